//! Files of a source with latency: read and loaded, beside the best of raw reads at several depths.
//!
//! A FUSE server of ours answers each request a given time after it came, at a given rate in all. A block device over
//! one of its files answers as late. Rows take turns, round by round; what was read is compared with what the server
//! gives.

use std::error::Error;
use std::fs::File;
use std::hash::Hasher;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dmalane::addr::FileOffset;
use dmalane::device::RamDevice;
use dmalane::dma::{AnonHeap, Heap, PageKind, Pool, SharedBuf};
use dmalane::file::read_now;
use dmalane::{FileOptions, OpenDevice, Placement, ReadOptions, alloc_and_read, open_file};
use twox_hash::XxHash3_64;

use crate::late::Server;
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

pub(crate) fn contents(size: u64) -> Vec<u8> {
    let mut random = Mt19937::new(1);
    (0..size.div_ceil(4)).flat_map(|_| random.number().to_le_bytes()).take(size as usize).collect()
}

const BLOCK: usize = 2 << 20;
/// Reads in flight of the raw readers.
const DEPTHS: [usize; 3] = [4, 16, 64];
const O_DIRECT: i32 = 0o40000;

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("slow");
    let files = tempfile::tempdir()?;
    let bytes = contents(options.size);
    std::fs::write(files.path().join("f"), &bytes)?;
    let right = XxHash3_64::oneshot(&bytes);
    drop(bytes);
    let image = Disk::image(files.path(), options.size);
    for latency in &options.latency {
        let server = Server::start(files.path(), Duration::from_secs_f64(latency / 1e3), options.rate, false)?;
        source(&format!("FUSE, {latency} ms"), &server.path().join("f"), right, options, &mut report)?;
        match image.as_ref().map_err(ToString::to_string).and_then(|image| Disk::new(&server.path().join(image))) {
            Ok(disk) => {
                source(&format!("disk, {latency} ms"), &disk.folder.path().join("f"), right, options, &mut report)?
            }
            Err(why) => report.say(format!("no block device: {why}")),
        }
    }
    Ok(report)
}

/// A file system on a loop device over a file of the server.
struct Disk {
    device: String,
    folder: tempfile::TempDir,
}

impl Disk {
    /// Makes a file in this folder with a file system that holds the others, and returns its name.
    fn image(files: &Path, size: u64) -> std::result::Result<PathBuf, String> {
        let (made, kib) = (files.with_extension("disk"), ((size + size / 16) >> 10) + (16 << 10));
        let mut mkfs = Command::new("mkfs.ext4");
        mkfs.args(["-q", "-F", "-O", "^has_journal", "-d"]).arg(files).arg(&made).arg(format!("{kib}k"));
        said(&mut mkfs)?;
        std::fs::rename(&made, files.join("disk")).map_err(|e| e.to_string())?;
        Ok("disk".into())
    }

    fn new(image: &Path) -> std::result::Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let mut losetup = Command::new("losetup");
        let device = said(losetup.args(["--find", "--show", "--read-only", "--direct-io=on"]).arg(image))?;
        let disk = Self { device: device.trim().to_owned(), folder };
        said(Command::new("mount").args(["-t", "ext4", "-o", "ro", &disk.device]).arg(disk.folder.path()))?;
        Ok(disk)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = said(Command::new("umount").arg(self.folder.path()));
        let _ = said(Command::new("losetup").args(["--detach", &self.device]));
    }
}

/// The output of a program, or why it failed.
fn said(command: &mut Command) -> std::result::Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|e| format!("{name}: {e}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// The rows of a source.
fn source(case: &str, path: &Path, right: u64, options: &Options, report: &mut Report) -> Result<()> {
    let heap = Pool::new(AnonHeap::starting_at(PageKind::Transparent), 2 * options.size as usize);
    let ram = RamDevice::new(options.size + (8 << 20))?;
    let mut device = OpenDevice::new(Box::new(ram), Default::default())?;
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); DEPTHS.len() + 3];
    for round in 0..=options.rounds {
        for row in 0..samples.len() {
            forget(path)?;
            let begin = Instant::now();
            let (took, hash) = match row.checked_sub(DEPTHS.len()) {
                None => raw(path, options.size, DEPTHS[row], &heap, true)?,
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

/// Reads by as many threads, into memory that was touched before.
pub(crate) fn raw(path: &Path, size: u64, depth: usize, heap: &Pool, direct: bool) -> Result<(Duration, u64)> {
    let mut rest = heap.allocate(size as usize)?.share().into_slice();
    let file = File::options().read(true).custom_flags(if direct { O_DIRECT } else { 0 }).open(path)?;
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

pub(crate) fn hash_of(buf: &SharedBuf) -> u64 {
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
pub(crate) fn forget(path: &Path) -> Result<()> {
    Ok(rustix::fs::fadvise(File::open(path)?, 0, None, rustix::fs::Advice::DontNeed)?)
}
