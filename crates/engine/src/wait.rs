//! Waiting for operations.

use std::time::{Duration, Instant};

use thiserror::Error;

use crate::{Channel, Completion, OpError, Refused, Transfer};

/// Why [`run`] did not move the bytes.
#[derive(Debug, Error)]
pub enum RunError<F: std::fmt::Debug> {
    /// The channel did not take the operation.
    #[error(transparent)]
    Refused(#[from] Refused<F>),
    /// The operation failed; here it is back.
    #[error("{1}")]
    Failed(Transfer<F>, OpError),
    /// The operation did not end in time. The channel still owns the buffer.
    #[error("the operation did not end within {0:?}")]
    TimedOut(Duration),
    /// The channel has halted, and its device has not let go of the buffer.
    #[error("the channel has halted: {0}")]
    Halted(String),
    /// Other operations were in flight; [`run`] is for a channel of one's own.
    #[error("other operations are in flight")]
    Busy,
}

/// How long a channel that has halted may take to end what it has: a device that still answers lets go in far less.
const LETS_GO: Duration = Duration::from_secs(2);
/// The longest wait without a look at whether the channel has halted.
const LOOK: Duration = Duration::from_millis(200);

/// Notices that a channel has halted and does not end what it has in flight: its device is gone, or deaf.
#[derive(Debug, Default)]
pub struct HaltWatch(Option<Instant>);

impl HaltWatch {
    /// Why the channel has halted, once it has been seen so for two seconds with something still in flight. To be asked now and then.
    pub fn lost<C: Channel + ?Sized>(&mut self, channel: &C) -> Option<String> {
        let why = channel.halted().filter(|_| channel.in_flight() > 0);
        if why.is_none() {
            self.0 = None;
        }
        why.filter(|_| self.0.get_or_insert_with(Instant::now).elapsed() >= LETS_GO)
    }
}

/// Runs one operation to its end on a channel that has no other, and gives the buffer back.
///
/// # Errors
/// [`RunError`].
pub fn run<C: Channel>(
    channel: &mut C,
    transfer: Transfer<C::Far>,
    timeout: Duration,
) -> Result<Transfer<C::Far>, RunError<C::Far>> {
    if channel.in_flight() > 0 {
        return Err(RunError::Busy);
    }
    let _only = channel.submit(transfer)?;
    let mut done = Vec::new();
    let deadline = Instant::now().checked_add(timeout);
    let mut watch = HaltWatch::default();
    while done.is_empty() {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if channel.wait(&mut done, left.min(LOOK)) > 0 {
            break;
        }
        if let Some(why) = watch.lost(channel) {
            return Err(RunError::Halted(why));
        }
        if left.is_zero() {
            return Err(RunError::TimedOut(timeout));
        }
    }
    let Completion { transfer, result, .. } = done.remove(0);
    match result {
        Ok(()) => Ok(transfer),
        Err(e) => Err(RunError::Failed(transfer, e)),
    }
}

/// Waits until nothing is in flight, `timeout` has passed, or the channel has halted for good, and returns what ended.
pub fn drain<C: Channel + ?Sized>(channel: &mut C, timeout: Duration) -> Vec<Completion<C::Far>> {
    let mut done = Vec::new();
    let deadline = Instant::now().checked_add(timeout);
    let mut watch = HaltWatch::default();
    while channel.in_flight() > 0 {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if channel.wait(&mut done, left.min(LOOK)) == 0 && (left.is_zero() || watch.lost(channel).is_some()) {
            break;
        }
    }
    done
}
