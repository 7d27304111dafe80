//! A hostile card: whatever it answers and writes back, the driver gives every buffer back exactly once.

/// Runs the target on one input.
pub fn target(bytes: &[u8]) {
    dmalane_sim::fuzzing::fuzz_driver(bytes);
}
