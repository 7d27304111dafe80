//! A clock on each stage of the path.

use std::time::{Duration, Instant};

use crate::stage::{Stage, StageReport};
use crate::timeline::{Recorder, StageTimeline, Track};

/// Time and bytes of each stage, and a recording if there is one.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    clocks: [Clock; Stage::ALL.len()],
    recording: Option<Box<Recording>>,
    /// The records of other recorders.
    tracks: Vec<Track>,
}

/// The records of one thread or device.
#[derive(Debug)]
struct Recording {
    /// Its own work, nothing of which overlaps.
    work: Recorder,
    /// Operations in flight.
    operations: Recorder,
}

#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    busy: Duration,
    wall: Duration,
    bytes: u64,
    since: Option<Instant>,
    in_flight: usize,
}

impl Clocks {
    /// Runs `f`, during which the stage is busy and the pipeline does nothing else.
    pub(crate) fn time<T>(&mut self, stage: Stage, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = f();
        let end = Instant::now();
        let clock = &mut self.clocks[stage as usize];
        clock.busy += end - start;
        clock.wall += end - start;
        if let Some(recording) = &mut self.recording {
            recording.work.add(stage, start, end, 0);
        }
        result
    }

    /// Clocks that record under this name too, if `epoch`, the beginning of the timeline, is given.
    pub(crate) fn recording(name: &str, epoch: Option<Instant>) -> Self {
        let recorder = |name: String, epoch| Recorder::new(name, epoch);
        let recording = epoch.map(|epoch| {
            let operations = recorder(format!("{name}, in flight"), epoch);
            Box::new(Recording { work: recorder(name.to_owned(), epoch), operations })
        });
        Self { recording, ..Self::default() }
    }

    /// The time, if an operation that begins now is to be recorded.
    pub(crate) fn begin(&self) -> Option<Instant> {
        self.recording.as_ref().map(|_| Instant::now())
    }

    /// Records an operation that began then and has ended.
    pub(crate) fn ended(&mut self, stage: Stage, begun: Option<Instant>, bytes: u64) {
        if let (Some(recording), Some(begun)) = (&mut self.recording, begun) {
            recording.operations.add(stage, begun, Instant::now(), bytes);
        }
    }

    /// Runs `f`, in which the pipeline waits for a stage or does its work, but which does not measure how long the
    /// stage was busy: [`Clocks::in_flight`] does.
    pub(crate) fn time_wall<T>(&mut self, stage: Stage, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = f();
        let end = Instant::now();
        self.clocks[stage as usize].wall += end - start;
        result
    }

    pub(crate) fn bytes(&mut self, stage: Stage, bytes: u64) {
        self.clocks[stage as usize].bytes += bytes;
        if let Some(recording) = &mut self.recording {
            recording.work.bytes(stage, bytes);
        }
    }

    /// Notes how many operations an asynchronous stage has in flight: the time with any counts as busy.
    pub(crate) fn in_flight(&mut self, stage: Stage, in_flight: usize) {
        let clock = &mut self.clocks[stage as usize];
        clock.in_flight = clock.in_flight.max(in_flight);
        match (clock.since, in_flight > 0) {
            (None, true) => clock.since = Some(Instant::now()),
            (Some(since), false) => {
                clock.busy += since.elapsed();
                clock.since = None;
            }
            _ => {}
        }
    }

    /// Adds times, bytes and recordings of others.
    pub(crate) fn add(&mut self, mut other: Self) {
        for (mine, theirs) in self.clocks.iter_mut().zip(other.clocks) {
            mine.busy += theirs.busy;
            mine.wall += theirs.wall;
            mine.bytes += theirs.bytes;
            mine.in_flight += theirs.in_flight;
        }
        self.tracks.append(&mut other.take_tracks());
    }

    /// Everything that was recorded; `None` if nothing was to be.
    pub(crate) fn timeline(&mut self) -> Option<StageTimeline> {
        let tracks = self.take_tracks();
        (!tracks.is_empty()).then_some(StageTimeline { tracks })
    }

    /// Takes what was recorded.
    fn take_tracks(&mut self) -> Vec<Track> {
        let own = self.recording.take().map(|recording| [recording.work, recording.operations]);
        let own = own.into_iter().flatten().filter_map(Recorder::into_track);
        own.chain(self.tracks.drain(..)).collect()
    }

    /// Adds the tracks of others.
    pub(crate) fn tracks(&mut self, tracks: Vec<Track>) {
        self.tracks.extend(tracks);
    }

    /// All stages in the order of the path.
    pub(crate) fn stages(&self) -> impl Iterator<Item = StageReport> {
        Stage::ALL.into_iter().map(|stage| self.get(stage))
    }

    fn get(&self, stage: Stage) -> StageReport {
        let clock = &self.clocks[stage as usize];
        let Clock { busy, wall, bytes, in_flight, .. } = *clock;
        StageReport { stage, busy, wall, bytes, in_flight }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_operations_count_once() {
        let mut c = Clocks::default();
        let start = Instant::now();
        for n in [1, 2, 0, 0, 1, 0] {
            c.in_flight(Stage::Read, n);
            std::thread::sleep(Duration::from_millis(2));
        }
        let busy = c.get(Stage::Read).busy;
        assert!(busy >= Duration::from_millis(6) && busy < start.elapsed(), "{busy:?}");
        assert_eq!(Stage::ALL.map(|s| s as usize), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
