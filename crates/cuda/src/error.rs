//! Errors of the CUDA driver, with what helps against them.

use dmalane_queue::StopReason;
use thiserror::Error;

/// Why a GPU cannot be used, or a call of its driver failed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is not there or cannot be loaded.
    #[error("cannot load the CUDA driver {library}: {why}")]
    Library {
        /// Its name or path.
        library: String,
        /// The dynamic linker's reason.
        why: String,
    },
    /// The library does not have a function.
    #[error("the CUDA driver {library} is too old: it has no {symbol}")]
    Symbol {
        /// Name or path of the library.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {text} ({name}, {code})")]
    Call {
        /// The function.
        call: &'static str,
        /// The `CUresult`.
        code: u32,
        /// Its name.
        name: String,
        /// The driver's words for it.
        text: String,
    },
    /// No GPU has this number or UUID.
    #[error("there is no GPU {wanted}; the driver has {}", if have.is_empty() { "none" } else { have })]
    NoGpu {
        /// The number or UUID that was asked for.
        wanted: String,
        /// The GPUs that are there, with commas between them.
        have: String,
    },
    /// The GPU does not support what was asked for.
    #[error("the GPU does not support {0}")]
    Unsupported(&'static str),
    /// Host memory that overlaps a registration without lying in it.
    #[error("bytes {first:#x} to {last:#x} of host memory are partly registered with the CUDA driver already")]
    Overlap {
        /// The first address.
        first: usize,
        /// The last address.
        last: usize,
    },
    /// A call after which no other on the GPU's context succeeds.
    #[error("the GPU's context is lost: open the GPU again, if need be in a new process")]
    Lost(#[source] Box<Error>),
    /// Device memory, or a bind, where something is already.
    #[error("something is mapped at {0:#x} already")]
    Mapped(u64),
    /// Device memory that is not allocated, or not as whole pages.
    #[error("no memory, or no whole page of it, was allocated at {0:#x}")]
    NotAllocated(u64),
    /// Memory that another process has lent, of another GPU.
    #[error("the memory is that of GPU {0}")]
    OtherGpu(i32),
    /// The GPU has no memory.
    #[error("the GPU has no memory")]
    NoMemory,
}

/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: u32 = 100;
/// `CUDA_ERROR_NOT_READY`.
pub(crate) const NOT_READY: u32 = 600;

impl Error {
    /// The fix, where one is known.
    pub fn fix(&self) -> Option<&'static str> {
        match self {
            Self::Library { .. } => Some(
                "install NVIDIA's driver, which has libcuda.so.1 (package libcuda1 of Debian); start containers with \
                 GPUs (--gpus all); DMALANE_CUDA_LIB names the library if it lies elsewhere",
            ),
            Self::Symbol { .. } => Some("install a driver for CUDA 11.2 or newer"),
            Self::Call { code: NO_DEVICE, .. } => {
                Some("nvidia-smi shows whether the driver sees a GPU; CUDA_VISIBLE_DEVICES may hide it")
            }
            Self::Call { code: 2, .. } => Some("nvidia-smi shows which processes use the GPU's memory"),
            Self::Call { code: 803 | 804, .. } => {
                Some("libcuda and the kernel's module differ in version: reboot, or reload the module nvidia")
            }
            Self::Call { code: 999, call: "cuInit", .. } => {
                Some("load the kernel modules (modprobe nvidia nvidia_uvm) and see dmesg")
            }
            Self::NoGpu { .. } => Some("`dmalane devices` lists the GPUs"),
            _ => None,
        }
    }

    /// The error of a call that failed: [`Error::Lost`] where `cuda.h` says that the context cannot be used any more.
    pub(crate) fn of_call(call: &'static str, code: u32, name: String, text: String) -> Self {
        let error = Self::Call { call, code, name, text };
        // The driver shuts down; the context is invalid or destroyed; errors of memory, NVLink, kernels and the
        // hardware, a client that MPS has ended, and an external device that failed, after which each call answers the
        // same.
        let lost = matches!(code, 4 | 201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911);
        // An unknown error; of `cuInit`, there is no context yet.
        if lost || (code == 999 && call != "cuInit") { Self::Lost(Box::new(error)) } else { error }
    }

    /// True when nothing may be asked of a stream any more: after each error that is not known to be of one call only.
    pub(crate) fn is_fatal(&self) -> bool {
        match self {
            // Invalid value, out of memory, not ready, (not) registered, not permitted, not supported.
            Self::Call { code, .. } => !matches!(code, 1 | 2 | 600 | 712 | 713 | 800 | 801),
            Self::Lost(_) => true,
            _ => false,
        }
    }

    /// The driver's number for it.
    pub(crate) fn code(&self) -> u32 {
        match self {
            Self::Call { code, .. } => *code,
            Self::Lost(call) => call.code(),
            _ => u32::MAX,
        }
    }
}

impl From<Error> for dmalane_dma::Error {
    fn from(error: Error) -> Self {
        Self::Backend(Box::new(error))
    }
}

/// Why a queue stops after a call that failed.
impl From<Error> for StopReason {
    fn from(error: Error) -> Self {
        if matches!(error, Error::Lost(_)) { Self::Lost(error.into()) } else { Self::Driver(error.into()) }
    }
}
