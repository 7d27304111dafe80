//! A software card shared between processes: the daemon that serves it, with its client.
//!
//! A [`Server`] gives each [`Client`] a function of its card: registers, queues, an MMU, card memory and an IOMMU
//! domain of its own. A client implements [`dmalane_dma::Mmio`], so the driver of the card ([`dmalane_card::Card`])
//! works with it as with a card in the same process. No payload passes through the socket: rings and buffers are
//! memfds that both processes map, and polling needs no system call. Usage: `docs/how-to/share-a-card.md`. Messages:
//! [`wire`] and `docs/formats/daemon.md`.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use dmalane_addr::Access;
//! use dmalane_card::Card;
//! use dmalane_daemon::{Client, Config, Listener, ClientOptions, Server};
//! use dmalane_queue::{DeviceAddr, Direction, Operation, Queue, Registered};
//! use dmalane_dma::MemfdHeap;
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("socket");
//! // The daemon, usually a separate process.
//! let (stop, stopped) = std::os::unix::net::UnixStream::pair()?;
//! let listener = Listener::bind(&path, 0o600, false)?;
//! let server = Server::new(Config::default(), |event| eprintln!("{}", event.text))?;
//! let daemon = std::thread::spawn(move || server.run(listener, std::os::fd::AsFd::as_fd(&stopped)));
//!
//! let client = Client::connect(ClientOptions::new(&path))?;
//! let card = Card::open(Arc::new(client.clone()), &MemfdHeap::new())?;
//! let mut queue = card.queue(0)?;
//! let buf = client.buffer(4096)?;
//! buf.as_volatile_slice().write(b"hello");
//! let via = Registered::new(&client, &buf, Access::RW)?;
//! let at = DeviceAddr::Card(card.layout().hbm.first());
//! let _ticket = queue.submit(Operation::copy(Direction::FromHost, (buf.into_slice(), via), at)).unwrap();
//! queue.flush();
//! let mut ended = Vec::new();
//! while queue.in_flight() > 0 {
//!     queue.wait(&mut ended, Duration::from_secs(1));
//! }
//! assert_eq!(ended[0].result, Ok(()));
//!
//! drop((queue, card, ended, client));
//! drop(stop);
//! daemon.join().unwrap()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod account;
mod client;
mod config;
mod connection;
mod error;
mod fork;
mod function;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod gate;
mod guard;
mod listener;
mod log;
mod page;
mod server;
mod serving;
mod socket;
mod state;
mod table;
mod turns;
pub mod wire;
mod worker;

pub use client::{Client, ClientError, ClientOptions, DaemonStatus, status};
pub use config::{BadConfig, ClientLimits, Config};
pub use error::ServerError;
pub use guard::can_watch_memory;
pub use listener::{Listener, SOCKET};
pub use log::ServerEvent;
pub use server::Server;
pub use socket::pass_rights;
pub use wire::ClientStatus;
