//! The description of a GPU.

/// A GPU, as far as the driver describes it without using it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gpu {
    /// Its number, in the driver's order.
    pub number: u32,
    /// Its name ("NVIDIA H100 80GB HBM3").
    pub name: String,
    /// Its UUID ("GPU-2918fc3f-..."), or that of the part of one that it is ("MIG-...").
    pub uuid: String,
    /// Its PCI address ("0000:00:06.0").
    pub pci: String,
    /// Its memory, in bytes.
    pub memory: u64,
    /// The newest CUDA that the driver knows, major and minor.
    pub driver: (u32, u32),
    /// Memory can be mapped anywhere (`cuMemMap`), which is needed to open it.
    pub virtual_memory: bool,
    /// Its memory can be given to other devices as a dma-buf.
    pub dma_buf: bool,
    /// Host memory can be pinned for it (`cuMemHostRegister`).
    pub host_register: bool,
    /// Copies that run at the same time.
    pub copy_engines: u32,
}
