//! Rates that the machine reaches at best, to compare with: measured in the same run as a load.

use std::ops::ControlFlow;
use std::time::Instant;

use dmalane_addr::FileOffset;
use dmalane_dma::{CopyHint, SharedBuf};
use dmalane_queue::Queue;

use crate::device::OpenDevice;
use crate::engine::describe;
use crate::error::Error;
use crate::fill::{self, FillOptions, Sink, Workers};
use crate::input::Input;
use crate::manifest::Manifest;
use crate::parts::Parts;

/// Rates in bytes per second.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ReferenceRates {
    /// The same parts of the same files read into the same staging buffers, and nothing else done.
    pub read: f64,
    /// A thread copying memory that is not in the cache, with stores that bypass it; two where the device has
    /// [one of its own](dmalane_device::DeviceInfo::helped).
    pub copy: f64,
    /// First touch of sparse shared memory, as the software card's memory is.
    pub first_touch: f64,
}

/// No more than this is read again.
const READ_AT_MOST: u64 = 4 << 30;
const MEMORY_BYTES: usize = 256 << 20;
const COPIES: usize = 4;

impl OpenDevice {
    /// Measures the rates, with the first 4 GiB of what [`OpenDevice::load_checked`] reads of `inputs` with this
    /// manifest, in the staging buffers that a load uses.
    ///
    /// # Errors
    /// [`Error`] when memory cannot be had or the files cannot be read.
    pub fn reference_rates<S: Queue<Addr = FileOffset>>(
        &mut self,
        inputs: &mut [Input<S>],
        manifest: &Manifest,
    ) -> Result<ReferenceRates, Error> {
        let hashed = self.options.fill.checksum || !manifest.files.is_empty();
        let models = inputs.iter().map(|input| input.source.model()).collect::<Result<Vec<_>, _>>()?;
        let wanted = inputs.iter().zip(models).map(|(input, model)| input.wanted(model, hashed));
        let job = Parts::new(wanted).first(READ_AT_MOST);
        let start = Instant::now();
        self.staging.prepare(job.buffers.iter().copied().max().unwrap_or(0));
        let mut queues = [inputs.iter_mut().map(|input| &mut input.queue).collect::<Vec<_>>()];
        let workers = Workers { queues: &mut queues, all: true, late: false };
        let FillOptions { block, timeout, .. } = self.options.fill;
        let options = FillOptions { block, timeout, ..FillOptions::default() };
        let sink = Sink::Staging(&mut self.staging, None);
        let mut go = |_| ControlFlow::Continue(());
        if let Err(error) = fill::run(start, sink, &job, workers, &options, &mut go) {
            // Slots that were in flight are incomplete: new ones are made next time.
            self.staging.clear();
            return Err(describe(error, |file| (inputs[file].source.path.clone(), None)));
        }
        let read = job.bytes() as f64 / start.elapsed().as_secs_f64();
        let (copy, first_touch) = memory_rates(1 + usize::from(self.info.helped))?;
        Ok(ReferenceRates { read, copy, first_touch })
    }
}

/// First touch of memory as the software card's, and then copying one half of it to the other by as many threads: more
/// than any cache holds.
fn memory_rates(threads: usize) -> Result<(f64, f64), Error> {
    // A virtual machine's host may have taken unused memory away, and its first touch is then the host's work, up to
    // twenty times slower. So touch some, give it back, and time the second time.
    touched()?;
    let start = Instant::now();
    let memory = touched()?;
    let first_touch = MEMORY_BYTES as f64 / start.elapsed().as_secs_f64();
    let half = MEMORY_BYTES / 2;
    let part = half / threads;
    let copy = &|at: usize| {
        let view = memory.as_volatile_slice();
        if let Some((from, to)) = view.sub(at, part).zip(view.sub(half + at, part)) {
            (0..COPIES).for_each(|_| to.copy_from(from, CopyHint::Stream));
        }
    };
    let start = Instant::now();
    let parts = std::thread::scope(|scope| {
        let spawn = |n: usize| std::thread::Builder::new().spawn_scoped(scope, move || copy(n * part));
        let others = (1..threads).filter(|n| spawn(*n).is_ok()).count();
        copy(0);
        1 + others
    });
    Ok(((parts * part * COPIES) as f64 / start.elapsed().as_secs_f64(), first_touch))
}

fn touched() -> Result<SharedBuf, Error> {
    let memory = SharedBuf::sparse_private(MEMORY_BYTES)?;
    for at in (0..MEMORY_BYTES).step_by(2 << 20) {
        memory.populate(at, 2 << 20).map_err(|source| dmalane_dma::Error::Allocate {
            len: MEMORY_BYTES,
            kind: "sparse memory",
            source,
        })?;
    }
    Ok(memory)
}
