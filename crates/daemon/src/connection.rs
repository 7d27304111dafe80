//! A connection: the daemon's state of one client, and the execution of its requests.
//!
//! Everything that a client can send is handled here. A request either succeeds completely or is refused without any
//! effect.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dmalane_addr::Access;
use dmalane_card::regs::{self, BAR_MEMORY, BAR_REGISTERS};
use dmalane_dma::{Error as DmaError, Mapping, Registrar, SharedBuf};
use dmalane_sim::Allowance;
use zerocopy::{FromZeros, IntoBytes};

use crate::account::{Account, Charge};
use crate::config::FUNCTION_DESCRIPTORS;
use crate::function::Function;
use crate::log::ClientResources;
use crate::peer::Peer;
use crate::socket;
use crate::state::ServerState;
use crate::thread::take_time;
use crate::wire::{
    ANSWER, ClientRequest, ClientStatus, Code, HelloAnswer, MAX_FDS, MalformedRequest, MapAnswer, MapSegment,
    OpenAnswer, Refused, VERSION, failed, message,
};

/// Bytes of a buffer that are populated at once.
const POPULATED_AT_ONCE: usize = 8 << 20;

/// How often a request that waits until its user has paid looks whether it may go on.
const PACE: Duration = Duration::from_micros(50);

/// Registers whose writes wait for a step under way that uses the MMU.
const WAITING: [u64; 3] = [regs::CONTROL, regs::MMU_CONTROL, regs::MMU_INVALIDATE];

/// Bytes of a mapping for each byte of the daemon's memory that it takes: page tables here and in the kernel, and
/// frames.
const MAPPED_PER_BYTE: u64 = 64;
/// And what a mapping takes beside that, and each of its segments: 207 bytes were measured for one of a single page.
const MAPPING_BYTES: u64 = 512;
const SEGMENT_BYTES: u64 = 256;

/// An answer, ready to send.
#[derive(Default)]
pub(crate) struct Answer {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// Result of a request.
pub(crate) enum Handled {
    /// The answer to a request that succeeded.
    Answer(Answer),
    /// The answer to a request that was refused.
    Refused(Answer),
    /// A status request: the server answers it, since it knows all connections.
    Status { seqno: u64, first: u64 },
}

/// A memfd by device and inode: a client that sends it several times still has one buffer.
type Key = (u64, u64);

struct Buffer {
    buf: SharedBuf,
    /// Mappings that contain a part of it.
    maps: usize,
    /// For its memory and its descriptor. After the buffer, which is freed first.
    _charges: [Charge; 2],
}

struct Mapped {
    /// Unmaps on drop.
    _mapping: Mapping,
    keys: Vec<Key>,
    /// For page tables and what else the daemon notes of each page.
    _charge: Charge,
}

/// The state of one client.
pub(crate) struct Connection {
    pub id: u64,
    pub peer: Peer,
    pub socket: OwnedFd,
    /// Set when the client may only request the status: the reason.
    pub status_only: Option<(Code, &'static str)>,
    pub greeted: bool,
    // Drop order: mappings before buffers, and both before the function.
    mappings: BTreeMap<u64, Mapped>,
    buffers: HashMap<Key, Buffer>,
    bytes: u64,
    pub errors: u64,
    pub function: Option<Arc<Function>>,
    /// Of the function.
    descriptors: Option<Charge>,
    /// For the descriptors that came with the request under way.
    pub received: Option<Charge>,
    /// When the request under way has to end.
    pub deadline: Option<Instant>,
}

impl Connection {
    pub(crate) fn new(id: u64, peer: Peer, socket: OwnedFd) -> Self {
        Self {
            id,
            peer,
            socket,
            status_only: None,
            greeted: false,
            mappings: BTreeMap::new(),
            buffers: HashMap::new(),
            bytes: 0,
            errors: 0,
            function: None,
            descriptors: None,
            received: None,
            deadline: None,
        }
    }

    /// True for a message that the client can make long: the kernel finds pages for card memory that is touched for the
    /// first time, and some registers wait for a step.
    pub(crate) fn is_long(&self, bytes: &[u8]) -> bool {
        match ClientRequest::decode(bytes) {
            Ok((_, request)) => match request {
                ClientRequest::Open { .. } | ClientRequest::Map { .. } | ClientRequest::Unmap { .. } => true,
                ClientRequest::WriteBytes { .. } => true,
                ClientRequest::Write { bar: BAR_REGISTERS, offset, .. } => WAITING.contains(&offset),
                ClientRequest::Read { bar, .. } | ClientRequest::Write { bar, .. } => bar == BAR_MEMORY,
                ClientRequest::Hello { .. } | ClientRequest::Status { .. } => false,
            },
            Err(_) => false,
        }
    }

    /// Populates a range of a buffer in pieces, so that the address space is not locked for long, and no faster than
    /// the user's share of the worker pays for.
    fn populate(&self, state: &ServerState, buf: &SharedBuf, range: Range<usize>) -> Result<(), String> {
        let run_queue = &state.run_queue;
        let aborted = || state.is_over(&self.socket);
        let late = || self.deadline.is_some_and(|deadline| Instant::now() > deadline);
        let waits = || self.deadline.is_some() && run_queue.owes(self.peer.user);
        for first in range.clone().step_by(POPULATED_AT_ONCE) {
            run_queue.charge(self.peer.user, take_time());
            while waits() && !aborted() && !late() {
                thread::sleep(PACE);
            }
            if aborted() {
                return Err("the client has disconnected".to_owned());
            }
            if late() {
                return Err("the time for it is over: map smaller parts, and touch them before".to_owned());
            }
            let len = POPULATED_AT_ONCE.min(range.end - first);
            buf.populate(first, len).map_err(|e| format!("no memory: {e}"))?;
        }
        Ok(())
    }

    /// Handles a message and the descriptors that came with it. Those that it leaves may take any time to close.
    pub(crate) fn handle(&mut self, state: &ServerState, bytes: &[u8], fds: &mut Vec<OwnedFd>) -> Handled {
        let (seqno, request) = match ClientRequest::decode(bytes) {
            Ok(decoded) => decoded,
            Err(MalformedRequest { seqno, unknown, why }) => {
                let code = if unknown { Code::Unknown } else { Code::Malformed };
                return self.refuse(seqno, code, &format!("a message of {} bytes: {why}", bytes.len()));
            }
        };
        // Unsealed descriptors may be FUSE files of the client; even `fstat` can block on them.
        if let Some(i) = fds.iter().position(|fd| rustix::fs::fcntl_get_seals(fd).is_err()) {
            return self.refuse(seqno, Code::BadDescriptor, &format!("descriptor {i} is not a memfd"));
        }
        if let ClientRequest::Status { first } = request
            && self.greeted
        {
            return Handled::Status { seqno, first };
        }
        match self.execute(state, request, fds) {
            Ok((body, fds)) => Handled::Answer(Answer { bytes: message(request.opcode() | ANSWER, seqno, &body), fds }),
            Err(Refused(code, text)) => self.refuse(seqno, code, &text),
        }
    }

    /// The answer to a malformed or refused request.
    pub(crate) fn refuse(&mut self, seqno: u64, code: Code, text: &str) -> Handled {
        self.errors += 1;
        Handled::Refused(Answer { bytes: failed(seqno, code, text), fds: Vec::new() })
    }

    fn execute(
        &mut self,
        state: &ServerState,
        request: ClientRequest<'_>,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
        let limits = &state.config.limits;
        let refused = |code, text: &str| Err(Refused(code, text.to_owned()));
        if !self.greeted && !matches!(request, ClientRequest::Hello { .. }) {
            return refused(Code::NotPermitted, "the first message must be a hello message");
        }
        if !fds.is_empty() && !matches!(request, ClientRequest::Map { .. }) {
            return refused(Code::BadDescriptor, "only a map request may carry descriptors");
        }
        let nothing = (Vec::new(), Vec::new());
        match request {
            ClientRequest::Hello { min, max } => {
                if !(min..=max).contains(&VERSION) {
                    let text = format!("the client speaks versions {min} to {max}, the daemon {VERSION}");
                    return Err(Refused(Code::Version, text));
                }
                self.greeted = true;
                // From now on it may send descriptors.
                socket::pass_rights(&self.socket, true);
                let answer = HelloAnswer {
                    version: VERSION.into(),
                    queues: limits.queues.into(),
                    client: self.id.into(),
                    ddr: limits.ddr.into(),
                    hbm: limits.hbm.into(),
                    bytes: limits.bytes.into(),
                    buffers: limits.buffers.into(),
                    reserved: Default::default(),
                };
                Ok((answer.as_bytes().to_vec(), Vec::new()))
            }
            ClientRequest::Open { ddr, hbm, queues } => self.open(state, ddr, hbm, queues),
            ClientRequest::Read { bar, offset } => {
                let value = self.function()?.card().read32(bar, offset).ok_or_else(|| no_register(bar, offset))?;
                Ok((value.to_le_bytes().into_iter().chain([0; 4]).collect(), Vec::new()))
            }
            ClientRequest::Write { bar, offset, value } => {
                let function = self.function()?;
                // A queue starts with a doorbell of 0.
                let within = offset.wrapping_sub(regs::CHANNEL_BASE) % regs::CHANNEL_STRIDE;
                let queue = offset.wrapping_sub(regs::CHANNEL_BASE) / regs::CHANNEL_STRIDE;
                let starts = bar == BAR_REGISTERS && within == regs::CH_CONTROL && value & 1 == 1;
                if starts && queue < function.queues() as u64 && function.is_at_rest(queue as usize) {
                    function.forget_doorbell(queue as usize);
                }
                function.card().write32(bar, offset, value).ok_or_else(|| no_register(bar, offset))?;
                state.run_queue.wake();
                Ok(nothing)
            }
            ClientRequest::WriteBytes { bar, offset, bytes } => {
                let written = self.function()?.write_bytes(bar, offset, bytes);
                written.map_err(|e| Refused(Code::NoSuchThing, e))?;
                Ok(nothing)
            }
            ClientRequest::Map { access, segments } => {
                let answer = self.map(state, access, segments, std::mem::take(fds));
                state.run_queue.wake(); // the worker skips a function while its tables change
                answer
            }
            ClientRequest::Unmap { iova } => {
                let Some(mapped) = self.mappings.remove(&iova) else {
                    return Err(Refused(Code::NoSuchThing, format!("no mapping begins at {iova:#x}")));
                };
                let keys = mapped.keys.clone();
                drop(mapped);
                for key in keys {
                    self.release_use(key);
                }
                state.run_queue.wake(); // as for Map
                Ok(nothing)
            }
            ClientRequest::Status { .. } => Ok(nothing), // handled above
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
        if let Some((code, why)) = self.status_only {
            return Err(Refused(code, why.to_owned()));
        }
        if self.function.is_some() {
            return Err(Refused(Code::Busy, "a connection has one function; connect again for another".into()));
        }
        let all = |wanted: u64, limit: u64| if wanted == 0 { limit } else { wanted };
        let (ddr, hbm) = (all(ddr, limits.ddr), all(hbm, limits.hbm));
        let queues = if queues == 0 { limits.queues } else { queues };
        let wanted =
            [("DDR", ddr, limits.ddr), ("HBM", hbm, limits.hbm), ("queues", queues.into(), limits.queues.into())];
        for (what, wanted, limit) in wanted {
            if wanted > limit {
                return Err(Refused(Code::Quota, format!("{what}: {wanted} requested, a client may have {limit}")));
            }
        }
        let descriptors = self.charge(&state.accounts.descriptors, FUNCTION_DESCRIPTORS - 1 + u64::from(queues))?;
        let (function, calls) = Function::new(limits, ddr, hbm, queues, self.peer.user, &state.accounts)?;
        let failed = |e: std::io::Error| Refused(Code::Failed, format!("cannot create a function: {e}"));
        let page = function.page().buf().export().expect("a memfd").try_clone_to_owned().map_err(failed)?;
        let function = Arc::new(function);
        state.run_queue.add(function.clone()).map_err(failed)?;
        (self.function, self.descriptors) = (Some(function), Some(descriptors));
        let answer =
            OpenAnswer { ddr: ddr.into(), hbm: hbm.into(), queues: queues.into(), reserved: Default::default() };
        Ok((answer.as_bytes().to_vec(), std::iter::once(page).chain(calls).collect()))
    }

    /// Counts one mapping less. Drops a buffer that is no longer mapped.
    fn release_use(&mut self, key: Key) {
        if let Some(buffer) = self.buffers.get_mut(&key) {
            buffer.maps = buffer.maps.saturating_sub(1);
            if buffer.maps == 0 {
                self.bytes -= buffer.buf.len() as u64;
                self.buffers.remove(&key);
            }
        }
    }

    /// Bytes that one more buffer may have.
    fn room_for_buffer(&self, state: &ServerState) -> Result<u64, Refused> {
        let limits = &state.config.limits;
        if self.buffers.len() >= limits.buffers as usize {
            let text = format!("a client may have {} buffers: unmap one", limits.buffers);
            return Err(Refused(Code::Quota, text));
        }
        Ok(limits.bytes - self.bytes)
    }

    /// Charges memory or descriptors to the user.
    fn charge(&self, account: &Arc<Account>, amount: u64) -> Result<Charge, Refused> {
        Charge::new(account, self.peer.user, amount).map_err(|text| Refused(Code::Quota, text))
    }

    fn map(
        &mut self,
        state: &ServerState,
        access: u32,
        segments: &[MapSegment],
        fds: Vec<OwnedFd>,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
        let host = self.function()?.host().clone();
        let access = u8::try_from(access).ok().and_then(Access::from_bits).filter(|a| Access::RW.contains(*a));
        let access = access.filter(|a| !a.is_empty()).ok_or_else(|| {
            Refused(Code::Malformed, "the access of a mapping is 1 (read), 2 (write) or 3 (both)".into())
        })?;
        if fds.len() > MAX_FDS {
            return Err(Refused(Code::BadDescriptor, format!("a map request has at most {MAX_FDS} descriptors")));
        }
        if self.mappings.len() >= 16 * state.config.limits.buffers as usize {
            let text = format!("a client may have {} mappings", 16 * state.config.limits.buffers);
            return Err(Refused(Code::Quota, text));
        }
        // No client is served while page tables are written, so a mapping must not repeat a buffer without bound.
        let all = segments.iter().fold(0u64, |all, segment| all.saturating_add(segment.len.get()));
        let possible = segments.iter().all(|segment| segment.len.get() <= state.config.limits.bytes);
        if possible && all > state.config.limits.bytes {
            let text = format!("a mapping of {all} bytes; the limit is {}", state.config.limits.bytes);
            return Err(Refused(Code::Quota, text));
        }
        // Until the end of this function, each buffer of the request counts as mapped once more, which keeps it alive.
        let mut taken: Vec<Key> = Vec::new();
        let mapped = self.take_buffers(state, fds, &mut taken).and_then(|()| {
            let failed = |e: dmalane_dma::Error| Refused(Code::Failed, e.to_string());
            let mut keys = Vec::new();
            let mut pinned = Vec::new();
            for (i, segment) in segments.iter().enumerate() {
                let key = taken.get(segment.fd.get() as usize).copied().ok_or_else(|| {
                    Refused(Code::BadDescriptor, format!("segment {i} refers to a missing descriptor"))
                })?;
                let buf = &self.buffers[&key].buf;
                let (offset, len) = (segment.offset.get(), segment.len.get());
                let range = usize::try_from(offset).ok().zip(usize::try_from(offset.saturating_add(len)).ok());
                let range = range.filter(|r| r.0 < r.1 && r.1 <= buf.len() && (r.0 | r.1).is_multiple_of(4096));
                let Some((first, end)) = range else {
                    let text = format!(
                        "segment {i}: {len} bytes at offset {offset} are not whole pages of a buffer of {} bytes",
                        buf.len()
                    );
                    return Err(Refused(Code::Malformed, text));
                };
                // Populate now, where a failure is an error; during a transfer it would be SIGBUS.
                self.populate(state, buf, first..end)
                    .map_err(|e| Refused(Code::Failed, format!("segment {i}: {e}")))?;
                pinned.push(host.pin_range(&buf.reference(), first..end).map_err(failed)?);
                keys.push(key);
            }
            let notes = MAPPING_BYTES + SEGMENT_BYTES * segments.len() as u64;
            let charge = self.charge(&state.accounts.memory, all / MAPPED_PER_BYTE + notes)?;
            let mapping = host.map_list(pinned, access).map_err(failed)?;
            Ok((mapping, keys, charge))
        });
        let answer = mapped.map(|(mapping, keys, charge)| {
            for key in &keys {
                if let Some(buffer) = self.buffers.get_mut(key) {
                    buffer.maps += 1;
                }
            }
            let span = mapping.span();
            self.mappings.insert(span.first().bits(), Mapped { _mapping: mapping, keys, _charge: charge });
            MapAnswer { first: span.first().bits().into(), len: span.len().into() }
        });
        for key in taken {
            self.release_use(key);
        }
        Ok((answer?.as_bytes().to_vec(), Vec::new()))
    }

    /// Finds or imports the buffers behind the descriptors, and counts each as mapped once more.
    fn take_buffers(&mut self, state: &ServerState, fds: Vec<OwnedFd>, taken: &mut Vec<Key>) -> Result<(), Refused> {
        for (i, fd) in fds.into_iter().enumerate() {
            // From now on it counts as a buffer, or is closed.
            if let Some(received) = &self.received {
                received.give(1);
            }
            let key = key_of(&fd)?;
            if let Some(buffer) = self.buffers.get_mut(&key) {
                buffer.maps += 1;
            } else {
                let left = self.room_for_buffer(state)?;
                // The memfd is sealed against shrinking only: asked for its length before, it may grow until then.
                let buf = SharedBuf::import_up_to(fd, left).map_err(|e| match e {
                    DmaError::Import(e) if e.kind() == ErrorKind::OutOfMemory && e.raw_os_error().is_none() => {
                        let (used, all) = (self.bytes, state.config.limits.bytes);
                        let text = format!("{e}: {used} of {all} are in use; use smaller ones, or unmap one");
                        Refused(Code::Quota, text)
                    }
                    e => Refused(Code::BadDescriptor, format!("descriptor {i}: {e}")),
                })?;
                let len = buf.len() as u64;
                let charges = [self.charge(&state.accounts.memory, len)?, self.charge(&state.accounts.descriptors, 1)?];
                self.bytes += len;
                self.buffers.insert(key, Buffer { buf, maps: 1, _charges: charges });
            }
            taken.push(key);
        }
        Ok(())
    }

    /// The client's row of a status answer, but for what its function counts.
    pub(crate) fn row(&self) -> ClientStatus {
        let function = self.function.as_deref();
        ClientStatus {
            client: self.id,
            pid: self.peer.pid,
            uid: self.peer.uid,
            queues: function.map_or(0, Function::queues) as u32,
            buffers: self.buffers.len() as u32,
            mappings: self.mappings.len() as u32,
            bytes: self.bytes,
            ddr: function.map_or(0, |f| f.ddr),
            hbm: function.map_or(0, |f| f.hbm),
            errors: self.errors,
            ..ClientStatus::new_zeroed()
        }
    }

    /// Removes all mappings, and then the buffers.
    pub(crate) fn release(&mut self) {
        self.mappings.clear();
        self.buffers.clear();
        self.descriptors = None;
    }

    /// The client's resources.
    pub(crate) fn resources(&self) -> ClientResources {
        ClientResources {
            buffers: self.buffers.len(),
            bytes: self.bytes,
            mappings: self.mappings.len(),
            card: self.function.as_ref().map_or(0, |f| f.ddr + f.hbm),
        }
    }
}

/// The key of a sealed memfd. (For another file, `fstat` may block.)
fn key_of(fd: &OwnedFd) -> Result<Key, Refused> {
    let stat = rustix::fs::fstat(fd.as_fd())
        .map_err(|e| Refused(Code::BadDescriptor, format!("fstat failed on a descriptor: {e}")))?;
    Ok((stat.st_dev, stat.st_ino))
}

fn no_register(bar: u8, offset: u64) -> Refused {
    Refused(Code::NoSuchThing, format!("no 4-byte register at offset {offset:#x} of BAR {bar}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MapSegment;

    /// Requests that may block in the kernel hold up no short ones of the same user.
    #[test]
    fn what_a_client_can_make_long_is_long() {
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Peer { pid: 1, uid: 7, user: 7, allowed: true, admin: false };
        let connection = Connection::new(1, peer, socket.into());
        let segments: [MapSegment; 1] = [MapSegment::new_zeroed()];
        let is_long = |request: ClientRequest<'_>| connection.is_long(&request.encode(1));
        for (bar, long) in [(BAR_REGISTERS, false), (BAR_MEMORY, true)] {
            assert_eq!(is_long(ClientRequest::Read { bar, offset: 0x1000 }), long);
            assert_eq!(is_long(ClientRequest::Write { bar, offset: 0x1000, value: 1 }), long);
        }
        assert!(WAITING.into_iter().all(|offset| is_long(ClientRequest::Write { bar: 0, offset, value: 1 })));
        assert!(is_long(ClientRequest::WriteBytes { bar: BAR_MEMORY, offset: 0, bytes: &[1; 8] }));
        assert!(is_long(ClientRequest::Map { access: 3, segments: &segments }));
        assert!(!is_long(ClientRequest::Status { first: 0 }) && !connection.is_long(b"broken"));
    }
}
