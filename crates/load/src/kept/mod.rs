//! Models that stay in memory: a keeper (`dmalaned keep`) lends them to any process, which reads and copies nothing.
//!
//! A kept model is a few memfds: one that describes it in JSON ([`KeptModel`]), its [manifest](crate::Manifest), and
//! one for each of its files, with the file's bytes. All are sealed: nobody can write to them, shorten them or punch
//! holes. Who attaches gets them in one message, and maps them. As a path, `kept:NAME` stands for the files of such a
//! model wherever files of models are named ([`ModelSet::find`](crate::ModelSet::find)).
//!
//! The keeper opens each memfd anew for whoever attaches, and locks what it has opened (flock(2)). The kernel holds
//! such a lock until the last descriptor and the last mapping are gone. So who is attached is counted by the kernel,
//! also over the death of a client, and of the keeper.
//!
//! The files of a model may be in memory of a device instead ([`KeeperClient::attach_onto`]), each behind
//! a descriptor of the device's driver. That can be neither sealed nor locked: who attaches is trusted to read alone,
//! and is counted by the description, which it holds as long as the memory.

mod client;
mod describe;
mod error;
mod file;
mod keep;
mod on_device;
mod times;
pub mod wire;

pub use client::{Attached, KeeperClient, attach, name_in, socket_path};
pub use describe::{KeptEntry, KeptModel, KeptPlaces, Stamp, check_name, read_text, sealed_text};
pub use error::KeepError;
pub use file::KeptFile;
pub(crate) use file::RegisteredFiles;
pub use keep::{KeepOptions, attach_or_keep, attach_or_keep_on, check, keep};
pub use times::KeptTimes;
