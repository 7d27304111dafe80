//! A hostile card: whatever it answers and writes back, the driver gives every buffer back exactly once.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| dmalane_sim::fuzzing::fuzz_driver(bytes));
