//! Arbitrary bytes as a header of any container: parsing takes memory in proportion to them, whatever they claim.

use dmalane_load::container::{gguf, npy, safetensors};

use crate::MEMORY;

/// Bytes that every header may take, for limits that do not depend on its length.
const SOME: usize = 64 << 10;

/// Runs the target on one input.
pub fn target(input: &[u8]) {
    let Some((kind, header)) = input.split_first() else { return };
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    // A count may claim what a large file could hold, but not what it holds.
    let len = header.len() as u64;
    let times = match kind % 3 {
        0 => {
            drop(safetensors::parse_header(header, len + 8));
            4
        }
        1 => {
            drop(gguf::parse_header(header, len));
            7
        }
        _ => {
            drop(npy::parse_header(header, len, "array"));
            4
        }
    };
    let took = MEMORY.peak_usage() - before;
    assert!(took <= times * header.len() + SOME, "{took} bytes for a header of {}", header.len());
}
