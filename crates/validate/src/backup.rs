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

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::hash::Hasher;
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

use dmalane_device::contents::{FileExtent, extents, holds_data, reopen};
use dmalane_device::{BackingFiles, backup_name};
use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, StatxFlags, fallocate, flock, fstat, linkat,
    major, minor, openat, renameat_with, statat, statx, unlinkat,
};
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

/// Timeout for a lock: systemd-udevd locks a disk for a moment after somebody has written and closed it, and the kernel
/// lets go of the last requests of a device a moment after it was closed.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// A file that can be backed up, opened for reading and writing through the page cache. It is [claimed](claim).
pub(crate) struct Original {
    file: File,
    id: Identity,
    place: Place,
}

/// Where the backup of a file lies.
struct Place {
    folder: PathBuf,
    name: OsString,
}

/// Which file a backup is of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Identity {
    /// A regular file: its file system and inode, and the time of birth, as inodes are used again; empty where there is
    /// none.
    File { dev: u64, ino: u64, born: String },
    /// A disk that has a name for good, or a partition of it.
    Disk { name: String, start: u64, len: u64 },
    /// Another block device: its number and its sequence number, which are used again when the machine has started.
    Number { rdev: u64, sequence: String },
}

/// The first line of a backup.
#[derive(Serialize, Deserialize)]
struct Header {
    dmalane_backup: u32,
    file: Identity,
    /// The start of the machine.
    boot: String,
    /// Bytes of a regular file.
    len: Option<u64>,
    /// Where each begins, its bytes, and whether it is data.
    extents: Vec<(u64, u64, bool)>,
}

/// A complete backup. Dropped, it restores the file; its [own method](Backup::restore) says whether that worked.
pub(crate) struct Backup {
    original: Original,
    stored: Stored,
    /// The backup is needed no more, or must stay.
    done: bool,
}

/// A backup on the disk, open. This very file is restored and removed, whatever has its name by then.
struct Stored {
    file: File,
    folder: OwnedFd,
    name: OsString,
}

/// The contents of a backup, checked as a whole.
struct Saved<'a> {
    backup: &'a File,
    of: Identity,
    boot: String,
    len: Option<u64>,
    extents: Vec<FileExtent>,
}

/// Locks a device that is made of files, until it is closed and none of its requests is under way any more, and returns
/// the backup of its contents that a run left that was killed. Nothing may be written while there is one. Devices that
/// are no regular files nor block devices have neither a lock nor a backup.
///
/// # Errors
/// [`ValidateError::Locked`]: another process has claimed it, or this one through another device;
/// [`ValidateError::Lock`], [`ValidateError::Claim`].
pub fn claim(files: &BackingFiles) -> Result<Option<PathBuf>, ValidateError> {
    let file = &files.written;
    let kind = file.metadata().map_err(ValidateError::Claim)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Ok(None);
    }
    let begun = Instant::now();
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < LOCK_TIMEOUT => thread::sleep(Duration::from_millis(10)),
            Err(Errno::WOULDBLOCK) => return Err(ValidateError::Locked),
            Err(e) => return Err(ValidateError::Lock(e.into())),
            Ok(()) => break,
        }
    }
    left_backup(file).map_err(ValidateError::Claim)
}

/// The backup of a regular file or block device, if a run left one that was killed, or that is still under way: the
/// file holds test data until it is restored. Takes no lock, so it is for those who only read the file.
///
/// # Errors
/// Its place cannot be told or looked at.
pub fn left_backup(file: &File) -> io::Result<Option<PathBuf>> {
    let path = identify(file)?.1.path();
    match path.symlink_metadata() {
        Ok(_) => Ok(Some(path)),
        // Under a name that is too long there is none either.
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::InvalidFilename) => Ok(None),
        Err(e) => Err(named(e, &path)),
    }
}

/// Whether [`recover`](crate::recover) can restore the backup that [`claim`] has found: it is whole, and this user's.
///
/// # Errors
/// [`ValidateError::Recover`] says why not; [`ValidateError::Backup`].
pub fn check_backup(files: &BackingFiles) -> Result<(), ValidateError> {
    let Some(original) = Original::of(&files.written)? else { return Ok(()) };
    let checked = original.find().and_then(|stored| stored.map_or(Ok(()), |stored| stored.read().map(drop)));
    checked.map_err(|e| original.failed(e))
}

/// Which file this is, and where its backup lies.
fn identify(file: &File) -> io::Result<(Identity, Place)> {
    let meta = file.metadata()?;
    if meta.file_type().is_block_device() {
        let rdev = meta.rdev();
        let sys = PathBuf::from(format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev)));
        let id = identify_disk(rdev, &sys);
        let name = match &id {
            Identity::Number { rdev, .. } => backup_name::of_device(*rdev),
            id => backup_name::of_disk(XxHash3_64::oneshot(&serde_json::to_vec(id)?)),
        };
        return Ok((id, Place { folder: folder()?, name }));
    }
    let path = path_of(file)?;
    let born = meta.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let born = born.map_or(String::new(), |at| at.as_nanos().to_string());
    let id = Identity::File { dev: meta.dev(), ino: meta.ino(), born };
    let folder = path.parent().unwrap_or(Path::new("/")).to_owned();
    let name = backup_name::of_file(path.file_name().unwrap_or_default(), XxHash3_64::oneshot);
    Ok((id, Place { folder, name }))
}

fn path_of(file: &File) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The mount that a file was opened on; `None` before Linux 5.8.
fn mount(file: BorrowedFd<'_>) -> Option<u64> {
    let stat = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    Some(stat.stx_mnt_id).filter(|_| stat.stx_mask & StatxFlags::MNT_ID.bits() != 0)
}

/// Which block device this is, from its directory in sysfs.
fn identify_disk(rdev: u64, sys: &Path) -> Identity {
    let read = |name: &str| fs::read_to_string(sys.join(name)).map_or(String::new(), |text| text.trim().to_owned());
    // A partition has the name of its disk, whose directory its own lies in.
    let mut names =
        ["wwid", "device/wwid", "dm/uuid"].iter().flat_map(|name| [(*name).to_owned(), format!("../{name}")]);
    match names.find_map(|name| Some(read(&name)).filter(|name| !name.is_empty())) {
        Some(name) => {
            let [start, len] = ["start", "size"].map(|name| read(name).parse().unwrap_or(0));
            // A whole disk has no start, and may grow.
            let part = !read("start").is_empty();
            Identity::Disk { name, start, len: if part { len } else { 0 } }
        }
        None => {
            let sequence = ["diskseq", "../diskseq"].map(read).into_iter().find(|number| !number.is_empty());
            Identity::Number { rdev, sequence: sequence.unwrap_or_default() }
        }
    }
}

/// A number of this start of the machine.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or(String::new(), |id| id.trim().to_owned())
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

impl Place {
    fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    /// Makes the folder, which is to last.
    fn make(&self) -> io::Result<()> {
        if self.folder.is_dir() {
            return Ok(());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        for above in self.folder.ancestors().skip(1) {
            let _ = File::open(above).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }

    /// Opens the folder, so that nobody can put another one in its place.
    fn enter(&self) -> io::Result<OwnedFd> {
        Ok(rustix::fs::open(&self.folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

impl Original {
    /// The regular file or block device behind a descriptor, whatever that was opened for; `None` for anything else.
    /// It is [claimed](claim).
    ///
    /// # Errors
    /// [`ValidateError::Backup`].
    pub fn of(written: &File) -> Result<Option<Self>, ValidateError> {
        Self::open(written).map_err(ValidateError::Backup)
    }

    fn open(written: &File) -> io::Result<Option<Self>> {
        let Some(file) = reopen(written)? else { return Ok(None) };
        let (id, place) = identify(&file)?;
        Ok(Some(Self { file, id, place }))
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
        let Some(stored) = self.find().map_err(|e| self.failed(e))? else { return Ok(None) };
        let saved = stored.read().map_err(|e| self.failed(e))?;
        let backup = self.place.path();
        if !self.is_of(&saved) {
            let why = match saved.boot == boot() {
                true => "it is of another file or disk that had this name",
                false => "the machine was started since: make sure that it is of this file or disk",
            };
            return Err(ValidateError::Left { backup, why });
        }
        if self.is_written_since(&saved).map_err(|e| self.failed(e))? {
            return Err(ValidateError::Left { backup, why: "the device was written since" });
        }
        self.restore_from(&saved).map_err(|e| self.failed(e))?;
        stored.remove().map_err(|e| self.remains(e))?;
        Ok(Some(backup))
    }

    /// Restores the file from its backup, whatever it holds now, which gets a backup of another name first. A backup
    /// that may be of another file or disk stays: it may be the only copy.
    ///
    /// # Errors
    /// [`ValidateError::NoBackup`]; [`ValidateError::Recover`]: the backup stays.
    pub fn recover_over(&self) -> Result<Recovered, ValidateError> {
        let stored = self.find().map_err(|e| self.failed(e))?;
        let stored = stored.ok_or_else(|| ValidateError::NoBackup(self.place.path()))?;
        let restored = || {
            let saved = stored.read()?;
            let (first, last) = (saved.extents.first(), saved.extents.last());
            let range = first.map_or(0, |e| e.at)..last.map_or(0, |e| e.at + e.len);
            let free = |n: u32| {
                let name = backup_name::of_replaced(&self.place.name, n);
                Place { folder: self.place.folder.clone(), name }
            };
            let replaced = (1..).map(free).find(|place| place.path().symlink_metadata().is_err());
            let replaced = replaced.ok_or(ErrorKind::AlreadyExists)?;
            let now = self.extents(range.start, range.end)?;
            self.write_backup(&replaced, &now)?;
            self.restore_from(&saved)?;
            let stays = !self.is_of(&saved);
            Ok(Recovered { backup: self.place.path(), range, replaced: replaced.path(), stays })
        };
        let recovered = restored().map_err(|e| self.failed(e))?;
        if !recovered.stays {
            stored.remove().map_err(|e| self.remains(e))?;
        }
        Ok(recovered)
    }

    /// Whether this file is the one that was backed up, for all that is known.
    fn is_of(&self, saved: &Saved<'_>) -> bool {
        saved.of == self.id && (!matches!(self.id, Identity::Number { .. }) || saved.boot == boot())
    }

    /// The name of a backup that is being written. Only who has claimed the file writes one of this name.
    fn unfinished(&self) -> OsString {
        match &self.id {
            Identity::File { dev, ino, .. } => format!(".dmalane-backup-of-{dev:x}-{ino:x}.new").into(),
            Identity::Disk { .. } | Identity::Number { .. } => {
                let mut name = self.place.name.clone();
                name.push(".new");
                name
            }
        }
    }

    fn remains(&self, source: io::Error) -> ValidateError {
        ValidateError::Remains { backup: self.place.path(), source }
    }

    fn failed(&self, source: io::Error) -> ValidateError {
        ValidateError::Recover { backup: self.place.path(), source }
    }

    /// Copies what the file holds from `at` on into a backup on the disk.
    ///
    /// # Errors
    /// [`ValidateError::Backup`], also when there is a backup already; nothing is left of the new one.
    pub fn back_up(self, at: u64, len: u64) -> Result<Backup, ValidateError> {
        let extents = self.extents(at, at.saturating_add(len));
        let stored = extents.and_then(|extents| self.write_backup(&self.place, &extents));
        let stored = stored.map_err(ValidateError::Backup)?;
        Ok(Backup { original: self, stored, done: false })
    }

    fn write_backup(&self, place: &Place, extents: &[FileExtent]) -> io::Result<Stored> {
        let path = place.path();
        let here = |e: io::Error| named(e, &path);
        if !matches!(self.id, Identity::File { .. }) {
            place.make().map_err(here)?;
        }
        let (folder, new) = (place.enter().map_err(here)?, self.unfinished());
        self.check_beside(&folder)?;
        // That of a run that was killed before it had overwritten anything.
        match unlinkat(&folder, &new, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(here(e.into())),
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&folder, &new, flags, Mode::RUSR | Mode::WUSR).map_err(|e| here(e.into()))?.into();
        let stored = Stored { file, folder, name: place.name.clone() };
        let written = || {
            if !is_ours(&stored.file.metadata()?) {
                // A later run would not take it for its own.
                return Err(here(io::Error::other("this file system says that new files are another user's")));
            }
            self.copy_to(&stored.file, extents, &path)?;
            put_in_place(&stored.folder, &new, &place.name, RenameFlags::NOREPLACE).map_err(|e| here(e.into()))?;
            sync_folder(&stored.folder).map_err(here)?;
            match stored.has_its_name()? {
                true => Ok(()),
                false => Err(here(io::Error::other("another file has its name"))),
            }
        };
        let written = written();
        if written.is_err() {
            let _ = unlinkat(&stored.folder, &new, AtFlags::empty());
            let _ = stored.remove();
        }
        written.map(|()| stored)
    }

    /// Refuses a regular file whose backup would not lie beside it, where a later run looks for it.
    fn check_beside(&self, folder: &OwnedFd) -> io::Result<()> {
        if !matches!(self.id, Identity::File { .. }) {
            return Ok(());
        }
        let own = fstat(&self.file)?;
        match statat(folder, path_of(&self.file)?.file_name().unwrap_or_default(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino) => {}
            Err(e) if e != Errno::NOENT => return Err(e.into()),
            _ => return Err(io::Error::other("the file has no name beside which a backup could lie")),
        }
        if mount(self.file.as_fd()) != mount(folder.as_fd()) {
            let why =
                "the file is mounted apart from its folder, as by `docker -v FILE:FILE`: mount the folder instead";
            return Err(io::Error::other(why));
        }
        Ok(())
    }

    fn copy_to(&self, backup: &File, extents: &[FileExtent], path: &Path) -> io::Result<()> {
        let mut out = Hashed { inner: BufWriter::with_capacity(BLOCK, backup), hash: XxHash3_64::new(), path };
        let listed = extents.iter().map(|e| (e.at, e.len, e.data)).collect();
        let meta = self.file.metadata()?;
        let len = meta.is_file().then_some(meta.len());
        let header = Header { dmalane_backup: 3, file: self.id.clone(), boot: boot(), len, extents: listed };
        let mut header = serde_json::to_vec(&header)?;
        header.push(b'\n');
        if header.len() as u64 > MAX_HEADER {
            return Err(io::Error::other("the file has too many extents"));
        }
        out.write_all(&header)?;
        let mut block = vec![0; BLOCK];
        for extent in extents.iter().filter(|e| e.data) {
            for (at, n) in extent.blocks(BLOCK) {
                let read = self.file.read_exact_at(&mut block[..n], at);
                read.map_err(|e| io::Error::new(e.kind(), format!("the device cannot be read at byte {at}: {e}")))?;
                out.write_all(&block[..n])?;
            }
        }
        out.finish()
    }

    /// The backup, if there is one. It must be [of this user](is_ours).
    fn find(&self) -> io::Result<Option<Stored>> {
        let name = self.place.name.clone();
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = self.place.enter().and_then(|folder| {
            let file = File::from(openat(&folder, &name, flags, Mode::empty())?);
            Ok(Stored { file, folder, name })
        });
        match opened {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
            Ok(stored) if is_ours(&stored.file.metadata()?) => Ok(Some(stored)),
            Ok(_) => Err(io::Error::new(ErrorKind::PermissionDenied, "it is not a file of this user")),
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

    /// Restores the file from a backup, on the disk too.
    fn restore_from(&self, saved: &Saved<'_>) -> io::Result<()> {
        saved.each_block(|at, bytes, data| match data {
            true => self.file.write_all_at(bytes, at),
            false => self.clear(at, bytes.len() as u64),
        })?;
        // One that was cut short since; a hole at its end writes nothing.
        if let Some(len) = saved.len.filter(|_| matches!(self.id, Identity::File { .. }))
            && self.file.metadata()?.len() < len
        {
            self.file.set_len(len)?;
        }
        self.file.sync_all()
    }

    /// The extents of the file from `at` to `end`. A file that is allocated whole has no holes: what looks like one is
    /// to stay allocated.
    fn extents(&self, at: u64, end: u64) -> io::Result<Vec<FileExtent>> {
        let meta = self.file.metadata()?;
        let whole = meta.is_file() && meta.blocks() * 512 >= meta.len();
        let data = |e: &FileExtent| e.data || (whole && e.at + e.len <= meta.len());
        Ok(extents(&self.file, at, end).into_iter().map(|e| FileExtent { data: data(&e), ..e }).collect())
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

impl Stored {
    /// Whether the name still is this file's.
    fn has_its_name(&self) -> io::Result<bool> {
        let own = fstat(&self.file)?;
        match statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) => Ok((there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Removes this file and no other.
    fn remove(&self) -> io::Result<()> {
        if self.has_its_name()? {
            unlinkat(&self.folder, &self.name, AtFlags::empty())?;
            // Where that fails, and the power does, the backup may be there again, and is restored again.
            let _ = sync_folder(&self.folder);
        }
        Ok(())
    }

    /// Its contents, checked as a whole.
    fn read(&self) -> io::Result<Saved<'_>> {
        let backup = &self.file;
        let damaged = || io::Error::new(ErrorKind::InvalidData, "it is damaged");
        let mut input = BufReader::with_capacity(BLOCK, backup);
        io::Seek::rewind(&mut input)?;
        let mut line = Vec::new();
        input.by_ref().take(MAX_HEADER).read_until(b'\n', &mut line)?;
        let header = serde_json::from_slice(&line).map_err(|_| damaged())?;
        let Header { dmalane_backup: 3, file: of, boot, len, extents } = header else { return Err(damaged()) };
        let extents: Vec<_> = extents.into_iter().map(|(at, len, data)| FileExtent { at, len, data }).collect();
        let mut rest = backup.metadata()?.len().checked_sub(line.len() as u64 + 8).ok_or_else(damaged)?;
        let data = extents.iter().filter(|e| e.data).try_fold(0u64, |sum, e| sum.checked_add(e.len));
        // Files end below this, and so do holes: nobody waits for one that does not.
        let has_end = |e: &FileExtent| e.at.checked_add(e.len).is_some_and(|end| end <= i64::MAX as u64);
        if data != Some(rest) || !extents.iter().all(has_end) {
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
        if u64::from_le_bytes(end) == hash.finish() {
            Ok(Saved { backup, of, boot, len, extents })
        } else {
            Err(damaged())
        }
    }
}

impl Saved<'_> {
    /// Calls `f` with each place in the file, what was there, and whether that was data and not a hole.
    fn each_block(&self, mut f: impl FnMut(u64, &[u8], bool) -> io::Result<()>) -> io::Result<()> {
        let mut input = BufReader::with_capacity(BLOCK, self.backup);
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
        self.put_back()
    }

    fn put_back(&self) -> Result<(), ValidateError> {
        let restored = self.stored.read().and_then(|saved| self.original.restore_from(&saved));
        restored.map_err(|e| self.original.failed(e))?;
        self.stored.remove().map_err(|e| self.original.remains(e))
    }

    /// Leaves the file as it is, and returns the path of the backup, which stays: a call on a device that hangs would
    /// hang as well.
    pub fn leave(mut self) -> PathBuf {
        self.done = true;
        self.original.place.path()
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        if !self.done {
            // On the way out of a panic. Where it fails, the backup stays.
            let _ = self.put_back();
        }
    }
}

/// Writes a backup, and hashes what goes through it. Its errors name the backup.
struct Hashed<'a> {
    inner: BufWriter<&'a File>,
    hash: XxHash3_64,
    path: &'a Path,
}

impl Hashed<'_> {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.write(bytes);
        self.inner.write_all(bytes).map_err(|e| named(e, self.path))
    }

    /// Writes the hash, and waits for the disk.
    fn finish(mut self) -> io::Result<()> {
        let hash = self.hash.finish().to_le_bytes();
        let written = self.inner.write_all(&hash).and_then(|()| self.inner.flush());
        written.and_then(|()| self.inner.get_ref().sync_all()).map_err(|e| named(e, self.path))
    }
}

/// Whether a backup is one that this user made: nobody else's is restored.
fn is_ours(meta: &fs::Metadata) -> bool {
    meta.is_file() && meta.uid() == rustix::process::geteuid().as_raw()
}

fn named(e: io::Error, path: &Path) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

/// Gives a file its name, where that is free.
fn put_in_place(folder: &OwnedFd, new: &OsStr, name: &OsStr, flags: RenameFlags) -> Result<(), Errno> {
    match renameat_with(folder, new, folder, name, flags) {
        // A file system that does not know these flags.
        Err(Errno::INVAL) => {
            linkat(folder, new, folder, name, AtFlags::empty()).and_then(|()| unlinkat(folder, new, AtFlags::empty()))
        }
        other => other,
    }
}

/// Makes a new or removed name last, where that can be done: not in a folder that may not be read, nor on some file
/// systems.
fn sync_folder(folder: &OwnedFd) -> io::Result<()> {
    let opened = openat(folder, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    match opened.and_then(rustix::fs::fsync) {
        Err(Errno::ACCESS | Errno::INVAL) => Ok(()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::sync::Arc;

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

    /// The device that writes a file: opened for writing only, as one of two files is.
    fn device(path: &Path) -> BackingFiles {
        let written = Arc::new(File::options().write(true).open(path).unwrap());
        BackingFiles { read: written.clone(), written }
    }

    fn original(path: &Path) -> Original {
        Original::of(&device(path).written).unwrap().unwrap()
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
    fn a_device_is_claimed_as_long_as_a_request_has_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let (path, _) = file(folder.path());
        let (first, second) = (device(&path), device(&path));
        assert_eq!((claim(&first).unwrap(), claim(&first).unwrap()), (None, None));
        let request = first.written.clone();
        drop(first);
        assert!(matches!(claim(&second), Err(ValidateError::Locked)), "a request is under way");
        drop(request);
        assert_eq!(claim(&second).unwrap(), None);
        let backup = original(&path).back_up(0, LEN).unwrap().leave();
        assert_eq!(claim(&second).unwrap(), Some(backup));
        assert_eq!(claim(&device(Path::new("/dev/null"))).unwrap(), None);
    }

    #[test]
    fn a_run_restores_its_own_backup_whatever_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let (path, before) = file(folder.path());
        let backup = original(&path).back_up(0, LEN).unwrap();
        // Its file is moved away, and another run backs up a new one of that name.
        let moved = folder.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        fs::rename(folder.path().join(".card.dmalane-backup"), folder.path().join("mine")).unwrap();
        fs::write(&path, vec![9; LEN as usize]).unwrap();
        let other = original(&path).back_up(0, LEN).unwrap();
        fs::write(&moved, written()).unwrap();
        backup.restore().unwrap();
        assert!(fs::read(&moved).unwrap()[..] == before[..] && fs::read(&path).unwrap() == vec![9; LEN as usize]);
        fs::write(&path, written()).unwrap();
        other.restore().unwrap();
        assert!(fs::read(&path).unwrap() == vec![9; LEN as usize]);
        assert_ne!(original(&path).unfinished(), original(&moved).unfinished(), "nor do they share another name");
    }

    #[test]
    fn no_backup_replaces_another() {
        let folder = tempfile::tempdir().unwrap();
        let (path, before) = file(folder.path());
        let backup = original(&path).back_up(0, LEN).unwrap();
        assert!(original(&path).back_up(0, LEN).is_err());
        backup.restore().unwrap();
        assert!(fs::read(&path).unwrap() == before);
        // Both flags at once are none that a file system knows.
        let there = original(&path).place.enter().unwrap();
        for flags in [RenameFlags::NOREPLACE, RenameFlags::NOREPLACE | RenameFlags::EXCHANGE] {
            fs::write(folder.path().join("new"), b"new").unwrap();
            let refused = put_in_place(&there, "new".as_ref(), "card".as_ref(), flags);
            assert_eq!((refused, names(folder.path())), (Err(Errno::EXIST), 2));
            put_in_place(&there, "new".as_ref(), "free".as_ref(), flags).unwrap();
            assert_eq!((fs::read(folder.path().join("free")).unwrap(), names(folder.path())), (b"new".to_vec(), 2));
            fs::remove_file(folder.path().join("free")).unwrap();
        }
    }

    #[test]
    fn the_size_and_the_allocation_of_a_file_are_restored() {
        let folder = tempfile::tempdir().unwrap();
        let (path, before) = file(folder.path());
        let out = File::options().write(true).open(&path).unwrap();
        original(&path).back_up(0, LEN).unwrap().leave();
        out.set_len(1 << 20).unwrap();
        assert!(original(&path).recover().unwrap_err().to_string().contains("written since"));
        original(&path).recover_over().unwrap();
        assert!(fs::read(&path).unwrap() == before, "with the hole at its end");
        if fallocate(&out, FallocateFlags::empty(), 0, LEN).is_err() {
            return println!("SKIPPED: no preallocation");
        }
        let blocks = out.metadata().unwrap().blocks();
        let backup = original(&path).back_up(0, LEN).unwrap();
        out.write_all_at(&written(), 0).unwrap();
        backup.restore().unwrap();
        assert_eq!((out.metadata().unwrap().blocks(), fs::read(&path).unwrap() == before), (blocks, true));
    }

    #[test]
    fn a_name_may_be_as_long_as_names_are() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["n".repeat(255), "n".repeat(254) + "m", "n".repeat(200)];
        let backups = names.map(|name| {
            let path = folder.path().join(name);
            fs::write(&path, [7; 4096]).unwrap();
            for _ in 0..2 {
                let backup = original(&path).back_up(0, 4096).unwrap().leave();
                assert_eq!(claim(&device(&path)).unwrap(), Some(backup));
                original(&path).recover_over().unwrap();
            }
            original(&path).back_up(0, 4096).unwrap().leave()
        });
        assert_eq!(backups.iter().collect::<std::collections::BTreeSet<_>>().len(), 3);
    }

    #[test]
    fn names_that_are_not_text_have_backups_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let names = [b"card\xff", b"card\xfe"].map(|name| folder.path().join(OsStr::from_bytes(name)));
        let backups = names.map(|path| {
            fs::write(&path, [7; 4096]).unwrap();
            original(&path).back_up(0, 4096).unwrap().leave()
        });
        assert!(backups[0] != backups[1] && backups.iter().all(|path| path.exists()));
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
        // A hole without an end, with the right hash.
        let mut endless: serde_json::Value = serde_json::from_str(&header).unwrap();
        endless["extents"] = serde_json::json!([[0, u64::MAX, false]]);
        let mut endless = format!("{endless}\n").into_bytes();
        endless.extend(XxHash3_64::oneshot(&endless).to_le_bytes());
        wrong.push(endless);
        for bytes in wrong {
            fs::write(&backup, &bytes).unwrap();
            let error = original(&path).recover().unwrap_err();
            assert!(matches!(&error, ValidateError::Recover { backup: b, .. } if *b == backup), "{error}");
            assert!(fs::read(&backup).unwrap() == bytes && fs::read(&path).unwrap() == before);
            assert!(original(&path).back_up(0, 4096).is_err(), "it is not replaced either");
        }
        // One that was not finished is in nobody's way.
        fs::rename(&backup, folder.path().join(original(&path).unfinished())).unwrap();
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
        let Identity::File { born, .. } = &mut header.file else { panic!("it is one") };
        assert!(!born.is_empty(), "this file system tells the time of birth");
        born.push('0');
        let rest = &whole[end..whole.len() - 8];
        fs::write(&backup, backup_of(&header, rest)).unwrap();
        assert!(original(&path).recover().unwrap_err().to_string().contains("it is of another file"));
        // It is restored where that is asked for, and stays.
        let recovered = original(&path).recover_over().unwrap();
        assert!(recovered.backup == backup && recovered.stays && backup.exists());
        assert!(fs::read(&path).unwrap() == before);
        // Numbers that the machine assigns at boot may have changed since.
        header.boot = "another".into();
        fs::write(&backup, backup_of(&header, rest)).unwrap();
        let error = original(&path).recover().unwrap_err().to_string();
        assert!(error.contains("the machine was started since") && !error.contains("another file"), "{error}");
        fs::remove_file(&backup).unwrap();
        std::os::unix::fs::symlink(folder.path().join("moved"), &backup).unwrap();
        assert!(original(&path).recover().is_err() && original(&path).back_up(0, 4096).is_err(), "no link is followed");
    }

    /// The bytes of a backup.
    fn backup_of(header: &Header, rest: &[u8]) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(header).unwrap();
        bytes.extend(rest);
        bytes.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
        bytes
    }

    #[test]
    fn a_disk_is_known_by_its_name_and_else_as_long_as_the_machine_runs() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        let partition = disk.join("partition");
        fs::create_dir_all(&partition).unwrap();
        let set = |path: &Path, text: &str| fs::write(path, text).unwrap();
        set(&disk.join("size"), "100\n");
        set(&disk.join("diskseq"), "7\n");
        set(&partition.join("start"), "8\n");
        set(&partition.join("size"), "16\n");
        let number = Identity::Number { rdev: 3, sequence: "7".into() };
        assert_eq!((identify_disk(3, &disk), identify_disk(3, &partition)), (number.clone(), number));
        set(&disk.join("wwid"), "naa.5000\n");
        let named = |start, len| Identity::Disk { name: "naa.5000".into(), start, len };
        assert_eq!((identify_disk(3, &disk), identify_disk(4, &disk)), (named(0, 0), named(0, 0)));
        assert_eq!(identify_disk(3, &partition), named(8, 16));
        // The number of a disk without a name says nothing after a start.
        let (path, _) = file(folder.path());
        let original = Original { id: Identity::Number { rdev: 3, sequence: "7".into() }, ..original(&path) };
        let mut saved =
            Saved { backup: &original.file, of: original.id.clone(), boot: boot(), len: None, extents: Vec::new() };
        assert!(original.is_of(&saved));
        saved.boot.push('0');
        assert!(!original.is_of(&saved));
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
            let replaced = original(&path).recover_over().unwrap().replaced;
            assert!(fs::read(&path).unwrap() == before && !backup.exists());
            fs::rename(replaced, &backup).unwrap();
            fs::remove_file(original(&path).recover_over().unwrap().replaced).unwrap();
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
