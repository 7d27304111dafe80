//! A file to the software card: cold against the raw direct read, warm against a page-cache copy and a memory copy.
//!
//! All variants of a case take turns, round by round, and the card's memory has been touched before. Every load's
//! checksum is compared, and the last one of each variant is read back and compared with the file.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dmalane::addr::FileOffset;
use dmalane::dma::{AnonHeap, BufferSlice, CopyHint, Heap, SharedBuf};
use dmalane::file::{FileQueue, Mode};
use dmalane::load::{DriveOptions, write_sample};
use dmalane::queue::{Operation, Queue};
use dmalane::{FileOptions, OpenDevice, OpenOptions, Placement, open_file};

use crate::report::Report;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of the file
    #[arg(long, default_value_t = 1 << 30)]
    size: u64,

    /// Rounds of each case; the median counts
    #[arg(long, default_value_t = 9)]
    rounds: usize,

    /// Bytes of a staging buffer
    #[arg(long, default_value_t = 16 << 20)]
    chunk: u64,

    /// Where the file is made; it must be on a disk
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/target"))]
    folder: PathBuf,
}

const BLOCK: usize = 1 << 20;
/// Buffers of the raw read: as many and as large as those of a load, and one more.
const RAW_BUFFERS: usize = 4;

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("load");
    std::fs::create_dir_all(&options.folder)?;
    let mut file = tempfile::Builder::new().suffix(".safetensors").tempfile_in(&options.folder)?;
    write_sample(file.as_file_mut(), options.size, 1)?;
    file.as_file().sync_all()?;
    let mut bench = Bench::new(file.path().to_owned(), options)?;
    cold(&mut bench, options, &mut report)?;
    warm(&mut bench, options, &mut report)?;
    Ok(report)
}

fn cold(bench: &mut Bench, options: &Options, report: &mut Report) -> Result<()> {
    let mut samples: [Vec<f64>; 4] = Default::default();
    for round in 0..options.rounds {
        let last = round + 1 == options.rounds;
        bench.forget()?;
        samples[0].push(bench.raw_uring()?);
        bench.forget()?;
        samples[1].push(bench.raw_pread()?);
        bench.forget()?;
        samples[2].push(bench.whole_then_copy()?);
        bench.forget()?;
        samples[3].push(bench.ours(Mode::Direct, last)?);
    }
    let raw_uring = report.row("cold", "floor: raw direct read, io_uring", options.size, &samples[0]);
    let raw_pread = report.row("cold", "floor: raw direct read, pread of 2 MiB", options.size, &samples[1]);
    report.row("cold", "before: read it whole, then copy it", options.size, &samples[2]);
    let ours = report.row("cold", "ours: load, direct", options.size, &samples[3]);
    report.at_most("cold: load / the faster raw direct read", 1.25, ours / raw_uring.min(raw_pread));
    Ok(())
}

fn warm(bench: &mut Bench, options: &Options, report: &mut Report) -> Result<()> {
    bench.cache_copy()?;
    let mut samples: [Vec<f64>; 4] = Default::default();
    for round in 0..options.rounds {
        let last = round + 1 == options.rounds;
        samples[0].push(bench.cache_copy()?);
        samples[1].push(bench.memory_copy(CopyHint::Keep));
        samples[2].push(bench.memory_copy(CopyHint::Stream));
        samples[3].push(bench.ours(Mode::Buffered, last)?);
    }
    let cache = report.row("warm", "floor: copy from the page cache", options.size, &samples[0]);
    let keep = report.row("warm", "floor: memory copy, plain stores", options.size, &samples[1]);
    let stream = report.row("warm", "floor: memory copy, streaming stores", options.size, &samples[2]);
    let ours = report.row("warm", "ours: load, buffered", options.size, &samples[3]);
    report.at_most("warm: load / (page-cache copy + the faster memory copy)", 1.2, ours / (cache + keep.min(stream)));
    Ok(())
}

struct Bench {
    path: PathBuf,
    size: u64,
    device: OpenDevice,
    checksum: Option<u64>,
    parts: Vec<BufferSlice>,
    whole: SharedBuf,
    card: SharedBuf,
}

impl Bench {
    fn new(path: PathBuf, options: &Options) -> Result<Self> {
        let mut drive = DriveOptions::default();
        drive.fill.chunk = options.chunk;
        let how = OpenOptions { drive, ..OpenOptions::default() };
        let heap = AnonHeap::new();
        let chunk = usize::try_from(options.chunk)?;
        let parts = (0..RAW_BUFFERS).map(|_| Ok(heap.allocate(chunk)?.share().into_slice())).collect::<Result<_>>()?;
        let size = usize::try_from(options.size)?;
        let card = SharedBuf::sparse("bench", size)?;
        card.populate(0, card.len())?;
        let mut bench = Self {
            path,
            size: options.size,
            device: how.open(&"soft".parse()?)?,
            checksum: None,
            parts,
            whole: heap.allocate(size)?.share(),
            card,
        };
        // Touches the card's memory and makes the staging buffers.
        bench.ours(Mode::Auto, true)?;
        Ok(bench)
    }

    /// Drops the file from the page cache.
    fn forget(&self) -> Result<()> {
        let file = File::open(&self.path)?;
        Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
    }

    fn channel(&self, mode: Mode) -> Result<FileQueue> {
        Ok(FileQueue::open(&self.path, FileOptions { mode, ..FileOptions::default() })?)
    }

    /// The whole path, from opening the file to the last bind.
    fn ours(&mut self, mode: Mode, verify: bool) -> Result<f64> {
        let start = Instant::now();
        let mut inputs = [open_file(&self.path, FileOptions::for_mode(mode))?];
        let loaded = self.device.load(&mut inputs, &Placement::DDR, &mut |_| {})?;
        let seconds = start.elapsed().as_secs_f64();
        let checksum = loaded.files[0].checksum.ok_or("not hashed")?;
        if *self.checksum.get_or_insert(checksum) != checksum {
            return Err(format!("checksum {checksum:x} differs from the first load's").into());
        }
        if verify {
            self.device.verify(&loaded, &mut inputs, &mut |_| {})?;
        }
        self.device.unload(loaded)?;
        Ok(seconds)
    }

    /// Direct reads by io_uring into the same few buffers, and nothing else.
    fn raw_uring(&mut self) -> Result<f64> {
        let start = Instant::now();
        let mut channel = self.channel(Mode::Direct)?;
        let (mut at, mut done, mut tails) = (0, Vec::new(), Vec::new());
        while at < self.size || channel.in_flight() > 0 {
            while at < self.size
                && let Some(part) = self.parts.pop()
            {
                let len = (self.size - at).min(part.len() as u64);
                let (part, tail) = part.split_at(len as usize).map_err(|_| "a short buffer")?;
                let transfer = Operation::read(part, FileOffset::new(at));
                tails.push((channel.submit(transfer)?, tail));
                at += len;
            }
            channel.wait(&mut done, Duration::from_secs(1));
            for c in done.drain(..) {
                c.result?;
                let i = tails.iter().position(|(t, _)| *t == c.ticket).ok_or("an unknown ticket")?;
                let (_, tail) = tails.swap_remove(i);
                let part = c.operation.into_slice().ok_or("a read")?;
                self.parts.push(part.join(tail).map_err(|_| "parts of two buffers")?);
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Direct reads one after the other, 2 MiB each.
    fn raw_pread(&mut self) -> Result<f64> {
        let start = Instant::now();
        let options =
            FileOptions { io: dmalane::file::Io::Pread, block: 2 << 20, mode: Mode::Direct, ..FileOptions::default() };
        let mut channel = FileQueue::open(&self.path, options)?;
        let mut at = 0;
        while at < self.size {
            let part = self.parts.pop().ok_or("no buffer")?;
            let len = (self.size - at).min(part.len() as u64);
            let (part, tail) = part.split_at(len as usize).map_err(|_| "a short buffer")?;
            let transfer = Operation::read(part, FileOffset::new(at));
            let back = dmalane::queue::run(&mut channel, transfer, Duration::from_secs(60))?;
            let back = back.into_slice().ok_or("a read")?;
            self.parts.push(back.join(tail).map_err(|_| "parts of two buffers")?);
            at += len;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// A loader without a pipeline: a buffer as large as the file, all reads, then all copies. The buffer is
    /// there already, which flatters it.
    fn whole_then_copy(&mut self) -> Result<f64> {
        let start = Instant::now();
        let mut channel = self.channel(Mode::Direct)?;
        let heap = AnonHeap::new();
        let old = std::mem::replace(&mut self.whole, heap.allocate(4096)?.share());
        let (part, tail) = old.into_slice().split_at(self.size as usize).map_err(|_| "a short buffer")?;
        let transfer = Operation::read(part, FileOffset::new(0));
        let back = dmalane::queue::run(&mut channel, transfer, Duration::from_secs(60))?;
        let whole = back
            .into_slice()
            .and_then(|back| back.join(tail).ok())
            .and_then(|p| p.into_whole().ok())
            .ok_or("parts of two buffers")?;
        self.whole = whole;
        let bytes = self.whole.as_volatile_slice().sub(0, self.size as usize).ok_or("a short buffer")?;
        self.card.as_volatile_slice().copy_from(bytes, CopyHint::Stream);
        let seconds = start.elapsed().as_secs_f64();
        // Any byte will do as a check that they arrived: compare a sample with the file.
        let file = File::open(&self.path)?;
        for at in (0..self.size).step_by((self.size as usize / 64).max(1)) {
            let (mut want, mut got) = ([0], [0]);
            file.read_exact_at(&mut want, at)?;
            self.card.as_volatile_slice().sub(at as usize, 1).ok_or("a short card")?.read(&mut got);
            if want != got {
                return Err(format!("wrong byte at {at}").into());
            }
        }
        Ok(seconds)
    }

    /// Reads the whole file through the page cache into one small buffer after the other.
    fn cache_copy(&mut self) -> Result<f64> {
        let file = File::open(&self.path)?;
        let mut buffer = AnonHeap::new().allocate(RAW_BUFFERS * 16 * BLOCK)?;
        let start = Instant::now();
        let mut at = 0;
        while at < self.size {
            let place = (at as usize) % buffer.len();
            let len = (self.size - at).min(BLOCK as u64).min((buffer.len() - place) as u64) as usize;
            file.read_exact_at(&mut buffer[place..place + len], at)?;
            at += len as u64;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Copies as many bytes from a large buffer to another, by two threads, as the card does.
    fn memory_copy(&mut self, hint: CopyHint) -> f64 {
        let start = Instant::now();
        let half = self.size as usize / 2;
        let copy = |at: usize, len: usize| {
            let (from, to) = (self.whole.as_volatile_slice().sub(at, len), self.card.as_volatile_slice().sub(at, len));
            from.zip(to).map(|(from, to)| to.copy_from(from, hint))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| copy(half, self.size as usize - half));
            copy(0, half);
        });
        start.elapsed().as_secs_f64()
    }
}
