//! Arbitrary bytes as a header of any container: parsing takes memory and time in proportion to them, whatever they
//! claim.

use std::time::Duration;

use dmalane_load::CONTAINERS;
use rustix::time::{ClockId, clock_gettime};

use crate::MEMORY;

/// Bytes that every header may take, for limits that do not depend on its length.
const SOME: usize = 64 << 10;

/// Time of this thread for each byte, in the slowest build, and for every header.
const PER_BYTE: Duration = Duration::from_micros(100);
const AT_ALL: Duration = Duration::from_millis(100);

/// Runs the target on one input.
pub fn target(input: &[u8]) {
    let Some((kind, header)) = input.split_first() else { return };
    let time = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
    let (before, start) = (MEMORY.current_usage(), time());
    MEMORY.reset_peak_usage();
    // A count may claim what a large file could hold, but not what it holds.
    let len = header.len() as u64;
    // The last kind, raw files, has no header.
    let kinds = &CONTAINERS[..CONTAINERS.len() - 1];
    let parse = kinds[usize::from(*kind) % kinds.len()].parse_header.expect("a kind with a header");
    // A whole file, or one with eight bytes before its header, as safetensors has.
    for file in [len, len + 8] {
        drop(parse(header, file, "array"));
    }
    let (took, bytes) = (time().saturating_sub(start), MEMORY.peak_usage() - before);
    assert!(bytes <= 4 * header.len() + SOME, "{bytes} bytes for a header of {}", header.len());
    assert!(took <= PER_BYTE * header.len() as u32 + AT_ALL, "{took:?} for a header of {} bytes", header.len());
}
