//! An opened GPU, its memory and its buffers.
//!
//! `unsafe` because every call of Vulkan is. Each object owns what the driver needs while it exists: a buffer its
//! memory, imported memory the host memory behind it, everything the device. So no order of drops is wrong; that
//! nothing is destroyed while commands use it is the business of [`channel`](crate::channel).
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ash::{Device, ext, khr, vk};
use dmalane_dma::{AnonHeap, BufferRef, DriverMemory, Heap, PageKind, VolatileSlice, error_chain};

use crate::error::{CallError, Error};
use crate::library::{DMA_BUF, Found, GpuInfo, Library, SPARSE, copied};
use crate::options::VulkanOptions;

/// Numbers of live objects.
#[derive(Debug, Default)]
pub(crate) struct Live {
    pub memories: AtomicU64,
    pub imports: AtomicU64,
    pub buffers: AtomicU64,
    pub semaphores: AtomicU64,
    pub pools: AtomicU64,
    /// Binds that waited for those before them.
    #[cfg(test)]
    pub ordered_binds: AtomicU64,
    /// In place of the process-wide number of sparse bindings.
    #[cfg(test)]
    pub held: OnceLock<Arc<crate::sparse::Held>>,
    /// Bytes of addresses for sparse buffers, at most; 0 for what the driver has.
    #[cfg(test)]
    pub addresses: AtomicU64,
    /// The alignment of imported memory, at least.
    #[cfg(test)]
    pub import_align: AtomicU64,
    /// The GPU exports dedicated allocations only.
    #[cfg(test)]
    pub dedicated: std::sync::atomic::AtomicBool,
    /// Added to the addresses of sparse buffers, which some drivers have in the upper half.
    #[cfg(test)]
    pub high: AtomicU64,
    /// Buffers that were acquired from the foreign queue family, or released to it.
    #[cfg(test)]
    pub transfers: AtomicU64,
    /// Queues that submissions waited for, because these owned a buffer before them.
    #[cfg(test)]
    pub handovers: AtomicU64,
}

/// An opened GPU.
pub(crate) struct Gpu {
    device: Device,
    physical: vk::PhysicalDevice,
    host: Option<ext::external_memory_host::Device>,
    /// Why the driver does not import host memory, although it states that it can.
    refused: OnceLock<String>,
    descriptors: Option<khr::external_memory_fd::Device>,
    exportable: bool,
    direct: bool,
    info: GpuInfo,
    /// The families whose queues are used.
    families: Vec<u32>,
    queues: Vec<QueueHandle>,
    /// Which of the queues binds sparse buffers.
    sparse: Option<usize>,
    /// Memory types that sparse buffers take, once there is one.
    sparse_types: OnceLock<u32>,
    /// The first call that found the device lost.
    lost: OnceLock<CallError>,
    /// Held by submissions that use foreign buffers, so that they follow each other in one order.
    ownership: Mutex<()>,
    live: Arc<Live>,
    library: Arc<Library>,
}

/// A queue of the device. Vulkan wants one caller at a time.
pub(crate) struct QueueHandle {
    queue: Mutex<vk::Queue>,
    pub family: u32,
}

impl QueueHandle {
    pub fn lock(&self) -> MutexGuard<'_, vk::Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Device memory that the host writes as it writes its own. Without coherence each write would have to be flushed in
/// whole atoms (`nonCoherentAtomSize`), and with it neighbouring bytes that the GPU may have written.
const DIRECT: vk::MemoryPropertyFlags =
    vk::MemoryPropertyFlags::from_raw(vk::MemoryPropertyFlags::DEVICE_LOCAL.as_raw() | COHERENT.as_raw());

/// Memory that the host and the GPU see alike.
const COHERENT: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::from_raw(
    vk::MemoryPropertyFlags::HOST_VISIBLE.as_raw() | vk::MemoryPropertyFlags::HOST_COHERENT.as_raw(),
);

/// Queues of one family that are used at most: more do not copy faster.
const QUEUES: u32 = 2;

/// Families of queues.
struct Families {
    /// Those that copy, with how many queues of each.
    copying: Vec<(u32, u32)>,
    /// For sparse binding; it may be one of the others.
    binding: Option<u32>,
}

fn families(info: &GpuInfo, sparse: bool) -> Families {
    use vk::QueueFlags as Flags;
    let copies = |f: &Flags| f.intersects(Flags::TRANSFER | Flags::GRAPHICS | Flags::COMPUTE);
    // Copy engines first: a family that can do nothing else.
    let rank = |f: &Flags| match () {
        () if !f.intersects(Flags::GRAPHICS | Flags::COMPUTE) => 0,
        () if !f.contains(Flags::GRAPHICS) => 1,
        () => 2,
    };
    let all = info.families.iter().zip(0u32..).filter(|((flags, count), _)| copies(flags) && *count > 0);
    let mut all: Vec<_> = all.map(|((flags, count), family)| (*flags, *count, family)).collect();
    all.sort_by_key(|(flags, _, family)| (rank(flags), *family));
    let used: Vec<_> = all.iter().take(1).map(|(_, count, family)| (*family, (*count).min(QUEUES))).collect();
    let can = |flags: Flags| {
        let mut candidates = used.iter().map(|(family, _)| *family).chain(all.iter().map(|(_, _, family)| *family));
        candidates.find(|family| info.families[*family as usize].0.contains(flags))
    };
    let binding = if sparse { can(Flags::SPARSE_BINDING) } else { None };
    Families { copying: used, binding }
}

/// How families of queues, those that are used, share a buffer. One family at a time owns a foreign buffer: a queue's
/// during a submission, else the foreign one, from which each acquires it. One that is shared could not be transferred:
/// without `synchronization2` no barrier names the foreign family (VUID-VkBufferMemoryBarrier-None-09050, -09051).
pub(crate) fn sharing(foreign: bool, families: &[u32]) -> vk::SharingMode {
    match families {
        [_, _, ..] if !foreign => vk::SharingMode::CONCURRENT,
        _ => vk::SharingMode::EXCLUSIVE,
    }
}

fn too_large(what: &str, len: u64, most: u64) -> Error {
    Error::Limit(format!("{what} of {len} bytes is larger than the driver's largest ({most})"))
}

impl Gpu {
    /// Opens a GPU.
    pub fn open(found: Found, options: &VulkanOptions, live: Arc<Live>) -> Result<Arc<Self>, Error> {
        let (library, gpu, info) = found.into_parts();
        if let Some(missing) = info.missing() {
            return Err(Error::Unsuitable { name: info.name, missing: missing.to_owned() });
        }
        let Families { copying, binding } =
            families(&info, options.sparse && info.sparse.is_some() && info.device_address);
        if copying.is_empty() {
            return Err(Error::Unsuitable { name: info.name, missing: "it has no queue that copies".to_owned() });
        }
        let mut asked = copying.clone();
        asked.extend(binding.filter(|family| asked.iter().all(|(f, _)| f != family)).map(|family| (family, 1)));
        let priorities = [1.0; QUEUES as usize];
        let families: Vec<_> = asked
            .iter()
            .map(|(family, count)| {
                vk::DeviceQueueCreateInfo::default()
                    .queue_family_index(*family)
                    .queue_priorities(&priorities[..*count as usize])
            })
            .collect();
        let mut extensions = Vec::new();
        let host_import = options.host_import && info.host_import.is_some();
        if host_import {
            extensions.push(ext::external_memory_host::NAME.as_ptr());
        }
        let descriptors = info.dma_buf_import || info.dma_buf_export;
        if descriptors {
            extensions.push(ext::external_memory_dma_buf::NAME.as_ptr());
            extensions.push(khr::external_memory_fd::NAME.as_ptr());
        }
        if info.foreign_queues {
            extensions.push(ext::queue_family_foreign::NAME.as_ptr());
        }
        let mut vulkan12 = vk::PhysicalDeviceVulkan12Features::default()
            .timeline_semaphore(true)
            .buffer_device_address(info.device_address);
        let features = vk::PhysicalDeviceFeatures::default()
            .sparse_binding(binding.is_some())
            .sparse_residency_buffer(binding.is_some())
            .sparse_residency_aliased(binding.is_some());
        let create = vk::DeviceCreateInfo::default()
            .queue_create_infos(&families)
            .enabled_extension_names(&extensions)
            .enabled_features(&features)
            .push_next(&mut vulkan12);
        let device = library.faults().call("vkCreateDevice", || {
            // SAFETY: the structures live until the call returns; the physical device is one of the instance, and has
            // the families, queues, features and extensions that `info` says (the invariant of `Found`).
            unsafe { library.instance().create_device(gpu, &create, None) }
        })?;
        let host = host_import.then(|| ext::external_memory_host::Device::new(library.instance(), &device));
        let descriptors = descriptors.then(|| khr::external_memory_fd::Device::new(library.instance(), &device));
        let exportable = options.exportable && info.dma_buf_export;
        let coherent = info.memory_types.iter().any(|t| t.flags.contains(DIRECT));
        let direct = options.direct > 0 && info.unified().is_some() && coherent;
        let mut queues = Vec::new();
        for (family, count) in &asked {
            for index in 0..*count {
                // SAFETY: the device was created with this queue.
                let queue = unsafe { device.get_device_queue(*family, index) };
                queues.push(QueueHandle { queue: Mutex::new(queue), family: *family });
            }
        }
        let first_of = |family: Option<u32>| family.and_then(|family| queues.iter().position(|q| q.family == family));
        let sparse = first_of(binding);
        let families = asked.iter().map(|(family, _)| *family).collect();
        Ok(Arc::new(Self {
            device,
            physical: gpu,
            host,
            refused: OnceLock::new(),
            descriptors,
            exportable,
            direct,
            info,
            families,
            queues,
            sparse,
            sparse_types: OnceLock::new(),
            lost: OnceLock::new(),
            ownership: Mutex::default(),
            live,
            library,
        }))
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    pub fn live(&self) -> &Live {
        &self.live
    }

    /// The alignment of host memory that can be imported; `None` when none can.
    pub fn import_align(&self) -> Option<u64> {
        self.host.as_ref().filter(|_| self.refused.get().is_none()).and(self.info.host_import)
    }

    /// Imports a page of memory, and none any more if the driver refuses: it may state an extension that does not work
    /// on this system, or take only more than a page, which buffers are not aligned to. Gives the reason.
    pub fn try_import(self: &Arc<Self>) -> Option<&str> {
        let align = self.import_align()?;
        let memory = AnonHeap::starting_at(PageKind::Base).allocate(1).ok()?.share().reference();
        let refused = match memory.len() {
            page if align > page as u64 => format!("only at multiples of {align} bytes, and pages have {page}"),
            page => error_chain(&self.import(&memory, 0, page).err()?),
        };
        Some(self.refused.get_or_init(|| refused))
    }

    /// True when device memory is mapped into this process, of the heaps that have such memory.
    pub fn maps_memory(&self) -> bool {
        self.direct
    }

    /// True when sparse buffers can be bound.
    pub fn binds(&self) -> bool {
        self.sparse.is_some()
    }

    /// Number of queues that copy.
    pub fn copy_queues(&self) -> usize {
        self.queues.iter().filter(|q| q.family == self.queues[0].family).count()
    }

    pub fn queue(&self, index: usize) -> &QueueHandle {
        &self.queues[index]
    }

    /// The family that owns a foreign buffer while this queue uses it.
    pub fn owner(&self, queue: usize) -> u32 {
        self.queue(queue).family
    }

    /// To be held from the look at the [last users](Foreign) of buffers until they are this submission.
    pub fn ownership(&self) -> MutexGuard<'_, ()> {
        self.ownership.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Device memory is allocated to be exported.
    pub fn exports(&self) -> bool {
        self.exportable
    }

    #[cfg(test)]
    pub fn is_validated(&self) -> bool {
        self.library.is_validated()
    }

    /// Waits, without a limit unless the device is lost, until a queue has nothing to do. True when that is so: of a
    /// device that is lost the driver does not know it, and Mesa's drivers answer without waiting.
    pub fn is_idle(&self, queue: usize) -> bool {
        let queue = self.queue(queue).lock();
        // SAFETY: the queue is locked.
        let idle = self.call("vkQueueWaitIdle", |d| unsafe { d.queue_wait_idle(*queue) });
        idle.is_ok()
    }

    /// The same of the queue that binds sparse buffers.
    pub fn has_bound(&self) -> bool {
        self.sparse.is_none_or(|queue| self.is_idle(queue))
    }

    /// To be asked before a call that can fail, and told its answer.
    pub fn call<T>(
        &self,
        call: &'static str,
        f: impl FnOnce(&Device) -> Result<T, vk::Result>,
    ) -> Result<T, CallError> {
        let done = self.library.faults().call(call, || f(&self.device));
        if let Err(e) = done.as_ref()
            && e.is_lost()
        {
            self.lost.get_or_init(|| *e);
        }
        done
    }

    /// To be asked before the device gets more work, and before its answers are believed: once a call has found the
    /// device lost, also one whose answer did not matter, others may succeed without having done anything.
    ///
    /// # Errors
    /// The first call that found it lost.
    pub fn check(&self) -> Result<(), CallError> {
        self.lost.get().map_or(Ok(()), |e| Err(*e))
    }

    /// The first memory type of `bits` that has `flags`, of this heap if one is given: the one with the fewest
    /// properties that nobody asked for.
    fn memory_type(&self, bits: u32, flags: vk::MemoryPropertyFlags, heap: Option<u32>) -> Option<u32> {
        use vk::MemoryPropertyFlags as Flags;
        // All others need a feature, or are not for buffers that are copied.
        let plain = Flags::DEVICE_LOCAL | Flags::HOST_VISIBLE | Flags::HOST_COHERENT | Flags::HOST_CACHED;
        let types = self.info.memory_types.iter().zip(0u32..);
        let fit = types.filter(|(t, i)| {
            bits & (1 << i) != 0
                && t.flags.contains(flags)
                && plain.contains(t.flags)
                && heap.is_none_or(|heap| t.heap == heap)
        });
        // The host reads memory faster that it caches.
        let rank = |f: Flags| if flags.contains(Flags::HOST_VISIBLE) && f.contains(Flags::HOST_CACHED) { 0 } else { 1 };
        fit.min_by_key(|(t, i)| (rank(t.flags), (t.flags & !flags).as_raw().count_ones(), *i)).map(|(_, i)| i)
    }

    /// Allocates memory, or imports it.
    ///
    /// # Safety
    /// The structure and its chain are as the specification asks for (`VkMemoryAllocateInfo`). Memory that is imported
    /// exists until this is dropped.
    unsafe fn allocate(self: &Arc<Self>, info: &vk::MemoryAllocateInfo<'_>) -> Result<Memory, Error> {
        let (len, most) = (info.allocation_size, self.info.max_allocation);
        if len > most {
            return Err(too_large("an allocation", len, most));
        }
        let most = self.info.max_allocations;
        if self.live.memories.load(Ordering::Relaxed) >= u64::from(most) {
            return Err(Error::Limit(format!("the driver makes {most} allocations at most, and all are made")));
        }
        // SAFETY: of the caller; there are not too many allocations, checked above.
        let memory = self.call("vkAllocateMemory", |d| unsafe { d.allocate_memory(info, None) });
        let memory = memory.map_err(|e| match e.result {
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY => {
                let kind = self.info.memory_types.get(info.memory_type_index as usize);
                Error::NoMemory { len, free: kind.and_then(|kind| self.free_memory(kind.heap)), source: e }
            }
            _ => e.into(),
        })?;
        self.live.memories.fetch_add(1, Ordering::Relaxed);
        Ok(Memory { memory, len: info.allocation_size, host: None, exportable: false, gpu: self.clone() })
    }

    /// Bytes that this process may still have of a heap; `None` where the driver does not say.
    pub fn free_memory(&self, heap: u32) -> Option<u64> {
        let heap = Some(heap as usize).filter(|_| self.info.memory_budget)?;
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the physical device is one of the instance, and has the extension of the structure.
        unsafe { self.library.instance().get_physical_device_memory_properties2(self.physical, &mut properties) };
        Some(budget.heap_budget[heap].saturating_sub(budget.heap_usage[heap]))
    }

    /// A buffer without memory. It is foreign if its memory is or can be a dma-buf and the driver transfers ownership.
    ///
    /// # Safety
    /// The structure and its chain are as the specification asks for (`VkBufferCreateInfo`), but for sharing.
    unsafe fn create_buffer(
        self: &Arc<Self>,
        info: &vk::BufferCreateInfo<'_>,
        is_dma_buf: bool,
    ) -> Result<Buffer, Error> {
        let (len, most) = (info.size, self.info.max_buffer);
        if len > most {
            return Err(too_large("a buffer", len, most));
        }
        let foreign = is_dma_buf && self.info.foreign_queues;
        let info = info.sharing_mode(sharing(foreign, &self.families)).queue_family_indices(&self.families);
        // SAFETY: of the caller; the families are those of the device.
        let buffer = self.call("vkCreateBuffer", |d| unsafe { d.create_buffer(&info, None) })?;
        self.live.buffers.fetch_add(1, Ordering::Relaxed);
        let foreign = foreign.then(Foreign::default);
        Ok(Buffer { buffer, len: info.size, memory: None, window: None, foreign, gpu: self.clone() })
    }

    /// Allocates a buffer of device memory of this heap: to be exported, which the driver can, or for the queues of
    /// this device only.
    pub fn device_buffer(self: &Arc<Self>, len: u64, heap: u32, exported: bool) -> Result<Arc<Buffer>, Error> {
        let exportable = exported && self.info.dma_buf_export;
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(DMA_BUF);
        let mut create = vk::BufferCreateInfo::default().size(len).usage(copied(self.info.device_address));
        if exportable {
            create = create.push_next(&mut external);
        }
        // SAFETY: a usage that every device has, and addresses where it has them; external only if it is exported.
        let buffer = unsafe { self.create_buffer(&create, exportable)? };
        let needs = buffer.requirements();
        // It may be bound to sparse buffers, too.
        let bits = needs.memory_type_bits & self.sparse_types.get().unwrap_or(&u32::MAX);
        let kind = |flags| self.memory_type(bits, flags, Some(heap));
        let mapped = if self.direct { kind(DIRECT) } else { None };
        let kind = mapped.or_else(|| kind(vk::MemoryPropertyFlags::DEVICE_LOCAL));
        let kind = kind.ok_or(Error::NoMemoryType("buffers in this heap"))?;
        let mut flags = vk::MemoryAllocateFlagsInfo::default();
        let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(DMA_BUF);
        let mut info = vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(kind);
        let mut dedicated = vk::MemoryDedicatedAllocateInfo::default().buffer(buffer.buffer);
        if exportable {
            info = info.push_next(&mut export);
            if self.info.dedicated_export {
                info = info.push_next(&mut dedicated);
            }
        }
        if self.info.device_address {
            flags = flags.flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
            info = info.push_next(&mut flags);
        }
        // SAFETY: a type that the buffer permits; exported, dedicated and with addresses as far as the device does
        // that.
        let mut memory = unsafe { self.allocate(&info)? };
        memory.exportable = exportable;
        // SAFETY: of a type that the buffer permits, and as long as it asks for.
        let mut buffer = unsafe { buffer.bind(memory)? };
        if mapped.is_some() {
            // SAFETY: `DIRECT` is host-visible.
            unsafe { buffer.map(kind)? };
        }
        Ok(Arc::new(buffer))
    }

    /// Imports `len` bytes of host memory from `offset` of a buffer on: whole multiples of the
    /// [alignment](Self::import_align), which is checked. The import keeps the memory alive.
    pub fn import(self: &Arc<Self>, host: &BufferRef, offset: usize, len: usize) -> Result<Arc<Buffer>, Error> {
        const HOST: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let (Some(import), Some(align)) = (&self.host, self.import_align()) else { return Err(Error::ForeignMemory) };
        let address = host.address() + offset;
        let inside = offset.checked_add(len).is_some_and(|end| end <= host.len());
        // Drivers take what violates this, and fail later.
        if !inside || len == 0 || !(address as u64).is_multiple_of(align) || !(len as u64).is_multiple_of(align) {
            return Err(Error::Misaligned { align, address });
        }
        let pointer = address as *mut std::ffi::c_void;
        let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
        self.call("vkGetMemoryHostPointerPropertiesEXT", |d| {
            // SAFETY: the extension is enabled; the range lies in the memory of `host`, as was checked.
            let got = unsafe {
                (import.fp().get_memory_host_pointer_properties_ext)(d.handle(), HOST, pointer, &mut properties)
            };
            got.result()
        })?;
        let mut from = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(HOST).host_pointer(pointer);
        // SAFETY: address and length are aligned and within `host`, checked above; a handle type that this one imports.
        unsafe { self.imported(Some(host), len as u64, HOST, properties.memory_type_bits, &mut from, None) }
    }

    /// Imports a dma-buf of `len` bytes, of the memory behind a buffer, which the import keeps alive, or of a device.
    pub fn import_dma_buf(
        self: &Arc<Self>,
        host: Option<&BufferRef>,
        len: u64,
        fd: OwnedFd,
    ) -> Result<Arc<Buffer>, Error> {
        let Some(descriptors) = self.descriptors.as_ref().filter(|_| self.info.dma_buf_import) else {
            return Err(Error::NoDmaBufs);
        };
        let mut properties = vk::MemoryFdPropertiesKHR::default();
        self.call("vkGetMemoryFdPropertiesKHR", |d| {
            // SAFETY: the extension is enabled; the descriptor is open, and the driver says so if it is no dma-buf.
            let got = unsafe {
                (descriptors.fp().get_memory_fd_properties_khr)(d.handle(), DMA_BUF, fd.as_raw_fd(), &mut properties)
            };
            got.result()
        })?;
        // Not every driver looks.
        let mut file = File::from(fd);
        let has = file.seek(SeekFrom::End(0)).map_err(Error::Descriptor)?;
        if has < len {
            return Err(Error::NoMemoryType("a dma-buf that is too short"));
        }
        let fd = OwnedFd::from(file);
        let mut from = vk::ImportMemoryFdInfoKHR::default().handle_type(DMA_BUF).fd(fd.as_raw_fd());
        // SAFETY: the dma-buf is as long, checked above, and exists as long as somebody has it; a handle type that this
        // one imports.
        unsafe { self.imported(host, len, DMA_BUF, properties.memory_type_bits, &mut from, Some((fd, has))) }
    }

    /// Imports `len` bytes of memory behind a buffer, which the import keeps alive, or of a device, by a handle of this
    /// type: into a memory type of these bits. `fd` is the handle if it is a descriptor, with its bytes.
    ///
    /// # Safety
    /// `from` is as the specification asks for, a handle type that this device imports, of `len` bytes of `host`, or as
    /// many as `fd` says.
    unsafe fn imported(
        self: &Arc<Self>,
        host: Option<&BufferRef>,
        len: u64,
        handle: vk::ExternalMemoryHandleTypeFlags,
        bits: u32,
        from: &mut impl vk::ExtendsMemoryAllocateInfo,
        fd: Option<(OwnedFd, u64)>,
    ) -> Result<Arc<Buffer>, Error> {
        // Programs on the GPU see memory of a device.
        let addressed = host.is_none() && self.info.device_address;
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(handle);
        let create = vk::BufferCreateInfo::default().size(len).usage(copied(addressed)).push_next(&mut external);
        // SAFETY: a usage that every device has, addresses where it has them, and a handle type that this one imports.
        let buffer = unsafe { self.create_buffer(&create, fd.is_some())? };
        let needs = buffer.requirements();
        let (flags, size, has, what) = match fd {
            Some((_, has)) => (vk::MemoryPropertyFlags::empty(), needs.size, has, "imported dma-bufs"),
            None => (COHERENT, len, len, "imported host memory"),
        };
        let kind = |flags| self.memory_type(needs.memory_type_bits & bits, flags, None);
        let local = if host.is_none() { kind(vk::MemoryPropertyFlags::DEVICE_LOCAL) } else { None };
        let kind = local.or_else(|| kind(flags)).filter(|_| needs.size <= has).ok_or(Error::NoMemoryType(what))?;
        // Some drivers take dma-bufs so only, and it has no other buffer anyway.
        let mut dedicated = vk::MemoryDedicatedAllocateInfo::default().buffer(buffer.buffer);
        let mut info = vk::MemoryAllocateInfo::default().allocation_size(size).memory_type_index(kind).push_next(from);
        if fd.is_some() {
            info = info.push_next(&mut dedicated);
        }
        let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        if addressed {
            info = info.push_next(&mut flags);
        }
        // SAFETY: a type that the handle's memory has, of which there are as many bytes; the result keeps it.
        let mut memory = unsafe { self.allocate(&info)? };
        // The driver owns it now.
        let _ = fd.map(|(fd, _)| fd.into_raw_fd());
        memory.host = host.cloned();
        self.live.imports.fetch_add(u64::from(host.is_some()), Ordering::Relaxed);
        // SAFETY: of a type that the buffer permits, and as long as it asks for.
        Ok(Arc::new(unsafe { buffer.bind(memory)? }))
    }

    /// A dma-buf of the whole memory of a buffer.
    pub fn export_dma_buf(&self, buffer: &Buffer) -> Result<OwnedFd, Error> {
        let memory = buffer.memory.as_ref().filter(|memory| memory.exportable);
        let (Some(descriptors), Some(memory)) = (&self.descriptors, memory) else { return Err(Error::NotExportable) };
        let info = vk::MemoryGetFdInfoKHR::default().memory(memory.memory).handle_type(DMA_BUF);
        // SAFETY: the extension is enabled, and the memory was allocated to be exported as this.
        let fd = self.call("vkGetMemoryFdKHR", |_| unsafe { descriptors.get_memory_fd(&info) })?;
        // SAFETY: the driver has opened this descriptor for us, and nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Host memory that the driver allocates and maps, and the buffer that it is: whole pages of 4 KiB.
    pub fn host_memory(self: &Arc<Self>, len: u64) -> Result<HostMemory, Error> {
        if len == 0 || !len.is_multiple_of(4096) {
            return Err(Error::NoMemoryType("parts of pages"));
        }
        let create = vk::BufferCreateInfo::default().size(len).usage(copied(false));
        // SAFETY: a usage that every device has.
        let buffer = unsafe { self.create_buffer(&create, false)? };
        let needs = buffer.requirements();
        let kind = self.memory_type(needs.memory_type_bits, COHERENT, None);
        let kind = kind.ok_or(Error::NoMemoryType("host memory"))?;
        let info = vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(kind);
        // SAFETY: a type that the buffer permits.
        let memory = unsafe { self.allocate(&info)? };
        let len = usize::try_from(len).ok().and_then(NonZeroUsize::new).ok_or(Error::NoMemoryType("no bytes"))?;
        // SAFETY: of a type that the buffer permits, and as long as it asks for.
        let mut buffer = unsafe { buffer.bind(memory)? };
        // SAFETY: the type is host-visible.
        let start = unsafe { buffer.map(kind)? };
        if !start.addr().get().is_multiple_of(4096) {
            return Err(Error::Misaligned { align: 4096, address: start.addr().get() });
        }
        Ok(HostMemory { start, len, buffer: Arc::new(buffer) })
    }

    /// A sparse buffer in which nothing is bound, and the multiple of bytes in which memory is bound to it.
    pub fn sparse_buffer(self: &Arc<Self>, len: u64) -> Result<(Arc<Buffer>, u64), Error> {
        if !self.binds() {
            return Err(Error::NoMemoryType("sparse buffers"));
        }
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(DMA_BUF);
        let mut create =
            vk::BufferCreateInfo::default().size(len).usage(copied(self.info.device_address)).flags(SPARSE);
        if self.exportable {
            // Memory that can be exported is bound to buffers of its kind only.
            create = create.push_next(&mut external);
        }
        // SAFETY: a usage that every device has, and addresses where it has them; it has sparse buffers, checked above.
        let buffer = unsafe { self.create_buffer(&create, false)? };
        let needs = buffer.requirements();
        self.sparse_types.get_or_init(|| needs.memory_type_bits);
        Ok((Arc::new(buffer), needs.alignment))
    }

    /// Does what the specification forbids, which the validation layers must notice.
    #[cfg(test)]
    pub fn misuse(self: &Arc<Self>) {
        // Without usage flags, which is invalid. Drivers ignore it until memory is bound.
        let info = vk::BufferCreateInfo::default().size(4096).usage(vk::BufferUsageFlags::empty());
        // SAFETY: as above.
        drop(unsafe { self.create_buffer(&info, false) });
    }

    /// Binds and unbinds ranges of sparse buffers, after all binds up to the value before; it happens when the
    /// semaphore reaches `value`.
    ///
    /// # Safety
    /// Until the semaphore has reached `value`, it, the buffers and the memory exist, and nothing uses the ranges.
    /// Memory exists as long as it is bound and used. Ranges are multiples of what [`Gpu::sparse_buffer`] has said, of
    /// memory that [`Gpu::device_buffer`] has made. Each call has a `value` one above that of the call before.
    pub unsafe fn bind_sparse(
        &self,
        all: &[(Arc<Buffer>, Vec<SparseBind<'_>>)],
        semaphore: &Timeline,
        value: u64,
    ) -> Result<(), CallError> {
        let bind = |to: &Buffer, b: &SparseBind<'_>| {
            let inside = b.at.checked_add(b.len).is_some_and(|end| end <= to.len);
            let there = b.memory.is_none_or(|(m, at)| at.checked_add(b.len).is_some_and(|end| end <= m.len));
            assert!(inside && there, "a range that is not in its buffer");
            let bind = vk::SparseMemoryBind::default().resource_offset(b.at).size(b.len);
            match b.memory {
                Some((memory, at)) => bind.memory(memory.memory).memory_offset(at),
                None => bind,
            }
        };
        let binds: Vec<Vec<_>> = all.iter().map(|(to, binds)| binds.iter().map(|b| bind(to, b)).collect()).collect();
        let of = |((to, _), binds): (&(Arc<Buffer>, _), _)| {
            vk::SparseBufferMemoryBindInfo::default().buffer(to.buffer).binds(binds)
        };
        let buffers: Vec<_> = all.iter().zip(binds.iter().map(Vec::as_slice)).map(of).collect();
        let (signals, values) = ([semaphore.semaphore], [value]);
        // Without it the driver may make binds of the same range in any order.
        let waits = if value > 1 { &signals[..] } else { &[] };
        let before = [value.saturating_sub(1)];
        let mut timeline = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&before[..waits.len()])
            .signal_semaphore_values(&values);
        let info = vk::BindSparseInfo::default()
            .buffer_binds(&buffers)
            .wait_semaphores(waits)
            .signal_semaphores(&signals)
            .push_next(&mut timeline);
        #[cfg(test)]
        self.live.ordered_binds.fetch_add(waits.len() as u64, Ordering::Relaxed);
        let queue = self.queue(self.sparse.expect("a GPU with sparse buffers has a queue that binds them")).lock();
        // SAFETY: the ranges lie in the buffers and in the memories, as was checked; the rest is of the caller; the
        // queue is locked.
        self.call("vkQueueBindSparse", |d| unsafe { d.queue_bind_sparse(*queue, &[info], vk::Fence::null()) })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: every object of the device owned a reference to this and is gone. An owner with commands still in
        // flight has kept such an object.
        unsafe { self.device.destroy_device(None) }
    }
}

/// A range of a sparse buffer, and the memory that it gets: from which byte on. `None`: nothing.
pub(crate) struct SparseBind<'a> {
    pub at: u64,
    pub len: u64,
    pub memory: Option<(&'a Memory, u64)>,
}

/// Memory that the driver has allocated, or imported.
pub(crate) struct Memory {
    memory: vk::DeviceMemory,
    len: u64,
    /// The imported host memory, if it was imported.
    host: Option<BufferRef>,
    /// Allocated so that it can be exported.
    exportable: bool,
    gpu: Arc<Gpu>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the buffers that it is bound to own a reference to it, and so does what is in flight: no use is left.
        unsafe { self.gpu.device.free_memory(self.memory, None) }
        self.gpu.live.memories.fetch_sub(1, Ordering::Relaxed);
        if self.host.take().is_some() {
            self.gpu.live.imports.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Host memory of the driver, mapped as long as this exists.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    len: NonZeroUsize,
    buffer: Arc<Buffer>,
}

impl HostMemory {
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// True for memory of this device's.
    pub fn is_of(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(&self.buffer.gpu, gpu)
    }
}

// SAFETY: it is plain memory, not tied to a thread; Vulkan's objects are not either.
unsafe impl Send for HostMemory {}
// SAFETY: it gives only its address.
unsafe impl Sync for HostMemory {}

// SAFETY: the memory is mapped until it is freed, which is after the drop of the buffer that this owns. Drivers
// initialise what they map, or the system does. The heap that it is made for asks for whole pages; the start was
// checked.
unsafe impl DriverMemory for HostMemory {
    fn span(&self) -> (NonNull<u8>, NonZeroUsize) {
        (self.start, self.len)
    }
}

/// A buffer with its memory; or a sparse one, whose memory others keep.
pub(crate) struct Buffer {
    buffer: vk::Buffer,
    len: u64,
    memory: Option<Arc<Memory>>,
    window: Option<Window>,
    foreign: Option<Foreign>,
    gpu: Arc<Gpu>,
}

/// Of a buffer whose memory other devices and processes may use: the last submission that used it, as a timeline and
/// the value that this reaches at its end. Between submissions the foreign queue family owns the memory, also before
/// the first one, so that it can be exported at any time.
pub(crate) type Foreign = Mutex<Option<(Arc<Timeline>, u64)>>;

/// Where the first byte of a buffer is mapped, as long as its memory exists.
struct Window {
    start: NonNull<u8>,
    cached: bool,
}

// SAFETY: it is the address of plain memory, not tied to a thread.
unsafe impl Send for Window {}
// SAFETY: what is read and written there goes through `VolatileSlice`s, which are made for sharing.
unsafe impl Sync for Window {}

impl Buffer {
    fn requirements(&self) -> vk::MemoryRequirements {
        // SAFETY: the buffer exists.
        unsafe { self.gpu.device.get_buffer_memory_requirements(self.buffer) }
    }

    /// Gives it its memory.
    ///
    /// # Safety
    /// It has none, and is not sparse. The memory is of a type that the buffer permits, as long as it needs, and not
    /// dedicated to another buffer.
    unsafe fn bind(mut self, memory: Memory) -> Result<Self, CallError> {
        // SAFETY: of the caller; the memory is owned, so no other buffer has it.
        self.gpu.call("vkBindBufferMemory", |d| unsafe { d.bind_buffer_memory(self.buffer, memory.memory, 0) })?;
        self.memory = Some(Arc::new(memory));
        Ok(self)
    }

    /// Maps its memory, of this type.
    ///
    /// # Safety
    /// The type is that of the memory, and host-visible.
    unsafe fn map(&mut self, kind: u32) -> Result<NonNull<u8>, Error> {
        let unmapped = self.memory.as_ref().filter(|_| self.window.is_none());
        let memory = unmapped.ok_or(Error::NoMemoryType("a buffer without memory"))?.memory;
        let (flags, len) = (vk::MemoryMapFlags::empty(), self.len);
        // SAFETY: the memory is host-visible, which the caller says, not mapped yet as was checked, and at least as
        // long as the buffer; it is this buffer's alone.
        let start = self.gpu.call("vkMapMemory", |d| unsafe { d.map_memory(memory, 0, len, flags) })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(Error::NoMemoryType("mapped memory"))?;
        let flags = self.gpu.info.memory_types[kind as usize].flags;
        self.window = Some(Window { start, cached: flags.contains(vk::MemoryPropertyFlags::HOST_CACHED) });
        Ok(start)
    }

    /// Bytes of it that are mapped into this process; `None` where they are not, or, for reading, where the
    /// processor does not cache them and would take far longer than the GPU. They are coherent with the GPU, but may
    /// not be with other devices: `None` for foreign buffers.
    pub fn as_volatile_slice(&self, at: u64, len: u64, reads: bool) -> Option<VolatileSlice<'_>> {
        let window = self.window.as_ref().filter(|window| self.foreign.is_none() && (window.cached || !reads))?;
        at.checked_add(len).filter(|end| *end <= self.len)?;
        let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
        // SAFETY: the range lies in the buffer, as was just checked, all of which is mapped until its memory is freed,
        // which this owns; nobody has a reference into memory of the GPU.
        Some(unsafe { VolatileSlice::from_raw(window.start.add(at), len) })
    }

    pub fn handle(&self) -> vk::Buffer {
        self.buffer
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Its last user, if other devices may use it and the driver transfers ownership.
    pub fn foreign(&self) -> Option<&Foreign> {
        self.foreign.as_ref()
    }

    /// The memory; `None` for a sparse buffer.
    pub fn memory(&self) -> Option<&Arc<Memory>> {
        self.memory.as_ref()
    }

    /// Its address for programs on the GPU; `None` where there is none.
    pub fn device_address(&self) -> Option<u64> {
        let info = vk::BufferDeviceAddressInfo::default().buffer(self.buffer);
        // SAFETY: the buffer exists, and was made for this where the GPU has addresses; of imported ones, those of host
        // memory were not.
        let address = || unsafe { self.gpu.device.get_buffer_device_address(&info) };
        let imported = self.memory.as_ref().is_some_and(|m| m.host.is_some());
        (self.gpu.info.device_address && !imported).then(address)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: what is in flight owns a reference to each buffer that it uses: nothing uses this one.
        unsafe { self.gpu.device.destroy_buffer(self.buffer, None) }
        // After the buffer.
        self.memory = None;
        self.gpu.live.buffers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A timeline semaphore.
pub(crate) struct Timeline {
    semaphore: vk::Semaphore,
    gpu: Arc<Gpu>,
}

impl Timeline {
    /// At 0.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CallError> {
        let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the device has timeline semaphores.
        let semaphore = gpu.call("vkCreateSemaphore", |d| unsafe { d.create_semaphore(&info, None) })?;
        gpu.live.semaphores.fetch_add(1, Ordering::Relaxed);
        Ok(Self { semaphore, gpu: gpu.clone() })
    }

    pub fn handle(&self) -> vk::Semaphore {
        self.semaphore
    }

    /// The value that it has reached.
    pub fn value(&self) -> Result<u64, CallError> {
        // SAFETY: the semaphore exists.
        self.gpu.call("vkGetSemaphoreCounterValue", |d| unsafe { d.get_semaphore_counter_value(self.semaphore) })
    }

    /// Waits until it has reached `value`; false when `timeout` passed before.
    pub fn wait(&self, value: u64, timeout: Duration) -> Result<bool, CallError> {
        let (semaphores, values) = ([self.semaphore], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the semaphore exists.
        let waited = self.gpu.call("vkWaitSemaphores", |d| unsafe { d.wait_semaphores(&info, ns) });
        match waited {
            Err(e) if e.result == vk::Result::TIMEOUT => Ok(false),
            waited => waited.map(|()| true),
        }
    }

    /// The same after an error: asks again while there are more, for a second. `vkQueueWaitIdle` knows no timeout, and
    /// a stuck GPU never answers it.
    ///
    /// # Errors
    /// The device is lost.
    pub fn wait_despite_errors(&self, value: u64, timeout: Duration) -> Result<bool, CallError> {
        for _ in 0..100 {
            match self.wait(value, timeout) {
                Err(e) if e.is_lost() => return Err(e),
                Err(_) if self.value().is_ok_and(|reached| reached >= value) => return Ok(true),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
                waited => return waited,
            }
        }
        Ok(false)
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // SAFETY: each user keeps the semaphore until its signal or wait has completed.
        unsafe { self.gpu.device.destroy_semaphore(self.semaphore, None) }
        self.gpu.live.semaphores.fetch_sub(1, Ordering::Relaxed);
    }
}
