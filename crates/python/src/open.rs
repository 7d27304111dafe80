//! Open models: the tensors of one or more files, read all at once, one by one, in slices, or as a stream.

use std::collections::HashSet;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dmalane::addr::{CardAddr, FileOffset};
use dmalane::load::fill::{Event, Extent, Job, Watch};
use dmalane::load::kept::{self, Attached, KeepError, KeepOptions, KeeperClient, socket_path};
use dmalane::load::{Error as LoadError, Next, Part, Reads, TensorStream, model_heap};
use dmalane::queue::Queue;
use dmalane::{HostModel, ModelOptions, OpenFile, Read, ReadFiles, ReadOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::device::{self, Device};
use crate::failure::Failure;
use crate::interrupt::{self, Progress};
use crate::manifest::{ManifestOf, mode};
use crate::memory::{Buffer, Tensor};
use crate::of_process::OfProcess;
use crate::report;

/// How often a thread that waits for a tensor looks for signals.
const EVERY: Duration = Duration::from_millis(40);

/// A model that is open: one or more files of tensors.
#[pyclass(frozen, weakref, module = "dmalane")]
pub(crate) struct Files {
    model: OfProcess<HostModel>,
}

/// Runs a read of `total` bytes without the interpreter's lock, which Ctrl-C ends.
fn run<T: Send>(
    py: Python<'_>,
    total: u64,
    told: Option<&Py<PyAny>>,
    read: impl FnOnce(&mut Watch<'_>) -> Result<T, LoadError> + Send,
) -> PyResult<T> {
    let read = |progress: &Progress| read(&mut |event: Event| progress.watch(&event));
    Ok(interrupt::run(py, total, told, read)?.map_err(Failure::from)?)
}

/// The files of a kept model.
fn attached(lent: &Attached, options: ModelOptions) -> Result<HostModel, Failure> {
    let files = lent.files().iter().map(OpenFile::of).collect::<Result<Vec<_>, _>>()?;
    Ok(HostModel::of_files(files, options)?)
}

/// Parts of tensors, and their bytes.
fn parts_of(parts: Vec<(String, u64, u64, u64)>) -> (Vec<Part>, u64) {
    let part = |(name, start, stop, to)| Part { name, bytes: start..stop, to };
    let parts: Vec<Part> = parts.into_iter().map(part).collect();
    let bytes = |n: u64, part: &Part| n.saturating_add(part.bytes.end.saturating_sub(part.bytes.start));
    let total = parts.iter().fold(0, bytes);
    (parts, total)
}

#[pymethods]
impl Files {
    #[new]
    #[pyo3(signature = (paths, memory_limit=None, direct=None, manifest=None, raw=false, keep=false))]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        memory_limit: Option<u64>,
        direct: Option<bool>,
        manifest: Option<ManifestOf>,
        raw: bool,
        keep: bool,
    ) -> PyResult<Self> {
        let (mode, refuse_raw) = (mode(direct), !raw);
        let opened = interrupt::run(py, if keep { u64::MAX } else { 0 }, None, |progress| -> Result<_, Failure> {
            let manifest = manifest.map(ManifestOf::read).transpose()?.unwrap_or_default();
            let options = ModelOptions { mode, memory_limit, refuse_raw, ..ModelOptions::default() };
            if !keep {
                return Ok(HostModel::open(&paths, ModelOptions { manifest, ..options })?);
            }
            let keeping = KeepOptions { manifest, mode, ..KeepOptions::default() };
            let lent = kept::attach_or_keep(&paths, &keeping, |event| progress.watch(&event))?;
            attached(&lent, options)
        })?;
        Ok(Self { model: OfProcess::new(opened?) })
    }

    /// A model that a keeper lends; with a `device`, rather the one in its memory. `None` for one of such memory.
    #[staticmethod]
    fn attached(py: Python<'_>, name: &str, verify: bool, device: Option<&Device>) -> PyResult<Option<Self>> {
        let opened = interrupt::run(py, if verify { u64::MAX } else { 0 }, None, |progress| -> Result<_, Failure> {
            let keeper = KeeperClient::connect(&socket_path()).map_err(LoadError::from)?;
            let lending = device.map(Device::lends_as).transpose()?.flatten();
            let lent = match keeper.attach_rather(name, lending.as_deref()) {
                Err(KeepError::Elsewhere { .. }) if device.is_some() => return Ok(None),
                lent => lent.map_err(LoadError::from)?,
            };
            if verify {
                lent.check(&mut |bytes| progress.advance(bytes))?;
            }
            attached(&lent, ModelOptions { refuse_raw: true, ..ModelOptions::default() }).map(Some)
        })?;
        Ok(opened?.map(|model| Self { model: OfProcess::new(model) }))
    }

    /// A file that this path opens, by another name in messages. It stays open.
    #[staticmethod]
    fn opened(py: Python<'_>, path: PathBuf, name: &str) -> PyResult<Self> {
        let opened = interrupt::quietly(py, || -> Result<_, Failure> {
            let file = File::open(&path).map_err(|source| LoadError::File { path, what: "open it", source })?;
            let file = OpenFile::new(name, file);
            Ok(HostModel::of_files([file], ModelOptions { refuse_raw: true, ..ModelOptions::default() })?)
        })?;
        Ok(Self { model: OfProcess::new(opened?) })
    }

    /// The same files with another memory limit.
    fn within(&self, memory_limit: u64) -> PyResult<Self> {
        Ok(Self { model: OfProcess::new(self.model.get()?.within(memory_limit)) })
    }

    /// The names, in the order of the files and of the bytes in them.
    fn keys(&self) -> PyResult<Vec<String>> {
        let model = self.model.get()?;
        model.check_open().map_err(Failure::from)?;
        Ok(model.tensors().map(|tensor| tensor.name.clone()).collect())
    }

    /// The text pairs of all headers, or None where no header has any.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let model = self.model.get()?;
        model.check_open().map_err(Failure::from)?;
        let dict = PyDict::new(py);
        let mut any = false;
        for pairs in model.files().iter().filter_map(|file| file.contents().metadata.as_ref()) {
            any = true;
            pairs.iter().try_for_each(|(key, value)| dict.set_item(key, value))?;
        }
        Ok(any.then_some(dict))
    }

    /// The paths of the files.
    fn paths(&self) -> PyResult<Vec<String>> {
        Ok(self.model.get()?.files().iter().map(|file| file.path().display().to_string()).collect())
    }

    /// The kind of each file.
    fn containers(&self) -> PyResult<Vec<&'static str>> {
        Ok(self.model.get()?.files().iter().map(|file| file.contents().container.name).collect())
    }

    /// Type, shape, bytes, path and file offset of a tensor.
    fn describe(&self, name: &str) -> PyResult<(String, Vec<u64>, u64, String, u64)> {
        let (file, tensor) = self.model.get()?.find(name).map_err(Failure::from)?;
        let path = file.path().display().to_string();
        Ok((tensor.dtype.to_string(), tensor.shape.to_vec(), tensor.len, path, tensor.at.bits()))
    }

    /// Reads all tensors.
    #[pyo3(signature = (align=None, progress=None))]
    fn load(&self, py: Python<'_>, align: Option<u64>, progress: Option<Py<PyAny>>) -> PyResult<Vec<Tensor>> {
        let model = self.model.get()?;
        let total = model.tensors().map(|tensor| tensor.len).sum();
        let tensors = run(py, total, progress.as_ref(), |watch| model.read_all(align, watch))?;
        Ok(tensors.into_iter().map(Tensor::new).collect())
    }

    /// Reads one tensor.
    fn get(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        let model = self.model.get()?;
        let (_, tensor) = model.find(name).map_err(Failure::from)?;
        Ok(Tensor::new(run(py, tensor.len, None, |watch| model.read(name, watch))?))
    }

    /// Reads a slice of a tensor: a range of each dimension. The result has the shape `shape`, which has as many
    /// elements.
    fn slice(&self, py: Python<'_>, name: &str, ranges: Vec<(u64, u64)>, shape: Vec<u64>) -> PyResult<Tensor> {
        let model = self.model.get()?;
        let (_, tensor) = model.find(name).map_err(Failure::from)?;
        let ranges: Vec<_> = ranges.into_iter().map(|(start, stop)| start..stop).collect();
        Ok(Tensor::new(run(py, tensor.len, None, |watch| model.slice(name, &ranges, shape, watch))?))
    }

    /// Reads bytes `start..stop` of tensors to their places in a new buffer of `len` bytes, for each part
    /// `(name, start, stop, place)`. The other bytes are zero. Whole tensors are compared with the manifest.
    fn read(&self, py: Python<'_>, parts: Vec<(String, u64, u64, u64)>, len: u64) -> PyResult<Buffer> {
        let model = self.model.get()?;
        let (parts, total) = parts_of(parts);
        let buf = run(py, total, None, |watch| model.read_parts(&parts, len, watch))?;
        Ok(Buffer::from_shared(buf, len.max(1) as usize))
    }

    /// Refuses a slice of a tensor that is to be compared with a manifest.
    fn check_slice(&self, name: &str) -> PyResult<()> {
        Ok(self.model.get()?.check_slice(name).map_err(Failure::from)?)
    }

    /// Reads bytes `start..stop` of tensors onto a device, for each part `(name, start, stop, address)`, through memory
    /// that is registered once. `lent` is the memory there, address and length of each piece, that of `owner`, which
    /// lives on where the device may still write to it after an error.
    fn read_onto(
        &self,
        py: Python<'_>,
        device: &Device,
        parts: Vec<(String, u64, u64, u64)>,
        lent: Vec<(u64, u64)>,
        owner: Py<PyAny>,
    ) -> PyResult<()> {
        let model = self.model.get()?;
        let (parts, total) = parts_of(parts);
        let late = AtomicBool::new(false);
        // Who waits for others' reads looks for signals, however little is read then.
        let total = if device.is_in_use() { u64::MAX } else { total };
        let read = interrupt::run(py, total, None, |progress| {
            let mut device = device.lock_unless(|| progress.is_cancelled())?;
            let _lent = device::borrow(&device, lent)?;
            let mut watch = |event: Event| progress.watch(&event);
            let read = model.read_parts_onto(&mut device, CardAddr::new(0).into(), &parts, &mut watch);
            late.store(device.queue_mut().in_flight() > 0, Ordering::Relaxed);
            Ok::<_, Failure>(read?)
        });
        if late.into_inner() {
            std::mem::forget(owner);
        }
        Ok(read??)
    }

    /// The same files with the same limit and reports, read by this number of threads, whose `close` ends its own reads
    /// alone.
    #[pyo3(signature = (threads=None))]
    fn apart(&self, threads: Option<usize>) -> PyResult<Self> {
        Ok(Self { model: OfProcess::new(self.model.get()?.apart(threads)) })
    }

    /// Begins to read the tensors in the order of their bytes, all or those of these names.
    #[pyo3(signature = (names=None))]
    fn stream(&self, names: Option<HashSet<String>>) -> PyResult<Stream> {
        Ok(Stream { stream: OfProcess::new(self.model.get()?.stream(names).map_err(Failure::from)?) })
    }

    /// Measures what the machine reaches at best with these files: bytes per second of reading the first 256 MiB of
    /// them, as they are read now, into memory that is there; and of making such memory. Empty where the limit leaves
    /// no memory for that.
    fn references<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (model, dict) = (self.model.get()?, PyDict::new(py));
        if let Some(rates) = run(py, u64::MAX, None, |watch| model.host_rates(watch))? {
            dict.set_item("bytes", rates.bytes)?;
            dict.set_item("read", rates.read)?;
            dict.set_item("first_touch", rates.first_touch)?;
        }
        Ok(dict)
    }

    /// Returns a report of the reads so far.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let model = self.model.get()?;
        let dict = report::of_reads(py, &model.reads())?;
        let (used, limit) = model.memory();
        dict.set_item("memory_used", used)?;
        dict.set_item("memory_limit", limit)?;
        report::add_files(&dict, model)?;
        Ok(dict)
    }

    /// Refuses everything from now on, and ends reads in flight. Tensors keep their memory. Nothing in a child of
    /// `fork`, where a `with` ends too.
    fn close(&self) {
        if let Ok(model) = self.model.get() {
            model.close();
        }
    }
}

/// Tensors in the order of their bytes. A thread reads ahead; it ends with this object.
#[pyclass(module = "dmalane")]
pub(crate) struct Stream {
    stream: OfProcess<TensorStream>,
}

#[pymethods]
impl Stream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Tensor>> {
        let stream = self.stream.get_mut()?;
        loop {
            let next = py.detach(|| stream.next_within(EVERY)).map_err(Failure::from)?;
            let stopped = match next {
                Next::Tensor(tensor) => return Ok(Some(Tensor::new(tensor))),
                Next::End => return Ok(None),
                // Tensors may be garbage that nobody has collected.
                Next::NeedsMemory => py.import("gc").and_then(|gc| gc.call_method0("collect")).map(drop),
                Next::Pending => Ok(()),
            };
            if let Err(error) = stopped.and_then(|()| py.check_signals()) {
                stream.cancel();
                return Err(error);
            }
        }
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
    let source = OpenFile::open(&path).map_err(Failure::from)?;
    let len = stop.map_or_else(|| source.size(), Ok).map_err(Failure::from)?.saturating_sub(start);
    if len == 0 {
        return Err(PyValueError::new_err("there are no bytes to read"));
    }
    let extent = Extent { source: 0, at: FileOffset::new(start), len, buffer: 0, to: 0 };
    let job = Job { buffers: vec![len], extents: vec![extent] };
    let options = ReadOptions { mode: mode(direct), ..ReadOptions::default() };
    let read = interrupt::run(py, len, None, |progress| {
        let watch = |event| progress.watch(&event);
        Read::sources(vec![source]).options(options).job(job).watch(watch).into_memory(model_heap())
    })?;
    let ReadFiles { mut filled, methods } = read.map_err(Failure::from)?;
    let buffer = filled.buffers.pop().ok_or_else(|| Failure::new("Error", "a buffer is missing"))?;
    let mut reads = Reads::default();
    reads.add(filled.report, methods.into_iter().map(|method| (path.clone(), method)));
    Ok((Buffer::from_shared(buffer.into_shared(), len as usize), report::of_reads(py, &reads)?))
}
