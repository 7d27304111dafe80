//! Files as inputs of the pipeline.

use std::path::Path;

use dmalane_load::Input;
use dmalane_uring::{Error, FileChannel, Options};

/// Opens a file once, for its header, its bytes and comparisons alike.
///
/// # Errors
/// Those of [`FileChannel::open`].
pub fn open_file(path: impl AsRef<Path>, options: Options) -> Result<Input<FileChannel>, Error> {
    let path = path.as_ref();
    let channel = FileChannel::open(path, options)?;
    let file = channel.file().try_clone().map_err(|source| Error::Open { path: path.to_owned(), source })?;
    Ok(Input { path: path.to_owned(), file, channel })
}
