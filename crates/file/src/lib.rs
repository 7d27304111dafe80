//! Files as a [`Queue`](dmalane_queue::Queue): read with several operations in flight, past the page cache where that
//! is possible.
//!
//! A [`FileQueue`] reads through io_uring. The part of an operation that is aligned as the file system demands goes by
//! direct I/O, the unaligned head and tail by ordinary reads. Where direct I/O or io_uring is refused (tmpfs; a
//! container's seccomp profile) it falls back to ordinary reads or to `pread` on threads. [`FileQueue::how`] says so
//! and why.
//!
//! [`residency`] says how much of a file is in the page cache.
//!
//! A [`FileDevice`] is a file that stands for a device: its [`FileDeviceQueue`]s write and read at device addresses.
//!
//! ```
//! use dmalane_addr::FileOffset;
//! use dmalane_queue::{Operation, run};
//! use dmalane_dma::{AnonHeap, Heap};
//! use dmalane_file::{FileQueue, FileOptions};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("greeting");
//! std::fs::write(&path, b"hello, device")?;
//! let mut file = FileQueue::open(&path, FileOptions::default())?;
//! let (slice, _) = AnonHeap::new().allocate(4096)?.share().into_slice().split_at(13).unwrap();
//! let read = run(&mut file, Operation::read(slice, FileOffset::new(0)), std::time::Duration::from_secs(10))?;
//! let mut bytes = [0; 13];
//! read.into_slice().unwrap().read(0, &mut bytes).unwrap();
//! assert_eq!(&bytes, b"hello, device");
//! println!("read by {}", file.how());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cache;
mod cut;
mod device;
mod error;
mod handle;
mod op;
mod options;
mod queue;
mod reads;
mod residency;
mod ring;
mod short;
mod source;
mod workers;

pub use cache::residency;
pub use device::{FileDevice, FileDeviceError, FileDeviceOptions, FileDevicePaths, FileDeviceQueue, HoldsData};
pub use error::{Error, Fallback};
pub use handle::{FileHandle, open_at_once};
pub use options::{FileOptions, How, Io, Mode};
pub use queue::{FileQueue, Moved};
pub use reads::SharedReads;
pub use residency::Residency;
pub use short::read_now;
