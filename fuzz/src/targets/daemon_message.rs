//! A hostile client of the daemon: whatever it says, it gets an answer, and no more than it may have.

/// Runs the target on one input.
pub fn target(bytes: &[u8]) {
    dmalane_daemon::fuzzing::fuzz_messages(bytes);
}
