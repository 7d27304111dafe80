//! GPUs of every vendor as devices, through Vulkan.
//!
//! [`VulkanDevice`] is the device. Host memory is registered by importing it where it lies. Queues write operations
//! down; the doorbell makes one submission of them, with regions grouped by the buffers that they are in and a barrier
//! only between copies that depend on each other. Memory is bound by `vkQueueBindSparse` where the driver has that.
//!
//! The loader is opened at run time: without one, or without a driver, [`VulkanDevice::open`] says how to get it.

#[cfg(feature = "by-hand")]
pub mod by_hand;
mod channel;
mod device;
mod driver_copies;
mod error;
mod fault;
mod gpu;
mod hazards;
mod library;
mod memory;
mod options;
mod queue;
mod registrar;
mod sparse;
#[cfg(test)]
mod tests;

pub use device::{VulkanDevice, gpus};
pub use error::{CallError, Error};
pub use library::{GpuInfo, MemoryHeap};
pub use options::VulkanOptions;
