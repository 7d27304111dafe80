//! The pipeline: read, checksum, transfer and bind, chunk after chunk, all under way at once.
//!
//! Staging buffers of `chunk` bytes are made one by one while the first of them are already being read into. Each is
//! cut into slots. A chunk is the next bytes of a file, as many as a slot holds. It is read into the slot and is then
//! cut: at tensor boundaries, and where the tensor's card memory has a discontinuity. Each piece is one transfer; bytes
//! between tensors (the header) have no destination. When the last piece has arrived, the slot is free for the next
//! chunk.
//!
//! One thread does all this. Reads are the kernel's work, transfers the device's; with a device that works inline, they
//! are done here between reads.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::hash::Hasher;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dmalane_addr::{FileOffset, PageSize};
use dmalane_device::Placement;
use dmalane_dma::BufferSlice;
use dmalane_queue::{
    Completion, DeviceAddr, HaltWatch, OpError, Operation, Queue, RELEASE_TIMEOUT, Refusal, Refused, StallWatch,
    Ticket, drain,
};
use twox_hash::XxHash3_64;

use crate::clock::{Clocks, Stage};
use crate::cut::{Cut, cut};
use crate::device::{STAGING, Slot};
use crate::{Error, Loaded, LoadedFile, Model, OpenDevice, Report};

/// A file to load.
pub struct Input<S> {
    /// What to call it, and how to tell a safetensors file: by its extension.
    pub path: PathBuf,
    /// For its header, its size, and comparisons.
    pub file: File,
    /// For its bytes.
    pub channel: S,
}

impl<S> Input<S> {
    /// The file's size now.
    pub(crate) fn len(&self) -> Result<u64, Error> {
        let size = self.file.metadata().and_then(|meta| match meta.file_type().is_block_device() {
            // A block device has no length of its own; all reads here name their offset, so the position does not
            // matter.
            true => (&self.file).seek(SeekFrom::End(0)),
            false => Ok(meta.len()),
        });
        size.map_err(|source| self.error("read its size", source))
    }

    pub(crate) fn error(&self, what: &'static str, source: std::io::Error) -> Error {
        Error::File { path: self.path.clone(), what, source }
    }

    /// What is in the file: tensors for `*.safetensors`, else one blob with the file's name.
    ///
    /// # Errors
    /// [`Error::Format`], [`Error::File`].
    pub fn model(&self) -> Result<Model, Error> {
        let format = |source| Error::Format { path: self.path.clone(), source };
        let len = self.len()?;
        if self.path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("safetensors")) {
            let name = self.path.file_name().unwrap_or_default().to_string_lossy();
            return Model::blob(&name, len).map_err(format);
        }
        if len == 0 {
            return Err(format(crate::FormatError::Empty));
        }
        let mut prefix = [0; 8];
        let have = prefix.len().min(usize::try_from(len).unwrap_or(usize::MAX));
        self.file.read_exact_at(&mut prefix[..have], 0).map_err(|e| self.error("read its header", e))?;
        let mut header = vec![0; Model::header_len(prefix, len).map_err(format)? as usize];
        self.file.read_exact_at(&mut header, 8).map_err(|e| self.error("read its header", e))?;
        Model::parse(&header, len).map_err(format)
    }
}

/// The next bytes of a file, at most one slot.
#[derive(Clone, Copy)]
struct Chunk {
    file: usize,
    at: u64,
    len: u64,
}

/// What a slot is doing.
enum State {
    Free,
    /// The kernel fills the front; here is the rest.
    Reading(BufferSlice),
    /// Full, waiting for its turn.
    Full(BufferSlice),
    /// On its way: pieces that have come back, in their places, and how many have not.
    Moving(Vec<Option<BufferSlice>>, usize),
}

/// A piece of a chunk on its way to the device.
struct Piece {
    slot: usize,
    index: usize,
    file: usize,
    tensor: usize,
}

struct Job<'a, S> {
    device: &'a mut OpenDevice,
    inputs: &'a mut [Input<S>],
    files: Vec<LoadedFile>,
    clocks: Clocks,
    /// The next byte to read: which file, and where.
    next: (usize, u64),
    /// Bytes of a staging buffer that this load makes.
    staging_len: u64,
    /// Chunks being read or full, oldest first, with their slots: they go on in this order.
    order: VecDeque<(Chunk, usize)>,
    states: Vec<State>,
    /// The slot of each read in flight, and its file offset.
    reads: HashMap<(usize, Ticket), (usize, u64)>,
    backlog: VecDeque<(Piece, Operation)>,
    moving: HashMap<Ticket, Piece>,
    /// Per file and tensor: bytes that have not arrived.
    missing: Vec<Vec<u64>>,
    hashes: Vec<XxHash3_64>,
    transfers: u64,
    progress: &'a mut dyn FnMut(u64),
    /// How long to wait in the end for what the device has.
    timeout: Duration,
}

const MIB: u64 = 1 << 20;
/// How long to sleep at most before looking at everything again.
const NAP: Duration = Duration::from_millis(50);

impl OpenDevice {
    /// Loads files: when this returns, every tensor is on the card and bound, for reading, at its own device virtual
    /// address. `progress` is told how many more bytes are on their way to the device; it must not panic.
    ///
    /// # Errors
    /// [`Error`]. Whatever was in flight has been waited for, and nothing stays bound or allocated on the device; only
    /// when the device does not finish its transfers within [`DriveOptions::timeout`](crate::DriveOptions::timeout),
    /// their destination is never used again ([`OpenDevice::abandoned_bytes`]).
    pub fn load<S: Queue<Addr = FileOffset>>(
        &mut self,
        inputs: &mut [Input<S>],
        placement: &Placement,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(Loaded, Report), Error> {
        let mut files: Vec<LoadedFile> = Vec::new();
        for input in inputs.iter() {
            let placed = input.model().and_then(|model| self.place(input.path.clone(), model, placement));
            match placed {
                Ok(file) => files.push(file),
                Err(e) => {
                    // The reason for the failure matters more than a second one while cleaning up.
                    let _ = self.unload(Loaded { files });
                    return Err(e);
                }
            }
        }
        let resident_before = self.see_resident();
        let start = Instant::now();
        let mut job = Job::new(self, inputs, files, progress);
        let result = job.run();
        let quiet = result.is_ok() || job.quiesce();
        let wall = start.elapsed();
        let Job { files, clocks, transfers, .. } = job;
        let loaded = Loaded { files };
        if let Err(e) = result {
            match quiet {
                // As above.
                true => drop(self.unload(loaded)),
                false => self.abandon(loaded),
            }
            return Err(e);
        }
        self.see_resident();
        let report = Report {
            bytes: loaded.files.iter().map(|f| f.model.len).sum(),
            wall,
            stages: Stage::ALL.iter().map(|&stage| clocks.get(stage)).collect(),
            segments: self.staging_pages().map(|p| p.segment_count() as u64).sum(),
            staging: (self.buffers, self.staging.first().map_or(0, |s| s.via.mapping().span().len())),
            device_leaves: self.address_space().leaf_counts(),
            transfers,
            heap_peak: self.heap().stats().peak as u64,
            resident_before,
            resident_peak: self.resident_peak(),
            ..Report::default()
        };
        Ok((loaded, report))
    }
}

impl<'a, S: Queue<Addr = FileOffset>> Job<'a, S> {
    fn new(
        device: &'a mut OpenDevice,
        inputs: &'a mut [Input<S>],
        files: Vec<LoadedFile>,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        // Small files take small buffers, but whole huge pages where that is no more than was asked for.
        let chunk = device.chunk;
        let largest = files.iter().map(|f| f.model.len).max().unwrap_or(0).min(chunk);
        let huge = PageSize::SIZE_2M.round_up(largest).filter(|len| *len <= chunk && largest > MIB);
        // What is left of a load of smaller files, or of a load that failed, is of no use.
        let usable = |s: &Slot| s.slice.is_some() && s.via.mapping().span().len() >= largest;
        if !device.staging.iter().all(usable) {
            device.staging.clear();
            device.buffers = 0;
        }
        Self {
            next: (0, 0),
            staging_len: huge.unwrap_or(largest),
            missing: files.iter().map(|f| f.model.tensors.iter().map(|t| t.len).collect()).collect(),
            hashes: files.iter().map(|_| XxHash3_64::with_seed(0)).collect(),
            states: device.staging.iter().map(|_| State::Free).collect(),
            timeout: device.timeout,
            device,
            inputs,
            files,
            clocks: Clocks::default(),
            order: VecDeque::new(),
            reads: HashMap::new(),
            backlog: VecDeque::new(),
            moving: HashMap::new(),
            transfers: 0,
            progress,
        }
    }

    fn run(&mut self) -> Result<(), Error> {
        self.advance(0);
        let mut done = Vec::new();
        let mut read = Vec::new();
        let (mut watch, mut stall) = (HaltWatch::default(), StallWatch::default());
        while self.next_chunk(1).is_some() || !self.states.iter().all(State::is_free) {
            self.start_reads()?;
            let mut busy = self.reap_reads(&mut read, Duration::ZERO)?;
            busy |= self.start_transfers()?;
            busy |= self.reap_transfers(&mut done, Duration::ZERO)?;
            if busy {
                stall.moved();
                continue;
            }
            if self.device.queue.in_flight() > 0 {
                let channel = &mut self.device.queue;
                // A device that has halted has had its time; one that hangs lets go of what it has when it is stopped,
                // if it can.
                let gone = watch.lost(channel).map(|why| (why, Duration::ZERO));
                let hangs = || stall.lost(self.device.timeout).map(|why| (why, self.timeout.min(RELEASE_TIMEOUT)));
                if let Some((why, timeout)) = gone.or_else(hangs) {
                    channel.stop(&why);
                    self.timeout = timeout;
                    let file = self.moving.values().next().map_or(0, |piece| piece.file);
                    return Err(self.broken(file, "device", why));
                }
            }
            // Nothing to do here: sleep on whatever ends first. A device that works inline works in its wait.
            if self.device.queue.in_flight() > 0 {
                if self.reap_transfers(&mut done, NAP)? {
                    stall.moved();
                }
            } else if !self.reads.is_empty() {
                self.reap_reads(&mut read, NAP)?;
            }
        }
        for (file, missing) in self.files.iter().zip(&self.missing) {
            if let Some(tensor) = missing.iter().position(|bytes| *bytes > 0) {
                let reason = format!("tensor {:?} did not arrive whole", file.model.tensors[tensor].name);
                return Err(Error::Channel { path: file.path.clone(), end: "device", reason });
            }
        }
        for (input, file) in self.inputs.iter().zip(&mut self.files) {
            let (before, now) = (file.model.len, input.len()?);
            if before != now {
                return Err(Error::Changed { path: file.path.clone(), before, now });
            }
        }
        for (file, hash) in self.files.iter_mut().zip(&self.hashes) {
            file.checksum = hash.finish();
        }
        Ok(())
    }

    /// The next chunk to read, of at most `len` bytes.
    fn next_chunk(&self, len: u64) -> Option<Chunk> {
        let (file, at) = self.next;
        let left = self.files.get(file)?.model.len - at;
        Some(Chunk { file, at, len: left.min(len) })
    }

    /// Gives every free slot the next chunk, making a buffer first while there are fewer than there may be.
    fn start_reads(&mut self) -> Result<(), Error> {
        while let Some(Chunk { file, .. }) = self.next_chunk(1) {
            // As many chunks may wait for their turn as are being read. Reading further ahead would only push them out
            // of the processor's cache.
            if self.order.len() >= 2 * self.inputs[file].channel.limits().capacity {
                return Ok(());
            }
            let slot = match self.states.iter().position(State::is_free) {
                Some(slot) => slot,
                None if self.device.buffers < STAGING => {
                    self.device.add_staging(self.staging_len, &mut self.clocks)?;
                    self.states.resize_with(self.device.staging.len(), || State::Free);
                    continue;
                }
                None => return Ok(()),
            };
            let buffer = &mut self.device.staging[slot];
            let (len, part) = (buffer.len, buffer.slice.take());
            let (Some(chunk), Some(whole)) = (self.next_chunk(len), part) else {
                return Err(self.broken(file, "device", "a staging buffer is missing".into()));
            };
            let (front, rest) = whole.split_at(chunk.len as usize).expect("a chunk is no longer than its slot");
            match self.inputs[chunk.file].channel.submit(Operation::read(front, FileOffset::new(chunk.at))) {
                Ok(ticket) => {
                    self.reads.insert((chunk.file, ticket), (slot, chunk.at));
                    self.states[slot] = State::Reading(rest);
                    self.order.push_back((chunk, slot));
                    self.advance(chunk.len);
                    self.clocks.in_flight(Stage::Read, true);
                }
                Err(Refused { operation, reason }) => {
                    self.device.staging[slot].slice = operation.into_slice().and_then(|front| front.join(rest).ok());
                    if reason == Refusal::Full {
                        return Ok(());
                    }
                    return Err(self.broken(chunk.file, "file", reason.to_string()));
                }
            }
        }
        Ok(())
    }

    /// Moves on to the next byte to read, which may be that of the next file.
    fn advance(&mut self, len: u64) {
        let (file, at) = &mut self.next;
        *at += len;
        while self.files.get(*file).is_some_and(|f| f.model.len == *at) {
            (*file, *at) = (*file + 1, 0);
        }
    }

    /// Takes back slots that have been filled.
    fn reap_reads(&mut self, read: &mut Vec<Completion<FileOffset>>, nap: Duration) -> Result<bool, Error> {
        let mut any = false;
        let mut nap = nap;
        for file in 0..self.inputs.len() {
            let channel = &mut self.inputs[file].channel;
            if channel.in_flight() == 0 {
                continue;
            }
            // Sleep on the first file that has reads in flight: chunks go on in order, so it is the one that matters.
            let nap = std::mem::take(&mut nap);
            self.clocks.hold(Stage::Read, || match nap {
                Duration::ZERO => channel.poll(read),
                nap => channel.wait(read, nap),
            });
            for Completion { ticket, operation, result, bytes: len } in read.drain(..) {
                any = true;
                let Some((slot, at)) = self.reads.remove(&(file, ticket)) else { continue };
                let State::Reading(rest) = std::mem::replace(&mut self.states[slot], State::Free) else { continue };
                let whole = operation.into_slice().and_then(|front| front.join(rest).ok());
                if let Err(source) = result {
                    self.device.staging[slot].slice = whole;
                    return Err(self.read_error(file, FileOffset::new(at), source));
                }
                self.clocks.bytes(Stage::Read, len);
                if let Some(whole) = whole {
                    self.states[slot] = State::Full(whole);
                }
            }
        }
        self.clocks.in_flight(Stage::Read, !self.reads.is_empty());
        Ok(any)
    }

    /// Cuts the next full chunk, in order, and gives its pieces to the device. One at a time, so that what was hashed
    /// is transferred while it is in the cache.
    fn start_transfers(&mut self) -> Result<bool, Error> {
        let mut any = false;
        if let Some(&(chunk, slot)) = self.order.front()
            && self.backlog.is_empty()
            && let Some(mut whole) = self.states[slot].take_full()
        {
            self.order.pop_front();
            any = true;
            let hash = &mut self.hashes[chunk.file];
            let len = chunk.len as usize;
            self.clocks.time(Stage::Checksum, || {
                let hashed = whole.with_bytes(|bytes| hash.write(&bytes[..len]));
                // The device may write the buffer: nothing here maps it so, but then a copy does.
                if let (None, Some(view)) = (hashed, whole.view().sub(0, len)) {
                    view.for_each_block(|block| hash.write(block));
                }
            });
            self.clocks.bytes(Stage::Checksum, chunk.len);
            self.send(chunk, slot, whole);
        }
        while let Some((piece, operation)) = self.backlog.pop_front() {
            let channel = &mut self.device.queue;
            let submitted = match self.device.info.polled {
                true => self.clocks.time(Stage::Transfer, || channel.submit(operation)),
                false => channel.submit(operation),
            };
            match submitted {
                Ok(ticket) => {
                    any = true;
                    self.transfers += 1;
                    self.moving.insert(ticket, piece);
                }
                Err(Refused { operation, reason: Refusal::Full }) => {
                    self.backlog.push_front((piece, operation));
                    break;
                }
                Err(Refused { operation, reason }) => {
                    let file = piece.file;
                    self.put_back(&piece, operation);
                    return Err(self.broken(file, "device", reason.to_string()));
                }
            }
        }
        Ok(any)
    }

    /// Cuts a full slot into pieces with one destination each.
    fn send(&mut self, chunk: Chunk, slot: usize, whole: BufferSlice) {
        let file = &self.files[chunk.file];
        let max = self.device.queue.limits().max_len;
        let cuts = cut(&file.model, &file.layout, file.bo.as_ref().map(|bo| bo.sg()), chunk.at, chunk.len, max);
        let mut pieces = Vec::with_capacity(cuts.len() + 1);
        let mut outgoing = Vec::with_capacity(cuts.len());
        let mut rest = whole;
        for Cut { len, to } in cuts {
            let (part, after) = rest.split_at(len as usize).expect("a chunk lies in its slot");
            rest = after;
            let Some((tensor, to)) = to else {
                pieces.push(Some(part));
                continue;
            };
            let via = self.device.staging[slot].via.clone();
            let piece = Piece { slot, index: pieces.len(), file: chunk.file, tensor };
            outgoing.push((piece, Operation::write((part, via), DeviceAddr::Card(to))));
            pieces.push(None);
        }
        let missing = outgoing.len();
        pieces.push(Some(rest));
        self.backlog.extend(outgoing);
        self.states[slot] = State::Moving(pieces, missing);
        if missing == 0 {
            self.finish(slot);
        }
        (self.progress)(chunk.len);
    }

    /// Takes back pieces that have arrived, and binds tensors that are complete.
    fn reap_transfers(&mut self, done: &mut Vec<Completion>, nap: Duration) -> Result<bool, Error> {
        let channel = &mut self.device.queue;
        if channel.in_flight() == 0 {
            return Ok(false);
        }
        let inline = self.device.info.polled;
        let poll = || match nap {
            Duration::ZERO => channel.poll(done),
            nap => channel.wait(done, nap),
        };
        if inline {
            self.clocks.time(Stage::Transfer, poll);
        } else {
            self.clocks.in_flight(Stage::Transfer, true);
            self.clocks.hold(Stage::Transfer, poll);
        }
        let any = !done.is_empty();
        for Completion { ticket, operation, result, bytes: len } in done.drain(..) {
            let Some(piece) = self.moving.remove(&ticket) else { continue };
            self.put_back(&piece, operation);
            if let Err(source) = result {
                return Err(self.transfer_error(&piece, source));
            }
            self.clocks.bytes(Stage::Transfer, len);
            let missing = &mut self.missing[piece.file][piece.tensor];
            *missing -= len;
            if *missing == 0 {
                let file = &self.files[piece.file];
                let bound = file.layout.places[piece.tensor].bound;
                let device = &mut *self.device;
                self.clocks.time(Stage::Bind, || device.bind(file, piece.tensor))?;
                self.clocks.bytes(Stage::Bind, bound);
            }
        }
        if !inline {
            self.clocks.in_flight(Stage::Transfer, !self.moving.is_empty());
        }
        Ok(any)
    }

    /// Puts a piece back into its place; with the last one the slot is whole and free.
    fn put_back(&mut self, piece: &Piece, operation: Operation) {
        let State::Moving(pieces, missing) = &mut self.states[piece.slot] else { return };
        pieces[piece.index] = operation.into_slice();
        *missing -= 1;
        if *missing == 0 {
            self.finish(piece.slot);
        }
    }

    fn finish(&mut self, slot: usize) {
        if let State::Moving(pieces, _) = std::mem::replace(&mut self.states[slot], State::Free) {
            let whole = pieces.into_iter().flatten().reduce(|a, b| a.join(b).expect("pieces are in their order"));
            self.device.staging[slot].slice = whole;
        }
        let len = self.device.staging[slot].len;
        self.device.sample_resident(len);
    }

    /// Waits for everything in flight; buffers that do not come back are not used again. False when transfers to the
    /// device are still under way.
    fn quiesce(&mut self) -> bool {
        self.backlog.clear();
        let timeout = self.device.timeout;
        for input in self.inputs.iter_mut() {
            drain(&mut input.channel, timeout);
        }
        drain(&mut self.device.queue, self.timeout);
        // Slots that were cut may be incomplete now. They are cheap to make again.
        self.device.staging.clear();
        self.device.buffers = 0;
        self.device.queue.in_flight() == 0
    }

    fn read_error(&self, file: usize, at: FileOffset, source: OpError) -> Error {
        // The channel knows best where it stopped.
        let at = match &source {
            OpError::EndOfFile { at, .. } | OpError::Io { at, .. } => *at,
            _ => at,
        };
        let file = &self.files[file];
        let tensor = file.model.tensor_at(at).map(|t| t.name.clone());
        Error::Read { path: file.path.clone(), at, tensor, source }
    }

    fn transfer_error(&self, piece: &Piece, source: OpError) -> Error {
        let file = &self.files[piece.file];
        let tensor = &file.model.tensors[piece.tensor];
        Error::Transfer { path: file.path.clone(), at: tensor.at, tensor: Some(tensor.name.clone()), source }
    }

    fn broken(&self, file: usize, end: &'static str, reason: String) -> Error {
        Error::Channel { path: self.files[file].path.clone(), end, reason }
    }
}

impl State {
    fn is_free(&self) -> bool {
        matches!(self, State::Free)
    }

    fn take_full(&mut self) -> Option<BufferSlice> {
        match std::mem::replace(self, State::Free) {
            State::Full(part) => Some(part),
            other => {
                *self = other;
                None
            }
        }
    }
}
