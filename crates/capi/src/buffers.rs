//! Buffers that files were read into, behind the numbers that C holds.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Bound;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane::dma::{Needs, Picked, pick};
use dmalane::file::Mode;
use dmalane::load::fill::{Extent, FillOptions, FilledBuf, Job};
use dmalane::{OpenFile, Read, ReadOptions, error_chain};
use dmalane_addr::FileOffset;
use dmalane_vm::Errno;

use crate::numbers::os;
use crate::objects::{Numbered, Refused, lock, remove};
use crate::types::{DmlFilled, DmlRange, DmlReadConfig};

static BUFFERS: Mutex<Numbered<FilledBuf>> = Mutex::new(Numbered::new());

const SHAREABLE: u32 = 1;
const DIRECT: u32 = 1 << 1;
const BUFFERED: u32 = 1 << 2;
const CHECKSUM: u32 = 1 << 3;

/// A buffer: its number and its bytes.
type Placed = (u64, DmlFilled);

/// How the flags of a read or a model, of which there are no others, say that files are read.
pub(crate) fn mode(flags: u32) -> Result<Mode, Refused> {
    match flags {
        0 => Ok(Mode::Auto),
        DIRECT => Ok(Mode::Direct),
        BUFFERED => Ok(Mode::Buffered),
        _ if flags == DIRECT | BUFFERED => Err(Refused::new(Errno::Inval, "both direct and buffered")),
        _ => Err(Refused::new(Errno::Inval, format_args!("flags {flags:#x}"))),
    }
}

/// Options of a read, and the heap that it takes memory from.
fn prepare(request: &DmlReadConfig) -> Result<(ReadOptions, Picked), Refused> {
    let has = |flag| request.flags & flag != 0;
    let mode = mode(request.flags & !(SHAREABLE | CHECKSUM))?;
    if request.threads > 64 {
        return Err(Refused::new(Errno::Range, format_args!("{} threads", request.threads)));
    }
    let some = |n: u64| (n > 0).then_some(n);
    let default = FillOptions::default();
    let options = ReadOptions {
        mode,
        threads: some(request.threads.into()).map(|n| n as usize),
        limit: some(request.limit),
        fill: FillOptions {
            chunk: some(request.chunk).unwrap_or(default.chunk),
            checksum: has(CHECKSUM),
            time_limit: some(request.timeout_ms).map(Duration::from_millis),
            ..default
        },
    };
    let picked = pick(Needs { shareable: has(SHAREABLE), ..Needs::default() });
    Ok((options, picked.map_err(|e| Refused::new(Errno::NoMem, error_chain(&e)))?))
}

fn end(offset: u64, len: u64) -> Result<u64, Refused> {
    let past = || Refused::new(Errno::Overflow, format_args!("{len} bytes from {offset} on"));
    offset.checked_add(len).ok_or_else(past)
}

fn owned(file: BorrowedFd<'_>) -> Result<File, Refused> {
    file.try_clone_to_owned().map(File::from).map_err(|e| kernel(&e))
}

pub(crate) fn alloc_and_read(file: BorrowedFd<'_>, request: &DmlReadConfig) -> Result<Placed, Refused> {
    let (options, picked) = prepare(request)?;
    let end = match request.len {
        0 => Bound::Unbounded,
        len => Bound::Excluded(end(request.offset, len)?),
    };
    let range = (Bound::Included(request.offset), end);
    let read = dmalane::alloc_and_read(&*picked.heap, &owned(file)?, range, &options)?;
    Ok(add(read.buffer))
}

/// Reads ranges into a buffer each.
pub(crate) fn read_ranges(
    ranges: &[(BorrowedFd<'_>, DmlRange)],
    request: &DmlReadConfig,
    count: usize,
) -> Result<Vec<Placed>, Refused> {
    if request.offset != 0 || request.len != 0 {
        return Err(Refused::new(Errno::Inval, "a range in the configuration"));
    }
    let (options, picked) = prepare(request)?;
    let mut job = Job { buffers: vec![0; count], extents: Vec::with_capacity(ranges.len()) };
    let mut named = vec![false; count];
    // A file that is named several times is opened once.
    let (mut sources, mut numbers) = (Vec::new(), BTreeMap::new());
    for (i, (file, range)) in ranges.iter().enumerate() {
        let source = match numbers.entry(file.as_raw_fd()) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let name = format!("file descriptor {}", file.as_raw_fd());
                sources.push(OpenFile::new(name, owned(*file)?));
                *new.insert(sources.len() - 1)
            }
        };
        let len = match range.len {
            0 => sources[source].size()?.saturating_sub(range.offset),
            len => len,
        };
        end(range.offset, len)?;
        let (Some(buffer), Some(named)) =
            (job.buffers.get_mut(range.buffer as usize), named.get_mut(range.buffer as usize))
        else {
            let what = format_args!("range {i} is of buffer {}, and there are {count}", range.buffer);
            return Err(Refused::new(Errno::Inval, what));
        };
        (*buffer, *named) = ((*buffer).max(end(range.to, len)?), true);
        let (at, buffer) = (FileOffset::new(range.offset), range.buffer as usize);
        job.extents.push(Extent { source, at, len, buffer, to: range.to });
    }
    if let Some(buffer) = named.iter().position(|named| !named) {
        return Err(Refused::new(Errno::Inval, format_args!("no range is of buffer {buffer}")));
    }
    let read = Read::sources(sources).job(job).options(options).into_memory(&*picked.heap)?;
    Ok(read.filled.buffers.into_iter().map(add).collect())
}

fn add(buffer: FilledBuf) -> Placed {
    let view = buffer.as_volatile_slice();
    let (data, len) = (view.as_ptr().cast(), view.len() as u64);
    let filled = DmlFilled { data, len, checksum: buffer.checksum().unwrap_or(0) };
    (lock(&BUFFERS).add(buffer), filled)
}

pub(crate) fn export(buffer: u64) -> Result<OwnedFd, Refused> {
    let buffer = get(buffer)?;
    let memfd = buffer.shared().export();
    let memfd = memfd.ok_or_else(|| Refused::new(Errno::NotSup, "the buffer was not created as shareable"))?;
    memfd.try_clone_to_owned().map_err(|e| kernel(&e))
}

pub(crate) fn export_dma_buf(buffer: u64) -> Result<OwnedFd, Refused> {
    dmalane::dma::export_dma_buf(&get(buffer)?.shared().reference()).map_err(|e| match e.kind() {
        ErrorKind::Unsupported => Refused::new(Errno::NotSup, "the buffer was not created as shareable"),
        ErrorKind::NotFound => Refused::new(Errno::NoEnt, &e),
        ErrorKind::InvalidInput => Refused::new(Errno::Inval, &e),
        _ => kernel(&e),
    })
}

pub(crate) fn get(buffer: u64) -> Result<Arc<FilledBuf>, Refused> {
    lock(&BUFFERS).get(buffer, "buffer")
}

/// Takes a buffer, whose number then names nothing any more.
pub(crate) fn take(buffer: u64) -> Result<FilledBuf, Refused> {
    lock(&BUFFERS).take(buffer, "buffer")
}

pub(crate) fn destroy(buffer: u64) -> Result<(), Refused> {
    remove(&BUFFERS, buffer, "buffer")
}

fn kernel(error: &std::io::Error) -> Refused {
    Refused::new(os(error), error)
}
