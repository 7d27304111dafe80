//! The work of this process, for `dmalane top`: a socket in a directory of this user that answers with a snapshot.
//!
//! Nothing is written while nobody asks. A process that was killed leaves a socket that refuses connections; the next
//! `dmalane top` removes it.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use dmalane::device::{Counters, ReadCounters};
use dmalane::load::{Live, LiveStage};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use serde::{Deserialize, Serialize};

use crate::program::command_line;

/// The version of [`Snapshot`].
const SCHEMA: u32 = 1;
/// Bytes of a snapshot, at most.
const MOST: usize = 64 << 10;
/// Time that a job has to answer.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Sockets that are looked at, at most.
const JOBS: usize = 256;
/// More sockets than this are looked through for stale ones when a job begins.
const CROWDED: usize = 32;

/// The state of a job, as the job reports it.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Snapshot {
    schema: u32,
    /// The words of the command.
    pub command: String,
    /// Its present step ("load", "verify").
    pub phase: String,
    /// Time since the first phase began.
    pub elapsed_s: f64,
    /// Bytes or steps of the phase that are done, and all of them; 0 where that is not known.
    pub done: u64,
    pub total: u64,
    /// They are bytes, not steps.
    pub bytes: bool,
    /// The stages that have done anything.
    pub stages: Vec<StageSnapshot>,
    /// The IOMMU of a device in the job's process.
    pub iommu: Option<IommuSnapshot>,
    /// Operations that a device was given and has not ended, where no stage counts them.
    #[serde(default)]
    pub in_flight: Option<u64>,
    /// The memory of others that a device has accessed.
    #[serde(default)]
    pub link: Option<LinkSnapshot>,
}

/// Bytes of host memory that a device has read (H2C) and written (C2H), from the beginning on.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub struct LinkSnapshot {
    pub read: u64,
    pub written: u64,
}

/// A stage, from the beginning on.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct StageSnapshot {
    pub stage: String,
    pub busy_s: f64,
    pub wall_s: f64,
    pub bytes: u64,
    pub in_flight: u64,
}

/// The IOMMU, from the beginning on.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub struct IommuSnapshot {
    pub hits: u64,
    pub misses: u64,
    pub faults: u64,
}

/// The job of this process.
pub struct ProcessJob {
    started: Instant,
    phase: Mutex<(&'static str, bool)>,
    message: Mutex<String>,
    done: AtomicU64,
    total: AtomicU64,
    live: Arc<Live>,
    counters: Mutex<Option<Weak<dyn Fn() -> Counters + Send + Sync>>>,
}

/// The job and its socket.
static JOB: Mutex<Option<(Arc<ProcessJob>, Option<Socket>)>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The job of this process. The first call makes it known to others, if it can.
pub fn this() -> Arc<ProcessJob> {
    let mut job = lock(&JOB);
    let (job, _) = job.get_or_insert_with(|| {
        let job = Arc::new(ProcessJob {
            started: Instant::now(),
            phase: Mutex::new(("start", false)),
            message: Mutex::default(),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            live: Arc::default(),
            counters: Mutex::default(),
        });
        // A job that nobody can see works as well.
        (job.clone(), Socket::open(job).ok())
    });
    job.clone()
}

/// The job of this process is done.
pub fn end() {
    *lock(&JOB) = None;
}

impl ProcessJob {
    /// A phase begins, whose progress is in bytes or steps.
    pub fn phase(&self, name: &'static str, bytes: bool) {
        *lock(&self.phase) = (name, bytes);
        lock(&self.message).clear();
        self.total.store(0, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
    }

    /// The step of the phase.
    pub fn message(&self, text: &str) {
        text.clone_into(&mut lock(&self.message));
    }

    /// All bytes or steps of the phase.
    pub fn total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    /// More bytes or steps are to be done.
    pub fn more(&self, by: u64) {
        self.total.fetch_add(by, Ordering::Relaxed);
    }

    /// More bytes or steps are done.
    pub fn advance(&self, by: u64) {
        self.done.fetch_add(by, Ordering::Relaxed);
    }

    /// The state of the stages.
    pub fn live(&self) -> Arc<Live> {
        self.live.clone()
    }

    /// A device of the job, as long as it exists.
    pub fn counted(&self, counters: &ReadCounters) {
        *lock(&self.counters) = Some(Arc::downgrade(counters));
    }

    fn snapshot(&self) -> Snapshot {
        let ((phase, bytes), message) = (*lock(&self.phase), lock(&self.message).clone());
        let stage = |LiveStage { report, in_flight }: LiveStage| StageSnapshot {
            stage: report.stage.to_string(),
            busy_s: report.busy.as_secs_f64(),
            wall_s: report.wall.as_secs_f64(),
            bytes: report.bytes,
            in_flight: in_flight as u64,
        };
        let used = |s: &LiveStage| s.report.bytes > 0 || s.in_flight > 0 || !s.report.wall.is_zero();
        let counters = lock(&self.counters).as_ref().and_then(Weak::upgrade).map(|counters| counters());
        let Counters { iommu, moved, in_flight, .. } = counters.unwrap_or_default();
        let link = moved.map(|(read, written)| LinkSnapshot { read, written });
        let moved = link.map(|link| link.read.saturating_add(link.written));
        Snapshot {
            schema: SCHEMA,
            command: command_line().chars().take(2000).collect(),
            phase: if message.is_empty() { phase.to_owned() } else { format!("{phase}: {message}") },
            elapsed_s: self.started.elapsed().as_secs_f64(),
            done: moved.unwrap_or_else(|| self.done.load(Ordering::Relaxed)),
            total: self.total.load(Ordering::Relaxed),
            bytes,
            stages: self.live.stages().into_iter().filter(used).map(stage).collect(),
            iommu: iommu.map(|i| IommuSnapshot { hits: i.hits, misses: i.misses, faults: i.faults }),
            in_flight,
            link,
        }
    }
}

/// A socket on which a thread answers.
struct Socket {
    folder: Folder,
    name: String,
    listener: Arc<UnixListener>,
    closed: Arc<AtomicBool>,
}

impl Socket {
    fn open(job: Arc<ProcessJob>) -> io::Result<Self> {
        let folder = Folder::open(true)?;
        let others = folder.sockets();
        if others.len() > CROWDED {
            others.iter().for_each(|name| drop(folder.connect(name)));
        }
        // Processes of several containers may share the directory, and have the same number.
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
        let name = format!("{}-{since:x}", std::process::id());
        let listener = Arc::new(UnixListener::bind(folder.path(&name))?);
        let closed = Arc::new(AtomicBool::new(false));
        let (connections, over) = (listener.clone(), closed.clone());
        let answer = move || {
            while !over.load(Ordering::Relaxed) {
                match connections.accept() {
                    Ok((stream, _)) => drop(tell(stream, &job)),
                    // Such as too many open files.
                    Err(_) => std::thread::sleep(Duration::from_millis(100)),
                }
            }
        };
        // Dropped, it removes the socket.
        let socket = Self { folder, name, listener, closed };
        std::thread::Builder::new().name("job".to_owned()).spawn(answer)?;
        Ok(socket)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
        // Wakes the thread; the socket is removed whether it can be shut down or not.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        let _ = rustix::fs::unlinkat(&self.folder.0, &self.name, AtFlags::empty());
    }
}

/// Answers a connection.
fn tell(mut stream: UnixStream, job: &ProcessJob) -> io::Result<()> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(&serde_json::to_vec(&job.snapshot())?)
}

/// The directory of the sockets: of this user, and closed to others.
struct Folder(OwnedFd);

impl Folder {
    /// Opens it, or makes it.
    fn open(make: bool) -> io::Result<Self> {
        let me = rustix::process::geteuid().as_raw();
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| {
            // Another user's after `sudo -E`.
            path.is_absolute() && rustix::fs::stat(path).is_ok_and(|stat| stat.st_uid == me)
        });
        let path = runtime.map_or_else(|| PathBuf::from(format!("/tmp/dmalane-{me}")), |path| path.join("dmalane"));
        if make {
            match rustix::fs::mkdir(&path, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let folder = rustix::fs::open(&path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&folder)?;
        match stat.st_uid == me && stat.st_mode & 0o077 == 0 {
            true => Ok(Self(folder)),
            false => Err(io::Error::other(format!("{} is not this user's alone", path.display()))),
        }
    }

    /// A path of an entry, whatever happens to the directory's name, that is short enough for a socket.
    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        Path::new("/proc/self/fd").join(self.0.as_raw_fd().to_string()).join(name)
    }

    /// The sockets in it.
    fn sockets(&self) -> Vec<OsString> {
        let entries = std::fs::read_dir(self.path("")).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name()).filter(|name| self.is_socket(name)).collect();
        names.sort();
        names.truncate(JOBS);
        names
    }

    /// Connects to a job. Removes a socket of which the process is gone.
    fn connect(&self, name: &OsString) -> Option<UnixStream> {
        let stream = UnixStream::connect(self.path(name));
        if stream.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused) {
            let _ = rustix::fs::unlinkat(&self.0, name, AtFlags::empty());
        }
        stream.ok()
    }

    /// True for sockets themselves, not for links to one.
    fn is_socket(&self, name: &OsString) -> bool {
        let stat = rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
    }
}

/// A job that is under way.
pub struct Found {
    /// Its socket, which tells it from others.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Its answer, or why there is none.
    pub answer: Result<Snapshot, String>,
}

/// The jobs of this user. Removes sockets of which the process is gone.
pub fn all() -> Vec<Found> {
    let Ok(folder) = Folder::open(false) else { return Vec::new() };
    let found = folder.sockets().into_iter().filter_map(|name| {
        let mut stream = folder.connect(&name)?;
        let peer = socket_peercred(&stream).ok()?;
        let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
        (pid != std::process::id()).then(|| Found {
            name: name.to_string_lossy().into_owned(),
            pid,
            answer: ask(&mut stream),
        })
    });
    found.collect()
}

/// Reads an answer, which may come late, never, or be anything.
fn ask(stream: &mut UnixStream) -> Result<Snapshot, String> {
    let (deadline, mut bytes) = (Instant::now() + TIMEOUT, Vec::new());
    let mut chunk = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(|e| e.to_string())?;
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => bytes.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err("no answer".to_owned()),
        }
        if bytes.len() > MOST {
            return Err("no valid answer".to_owned());
        }
        if Instant::now() >= deadline {
            return Err("no answer".to_owned());
        }
    }
    let snapshot: Snapshot = serde_json::from_slice(&bytes).map_err(|_| "no valid answer".to_owned())?;
    match snapshot.schema {
        SCHEMA => Ok(snapshot),
        _ => Err("another version of dmalane".to_owned()),
    }
}
