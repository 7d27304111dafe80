//! The client: a bus whose card is in another process.
//!
//! Pinning and mapping are one message, starting and stopping are messages; doorbells, statuses and wishes to be woken are words of the register
//! page. So a driver that polls makes no system call, but for a look now and then whether the daemon is still there.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_card::regs::{self, BAR_REGISTERS};
use dmalane_dma::{
    self as mem, BufferRef, Heap, Mapping, MemfdHeap, Mmio, PageKind, Pinned, Registrar, SharedBuf, Undo,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::config::Limits;
use crate::page::Page;
use crate::server::Totals;
use crate::socket::{self, Received};
use crate::wire::{
    ANSWER, Code, FAILED, FailedAnswer, Header, HelloAnswer, MAX_BYTES, MAX_FDS, MAX_MESSAGE, MAX_SEGMENTS, OpenAnswer,
    PairAnswer, Request, RowAnswer, Segment, TotalsAnswer, VERSION,
};

/// Looks at a status between two looks at whether the daemon is still there.
const LOOKS: u32 = 64;

/// An error of a client.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody listens.
    #[error("cannot connect to {}: {source} (is dmalaned running, and may this user open the socket?)", path.display())]
    Connect {
        /// Where.
        path: PathBuf,
        /// The kernel's answer.
        source: Errno,
    },
    /// The daemon has ended, or closed the connection. What was on the card is gone; buffers and their bytes are not.
    #[error("the daemon at {} is gone: connect again (Client::reconnect) and register buffers anew", .0.display())]
    Disconnected(PathBuf),
    /// The daemon has not answered in time.
    #[error("the daemon at {} has not answered within {after:?}", path.display())]
    Timeout {
        /// Where.
        path: PathBuf,
        /// How long the client waited.
        after: Duration,
    },
    /// The daemon refused.
    #[error("the daemon refused: {text}")]
    Refused {
        /// Why.
        code: Code,
        /// Why, in its words.
        text: String,
    },
    /// The daemon does not keep to the format.
    #[error("the daemon at {} answered what cannot be: {what}", path.display())]
    BadAnswer {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// Memory that no other process can have.
    #[error(
        "this memory cannot be lent to the daemon: take it from a MemfdHeap without reserved huge pages, or from Client::buffer"
    )]
    NotShareable,
    /// A mapping of more buffers, or more pieces of them, than fit a message.
    #[error("a mapping of {pieces} pieces of {buffers} buffers; at most {MAX_SEGMENTS} of {MAX_FDS} are possible")]
    TooManyPieces {
        /// How many.
        pieces: usize,
        /// How many.
        buffers: usize,
    },
    /// The kernel refused what the client needs.
    #[error("{what}: {source}")]
    System {
        /// What could not be done.
        what: &'static str,
        /// The kernel's answer.
        source: Errno,
    },
}

impl From<Error> for mem::Error {
    fn from(error: Error) -> Self {
        Self::Other(Box::new(error))
    }
}

/// How to connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// The daemon's socket.
    pub path: PathBuf,
    /// Bytes of DDR; 0 for as many as a client may have.
    pub ddr: u64,
    /// Bytes of HBM; 0 for as many as a client may have.
    pub hbm: u64,
    /// Queues; 0 for as many as a client may have.
    pub queues: u32,
    /// How long to wait for an answer.
    pub patience: Duration,
}

impl Options {
    /// As much as a client may have of the daemon at `path`, with 10 s of patience.
    pub fn new(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref().to_owned();
        Self { path, ddr: 0, hbm: 0, queues: 0, patience: Duration::from_secs(10) }
    }
}

/// What is said over the socket, one request at a time.
struct Line {
    socket: OwnedFd,
    path: PathBuf,
    next: u64,
    patience: Duration,
}

/// A connection to a daemon, and what its greeting said.
struct Greeted {
    line: Line,
    limits: Limits,
    client: u64,
}

impl Line {
    fn connect(path: &Path, patience: Duration) -> Result<Greeted, Error> {
        let failed = |source| Error::Connect { path: path.to_owned(), source };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).map_err(failed)?;
        // A daemon that neither accepts nor reads is not waited for longer than one that does not answer. (0 would be for ever.)
        let most = Some(patience.clamp(Duration::from_millis(1), Duration::from_secs(86400)));
        set_socket_timeout(&socket, Timeout::Send, most).map_err(failed)?;
        loop {
            match rustix::net::connect(&socket, &address) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(Error::Timeout { path: path.to_owned(), after: patience }),
                other => break other.map_err(failed)?,
            }
        }
        let mut line = Self { socket, path: path.to_owned(), next: 1, patience };
        let (hello, _): (HelloAnswer, _) = line.ask_for(&Request::Hello { min: VERSION, max: VERSION }, &[])?;
        if hello.version.get() != VERSION {
            return Err(line.bad("a version that was not offered"));
        }
        let limits = Limits {
            ddr: hello.ddr.get(),
            hbm: hello.hbm.get(),
            queues: hello.queues.get(),
            buffers: hello.buffers.get(),
            bytes: hello.bytes.get(),
        };
        Ok(Greeted { line, limits, client: hello.client.get() })
    }

    fn bad(&self, what: &'static str) -> Error {
        Error::BadAnswer { path: self.path.clone(), what }
    }

    fn gone(&self) -> Error {
        Error::Disconnected(self.path.clone())
    }

    /// Asks, and waits for the answer: its body, and the descriptors that come with it.
    fn ask(&mut self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
        let deadline = Instant::now().checked_add(self.patience);
        self.ask_until(request, fds, deadline)
    }

    /// The same; `None` waits until there is an answer or the daemon is gone.
    fn ask_until(
        &mut self,
        request: &Request<'_>,
        fds: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
        let seqno = self.next;
        self.next += 1;
        match socket::send(&self.socket, &request.encode(seqno), fds, true) {
            Ok(()) => {}
            // It may have said why before it closed.
            Err(Errno::PIPE | Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => return Err(Error::Timeout { path: self.path.clone(), after: self.patience }),
            Err(source) => return Err(Error::System { what: "cannot send to the daemon", source }),
        }
        let mut buffer = [0; MAX_MESSAGE];
        loop {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(Error::Timeout { path: self.path.clone(), after: self.patience });
            }
            wait_for(&[self.socket.as_fd()], left.unwrap_or(Duration::from_secs(1)));
            let mut fds = Vec::new();
            let n = match socket::receive(&self.socket, &mut buffer, &mut fds) {
                Ok(Received::Message(n)) => n,
                Ok(Received::Nothing) => continue,
                Ok(Received::End) => return Err(self.gone()),
                Ok(Received::TooMuch) => {
                    return Err(self.bad(
                        "a message that is too long, or descriptors that this process may not have (RLIMIT_NOFILE)",
                    ));
                }
                Err(source) => return Err(Error::System { what: "cannot receive from the daemon", source }),
            };
            let Ok((header, body)) = Header::ref_from_prefix(&buffer[..n]) else {
                return Err(self.bad("a message shorter than a header"));
            };
            if header.size.get() as usize != n {
                return Err(self.bad("a message of another size than its header says"));
            }
            let (opcode, number) = (header.opcode.get(), header.seqno.get());
            if opcode == FAILED && (number == seqno || number == 0) {
                return Err(self.refused(body));
            }
            if number < seqno {
                continue; // too late: nobody waits for it any more
            }
            if number != seqno || opcode != request.opcode() | ANSWER {
                return Err(self.bad("an answer to what was not asked"));
            }
            return Ok((body.to_vec(), fds));
        }
    }

    fn refused(&self, body: &[u8]) -> Error {
        let Ok((failed, text)) = FailedAnswer::ref_from_prefix(body) else {
            return self.bad("a refusal that is too short");
        };
        let text = &text[..text.len().min(failed.len.get() as usize)];
        let code = Code::from_number(failed.code.get()).unwrap_or(Code::Failed);
        Error::Refused { code, text: String::from_utf8_lossy(text).into_owned() }
    }

    fn ask_for<T: FromBytes + KnownLayout + Immutable>(
        &mut self,
        request: &Request<'_>,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(T, Vec<OwnedFd>), Error> {
        let (body, fds) = self.ask(request, fds)?;
        let answer = T::read_from_bytes(&body).map_err(|_| self.bad("an answer of the wrong length"))?;
        Ok((answer, fds))
    }
}

/// Waits until one of them is readable or at its end, at most so long. Says whether one is.
fn wait_for(fds: &[BorrowedFd<'_>], timeout: Duration) -> bool {
    let mut fds: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    poll(&mut fds, Some(&timeout)).is_ok_and(|n| n > 0)
}

/// A function of a daemon's card: an [`Mmio`], so that [`dmalane_card::Card`] drives it like a card in this process.
/// Clones are handles to the same.
///
/// Buffers are memfds: those of [`Client::buffer`], or any that a [`mem::MemfdHeap`] gives. The connection ends when the last handle and the last
/// mapping are dropped; then the daemon stops the queues and releases everything.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    options: Options,
    line: Mutex<Line>,
    /// The line's socket again: to be looked at while somebody waits for an answer.
    socket: OwnedFd,
    limits: Limits,
    number: u64,
    page: Page,
    /// Wakes the daemon.
    kick: OwnedFd,
    /// Wake the client, one for each queue.
    calls: Vec<OwnedFd>,
    /// Somebody waits for this one by its descriptor: [`Mmio::wait`] leaves it alone.
    lent: Vec<AtomicBool>,
    gone: OnceLock<Error>,
    looks: AtomicU32,
    /// The IOVAs that the daemon has given out.
    iovas: Mutex<RangeCache<Iova>>,
    /// Buffers that the daemon made, until nobody holds them.
    made: Mutex<Vec<(u64, BufferRef)>>,
}

impl Client {
    /// Connects to a daemon, and opens a function of its card.
    ///
    /// # Errors
    /// [`Error::Connect`]; [`Error::Refused`], with [`Code::Quota`] when the card is shared out; the others.
    pub fn connect(options: Options) -> Result<Self, Error> {
        let Greeted { mut line, limits, client } = Line::connect(&options.path, options.patience)?;
        let Options { ddr, hbm, queues, .. } = options;
        let (answer, fds): (OpenAnswer, _) = line.ask_for(&Request::Open { ddr, hbm, queues }, &[])?;
        let queues = answer.queues.get();
        if !(1..=regs::MAX_CHANNELS).contains(&queues) || fds.len() != queues as usize + 2 {
            return Err(line.bad("a function without its register page, kick and call descriptors"));
        }
        let mut fds = fds.into_iter();
        let page = fds.next().and_then(|fd| SharedBuf::import(fd).ok()).and_then(Page::of);
        let page = page.ok_or_else(|| line.bad("a register page that is none"))?;
        let kick = fds.next().ok_or_else(|| line.bad("a function without its kick descriptor"))?;
        let socket = line.socket.try_clone().map_err(|e| Error::System {
            what: "cannot keep a second descriptor of the connection",
            source: Errno::from_io_error(&e).unwrap_or(Errno::IO),
        })?;
        let space = Span::inclusive(Iova::new(0), Iova::new((1 << 52) - 1)).expect("a constant span");
        Ok(Self(Arc::new(Inner {
            options,
            line: Mutex::new(line),
            socket,
            limits,
            number: client,
            page,
            kick,
            calls: fds.collect(),
            lent: (0..queues).map(|_| AtomicBool::new(false)).collect(),
            gone: OnceLock::new(),
            looks: AtomicU32::new(0),
            iovas: Mutex::new(RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K))),
            made: Mutex::default(),
        })))
    }

    /// A new connection to a daemon at the same place, with the same options: after [`Error::Disconnected`]. It has nothing of this one's:
    /// card memory is zeros, and buffers are to be registered again.
    ///
    /// # Errors
    /// Those of [`Client::connect`], [`Error::Connect`] while there is no daemon.
    pub fn reconnect(&self) -> Result<Self, Error> {
        Self::connect(self.0.options.clone())
    }

    /// The same, trying again for so long while there is no daemon.
    ///
    /// # Errors
    /// As [`Client::reconnect`].
    pub fn reconnect_within(&self, patience: Duration) -> Result<Self, Error> {
        let deadline = Instant::now().checked_add(patience);
        loop {
            match self.reconnect() {
                Err(Error::Connect { .. } | Error::Disconnected(_)) if deadline.is_none_or(|d| Instant::now() < d) => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => return other,
            }
        }
    }

    /// For a test: the connection ends as when the process does.
    #[cfg(test)]
    pub(crate) fn abandon(&self) {
        let _ = rustix::net::shutdown(&self.0.socket, rustix::net::Shutdown::Both);
    }

    /// What this client may have.
    pub fn limits(&self) -> Limits {
        self.0.limits
    }

    /// The number that the daemon knows this client by.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// The number of queues of the function.
    pub fn queues(&self) -> usize {
        self.0.calls.len()
    }

    /// The error that all requests end with once the daemon is gone.
    pub fn gone(&self) -> Option<Error> {
        self.0.look_for_end();
        self.0.gone.get().cloned()
    }

    /// A buffer of at least `len` bytes, zeroed, made by the daemon and counted against what this client may have. It can be mapped like any
    /// other. When the last reference to it is dropped the daemon takes it back, at the next request; when the
    /// connection ends its bytes are lost.
    ///
    /// # Errors
    /// [`Error::Refused`] and the others.
    pub fn buffer(&self, len: usize) -> Result<SharedBuf, Error> {
        self.0.sweep();
        let (answer, fds): (PairAnswer, _) = self.0.ask_for(&Request::Buffer { len: len as u64 }, &[])?;
        let bad = || Error::BadAnswer { path: self.0.options.path.clone(), what: "a buffer that is none" };
        let fd = fds.into_iter().next().ok_or_else(bad)?;
        let buf = SharedBuf::import(fd).ok().filter(|buf| buf.len() >= len).ok_or_else(bad)?;
        lock(&self.0.made).push((answer.first.get(), buf.reference()));
        Ok(buf)
    }
}

impl Inner {
    fn lost(&self, error: Error) -> Error {
        if let Error::Disconnected(_) = error {
            let _ = self.gone.set(error.clone());
        }
        error
    }

    fn alive(&self) -> Result<(), Error> {
        self.gone.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    fn ask(&self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, Error> {
        self.alive()?;
        let asked = lock(&self.line).ask(request, fds);
        asked.map(|(body, _)| body).map_err(|e| self.lost(e))
    }

    fn ask_for<T: FromBytes + KnownLayout + Immutable>(
        &self,
        request: &Request<'_>,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(T, Vec<OwnedFd>), Error> {
        self.alive()?;
        let asked = lock(&self.line).ask_for(request, fds);
        asked.map_err(|e| self.lost(e))
    }

    /// Notices that the daemon has closed the connection.
    fn look_for_end(&self) {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let end = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        if poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().intersects(end) {
            let _ = self.gone.set(Error::Disconnected(self.options.path.clone()));
        }
    }

    /// Has the daemon take back the buffers that nobody holds.
    fn sweep(&self) {
        let mut made = lock(&self.made);
        let dropped: Vec<u64> = made.iter().filter(|(_, memory)| memory.is_last()).map(|(id, _)| *id).collect();
        made.retain(|(id, _)| !dropped.contains(id));
        drop(made);
        for id in dropped {
            // One that the daemon does not take back it counts on; and it says so when there are too many.
            let _ = self.ask(&Request::Close { id }, &[]);
        }
    }

    /// Which queue's register lies at an offset, and which register it is.
    #[inline]
    fn queue(&self, bar: u8, offset: u64) -> Option<(usize, u64)> {
        let offset = offset.checked_sub(regs::CHANNEL_BASE).filter(|_| bar == BAR_REGISTERS)?;
        let queue = usize::try_from(offset / regs::CHANNEL_STRIDE).ok().filter(|q| *q < self.calls.len())?;
        Some((queue, offset % regs::CHANNEL_STRIDE))
    }
}

impl Registrar for Client {
    /// Notes what is to be pinned: the daemon pins as it maps.
    fn pin(&self, buffer: &BufferRef) -> Result<Pinned, mem::Error> {
        self.pin_range(buffer, 0..buffer.len())
    }

    /// [`Error::NotShareable`] for memory that is not a memfd's.
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, mem::Error> {
        let len = buffer.len();
        if range.is_empty() || range.end > len || !(range.start | range.end).is_multiple_of(4096) {
            return Err(mem::Error::BadRange { range, len });
        }
        if buffer.export().is_none() {
            return Err(Error::NotShareable.into());
        }
        Ok(Pinned::of_range(buffer.clone(), range, None, self.0.clone()))
    }

    fn map(&self, pinned: Pinned, access: Access) -> Result<Mapping, mem::Error> {
        self.map_list(vec![pinned], access)
    }

    fn map_list(&self, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, mem::Error> {
        self.0.sweep();
        if list.iter().any(|pinned| !pinned.is_from(&self.0)) {
            return Err(mem::Error::ForeignPin);
        }
        if list.is_empty() {
            return Err(mem::Error::WholeBuffers);
        }
        if !access.intersects(Access::RW) {
            return Err(mem::Error::NoAccess(access));
        }
        // Before the device can write: who borrows the bytes as a slice must have ended.
        list.iter_mut().for_each(|pinned| pinned.admit(access));
        let answer = {
            let mut memories: Vec<&BufferRef> = Vec::new();
            let mut segments = Vec::new();
            for pinned in &list {
                let known = memories.iter().position(|m| m.same_memory(pinned.reference()));
                let fd = known.unwrap_or_else(|| {
                    memories.push(pinned.reference());
                    memories.len() - 1
                });
                segments.push(Segment {
                    fd: (fd as u32).into(),
                    reserved: Default::default(),
                    offset: (pinned.range().start as u64).into(),
                    len: (pinned.range().len() as u64).into(),
                });
            }
            if segments.len() > MAX_SEGMENTS || memories.len() > MAX_FDS {
                return Err(Error::TooManyPieces { pieces: segments.len(), buffers: memories.len() }.into());
            }
            let fds: Vec<BorrowedFd<'_>> = memories.iter().filter_map(|m| m.export()).collect();
            let access = u32::from((access & Access::RW).bits());
            let asked = self.0.ask_for::<PairAnswer>(&Request::Map { access, segments: &segments }, &fds);
            asked?.0
        };
        let len: u64 = list.iter().map(|pinned| pinned.range().len() as u64).sum();
        let first = answer.first.get();
        let span = Span::new(Iova::new(first), answer.len.get()).filter(|span| span.len() == len);
        let lease = span.and_then(|span| lock(&self.0.iovas).reserve(span).ok());
        let Some(lease) = lease else {
            let what = "a mapping where one is, or of another length";
            return Err(Error::BadAnswer { path: self.0.options.path.clone(), what }.into());
        };
        let more = list.split_off(1);
        Ok(Mapping::of_list(list.remove(0), more, lease, access))
    }

    fn pin_limit(&self) -> Option<u64> {
        Some(self.0.limits.bytes)
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }

    /// Memfds without reserved huge pages: another process has to map them.
    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        Arc::new(MemfdHeap::importable(best))
    }
}

impl Mmio for Client {
    /// A status comes from the register page. Once the daemon is gone it is 0: the daemon closes a connection when the queues have stopped, and
    /// a process that has ended touches nothing.
    #[inline]
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, mem::Error> {
        if let Some((queue, register)) = self.0.queue(bar, offset) {
            match register {
                regs::CH_STATUS => {
                    if self.0.looks.fetch_add(1, Ordering::Relaxed) % LOOKS == LOOKS - 1 {
                        self.0.look_for_end();
                    }
                    return Ok(if self.0.gone.get().is_some() { 0 } else { self.0.page.status(queue) });
                }
                regs::CH_DOORBELL => return Ok(self.0.page.doorbell(queue)),
                regs::CH_INTERRUPT => return Ok(self.0.page.wish(queue)),
                _ => {}
            }
        }
        let body = self.0.ask(&Request::Read { bar, offset }, &[]).map_err(|e| no_register(e, bar, offset, 4))?;
        match body.first_chunk::<4>() {
            Some(value) => Ok(u32::from_le_bytes(*value)),
            None => {
                Err(Error::BadAnswer { path: self.0.options.path.clone(), what: "a register without a value" }.into())
            }
        }
    }

    #[inline]
    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), mem::Error> {
        if let Some((queue, register)) = self.0.queue(bar, offset) {
            match register {
                regs::CH_DOORBELL => {
                    self.0.alive()?;
                    if self.0.page.ring(queue, value) {
                        socket::kick(&self.0.kick);
                    }
                    return Ok(());
                }
                regs::CH_INTERRUPT => {
                    self.0.alive()?;
                    self.0.page.set_wish(queue, value & 1);
                    return Ok(());
                }
                _ => {}
            }
        }
        self.0.ask(&Request::Write { bar, offset, value }, &[]).map_err(|e| no_register(e, bar, offset, 4))?;
        Ok(())
    }

    /// By messages: for page tables, not for data.
    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), mem::Error> {
        // A multiple of 8, so that words stay whole.
        for (at, piece) in (0..).step_by(MAX_BYTES).zip(bytes.chunks(MAX_BYTES)) {
            let offset = offset.saturating_add(at);
            let written = self.0.ask(&Request::WriteBytes { bar, offset, bytes: piece }, &[]);
            written.map_err(|e| no_register(e, bar, offset, bytes.len() as u64))?;
        }
        Ok(())
    }

    /// Waits for the calls whose descriptors nobody has asked for, and for the daemon's end.
    fn wait(&self, timeout: Duration) -> bool {
        let lent = self.0.lent.iter().map(|lent| lent.load(Ordering::Relaxed));
        let calls: Vec<&OwnedFd> =
            self.0.calls.iter().zip(lent).filter(|(_, lent)| !lent).map(|(call, _)| call).collect();
        let fds: Vec<BorrowedFd<'_>> = calls.iter().map(|call| call.as_fd()).chain([self.0.socket.as_fd()]).collect();
        if self.0.gone.get().is_some() || !wait_for(&fds, timeout) {
            return false;
        }
        calls.iter().for_each(socket::drain);
        self.0.look_for_end();
        true
    }

    fn event(&self, channel: usize) -> Option<BorrowedFd<'_>> {
        self.0.lent.get(channel)?.store(true, Ordering::Relaxed);
        Some(self.0.calls.get(channel)?.as_fd())
    }
}

impl Undo for Inner {
    /// Waits for the daemon's answer, or its end, however long that takes: until then the card may reach the memory.
    fn unmap(&self, lease: Lease<Iova>) {
        if self.alive().is_ok() {
            let request = Request::Unmap { iova: lease.span().first().bits() };
            let answer = lock(&self.line).ask_until(&request, &[], None);
            if let Err(e) = answer
                && !matches!(self.lost(e), Error::Disconnected(_))
            {
                return; // nobody knows whether it is still there: its addresses stay taken
            }
        }
        lock(&self.iovas).free(lease);
        self.sweep();
    }

    fn unpin(&self, _pages: &SgTable<PhysAddr>) {} // nothing of a client's is pinned but by a mapping
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("path", &self.0.options.path)
            .field("number", &self.0.number)
            .field("queues", &self.queues())
            .finish_non_exhaustive()
    }
}

fn no_register(error: Error, bar: u8, offset: u64, bytes: u64) -> mem::Error {
    match error {
        Error::Refused { code: Code::NoSuchThing, .. } => mem::Error::NoRegister { bar, offset, bytes },
        other => other.into(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these hold is consistent between statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a daemon does and who uses it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Seconds since the daemon was started.
    pub uptime: u64,
    /// What it has done.
    pub totals: Totals,
    /// Clients whose queues do not stop, now.
    pub quarantined: u32,
    /// DDR that clients have, and that there is, in bytes.
    pub ddr: (u64, u64),
    /// HBM that clients have, and that there is, in bytes.
    pub hbm: (u64, u64),
    /// The clients, by number; the one that asks is among them.
    pub clients: Vec<ClientReport>,
}

/// One client of a daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClientReport {
    /// Its number.
    pub client: u64,
    /// Its process, as it was when it connected.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its queues; 0 for one that has opened no function.
    pub queues: u32,
    /// Its buffers.
    pub buffers: u32,
    /// Its mappings.
    pub mappings: u32,
    /// It has gone, and what it had is being released.
    pub closing: bool,
    /// Bytes of its buffers.
    pub bytes: u64,
    /// DDR, in bytes.
    pub ddr: u64,
    /// HBM, in bytes.
    pub hbm: u64,
    /// Bytes moved between host and card for it.
    pub moved: u64,
    /// Requests of it that were refused.
    pub errors: u64,
}

/// Asks the daemon at `path` what it does, without opening a function.
///
/// # Errors
/// Those of [`Client::connect`].
pub fn report(path: &Path) -> Result<Report, Error> {
    let Greeted { mut line, .. } = Line::connect(path, Duration::from_secs(10))?;
    let mut first = 0;
    let mut clients = Vec::new();
    loop {
        let (body, _) = line.ask(&Request::Status { first }, &[])?;
        let short = "a report that is too short";
        let Ok((totals, rest)) = TotalsAnswer::read_from_prefix(&body) else { return Err(line.bad(short)) };
        let rows = <[RowAnswer]>::ref_from_bytes(rest).map_err(|_| line.bad(short))?;
        if rows.len() != totals.rows.get() as usize {
            return Err(line.bad(short));
        }
        clients.extend(rows.iter().map(|row| ClientReport {
            client: row.client.get(),
            pid: row.pid.get(),
            uid: row.uid.get(),
            queues: row.queues.get(),
            buffers: row.buffers.get(),
            mappings: row.mappings.get(),
            closing: row.closing.get() != 0,
            bytes: row.bytes.get(),
            ddr: row.ddr.get(),
            hbm: row.hbm.get(),
            moved: row.moved.get(),
            errors: row.errors.get(),
        }));
        match clients.last() {
            // Numbers go up, so this ends.
            Some(last) if totals.more.get() != 0 && last.client >= first => first = last.client.saturating_add(1),
            _ => {
                return Ok(Report {
                    uptime: totals.uptime.get(),
                    totals: Totals {
                        served: totals.served.get(),
                        released: totals.released.get(),
                        refused: totals.refused.get(),
                        requests: totals.requests.get(),
                        errors: totals.errors.get(),
                        quarantined: totals.quarantined.get().into(),
                    },
                    quarantined: totals.quarantined.get(),
                    ddr: (totals.ddr.get(), totals.ddr_total.get()),
                    hbm: (totals.hbm.get(), totals.hbm_total.get()),
                    clients,
                });
            }
        }
    }
}
