//! Files with the queues that read them: the inputs of a load.

use std::path::Path;
use std::sync::Arc;

use dmalane_file::{FileOptions, FileQueue, Mode};

use crate::choose::{Choice, workers};
use crate::container::{Model, Tensor};
use crate::error::Error;
use crate::open_file::OpenFile;

/// A file to load, and the queues that read it.
pub struct Input<S> {
    /// For its header, its size, and comparisons.
    pub source: OpenFile,
    /// For its bytes.
    pub queue: S,
    /// Queues of further workers: each file is read by as many workers as every file has queues. Empty for a file
    /// that the disk reads; where the processor copies out of the page cache, several do so, and hash, at a time.
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
    let queue = FileQueue::open(path, options)?;
    let path = queue.path().to_owned();
    let file =
        queue.file().try_clone().map_err(|source| Error::File { path: path.clone(), what: "open it", source })?;
    choose(OpenFile::new(path, file), queue, options)
}

impl OpenFile {
    /// Adds the queues that read it, as [`open_file`] does.
    ///
    /// # Errors
    /// [`Error::Open`], [`Error::File`].
    pub fn into_input(self, options: FileOptions) -> Result<Input<FileQueue>, Error> {
        let queue = self.queue(options)?;
        choose(self, queue, options)
    }

    fn queue(&self, options: FileOptions) -> Result<FileQueue, Error> {
        let file = self.file.try_clone().map_err(|source| self.error("open it", source))?;
        Ok(FileQueue::from_file(file, &self.path, options)?)
    }
}

/// Chooses how a file is read that was opened with these options.
fn choose(source: OpenFile, queue: FileQueue, mut options: FileOptions) -> Result<Input<FileQueue>, Error> {
    if options.mode != Mode::Auto {
        return Ok(Input::new(source, queue));
    }
    let len = source.size()?;
    let Choice { mode, fallback, cached } = Choice::new(queue.file(), options.mode, 0..len, len);
    let first = match fallback {
        // Without direct I/O, its reason is the one that counts.
        Some(why) if queue.how().direct => {
            options.mode = mode;
            source.queue(options)?.because(why)
        }
        _ => queue,
    };
    let open = |_| Ok(source.queue(options)?.from_cache_where_cached());
    let more = (1..workers(cached.map_or(0, |cached| cached.cached))).map(open).collect::<Result<_, Error>>()?;
    Ok(Input { source, queue: first.from_cache_where_cached(), more })
}
