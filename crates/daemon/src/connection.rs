//! A connection: one client as the daemon sees it, and what its requests do.
//!
//! Everything that a client may send ends here: a request is carried out whole, or refused and nothing has changed.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dmalane_addr::Access;
use dmalane_card::regs::{self, BAR_REGISTERS};
use dmalane_dma::{Heap, Mapping, MemfdHeap, PageKind, Registrar, SharedBuf};
use rustix::fs::{FallocateFlags, SealFlags};
use zerocopy::IntoBytes;

use crate::config::{Budget, Config};
use crate::deferred_close::DeferredClose;
use crate::function::{Function, NoFunction};
use crate::wire::{
    ANSWER, Code, HelloAnswer, MAX_FDS, Malformed, OpenAnswer, PairAnswer, Request, RowAnswer, Segment, VERSION,
    failed, message,
};
use crate::worker::RunQueue;

/// Who is at the other end, as the kernel says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    pub pid: u32,
    pub uid: u32,
    pub gid: u32,
}

/// What connections share.
pub(crate) struct ServerState {
    pub config: Config,
    pub budget: Arc<Budget>,
    pub run_queue: Arc<RunQueue>,
    pub deferred_close: DeferredClose,
}

/// An answer, ready to be sent.
#[derive(Default)]
pub(crate) struct Answer {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// What came of a request.
pub(crate) enum Handled {
    /// This is the answer.
    Answer(Answer),
    /// The same, and the request was refused.
    Refused(Answer),
    /// About the daemon: who has all connections answers it.
    Status { seqno: u64, first: u64 },
}

struct Refused(Code, String);

/// A memfd by its inode: however often a client sends it, it is one buffer.
type Key = (u64, u64);

struct Buffer {
    buf: SharedBuf,
    /// Mappings that show some of it.
    maps: usize,
    /// Made by the daemon, under this number.
    made: Option<u64>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The client, or a child of it, may still have the descriptor: it keeps no memory that way.
        if self.made.is_some()
            && let Some(fd) = self.buf.export()
        {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(fd, flags, 0, self.buf.len() as u64);
        }
    }
}

struct Mapped {
    /// Dropped, it is no longer there.
    _mapping: Mapping,
    keys: Vec<Key>,
}

/// What was released when a connection had gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Released {
    /// Buffers.
    pub buffers: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Mappings.
    pub mappings: usize,
    /// Card memory in bytes.
    pub card: u64,
}

/// A client.
pub(crate) struct Connection {
    pub id: u64,
    pub peer: Peer,
    /// Why it may only ask for the status, if so.
    pub barred: Option<(Code, &'static str)>,
    pub greeted: bool,
    // Mappings go before buffers, and both before the function.
    mappings: BTreeMap<u64, Mapped>,
    buffers: HashMap<Key, Buffer>,
    made: BTreeMap<u64, Key>,
    next: u64,
    bytes: u64,
    pub errors: u64,
    pub function: Option<Arc<Function>>,
}

impl Connection {
    pub(crate) fn new(id: u64, peer: Peer) -> Self {
        Self {
            id,
            peer,
            barred: None,
            greeted: false,
            mappings: BTreeMap::new(),
            buffers: HashMap::new(),
            made: BTreeMap::new(),
            next: 1,
            bytes: 0,
            errors: 0,
            function: None,
        }
    }

    /// Answers a message and the descriptors that came with it.
    pub(crate) fn handle(&mut self, state: &ServerState, bytes: &[u8], fds: Vec<OwnedFd>) -> Handled {
        let (seqno, request) = match Request::decode(bytes) {
            Ok(decoded) => decoded,
            Err(Malformed { seqno, unknown, why }) => {
                state.deferred_close.put(self.peer.uid, fds);
                let code = if unknown { Code::Unknown } else { Code::Malformed };
                return self.refuse(seqno, code, &format!("a message of {} bytes: {why}", bytes.len()));
            }
        };
        // What has no seals may be anything, and nothing may be asked of it, not even its length, that a file system of the client answers.
        if let Some(i) = fds.iter().position(|fd| rustix::fs::fcntl_get_seals(fd).is_err()) {
            state.deferred_close.put(self.peer.uid, fds);
            return self.refuse(seqno, Code::BadDescriptor, &format!("descriptor {i} is not a memfd"));
        }
        if let Request::Status { first } = request
            && self.greeted
        {
            return Handled::Status { seqno, first };
        }
        match self.carry_out(state, request, fds) {
            Ok((body, fds)) => Handled::Answer(Answer { bytes: message(request.opcode() | ANSWER, seqno, &body), fds }),
            Err(Refused(code, text)) => self.refuse(seqno, code, &text),
        }
    }

    /// The answer to what is no request, or one that is refused.
    pub(crate) fn refuse(&mut self, seqno: u64, code: Code, text: &str) -> Handled {
        self.errors += 1;
        Handled::Refused(Answer { bytes: failed(seqno, code, text), fds: Vec::new() })
    }

    fn carry_out(
        &mut self,
        state: &ServerState,
        request: Request<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
        let limits = &state.config.limits;
        let refused = |code, text: &str| Err(Refused(code, text.to_owned()));
        if !self.greeted && !matches!(request, Request::Hello { .. }) {
            return refused(Code::NotPermitted, "the first message must be a greeting");
        }
        if !fds.is_empty() && !matches!(request, Request::Map { .. }) {
            return refused(Code::BadDescriptor, "descriptors come only with a mapping");
        }
        let nothing = (Vec::new(), Vec::new());
        match request {
            Request::Hello { min, max } => {
                if !(min..=max).contains(&VERSION) {
                    let text = format!("the client speaks versions {min} to {max}, the daemon {VERSION}");
                    return Err(Refused(Code::Version, text));
                }
                self.greeted = true;
                let answer = HelloAnswer {
                    version: VERSION.into(),
                    reserved: Default::default(),
                    client: self.id.into(),
                    ddr: limits.ddr.into(),
                    hbm: limits.hbm.into(),
                    queues: limits.queues.into(),
                    buffers: limits.buffers.into(),
                    bytes: limits.bytes.into(),
                };
                Ok((answer.as_bytes().to_vec(), Vec::new()))
            }
            Request::Open { ddr, hbm, queues } => self.open(state, ddr, hbm, queues),
            Request::Read { bar, offset } => {
                let value = self.function()?.card().read32(bar, offset).ok_or_else(|| no_register(bar, offset))?;
                Ok((value.to_le_bytes().into_iter().chain([0; 4]).collect(), Vec::new()))
            }
            Request::Write { bar, offset, value } => {
                let function = self.function()?;
                // A queue that is started begins with a doorbell of 0.
                let within = offset.wrapping_sub(regs::CHANNEL_BASE) % regs::CHANNEL_STRIDE;
                let queue = offset.wrapping_sub(regs::CHANNEL_BASE) / regs::CHANNEL_STRIDE;
                let starts = bar == BAR_REGISTERS && within == regs::CH_CONTROL && value & 1 == 1;
                if starts && queue < function.queues() as u64 && function.is_at_rest(queue as usize) {
                    function.forget_doorbell(queue as usize);
                }
                function.card().write32(bar, offset, value).ok_or_else(|| no_register(bar, offset))?;
                state.run_queue.nudge();
                Ok(nothing)
            }
            Request::WriteBytes { bar, offset, bytes } => {
                let written = self.function()?.write_bytes(bar, offset, bytes);
                written.map_err(|e| Refused(Code::NoSuchThing, e))?;
                Ok(nothing)
            }
            Request::Map { access, segments } => {
                let answer = self.map(state, access, segments, fds);
                state.run_queue.nudge(); // it has passed this client by while tables were written
                answer
            }
            Request::Unmap { iova } => {
                let Some(mapped) = self.mappings.remove(&iova) else {
                    return Err(Refused(Code::NoSuchThing, format!("no mapping begins at {iova:#x}")));
                };
                let keys = mapped.keys.clone();
                drop(mapped);
                for key in keys {
                    self.unuse(key);
                }
                state.run_queue.nudge(); // as above
                Ok(nothing)
            }
            Request::Buffer { len } => self.make(state, len),
            Request::Close { id } => {
                let Some(key) = self.made.get(&id).copied() else {
                    return Err(Refused(Code::NoSuchThing, format!("there is no buffer {id}")));
                };
                if self.buffers.get(&key).is_some_and(|b| b.maps > 0) {
                    return Err(Refused(Code::Busy, format!("buffer {id} is mapped")));
                }
                self.made.remove(&id);
                if let Some(buffer) = self.buffers.remove(&key) {
                    self.bytes -= buffer.buf.len() as u64;
                }
                Ok(nothing)
            }
            Request::Status { .. } => Ok(nothing), // answered before
        }
    }

    fn function(&self) -> Result<&Arc<Function>, Refused> {
        self.function.as_ref().ok_or_else(|| Refused(Code::NotPermitted, "the client has not opened a function".into()))
    }

    fn open(
        &mut self,
        state: &ServerState,
        ddr: u64,
        hbm: u64,
        queues: u32,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
        let limits = &state.config.limits;
        if let Some((code, why)) = self.barred {
            return Err(Refused(code, why.to_owned()));
        }
        if self.function.is_some() {
            return Err(Refused(Code::Busy, "a client has one function; connect again for another".into()));
        }
        let all = |asked: u64, most: u64| if asked == 0 { most } else { asked };
        let (ddr, hbm) = (all(ddr, limits.ddr), all(hbm, limits.hbm));
        let queues = if queues == 0 { limits.queues } else { queues };
        let asked =
            [("DDR", ddr, limits.ddr), ("HBM", hbm, limits.hbm), ("queues", queues.into(), limits.queues.into())];
        for (what, asked, most) in asked {
            if asked > most {
                return Err(Refused(Code::Quota, format!("{what}: {asked} asked for, a client may have {most}")));
            }
        }
        let made = Function::new(limits, ddr, hbm, queues, self.peer.uid, &state.budget);
        let (function, calls) = made.map_err(|NoFunction(code, text)| Refused(code, text))?;
        let failed = |e: std::io::Error| Refused(Code::Failed, format!("cannot make a function: {e}"));
        let page = function.page().buf().export().expect("a memfd").try_clone_to_owned().map_err(failed)?;
        let function = Arc::new(function);
        state.run_queue.add(function.clone()).map_err(failed)?;
        self.function = Some(function);
        let answer =
            OpenAnswer { ddr: ddr.into(), hbm: hbm.into(), queues: queues.into(), reserved: Default::default() };
        Ok((answer.as_bytes().to_vec(), std::iter::once(page).chain(calls).collect()))
    }

    /// Counts one mapping less, and forgets a buffer of the client's own that no mapping shows.
    fn unuse(&mut self, key: Key) {
        if let Some(buffer) = self.buffers.get_mut(&key) {
            buffer.maps = buffer.maps.saturating_sub(1);
            if buffer.maps == 0 && buffer.made.is_none() {
                self.bytes -= buffer.buf.len() as u64;
                self.buffers.remove(&key);
            }
        }
    }

    /// Whether one more buffer of so many bytes may be had.
    fn room_for(&self, state: &ServerState, len: u64) -> Result<(), Refused> {
        let limits = &state.config.limits;
        if self.buffers.len() >= limits.buffers as usize {
            let text = format!("a client may have {} buffers: unmap or close one", limits.buffers);
            return Err(Refused(Code::Quota, text));
        }
        if len > limits.bytes - self.bytes {
            let text = format!(
                "a buffer of {len} bytes: {} of {} are in use; use smaller ones, or unmap one",
                self.bytes, limits.bytes
            );
            return Err(Refused(Code::Quota, text));
        }
        Ok(())
    }

    fn make(&mut self, state: &ServerState, len: u64) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
        let len = len.max(1).checked_next_multiple_of(4096).unwrap_or(u64::MAX);
        self.room_for(state, len)?;
        let failed = |e: &dyn std::fmt::Display| Refused(Code::Failed, format!("cannot make a buffer: {e}"));
        // Reserved huge pages are not lent: `SharedBuf::import` says why.
        let heap = MemfdHeap::starting_at(PageKind::Transparent);
        let buf = heap.allocate(usize::try_from(len).unwrap_or(usize::MAX)).map_err(|e| failed(&e))?.share();
        let fd = buf.export().expect("a memfd").try_clone_to_owned().map_err(|e| failed(&e))?;
        // No more seals: with one against writing, its memory could not be taken back (`Buffer::drop`).
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SEAL).map_err(|e| failed(&e))?;
        let key = key_of(&fd)?;
        let id = self.next;
        self.next += 1;
        let len = buf.len() as u64;
        self.bytes += len;
        self.made.insert(id, key);
        self.buffers.insert(key, Buffer { buf, maps: 0, made: Some(id) });
        let answer = PairAnswer { first: id.into(), len: len.into() };
        Ok((answer.as_bytes().to_vec(), vec![fd]))
    }

    fn map(
        &mut self,
        state: &ServerState,
        access: u32,
        segments: &[Segment],
        fds: Vec<OwnedFd>,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
        let host = self.function()?.host().clone();
        let access = u8::try_from(access).ok().and_then(Access::from_bits).filter(|a| Access::RW.contains(*a));
        let access = access.filter(|a| !a.is_empty()).ok_or_else(|| {
            Refused(Code::Malformed, "a mapping permits reading (1), writing (2) or both (3), and nothing else".into())
        })?;
        if fds.len() > MAX_FDS {
            return Err(Refused(Code::BadDescriptor, format!("at most {MAX_FDS} descriptors come with a mapping")));
        }
        if self.mappings.len() >= 16 * state.config.limits.buffers as usize {
            let text = format!("a client may have {} mappings", 16 * state.config.limits.buffers);
            return Err(Refused(Code::Quota, text));
        }
        // Nobody is answered while a mapping is written: one must not show a buffer over and over.
        let all = segments.iter().fold(0u64, |all, segment| all.saturating_add(segment.len.get()));
        let possible = segments.iter().all(|segment| segment.len.get() <= state.config.limits.bytes);
        if possible && all > state.config.limits.bytes {
            let text = format!("a mapping of {all} bytes; one may show {} at most", state.config.limits.bytes);
            return Err(Refused(Code::Quota, text));
        }
        // From here on every buffer that is new counts as mapped once too often, until the end.
        let mut taken: Vec<Key> = Vec::new();
        let mapped = self.take_buffers(state, fds, &mut taken).and_then(|()| {
            let failed = |e: dmalane_dma::Error| Refused(Code::Failed, e.to_string());
            let mut keys = Vec::new();
            let mut pinned = Vec::new();
            for (i, segment) in segments.iter().enumerate() {
                let key = taken.get(segment.fd.get() as usize).copied().ok_or_else(|| {
                    Refused(Code::BadDescriptor, format!("segment {i} names a descriptor that did not come"))
                })?;
                let buf = &self.buffers[&key].buf;
                let (offset, len) = (segment.offset.get(), segment.len.get());
                let range = usize::try_from(offset).ok().zip(usize::try_from(offset.saturating_add(len)).ok());
                let range = range.filter(|r| r.0 < r.1 && r.1 <= buf.len() && (r.0 | r.1).is_multiple_of(4096));
                let Some((first, end)) = range else {
                    let text = format!(
                        "segment {i}: {len} bytes from {offset} on are not whole pages of a buffer of {}",
                        buf.len()
                    );
                    return Err(Refused(Code::Malformed, text));
                };
                // Now, where a refusal is an error: in the middle of a transfer it would be a signal.
                buf.populate(first, end - first)
                    .map_err(|e| Refused(Code::Failed, format!("no memory for segment {i}: {e}")))?;
                pinned.push(host.pin_range(&buf.reference(), first..end).map_err(failed)?);
                keys.push(key);
            }
            let mapping = host.map_list(pinned, access).map_err(failed)?;
            Ok((mapping, keys))
        });
        let answer = mapped.map(|(mapping, keys)| {
            for key in &keys {
                if let Some(buffer) = self.buffers.get_mut(key) {
                    buffer.maps += 1;
                }
            }
            let span = mapping.span();
            self.mappings.insert(span.first().bits(), Mapped { _mapping: mapping, keys });
            PairAnswer { first: span.first().bits().into(), len: span.len().into() }
        });
        for key in taken {
            self.unuse(key);
        }
        Ok((answer?.as_bytes().to_vec(), Vec::new()))
    }

    /// Looks up or takes in the buffers behind descriptors, each counted as mapped once more.
    fn take_buffers(&mut self, state: &ServerState, fds: Vec<OwnedFd>, taken: &mut Vec<Key>) -> Result<(), Refused> {
        for (i, fd) in fds.into_iter().enumerate() {
            let key = key_of(&fd)?;
            if let Some(buffer) = self.buffers.get_mut(&key) {
                buffer.maps += 1;
            } else {
                let len = rustix::fs::fstat(&fd).map_or(0, |s| u64::try_from(s.st_size).unwrap_or(0));
                self.room_for(state, len)?;
                let bad = |e| Refused(Code::BadDescriptor, format!("descriptor {i}: {e}"));
                let buf = SharedBuf::import(fd).map_err(bad)?;
                // Sealed against shrinking only: it may have grown since.
                let len = buf.len() as u64;
                self.room_for(state, len)?;
                self.bytes += len;
                self.buffers.insert(key, Buffer { buf, maps: 1, made: None });
            }
            taken.push(key);
        }
        Ok(())
    }

    /// What the client has, for who asks.
    pub(crate) fn row(&self, closing: bool) -> RowAnswer {
        let function = self.function.as_deref();
        RowAnswer {
            client: self.id.into(),
            pid: self.peer.pid.into(),
            uid: self.peer.uid.into(),
            queues: (function.map_or(0, Function::queues) as u32).into(),
            buffers: (self.buffers.len() as u32).into(),
            mappings: (self.mappings.len() as u32).into(),
            closing: u32::from(closing).into(),
            bytes: self.bytes.into(),
            ddr: function.map_or(0, |f| f.ddr).into(),
            hbm: function.map_or(0, |f| f.hbm).into(),
            moved: function.map_or(0, Function::moved).into(),
            errors: self.errors.into(),
        }
    }

    /// Leaves the bytes of buffers that the daemon made as they are: their client lives on.
    pub(crate) fn leave_memory(&mut self) {
        self.buffers.values_mut().for_each(|buffer| buffer.made = None);
    }

    /// What there is to release.
    pub(crate) fn holds(&self) -> Released {
        Released {
            buffers: self.buffers.len(),
            bytes: self.bytes,
            mappings: self.mappings.len(),
            card: self.function.as_ref().map_or(0, |f| f.ddr + f.hbm),
        }
    }
}

/// Of what has seals: asking for the inode of another file may block.
fn key_of(fd: &OwnedFd) -> Result<Key, Refused> {
    let stat = rustix::fs::fstat(fd.as_fd())
        .map_err(|e| Refused(Code::BadDescriptor, format!("a descriptor that cannot be looked at: {e}")))?;
    Ok((stat.st_dev, stat.st_ino))
}

fn no_register(bar: u8, offset: u64) -> Refused {
    Refused(Code::NoSuchThing, format!("no 4-byte register at offset {offset:#x} of BAR {bar}"))
}
