//! A FUSE server of ours that answers late: each request a given time after it came, at a given rate in all.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyOpen, Request,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The server, in a process of its own: nothing waits for a process that is gone.
#[derive(clap::Args)]
pub struct Serve {
    folder: PathBuf,
    /// The files that it serves, from memory
    source: PathBuf,
    latency_us: u64,
    rate: u64,
    /// Whether names are found and files opened late too
    opens: u8,
}

/// Threads that answer.
const ANSWERERS: usize = 2;
/// The kernel remembers names and attributes for so long.
const REMEMBERED: Duration = Duration::from_secs(1);

/// Serves until standard input ends.
pub fn serve(options: &Serve) -> Result<()> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&options.source)? {
        let entry = entry?;
        files.push((entry.file_name(), std::fs::read(entry.path())?));
    }
    files.sort();
    let late = Arc::new(Late {
        numbers: files.iter().enumerate().map(|(i, (name, _))| (name.clone(), i)).collect(),
        files,
        latency: Duration::from_micros(options.latency_us),
        rate: options.rate,
        opens: options.opens > 0,
        state: Mutex::default(),
        changed: Condvar::new(),
    });
    let mut config = Config::default();
    (config.n_threads, config.clone_fd) = (Some(2), true);
    let session = fuser::spawn_mount(Files(late.clone()), &options.folder, &config)?;
    for _ in 0..ANSWERERS {
        let late = late.clone();
        std::thread::spawn(move || late.answer());
    }
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(session.umount_and_join()?)
}

/// The files of a folder, answered late, as long as this lives.
pub struct Server {
    process: Child,
    folder: tempfile::TempDir,
}

impl Server {
    /// Serves the files of `source`: reads `latency` after they came and at `rate` bytes a second in all. With `opens`,
    /// names are found and files opened as late.
    pub fn start(source: &Path, latency: Duration, rate: u64, opens: bool) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let numbers = [latency.as_micros() as u64, rate, u64::from(opens)].map(|n| n.to_string());
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("late-server").arg(folder.path()).arg(source).args(numbers);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = [0; 6];
        process.stdout.as_mut().expect("a pipe").read_exact(&mut said)?;
        Ok(Self { process, folder })
    }

    /// Where the files are.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.stdin = None;
        let _ = self.process.wait();
    }
}

/// Requests that wait for their time.
struct Late {
    files: Vec<(OsString, Vec<u8>)>,
    numbers: HashMap<OsString, usize>,
    latency: Duration,
    rate: u64,
    opens: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// When the source has given all that was asked for so far.
    free: Option<Instant>,
    waiting: BinaryHeap<Reverse<(Instant, u64)>>,
    replies: HashMap<u64, Answer>,
    requests: u64,
}

enum Answer {
    Data { file: usize, offset: u64, size: u32, reply: ReplyData },
    Entry(FileAttr, ReplyEntry),
    Open(ReplyOpen),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic")
}

impl Late {
    fn answer(&self) {
        let mut state = locked(&self.state);
        loop {
            let now = Instant::now();
            let due = state.waiting.peek().map(|Reverse((at, _))| *at);
            match due {
                Some(at) if at > now => state = self.changed.wait_timeout(state, at - now).expect("no panic").0,
                Some(_) => {
                    let Some(Reverse((_, number))) = state.waiting.pop() else { continue };
                    let Some(answer) = state.replies.remove(&number) else { continue };
                    drop(state);
                    self.give(answer);
                    state = locked(&self.state);
                }
                None => state = self.changed.wait(state).expect("no panic"),
            }
        }
    }

    fn give(&self, answer: Answer) {
        match answer {
            Answer::Data { file, offset, size, reply } => {
                let bytes = &self.files[file].1;
                let first = (offset as usize).min(bytes.len());
                reply.data(&bytes[first..(first + size as usize).min(bytes.len())]);
            }
            Answer::Entry(attr, reply) => reply.entry(&REMEMBERED, &attr, Generation(0)),
            Answer::Open(reply) => reply.opened(FileHandle(0), FopenFlags::empty()),
        }
    }

    /// Answers after the source has given this number of bytes, and its latency.
    fn later(&self, bytes: u32, answer: Answer) {
        let (now, mut state) = (Instant::now(), locked(&self.state));
        let given =
            state.free.map_or(now, |free| free.max(now)) + Duration::from_secs_f64(f64::from(bytes) / self.rate as f64);
        state.free = Some(given);
        state.requests += 1;
        let number = state.requests;
        state.waiting.push(Reverse((given + self.latency, number)));
        state.replies.insert(number, answer);
        drop(state);
        self.changed.notify_one();
    }
}

struct Files(Arc<Late>);

impl Files {
    /// The root has number 1, the files follow.
    fn file(ino: INodeNo) -> Option<usize> {
        usize::try_from(ino.0).ok()?.checked_sub(2)
    }

    fn attr(&self, ino: INodeNo) -> FileAttr {
        let file = Self::file(ino).and_then(|file| self.0.files.get(file));
        let size = file.map_or(0, |(_, bytes)| bytes.len() as u64);
        FileAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if file.is_none() { FileType::Directory } else { FileType::RegularFile },
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 4096,
        }
    }
}

impl Filesystem for Files {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let unsupported = |_| std::io::ErrorKind::Unsupported;
        // Several names of a folder at a time, and reads of a loop device.
        config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS | InitFlags::FUSE_ASYNC_DIO).map_err(unsupported)?;
        config.set_max_background(1024).map(drop).map_err(|_| std::io::ErrorKind::Unsupported.into())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let Some(file) = self.0.numbers.get(name) else { return reply.error(Errno::ENOENT) };
        let answer = Answer::Entry(self.attr(INodeNo(*file as u64 + 2)), reply);
        if self.0.opens { self.0.later(0, answer) } else { self.0.give(answer) }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&REMEMBERED, &self.attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let answer = Answer::Open(reply);
        if self.0.opens { self.0.later(0, answer) } else { self.0.give(answer) }
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        for (i, (name, _)) in self.0.files.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(i as u64 + 2), i as u64 + 1, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(file) = Self::file(ino) else { return reply.error(Errno::EISDIR) };
        self.0.later(size, Answer::Data { file, offset, size, reply });
    }
}
