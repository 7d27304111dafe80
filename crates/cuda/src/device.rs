//! GPUs: which there are, and one as a device.

use std::error::Error as StdError;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dmalane_addr::{CardAddr, PageSize, Span};
use dmalane_device::{
    AddressSpace, AddressSpaceKind, Device, DeviceInfo, DeviceMemory, DlpackDevice, DriverCopies, FlatSpace, Lending,
    NoIommu, Region,
};
use dmalane_dma::{AnonHeap, DriverHeap, Heap, PageKind, Registrar};
use dmalane_queue::DeviceQueue;

use crate::error::Error;
use crate::gpu::Gpu;
use crate::lender::Lender;
use crate::queue::CudaQueue;
use crate::space::{Binds, MapSpace};
use crate::sys::{Attribute, BackToBack, Borrowed, Context, Driver, PinnedMemory, Pins, Registered, Window};
use crate::vram::Vram;

/// The GPUs of this machine, by the driver's library as [`CudaDevice::open`] finds it. No context is created.
///
/// # Errors
/// [`Error::Library`] where there is no driver, [`Error::Call`] where it does not work.
pub fn gpus(library: Option<&str>) -> Result<Vec<Gpu>, Error> {
    let driver = Driver::open(library)?;
    (0..driver.count()?).map(|number| driver.gpu(number).map(|(gpu, _)| gpu)).collect()
}

/// A GPU as a device.
pub struct CudaDevice {
    // In the order in which they must go: queues wait, memory is unmapped, the context is released.
    queue: Option<CudaQueue>,
    space: Box<dyn AddressSpace>,
    registrar: Pins,
    window: Arc<Window>,
    context: Arc<Context>,
    gpu: Gpu,
    region: [Region; 1],
    lendable: Arc<AtomicBool>,
    notes: Vec<String>,
}

impl CudaDevice {
    /// Opens a GPU by its number in the driver's order or its UUID, as `nvidia-smi -L` prints it, or the first digits
    /// of that. The driver is `library`; `None` for that of [`LIBRARY_VARIABLE`](crate::LIBRARY_VARIABLE), else
    /// [`LIBRARY`](crate::LIBRARY).
    ///
    /// # Errors
    /// [`Error`]: no driver, no such GPU, one without virtual memory, a call that failed.
    pub fn open(gpu: &str, library: Option<&str>, binds: Binds) -> Result<Self, Error> {
        let driver = Driver::open(library)?;
        let (gpu, device) = find(driver, gpu)?;
        if !gpu.virtual_memory {
            return Err(Error::Unsupported("virtual memory (cuMemMap), as of some vGPUs; vulkan:N does without"));
        }
        let context = Context::new(driver, device)?;
        // Addresses for all memory, also what other programs have now: it may become free while the device is open.
        let (_, total) = context.memory()?;
        let granule = context.granularity()?;
        let window = Window::reserve(&context, total / granule.max(1) * granule)?;
        let granule = PageSize::new(granule).ok_or(Error::Unsupported("pages of a power of two bytes"))?;
        let span = Span::new(CardAddr::new(window.at()), window.len());
        let span = span.ok_or(Error::NoMemory)?;
        let space: Box<dyn AddressSpace> = match binds {
            Binds::Flat => Box::new(FlatSpace::new()),
            Binds::CuMemMap => Box::new(MapSpace::new(context.clone(), granule)),
        };
        let region = Region { granule, ..Region::new("vram", span) };
        let refused = match gpu.host_register {
            true => registration_refused(&context)?,
            false => Some("the GPU does not support cuMemHostRegister".to_owned()),
        };
        let registrar = registrar(&context, refused.is_none());
        let queue = Some(CudaQueue::new(&context, registrar.clone(), span.len())?);
        let notes = notes(&gpu, binds, granule, driver.has_batches(), refused.as_deref());
        let window = Arc::new(window);
        let lendable = Arc::default();
        Ok(Self { queue, space, registrar, window, context, gpu, region: [region], lendable, notes })
    }

    /// Name, memory and capabilities of the GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// As many addresses as memory, which a device that binds by [`Binds::CuMemMap`] has allocated; both are whole
    /// pages of its own. For benches.
    ///
    /// # Errors
    /// [`Error::Call`].
    #[cfg(feature = "by-hand")]
    pub fn plain_binds(&self, memory: Span<CardAddr>, page: PageSize) -> Result<crate::PlainBinds, Error> {
        crate::PlainBinds::new(&self.context, memory, page)
    }

    /// Another queue to the same memory, on streams of its own. The device has one because a second moves nothing
    /// faster; threads that do not want to share it can have their own.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn open_queue(&self) -> Result<Box<DeviceQueue>, Error> {
        Ok(Box::new(CudaQueue::new(&self.context, self.registrar.clone(), self.window.len())?))
    }

    /// Gives allocated memory, whole 4 KiB pages, to other devices: a dma-buf, which holds the memory until it is
    /// closed. Import it into a network card; iommufd maps only dma-bufs of the BARs of VFIO devices (Linux 7.2).
    ///
    /// # Errors
    /// [`Error::Unsupported`] where [`Gpu::dma_buf`] is false; [`Error::NotAllocated`]; [`Error::Call`].
    pub fn export_dma_buf(&self, memory: Span<CardAddr>) -> Result<OwnedFd, Error> {
        match self.gpu.dma_buf {
            true => self.context.dma_buf(memory.first().bits(), memory.len()),
            false => Err(Error::Unsupported("dma-buf export of its memory")),
        }
    }
}

/// The GPU of a number or UUID.
fn find(driver: &Driver, wanted: &str) -> Result<(Gpu, i32), Error> {
    let mut have = Vec::new();
    for number in 0..driver.count()? {
        let found = driver.gpu(number)?;
        let is = match wanted.parse::<u32>() {
            Ok(wanted) => wanted == number,
            // At least four digits behind "GPU-".
            Err(_) => wanted.len() >= 8 && found.0.uuid.to_lowercase().starts_with(&wanted.to_lowercase()),
        };
        if is {
            return Ok(found);
        }
        have.push(format!("{number} ({})", found.0.uuid));
    }
    Err(Error::NoGpu { wanted: wanted.to_owned(), have: have.join(", ") })
}

/// Why the driver does not register host memory here, although the GPU could: containers and virtual machines may lack
/// what it needs.
fn registration_refused(context: &Arc<Context>) -> Result<Option<String>, Error> {
    const NOT_PERMITTED: u32 = 800;
    const NOT_SUPPORTED: u32 = 801;
    let Ok(page) = AnonHeap::starting_at(PageKind::Base).allocate(1) else { return Ok(None) };
    let page = page.share();
    match Registered::new(context, &page.reference(), 0..page.len()) {
        Ok(_) => Ok(None),
        Err(e) if [NOT_PERMITTED, NOT_SUPPORTED].contains(&e.code()) => Ok(Some(e.to_string())),
        Err(e) => Err(e),
    }
}

/// Pins host memory where the GPU can. Else there is a heap of memory that the driver has pinned; other memory it
/// copies through memory of its own.
fn registrar(context: &Arc<Context>, pins: bool) -> Pins {
    let context = context.clone();
    if pins {
        return NoIommu::calling(None, move |buffer, range| Ok(Some(Registered::new(&context, buffer, range)?)));
    }
    let allocate = move |len| Ok(PinnedMemory::allocate(&context, len)?);
    NoIommu::calling(Some(Arc::new(DriverHeap::new("cuMemHostAlloc", allocate))), |buffer, _| {
        match buffer.is_read_only() {
            // Copies from there would take longer than those through the heap's memory.
            true => Err(Error::Unsupported("cuMemHostRegister").into()),
            false => Ok(None),
        }
    })
}

fn notes(gpu: &Gpu, binds: Binds, granule: PageSize, batches: bool, refused: Option<&str>) -> Vec<String> {
    let (major, minor) = gpu.driver;
    let host = match refused {
        None => "host memory is pinned by cuMemHostRegister".to_owned(),
        Some(why) => format!("host memory is pinned by cuMemHostAlloc; the driver copies other memory: {why}"),
    };
    let memory = match binds {
        Binds::Flat => format!("memory: cuMemCreate and cuMemMap, pages of {granule}; flat: addresses are pointers"),
        Binds::CuMemMap => format!("memory: allocated and bound by cuMemMap in pages of {granule}"),
    };
    let copies = match batches {
        true => "copies of up to 1 MiB in batches (cuMemcpyBatchAsync)",
        false => "copies one by one: the driver has no cuMemcpyBatchAsync (CUDA 12.8 has)",
    };
    vec![
        format!("{}, PCI {}, CUDA {major}.{minor}, {} copy engines", gpu.uuid, gpu.pci, gpu.copy_engines),
        host,
        memory,
        format!("a stream for each direction; {copies}"),
    ]
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        let (name, notes) = (self.gpu.name.clone(), self.notes.clone());
        // As the driver's own allocations, which kernels and textures are made for.
        DeviceInfo { name, notes, tensor_align: 256, ..DeviceInfo::default() }
    }

    fn regions(&self) -> &[Region] {
        &self.region
    }

    fn memory(&self) -> DeviceMemory {
        let (context, window) = (self.context.clone(), self.window.clone());
        // What is bound in pages has to be allocated in pages.
        let page = (self.space.kind() != AddressSpaceKind::Flat).then(|| self.space.page().bytes());
        let lendable = self.lendable.clone();
        let vram = Vram { context, window, page, lendable, stuck: Vec::new() };
        DeviceMemory::new(&self.region).driven_by(vram)
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(self.registrar.clone())
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        self.queue.take().map(|queue| Box::new(queue) as Box<DeviceQueue>).into_iter().collect()
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        &mut *self.space
    }

    fn dlpack(&self) -> Option<DlpackDevice> {
        DlpackDevice::cuda(self.gpu.number)
    }

    fn borrow(&self, memory: Span<CardAddr>) -> Result<Box<dyn Send>, Box<dyn StdError + Send + Sync>> {
        Ok(Box::new(Borrowed::new(&self.context, memory.first().bits(), memory.len())?))
    }

    fn lending(&self) -> Result<Box<dyn Lending>, Box<dyn StdError + Send + Sync>> {
        if self.space.kind() != AddressSpaceKind::Flat {
            return Err("memory that is bound in pages (vmm) cannot be lent to other processes".into());
        }
        if self.context.attribute(Attribute::PosixHandles) == 0 {
            return Err(Error::Unsupported("descriptors of its memory for other processes").into());
        }
        let (context, lendable) = (self.context.clone(), self.lendable.clone());
        Ok(Box::new(Lender { context, lendable, uuid: self.gpu.uuid.clone() }))
    }

    fn driver_copies(&self) -> Result<Option<Box<dyn DriverCopies>>, Box<dyn StdError + Send + Sync>> {
        Ok(Some(Box::new(BackToBack::new(&self.context, self.registrar.clone())?)))
    }
}
