//! Timelines: which work was under way when, in bounded memory.

use std::time::{Duration, Instant};

use crate::Stage;

/// Spans that a lane keeps at most. Where there are more, short ones that lie close together become one.
const MOST: usize = 1 << 14;
/// The first length to which spans grow.
const GRAIN: Duration = Duration::from_micros(1);

/// A recording of a load, from its beginning on.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Who worked: threads, the device, and what was in flight for them.
    pub lanes: Vec<Lane>,
}

/// The work of one thread, or the operations of one queue.
#[derive(Clone, Debug)]
pub struct Lane {
    /// Its name, such as `worker 0` or `worker 0, in flight`.
    pub name: String,
    /// Its work, in the order in which it ended. Spans overlap where operations were in flight together.
    pub work: Vec<Work>,
}

/// A span of time that was spent on a stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// The stage.
    pub stage: Stage,
    /// When it began, from the beginning of the load.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
    /// Bytes that were moved.
    pub bytes: u64,
    /// The number of operations, or steps of work, that the span stands for.
    pub count: u64,
}

impl Lane {
    /// The work in rows, in each of which nothing overlaps; as few as there can be.
    pub fn rows(&self) -> Vec<Vec<Work>> {
        let mut work = self.work.clone();
        work.sort_by_key(|work| work.start);
        let mut rows: Vec<Vec<Work>> = Vec::new();
        for work in work {
            let free = rows.iter_mut().find(|row| row.last().is_none_or(|last| last.end <= work.start));
            match free {
                Some(row) => row.push(work),
                None => rows.push(vec![work]),
            }
        }
        rows
    }
}

/// Records a lane.
#[derive(Debug)]
pub(crate) struct Recorder {
    epoch: Instant,
    lane: Lane,
    /// Spans of a stage that together take no longer than this are one.
    grain: Option<Duration>,
}

impl Recorder {
    /// An empty lane of a timeline that begins at `epoch`.
    pub(crate) fn new(name: String, epoch: Instant) -> Self {
        Self { epoch, lane: Lane { name, work: Vec::new() }, grain: None }
    }

    /// Adds a span.
    pub(crate) fn add(&mut self, stage: Stage, start: Instant, end: Instant, bytes: u64) {
        let since = |at: Instant| at.saturating_duration_since(self.epoch);
        let work = Work { stage, start: since(start), end: since(end), bytes, count: 1 };
        let last = self.lane.work.iter_mut().rev().take(Stage::ALL.len()).find(|last| last.stage == stage);
        if let (Some(grain), Some(last)) = (self.grain, last)
            && last.takes(&work, grain)
        {
            return;
        }
        if self.lane.work.len() >= MOST {
            self.thin();
        }
        self.lane.work.push(work);
    }

    /// Adds bytes to the last span of a stage.
    pub(crate) fn bytes(&mut self, stage: Stage, bytes: u64) {
        if let Some(last) = self.lane.work.iter_mut().rev().take(Stage::ALL.len()).find(|last| last.stage == stage) {
            last.bytes += bytes;
        }
    }

    /// The lane; `None` if nothing was recorded.
    pub(crate) fn into_lane(self) -> Option<Lane> {
        (!self.lane.work.is_empty()).then_some(self.lane)
    }

    /// Makes spans one that lie close together, until there is room for as many again.
    fn thin(&mut self) {
        while self.lane.work.len() > MOST / 2 {
            let grain = self.grain.map_or(GRAIN, |grain| grain.saturating_mul(2));
            self.grain = Some(grain);
            let mut last: [Option<usize>; Stage::ALL.len()] = [None; Stage::ALL.len()];
            let mut kept: Vec<Work> = Vec::with_capacity(MOST);
            for work in self.lane.work.drain(..) {
                let place = &mut last[work.stage as usize];
                match place.is_some_and(|at| kept[at].takes(&work, grain)) {
                    true => {}
                    false => {
                        *place = Some(kept.len());
                        kept.push(work);
                    }
                }
            }
            self.lane.work = kept;
        }
    }
}

impl Work {
    /// Takes up a later span of the same stage, if both together take no longer than `grain`.
    fn takes(&mut self, later: &Self, grain: Duration) -> bool {
        let near = later.end.saturating_sub(self.start) <= grain;
        if near {
            (self.start, self.end) = (self.start.min(later.start), self.end.max(later.end));
            self.bytes += later.bytes;
            self.count += later.count;
        }
        near
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder() -> (Recorder, Instant) {
        let epoch = Instant::now();
        (Recorder::new("test".to_owned(), epoch), epoch)
    }

    #[test]
    fn a_long_recording_takes_bounded_memory_and_loses_no_bytes() {
        let (mut recorder, epoch) = recorder();
        let n = 40 * MOST as u64;
        for i in 0..n {
            let at = epoch + Duration::from_micros(3 * i);
            let stage = if i % 7 == 0 { Stage::Bind } else { Stage::Read };
            recorder.add(stage, at, at + Duration::from_micros(2), 5);
            assert!(recorder.lane.work.len() <= MOST && recorder.lane.work.capacity() <= 2 * MOST);
        }
        let lane = recorder.into_lane().unwrap();
        assert!(lane.work.len() > MOST / 8, "{} of {MOST}: no coarser than need be", lane.work.len());
        assert_eq!(lane.work.iter().map(|w| w.count).sum::<u64>(), n);
        assert_eq!(lane.work.iter().map(|w| w.bytes).sum::<u64>(), 5 * n);
        let end = lane.work.iter().map(|w| w.end).max().unwrap();
        assert_eq!(end, Duration::from_micros(3 * (n - 1) + 2));
    }

    #[test]
    fn spans_that_overlap_are_in_rows_of_their_own() {
        let (mut recorder, epoch) = recorder();
        let at = |ms| epoch + Duration::from_millis(ms);
        for (start, end) in [(0, 4), (1, 5), (2, 3), (4, 6), (5, 9)] {
            recorder.add(Stage::Read, at(start), at(end), 0);
        }
        recorder.bytes(Stage::Read, 7);
        let rows = recorder.into_lane().unwrap().rows();
        let starts: Vec<Vec<u128>> = rows.iter().map(|row| row.iter().map(|w| w.start.as_millis()).collect()).collect();
        assert_eq!(starts, [vec![0, 4], vec![1, 5], vec![2]]);
        assert_eq!(rows.iter().flatten().map(|w| w.bytes).sum::<u64>(), 7);
        assert!(Recorder::new(String::new(), epoch).into_lane().is_none());
    }
}
