//! The client's side of vfio-user: a device in another process as a bus.

use std::io;
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{
    self as mem, BufferRef, Heap, Mapping, MemfdHeap, Mmio, PageKind, Pinned, Registrar, SharedBuf, Undo, VolatileSlice,
};
use vfio_bindings::bindings::vfio as abi;

use super::wire::{Body, Command, ERROR, Fields, MAX_DATA, Message, REPLY, receive, send};
use crate::Error;
use crate::interrupts::Interrupts;

/// Interrupts that are asked for, at most.
const VECTORS: u32 = 16;
/// Bytes that the description of a region may take; areas of it that are mapped, at most.
const REGION_INFO: u32 = 4096;
const MOST_AREAS: u32 = (REGION_INFO - 48) / 16;
/// Longer than this no device takes to read a message, or for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest file that a region is seen through; a longer one is not mapped.
const MOST_WINDOW: u64 = 1 << 40;

/// A device that another process serves, as its driver sees it. Memory for it must be such that it can be lent to that process: a memfd's
/// ([`mem::MemfdHeap`]).
pub struct UserBus {
    inner: Arc<Inner>,
    regions: Vec<Region>,
    interrupts: Interrupts,
}

/// A region of the device.
#[derive(Debug, Default)]
struct Region {
    len: u64,
    window: Option<Window>,
}

/// What of a region is mapped here: no message is needed for it.
#[derive(Debug)]
struct Window {
    /// The file that shows the region from its start on.
    file: SharedBuf,
    areas: Vec<Range<u64>>,
}

impl Window {
    /// Bytes that lie whole within an area, present: what the device's process has not made so yet could be missing.
    fn view(&self, offset: u64, len: usize) -> Option<VolatileSlice<'_>> {
        let end = offset.checked_add(len as u64)?;
        self.areas.iter().find(|area| area.start <= offset && end <= area.end)?;
        let at = usize::try_from(offset).ok()?;
        let view = self.file.view().sub(at, len)?;
        self.file.populate(at, len).ok()?;
        Some(view)
    }
}

struct Inner {
    socket: Mutex<Socket>,
    iovas: Mutex<RangeCache<Iova>>,
    mapped: AtomicU64,
}

struct Socket {
    stream: UnixStream,
    next: u16,
    /// Shut down: after an error nothing that comes can be told from what should.
    broken: bool,
}

fn protocol(what: &str) -> Error {
    Error::kernel("the device's process")(io::Error::new(io::ErrorKind::InvalidData, what.to_owned()))
}

fn unanswered(command: Command, source: io::Error) -> Error {
    Error::kernel(format!("the device's process does not answer to {command:?}"))(source)
}

impl Socket {
    /// One whose other side may take so long to read a message, and to answer.
    fn new(stream: UnixStream, patience: Duration) -> io::Result<Self> {
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Self { stream, next: 0, broken: false })
    }

    /// Sends a request and waits for the body of its answer.
    fn ask(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, Error> {
        Ok(self.converse(command, body, fds)?.body)
    }

    /// Sends a request and waits for its answer.
    fn converse(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message, Error> {
        if self.broken {
            return Err(unanswered(command, io::ErrorKind::NotConnected.into()));
        }
        let answer = self.exchange(command, body, fds).inspect_err(|_| {
            // The device's process sees the end of it, and lets go of what was mapped: nobody will tell it to.
            self.broken = true;
            let _ = self.stream.shutdown(Shutdown::Both);
        })?;
        if answer.flags & ERROR != 0 {
            let errno = io::Error::from_raw_os_error(i32::try_from(answer.error).unwrap_or(0));
            return Err(Error::kernel(format!("the device's process refuses {command:?}"))(errno));
        }
        Ok(answer)
    }

    /// The same, whatever the answer says. After an error nothing can be asked any more.
    fn exchange(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message, Error> {
        let lost = |e| unanswered(command, e);
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        send(&mut self.stream, id, command as u16, 0, 0, body, fds).map_err(lost)?;
        let answer = receive(&mut self.stream).map_err(lost)?;
        let answer = answer.ok_or_else(|| lost(io::ErrorKind::UnexpectedEof.into()))?;
        if (answer.id, answer.command) != (id, command as u16) || answer.flags & REPLY == 0 {
            return Err(protocol("it answered something else than it was asked"));
        }
        Ok(answer)
    }

    /// Asks about a region, and maps what of it can be.
    fn region(&mut self, index: u32) -> Result<Region, Error> {
        let body = Body::default().u32(REGION_INFO).u32(0).u32(index).u32(0).u64(0).u64(0);
        let Message { body: info, mut fds, .. } = self.converse(Command::RegionInfo, &body.0, &[])?;
        let mut fields = Fields(&info);
        let (_argsz, flags, _index, at) = (fields.u32(), fields.u32().unwrap_or(0), fields.u32(), fields.u32());
        let len = fields.u64().ok_or_else(|| protocol("a region without a length"))?;
        let offset = fields.u64().unwrap_or(0);
        let mut region = Region { len, window: None };
        // A file that shows the region elsewhere than at its own offsets is left alone: messages do as well.
        if flags & abi::VFIO_REGION_INFO_FLAG_MMAP == 0 || offset != 0 {
            return Ok(region);
        }
        let Some(file) = fds.pop() else { return Ok(region) };
        let caps = if flags & abi::VFIO_REGION_INFO_FLAG_CAPS != 0 { at.unwrap_or(0) as usize } else { 0 };
        let areas = sparse(&info, caps).unwrap_or_else(|| std::iter::once(0..len).collect());
        // What is no sealed memory could vanish under us; and a sparse file can be longer than this process has addresses.
        let Ok(file) = SharedBuf::import_up_to(file, MOST_WINDOW) else { return Ok(region) };
        let areas = areas.into_iter().filter(|a| a.start < a.end && a.end <= len.min(file.len() as u64));
        region.window = Some(Window { areas: areas.collect(), file });
        Ok(region)
    }
}

/// The areas that can be mapped, from the chain of capabilities that begins at a place in the answer; `None` when it lists none.
fn sparse(info: &[u8], mut at: usize) -> Option<Vec<Range<u64>>> {
    // Each capability lies behind the one before, so there is an end.
    while at >= 32 {
        let mut fields = Fields(info.get(at..)?);
        let (id, _version, next) = (fields.u16()?, fields.u16()?, fields.u32()? as usize);
        if u32::from(id) == abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP {
            let (count, _reserved) = (fields.u32()?, fields.u32()?);
            let area = |_| {
                let (first, len) = (fields.u64()?, fields.u64()?);
                Some(first..first.checked_add(len)?)
            };
            return (0..count.min(MOST_AREAS)).map(area).collect();
        }
        at = if next > at { next } else { 0 };
    }
    None
}

impl Inner {
    fn ask(&self, command: Command, body: Body, fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, Error> {
        lock(&self.socket).ask(command, &body.0, fds)
    }

    fn dma_map(&self, pinned: &Pinned, span: Span<Iova>, access: Access) -> Result<(), Error> {
        let fd = pinned.reference().export().ok_or(Error::NotLendable)?;
        let mut flags = 0;
        if access.contains(Access::READ) {
            flags |= abi::VFIO_DMA_MAP_FLAG_READ;
        }
        if access.contains(Access::WRITE) {
            flags |= abi::VFIO_DMA_MAP_FLAG_WRITE;
        }
        let body = Body::default().u32(32).u32(flags).u64(pinned.range().start as u64);
        let body = body.u64(span.first().bits()).u64(span.len());
        self.ask(Command::DmaMap, body, &[fd]).map(drop)
    }

    fn dma_unmap(&self, span: Span<Iova>) -> Result<(), Error> {
        let body = Body::default().u32(24).u32(0).u64(span.first().bits()).u64(span.len());
        self.ask(Command::DmaUnmap, body, &[]).map(drop)
    }
}

impl Undo for Inner {
    fn unmap(&self, lease: Lease<Iova>) {
        let span = lease.span();
        self.mapped.fetch_sub(span.len(), Ordering::Relaxed);
        // The addresses of a device that does not answer are nobody's any more. Its process unmaps when the socket is shut down.
        if self.dma_unmap(span).is_ok() {
            lock(&self.iovas).free(lease);
        }
    }

    fn unpin(&self, _: &SgTable<PhysAddr>) {}
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UserBus {
    /// Connects to the socket of a device, and turns its interrupts on.
    ///
    /// # Errors
    /// [`Error::Kernel`] when nobody is there, or what is there does not speak vfio-user.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let refused = Error::kernel(format!("cannot connect to {}", path.display()));
        Self::over(UnixStream::connect(path).map_err(refused)?)
    }

    /// The same over a socket that is connected.
    ///
    /// # Errors
    /// As [`UserBus::connect`].
    pub fn over(stream: UnixStream) -> Result<Self, Error> {
        Self::patient(stream, PATIENCE)
    }

    fn patient(stream: UnixStream, patience: Duration) -> Result<Self, Error> {
        let mut socket = Socket::new(stream, patience).map_err(Error::kernel("the socket"))?;
        let text = format!(r#"{{"capabilities":{{"max_msg_fds":{VECTORS},"max_data_xfer_size":{MAX_DATA}}}}}"#);
        let hello = Body::default().u32(1 << 16).bytes(text.as_bytes()).bytes(&[0]);
        let version = socket.ask(Command::Version, &hello.0, &[])?;
        if Fields(&version).u16() != Some(0) {
            return Err(protocol("it speaks another version than 0.x"));
        }
        let info = socket.ask(Command::DeviceInfo, &Body::default().u32(16).u32(0).u32(0).u32(0).0, &[])?;
        let mut fields = Fields(&info);
        let (_argsz, flags, count) = (fields.u32(), fields.u32(), fields.u32());
        if flags.is_none_or(|flags| flags & abi::VFIO_DEVICE_FLAGS_PCI == 0) {
            return Err(protocol("it is no PCI device"));
        }
        let count = count.unwrap_or(0).min(abi::VFIO_PCI_NUM_REGIONS);
        let regions = (0..count).map(|index| socket.region(index)).collect::<Result<Vec<_>, _>>()?;
        let kind = abi::VFIO_PCI_MSIX_IRQ_INDEX;
        let info = socket.ask(Command::IrqInfo, &Body::default().u32(16).u32(0).u32(kind).u32(0).0, &[])?;
        let vectors = Fields(info.get(12..).unwrap_or_default()).u32().unwrap_or(0).min(VECTORS);
        let interrupts = Interrupts::new(vectors).map_err(Error::kernel("cannot make eventfds"))?;
        if vectors > 0 {
            let fds: Vec<_> = interrupts.events().iter().map(AsFd::as_fd).collect();
            let flags = abi::VFIO_IRQ_SET_DATA_EVENTFD | abi::VFIO_IRQ_SET_ACTION_TRIGGER;
            socket.ask(Command::SetIrqs, &Body::default().u32(20).u32(flags).u32(kind).u32(0).u32(vectors).0, &fds)?;
        }
        // 39 bits, without the first MiB and the window that x86 has for interrupts: what a device behind a small IOMMU has too.
        let space = Span::inclusive(Iova::new(1 << 20), Iova::new((1 << 39) - 1)).expect("a constant span");
        let mut iovas = RangeAllocator::new(space, PageSize::SIZE_4K);
        let window = Span::new(Iova::new(0xfee0_0000), 1 << 20).expect("a constant span");
        iovas.reserve(window)?;
        let inner =
            Inner { socket: Mutex::new(socket), iovas: Mutex::new(RangeCache::new(iovas)), mapped: AtomicU64::new(0) };
        Ok(Self { inner: Arc::new(inner), regions, interrupts })
    }

    /// The length of a region in bytes; 0 for one that the device does not have.
    pub fn region_len(&self, region: u32) -> u64 {
        self.regions.get(region as usize).map_or(0, |region| region.len)
    }

    /// What of a region is mapped into this process, so that no message is sent for it.
    pub fn mapped_areas(&self, region: u32) -> &[Range<u64>] {
        self.window(region).map_or(&[], |window| &window.areas)
    }

    fn window(&self, region: u32) -> Option<&Window> {
        self.regions.get(region as usize)?.window.as_ref()
    }

    /// What the device is: vendor and device number.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn id(&self) -> Result<(u16, u16), Error> {
        let mut bytes = [0; 4];
        self.read_region(abi::VFIO_PCI_CONFIG_REGION_INDEX, 0, &mut bytes)?;
        Ok((u16::from_le_bytes([bytes[0], bytes[1]]), u16::from_le_bytes([bytes[2], bytes[3]])))
    }

    /// Bytes that are mapped now.
    pub fn mapped_bytes(&self) -> u64 {
        self.inner.mapped.load(Ordering::Relaxed)
    }

    /// Reads part of a region.
    ///
    /// # Errors
    /// [`Error::Kernel`] when the device has no such bytes.
    pub fn read_region(&self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        if let Some(view) = self.window(region).and_then(|window| window.view(offset, into.len())) {
            view.read(into);
            return Ok(());
        }
        let mut at = offset;
        for piece in into.chunks_mut(MAX_DATA) {
            let body = Body::default().u64(at).u32(region).u32(piece.len() as u32);
            let answer = self.inner.ask(Command::RegionRead, body, &[])?;
            let data = answer.get(16..).filter(|data| data.len() == piece.len());
            piece.copy_from_slice(data.ok_or_else(|| protocol("it answered with more or less than was asked for"))?);
            at = at.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    /// Writes part of a region.
    ///
    /// # Errors
    /// As [`UserBus::read_region`].
    pub fn write_region(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), Error> {
        if let Some(view) = self.window(region).and_then(|window| window.view(offset, from.len())) {
            store(&view, offset, from);
            return Ok(());
        }
        let mut at = offset;
        for piece in from.chunks(MAX_DATA) {
            let body = Body::default().u64(at).u32(region).u32(piece.len() as u32).bytes(piece);
            self.inner.ask(Command::RegionWrite, body, &[])?;
            at = at.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    /// Resets the device.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn reset(&self) -> Result<(), Error> {
        self.inner.ask(Command::Reset, Body::default(), &[]).map(drop)
    }
}

/// Writes bytes at an offset of a region: aligned words of 64 bits each in one piece, as the device may look at them at any time.
fn store(view: &VolatileSlice<'_>, offset: u64, from: &[u8]) {
    match from.as_chunks::<8>() {
        (words, []) if offset.is_multiple_of(8) => {
            for (i, word) in words.iter().enumerate() {
                view.store_u64(8 * i, u64::from_le_bytes(*word)).expect("an aligned word within the view");
            }
        }
        _ => view.write(from),
    }
}

fn nowhere(bar: u8, offset: u64, bytes: usize) -> mem::Error {
    mem::Error::NoRegister { bar, offset, bytes: bytes as u64 }
}

/// What the device refused is not there; anything else is the connection's fault.
fn why(error: Error, nowhere: mem::Error) -> mem::Error {
    match &error {
        Error::Kernel { source, .. } if matches!(source.raw_os_error(), Some(libc::EINVAL | libc::EIO)) => nowhere,
        _ => error.into(),
    }
}

impl Registrar for UserBus {
    fn pin(&self, buffer: &BufferRef) -> Result<Pinned, mem::Error> {
        self.pin_range(buffer, 0..buffer.len())
    }

    fn map(&self, pinned: Pinned, access: Access) -> Result<Mapping, mem::Error> {
        self.map_list(vec![pinned], access)
    }

    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, mem::Error> {
        let len = buffer.len();
        if range.is_empty() || range.end > len || !(range.start | range.end).is_multiple_of(4096) {
            return Err(mem::Error::BadRange { range, len });
        }
        Ok(Pinned::of_range(buffer.clone(), range, None, self.inner.clone()))
    }

    fn map_list(&self, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, mem::Error> {
        if list.iter().any(|pinned| !pinned.is_from(&self.inner)) {
            return Err(mem::Error::ForeignPin);
        }
        if !access.intersects(Access::RW) {
            return Err(mem::Error::NoAccess(access));
        }
        if list.is_empty() {
            return Err(mem::Error::WholeBuffers);
        }
        list.iter_mut().for_each(|pinned| pinned.admit(access));
        let len: u64 = list.iter().map(|pinned| pinned.range().len() as u64).sum();
        let align = if len >= PageSize::SIZE_2M.bytes() { PageSize::SIZE_2M } else { PageSize::SIZE_4K };
        let lease = lock(&self.inner.iovas).allocate(len, align)?;
        let span = lease.span();
        let mut done = 0;
        for pinned in &list {
            let n = pinned.range().len() as u64;
            let mapped = span.sub(done, n).ok_or(Error::OutsideIova { span, ranges: vec![span] });
            if let Err(e) = mapped.and_then(|piece| self.inner.dma_map(pinned, piece, access)) {
                let undone = span.sub(0, done).map_or(Ok(()), |before| self.inner.dma_unmap(before));
                if undone.is_ok() {
                    lock(&self.inner.iovas).free(lease);
                }
                return Err(e.into());
            }
            done += n;
        }
        self.inner.mapped.fetch_add(len, Ordering::Relaxed);
        let more = list.split_off(1);
        Ok(Mapping::of_list(list.remove(0), more, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.inner)
    }

    /// Memfds without reserved huge pages: another process has to map them.
    fn heap(&self, best: Option<PageKind>) -> Arc<dyn Heap> {
        Arc::new(MemfdHeap::importable(best))
    }
}

impl Mmio for UserBus {
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, mem::Error> {
        let mut bytes = [0; 4];
        let aligned = offset.is_multiple_of(4) && bar < 6;
        aligned.then_some(()).ok_or(nowhere(bar, offset, 4))?;
        self.read_region(bar.into(), offset, &mut bytes).map_err(|e| why(e, nowhere(bar, offset, 4)))?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), mem::Error> {
        let aligned = offset.is_multiple_of(4) && bar < 6;
        aligned.then_some(()).ok_or(nowhere(bar, offset, 4))?;
        self.write_region(bar.into(), offset, &value.to_le_bytes()).map_err(|e| why(e, nowhere(bar, offset, 4)))
    }

    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), mem::Error> {
        (bar < 6).then_some(()).ok_or(nowhere(bar, offset, bytes.len()))?;
        self.write_region(bar.into(), offset, bytes).map_err(|e| why(e, nowhere(bar, offset, bytes.len())))
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.interrupts.wait(timeout)
    }

    fn event(&self, channel: usize) -> Option<BorrowedFd<'_>> {
        self.interrupts.lend(channel)
    }
}

impl std::fmt::Debug for UserBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UserBus").field("regions", &self.regions).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::time::Instant;

    use super::super::{ClientMemory, Model, RegionSpec, serve};
    use super::*;

    /// A device of nothing but one BAR, which takes its time to be read.
    struct Slow(Duration);

    impl Model for Slow {
        fn region(&self, index: u32) -> RegionSpec {
            if index == 0 { RegionSpec { len: 4096, usable: true } } else { RegionSpec::default() }
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

    const SHORT: Duration = Duration::from_millis(200);

    #[test]
    fn a_device_that_does_not_read_is_an_error() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut socket = Socket::new(ours, SHORT).unwrap();
        let began = Instant::now();
        let error = socket.ask(Command::RegionWrite, &vec![0; MAX_DATA], &[]).unwrap_err().to_string();
        assert!(error.contains("does not answer to RegionWrite"), "{error}");
        assert!(began.elapsed() >= SHORT && began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    }

    #[test]
    fn a_device_that_answers_late_loses_what_was_mapped() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let memory = ClientMemory::new();
        let seen = memory.clone();
        let server = std::thread::spawn(move || serve(theirs, &mut Slow(2 * SHORT), &memory));
        let bus = UserBus::patient(ours, SHORT).unwrap();
        let buf = MemfdHeap::starting_at(PageKind::Base).allocate(4096).unwrap().share();
        let mapping = bus.map(bus.pin(&buf.reference()).unwrap(), Access::RW).unwrap();
        assert_eq!(seen.mappings(), 1);
        assert!(bus.read32(0, 0).is_err());
        // While the bus is still there.
        let _ended = server.join().unwrap();
        assert_eq!(seen.mappings(), 0);
        drop(mapping);
        assert_eq!(bus.mapped_bytes(), 0);
    }
}
