//! The keeper of models: it holds models that others have loaded, and lends them ([`dmalane_load::kept`]).
//!
//! A keeper reads no files and maps no memory. It passes on descriptors of sealed memfds, and of memory of devices, of
//! which it asks nothing, so that nothing that a client does with its own memory or files can hold it up. It has one
//! thread, and others that close what clients sent, and that hash models before other users get them.
//!
//! ```
//! use dmalane_keep::{KeeperConfig, Keeper, Listener};
//! use dmalane_load::kept::{self, KeepOptions};
//!
//! # let folder = tempfile::tempdir()?;
//! # let (model, socket) = (folder.path().join("model.safetensors"), folder.path().join("socket"));
//! # dmalane_load::write_sample(&mut std::fs::File::create(&model)?, 1 << 20, 1)?;
//! // The keeper, usually a process of its own (`dmalaned keep`).
//! let (stop, stopped) = std::os::unix::net::UnixStream::pair()?;
//! let listener = Listener::bind(&socket, 0o600, true)?;
//! let keeper = Keeper::new(KeeperConfig { memory: 1 << 30, ..KeeperConfig::default() }, |line| eprintln!("{line}"));
//! let keeper = std::thread::spawn(move || keeper.run(listener, std::os::fd::AsFd::as_fd(&stopped)));
//!
//! let options = KeepOptions { name: Some("llama".to_owned()), socket: Some(socket.clone()), ..Default::default() };
//! kept::keep(None, [&model], &options, |_| std::ops::ControlFlow::Continue(()))?;
//! let lent = kept::KeeperClient::connect(&socket)?.attach("llama")?;
//! assert_eq!(lent.model.files.len(), 1);
//! # drop(stop);
//! # keeper.join().unwrap()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod close;
mod config;
mod keeper;
mod lend;
mod shelf;
mod store;

pub use config::KeeperConfig;
pub use dmalane_daemon::Listener;
pub use keeper::Keeper;
pub use store::{Holder, Store, hold, inherited};
