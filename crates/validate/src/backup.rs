//! A copy on disk of what a file held before it was measured, holes included, from which it is restored: at the end, or
//! by a later run when this process was killed.
//!
//! A backup is one file. Its first line is a JSON object with the identity of the backed-up file and its extents; the
//! bytes of the extents follow in order, and then XXH3-64 of all that, little-endian. It lies beside a regular file as
//! `.NAME.dmalane-backup`, and for a block device in a directory of this user. It gets that name when it is whole and
//! on the disk, and nothing of the file is overwritten before.
//!
//! A later run restores a backup unasked only where nothing can be lost: each sector of the file still holds what was
//! backed up, or what a validation writes.

use std::fs::{self, DirBuilder, File};
use std::hash::Hasher;
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use dmalane_device::BackingFiles;
use dmalane_device::contents::{FileExtent, extents, holds_data, reopen};
use rustix::fs::{CWD, FallocateFlags, FlockOperation, OFlags, RenameFlags, fallocate, major, minor};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::walk::is_pattern;
use crate::{Recovered, ValidateError};

/// The most bytes of the first line of a backup.
const MAX_HEADER: u64 = 64 << 20;
/// Bytes that are copied at a time.
const BLOCK: usize = 1 << 20;
/// Bytes that are written whole or not at all, whatever ends a run.
const SECTOR: usize = 512;

/// A file that can be backed up, opened for reading and writing through the page cache.
pub(crate) struct Original {
    file: File,
    id: Identity,
    /// Where its backup lies.
    backup: PathBuf,
}

/// Which file a backup is of: the device number of a block device, or file system and inode.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Identity {
    rdev: u64,
    dev: u64,
    ino: u64,
    /// The time of birth of a regular file, as inodes are used again; the start of the machine and the sequence number
    /// of a disk, as device numbers are. Empty where there is none.
    born: String,
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

/// A backup that was found, and checked.
struct Saved {
    backup: File,
    of: Identity,
    extents: Vec<FileExtent>,
}

/// The backup of the contents of a device that is made of files, which a run left that was killed or is under way.
///
/// # Errors
/// The kernel's.
pub fn backup_left(files: &BackingFiles) -> io::Result<Option<PathBuf>> {
    let kind = files.written.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Ok(None);
    }
    let (_, backup) = identify(&files.written)?;
    Ok(backup.symlink_metadata().is_ok().then_some(backup))
}

/// Which file this is, and where its backup lies.
fn identify(file: &File) -> io::Result<(Identity, PathBuf)> {
    let meta = file.metadata()?;
    if meta.file_type().is_block_device() {
        let rdev = meta.rdev();
        let sys = PathBuf::from(format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev)));
        // That of a partition is its disk's.
        let disk = ["diskseq", "../diskseq"].iter().find_map(|name| fs::read_to_string(sys.join(name)).ok());
        let start = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let born = format!("{} {}", start.trim(), disk.unwrap_or_default().trim());
        let backup = folder()?.join(format!("backup-of-device-{rdev:x}"));
        return Ok((Identity { rdev, dev: 0, ino: 0, born }, backup));
    }
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let born = meta.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let born = born.map_or(String::new(), |at| at.as_nanos().to_string());
    let id = Identity { rdev: 0, dev: meta.dev(), ino: meta.ino(), born };
    Ok((id, path.with_file_name(format!(".{name}.dmalane-backup"))))
}

/// The directory of the backups of block devices, in which nobody else can take a name.
fn folder() -> io::Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok("/var/lib/dmalane".into());
    }
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")));
    let missing = || io::Error::other("neither XDG_STATE_HOME nor HOME is set, for a place of the backup");
    Ok(state.ok_or_else(missing)?.join("dmalane"))
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
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(io::Error::other("another process has locked it")),
            other => other?,
        }
        let (id, backup) = identify(&file)?;
        Ok(Some(Self { file, id, backup }))
    }

    /// Whether there is anything but zeroes from `at` on.
    ///
    /// # Errors
    /// [`ValidateError::Backup`].
    pub fn holds_data(&self, at: u64, len: u64) -> Result<bool, ValidateError> {
        holds_data(&self.file, at, len).map_err(ValidateError::Backup)
    }

    /// Restores the file from the backup of a run that was killed, if there is one, and returns the backup's path.
    ///
    /// # Errors
    /// [`ValidateError::Left`] when something else would be lost, [`ValidateError::Recover`]: the backup stays.
    pub fn recover(&self) -> Result<Option<PathBuf>, ValidateError> {
        let Some(saved) = self.saved()? else { return Ok(None) };
        let left = |why| Err(ValidateError::Left { backup: self.backup.clone(), why });
        if saved.of != self.id {
            return left("it is of another file or disk that had this name");
        }
        if self.is_written_since(&saved).map_err(|e| self.failed(e))? {
            return left("the device was written since");
        }
        self.restore_from(&saved).map(|()| Some(self.backup.clone()))
    }

    /// Restores the file from its backup, whatever it holds now, which gets a backup of another name first.
    ///
    /// # Errors
    /// [`ValidateError::Recover`]: the backup stays.
    pub fn recover_over(&self) -> Result<Recovered, ValidateError> {
        let saved = self.needed()?;
        let (first, last) = (saved.extents.first(), saved.extents.last());
        let range = first.map_or(0, |e| e.at)..last.map_or(0, |e| e.at + e.len);
        let free = |n: u32| with_end(&self.backup, &format!("-replaced-{n}"));
        let kept = (1..).map(free).find(|path| path.symlink_metadata().is_err()).unwrap_or_default();
        let now = extents(&self.file, range.start, range.end);
        self.write_backup(&kept, &now).map_err(|e| self.failed(named(e, &kept)))?;
        self.restore_from(&saved)?;
        Ok(Recovered { backup: self.backup.clone(), range, kept })
    }

    /// Restores the file from the backup of this run.
    fn put_back(&self) -> Result<(), ValidateError> {
        self.needed().and_then(|saved| self.restore_from(&saved))
    }

    /// The backup, which must be there.
    fn needed(&self) -> Result<Saved, ValidateError> {
        self.saved()?.ok_or_else(|| self.failed(ErrorKind::NotFound.into()))
    }

    fn failed(&self, source: io::Error) -> ValidateError {
        ValidateError::Recover { backup: self.backup.clone(), source }
    }

    /// Copies what the file holds from `at` on into a backup on the disk.
    ///
    /// # Errors
    /// [`ValidateError::Backup`], also when there is a backup already; nothing is left of the new one.
    pub fn back_up(self, at: u64, len: u64) -> Result<Backup, ValidateError> {
        let extents = extents(&self.file, at, at.saturating_add(len));
        let written = self.write_backup(&self.backup, &extents);
        written.map_err(|e| ValidateError::Backup(named(e, &self.backup)))?;
        Ok(Backup { original: self, done: false })
    }

    fn write_backup(&self, path: &Path, extents: &[FileExtent]) -> io::Result<()> {
        if let Some(folder) = path.parent().filter(|_| self.id.rdev != 0) {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let new = unfinished(path);
        // That of a run that was killed before it had overwritten anything: this one has the lock.
        match fs::remove_file(&new) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC).bits() as i32;
        let backup = File::options().write(true).create_new(true).mode(0o600).custom_flags(flags).open(&new)?;
        let written = self.copy_to(&backup, extents).and_then(|()| {
            match rustix::fs::renameat_with(CWD, &new, CWD, path, RenameFlags::NOREPLACE) {
                // A file system that cannot do that; there was no backup before.
                Err(Errno::INVAL) => fs::rename(&new, path)?,
                other => other?,
            }
            sync_folder(path)
        });
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }

    fn copy_to(&self, backup: &File, extents: &[FileExtent]) -> io::Result<()> {
        let mut out = Hashed { inner: BufWriter::with_capacity(BLOCK, backup), hash: XxHash3_64::new() };
        let listed = extents.iter().map(|e| (e.at, e.len, e.data)).collect();
        let mut header = serde_json::to_vec(&Header { dmalane_backup: 2, file: self.id.clone(), extents: listed })?;
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

    /// The backup, if there is one.
    fn saved(&self) -> Result<Option<Saved>, ValidateError> {
        let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as i32;
        match File::options().read(true).custom_flags(flags).open(&self.backup) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.and_then(Saved::check).map(Some).map_err(|e| self.failed(e)),
        }
    }

    /// Whether the file holds something that is neither in the backup nor what a validation writes.
    fn is_written_since(&self, saved: &Saved) -> io::Result<bool> {
        let (mut now, mut written) = (vec![0; BLOCK], false);
        saved.each_block(|at, before, _| {
            let now = &mut now[..before.len()];
            match self.file.read_exact_at(now, at) {
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => written = true,
                other => other?,
            }
            let mut sectors = now.chunks(SECTOR).zip(before.chunks(SECTOR));
            written |= sectors.any(|(now, before)| now != before && !is_pattern(now));
            Ok(())
        })?;
        Ok(written)
    }

    /// Restores the file from a backup, and removes that.
    fn restore_from(&self, saved: &Saved) -> Result<(), ValidateError> {
        let restore = || {
            saved.each_block(|at, bytes, data| match data {
                true => self.file.write_all_at(bytes, at),
                false => self.clear(at, bytes.len() as u64),
            })?;
            self.file.sync_all()?;
            fs::remove_file(&self.backup)?;
            sync_folder(&self.backup)
        };
        restore().map_err(|e| self.failed(e))
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

impl Saved {
    /// A backup, which is checked as a whole.
    fn check(backup: File) -> io::Result<Self> {
        let meta = backup.metadata()?;
        if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::new(ErrorKind::PermissionDenied, "it is not a file of this user"));
        }
        let damaged = || io::Error::new(ErrorKind::InvalidData, "it is damaged");
        let mut input = BufReader::with_capacity(BLOCK, &backup);
        let mut line = Vec::new();
        input.by_ref().take(MAX_HEADER).read_until(b'\n', &mut line)?;
        let header = serde_json::from_slice(&line).map_err(|_| damaged())?;
        let Header { dmalane_backup: 2, file: of, extents } = header else { return Err(damaged()) };
        let extents: Vec<_> = extents.into_iter().map(|(at, len, data)| FileExtent { at, len, data }).collect();
        let mut rest = meta.len().checked_sub(line.len() as u64 + 8).ok_or_else(damaged)?;
        let data = extents.iter().filter(|e| e.data).try_fold(0u64, |sum, e| sum.checked_add(e.len));
        if data != Some(rest) {
            return Err(damaged());
        }
        let mut hash = XxHash3_64::new();
        hash.write(&line);
        let mut block = vec![0; BLOCK];
        while rest > 0 {
            let bytes = &mut block[..rest.min(BLOCK as u64) as usize];
            input.read_exact(bytes)?;
            hash.write(bytes);
            rest -= bytes.len() as u64;
        }
        let mut end = [0; 8];
        input.read_exact(&mut end)?;
        drop(input);
        if u64::from_le_bytes(end) == hash.finish() { Ok(Self { backup, of, extents }) } else { Err(damaged()) }
    }

    /// Calls `f` with each place in the file, what was there, and whether that was data and not a hole.
    fn each_block(&self, mut f: impl FnMut(u64, &[u8], bool) -> io::Result<()>) -> io::Result<()> {
        let mut input = BufReader::with_capacity(BLOCK, &self.backup);
        io::Seek::rewind(&mut input)?;
        input.skip_until(b'\n')?;
        let mut block = vec![0; BLOCK];
        for extent in &self.extents {
            if !extent.data {
                block.fill(0);
            }
            for (at, n) in extent.blocks(BLOCK) {
                if extent.data {
                    input.read_exact(&mut block[..n])?;
                }
                f(at, &block[..n], extent.data)?;
            }
        }
        Ok(())
    }
}

impl Backup {
    /// Restores the file now, on the disk too, and removes the backup.
    ///
    /// # Errors
    /// [`ValidateError::Recover`]: the backup stays.
    pub fn restore(mut self) -> Result<(), ValidateError> {
        self.done = true;
        self.original.put_back()
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
            let _ = self.original.put_back();
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
    with_end(backup, ".new")
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
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
    use crate::walk::pattern;

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

    /// The contents after a validation, past the first page.
    fn written() -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize - 4096];
        pattern(7, 0, &mut bytes);
        bytes
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
            File::options().write(true).open(&path).unwrap().write_all_at(&written(), 4096).unwrap();
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
        let (path, before) = file(folder.path());
        let backup = original(&path).back_up(0, LEN).unwrap().leave();
        fs::rename(&path, folder.path().join("moved")).unwrap();
        fs::write(&path, b"another file").unwrap();
        let error = original(&path).recover().unwrap_err().to_string();
        assert!(error.contains("it is of another file") && error.contains(".card.dmalane-backup"), "{error}");
        assert!(backup.exists() && fs::read(&path).unwrap() == b"another file");
        // Another file of the same inode.
        let whole = fs::read(&backup).unwrap();
        fs::rename(folder.path().join("moved"), &path).unwrap();
        assert_eq!(original(&path).recover().unwrap(), Some(backup.clone()));
        let end = whole.iter().position(|b| *b == b'\n').unwrap();
        let mut header: Header = serde_json::from_slice(&whole[..end]).unwrap();
        assert!(!header.file.born.is_empty(), "this file system tells the time of birth");
        header.file.born.push('0');
        let mut bytes = serde_json::to_vec(&header).unwrap();
        bytes.extend(&whole[end..whole.len() - 8]);
        let mut hash = XxHash3_64::new();
        hash.write(&bytes);
        bytes.extend(hash.finish().to_le_bytes());
        fs::write(&backup, bytes).unwrap();
        assert!(original(&path).recover().unwrap_err().to_string().contains("it is of another file"));
        // It is restored where that is asked for.
        assert_eq!(original(&path).recover_over().unwrap().backup, backup);
        assert!(fs::read(&path).unwrap() == before);
        std::os::unix::fs::symlink(folder.path().join("moved"), &backup).unwrap();
        assert!(original(&path).recover().is_err() && original(&path).back_up(0, 4096).is_err(), "no link is followed");
    }

    #[test]
    fn nothing_that_was_written_since_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let (path, before) = file(folder.path());
        let out = File::options().write(true).open(&path).unwrap();
        for at in [0, 4096, 1 << 20, (1 << 20) + 50_000, LEN - 512] {
            let backup = original(&path).back_up(0, LEN).unwrap().leave();
            out.write_all_at(&written(), 4096).unwrap();
            out.write_all_at(b"new", at).unwrap();
            let new = fs::read(&path).unwrap();
            let error = original(&path).recover().unwrap_err();
            assert!(
                matches!(error, ValidateError::Left { .. }) && error.to_string().contains("written since"),
                "{error}"
            );
            assert!(backup.exists() && fs::read(&path).unwrap() == new);
            // Restored after all, and back.
            let kept = original(&path).recover_over().unwrap().kept;
            assert!(fs::read(&path).unwrap() == before && !backup.exists());
            fs::rename(kept, &backup).unwrap();
            fs::remove_file(original(&path).recover_over().unwrap().kept).unwrap();
            assert!(fs::read(&path).unwrap() == new);
            out.write_all_at(&before, 0).unwrap();
        }
        let backup = original(&path).back_up(0, LEN).unwrap().leave();
        out.set_len(LEN - 1).unwrap();
        assert!(original(&path).recover().is_err() && backup.exists(), "it ends before");
    }

    #[test]
    fn backups_of_block_devices_lie_where_only_their_user_writes() {
        let folder = folder().unwrap();
        match rustix::process::geteuid().is_root() {
            true => assert_eq!(folder, Path::new("/var/lib/dmalane")),
            false => assert!(folder.ends_with("dmalane") && !folder.starts_with("/var/tmp"), "{}", folder.display()),
        }
    }
}
