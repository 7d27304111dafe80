//! A hostile client of a device served over vfio-user: whatever it sends, no request outside of the device reaches it.

/// Runs the target on one input.
pub fn target(bytes: &[u8]) {
    dmalane_vfio_user::fuzzing::fuzz_client(bytes);
}
