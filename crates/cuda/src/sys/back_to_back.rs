//! Copies back to back on plain streams: what the queue is measured beside.

use std::error::Error as StdError;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use dmalane_device::{DriverCopies, DriverCopy};
use dmalane_queue::{DeviceAddr, Direction, Refusal, Registered};

use super::RawHandle;
use super::context::Context;
use super::host::Pins;
use super::ranges::check_use;
use crate::Error;

/// A stream for each direction; that of copies to the host is the last.
pub(crate) struct BackToBack {
    context: Arc<Context>,
    streams: Vec<RawHandle>,
    registrar: Pins,
}

impl BackToBack {
    pub(crate) fn new(context: &Arc<Context>, registrar: Pins) -> Result<Self, Error> {
        let mut this = Self { context: context.clone(), streams: Vec::new(), registrar };
        let (driver, _current) = (context.driver, context.current()?);
        for _ in 0..2 {
            let mut raw = ptr::null_mut();
            // 1: CU_STREAM_NON_BLOCKING.
            call!(driver.stream_create(&raw mut raw, 1))?;
            this.streams.push(RawHandle(raw));
        }
        Ok(this)
    }

    /// Gives all copies to the driver once.
    fn give(&self, copies: &[DriverCopy]) -> Result<(), Box<dyn StdError + Send + Sync>> {
        let (context, driver, _current) = (&self.context, self.context.driver, self.context.current()?);
        // Locked, so that what was checked stays mapped until the driver has the copy, as for a queue.
        let mapped = context.mapped();
        for copy in copies {
            copy.check(&self.registrar)?;
            let here = copy.address().ok_or(Refusal::NotRegistered)?;
            let (at, len) = (copy.at.bits(), copy.len as usize);
            check_use(&mapped, DeviceAddr::Card(copy.at), copy.len, copy.direction == Direction::FromHost)?;
            let [up, down] = self.streams[..] else { continue };
            match copy.direction {
                Direction::FromHost => call!(driver.to_device(at, here as *const c_void, len, up.0)),
                Direction::ToHost => call!(driver.to_host(here as *mut c_void, at, len, down.0)),
            }?;
        }
        Ok(())
    }

    /// Waits until the streams have ended what they were given. Each stream is queried twice, in case the first query
    /// itself failed.
    fn wait(&self) -> Result<(), Error> {
        let (driver, _current) = (self.context.driver, self.context.current_to_undo()?);
        let wait = |stream: &RawHandle| call!(driver.stream_synchronize(stream.0));
        self.streams.iter().try_for_each(|stream| wait(stream).or_else(|_| wait(stream)))
    }
}

impl DriverCopies for BackToBack {
    fn copy(&mut self, copies: &[DriverCopy], times: u64) -> Result<(), Box<dyn StdError + Send + Sync>> {
        let hosts: Vec<Registered> = copies.iter().map(|copy| copy.host.clone()).collect();
        let given = (0..times).try_for_each(|_| self.give(copies));
        // Also after an error, which leaves some of the copies under way.
        let ended = self.wait();
        if ended.is_err() {
            // The GPU may still use the memory: it is never freed.
            std::mem::forget(hosts);
        }
        given.and(ended.map_err(Into::into))
    }
}

impl Drop for BackToBack {
    fn drop(&mut self) {
        let driver = self.context.driver;
        if let Ok(_current) = self.context.current_to_undo() {
            for stream in self.streams.drain(..) {
                // Nothing is on it, or nothing can be said about it.
                let _ = call!(driver.stream_destroy(stream.0));
            }
        }
    }
}
