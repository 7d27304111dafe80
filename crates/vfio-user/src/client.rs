//! The client's side of vfio-user: a bus whose device is in another process.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Iova, Lease, PageSize, PageSizes, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{
    self as dma, BufferRef, Heap, InterruptEvents, Mapping, MemfdHeap, Mmio, PageKind, Pinned, Registrar, SharedBuf,
    Undo, VolatileSlice, lock,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio as abi;

use crate::capabilities::Announced;
use crate::wire::{
    Body, Command, ERROR, Fields, MAX_DATA, MAX_FDS, MAX_PUSHED, Message, NO_REPLY, REPLY, receive, send,
};
use crate::{Error, ProtocolError};

const CONFIG: u32 = abi::VFIO_PCI_CONFIG_REGION_INDEX;
/// The offset of PCI's command register, and bits of its first byte: the device responds at its BARs; the device may
/// access memory.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u8 = 1 << 1;
const COMMAND_MASTER: u8 = 1 << 2;
/// Maximum number of interrupts.
const VECTORS: u32 = 16;
/// Maximum bytes of a region's description, and the mappable areas that fit.
const REGION_INFO: u32 = 4096;
const MAX_AREAS: u32 = (REGION_INFO - 48) / 16;
/// Timeout for the device to read a message, and to answer it.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The largest error number of Linux.
const MAX_ERRNO: u32 = 4095;
/// Maximum length of a region's file; a longer one is not mapped.
const MAX_WINDOW: u64 = 1 << 40;

/// A device that another process serves, as its driver sees it. Memory from a memfd ([`dma::MemfdHeap`]) is sent to
/// that process, which maps it; other memory it can only read and write by messages, if it knows them.
///
/// The device may access mapped memory until the bus is dropped.
pub struct UserBus {
    inner: Arc<Inner>,
    regions: Vec<Region>,
    interrupts: InterruptEvents,
    /// The device responds at its BARs, according to what was written to its command register.
    decodes: AtomicBool,
}

/// A region of the device.
#[derive(Debug, Default)]
struct Region {
    len: u64,
    window: Option<Window>,
}

/// The areas of a region that are mapped into this process, which are accessed without messages.
#[derive(Debug)]
struct Window {
    /// The file that contains the region, from its start.
    file: SharedBuf,
    areas: Vec<Range<u64>>,
}

impl Window {
    /// The slice of these bytes if they lie within one area. Populates them first: the device's process may not have
    /// touched them yet.
    fn slice(&self, offset: u64, len: usize) -> Option<VolatileSlice<'_>> {
        let end = offset.checked_add(len as u64)?;
        self.areas.iter().find(|area| area.start <= offset && end <= area.end)?;
        let at = usize::try_from(offset).ok()?;
        let slice = self.file.as_volatile_slice().sub(at, len)?;
        self.file.populate(at, len).ok()?;
        Some(slice)
    }
}

struct Inner {
    socket: Mutex<Socket>,
    /// The process that has made this one: a child by `fork` must leave the connection alone.
    process: u32,
    /// Threads that have requests to send.
    asking: AtomicUsize,
    /// This, for the thread that answers the device's process.
    this: Weak<Inner>,
    limits: Limits,
    iovas: Mutex<RangeCache<Iova>>,
    mapped: AtomicU64,
}

/// Limits of the device's process for messages to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Limits {
    /// Descriptors of a message.
    fds: usize,
    /// Bytes of a region in a message.
    data: usize,
    /// The smallest page of DMA mappings, at least 4 KiB.
    page: PageSize,
    /// Mappings that exist at a time.
    maps: u64,
}

/// Every buffer is a multiple of a page: a server may not have this process take more memory for each.
const MAX_PAGE: u64 = 16 << 20;

impl Limits {
    /// Parses the capabilities of a version message. Absent ones have the defaults of the specification.
    fn parse(text: &[u8]) -> Result<Self, ProtocolError> {
        let announced = Announced::parse(text)?;
        Ok(Self {
            fds: announced.number("max_msg_fds", 1, 1)?.min(MAX_FDS as u64) as usize,
            data: announced.max_data()?,
            page: PageSizes::from_bits(announced.number("pgsizes", 4096, 4096)? & !0xfff)
                .smallest()
                .filter(|page| page.bytes() <= MAX_PAGE)
                .ok_or(ProtocolError::Capability("pgsizes"))?,
            maps: announced.number("max_dma_maps", 65_535, 1)?,
        })
    }
}

/// Memory that the device's process may ask for.
struct Lent {
    len: u64,
    access: Access,
    buffer: BufferRef,
    /// Its first byte in the buffer.
    offset: usize,
}

struct Socket {
    stream: UnixStream,
    /// Mapped memory, by its first address.
    lent: BTreeMap<Iova, Lent>,
    /// The device's process asks for memory, or has to.
    asked: bool,
    /// A thread answers it also while no request waits for an answer.
    answered: bool,
    /// The process that has made this one: a child by `fork` must leave the connection alone.
    process: u32,
    /// For a message to be read, and to be answered.
    timeout: Duration,
    next: u16,
    /// Shut down: after an error, answers can no longer be matched to requests.
    broken: bool,
    /// The device's process has closed its end, which it does after its last access to memory.
    gone: bool,
}

impl Socket {
    /// A socket with a timeout for reading a message and for answering it.
    fn new(stream: UnixStream, timeout: Duration) -> io::Result<Self> {
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let (lent, process) = (BTreeMap::new(), dma::process_id());
        let (asked, answered, broken, gone) = (false, false, false, false);
        Ok(Self { stream, lent, asked, answered, process, timeout, next: 0, broken, gone })
    }

    /// Sends a request and returns the body of its answer.
    fn ask(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, Error> {
        Ok(self.request(command, body, fds)?.body)
    }

    /// Sends a request and returns its answer.
    fn request(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message, Error> {
        if self.broken {
            return Err(Error::Unanswered { command, source: io::ErrorKind::NotConnected.into() });
        }
        let answer = self.exchange(command, body, fds).inspect_err(|error| {
            self.lose(match error {
                Error::Unanswered { source, .. } => source.kind(),
                _ => io::ErrorKind::InvalidData,
            });
        })?;
        if answer.flags & ERROR != 0 {
            let source = match answer.error {
                error @ 1..=MAX_ERRNO => io::Error::from_raw_os_error(error as i32),
                other => io::Error::other(format!("error number {other}, which Linux does not have")),
            };
            return Err(Error::Refused { command, source });
        }
        Ok(answer)
    }

    /// Sends a request and returns its answer, which may be an error number. After an error of this function the socket
    /// is unusable.
    fn exchange(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message, Error> {
        let timeout = self.timeout;
        let lost = |source: io::Error| Error::Unanswered {
            command,
            // What a socket says whose timeout is over.
            source: match source.kind() {
                io::ErrorKind::WouldBlock => {
                    // A process that serves one client at a time lets the next one wait.
                    let busy = if command == Command::Version { "; does it serve another client?" } else { "" };
                    io::Error::new(io::ErrorKind::TimedOut, format!("not within {timeout:?}{busy}"))
                }
                _ => source,
            },
        };
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        send(&self.stream, id, command as u16, 0, 0, body, fds).map_err(lost)?;
        let began = Instant::now();
        loop {
            let message = receive(&self.stream).map_err(lost)?;
            let message = message.ok_or_else(|| lost(io::ErrorKind::UnexpectedEof.into()))?;
            if message.flags & REPLY != 0 {
                let matches = (message.id, message.command) == (id, command as u16);
                return if matches { Ok(message) } else { Err(ProtocolError::WrongAnswer.into()) };
            }
            self.lend(&message).ok_or(ProtocolError::WrongAnswer)?.map_err(lost)?;
            if began.elapsed() > timeout {
                return Err(lost(io::ErrorKind::WouldBlock.into()));
            }
        }
    }

    /// Shuts the socket down after an error of this kind. The device's process sees the end of the stream and unmaps
    /// everything; no unmap requests will follow.
    fn lose(&mut self, kind: io::ErrorKind) {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        self.gone |= matches!(kind, BrokenPipe | ConnectionReset | UnexpectedEof);
        self.broken = true;
        self.lent.clear();
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Answers a request of the device's process for memory; `None` for another request.
    fn lend(&mut self, request: &Message) -> Option<io::Result<()>> {
        let writes = match Command::from_number(request.command) {
            Some(Command::DmaRead) => false,
            Some(Command::DmaWrite) => true,
            _ => return None,
        };
        self.asked = true;
        let answer = self.access(&request.body, writes);
        if request.flags & NO_REPLY != 0 {
            return Some(Ok(()));
        }
        let (flags, errno, body) = match answer {
            Ok(body) => (REPLY, 0, body),
            Err(errno) => (REPLY | ERROR, errno.raw_os_error() as u32, Vec::new()),
        };
        Some(send(&self.stream, request.id, request.command, flags, errno, &body, &[]))
    }

    /// Reads or writes mapped memory, as far as it is mapped for that, and gives the body of the answer.
    fn access(&self, request: &[u8], writes: bool) -> Result<Vec<u8>, Errno> {
        let mut fields = Fields(request);
        let (at, count) = (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let sent = if writes { count } else { 0 };
        if count > MAX_DATA as u64 || fields.0.len() as u64 != sent {
            return Err(Errno::INVAL);
        }
        let mut answer = request[..16].to_vec();
        answer.resize(16 + (count - sent) as usize, 0);
        // All of it first: a write that is refused changes nothing.
        let (wanted, mut parts, mut done) = (if writes { Access::WRITE } else { Access::READ }, Vec::new(), 0);
        while done < count {
            let here = at.checked_add(done).map(Iova::new).ok_or(Errno::FAULT)?;
            let (first, lent) = self.lent.range(..=here).next_back().ok_or(Errno::FAULT)?;
            let inside = here.bits() - first.bits();
            let n = lent.len.saturating_sub(inside).min(count - done);
            if n == 0 || !lent.access.contains(wanted) {
                return Err(Errno::FAULT);
            }
            parts.push((&lent.buffer, lent.offset + inside as usize, done as usize..(done + n) as usize));
            done += n;
        }
        for (buffer, offset, part) in parts {
            let moved = match writes {
                true => buffer.write(offset, &fields.0[part]),
                false => buffer.read(offset, &mut answer[16..][part]),
            };
            moved.ok_or(Errno::FAULT)?;
        }
        Ok(answer)
    }

    /// Queries a region, and maps its mappable areas.
    fn region(&mut self, index: u32) -> Result<Region, Error> {
        let body = Body::default().u32(REGION_INFO).u32(0).u32(index).u32(0).u64(0).u64(0);
        let Message { body: info, mut fds, .. } = self.request(Command::RegionInfo, &body.0, &[])?;
        let mut fields = Fields(&info);
        let (_argsz, flags, _index, at) = (fields.u32(), fields.u32().unwrap_or(0), fields.u32(), fields.u32());
        let len = fields.u64().ok_or(ProtocolError::NoRegionLength)?;
        let offset = fields.u64().unwrap_or(0);
        let mut region = Region { len, window: None };
        // A file with the region at other offsets is not mapped; messages work too.
        if flags & abi::VFIO_REGION_INFO_FLAG_MMAP == 0 || offset != 0 {
            return Ok(region);
        }
        let Some(file) = fds.pop() else { return Ok(region) };
        let caps = if flags & abi::VFIO_REGION_INFO_FLAG_CAPS != 0 { at.unwrap_or(0) as usize } else { 0 };
        let areas = mappable_areas(&info, caps).unwrap_or_else(|| std::iter::once(0..len).collect());
        // Unsealed memory could shrink under us, and a sparse file can be longer than the address space: those are not
        // mapped.
        let Ok(file) = SharedBuf::import_up_to(file, MAX_WINDOW) else { return Ok(region) };
        let areas = areas.into_iter().filter(|a| a.start < a.end && a.end <= len.min(file.len() as u64));
        region.window = Some(Window { areas: areas.collect(), file });
        Ok(region)
    }
}

/// The mappable areas, from the chain of capabilities at offset `at` of the answer; `None` without such a capability.
fn mappable_areas(info: &[u8], mut at: usize) -> Option<Vec<Range<u64>>> {
    // Each capability must be after the previous one, so the loop ends.
    while at >= 32 {
        let mut fields = Fields(info.get(at..)?);
        let (id, _version, next) = (fields.u16()?, fields.u16()?, fields.u32()? as usize);
        if u32::from(id) == abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP {
            let (count, _reserved) = (fields.u32()?, fields.u32()?);
            let area = |_| {
                let (first, len) = (fields.u64()?, fields.u64()?);
                Some(first..first.checked_add(len)?)
            };
            return (0..count.min(MAX_AREAS)).map(area).collect();
        }
        at = if next > at { next } else { 0 };
    }
    None
}

impl Inner {
    /// Locks the socket before the thread that answers the device's process.
    fn socket(&self) -> MutexGuard<'_, Socket> {
        self.asking.fetch_add(1, Ordering::Relaxed);
        let socket = lock(&self.socket);
        self.asking.fetch_sub(1, Ordering::Relaxed);
        socket
    }

    fn ask(&self, command: Command, body: Body, fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, Error> {
        self.exchange(|socket| socket.ask(command, &body.0, fds))
    }

    /// Has the socket for requests. If the device's process has asked for memory, it is answered from then on also
    /// while no request waits for an answer.
    fn exchange<T>(&self, requests: impl FnOnce(&mut Socket) -> T) -> T {
        let mut socket = self.socket();
        let done = requests(&mut socket);
        if socket.asked && !socket.answered {
            let (stream, this) = (socket.stream.try_clone(), self.this.clone());
            let thread = std::thread::Builder::new().name("dmalane-vfio-user".into());
            // Without a thread it is answered with the next request, which tries again.
            let begun = stream.and_then(|stream| thread.spawn(move || answer_all(&stream, &this)));
            socket.answered = begun.is_ok();
        }
        done
    }

    /// Maps memory: by a descriptor, if it has one.
    fn dma_map(&self, pinned: &Pinned, span: Span<Iova>, access: Access) -> Result<(), Error> {
        let fd = pinned.reference().export().ok();
        let (buffer, offset) = (pinned.reference().clone(), pinned.range().start);
        // 1: the device may read; 2: it may write.
        let flags = (access & Access::RW).bits().into();
        let body = Body::default().u32(32).u32(flags).u64(if fd.is_some() { offset as u64 } else { 0 });
        let body = body.u64(span.first().bits()).u64(span.len());
        self.exchange(|socket| {
            if socket.lent.len() as u64 >= self.limits.maps {
                return Err(Error::TooManyMappings { most: self.limits.maps });
            }
            socket.asked |= fd.is_none();
            // Before the answer comes, the device's process may have asked for it.
            socket.lent.insert(span.first(), Lent { len: span.len(), access, buffer, offset });
            let mapped = socket.ask(Command::DmaMap, &body.0, fd.as_slice());
            mapped.map(drop).inspect_err(|_| drop(socket.lent.remove(&span.first())))
        })
    }

    /// Unmaps what is mapped within a span, part by part: a server unmaps what it has mapped. False when the device's
    /// process did not answer and still exists: it will unmap when it finds the socket shut down, at an unknown time.
    fn try_unmap(&self, span: Span<Iova>) -> bool {
        self.exchange(|socket| {
            while let Some((&first, part)) = socket.lent.range(span.first()..=span.last()).next() {
                let body = Body::default().u32(24).u32(0).u64(first.bits()).u64(part.len);
                let unmapped = socket.ask(Command::DmaUnmap, &body.0, &[]).is_ok();
                socket.lent.remove(&first);
                if !unmapped {
                    return socket.gone;
                }
            }
            // With the socket, what was mapped was forgotten.
            !socket.broken || socket.gone
        })
    }
}

/// Answers the device's process while no request waits for an answer, until the socket is shut down.
fn answer_all(stream: &UnixStream, inner: &Weak<Inner>) {
    let readable = |left: Option<&Timespec>| poll(&mut [PollFd::new(stream, PollFlags::IN)], left);
    while readable(None) != Ok(0)
        && let Some(inner) = inner.upgrade()
    {
        if inner.asking.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(Duration::from_micros(50));
            continue;
        }
        let mut socket = lock(&inner.socket);
        if socket.broken {
            return;
        }
        // Whoever had the socket may have received what was there, and a signal says nothing of it.
        if readable(Some(&Timespec::default())) != Ok(1) {
            continue;
        }
        let answered = receive(stream).and_then(|request| {
            let request = request.ok_or(io::ErrorKind::UnexpectedEof)?;
            let is_request = request.flags & REPLY == 0;
            is_request.then(|| socket.lend(&request)).flatten().ok_or(io::ErrorKind::InvalidData)?
        });
        if let Err(error) = answered {
            return socket.lose(error.kind());
        }
    }
}

impl Drop for Socket {
    /// Ends the thread that answers, which has a descriptor of its own.
    fn drop(&mut self) {
        if self.answered && self.process == dma::process_id() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Undo for Inner {
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        let span = lease.span();
        self.mapped.fetch_sub(span.len(), Ordering::Relaxed);
        self.try_unmap(span) && {
            lock(&self.iovas).free(lease);
            true
        }
    }

    fn unpin(&self, _: &SgTable<PhysAddr>) {}
}

impl UserBus {
    /// Connects to the socket of a device, enables its interrupts, and lets it access memory and respond at its BARs.
    /// The socket belongs to one of these users, or to anyone if there are none: [`dma::trusted_users`] are the usual
    /// ones.
    ///
    /// # Errors
    /// [`Error::Connect`]; [`Error::WrongServer`]; [`Error::Setup`]; [`Error::Unanswered`], [`Error::Refused`] and
    /// [`Error::Protocol`] of the first requests.
    pub fn connect(path: &Path, trusted: &[u32]) -> Result<Self, Error> {
        let stream = UnixStream::connect(path).map_err(|source| Error::Connect { path: path.to_owned(), source })?;
        dma::check_peer(&stream, trusted).map_err(|source| Error::WrongServer { path: path.to_owned(), source })?;
        Self::over(stream)
    }

    /// As [`UserBus::connect`], over a connected socket.
    ///
    /// # Errors
    /// As [`UserBus::connect`].
    pub fn over(stream: UnixStream) -> Result<Self, Error> {
        Self::with_timeout(stream, TIMEOUT)
    }

    pub(crate) fn with_timeout(stream: UnixStream, timeout: Duration) -> Result<Self, Error> {
        let mut socket = Socket::new(stream, timeout).map_err(Error::Setup)?;
        let text = format!(r#"{{"capabilities":{{"max_msg_fds":{MAX_FDS},"max_data_xfer_size":{MAX_DATA}}}}}"#);
        let hello = Body::default().u32(1 << 16).bytes(text.as_bytes()).bytes(&[0]);
        let version = socket.ask(Command::Version, &hello.0, &[])?;
        if Fields(&version).u16() != Some(0) {
            return Err(ProtocolError::Version.into());
        }
        let limits = Limits::parse(version.get(4..).unwrap_or_default())?;
        let info = socket.ask(Command::DeviceInfo, &Body::default().u32(16).u32(0).u32(0).u32(0).0, &[])?;
        let mut fields = Fields(&info);
        let (_argsz, flags, count) = (fields.u32(), fields.u32(), fields.u32());
        if flags.is_none_or(|flags| flags & abi::VFIO_DEVICE_FLAGS_PCI == 0) {
            return Err(ProtocolError::NotPci.into());
        }
        let count = count.unwrap_or(0).min(abi::VFIO_PCI_NUM_REGIONS);
        let regions = (0..count).map(|index| socket.region(index)).collect::<Result<Vec<_>, _>>()?;
        let kind = abi::VFIO_PCI_MSIX_IRQ_INDEX;
        let info = socket.ask(Command::IrqInfo, &Body::default().u32(16).u32(0).u32(kind).u32(0).0, &[])?;
        let vectors = Fields(info.get(12..).unwrap_or_default()).u32().unwrap_or(0).min(VECTORS);
        let interrupts = InterruptEvents::new(vectors).map_err(Error::Setup)?;
        let flags = abi::VFIO_IRQ_SET_DATA_EVENTFD | abi::VFIO_IRQ_SET_ACTION_TRIGGER;
        for (first, events) in (0..).step_by(limits.fds).zip(interrupts.events().chunks(limits.fds)) {
            let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
            let body = Body::default().u32(20).u32(flags).u32(kind).u32(first).u32(fds.len() as u32);
            socket.ask(Command::SetIrqs, &body.0, &fds)?;
        }
        // 39 bits as of a small IOMMU, without the first MiB and x86's window of interrupts, in whole pages.
        let page = limits.page.bytes();
        let (first, window) = (page.max(1 << 20), 0xfee0_0000 & !(page - 1));
        let span = |first, last| Span::inclusive(Iova::new(first), Iova::new(last));
        let bad = ProtocolError::Capability("pgsizes");
        let mut iovas = RangeAllocator::new(span(first, (1 << 39) - 1).ok_or(bad)?, limits.page);
        let window = span(window.max(first), 0xfeef_ffff | (page - 1)).ok_or(bad)?;
        iovas.reserve(window)?;
        let inner = Arc::new_cyclic(|this| Inner {
            socket: Mutex::new(socket),
            process: dma::process_id(),
            asking: AtomicUsize::new(0),
            this: this.clone(),
            limits,
            iovas: Mutex::new(RangeCache::new(iovas)),
            mapped: AtomicU64::new(0),
        });
        let this = Self { inner, regions, interrupts, decodes: AtomicBool::new(true) };
        this.command(COMMAND_MEMORY | COMMAND_MASTER)?;
        Ok(this)
    }

    /// Writes the command register, if the device has one: whole, as libvfio-user reads it.
    fn command(&self, bits: u8) -> Result<(), Error> {
        if self.has_command() { self.write_region(CONFIG, COMMAND, &[bits, 0]) } else { Ok(()) }
    }

    fn has_command(&self) -> bool {
        self.region_len(CONFIG) > COMMAND + 1
    }

    /// The length of a region in bytes; 0 for one that the device does not have.
    pub fn region_len(&self, region: u32) -> u64 {
        self.regions.get(region as usize).map_or(0, |region| region.len)
    }

    /// The areas of a region that are mapped into this process and accessed without messages; none while the command
    /// register disables the BARs.
    pub fn mapped_areas(&self, region: u32) -> &[Range<u64>] {
        self.window(region).map_or(&[], |window| &window.areas)
    }

    /// The device's process may be wrong about what it has, so nobody asks it for more than it described.
    fn check_range(&self, region: u32, offset: u64, len: usize) -> Result<(), Error> {
        let has = self.region_len(region);
        match offset.checked_add(len as u64) {
            Some(end) if end <= has => Ok(()),
            _ => Err(Error::BeyondRegion { region, has, offset, len }),
        }
    }

    fn window(&self, region: u32) -> Option<&Window> {
        let window = self.regions.get(region as usize)?.window.as_ref();
        window.filter(|_| self.decodes.load(Ordering::Relaxed))
    }

    /// Vendor and device number.
    ///
    /// # Errors
    /// As [`UserBus::read_region`].
    pub fn id(&self) -> Result<(u16, u16), Error> {
        let mut bytes = [0; 4];
        self.read_region(CONFIG, 0, &mut bytes)?;
        Ok((u16::from_le_bytes([bytes[0], bytes[1]]), u16::from_le_bytes([bytes[2], bytes[3]])))
    }

    /// Bytes of host memory that are mapped for the device.
    pub fn mapped_bytes(&self) -> u64 {
        self.inner.mapped.load(Ordering::Relaxed)
    }

    /// Reads part of a region.
    ///
    /// # Errors
    /// [`Error::BeyondRegion`]; [`Error::Refused`] when the device's command register disables the BARs;
    /// [`Error::Unanswered`], [`Error::Protocol`].
    pub fn read_region(&self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.check_range(region, offset, into.len())?;
        if let Some(slice) = self.window(region).and_then(|window| window.slice(offset, into.len())) {
            slice.read_words(0, into).expect("it has as many bytes");
            return Ok(());
        }
        let mut at = offset;
        for chunk in into.chunks_mut(self.inner.limits.data) {
            let body = Body::default().u64(at).u32(region).u32(chunk.len() as u32);
            let answer = self.inner.ask(Command::RegionRead, body, &[])?;
            let data = answer.get(16..).filter(|data| data.len() == chunk.len());
            chunk.copy_from_slice(data.ok_or(ProtocolError::ReadLength)?);
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Writes part of a region.
    ///
    /// # Errors
    /// As [`UserBus::read_region`].
    pub fn write_region(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), Error> {
        self.check_range(region, offset, from.len())?;
        if let Some(slice) = self.window(region).and_then(|window| window.slice(offset, from.len())) {
            slice.write_words(0, from).expect("it has as many bytes");
            return Ok(());
        }
        let mut at = offset;
        for chunk in from.chunks(self.inner.limits.data.min(MAX_PUSHED)) {
            let body = Body::default().u64(at).u32(region).u32(chunk.len() as u32).bytes(chunk);
            self.inner.ask(Command::RegionWrite, body, &[])?;
            at += chunk.len() as u64;
        }
        let command = COMMAND.checked_sub(offset).and_then(|at| from.get(at as usize));
        if let Some(command) = command.filter(|_| region == CONFIG) {
            self.decodes.store(command & COMMAND_MEMORY != 0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Resets the device, and gives its command register back what it had, as the kernel's VFIO does.
    ///
    /// # Errors
    /// [`Error::Refused`] when it did not stop in time; [`Error::Unanswered`], [`Error::Protocol`].
    pub fn reset(&self) -> Result<(), Error> {
        let mut command = [0; 2];
        let has_command = self.has_command();
        if has_command {
            self.read_region(CONFIG, COMMAND, &mut command)?;
        }
        self.ask(Command::Reset, Body::default())?;
        if has_command { self.write_region(CONFIG, COMMAND, &command) } else { Ok(()) }
    }

    pub(crate) fn ask(&self, command: Command, body: Body) -> Result<Vec<u8>, Error> {
        self.inner.ask(command, body, &[])
    }

    /// Maximum bytes of a region, of memory or of the device's state in a message.
    pub(crate) fn max_data(&self) -> usize {
        self.inner.limits.data
    }
}

fn no_register(bar: u8, offset: u64, bytes: usize) -> dma::Error {
    dma::Error::NoRegister { bar, offset, bytes: bytes as u64 }
}

/// An access that the device refused is `no_register`; other errors are of the connection.
fn register_error(error: Error, no_register: dma::Error) -> dma::Error {
    match &error {
        Error::BeyondRegion { .. } => no_register,
        Error::Refused { source, .. } if matches!(source.raw_os_error(), Some(libc::EINVAL | libc::EIO)) => no_register,
        _ => error.into(),
    }
}

impl Registrar for UserBus {
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, dma::Error> {
        if buffer.is_read_only() {
            // By messages: through memory that the device's process maps it is faster.
            return Err(dma::Error::NoDescriptor);
        }
        buffer.check_pages(&range, self.inner.limits.page.bytes() as usize)?;
        Ok(Pinned::new(buffer.clone(), range, None, self.inner.clone()))
    }

    fn map_list(&self, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, dma::Error> {
        for pinned in &list {
            if let Err(e) = pinned.reference().export()
                && !matches!(e, dma::Error::NoDescriptor)
            {
                return Err(e);
            }
        }
        let len = Pinned::admit_all(&mut list, &self.inner, access)?;
        let align = if len >= PageSize::SIZE_2M.bytes() { PageSize::SIZE_2M } else { PageSize::SIZE_4K };
        let align = align.max(self.inner.limits.page);
        let lease = lock(&self.inner.iovas).allocate(len, align)?;
        let span = lease.span();
        let mut done = 0;
        for pinned in &list {
            let part = span.sub(done, pinned.range().len() as u64).expect("the lengths add up to the span's");
            if let Err(e) = self.inner.dma_map(pinned, part, access) {
                // A request that was not answered may have mapped the part; then the socket is lost.
                match self.inner.try_unmap(span) {
                    true => lock(&self.inner.iovas).free(lease),
                    false => list.iter_mut().for_each(Pinned::leak),
                }
                return Err(e.into());
            }
            done += part.len();
        }
        self.inner.mapped.fetch_add(len, Ordering::Relaxed);
        Ok(Mapping::new(list, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.inner)
    }

    /// Memfds without reserved huge pages, of whole pages of DMA mappings: another process has to map them.
    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        Arc::new(MemfdHeap::importable(best).in_multiples_of(self.inner.limits.page.bytes() as usize))
    }
}

impl Mmio for UserBus {
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, dma::Error> {
        let mut bytes = [0; 4];
        offset.is_multiple_of(4).then_some(()).ok_or(no_register(bar, offset, 4))?;
        self.read_bytes(bar, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), dma::Error> {
        offset.is_multiple_of(4).then_some(()).ok_or(no_register(bar, offset, 4))?;
        self.write_bytes(bar, offset, &value.to_le_bytes())
    }

    fn read_bytes(&self, bar: u8, offset: u64, into: &mut [u8]) -> Result<(), dma::Error> {
        let none = no_register(bar, offset, into.len());
        match bar {
            0..6 => self.read_region(bar.into(), offset, into).map_err(|e| register_error(e, none)),
            _ => Err(none),
        }
    }

    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), dma::Error> {
        (bar < 6).then_some(()).ok_or(no_register(bar, offset, bytes.len()))?;
        self.write_region(bar.into(), offset, bytes)
            .map_err(|e| register_error(e, no_register(bar, offset, bytes.len())))
    }

    fn is_gone(&self) -> bool {
        lock(&self.inner.socket).gone
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.interrupts.wait(timeout)
    }
}

impl Drop for UserBus {
    fn drop(&mut self) {
        // Ends DMA. A process that does not answer unmaps everything when the socket is closed.
        if self.inner.process == dma::process_id() {
            let _ = self.command(COMMAND_MEMORY);
        }
    }
}

dmalane_dma::debug_as!(UserBus, |it| "UserBus {{ regions: {:?}, .. }}", it.regions);

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::OwnedFd;
    use std::time::Instant;

    use super::*;
    use crate::{ClientMemory, RegionSpec, ServedDevice, serve};

    /// A device with one BAR that is slow to read.
    struct Slow(Duration);

    impl ServedDevice for Slow {
        fn region(&self, index: u32) -> RegionSpec {
            if index == 0 { RegionSpec { len: 4096, accessible: true } } else { RegionSpec::default() }
        }

        fn read(&mut self, _: u32, _: u64, _: &mut [u8]) -> bool {
            std::thread::sleep(self.0);
            true
        }

        fn write(&mut self, _: u32, _: u64, _: &[u8]) -> bool {
            true
        }

        fn interrupts(&self) -> u32 {
            0
        }

        fn set_interrupts(&mut self, _: u32, _: Vec<Option<OwnedFd>>) {}

        fn reset(&mut self) -> bool {
            true
        }
    }

    /// Long enough for a device that answers at once.
    pub(crate) const SHORT: Duration = Duration::from_secs(1);

    /// An error with its source.
    fn chain(error: Error) -> String {
        format!("{error}: {}", std::error::Error::source(&error).expect("a source"))
    }

    #[test]
    fn a_device_that_does_not_read_times_out() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut socket = Socket::new(ours, SHORT).unwrap();
        let began = Instant::now();
        let error = chain(socket.ask(Command::RegionWrite, &vec![0; MAX_DATA], &[]).unwrap_err());
        assert_eq!(error, "the device's process does not answer to RegionWrite: not within 1s");
        assert!(began.elapsed() >= SHORT && began.elapsed() < TIMEOUT, "{:?}", began.elapsed());
        let (ours, _busy) = UnixStream::pair().unwrap();
        let error = chain(UserBus::with_timeout(ours, SHORT).unwrap_err());
        let why = "not within 1s; does it serve another client?";
        assert_eq!(error, format!("the device's process does not answer to Version: {why}"));
    }

    #[test]
    fn a_device_that_answers_in_drops_times_out() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let device = std::thread::spawn(move || {
            let Some(request) = receive(&theirs).unwrap() else { return };
            let mut answer = Vec::new();
            for half in [request.id, request.command] {
                answer.extend(half.to_le_bytes());
            }
            for word in [16 + 4, REPLY, 0, 0] {
                answer.extend(word.to_le_bytes());
            }
            // Each in time, all of them not.
            for byte in answer {
                std::thread::sleep(SHORT / 4);
                if std::io::Write::write_all(&mut theirs, &[byte]).is_err() {
                    return;
                }
            }
        });
        let error = Socket::new(ours, SHORT).unwrap().ask(Command::Reset, &[], &[]).unwrap_err();
        assert!(matches!(error, Error::Unanswered { .. }), "{error}");
        device.join().unwrap();
    }

    #[test]
    fn a_silent_device_times_out_and_a_refusal_is_no_success() {
        let (ours, _silent) = UnixStream::pair().unwrap();
        let error = chain(Socket::new(ours, SHORT).unwrap().ask(Command::Reset, &[], &[]).unwrap_err());
        assert_eq!(error, "the device's process does not answer to Reset: not within 1s");
        for (number, text) in [
            (u32::MAX, "error number 4294967295, which Linux does not have"),
            (0, "error number 0, which Linux does not have"),
            (4096, "error number 4096, which Linux does not have"),
            (4095, "Unknown error 4095 (os error 4095)"),
            (5, "Input/output error (os error 5)"),
        ] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let device = std::thread::spawn(move || {
                let request = receive(&theirs).unwrap().unwrap();
                send(&theirs, request.id, request.command, REPLY | ERROR, number, &[], &[]).unwrap();
            });
            let error = chain(Socket::new(ours, TIMEOUT).unwrap().ask(Command::Reset, &[], &[]).unwrap_err());
            assert_eq!(error, format!("the device's process refuses Reset: {text}"));
            device.join().unwrap();
        }
    }

    #[test]
    fn a_device_that_answers_late_loses_its_mappings() {
        use dmalane_dma::{Heap, MemfdHeap, PageKind};
        let (ours, theirs) = UnixStream::pair().unwrap();
        let memory = ClientMemory::new();
        let seen = memory.clone();
        let server = std::thread::spawn(move || serve(theirs, &mut Slow(2 * SHORT), &memory));
        let bus = UserBus::with_timeout(ours, SHORT).unwrap();
        let heap = MemfdHeap::starting_at(PageKind::Base);
        let buf = heap.allocate(4096).unwrap().share();
        let mapping = bus.map(bus.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
        assert_eq!(seen.mappings(), 1);
        assert!(bus.read32(0, 0).is_err());
        // While the bus still exists.
        let _ended = server.join().unwrap();
        assert_eq!(seen.mappings(), 0);
        drop(mapping);
        assert_eq!(bus.mapped_bytes(), 0);
        drop(buf);
        assert_eq!(heap.stats().live, 4096, "the device may still access it");
    }
}
