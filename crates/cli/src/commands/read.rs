//! `dmalane read`: files into DMA-ready memory.

mod export;
mod report;

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use dmalane::addr::FileOffset;
use dmalane::dma::{AnonHeap, DmaHeap, Heap, MemfdHeap, Needs, PageKind, Picked, pick};
use dmalane::load::fill::{Event, Extent, FilledBuf, Job};
use dmalane::load::{Manifest, SetFile, in_parallel};
use dmalane::{OpenFile, ReadFiles, ReadOptions};

use crate::failure::Failure;
use crate::layout::fit;
use crate::model;
use crate::output::{self, Outputs};
use crate::progress::Progress;
use crate::range::Range;
use crate::runs::{self, MeasuredRuns, MeasuredStage, RunOptions};
use crate::source::{self, Copied};
use report::{Outcome, ReadFile, Run};

const EXAMPLES: &str = "\
Examples:
  dmalane read model.safetensors -v              how the file was read, and why
  dmalane read shard-*.safetensors --json        a buffer for each file
  dmalane read model.bin --heap memfd --pages thp --chunk 16MiB
  dmalane read model.bin --range 1MiB..2MiB --direct
  dmalane read model.bin --repeat 5              the stages of the median run
  dmalane read model.bin --repeat 5 --cold       the same from the disk, and the average
  dmalane read model.bin --trace read.json --report read.html  what was done when
  dmalane read model.bin --export fd -- sh -c 'head -c $DMALANE_SIZE /dev/fd/$DMALANE_FD | wc -c'
  zcat model.bin.gz | dmalane read -

Reads files into memory that devices can use while the memory is still being allocated, then frees it, or hands it \
to another process.

Exit status: 0 read, 1 bad file or no memory, 2 usage error; with --export that of COMMAND, or 126 or 127 if it \
cannot be run.";

/// Read files into DMA-ready memory while it is being allocated.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Read {
    /// Files to read, or the directory or the index of a model; - for standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Heap to allocate from
    #[arg(long, value_enum, default_value_t = HeapKind::Auto)]
    heap: HeapKind,

    /// Best pages to try; smaller ones take over where there are too few
    #[arg(long, value_enum, default_value_t = PageKind::Hugetlb2M, help_heading = "Memory")]
    pages: PageKind,

    /// Require buffers that a driver can import as dma-bufs
    #[arg(long, help_heading = "Memory")]
    dma_buf: bool,

    /// Read only these bytes of each file, such as 0..4096, 1GiB.. or ..1MiB
    #[arg(long, value_name = "START..END", conflicts_with = "manifest", help_heading = "Reading")]
    range: Option<Range>,

    /// Run COMMAND in place of dmalane, with the memory as an open descriptor that it can map
    ///
    /// Its number is in DMALANE_FD, its bytes in DMALANE_SIZE (for several files, lists with spaces), and memfd or
    /// dma-buf in DMALANE_KIND.
    #[arg(long, value_parser = ["fd"], requires = "command", conflicts_with = "repeat")]
    #[arg(help_heading = "To another process")]
    export: Option<String>,

    /// The command of --export, with its arguments
    #[arg(value_name = "COMMAND", last = true, requires = "export")]
    command: Vec<OsString>,

    #[command(flatten)]
    run: RunOptions,
}

/// A heap to allocate from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum HeapKind {
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

impl Read {
    /// Reads, and prints the result.
    pub fn run(self) -> Result<ExitCode, Failure> {
        source::check(self.files.iter().chain(&self.run.manifest))?;
        let files = model::set(&self.files)?.files;
        let picked = self.pick_heap()?;
        let mut copied = Copied::default();
        let sources = open_all(&files, &mut copied)?;
        let read =
            output::named_files(self.files.iter().chain(files.iter().map(|file| &file.path)).chain(&self.run.manifest));
        let outputs = Outputs::new(self.run.replace, self.run.timeline.paths())?.excluding(&read)?;
        let manifest = model::manifest(self.run.manifest.as_deref())?;
        let (mut all, mut buffers, mut cold) = (Vec::new(), Vec::new(), None);
        for _ in 0..self.run.repeat {
            self.run.drop_cached(&sources, &mut cold)?;
            // Every run gets new memory, without that of the run before.
            buffers.clear();
            let (run, filled) = self.once(&*picked.heap, &sources, &manifest)?;
            all.push(run);
            buffers = filled;
        }
        let exported = self.export.is_some().then(|| export::Exported::new(&buffers, self.dma_buf)).transpose()?;
        drop(buffers);
        let walls: Vec<_> = all.iter().map(|run| run.report.wall).collect();
        let run = all.swap_remove(runs::median(&walls));
        let whole = (run.report.wall, run.report.workers);
        let runs = MeasuredRuns {
            command: "read",
            bytes: run.report.bytes,
            walls,
            cold,
            stages: run.report.stages.iter().map(|s| MeasuredStage::new(*s, whole)).collect(),
            copied,
            manifest: self.run.manifest,
        };
        let outcome = Outcome { picked, run, runs };
        let about = ("", &*report::answer(&outcome), report::files(&outcome));
        let written = outcome.runs.write(&outputs, outcome.run.report.timeline.as_ref(), about);
        let output::OutputFormat { verbose, json, .. } = self.run.format;
        let text = match json {
            true => output::json(&report::json(&outcome))?,
            false => fit(&report::text(&outcome, verbose)).into_owned(),
        };
        if let Some(exported) = exported {
            written?;
            // Stdout is the command's.
            if verbose || json {
                output::print_beside(&text);
            }
            return Err(exported.run(&self.command));
        }
        output::print(&text)?;
        written.map(|()| ExitCode::SUCCESS)
    }

    /// Reads once. Gives the buffers too.
    fn once(
        &self,
        heap: &dyn Heap,
        sources: &[OpenFile],
        manifest: &Manifest,
    ) -> Result<(Run, Vec<FilledBuf>), Failure> {
        let bar = Progress::new("read", self.run.format.shows_progress());
        let sizes = sources.iter().map(OpenFile::size).collect::<Result<Vec<_>, _>>().map_err(model::failure)?;
        let range = self.range.unwrap_or_default();
        let mut job = Job::default();
        for (source, (file, size)) in sources.iter().zip(sizes).enumerate() {
            let end = range.end.unwrap_or(size);
            if end > size || range.start > 0 && range.start >= size {
                let path = file.path.display();
                let message = format!("--range {range} does not lie in {path}: the file ends before, at {size}");
                return Err(Failure::new(message));
            }
            let (at, len) = (FileOffset::new(range.start), end - range.start);
            job.extents.push(Extent { source, at, len, buffer: source, to: 0 });
            job.buffers.push(len);
        }
        bar.set_length(job.bytes());
        let read = dmalane::Read::sources(sources.to_vec()).job(job).options(self.options()).manifest(manifest).watch(
            |event: Event| {
                if let Event::Arrived { len, .. } = event {
                    bar.advance(len);
                }
                ControlFlow::Continue(())
            },
        );
        let read = read.into_memory(heap);
        let failed = |e| model::differs("the read failed", &e).unwrap_or_else(|| model::failure(e));
        let ReadFiles { filled, methods } = read.map_err(failed)?;
        bar.finish();
        let segments = filled.buffers.iter().map(|b| dmalane::dma::physical_runs(b.shared()).ok());
        let files = sources.iter().zip(&filled.buffers).zip(methods);
        let run = Run {
            segments: segments.map(|runs| Some(runs?.segment_count() as u64)).sum(),
            files: files
                .map(|((source, buffer), method)| ReadFile {
                    path: source.path.clone(),
                    bytes: buffer.len() as u64,
                    checksum: buffer.checksum(),
                    method,
                })
                .collect(),
            report: filled.report,
        };
        Ok((run, filled.buffers))
    }

    fn options(&self) -> ReadOptions {
        ReadOptions {
            mode: self.run.mode.mode(),
            threads: self.run.threads(),
            fill: self.run.fill(ReadOptions::default().fill),
            ..ReadOptions::default()
        }
    }

    fn pick_heap(&self) -> Result<Picked, Failure> {
        let (shareable, dma_buf) = (self.export.is_some(), self.dma_buf);
        let needs = Needs { shareable, dma_buf, pages: Some(self.pages) };
        let heap: Arc<dyn Heap> = match self.heap {
            HeapKind::Auto => {
                return pick(needs).map_err(|e| {
                    let failure = Failure::because("this machine has no such memory", &e);
                    failure.hint("`dmalane doctor` lists missing kernel features")
                });
            }
            HeapKind::Anonymous => Arc::new(AnonHeap::starting_at(self.pages)),
            HeapKind::Memfd => Arc::new(MemfdHeap::starting_at(self.pages)),
            HeapKind::Dma => {
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
}

/// Opens files that are read as they are: by name, no Git LFS pointers in their place.
fn open_all(files: &[SetFile], copied: &mut Copied) -> Result<Vec<OpenFile>, Failure> {
    let opened = model::open_all(files, copied)?;
    let named = files.iter().zip(&opened).filter(|(file, _)| !source::is_stdin(&file.path)).collect();
    in_parallel(named, |(file, opened)| model::refuse_lfs_pointer(&file.path, &*opened.file()?))?;
    Ok(opened)
}
