//! Streams of the driver, which own the operations that the GPU works on.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use dmalane_queue::{Completion, DeviceAddr, Direction, OpError, Operation, QueueAddr, Refusal, Ticket};

use super::context::Context;
use super::ranges::{Mapped, check_use};
use super::{Copy2D, CopyAttributes, Pointer, RawHandle, Side};
use crate::Error;
use crate::error::NOT_READY;
use crate::plan::{Rows, Step, memory};

/// A copy in a batch.
struct TransferRange {
    at: DeviceAddr,
    here: Pointer,
    len: u64,
}

/// Copies in a batch, at most.
const BATCH: usize = 64;
/// Bytes of a copy that goes into a batch, at most: longer ones gain nothing.
const BATCHED: u64 = 1 << 20;
/// Bytes after which an event is recorded, so that what has ended is seen while the rest runs.
const EVENT_BYTES: u64 = 4 << 20;
/// Operations after which an event is recorded.
const EVENT_OPERATIONS: usize = BATCH;

/// Operations on a stream of the driver, in order.
pub(crate) struct Stream {
    context: Arc<Context>,
    raw: RawHandle,
    /// Begun, and followed by an event; `None` where none could be recorded.
    groups: VecDeque<(Option<RawHandle>, Vec<Completion>)>,
    /// Begun since then.
    open: Vec<Completion>,
    open_bytes: u64,
    /// Copies that go to the driver in one call. Their order is left to the driver, so no two of them write the same
    /// memory.
    batch: Vec<TransferRange>,
    /// That of all copies in the batch.
    direction: Direction,
    batches: bool,
    /// Calls that were made and are not known to have ended.
    calls: VecDeque<usize>,
    open_calls: usize,
    /// Events that can be recorded again.
    idle: Vec<RawHandle>,
    broken: Option<Error>,
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, Error> {
        let (driver, _current) = (context.driver, context.current()?);
        let mut raw = ptr::null_mut();
        // 1: CU_STREAM_NON_BLOCKING, not ordered behind the work of others on the legacy stream.
        call!(driver.stream_create(&raw mut raw, 1))?;
        Ok(Self {
            context: context.clone(),
            raw: RawHandle(raw),
            groups: VecDeque::new(),
            open: Vec::new(),
            open_bytes: 0,
            batch: Vec::new(),
            direction: Direction::FromHost,
            batches: driver.has_batches(),
            calls: VecDeque::new(),
            open_calls: 0,
            idle: Vec::new(),
            broken: None,
        })
    }

    /// Calls that are not known to have ended; the driver blocks when they are about a thousand.
    pub(crate) fn calls(&self) -> usize {
        self.calls.iter().sum::<usize>() + self.open_calls
    }

    /// Why nothing on the stream works any more.
    pub(crate) fn broken(&self) -> Option<&Error> {
        self.broken.as_ref()
    }

    /// Lets what is begun here from now on wait for what was begun on another stream of the context.
    pub(crate) fn wait_for(&mut self, other: &mut Self) {
        other.record(true);
        let Some((event, _)) = other.groups.back() else { return };
        let (context, driver) = (self.context.clone(), self.context.driver);
        let waits = context.current().and_then(|_current| match event {
            Some(event) => call!(driver.stream_wait(self.raw.0, event.0, 0)),
            // No event could be recorded.
            None => call!(driver.stream_synchronize(other.raw.0)),
        });
        if let Err(e) = waits {
            // Nothing may run that had to wait.
            self.breaks(e);
        }
    }

    /// Begins an operation: takes its steps, in order, up to one that cannot be done. The operation is owned until
    /// [`Stream::ended`] gives it back.
    pub(crate) fn begin(&mut self, ticket: Ticket, operation: Operation, steps: &[Step]) {
        let context = self.context.clone();
        let (mut result, mut bytes) = (Ok(()), 0);
        match context.current() {
            Err(e) => result = Err(self.failed(e)),
            Ok(_current) => {
                // Locked, so that what was checked stays mapped until the driver has the copy: who unmaps closes the
                // range first, and then waits for the stream.
                let mapped = context.mapped();
                for step in steps {
                    if let Err(e) = self.step(&mapped, &operation, step) {
                        result = Err(e);
                        break;
                    }
                    bytes += step.bytes();
                }
            }
        }
        self.open_bytes += bytes;
        self.open.push(Completion { ticket, operation, result, bytes });
    }

    /// Takes an operation that cannot be done, so that it ends in its turn.
    pub(crate) fn give_up(&mut self, ticket: Ticket, operation: Operation, error: OpError) {
        self.open.push(Completion { ticket, operation, result: Err(error), bytes: 0 });
    }

    fn failed(&mut self, error: Error) -> OpError {
        let status = error.code();
        if error.is_fatal() {
            self.breaks(error);
        }
        OpError::Device { status }
    }

    /// Nothing works any more, for the first reason, or since the context is lost.
    fn breaks(&mut self, error: Error) {
        let says_more = matches!(error, Error::Lost(_)) && !matches!(self.broken, Some(Error::Lost(_)));
        if self.broken.is_none() || says_more {
            self.broken = Some(error);
        }
    }

    /// An error if nothing works any more.
    fn works(&self) -> Result<(), OpError> {
        self.broken.as_ref().map_or(Ok(()), |e| Err(OpError::Device { status: e.code() }))
    }

    fn step(&mut self, mapped: &Mapped, operation: &Operation, step: &Step) -> Result<(), OpError> {
        self.works()?;
        for (at, len, write) in step.device().into_iter().flatten() {
            check_use(mapped, at, len, write)?;
        }
        // The address of host memory that the operation owns.
        let host = |index: usize, offset: u64, len: u64| {
            let slice = operation.hosts().get(index).map(|host| &host.slice);
            let inside = offset.checked_add(len).zip(slice).filter(|(end, slice)| *end <= slice.len() as u64);
            let (_, slice) = inside.ok_or(OpError::Refused(Refusal::Mismatch))?;
            Ok::<usize, OpError>(slice.reference().address() + slice.offset() + offset as usize)
        };
        if let Step::Copy { direction, host: index, offset, at, rows: Rows { row: len, count: 1, .. } } = *step
            && self.batches
            && len <= BATCHED
        {
            let here = host(index, offset, len)? as Pointer;
            return self.add_to_batch(mapped, direction, TransferRange { at, here, len });
        }
        self.send_batch(mapped)?;
        let (driver, stream) = (self.context.driver, self.raw.0);
        let side = |kind, host: usize, device, pitch: u64| Side {
            x: 0,
            y: 0,
            kind,
            host: host as *mut c_void,
            device,
            array: ptr::null_mut(),
            pitch: pitch as usize,
        };
        self.open_calls += 1;
        let two = |from, to, rows: &Rows| {
            let copy = Copy2D { from, to, width: rows.row as usize, height: rows.count as usize };
            call!(driver.copy_2d(&raw const copy, stream))
        };
        let done = match step {
            Step::Copy { direction, host: index, offset, at, rows } => {
                let here = host(*index, *offset, rows.extent(rows.pitches.0))?;
                let (bytes, there) = (rows.row as usize, at.bits());
                let (host, device) = (side(1, here, 0, rows.pitches.0), side(2, 0, there, rows.pitches.1));
                match (direction, rows.count) {
                    (Direction::FromHost, 1) => call!(driver.to_device(there, here as *mut c_void, bytes, stream)),
                    (Direction::ToHost, 1) => call!(driver.to_host(here as *mut c_void, there, bytes, stream)),
                    (Direction::FromHost, _) => two(host, device, rows),
                    (Direction::ToHost, _) => two(device, host, rows),
                }
            }
            Step::Within { from, to, rows } => match rows.count {
                1 => call!(driver.within(to.bits(), from.bits(), rows.row as usize, stream)),
                _ => two(side(2, 0, from.bits(), rows.pitches.0), side(2, 0, to.bits(), rows.pitches.1), rows),
            },
            Step::Bytes { at, value, rows: Rows { row, count: 1, .. } } => {
                call!(driver.set_8(at.bits(), *value, *row as usize, stream))
            }
            Step::Bytes { at, value, rows: Rows { row, count, pitches } } => {
                let (pitch, row, count) = (pitches.1 as usize, *row as usize, *count as usize);
                call!(driver.set_2d_8(at.bits(), pitch, *value, row, count, stream))
            }
            Step::Words { at, value, rows: Rows { row, count: 1, .. } } => {
                call!(driver.set_32(at.bits(), *value, *row as usize / 4, stream))
            }
            Step::Words { at, value, rows: Rows { row, count, pitches } } => {
                let (pitch, words, count) = (pitches.1 as usize, *row as usize / 4, *count as usize);
                call!(driver.set_2d_32(at.bits(), pitch, *value, words, count, stream))
            }
        };
        done.map_err(|e| self.failed(e))
    }

    fn add_to_batch(&mut self, mapped: &Mapped, direction: Direction, new: TransferRange) -> Result<(), OpError> {
        // Each slice of host memory is one operation's alone, but device memory may be written twice.
        let (first, last) = memory(new.at, new.len);
        let twice = |range: &TransferRange| {
            let (low, high) = memory(range.at, range.len);
            direction == Direction::FromHost && first <= high && low <= last
        };
        if self.direction != direction || self.batch.len() >= BATCH || self.batch.iter().any(twice) {
            self.send_batch(mapped)?;
        }
        self.direction = direction;
        self.batch.push(new);
        Ok(())
    }

    /// Gives the driver the copies that wait for it. When it refuses, all operations since the last event have failed:
    /// which of them were part of the batch is not known.
    fn send_batch(&mut self, mapped: &Mapped) -> Result<(), OpError> {
        let (direction, ranges) = (self.direction, std::mem::take(&mut self.batch));
        if ranges.is_empty() {
            return Ok(());
        }
        let sent = self.works().and_then(|()| self.send(mapped, direction, &ranges));
        if let Err(error) = &sent {
            self.fail_open(error);
        }
        sent
    }

    /// Fails the operations that were begun since the last event.
    fn fail_open(&mut self, error: &OpError) {
        for begun in self.open.iter_mut().filter(|begun| begun.result.is_ok()) {
            (begun.result, begun.bytes) = (Err(error.clone()), 0);
        }
    }

    fn send(&mut self, mapped: &Mapped, direction: Direction, ranges: &[TransferRange]) -> Result<(), OpError> {
        let (driver, stream, count) = (self.context.driver, self.raw.0, ranges.len());
        let to_device = direction == Direction::FromHost;
        for range in ranges {
            // Again, since it may have been unmapped while it waited.
            check_use(mapped, range.at, range.len, to_device)?;
        }
        self.open_calls += count;
        let done = if let [TransferRange { at, here, len, .. }] = *ranges {
            match to_device {
                true => call!(driver.to_device(at.bits(), here as *const c_void, len as usize, stream)),
                false => call!(driver.to_host(here as *mut c_void, at.bits(), len as usize, stream)),
            }
        } else {
            let device: Vec<Pointer> = ranges.iter().map(|range| range.at.bits()).collect();
            let host: Vec<Pointer> = ranges.iter().map(|range| range.here).collect();
            let lens: Vec<usize> = ranges.iter().map(|range| range.len as usize).collect();
            let (to, from) = if to_device { (&device, &host) } else { (&host, &device) };
            let (to, from, lens) = (to.as_ptr(), from.as_ptr(), lens.as_ptr());
            // One set of attributes, for all copies from the first on.
            let (attributes, first) = (CopyAttributes { order: 1, ..CopyAttributes::default() }, 0usize);
            let (attributes, first) = (&raw const attributes, &raw const first);
            if driver.calls.batch.is_some() {
                may_call!(driver.batch(to, from, lens, count, attributes, first, 1, stream))
            } else {
                let mut failed = 0usize;
                let failed = &raw mut failed;
                may_call!(driver.batch_with_index(to, from, lens, count, attributes, first, 1, failed, stream))
            }
        };
        done.map_err(|e| self.failed(e))
    }

    /// Lets the driver note the end of what has been begun. `all`: however little that is.
    pub(crate) fn record(&mut self, all: bool) {
        let enough = self.open_bytes >= EVENT_BYTES || self.open.len() >= EVENT_OPERATIONS;
        if self.open.is_empty() || !(all || enough) {
            return;
        }
        let context = self.context.clone();
        let event = match context.current() {
            Err(e) => {
                // Operations that wait in the batch were not begun.
                let error = self.failed(e);
                self.batch.clear();
                self.fail_open(&error);
                None
            }
            Ok(_current) => {
                // A failure is noted with the operations.
                let _ = self.send_batch(&context.mapped());
                self.mark().map_err(|e| self.failed(e)).ok()
            }
        };
        self.groups.push_back((event, std::mem::take(&mut self.open)));
        self.calls.push_back(std::mem::take(&mut self.open_calls));
        self.open_bytes = 0;
    }

    fn mark(&mut self) -> Result<RawHandle, Error> {
        let driver = self.context.driver;
        let event = match self.idle.pop() {
            Some(event) => event,
            None => {
                let mut event = ptr::null_mut();
                // 2: CU_EVENT_DISABLE_TIMING.
                call!(driver.event_create(&raw mut event, 2))?;
                RawHandle(event)
            }
        };
        let recorded = call!(driver.event_record(event.0, self.raw.0));
        if recorded.is_err() {
            self.idle.push(event);
        }
        recorded.map(|()| event)
    }

    /// Appends what is known to have ended, in order.
    pub(crate) fn ended(&mut self, done: &mut Vec<Completion>) {
        if self.groups.is_empty() {
            return;
        }
        let context = self.context.clone();
        let Ok(_current) = context.current().map_err(|e| self.failed(e)) else { return };
        let driver = context.driver;
        while let Some((event, _)) = self.groups.front() {
            let state = match event {
                // After an error that the context does not survive, only an answer for all of the stream counts.
                Some(event) if self.broken.is_none() => call!(driver.event_query(event.0)),
                _ => call!(driver.stream_query(self.raw.0)),
            };
            match state {
                Ok(()) => {}
                Err(Error::Call { code: NOT_READY, .. }) => return,
                Err(e) => {
                    self.failed(e);
                    // That says nothing about the copies: ask for the whole stream next time.
                    let event = self.groups.front_mut().and_then(|(event, _)| event.take());
                    self.idle.extend(event);
                    return;
                }
            }
            if let Some((event, group)) = self.groups.pop_front() {
                self.calls.pop_front();
                self.idle.extend(event);
                done.extend(group);
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.record(true);
        let (context, driver) = (self.context.clone(), self.context.driver);
        let wait = || call!(driver.stream_synchronize(self.raw.0));
        let ended = context.current_to_undo().and_then(|_current| wait().or_else(|_| wait()));
        if ended.is_err() {
            // The GPU may still use the memory of these operations: it is never freed.
            self.groups.drain(..).for_each(std::mem::forget);
            std::mem::take(&mut self.open).into_iter().for_each(std::mem::forget);
        }
        if let Ok(_current) = context.current_to_undo() {
            for event in self.idle.drain(..).chain(self.groups.drain(..).filter_map(|(event, _)| event)) {
                let _ = call!(driver.event_destroy(event.0));
            }
            let _ = call!(driver.stream_destroy(self.raw.0));
        }
    }
}
