//! `dmalane read`: files into DMA-ready memory.

mod device;
mod report;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::ValueEnum;
use dmalane::addr::{Access, FileOffset};
use dmalane::dma::{AnonHeap, DmaHeap, MemfdHeap, Needs, PageKind, Picked, pick};
use dmalane::load::fill::{Event, Extent, FillError, Filled, Job};
use dmalane::sim::{HostConfig, SoftHost};
use dmalane::{AllocAndRead, AllocRead, ReadError, ReadMethod, ReadOptions, ReadSource, read_all, read_mapped};

use crate::failure::Failure;
use crate::load::Device;
use crate::output;
use crate::progress::Progress;
use crate::size::binary;
use device::Target;

/// What to read, how, and what to say about it.
pub struct ReadArgs {
    /// At least one.
    pub files: Vec<PathBuf>,
    /// Where the memory comes from.
    pub heap: Heap,
    /// The best pages to try.
    pub pages: Pages,
    /// Another process must be able to map it.
    pub shareable: bool,
    /// A driver must be able to import it.
    pub dma_buf: bool,
    /// The NUMA node whose memory it must be.
    pub node: Option<u32>,
    /// Map each gather for a device.
    pub map: bool,
    /// The device that gets what has arrived; its gathers are mapped for it.
    pub device: Option<Device>,
    /// Bytes of DDR on the software card, or asked of a daemon; at least 1.
    pub card_ddr: Option<u64>,
    /// Read back what the device got, and compare it.
    pub verify: bool,
    /// Which bytes of each file.
    pub range: Option<Range>,
    /// How to read.
    pub options: ReadOptions,
    /// Say more.
    pub explain: bool,
    /// Result as JSON.
    pub json: bool,
    /// No progress bar.
    pub quiet: bool,
}

/// Bytes of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// The first.
    pub start: u64,
    /// The first that is not read any more; all to the end of the file without.
    pub end: Option<u64>,
}

/// Where memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Heap {
    /// The fastest that gives what is asked for.
    Auto,
    /// Private memory of this process.
    Anonymous,
    /// Memory behind a sealed file descriptor.
    Memfd,
    /// The kernel's dma-buf heap, /dev/dma_heap/system.
    #[value(name = "dma-heap")]
    Dma,
}

/// The best pages to try; where there are none left, smaller ones do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Pages {
    /// Reserved huge pages of 2 MiB.
    #[value(name = "2m")]
    Huge,
    /// Reserved huge pages of 1 GiB.
    #[value(name = "1g")]
    Giant,
    /// Transparent huge pages.
    #[value(name = "thp")]
    Transparent,
    /// Pages of 4 KiB.
    #[value(name = "4k")]
    Base,
}

impl From<Pages> for PageKind {
    fn from(pages: Pages) -> Self {
        match pages {
            Pages::Huge => Self::Hugetlb2M,
            Pages::Giant => Self::Hugetlb1G,
            Pages::Transparent => Self::Transparent,
            Pages::Base => Self::Base,
        }
    }
}

/// The order of allocating and reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Scheme {
    /// Read into what is there while the rest is being allocated.
    Overlap,
    /// Allocate all of it, then read.
    Sequential,
    /// Allocate all of it, then one pread after the other.
    Plain,
}

impl From<Scheme> for dmalane::Scheme {
    fn from(scheme: Scheme) -> Self {
        match scheme {
            Scheme::Overlap => Self::Overlap,
            Scheme::Sequential => Self::Sequential,
            Scheme::Plain => Self::Plain,
        }
    }
}

/// What was read, for the report.
struct Outcome {
    files: Vec<PathBuf>,
    picked: Picked,
    filled: Filled,
    ways: Vec<ReadMethod>,
    /// Physically contiguous segments of the buffers, where the kernel tells.
    segments: Option<u64>,
    /// How many mappings a device has of them, and whether it was asked for any.
    mappings: Option<usize>,
    /// The device that got them.
    device: Option<Device>,
    /// What it got was read back and compared.
    verified: bool,
}

/// Reads, and prints the result.
pub fn run(args: ReadArgs) -> Result<ExitCode, Failure> {
    let picked = heap(&args)?;
    let bar = Progress::new("read", !args.quiet && !args.json);
    let Read { filled, ways, mappings, target } = read(&args, &*picked.heap, &bar)?;
    bar.finish();
    if let Some(mut target) = target.filter(|_| args.verify) {
        target.verify(&filled)?;
    }
    let runs = filled.buffers.iter().map(|b| dmalane::dma::physical_runs(b.shared()).ok());
    let segments = runs.map(|runs| Some(runs?.segment_count() as u64)).sum();
    let (device, verified) = (args.device, args.verify);
    let outcome = Outcome { files: args.files, picked, filled, ways, segments, mappings, device, verified };
    match args.json {
        true => output::print_json(&report::json(&outcome))?,
        false => output::print(&report::text(&outcome, args.explain))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn heap(args: &ReadArgs) -> Result<Picked, Failure> {
    let best = PageKind::from(args.pages);
    let shareable = args.shareable || args.device.as_ref().is_some_and(device::shares);
    let (dma_buf, node) = (args.dma_buf, args.node);
    let needs = Needs { shareable, dma_buf, node, pages: Some(best), ..Needs::default() };
    let heap: Arc<dyn dmalane::dma::Heap> = match args.heap {
        Heap::Auto => return pick(needs).map_err(|e| Failure::because("no such memory on this machine", &e)),
        Heap::Anonymous => Arc::new(AnonHeap::starting_at(best).bound_to(args.node)),
        Heap::Memfd => Arc::new(MemfdHeap::starting_at(best).bound_to(args.node)),
        Heap::Dma if args.node.is_some() => {
            return Err(Failure::new("the kernel's dma-buf heap cannot be bound to a NUMA node"));
        }
        Heap::Dma => {
            let opened = DmaHeap::open("system").map_err(|e| Failure::because("no dma-buf heap on this machine", &e));
            Arc::new(opened.map_err(|f| f.hint("dmalane doctor says what the kernel lacks"))?)
        }
    };
    let can = heap.abilities();
    for (needed, had, what) in
        [(shareable, can.shareable, "shared with another process"), (args.dma_buf, can.dma_buf, "a dma-buf")]
    {
        if needed && !had {
            let message = format!("memory of the heap {:?} cannot be {what} here: {can}", heap.name());
            return Err(Failure::new(message).hint("without --heap a heap that can is chosen, if there is one"));
        }
    }
    Ok(Picked { heap, passed_over: Vec::new() })
}

/// What was read.
struct Read {
    filled: Filled,
    ways: Vec<ReadMethod>,
    mappings: Option<usize>,
    /// The device that has it.
    target: Option<Box<dyn Target>>,
}

fn read(args: &ReadArgs, heap: &dyn dmalane::dma::Heap, bar: &Progress) -> Result<Read, Failure> {
    let sources = args.files.iter().map(ReadSource::open).collect::<Result<Vec<_>, _>>().map_err(failure)?;
    let range = args.range.unwrap_or(Range { start: 0, end: None });
    if let [only] = &sources[..]
        && only.file.metadata().is_ok_and(|meta| is_stream(&meta.file_type()))
    {
        if args.map || args.device.is_some() {
            return Err(Failure::new("a pipe or socket cannot be mapped while it is read")
                .hint("without --map and --device it is read into memory, which can be mapped afterwards"));
        }
        let end = range.end.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
        let bounds = (std::ops::Bound::Included(range.start), end);
        let AllocRead { buffer, way, report } =
            heap.alloc_and_read(&only.file, bounds, &args.options).map_err(failure)?;
        let filled = Filled { buffers: vec![buffer], report };
        return Ok(Read { filled, ways: vec![way], mappings: None, target: None });
    }
    let mut job = Job::default();
    for (source, file) in sources.iter().enumerate() {
        let size = file.size().map_err(failure)?;
        let end = range.end.unwrap_or(size.max(range.start));
        let (at, len) = (FileOffset::new(range.start), end.saturating_sub(range.start));
        job.extents.push(Extent { source, at, len, buffer: source, to: 0 });
        job.buffers.push(len);
    }
    bar.set_length(job.bytes());
    let mut watch = |event: Event| {
        if let Event::Arrived { len, .. } = event {
            bar.advance(len);
        }
        ControlFlow::Continue(())
    };
    let mut target = match &args.device {
        Some(device) => Some(device::open(device, args.card_ddr, &job.buffers)?),
        None => None,
    };
    let read = if let Some(target) = &mut target {
        target.read(heap, &sources, &job, &args.options, &mut watch).map_err(failure)?
    } else if args.map {
        // Synthetic memory costs nothing until it is pinned.
        let config = HostConfig { memory: 16 << 40, ..HostConfig::default() };
        let host: SoftHost = SoftHost::new(config).map_err(|e| Failure::because("no software host", &e))?;
        read_mapped(heap, &host, Access::READ, &sources, &job, &args.options, &mut watch).map_err(failure)?
    } else {
        let (filled, ways) = read_all(heap, &sources, &job, &args.options, &mut watch).map_err(failure)?;
        return Ok(Read { filled, ways, mappings: None, target: None });
    };
    let mappings = Some(read.gathers.iter().map(Vec::len).sum());
    Ok(Read { filled: read.filled, ways: read.ways, mappings, target })
}

fn is_stream(kind: &std::fs::FileType) -> bool {
    use std::os::unix::fs::FileTypeExt;
    !kind.is_file() && !kind.is_block_device() && !kind.is_dir()
}

fn failure(error: ReadError) -> Failure {
    match &error {
        ReadError::Open { path, source } => Failure::because(format!("cannot open {}", path.display()), source),
        ReadError::Channel(dmalane::file::Error::NoDirect { .. }) => {
            Failure::from(error).hint("without --direct it is read through the page cache")
        }
        ReadError::Fill(FillError::NoRoom { wanted, left, limited_by }) => {
            let message = format!("the files need {}, and {limited_by} has {} left", binary(*wanted), binary(*left));
            Failure::new(message).hint("read less at a time with --range")
        }
        ReadError::Limit { wanted, limit } => {
            Failure::new(format!("the files need {}, and --limit is {}", binary(*wanted), binary(*limit)))
        }
        _ => Failure::from(error),
    }
}
