//! Memory that is never freed, because a device or the kernel may still access it.

use std::any::Any;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::lock;

/// Statics are never dropped.
static MEMORY: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes of memory that this process will never free, because a device, its driver or the kernel was not done with them
/// within some seconds of their queue being dropped: a sign of a hanging disk, device or network file system.
pub fn quarantined_bytes() -> u64 {
    BYTES.load(Ordering::Relaxed)
}

/// Keeps this for good, and counts `bytes` bytes.
pub fn quarantine(memory: impl Any + Send, bytes: u64) {
    lock(&MEMORY).push(Box::new(memory));
    BYTES.fetch_add(bytes, Ordering::Relaxed);
}
