//! A hostile client of a device served over vfio-user: whatever it sends, the device is asked for nothing that it does not have.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| dmalane_vfio::user::fuzzing::fuzz_client(bytes));
