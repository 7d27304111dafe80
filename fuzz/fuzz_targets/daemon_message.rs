//! A hostile client of the daemon: whatever it says, it gets an answer, and no more than it may have.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| dmalane_daemon::fuzzing::fuzz_messages(bytes));
