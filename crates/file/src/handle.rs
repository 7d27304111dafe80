//! Files that are closed while many others are in use, and opened again when they are needed.

use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::fs::{Mode as Permissions, OFlags};
use rustix::io::Errno;
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
    /// What the file was when it was opened, if its name may open it again.
    named: Option<Identity>,
    open: Mutex<Option<Opened>>,
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

fn most() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| (getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4).clamp(16, 4096) as usize)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FileHandle {
    /// A file that stays open, and its name in messages.
    pub fn new(file: File, path: impl Into<PathBuf>) -> Self {
        Self::of(file, path.into(), None)
    }

    /// A file that was opened by this name just now.
    ///
    /// # Errors
    /// The kernel's, when it does not tell what the file is.
    pub fn named(file: File, path: impl Into<PathBuf>) -> io::Result<Self> {
        let meta = file.metadata()?;
        let handle = Self::of(file, path.into(), meta.is_file().then(|| Identity::of(&meta)));
        handle.register();
        Ok(handle)
    }

    /// Opens a file by name.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        Self::named(File::open(path)?, path)
    }

    fn of(file: File, path: PathBuf, named: Option<Identity>) -> Self {
        let open = Mutex::new(Some(Opened { file: Arc::new(file), direct: None }));
        Self(Arc::new(Shared { path, named, open }))
    }

    /// Its name.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// True if it was opened by its name, and may be opened so again.
    pub fn is_named(&self) -> bool {
        self.0.named.is_some()
    }

    /// The file, opened again if it was closed.
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if another file has its name by now, or it was changed.
    pub fn file(&self) -> io::Result<Arc<File>> {
        let mut open = locked(&self.0.open);
        if let Some(Opened { file, .. }) = &*open {
            return Ok(file.clone());
        }
        // Before it is opened, too: a pipe that took its place would wait for a writer.
        self.same(&std::fs::metadata(self.path())?)?;
        let file = Arc::new(File::open(self.path())?);
        self.same(&file.metadata()?)?;
        *open = Some(Opened { file: file.clone(), direct: None });
        drop(open);
        self.register();
        Ok(file)
    }

    /// The same file, opened for direct I/O.
    pub(crate) fn direct(&self) -> io::Result<Arc<File>> {
        let file = self.file()?;
        let mut open = locked(&self.0.open);
        if let Some(direct) = open.as_ref().and_then(|opened| opened.direct.clone()) {
            return Ok(direct);
        }
        let direct = Arc::new(open_again(&file, self.path(), OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT)?);
        if let Some(opened) = &mut *open {
            opened.direct = Some(direct.clone());
        }
        Ok(direct)
    }

    /// What the kernel says of it now.
    ///
    /// # Errors
    /// The kernel's.
    pub fn metadata(&self) -> io::Result<Metadata> {
        let file = locked(&self.0.open).as_ref().map(|opened| opened.file.clone());
        file.map_or_else(|| std::fs::metadata(self.path()), |file| file.metadata())
    }

    /// Whether its name still opens the file that it was, unchanged, by what the kernel says of it.
    ///
    /// # Errors
    /// The kernel's; `ESTALE` if not.
    pub fn check(&self) -> io::Result<()> {
        if self.is_named() { self.same(&std::fs::metadata(self.path())?) } else { Ok(()) }
    }

    fn same(&self, meta: &Metadata) -> io::Result<()> {
        let same = self.0.named.is_none_or(|was| Identity::of(meta) == was);
        same.then_some(()).ok_or_else(|| Errno::STALE.into())
    }

    /// Closes those that were opened first, if there are too many with this one.
    fn register(&self) {
        if !self.is_named() {
            return;
        }
        let mut open = locked(&OPEN);
        open.push_back(Arc::downgrade(&self.0));
        let too_many = open.len().saturating_sub(most());
        let closed: Vec<_> = open.drain(..too_many).collect();
        drop(open);
        for shared in closed.iter().filter_map(Weak::upgrade) {
            *locked(&shared.open) = None;
        }
    }
}

impl std::fmt::Debug for FileHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let open = locked(&self.0.open).is_some();
        f.debug_struct("FileHandle").field("path", &self.path()).field("open", &open).finish()
    }
}

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
