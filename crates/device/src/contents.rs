//! A file that serves as device memory: its data, and the lock on it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, SeekFrom, flock, seek};
use rustix::io::Errno;
use thiserror::Error;

/// Timeout for a lock: systemd-udevd locks a disk for a moment after a writer has closed it, and the kernel ends the
/// last requests of a device a moment after it was closed.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a file was not locked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LockError {
    /// It is locked.
    #[error("its file is in use as a device: another process, or another open device of this process, has locked it")]
    InUse,
    /// The kernel's error.
    #[error("cannot lock the device's file")]
    Failed(#[from] io::Error),
}

/// Locks a regular file or a block device that serves as device memory, until it is closed and none of its requests is
/// under way. Other files have no lock.
///
/// # Errors
/// [`LockError`].
pub fn lock(file: &File) -> Result<(), LockError> {
    if !is_kept(file)? {
        return Ok(());
    }
    let begun = Instant::now();
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < LOCK_TIMEOUT => thread::sleep(Duration::from_millis(10)),
            Err(Errno::WOULDBLOCK) => return Err(LockError::InUse),
            Err(e) => return Err(LockError::Failed(e.into())),
            Ok(()) => return Ok(()),
        }
    }
}

/// Whether this is a regular file or a block device, which keeps what is written to it.
fn is_kept(file: &File) -> io::Result<bool> {
    let kind = file.metadata()?.file_type();
    Ok(kind.is_file() || kind.is_block_device())
}

/// Opens a regular file or a block device again, for reading and writing through the page cache, whatever `file` was
/// opened for; `None` for anything else, whose contents cannot be kept.
///
/// # Errors
/// The kernel's.
pub fn reopen(file: &File) -> io::Result<Option<File>> {
    if !is_kept(file)? {
        return Ok(None);
    }
    File::options().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd())).map(Some)
}

/// Whether there is anything but zeroes in `len` bytes of a file from `at` on.
///
/// # Errors
/// The kernel's.
pub fn holds_data(file: &File, mut at: u64, len: u64) -> io::Result<bool> {
    const BLOCK: u64 = 1 << 20;
    let (end, mut block) = (at.saturating_add(len), vec![0; BLOCK as usize]);
    while at < end {
        // Holes are skipped. A file that does not tell has none.
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.clamp(at, end),
            Err(Errno::NXIO) => end,
            Err(_) => at,
        };
        let hole = seek(file, SeekFrom::Hole(data)).ok().filter(|hole| *hole > data).unwrap_or(end).min(end);
        at = data;
        while at < hole {
            let bytes = &mut block[..(hole - at).min(BLOCK) as usize];
            file.read_exact_at(bytes, at)?;
            if bytes.iter().any(|byte| *byte != 0) {
                return Ok(true);
            }
            at += bytes.len() as u64;
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_found_and_holes_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create_new(folder.path().join("memory")).unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_all_at(&[0; 4096], 0).unwrap();
        file.write_all_at(&[7], 3 << 20).unwrap();
        let file = reopen(&file).unwrap().unwrap();
        let holds = |at, len| holds_data(&file, at, len).unwrap();
        assert!(holds(0, 4 << 20) && holds(3 << 20, 1) && holds(3 << 20, 1 << 20));
        assert!(!holds(0, 3 << 20) && !holds((3 << 20) + 1, 4096) && !holds(0, 0));
        assert!(reopen(&File::open("/dev/null").unwrap()).unwrap().is_none());
    }

    #[test]
    fn a_file_is_locked_as_long_as_a_request_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        std::fs::write(&path, [7; 4096]).unwrap();
        let open = || std::sync::Arc::new(File::options().write(true).open(&path).unwrap());
        let (first, second) = (open(), open());
        lock(&first).unwrap();
        lock(&first).unwrap();
        let request = first.clone();
        drop(first);
        assert!(matches!(lock(&second), Err(LockError::InUse)), "a request is under way");
        drop(request);
        lock(&second).unwrap();
        lock(&File::open("/dev/null").unwrap()).unwrap();
    }
}
