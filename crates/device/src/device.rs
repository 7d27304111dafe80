//! The trait that every device implements.

use std::error::Error;
use std::fs::File;
use std::sync::Arc;

use dmalane_addr::{CardAddr, PageSize, Span};
use dmalane_dma::Registrar;
use dmalane_queue::DeviceQueue;

use crate::{AddressSpace, DeviceMemory, DriverCopies, Lending, Region};

/// A device: memory regions, registration of host memory, queues, and an address space.
///
/// Object-safe. The [crate documentation](crate) has a complete one.
pub trait Device: Send {
    /// Its description. How it is driven may change while it is used.
    fn info(&self) -> DeviceInfo;

    /// Its memory, in the order of preference: the first region is the default. No two overlap; memory that the device
    /// keeps for itself, such as page tables, is in none.
    fn regions(&self) -> &[Region];

    /// All of its memory, free. A device whose driver allocates memory says [so](DeviceMemory::driven_by).
    fn memory(&self) -> DeviceMemory {
        DeviceMemory::new(self.regions())
    }

    /// Makes host memory reachable for its queues.
    fn registrar(&self) -> Arc<dyn Registrar>;

    /// Its queues, at least one; only the first call has any.
    fn take_queues(&mut self) -> Vec<Box<DeviceQueue>>;

    /// Where programs on the device see its memory.
    fn address_space(&mut self) -> &mut dyn AddressSpace;

    /// The device in the words of DLPack, where its device virtual addresses are the pointers that DLPack hands on, so
    /// that kernels and other libraries can use them as they are; `None` for other addresses.
    fn dlpack(&self) -> Option<DlpackDevice> {
        None
    }

    /// Lets its queues use device memory that another library of this process, such as PyTorch, has allocated on it,
    /// until what is returned is dropped. The memory stays allocated until then, and until operations on it have ended.
    ///
    /// # Errors
    /// It is no memory of this device, or the device has no such libraries.
    fn borrow(&self, memory: Span<CardAddr>) -> Result<Box<dyn Send>, Box<dyn Error + Send + Sync>> {
        Err(format!("{memory:?} is memory of another library, and this device has none").into())
    }

    /// Lends its memory to other processes.
    ///
    /// # Errors
    /// It cannot: why, in a sentence.
    fn lending(&self) -> Result<Box<dyn Lending>, Box<dyn Error + Send + Sync>> {
        Err(format!("{} cannot lend its memory to other processes", self.info().name).into())
    }

    /// Counters of what can be observed of it, as they are now.
    fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Copies by its driver alone, for a reference beside its queues; `None` where queues are all that moves bytes.
    ///
    /// # Errors
    /// The driver refused it.
    fn driver_copies(&self) -> Result<Option<Box<dyn DriverCopies>>, Box<dyn Error + Send + Sync>> {
        Ok(None)
    }

    /// The files of a device that is made of files: what they hold can be read before a measurement and put back after
    /// it, and plain system calls can be measured beside the queues.
    fn backing_files(&self) -> Option<BackingFiles> {
        None
    }
}

/// The description of a device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceInfo {
    /// A name for people ("software card").
    pub name: String,
    /// How it is driven, for people; a line each.
    pub notes: Vec<String>,
    /// True when its queues work inside `poll`, on the caller's time.
    pub polled: bool,
    /// True when its queues work at the same time, so that measured rates say which of them has room.
    pub concurrent: bool,
    /// Processors of this machine that the device needs for itself while it works: threads of a device in software, or
    /// of the process that serves it. 0 for hardware, and where the caller's time is used.
    pub processors: usize,
    /// True when a thread of its own and those that poll share its work: for one thread, two processors move bytes.
    pub helped: bool,
    /// Bytes of which the addresses of tensors are multiples for the programs on it, a power of two; 0 for nothing
    /// beyond 64.
    pub tensor_align: u64,
}

/// A device as other libraries of this process name it: `DLDevice` of DLPack.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DlpackDevice {
    /// The type of device (`DLDeviceType`).
    pub kind: u32,
    /// Its number among those of that type.
    pub number: i32,
}

impl DlpackDevice {
    /// The CUDA device of this number.
    pub fn cuda(number: u32) -> Option<Self> {
        const CUDA: u32 = 2;
        Some(Self { kind: CUDA, number: i32::try_from(number).ok()? })
    }
}

/// The files behind a device; often both are the same.
#[derive(Clone, Debug)]
pub struct BackingFiles {
    /// Opened for writing: what is written to the device goes there.
    pub written: Arc<File>,
    /// Opened for reading: what is read from the device comes from there.
    pub read: Arc<File>,
}

/// Counters of a device; `None` where it cannot tell.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// The IOMMU between host memory and the device.
    pub iommu: Option<IommuCounters>,
    /// Bytes of the device's memory that were ever used, where it is memory of this machine that is there from its
    /// first use on.
    pub touched: Option<u64>,
}

/// Counters of an IOMMU.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct IommuCounters {
    /// Leaves in its page tables, by size.
    pub leaves: Vec<(PageSize, u64)>,
    /// Page tables.
    pub tables: usize,
    /// Accesses that were refused.
    pub faults: u64,
}
