//! Files that are read and written at device addresses, as a device with queues.
//!
//! The character devices of DMA drivers (QDMA, XDMA) are such files, and so are block devices, files of `/dev/shm` and
//! memfds. A [`FileDevice`] opens one, or one for each direction; its [`queue`](FileDevice::queue)s copy in both
//! directions.
//!
//! Some drivers do asynchronous calls wrong without an error: stock XDMA drivers write to the wrong address. So the
//! queues use `pread` and `pwrite` on threads only.

mod error;
mod file_device;
mod opened;
mod options;
mod paths;
mod protected;
mod queue;

pub use error::FileDeviceError;
pub use file_device::FileDevice;
pub use options::FileDeviceOptions;
pub use paths::FileDevicePaths;
pub use protected::HoldsData;
pub use queue::FileDeviceQueue;
