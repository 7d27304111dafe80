//! Which channel of a device moved what, and when.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dmalane_addr::CardAddr;
use dmalane_dma::lock;
use dmalane_queue::{Direction, Piece, Policy};

use crate::stage::Stage;
use crate::timeline::{Recorder, Track};

/// A recording of the pieces that channels were given, while there is an epoch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Channels(Arc<Mutex<Option<Recording>>>);

#[derive(Debug)]
struct Recording {
    epoch: Instant,
    /// For each channel what it has moved, and the pieces that it has.
    channels: Vec<(Recorder, VecDeque<(Piece, Instant)>)>,
}

impl Channels {
    /// Records from now on, on a timeline that began at `epoch`.
    pub fn begin(&self, epoch: Instant) {
        *lock(&self.0) = Some(Recording { epoch, channels: Vec::new() });
    }

    /// Ends the recording: a track for each channel that moved anything.
    pub fn end(&self) -> Vec<Track> {
        let channels = lock(&self.0).take().into_iter().flat_map(|recording| recording.channels);
        channels.filter_map(|(recorder, _)| recorder.into_track()).collect()
    }

    /// The same policy, recorded.
    pub fn of(&self, policy: Box<dyn Policy>) -> Box<dyn Policy> {
        Box::new(Recorded { policy, channels: self.clone() })
    }
}

struct Recorded {
    policy: Box<dyn Policy>,
    channels: Channels,
}

impl Policy for Recorded {
    fn arrive(&mut self, transfer: u64, direction: Direction, at: Option<CardAddr>, len: u64, channels: usize) {
        if let Some(Recording { epoch, channels: known }) = &mut *lock(&self.channels.0) {
            for i in known.len()..channels {
                known.push((Recorder::new(format!("channel {i}, in flight"), *epoch), VecDeque::new()));
            }
        }
        self.policy.arrive(transfer, direction, at, len, channels);
    }

    fn next(&mut self, channel: usize, now: Duration) -> Option<Piece> {
        let piece = self.policy.next(channel, now)?;
        if let Some((_, flying)) = lock(&self.channels.0).as_mut().and_then(|all| all.channels.get_mut(channel)) {
            flying.push_back((piece, Instant::now()));
        }
        Some(piece)
    }

    fn ended(&mut self, channel: usize, piece: &Piece, now: Duration, moved: bool) {
        if let Some((recorder, flying)) = lock(&self.channels.0).as_mut().and_then(|all| all.channels.get_mut(channel))
            && let Some(place) = flying.iter().position(|(known, _)| known == piece)
            && let Some((_, begun)) = flying.remove(place)
            && moved
        {
            recorder.add(Stage::Transfer, begun, Instant::now(), piece.len);
        }
        self.policy.ended(channel, piece, now, moved);
    }

    fn forget(&mut self, transfer: u64) {
        self.policy.forget(transfer);
    }

    fn uses(&self, channel: usize, channels: usize) -> bool {
        self.policy.uses(channel, channels)
    }
}
