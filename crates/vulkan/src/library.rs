//! The Vulkan loader, an instance, and the GPUs that it finds.
//!
//! `unsafe` because every call of Vulkan is. The instance outlives every object that is made of it, because all of them
//! own a reference to it.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use ash::vk::ExternalMemoryFeatureFlags as External;
use ash::{Entry, Instance, ext, khr, vk};

use crate::error::{CallError, Error};
use crate::fault::Faults;
use crate::options::VulkanOptions;

/// dma-bufs.
pub(crate) const DMA_BUF: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::DMA_BUF_EXT;

/// Sparse buffers, whose memory other buffers have too: the one that it was allocated for, and other ranges that it is
/// bound to.
pub(crate) const SPARSE: vk::BufferCreateFlags = vk::BufferCreateFlags::from_raw(
    vk::BufferCreateFlags::SPARSE_BINDING.as_raw()
        | vk::BufferCreateFlags::SPARSE_RESIDENCY.as_raw()
        | vk::BufferCreateFlags::SPARSE_ALIASED.as_raw(),
);

/// The use of buffers that are copied, of device memory where programs have addresses of it.
pub(crate) fn copied(addressed: bool) -> vk::BufferUsageFlags {
    let copied = vk::BufferUsageFlags::TRANSFER_SRC | vk::BufferUsageFlags::TRANSFER_DST;
    match addressed {
        true => copied | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS | vk::BufferUsageFlags::STORAGE_BUFFER,
        false => copied,
    }
}

/// True when a GPU binds sparse buffers, also memory that other buffers have ([`SPARSE`]).
fn binds_sparse(features: &vk::PhysicalDeviceFeatures) -> bool {
    [features.sparse_binding, features.sparse_residency_buffer, features.sparse_residency_aliased] == [vk::TRUE; 3]
}

/// True when memory of device buffers, of these features, can also be exported while it is bound to sparse buffers of
/// those: neither may want the memory for itself.
fn shares_with_sparse(plain: External, sparse: External) -> bool {
    (plain & sparse).contains(External::EXPORTABLE) && !(plain | sparse).contains(External::DEDICATED_ONLY)
}

/// The loader and an instance.
pub(crate) struct Library {
    // Unloaded last: fields are dropped in this order, after `drop` has destroyed the instance.
    instance: Instance,
    faults: Arc<Faults>,
    #[cfg(test)]
    watch: Option<crate::tests::layers::Watch>,
    _entry: Entry,
}

impl Library {
    /// Loads Vulkan.
    pub fn load(options: &VulkanOptions, faults: Arc<Faults>) -> Result<Arc<Self>, Error> {
        let entry = loader(&faults)?;
        #[cfg(test)]
        let (instance, watch) = crate::tests::layers::create_watched(&entry, options.validation.as_ref(), &faults)?;
        #[cfg(not(test))]
        let instance = create(&entry, vk::InstanceCreateInfo::default(), &faults)?;
        let _ = options;
        Ok(Arc::new(Self {
            instance,
            faults,
            #[cfg(test)]
            watch,
            _entry: entry,
        }))
    }

    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// True when the validation layers watch.
    #[cfg(test)]
    pub fn is_validated(&self) -> bool {
        self.watch.is_some()
    }

    /// The GPUs, in the order in which the loader lists them.
    pub fn gpus(self: &Arc<Self>) -> Result<Vec<Found>, Error> {
        // SAFETY: the instance exists as long as `self`.
        let list = || unsafe { self.instance.enumerate_physical_devices() };
        let found = match self.faults.call("vkEnumeratePhysicalDevices", list) {
            Err(CallError { result: vk::Result::ERROR_INITIALIZATION_FAILED, .. }) => Vec::new(),
            found => found?,
        };
        if found.is_empty() {
            return Err(Error::NoDriver);
        }
        let of = |(index, gpu)| Ok(Found { library: self.clone(), gpu, info: self.info(index, gpu)? });
        found.into_iter().enumerate().map(of).collect()
    }

    fn info(&self, index: usize, gpu: vk::PhysicalDevice) -> Result<GpuInfo, Error> {
        // SAFETY: the physical device is one of this instance.
        let list = || unsafe { self.instance.enumerate_device_extension_properties(gpu) };
        let extensions = self.faults.call("vkEnumerateDeviceExtensionProperties", list)?;
        let has = |name: &CStr| extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
        // SAFETY: as above.
        let api = unsafe { self.instance.get_physical_device_properties(gpu) }.api_version;
        let (mut id, mut driver) =
            (vk::PhysicalDeviceIDProperties::default(), vk::PhysicalDeviceDriverProperties::default());
        let (mut sizes, mut more) =
            (vk::PhysicalDeviceMaintenance3Properties::default(), vk::PhysicalDeviceMaintenance4Properties::default());
        let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        // An older one is only listed.
        let (modern, has_1_3) = (api >= vk::API_VERSION_1_2, api >= vk::API_VERSION_1_3);
        let host_import = has(ext::external_memory_host::NAME);
        let mut properties = vk::PhysicalDeviceProperties2::default();
        if modern {
            properties = properties.push_next(&mut id).push_next(&mut sizes).push_next(&mut driver);
        }
        if has_1_3 {
            properties = properties.push_next(&mut more);
        }
        if host_import {
            properties = properties.push_next(&mut host);
        }
        let mut vulkan12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default();
        if modern {
            features = features.push_next(&mut vulkan12);
        }
        // SAFETY: the physical device is one of this instance, whose version has both calls; every structure of the
        // chains belongs to a version or an extension that the device has.
        unsafe {
            self.instance.get_physical_device_properties2(gpu, &mut properties);
            self.instance.get_physical_device_features2(gpu, &mut features);
        }
        let (limits, features) = (properties.properties.limits, features.features);
        let properties = properties.properties;
        // SAFETY: as above.
        let (memory, families) = unsafe {
            (
                self.instance.get_physical_device_memory_properties(gpu),
                self.instance.get_physical_device_queue_family_properties(gpu),
            )
        };
        let text = |c: Result<&CStr, _>| c.unwrap_or_default().to_string_lossy().into_owned();
        let sparse = binds_sparse(&features);
        let device_address = vulkan12.buffer_device_address == vk::TRUE;
        let dma_bufs = modern && has(ext::external_memory_dma_buf::NAME) && has(khr::external_memory_fd::NAME);
        // The driver's support for dma-bufs of such buffers.
        let shares = |usage, flags| {
            let mut shared = vk::ExternalBufferProperties::default();
            if dma_bufs {
                let buffers = vk::PhysicalDeviceExternalBufferInfo::default().usage(usage).flags(flags);
                let buffers = buffers.handle_type(DMA_BUF);
                // SAFETY: as above; the version has the call.
                unsafe { self.instance.get_physical_device_external_buffer_properties(gpu, &buffers, &mut shared) };
            }
            shared.external_memory_properties.external_memory_features
        };
        let plain = vk::BufferCreateFlags::empty();
        let of_device = copied(device_address);
        let (imports, exports) = (shares(copied(false), plain), shares(of_device, plain));
        let heap = |h: &vk::MemoryHeap| MemoryHeap {
            bytes: h.size,
            device_local: h.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL),
        };
        Ok(GpuInfo {
            index,
            name: text(properties.device_name_as_c_str()),
            kind: kind(properties.device_type),
            device_type: properties.device_type,
            uuid: if modern { id.device_uuid } else { [0; 16] },
            driver: format!("{} {}", text(driver.driver_name_as_c_str()), text(driver.driver_info_as_c_str())),
            api: (vk::api_version_major(api), vk::api_version_minor(api), vk::api_version_patch(api)),
            dma_buf_import: imports.contains(External::IMPORTABLE),
            dma_buf_export: exports.contains(External::EXPORTABLE),
            lends: exports.contains(External::EXPORTABLE | External::IMPORTABLE)
                && has(ext::queue_family_foreign::NAME),
            dedicated_export: exports.contains(External::DEDICATED_ONLY),
            foreign_queues: dma_bufs && has(ext::queue_family_foreign::NAME),
            sparse_export: sparse && shares_with_sparse(exports, shares(of_device, SPARSE)),
            host_import: host_import.then_some(host.min_imported_host_pointer_alignment.max(1)),
            memory_budget: modern && has(ext::memory_budget::NAME),
            timeline: vulkan12.timeline_semaphore == vk::TRUE,
            device_address,
            sparse: sparse.then_some(limits.sparse_address_space_size),
            max_allocation: if modern { sizes.max_memory_allocation_size } else { 1 << 30 },
            max_allocations: limits.max_memory_allocation_count,
            max_buffer: if has_1_3 { more.max_buffer_size } else { u64::MAX },
            heaps: memory.memory_heaps_as_slice().iter().map(heap).collect(),
            families: families.iter().map(|f| (f.queue_flags, f.queue_count)).collect(),
            memory_types: memory
                .memory_types_as_slice()
                .iter()
                .map(|t| MemoryType { flags: t.property_flags, heap: t.heap_index })
                .collect(),
        })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        #[cfg(test)]
        drop(self.watch.take());
        // SAFETY: whatever was made of the instance owned a reference to this and is gone.
        unsafe { self.instance.destroy_instance(None) }
    }
}

/// A GPU of an instance, with what it says of itself.
///
/// Invariant: the handle is one of the instance, and the driver has said what `info` says, or more. Made by
/// [`Library::gpus`] alone; methods only take away.
pub(crate) struct Found {
    library: Arc<Library>,
    gpu: vk::PhysicalDevice,
    info: GpuInfo,
}

impl Found {
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// Has buffers and allocations of at most this many bytes.
    pub fn limit(&mut self, largest: u64) {
        let info = &mut self.info;
        (info.max_buffer, info.max_allocation) = (info.max_buffer.min(largest), info.max_allocation.min(largest));
    }

    /// For tests: imports memory at multiples of `align` at least, exports memory of `dedicated` allocations alone, and
    /// has at most `addresses` bytes of them for sparse buffers, unless that is 0.
    #[cfg(test)]
    pub fn restrict(&mut self, align: u64, dedicated: bool, addresses: u64) {
        let info = &mut self.info;
        info.host_import = info.host_import.map(|has| has.max(align));
        info.dedicated_export |= dedicated;
        info.sparse_export &= !dedicated;
        info.sparse = info.sparse.map(|bytes| if addresses > 0 { bytes.min(addresses) } else { bytes });
    }

    /// The instance, the handle, and what the driver has said.
    pub fn into_parts(self) -> (Arc<Library>, vk::PhysicalDevice, GpuInfo) {
        (self.library, self.gpu, self.info)
    }
}

/// The loader, with an instance that is never destroyed, so that drivers stay loaded as long as the process runs:
/// NVIDIA's (580.159) cannot be loaded again and again; after some tens of devices there was no driver any more.
static LEAKED: Mutex<Option<Entry>> = Mutex::new(None);

fn loader(faults: &Faults) -> Result<Entry, Error> {
    let mut loader = LEAKED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(entry) = &*loader {
        return Ok(entry.clone());
    }
    // SAFETY: the system's Vulkan loader is what it says: its initialisation has no requirements.
    let entry = unsafe { Entry::load() }.map_err(|e| Error::NoLoader(e.to_string()))?;
    let _for_ever = create(&entry, vk::InstanceCreateInfo::default(), faults)?;
    *loader = Some(entry.clone());
    Ok(entry)
}

/// Creates an instance, which the caller destroys.
pub(crate) fn create(entry: &Entry, info: vk::InstanceCreateInfo<'_>, faults: &Faults) -> Result<Instance, Error> {
    let application = vk::ApplicationInfo::default()
        .application_name(c"dmalane")
        .engine_name(c"dmalane")
        .api_version(vk::API_VERSION_1_3);
    let info = info.application_info(&application);
    // SAFETY: the structures and the names live until the call returns.
    faults.call("vkCreateInstance", || unsafe { entry.create_instance(&info, None) }).map_err(|e| match e.result {
        vk::Result::ERROR_INCOMPATIBLE_DRIVER => Error::NoDriver,
        _ => e.into(),
    })
}

fn kind(of: vk::PhysicalDeviceType) -> &'static str {
    match of {
        vk::PhysicalDeviceType::DISCRETE_GPU => "discrete GPU",
        vk::PhysicalDeviceType::INTEGRATED_GPU => "integrated GPU",
        vk::PhysicalDeviceType::VIRTUAL_GPU => "virtual GPU",
        vk::PhysicalDeviceType::CPU => "software GPU",
        _ => "GPU of another kind",
    }
}

/// Not a GPU whose memory the host sees through a large BAR: writes there were never timed.
fn unified(of: vk::PhysicalDeviceType) -> Option<&'static str> {
    match of {
        vk::PhysicalDeviceType::INTEGRATED_GPU => Some("an integrated GPU"),
        vk::PhysicalDeviceType::CPU => Some("a software GPU"),
        _ => None,
    }
}

/// A memory of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryHeap {
    /// Bytes.
    pub bytes: u64,
    /// True for memory of the GPU, false for host memory that it uses.
    pub device_local: bool,
}

/// A kind of memory of a heap.
#[derive(Clone, Copy)]
pub(crate) struct MemoryType {
    pub flags: vk::MemoryPropertyFlags,
    pub heap: u32,
}

/// Properties of a GPU that are known before it is opened.
#[derive(Clone)]
pub struct GpuInfo {
    /// Its number among the GPUs of this machine.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// "discrete GPU", "software GPU" and so on.
    pub kind: &'static str,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// The driver and its version.
    pub driver: String,
    /// The version of Vulkan: major, minor, patch.
    pub api: (u32, u32, u32),
    /// The alignment in bytes of host memory that it can import; `None` where it cannot.
    pub host_import: Option<u64>,
    /// It can import dma-bufs (`VK_EXT_external_memory_dma_buf`).
    pub dma_buf_import: bool,
    /// It can export its memory as dma-bufs.
    pub dma_buf_export: bool,
    /// Only memory that was allocated for one buffer, which is never bound to sparse ones.
    pub dedicated_export: bool,
    /// Also memory that is bound to sparse buffers.
    pub sparse_export: bool,
    /// Bytes of address space for sparse buffers; `None` without sparse binding.
    pub sparse: Option<u64>,
    /// Shaders can use addresses of buffers.
    pub device_address: bool,
    /// Bytes of one allocation at most.
    pub max_allocation: u64,
    /// Allocations at one time at most.
    pub max_allocations: u32,
    /// Bytes of one buffer at most.
    pub max_buffer: u64,
    /// Its memories.
    pub heaps: Vec<MemoryHeap>,
    /// Queues: what each family can do, and how many it has.
    pub(crate) families: Vec<(vk::QueueFlags, u32)>,
    pub(crate) memory_types: Vec<MemoryType>,
    pub(crate) device_type: vk::PhysicalDeviceType,
    /// Dma-bufs are acquired from other devices and released to them (`VK_EXT_queue_family_foreign`).
    pub(crate) foreign_queues: bool,
    /// Its memory crosses processes as dma-bufs, and so does its ownership.
    pub(crate) lends: bool,
    pub(crate) timeline: bool,
    pub(crate) memory_budget: bool,
}

impl GpuInfo {
    /// The UUID as text: 8-4-4-4-12 hexadecimal digits.
    pub fn uuid(&self) -> String {
        let mut text = String::new();
        for (i, byte) in self.uuid.iter().enumerate() {
            if [4, 6, 8, 10].contains(&i) {
                text.push('-');
            }
            text += &format!("{byte:02x}");
        }
        text
    }

    /// Reason why it cannot be opened, if there is one.
    pub fn missing(&self) -> Option<&'static str> {
        let (major, minor, _) = self.api;
        match () {
            () if (major, minor) < (1, 2) => Some("its driver has no Vulkan 1.2: update the driver"),
            () if !self.timeline => Some("its driver has no timeline semaphores: update the driver"),
            () if !self.heaps.iter().any(|h| h.device_local) => Some("it has no memory of its own"),
            () => None,
        }
    }

    /// Why it has no memory apart from the host's; `None` for a GPU that has.
    pub fn unified(&self) -> Option<&'static str> {
        unified(self.device_type)
    }

    /// Processors of this machine that it works on: all of them for a GPU in software, none for another one.
    pub fn processors(&self) -> usize {
        match self.device_type {
            vk::PhysicalDeviceType::CPU => std::thread::available_parallelism().map_or(1, |n| n.get()),
            _ => 0,
        }
    }

    /// Its queues, for people: "2 transfer, 16 graphics".
    pub fn queues(&self) -> String {
        let family = |(flags, count): &(vk::QueueFlags, u32)| {
            let what = match () {
                () if flags.contains(vk::QueueFlags::GRAPHICS) => "graphics",
                () if flags.contains(vk::QueueFlags::COMPUTE) => "compute",
                () if flags.contains(vk::QueueFlags::TRANSFER) => "transfer",
                () => "other",
            };
            format!("{count} {what}")
        };
        self.families.iter().map(family).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for GpuInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.name, self.kind, self.driver)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_dedicated_allocations_is_not_bound_to_sparse_buffers() {
        let (exports, dedicated) = (External::EXPORTABLE, External::EXPORTABLE | External::DEDICATED_ONLY);
        assert!(shares_with_sparse(exports, exports | External::IMPORTABLE));
        for (plain, sparse) in [(dedicated, exports), (exports, dedicated), (exports, External::IMPORTABLE)] {
            assert!(!shares_with_sparse(plain, sparse), "{}, {}", plain.as_raw(), sparse.as_raw());
        }
    }

    #[test]
    fn sparse_buffers_share_memory_with_others() {
        assert!(SPARSE.contains(vk::BufferCreateFlags::SPARSE_ALIASED));
        let of = |binding, residency, aliased| {
            let features = vk::PhysicalDeviceFeatures::default().sparse_binding(binding);
            features.sparse_residency_buffer(residency).sparse_residency_aliased(aliased)
        };
        assert!(binds_sparse(&of(true, true, true)));
        for features in [of(false, true, true), of(true, false, true), of(true, true, false)] {
            assert!(!binds_sparse(&features), "the specification asks for all three");
        }
    }

    #[test]
    fn memory_is_unified_where_the_gpu_has_none_of_its_own() {
        for of in [vk::PhysicalDeviceType::INTEGRATED_GPU, vk::PhysicalDeviceType::CPU] {
            assert!(unified(of).is_some());
        }
        for of in [vk::PhysicalDeviceType::DISCRETE_GPU, vk::PhysicalDeviceType::VIRTUAL_GPU] {
            assert!(unified(of).is_none());
        }
    }
}
