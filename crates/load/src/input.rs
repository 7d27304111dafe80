//! Files with the queues that read them: the inputs of a load.

use std::path::Path;
use std::sync::Arc;

use dmalane_file::{FileOptions, FileQueue, Mode, SharedReads};

use crate::choose::{Choice, workers};
use crate::container::{Model, Tensor};
use crate::error::Error;
use crate::open_file::OpenFile;
use crate::parallel::in_parallel;

/// A file to load, and the queues that read it.
pub struct Input<S> {
    /// For its header, its size, and comparisons.
    pub source: OpenFile,
    /// For its bytes.
    pub queue: S,
    /// Queues of further workers: a load has as many workers as every file has queues, or fewer where more do not make
    /// the bytes come faster. Empty for a file that the disk reads; where the processor copies out of the page cache,
    /// several do so, and hash, at a time.
    pub more: Vec<S>,
}

impl<S> Input<S> {
    /// A file that one worker reads through `queue`.
    pub fn new(source: OpenFile, queue: S) -> Self {
        Self { source, queue, more: Vec::new() }
    }

    /// The length of a file of these contents, and the tensors that are read of it; `None` where all of it is, as where
    /// it is hashed.
    pub(crate) fn wanted<'a>(&self, model: &'a Model, hashed: bool) -> (u64, Option<&'a [Arc<Tensor>]>) {
        (model.len, Some(&*model.tensors).filter(|_| self.source.is_selected() && !hashed))
    }
}

/// Opens a file once, for its header, its bytes and comparisons alike. With [`Mode::Auto`], short files and mostly
/// cached files are read from the page cache. Of any other file, cached blocks are read from there, and the rest with
/// direct I/O where the file system supports it.
///
/// # Errors
/// [`Error::Open`], [`Error::File`].
pub fn open_file(path: impl AsRef<Path>, options: FileOptions) -> Result<Input<FileQueue>, Error> {
    OpenFile::regular(path)?.into_input(options)
}

/// Adds to each file the queues that read it, as [`open_file`] does. Those of one worker share a ring.
///
/// # Errors
/// As of [`open_file`].
pub fn open_inputs(files: Vec<OpenFile>, options: FileOptions) -> Result<Vec<Input<FileQueue>>, Error> {
    let choose = |file: OpenFile| {
        let len = if options.mode == Mode::Auto { file.known_size()? } else { 0 };
        let choice = Choice::new(&*file.file()?, options.mode, 0..len, len);
        Ok::<_, Error>((file, choice))
    };
    let chosen = in_parallel(files, choose)?;
    // Several where the processor copies out of the page cache, and hashes.
    let cached = chosen.iter().filter_map(|(_, choice)| Some(choice.cached?.cached));
    let workers = workers(cached.fold(0, u64::saturating_add));
    let reads: Vec<_> = (0..workers).map(|_| SharedReads::default()).collect();
    in_parallel(chosen, |(file, choice)| file.with_queues(options, choice, &reads))
}

impl OpenFile {
    /// Opens a file or a block device by name, never waiting for the other end of a FIFO.
    pub(crate) fn regular(path: impl AsRef<Path>) -> Result<Self, Error> {
        let options = FileOptions { mode: Mode::Buffered, ..FileOptions::default() };
        let queue = FileQueue::open(path, options)?;
        Ok(Self::of_handle(queue.handle().clone()))
    }

    /// Adds the queues that read it, as [`open_file`] does.
    ///
    /// # Errors
    /// [`Error::Open`], [`Error::File`].
    pub fn into_input(self, options: FileOptions) -> Result<Input<FileQueue>, Error> {
        Ok(open_inputs(vec![self], options)?.pop().expect("one for each file"))
    }

    /// A queue for each worker, with its reads.
    fn with_queues(
        self,
        options: FileOptions,
        Choice { mode, fallback, .. }: Choice,
        reads: &[SharedReads],
    ) -> Result<Input<FileQueue>, Error> {
        let open = |reads| {
            let queue = FileQueue::of_handle(self.handle.clone(), FileOptions { mode, ..options })?.sharing(reads);
            Ok::<_, Error>(if options.mode == Mode::Auto { queue.from_cache_where_cached() } else { queue })
        };
        let mut queues = reads.iter().map(open).collect::<Result<Vec<_>, _>>()?.into_iter();
        let first = queues.next().expect("a worker");
        // Without direct I/O, its reason is the one that counts.
        let told = mode == Mode::Buffered || first.how().direct;
        let queue = fallback.into_iter().filter(|_| told).fold(first, FileQueue::because);
        Ok(Input { source: self, queue, more: queues.collect() })
    }
}
