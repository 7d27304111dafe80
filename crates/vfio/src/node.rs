//! Opening the nodes of VFIO, with the reason of a refusal.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;

use crate::Error;

/// Opens a node of this kernel module for reading and writing.
pub(crate) fn open(path: &Path, module: &'static str) -> Result<OwnedFd, Error> {
    let opened = File::options().read(true).write(true).open(path).map(OwnedFd::from);
    opened.map_err(|source| match Errno::from_io_error(&source) {
        Some(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Error::NoModule { path: path.to_owned(), module },
        Some(Errno::ACCESS | Errno::PERM) => Error::NoPermission { path: path.to_owned() },
        Some(Errno::BUSY) => Error::Busy { path: path.to_owned() },
        _ => Error::kernel(format_args!("open {}", path.display()))(source),
    })
}
