//! The client: gives a driver access to a card in another process.
//!
//! One message pins and maps a buffer; starting and stopping a queue are messages too. Doorbells, statuses and wake-up
//! requests are words of the register page. A driver that polls therefore makes no system call, except for an
//! occasional check that the daemon is still running and answers: a page stays as it is when its daemon is stopped.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_card::regs::{self, BAR_REGISTERS};
use dmalane_dma::{
    self as mem, BufferRef, Heap, Mapping, MemfdHeap, Mmio, PageKind, PeerError, Pinned, Registrar, SharedBuf, Undo,
    check_peer, lock, trusted_users,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use crate::page::Page;
use crate::socket::{self, Received, readable};
use crate::wire::{
    ANSWER, ClientRequest, ClientStatus, Code, FAILED, FailedAnswer, FunctionFiles, HelloAnswer, MAX_BYTES, MAX_FDS,
    MAX_MESSAGE, MAX_SEGMENTS, MapSegment, MessageHeader, StatusAnswer, VERSION,
};

/// Status reads between two checks that the daemon is still running.
const STATUS_READS_PER_CHECK: u32 = 64;
/// A daemon that has said nothing for this time is asked for an answer. Of the time between two checks of whether it is
/// there, at most so much counts: the daemon is not to blame for the time in which this process did not run.
const ASK_AFTER: Duration = Duration::from_secs(1);

/// An error of a client.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The socket cannot be opened, or no daemon listens on it.
    #[error("cannot connect to {}{}", path.display(), match *source {
        Errno::ACCESS => ": this user may not open it",
        Errno::CONNREFUSED => ": nobody listens there",
        Errno::NOENT => " (is dmalaned running?)",
        _ => "",
    })]
    Connect {
        /// The daemon's socket.
        path: PathBuf,
        /// The kernel's error.
        source: Errno,
    },
    /// The daemon has exited or closed the connection. Card memory is lost; buffers keep their contents, and can be
    /// registered with another client.
    #[error("the daemon at {} is gone, with all that was on its card: open the device again", .0.display())]
    Disconnected(PathBuf),
    /// The daemon has not answered in time.
    #[error("the daemon at {} has not answered within {after:?}", path.display())]
    Timeout {
        /// The daemon's socket.
        path: PathBuf,
        /// Time that the client waited.
        after: Duration,
    },
    /// The socket belongs to another user than was expected.
    #[error(
        "cannot use {}: if the user of the daemon is right, say so (-d daemon:SOCKET,server-uid=UID, \
         dmalaned status --server-uid UID)",
        path.display()
    )]
    WrongServer {
        /// The daemon's socket.
        path: PathBuf,
        /// The user that the daemon runs as.
        source: PeerError,
    },
    /// The daemon refused a request.
    #[error("the daemon refused: {text}")]
    Refused {
        /// The reason, as a code.
        code: Code,
        /// The reason, as the daemon's text.
        text: String,
    },
    /// The daemon sent an answer that violates the protocol.
    #[error("invalid answer from the daemon at {}: {what}", path.display())]
    BadAnswer {
        /// The daemon's socket.
        path: PathBuf,
        /// The violation.
        what: &'static str,
    },
    /// Memory that another process cannot map. [`Client::buffer`] allocates some that it can.
    #[error("this memory cannot be shared with the daemon: it must be that of a memfd, without reserved huge pages")]
    NotShareable,
    /// A system call of the client failed.
    #[error("{what}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: Errno,
    },
}

impl From<ClientError> for mem::Error {
    fn from(error: ClientError) -> Self {
        Self::Backend(Box::new(error))
    }
}

/// Options of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientOptions {
    /// The daemon's socket.
    pub path: PathBuf,
    /// Bytes of DDR; 0 for the per-client limit.
    pub ddr: u64,
    /// Bytes of HBM; 0 for the per-client limit.
    pub hbm: u64,
    /// Queues; 0 for the per-client limit.
    pub queues: u32,
    /// Longest time to wait for an answer.
    pub timeout: Duration,
    /// Users to whom the socket may belong: who called listen(2), which is root under socket activation. Empty for all.
    pub server_uids: Vec<u32>,
}

impl ClientOptions {
    /// Options for the daemon at `path`, which must belong to root or the user of this process: per-client limits for
    /// all resources, and a timeout of 10 s.
    pub fn new(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref().to_owned();
        Self { path, ddr: 0, hbm: 0, queues: 0, timeout: Duration::from_secs(10), server_uids: trusted_users() }
    }
}

/// The socket, with one request at a time in flight.
struct Transport {
    options: ClientOptions,
    socket: OwnedFd,
    line: Mutex<Line>,
    /// The connection has ended, and every request fails.
    gone: AtomicBool,
    /// The daemon does not answer, and its status is unknown until it does.
    silent: AtomicBool,
}

/// Numbers of requests, and when the daemon answered.
struct Line {
    /// The number of the next request.
    next: u64,
    /// When the daemon was last heard.
    heard: Instant,
    /// A check awaits an answer: the last time that it looked for one, and how long it has waited.
    asked: Option<(Instant, Duration)>,
}

impl Transport {
    /// A connection to a daemon, and what the daemon says about it.
    fn connect(options: ClientOptions) -> Result<(Self, HelloAnswer), ClientError> {
        let path = || options.path.clone();
        let failed = |source| ClientError::Connect { path: path(), source };
        // 0 would wait for ever.
        let most = options.timeout.clamp(Duration::from_millis(1), Duration::from_secs(86400));
        let socket = match mem::connect_seqpacket(&options.path, None, Some(most)) {
            Err(Errno::AGAIN) => return Err(ClientError::Timeout { path: path(), after: options.timeout }),
            other => other.map_err(failed)?,
        };
        check_peer(&socket, &options.server_uids)
            .map_err(|source| ClientError::WrongServer { path: path(), source })?;
        let line = Line { next: 1, heard: Instant::now(), asked: None };
        let (gone, silent) = (AtomicBool::new(false), AtomicBool::new(false));
        let transport = Self { options, socket, line: Mutex::new(line), gone, silent };
        let hello: HelloAnswer = transport.ask(&ClientRequest::Hello { min: VERSION, max: VERSION }, &[])?;
        if hello.version.get() != VERSION {
            return Err(transport.bad("a protocol version that the client did not offer"));
        }
        Ok((transport, hello))
    }

    fn bad(&self, what: &'static str) -> ClientError {
        ClientError::BadAnswer { path: self.options.path.clone(), what }
    }

    /// The daemon has not answered in time.
    fn timeout(&self) -> ClientError {
        self.silent.store(true, Ordering::Relaxed);
        ClientError::Timeout { path: self.options.path.clone(), after: self.options.timeout }
    }

    /// The connection has ended.
    fn gone(&self) -> ClientError {
        self.gone.store(true, Ordering::Relaxed);
        ClientError::Disconnected(self.options.path.clone())
    }

    fn alive(&self) -> Result<(), ClientError> {
        if self.gone.load(Ordering::Relaxed) { Err(self.gone()) } else { Ok(()) }
    }

    /// Checks whether the daemon has closed the connection, and whether it answers.
    fn check(&self) {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP | PollFlags::IN)];
        let end = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        let events = poll(&mut fds, Some(&Timespec::default())).map_or(PollFlags::empty(), |_| fds[0].revents());
        if events.intersects(end) {
            self.gone();
            return;
        }
        // Another thread's request awaits an answer itself, for as long at most.
        let Ok(mut line) = self.line.try_lock() else { return };
        let now = Instant::now();
        if events.contains(PollFlags::IN) {
            // Of a request that timed out, or of a check: only that there is an answer counts.
            if let Ok(Received::Message(_)) = socket::receive(&self.socket, &mut [0; MAX_MESSAGE], &mut Vec::new()) {
                self.heard(&mut line, now);
            }
        } else if let Some((last, waited)) = &mut line.asked {
            *waited += now.saturating_duration_since(std::mem::replace(last, now)).min(ASK_AFTER);
            if *waited >= self.options.timeout {
                self.silent.store(true, Ordering::Relaxed);
            }
        } else if now.saturating_duration_since(line.heard) >= ASK_AFTER {
            let question = ClientRequest::Read { bar: BAR_REGISTERS, offset: regs::ID }.encode(line.next);
            if socket::send(&self.socket, &question, &[], false).is_ok() {
                (line.next, line.asked) = (line.next + 1, Some((now, Duration::ZERO)));
            }
        }
    }

    fn heard(&self, line: &mut Line, now: Instant) {
        (line.heard, line.asked) = (now, None);
        self.silent.store(false, Ordering::Relaxed);
    }

    /// Fails while the daemon does not answer.
    fn answers(&self) -> Result<(), ClientError> {
        if self.silent.load(Ordering::Relaxed) { Err(self.timeout()) } else { Ok(()) }
    }

    /// Sends a request and waits for the answer of this type.
    fn ask<T: FromBytes>(&self, request: &ClientRequest<'_>, fds: &[BorrowedFd<'_>]) -> Result<T, ClientError> {
        let body = self.exchange(request, fds)?;
        T::read_from_bytes(&body).map_err(|_| self.bad("an answer of the wrong length"))
    }

    /// Sends a request and waits for the body of its answer.
    fn exchange(&self, request: &ClientRequest<'_>, fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, ClientError> {
        if self.silent.load(Ordering::Relaxed) {
            self.check();
        }
        // Until the answer is here.
        let mut line = lock(&self.line);
        self.alive()?;
        self.answers()?;
        let start = Instant::now();
        let seqno = line.next;
        line.next += 1;
        match socket::send(&self.socket, &request.encode(seqno), fds, true) {
            // The daemon may have sent a reason before it closed the connection.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => return Err(self.timeout()),
            Err(source) => return Err(ClientError::System { what: "cannot send to the daemon", source }),
        }
        let mut buffer = [0; MAX_MESSAGE];
        loop {
            let left = self.options.timeout.saturating_sub(start.elapsed());
            readable([Some(self.socket.as_fd())], Some(left));
            let n = match socket::receive(&self.socket, &mut buffer, &mut Vec::new()) {
                Ok(Received::Message(n)) => n,
                // Looked for once more when the time is over: this process may have been stopped meanwhile.
                Ok(Received::Nothing) if left.is_zero() => return Err(self.timeout()),
                Ok(Received::Nothing) => continue,
                Ok(Received::End) => return Err(self.gone()),
                Ok(Received::TooMuch) => return Err(self.bad("a message that is too long, or has descriptors")),
                Err(source) => return Err(ClientError::System { what: "cannot receive from the daemon", source }),
            };
            self.heard(&mut line, Instant::now());
            let header = MessageHeader::ref_from_prefix(&buffer[..n]).ok();
            let Some((header, body)) = header.filter(|(header, _)| header.size.get() as usize == n) else {
                return Err(self.bad("a message whose size differs from its header"));
            };
            let (opcode, number) = (header.opcode.get(), header.seqno.get());
            if opcode == FAILED && (number == seqno || number == 0) {
                return Err(self.refused(body));
            }
            if number < seqno {
                continue; // the answer to an earlier request that timed out
            }
            if number != seqno || opcode != request.opcode() | ANSWER {
                return Err(self.bad("an answer to another request"));
            }
            return Ok(body.to_vec());
        }
    }

    fn refused(&self, body: &[u8]) -> ClientError {
        let Ok((failed, text)) = FailedAnswer::ref_from_prefix(body) else {
            return self.bad("an error answer that is too short");
        };
        let text = &text[..text.len().min(failed.len.get() as usize)];
        let code = Code::from_number(failed.code.get()).unwrap_or(Code::Failed);
        ClientError::Refused { code, text: String::from_utf8_lossy(text).into_owned() }
    }
}

/// A function of a daemon's card. It implements [`Mmio`], so [`dmalane_card::Card`] drives it like a card in this
/// process. Clones are handles to the same function.
///
/// Buffers are memfds of this process, from [`Client::buffer`] or from a [`mem::MemfdHeap`]. The
/// connection ends when the last handle and the last mapping are dropped; then the daemon stops the queues and releases
/// all resources of the client.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    transport: Transport,
    number: u64,
    queues: usize,
    page: Page,
    /// Wakes the daemon.
    kick: OwnedFd,
    /// Wakes the client.
    call: OwnedFd,
    status_reads: AtomicU32,
    /// The IOVAs that the daemon has assigned.
    iovas: Mutex<RangeCache<Iova>>,
}

impl Client {
    /// Connects to a daemon and opens a function of its card.
    ///
    /// # Errors
    /// [`ClientError::Connect`]; [`ClientError::Refused`], with [`Code::Quota`] when the card has too little left; the
    /// other errors of the connection.
    pub fn connect(options: ClientOptions) -> Result<Self, ClientError> {
        let ClientOptions { ddr, hbm, queues, .. } = options;
        let (transport, hello) = Transport::connect(options)?;
        let queues = if queues == 0 { hello.queues.get() } else { queues };
        let files = FunctionFiles::new().map_err(|e| {
            let source = Errno::from_io_error(&e).unwrap_or(Errno::NOMEM);
            ClientError::System { what: "cannot create a register page and wake-ups", source }
        })?;
        transport.ask::<()>(&ClientRequest::Open { ddr, hbm, queues }, &files.fds())?;
        let FunctionFiles { page, kick, call, .. } = files;
        let space = Span::inclusive(Iova::new(0), Iova::new((1 << 52) - 1)).expect("a constant span");
        Ok(Self(Arc::new(Inner {
            transport,
            number: hello.client.get(),
            queues: queues as usize,
            page: Page::of(page).expect("made for it"),
            kick,
            call,
            status_reads: AtomicU32::new(0),
            iovas: Mutex::new(RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K))),
        })))
    }

    /// For a test: ends the connection as the end of the process would.
    #[cfg(test)]
    pub(crate) fn abandon(&self) {
        let _ = rustix::net::shutdown(&self.0.transport.socket, rustix::net::Shutdown::Both);
    }

    /// The number by which the daemon identifies this client.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// The number of queues of the function.
    pub fn queues(&self) -> usize {
        self.0.queues
    }

    /// The error with which every request fails once the connection has ended; `None` while it is open.
    pub fn gone(&self) -> Option<ClientError> {
        self.0.transport.check();
        self.0.transport.alive().err()
    }

    /// A zeroed buffer of at least `len` bytes that the card can reach. The memory belongs to this process, also in the
    /// kernel's accounts. It counts against the limits of this client while it is mapped.
    ///
    /// # Errors
    /// Those of [`MemfdHeap`].
    pub fn buffer(&self, len: usize) -> Result<SharedBuf, mem::Error> {
        Ok(MemfdHeap::importable(None).allocate(len)?.share())
    }
}

impl Inner {
    /// The queue whose register is at this offset, and the register's offset within the queue's block.
    #[inline]
    fn queue(&self, bar: u8, offset: u64) -> Option<(usize, u64)> {
        regs::channel_at(offset).filter(|(queue, _)| bar == BAR_REGISTERS && *queue < self.queues)
    }
}

impl Registrar for Client {
    /// Records the buffer; the daemon pins it when it maps it. [`ClientError::NotShareable`] for memory without a
    /// descriptor.
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, mem::Error> {
        buffer.check_pages(&range, 4096)?;
        // The daemon makes no pages for its clients.
        buffer.populate(&range).map_err(|source| mem::Error::Allocate { len: range.len(), kind: "pages", source })?;
        buffer.export().map_err(|e| match e {
            mem::Error::NoDescriptor => ClientError::NotShareable.into(),
            e => e,
        })?;
        Ok(Pinned::new(buffer.clone(), range, None, self.0.clone()))
    }

    fn map_list(&self, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, mem::Error> {
        // Before the device can write: waits until no thread borrows the bytes as a slice.
        let len = Pinned::admit_all(&mut list, &self.0, access)?;
        let first = {
            let mut memories: Vec<&BufferRef> = Vec::new();
            let mut segments = Vec::new();
            for pinned in &list {
                let known = memories.iter().position(|m| m.same_memory(pinned.reference()));
                let fd = known.unwrap_or_else(|| {
                    memories.push(pinned.reference());
                    memories.len() - 1
                });
                segments.push(MapSegment {
                    fd: (fd as u32).into(),
                    reserved: Default::default(),
                    offset: (pinned.range().start as u64).into(),
                    len: (pinned.range().len() as u64).into(),
                });
            }
            if segments.len() > MAX_SEGMENTS || memories.len() > MAX_FDS {
                // As the daemon would refuse it.
                let text = format!(
                    "a mapping of {} segments from {} buffers; at most {MAX_SEGMENTS} from {MAX_FDS} are possible",
                    segments.len(),
                    memories.len()
                );
                return Err(ClientError::Refused { code: Code::Malformed, text }.into());
            }
            let fds: Vec<BorrowedFd<'_>> = memories.iter().map(|m| m.export()).collect::<Result<_, _>>()?;
            let access = u32::from((access & Access::RW).bits());
            self.0.transport.ask::<U64>(&ClientRequest::Map { access, segments: &segments }, &fds)?.get()
        };
        let span = Span::new(Iova::new(first), len);
        let lease = span.and_then(|span| lock(&self.0.iovas).reserve(span).ok());
        let Some(lease) = lease else {
            return Err(self.0.transport.bad("a mapping that overlaps another").into());
        };
        Ok(Mapping::new(list, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.0)
    }

    /// A heap of memfds without reserved huge pages, which another process can map.
    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        Arc::new(MemfdHeap::importable(best))
    }
}

impl Mmio for Client {
    /// Reads a status from the register page, without a message. Once the connection has ended the status is 0: the
    /// daemon closes it only after the queues have stopped, and a daemon that has exited accesses no memory.
    #[inline]
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, mem::Error> {
        if let Some((queue, register)) = self.0.queue(bar, offset) {
            match register {
                regs::CH_STATUS => {
                    if self.0.status_reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(STATUS_READS_PER_CHECK) {
                        self.0.transport.check();
                    }
                    if self.0.transport.alive().is_err() {
                        return Ok(0);
                    }
                    self.0.transport.answers()?;
                    return Ok(self.0.page.status(queue));
                }
                regs::CH_DOORBELL => return Ok(self.0.page.doorbell(queue)),
                regs::CH_INTERRUPT => return Ok(self.0.page.wakeup_wanted(queue)),
                _ => {}
            }
        }
        let read = self.0.transport.ask::<U64>(&ClientRequest::Read { bar, offset }, &[]);
        read.map(|value| value.get() as u32).map_err(|e| no_register(e, bar, offset, 4))
    }

    #[inline]
    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), mem::Error> {
        if let Some((queue, register)) = self.0.queue(bar, offset) {
            match register {
                regs::CH_DOORBELL => {
                    self.0.transport.alive()?;
                    if self.0.page.ring(queue, value) {
                        socket::kick(&self.0.kick);
                    }
                    return Ok(());
                }
                regs::CH_INTERRUPT => {
                    self.0.transport.alive()?;
                    self.0.page.swap_wakeup_wanted(queue, value & 1);
                    return Ok(());
                }
                _ => {}
            }
        }
        let written = self.0.transport.ask(&ClientRequest::Write { bar, offset, value }, &[]);
        written.map_err(|e| no_register(e, bar, offset, 4))
    }

    /// Sends the bytes in messages: suitable for page tables, not for payload.
    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), mem::Error> {
        // MAX_BYTES is a multiple of 8, so no word is split.
        for (at, chunk) in (0..).step_by(MAX_BYTES).zip(bytes.chunks(MAX_BYTES)) {
            let offset = offset.saturating_add(at);
            let written = self.0.transport.ask(&ClientRequest::WriteBytes { bar, offset, bytes: chunk }, &[]);
            let () = written.map_err(|e| no_register(e, bar, offset, bytes.len() as u64))?;
        }
        Ok(())
    }

    /// Waits for a call, and for the end of the connection.
    fn wait(&self, timeout: Duration) -> bool {
        let Inner { transport, call, .. } = &*self.0;
        let fds = [Some(call.as_fd()), Some(transport.socket.as_fd())];
        if transport.alive().is_err() {
            return false;
        }
        let called = readable(fds, Some(timeout)) != [false; 2];
        if called {
            socket::drain(call);
        }
        transport.check();
        called
    }
}

impl Undo for Inner {
    /// The card may access the memory until the daemon has answered or the connection has ended.
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        let request = ClientRequest::Unmap { iova: lease.span().first().bits() };
        if !matches!(self.transport.exchange(&request, &[]), Ok(_) | Err(ClientError::Disconnected(_))) {
            return false; // the mapping may still exist, so its addresses stay reserved
        }
        lock(&self.iovas).free(lease);
        true
    }

    fn unpin(&self, _pages: &SgTable<PhysAddr>) {} // the daemon pins only what is mapped
}

mem::debug_as!(Client, |it| "Client({}: {})", it.0.transport.options.path.display(), it.0.number);

fn no_register(error: ClientError, bar: u8, offset: u64, bytes: u64) -> mem::Error {
    match error {
        ClientError::Refused { code: Code::NoSuchThing, .. } => mem::Error::NoRegister { bar, offset, bytes },
        other => other.into(),
    }
}

/// The state of a daemon, with its clients.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DaemonStatus {
    /// Seconds since the daemon was started.
    pub uptime: u64,
    /// Bytes of DDR in use, and in total.
    pub ddr: (u64, u64),
    /// Bytes of HBM in use, and in total.
    pub hbm: (u64, u64),
    /// The clients, by number; the connection that asks for the status is one of them.
    pub clients: Vec<ClientStatus>,
}

/// Queries the status of a daemon without opening a function, with the path, timeout and users of these options.
///
/// # Errors
/// Those of [`Client::connect`].
pub fn status(options: &ClientOptions) -> Result<DaemonStatus, ClientError> {
    let (transport, _) = Transport::connect(options.clone())?;
    let mut first = 0;
    let mut clients = Vec::new();
    loop {
        let body = transport.exchange(&ClientRequest::Status { first }, &[])?;
        let bad = || transport.bad("a status answer of the wrong length");
        let (answer, rest) = StatusAnswer::read_from_prefix(&body).map_err(|_| bad())?;
        for row in rest.chunks(size_of::<ClientStatus>()) {
            clients.push(ClientStatus::read_from_bytes(row).map_err(|_| bad())?);
        }
        // Numbers increase, so the loop ends.
        let Some(last) = clients.last().filter(|last| answer.more != 0 && last.client >= first) else {
            let StatusAnswer { uptime, ddr, hbm, .. } = answer;
            return Ok(DaemonStatus { uptime, ddr: ddr.into(), hbm: hbm.into(), clients });
        };
        first = last.client.saturating_add(1);
    }
}
