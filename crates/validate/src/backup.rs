//! A copy on disk of what a file held before it was measured, holes included, from which it is restored: at the end, or
//! by a later run when this process was killed.
//!
//! A backup is one file. Its first line is a JSON object with the identity of the backed-up file and its extents; the
//! bytes of the extents follow in order, and then XXH3-64 of all that, little-endian. It lies beside a regular file as
//! `.NAME.dmalane-backup`, and for a block device in `/var/tmp`. It gets that name when it is whole and on the disk,
//! and nothing of the file is overwritten before.

use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dmalane_device::contents::{FileExtent, extents, holds_data, reopen};
use rustix::fs::{CWD, FallocateFlags, FlockOperation, OFlags, RenameFlags, fallocate};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::ValidateError;

/// The most bytes of the first line of a backup.
const MAX_HEADER: u64 = 64 << 20;
/// Bytes that are copied at a time.
const BLOCK: usize = 1 << 20;

/// A file that can be backed up, opened for reading and writing through the page cache.
pub(crate) struct Original {
    file: File,
    id: Identity,
    /// Where its backup lies.
    backup: PathBuf,
}

/// Which file a backup is of: the device number of a block device, or file system and inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Identity {
    rdev: u64,
    dev: u64,
    ino: u64,
}

/// The first line of a backup.
#[derive(Serialize, Deserialize)]
struct Header {
    dmalane_backup: u32,
    file: Identity,
    /// Where each begins, its bytes, and whether it is data.
    extents: Vec<(u64, u64, bool)>,
}

/// A complete backup. Dropped, it restores the file; its [own method](Backup::restore) says whether that worked.
pub(crate) struct Backup {
    original: Original,
    /// The backup is needed no more, or must stay.
    done: bool,
}

impl Original {
    /// The regular file or block device behind a descriptor, whatever that was opened for; `None` for anything else.
    ///
    /// # Errors
    /// [`ValidateError::Backup`].
    pub fn of(written: &File) -> Result<Option<Self>, ValidateError> {
        Self::open(written).map_err(ValidateError::Backup)
    }

    /// The file is locked until this is dropped, so that no other run restores it meanwhile.
    fn open(written: &File) -> io::Result<Option<Self>> {
        let Some(file) = reopen(written)? else { return Ok(None) };
        let meta = file.metadata()?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(io::Error::other("another process has locked it")),
            other => other?,
        }
        let (id, backup) = match meta.file_type().is_block_device() {
            true => {
                let (rdev, place) = (meta.rdev(), Path::new("/var/tmp"));
                (Identity { rdev, dev: 0, ino: 0 }, place.join(format!("dmalane-backup-of-device-{rdev:x}")))
            }
            false => {
                let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let id = Identity { rdev: 0, dev: meta.dev(), ino: meta.ino() };
                (id, path.with_file_name(format!(".{name}.dmalane-backup")))
            }
        };
        Ok(Some(Self { file, id, backup }))
    }

    /// Whether there is anything but zeroes from `at` on.
    ///
    /// # Errors
    /// [`ValidateError::Backup`].
    pub fn holds_data(&self, at: u64, len: u64) -> Result<bool, ValidateError> {
        holds_data(&self.file, at, len).map_err(ValidateError::Backup)
    }

    /// Restores the file from the backup of a run that was killed, if there is one, and returns the backup's
    /// path.
    ///
    /// # Errors
    /// [`ValidateError::Recover`]: the backup stays.
    pub fn recover(&self) -> Result<Option<PathBuf>, ValidateError> {
        let failed = |source| ValidateError::Recover { backup: self.backup.clone(), source };
        match self.restore_from(&self.backup) {
            Ok(()) => Ok(Some(self.backup.clone())),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// Copies what the file holds from `at` on into a backup on the disk.
    ///
    /// # Errors
    /// [`ValidateError::Backup`], also when there is a backup already; nothing is left of the new one.
    pub fn back_up(self, at: u64, len: u64) -> Result<Backup, ValidateError> {
        let extents = extents(&self.file, at, at.saturating_add(len));
        let written = self.write_backup(&extents);
        written.map_err(|e| ValidateError::Backup(named(e, &self.backup)))?;
        Ok(Backup { original: self, done: false })
    }

    fn write_backup(&self, extents: &[FileExtent]) -> io::Result<()> {
        let new = unfinished(&self.backup);
        // That of a run that was killed before it had overwritten anything: this one has the lock.
        match fs::remove_file(&new) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC).bits() as i32;
        let backup = File::options().write(true).create_new(true).mode(0o600).custom_flags(flags).open(&new)?;
        let written = self.copy_to(&backup, extents).and_then(|()| {
            match rustix::fs::renameat_with(CWD, &new, CWD, &self.backup, RenameFlags::NOREPLACE) {
                // A file system that cannot do that; `recover` found no backup there.
                Err(Errno::INVAL) => fs::rename(&new, &self.backup)?,
                other => other?,
            }
            sync_folder(&self.backup)
        });
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }

    fn copy_to(&self, backup: &File, extents: &[FileExtent]) -> io::Result<()> {
        let mut out = Hashed { inner: BufWriter::with_capacity(BLOCK, backup), hash: XxHash3_64::new() };
        let listed = extents.iter().map(|e| (e.at, e.len, e.data)).collect();
        let mut header = serde_json::to_vec(&Header { dmalane_backup: 1, file: self.id, extents: listed })?;
        header.push(b'\n');
        if header.len() as u64 > MAX_HEADER {
            return Err(io::Error::other("the file has too many extents"));
        }
        out.write_all(&header)?;
        let mut block = vec![0; BLOCK];
        for extent in extents.iter().filter(|e| e.data) {
            for (at, n) in extent.blocks(BLOCK) {
                self.file.read_exact_at(&mut block[..n], at)?;
                out.write_all(&block[..n])?;
            }
        }
        let hash = out.hash.finish();
        out.inner.write_all(&hash.to_le_bytes())?;
        out.inner.flush()?;
        backup.sync_all()
    }

    /// Restores the file from a backup, and removes that.
    fn restore_from(&self, path: &Path) -> io::Result<()> {
        let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as i32;
        let backup = File::options().read(true).custom_flags(flags).open(path)?;
        let meta = backup.metadata()?;
        if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::new(ErrorKind::PermissionDenied, "it is not a file of this user"));
        }
        let extents = self.extents_of(&backup, meta.len())?;
        let mut input = BufReader::with_capacity(BLOCK, &backup);
        io::Seek::rewind(&mut input)?;
        input.skip_until(b'\n')?;
        let mut block = vec![0; BLOCK];
        for extent in &extents {
            if !extent.data {
                self.clear(extent.at, extent.len)?;
                continue;
            }
            for (at, n) in extent.blocks(BLOCK) {
                input.read_exact(&mut block[..n])?;
                self.file.write_all_at(&block[..n], at)?;
            }
        }
        self.file.sync_all()?;
        fs::remove_file(path)?;
        sync_folder(path)
    }

    /// The extents of a backup of `len` bytes, which is checked as a whole.
    fn extents_of(&self, backup: &File, len: u64) -> io::Result<Vec<FileExtent>> {
        let damaged = || io::Error::new(ErrorKind::InvalidData, "it is damaged");
        let mut input = BufReader::with_capacity(BLOCK, backup);
        let mut line = Vec::new();
        input.by_ref().take(MAX_HEADER).read_until(b'\n', &mut line)?;
        let header = serde_json::from_slice(&line).map_err(|_| damaged())?;
        let Header { dmalane_backup: 1, file, extents } = header else { return Err(damaged()) };
        if file != self.id {
            return Err(io::Error::other("it is of another file that had this name"));
        }
        let extents: Vec<_> = extents.into_iter().map(|(at, len, data)| FileExtent { at, len, data }).collect();
        let data = extents.iter().filter(|e| e.data).try_fold(line.len() as u64 + 8, |sum, e| sum.checked_add(e.len));
        if data != Some(len) {
            return Err(damaged());
        }
        let mut hash = XxHash3_64::new();
        hash.write(&line);
        let (mut left, mut block) = (len - 8 - line.len() as u64, vec![0; BLOCK]);
        while left > 0 {
            let bytes = &mut block[..left.min(BLOCK as u64) as usize];
            input.read_exact(bytes)?;
            hash.write(bytes);
            left -= bytes.len() as u64;
        }
        let mut end = [0; 8];
        input.read_exact(&mut end)?;
        if u64::from_le_bytes(end) == hash.finish() { Ok(extents) } else { Err(damaged()) }
    }

    /// Makes a hole, or zeros where the file system has none.
    fn clear(&self, at: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if fallocate(&self.file, flags, at, len).is_ok() {
            return Ok(());
        }
        let zeros = vec![0; BLOCK];
        FileExtent { at, len, data: true }.blocks(BLOCK).try_for_each(|(at, n)| self.file.write_all_at(&zeros[..n], at))
    }
}

impl Backup {
    /// Restores the file now, on the disk too, and removes the backup.
    ///
    /// # Errors
    /// [`ValidateError::Recover`]: the backup stays.
    pub fn restore(mut self) -> Result<(), ValidateError> {
        self.done = true;
        self.original.recover().map(drop)
    }

    /// Leaves the file as it is, and returns the path of the backup, which stays: a call on a device that hangs would
    /// hang as well.
    pub fn leave(mut self) -> PathBuf {
        self.done = true;
        self.original.backup.clone()
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        if !self.done {
            // On the way out of a panic. Where it fails, the backup stays.
            let _ = self.original.recover();
        }
    }
}

/// A writer that hashes what goes through it.
struct Hashed<W> {
    inner: W,
    hash: XxHash3_64,
}

impl<W: Write> Hashed<W> {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.write(bytes);
        self.inner.write_all(bytes)
    }
}

/// The name of a backup that is being written.
fn unfinished(backup: &Path) -> PathBuf {
    let mut name = backup.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

fn named(e: io::Error, path: &Path) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

/// Makes a new or removed name last.
fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 4 << 20;

    fn file(folder: &Path) -> (PathBuf, Vec<u8>) {
        let path = folder.join("card");
        let file = File::create(&path).unwrap();
        file.set_len(LEN).unwrap();
        file.write_all_at(&[7; 100_000], 1 << 20).unwrap();
        file.sync_all().unwrap();
        (path.clone(), fs::read(path).unwrap())
    }

    /// Opened for writing only, as one of two files is.
    fn original(path: &Path) -> Original {
        Original::of(&File::options().write(true).open(path).unwrap()).unwrap().unwrap()
    }

    fn names(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn bytes_and_holes_are_restored() {
        let folder = tempfile::tempdir().unwrap();
        let (path, before) = file(folder.path());
        let blocks = fs::metadata(&path).unwrap().blocks();
        for how in 0..3 {
            let backup = original(&path).back_up(4096, LEN - 4096).unwrap();
            let again = Original::of(&File::open(&path).unwrap()).err().map(|e| e.to_string());
            assert!(again.is_some_and(|e| e.contains("another process has locked it")), "one at a time");
            File::options().write(true).open(&path).unwrap().write_all_at(&vec![9; LEN as usize - 4096], 4096).unwrap();
            match how {
                0 => drop(backup),
                1 => backup.restore().unwrap(),
                // As if this process had been killed.
                _ => {
                    let left = backup.leave();
                    assert_eq!(original(&path).recover().unwrap(), Some(left));
                }
            }
            assert!(fs::read(&path).unwrap() == before);
            if blocks < 8192 {
                assert!(fs::metadata(&path).unwrap().blocks() < 8192, "what was a hole is one again");
            }
            assert_eq!((names(folder.path()), original(&path).recover().unwrap()), (1, None));
        }
        assert!(Original::of(&File::open("/dev/null").unwrap()).unwrap().is_none());
        assert!(original(&path).holds_data(0, LEN).unwrap());
        assert!(!original(&path).holds_data(0, 1 << 20).unwrap());
    }

    #[test]
    fn a_damaged_backup_restores_nothing_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (path, before) = file(folder.path());
        let backup = original(&path).back_up(0, LEN).unwrap().leave();
        let whole = fs::read(&backup).unwrap();
        let end = whole.iter().position(|b| *b == b'\n').unwrap();
        let header = String::from_utf8_lossy(&whole[..end]).into_owned();
        let mut wrong: Vec<Vec<u8>> = [0, 1, 20, whole.len() / 2, whole.len() - 1].map(|n| whole[..n].to_vec()).into();
        for at in [5, end, end + 1, whole.len() - 1] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            wrong.push(bytes);
        }
        // Extents that are longer than the backup, or than a number.
        for len in [LEN, u64::MAX] {
            wrong.push(header.replace("false", "true").replace("1048576", &len.to_string()).into());
        }
        for bytes in wrong {
            fs::write(&backup, &bytes).unwrap();
            let error = original(&path).recover().unwrap_err();
            assert!(matches!(&error, ValidateError::Recover { backup: b, .. } if *b == backup), "{error}");
            assert!(fs::read(&backup).unwrap() == bytes && fs::read(&path).unwrap() == before);
            assert!(original(&path).back_up(0, 4096).is_err(), "it is not replaced either");
        }
        // One that was not finished is in nobody's way.
        fs::rename(&backup, unfinished(&backup)).unwrap();
        assert_eq!(original(&path).recover().unwrap(), None);
        original(&path).back_up(0, LEN).unwrap().restore().unwrap();
        assert_eq!(names(folder.path()), 1);
    }

    #[test]
    fn a_backup_of_something_else_is_refused_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (path, _) = file(folder.path());
        let backup = original(&path).back_up(0, LEN).unwrap().leave();
        fs::rename(&path, folder.path().join("moved")).unwrap();
        fs::write(&path, b"another file").unwrap();
        let error = original(&path).recover().unwrap_err().to_string();
        assert!(error.contains("it is of another file") && error.contains(".card.dmalane-backup"), "{error}");
        assert!(backup.exists() && fs::read(&path).unwrap() == b"another file");
        fs::remove_file(&backup).unwrap();
        std::os::unix::fs::symlink(folder.path().join("moved"), &backup).unwrap();
        assert!(original(&path).recover().is_err() && original(&path).back_up(0, 4096).is_err(), "no link is followed");
    }
}
