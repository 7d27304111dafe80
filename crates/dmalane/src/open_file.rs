//! Files as inputs of the pipeline.

use std::fs::File;
use std::path::Path;

use dmalane_file::{Error, FileQueue, Options};
use dmalane_load::Input;

/// Opens a file once, for its header, its bytes and comparisons alike.
///
/// # Errors
/// Those of [`FileQueue::open`].
pub fn open_file(path: impl AsRef<Path>, options: Options) -> Result<Input<FileQueue>, Error> {
    input(FileQueue::open(path, options)?)
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
        Ok(file) => Ok(Input { path, file, queue }),
        Err(source) => Err(Error::Open { path, source }),
    }
}
