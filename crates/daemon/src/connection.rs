//! A connection: the daemon's state of one client, and the execution of its requests.
//!
//! Everything that a client can send is handled here. A request either succeeds completely or is refused without any
//! effect.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use dmalane_addr::Access;
use dmalane_card::regs::{self, BAR_REGISTERS};
use dmalane_dma::{Error as DmaError, Mapping, Registrar, SharedBuf, error_chain};
use rustix::io::Errno;
use zerocopy::{FromZeros, IntoBytes};

use crate::account::Charge;
use crate::fork::trim;
use crate::function::Function;
use crate::guard::Guard;
use crate::page::{PAGE_BYTES, Page};
use crate::socket;
use crate::state::{Peer, ServerState};
use crate::wire::{
    ANSWER, ClientRequest, ClientStatus, Code, Denied, HelloAnswer, MapSegment, VERSION, failed, message,
};
use crate::worker::Alarm;

/// Bytes of a mapping for each byte of the daemon's memory that it takes: page tables here and in the kernel, and
/// frames.
const MAPPED_PER_BYTE: u64 = 64;
/// And what a mapping takes beside that, and each of its segments: 207 bytes were measured for one of a single page.
const MAPPING_BYTES: u64 = 512;
const SEGMENT_BYTES: u64 = 256;

/// A mapping of more bytes leaves tables that are worth giving back to the kernel.
const LARGE: u64 = 64 << 20;

/// A memfd by device and inode: a client that sends it several times still has one buffer.
type Key = (u64, u64);

/// Memory of the client, for as long as a mapping has a part of it.
struct Buffer {
    buf: SharedBuf,
    /// For its memory, where the kernel may have this process pay for it. After the buffer, which is freed first.
    _charge: Option<Charge>,
}

struct Mapped {
    /// Unmaps on drop.
    mapping: Mapping,
    /// Of each segment. After the mapping.
    _buffers: Vec<Arc<Buffer>>,
    /// For page tables and what else the daemon notes of each page.
    _charge: Charge,
}

/// The state of one client.
pub(crate) struct Connection {
    pub seat: usize,
    pub id: u64,
    pub peer: Peer,
    /// Set when the client may only request the status: the reason.
    pub status_only: Option<&'static str>,
    pub greeted: bool,
    // Dropped before the buffers, and these before the function.
    mappings: BTreeMap<u64, Mapped>,
    /// Those of mappings, and their bytes.
    buffers: HashMap<Key, Weak<Buffer>>,
    bytes: u64,
    pub errors: u64,
    /// The function, and what wakes the worker.
    pub alarm: Arc<Alarm>,
    /// Watches memory of the client, where the kernel allows that.
    guard: Option<Guard>,
    /// Dropped last: its end means that the card accesses nothing.
    pub socket: OwnedFd,
}

impl Connection {
    /// The client of a seat, before its first message.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(seat: usize, id: u64, peer: Peer, socket: OwnedFd) -> std::io::Result<Self> {
        Ok(Self {
            seat,
            id,
            peer,
            socket,
            status_only: None,
            greeted: false,
            mappings: BTreeMap::new(),
            buffers: HashMap::new(),
            bytes: 0,
            errors: 0,
            alarm: Arc::new(Alarm::new()?),
            guard: Guard::new().ok(),
        })
    }

    /// Handles a message and the descriptors that came with it; the answer. The descriptors that it leaves may take any
    /// time to close.
    pub(crate) fn handle(&mut self, state: &ServerState, bytes: &[u8], fds: &mut Vec<OwnedFd>) -> Vec<u8> {
        let (seqno, answer) = match ClientRequest::decode(bytes) {
            Ok((seqno, request)) => {
                let done = self.execute(state, request, fds);
                (seqno, done.map(|body| message(request.opcode() | ANSWER, seqno, &body)))
            }
            Err((seqno, refused)) => (seqno, Err(refused)),
        };
        answer.unwrap_or_else(|Denied(code, text)| self.refuse(seqno, code, &text))
    }

    /// The answer to a malformed or refused request.
    pub(crate) fn refuse(&mut self, seqno: u64, code: Code, text: &str) -> Vec<u8> {
        self.errors += 1;
        failed(seqno, code, text)
    }

    fn execute(
        &mut self,
        state: &ServerState,
        request: ClientRequest<'_>,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Denied> {
        let limits = &state.config.limits;
        let in_order = self.greeted || matches!(request, ClientRequest::Hello { .. });
        Denied::unless(in_order, Code::NotPermitted, || "the first message must be a hello message".to_owned())?;
        let may_carry = matches!(request, ClientRequest::Map { .. } | ClientRequest::Open { .. });
        let why = || "only open and map requests may carry descriptors".to_owned();
        Denied::unless(may_carry || fds.is_empty(), Code::BadDescriptor, why)?;
        match request {
            ClientRequest::Hello { min, max } => {
                let why = || format!("the client speaks versions {min} to {max}, the daemon {VERSION}");
                Denied::unless((min..=max).contains(&VERSION), Code::Version, why)?;
                self.greeted = true;
                // From now on it may send descriptors.
                socket::pass_rights(&self.socket, true);
                let answer =
                    HelloAnswer { version: VERSION.into(), queues: limits.queues.into(), client: self.id.into() };
                Ok(answer.as_bytes().to_vec())
            }
            ClientRequest::Open { ddr, hbm, queues } => self.open(state, (ddr, hbm), queues, std::mem::take(fds)),
            ClientRequest::Read { bar, offset } => {
                let value = self.function()?.card.read32(bar, offset).ok_or_else(|| no_register(bar, offset))?;
                Ok(u64::from(value).to_le_bytes().to_vec())
            }
            ClientRequest::Write { bar, offset, value } => {
                let function = self.function()?;
                // A queue starts with a doorbell of 0.
                if let Some((queue, regs::CH_CONTROL)) = regs::channel_at(offset)
                    && (bar == BAR_REGISTERS && value & 1 == 1 && queue < function.queues)
                {
                    function.forget_doorbell(queue);
                }
                function.card.write32(bar, offset, value).ok_or_else(|| no_register(bar, offset))?;
                self.alarm.wake();
                Ok(Vec::new())
            }
            ClientRequest::WriteBytes { bar, offset, bytes } => {
                self.function()?.write_bytes(bar, offset, bytes)?;
                Ok(Vec::new())
            }
            ClientRequest::Map { access, segments } => {
                // What is no memfd stays with the caller: it may take any time to close.
                for (i, fd) in fds.iter().enumerate() {
                    let is_memfd = rustix::fs::fcntl_get_seals(fd).is_ok();
                    Denied::unless(is_memfd, Code::BadDescriptor, || format!("descriptor {i} is not a memfd"))?;
                }
                let answer = self.map(state, access, segments, std::mem::take(fds));
                self.alarm.wake(); // the worker skips a function while its tables change
                answer
            }
            ClientRequest::Unmap { iova } => {
                let none = || Denied(Code::NoSuchThing, format!("no mapping begins at {iova:#x}"));
                let mapped = self.mappings.remove(&iova).ok_or_else(none)?;
                let len = mapped.mapping.span().len();
                drop(mapped);
                self.forget_unmapped();
                if len >= LARGE {
                    trim();
                }
                self.alarm.wake(); // as for Map
                Ok(Vec::new())
            }
            ClientRequest::Status { first } => Ok(state.status(first, self.peer)),
        }
    }

    fn function(&self) -> Result<&Function, Denied> {
        self.alarm
            .function
            .get()
            .ok_or_else(|| Denied(Code::NotPermitted, "the client has not opened a function".into()))
    }

    fn open(
        &mut self,
        state: &ServerState,
        (ddr, hbm): (u64, u64),
        queues: u32,
        fds: Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Denied> {
        let limits = &state.config.limits;
        if let Some(why) = self.status_only {
            return Err(Denied(Code::Quota, why.to_owned()));
        }
        let why = || "a connection has one function; connect again for another".to_owned();
        Denied::unless(self.alarm.function.get().is_none(), Code::Busy, why)?;
        let granted = |what: &str, wanted: u64, limit: u64| {
            let why = || format!("{what}: {wanted} requested, a client may have {limit}");
            Denied::unless(wanted <= limit, Code::Quota, why).map(|()| if wanted == 0 { limit } else { wanted })
        };
        let (ddr, hbm) = (granted("DDR", ddr, limits.ddr)?, granted("HBM", hbm, limits.hbm)?);
        let queues = granted("queues", queues.into(), limits.queues.into())? as u32;
        let bad = |what: &str, e: &dyn std::fmt::Display| Denied(Code::BadDescriptor, format!("{what}: {e}"));
        let bad_page = |e: &dyn std::fmt::Display| bad("the register page", e);
        let [page, kick, call] = fds.try_into().map_err(|fds: Vec<_>| {
            bad("descriptors", &format!("{}; a function has a register page, a kick and a call", fds.len()))
        })?;
        let page = self.import(page, 2 * PAGE_BYTES as u64).map_err(|e| bad_page(&error_chain(&e)))?;
        page.populate(0, page.len()).map_err(|e| bad_page(&e))?;
        let page = Page::of(page).ok_or_else(|| bad_page(&"too short"))?;
        let function = Function::new(limits, (ddr, hbm, queues), (page, kick, call), self.seat, &state.accounts)?;
        self.alarm.serve(function).map_err(|e| bad("the kick descriptor", &e))?;
        Ok(Vec::new())
    }

    /// Maps a memfd of the client, whose missing pages are not made where the kernel can be told so.
    fn import(&self, fd: OwnedFd, most: u64) -> Result<SharedBuf, DmaError> {
        let buf = SharedBuf::import_up_to(fd, most)?;
        let watched = self.guard.as_ref().map_or(Ok(()), |guard| guard.watch(&buf));
        watched.map(|()| buf).map_err(|e| DmaError::Import(e.into()))
    }

    /// Forgets buffers that are in no mapping any more.
    fn forget_unmapped(&mut self) {
        self.buffers.retain(|_, buffer| buffer.strong_count() > 0);
        self.bytes = self.buffers.values().filter_map(Weak::upgrade).map(|buffer| buffer.buf.len() as u64).sum();
    }

    fn map(
        &mut self,
        state: &ServerState,
        access: u32,
        segments: &[MapSegment],
        fds: Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Denied> {
        let host = self.function()?.host.clone();
        let limits = &state.config.limits;
        let access = u8::try_from(access).ok().and_then(Access::from_bits).filter(|a| Access::RW.contains(*a));
        let access = access.filter(|a| !a.is_empty()).ok_or_else(|| {
            Denied(Code::Malformed, "the access of a mapping is 1 (read), 2 (write) or 3 (both)".into())
        })?;
        let most = 16 * limits.buffers as usize;
        let why = || format!("a client may have {most} mappings");
        Denied::unless(self.mappings.len() < most, Code::Quota, why)?;
        // Page tables take memory and time, so a mapping must not repeat a buffer without bound.
        let all = segments.iter().fold(0u64, |all, segment| all.saturating_add(segment.len.get()));
        let too_long = all > limits.bytes && segments.iter().all(|segment| segment.len.get() <= limits.bytes);
        let why = || format!("a mapping of {all} bytes; the limit is {}", limits.bytes);
        Denied::unless(!too_long, Code::Quota, why)?;
        // Before page tables are made.
        let notes = MAPPING_BYTES + SEGMENT_BYTES * segments.len() as u64;
        let charge = state.accounts.memory.charge(self.seat, all / MAPPED_PER_BYTE + notes);
        let mapped = self.take_buffers(state, fds).and_then(|taken| {
            let failed = |e: dmalane_dma::Error| Denied(Code::Failed, error_chain(&e));
            let charge = charge?;
            let mut buffers = Vec::new();
            let mut pinned = Vec::new();
            for (i, segment) in segments.iter().enumerate() {
                let buffer = taken.get(segment.fd.get() as usize).ok_or_else(|| {
                    Denied(Code::BadDescriptor, format!("segment {i} refers to a missing descriptor"))
                })?;
                let buf = &buffer.buf;
                let (offset, len) = (segment.offset.get(), segment.len.get());
                let range = usize::try_from(offset).ok().zip(usize::try_from(offset.saturating_add(len)).ok());
                let range = range.filter(|r| r.0 < r.1 && r.1 <= buf.len() && (r.0 | r.1).is_multiple_of(4096));
                let (first, end) = range.ok_or_else(|| {
                    let all = buf.len();
                    let why = format!("{len} bytes at offset {offset} are not whole pages of a buffer of {all} bytes");
                    Denied(Code::Malformed, format!("segment {i}: {why}"))
                })?;
                // Now, where a missing page is an error; during a transfer it would be a SIGBUS.
                buf.populate(first, end - first).map_err(|e| {
                    let hole = "a page was never touched, or was given back to the kernel: touch it first";
                    let is_hole = e.raw_os_error() == Some(Errno::FAULT.raw_os_error());
                    let why = if is_hole { hole.to_owned() } else { format!("no memory: {e}") };
                    Denied(Code::Failed, format!("segment {i}: {why}"))
                })?;
                pinned.push(host.pin_range(&buf.reference(), first..end).map_err(failed)?);
                buffers.push(buffer.clone());
            }
            let mapping = host.map_list(pinned, access).map_err(failed)?;
            Ok(Mapped { mapping, _buffers: buffers, _charge: charge })
        });
        let answer = mapped.map(|mapped| {
            let first = mapped.mapping.span().first().bits();
            self.mappings.insert(first, mapped);
            first.to_le_bytes().to_vec()
        });
        self.forget_unmapped();
        if answer.is_err() && all >= LARGE {
            trim();
        }
        answer
    }

    /// Finds or imports the buffers behind the descriptors.
    fn take_buffers(&mut self, state: &ServerState, fds: Vec<OwnedFd>) -> Result<Vec<Arc<Buffer>>, Denied> {
        let limits = &state.config.limits;
        let mut taken = Vec::new();
        for (i, fd) in fds.into_iter().enumerate() {
            let bad = |e: &dyn std::fmt::Display| Denied(Code::BadDescriptor, format!("descriptor {i}: {e}"));
            // Of a sealed memfd: for another file, `fstat` may block.
            let stat = rustix::fs::fstat(&fd).map_err(|e| bad(&e))?;
            let key = (stat.st_dev, stat.st_ino);
            let known = self.buffers.get(&key).and_then(Weak::upgrade);
            let buffer = if let Some(buffer) = known {
                buffer
            } else {
                let why = || format!("a client may have {} buffers: unmap one", limits.buffers);
                Denied::unless(self.buffers.len() < limits.buffers as usize, Code::Quota, why)?;
                // The memfd is sealed against shrinking only: asked for its length before, it may grow until then.
                let buf = self.import(fd, limits.bytes - self.bytes).map_err(|e| match e {
                    DmaError::Import(e) if e.kind() == ErrorKind::OutOfMemory && e.raw_os_error().is_none() => {
                        let (used, all) = (self.bytes, limits.bytes);
                        let text = format!("{e}: {used} of {all} are in use; use smaller ones, or unmap one");
                        Denied(Code::Quota, text)
                    }
                    e => bad(&error_chain(&e)),
                })?;
                let (len, memory) = (buf.len() as u64, &state.accounts.memory);
                let _charge = self.guard.is_none().then(|| memory.charge(self.seat, len)).transpose()?;
                let buffer = Arc::new(Buffer { buf, _charge });
                self.bytes += len;
                self.buffers.insert(key, Arc::downgrade(&buffer));
                buffer
            };
            taken.push(buffer);
        }
        Ok(taken)
    }

    /// The client's row of a status answer, but for what its function counts.
    pub(crate) fn row(&self) -> ClientStatus {
        let function = self.alarm.function.get();
        ClientStatus {
            client: self.id,
            pid: self.peer.pid,
            uid: self.peer.uid,
            queues: function.map_or(0, |f| f.queues) as u32,
            buffers: self.buffers.len() as u32,
            mappings: self.mappings.len() as u32,
            bytes: self.bytes,
            ddr: function.map_or(0, |f| f.ddr),
            hbm: function.map_or(0, |f| f.hbm),
            errors: self.errors,
            ..ClientStatus::new_zeroed()
        }
    }

    /// Removes all mappings, then the buffers, then the function; the socket is left.
    pub(crate) fn release(self) -> OwnedFd {
        self.socket
    }
}

fn no_register(bar: u8, offset: u64) -> Denied {
    Denied(Code::NoSuchThing, format!("no 4-byte register at offset {offset:#x} of BAR {bar}"))
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{Heap, MemfdHeap, PageKind};

    use super::*;
    use crate::config::Config;
    use crate::wire::FunctionFiles;

    const PAGE: u64 = 4096;

    /// The state of a daemon that lets a client have buffers of eight pages in all, and a client with a function.
    fn client() -> (ServerState, Connection) {
        let mut config = Config { memory: Some(8 << 20), user_percent: 100, ..Config::default() };
        config.limits.bytes = 8 * PAGE;
        let state = ServerState::new(config).unwrap();
        let peer = Peer { pid: 1, uid: 1, user: 1, admin: false };
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let seat = state.table.sit(1, ClientStatus { client: 1, ..ClientStatus::new_zeroed() }).unwrap();
        let mut connection = Connection::new(seat, 1, peer, socket.into()).unwrap();
        connection.greeted = true;
        let files = FunctionFiles::new().unwrap();
        let files = files.fds().map(|fd| fd.try_clone_to_owned().unwrap()).into();
        connection.open(&state, (2 << 20, 4 << 20), 1, files).unwrap();
        (state, connection)
    }

    /// Touched.
    fn buffer(pages: u64) -> OwnedFd {
        let buf = MemfdHeap::starting_at(PageKind::Base).allocate((pages * PAGE) as usize).unwrap().share();
        buf.as_volatile_slice().fill(1);
        buf.export().unwrap().try_clone_to_owned().unwrap()
    }

    /// Maps the first page of each of them.
    fn map(connection: &mut Connection, state: &ServerState, segments: &[u32], fds: Vec<OwnedFd>) -> Result<u64, Code> {
        let segment =
            |fd: &u32| MapSegment { fd: (*fd).into(), reserved: 0.into(), offset: 0.into(), len: PAGE.into() };
        let segments: Vec<_> = segments.iter().map(segment).collect();
        let answer = connection.map(state, 3, &segments, fds).map_err(|Denied(code, _)| code)?;
        Ok(u64::from_le_bytes(answer.try_into().unwrap()))
    }

    #[test]
    fn each_segment_is_charged() {
        let (state, mut connection) = client();
        let mut charged = Vec::new();
        for segments in [&[0][..], &[0; 8]] {
            let before = state.accounts.memory.in_use(None);
            let pages = (segments.len() as u64 * PAGE) / MAPPED_PER_BYTE;
            map(&mut connection, &state, segments, vec![buffer(1)]).unwrap();
            charged.push(state.accounts.memory.in_use(None) - before - pages);
        }
        assert!(charged[1] >= charged[0] + 7 * 207, "{charged:?}: as many bytes were measured for one");
    }

    #[test]
    fn each_queue_is_charged() {
        let (state, connection) = client();
        let in_use = || state.accounts.memory.in_use(None);
        let charged = |queues| {
            let files = FunctionFiles::new().unwrap();
            let [_, kick, call] = files.fds().map(|fd| fd.try_clone_to_owned().unwrap());
            let files = (Page::of(files.page).unwrap(), kick, call);
            let (before, sizes) = (in_use(), (2 << 20, 4 << 20, queues));
            let function = Function::new(&state.config.limits, sizes, files, connection.seat, &state.accounts);
            let _function = function.map_err(|Denied(_, why)| why).unwrap();
            in_use() - before
        };
        assert_eq!(charged(3) - charged(1), 2 * (192 << 10));
    }

    #[test]
    fn other_requests_carry_no_descriptors() {
        let (state, mut connection) = client();
        let read = || ClientRequest::Read { bar: BAR_REGISTERS, offset: regs::ID };
        let refused = connection.execute(&state, read(), &mut vec![buffer(1)]);
        assert_eq!(refused.map_err(|Denied(code, _)| code), Err(Code::BadDescriptor));
        assert!(connection.execute(&state, read(), &mut Vec::new()).is_ok());
    }

    #[test]
    fn buffers_of_one_message_count_together() {
        let (state, mut connection) = client();
        assert_eq!(map(&mut connection, &state, &[0, 1], vec![buffer(5), buffer(4)]), Err(Code::Quota));
        assert_eq!((connection.row().bytes, connection.row().buffers), (0, 0));
        map(&mut connection, &state, &[0, 1], vec![buffer(5), buffer(3)]).unwrap();
    }

    #[test]
    fn pages_that_the_kernel_has_the_daemon_pay_for_are_charged() {
        let (state, mut connection) = client();
        connection.guard = None;
        let in_use = || state.accounts.memory.in_use(None);
        let before = in_use();
        let iova = map(&mut connection, &state, &[0], vec![buffer(8)]).unwrap();
        assert_eq!(in_use() - before, 8 * PAGE + PAGE / MAPPED_PER_BYTE + MAPPING_BYTES + SEGMENT_BYTES);
        connection.execute(&state, ClientRequest::Unmap { iova }, &mut Vec::new()).unwrap();
        assert_eq!(in_use(), before);
    }
}
