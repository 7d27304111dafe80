//! Open models: the tensors of one or more files, read all at once, one by one, or in slices.

use std::collections::{HashMap, HashSet};
use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use dmalane::addr::FileOffset;
use dmalane::dma::{AnonHeap, Heap, Pool};
use dmalane::file::Mode;
use dmalane::load::container::model_files;
use dmalane::load::fill::{Extent, FilledBuf, Job};
use dmalane::load::{Error as LoadError, Input, Model};
use dmalane::{Read, ReadFiles, ReadOptions, ReadSource};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::expected::{self, Expected, ManifestOf, Placed};
use crate::failure::Failure;
use crate::interrupt::{self, Progress};
use crate::memory::{Block, Buffer, Tensor, bits, heap};
use crate::report::Reads;
use crate::stream::{Budget, Charge, Stream};

/// Files read by one job: each takes a few descriptors while it is read.
const FILES_AT_ONCE: usize = 32;
/// The page that direct I/O wants memory and file offsets to agree on.
const PAGE: u64 = 4096;
/// Tensors that cannot lie as they do in the file are aligned to a cache line.
const LINE: u64 = 64;
/// Ranges of a slice that are at least this long are read where they go; shorter ones are gathered.
const DIRECT_RUN: u64 = 128 << 10;
/// Bytes between two ranges that are rather read than skipped, and read at a time, at most.
const GAP: u64 = 64 << 10;
const GATHER: u64 = 8 << 20;
/// Bytes that reference rates are measured with, at most; and a huge page, so that a pool keeps all of its memory.
const REFERENCE: u64 = 256 << 20;
const HUGE: usize = 2 << 20;

/// A file of the model. It is opened for each read, so that a model of 1000 files needs no 1000 descriptors.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    /// Device, inode, bytes and time of the last change when the header was read.
    identity: (u64, u64, u64, i64, i64),
    pub(crate) model: Model,
    /// The hashes that its tensors must have.
    pub(crate) expected: Option<Expected>,
}

fn identity(meta: &Metadata) -> (u64, u64, u64, i64, i64) {
    (meta.dev(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec())
}

impl Source {
    fn new(path: PathBuf) -> Result<Self, Failure> {
        let failed = |what, source| LoadError::File { path: path.clone(), what, source };
        let file = File::open(&path).map_err(|e| failed("open it", e))?;
        let meta = file.metadata().map_err(|e| failed("read its size", e))?;
        let model = Input { path: path.clone(), file, queue: (), more: Vec::new(), select: None }.model()?;
        if model.by_columns {
            let message = format!("{}: its array is stored by columns, which numpy.load reads", path.display());
            return Err(Failure::new("FormatError", message).text("path", path.display().to_string()));
        }
        Ok(Self { path, identity: identity(&meta), model, expected: None })
    }

    /// Opens the file, which must be the one that was parsed.
    pub(crate) fn open(&self) -> Result<ReadSource, Failure> {
        let source = ReadSource::open(&self.path)?;
        let failed = |source| LoadError::File { path: self.path.clone(), what: "read its size", source };
        let meta = source.file.metadata().map_err(failed)?;
        if meta.is_file() && identity(&meta) != self.identity {
            let (before, now) = (self.identity.2, meta.len());
            let message = format!("{}: it was changed or replaced since it was opened", self.path.display());
            return Err(Failure::new("ChangedError", message)
                .text("path", self.path.display().to_string())
                .number("before", before)
                .number("size", now));
        }
        Ok(source)
    }

    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }
}

/// Where tensors of a file lie in their buffer.
pub(crate) struct Plan {
    /// Which tensors; none for a slice of one.
    pub(crate) tensors: Range<usize>,
    /// Where each begins.
    pub(crate) places: Vec<u64>,
    pub(crate) extents: Vec<Extent>,
    pub(crate) len: u64,
}

impl Plan {
    /// Lays some tensors of a file out in one buffer. Without `align` they lie as they do in the file, so that direct
    /// I/O puts them there together, but each is aligned to its elements. With it, each starts at a multiple of
    /// `align`, a power of two, and shares no such unit with another one.
    ///
    /// `None` when the sizes add up to more than 63 bits.
    pub(crate) fn new(model: &Model, tensors: Range<usize>, align: Option<u64>) -> Option<Self> {
        let mut plan = Self { tensors: tensors.clone(), places: Vec::new(), extents: Vec::<Extent>::new(), len: 0 };
        for tensor in &model.tensors[tensors] {
            let at = tensor.at.bits();
            let element = bits(&tensor.dtype).map_or(1, |bits| u64::from(bits) / 8).max(1);
            let next = match (align, plan.extents.last()) {
                (Some(align), _) => plan.len.checked_next_multiple_of(align)?,
                (None, Some(last)) if last.at.bits() + last.len == at && plan.len.is_multiple_of(element) => plan.len,
                // As in the file, from the first one on too.
                (None, _) if at.is_multiple_of(element) => plan.len + (at.wrapping_sub(plan.len) & (PAGE - 1)),
                (None, _) => plan.len.checked_next_multiple_of(LINE)?,
            };
            plan.places.push(next);
            if tensor.len == 0 {
                continue;
            }
            plan.len = next.checked_add(tensor.len).filter(|len| i64::try_from(*len).is_ok())?;
            match plan.extents.last_mut() {
                Some(last) if last.at.bits() + last.len == at && last.to + last.len == next => last.len += tensor.len,
                _ => plan.extents.push(Extent { source: 0, at: tensor.at, len: tensor.len, buffer: 0, to: next }),
            }
        }
        // An empty tensor may have been placed behind the last byte.
        plan.places.iter_mut().for_each(|place| *place = (*place).min(plan.len));
        Some(plan)
    }
}

impl Plan {
    /// Bytes of memory that its buffer takes, in pages.
    pub(crate) fn memory(&self) -> u64 {
        self.len.max(1).next_multiple_of(PAGE)
    }
}

/// The state that all Python objects of an open model share.
pub(crate) struct Inner {
    pub(crate) files: Vec<Source>,
    /// File and tensor of each name.
    by_name: HashMap<String, (usize, usize)>,
    pub(crate) budget: Arc<Budget>,
    reads: Mutex<Reads>,
    mode: Mode,
    closed: AtomicBool,
}

impl Inner {
    pub(crate) fn open(&self) -> Result<(), Failure> {
        if self.closed.load(Ordering::Relaxed) { Err(Failure::closed()) } else { Ok(()) }
    }

    fn find(&self, name: &str) -> Result<(usize, usize), Failure> {
        self.open()?;
        self.by_name.get(name).copied().ok_or_else(|| Failure::unknown(name))
    }

    /// Takes the memory for one buffer for each plan.
    fn charge(&self, files: &[(usize, Plan)]) -> Result<Vec<Charge>, Failure> {
        self.budget.check(files.iter().map(|(_, plan)| plan.memory()).sum())?;
        files.iter().map(|(_, plan)| self.budget.take(plan.memory())).collect()
    }

    /// Runs a job, if it has anything to read, and notes how the files were read. `tensors` are those of each buffer
    /// that are compared with the manifest.
    fn run(
        &self,
        files: &[&Source],
        job: Job,
        tensors: &[Vec<Placed<'_>>],
        progress: &Progress,
    ) -> Result<Vec<FilledBuf>, Failure> {
        if job.buffers.is_empty() {
            return Ok(Vec::new());
        }
        let ReadFiles { filled, methods } = self.fill(heap(), files, job, tensors, progress)?;
        expected::check(tensors, filled.buffers.iter().map(FilledBuf::digests))?;
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        reads.add(filled.report, files.iter().map(|file| file.name()).zip(methods));
        Ok(filled.buffers)
    }

    fn fill(
        &self,
        heap: &Pool,
        files: &[&Source],
        job: Job,
        tensors: &[Vec<Placed<'_>>],
        progress: &Progress,
    ) -> Result<ReadFiles, Failure> {
        let sources = files.iter().map(|file| file.open()).collect::<Result<_, _>>()?;
        let watch = |event| {
            if self.closed.load(Ordering::Relaxed) {
                progress.cancel();
            }
            progress.watch(&event)
        };
        let mut options = ReadOptions { mode: self.mode, ..ReadOptions::default() };
        options.fill.hash_regions = expected::hash_regions(tensors);
        let read = Read::sources(sources).options(options).job(job).watch(watch);
        Ok(read.into_memory(heap)?)
    }

    /// Refuses to read a part of a tensor whose hash is to be checked.
    fn unchecked(&self, file: usize) -> Result<(), Failure> {
        let why = "a part of a tensor cannot be compared with the manifest: get_tensor reads all of it";
        self.files[file].expected.as_ref().map_or(Ok(()), |_| Err(Failure::new("IntegrityError", why)))
    }

    /// Reads a buffer for each of these files, laid out by its plan, into memory that was taken.
    pub(crate) fn read(
        &self,
        files: &[(usize, Plan)],
        charges: Vec<Charge>,
        progress: &Progress,
    ) -> Result<Vec<Arc<Block>>, Failure> {
        let mut blocks: Vec<Arc<Block>> = Vec::new();
        let mut charges = charges.into_iter();
        for files in files.chunks(FILES_AT_ONCE) {
            let mut job = Job::default();
            let with_bytes = files.iter().filter(|(_, plan)| plan.len > 0);
            let plans: Vec<_> = with_bytes.map(|(file, plan)| (&self.files[*file], plan)).collect();
            for (buffer, (_, plan)) in plans.iter().enumerate() {
                job.buffers.push(plan.len);
                job.extents.extend(plan.extents.iter().map(|e| Extent { source: buffer, buffer, ..*e }));
            }
            let sources: Vec<&Source> = plans.iter().map(|(source, _)| *source).collect();
            let tensors: Vec<_> = plans.iter().map(|(source, plan)| expected::placed(source, plan)).collect();
            let mut buffers = self.run(&sources, job, &tensors, progress)?.into_iter();
            for (_, plan) in files {
                let buf = match plan.len {
                    // A tensor of no bytes has memory too: no address is special.
                    0 => heap().allocate(PAGE as usize)?.share(),
                    _ => buffers.next().ok_or_else(|| Failure::new("Error", "a buffer is missing"))?.into_shared(),
                };
                blocks.push(Block::new(buf, charges.next()));
            }
        }
        Ok(blocks)
    }
}

/// A model that is open: one or more files of tensors.
#[pyclass(frozen, weakref, module = "dmalane")]
pub(crate) struct Files {
    inner: Arc<Inner>,
}

#[pymethods]
impl Files {
    #[new]
    #[pyo3(signature = (paths, memory_limit=None, direct=None, manifest=None))]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        memory_limit: Option<u64>,
        direct: Option<bool>,
        manifest: Option<ManifestOf>,
    ) -> PyResult<Self> {
        let (opened, interrupted) = interrupt::quietly(py, || -> Result<_, Failure> {
            let mut files = Vec::new();
            for path in &paths {
                for path in model_files(path)? {
                    files.push(Source::new(path)?);
                }
            }
            if let Some(manifest) = manifest {
                let expected = expected::expect(&manifest.read()?, &files)?;
                files.iter_mut().zip(expected).for_each(|(file, of)| file.expected = Some(of));
            }
            let mut by_name = HashMap::new();
            for (f, file) in files.iter().enumerate() {
                for (t, tensor) in file.model.tensors.iter().enumerate() {
                    if let Some((first, _)) = by_name.insert(tensor.name.clone(), (f, t)) {
                        let message = format!("{} has tensor {:?} too", files[first].name(), tensor.name);
                        return Err(Failure::new("FormatError", format!("{}: {message}", file.name()))
                            .text("path", file.name())
                            .text("tensor", tensor.name.clone()));
                    }
                }
            }
            Ok((files, by_name))
        });
        interrupted?;
        let (files, by_name) = opened?;
        let mode = mode(direct);
        let (reads, closed) = (Mutex::default(), AtomicBool::new(false));
        let budget = Budget::new(memory_limit.unwrap_or(u64::MAX));
        Ok(Self { inner: Arc::new(Inner { files, by_name, budget, reads, mode, closed }) })
    }

    /// The names, in the order of the files and of the bytes in them.
    fn keys(&self) -> PyResult<Vec<String>> {
        self.inner.open()?;
        let tensors = self.inner.files.iter().flat_map(|file| &file.model.tensors);
        Ok(tensors.map(|tensor| tensor.name.clone()).collect())
    }

    /// The text pairs of all headers, or None where no header has any.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.inner.open()?;
        let dict = PyDict::new(py);
        let mut any = false;
        for (key, value) in self.inner.files.iter().filter_map(|file| file.model.metadata.as_ref()).flatten() {
            dict.set_item(key, value)?;
            any = true;
        }
        Ok((any || self.inner.files.iter().any(|file| file.model.metadata.is_some())).then_some(dict))
    }

    /// The paths of the files.
    fn paths(&self) -> Vec<String> {
        self.inner.files.iter().map(Source::name).collect()
    }

    /// The kind of each file.
    fn containers(&self) -> Vec<&'static str> {
        self.inner.files.iter().map(|file| file.model.container.name()).collect()
    }

    /// Type, shape, bytes, path and file offset of a tensor.
    fn describe(&self, name: &str) -> PyResult<(String, Vec<u64>, u64, String, u64)> {
        let (file, index) = self.inner.find(name)?;
        let source = &self.inner.files[file];
        let tensor = &source.model.tensors[index];
        Ok((tensor.dtype.to_string(), tensor.shape.to_vec(), tensor.len, source.name(), tensor.at.bits()))
    }

    /// Reads all tensors.
    #[pyo3(signature = (align=None, progress=None))]
    fn load(&self, py: Python<'_>, align: Option<u64>, progress: Option<Py<PyAny>>) -> PyResult<Vec<Tensor>> {
        self.inner.open()?;
        if align.is_some_and(|align| !align.is_power_of_two() || align > PAGE) {
            return Err(PyValueError::new_err("align is a power of two of at most 4096"));
        }
        let inner = &*self.inner;
        let mut plans = Vec::new();
        for (index, file) in inner.files.iter().enumerate() {
            plans.push((index, plan(file, 0..file.model.tensors.len(), align)?));
        }
        let total = plans.iter().flat_map(|(_, plan)| &plan.extents).map(|e| e.len).sum();
        let charges = inner.charge(&plans)?;
        let read = |progress: &Progress| inner.read(&plans, charges, progress);
        let blocks = interrupt::run(py, total, progress.as_ref(), read)??;
        let mut tensors = Vec::new();
        for ((index, plan), block) in plans.iter().zip(blocks) {
            for (tensor, place) in inner.files[*index].model.tensors.iter().zip(&plan.places) {
                tensors.push(Tensor::new(tensor, shape_of(tensor), block.clone(), *place, tensor.len));
            }
        }
        Ok(tensors)
    }

    /// Reads one tensor.
    fn get(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        let (file, index) = self.inner.find(name)?;
        let inner = &*self.inner;
        let tensor = &inner.files[file].model.tensors[index];
        let plans = [(file, plan(&inner.files[file], index..index + 1, None)?)];
        let charges = inner.charge(&plans)?;
        let blocks = interrupt::run(py, tensor.len, None, |progress| inner.read(&plans, charges, progress))??;
        let block = blocks.into_iter().next().ok_or_else(|| Failure::new("Error", "a buffer is missing"))?;
        Ok(Tensor::new(tensor, shape_of(tensor), block, plans[0].1.places[0], tensor.len))
    }

    /// Reads a slice of a tensor: a range of each dimension. The result has the shape `shape`, which has as many
    /// elements.
    fn slice(&self, py: Python<'_>, name: &str, ranges: Vec<(u64, u64)>, shape: Vec<u64>) -> PyResult<Tensor> {
        let (file, index) = self.inner.find(name)?;
        let inner = &*self.inner;
        inner.unchecked(file)?;
        let tensor = &inner.files[file].model.tensors[index];
        let bits = bits(&tensor.dtype)
            .ok_or_else(|| PyValueError::new_err(format!("tensors of the type {:?} cannot be sliced", tensor.dtype)))?;
        let (runs, run) = runs(&tensor.shape, &ranges, u64::from(bits)).map_err(PyValueError::new_err)?;
        let elements = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim));
        let total = runs.len() as u64 * run;
        if elements.and_then(|n| n.checked_mul(u64::from(bits))) != total.checked_mul(8) {
            return Err(PyValueError::new_err("the shape does not have the elements of the ranges"));
        }
        let at = tensor.at.bits();
        let block =
            interrupt::run(py, total, None, |progress| match total > 0 && run < DIRECT_RUN && runs.len() > 1 {
                true => gather(inner, file, at, &runs, run, progress),
                false => {
                    let mut plan = Plan { tensors: 0..0, places: Vec::new(), extents: Vec::new(), len: 0 };
                    // As in the file, so that direct I/O puts the bytes in place.
                    let element = (u64::from(bits) / 8).max(1);
                    let first = runs.first().map_or(0, |start| (at + start) & (PAGE - 1));
                    let first = if first.is_multiple_of(element) { first } else { 0 };
                    plan.places.push(first);
                    for (n, start) in runs.iter().enumerate().filter(|_| run > 0) {
                        let (at, to) = (FileOffset::new(at + start), first + n as u64 * run);
                        plan.extents.push(Extent { source: 0, at, len: run, buffer: 0, to });
                    }
                    plan.len = if total > 0 { first + total } else { 0 };
                    let place = first.min(plan.len);
                    let plans = [(file, plan)];
                    let blocks = inner.read(&plans, inner.charge(&plans)?, progress)?;
                    let block =
                        blocks.into_iter().next().ok_or_else(|| Failure::new("Error", "a buffer is missing"))?;
                    Ok((block, place))
                }
            })??;
        Ok(Tensor::new(tensor, shape, block.0, block.1, total))
    }

    /// Reads bytes `start..stop` of tensors to their places in a new buffer of `len` bytes, for each part
    /// `(name, start, stop, place)`. The other bytes are zero. Whole tensors are compared with the manifest.
    fn read(&self, py: Python<'_>, parts: Vec<(String, u64, u64, u64)>, len: u64) -> PyResult<Buffer> {
        self.inner.open()?;
        let inner = &*self.inner;
        let (mut files, mut extents, mut tensors, mut total) = (Vec::new(), Vec::new(), Vec::new(), 0u64);
        for (name, start, stop, to) in parts {
            let (file, index) = inner.find(&name)?;
            let tensor = &inner.files[file].model.tensors[index];
            match (start, stop) == (0, tensor.len) {
                true if tensor.len == 0 => {}
                true => tensors.push((&inner.files[file], index, to, to.saturating_add(tensor.len))),
                false => inner.unchecked(file)?,
            }
            if start > stop || stop > tensor.len {
                let message = format!("{start}..{stop} does not lie within the {} bytes of {name:?}", tensor.len);
                return Err(PyValueError::new_err(message));
            }
            let source = files.iter().position(|known| *known == file).unwrap_or_else(|| {
                files.push(file);
                files.len() - 1
            });
            let (at, len) = (FileOffset::new(tensor.at.bits() + start), stop - start);
            extents.push(Extent { source, at, len, buffer: 0, to });
            total = total.saturating_add(len);
        }
        let len = len.max(1);
        tensors.sort_by_key(|(_, _, at, _)| *at);
        let job = Job { buffers: vec![len], extents };
        let files: Vec<&Source> = files.into_iter().map(|file| &inner.files[file]).collect();
        let read = interrupt::run(py, total, None, |progress| match total {
            0 => heap().allocate(len as usize).map(|buf| Some(buf.share())).map_err(Failure::from),
            _ => Ok(inner.run(&files, job, &[tensors], progress)?.pop().map(|buffer| buffer.into_shared())),
        })??;
        let buf = read.ok_or_else(|| Failure::new("Error", "a buffer is missing"))?;
        Ok(Buffer::from_shared(buf, len as usize))
    }

    /// Begins to read the tensors in the order of their bytes, all or those of these names.
    #[pyo3(signature = (names=None))]
    fn stream(&self, names: Option<HashSet<String>>) -> PyResult<Stream> {
        self.inner.open()?;
        names.iter().flatten().try_for_each(|name| self.inner.find(name).map(drop))?;
        Ok(Stream::new(self.inner.clone(), names))
    }

    /// Measures what the machine reaches at best with these files: bytes per second of reading the first 256 MiB of
    /// them, as they are read now, into memory that is there; and of making such memory. Empty where the limit leaves
    /// no memory for that.
    fn references<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.inner.open()?;
        let inner = &*self.inner;
        let (used, limit) = inner.budget.used();
        let most = REFERENCE.min(limit.saturating_sub(used) & !(PAGE - 1));
        let mut job = Job { buffers: vec![0], extents: Vec::new() };
        for (source, file) in inner.files.iter().take(FILES_AT_ONCE).enumerate() {
            let (to, len) = (job.buffers[0], file.model.len.min(most.saturating_sub(job.buffers[0])));
            job.extents.push(Extent { source, at: FileOffset::new(0), len, buffer: 0, to });
            job.buffers[0] = (to + len).next_multiple_of(PAGE);
        }
        let total = job.bytes();
        let dict = PyDict::new(py);
        if total == 0 {
            return Ok(dict);
        }
        let memory = inner.budget.take(job.buffers[0])?;
        let files: Vec<&Source> = inner.files.iter().take(FILES_AT_ONCE).collect();
        let (touched, read) = interrupt::run(py, total, None, |progress| {
            let len = job.buffers[0] as usize;
            let heap = Pool::new(AnonHeap::new(), len.next_multiple_of(HUGE));
            // A virtual machine's host may have to find memory for the first touch: that is not measured.
            drop(AnonHeap::new().allocate(len)?);
            let begin = Instant::now();
            drop(heap.reserve(len)?.populate()?);
            let touched = begin.elapsed();
            Ok::<_, Failure>((touched, inner.fill(&heap, &files, job, &[], progress)?.filled.report.wall))
        })??;
        drop(memory);
        dict.set_item("bytes", total)?;
        dict.set_item("read", total as f64 / read.as_secs_f64())?;
        dict.set_item("first_touch", total as f64 / touched.as_secs_f64())?;
        Ok(dict)
    }

    /// Returns a report of the reads so far.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let reads = self.inner.reads.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let dict = reads.to_dict(py)?;
        let (used, limit) = self.inner.budget.used();
        dict.set_item("memory_used", used)?;
        dict.set_item("memory_limit", (limit < u64::MAX).then_some(limit))?;
        Ok(dict)
    }

    /// Refuses everything from now on, and ends reads in flight. Tensors keep their memory.
    fn close(&self) {
        self.inner.closed.store(true, Ordering::Relaxed);
    }
}

/// Reads a range of a file into a new buffer; returns it with the report.
#[pyfunction]
#[pyo3(signature = (path, start, stop, direct))]
pub(crate) fn alloc_and_read<'py>(
    py: Python<'py>,
    path: PathBuf,
    start: u64,
    stop: Option<u64>,
    direct: Option<bool>,
) -> PyResult<(Buffer, Bound<'py, PyDict>)> {
    if stop.is_some_and(|stop| stop < start) {
        return Err(PyValueError::new_err("the range ends before it starts"));
    }
    let source = ReadSource::open(&path).map_err(Failure::from)?;
    let len = stop.map_or_else(|| source.size(), Ok).map_err(Failure::from)?.saturating_sub(start);
    if len == 0 {
        return Err(PyValueError::new_err("there are no bytes to read"));
    }
    let extent = Extent { source: 0, at: FileOffset::new(start), len, buffer: 0, to: 0 };
    let job = Job { buffers: vec![len], extents: vec![extent] };
    let options = ReadOptions { mode: mode(direct), ..ReadOptions::default() };
    let read = interrupt::run(py, len, None, |progress| {
        let watch = |event| progress.watch(&event);
        Read::sources(vec![source]).options(options).job(job).watch(watch).into_memory(heap())
    })?;
    let ReadFiles { mut filled, methods } = read.map_err(Failure::from)?;
    let buffer = filled.buffers.pop().ok_or_else(|| Failure::new("Error", "a buffer is missing"))?;
    let mut reads = Reads::default();
    reads.add(filled.report, methods.into_iter().map(|method| (path.display().to_string(), method)));
    Ok((Buffer::from_shared(buffer.into_shared(), len as usize), reads.to_dict(py)?))
}

fn mode(direct: Option<bool>) -> Mode {
    match direct {
        None => Mode::Auto,
        Some(true) => Mode::Direct,
        Some(false) => Mode::Buffered,
    }
}

/// The plan for some tensors of a file.
pub(crate) fn plan(file: &Source, tensors: Range<usize>, align: Option<u64>) -> Result<Plan, Failure> {
    Plan::new(&file.model, tensors, align)
        .ok_or_else(|| Failure::new("FormatError", format!("{}: its tensors do not fit 63 bits", file.name())))
}

/// The shape of a tensor; that of bytes without a type is their number.
pub(crate) fn shape_of(tensor: &dmalane::load::Tensor) -> Vec<u64> {
    if tensor.dtype.is_empty() { vec![tensor.len] } else { tensor.shape.to_vec() }
}

/// The runs of consecutive bytes that a slice of a tensor consists of: where each starts in the tensor, and the bytes
/// of each.
fn runs(shape: &[u64], ranges: &[(u64, u64)], bits: u64) -> Result<(Vec<u64>, u64), String> {
    if ranges.len() != shape.len() {
        return Err(format!("{} ranges for {} dimensions", ranges.len(), shape.len()));
    }
    if let Some(((start, stop), dim)) = ranges.iter().zip(shape).find(|((a, b), dim)| a > b || b > dim) {
        return Err(format!("{start}..{stop} does not lie within a dimension of {dim}"));
    }
    if ranges.iter().any(|(start, stop)| start == stop) {
        return Ok((Vec::new(), 0));
    }
    // Dimensions from `inner` on make one run; all behind it are whole. No product overflows: each is at most the
    // elements of the tensor, which is not empty.
    let whole = |i: &usize| ranges[*i] == (0, shape[*i]);
    let inner = (0..shape.len()).rev().find(|i| !whole(i)).unwrap_or(0);
    let below = |i: usize| shape[i + 1..].iter().product::<u64>();
    let bytes = |elements: u64| match (elements * bits).is_multiple_of(8) {
        true => Ok(elements * bits / 8),
        false => Err(format!("a slice of elements of {bits} bits starts and ends at whole bytes")),
    };
    let Some(&(first, stop)) = ranges.get(inner) else { return Ok((vec![0], bytes(1)?)) };
    let run = bytes((stop - first) * below(inner))?;
    let mut starts = vec![first * below(inner)];
    for outer in (0..inner).rev() {
        let step = below(outer);
        let (start, stop) = ranges[outer];
        starts = (start..stop).flat_map(|n| starts.iter().map(move |at| at + n * step)).collect();
    }
    Ok((starts.into_iter().map(bytes).collect::<Result<_, _>>()?, run))
}

/// Reads many short runs of a tensor at `at`: those that lie close together by one read, through the page cache.
fn gather(
    inner: &Inner,
    file: usize,
    at: u64,
    runs: &[u64],
    run: u64,
    progress: &Progress,
) -> Result<(Arc<Block>, u64), Failure> {
    let total = runs.len() as u64 * run;
    let charge = inner.budget.take(total.next_multiple_of(PAGE))?;
    let source = inner.files[file].open()?;
    let buf = heap().allocate(total as usize)?.share();
    let mut scratch = Vec::new();
    let (mut first, mut to) = (0, 0);
    while first < runs.len() {
        let mut end = first + 1;
        while end < runs.len()
            && runs[end] + run - runs[first] <= GATHER
            && runs[end].saturating_sub(runs[end - 1] + run) <= GAP
        {
            end += 1;
        }
        if progress.is_cancelled() {
            return Err(Failure::new("CancelledError", "cancelled"));
        }
        scratch.resize((runs[end - 1] + run - runs[first]) as usize, 0);
        let from = at + runs[first];
        let read = source.file.read_exact_at(&mut scratch, from);
        read.map_err(|source| LoadError::File { path: inner.files[file].path.clone(), what: "read it", source })?;
        for start in &runs[first..end] {
            let from = (start - runs[first]) as usize;
            if let Some(view) = buf.as_volatile_slice().sub(to, run as usize) {
                view.write(&scratch[from..from + run as usize]);
            }
            to += run as usize;
        }
        first = end;
    }
    Ok((Block::new(buf, Some(charge)), 0))
}
