//! Files that are closed while many others are in use, and opened again when they are needed.

use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use dmalane_dma::lock;
use rustix::fs::{Mode as Permissions, OFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Resource, getrlimit};

/// An open file. A regular file that was opened by its name is closed when too many others were opened since, and
/// opened again when it is needed, if it still is the file that it was: 100 000 files need no 100 000 descriptors.
///
/// At a time, at most a quarter as many are open as the soft limit (`RLIMIT_NOFILE`) allowed when the first one was
/// opened, from 16 to 4096, beside those with reads in flight. Each may have a second descriptor, for direct I/O.
#[derive(Clone)]
pub struct FileHandle(Arc<Shared>);

struct Shared {
    path: PathBuf,
    /// The file's identity when it was opened, if it is a regular one.
    was: Option<Identity>,
    /// Its name may open it again.
    named: bool,
    open: Mutex<Option<Opened>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn close(&self) {
        if lock(&self.open).take().is_some() && self.named {
            COUNT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Descriptors through the page cache and past it.
struct Opened {
    file: Arc<File>,
    direct: Option<Arc<File>>,
}

/// Device, inode, bytes, and the time of the last change.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity(u64, u64, u64, i64, i64);

impl Identity {
    fn of(meta: &Metadata) -> Self {
        Self(meta.dev(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec())
    }
}

/// Files that may be closed, the one that was opened first in front.
static OPEN: Mutex<VecDeque<Weak<Shared>>> = Mutex::new(VecDeque::new());
/// How many of them are open.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn most() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| (getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4).clamp(16, 4096) as usize)
}

impl FileHandle {
    /// A file that stays open, and its name in messages.
    pub fn new(file: File, path: impl Into<PathBuf>) -> Self {
        let was = file.metadata().ok().filter(Metadata::is_file).map(|meta| Identity::of(&meta));
        Self::of(file, path.into(), was, false)
    }

    /// A file that was opened by this name just now.
    ///
    /// # Errors
    /// The kernel's, when it does not tell what the file is.
    pub fn named(file: File, path: impl Into<PathBuf>) -> io::Result<Self> {
        let meta = file.metadata()?;
        let handle = Self::of(file, path.into(), meta.is_file().then(|| Identity::of(&meta)), meta.is_file());
        handle.register();
        Ok(handle)
    }

    /// Opens a file by name, [at once](open_at_once).
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        Self::named(again_with_room(|| open_at_once(path))?, path)
    }

    fn of(file: File, path: PathBuf, was: Option<Identity>, named: bool) -> Self {
        let open = Mutex::new(Some(Opened { file: Arc::new(file), direct: None }));
        Self(Arc::new(Shared { path, was, named, open }))
    }

    /// Its name.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// True if it was opened by its name, and may be opened so again.
    pub fn is_named(&self) -> bool {
        self.0.named
    }

    /// The file, opened again if it was closed.
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if another file has its name by now, or it was changed.
    pub fn file(&self) -> io::Result<Arc<File>> {
        let mut open = lock(&self.0.open);
        if let Some(Opened { file, .. }) = &*open {
            return Ok(file.clone());
        }
        let file = Arc::new(again_with_room(|| open_at_once(self.path()))?);
        self.same(&file.metadata()?)?;
        *open = Some(Opened { file: file.clone(), direct: None });
        drop(open);
        self.register();
        Ok(file)
    }

    /// The same file, opened for direct I/O.
    pub(crate) fn direct(&self) -> io::Result<Arc<File>> {
        let file = self.file()?;
        let mut open = lock(&self.0.open);
        if let Some(direct) = open.as_ref().and_then(|opened| opened.direct.clone()) {
            return Ok(direct);
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
        let direct = Arc::new(open_again(&file, self.path(), flags)?);
        if let Some(opened) = &mut *open {
            opened.direct = Some(direct.clone());
        }
        Ok(direct)
    }

    /// The kernel's description of it now.
    ///
    /// # Errors
    /// The kernel's.
    pub fn metadata(&self) -> io::Result<Metadata> {
        let file = lock(&self.0.open).as_ref().map(|opened| opened.file.clone());
        file.map_or_else(|| std::fs::metadata(self.path()), |file| file.metadata())
    }

    /// Whether it is the file that it was, unchanged, by what the kernel says of it: of its name, where it has one.
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if not.
    pub fn check(&self) -> io::Result<()> {
        self.same(&if self.is_named() { std::fs::metadata(self.path())? } else { self.metadata()? })
    }

    fn same(&self, meta: &Metadata) -> io::Result<()> {
        let same = self.0.was.is_none_or(|was| Identity::of(meta) == was);
        same.then_some(()).ok_or_else(|| Errno::STALE.into())
    }

    /// Bytes in it when it was opened, if it is a regular file.
    pub fn len_when_opened(&self) -> Option<u64> {
        self.0.was.map(|Identity(_, _, len, ..)| len)
    }

    /// Counts it, and closes those that were opened first while there are too many.
    fn register(&self) {
        if !self.is_named() {
            return;
        }
        COUNT.fetch_add(1, Ordering::Relaxed);
        let mut open = lock(&OPEN);
        if open.len() > 2 * most() {
            open.retain(|shared| shared.strong_count() > 0);
        }
        open.push_back(Arc::downgrade(&self.0));
        drop(open);
        close_down_to(most());
    }
}

/// Closes files, the one that was opened first before others, until this number is open.
fn close_down_to(most: usize) {
    while COUNT.load(Ordering::Relaxed) > most {
        // Dropped without the lock, as are files whose last handle this is.
        let Some(first) = lock(&OPEN).pop_front() else { return };
        if let Some(shared) = first.upgrade() {
            shared.close();
        }
    }
}

/// Opens a file for reading, without waiting: a FIFO without a writer is at its end.
///
/// # Errors
/// The kernel's.
pub fn open_at_once(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    match retry_on_intr(|| rustix::fs::open(path, flags, Permissions::empty())) {
        Ok(file) => {
            // Reads wait all the same: a writer that is there may be slow, and io_uring would give up.
            rustix::fs::fcntl_setfl(&file, OFlags::empty())?;
            Ok(file.into())
        }
        // Of a file: another process has a lease, which it gives back when it is asked to.
        Err(Errno::AGAIN) if path.is_file() => File::open(path),
        Err(e) => Err(e.into()),
    }
}

/// Opens something, and once more with half of the files closed where there are no descriptors left.
fn again_with_room<T>(open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    match open() {
        Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::MFILE | Errno::NFILE)) => {
            close_down_to(COUNT.load(Ordering::Relaxed) / 2);
            open()
        }
        other => other,
    }
}

dmalane_dma::debug_as!(FileHandle, |it| "FileHandle({}, open: {})", it.path().display(), lock(&it.0.open).is_some());

/// Opens the same file again, whatever has its path by now; where no `/proc` is mounted, by its path, if that is still
/// the file.
pub(crate) fn open_again(file: &File, path: &Path, flags: OFlags) -> io::Result<File> {
    let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::open(descriptor, flags, Permissions::empty()) {
        Err(Errno::NOENT) => {}
        other => return Ok(File::from(other?)),
    }
    let was = file.metadata()?;
    let same = |is: Metadata| match (is.dev(), is.ino()) == (was.dev(), was.ino()) {
        true => Ok(()),
        false => Err(Errno::NOENT),
    };
    // Before it is opened, too: another file might be a FIFO.
    same(std::fs::metadata(path)?)?;
    let again = File::from(rustix::fs::open(path, flags, Permissions::empty())?);
    same(again.metadata()?)?;
    Ok(again)
}
