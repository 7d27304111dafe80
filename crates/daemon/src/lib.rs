//! A card shared by processes: the daemon that serves it, and the client that is a bus.
//!
//! A [`Server`] gives each [`Client`] a function of its card: registers, queues, an MMU, card memory and an IOMMU domain of its own. A client is
//! an [`dmalane_dma::Mmio`], so the driver of the card ([`dmalane_card::Card`]) and everything above it runs over it
//! as over a card in the same process. Bytes never pass through the socket: rings and buffers are memfds that both
//! processes map, and polling needs no system call. How that is done: `docs/how-to/share-a-card.md`; the messages: [`wire`] and
//! `docs/formats/daemon.md`.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use dmalane_addr::Access;
//! use dmalane_card::Card;
//! use dmalane_daemon::{Client, Config, Listener, Options, Server};
//! use dmalane_queue::{DeviceAddr, Direction, Operation, Queue, Registered};
//! use dmalane_dma::MemfdHeap;
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("socket");
//! // The daemon: a process of its own, otherwise.
//! let (stop, stopped) = std::os::unix::net::UnixStream::pair()?;
//! let listener = Listener::bind(&path, 0o600)?;
//! let server = Server::new(Config::default(), |event| eprintln!("{event}"))?;
//! let daemon = std::thread::spawn(move || server.run(listener, std::os::fd::AsFd::as_fd(&stopped)));
//!
//! let client = Client::connect(Options::new(&path))?;
//! let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new())?;
//! let mut queue = card.queue(0)?;
//! let buf = client.buffer(4096)?;
//! buf.view().write(b"hello");
//! let via = Registered::new(&client, &buf, Access::RW)?;
//! let at = DeviceAddr::Card(card.layout().hbm.first());
//! let _ticket = queue.submit(Operation::copy(Direction::FromHost, (buf.into_part(), via), at)).unwrap();
//! queue.flush();
//! let mut ended = Vec::new();
//! while queue.in_flight() > 0 {
//!     queue.wait(&mut ended, Duration::from_secs(1));
//! }
//! assert_eq!(ended[0].result, Ok(()));
//!
//! drop((queue, card, ended, client));
//! drop(stop);
//! assert_eq!(daemon.join().unwrap()?.released, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

/// Where the daemon of a machine listens.
pub const SOCKET: &str = "/run/dmalane/dmalaned.sock";

mod client;
mod config;
mod connection;
mod deferred_close;
mod function;
pub mod fuzzing;
mod page;
mod server;
mod socket;
pub mod wire;
mod worker;

pub use client::{Client, ClientReport, Error, Options, Report, report};
pub use config::{BadConfig, Config, Limits};
pub use connection::Released;
pub use server::{Event, Listener, ServeError, Server, Totals};
