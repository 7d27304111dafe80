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
    /// Other operations were in flight; [`run`] is for a channel of one's own.
    #[error("other operations are in flight")]
    Busy,
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
    while done.is_empty() {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if channel.wait(&mut done, left) == 0 && left.is_zero() {
            return Err(RunError::TimedOut(timeout));
        }
    }
    let Completion { transfer, result, .. } = done.remove(0);
    match result {
        Ok(()) => Ok(transfer),
        Err(e) => Err(RunError::Failed(transfer, e)),
    }
}

/// Waits until nothing is in flight, or `timeout` has passed, and returns what ended.
pub fn drain<C: Channel + ?Sized>(channel: &mut C, timeout: Duration) -> Vec<Completion<C::Far>> {
    let mut done = Vec::new();
    let deadline = Instant::now().checked_add(timeout);
    while channel.in_flight() > 0 {
        let left = deadline.map_or(Duration::MAX, |d| d.saturating_duration_since(Instant::now()));
        if channel.wait(&mut done, left) == 0 && left.is_zero() {
            break;
        }
    }
    done
}
