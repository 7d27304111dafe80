//! NVIDIA GPUs as devices, through the CUDA driver.
//!
//! [`gpus`] lists them, [`CudaDevice::open`] opens one. The driver's library is loaded when it is first needed:
//! nothing of CUDA is needed to build, and a machine without a driver gets an error that says what to install
//! ([`Error::fix`]).
//!
//! | part | what it is here |
//! |---|---|
//! | host memory | pinned by `cuMemHostRegister`, for all GPUs of the process; else the driver copies it |
//! | device memory | one region `vram`, of which other programs may have a part; addresses are those of CUDA |
//! | queue | one, on a stream for each direction; short copies go in batches (`cuMemcpyBatchAsync`) |
//! | lending | descriptors of memory (`cuMemExportToShareableHandle`), in a flat address space |
//! | address space | flat, or bound by `cuMemMap` ([`Binds::CuMemMap`]) |
//!
//! **An address of device memory is a `CUdeviceptr`.** A window of addresses as long as the memory is reserved when
//! the GPU is opened, and each allocation is mapped in it where [`DeviceMemory`](dmalane_device::DeviceMemory) says.
//! So a kernel can use loaded data, and a framework wrap them, without asking. The context is the primary one, which
//! the runtime API and frameworks use, too.
//!
//! **Flat is the default** because binding costs more than copying. The driver maps whole allocations only
//! (`CUDA_ERROR_NOT_SUPPORTED` for parts of one), so memory that is to be bound in pages must be allocated in pages.
//! An H100 with driver 580 takes 23 us to allocate 2 MiB and 33 us to map them; it copies them in 38. A flat GiB is
//! allocated and mapped in 0.2 ms.
//!
//! `cudarc` (0.19) is not used: it looks for libraries of fixed names, keeps one for the process, and panics where a
//! library or a symbol is missing; the tests need a library of their own, and people an error. About fifty functions
//! are declared in `sys.rs`; it and the files below it are the only ones with `unsafe`.

mod device;
mod error;
mod gpu;
mod lender;
mod plan;
mod queue;
mod space;
mod sys;
mod vram;

pub use device::{CudaDevice, gpus};
pub use error::Error;
pub use gpu::Gpu;
pub use space::Binds;
#[cfg(feature = "by-hand")]
pub use sys::PlainBinds;
pub use sys::{LIBRARY, LIBRARY_VARIABLE};
