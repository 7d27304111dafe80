//! Files into memory: read while the memory is still being allocated, and registered or copied to a device meanwhile.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dmalane_addr::Access;
use dmalane_dma::{Heap, Registrar};
use dmalane_queue::DeviceAddr;

use super::job::{Onto, read};
use super::method::ReadFiles;
use super::options::ReadOptions;
use crate::device::OpenDevice;
use crate::error::Error;
use crate::fill::{BufferMemory, Event, FilledBuf, Job, Watch};
use crate::manifest::{Manifest, check, hash_regions};
use crate::open_file::OpenFile;
use crate::parallel::in_parallel;

/// Reads files into buffers of a heap, one buffer per file by default.
///
/// Reading starts as soon as the first chunk is allocated: T(first chunk) + max(T(rest of the allocation), T(I/O)).
///
/// ```
/// use dmalane_device::RamDevice;
/// use dmalane_dma::AnonHeap;
/// use dmalane_load::{OpenDevice, Read, ReadOptions};
/// use dmalane_queue::DeviceAddr;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.bin");
/// std::fs::write(&path, vec![7; 5_000_000])?;
/// let mut options = ReadOptions::default();
/// options.fill.checksum = true;
/// let read = Read::files([&path]).options(options).into_memory(&AnonHeap::new())?;
/// println!("{:x?}; {}", read.filled.buffers[0].checksum(), read.filled.report);
///
/// // Into memory, and from there to a device:
/// let mut device = OpenDevice::new(Box::new(RamDevice::new(8 << 20)?), Default::default())?;
/// let places = [DeviceAddr::Card(device.memory_mut().reserve(5_000_000)?.first())];
/// let read = Read::files([&path]).copy_to_device(&mut device, &places).into_memory(&AnonHeap::new())?;
/// assert!(read.filled.mappings[0].len() >= 3, "registered chunk by chunk");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Read<'a> {
    sources: Result<Vec<OpenFile>, Error>,
    job: Option<Job>,
    options: ReadOptions,
    register: Option<(&'a dyn Registrar, Access)>,
    device: Option<Onto<'a>>,
    manifest: Option<&'a Manifest>,
    watch: Box<Watch<'a>>,
}

impl<'a> Read<'a> {
    /// Files by name. They are opened here; errors are returned by [`Read::into_memory`].
    pub fn files<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().map(|path| path.as_ref().to_owned()).collect();
        Self { sources: in_parallel(paths, OpenFile::open), ..Self::sources(Vec::new()) }
    }

    /// Files that are open already.
    pub fn sources(sources: Vec<OpenFile>) -> Self {
        Self {
            sources: Ok(sources),
            job: None,
            options: ReadOptions::default(),
            register: None,
            device: None,
            manifest: None,
            watch: Box::new(|_| ControlFlow::Continue(())),
        }
    }

    /// Sets the options.
    pub fn options(mut self, options: ReadOptions) -> Self {
        self.options = options;
        self
    }

    /// Reads these extents into these buffers, instead of each file as a whole into a buffer of its own. Sources of the
    /// job are files in the order given.
    pub fn job(mut self, job: Job) -> Self {
        self.job = Some(job);
        self
    }

    /// Compares the files, each read as a whole, with a manifest: they are hashed as their bytes arrive. An empty
    /// manifest is none.
    pub fn manifest(mut self, manifest: &'a Manifest) -> Self {
        self.manifest = Some(manifest);
        self
    }

    /// Calls `watch` with every event; it may stop the job.
    pub fn watch(mut self, watch: impl FnMut(Event) -> ControlFlow<()> + Send + 'a) -> Self {
        self.watch = Box::new(watch);
        self
    }

    /// Pins and maps every chunk as soon as its memory is present: one call of `registrar` for each step, while reads
    /// into the chunks before it are in flight.
    ///
    /// The device sees a chunk from the moment of [`Event::Allocated`], and may
    /// use the bytes of an extent from the moment that it is complete. With an access that lets the device write,
    /// checksums are of what it has left there.
    pub fn mapped(mut self, registrar: &'a dyn Registrar, access: Access) -> Self {
        self.register = Some((registrar, access));
        self
    }

    /// Copies the buffers to a device as well, the first byte of each to the place with its number: the transfer of a
    /// fragment begins as soon as its bytes have arrived, or were hashed with checksums on, while later bytes are being
    /// read or allocated. Bytes that no extent names go there as zeroes. Every chunk is mapped for the device, which
    /// may only read it; this replaces [`Read::mapped`].
    ///
    /// The device's queue has nothing in flight. An extent is complete when the device has all of it.
    pub fn copy_to_device(mut self, device: &'a mut OpenDevice, places: &'a [DeviceAddr]) -> Self {
        self.device = Some(Onto::Copied(device, places));
        self
    }

    /// Reads into buffers of `heap`, and returns when everything has arrived, on the device too.
    ///
    /// # Errors
    /// [`Error`]. [`Error::Differs`] for other files than those of the manifest.
    /// [`FillError::Map`](crate::fill::FillError::Map) where the registrar refuses;
    /// [`Transfer`](crate::fill::FillError::Transfer) where the device refuses, fails, or ends nothing for half a
    /// minute: then its queue is stopped.
    /// Reads and transfers in flight have ended by then, and nothing is left mapped or pinned; a transfer that the
    /// device does not let go of stays in flight, and keeps its memory and its mapping.
    pub fn into_memory(self, heap: &dyn Heap) -> Result<ReadFiles, Error> {
        let Self { sources, job, mut options, register, device, manifest, mut watch } = self;
        let sources = sources?;
        let lens = || sources.iter().map(OpenFile::size).collect::<Result<Vec<_>, _>>();
        let expected = match manifest {
            Some(manifest) => manifest.expect(sources.iter().map(|source| &*source.path).zip(lens()?))?,
            None => Vec::new(),
        };
        if !expected.is_empty() {
            options.fill.hash_regions = Some(Arc::new(hash_regions(&expected)));
        }
        let job = job.map_or_else(|| Ok::<_, Error>(Job::whole(&lens()?)), Ok)?;
        let memory = BufferMemory { register, ..BufferMemory::of(heap) };
        let read = read(memory, device, &sources, &job, &options, &mut *watch, true)?;
        check(&expected, read.filled.buffers.iter().map(FilledBuf::digests))?;
        Ok(read)
    }
}
