//! Files of a source with latency: read and loaded, beside the best of raw reads at several depths.
//!
//! A FUSE server of ours answers each request a given time after it came, at a given rate in all. Rows take turns,
//! round by round; what was read is compared with what the server gives.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::error::Error;
use std::ffi::OsStr;
use std::fs::File;
use std::hash::Hasher;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant, UNIX_EPOCH};

use dmalane::addr::FileOffset;
use dmalane::device::RamDevice;
use dmalane::dma::{AnonHeap, Heap, PageKind, Pool, SharedBuf};
use dmalane::file::read_now;
use dmalane::{FileOptions, OpenDevice, Placement, ReadOptions, alloc_and_read, open_file};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use twox_hash::XxHash3_64;

use crate::mt19937::Mt19937;
use crate::report::Report;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of the file
    #[arg(long, default_value_t = 256 << 20)]
    size: u64,

    /// Milliseconds until a request is answered
    #[arg(long, value_delimiter = ',', default_values_t = [0.2, 1.0, 5.0, 20.0])]
    latency: Vec<f64>,

    /// Bytes a second that the source gives in all
    #[arg(long, default_value_t = 1_500_000_000)]
    rate: u64,

    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 11)]
    rounds: usize,
}

/// The server, in a process of its own: nothing waits for a process that is gone.
#[derive(clap::Args)]
pub struct Serve {
    folder: PathBuf,
    size: u64,
    latency_us: u64,
    rate: u64,
}

/// Serves until standard input ends.
pub fn serve(options: &Serve) -> Result<()> {
    let latency = Duration::from_micros(options.latency_us);
    let (bytes, state) = (contents(options.size), Mutex::new(State::default()));
    let late = Arc::new(Late { bytes, latency, rate: options.rate, state, changed: Condvar::new() });
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

fn contents(size: u64) -> Vec<u8> {
    let mut random = Mt19937::new(1);
    (0..size.div_ceil(4)).flat_map(|_| random.number().to_le_bytes()).take(size as usize).collect()
}

const BLOCK: usize = 2 << 20;
/// Reads in flight of the raw readers.
const DEPTHS: [usize; 3] = [4, 16, 64];
const O_DIRECT: i32 = 0o40000;

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("slow");
    for latency in &options.latency {
        let server = Server::start(options, Duration::from_secs_f64(latency / 1e3))?;
        let path = server.folder.path().join("f");
        source(&format!("FUSE, {latency} ms"), &path, &server, options, &mut report)?;
    }
    Ok(report)
}

/// The rows of a source.
fn source(case: &str, path: &Path, server: &Server, options: &Options, report: &mut Report) -> Result<()> {
    let heap = Pool::new(AnonHeap::starting_at(PageKind::Transparent), 2 * options.size as usize);
    let ram = RamDevice::new(options.size + (8 << 20))?;
    let mut device = OpenDevice::new(Box::new(ram), Default::default())?;
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); DEPTHS.len() + 3];
    let right = server.hash;
    for round in 0..=options.rounds {
        for row in 0..samples.len() {
            forget(path)?;
            let begin = Instant::now();
            let (took, hash) = match row.checked_sub(DEPTHS.len()) {
                None => raw(path, options.size, DEPTHS[row], &heap)?,
                Some(0) => {
                    let read = alloc_and_read(&heap, &File::open(path)?, .., &ReadOptions::default())?;
                    (begin.elapsed(), hash_of(read.buffer.shared()))
                }
                Some(1) => {
                    let mut read = ReadOptions::default();
                    read.fill.checksum = true;
                    let read = alloc_and_read(&heap, &File::open(path)?, .., &read)?;
                    (begin.elapsed(), read.buffer.checksum().ok_or("no checksum")?)
                }
                Some(_) => {
                    let mut inputs = [open_file(path, FileOptions::default())?];
                    let loaded = device.load(&mut inputs, &Placement::Default, &mut |_| {})?;
                    let took = begin.elapsed();
                    let hash = loaded.files[0].checksum.ok_or("no checksum")?;
                    device.unload(loaded)?;
                    (took, hash)
                }
            };
            if hash != right {
                return Err(format!("{case}: row {row} read other bytes").into());
            }
            // The first round touches memory.
            if round > 0 {
                samples[row].push(took.as_secs_f64());
            }
        }
    }
    let mut best = f64::INFINITY;
    for (depth, samples) in DEPTHS.iter().zip(&samples) {
        best = best.min(report.row(case, &format!("raw: {depth} reads of 2 MiB at a time"), options.size, samples));
    }
    for (what, samples) in ["read", "read, hashed", "load"].iter().zip(&samples[DEPTHS.len()..]) {
        let ours = report.row(case, &format!("ours: {what}"), options.size, samples);
        report.of_rounds(samples.len()).at_least(&format!("{case}: {what} / the best raw reads"), 0.9, best / ours);
    }
    Ok(())
}

/// Direct reads by as many threads, into memory that was touched before.
fn raw(path: &Path, size: u64, depth: usize, heap: &Pool) -> Result<(Duration, u64)> {
    let mut rest = heap.allocate(size as usize)?.share().into_slice();
    let file = File::options().read(true).custom_flags(O_DIRECT).open(path)?;
    let begin = Instant::now();
    let mut slices = Vec::new();
    while let Some(slice) = rest.split_off_front(BLOCK.min(rest.len())).filter(|slice| !slice.is_empty()) {
        slices.push(Some(slice));
    }
    let next = AtomicUsize::new(0);
    let slices: Vec<_> = slices.into_iter().map(Mutex::new).collect();
    let read = || -> std::result::Result<(), String> {
        while let Some(mut slice) = slices.get(next.fetch_add(1, Ordering::Relaxed)).map(locked) {
            let slice = slice.as_mut().expect("taken at the end");
            let at = FileOffset::new(slice.offset() as u64);
            read_now(&file, slice, at).map_err(|e| e.to_string())?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..depth).map(|_| scope.spawn(read)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    let took = begin.elapsed();
    let whole = slices.iter().map(|slice| locked(slice).take()).reduce(|a, b| a?.join(b?).ok());
    let whole = whole.flatten().ok_or("no bytes")?.into_whole().map_err(|_| "a slice is missing")?;
    Ok((took, hash_of(&whole)))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic")
}

fn hash_of(buf: &SharedBuf) -> u64 {
    let mut bytes = vec![0; BLOCK];
    let (view, mut hash) = (buf.as_volatile_slice(), XxHash3_64::new());
    for at in (0..view.len()).step_by(BLOCK) {
        let part = view.sub(at, BLOCK.min(view.len() - at)).expect("within the buffer");
        part.read(&mut bytes[..part.len()]);
        hash.write(&bytes[..part.len()]);
    }
    hash.finish()
}

/// Nothing of the file is cached.
fn forget(path: &Path) -> Result<()> {
    Ok(rustix::fs::fadvise(File::open(path)?, 0, None, rustix::fs::Advice::DontNeed)?)
}

/// A file system of one file, `f`, whose reads are answered late.
struct Server {
    hash: u64,
    process: Child,
    folder: tempfile::TempDir,
}

/// Requests that wait for their time.
struct Late {
    bytes: Vec<u8>,
    latency: Duration,
    rate: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// When the source has given all that was asked for so far.
    free: Option<Instant>,
    waiting: BinaryHeap<Reverse<(Instant, u64)>>,
    replies: HashMap<u64, (u64, u32, ReplyData)>,
    requests: u64,
}

/// Threads that answer.
const ANSWERERS: usize = 2;

impl Server {
    fn start(options: &Options, latency: Duration) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let numbers = [options.size, latency.as_micros() as u64, options.rate].map(|n| n.to_string());
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("slow-server").arg(folder.path()).args(numbers).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let mut said = [0; 6];
        process.stdout.as_mut().expect("a pipe").read_exact(&mut said)?;
        Ok(Self { hash: XxHash3_64::oneshot(&contents(options.size)), process, folder })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.stdin = None;
        let _ = self.process.wait();
    }
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
                    let Some((offset, size, reply)) = state.replies.remove(&number) else { continue };
                    drop(state);
                    let first = (offset as usize).min(self.bytes.len());
                    let end = (first + size as usize).min(self.bytes.len());
                    reply.data(&self.bytes[first..end]);
                    state = locked(&self.state);
                }
                None => state = self.changed.wait(state).expect("no panic"),
            }
        }
    }
}

struct Files(Arc<Late>);

impl Files {
    fn attr(&self, ino: INodeNo) -> FileAttr {
        let directory = ino == INodeNo::ROOT;
        let size = if directory { 0 } else { self.0.bytes.len() as u64 };
        FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if directory { FileType::Directory } else { FileType::RegularFile },
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
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("f") => reply.entry(&Duration::from_secs(60), &self.attr(INodeNo(2)), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::from_secs(60), &self.attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let (now, mut state) = (Instant::now(), locked(&self.0.state));
        let given = state.free.map_or(now, |free| free.max(now))
            + Duration::from_secs_f64(f64::from(size) / self.0.rate as f64);
        state.free = Some(given);
        state.requests += 1;
        let number = state.requests;
        state.waiting.push(Reverse((given + self.0.latency, number)));
        state.replies.insert(number, (offset, size, reply));
        drop(state);
        self.0.changed.notify_one();
    }
}
