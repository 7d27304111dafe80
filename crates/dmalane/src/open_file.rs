//! Files as inputs of the pipeline.

use std::fs::File;
use std::path::Path;

use dmalane_file::{Error, FileOptions, FileQueue, Mode};
use dmalane_load::Input;

use crate::choose::{Choice, workers};
use crate::read::size;

/// Opens a file once, for its header, its bytes and comparisons alike. With [`Mode::Auto`], short files and mostly
/// cached files are read from the page cache. Of any other file, cached blocks are read from there, and the rest with
/// direct I/O where the file system supports it.
///
/// # Errors
/// Those of [`FileQueue::open`].
pub fn open_file(path: impl AsRef<Path>, options: FileOptions) -> Result<Input<FileQueue>, Error> {
    choose(FileQueue::open(path, options)?, options)
}

/// Takes a file that is open already and names it `name`. The name and the first bytes decide the container format, and
/// it is read as by [`open_file`].
///
/// # Errors
/// Those of [`FileQueue::from_file`].
pub fn open_as(file: File, name: impl AsRef<Path>, options: FileOptions) -> Result<Input<FileQueue>, Error> {
    choose(FileQueue::from_file(file, name.as_ref(), options)?, options)
}

/// Chooses how a file is read that was opened with these options.
fn choose(queue: FileQueue, mut options: FileOptions) -> Result<Input<FileQueue>, Error> {
    if options.mode != Mode::Auto {
        return input(queue, Vec::new());
    }
    let failed = |source| Error::Open { path: queue.path().to_owned(), source };
    let len = size(queue.file()).map_err(failed)?;
    let Choice { mode, fallback, cached } = Choice::new(queue.file(), options.mode, 0..len, len);
    let first = match fallback {
        // Without direct I/O, its reason is the one that counts.
        Some(why) if queue.how().direct => {
            options.mode = mode;
            FileQueue::from_file(duplicate(&queue)?, queue.path(), options)?.because(why)
        }
        _ => queue,
    };
    let open = |_| Ok(FileQueue::from_file(duplicate(&first)?, first.path(), options)?.from_cache_where_cached());
    let more = (1..workers(cached.map_or(0, |cached| cached.cached))).map(open).collect::<Result<_, Error>>()?;
    input(first.from_cache_where_cached(), more)
}

fn duplicate(queue: &FileQueue) -> Result<File, Error> {
    queue.file().try_clone().map_err(|source| Error::Open { path: queue.path().to_owned(), source })
}

fn input(queue: FileQueue, more: Vec<FileQueue>) -> Result<Input<FileQueue>, Error> {
    let (path, file) = (queue.path().to_owned(), duplicate(&queue)?);
    Ok(Input { path, file, queue, more, select: None })
}
