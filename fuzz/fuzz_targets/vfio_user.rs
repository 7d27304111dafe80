//! A hostile client of a device served over vfio-user: whatever it sends, no request outside of the device reaches it.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| dmalane_vfio_user::fuzzing::fuzz_client(bytes));
