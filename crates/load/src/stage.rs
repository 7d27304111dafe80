//! The stages of the path from file to device.

use std::fmt;
use std::time::Duration;

/// A stage of the path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Stage {
    /// Parsing headers, and giving tensors their places on the device.
    Parse,
    /// Taking memory from the heap, pages faulted in.
    Allocate,
    /// Reads in flight.
    Read,
    /// Pinning: giving buffers frames and a scatter-gather table.
    Register,
    /// Entering buffers into the IOMMU's page tables.
    Map,
    /// Hashing the bytes as they arrive.
    Checksum,
    /// Moving bytes to the card.
    Transfer,
    /// Binding tensors in the device's page tables.
    Bind,
    /// Reading back through the card's MMU, and comparing.
    Verify,
}

impl Stage {
    /// All stages in the order of the path.
    pub const ALL: [Self; 9] = [
        Self::Parse,
        Self::Allocate,
        Self::Read,
        Self::Register,
        Self::Map,
        Self::Checksum,
        Self::Transfer,
        Self::Bind,
        Self::Verify,
    ];
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Parse => "parse",
            Self::Allocate => "allocate",
            Self::Read => "read",
            Self::Register => "register",
            Self::Map => "map",
            Self::Checksum => "checksum",
            Self::Transfer => "transfer",
            Self::Bind => "bind",
            Self::Verify => "verify",
        })
    }
}

/// One stage of a load.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StageReport {
    /// Which stage.
    pub stage: Stage,
    /// Time in which the stage had work under way. Stages overlap, so these may add up to more than the wall time.
    pub busy: Duration,
    /// Time in which the pipeline did this stage's work or waited for it, and nothing else. These add up to about the
    /// wall time, and show where it went.
    pub wall: Duration,
    /// Bytes that went through.
    pub bytes: u64,
    /// The most operations in flight at once, summed over workers; 0 of a stage that does one thing at a time.
    pub in_flight: usize,
}
