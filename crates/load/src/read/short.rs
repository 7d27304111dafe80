//! The fast path: a small file, copied out of the page cache by one system call.

use std::fs::File;
use std::time::Instant;

use crate::fill::{FillError, FillReport, FilledBuf, broken};
use dmalane_addr::FileOffset;
use dmalane_dma::Heap;
use dmalane_file::{How, Mode, Moved, read_now};
use rustix::fs::{FileType, OFlags};
use twox_hash::XxHash3_64;

use super::method::{AllocRead, ReadMethod};
use super::options::ReadOptions;
use super::plan::SHORT;
use crate::choose::Choice;
use crate::error::Error;
use crate::open_file::name;

/// Reads a small file if it is cached, or so small that it does not matter; `None` for everything else, which takes the
/// engine.
///
/// Three system calls where `read()` has one or two: each further one is a hundredth of the time that half a megabyte
/// takes.
pub(super) fn try_short(
    heap: &dyn Heap,
    file: &File,
    start: u64,
    end: Option<u64>,
    options: &ReadOptions,
) -> Result<Option<AllocRead>, Error> {
    if options.mode == Mode::Direct || options.fill.time_limit.is_some() {
        return Ok(None);
    }
    let begin = Instant::now();
    // A failure here repeats in the engine, which has the message.
    let Ok(stat) = rustix::fs::fstat(file) else { return Ok(None) };
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let len = end.unwrap_or(size).saturating_sub(start);
    let small = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && len > 0 && len <= SHORT;
    if !small || start + len > size || options.limit.is_some_and(|limit| len > limit) {
        return Ok(None);
    }
    let Choice { mode, fallback, cached } = Choice::new(file, options.mode, start..start + len, len);
    if mode != Mode::Buffered {
        return Ok(None);
    }
    let reason = fallback.map_or("buffered I/O was asked for".to_owned(), |why| why.to_string()) + "; fast path";
    // A file that its owner opened for direct I/O has rules of its own.
    if rustix::fs::fcntl_getfl(file).map_or(true, |flags| flags.contains(OFlags::DIRECT)) {
        return Ok(None);
    }
    let memory = |source| Error::Fill(FillError::Memory { buffer: 0, source });
    let reserved = heap.reserve(len as usize).map_err(memory)?;
    let (recycled, backing) = (!reserved.is_fresh(), reserved.backing().clone());
    let whole = reserved.populate().map_err(memory)?;
    let first_chunk = begin.elapsed();
    let failed = |source| Error::Read { path: name(file), at: FileOffset::new(start), tensor: None, source };
    let lost = || failed(broken("a buffer came apart"));
    let mut rest = whole.into_slice();
    let mut front = rest.split_off_front(len as usize).ok_or_else(lost)?;
    read_now(file, &mut front, FileOffset::new(start)).map_err(failed)?;
    let checksum = options.fill.checksum.then(|| front.with_bytes(XxHash3_64::oneshot)).flatten();
    if recycled {
        rest.as_volatile_slice().fill(0);
    }
    let whole = front.join(rest).ok().and_then(|slice| slice.into_whole().ok());
    let buffer = whole.and_then(|buf| FilledBuf::new(buf, len as usize, checksum)).ok_or_else(lost)?;
    if end.is_none() {
        let now = rustix::fs::fstat(file).map_or(size, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        if now != size {
            return Err(Error::Changed { path: name(file), before: size, now });
        }
    }
    let report = FillReport {
        bytes: len,
        wall: begin.elapsed(),
        first_chunk,
        workers: 1,
        backing: Some(backing),
        recycled,
        ..FillReport::default()
    };
    let method = ReadMethod { how: How::default(), reason, moved: Moved { direct: 0, buffered: len }, cached };
    Ok(Some(AllocRead { buffer, method, report }))
}
