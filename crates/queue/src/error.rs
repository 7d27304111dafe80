//! Why an operation was refused, why one failed, and why a queue has stopped.

use std::error::Error as StdError;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use dmalane_addr::{CardAddr, DeviceVa, FileOffset};
use dmalane_dma::{DmaFault, error_chain};
use thiserror::Error;

use crate::Capabilities;

/// Why an operation failed. The bytes that were moved before are unspecified, but for the count in its completion.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum OpError {
    /// The IOMMU refused the device an access to host memory.
    #[error(transparent)]
    Fault(#[from] DmaFault),
    /// The device has no memory at this address.
    #[error("the device has no memory at {0}")]
    NoCardMemory(CardAddr),
    /// The device's MMU does not translate this address, or not for this access.
    #[error("the device's MMU refused {0}")]
    MmuFault(DeviceVa),
    /// The device refused or failed the operation with a status of its own.
    #[error("the device failed the operation with status {status:#x}")]
    Device {
        /// The status as the device gave it.
        status: u32,
    },
    /// The file ended early: it is shorter than the read, perhaps because another process truncated it.
    #[error("the file ended at {at}, {missing} bytes early")]
    EndOfFile {
        /// Where it ended.
        at: FileOffset,
        /// Bytes that were expected from there on.
        missing: u64,
    },
    /// The kernel failed a file operation.
    #[error("I/O error at {at}: {}", std::io::Error::from_raw_os_error(*errno))]
    Io {
        /// The first byte of the request that failed.
        at: FileOffset,
        /// The error number.
        errno: i32,
    },
    /// The device answered a request with an impossible count: its effect is unknown.
    #[error("the device answered a request for {asked} bytes at {at} with {got}")]
    BadCount {
        /// The first byte of the request.
        at: FileOffset,
        /// Its bytes.
        asked: u64,
        /// The answer.
        got: u64,
    },
    /// A comparison found a difference.
    #[error("the memories differ at byte {offset}")]
    Differs {
        /// The first byte that differs, counted over what is compared.
        offset: u64,
    },
    /// The operation was cancelled before it was done.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The queue was stopped or reset before the operation ended.
    #[error("the queue stopped")]
    Stopped(#[source] StopReason),
    /// A queue inside this one refused the operation after this one had accepted it.
    #[error(transparent)]
    Refused(Refusal),
}

impl From<Refusal> for OpError {
    fn from(reason: Refusal) -> Self {
        match reason {
            Refusal::Stopped(reason) => Self::Stopped(reason),
            reason => Self::Refused(reason),
        }
    }
}

/// Why a queue did not accept an operation.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// As many operations are in flight as the queue holds; poll, then try again.
    #[error("the queue is full")]
    Full,
    /// An operation on no bytes.
    #[error("the operation is empty")]
    Empty,
    /// More bytes than one operation may move.
    #[error("an operation of {len} bytes is longer than {max}")]
    TooLong {
        /// Bytes asked for.
        len: u64,
        /// [`Limits::max_len`](crate::Limits::max_len).
        max: u64,
    },
    /// A gather list of more parts than one operation may have.
    #[error("a gather list of {parts} parts is longer than {max}")]
    TooManyParts {
        /// Parts of the list.
        parts: usize,
        /// [`Limits::max_parts`](crate::Limits::max_parts).
        max: usize,
    },
    /// The two sides of a copy within device memory have bytes in common.
    #[error("the two sides of a copy within device memory overlap")]
    Overlap,
    /// The target would run past the top of its address space.
    #[error("the target runs past the top of its address space")]
    PastTheTop,
    /// The host memory has no registration, or one of other memory or of another device.
    #[error("the host memory is not registered with this device")]
    NotRegistered,
    /// The registration does not let the device write (device to host) or read (host to device).
    #[error("the registration does not permit this direction")]
    NotPermitted,
    /// The queue does not have these capabilities.
    #[error("the queue does not support {}", .0.iter_names().map(|(name, _)| name).collect::<Vec<_>>().join(" | "))]
    Unsupported(Capabilities),
    /// The device moves whole blocks only (direct I/O): address, length and host memory must be multiples of this.
    #[error("addresses, lengths and memory must be multiples of {align} bytes here")]
    Misaligned {
        /// Bytes.
        align: u64,
    },
    /// The two sides of an operation are not of the same length, or its shape does not cover them.
    #[error("the two sides of the operation do not match")]
    Mismatch,
    /// The queue has stopped: for good, or until it is restarted.
    #[error("the queue has stopped")]
    Stopped(#[source] StopReason),
}

/// Why a queue has stopped.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum StopReason {
    /// [`Queue::stop`](crate::Queue::stop) was called; the text is the caller's.
    #[error("{0}")]
    Requested(Arc<str>),
    /// No operation has ended for this long.
    #[error("nothing ended for {0:?}")]
    Timeout(Duration),
    /// The device reported an error after which it cannot continue.
    #[error("the device failed")]
    Device(#[source] StopCause),
    /// The device violated its interface.
    #[error("the device violated its interface")]
    Protocol(#[source] StopCause),
    /// The device is gone until it is opened again: it was removed, its driver has lost it, or its server has ended.
    #[error("the device is gone")]
    Lost(#[source] StopCause),
    /// A call of the operating system or of the device's driver failed.
    #[error("the device's driver failed")]
    Driver(#[source] StopCause),
}

/// The error that stopped a queue, shared by all operations that ended with it. `downcast_ref` gives the type of the
/// crate that drives the device. Two are equal if they read the same.
#[derive(Clone, Debug)]
pub struct StopCause(Arc<dyn StdError + Send + Sync>);

impl<E: Into<Box<dyn StdError + Send + Sync>>> From<E> for StopCause {
    fn from(error: E) -> Self {
        Self(error.into().into())
    }
}

impl Deref for StopCause {
    type Target = dyn StdError + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Display for StopCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for StopCause {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || error_chain(&**self) == error_chain(&**other)
    }
}

impl Eq for StopCause {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_capabilities_that_are_missing() {
        let refusal = Refusal::Unsupported(Capabilities::FENCE | Capabilities::FILL);
        assert_eq!(refusal.to_string(), "the queue does not support FILL | FENCE");
    }

    #[test]
    fn the_error_that_stopped_a_queue_keeps_its_type() {
        let reason = StopReason::Driver(std::io::Error::from_raw_os_error(5).into());
        let StopReason::Driver(cause) = &reason else { panic!("{reason}") };
        assert_eq!(cause.downcast_ref::<std::io::Error>().and_then(|e| e.raw_os_error()), Some(5));
        assert!(error_chain(&reason).ends_with(&cause.to_string()));
        assert!(StdError::source(&reason).is_some_and(|source| source.is::<std::io::Error>()));
        assert_ne!(reason, StopReason::Driver("another".into()));
    }
}
