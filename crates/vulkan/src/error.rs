//! Errors of the device.

use ash::vk;
use dmalane_dma::error_chain;
use dmalane_queue::StopReason;
use thiserror::Error;

/// A call of Vulkan that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{call} failed: {result:?}")]
pub struct CallError {
    /// The name of the call ("vkAllocateMemory").
    pub call: &'static str,
    /// The driver's answer.
    pub result: vk::Result,
}

impl CallError {
    /// True when the device is lost: nothing can be done with it any more.
    pub fn is_lost(&self) -> bool {
        self.result == vk::Result::ERROR_DEVICE_LOST
    }
}

/// Why a GPU was not opened or found, or did not do something.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The Vulkan loader is not there.
    #[error("cannot load libvulkan.so.1: {0} (Debian and Ubuntu: apt install libvulkan1 mesa-vulkan-drivers)")]
    NoLoader(String),
    /// The loader found no driver.
    #[error(
        "Vulkan found no driver (Mesa: apt install mesa-vulkan-drivers, also for its software GPU lavapipe; NVIDIA: \
         the driver has one, in containers with NVIDIA_DRIVER_CAPABILITIES=all)"
    )]
    NoDriver,
    /// No GPU has this number, name or UUID.
    #[error("no GPU is called {wanted:?}; there is {}", if there.is_empty() { "none" } else { there })]
    NoSuchGpu {
        /// The number, name or UUID.
        wanted: String,
        /// The names of those that there are, with commas between them.
        there: String,
    },
    /// A name that several GPUs have.
    #[error("several GPUs are called {wanted:?}: {which}; use the number or the UUID")]
    Ambiguous {
        /// The name.
        wanted: String,
        /// Their names, with commas between them.
        which: String,
    },
    /// The GPU or its driver does not support something that is needed.
    #[error("{name} cannot be used: {missing}")]
    Unsuitable {
        /// The GPU's name.
        name: String,
        /// The missing part, and how to get it.
        missing: String,
    },
    /// Host memory that cannot be imported as it lies.
    #[error("this GPU imports host memory at multiples of {align} bytes, and {address:#x} is not within such a range")]
    Misaligned {
        /// The alignment.
        align: u64,
        /// The first address.
        address: usize,
    },
    /// Host memory that is not from the heap of the device, which cannot import any other.
    #[error("this GPU's driver cannot import host memory; only buffers of the device's own heap can be registered")]
    ForeignMemory,
    /// The driver imports no dma-bufs.
    #[error("this GPU's driver cannot import dma-bufs (VK_EXT_external_memory_dma_buf)")]
    NoDmaBufs,
    /// Memory that cannot be exported.
    #[error("this memory cannot be exported: the driver exports no dma-bufs, or it was not allocated for that")]
    NotExportable,
    /// Host memory that cannot be imported, neither by its address nor as a dma-buf.
    #[error("{}; as a dma-buf: {}", error_chain(by_address), error_chain(as_dma_buf))]
    Import {
        /// Why not by its address.
        by_address: Box<Error>,
        /// Why not as a dma-buf.
        as_dma_buf: Box<Error>,
    },
    /// Host memory of which there is no dma-buf.
    #[error("there is no dma-buf of it")]
    Descriptor(#[source] std::io::Error),
    /// The range of card addresses was allocated before, or is none.
    #[error("the range {0} of device memory cannot be allocated")]
    Range(dmalane_addr::Span<dmalane_addr::CardAddr>),
    /// Memory that was lent in other pieces than a GPU lends.
    #[error("memory of a GPU is lent in pieces of one length, of which the last may be shorter")]
    Pieces,
    /// Device memory that is not allocated.
    #[error("no device memory is allocated at {0}")]
    NotAllocated(dmalane_addr::CardAddr),
    /// No memory type of the GPU is fit for a use.
    #[error("the GPU has no memory type for {0}")]
    NoMemoryType(&'static str),
    /// More addresses than the driver has for sparse buffers.
    #[error(
        "{free} of the driver's {most} bytes of addresses for sparse buffers (sparseAddressSpaceSize) are left, too \
         few for {len}: open the GPU as vulkan:NAME,flat, which takes none"
    )]
    NoAddresses {
        /// Bytes of the range.
        len: u64,
        /// Bytes that are left.
        free: u64,
        /// Bytes that the driver has.
        most: u64,
    },
    /// More than the driver can make or hold.
    #[error("{0}")]
    Limit(String),
    /// A device without queues.
    #[error("the number of channels is 0, and at least 1 is needed")]
    NoQueues,
    /// A bind or unbind that is not whole pages.
    #[error("{span} cannot be changed: addresses, memory and lengths must be multiples of {page}")]
    NotPages {
        /// The addresses.
        span: dmalane_addr::Span<dmalane_addr::DeviceVa>,
        /// The size of a page.
        page: dmalane_addr::PageSize,
    },
    /// The driver has no memory left.
    #[error("no {len} bytes of memory are left; {}", match free {
        Some(free) => format!("{free} bytes of the GPU's memory are free"),
        None => "its driver does not say how much is free (VK_EXT_memory_budget)".to_owned(),
    })]
    NoMemory {
        /// Bytes asked for.
        len: u64,
        /// Bytes that this process may still have of that heap, where the driver says so.
        free: Option<u64>,
        /// The call.
        source: CallError,
    },
    /// The GPU was reset or removed while it was used; this call reported it.
    #[error("the GPU is lost: see the kernel log")]
    Lost(#[source] CallError),
    /// A call failed.
    #[error(transparent)]
    Call(CallError),
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        if error.is_lost() { Self::Lost(error) } else { Self::Call(error) }
    }
}

/// Why a queue stops after a call that failed.
impl From<CallError> for StopReason {
    fn from(error: CallError) -> Self {
        let cause = Error::from(error).into();
        if error.is_lost() { Self::Lost(cause) } else { Self::Driver(cause) }
    }
}
