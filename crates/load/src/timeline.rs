//! Timelines: which work was under way when, in bounded memory.

use std::time::{Duration, Instant};

use crate::stage::Stage;

/// Spans that a track keeps at most. Where there are more, short ones that lie close together become one.
const MOST: usize = 1 << 14;
/// The first length to which spans grow.
const GRAIN: Duration = Duration::from_micros(1);

/// A recording of a load, from its beginning on.
#[derive(Clone, Debug, Default)]
pub struct StageTimeline {
    /// Who worked: threads, the device, and what was in flight for them.
    pub tracks: Vec<Track>,
}

/// The work of one thread, or the operations of one queue.
#[derive(Clone, Debug)]
pub struct Track {
    /// Its name, such as `worker 0` or `worker 0, in flight`.
    pub name: String,
    /// Its work, in the order in which it ended. Spans overlap where operations were in flight together.
    pub work: Vec<StageSpan>,
}

/// A span of time that was spent on a stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StageSpan {
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

impl Track {
    /// The work in rows, in each of which nothing overlaps; as few as there can be.
    pub fn rows(&self) -> Vec<Vec<StageSpan>> {
        let mut work = self.work.clone();
        work.sort_by_key(|work| work.start);
        let mut rows: Vec<Vec<StageSpan>> = Vec::new();
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

/// Records a track.
#[derive(Debug)]
pub(crate) struct Recorder {
    epoch: Instant,
    track: Track,
    /// Spans of a stage that together take no longer than this are one.
    grain: Option<Duration>,
}

impl Recorder {
    /// An empty track of a timeline that begins at `epoch`.
    pub(crate) fn new(name: String, epoch: Instant) -> Self {
        Self { epoch, track: Track { name, work: Vec::new() }, grain: None }
    }

    /// Adds a span.
    pub(crate) fn add(&mut self, stage: Stage, start: Instant, end: Instant, bytes: u64) {
        let since = |at: Instant| at.saturating_duration_since(self.epoch);
        let work = StageSpan { stage, start: since(start), end: since(end), bytes, count: 1 };
        let last = self.track.work.iter_mut().rev().take(Stage::ALL.len()).find(|last| last.stage == stage);
        if let (Some(grain), Some(last)) = (self.grain, last)
            && last.takes(&work, grain)
        {
            return;
        }
        if self.track.work.len() >= MOST {
            self.thin();
        }
        self.track.work.push(work);
    }

    /// Adds bytes to the last span of a stage.
    pub(crate) fn bytes(&mut self, stage: Stage, bytes: u64) {
        if let Some(last) = self.track.work.iter_mut().rev().take(Stage::ALL.len()).find(|last| last.stage == stage) {
            last.bytes += bytes;
        }
    }

    /// The track; `None` if nothing was recorded.
    pub(crate) fn into_track(self) -> Option<Track> {
        (!self.track.work.is_empty()).then_some(self.track)
    }

    /// Makes spans one that lie close together, until there is room for as many again.
    fn thin(&mut self) {
        while self.track.work.len() > MOST / 2 {
            let grain = self.grain.map_or(GRAIN, |grain| grain.saturating_mul(2));
            self.grain = Some(grain);
            let mut last: [Option<usize>; Stage::ALL.len()] = [None; Stage::ALL.len()];
            let mut kept: Vec<StageSpan> = Vec::with_capacity(MOST);
            for work in self.track.work.drain(..) {
                let place = &mut last[work.stage as usize];
                match place.is_some_and(|at| kept[at].takes(&work, grain)) {
                    true => {}
                    false => {
                        *place = Some(kept.len());
                        kept.push(work);
                    }
                }
            }
            self.track.work = kept;
        }
    }
}

impl StageSpan {
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
            assert!(recorder.track.work.len() <= MOST && recorder.track.work.capacity() <= 2 * MOST);
        }
        let track = recorder.into_track().unwrap();
        assert!(track.work.len() > MOST / 8, "{} of {MOST}: no coarser than need be", track.work.len());
        assert_eq!(track.work.iter().map(|w| w.count).sum::<u64>(), n);
        assert_eq!(track.work.iter().map(|w| w.bytes).sum::<u64>(), 5 * n);
        let end = track.work.iter().map(|w| w.end).max().unwrap();
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
        let rows = recorder.into_track().unwrap().rows();
        let starts: Vec<Vec<u128>> = rows.iter().map(|row| row.iter().map(|w| w.start.as_millis()).collect()).collect();
        assert_eq!(starts, [vec![0, 4], vec![1, 5], vec![2]]);
        assert_eq!(rows.iter().flatten().map(|w| w.bytes).sum::<u64>(), 7);
        assert!(Recorder::new(String::new(), epoch).into_track().is_none());
    }
}
