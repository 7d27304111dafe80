//! Heaps allocate buffers.

mod dma_heap;
mod driver;
mod fallback;
mod needs;
mod pick;
mod pool;
mod port;
mod reserved;

pub use dma_heap::{DmaHeap, export_dma_buf, export_dma_buf_range};
pub use driver::DriverHeap;
pub use fallback::{AnonHeap, MemfdHeap, PageHeap};
pub use needs::{HeapCapabilities, Needs};
pub use pick::{Picked, pick};
pub use pool::{Pool, PoolStats};
pub use port::Heap;
pub use reserved::{Absent, Reserved};

#[cfg(test)]
mod tests;
