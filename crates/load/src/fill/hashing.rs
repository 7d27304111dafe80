//! Who hashes, and when: workers between their reads, a worker with nothing else to do, or a thread.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dmalane_dma::lock;

use super::order::Turn;
use super::sink::DeviceSink;
use super::state::{POLL_INTERVAL, State};
use crate::clock::Clocks;
use crate::stage::Stage;

/// The longest that a worker with nothing to do waits for another thread.
const PAUSE: Duration = Duration::from_millis(1);

impl State<'_, '_> {
    /// Hashes what workers do not get to, until nothing comes any more or the job is stopped.
    pub fn hash_in_background(&self, mut clocks: Clocks) -> Clocks {
        let _stop = StopOnPanic(&self.stop);
        let mut overdue = false;
        while !self.stop.load(Ordering::Relaxed) {
            let progress = lock(&self.progress);
            let wanted = progress.order.is_behind(self.hash_thread.leaves) || progress.nothing_comes || overdue;
            if wanted && progress.order.is_ready() && !self.device_is_full() {
                drop(progress);
                self.hash(&mut clocks);
                overdue = false;
                continue;
            }
            if progress.nothing_comes {
                break;
            }
            // A device may have room again although nothing of this job has ended, and workers may be long at a read.
            let waited = self.hash_thread.hashable.wait_timeout(progress, POLL_INTERVAL);
            overdue = waited.unwrap_or_else(PoisonError::into_inner).1.timed_out();
        }
        clocks
    }

    /// Hashes in a worker that has just copied something, which is in its cache, or that has nothing else to do. True
    /// when there was something.
    pub fn hash_in_worker(&self, is_idle: bool, clocks: &mut Clocks) -> bool {
        (!self.hash_thread.runs() || is_idle && self.hash_thread.leaves > 0) && self.hash(clocks)
    }

    /// Notes that nothing will have to be hashed any more.
    pub fn nothing_comes(&self) {
        lock(&self.progress).nothing_comes = true;
        self.hash_thread.hashable.notify_all();
    }

    /// Fragments that were hashed and handed on until now, for [`State::pause`].
    pub fn handed_on(&self) -> u64 {
        self.hash_thread.handed.load(Ordering::Relaxed)
    }

    /// Waits a little for another thread: until it has handed on a fragment more than `seen`, if it hashes.
    pub fn pause(&self, seen: u64) {
        if !self.hash_thread.runs() {
            return std::thread::sleep(PAUSE);
        }
        let progress = lock(&self.progress);
        if self.handed_on() == seen {
            drop(self.hash_thread.handed_on.wait_timeout(progress, PAUSE));
        }
    }

    /// The timeout of a worker's wait for the disk; short where blocks hashed meanwhile must go to the device.
    pub fn disk_timeout(&self) -> Duration {
        if self.hash_thread.runs() && self.device.is_some() { PAUSE } else { POLL_INTERVAL }
    }

    /// Drives the device, and hashes for it, until it has everything that has arrived or the job is stopped.
    pub fn drain(&self, mut clocks: Clocks) -> Clocks {
        while self.device.is_some() && !self.stopped() {
            let seen = self.handed_on();
            if lock(&self.progress).undelivered == 0 {
                break;
            }
            let hashed = self.hash_in_worker(false, &mut clocks);
            if !self.drive(if hashed { Duration::ZERO } else { POLL_INTERVAL }) && !hashed {
                self.pause(seen);
            }
        }
        clocks
    }

    pub fn device_is_full(&self) -> bool {
        self.device.as_ref().is_some_and(DeviceSink::is_full)
    }

    /// Hashes the fragments whose turn it is and sends them on: with a device only one, so that it is transferred while
    /// it is in the processor's cache, and none while the device has no room. True when there was one.
    fn hash(&self, clocks: &mut Clocks) -> bool {
        let mut any = false;
        // A job that was stopped has no use for the hashes of what stays.
        while !self.device_is_full() && (self.device.is_some() || !self.stop.load(Ordering::Relaxed)) {
            let turn = lock(&self.progress).order.begin();
            let Some(Turn { at, mut hash, mut fragment, len }) = turn else { break };
            clocks.time(Stage::Checksum, || {
                if fragment.slice.with_bytes(|bytes| hash.write(&bytes[..len])).is_none() {
                    // A device may write to it.
                    let view = fragment.slice.as_volatile_slice().sub(0, len);
                    view.into_iter().for_each(|view| view.for_each_block(|block| hash.write(block)));
                }
            });
            clocks.bytes(Stage::Checksum, len as u64);
            let sent = {
                let mut progress = lock(&self.progress);
                progress.order.end(at, fragment.end(), hash);
                self.keep_hashed(&mut progress, fragment)
            };
            sent.into_iter().for_each(|fragment| self.send(fragment));
            any = true;
            if self.device.is_some() {
                if self.hash_thread.runs() {
                    let _progress = lock(&self.progress);
                    self.hash_thread.handed.fetch_add(1, Ordering::Relaxed);
                    self.hash_thread.handed_on.notify_all();
                }
                break;
            }
        }
        any
    }
}

/// Stops the job when the thread that holds it panics: others wait for what it does.
struct StopOnPanic<'s>(&'s AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}
