//! Files as inputs of the pipeline.

use std::fs::File;
use std::path::Path;

use dmalane_file::{Error, FileQueue, Mode, Options, residency};
use dmalane_load::Input;

use crate::read::MOSTLY;

/// Opens a file once, for its header, its bytes and comparisons alike. With [`Mode::Auto`], a file of which most is in
/// the page cache is read from there; of any other the blocks that are cached, and the rest with direct I/O where the
/// file system supports it.
///
/// # Errors
/// Those of [`FileQueue::open`].
pub fn open_file(path: impl AsRef<Path>, options: Options) -> Result<Input<FileQueue>, Error> {
    let queue = FileQueue::open(path, options)?;
    match options.mode == Mode::Auto && queue.how().direct {
        true => input(from_cache(queue, options)?),
        false => input(queue),
    }
}

/// The same queue, or one through the page cache where that has most of the file.
fn from_cache(queue: FileQueue, options: Options) -> Result<FileQueue, Error> {
    let len = queue.file().metadata().map_or(0, |meta| meta.len());
    let Ok(cached) = residency(queue.file(), 0, len) else { return Ok(queue) };
    if len == 0 || cached.share() < MOSTLY {
        return Ok(match cached.cached {
            0 => queue,
            _ => queue.from_cache_where_cached().because(format!("{cached}: copied from there, the rest read past it")),
        });
    }
    let path = queue.path().to_owned();
    let file = queue.file().try_clone().map_err(|source| Error::Open { path: path.clone(), source })?;
    let buffered = FileQueue::from_file(file, path, Options { mode: Mode::Buffered, ..options })?;
    Ok(buffered.because(cached.to_string()))
}

/// Takes a file that is open already and calls it `name`, which decides whether it is read as safetensors.
///
/// # Errors
/// Those of [`FileQueue::from_file`].
pub fn open_as(file: File, name: impl AsRef<Path>, options: Options) -> Result<Input<FileQueue>, Error> {
    input(FileQueue::from_file(file, name.as_ref(), options)?)
}

fn input(queue: FileQueue) -> Result<Input<FileQueue>, Error> {
    let path = queue.path().to_owned();
    match queue.file().try_clone() {
        Ok(file) => Ok(Input { path, file, queue, select: None }),
        Err(source) => Err(Error::Open { path, source }),
    }
}
