//! Files as inputs of the pipeline.

use std::fs::File;
use std::path::Path;

use dmalane_file::{Error, Fallback, FileOptions, FileQueue, Mode, residency};
use dmalane_load::Input;

use crate::read::{MOSTLY, workers};

/// Opens a file once, for its header, its bytes and comparisons alike. With [`Mode::Auto`], a file of which most is in
/// the page cache is read from there; of any other the blocks that are cached, and the rest with direct I/O where the
/// file system supports it.
///
/// # Errors
/// Those of [`FileQueue::open`].
pub fn open_file(path: impl AsRef<Path>, options: FileOptions) -> Result<Input<FileQueue>, Error> {
    let queue = FileQueue::open(path, options)?;
    let len = queue.file().metadata().map_or(0, |meta| meta.len());
    let cached = residency(queue.file(), 0, len).unwrap_or_default();
    if options.mode != Mode::Auto || cached.cached == 0 {
        return input(queue, Vec::new());
    }
    let open = |options| FileQueue::from_file(duplicate(&queue)?, queue.path(), options);
    let (options, reason) = match cached.share() >= MOSTLY {
        // Without direct I/O, its reason is the one that counts.
        _ if !queue.how().direct => (options, None),
        true => (FileOptions { mode: Mode::Buffered, ..options }, Some(Fallback::Cached(cached))),
        false => (options, Some(Fallback::PartlyCached(cached))),
    };
    let first = open(options)?.from_cache_where_cached();
    let first = match reason {
        Some(reason) => first.because(reason),
        None => first,
    };
    let more = (1..workers(cached.cached)).map(|_| Ok(open(options)?.from_cache_where_cached()));
    input(first, more.collect::<Result<_, Error>>()?)
}

fn duplicate(queue: &FileQueue) -> Result<File, Error> {
    queue.file().try_clone().map_err(|source| Error::Open { path: queue.path().to_owned(), source })
}

/// Takes a file that is open already and names it `name`. The name and the first bytes decide the container format.
///
/// # Errors
/// Those of [`FileQueue::from_file`].
pub fn open_as(file: File, name: impl AsRef<Path>, options: FileOptions) -> Result<Input<FileQueue>, Error> {
    input(FileQueue::from_file(file, name.as_ref(), options)?, Vec::new())
}

fn input(queue: FileQueue, more: Vec<FileQueue>) -> Result<Input<FileQueue>, Error> {
    let (path, file) = (queue.path().to_owned(), duplicate(&queue)?);
    Ok(Input { path, file, queue, more, select: None })
}
