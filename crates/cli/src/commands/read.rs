//! `dmalane read`: files into DMA-ready memory.

mod device;
mod report;

use std::ops::{Bound, ControlFlow};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use dmalane::addr::{Access, FileOffset};
use dmalane::dma::{AnonHeap, DmaHeap, MemfdHeap, Needs, PageKind, Picked, pick};
use dmalane::file::Mode;
use dmalane::load::fill::{Event, Extent, FillError, Filled, Job};
use dmalane::sim::{HostConfig, SoftHost};
use dmalane::{AllocAndRead, AllocRead, DeviceSpec, ReadError, ReadFiles, ReadMethod, ReadOptions, ReadSource, Scheme};

use crate::device::{self as opening, LARGE_HOST, card_memory};
use crate::failure::Failure;
use crate::number::within;
use crate::output;
use crate::progress::Progress;
use crate::range::Range;
use crate::size::{self, Size, between, binary};
use device::Target;

const EXAMPLES: &str = "\
Examples:
  dmalane read model.safetensors --explain       how the file was read, and why
  dmalane read shard-*.safetensors --json        a buffer for each file
  dmalane read model.bin --heap memfd --pages thp --chunk 16MiB
  dmalane read model.bin --scheme sequential     allocate everything first, to compare
  dmalane read model.bin --range 1MiB..2MiB --direct
  dmalane read model.bin --map --explain         the cost of registering and mapping each chunk
  dmalane read model.bin -d soft --verify        transfer it to the software card meanwhile
  zcat model.bin.gz | dmalane read /dev/stdin

Reads files into memory that devices can use while the memory is still being allocated, then frees it.

Exit status: 0 read, 1 bad file or no memory, 2 usage error.";

/// Read files into DMA-ready memory while it is being allocated.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Read {
    /// Files to read, each into its own buffer
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Heap to allocate from
    #[arg(long, value_enum, default_value_t = Heap::Auto)]
    heap: Heap,

    /// Best page backing to try; smaller pages take over where there are too few
    #[arg(long, value_enum, default_value_t = PageKind::Hugetlb2M)]
    pages: PageKind,

    /// Require buffers that another process can map
    #[arg(long)]
    shareable: bool,

    /// Require buffers that a driver can import as dma-bufs
    #[arg(long)]
    dma_buf: bool,

    /// NUMA node of the memory
    #[arg(long, value_name = "N", value_parser = within::<u32>(0..=u32::MAX.into()))]
    node: Option<u32>,

    /// Pin and map each chunk for a device as soon as it is allocated, with the software host's IOMMU
    #[arg(long)]
    map: bool,

    /// Map each chunk for this device and transfer it while the rest is read: soft, daemon, vfio:BDF, file:PATH,
    /// vulkan:N, cuda:N and others; `dmalane devices` lists all kinds
    #[arg(short, long, value_parser = opening::parse, conflicts_with = "map")]
    device: Option<DeviceSpec>,

    /// DDR size of the software card (default 64GiB), or of the share of a daemon's card; at most 256GiB, rounded up
    /// to 2MiB
    #[arg(long, value_name = "SIZE", value_parser = card_memory, allow_hyphen_values = true, requires = "device")]
    card_ddr: Option<Size>,

    /// Overwrite the data of a file or a block device that serves as device memory
    #[arg(long, requires = "device")]
    overwrite: bool,

    /// Read the data back from the device and compare it
    #[arg(long, requires = "device")]
    verify: bool,

    /// Order of allocation and reading
    #[arg(long, value_enum, default_value_t)]
    scheme: Scheme,

    /// Choose for each file: the page cache for cached files, direct I/O for others; this is the default
    #[arg(long, conflicts_with_all = ["direct", "buffered"])]
    auto: bool,

    /// Read with direct I/O, or fail
    #[arg(long, conflicts_with = "buffered")]
    direct: bool,

    /// Read through the page cache
    #[arg(long)]
    buffered: bool,

    /// Chunk size, from 4KiB to 1GiB: bytes allocated before reading into them starts
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(2))]
    #[arg(value_parser = between(Size::kib(4), Size::gib(1)))]
    #[arg(allow_hyphen_values = true)]
    chunk: Size,

    /// Reads in flight, from 1 to 4096
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = within::<u16>(1..=4096))]
    iodepth: u16,

    /// Bytes per read, from 64KiB to 1GiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(2))]
    #[arg(value_parser = between(Size::kib(64), Size::gib(1)))]
    #[arg(allow_hyphen_values = true)]
    block_size: Size,

    /// Threads that allocate and read, from 1 to 64
    /// [default: 1 for direct I/O; for copies out of the page cache one per processor, at most 4]
    #[arg(long, value_name = "N", value_parser = within::<u8>(1..=64))]
    threads: Option<u8>,

    /// Read only these bytes of each file, for example 0..4096, 1GiB.. or ..1MiB
    #[arg(long, value_name = "START..END")]
    range: Option<Range>,

    /// Refuse to use more memory than this
    #[arg(long, value_name = "SIZE", value_parser = size::nonzero, allow_hyphen_values = true)]
    limit: Option<Size>,

    /// Give up after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,

    /// Do not hash the data
    #[arg(long)]
    no_checksum: bool,

    /// Show how each file was read and why, and the time of each stage
    #[arg(long)]
    explain: bool,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// Show no progress bar
    #[arg(short, long)]
    quiet: bool,
}

/// A heap to allocate from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Heap {
    /// The fastest that meets the other options.
    Auto,
    /// Private memory of this process.
    Anonymous,
    /// Memory behind a sealed file descriptor.
    Memfd,
    /// The kernel's dma-buf heap, /dev/dma_heap/system.
    #[value(name = "dma-heap")]
    Dma,
}

/// The result of reading, for the report.
struct Outcome {
    files: Vec<PathBuf>,
    picked: Picked,
    filled: Filled,
    methods: Vec<ReadMethod>,
    /// Physically contiguous segments of the buffers, where the kernel tells.
    segments: Option<u64>,
    /// Device mappings of the buffers; `None` if none were asked for.
    mappings: Option<usize>,
    /// The device that got them.
    device: Option<DeviceSpec>,
    /// What it got was read back and compared.
    verified: bool,
}

impl Read {
    /// Reads, and prints the result.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let picked = self.pick_heap()?;
        let bar = Progress::new("read", !self.quiet && !self.json);
        let Done { read: ReadFiles { filled, methods }, mapped, target } = self.read(&*picked.heap, &bar)?;
        let mappings = mapped.then(|| filled.mappings.iter().map(Vec::len).sum());
        bar.finish();
        if let Some(mut target) = target.filter(|_| self.verify) {
            target.verify(&filled)?;
        }
        let runs = filled.buffers.iter().map(|b| dmalane::dma::physical_runs(b.shared()).ok());
        let segments = runs.map(|runs| Some(runs?.segment_count() as u64)).sum();
        let (files, device, verified) = (self.files, self.device, self.verify);
        let outcome = Outcome { files, picked, filled, methods, segments, mappings, device, verified };
        match self.json {
            true => output::print_json(&report::json(&outcome))?,
            false => output::print(&report::text(&outcome, self.explain))?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn options(&self) -> ReadOptions {
        ReadOptions {
            mode: match (self.buffered, self.direct) {
                (true, _) => Mode::Buffered,
                (_, true) => Mode::Direct,
                _ => Mode::Auto,
            },
            scheme: self.scheme,
            chunk: self.chunk.bytes(),
            depth: self.iodepth.into(),
            block: self.block_size.bytes() as usize,
            threads: self.threads.map(usize::from),
            checksum: !self.no_checksum,
            timeout: self.timeout,
            limit: self.limit.map(Size::bytes),
        }
    }

    fn pick_heap(&self) -> Result<Picked, Failure> {
        let shareable = self.shareable || self.device.as_ref().is_some_and(opening::shares);
        let (dma_buf, node) = (self.dma_buf, self.node);
        let needs = Needs { shareable, dma_buf, node, pages: Some(self.pages), ..Needs::default() };
        let heap: Arc<dyn dmalane::dma::Heap> = match self.heap {
            Heap::Auto => return pick(needs).map_err(|e| Failure::because("this machine has no such memory", &e)),
            Heap::Anonymous => Arc::new(AnonHeap::starting_at(self.pages).bound_to(node)),
            Heap::Memfd => Arc::new(MemfdHeap::starting_at(self.pages).bound_to(node)),
            Heap::Dma if node.is_some() => {
                return Err(Failure::usage("the kernel's dma-buf heap cannot be bound to a NUMA node"));
            }
            Heap::Dma => {
                let opened = DmaHeap::open("system");
                let opened = opened.map_err(|e| Failure::because("no dma-buf heap on this machine", &e));
                Arc::new(opened.map_err(|f| f.hint("`dmalane doctor` shows what the kernel lacks"))?)
            }
        };
        let can = heap.abilities();
        for (needed, had, what) in
            [(shareable, can.shareable, "shared with another process"), (dma_buf, can.dma_buf, "a dma-buf")]
        {
            if needed && !had {
                let message = format!("memory of the heap {:?} cannot be {what} here: {can}", heap.name());
                return Err(Failure::new(message).hint("without --heap a heap that can is chosen, if there is one"));
            }
        }
        Ok(Picked { heap, passed_over: Vec::new() })
    }

    fn read(&self, heap: &dyn dmalane::dma::Heap, bar: &Progress) -> Result<Done, Failure> {
        let options = self.options();
        let sources = self.files.iter().map(ReadSource::open).collect::<Result<Vec<_>, _>>().map_err(failure)?;
        let range = self.range.unwrap_or_default();
        if let [only] = &sources[..]
            && only.file.metadata().is_ok_and(|meta| is_stream(&meta.file_type()))
        {
            if self.map || self.device.is_some() {
                return Err(Failure::new("a pipe or socket cannot be mapped while it is read")
                    .hint("without --map and --device it is read into memory, which can be mapped afterwards"));
            }
            let bounds = (Bound::Included(range.start), range.end.map_or(Bound::Unbounded, Bound::Excluded));
            let AllocRead { buffer, method, report } =
                heap.alloc_and_read(&only.file, bounds, &options).map_err(failure)?;
            let filled = Filled { buffers: vec![buffer], mappings: Vec::new(), report };
            return Ok(Done { read: ReadFiles { filled, methods: vec![method] }, mapped: false, target: None });
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
        let watch = |event: Event| {
            if let Event::Arrived { len, .. } = event {
                bar.advance(len);
            }
            ControlFlow::Continue(())
        };
        let mut target = match &self.device {
            Some(spec) => Some(Target::open(spec, self.card_ddr.map(Size::bytes), self.overwrite, &job.buffers)?),
            None => None,
        };
        let host: SoftHost;
        let mut read = dmalane::Read::sources(sources).job(job).options(options).watch(watch);
        if let Some(Target { device, to }) = &mut target {
            read = read.and_to(device, to);
        } else if self.map {
            host = SoftHost::new(HostConfig { memory: LARGE_HOST, ..HostConfig::default() })
                .map_err(|e| Failure::because("no software host", &e))?;
            read = read.mapped(&host, Access::READ);
        }
        let read = read.into_memory(heap).map_err(failure)?;
        Ok(Done { read, mapped: self.map || target.is_some(), target })
    }
}

/// The buffers and how they were filled.
struct Done {
    read: ReadFiles,
    /// The buffers were mapped for a device.
    mapped: bool,
    /// The device that has it.
    target: Option<Target>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("not a time".to_owned()),
    }
}

fn is_stream(kind: &std::fs::FileType) -> bool {
    use std::os::unix::fs::FileTypeExt;
    !kind.is_file() && !kind.is_block_device() && !kind.is_dir()
}

fn failure(error: ReadError) -> Failure {
    match &error {
        ReadError::Open { path, source } => Failure::because(format!("cannot open {}", path.display()), source),
        ReadError::File(dmalane::file::Error::NoDirect { .. }) => {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "NaN", "1e99", "soon"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
