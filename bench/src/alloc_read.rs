//! A file into a buffer, cold, warm and half cached, beside reads into memory that is there and allocation alone.
//!
//! Rows take turns, round by round, in another order each round. Cold samples begin with the file dropped from the page
//! cache. After that, before every sample, as much memory as it needs is touched and given back, so that a host that
//! takes free pages away has backed it again. Every buffer is hashed afterwards and compared with the file.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::hash::Hasher;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dmalane::addr::FileOffset;
use dmalane::dma::{
    AnonHeap, BufferSlice, DmaHeap, Heap, MemfdHeap, PageKind, Pool, SharedBuf, VolatileSlice, export_dma_buf,
};
use dmalane::file::{FileQueue, Io, Mode, read_now};
use dmalane::queue::{Operation, Queue};
use dmalane::{AllocRead, FileOptions, OpenDevice, Placement, ReadOptions, alloc_and_read, open_file};
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, fcntl_setpipe_size, pipe, splice};
use rustix::time::{ClockId, clock_gettime};
use twox_hash::XxHash3_64;

use crate::mt19937::Mt19937;
use crate::report::Report;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of the files; the goals are about these sizes
    #[arg(long, value_delimiter = ',', default_values_t = [512 << 10, 8 << 20, 1 << 30, 3 << 30])]
    sizes: Vec<u64>,

    /// Rounds of each case, four times as many for small files; the median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,

    /// Seconds at most, of which each case gets an equal share of what is left; a case has a round at least
    #[arg(long, default_value_t = 290)]
    seconds: u64,

    /// Bytes of a chunk: allocated together before it is read
    #[arg(long)]
    chunk: Option<u64>,

    /// Reads in flight
    #[arg(long)]
    iodepth: Option<usize>,

    /// Bytes per read
    #[arg(long)]
    block_size: Option<usize>,

    /// Worker threads
    #[arg(long)]
    threads: Option<usize>,

    /// Only the rows whose names contain one of these; by default large files have the rows that goals are about
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,

    /// Only files that are not in the page cache, without goals
    #[arg(long)]
    cold: bool,

    /// Seed of the order of the rows, which is another one in each round
    #[arg(long, default_value_t = 1)]
    seed: u32,

    /// Where the files are made; it must be on a disk
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/target"))]
    folder: PathBuf,
}

/// From this size on a sample touches memory before, and a buffer is new each time.
const LARGE: u64 = 64 << 20;
const MIB: u64 = 1 << 20;

const REFERENCE: &str = "reference: the same direct reads into private huge pages that are there";
const REFERENCE_HUGE: &str = "reference: the same direct reads into a memfd of huge pages that is there";
const FRESH: &str = "reference: the same into new private huge pages, without their allocation";
const FIO: &str = "reference: the same by fio, into huge pages of its own";
const COPY: &str = "reference: one buffered pread into private huge pages that are there";
const ALLOCATION: &str = "reference: allocation of private huge pages alone";
const NORMAL: &str = "normal: memfd of 4 KiB pages, mmap, read";
const NORMAL_HEAP: &str = "normal: dma-buf of the heap system, mmap, read";
const SENDFILE: &str = "sendfile to a memfd of 4 KiB pages, buffered";
const SPLICE: &str = "splice by a pipe to a memfd of 4 KiB pages, buffered";
const COPY_RANGE: &str = "copy_file_range to a memfd of 4 KiB pages, buffered";
const SENDFILE_DIRECT: &str = "sendfile to a memfd of 4 KiB pages, direct";
const SYNC: &str = "memfd of 4 KiB pages, mmap, read, direct";
const UDMABUF: &str = "udmabuf: memfd of 4 KiB pages, mmap, read, buffered";
const UDMABUF_DIRECT: &str = "udmabuf: memfd of 4 KiB pages, mmap, read, direct";
const PLAIN: &str = "plain read() into a fresh private buffer, in the pages of malloc";
const BEFORE: &str = "ours: allocate all, then read all, direct, private huge pages";
const OURS_BUFFERED: &str = "ours: buffered, private huge pages";
const OURS: &str = "ours: direct, private huge pages";
const POOLED: &str = "ours: auto, into a pooled private buffer of huge pages";
const AUTO: &str = "ours: auto, private huge pages";
const HASHED: &str = "ours: auto, private huge pages, hashed";
const POOLED_SHARED: &str = "ours: auto, into a pooled memfd of 4 KiB pages";
const SHARED: &str = "ours: auto, memfd of 4 KiB pages";
const SHARED_HUGE: &str = "ours: auto, memfd of huge pages";
const OURS_UDMABUF: &str = "ours: auto, memfd of 4 KiB pages, as a udmabuf";
const OURS_DMA_HEAP: &str = "ours: auto, shareable dma-buf of the heap system";
const OTHERS: &str = "ours: auto, private huge pages, as nobody, of a file of root's";
const LOAD: &str = "ours: load onto the software card";
const VERIFY: &str = "ours: verify of that load";
const FIRST: &str = "ours: auto, private huge pages, the cached half";
const SECOND: &str = "ours: auto, private huge pages, the other half";

/// How much of the file is in the page cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cached {
    None,
    /// The first half.
    Half,
    All,
}

impl Cached {
    fn name(self) -> &'static str {
        match self {
            Self::None => "cold",
            Self::Half => "half cached",
            Self::All => "warm",
        }
    }
}

pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("alloc-read");
    std::fs::create_dir_all(&options.folder)?;
    let end = Instant::now() + Duration::from_secs(options.seconds);
    let cases = |size: &u64| if options.cold { 1 } else { 2 + u32::from(*size >= LARGE) };
    let mut left: u32 = options.sizes.iter().map(cases).sum();
    for &size in &options.sizes {
        let mut bench = Bench::new(size, options)?;
        let mut table = |cached, bench: &mut Bench| {
            let share = end.saturating_duration_since(Instant::now()) / left;
            left -= 1;
            bench.table(cached, options, share, &mut report)
        };
        let cold = table(Cached::None, &mut bench)?;
        if options.cold {
            continue;
        }
        let warm = table(Cached::All, &mut bench)?;
        let half = if size >= LARGE { table(Cached::Half, &mut bench)? } else { Medians::new() };
        goals(&mut report, &bench, &cold, &warm, &half);
    }
    Ok(report)
}

fn name(size: u64) -> String {
    match size {
        n if n.is_multiple_of(1 << 30) => format!("{} GB", n >> 30),
        n if n.is_multiple_of(MIB) => format!("{} MB", n >> 20),
        n => format!("{} KB", n >> 10),
    }
}

/// Medians in seconds, and how many rounds they are of, by row.
type Medians = BTreeMap<&'static str, (f64, usize)>;

/// Goals compare rows of the same memory. Those whose rows were not measured are left out.
fn goals(report: &mut Report, bench: &Bench, cold: &Medians, warm: &Medians, half: &Medians) {
    let size = name(bench.size);
    // And the rounds of that with fewer.
    let ratio = |t: &Medians, a: &str, b: &str| t.get(a).zip(t.get(b)).map(|(a, b)| (a.0 / b.0, a.1.min(b.1)));
    let mut at_least = |what: &str, goal, t: &Medians, than, ours| {
        if let Some((got, rounds)) = ratio(t, than, ours) {
            report.of_rounds(rounds).at_least(&format!("{size} {what}"), goal, got);
        }
    };
    if bench.size < MIB {
        at_least("cold, shareable: normal / ours", 2.5, cold, NORMAL, POOLED_SHARED);
        at_least("warm, shareable: normal / ours", 6.0, warm, NORMAL, POOLED_SHARED);
        at_least("cold, private: plain read / ours", 1.0, cold, PLAIN, POOLED);
        at_least("warm, private: plain read / ours", 1.0, warm, PLAIN, POOLED);
        for (temperature, t, floor) in [("cold", cold, REFERENCE), ("warm", warm, COPY)] {
            if let Some((got, _)) = ratio(t, POOLED, floor) {
                report.note(&size, &format!("{temperature}: ours / reference"), got);
            }
        }
        return;
    }
    if bench.size < LARGE {
        for (temperature, t) in [("cold", cold), ("warm", warm)] {
            let shareable =
                [NORMAL, SENDFILE, SPLICE, COPY_RANGE, SENDFILE_DIRECT, SYNC, UDMABUF, UDMABUF_DIRECT].as_slice();
            for (memory, others, ours) in [("shareable", shareable, POOLED_SHARED), ("private", &[PLAIN], POOLED)] {
                let best = others.iter().filter_map(|row| t.get(row)).min_by(|a, b| a.0.total_cmp(&b.0));
                if let Some((ours, best)) = t.get(ours).zip(best) {
                    let goal = format!("{size} {temperature}, {memory}: ours / the fastest other");
                    report.of_rounds(ours.1.min(best.1)).at_most(&goal, 1.0, ours.0 / best.0);
                }
            }
        }
        return;
    }
    at_least("cold, shareable: sendfile / ours", 1.15, cold, SENDFILE, SHARED);
    at_least("cold, shareable: normal / ours", 1.5, cold, NORMAL, SHARED);
    at_least("warm, shareable: sendfile / ours", 1.5, warm, SENDFILE, SHARED);
    at_least("warm, shareable: normal / ours", 2.0, warm, NORMAL, SHARED);
    for (temperature, t) in [("cold", cold), ("warm", warm)] {
        at_least(&format!("{temperature}: rate of verify / that of the load"), 0.5, t, LOAD, VERIFY);
    }
    let mut at_most = |what: &str, goal, t: &Medians, ours, than| {
        if let Some((got, rounds)) = ratio(t, ours, than) {
            report.of_rounds(rounds).at_most(&format!("{size} {what}"), goal, got);
        }
    };
    at_most("cold, shareable huge pages: ours / reference", 1.10, cold, SHARED_HUGE, REFERENCE_HUGE);
    at_most("cold, private huge pages: ours / reference", 1.10, cold, AUTO, REFERENCE);
    at_most("cold: hashed / not", 1.03, cold, HASHED, AUTO);
    at_most("warm: hashed / not", 1.15, warm, HASHED, AUTO);
    at_most("warm, a file of another user: unprivileged / root", 1.1, warm, OTHERS, AUTO);
    if let (Some(both), Some(a), Some(b)) = (half.get(AUTO), half.get(FIRST), half.get(SECOND)) {
        let goal = format!("{size} half cached: ours / (one half + the other)");
        report.of_rounds(both.1.min(a.1).min(b.1)).at_most(&goal, 1.10, both.0 / (a.0 + b.0));
    }
    // The most that "normal / ours" could be where the disk allows no more than the reference.
    for (row, of) in [(NORMAL, "normal / reference"), (SENDFILE, "sendfile / reference")] {
        if let Some((got, _)) = ratio(cold, row, REFERENCE) {
            report.note(&size, &format!("cold: {of}"), got);
        }
    }
    let Some(&(ours, rounds)) = cold.get(AUTO) else { return };
    if let (Some((alloc, _)), Some((io, _))) = (cold.get(ALLOCATION), cold.get(REFERENCE)) {
        let first = bench.first_chunk;
        let ideal = first + (alloc - first).max(*io);
        report.of_rounds(rounds).at_most(
            &format!("{size} cold: T / (first chunk + max(rest of allocation, I/O))"),
            1.10,
            ours / ideal,
        );
        report.note(&size, "cold: T / (allocation + I/O)", ours / (alloc + io));
        report.note(&size, "cold: ms, T(first chunk)", first * 1e3);
    }
    let gib = bench.size as f64 / (1u64 << 30) as f64;
    report.at_most_in(&format!("{size} cold: CPU"), 0.2, bench.cpu / gib, "core-seconds per GiB, at most");
    let spare = bench.extra as f64 / MIB as f64;
    let goal = (bench.depth as u64 * bench.read.fill.block) as f64 / MIB as f64 + 16.0;
    report.at_most_in(&format!("{size} cold: peak memory beyond the buffer"), goal, spare, "MiB, at most");
}

struct Bench {
    size: u64,
    path: PathBuf,
    _file: tempfile::NamedTempFile,
    hash: u64,
    read: ReadOptions,
    /// Reads in flight of the references.
    depth: usize,
    /// Memory that is there, for the references: private, and a memfd.
    ready: [Option<BufferSlice>; 2],
    pool: Pool,
    pool_shared: Pool,
    first_chunk: f64,
    /// Core-seconds of the last cold sample of ours.
    cpu: f64,
    /// Its peak memory beyond the buffer, in bytes.
    extra: u64,
    /// The card of loads, and the time of the last one's verification.
    device: Option<OpenDevice>,
    verified: Option<f64>,
    /// Why there are no samples of a row.
    missing: BTreeMap<&'static str, String>,
    /// Buffers of the plain reads of small files: freed, they would be handed out again, and would not be fresh.
    kept: Vec<Vec<u8>>,
}

/// The buffer of a sample: to be checked, then freed.
enum Left {
    Buffer(SharedBuf),
    Ours(Box<AllocRead>),
    Bytes(Vec<u8>),
    Memfd(File),
    Nothing,
}

/// The rows of a cold or a cached file.
const ROWS: [&str; 30] = [
    REFERENCE,
    REFERENCE_HUGE,
    FRESH,
    FIO,
    COPY,
    ALLOCATION,
    NORMAL,
    NORMAL_HEAP,
    UDMABUF,
    UDMABUF_DIRECT,
    SENDFILE,
    SPLICE,
    COPY_RANGE,
    SENDFILE_DIRECT,
    SYNC,
    PLAIN,
    BEFORE,
    OURS_BUFFERED,
    OURS,
    POOLED,
    POOLED_SHARED,
    AUTO,
    HASHED,
    SHARED,
    SHARED_HUGE,
    OURS_UDMABUF,
    OURS_DMA_HEAP,
    OTHERS,
    LOAD,
    VERIFY,
];

/// Those that goals of large files are about.
const GOALS: [&str; 12] =
    [REFERENCE, REFERENCE_HUGE, ALLOCATION, NORMAL, SENDFILE, AUTO, HASHED, SHARED, SHARED_HUGE, OTHERS, LOAD, VERIFY];

impl Bench {
    fn new(size: u64, options: &Options) -> Result<Self> {
        let mut file = tempfile::Builder::new().suffix(".bin").tempfile_in(&options.folder)?;
        let mut hash = XxHash3_64::with_seed(0);
        // Also for nobody.
        file.as_file().set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        let (mut x, mut left) = (size | 1, size);
        let mut block = vec![0u8; MIB as usize];
        while left > 0 {
            for word in block.as_chunks_mut::<8>().0 {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *word = x.to_le_bytes();
            }
            let n = left.min(MIB) as usize;
            file.write_all(&block[..n])?;
            hash.write(&block[..n]);
            left -= n as u64;
        }
        file.as_file().sync_all()?;
        let mut read = ReadOptions { threads: options.threads, ..ReadOptions::default() };
        read.fill.chunk = options.chunk.unwrap_or(read.fill.chunk);
        read.fill.depth = options.iodepth;
        read.fill.block = options.block_size.map_or(read.fill.block, |len| len as u64);
        let kept = size as usize + (4 << 20);
        let pool = Pool::new(AnonHeap::new(), kept);
        let pool_shared = Pool::new(MemfdHeap::starting_at(PageKind::Base), kept);
        Ok(Self {
            size,
            path: file.path().to_owned(),
            _file: file,
            hash: hash.finish(),
            read,
            depth: options.iodepth.unwrap_or(16),
            ready: [None, None],
            pool,
            pool_shared,
            first_chunk: 0.0,
            cpu: 0.0,
            extra: 0,
            device: None,
            verified: None,
            missing: BTreeMap::new(),
            kept: Vec::new(),
        })
    }

    /// Measures a case for as many rounds as were asked for, or as `share` allows.
    fn table(&mut self, cached: Cached, options: &Options, share: Duration, report: &mut Report) -> Result<Medians> {
        let cold = cached == Cached::None;
        let all: &[&'static str] = match cached {
            Cached::Half => &[AUTO, FIRST, SECOND],
            Cached::None | Cached::All if self.size >= LARGE && options.only.is_empty() => &GOALS,
            Cached::None | Cached::All => &ROWS,
        };
        let rows: Vec<&'static str> = all
            .iter()
            .copied()
            .filter(|row| options.only.is_empty() || options.only.iter().any(|only| row.contains(only)))
            .filter(|row| !matches!(*row, POOLED | POOLED_SHARED) || self.size < LARGE)
            .filter(|row| !matches!(*row, AUTO | HASHED | SHARED | SHARED_HUGE | REFERENCE_HUGE) || self.size >= LARGE)
            .filter(|row| *row != REFERENCE_HUGE || cold)
            .filter(|row| *row != OTHERS || (self.size >= LARGE && !cold))
            // The card has as much memory again.
            .filter(|row| !matches!(*row, LOAD | VERIFY) || (LARGE..=1 << 30).contains(&self.size))
            // It starts up for longer than it takes to read a small file, and reads past the page cache in any case.
            .filter(|row| *row != FRESH || self.size >= LARGE)
            .filter(|row| *row != FIO || (self.size >= LARGE && cold))
            .collect();
        let mut samples: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        // Short runs are disturbed easily, and cost little.
        let rounds = if self.size < LARGE { 4 * options.rounds + 1 } else { options.rounds };
        let end = Instant::now() + share;
        let mut random = Mt19937::new(options.seed);
        for round in 0..=rounds {
            let began = Instant::now();
            for row in order(&rows, &mut random) {
                let Some(seconds) = self.sample(row, cached)? else { continue };
                // The first round fills pools and warms what is warm.
                if round == 1 && rounds > 1 {
                    samples.remove(row);
                }
                samples.entry(row).or_default().push(seconds);
            }
            if end.saturating_duration_since(Instant::now()) < began.elapsed() {
                eprintln!(
                    "bench: {} {}: {} of {rounds} rounds, for time",
                    name(self.size),
                    cached.name(),
                    round.max(1)
                );
                break;
            }
        }
        self.ready = [None, None];
        self.device = None;
        self.kept.clear();
        let case = format!("{} {}", name(self.size), cached.name());
        let mut medians = Medians::new();
        for row in rows {
            match samples.get(row) {
                Some(samples) => {
                    let median = report.row(&case, row, self.size, samples);
                    medians.insert(row, (median, samples.len()));
                }
                None => {
                    let why = self.missing.get(row).map_or("there is none", String::as_str);
                    eprintln!("bench: skipped: {case}: {row}: {why}");
                }
            }
        }
        Ok(medians)
    }

    /// Puts the share `cached` of the file into the page cache, and no more.
    fn prepare(&self, cached: Cached) -> Result<()> {
        let mut file = File::open(&self.path)?;
        if cached != Cached::All {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
            // Nothing is read ahead of the half.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
        }
        let mut left = match cached {
            Cached::None => 0,
            Cached::Half => self.size / 2,
            Cached::All => self.size,
        };
        // On the stack: what is freed here, the plain read would get as its fresh buffer.
        let mut block = [0; 64 << 10];
        while left > 0 {
            left -= file.read(&mut block)? as u64;
        }
        Ok(())
    }

    /// Makes the host back as much memory as a sample will need.
    fn touch(&self, row: &str) -> Result<()> {
        if self.size < LARGE || matches!(row, REFERENCE | REFERENCE_HUGE | COPY | FIO | LOAD | VERIFY) {
            return Ok(());
        }
        let buffered =
            matches!(row, NORMAL | NORMAL_HEAP | SENDFILE | SPLICE | COPY_RANGE | PLAIN | OURS_BUFFERED | UDMABUF);
        let bytes = self.size as usize * if buffered { 2 } else { 1 };
        drop(AnonHeap::starting_at(PageKind::Transparent).allocate(bytes)?);
        Ok(())
    }

    fn sample(&mut self, row: &'static str, cached: Cached) -> Result<Option<f64>> {
        let cold = cached == Cached::None;
        self.prepare(cached)?;
        self.touch(row)?;
        let large = self.size >= LARGE;
        let ours = |bench: &Self, mode, chunk| -> Result<Left> {
            let file = File::open(&bench.path)?;
            let mut options = ReadOptions { mode, ..bench.read.clone() };
            options.fill.chunk = chunk;
            Ok(Left::Ours(Box::new(alloc_and_read(&AnonHeap::new(), &file, .., &options)?)))
        };
        let measured = row == AUTO && cold && large;
        let resident = measured.then(|| Resident::begin(self.size));
        let cpu = cpu();
        let start = Instant::now();
        let left = match row {
            REFERENCE => return self.reference(false).map(Some),
            REFERENCE_HUGE => {
                if self.ready[1].is_none() {
                    self.ready[1] = Self::huge_memfd(self.size)?.map(SharedBuf::into_slice);
                }
                return if self.ready[1].is_some() { self.reference(true).map(Some) } else { Ok(None) };
            }
            FRESH => {
                // The reference reads into the same memory in each round; this lies where a load's memory lies.
                let kept = self.ready[0].take();
                let seconds = self.reference(false)?;
                self.ready[0] = kept;
                return Ok(Some(seconds));
            }
            FIO => match self.fio() {
                Ok(seconds) => return Ok(Some(seconds)),
                Err(why) => {
                    self.missing.insert(row, why);
                    return Ok(None);
                }
            },
            COPY => {
                let mut part = self.ready(false)?;
                let start = Instant::now();
                let file = File::open(&self.path)?;
                let mut front = part.split_off_front(self.size as usize).ok_or("a short buffer")?;
                read_now(&file, &mut front, FileOffset::new(0))?;
                let seconds = start.elapsed().as_secs_f64();
                self.ready[0] = Some(front.join(part).map_err(|_| "parts of two buffers")?);
                return Ok(Some(seconds));
            }
            ALLOCATION => {
                let buf = AnonHeap::new().reserve(self.size as usize)?.populate()?;
                let seconds = start.elapsed().as_secs_f64();
                drop(buf);
                return Ok(Some(seconds));
            }
            NORMAL => Left::Buffer(self.memfd_read(Mode::Buffered)?),
            SYNC => Left::Buffer(self.memfd_read(Mode::Direct)?),
            NORMAL_HEAP => match DmaHeap::open("system") {
                Ok(heap) => Left::Buffer(self.read_into(heap.allocate(self.size as usize)?.share(), Mode::Buffered)?),
                Err(e) => {
                    self.missing.insert(row, e.to_string());
                    return Ok(None);
                }
            },
            UDMABUF | UDMABUF_DIRECT => {
                let mode = if row == UDMABUF { Mode::Buffered } else { Mode::Direct };
                let buf = self.memfd_read(mode)?;
                // There is no udmabuf, or the buffer exceeds its limit: 64 MiB unless told otherwise.
                if let Err(e) = export_dma_buf(&buf.reference()) {
                    self.missing.insert(row, e.to_string());
                    return Ok(None);
                }
                Left::Buffer(buf)
            }
            OURS_UDMABUF => {
                let (file, heap) = (File::open(&self.path)?, MemfdHeap::starting_at(PageKind::Base));
                let read = alloc_and_read(&heap, &file, .., &self.read)?;
                if let Err(e) = export_dma_buf(&read.buffer.shared().reference()) {
                    self.missing.insert(row, e.to_string());
                    return Ok(None);
                }
                Left::Ours(Box::new(read))
            }
            OURS_DMA_HEAP => match DmaHeap::open("system") {
                Ok(heap) => Left::Ours(Box::new(alloc_and_read(&heap, &File::open(&self.path)?, .., &self.read)?)),
                Err(e) => {
                    self.missing.insert(row, e.to_string());
                    return Ok(None);
                }
            },
            OTHERS => match self.as_nobody() {
                Ok((seconds, read)) => {
                    self.check(row, Left::Ours(Box::new(read)))?;
                    return Ok(Some(seconds));
                }
                Err(why) => {
                    self.missing.insert(row, why);
                    return Ok(None);
                }
            },
            LOAD => return self.load().map(Some),
            VERIFY => return Ok(self.verified.take()),
            SENDFILE => Left::Memfd(self.sendfile(false)?),
            SENDFILE_DIRECT => Left::Memfd(self.sendfile(true)?),
            SPLICE => Left::Memfd(self.splice()?),
            COPY_RANGE => match self.copy_range() {
                Ok(memfd) => Left::Memfd(memfd),
                // The kernel copies within a file system, or between two of the same kind.
                Err(e @ (Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP)) => {
                    self.missing.insert(row, e.to_string());
                    return Ok(None);
                }
                Err(e) => return Err(e.into()),
            },
            PLAIN => Left::Bytes(std::fs::read(&self.path)?),
            BEFORE => ours(self, Mode::Direct, u64::MAX)?,
            OURS_BUFFERED => ours(self, Mode::Buffered, self.read.fill.chunk)?,
            OURS => ours(self, Mode::Direct, self.read.fill.chunk)?,
            POOLED | POOLED_SHARED => {
                let pool = if row == POOLED { &self.pool } else { &self.pool_shared };
                let file = File::open(&self.path)?;
                Left::Ours(Box::new(alloc_and_read(&pool, &file, .., &self.read)?))
            }
            AUTO => ours(self, Mode::Auto, self.read.fill.chunk)?,
            HASHED => {
                let file = File::open(&self.path)?;
                let mut options = self.read.clone();
                options.fill.checksum = true;
                let read = alloc_and_read(&AnonHeap::new(), &file, .., &options)?;
                if read.buffer.checksum() != Some(self.hash) {
                    return Err(format!("{row}: not the hash of the file").into());
                }
                Left::Ours(Box::new(read))
            }
            FIRST | SECOND => {
                let (file, half) = (File::open(&self.path)?, self.size / 2);
                let range = if row == FIRST { 0..half } else { half..self.size };
                drop(alloc_and_read(&AnonHeap::new(), &file, range, &self.read)?);
                return Ok(Some(start.elapsed().as_secs_f64()));
            }
            SHARED | SHARED_HUGE => {
                let pages = if row == SHARED { PageKind::Base } else { PageKind::Hugetlb2M };
                let (file, heap) = (File::open(&self.path)?, MemfdHeap::starting_at(pages));
                let read = alloc_and_read(&heap, &file, .., &self.read)?;
                // Those of the reference are of the same kind.
                if row == SHARED_HUGE && read.buffer.shared().backing().kind == PageKind::Base {
                    return Ok(None);
                }
                Left::Ours(Box::new(read))
            }
            _ => Left::Nothing,
        };
        let seconds = start.elapsed().as_secs_f64();
        if let (Some(resident), Left::Ours(read)) = (resident, &left) {
            self.extra = resident.end();
            self.first_chunk = read.report.first_chunk.as_secs_f64();
            self.cpu = crate::alloc_read::cpu() - cpu;
        }
        self.check(row, left)?;
        Ok(Some(seconds))
    }

    fn check(&mut self, row: &str, left: Left) -> Result<()> {
        let mut hash = XxHash3_64::with_seed(0);
        let mut view = |view: VolatileSlice<'_>| {
            if let Some(view) = view.sub(0, self.size as usize) {
                view.for_each_block(|block| hash.write(block));
            }
        };
        match left {
            Left::Buffer(buf) => view(buf.as_volatile_slice()),
            Left::Ours(read) => view(read.buffer.as_volatile_slice()),
            Left::Bytes(bytes) => {
                hash.write(&bytes);
                if self.size < LARGE {
                    self.kept.push(bytes);
                }
            }
            Left::Memfd(mut file) => {
                std::io::Seek::rewind(&mut file)?;
                let mut block = [0; 64 << 10];
                loop {
                    match file.read(&mut block)? {
                        0 => break,
                        n => hash.write(&block[..n]),
                    }
                }
            }
            Left::Nothing => {}
        }
        if hash.finish() != self.hash {
            Err(format!("{row}: the bytes are not those of the file").into())
        } else {
            Ok(())
        }
    }

    /// A memfd mapped in pages of 4 KiB that the read faults in, by reads as large as the kernel takes.
    fn memfd_read(&self, mode: Mode) -> Result<SharedBuf> {
        self.read_into(SharedBuf::sparse("normal", self.size as usize)?, mode)
    }

    fn read_into(&self, buf: SharedBuf, mode: Mode) -> Result<SharedBuf> {
        let options = FileOptions { mode, io: Io::Pread, depth: 1, block: 1 << 30 };
        let mut channel = FileQueue::open(&self.path, options)?;
        let transfer = Operation::read(buf.into_slice(), FileOffset::new(0));
        let back = dmalane::queue::run(&mut channel, transfer, Duration::from_secs(300))?;
        back.into_slice().and_then(|slice| slice.into_whole().ok()).ok_or_else(|| "a part of a buffer".into())
    }

    fn memfd(&self) -> std::result::Result<File, Errno> {
        let memfd = rustix::fs::memfd_create("bench", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memfd, self.size)?;
        Ok(memfd.into())
    }

    fn sendfile(&self, direct: bool) -> Result<File> {
        let (memfd, file) = (self.memfd()?, File::open(&self.path)?);
        if direct {
            rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? | rustix::fs::OFlags::DIRECT)?;
        }
        let mut left = self.size as usize;
        while left > 0 {
            match rustix::fs::sendfile(&memfd, &file, None, left)? {
                0 => return Err("sendfile stopped early".into()),
                n => left -= n,
            }
        }
        Ok(memfd)
    }

    /// Pages of the page cache by a pipe, as large as everybody may make one.
    fn splice(&self) -> Result<File> {
        let (memfd, file) = (self.memfd()?, File::open(&self.path)?);
        let (from, to) = pipe()?;
        let room = fcntl_setpipe_size(&to, MIB as usize)?;
        let mut left = self.size as usize;
        while left > 0 {
            let mut there = splice(&file, None, &to, None, left.min(room), SpliceFlags::MOVE)?;
            if there == 0 {
                return Err("splice stopped early".into());
            }
            left -= there;
            while there > 0 {
                there -= splice(&from, None, &memfd, None, there, SpliceFlags::MOVE)?;
            }
        }
        Ok(memfd)
    }

    fn copy_range(&self) -> std::result::Result<File, Errno> {
        let memfd = self.memfd()?;
        let file = rustix::fs::open(&self.path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())?;
        let mut left = self.size as usize;
        while left > 0 {
            match rustix::fs::copy_file_range(&file, None, &memfd, None, left)? {
                0 => return Err(Errno::INVAL),
                n => left -= n,
            }
        }
        Ok(memfd)
    }

    /// The time of fio for the same reads: its own clock, without its start. Nobody checks its bytes: it
    /// is a cross-check of the reference, and of no goal.
    fn fio(&self) -> std::result::Result<f64, String> {
        // Reserved huge pages where there are some, else transparent ones: fio as distributions build it does not ask
        // for those, but the C library does when told to. Pages of 4 KiB would take three times as long.
        self.fio_into("mmaphuge").or_else(|_| self.fio_into("malloc"))
    }

    fn fio_into(&self, memory: &str) -> std::result::Result<f64, String> {
        let (depth, block) = (self.depth, self.read.fill.block as usize);
        let out = std::process::Command::new("fio")
            .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
            .args([
                "--name=reference",
                "--readonly",
                "--rw=read",
                "--direct=1",
                "--ioengine=io_uring",
                "--output-format=json",
            ])
            .arg(format!("--mem={memory}"))
            .arg(format!("--filename={}", self.path.display()))
            .args([format!("--size={}", self.size), format!("--bs={block}"), format!("--iodepth={depth}")])
            .output()
            .map_err(|e| format!("fio cannot be started: {e}"))?;
        if !out.status.success() {
            let said = String::from_utf8_lossy(&out.stderr);
            return Err(format!("fio failed: {}", said.lines().next().unwrap_or("without a word")));
        }
        fio_runtime(&out.stdout).map(|ms| ms / 1e3).ok_or_else(|| "fio printed no result".to_owned())
    }

    /// Reads the file as nobody, whom it does not belong to: in a thread, which alone changes its user.
    fn as_nobody(&self) -> std::result::Result<(f64, AllocRead), String> {
        if !rustix::process::geteuid().is_root() {
            return Err("only root can become somebody else".to_owned());
        }
        let (path, options) = (&self.path, &self.read);
        let read = || {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).map_err(|e| e.to_string())?;
            let start = Instant::now();
            let file = File::open(path).map_err(|e| format!("nobody cannot open it: {e}"))?;
            let read = alloc_and_read(&AnonHeap::new(), &file, .., options).map_err(|e| e.to_string())?;
            Ok((start.elapsed().as_secs_f64(), read))
        };
        std::thread::scope(|scope| scope.spawn(read).join().unwrap_or_else(|_| Err("it panicked".to_owned())))
    }

    /// Loads the file onto the software card, and verifies it there.
    fn load(&mut self) -> Result<f64> {
        let device = match &mut self.device {
            Some(device) => device,
            none => none.insert(dmalane::open("soft")?),
        };
        let start = Instant::now();
        let mut inputs = [open_file(&self.path, FileOptions::for_mode(Mode::Auto))?];
        let loaded = device.load(&mut inputs, &Placement::DDR, &mut |_| {})?;
        let seconds = start.elapsed().as_secs_f64();
        let start = Instant::now();
        device.verify(&loaded, &mut inputs, &mut |_| {})?;
        self.verified = Some(start.elapsed().as_secs_f64());
        device.unload(loaded)?;
        Ok(seconds)
    }

    /// A memfd of huge pages, if there are some.
    fn huge_memfd(size: u64) -> Result<Option<SharedBuf>> {
        let buf = MemfdHeap::starting_at(PageKind::Hugetlb2M).allocate(size as usize)?.share();
        Ok((buf.backing().kind != PageKind::Base).then_some(buf))
    }

    /// Memory that is there, in the pages that a load would have: private or, with `shared`, a memfd.
    fn ready(&mut self, shared: bool) -> Result<BufferSlice> {
        match self.ready[usize::from(shared)].take() {
            Some(part) => Ok(part),
            None if shared => Err("there are no huge pages".into()),
            None => Ok(AnonHeap::new().reserve(self.size as usize)?.populate()?.into_slice()),
        }
    }

    /// Direct reads by io_uring into memory that is there, in the pages that a load would have, and nothing else.
    fn reference(&mut self, shared: bool) -> Result<f64> {
        let part = self.ready(shared)?; // not counted
        let start = Instant::now();
        let (depth, block) = (self.depth, self.read.fill.block as usize);
        let options = FileOptions { mode: Mode::Direct, io: Io::Auto, depth, block };
        let mut channel = FileQueue::open(&self.path, options)?;
        let (mut rest, mut at, mut done) = (part, 0, Vec::new());
        let mut back: BTreeMap<usize, BufferSlice> = BTreeMap::new();
        while at < self.size || channel.in_flight() > 0 {
            while at < self.size && channel.in_flight() < channel.limits().capacity {
                let len = (self.size - at).min(self.read.fill.block);
                let part = rest.split_off_front(len as usize).ok_or("a short buffer")?;
                let transfer = Operation::read(part, FileOffset::new(at));
                let _ticket = channel.submit(transfer)?;
                at += len;
            }
            channel.wait(&mut done, Duration::from_secs(1));
            for c in done.drain(..) {
                c.result?;
                if let Some(slice) = c.operation.into_slice() {
                    back.insert(slice.offset(), slice);
                }
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        back.insert(rest.offset(), rest);
        let whole = back.into_values().map(Some).reduce(|a, b| a?.join(b?).ok()).flatten();
        self.ready[usize::from(shared)] = Some(whole.ok_or("parts of two buffers")?);
        Ok(seconds)
    }
}

/// The rows in another order, so that none always pays for what the same one leaves behind. A verification follows the
/// load that it is of.
fn order(rows: &[&'static str], random: &mut Mt19937) -> Vec<&'static str> {
    let mut order: Vec<_> = rows.iter().copied().filter(|row| *row != VERIFY).collect();
    random.shuffle(&mut order);
    let after = order.iter().position(|row| *row == LOAD).map_or(order.len(), |load| load + 1);
    if rows.contains(&VERIFY) {
        order.insert(after, VERIFY);
    }
    order
}

/// Milliseconds, in whole ones, that a job of fio read for, of its JSON output (fio 3).
fn fio_runtime(json: &[u8]) -> Option<f64> {
    let report: serde_json::Value = serde_json::from_slice(json).ok()?;
    let job = report.get("jobs")?.get(0)?;
    let (ms, failed) = (job.get("read")?.get("runtime")?.as_f64()?, job.get("error")?.as_i64()?);
    (failed == 0 && ms > 0.0).then_some(ms)
}

/// Core-seconds of this process so far, those of the kernel for it included.
fn cpu() -> f64 {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// Bytes of a line of `/proc/self/status`.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

/// The most memory that the process has while a sample runs.
struct Resident {
    before: u64,
    buffer: u64,
}

impl Resident {
    fn now() -> u64 {
        ["RssAnon", "RssShmem", "HugetlbPages"].into_iter().map(status).sum()
    }

    fn begin(buffer: u64) -> Self {
        // Resets the high-water mark.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        Self { before: Self::now(), buffer }
    }

    /// Bytes beyond what there was before and the buffer.
    fn end(self) -> u64 {
        let hugetlb = status("HugetlbPages");
        // The mark has the pages of files in it, which are there before and after.
        let peak = (status("VmHWM") - status("RssFile")).max(Self::now() - hugetlb) + hugetlb;
        peak.saturating_sub(self.before).saturating_sub(self.buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_row_is_in_every_round_after_different_ones() {
        let mut random = Mt19937::new(1);
        let mut before_auto = BTreeSet::new();
        for _ in 0..100 {
            let order = order(&GOALS, &mut random);
            assert_eq!(order.iter().collect::<BTreeSet<_>>(), GOALS.iter().collect());
            assert_eq!(order.len(), GOALS.len());
            let at = |row| order.iter().position(|r| *r == row).unwrap();
            assert_eq!(at(VERIFY), at(LOAD) + 1);
            before_auto.insert(at(AUTO).checked_sub(1).map(|before| order[before]));
        }
        assert!(before_auto.len() > 5, "{before_auto:?}");
        assert_eq!(order(&[VERIFY], &mut random), [VERIFY]);
    }
}
