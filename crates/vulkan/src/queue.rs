//! A queue: operations are written down, and the doorbell makes one submission of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use ash::vk;
use dmalane_addr::{CardAddr, Iova, Span};
use dmalane_dma::CopyHint;
use dmalane_queue::{
    CacheHint, Cancelled, Capabilities, Completion, DeviceAddr, Direction, Limits, OpError, Operation, Queue,
    QueueAddr, QueueState, Refusal, Refused, Shape, StopReason, Ticket, Waiting, Work, wait_with,
};

use crate::channel::{Channel, Recording};
use crate::error::{CallError, Error};
use crate::gpu::{Buffer, Gpu};
use crate::hazards::{Hazards, Place, Side};
use crate::memory::GpuMemory;
use crate::registrar::{Import, Importer};
use crate::sparse::SparseMap;

/// Operations in flight.
const CAPACITY: usize = 1024;
/// Bytes of one operation.
pub(crate) const MAX_LEN: u64 = 1 << 40;
/// Bytes of one region of a copy, and of one fill. Some drivers count them in 31 bits (lavapipe 22.3).
const MAX_REGION: u64 = 1 << 30;
/// Most bytes and operations of a submission, so that the first of many end early.
const BATCH_BYTES: u64 = 16 << 20;
const BATCH: usize = 512;
/// Operations that are submitted without a doorbell, if the GPU has nothing else to do.
const EAGER: usize = 256;
/// Submissions in flight from which on a poll does not ring the doorbell: the longer it waits, the more goes into
/// one.
const BUSY: usize = 2;
/// Rows of one operation: each is a region of a command, and held in memory until the command is written.
const MOST_ROWS: u32 = 1 << 20;
/// Bytes of patterns that fills copy from: what `vkCmdUpdateBuffer` takes at a time.
const SCRATCH: u64 = 64 << 10;

/// A queue of a GPU.
pub(crate) struct GpuQueue {
    parts: Parts,
    channel: Channel<Vec<Completion>>,
    hazards: Hazards,
    regions: Regions,
    scratch: Scratch,
    /// The runs of the operation that is being written down.
    host_runs: Vec<Run>,
    device_runs: Vec<Run>,
    waiting: Waiting,
    /// Made by the processor, before everything in flight.
    early: Vec<Completion>,
    /// Ended without the GPU, after everything in flight.
    late: VecDeque<Completion>,
    state: QueueState,
}

/// The parts of a device that its queues share.
#[derive(Clone)]
pub(crate) struct Parts {
    pub gpu: Arc<Gpu>,
    pub memory: Arc<GpuMemory>,
    pub importer: Importer,
    pub sparse: Option<Arc<SparseMap>>,
    /// Queues of the device.
    pub channels: usize,
    /// Bytes of a copy by the processor, at most.
    pub direct: u64,
}

/// Memory of the queue's own, for a pattern that fills copy.
struct Scratch {
    buffer: Arc<Buffer>,
    pattern: Option<u64>,
}

/// Where the bytes of an operation are: a buffer, the offset in it, and an address that tells whether two are the same.
pub(crate) struct Run {
    pub buffer: Arc<Buffer>,
    pub offset: u64,
    address: u64,
    pub len: u64,
    /// The memory that is bound there, of a sparse buffer.
    pub behind: Option<Arc<Buffer>>,
}

/// Regions to copy, by the buffers that they are in.
#[derive(Default)]
struct Regions(Vec<(Arc<Buffer>, Arc<Buffer>, Vec<vk::BufferCopy>)>);

impl Regions {
    fn push(&mut self, from: &Arc<Buffer>, to: &Arc<Buffer>, region: vk::BufferCopy) {
        let same = |(f, t, _): &(Arc<Buffer>, Arc<Buffer>, _)| Arc::ptr_eq(f, from) && Arc::ptr_eq(t, to);
        match self.0.iter_mut().rev().find(|group| same(group)) {
            None => {
                let mut regions = Vec::new();
                append(&mut regions, region);
                self.0.push((from.clone(), to.clone(), regions));
            }
            Some((_, _, regions)) => append(regions, region),
        }
    }
}

/// Appends a region to a list. One that continues the last is merged into it; none becomes longer than [`MAX_REGION`].
fn append(regions: &mut Vec<vk::BufferCopy>, mut region: vk::BufferCopy) {
    while region.size > 0 {
        let continued = regions.last_mut().filter(|last| {
            last.size < MAX_REGION
                && last.src_offset + last.size == region.src_offset
                && last.dst_offset + last.size == region.dst_offset
        });
        let len = region.size.min(MAX_REGION - continued.as_ref().map_or(0, |last| last.size));
        match continued {
            Some(last) => last.size += len,
            None => regions.push(vk::BufferCopy { size: len, ..region }),
        }
        region.src_offset += len;
        region.dst_offset += len;
        region.size -= len;
    }
}

/// Calls `each` with the parts of two lists of runs with as many bytes: a run of each, the offset in it, and the bytes.
pub(crate) fn pairs<'a>(from: &'a [Run], to: &'a [Run], mut each: impl FnMut((&'a Run, u64), (&'a Run, u64), u64)) {
    let (mut f, mut t, mut in_f, mut in_t) = (0, 0, 0, 0);
    while let (Some(a), Some(b)) = (from.get(f), to.get(t)) {
        let len = (a.len - in_f).min(b.len - in_t);
        each((a, in_f), (b, in_t), len);
        (in_f, in_t) = (in_f + len, in_t + len);
        if in_f == a.len {
            (f, in_f) = (f + 1, 0);
        }
        if in_t == b.len {
            (t, in_t) = (t + 1, 0);
        }
    }
}

/// A submission that is being written.
struct Writer<'a> {
    channel: &'a Channel<Vec<Completion>>,
    recording: &'a mut Recording,
    hazards: &'a mut Hazards,
    regions: &'a mut Regions,
    scratch: &'a mut Scratch,
    /// Host memory is written.
    to_host: bool,
    /// Memory is used by a bound address.
    bound: bool,
}

impl Writer<'_> {
    /// Writes down what was collected: its order does not matter.
    fn emit(&mut self) {
        for (from, to, regions) in self.regions.0.drain(..) {
            self.channel.copy(self.recording, &from, &to, &regions);
        }
    }

    fn barrier(&mut self) {
        self.emit();
        self.channel.barrier(self.recording);
    }

    /// A barrier if there must be one before a command that reads and writes this.
    fn order(&mut self, reads: Option<Place>, writes: Place) {
        if self.hazards.adds(reads, writes) {
            self.barrier();
        }
    }

    fn copy(&mut self, (from, from_side): (&Run, Side), (to, to_side): (&Run, Side), at: (u64, u64), len: u64) {
        let place = |run: &Run, side, at| (side, run.address + at, run.address + at + len);
        let len = match (from_side, to_side) {
            // Of what overlaps itself the bytes are unspecified, but Vulkan must not be asked for it.
            (Side::Card, Side::Card) => len.min((from.address + at.0).abs_diff(to.address + at.1)),
            _ => len,
        };
        if len == 0 {
            return;
        }
        self.order(Some(place(from, from_side, at.0)), place(to, to_side, at.1));
        let region = vk::BufferCopy { src_offset: from.offset + at.0, dst_offset: to.offset + at.1, size: len };
        self.regions.push(&from.buffer, &to.buffer, region);
        self.keep_behind(from);
        self.keep_behind(to);
        self.to_host |= to_side == Side::Host;
    }

    /// Keeps the memory that is bound where a run lies.
    fn keep_behind(&mut self, run: &Run) {
        if let Some(memory) = &run.behind {
            self.channel.keep(self.recording, memory);
            self.bound = true;
        }
    }

    /// Copies between two lists of runs with as many bytes.
    fn copy_all(&mut self, from: (&[Run], Side), to: (&[Run], Side)) {
        pairs(from.0, to.0, |(a, in_a), (b, in_b), len| self.copy((a, from.1), (b, to.1), (in_a, in_b), len));
    }

    /// Fills a run, whose first byte is the byte `phase` of the pattern.
    fn fill(&mut self, to: &Run, pattern: u64, phase: u64) {
        let head = to.offset.next_multiple_of(4) - to.offset;
        let middle = to.len.saturating_sub(head) / 4 * 4;
        let word = pattern.rotate_right(((phase + head) % 8 * 8) as u32);
        if middle < 64 || word as u32 != (word >> 32) as u32 {
            return self.fill_by_copies(to, pattern, phase);
        }
        let part = |at: u64, len: u64| Run {
            buffer: to.buffer.clone(),
            offset: to.offset + at,
            address: to.address + at,
            len,
            behind: to.behind.clone(),
        };
        self.order(None, (Side::Card, to.address + head, to.address + head + middle));
        self.keep_behind(to);
        for at in (0..middle).step_by(MAX_REGION as usize) {
            let len = (middle - at).min(MAX_REGION);
            self.channel.fill(self.recording, &to.buffer, to.offset + head + at, len, word as u32);
        }
        for (at, len) in [(0, head), (head + middle, to.len - head - middle)] {
            if len > 0 {
                self.fill_by_copies(&part(at, len), pattern, phase + at);
            }
        }
    }

    fn fill_by_copies(&mut self, to: &Run, pattern: u64, phase: u64) {
        if self.scratch.pattern != Some(pattern) {
            self.order(None, (Side::Scratch, 0, SCRATCH));
            let bytes = pattern.to_le_bytes().repeat(SCRATCH as usize / 8);
            self.channel.update(self.recording, &self.scratch.buffer, &bytes);
            self.scratch.pattern = Some(pattern);
        }
        let from = Run { buffer: self.scratch.buffer.clone(), offset: 0, address: 0, len: SCRATCH, behind: None };
        let mut at = 0;
        while at < to.len {
            let first = (phase + at) % 8;
            let len = (to.len - at).min(SCRATCH - first);
            self.copy((&from, Side::Scratch), (to, Side::Card), (first, at), len);
            at += len;
        }
    }
}

impl Parts {
    /// The runs behind device memory.
    pub fn device(&self, at: DeviceAddr, len: u64, writes: bool, into: &mut Vec<Run>) -> Result<(), OpError> {
        let mut card = |at: CardAddr, len, seen: Option<(&Arc<Buffer>, u64)>| {
            self.memory.areas().resolve(at, len, writes, |_, chunk, offset, address, len| {
                into.push(match seen {
                    None => Run { buffer: chunk.clone(), offset, address, len, behind: None },
                    Some((buffer, first)) => {
                        let offset = first + (address - at.bits());
                        Run { buffer: buffer.clone(), offset, address, len, behind: Some(chunk.clone()) }
                    }
                });
            })
        };
        match (at, &self.sparse) {
            (DeviceAddr::Card(at), _) => card(at, len, None).map_err(OpError::NoCardMemory),
            (DeviceAddr::Va(va), Some(sparse)) => {
                let mut gone = Ok(());
                let found = sparse.resolve(va, len, writes, |buffer, offset, to, len| {
                    gone = gone.and(card(to, len, Some((buffer, offset))));
                });
                found.map_err(OpError::MmuFault).and(gone.map_err(OpError::NoCardMemory))
            }
            (DeviceAddr::Va(va), None) => Err(OpError::MmuFault(va)),
        }
    }

    /// Copies between host memory and memory of the GPU that is mapped. False if some of it is not, or not there;
    /// then some bytes may have been copied.
    fn copy_directly(&self, operation: &Operation) -> bool {
        let Work::Copy { direction, host, at } = &operation.work else { return false };
        let (host, reads) = (host.slice.as_volatile_slice(), *direction == Direction::ToHost);
        let len = host.len() as u64;
        if operation.shape.is_some() || len > self.direct {
            return false;
        }
        let hint = if operation.cache == CacheHint::Cold { CopyHint::Stream } else { CopyHint::Keep };
        let mut copied = 0;
        let mut card = |at: CardAddr, len| {
            let found = self.memory.areas().resolve(at, len, !reads, |_, buffer, offset, _, len| {
                let host_slice = host.sub(copied as usize, len as usize);
                if let (Some(host_slice), Some(card_slice)) = (host_slice, buffer.as_volatile_slice(offset, len, reads))
                {
                    match direction {
                        Direction::FromHost => card_slice.copy_from(host_slice, hint),
                        Direction::ToHost => host_slice.copy_from(card_slice, hint),
                    }
                    copied += len;
                }
            });
            found.is_ok()
        };
        let found = match (*at, &self.sparse) {
            (DeviceAddr::Card(at), _) => card(at, len),
            (DeviceAddr::Va(va), Some(sparse)) => {
                let mut there = true;
                sparse.resolve(va, len, !reads, |_, _, to, len| there = there && card(to, len)).is_ok() && there
            }
            (DeviceAddr::Va(_), None) => false,
        };
        found && copied == len
    }

    /// The runs behind a part of host memory, which is registered.
    pub fn host(&self, range: Option<Span<Iova>>, into: &mut Vec<Run>) -> Result<(), OpError> {
        let found = range.is_some_and(|range| {
            self.importer.resolve(range, |imports, wanted| {
                for Import { bytes, buffer, offset, address } in imports {
                    let (start, end) = (bytes.start.max(wanted.start), bytes.end.min(wanted.end));
                    if let Some(len) = end.checked_sub(start).filter(|len| *len > 0) {
                        let (offset, address) = (offset + start - bytes.start, address + start - bytes.start);
                        into.push(Run { buffer: buffer.clone(), offset, address, len, behind: None });
                    }
                }
            })
        });
        // It was checked when the operation was submitted, which holds the registration since.
        if found { Ok(()) } else { Err(OpError::Refused(Refusal::NotRegistered)) }
    }
}

/// The rows of an operation: the offset in host memory (or in the source), that in device memory, and the bytes.
fn rows(shape: Option<&Shape>, len: u64) -> impl Iterator<Item = (u64, u64, u64)> + use<> {
    let shape = shape.copied().unwrap_or(Shape { row: len, rows: 1, host_pitch: 0, device_pitch: 0 });
    (0..u64::from(shape.rows)).map(move |i| (i * shape.host_pitch, i * shape.device_pitch, shape.row))
}

/// Writes an operation down: how many bytes it moves, and why not all.
fn write(
    operation: &Operation,
    parts: &Parts,
    writer: &mut Writer<'_>,
    (host_runs, device_runs): (&mut Vec<Run>, &mut Vec<Run>),
) -> (u64, Result<(), OpError>) {
    host_runs.clear();
    device_runs.clear();
    let shape = operation.shape.as_deref();
    if let Some(shape) = shape.filter(|shape| shape.rows > MOST_ROWS) {
        let (len, max) = (shape.bytes().unwrap_or(u64::MAX), u64::from(MOST_ROWS) * shape.row);
        return (0, Err(OpError::Refused(Refusal::TooLong { len, max })));
    }
    let advance = |at: DeviceAddr, by: u64| at.advance(by).expect("checked when it was submitted");
    let all = |done: Result<(), OpError>| (if done.is_ok() { operation.bytes() } else { 0 }, done);
    let copies = |direction: Direction, writer: &mut Writer<'_>, host: &[Run], device: &[Run]| match direction {
        Direction::FromHost => writer.copy_all((host, Side::Host), (device, Side::Card)),
        Direction::ToHost => writer.copy_all((device, Side::Card), (host, Side::Host)),
    };
    match &operation.work {
        Work::Copy { direction, host, at } => {
            let writes = *direction == Direction::FromHost;
            all(rows(shape, host.slice.len() as u64)
                .try_for_each(|(in_host, in_device, len)| {
                    parts.host(host.iova().and_then(|span| span.sub(in_host, len)), host_runs)?;
                    parts.device(advance(*at, in_device), len, writes, device_runs)
                })
                .map(|()| copies(*direction, writer, host_runs, device_runs)))
        }
        Work::Gather(g) => {
            for host in &g.host {
                if let Err(e) = parts.host(host.iova(), host_runs) {
                    return (0, Err(e));
                }
            }
            let (mut bytes, mut done) = (0, Ok(()));
            for (at, len) in &g.device {
                let before = device_runs.len();
                if let Err(e) = parts.device(*at, *len, g.direction == Direction::FromHost, device_runs) {
                    device_runs.truncate(before);
                    done = Err(e);
                    break;
                }
                bytes += len;
            }
            copies(g.direction, writer, host_runs, device_runs);
            (bytes, done)
        }
        Work::Within { from, to, len } => all(rows(shape, *len)
            .try_for_each(|(in_source, in_target, len)| {
                parts.device(advance(*from, in_source), len, false, host_runs)?;
                parts.device(advance(*to, in_target), len, true, device_runs)
            })
            .map(|()| writer.copy_all((host_runs, Side::Card), (device_runs, Side::Card)))),
        Work::Fill { at, len, pattern } => {
            let mut each = Vec::new();
            let found = rows(shape, *len).try_for_each(|(_, in_device, len)| {
                let before = device_runs.len();
                parts.device(advance(*at, in_device), len, true, device_runs)?;
                each.push(before);
                Ok(())
            });
            all(found.map(|()| {
                let mut phase = 0;
                let mut starts = each.into_iter().peekable();
                for (i, run) in device_runs.iter().enumerate() {
                    // Every row begins with the first byte of the pattern.
                    if starts.next_if_eq(&i).is_some() {
                        phase = 0;
                    }
                    writer.fill(run, *pattern, phase);
                    phase += run.len;
                }
            }))
        }
        Work::Fence => {
            writer.hazards.clear();
            writer.barrier();
            (0, Ok(()))
        }
        Work::Compare { .. } => (0, Err(OpError::Refused(Refusal::Unsupported(Capabilities::COMPARE)))),
    }
}

impl GpuQueue {
    /// A queue over the GPU's queue of this number.
    pub fn new(parts: Parts, index: usize) -> Result<Self, Error> {
        let channel = Channel::new(&parts.gpu, index)?;
        let scratch = Scratch { buffer: parts.memory.scratch(SCRATCH)?, pattern: None };
        Ok(Self {
            parts,
            channel,
            hazards: Hazards::default(),
            regions: Regions::default(),
            scratch,
            host_runs: Vec::new(),
            device_runs: Vec::new(),
            waiting: Waiting::new(),
            early: Vec::new(),
            late: VecDeque::new(),
            state: QueueState::default(),
        })
    }

    /// Submits what is waiting, in as many submissions as it takes.
    fn ring(&mut self) {
        while !self.waiting.is_empty() && self.state.is_running() {
            let recording = match self.channel.begin() {
                Ok(recording) => recording,
                Err(e) => return self.halt(e),
            };
            if let Err(e) = self.batch(recording) {
                self.halt(e);
            }
        }
        self.refuse_waiting();
    }

    /// Submits the next operations.
    fn batch(&mut self, mut recording: Recording) -> Result<(), CallError> {
        let mut load = Vec::new();
        let sparse = self.parts.sparse.clone();
        // Buffers that are looked up stay bound until the GPU has the commands, and unbinding waits for these.
        let _stays = sparse.as_ref().map(|sparse| sparse.stays());
        let mut writer = Writer {
            channel: &self.channel,
            recording: &mut recording,
            hazards: &mut self.hazards,
            regions: &mut self.regions,
            scratch: &mut self.scratch,
            to_host: false,
            bound: false,
        };
        if self.parts.channels > 1 {
            self.channel.see_others(writer.recording);
        }
        let mut moved = 0u64;
        while load.len() < BATCH
            && moved < BATCH_BYTES
            && let Some((ticket, operation)) = self.waiting.pop_front()
        {
            let runs = (&mut self.host_runs, &mut self.device_runs);
            let (bytes, result) = write(&operation, &self.parts, &mut writer, runs);
            moved = moved.saturating_add(bytes);
            load.push(Completion { ticket, operation, result, bytes });
        }
        writer.emit();
        let uses_bound = writer.bound;
        // They would keep buffers that nothing uses any more.
        self.host_runs.clear();
        self.device_runs.clear();
        if writer.to_host || self.parts.gpu.maps_memory() {
            self.channel.show_host(&recording);
        }
        // Pending binds must be done before the commands use them.
        let after = sparse.as_ref().and_then(|sparse| sparse.pending());
        if let Err((load, e)) = self.channel.submit(recording, after, load) {
            // Nothing of it happened.
            self.hazards.clear();
            self.scratch.pattern = None;
            self.late.extend(load.into_iter().map(stopped_by(e)));
            return Err(e);
        }
        if let Some(sparse) = sparse.as_ref().filter(|_| uses_bound) {
            let (timeline, value) = self.channel.last();
            sparse.used_until(timeline, value);
        }
        Ok(())
    }

    /// Ends the operations that the GPU has not received, if the queue has stopped.
    fn refuse_waiting(&mut self) {
        let Some(reason) = self.state.stopped() else { return };
        let error = OpError::Stopped(reason.clone());
        let end = |(ticket, operation)| Completion { ticket, operation, result: Err(error.clone()), bytes: 0 };
        self.late.extend(self.waiting.drain(..).map(end));
    }

    fn halt(&mut self, e: CallError) {
        self.state.stop(e.into());
        self.refuse_waiting();
    }

    /// Has the processor make a copy that was just submitted, if the GPU has nothing to do and its memory is mapped.
    fn copy_directly(&mut self) {
        if !self.parts.gpu.maps_memory() || self.channel.in_flight() > 0 || !self.late.is_empty() {
            return;
        }
        let [(_, operation)] = self.waiting.make_contiguous() else { return };
        if self.parts.copy_directly(operation)
            && let Some((ticket, operation)) = self.waiting.pop_front()
        {
            let bytes = operation.bytes();
            self.early.push(Completion { ticket, operation, result: Ok(()), bytes });
        }
    }

    /// Collects what has ended.
    fn collect(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        if !self.early.is_empty() {
            // No call was made that would have noticed it.
            if let Err(e) = self.channel.is_alive() {
                self.halt(e);
            }
            done.append(&mut self.early);
        }
        if let Err(e) = self.channel.ended(|load| done.extend(load)) {
            self.halt(e);
            // The GPU may have done some of it, or nothing.
            let ended = stopped_by(e);
            self.channel.give_up(|load| done.extend(load.into_iter().map(&ended)));
        }
        if self.channel.in_flight() == 0 {
            done.extend(self.late.drain(..));
        }
        for end in &mut done[before..] {
            if let (Some(reason), Ok(())) = (self.state.stopped(), &end.result) {
                (end.result, end.bytes) = (Err(OpError::Stopped(reason.clone())), 0);
            }
            self.state.ended();
        }
        done.len() - before
    }
}

/// Ends an operation of a submission that failed.
fn stopped_by(e: CallError) -> impl Fn(Completion) -> Completion {
    let error = OpError::Stopped(e.into());
    move |completion| Completion { result: Err(error.clone()), bytes: 0, ..completion }
}

impl Queue for GpuQueue {
    type Addr = DeviceAddr;

    fn limits(&self) -> Limits {
        Limits { capacity: CAPACITY, max_len: MAX_LEN, max_parts: usize::MAX }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::COPY_ENGINE
    }

    fn in_flight(&self) -> usize {
        self.state.in_flight()
    }

    fn submit(&mut self, operation: Operation) -> Result<Ticket, Refused<DeviceAddr>> {
        let registered = |operation: &Operation| operation.check_registered(&self.parts.importer);
        let (capabilities, limits) = (self.capabilities(), self.limits());
        let ticket = self.state.submit(operation, capabilities, limits, registered, &mut self.waiting)?;
        self.copy_directly();
        // Submitted while the caller prepares more.
        if self.waiting.len() >= EAGER && self.channel.in_flight() < BUSY {
            self.ring();
        }
        Ok(ticket)
    }

    fn flush(&mut self) {
        self.ring();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        if self.channel.in_flight() < BUSY || self.waiting.len() >= BATCH {
            self.ring();
        }
        self.collect(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion>, timeout: Duration) -> usize {
        wait_with(self, done, timeout, |this, left| {
            if let Err(e) = this.channel.wait(left) {
                // The next poll finds out what has become of the operations.
                this.halt(e);
                let ended = stopped_by(e);
                this.channel.give_up(|load| this.late.extend(load.into_iter().map(&ended)));
            }
        })
    }

    fn state(&self) -> Option<&QueueState> {
        Some(&self.state)
    }

    fn stop(&mut self, reason: StopReason) {
        self.state.stop(reason);
        self.refuse_waiting();
    }

    fn restart(&mut self) -> bool {
        self.parts.gpu.check().is_ok() && self.state.restart()
    }

    fn cancel(&mut self, ticket: Ticket) -> Cancelled<DeviceAddr> {
        self.state.cancel(ticket, &mut self.waiting)
    }
}

dmalane_dma::debug_as!(GpuQueue, |it| "GpuQueue({} in flight)", it.in_flight());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_merged_up_to_a_limit() {
        const GIB: u64 = 1 << 30;
        let region = |src_offset, dst_offset, size| vk::BufferCopy { src_offset, dst_offset, size };
        let list = |all: &[(u64, u64, u64)]| {
            let mut regions = Vec::new();
            all.iter().for_each(|(from, to, len)| append(&mut regions, region(*from, *to, *len)));
            regions.iter().map(|r| (r.src_offset, r.dst_offset, r.size)).collect::<Vec<_>>()
        };
        assert_eq!(list(&[(0, 100, 8), (8, 108, 8), (16, 117, 8)]), [(0, 100, 16), (16, 117, 8)]);
        // One copy, and many that merge, of 2^31 bytes and more.
        for len in [GIB, 2 * GIB - 1, 2 * GIB, 4 * GIB, 4 * GIB + 1, 9 * GIB + 5] {
            let parts = |part: u64| {
                let all: Vec<_> = (0..len).step_by(part as usize).map(|at| (7 + at, at, part.min(len - at))).collect();
                list(&all)
            };
            let whole = list(&[(7, 0, len)]);
            for part in [len, GIB, GIB / 2 + 3, 64 << 20] {
                assert_eq!(parts(part), whole, "{len} bytes in parts of {part}");
            }
            let mut end = 0;
            for (from, to, size) in &whole {
                assert!(*size <= GIB && (*from, *to) == (7 + end, end));
                end += size;
            }
            assert_eq!((end, whole.len() as u64), (len, len.div_ceil(GIB)));
        }
    }
}
