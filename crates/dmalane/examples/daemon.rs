//! The same code over a card in this process and over one in a daemon: `cargo run --example daemon [SOCKET]`.
//!
//! Without a socket it starts a daemon of its own, for as long as it runs.

use std::error::Error;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dmalane::addr::Access;
use dmalane::card::Card;
use dmalane::daemon::{Client, ClientOptions, Config, Listener, Server};
use dmalane::dma::{Heap, Mmio};
use dmalane::queue::{DeviceAddr, Direction, Operation, Queue, QueueAddr, Registered};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};

/// Sends a message to the card, doubles it there, and reads it back. Knows no daemon.
fn there_and_back<B: Mmio>(bus: Arc<B>) -> Result<String, Box<dyn Error>> {
    let heap = bus.heap(None);
    let card = Card::open(bus.clone(), &*heap)?;
    let mut queue = card.queue(0)?;
    let mut buf = heap.allocate(4096)?;
    buf[..6].copy_from_slice(b"hello ");
    let buf = buf.share();
    let via = Registered::new(&*bus, &buf, Access::RW)?;
    let at = |offset| DeviceAddr::Card(card.layout().hbm.first()).advance(offset).ok_or("beyond the card");
    let mut ended = Vec::new();
    let up = Operation::copy(Direction::FromHost, (buf.into_slice(), via.clone()), at(0)?);
    for operation in [up, Operation::within(at(0)?, at(6)?, 6)] {
        let _ticket = queue.submit(operation).map_err(|e| e.reason)?;
    }
    while ended.len() < 2 {
        queue.wait(&mut ended, Duration::from_secs(5));
    }
    let part = ended.swap_remove(0).operation.into_slice().unwrap();
    let _ticket = queue.submit(Operation::copy(Direction::ToHost, (part, via), at(0)?)).map_err(|e| e.reason)?;
    ended.clear();
    while ended.is_empty() {
        queue.wait(&mut ended, Duration::from_secs(5));
    }
    let end = ended.remove(0);
    end.result?;
    let mut bytes = [0; 11];
    end.operation.into_slice().unwrap().read(0, &mut bytes).ok_or("a short part")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn run() -> Result<(), Box<dyn Error>> {
    let host: SoftHost = SoftHost::new(HostConfig::default())?;
    let bus: SoftBus = SoftBus::new(host, CardConfig::default())?;
    println!("in this process:    {}", there_and_back(Arc::new(bus))?);

    if let Some(socket) = std::env::args_os().nth(1) {
        println!(
            "through the daemon: {}",
            there_and_back(Arc::new(Client::connect(ClientOptions::new(PathBuf::from(socket)))?))?
        );
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("socket");
    let listener = Listener::bind(&path, 0o600, false)?;
    let server = Server::new(Config::default(), |event| println!("  daemon: {}", event.text))?;
    let (stop, stopped) = std::os::unix::net::UnixStream::pair()?;
    let daemon = std::thread::spawn(move || server.run(listener, stopped.as_fd()));
    let client = Client::connect(ClientOptions::new(&path))?;
    println!("through the daemon: {}", there_and_back(Arc::new(client))?);
    drop(stop);
    daemon.join().map_err(|_| "the daemon panicked")??;
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{}", dmalane::error_chain(&*error));
        std::process::exit(1);
    }
}
