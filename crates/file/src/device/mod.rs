//! Files that are read and written at device addresses, as a device with queues.
//!
//! The character devices of DMA drivers (QDMA, XDMA) are such files, and so are block devices, files of `/dev/shm` and
//! memfds. A [`FileDevice`] opens one, or one for each direction; its [`queue`](FileDevice::queue)s copy in both
//! directions.
//!
//! Some drivers do asynchronous calls wrong without an error ([`probe`] names how). So a file device uses `pread` and
//! `pwrite` on threads unless io_uring was [asked for](FileDeviceOptions::probe_at): a character device is then probed,
//! regular files and disks are not written. [`FileDevice::how`] says which, and why.

mod backend;
mod error;
mod file_device;
mod opened;
mod options;
mod paths;
mod probe;
mod protected;
mod queue;
mod workers;

pub use error::FileDeviceError;
pub use file_device::FileDevice;
pub use options::FileDeviceOptions;
pub use paths::FileDevicePaths;
pub use protected::HoldsData;
pub use queue::FileDeviceQueue;
