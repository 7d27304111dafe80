//! How a file device is used in fact, and why not in a better way.

use std::fmt;

use thiserror::Error;

use super::probe::Count;
use super::{IoBackend, ProbeError};
use crate::Fallback;

/// The I/O backend of a file device, and why not a better one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileDeviceHow {
    /// The backend.
    pub backend: IoBackend,
    /// Bypasses the page cache.
    pub direct: bool,
    /// A probe has found that it works.
    pub probed: bool,
    /// Why not a better one; empty when it is the best.
    pub reasons: Vec<BackendReason>,
    pub(super) count: Count,
}

/// Why a file device has its backend, and not a better one.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum BackendReason {
    /// [`FileDeviceOptions::trust`](crate::FileDeviceOptions::trust) names it.
    #[error("trusted without a probe")]
    Trusted,
    /// [`FileDeviceOptions::probe_at`](crate::FileDeviceOptions::probe_at) names no address.
    #[error("io_uring was not tried: that needs an offset (file:PATH,probe-at=OFFSET, FileDeviceOptions::probe_at)")]
    NotProbed,
    /// A better one is not available, or failed its probe.
    #[error("not {backend}: {error}")]
    Unfit {
        /// The better one.
        backend: IoBackend,
        /// The finding of its probe.
        error: ProbeError,
    },
    /// The kernel refused a better one.
    #[error(transparent)]
    Fallback(#[from] Fallback),
}

impl fmt::Display for FileDeviceHow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.backend)?;
        f.write_str(if self.direct { ", direct I/O" } else { "" })?;
        f.write_str(if self.probed { ", probed" } else { "" })?;
        f.write_str(if self.count == Count::Requests { ", completions count requests" } else { "" })?;
        for (i, reason) in self.reasons.iter().enumerate() {
            write!(f, "{}{reason}", if i == 0 { " (" } else { "; " })?;
        }
        f.write_str(if self.reasons.is_empty() { "" } else { ")" })
    }
}
