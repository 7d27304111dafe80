//! Files into memory, read while the memory is still being allocated.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use dmalane_dma::Heap;

use super::job::{ReadTo, read};
use super::method::ReadFiles;
use super::options::ReadOptions;
use crate::error::Error;
use crate::fill::{Event, FilledBuf, Job, Watch};
use crate::manifest::{Manifest, check, hash_regions, whole};
use crate::open_file::OpenFile;
use crate::parallel::in_parallel;

/// Reads files into buffers of a heap, one buffer per file by default.
///
/// Reading starts as soon as the first chunk is allocated: T(first chunk) + max(T(rest of the allocation), T(I/O)).
///
/// ```
/// use dmalane_dma::AnonHeap;
/// use dmalane_load::{Read, ReadOptions};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.bin");
/// std::fs::write(&path, vec![7; 5_000_000])?;
/// let mut options = ReadOptions::default();
/// options.fill.checksum = true;
/// let read = Read::files([&path]).options(options).into_memory(&AnonHeap::new())?;
/// println!("{:x?}; {:?}", read.filled.buffers[0].checksum(), read.filled.report.wall);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Read<'a> {
    sources: Result<Vec<OpenFile>, Error>,
    job: Option<Job>,
    options: ReadOptions,
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

    /// Calls `watch` with every event; it may stop the job, and may pin and map each chunk for a device as soon as it
    /// is [allocated](Event::Allocated), while reads into the chunks before it are in flight:
    ///
    /// ```
    /// # use std::ops::ControlFlow;
    /// # use dmalane_addr::Access;
    /// # use dmalane_device::NoIommu;
    /// # use dmalane_dma::{AnonHeap, Registrar};
    /// # use dmalane_load::{Read, fill::Event};
    /// # let (folder, registrar) = (tempfile::tempdir()?, NoIommu::new());
    /// # let path = folder.path().join("model.bin");
    /// # std::fs::write(&path, vec![7; 5_000_000])?;
    /// let mut mappings = Vec::new();
    /// let watch = |event| {
    ///     if let Event::Allocated { offset, len, reference, .. } = event {
    ///         let range = offset as usize..(offset + len) as usize;
    ///         let pinned = registrar.pin_range(&reference, range);
    ///         mappings.push(pinned.and_then(|pinned| registrar.map(pinned, Access::READ)));
    ///     }
    ///     ControlFlow::Continue(())
    /// };
    /// let read = Read::files([path]).watch(watch).into_memory(&AnonHeap::new())?;
    /// let mappings = mappings.into_iter().collect::<Result<Vec<_>, _>>()?;
    /// assert!(mappings.len() >= 3, "chunk by chunk");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn watch(mut self, watch: impl FnMut(Event) -> ControlFlow<()> + Send + 'a) -> Self {
        self.watch = Box::new(watch);
        self
    }

    /// Reads into buffers of `heap`, and returns when everything has arrived.
    ///
    /// # Errors
    /// [`Error`]. [`Error::Differs`] for other files than those of the manifest. Reads in flight have ended by then.
    pub fn into_memory(self, heap: &dyn Heap) -> Result<ReadFiles, Error> {
        let Self { sources, job, mut options, manifest, mut watch } = self;
        let sources = sources?;
        let lens = || sources.iter().map(OpenFile::size).collect::<Result<Vec<_>, _>>();
        let expected = match manifest {
            Some(manifest) => manifest.expect(sources.iter().map(|source| &*source.path).zip(lens()?))?,
            None => Vec::new(),
        };
        let compared = whole(&expected);
        options.fill.hash_regions = hash_regions(&compared).or(options.fill.hash_regions);
        let job = job.map_or_else(|| Ok::<_, Error>(Job::whole(&lens()?)), Ok)?;
        let read = read(ReadTo::Heap(heap), &sources, &job, &options, &mut *watch, true)?;
        check(&compared, read.filled.buffers.iter().map(FilledBuf::digests))?;
        Ok(read)
    }
}
