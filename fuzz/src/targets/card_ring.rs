//! A hostile driver: whatever it puts in registers, rings and page tables, the card touches only what is mapped for it.

/// Runs the target on one input.
pub fn target(bytes: &[u8]) {
    dmalane_sim::fuzzing::fuzz_ring(bytes);
}
