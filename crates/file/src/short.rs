//! The shortest way from a file to memory: `pread`, and nothing around it.

use std::fs::File;

use dmalane_addr::FileOffset;
use dmalane_dma::BufferSlice;
use dmalane_queue::OpError;
use rustix::io::Errno;

use crate::ring::pread_into;

/// Fills `slice` from `at` on in `file`, by as many calls of `pread` as it takes, through the page cache unless the
/// file was opened with `O_DIRECT`. For files so small that opening a [`FileQueue`](crate::FileQueue) would cost as
/// much as reading them.
///
/// # Errors
/// As the operations of a queue: [`OpError::EndOfFile`], [`OpError::Io`].
pub fn read_now(file: &File, slice: &mut BufferSlice, at: FileOffset) -> Result<(), OpError> {
    let mut done = 0;
    while let Some(rest) = slice.as_volatile_slice().sub(done, slice.len() - done).filter(|rest| !rest.is_empty()) {
        let next = FileOffset::new(at.bits().saturating_add(done as u64));
        match pread_into(file, rest, next.bits()) {
            0 => return Err(OpError::EndOfFile { at: next, missing: rest.len() as u64 }),
            n if n > 0 => done += (n as usize).min(rest.len()),
            n => match Errno::from_raw_os_error(-n) {
                Errno::INTR => {}
                errno => return Err(OpError::Io { at: next, errno: errno.raw_os_error() }),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{AnonHeap, Heap};

    use super::*;

    #[test]
    fn reads_what_is_there_and_says_where_it_ends() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [7; 10_000]).unwrap();
        let file = file.reopen().unwrap();
        let slice = |len| AnonHeap::new().allocate(len).unwrap().share().into_slice().split_off_front(len).unwrap();
        let mut bytes = [0; 8000];
        let mut there = slice(8000);
        read_now(&file, &mut there, FileOffset::new(2000)).unwrap();
        there.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 8000]);
        let early = OpError::EndOfFile { at: FileOffset::new(10_000), missing: 1 };
        assert_eq!(read_now(&file, &mut slice(8000), FileOffset::new(2001)).unwrap_err(), early);
        let directory = File::open("/").unwrap();
        let failed = read_now(&directory, &mut slice(1), FileOffset::new(5)).unwrap_err();
        assert_eq!(failed, OpError::Io { at: FileOffset::new(5), errno: Errno::ISDIR.raw_os_error() });
    }
}
