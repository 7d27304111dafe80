//! How a file device is to be used.

/// How a file device is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileDeviceOptions {
    /// Bypass the page cache. Then addresses, lengths and memory are multiples of
    /// [`FileDevice::alignment`](crate::FileDevice::alignment).
    pub direct: bool,
    /// Operations, and requests to the kernel, in flight on a queue. Clamped to 1..=4096.
    pub depth: usize,
    /// Threads of a queue. Clamped to 1..=64.
    pub threads: usize,
    /// Bytes of a request at most; a longer operation is cut. Clamped to 64 KiB..=1 GiB and rounded up to a power of
    /// two.
    pub block: usize,
    /// Memory may be allocated where a regular file or a block device holds data, which is then overwritten. Without it
    /// such an allocation fails with [`HoldsData`](crate::HoldsData); operations on addresses that were not allocated
    /// are not checked. A character device is never asked.
    pub overwrite: bool,
}

impl Default for FileDeviceOptions {
    /// Through the page cache, 64 operations, four threads, requests of 4 MiB; data are not overwritten.
    fn default() -> Self {
        Self { direct: false, depth: 64, threads: 4, block: 4 << 20, overwrite: false }
    }
}
