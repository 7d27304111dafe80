//! Files as a [`Channel`](dmalane_queue::Channel): read with several operations in flight, past the page cache where
//! that is possible.
//!
//! A [`FileChannel`] reads through io_uring. What is aligned as the file system demands goes by direct I/O, the unaligned
//! head and tail of an operation by ordinary reads. Where direct I/O or io_uring is refused (tmpfs; a container's seccomp
//! profile) it falls back to ordinary reads or to `pread`, and [`FileChannel::how`] says so and why.
//!
//! A [`StreamChannel`] reads what has no offsets, pipes and sockets, in order. [`residency`] says how much of a file is in the page cache.
//!
//! A [`FileDevice`] is a file that stands for a device: its [`FileDeviceQueue`]s write and read at device addresses.
//!
//! ```
//! use dmalane_addr::FileOffset;
//! use dmalane_queue::{Direction, Transfer, run};
//! use dmalane_dma::{AnonHeap, Heap};
//! use dmalane_file::{FileChannel, Options};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("greeting");
//! std::fs::write(&path, b"hello, device")?;
//! let mut file = FileChannel::open(&path, Options::default())?;
//! let (part, _) = AnonHeap::new().allocate(4096)?.share().into_part().split_at(13).unwrap();
//! let read = Transfer { part, direction: Direction::ToHost, far: FileOffset::new(0) };
//! let read = run(&mut file, read, std::time::Duration::from_secs(10))?;
//! let mut bytes = [0; 13];
//! read.part.read(0, &mut bytes).unwrap();
//! assert_eq!(&bytes, b"hello, device");
//! println!("read by {}", file.how());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cache;
mod channel;
mod cut;
mod device;
mod error;
mod options;
mod ring;
mod short;
mod source;
mod stream;

pub use cache::{Residency, residency};
pub use channel::{FileChannel, Moved};
pub use device::{
    BadFileDevicePaths, FileDevice, FileDeviceBus, FileDeviceError, FileDeviceHow, FileDeviceOptions, FileDevicePaths,
    FileDeviceQueue, IoBackend,
};
pub use error::Error;
pub use options::{How, Io, Mode, Options};
pub use ring::quarantined_bytes;
pub use short::read_now;
pub use stream::StreamChannel;
