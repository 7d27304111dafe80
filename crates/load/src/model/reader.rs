//! Reading tensors of a model into blocks within its memory limit.

use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use dmalane_dma::{Heap, Pool, lock};
use dmalane_file::Mode;

use super::block::{Block, model_heap};
use super::budget::{Budget, Charge};
use super::expected;
use super::file::ModelFile;
use super::plan::{PAGE, Plan};
use super::report::Reads;
use crate::container::FormatError;
use crate::error::Error;
use crate::fill::{Event, Extent, FilledBuf, Job, Watch};
use crate::manifest::{Compared, check, hash_regions};
use crate::read::{Read, ReadFiles, ReadOptions};

/// Files read by one job: what it knows of each takes memory.
pub(super) const FILES_AT_ONCE: usize = 1024;

/// The files of a model, and what all reads of it share.
#[derive(Clone)]
pub(super) struct Reader {
    pub files: Arc<Vec<ModelFile>>,
    pub budget: Arc<Budget>,
    pub reads: Arc<Mutex<Reads>>,
    pub mode: Mode,
    /// Threads that read, of one job; by default as many as the processors and the files take.
    pub threads: Option<usize>,
    pub closed: Arc<AtomicBool>,
    /// The reader that this one is [apart](super::HostModel::apart) from: to close it ends the reads of this one, too.
    pub above: Option<Arc<Self>>,
}

impl Reader {
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) || self.above.as_ref().is_some_and(|above| above.is_closed())
    }

    pub fn check_open(&self) -> Result<(), Error> {
        if self.is_closed() { Err(Error::Closed) } else { Ok(()) }
    }

    /// Ends a job as soon as the files are closed.
    pub fn while_open<'w>(&'w self, watch: &'w mut Watch<'_>) -> impl FnMut(Event) -> ControlFlow<()> + Send + 'w {
        |event: Event| if self.is_closed() { ControlFlow::Break(()) } else { watch(event) }
    }

    /// The plan for some tensors of a file.
    pub fn plan(&self, file: usize, tensors: Range<usize>, align: Option<u64>) -> Result<Plan, Error> {
        let file = &self.files[file];
        file.check_rows()?;
        let kept = file.kept().filter(|_| align.is_none());
        if let Some(plan) = kept.and_then(|block| Plan::kept(file.contents(), tensors.clone(), block)) {
            return Ok(plan);
        }
        let plan = Plan::new(file.contents(), tensors, align);
        plan.ok_or_else(|| file.bad(FormatError::new("its tensors do not fit 63 bits")))
    }

    /// Takes the memory for one buffer for each plan.
    pub fn charge(&self, files: &[(usize, Plan)]) -> Result<Vec<Charge>, Error> {
        self.budget.check(files.iter().map(|(_, plan)| plan.memory()).sum())?;
        files.iter().map(|(_, plan)| self.budget.take(None, plan.memory())).collect()
    }

    /// Runs a job, if it has anything to read, and notes how the files were read. `compared` are the ranges of each
    /// buffer, those that are compared with the manifest and those between.
    pub fn run(
        &self,
        files: &[&ModelFile],
        job: Job,
        compared: &[Vec<Compared<'_>>],
        watch: &mut Watch<'_>,
    ) -> Result<Vec<FilledBuf>, Error> {
        if job.buffers.is_empty() {
            return Ok(Vec::new());
        }
        let ReadFiles { filled, methods } = self.fill(model_heap(), files, job, compared, watch)?;
        check(compared, filled.buffers.iter().map(FilledBuf::digests))?;
        let mut reads = lock(&self.reads);
        reads.add(filled.report, files.iter().map(|file| file.path().to_owned()).zip(methods));
        Ok(filled.buffers)
    }

    /// Settings of a job that reads these ranges. Each of a given number of threads reads a block at a time.
    pub fn options(&self, compared: &[Vec<Compared<'_>>]) -> ReadOptions {
        let mut options = ReadOptions { mode: self.mode, threads: self.threads, ..ReadOptions::default() };
        options.fill.depth = self.threads.map(|_| 1);
        options.fill.hash_regions = hash_regions(compared);
        options
    }

    pub fn fill(
        &self,
        heap: &Pool,
        files: &[&ModelFile],
        job: Job,
        compared: &[Vec<Compared<'_>>],
        watch: &mut Watch<'_>,
    ) -> Result<ReadFiles, Error> {
        let sources = files.iter().map(|file| file.open()).collect::<Result<_, _>>()?;
        let (options, watch) = (self.options(compared), self.while_open(watch));
        Read::sources(sources).options(options).job(job).watch(watch).into_memory(heap)
    }

    /// Reads a buffer for each of these files, laid out by its plan, into memory that was taken.
    pub fn read(
        &self,
        files: &[(usize, Plan)],
        charges: Vec<Charge>,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Arc<Block>>, Error> {
        let mut blocks: Vec<Arc<Block>> = Vec::new();
        let mut charges = charges.into_iter();
        for files in files.chunks(FILES_AT_ONCE) {
            let mut job = Job::default();
            let with_bytes = files.iter().filter(|(_, plan)| plan.len > 0);
            let plans: Vec<_> = with_bytes.map(|(file, plan)| (&self.files[*file], plan)).collect();
            for (buffer, (_, plan)) in plans.iter().enumerate() {
                job.buffers.push(plan.len);
                job.extents.extend(plan.extents.iter().map(|e| Extent { source: buffer, buffer, ..*e }));
            }
            let sources: Vec<&ModelFile> = plans.iter().map(|(source, _)| *source).collect();
            let compared: Vec<_> = plans.iter().map(|(source, plan)| expected::of_plan(source, plan)).collect();
            let mut buffers = self.run(&sources, job, &compared, watch)?.into_iter();
            for (_, plan) in files {
                let charge = charges.next();
                if let Some(kept) = &plan.kept {
                    blocks.push(kept.clone());
                    continue;
                }
                let buf = match plan.len {
                    // A tensor of no bytes has memory too: no address is special.
                    0 => model_heap().allocate(PAGE as usize)?.share(),
                    _ => buffers.next().expect("a buffer for each plan").into_shared(),
                };
                blocks.push(Block::charged(buf, charge));
            }
        }
        Ok(blocks)
    }

    /// Reads one buffer of a file.
    pub fn read_one(
        &self,
        file: usize,
        plan: Plan,
        charge: Charge,
        watch: &mut Watch<'_>,
    ) -> Result<(Arc<Block>, Plan), Error> {
        let plans = [(file, plan)];
        let block = self.read(&plans, vec![charge], watch)?.pop().expect("a block for each plan");
        let [(_, plan)] = plans;
        Ok((block, plan))
    }
}
