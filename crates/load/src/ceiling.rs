//! What the machine can do at best, measured in the same run as a load.

use std::time::{Duration, Instant};

use dmalane_addr::FileOffset;
use dmalane_dma::{CopyHint, SharedBuf};
use dmalane_queue::{Completion, Operation, Queue, Refusal, Refused, drain};

use crate::clock::Clocks;
use crate::{Error, Input, OpenDevice};

/// Rates in bytes per second.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Ceilings {
    /// The same files read into the same staging buffers, and nothing else done.
    pub read: f64,
    /// One thread copying memory that is not in the cache, with stores that bypass it.
    pub copy: f64,
    /// First touch of sparse shared memory, as the software card's memory is.
    pub first_touch: f64,
}

/// No more than this is read again to find the ceiling.
const READ_AT_MOST: u64 = 4 << 30;
const MEMORY_BYTES: usize = 256 << 20;
const COPIES: usize = 4;

impl OpenDevice {
    /// Measures the ceilings, with as much of `inputs` as 4 GiB, in the staging buffers that there are.
    ///
    /// # Errors
    /// [`Error`] when memory cannot be had or the files cannot be read.
    pub fn ceilings<S: Queue<Addr = FileOffset>>(&mut self, inputs: &mut [Input<S>]) -> Result<Ceilings, Error> {
        // With the buffers of the load before; without one, a buffer like those that it would make.
        if self.buffers == 0 {
            self.add_staging(self.chunk, &mut Clocks::default())?;
        }
        let timeout = self.timeout;
        let read = self.read_ceiling(inputs).inspect_err(|_| {
            // Slots that were in flight have lost their tails: make new ones next time.
            for input in inputs.iter_mut() {
                drain(&mut input.channel, timeout);
            }
            self.staging.clear();
            self.buffers = 0;
        })?;
        let (copy, first_touch) = memory_ceilings()?;
        Ok(Ceilings { read, copy, first_touch })
    }

    /// Keeps all staging buffers being read into, and throws the bytes away.
    fn read_ceiling<S: Queue<Addr = FileOffset>>(&mut self, inputs: &mut [Input<S>]) -> Result<f64, Error> {
        let start = Instant::now();
        let mut total = 0;
        for input in inputs.iter_mut() {
            let lost = |reason: String| Error::Channel { path: input.path.clone(), end: "file", reason };
            let len = input.len()?.min(READ_AT_MOST - total);
            let (mut at, mut done) = (0, Vec::new());
            let mut tails: Vec<_> = self.staging.iter().map(|_| None).collect();
            let mut tickets = Vec::new();
            while at < len || !tickets.is_empty() {
                for (index, (slot, tail)) in self.staging.iter_mut().zip(&mut tails).enumerate() {
                    if at >= len {
                        break;
                    }
                    let Some(whole) = slot.slice.take() else { continue };
                    let n = (len - at).min(whole.len() as u64);
                    let (part, rest) = whole.split_at(n as usize).map_err(|_| lost("bad length".into()))?;
                    match input.channel.submit(Operation::read(part, FileOffset::new(at))) {
                        Ok(ticket) => {
                            tickets.push((ticket, index, at));
                            *tail = Some(rest);
                            at += n;
                        }
                        Err(Refused { operation, reason }) => {
                            slot.slice = operation.into_slice().and_then(|front| front.join(rest).ok());
                            match reason {
                                Refusal::Full => break,
                                reason => return Err(lost(reason.to_string())),
                            }
                        }
                    }
                }
                input.channel.wait(&mut done, Duration::from_millis(100));
                for Completion { ticket, operation, result, .. } in done.drain(..) {
                    let Some(i) = tickets.iter().position(|(t, ..)| *t == ticket) else { continue };
                    let (_, index, at) = tickets.swap_remove(i);
                    let whole = tails[index].take().and_then(|tail| operation.into_slice()?.join(tail).ok());
                    self.staging[index].slice = whole;
                    result.map_err(|source| Error::Read {
                        path: input.path.clone(),
                        at: FileOffset::new(at),
                        tensor: None,
                        source,
                    })?;
                }
            }
            total += len;
        }
        Ok(total as f64 / start.elapsed().as_secs_f64())
    }
}

/// First touch of sparse memory, and then copying one half of it to the other: more than any cache holds, and counted
/// with shared memory as the software card's is.
fn memory_ceilings() -> Result<(f64, f64), Error> {
    // A virtual machine's host may have taken unused memory away, and its first touch is then the host's work, up to
    // twenty times slower. So touch some, give it back, and time the second time.
    touched()?;
    let start = Instant::now();
    let memory = touched()?;
    let first_touch = MEMORY_BYTES as f64 / start.elapsed().as_secs_f64();
    let view = memory.view();
    let half = MEMORY_BYTES / 2;
    let (Some(from), Some(to)) = (view.sub(0, half), view.sub(half, half)) else { return Ok((0.0, first_touch)) };
    let start = Instant::now();
    for _ in 0..COPIES {
        to.copy_from(from, CopyHint::Stream);
    }
    Ok(((half * COPIES) as f64 / start.elapsed().as_secs_f64(), first_touch))
}

fn touched() -> Result<SharedBuf, Error> {
    let memory = SharedBuf::sparse("dmalane-ceiling", MEMORY_BYTES)?;
    for at in (0..MEMORY_BYTES).step_by(2 << 20) {
        memory.populate(at, 2 << 20).map_err(|source| dmalane_dma::Error::Allocate {
            len: MEMORY_BYTES,
            kind: "sparse memfd memory",
            source,
        })?;
    }
    Ok(memory)
}
