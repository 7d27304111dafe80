//! Buffers that leave the process, as descriptors that a command inherits.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use dmalane::dma::export_dma_buf;
use dmalane::load::fill::FilledBuf;
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::failure::Failure;

/// Exit statuses of shells for a command that cannot be run, and for one that is not there.
const NOT_RUN: [u8; 2] = [126, 127];

/// Descriptors of buffers, with their bytes.
pub struct Exported(Vec<(OwnedFd, usize)>);

impl Exported {
    /// Makes descriptors of buffers, which are those of their heap: memfds or dma-bufs. `dma_buf` wraps memfds.
    pub fn new(buffers: &[FilledBuf], dma_buf: bool) -> Result<Self, Failure> {
        let export = |buffer: &FilledBuf| {
            let fd = match dma_buf {
                true => export_dma_buf(&buffer.shared().reference()),
                false => match buffer.shared().export() {
                    Some(fd) => fd.try_clone_to_owned(),
                    None => Err(io::ErrorKind::Unsupported.into()),
                },
            };
            let fd = fd.map_err(|e| Failure::because("the memory cannot be exported", &e))?;
            Ok((fd, buffer.len()))
        };
        buffers.iter().map(export).collect::<Result<_, Failure>>().map(Self)
    }

    /// Becomes the command, which so has our process ID, exit status and signals. Returns what kept it from starting.
    pub fn run(self, command: &[OsString]) -> Failure {
        let Self(buffers) = self;
        if let Some(error) = buffers.iter().find_map(|(fd, _)| fcntl_setfd(fd, FdFlags::empty()).err()) {
            return error.into();
        }
        // Each of our memfds has this seal; a dma-buf has no seals.
        let sealed = |fd: &OwnedFd| fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let kind = if buffers.iter().all(|(fd, _)| sealed(fd)) { "memfd" } else { "dma-buf" };
        let list = |words: &mut dyn Iterator<Item = String>| words.collect::<Vec<_>>().join(" ");
        let [program, arguments @ ..] = command else { return Failure::usage("--export needs a command") };
        let error = Command::new(program)
            .args(arguments)
            // A mark of the Python program of the same name, for this process.
            .env_remove("_DMALANE_PROGRAM")
            .env("DMALANE_FD", list(&mut buffers.iter().map(|(fd, _)| fd.as_raw_fd().to_string())))
            .env("DMALANE_SIZE", list(&mut buffers.iter().map(|(_, bytes)| bytes.to_string())))
            .env("DMALANE_KIND", kind)
            .exec();
        let status = NOT_RUN[usize::from(error.kind() == io::ErrorKind::NotFound)];
        Failure::because(format!("cannot run {}", program.to_string_lossy()), &error).status(status)
    }
}
