//! `dmalane read`: files into DMA-ready memory.

mod device;
mod export;
mod report;

use std::ops::{Bound, ControlFlow};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use dmalane::addr::{Access, FileOffset};
use dmalane::devices::soft;
use dmalane::dma::{AnonHeap, DmaHeap, MemfdHeap, Needs, PageKind, Picked, pick};
use dmalane::load::fill::{Event, Extent, FillError, FillOptions, Filled, FilledBuf, Job};
use dmalane::load::{DriveOptions, Expected, Manifest};
use dmalane::queue::OpError;
use dmalane::sim::{HostConfig, SoftHost};
use dmalane::{AllocAndRead, AllocRead, DeviceSpec, OpenFile, OpenOptions, ReadError, ReadFiles, ReadOptions};

use crate::device::{self as opening, Consent};
use crate::failure::Failure;
use crate::layout::fit;
use crate::model::{self, ReadMode};
use crate::number::within;
use crate::output;
use crate::progress::Progress;
use crate::range::Range;
use crate::report::{Page, Section};
use crate::size::{Size, between, binary};
use crate::source::{self, Copied, SourceFile};
use crate::timeline;
use device::ReadTarget;
use export::{Export, Exported};
use report::{Outcome, ReadFile, Run};

const EXAMPLES: &str = "\
Examples:
  dmalane read model.safetensors -v              how the file was read, and why
  dmalane read shard-*.safetensors --json        a buffer for each file
  dmalane read model.bin --heap memfd --pages thp --chunk 16MiB
  dmalane read model.bin --range 1MiB..2MiB --direct
  dmalane read model.bin --map -v                the cost of registering and mapping each chunk
  dmalane read model.bin --repeat 5              the stages of the median run
  dmalane read model.bin --trace read.json --report read.html  what was done when
  dmalane read model.bin -d soft --verify        transfer it to the software card meanwhile
  dmalane read model.bin --export fd -- sh -c 'head -c $DMALANE_SIZE /dev/fd/$DMALANE_FD | wc -c'
  dmalane read model.bin --send-to /run/trainer.sock
  zcat model.bin.gz | dmalane read -

Reads files into memory that devices can use while the memory is still being allocated, then frees it, or hands it \
to another process.

Exit status: 0 read, 1 bad file or no memory, 2 usage error; with --export that of COMMAND, or 126 or 127 if it \
cannot be run.";

/// Read files into DMA-ready memory while it is being allocated.
#[derive(Args)]
#[command(
    after_help = EXAMPLES,
    mut_arg("overwrite", |arg| arg.requires("device"))
)]
pub(crate) struct Read {
    /// Files to read, or the directory or the index of a model; - for standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Heap to allocate from
    #[arg(long, value_enum, default_value_t = Heap::Auto)]
    heap: Heap,

    /// Best pages to try; smaller ones take over where there are too few
    #[arg(long, value_enum, default_value_t = PageKind::Hugetlb2M, help_heading = "Memory")]
    pages: PageKind,

    /// Require buffers that a driver can import as dma-bufs
    #[arg(long, help_heading = "Memory")]
    dma_buf: bool,

    /// NUMA node of the memory
    #[arg(long, value_name = "N", value_parser = within::<u32>(0..=u32::MAX.into()), help_heading = "Memory")]
    node: Option<u32>,

    /// Pin and map each chunk as soon as it is allocated, with the software host's IOMMU
    #[arg(long)]
    map: bool,

    #[arg(short, long, value_parser = opening::Name, hide_possible_values = true, conflicts_with = "map")]
    #[arg(help = opening::help("Map each chunk for this device and transfer it while the rest is read"))]
    device: Option<DeviceSpec>,

    /// Read the data back from the device and compare it
    #[arg(long, requires = "device")]
    verify: bool,

    /// Compare the files with this manifest while they are read; `dmalane manifest` makes it
    #[arg(long, value_name = "FILE", conflicts_with = "range")]
    manifest: Option<PathBuf>,

    #[command(flatten)]
    format: output::OutputFormat,

    /// Read N times, each into new memory, and report the run with the median time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within::<u32>(1..=1000))]
    repeat: u32,

    #[command(flatten)]
    mode: ReadMode,

    /// Bytes allocated before reading into them starts, from 4KiB to 1GiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(2))]
    #[arg(value_parser = between(Size::kib(4), Size::gib(1)))]
    #[arg(allow_hyphen_values = true, help_heading = "Reading")]
    chunk: Size,

    /// Read only these bytes of each file, such as 0..4096, 1GiB.. or ..1MiB
    #[arg(long, value_name = "START..END", help_heading = "Reading")]
    range: Option<Range>,

    /// Do not hash the data
    #[arg(long, help_heading = "Reading")]
    no_checksum: bool,

    #[command(flatten, next_help_heading = "Outputs")]
    timeline: timeline::TimelineOptions,

    #[command(flatten)]
    replace: output::Replace,

    #[command(flatten)]
    export: Export,

    #[command(flatten, next_help_heading = "Device")]
    consent: Consent,
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

impl Outcome {
    /// Writes the timeline and the page, if they were asked for.
    fn write_timeline(&self, outputs: &timeline::Files) -> Result<(), Failure> {
        let Some(timeline) = &self.run.report.timeline else { return Ok(()) };
        let device = self.device.as_ref().map_or(String::new(), DeviceSpec::to_string);
        let page = Page {
            command: "dmalane read",
            device: &device,
            answer: report::answer(self),
            sections: vec![
                Section::Timeline(timeline, self.run.report.wall),
                report::page_rates(self),
                report::page_stages(self),
                report::page_files(self),
            ],
        };
        outputs.write(timeline, &page, "the files are read")
    }
}

impl Read {
    /// Reads, and prints the result.
    pub fn run(self) -> Result<ExitCode, Failure> {
        source::check(self.files.iter().chain(&self.manifest))?;
        let files = model::files(&self.files)?;
        let mut outputs = self.timeline.files(self.replace)?;
        if let Some(spec) = &self.device {
            self.consent.check(spec)?;
        }
        let mut picked = self.pick_heap()?;
        let (sources, copied) = self.sources(&files)?;
        for source in &sources {
            let meta = source.file.metadata()?;
            outputs = outputs.map(|to| to.excluding(&source.path, &meta));
        }
        outputs = outputs.map(|to| output::excluding(to, self.files.iter().chain(&self.manifest)));
        outputs.check()?;
        let manifest = model::manifest(self.manifest.as_deref())?;
        let receiver = self.export.receiver()?;
        let (mut runs, mut buffers) = (Vec::new(), Vec::new());
        for _ in 0..self.repeat {
            // Every run gets new memory, without that of the run before.
            buffers.clear();
            let (mut run, filled) = self.once(&*picked.heap, &sources, &manifest, &mut outputs)?;
            if let Some(heap) = run.heap.take() {
                picked = Picked { heap, passed_over: Vec::new() };
            }
            runs.push(run);
            buffers = filled;
        }
        let exported = match receiver {
            Some(receiver) => Some((Exported::new(&buffers, self.dma_buf)?, receiver)),
            None => None,
        };
        drop(buffers);
        let walls: Vec<_> = runs.iter().map(|run| run.report.wall).collect();
        let (times, median) = output::WallTimes::of(&walls);
        let (run, device, verified) = (runs.swap_remove(median), self.device, self.verify);
        let timeline::TimelineOptions { trace: traced, report: reported } = self.timeline;
        let manifest = self.manifest;
        let mut outcome = Outcome { picked, copied, run, runs: times, device, verified, manifest, traced, reported };
        let written = outcome.write_timeline(&outputs);
        if written.is_err() {
            (outcome.traced, outcome.reported) = (None, None);
        }
        let output::OutputFormat { verbose, json, .. } = self.format;
        let text = match json {
            true => output::json(&report::json(&outcome))?,
            false => fit(&report::text(&outcome, verbose)).into_owned(),
        };
        match exported {
            Some((exported, receiver)) if self.export.runs_command() => {
                written?;
                // Stdout is the command's.
                if verbose || json {
                    output::print_beside(&text);
                }
                return exported.hand_to(receiver);
            }
            Some((exported, receiver)) => exported.hand_to(receiver)?,
            None => ExitCode::SUCCESS,
        };
        output::print(&text)?;
        written.map(|()| ExitCode::SUCCESS)
    }

    /// The files, and what was copied first: a file without a size that is not read once from front to back is.
    fn sources(&self, files: &[PathBuf]) -> Result<(Vec<OpenFile>, Copied), Failure> {
        let once = self.repeat == 1 && files.len() == 1 && !self.map && self.device.is_none();
        let once = once && self.manifest.is_none() && !self.timeline.any();
        let mut all = Copied::default();
        let open = |path: &PathBuf| {
            let source = SourceFile::open(path)?;
            if !source.is_stdin() {
                model::refuse_lfs_pointer(path, &source.file)?;
            }
            let source = match once && source.is_stream() {
                true => {
                    source.check_written()?;
                    if self.range.is_none_or(|range| range.end.is_none()) {
                        source.check_end().map_err(|e| e.hint("--range 0..SIZE reads a part of it"))?;
                    }
                    source
                }
                false => source.with_size()?,
            };
            let SourceFile { file, path, copied, .. } = source;
            all.add(copied);
            Ok(OpenFile::new(path, file))
        };
        let sources = files.iter().map(open).collect::<Result<_, Failure>>()?;
        Ok((sources, all))
    }

    /// Reads once, and checks what a device got, whose files are excluded from the outputs. Gives the buffers too.
    fn once(
        &self,
        heap: &dyn dmalane::dma::Heap,
        sources: &[OpenFile],
        manifest: &Manifest,
        outputs: &mut timeline::Files,
    ) -> Result<(Run, Vec<FilledBuf>), Failure> {
        let bar = Progress::new("read", self.format.shows_progress());
        let differs = |e| model::differs("the read failed", &e).unwrap_or_else(|| e.into());
        let expected = match manifest.files.is_empty() {
            true => Expected::default(),
            false => {
                let sizes = sources.iter().map(OpenFile::size).collect::<Result<Vec<_>, _>>();
                let sizes = sizes.map_err(|e| failure(e.into()))?;
                manifest.expect(sources.iter().map(|source| &*source.path).zip(sizes)).map_err(differs)?
            }
        };
        let mut options = self.options();
        options.fill.hash_regions = expected.hash_regions();
        let Done { read: ReadFiles { filled, methods }, mapped, target, heap } =
            self.read(heap, sources, options, &bar, outputs)?;
        bar.finish();
        expected.check(filled.buffers.iter().map(FilledBuf::digests)).map_err(differs)?;
        let mut notes = Vec::new();
        if let Some(mut target) = target {
            if self.verify {
                target.verify(&filled)?;
            }
            notes = target.device.notes();
        }
        let segments = filled.buffers.iter().map(|b| dmalane::dma::physical_runs(b.shared()).ok());
        let files = sources.iter().zip(&filled.buffers).zip(methods);
        let run = Run {
            segments: segments.map(|runs| Some(runs?.segment_count() as u64)).sum(),
            mappings: mapped.then(|| filled.mappings.iter().map(Vec::len).sum()),
            files: files
                .map(|((source, buffer), method)| ReadFile {
                    path: source.path.clone(),
                    bytes: buffer.len() as u64,
                    checksum: buffer.checksum(),
                    method,
                })
                .collect(),
            report: filled.report,
            heap,
            notes,
        };
        Ok((run, filled.buffers))
    }

    /// How the device is opened.
    fn open_options(&self) -> OpenOptions {
        OpenOptions {
            drive: DriveOptions {
                fill: FillOptions { timeline: self.timeline.any(), ..DriveOptions::default().fill },
                ..DriveOptions::default()
            },
            only: Some("ddr"),
            ..self.consent.open_options()
        }
    }

    fn options(&self) -> ReadOptions {
        ReadOptions {
            mode: self.mode.mode(),
            fill: FillOptions {
                chunk: self.chunk.bytes(),
                checksum: !self.no_checksum,
                timeline: self.timeline.any(),
                ..ReadOptions::default().fill
            },
            ..ReadOptions::default()
        }
    }

    fn pick_heap(&self) -> Result<Picked, Failure> {
        let shareable =
            self.export.shares() || self.device.as_ref().is_some_and(|spec| spec.kind().served_by().is_some());
        let (dma_buf, node) = (self.dma_buf, self.node);
        let needs = Needs { shareable, dma_buf, node, pages: Some(self.pages), ..Needs::default() };
        let heap: Arc<dyn dmalane::dma::Heap> = match self.heap {
            Heap::Auto => {
                return pick(needs).map_err(|e| {
                    let failure = Failure::because("this machine has no such memory", &e);
                    failure.hint("`dmalane doctor` lists missing kernel features")
                });
            }
            Heap::Anonymous => Arc::new(AnonHeap::starting_at(self.pages).bound_to(node)),
            Heap::Memfd => Arc::new(MemfdHeap::starting_at(self.pages).bound_to(node)),
            Heap::Dma if node.is_some() => {
                return Err(Failure::usage("the kernel's dma-buf heap cannot be bound to a NUMA node"));
            }
            Heap::Dma => {
                let opened = DmaHeap::open("system");
                let opened = opened.map_err(|e| Failure::because("no dma-buf heap on this machine", &e));
                Arc::new(opened.map_err(|f| f.hint("`dmalane doctor` lists missing kernel features"))?)
            }
        };
        let can = heap.capabilities();
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

    fn read(
        &self,
        heap: &dyn dmalane::dma::Heap,
        sources: &[OpenFile],
        options: ReadOptions,
        bar: &Progress,
        outputs: &mut timeline::Files,
    ) -> Result<Done, Failure> {
        let range = self.range.unwrap_or_default();
        if let [only] = sources
            && only.file.metadata().is_ok_and(|meta| source::is_stream(&meta.file_type()))
        {
            let bounds = (Bound::Included(range.start), range.end.map_or(Bound::Unbounded, Bound::Excluded));
            let AllocRead { buffer, method, report } =
                heap.alloc_and_read(&only.file, bounds, &options).map_err(|e| match ended_at(&e) {
                    Some(size) => beyond(&only.path, range, Some(size)),
                    None => failure(e),
                })?;
            if range.start > 0 && buffer.is_empty() {
                return Err(beyond(&only.path, range, None));
            }
            let filled = Filled { buffers: vec![buffer], mappings: Vec::new(), report };
            return Ok(Done {
                read: ReadFiles { filled, methods: vec![method] },
                mapped: false,
                target: None,
                heap: None,
            });
        }
        let mut job = Job::default();
        for (source, file) in sources.iter().enumerate() {
            let size = file.size().map_err(|e| failure(e.into()))?;
            let end = range.end.unwrap_or(size);
            if end > size || range.start > 0 && range.start >= size {
                return Err(beyond(&file.path, range, Some(size)));
            }
            let (at, len) = (FileOffset::new(range.start), end - range.start);
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
            Some(spec) => {
                let mut read = output::named_files(self.files.iter().chain(&self.manifest));
                for source in sources {
                    read.push((source.path.clone(), source.file.metadata()?));
                }
                let target = ReadTarget::open(spec, &self.open_options(), &read, &job.buffers)?;
                *outputs = outputs.clone().excluding_device(target.device.backing_files())?;
                Some(target)
            }
            None => None,
        };
        let registrar = target.as_ref().map(|target| target.device.registrar());
        let own = registrar.filter(|r| matches!(self.heap, Heap::Auto) && r.only_own_heap());
        let own = own.map(|r| r.heap(Some(self.pages)));
        let host: SoftHost;
        let mut read = dmalane::Read::sources(sources.iter().map(again).collect::<Result<Vec<_>, _>>()?)
            .job(job)
            .options(options)
            .watch(watch);
        if let Some(ReadTarget { device, to }) = &mut target {
            read = read.copy_to_device(device, to);
        } else if self.map {
            host = SoftHost::new(HostConfig { memory: soft::HOST_MEMORY, ..HostConfig::default() })
                .map_err(|e| Failure::because("no software host", &e))?;
            read = read.mapped(&host, Access::READ);
        }
        let read = read.into_memory(own.as_deref().unwrap_or(heap)).map_err(failure)?;
        Ok(Done { read, mapped: self.map || target.is_some(), target, heap: own })
    }
}

/// The buffers and how they were filled.
struct Done {
    read: ReadFiles,
    /// The buffers were mapped for a device.
    mapped: bool,
    /// As in [`Run`].
    heap: Option<Arc<dyn dmalane::dma::Heap>>,
    /// The device that has it.
    target: Option<ReadTarget>,
}

/// The same open file.
fn again(source: &OpenFile) -> Result<OpenFile, Failure> {
    let file = source.file.try_clone()?;
    Ok(OpenFile::new(source.path.clone(), file))
}

/// The error of a range that ends behind the end of a file.
fn beyond(path: &Path, range: Range, size: Option<u64>) -> Failure {
    let size = size.map_or(String::new(), |size| format!(", at {size}"));
    Failure::new(format!("--range {range} does not lie in {}: the file ends before{size}", path.display()))
}

/// Where a pipe ended that is shorter than the range.
fn ended_at(error: &ReadError) -> Option<u64> {
    match error {
        ReadError::Read { error: OpError::EndOfFile { at, .. }, .. } => Some(at.bits()),
        _ => None,
    }
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
        _ => Failure::from(error),
    }
}
