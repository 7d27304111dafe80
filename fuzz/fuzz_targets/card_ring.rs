//! A hostile driver: whatever it puts in registers, rings and page tables, the card touches only what is mapped for it.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| dmalane_sim::fuzzing::fuzz_ring(bytes));
