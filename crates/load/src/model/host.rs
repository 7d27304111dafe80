//! A model: its files, its tensors, and every way to read them.

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use dmalane_addr::FileOffset;
use dmalane_device::Placement;
use dmalane_dma::{AnonHeap, Heap, Pool, SharedBuf, lock};
use dmalane_file::{FileOptions, FileQueue, Mode};
use dmalane_queue::DeviceAddr;

use super::block::{HostTensor, model_heap};
use super::budget::Budget;
use super::expected;
use super::file::{ModelFile, Select};
use super::onto::{self, Part};
use super::plan::{PAGE, Plan};
use super::reader::{FILES_AT_ONCE, Reader};
use super::report::{HostRates, Reads};
use super::slice;
use super::stream::TensorStream;
use crate::container::{FormatError, Tensor};
use crate::device::{Loaded, OpenDevice};
use crate::error::Error;
use crate::fill::{Extent, Job, Watch};
use crate::input::{Input, open_inputs};
use crate::manifest::Manifest;
use crate::open_file::OpenFile;
use crate::parallel::in_parallel;
use crate::set::{self, ModelSet};

/// Bytes that reference rates are measured with, at most; and a huge page, so that a pool keeps all of its memory.
const REFERENCE: u64 = 256 << 20;
const HUGE: usize = 2 << 20;

/// How a model is opened. The default reads all tensors, without a limit, and compares them with nothing.
#[derive(Clone, Default)]
pub struct ModelOptions {
    /// Past the page cache or through it.
    pub mode: Mode,
    /// Bytes of host memory that its tensors may take at a time; `None` for no limit.
    pub memory_limit: Option<u64>,
    /// Hashes that the files must have; without files it is no manifest.
    pub manifest: Manifest,
    /// Which tensors count, by their names; files without any are left out.
    pub select: Option<Select>,
    /// Refuse files of no known kind. Else such a file is one tensor without a type: bytes for a device.
    pub refuse_raw: bool,
}

impl ModelOptions {
    fn file(&self, file: OpenFile) -> Result<ModelFile, Error> {
        if self.refuse_raw {
            file.refuse_raw()?;
        }
        ModelFile::new(file)
    }
}

/// How a model is loaded onto a device.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// The device memory that gets the tensors; the first region by default.
    pub placement: Placement,
    /// Read every tensor back through the device's address space, and compare it with its file.
    pub verify: bool,
}

/// A model that is open: one or more files of tensors, whose headers were parsed once.
///
/// Tensors are read into memory ([`read`](Self::read), [`read_all`](Self::read_all), [`slice`](Self::slice)), lent one
/// after the other within a limit of memory ([`stream`](Self::stream)), or loaded onto a device
/// ([`load_onto`](Self::load_onto)).
///
/// ```
/// use dmalane_load::{HostModel, ModelOptions};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # dmalane_load::write_sample(&mut std::fs::File::create(&path)?, 1 << 20, 1)?;
/// let options = ModelOptions { memory_limit: Some(64 << 20), ..ModelOptions::default() };
/// let model = HostModel::open([&path], options)?;
/// for tensor in model.stream(None)? {
///     let tensor = tensor?;
///     println!("{} {:?}: {} bytes", tensor.tensor.name, tensor.shape, tensor.len);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct HostModel {
    reader: Arc<Reader>,
    /// Made at the first look-up, or at once where several files must not have a tensor of one name.
    by_name: Arc<OnceLock<Names>>,
    manifest: Arc<Manifest>,
    left_out: Arc<Vec<(PathBuf, String)>>,
    /// Notes about tensors that no index lists.
    unlisted: Arc<Vec<String>>,
}

/// File and tensor of each name.
type Names = HashMap<Named, (usize, usize)>;

/// A tensor by its name.
struct Named(Arc<Tensor>);

impl Borrow<str> for Named {
    fn borrow(&self) -> &str {
        &self.0.name
    }
}

impl PartialEq for Named {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for Named {}

impl Hash for Named {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name.as_str().hash(state);
    }
}

/// The tensors of files by their names, of which those of one file differ. Two files with one name are told to `twice`.
fn names(files: &[ModelFile], mut twice: impl FnMut(&str, &ModelFile, &ModelFile)) -> Names {
    let mut names = Names::with_capacity(files.iter().map(|file| file.contents().tensors.len()).sum());
    for (f, file) in files.iter().enumerate() {
        for (t, tensor) in file.contents().tensors.iter().enumerate() {
            if let Some((first, _)) = names.insert(Named(tensor.clone()), (f, t)) {
                twice(&tensor.name, &files[first], file);
            }
        }
    }
    names
}

impl HostModel {
    /// Opens the files of a model: a directory and an index stand for theirs ([`ModelSet::find`]).
    ///
    /// # Errors
    /// [`Error::File`] for files that cannot be read, [`Error::Format`] for those that are no models, or where two have
    /// a tensor of one name, and what the manifest finds in headers.
    pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>, options: ModelOptions) -> Result<Self, Error> {
        let ModelSet { files, left_out, .. } = ModelSet::of(paths)?;
        let files = in_parallel(files, |file| options.file(OpenFile::of(&file)?))?;
        Ok(Self { left_out: Arc::new(left_out), ..Self::new(files, options)? })
    }

    /// The same of files that are open already. Those that were not opened by name stay open with the model.
    ///
    /// # Errors
    /// As of [`HostModel::open`].
    pub fn of_files(files: impl IntoIterator<Item = OpenFile>, options: ModelOptions) -> Result<Self, Error> {
        let files = in_parallel(files.into_iter().collect(), |file| options.file(file))?;
        Self::new(files, options)
    }

    fn new(mut files: Vec<ModelFile>, options: ModelOptions) -> Result<Self, Error> {
        let ModelOptions { mode, memory_limit, manifest, select, .. } = options;
        let all: Vec<_> = files.iter().map(|file| (file.path(), file.listed(), &**file.contents())).collect();
        set::check(&all)?;
        let unlisted = Arc::new(set::unlisted(&all));
        files.iter_mut().try_for_each(|file| file.retain(select.as_ref()))?;
        if select.is_some() {
            files.retain(|file| !file.contents().tensors.is_empty());
        }
        expected::expect(&manifest, &mut files)?;
        let by_name = OnceLock::new();
        if files.len() > 1 {
            let mut twice = None;
            let _ = by_name.set(names(&files, |name, first, second| {
                let text = format!("{} has tensor {name:?} too: name the files of one model", first.path().display());
                twice.get_or_insert_with(|| second.bad(FormatError::new(text).about_tensor(name)));
            }));
            twice.map_or(Ok(()), Err)?;
        }
        let (budget, above) = (Budget::new(memory_limit.unwrap_or(u64::MAX)), None);
        let (files, reads, closed) = (Arc::new(files), Arc::default(), Arc::default());
        let reader = Arc::new(Reader { files, budget, reads, mode, threads: None, closed, above });
        let (by_name, manifest) = (Arc::new(by_name), Arc::new(manifest));
        Ok(Self { reader, by_name, manifest, left_out: Arc::default(), unlisted })
    }

    /// The same model with another memory limit, which counts what it reads from now on, and the same
    /// [reads](Self::reads).
    pub fn within(&self, memory_limit: u64) -> Self {
        let (budget, closed) = (Budget::new(memory_limit), Arc::default());
        let reader = Reader { budget, closed, threads: None, above: None, ..(*self.reader).clone() };
        Self { reader: Arc::new(reader), ..self.clone() }
    }

    /// The same model with the same limit and [reads](Self::reads), read by this number of threads (1 to 64), or by as
    /// many as the processors and the files take. To [`close`](Self::close) it ends its own reads alone; to close this
    /// one ends those too.
    pub fn apart(&self, threads: Option<usize>) -> Self {
        let (closed, above) = (Arc::default(), Some(self.reader.clone()));
        let reader = Reader { threads, closed, above, ..(*self.reader).clone() };
        Self { reader: Arc::new(reader), ..self.clone() }
    }

    /// The files.
    pub fn files(&self) -> &[ModelFile] {
        &self.reader.files
    }

    /// Files beside these that are no part of the model, each with why.
    pub fn left_out(&self) -> &[(PathBuf, String)] {
        &self.left_out
    }

    /// Notes about the files, a sentence each: bytes of tensors that are holes, as in a download that never finished,
    /// bytes behind the last tensor, as where files were joined, and tensors that an index leaves out.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = (*self.unlisted).clone();
        let holes = in_parallel(self.files().iter().collect(), |file: &ModelFile| Ok::<_, Error>(file.hole()));
        for (file, hole) in self.files().iter().zip(holes.unwrap_or_default()) {
            let path = file.path().display();
            match hole {
                0 => {}
                n => notes.push(format!(
                    "{path}: {n} bytes of its tensors are a hole, which reads as zeroes: an unfinished download?"
                )),
            }
            match file.behind {
                0 => {}
                n => notes.push(format!("{path}: {n} bytes behind its last tensor belong to none: joined files?")),
            }
        }
        notes
    }

    /// The tensors, in the order of the files and of the bytes in them.
    pub fn tensors(&self) -> impl Iterator<Item = &Arc<Tensor>> {
        self.reader.files.iter().flat_map(|file| &file.contents().tensors)
    }

    /// The tensor of this name, and its file.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::Closed`].
    pub fn find(&self, name: &str) -> Result<(&ModelFile, &Arc<Tensor>), Error> {
        let (file, index) = self.place(name)?;
        let file = &self.reader.files[file];
        Ok((file, &file.contents().tensors[index]))
    }

    fn place(&self, name: &str) -> Result<(usize, usize), Error> {
        self.reader.check_open()?;
        let by_name = self.by_name.get_or_init(|| names(&self.reader.files, |_, _, _| {}));
        by_name.get(name).copied().ok_or_else(|| Error::NoTensor(name.to_owned()))
    }

    /// Reads all tensors, those of a file into one block. With `align`, a power of two of at most 4096, each starts at
    /// a multiple of it and shares no such unit with another one.
    ///
    /// # Errors
    /// [`Error`]. [`Error::BadSlice`] for another `align`.
    pub fn read_all(&self, align: Option<u64>, watch: &mut Watch<'_>) -> Result<Vec<HostTensor>, Error> {
        let reader = &*self.reader;
        reader.check_open()?;
        if align.is_some_and(|align| !align.is_power_of_two() || align > PAGE) {
            return Err(Error::BadSlice("align is a power of two of at most 4096".to_owned()));
        }
        let mut plans: Vec<(usize, Plan)> = Vec::new();
        for (i, file) in reader.files.iter().enumerate() {
            let (mut first, all) = (0, file.contents().tensors.len());
            while first < all {
                let end = (first..all).find(|n| !file.are_alike(first, *n)).unwrap_or(all);
                plans.push((i, reader.plan(i, first..end, align)?));
                first = end;
            }
        }
        let blocks = reader.read(&plans, reader.charge(&plans)?, watch)?;
        let mut tensors = Vec::new();
        for ((file, plan), block) in plans.iter().zip(blocks) {
            let of = &reader.files[*file].contents().tensors[plan.tensors.clone()];
            for (tensor, place) in of.iter().zip(&plan.places) {
                tensors.push(HostTensor::new(tensor, tensor.dims(), block.clone(), *place, tensor.len));
            }
        }
        Ok(tensors)
    }

    /// Reads one tensor.
    ///
    /// # Errors
    /// [`Error`].
    pub fn read(&self, name: &str, watch: &mut Watch<'_>) -> Result<HostTensor, Error> {
        let (file, index) = self.place(name)?;
        let plan = self.reader.plan(file, index..index + 1, None)?;
        let charge = self.reader.budget.take(Some(name), plan.memory())?;
        let (block, plan) = self.reader.read_one(file, plan, charge, watch)?;
        let tensor = &self.reader.files[file].contents().tensors[index];
        Ok(HostTensor::new(tensor, tensor.dims(), block, plan.places[0], tensor.len))
    }

    /// Refuses to read a part of a tensor that is to be compared with the manifest.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::Closed`], [`Error::Unchecked`].
    pub fn check_slice(&self, name: &str) -> Result<(), Error> {
        self.find(name)?.0.check_parts()
    }

    /// Reads a slice of a tensor: a range of each dimension. `shape` is that of the result, which has as many elements
    /// as the ranges.
    ///
    /// # Errors
    /// [`Error`]. [`Error::BadSlice`] for ranges beyond the tensor, for types without a size, and for bounds
    /// within a byte; [`Error::Unchecked`] with a manifest.
    pub fn slice(
        &self,
        name: &str,
        ranges: &[Range<u64>],
        shape: Vec<u64>,
        watch: &mut Watch<'_>,
    ) -> Result<HostTensor, Error> {
        slice::read(&self.reader, self.place(name)?, ranges, shape, watch)
    }

    /// Reads parts of tensors to their places in a new buffer of `len` bytes. The other bytes are zero. Whole tensors
    /// are compared with the manifest. The memory limit does not count the buffer.
    ///
    /// # Errors
    /// [`Error`].
    pub fn read_parts(&self, parts: &[Part], len: u64, watch: &mut Watch<'_>) -> Result<SharedBuf, Error> {
        let reader = &*self.reader;
        reader.check_open()?;
        let (mut files, mut extents, mut tensors, mut total) = (Vec::new(), Vec::new(), Vec::new(), 0u64);
        for part @ Part { name, bytes, to } in parts {
            let (file, index) = self.place(name)?;
            let tensor = &reader.files[file].contents().tensors[index];
            match *bytes == (0..tensor.len) {
                true => tensors.push((&reader.files[file], index, *to, to.saturating_add(tensor.len))),
                false => reader.files[file].check_parts()?,
            }
            let Range { start: at, end } = part.within(tensor)?;
            let source = files.iter().position(|known| *known == file).unwrap_or_else(|| {
                files.push(file);
                files.len() - 1
            });
            let (at, len) = (FileOffset::new(at), end - at);
            extents.push(Extent { source, at, len, buffer: 0, to: *to });
            total = total.saturating_add(len);
        }
        let len = len.max(1);
        if total == 0 {
            return Ok(model_heap().allocate(usize::try_from(len).unwrap_or(usize::MAX))?.share());
        }
        tensors.sort_by_key(|(_, _, at, _)| *at);
        let files: Vec<&ModelFile> = files.into_iter().map(|file| &reader.files[file]).collect();
        let filled =
            reader.run(&files, Job { buffers: vec![len], extents }, &[expected::compared(tensors)], watch)?.pop();
        Ok(filled.expect("one buffer").into_shared())
    }

    /// Reads parts of tensors into memory of a device, each to `part.to` bytes behind `place`, through staging buffers
    /// that are registered once for each device. Whole tensors are compared with the manifest. No two parts have a byte
    /// in common. What lies at these addresses is the caller's: nothing is allocated or bound. The memory limit counts
    /// the staging buffers, of which there are fewer where it leaves less.
    ///
    /// ```
    /// use dmalane_device::RamDevice;
    /// use dmalane_load::{HostModel, OpenDevice, Part};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// # dmalane_load::write_sample(&mut std::fs::File::create(&path)?, 1 << 20, 1)?;
    /// let model = HostModel::open([&path], Default::default())?;
    /// let mut device = OpenDevice::new(Box::new(RamDevice::new(8 << 20)?), Default::default())?;
    /// let place = device.memory_mut().reserve(4096)?.first();
    /// let part = Part { name: "embeddings.weight".to_owned(), bytes: 0..1000, to: 96 };
    /// model.read_parts_onto(&mut device, place.into(), &[part], &mut |_| std::ops::ControlFlow::Continue(()))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error`]. Some of the bytes may have been written, and if operations are in flight on the
    /// [queue](OpenDevice::queue_mut) then, some may still be.
    pub fn read_parts_onto(
        &self,
        device: &mut OpenDevice,
        place: DeviceAddr,
        parts: &[Part],
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        onto::read_parts(&self.reader, |name| self.place(name), device, place, parts, watch)
    }

    /// Begins to read the tensors in the order of their bytes, all or those of these names.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::Closed`]; [`Error::File`] where there can be no thread.
    pub fn stream(&self, names: Option<HashSet<String>>) -> Result<TensorStream, Error> {
        self.reader.check_open()?;
        names.iter().flatten().try_for_each(|name| self.place(name).map(drop))?;
        TensorStream::new(self.reader.clone(), names)
    }

    /// Opens the files for a load onto a device.
    ///
    /// # Errors
    /// [`Error`].
    pub fn inputs(&self, options: FileOptions) -> Result<Vec<Input<FileQueue>>, Error> {
        self.reader.check_open()?;
        let open = |file: &ModelFile| {
            file.check_rows()?;
            file.open()
        };
        open_inputs(in_parallel(self.reader.files.iter().collect(), open)?, options)
    }

    /// Loads the model onto a device: every tensor is bound at its own device virtual address, and compared with the
    /// manifest on the way. `progress` is called with the number of bytes that have been read since the last call; it
    /// must not panic.
    ///
    /// ```
    /// use dmalane_device::RamDevice;
    /// use dmalane_load::{HostModel, OpenDevice};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// # dmalane_load::write_sample(&mut std::fs::File::create(&path)?, 1 << 20, 1)?;
    /// let mut device = OpenDevice::new(Box::new(RamDevice::new(8 << 20)?), Default::default())?;
    /// let loaded = HostModel::open([&path], Default::default())?.load_onto(&mut device, &Default::default(), |_| {})?;
    /// println!("{:?} after {:?}", loaded["embeddings.weight"].va, loaded.report.wall);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error`]. Nothing stays on the device, and files that fail to verify are unloaded.
    pub fn load_onto(
        &self,
        device: &mut OpenDevice,
        options: &LoadOptions,
        mut progress: impl FnMut(u64) + Send,
    ) -> Result<Loaded, Error> {
        let mut inputs = self.inputs(FileOptions::for_mode(self.reader.mode))?;
        let mut loaded = device.load_checked(&mut inputs, &options.placement, &self.manifest, &mut progress)?;
        if options.verify {
            match device.verify(&loaded, &mut inputs, &mut |_| {}) {
                Ok(verified) => loaded.set_verified(verified),
                Err(error) => {
                    // The reason for the failure matters more than a second one while cleaning up.
                    let _ = device.unload(loaded);
                    return Err(error);
                }
            }
        }
        Ok(loaded)
    }

    /// Measures what the machine reaches at best with these files, with the first 256 MiB of them at most; `None` where
    /// the limit leaves no memory for that.
    ///
    /// # Errors
    /// [`Error`].
    pub fn host_rates(&self, watch: &mut Watch<'_>) -> Result<Option<HostRates>, Error> {
        let reader = &*self.reader;
        reader.check_open()?;
        let left = reader.budget.limit().saturating_sub(reader.budget.used());
        let most = REFERENCE.min(left & !(PAGE - 1));
        let mut job = Job { buffers: vec![0], extents: Vec::new() };
        let files: Vec<&ModelFile> = reader.files.iter().take(FILES_AT_ONCE).collect();
        for (source, file) in files.iter().enumerate() {
            let to = job.buffers[0];
            let len = file.contents().len.min(most.saturating_sub(to));
            job.extents.push(Extent { source, at: FileOffset::new(0), len, buffer: 0, to });
            job.buffers[0] = (to + len).next_multiple_of(PAGE);
        }
        let bytes = job.bytes();
        if bytes == 0 {
            return Ok(None);
        }
        let _charge = reader.budget.take(None, job.buffers[0])?;
        let len = job.buffers[0] as usize;
        let heap = Pool::new(AnonHeap::new(), len.next_multiple_of(HUGE));
        // A virtual machine's host may have to find memory for the first touch: that is not measured.
        drop(AnonHeap::new().allocate(len)?);
        let begin = Instant::now();
        drop(heap.reserve(len)?.populate()?);
        let touched = begin.elapsed();
        let read = reader.fill(&heap, &files, job, &[], watch)?.filled.report.wall;
        let rate = |time: std::time::Duration| bytes as f64 / time.as_secs_f64();
        Ok(Some(HostRates { bytes, read: rate(read), first_touch: rate(touched) }))
    }

    /// How the files were read so far.
    pub fn reads(&self) -> Reads {
        lock(&self.reader.reads).clone()
    }

    /// Bytes of memory that tensors take now, and the limit.
    pub fn memory(&self) -> (u64, Option<u64>) {
        let limit = self.reader.budget.limit();
        (self.reader.budget.used(), (limit < u64::MAX).then_some(limit))
    }

    /// Refuses everything from now on, and ends reads in flight. Tensors keep their memory.
    pub fn close(&self) {
        self.reader.closed.store(true, Ordering::Relaxed);
    }

    /// Whether it was closed.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn check_open(&self) -> Result<(), Error> {
        self.reader.check_open()
    }
}
