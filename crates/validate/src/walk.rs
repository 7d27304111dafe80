//! A buffer that goes to and from its place on the device again and again, and the bytes that it must have.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, CardAddr};
use dmalane_device::DriverCopy;
use dmalane_dma::{BufferSlice, Registrar, SharedBuf};
use dmalane_queue::{DeviceAddr, DeviceQueue, Direction, Operation, Refusal, Registered, Ticket};
use hdrhistogram::Histogram;

use crate::error::ValidateError;

/// Bytes compared or filled at a time.
const BLOCK: usize = 64 << 10;

/// A fragment of the device and the slice of a buffer that goes to and from it.
pub(crate) struct Stretch {
    pub at: CardAddr,
    /// `None` while it is in flight.
    slice: Option<BufferSlice>,
    /// Where in the buffer it begins.
    offset: u64,
}

/// A buffer and its place.
pub(crate) struct Walk {
    pub stretches: Vec<Stretch>,
    /// The direction whose figures it counts for.
    pub measured: Direction,
    /// The direction of its next pass.
    pub direction: Direction,
    via: Registered,
    /// Of the pass under way: what the queue has not taken yet, and what it has.
    todo: VecDeque<usize>,
    flying: Vec<(Ticket, usize)>,
    begun: Instant,
    len: u64,
    pub moved: Moved,
}

/// The bytes that a walk has moved.
#[derive(Clone)]
pub(crate) struct Moved {
    pub passes: u64,
    pub bytes: u64,
    /// From the first beginning to the last end.
    pub took: Duration,
    /// Nanoseconds that each whole pass took.
    pub times: Histogram<u32>,
}

impl Default for Moved {
    fn default() -> Self {
        Self { passes: 0, bytes: 0, took: Duration::ZERO, times: histogram() }
    }
}

/// A histogram of nanoseconds up to an hour, exact to two digits (1 %). It never allocates when it records.
pub(crate) fn histogram() -> Histogram<u32> {
    Histogram::new_with_bounds(1, 3600 * 1_000_000_000, 2).expect("bounds in order, two digits")
}

impl Walk {
    /// A buffer against these places, which are together as long as it.
    pub fn new(
        measured: Direction,
        buf: SharedBuf,
        places: &[(CardAddr, u64)],
        registrar: &dyn Registrar,
    ) -> Result<Self, ValidateError> {
        let via = Registered::new(registrar, &buf, Access::RW).map_err(ValidateError::Memory)?;
        let (mut rest, mut offset, mut stretches) = (buf.into_slice(), 0, Vec::new());
        for (at, len) in places {
            let slice = rest.split_off_front(*len as usize);
            stretches.push(Stretch { at: *at, slice, offset });
            offset += len;
        }
        let (todo, flying, begun) = (VecDeque::new(), Vec::new(), Instant::now());
        let moved = Moved::default();
        Ok(Self { stretches, measured, direction: measured, via, todo, flying, begun, len: offset, moved })
    }

    /// Forgets what was moved so far.
    pub fn reset(&mut self) {
        self.moved = Moved::default();
    }

    /// Bytes of the buffer.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True between passes.
    pub fn is_idle(&self) -> bool {
        self.todo.is_empty() && self.flying.is_empty()
    }

    /// Begins a pass.
    pub fn begin(&mut self) {
        self.begun = Instant::now();
        self.todo.extend(0..self.stretches.len());
    }

    /// Submits as much as the queue accepts; returns whether it accepted anything.
    pub fn feed(&mut self, queue: &mut DeviceQueue) -> Result<bool, ValidateError> {
        let mut any = false;
        while let Some(i) = self.todo.pop_front() {
            let stretch = &mut self.stretches[i];
            let Some(slice) = stretch.slice.take() else { continue };
            let at = DeviceAddr::Card(stretch.at);
            match queue.submit(Operation::copy(self.direction, (slice, self.via.clone()), at)) {
                Ok(ticket) => {
                    any = true;
                    self.flying.push((ticket, i));
                }
                Err(refused) => {
                    stretch.slice = refused.operation.into_slice();
                    if refused.reason != Refusal::Full {
                        return Err(ValidateError::Refused { at: stretch.at, reason: refused.reason });
                    }
                    self.todo.push_front(i);
                    return Ok(any);
                }
            }
        }
        Ok(any)
    }

    /// Submits nothing more of the pass under way.
    pub fn give_up(&mut self) {
        self.todo.clear();
    }

    /// The places on the device, and their lengths.
    pub fn places(&self) -> impl Iterator<Item = (CardAddr, u64)> + '_ {
        let ends = self.stretches.iter().skip(1).map(|s| s.offset).chain([self.len]);
        self.stretches.iter().zip(ends).map(|(s, end)| (s.at, end - s.offset))
    }

    /// The same copies for a driver, to or from the device.
    pub fn driver_copies(&self, direction: Direction) -> impl Iterator<Item = DriverCopy> {
        let stretches = self.stretches.iter().map(|stretch| stretch.offset).zip(self.places());
        stretches.map(move |(offset, (at, len))| DriverCopy { direction, host: self.via.clone(), offset, at, len })
    }

    /// Where on the device a byte of the buffer belongs.
    pub fn address_of(&self, byte: u64) -> CardAddr {
        let stretch = self.stretches.iter().rev().find(|s| s.offset <= byte);
        stretch.map_or(CardAddr::new(0), |s| s.at + (byte - s.offset))
    }

    /// Takes a slice back, if it is one of this walk's. At the end of a pass counts it.
    pub fn take(&mut self, ticket: Ticket, slice: BufferSlice, start: Instant) -> Result<(), BufferSlice> {
        let Some(i) = self.flying.iter().position(|(t, _)| *t == ticket) else { return Err(slice) };
        let (_, stretch) = self.flying.swap_remove(i);
        self.stretches[stretch].slice = Some(slice);
        if self.is_idle() {
            let now = Instant::now();
            self.moved.passes += 1;
            self.moved.bytes += self.len;
            self.moved.took = now.duration_since(start);
            let took = now.duration_since(self.begun).as_nanos();
            self.moved.times.saturating_record(u64::try_from(took).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    /// Fills the buffer with what `seed` stands for.
    pub fn fill(&mut self, seed: u64) {
        let mut block = vec![0; BLOCK];
        for Stretch { slice, offset, .. } in &mut self.stretches {
            let Some(slice) = slice else { continue };
            for at in (0..slice.len()).step_by(BLOCK) {
                let n = BLOCK.min(slice.len() - at);
                pattern(seed, *offset + at as u64, &mut block[..n]);
                let written = slice.write(at, &block[..n]);
                debug_assert!(written.is_some(), "a block of the slice");
            }
        }
    }

    /// The first byte of the buffer that is not what `seed` stands for; `None` when all are.
    pub fn wrong(&self, seed: u64) -> Option<u64> {
        let (mut block, mut got) = (vec![0; BLOCK], vec![0; BLOCK]);
        for Stretch { slice, offset, .. } in &self.stretches {
            let Some(slice) = slice else { return Some(*offset) };
            for at in (0..slice.len()).step_by(BLOCK) {
                let n = BLOCK.min(slice.len() - at);
                pattern(seed, offset + at as u64, &mut block[..n]);
                if slice.read(at, &mut got[..n]).is_none() || got[..n] != block[..n] {
                    let first = got.iter().zip(&block).position(|(a, b)| a != b).unwrap_or(0);
                    return Some(offset + (at + first) as u64);
                }
            }
        }
        None
    }
}

/// The bytes from `offset` (a multiple of 8) on of what a seed stands for.
fn pattern(seed: u64, offset: u64, into: &mut [u8]) {
    let seed = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for (i, word) in into.chunks_mut(8).enumerate() {
        let x = (seed ^ (offset / 8 + i as u64)).wrapping_mul(FACTOR);
        word.copy_from_slice(&(x ^ x >> 29).to_le_bytes()[..word.len()]);
    }
}

/// An odd number that spreads the bits of another.
const FACTOR: u64 = 0xbf58_476d_1ce4_e5b9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_one_percent() {
        let mut times = histogram();
        (1..=1000u64).for_each(|us| times.saturating_record(us * 1000 + 137));
        times.saturating_record(u64::MAX);
        for (share, us) in [(0.5, 500.0), (0.99, 990.0)] {
            let got = times.value_at_quantile(share) as f64 / 1000.0;
            assert!((got / us - 1.0).abs() < 0.01, "{share}: {got}");
        }
    }
}
