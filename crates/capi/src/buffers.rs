//! Buffers that files were read into, behind the numbers that C holds.

use std::fs::File;
use std::ops::Bound;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane::dma::{Needs, pick};
use dmalane::file::{Error, Mode};
use dmalane::load::fill::{FillError, FilledBuf};
use dmalane::{AllocAndRead, ReadError, ReadOptions};
use dmalane_vm::Errno;

use crate::objects::{Number, Numbered, Refused, chain, lock};

static BUFFERS: Mutex<Numbered<FilledBuf>> = Mutex::new(Numbered::new());

const SHAREABLE: u32 = 1;
const DIRECT: u32 = 1 << 1;
const BUFFERED: u32 = 1 << 2;
const CHECKSUM: u32 = 1 << 3;

// Numbers of asm-generic/errno.h that the bind manager has no use for.
const EIO: i32 = 5;
const EISDIR: i32 = 21;
const ENODATA: i32 = 61;
const ETIMEDOUT: i32 = 110;
const ESTALE: i32 = 116;

/// `struct dml_read_config`, by value.
pub(crate) struct Request {
    pub(crate) flags: u32,
    pub(crate) threads: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) chunk: u64,
    pub(crate) limit: u64,
    pub(crate) timeout_ms: u64,
}

pub(crate) fn alloc_and_read(file: BorrowedFd<'_>, request: &Request) -> Result<(u64, Arc<FilledBuf>), Refused> {
    let has = |flag| request.flags & flag != 0;
    let mode = match (has(DIRECT), has(BUFFERED)) {
        (false, false) => Mode::Auto,
        (true, false) => Mode::Direct,
        (false, true) => Mode::Buffered,
        (true, true) => return Err(Refused::new(Errno::Inval, "both direct and buffered")),
    };
    if request.flags & !(SHAREABLE | DIRECT | BUFFERED | CHECKSUM) != 0 {
        return Err(Refused::new(Errno::Inval, format_args!("flags {:#x}", request.flags)));
    }
    if request.threads > 64 {
        return Err(Refused::new(Errno::Range, format_args!("{} threads", request.threads)));
    }
    let end = match request.len {
        0 => Bound::Unbounded,
        len => match request.offset.checked_add(len) {
            Some(end) => Bound::Excluded(end),
            None => return Err(Refused::new(Errno::Overflow, format_args!("{len} bytes from {} on", request.offset))),
        },
    };
    let some = |n: u64| (n > 0).then_some(n);
    let default = ReadOptions::default();
    let options = ReadOptions {
        mode,
        checksum: has(CHECKSUM),
        threads: some(request.threads.into()).map(|n| n as usize),
        chunk: some(request.chunk).unwrap_or(default.chunk),
        limit: some(request.limit),
        timeout: some(request.timeout_ms).map(Duration::from_millis),
        ..default
    };
    let owned = file.try_clone_to_owned().map_err(|e| kernel(&e))?;
    let picked = pick(Needs { shareable: has(SHAREABLE), ..Needs::default() });
    let picked = picked.map_err(|e| Refused::new(Errno::NoMem, chain(&e)))?;
    let range = (Bound::Included(request.offset), end);
    let read = picked.heap.alloc_and_read(&File::from(owned), range, &options)?;
    let mut buffers = lock(&BUFFERS);
    let number = buffers.add(read.buffer);
    Ok((number, buffers.get(number, "buffer")?))
}

pub(crate) fn export(buffer: u64) -> Result<OwnedFd, Refused> {
    let buffer = get(buffer)?;
    let memfd = buffer.shared().export();
    let memfd = memfd.ok_or_else(|| Refused::new(Errno::NotSup, "the buffer was not created as shareable"))?;
    memfd.try_clone_to_owned().map_err(|e| kernel(&e))
}

pub(crate) fn get(buffer: u64) -> Result<Arc<FilledBuf>, Refused> {
    lock(&BUFFERS).get(buffer, "buffer")
}

/// Takes a buffer, whose number then names nothing any more.
pub(crate) fn take(buffer: u64) -> Result<FilledBuf, Refused> {
    lock(&BUFFERS).take(buffer, "buffer")
}

pub(crate) fn destroy(buffer: u64) -> Result<(), Refused> {
    lock(&BUFFERS).remove(buffer, "buffer")
}

fn kernel(error: &std::io::Error) -> Refused {
    Refused::new(os(error), error)
}

/// The number of an error of the operating system.
pub(crate) fn os(error: &std::io::Error) -> Number {
    Number::Kernel(error.raw_os_error().unwrap_or(EIO))
}

/// The number of an error about a file that was to be opened.
pub(crate) fn number_of_file(error: &Error) -> Number {
    match error {
        Error::Open { source, .. } => os(source),
        Error::NotAFile { kind: "directory", .. } => Number::Kernel(EISDIR),
        Error::NoDirect { .. } | Error::NoUring { .. } => Errno::NotSup.into(),
        _ => Number::Kernel(EIO),
    }
}

impl From<ReadError> for Refused {
    fn from(error: ReadError) -> Self {
        use dmalane::queue::OpError;
        let number = match &error {
            ReadError::Open { source, .. } => os(source),
            ReadError::File(error) => number_of_file(error),
            ReadError::PastEnd { .. } | ReadError::Read { error: OpError::EndOfFile { .. }, .. } => {
                Number::Kernel(ENODATA)
            }
            ReadError::Read { error: OpError::Io { errno, .. }, .. } => Number::Kernel(*errno),
            ReadError::Changed { .. } => Number::Kernel(ESTALE),
            ReadError::Limit { .. } | ReadError::Fill(FillError::NoRoom { .. } | FillError::Memory { .. }) => {
                Errno::NoMem.into()
            }
            ReadError::Fill(FillError::Deadline { .. }) => Number::Kernel(ETIMEDOUT),
            _ => Number::Kernel(EIO),
        };
        Self::new(number, chain(&error))
    }
}
