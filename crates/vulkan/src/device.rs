//! A GPU as a device.

use std::error::Error as StdError;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dmalane_addr::{CardAddr, PageSize, Span};
use dmalane_device::{AddressSpace, Device, DeviceInfo, DeviceMemory, DriverCopies, FlatSpace, Lending, Region};
use dmalane_dma::{Registrar, error_chain};
use dmalane_queue::DeviceQueue;

use crate::driver_copies::BackToBack;
use crate::error::Error;
use crate::fault::Faults;
use crate::gpu::{Gpu, Live};
use crate::library::{Found, GpuInfo, Library};
use crate::memory::{Allocator, GpuMemory, Lender};
use crate::options::VulkanOptions;
use crate::queue::{GpuQueue, Parts};
use crate::registrar::importer;
use crate::sparse::{SparseMap, SparseSpace};

/// A GPU, driven through Vulkan.
///
/// Card addresses are made up: each heap of the GPU has a range of them, a region. Where the driver binds sparse
/// buffers, virtual addresses are those that programs on the GPU use. Elsewhere they are card addresses, and
/// [`VulkanDevice::address_of`] says what programs use.
pub struct VulkanDevice {
    parts: Parts,
    notes: Vec<String>,
    regions: Vec<Region>,
    queues: Vec<Box<DeviceQueue>>,
    space: Box<dyn AddressSpace>,
}

impl VulkanDevice {
    /// Opens a GPU by number, name or UUID.
    ///
    /// # Errors
    /// [`Error`].
    pub fn open(name: &str, options: &VulkanOptions) -> Result<Self, Error> {
        Self::open_with(name, options, Arc::default(), Arc::default())
    }

    pub(crate) fn open_with(
        name: &str,
        options: &VulkanOptions,
        faults: Arc<Faults>,
        live: Arc<Live>,
    ) -> Result<Self, Error> {
        let library = Library::load(options, faults)?;
        let mut found = find(library.gpus()?, name)?;
        if let Some(largest) = options.largest {
            found.limit(largest);
        }
        #[cfg(test)]
        {
            use std::sync::atomic::Ordering::Relaxed;
            let (align, addresses) = (live.import_align.load(Relaxed), live.addresses.load(Relaxed));
            found.restrict(align, live.dedicated.load(Relaxed), addresses);
        }
        Self::of(found, options, live)
    }

    fn of(found: Found, options: &VulkanOptions, live: Arc<Live>) -> Result<Self, Error> {
        let direct = options.direct;
        let gpu = Gpu::open(found, options, live)?;
        let mut notes = vec![about(gpu.info())];
        let sparse = match () {
            () if !options.sparse => Err("it was not asked for".to_owned()),
            () if !gpu.binds() => Err("the driver cannot bind sparse buffers".to_owned()),
            () if gpu.exports() && !gpu.info().sparse_export => {
                Err("the driver exports no memory that is bound to sparse buffers, and it is to be exported".to_owned())
            }
            () => SparseMap::new(&gpu).map_err(|e| error_chain(&e)),
        };
        let granule = sparse.as_ref().map_or(PageSize::SIZE_4K, |map| map.granule());
        notes.push(match &sparse {
            Ok(map) => format!("binds sparse buffers, in pages of {}", map.granule()),
            Err(why) => format!("addresses are card addresses: {why}"),
        });
        let memory = GpuMemory::new(&gpu, granule);
        let refused = gpu.try_import();
        match gpu.import_align() {
            Some(align) => notes.push(format!("imports host memory, at multiples of {align} bytes")),
            None => {
                let why = match (refused, gpu.info().host_import) {
                    (Some(why), _) => format!("the driver refuses it ({why})"),
                    (_, Some(_)) => "it was not asked for".to_owned(),
                    (_, None) => "the driver has no VK_EXT_external_memory_host".to_owned(),
                };
                notes.push(format!("registers only host memory that the driver allocates, no import: {why}"));
            }
        }
        if let Some(why) = gpu.info().unified() {
            notes.push(match () {
                () if gpu.maps_memory() => {
                    format!("copies of up to {direct} bytes are the processor's while the GPU is idle: {why}")
                }
                () if direct == 0 => format!("all copies are the GPU's, as was asked for: {why}"),
                () => format!("all copies are the GPU's: {why}, but its memory is not coherent with the host"),
            });
        }
        let space: Box<dyn AddressSpace> = match &sparse {
            Ok(map) => Box::new(SparseSpace::new(map, &memory)),
            Err(_) => Box::new(FlatSpace::new()),
        };
        let copying = gpu.copy_queues();
        let channels = options.channels.unwrap_or(copying);
        if channels == 0 {
            return Err(Error::NoQueues);
        }
        let parts = Parts { importer: importer(&gpu), memory, sparse: sparse.ok(), channels, gpu, direct };
        let queues = (0..channels)
            .map(|index| Ok(Box::new(GpuQueue::new(parts.clone(), index % copying)?) as Box<DeviceQueue>))
            .collect::<Result<_, Error>>()?;
        // A part that the device does without may have failed because it is lost.
        parts.gpu.check()?;
        Ok(Self { regions: parts.memory.regions(), parts, notes, queues, space })
    }

    /// The GPU.
    pub fn gpu(&self) -> &GpuInfo {
        self.parts.gpu.info()
    }

    /// The pages in which sparse buffers are bound; `None` where addresses are card addresses.
    pub fn sparse_pages(&self) -> Option<PageSize> {
        self.parts.sparse.as_ref().map(|sparse| sparse.granule())
    }

    /// The address by which programs on the GPU reach an allocated card address; `None` where it has no such addresses,
    /// or nothing is allocated there. It holds up to the end of the allocation, or of the largest buffer.
    pub fn address_of(&self, at: CardAddr) -> Option<u64> {
        let mut address = None;
        let found = self.parts.memory.areas().resolve(at, 1, false, |_, buffer, offset, _, _| {
            address = buffer.device_address().map(|first| first + offset);
        });
        found.ok().and(address)
    }

    /// A dma-buf of allocated memory, for another device or process, and the offset in it of the first byte. It keeps
    /// the memory: all that was allocated at once with it, up to the driver's limits. Of memory that is bound, too.
    /// Others may use what was allocated whenever no operation on it is in flight.
    ///
    /// # Errors
    /// [`Error::NotExportable`] unless the device was opened [so](VulkanOptions::exportable) and the driver can;
    /// [`Error::NotAllocated`]; [`Error::Range`] for memory of more than one allocation of the driver; [`Error::Call`].
    pub fn export_dma_buf(&self, memory: Span<CardAddr>) -> Result<(OwnedFd, u64), Error> {
        let mut found = None;
        let (first, len) = (memory.first(), memory.len());
        let there = self.parts.memory.areas().resolve(first, len, false, |_, buffer, offset, at, len| {
            let whole = at == memory.first().bits() && len == memory.len();
            found = whole.then(|| (buffer.clone(), offset));
        });
        there.map_err(Error::NotAllocated)?;
        let (buffer, offset) = found.ok_or(Error::Range(memory))?;
        Ok((self.parts.gpu.export_dma_buf(&buffer)?, offset))
    }

    #[cfg(any(feature = "by-hand", test))]
    pub(crate) fn shared(&self) -> &Arc<Gpu> {
        &self.parts.gpu
    }

    /// The buffer behind an allocated card address.
    #[cfg(feature = "by-hand")]
    pub(crate) fn buffer_at(&self, at: CardAddr) -> Option<Arc<crate::gpu::Buffer>> {
        let mut found = None;
        let there = self.parts.memory.areas().resolve(at, 1, false, |_, buffer, _, _, _| found = Some(buffer.clone()));
        there.ok().and(found)
    }

    #[cfg(test)]
    pub(crate) fn misuse(&self) {
        self.parts.gpu.misuse();
    }

    #[cfg(test)]
    pub(crate) fn shares_limit_with(&self, other: &Self) -> bool {
        let (one, other) = (self.parts.sparse.as_ref(), other.parts.sparse.as_ref());
        one.zip(other).is_some_and(|(one, other)| one.shares_limit_with(other))
    }

    /// Another queue over the GPU's first: for tests that look at memory past the queue that they test.
    #[cfg(test)]
    pub(crate) fn open_queue(&self) -> Result<Box<DeviceQueue>, Error> {
        Ok(Box::new(GpuQueue::new(self.parts.clone(), 0)?))
    }
}

impl Device for VulkanDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.gpu().name.clone(),
            notes: self.notes.clone(),
            polled: false,
            concurrent: self.parts.gpu.copy_queues().min(self.parts.channels) > 1,
            processors: self.gpu().processors(),
            helped: false,
            // The most that any GPU may ask of an offset in a storage buffer.
            tensor_align: 256,
        }
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn memory(&self) -> DeviceMemory {
        DeviceMemory::new(&self.regions).driven_by(Allocator(self.parts.memory.clone()))
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(self.parts.importer.clone())
    }

    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>> {
        std::mem::take(&mut self.queues)
    }

    fn address_space(&mut self) -> &mut dyn AddressSpace {
        &mut *self.space
    }

    fn lending(&self) -> Result<Box<dyn Lending>, Box<dyn StdError + Send + Sync>> {
        let why = match () {
            () if !self.gpu().lends => {
                "its driver does not share memory (VK_EXT_external_memory_dma_buf, VK_EXT_queue_family_foreign)"
            }
            () if self.parts.sparse.is_some() => "it binds sparse buffers; open it as vulkan:NAME,flat",
            () => {
                return Ok(Box::new(Lender(self.parts.memory.clone(), format!("vulkan:{}", self.gpu().uuid()))));
            }
        };
        Err(format!("{} lends no memory: {why}", self.gpu().name).into())
    }

    fn driver_copies(&self) -> Result<Option<Box<dyn DriverCopies>>, Box<dyn StdError + Send + Sync>> {
        Ok(Some(Box::new(BackToBack::new(self.parts.clone())?)))
    }
}

dmalane_dma::debug_as!(VulkanDevice, |it| "VulkanDevice({})", it.gpu());

/// One line about a GPU.
fn about(info: &GpuInfo) -> String {
    let (major, minor, patch) = info.api;
    format!("{}, driver {}, Vulkan {major}.{minor}.{patch}", info.kind, info.driver)
}

/// The GPU of this number, name or UUID. A name may be part of one, in capitals or not.
fn find(gpus: Vec<Found>, wanted: &str) -> Result<Found, Error> {
    let index = index_of(&gpus.iter().map(Found::info).collect::<Vec<_>>(), wanted)?;
    gpus.into_iter().find(|found| found.info().index == index).ok_or(Error::NoDriver)
}

fn index_of(gpus: &[&GpuInfo], wanted: &str) -> Result<usize, Error> {
    let names = |gpus: &[&GpuInfo]| {
        gpus.iter().map(|info| format!("{} ({})", info.index, info.name)).collect::<Vec<_>>().join(", ")
    };
    let lower = wanted.to_lowercase();
    let fits = |info: &&GpuInfo| match wanted.parse::<usize>() {
        Ok(index) => info.index == index,
        Err(_) => info.uuid() == lower || info.name.to_lowercase().contains(&lower),
    };
    let found: Vec<_> = gpus.iter().copied().filter(fits).collect();
    let exact: Vec<_> = found.iter().copied().filter(|info| info.uuid() == lower || info.name == wanted).collect();
    match (&found[..], &exact[..]) {
        ([only], _) | (_, [only]) => Ok(only.index),
        ([], _) => Err(Error::NoSuchGpu { wanted: wanted.to_owned(), there: names(gpus) }),
        (several, _) => Err(Error::Ambiguous { wanted: wanted.to_owned(), which: names(several) }),
    }
}

/// The GPUs of this machine, in the order of their numbers.
///
/// # Errors
/// [`Error::NoLoader`], [`Error::NoDriver`], [`Error::Call`].
pub fn gpus() -> Result<Vec<GpuInfo>, Error> {
    let library = Library::load(&VulkanOptions::default(), Arc::default())?;
    Ok(library.gpus()?.iter().map(|found| found.info().clone()).collect())
}
