//! Open devices: memory, queues driven as one, and the files that are loaded onto them.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fs::Metadata;
use std::ops::Index;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, PageSize, PhysAddr, Segment, SgIndex, SgTable, Span};
use dmalane_device::{
    AddressSpace, AddressSpaceKind, BackingFiles, Bounce, Counters, Device, DeviceInfo, DeviceMemory, DlpackDevice,
    IoError, Lending, LentMemory, MemoryError, Placement, Region, areas,
};
use dmalane_dma::{Forked, Heap, OfProcess, PageBacking, Registrar};
use dmalane_queue::{AddressPolicy, BalancePolicy, DeviceAddr, DeviceQueue, Policy, QueueChoice, Split};
use dmalane_vm::{BindRequest, Bo};

use crate::channels::Channels;
use crate::clock::Clocks;
use crate::container::{Model, Tensor};
use crate::error::Error;
use crate::fill::{Digest, FillOptions, Job, Staging};
use crate::kept::RegisteredFiles;
use crate::layout::{ALIGN, Layout, PAGE, Place, TensorAlign, TensorRun, VaRange};
use crate::open_file::OpenFile;
use crate::report::Report;
use crate::stage::Stage;
use crate::timeline::Track;

/// Settings for driving a device.
#[derive(Clone)]
pub struct DriveOptions {
    /// Which queues move the bytes: those with an entry, or all.
    pub queues: QueueChoice,
    /// Where staging buffers come from; `None` for the best heap of the device's registrar.
    pub heap: Option<Arc<dyn Heap>>,
    /// How tensors are aligned, at least: a device may need more.
    pub align: TensorAlign,
    /// Settings of each load. A staging buffer has at most 1 GiB; the timeout is also that of one blocking operation.
    pub fill: FillOptions,
}

impl Default for DriveOptions {
    /// All queues, the registrar's heap, 16 MiB per staging buffer, reads of any length, hashing.
    fn default() -> Self {
        let fill = FillOptions { chunk: 16 << 20, block: u64::MAX, checksum: true, ..FillOptions::default() };
        Self { queues: QueueChoice::default(), heap: None, align: TensorAlign::default(), fill }
    }
}

/// The queues of a device, driven as one.
pub type JoinedQueue = Split<Box<DeviceQueue>>;

/// A device that is open: bytes can be written to it and read from it, and files loaded onto it.
///
/// ```
/// use dmalane_device::RamDevice;
/// use dmalane_load::{DriveOptions, OpenDevice};
///
/// let mut device = OpenDevice::new(Box::new(RamDevice::new(1 << 20)?), DriveOptions::default())?;
/// let at = device.memory_mut().reserve(5)?.first();
/// device.write(at, b"hello")?;
/// let mut back = [0; 5];
/// device.read(at, &mut back)?;
/// assert_eq!(&back, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct OpenDevice {
    pub(crate) queue: JoinedQueue,
    /// Kept files whose bytes it reads where they are.
    registered: OfProcess<RegisteredFiles>,
    pub(crate) device: OfProcess<Box<dyn Device>>,
    pub(crate) info: DeviceInfo,
    registrar: Arc<dyn Registrar>,
    memory: DeviceMemory,
    pub(crate) options: DriveOptions,
    /// Records its channels, if timelines are recorded.
    pub(crate) channels: Option<Channels>,
    /// Carries the bytes of loads.
    pub(crate) staging: Staging,
    pub(crate) bounce: Option<Bounce>,
    /// Tells this process's devices apart.
    number: u64,
    abandoned: u64,
    /// Places of its memory that loads have used.
    pub(crate) used: Used,
    next_bo: u64,
    /// Stops a load when it is set.
    pub(crate) stop: Option<Arc<AtomicBool>>,
}

/// Ranges of addresses, apart from each other: the first of each, and the one behind its last.
#[derive(Clone, Default)]
pub(crate) struct Used(BTreeMap<u64, u64>);

impl Used {
    /// Adds a range, and returns how many of its addresses are new.
    fn add(&mut self, first: u64, len: u64) -> u64 {
        let end = first.saturating_add(len);
        if end == first {
            return 0;
        }
        let (mut whole, mut known) = ((first, end), 0);
        while let Some((from, to)) = self.0.range(..=end).next_back().map(|(from, to)| (*from, *to))
            && to >= first
        {
            self.0.remove(&from);
            known += to.min(end) - from.max(first);
            whole = (whole.0.min(from), whole.1.max(to));
        }
        self.0.insert(whole.0, whole.1);
        end - first - known
    }
}

static DEVICES: AtomicU64 = AtomicU64::new(0);

/// Files on the device. `loaded["name"]` is a tensor.
#[derive(Debug)]
pub struct Loaded {
    /// The files, in the order given.
    pub files: Vec<LoadedFile>,
    /// Times and bytes of the load.
    pub report: Report,
}

impl Loaded {
    /// The tensor of this name, of the first file that has one.
    pub fn get(&self, name: &str) -> Option<&LoadedTensor> {
        self.files.iter().find_map(|file| file.get(name))
    }

    /// Says in the report that every tensor was found equal to its file, and how long that took.
    pub fn set_verified(&mut self, wall: Duration) {
        let bytes = self.files.iter().flat_map(|file| &file.model.tensors).map(|tensor| tensor.len).sum();
        self.report.verified = Some(wall);
        for stage in self.report.stages.iter_mut().filter(|of| of.stage == Stage::Verify) {
            (stage.busy, stage.wall, stage.bytes) = (wall, wall, bytes);
        }
    }
}

impl Index<&str> for Loaded {
    type Output = LoadedTensor;

    /// # Panics
    /// When no file has a tensor of this name.
    fn index(&self, name: &str) -> &LoadedTensor {
        self.get(name).unwrap_or_else(|| panic!("no tensor is called {name:?}"))
    }
}

/// A file on the device.
#[derive(Debug)]
pub struct LoadedFile {
    /// Where it came from.
    pub path: PathBuf,
    /// Its tensors.
    pub model: Arc<Model>,
    /// XXH3-64 of all bytes of the file in order, as `xxhsum -H3` prints it, if it was hashed
    /// ([`FillOptions::checksum`]).
    pub checksum: Option<u64>,
    /// The hashes of its regions, where the options of the device have any.
    pub(crate) digests: Vec<Digest>,
    /// The buffer object that holds its tensors; `None` when they have no bytes, or another process has lent them.
    pub bo: Option<Arc<Bo>>,
    /// Where it lies in device virtual memory, gaps included: one range, or several on a device whose longest is
    /// shorter than the file. Each tensor lies in one.
    pub ranges: Vec<Span<DeviceVa>>,
    pub(crate) layout: Layout,
    tensors: Vec<LoadedTensor>,
    /// The numbers of the tensors, sorted by name, once one is looked for.
    by_name: OnceLock<Vec<u32>>,
    /// The number of the device that it is on.
    device: u64,
    lent: Option<Lent>,
}

/// Memory of a file that is lent, with a descriptor by which its lender counts who has it.
pub(crate) type Lent = (LentMemory, Arc<OwnedFd>);

/// A tensor on the device.
#[derive(Clone, Debug)]
pub struct LoadedTensor {
    /// Name, type, shape and place in the file.
    pub tensor: Arc<Tensor>,
    /// Where it is bound; `None` for a tensor of no bytes. As long as the tensor.
    pub va: Option<Span<DeviceVa>>,
}

impl LoadedFile {
    pub(crate) fn new(path: PathBuf, model: Arc<Model>, layout: Layout, device: u64) -> Self {
        let (bo, ranges, tensors, by_name) = (None, Vec::new(), Vec::new(), OnceLock::new());
        let (checksum, digests, lent) = (None, Vec::new(), None);
        Self { path, model, checksum, digests, bo, ranges, layout, tensors, by_name, device, lent }
    }

    /// Whether another process has lent its memory, which is to be read alone.
    pub fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// Sets the ranges, and where the tensors lie in them.
    fn place_at(&mut self, ranges: Vec<Span<DeviceVa>>) {
        self.ranges = ranges;
        let places = self.model.tensors.iter().zip(&self.layout.places);
        self.tensors = places
            .map(|(tensor, place)| {
                let range = self.layout.address(place).and_then(|(range, at)| Some((self.ranges.get(range)?, at)));
                let va = range.and_then(|(range, at)| Span::new(range.first().checked_add(at)?, tensor.len));
                LoadedTensor { tensor: tensor.clone(), va }
            })
            .collect();
    }

    /// Makes the tensors of a run visible at their device virtual addresses.
    pub(crate) fn bind(&self, run: usize, space: &mut dyn AddressSpace) -> Result<(), Error> {
        let TensorRun { bo_offset: offset, bound: len, range, va_offset, .. } = self.layout.runs[run];
        let va = self.ranges.get(range).and_then(|range| range.first().checked_add(va_offset));
        let (Some(bo), Some(va)) = (self.bo.clone(), va) else { return Ok(()) };
        space.apply(&[BindRequest::Bind { va, bo, offset, len, access: Access::READ }]).map_err(|source| {
            let first = self.layout.places.partition_point(|place| (place.run as usize) < run);
            let tensor = self.model.tensors.get(first).map(|tensor| tensor.name.clone());
            Error::Bind { path: self.path.clone(), tensor, source }
        })
    }

    /// Bytes of device memory that it takes.
    pub fn device_bytes(&self) -> u64 {
        self.layout.bo_len
    }

    /// The tensors in the order of their bytes.
    pub fn tensors(&self) -> std::slice::Iter<'_, LoadedTensor> {
        self.tensors.iter()
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&LoadedTensor> {
        let of = |i: &u32| &*self.model.tensors[*i as usize].name;
        let by_name = self.by_name.get_or_init(|| {
            let mut all: Vec<u32> = (0..self.model.tensors.len() as u32).collect();
            all.sort_by_key(of);
            all
        });
        let found = by_name.binary_search_by_key(&name, of).ok()?;
        self.tensors.get(by_name[found] as usize)
    }

    /// The tensor at `index`.
    ///
    /// # Panics
    /// When there are not that many.
    pub fn tensor(&self, index: usize) -> &LoadedTensor {
        &self.tensors[index]
    }
}

impl OpenDevice {
    /// Takes the queues of a device and drives them as one. It has nothing loaded.
    ///
    /// # Errors
    /// [`Error::NoQueue`] for a queue that it does not have, or none at all; [`Error::MixedQueues`].
    pub fn new(mut device: Box<dyn Device>, options: DriveOptions) -> Result<Self, Error> {
        let choice: Vec<usize> = options.queues.entries().iter().flatten().copied().collect();
        if !choice.is_empty() && choice.len() < options.queues.entries().len() {
            return Err(Error::MixedQueues);
        }
        let (info, queues, registrar) = (device.info(), device.take_queues(), device.registrar());
        let has = queues.len();
        if let Some(wanted) = choice.iter().copied().chain(queues.is_empty().then_some(0)).find(|q| *q >= has) {
            return Err(Error::NoQueue { wanted, has });
        }
        let policy: Box<dyn Policy> = match &choice[..] {
            [] if has == 1 => Box::new(AddressPolicy::only(0)),
            // Queues that take turns must not be balanced: what they seem to differ in is only who is looked at first.
            [] if !info.concurrent => Box::new(AddressPolicy::new(areas(device.regions()))),
            [] => Box::new(BalancePolicy::new(areas(device.regions()))),
            list => Box::new(BalancePolicy::only(list)),
        };
        let channels = options.fill.timeline.then(Channels::default);
        let policy = match &channels {
            Some(channels) => channels.of(policy),
            None => policy,
        };
        let chunk = PageSize::SIZE_4K.round_up(options.fill.chunk.max(1)).unwrap_or(1 << 30).min(1 << 30);
        let heap = options.heap.clone().unwrap_or_else(|| registrar.heap(None));
        let number = DEVICES.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            queue: Split::new(queues, policy),
            registered: OfProcess::new(RegisteredFiles::of(number)),
            info,
            staging: Staging::new(heap, registrar.clone(), chunk),
            registrar,
            memory: device.memory(),
            device: OfProcess::new(device),
            options,
            channels,
            bounce: None,
            number,
            abandoned: 0,
            used: Used::default(),
            next_bo: 1,
            stop: None,
        })
    }

    /// The device's properties when it was opened.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// How it is driven, as it is now: the kernel may refuse later what it accepted at first.
    pub fn notes(&self) -> Vec<String> {
        self.device.info().notes
    }

    /// Its memory.
    pub fn regions(&self) -> &[Region] {
        self.device.regions()
    }

    /// Its free memory.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Its free memory, to allocate from. Memory of a load comes back with [`OpenDevice::unload`].
    pub fn memory_mut(&mut self) -> &mut DeviceMemory {
        &mut self.memory
    }

    /// The files behind a device that is made of files.
    pub fn backing_files(&self) -> Option<BackingFiles> {
        self.device.backing_files()
    }

    /// Refuses a file that is its memory. `meta` is asked for what the file is, where the device is made of files.
    ///
    /// # Errors
    /// [`Error::OwnMemory`]; [`Error::File`] where its own files cannot be looked at; that of `meta`.
    pub fn refuse_own(&self, path: &Path, meta: impl FnOnce() -> Result<Metadata, Error>) -> Result<(), Error> {
        let Some(own) = self.backing_files() else { return Ok(()) };
        let failed = |source| Error::File { path: path.to_owned(), what: "compare it with the device", source };
        let id = |meta: Metadata| (meta.dev(), meta.ino());
        let is_own = id(own.written.metadata().map_err(failed)?) == id(meta()?);
        if is_own { Err(Error::OwnMemory { path: path.to_owned() }) } else { Ok(()) }
    }

    /// Pins and maps host memory for it.
    pub fn registrar(&self) -> &Arc<dyn Registrar> {
        &self.registrar
    }

    /// The heap of the staging buffers.
    pub fn heap(&self) -> &dyn Heap {
        &*self.staging.heap
    }

    /// Where programs on the device see its memory.
    pub fn address_space(&mut self) -> &mut dyn AddressSpace {
        self.device.address_space()
    }

    /// Lets its queues use device memory that another library of this process has allocated ([`Device::borrow`]).
    ///
    /// # Errors
    /// As there.
    pub fn borrow(&self, memory: Span<CardAddr>) -> Result<Box<dyn Send>, Box<dyn StdError + Send + Sync>> {
        self.device.borrow(memory)
    }

    /// The device in the words of DLPack ([`Device::dlpack`]).
    pub fn dlpack(&self) -> Option<DlpackDevice> {
        self.device.dlpack()
    }

    /// Checks that this process opened it. Its queues refuse a child of `fork`, and loads do; nothing else does.
    ///
    /// # Errors
    /// [`Forked`].
    pub fn check_process(&self) -> Result<(), Forked> {
        self.device.check()
    }

    /// Its queues, driven as one. Operations of one's own must have ended before the next call of anything else here.
    pub fn queue_mut(&mut self) -> &mut JoinedQueue {
        &mut self.queue
    }

    /// Bytes that this machine has yet to find memory for where these places (address, bytes) are used, and the places
    /// that have memory after that; `None` unless the device's memory is of this machine and there from its first use
    /// on. Memory that cannot be counted on may still be there for a while, so it is asked for before it is used: a
    /// full cgroup kills its processes instead of returning an error.
    pub(crate) fn to_come(&self, places: impl Iterator<Item = (CardAddr, u64)>) -> Option<(u64, Used)> {
        let touched = self.device.counters().touched?;
        let mut used = self.used.clone();
        let all = self.memory.regions().fold(0, |sum: u64, region| sum.saturating_add(region.span.len()));
        let new = places.fold(0, |sum: u64, (at, len)| sum.saturating_add(used.add(at.bits(), len)));
        Some((new.min(all.saturating_sub(touched)), used))
    }

    /// Has the bytes of kept files transferred from where they are by this job, where the device reaches them. To
    /// register a file takes as long as to copy it: it is, once half of it is wanted.
    pub(crate) fn register_kept<'a>(
        &mut self,
        sources: impl Iterator<Item = &'a OpenFile>,
        job: &Job,
        clocks: &mut Clocks,
    ) {
        let Self { registered, registrar, staging, .. } = self;
        let mut wanted: Vec<(&OpenFile, u64)> = sources.map(|source| (source, 0)).collect();
        for extent in &job.extents {
            wanted.get_mut(extent.source).into_iter().for_each(|(_, sum)| *sum += extent.len);
        }
        let in_place = |(file, wanted): (&OpenFile, u64)| {
            let kept = file.kept.as_ref()?;
            registered.memory(kept, wanted >= kept.len / 2, &**registrar, clocks)
        };
        staging.in_place = wanted.into_iter().map(in_place).collect();
    }

    /// Counters of the device, where it has any.
    pub fn counters(&self) -> Counters {
        self.device.counters()
    }

    /// Makes loads and comparisons fail from now on, that under way too, as soon as `stop` is true; `None` for those
    /// that only end by themselves.
    pub fn stop_when(&mut self, stop: Option<Arc<AtomicBool>>) {
        self.stop = stop;
    }

    /// Records which of its queues moves what from now on, on a timeline that began at `epoch`, if a timeline was
    /// asked for when it was opened; [`OpenDevice::channel_tracks`] ends it.
    pub(crate) fn record_channels(&mut self, epoch: Instant) {
        if let Some(channels) = &self.channels {
            channels.begin(epoch);
        }
    }

    /// The recording since [`OpenDevice::record_channels`]: a track for each queue.
    pub(crate) fn channel_tracks(&mut self) -> Vec<Track> {
        self.channels.as_ref().map_or(Vec::new(), Channels::end)
    }

    /// Writes `bytes` to the device at `at`, and returns when they are there.
    ///
    /// # Errors
    /// [`IoError`]; some of the bytes may have been written.
    pub fn write(&mut self, at: impl Into<DeviceAddr>, bytes: &[u8]) -> Result<(), IoError> {
        let (bounce, queue) = self.bounce(bytes.len() as u64)?;
        bounce.write(queue, at.into(), bytes)
    }

    /// Reads from the device at `at` until `into` is full.
    ///
    /// # Errors
    /// [`IoError`]; some of the bytes may have been read.
    pub fn read(&mut self, at: impl Into<DeviceAddr>, into: &mut [u8]) -> Result<(), IoError> {
        let (bounce, queue) = self.bounce(into.len() as u64)?;
        bounce.read(queue, at.into(), into)
    }

    /// Copies `len` bytes within the device, which must not overlap; through the host where the device cannot.
    ///
    /// # Errors
    /// [`IoError`]; some of the bytes may have been copied.
    pub fn copy(&mut self, from: impl Into<DeviceAddr>, to: impl Into<DeviceAddr>, len: u64) -> Result<(), IoError> {
        let (bounce, queue) = self.bounce(len)?;
        bounce.copy(queue, from.into(), to.into(), len)
    }

    /// A buffer for blocking calls, of at least `len` bytes or a chunk, and the queue that it goes through.
    pub(crate) fn bounce(&mut self, len: u64) -> Result<(&mut Bounce, &mut JoinedQueue), dmalane_dma::Error> {
        let wanted = usize::try_from(len.clamp(1, self.staging.limit)).unwrap_or(usize::MAX);
        let bounce = match self.bounce.take() {
            Some(bounce) if bounce.len() >= wanted => bounce,
            // One that is too small, or was lost, is freed before there is another one.
            other => {
                drop(other);
                Bounce::new(&*self.registrar, &*self.staging.heap, wanted, self.options.fill.timeout)?
            }
        };
        Ok((self.bounce.insert(bounce), &mut self.queue))
    }

    /// The scatter-gather tables of the staging buffers, where the registrar knows them.
    pub fn staging_pages(&self) -> impl Iterator<Item = &SgTable<PhysAddr>> {
        self.staging.buffers().filter_map(|(via, _)| via.mapping().pinned().pages())
    }

    /// The pages behind the staging buffers, and why no better ones; `None` before the first load.
    pub fn staging_backing(&self) -> Option<&PageBacking> {
        self.staging.buffers().next().map(|(_, backing)| backing)
    }

    /// Lends its memory to other processes ([`Device::lending`]).
    ///
    /// # Errors
    /// It cannot.
    pub fn lending(&self) -> Result<Box<dyn Lending>, Box<dyn StdError + Send + Sync>> {
        self.device.lending()
    }

    /// A file in memory that another process has lent, its tensors at these places; `None` where they lie beyond it.
    pub(crate) fn lent_file(
        &self,
        path: PathBuf,
        model: Arc<Model>,
        offsets: impl Iterator<Item = u64>,
        lent: Option<Lent>,
    ) -> Option<LoadedFile> {
        let at = lent.as_ref().map(|(memory, _)| memory.at);
        let bo_len = at.map_or(0, |at| at.len());
        let places: Vec<Place> = offsets.map(|bo_offset| Place { bo_offset, run: 0 }).collect();
        let fits = |(tensor, place): (&Arc<Tensor>, &Place)| {
            tensor.len == 0 || place.bo_offset.checked_add(tensor.len).is_some_and(|end| end <= bo_len)
        };
        if places.len() != model.tensors.len() || !model.tensors.iter().zip(&places).all(fits) {
            return None;
        }
        let runs = vec![TensorRun { bound: bo_len, ..TensorRun::default() }];
        let layout = Layout { places, runs, bo_len, ranges: vec![VaRange { bo_offset: 0, len: bo_len }] };
        let mut file = LoadedFile { lent, ..LoadedFile::new(path, model, layout, self.number) };
        file.place_at(at.and_then(|at| Span::new(DeviceVa::new(at.first().bits()), at.len())).into_iter().collect());
        Some(file)
    }

    /// Takes device memory and device virtual addresses for a file.
    pub(crate) fn place(
        &mut self,
        path: PathBuf,
        model: Arc<Model>,
        placement: &Placement,
    ) -> Result<LoadedFile, Error> {
        self.device.check()?;
        let Some(layout) = self.layout(&model) else {
            let (needed, largest, align) = (model.len, self.memory.free_bytes(), PageSize::SIZE_16K);
            let full = MemoryError::Full { needed, range: needed, placement: placement.clone(), align, largest };
            return Err(Error::DeviceMemory { path, source: full });
        };
        let mut file = LoadedFile::new(path, model, layout, self.number);
        if file.layout.bo_len == 0 {
            file.place_at(Vec::new());
            return Ok(file);
        }
        let allocated = self.memory.allocate(file.layout.bo_len, placement);
        let memory = allocated.map_err(|source| Error::DeviceMemory { path: file.path.clone(), source })?;
        let index = SgIndex::from_table(&memory).map_err(|source| Error::Index { path: file.path.clone(), source });
        let mut ranges = Vec::new();
        let given = index.and_then(|index| {
            let bo = Arc::new(Bo::new(self.next_bo, index));
            self.next_bo += 1;
            self.give_addresses(&file, &bo, &memory, &mut ranges).map(|()| bo)
        });
        match given {
            Ok(bo) => file.bo = Some(bo),
            Err(e) => {
                // The first error says more than one of giving back.
                let _ = self.give_back(file.path, ranges, memory.segments());
                return Err(e);
            }
        }
        file.place_at(ranges);
        Ok(file)
    }

    /// Takes the device virtual ranges of a file, and binds it there if it is bound as a whole. `ranges` has what was
    /// taken, after an error too.
    fn give_addresses(
        &mut self,
        file: &LoadedFile,
        bo: &Arc<Bo>,
        memory: &SgTable<CardAddr>,
        ranges: &mut Vec<Span<DeviceVa>>,
    ) -> Result<(), Error> {
        let failed = |source| Error::Bind { path: file.path.clone(), tensor: None, source };
        let whole = self.binds_whole_files();
        let space = self.device.address_space();
        for VaRange { bo_offset, len } in &file.layout.ranges {
            let range = space.reserve(memory, *len).map_err(failed)?;
            ranges.push(range);
            if whole {
                // Up to the end of the memory, which is allocated in pages.
                let len = (*len).min(bo.len() - bo_offset);
                let (va, bo, offset) = (range.first(), bo.clone(), *bo_offset);
                space.apply(&[BindRequest::Bind { va, bo, offset, len, access: Access::READ }]).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// True where pages are so large that one for each tensor would waste memory: a file is bound as a whole before its
    /// bytes arrive. A flat space binds nothing, but checks the file.
    pub(crate) fn binds_whole_files(&mut self) -> bool {
        let space = self.device.address_space();
        space.kind() == AddressSpaceKind::Flat || space.page() > ALIGN
    }

    /// Aligns tensors that are loaded from now on.
    pub fn align_tensors(&mut self, align: TensorAlign) {
        self.options.align = align;
    }

    /// Where the tensors of a file would go; `None` when their sizes add up to more than 64 bits.
    pub fn layout(&mut self, model: &Model) -> Option<Layout> {
        let of_device = TensorAlign::try_from(self.info.tensor_align).unwrap_or_default();
        let (align, whole) = (self.options.align.max(of_device), self.binds_whole_files());
        let space = self.device.address_space();
        match space.kind() {
            AddressSpaceKind::Flat => Layout::whole(model, align, PAGE, u64::MAX),
            _ if whole => Layout::whole(model, align, space.page(), space.longest()),
            _ => Layout::new(model, align, space.longest()),
        }
    }

    /// Unbinds everything that a load bound and frees its memory.
    ///
    /// # Errors
    /// [`Error::Bind`] when the tables for the unbind cannot be had, or the device may still remember what was bound:
    /// then nothing of that file is freed. [`Error::OtherDevice`] for files of another device. The other files are
    /// unloaded all the same; the first error is returned.
    pub fn unload(&mut self, loaded: Loaded) -> Result<(), Error> {
        let results: Vec<_> = loaded.files.into_iter().map(|file| self.unload_file(file)).collect();
        results.into_iter().collect()
    }

    /// Gives up the files of a failed load while transfers to them may still be under way: their memory stays allocated
    /// for good, so that a late copy cannot land in something else.
    pub(crate) fn abandon(&mut self, loaded: Loaded) {
        self.abandoned += loaded.files.iter().filter_map(|f| f.bo.as_ref()).map(|bo| bo.len()).sum::<u64>();
    }

    /// Bytes of device memory that are never used again, because transfers to them did not end.
    pub fn abandoned_bytes(&self) -> u64 {
        self.abandoned
    }

    /// # Errors
    /// [`Error::OtherDevice`] for a file that was loaded onto another device; [`Error::Forked`].
    pub(crate) fn check(&self, file: &LoadedFile) -> Result<(), Error> {
        self.device.check()?;
        if file.device == self.number { Ok(()) } else { Err(Error::OtherDevice { path: file.path.clone() }) }
    }

    /// As [`OpenDevice::unload`], one file of a load.
    ///
    /// # Errors
    /// As there.
    pub fn unload_file(&mut self, file: LoadedFile) -> Result<(), Error> {
        self.check(&file)?;
        let Some(bo) = file.bo else { return Ok(()) };
        self.give_back(file.path, file.ranges, bo.sg().segments())
    }

    /// Unbinds all of these ranges, and frees the memory if none stays bound.
    fn give_back(
        &mut self,
        path: PathBuf,
        ranges: Vec<Span<DeviceVa>>,
        memory: impl Iterator<Item = Segment<CardAddr>>,
    ) -> Result<(), Error> {
        let space = self.device.address_space();
        let unbound: Vec<_> = ranges.into_iter().map(|range| space.release(range)).collect();
        let unbound = unbound.into_iter().collect::<Result<(), _>>();
        unbound.map_err(|source| Error::Bind { path: path.clone(), tensor: None, source })?;
        self.memory.free(memory).map_err(|source| Error::DeviceMemory { path, source })
    }
}

dmalane_dma::debug_as!(OpenDevice, |it| "OpenDevice {{ info: {:?}, memory: {:?}, .. }}", it.info, it.memory);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::Used;

    #[test]
    fn addresses_are_new_once() {
        let (mut used, mut model, mut x) = (Used::default(), BTreeSet::new(), 1u64);
        for round in 0..2000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if round % 40 == 0 {
                (used, model) = (Used::default(), BTreeSet::new());
            }
            let (first, len) = (x >> 55, x >> 40 & 15);
            let new = (first..first + len).filter(|at| model.insert(*at)).count();
            assert_eq!(used.add(first, len), new as u64, "{first} {len}");
        }
        assert_eq!(Used::default().add(u64::MAX - 1, 5), 1, "no further than the top");
    }
}
