//! How a GPU is opened.

/// How a GPU is opened.
#[derive(Clone, Debug)]
pub struct VulkanOptions {
    /// Bind through sparse buffers where the driver can, so that buffers need not be contiguous. Without it, virtual
    /// addresses are card addresses.
    pub sparse: bool,
    /// Import host memory where the driver can. Without it, only buffers of the device's own heap can be registered.
    pub host_import: bool,
    /// Allocate device memory so that [`export_dma_buf`](crate::VulkanDevice::export_dma_buf) can export it, where the
    /// driver can. With `VK_EXT_queue_family_foreign`, submissions of several queues to one allocation then follow each
    /// other.
    pub exportable: bool,
    /// Longest copy in bytes that is the processor's while the GPU is idle, where it shares its memory with the
    /// host; 0 for none.
    pub direct: u64,
    /// Queues of the device, which share the queues of the driver; `None` for one on each.
    pub channels: Option<usize>,
    /// Bytes of one buffer and of one allocation at most, below the driver's own limits; `None` for these.
    pub largest: Option<u64>,
    /// Have the validation layers, where they are installed, check every call, and collect their messages here.
    #[cfg(test)]
    pub(crate) validation: Option<crate::tests::layers::Messages>,
}

/// Longest copy in bytes that costs less than a submission. Of longer ones the GPU relieves the processor.
const DIRECT: u64 = 64 << 10;

impl Default for VulkanOptions {
    fn default() -> Self {
        Self {
            sparse: true,
            host_import: true,
            exportable: false,
            direct: DIRECT,
            channels: None,
            largest: None,
            #[cfg(test)]
            validation: None,
        }
    }
}
