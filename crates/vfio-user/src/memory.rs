//! The memory that a client has mapped for its device, as the device accesses it.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};

use dmalane_addr::{Access, Address, Iova, Span};
use dmalane_dma::{AnonHeap, DeviceMem, DmaFault, FaultReason, Heap, HeldMem, SharedBuf, VolatileSlice};
use rustix::io::Errno;

use crate::link::Link;
use crate::wire::MAX_PUSHED;

/// Maximum mappings of one client: the limit of the kernel's VFIO.
const MAX_MAPPINGS: usize = 65_535;
/// Maximum files of one client: each is a mapping of this process, which may have some 65 thousand in total.
const MAX_FILES: usize = 4096;
/// Maximum bytes of one client's files, mapped for the device or not: they use addresses of this process.
const MAX_BYTES: u64 = 1 << 40;

/// The memory that a client has mapped for a device. Clones share it.
///
/// The device takes a read lock for each access, an unmap takes the write lock: once an unmap is answered, no access to
/// that memory is in progress and none can begin.
#[derive(Clone)]
pub struct ClientMemory(Arc<RwLock<Mappings>>);

impl Default for ClientMemory {
    fn default() -> Self {
        let mappings = Mappings { bus_master: true, by_iova: BTreeMap::new(), files: HashMap::new(), link: None };
        Self(Arc::new(RwLock::new(mappings)))
    }
}

struct Mappings {
    /// The device may access memory: bus mastering, in PCI's command register.
    bus_master: bool,
    /// By first address; no two overlap.
    by_iova: BTreeMap<Iova, ClientMapping>,
    /// Each file once, however often the client sends it, by device and inode.
    files: HashMap<(u64, u64), Weak<SharedBuf>>,
    /// Reaches the memory that has no file.
    link: Option<Arc<Link>>,
}

struct ClientMapping {
    last: Iova,
    access: Access,
    /// The mapped file; `None` for memory without a file, which the device accesses by messages.
    file: Option<Arc<SharedBuf>>,
    /// Offset of the mapping in the file.
    offset: u64,
}

impl ClientMemory {
    /// Creates an empty set of mappings, with bus mastering enabled.
    pub fn new() -> Self {
        Self::default()
    }

    /// A port through which a device accesses the memory.
    pub fn port(&self) -> ClientPort {
        ClientPort { memory: self.clone(), copy: None }
    }

    /// Accesses memory without a file through a client's link from now on.
    pub(crate) fn set_link(&self, link: Option<Arc<Link>>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).link = link;
    }

    /// The number of mappings.
    pub fn mappings(&self) -> usize {
        self.read().by_iova.len()
    }

    /// Enables or disables bus mastering. While it is disabled, a device finds nothing mapped; when the call that
    /// disables it returns, no access is in progress.
    pub fn set_bus_master(&self, on: bool) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).bus_master = on;
    }

    /// Maps part of a client's file. A client may share [`MAX_FILES`] files with [`MAX_BYTES`] in total; beyond that
    /// the error is `ENOMEM`. QEMU maps its firmware and BARs of other devices without a file.
    pub(crate) fn map(&self, span: Span<Iova>, access: Access, fd: Option<OwnedFd>, offset: u64) -> Result<(), Errno> {
        let key = fd.as_ref().map(|fd| {
            // Unsealed descriptors may be FUSE files; even `fstat` can block on them.
            rustix::fs::fcntl_get_seals(fd)?;
            rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino))
        });
        let key = key.transpose()?;
        let mut mappings = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if mappings.by_iova.len() >= MAX_MAPPINGS {
            return Err(Errno::NOSPC);
        }
        if access.is_empty() || (span.first().bits() | span.len() | offset) & 0xfff != 0 {
            return Err(Errno::INVAL);
        }
        if mappings.overlapping(span).next().is_some() {
            return Err(Errno::EXIST);
        }
        let file = match fd.zip(key) {
            None => None,
            Some((fd, key)) => match mappings.files.get(&key).and_then(Weak::upgrade) {
                Some(file) => Some(file),
                None => {
                    let file = Arc::new(mappings.import(fd)?);
                    mappings.files.insert(key, Arc::downgrade(&file));
                    Some(file)
                }
            },
        };
        let len = file.as_ref().map_or(u64::MAX, |file| file.len() as u64);
        let end = offset.checked_add(span.len()).filter(|end| *end <= len);
        end.ok_or(Errno::INVAL)?;
        mappings.by_iova.insert(span.first(), ClientMapping { last: span.last(), access, file, offset });
        Ok(())
    }

    /// Unmaps the mappings in the span, which must be whole ones. There may be none, as with the kernel's VFIO: QEMU
    /// unmaps everything that a guest could have mapped.
    pub(crate) fn unmap(&self, span: Span<Iova>) -> Result<(), Errno> {
        let mut mappings = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let inside: Vec<_> = mappings.overlapping(span).map(|(first, mapping)| (first, mapping.last)).collect();
        let (Some((first, _)), Some((_, last))) = (inside.first(), inside.last()) else { return Ok(()) };
        if *first < span.first() || *last > span.last() {
            return Err(Errno::INVAL);
        }
        inside.iter().for_each(|(first, _)| drop(mappings.by_iova.remove(first)));
        Ok(())
    }

    /// Unmaps everything: the client has disconnected, or asked for it.
    pub(crate) fn clear(&self) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).by_iova.clear();
    }

    fn read(&self) -> RwLockReadGuard<'_, Mappings> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mappings {
    /// Maps another file of the client into this process, within the limits for a client.
    fn import(&mut self, fd: OwnedFd) -> Result<SharedBuf, Errno> {
        self.files.retain(|_, file| file.strong_count() > 0);
        let used: u64 = self.files.values().filter_map(Weak::upgrade).map(|file| file.len() as u64).sum();
        if self.files.len() >= MAX_FILES {
            return Err(Errno::NOMEM);
        }
        SharedBuf::import_up_to(fd, MAX_BYTES.saturating_sub(used)).map_err(|e| match e {
            dmalane_dma::Error::Import(e) if e.kind() == std::io::ErrorKind::OutOfMemory => Errno::NOMEM,
            _ => Errno::INVAL,
        })
    }

    /// The mappings that overlap the span, lowest first.
    fn overlapping(&self, span: Span<Iova>) -> impl Iterator<Item = (Iova, &ClientMapping)> {
        let before = self.by_iova.range(..span.first()).next_back().filter(|(_, mapping)| mapping.last >= span.first());
        before
            .into_iter()
            .chain(self.by_iova.range(span.first()..=span.last()))
            .map(|(first, mapping)| (*first, mapping))
    }

    /// The mapping that contains this address, if the device may access memory at all.
    fn at(&self, at: Iova) -> Option<(Iova, &ClientMapping)> {
        if !self.bus_master {
            return None;
        }
        let (first, mapping) = self.by_iova.range(..=at).next_back()?;
        (at <= mapping.last).then_some((*first, mapping))
    }
}

/// A device's access to [`ClientMemory`].
pub struct ClientPort {
    memory: ClientMemory,
    /// Bytes of memory without a file, as long as a message; allocated for the first access.
    copy: Option<SharedBuf>,
}

impl DeviceMem for ClientPort {
    type Held<'a> = HeldClient<'a>;

    fn hold(&mut self) -> HeldClient<'_> {
        HeldClient { mappings: self.memory.read(), copy: &mut self.copy }
    }
}

/// A [`ClientPort`] while it holds the mappings.
pub struct HeldClient<'a> {
    mappings: RwLockReadGuard<'a, Mappings>,
    copy: &'a mut Option<SharedBuf>,
}

impl HeldMem for HeldClient<'_> {
    /// Calls `each` with the memory of each mapping in the access and its offset in the access, until `each` returns
    /// false. For memory without a file it is a copy, which is written back as a whole.
    fn access(
        &mut self,
        at: Iova,
        len: usize,
        wanted: Access,
        mut each: impl FnMut(usize, VolatileSlice<'_>) -> bool,
    ) -> Result<(), DmaFault> {
        let Self { mappings, copy } = self;
        let mut done = 0;
        while done < len {
            let fault = |at, reason| DmaFault { at, wanted, reason, done: done as u64 };
            let here = at.checked_add(done as u64).ok_or_else(|| fault(at, FaultReason::PastTheTop))?;
            let (first, found) = mappings.at(here).ok_or_else(|| fault(here, FaultReason::NotMapped))?;
            if !found.access.contains(wanted) {
                return Err(fault(here, FaultReason::NotPermitted));
            }
            let inside = here.bits() - first.bits();
            let left = found.last.bits() - here.bits() + 1;
            let n = left.min((len - done) as u64) as usize;
            let (n, goes_on) = match &found.file {
                // `map` checked that the mapping lies within the file.
                Some(file) => {
                    let slice = file.as_volatile_slice().sub((found.offset + inside) as usize, n);
                    slice.map(|slice| (n, each(done, slice)))
                }
                None => mappings.by_messages(copy, here, n, wanted, |slice| each(done, slice)),
            }
            .ok_or_else(|| fault(here, FaultReason::NotMapped))?;
            if !goes_on {
                return Ok(());
            }
            done += n;
        }
        Ok(())
    }

    /// A word that is `None` is no part of an access.
    fn write_words(&mut self, into: Iova, words: &[Option<u64>]) -> Result<(), DmaFault> {
        let fault = |reason| DmaFault { at: into, wanted: Access::WRITE, reason, done: 0 };
        if !into.bits().is_multiple_of(8) {
            return Err(fault(FaultReason::Misaligned));
        }
        let mut first = 0;
        for run in words.chunk_by(|a, b| a.is_some() == b.is_some()) {
            let at = into.checked_add(8 * first as u64).ok_or_else(|| fault(FaultReason::PastTheTop))?;
            first += run.len();
            if run[0].is_some() {
                self.access(at, 8 * run.len(), Access::WRITE, |done, slice| {
                    for (i, word) in run[done / 8..][..slice.len() / 8].iter().flatten().enumerate() {
                        slice.store_u64(8 * i, *word).expect("an aligned word of the stretch");
                    }
                    true
                })?;
            }
        }
        Ok(())
    }
}

impl Mappings {
    /// Calls `each` with a copy of so many bytes of memory without a file, as far as a message reaches, and gives how
    /// many those are and what `each` returned. `None` where the client does not let go of them.
    fn by_messages(
        &self,
        copy: &mut Option<SharedBuf>,
        at: Iova,
        len: usize,
        wanted: Access,
        each: impl FnOnce(VolatileSlice<'_>) -> bool,
    ) -> Option<(usize, bool)> {
        let link = self.link.as_ref()?;
        if copy.is_none() {
            *copy = Some(AnonHeap::new().allocate(MAX_PUSHED).ok()?.share());
        }
        let mut bytes = vec![0; len.min(link.max_data())];
        let slice = copy.as_ref()?.as_volatile_slice().sub(0, bytes.len())?;
        if wanted.contains(Access::READ) {
            link.read(at.bits(), &mut bytes)?;
            slice.write(&bytes);
        }
        let goes_on = each(slice);
        if wanted.contains(Access::WRITE) {
            slice.read(&mut bytes);
            link.write(at.bits(), &bytes)?;
        }
        Some((bytes.len(), goes_on))
    }
}

#[cfg(test)]
mod tests {
    use dmalane_dma::{Heap, MemfdHeap, PageKind};

    use super::*;

    fn span(first: u64, len: u64) -> Span<Iova> {
        Span::new(Iova::new(first), len).unwrap()
    }

    /// A sealed memfd without pages.
    fn sparse(len: u64) -> Option<OwnedFd> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        let file = memfd_create("sparse", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, len).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        Some(file)
    }

    #[test]
    fn the_files_of_a_client_are_limited() {
        let memory = ClientMemory::new();
        let map = |page: u64, file| memory.map(span(page << 12, 4096), Access::RW, file, 0);
        assert_eq!(map(1, sparse(1 << 46)), Err(Errno::NOMEM));
        assert_eq!(map(1, sparse(MAX_BYTES + 4096)), Err(Errno::NOMEM));
        map(1, sparse(MAX_BYTES - 4096)).unwrap();
        assert_eq!(map(2, sparse(8192)), Err(Errno::NOMEM));
        map(2, sparse(4096)).unwrap();
        assert_eq!(map(3, sparse(4096)), Err(Errno::NOMEM), "the limit is reached");
        // Unmapped files no longer count.
        memory.unmap(span(1 << 12, 4096)).unwrap();
        map(3, sparse(8192)).unwrap();
        assert_eq!(memory.mappings(), 2);
    }

    #[test]
    fn the_number_of_files_is_limited() {
        let memory = ClientMemory::new();
        let map = |page: u64| memory.map(span(page << 12, 4096), Access::RW, sparse(4096), 0);
        // One file stands for all but one of them: a process may not have so many descriptors.
        let file = Arc::new(SharedBuf::import(sparse(4096).unwrap()).unwrap());
        let others = (1..MAX_FILES as u64).map(|number| ((u64::MAX, number), Arc::downgrade(&file)));
        memory.0.write().unwrap().files.extend(others);
        map(1).unwrap();
        assert_eq!(map(2), Err(Errno::NOMEM));
        memory.unmap(span(1 << 12, 4096)).unwrap();
        map(2).unwrap();
    }

    #[test]
    fn the_mappings_of_a_client_are_limited() {
        let memory = ClientMemory::new();
        let map = |page: u64| memory.map(span(page << 12, 4096), Access::RW, None, 0);
        (1..=MAX_MAPPINGS as u64).for_each(|page| map(page).unwrap());
        assert_eq!(map(MAX_MAPPINGS as u64 + 1), Err(Errno::NOSPC));
        memory.unmap(span(1 << 12, 4096)).unwrap();
        map(MAX_MAPPINGS as u64 + 1).unwrap();
        assert_eq!((map(1), memory.mappings()), (Err(Errno::NOSPC), MAX_MAPPINGS));
    }

    #[test]
    fn a_device_accesses_only_mapped_memory() {
        let memory = ClientMemory::new();
        let buf = MemfdHeap::starting_at(PageKind::Base).allocate(16 << 10).unwrap().share();
        let fd = || Some(buf.export().unwrap().try_clone_to_owned().unwrap());
        memory.map(span(0x1000, 0x1000), Access::RW, fd(), 0x2000).unwrap();
        memory.map(span(0x2000, 0x1000), Access::READ, fd(), 0).unwrap();
        memory.map(span(0x8000, 0x1000), Access::RW, fd(), 0x1000).unwrap();
        assert_eq!(memory.mappings(), 3);
        let mut port = memory.port();
        // Across two mappings, whose offsets in the file are in reverse order.
        buf.as_volatile_slice().sub(0x2ffc, 4).unwrap().write(b"abcd");
        buf.as_volatile_slice().sub(0, 4).unwrap().write(b"efgh");
        let mut bytes = [0; 8];
        port.hold().read_bytes(Iova::new(0x1ffc), &mut bytes).unwrap();
        assert_eq!(&bytes, b"abcdefgh");
        let fault = port.hold().write_bytes(Iova::new(0x1ffc), &bytes).unwrap_err();
        assert_eq!((fault.at, fault.reason, fault.done), (Iova::new(0x2000), FaultReason::NotPermitted, 4));
        let fault = port.hold().read_bytes(Iova::new(0x2ffc), &mut bytes).unwrap_err();
        assert_eq!((fault.at, fault.reason), (Iova::new(0x3000), FaultReason::NotMapped));
        port.hold().write_word(Iova::new(0x8ff8), 7).unwrap();
        assert_eq!(buf.as_volatile_slice().load_u64(0x1ff8), Some(7));
        port.hold().read_bytes(Iova::new(0x8fff), &mut [0]).unwrap();
        assert!(
            port.hold().write_word(Iova::new(0x8ff4), 7).is_err()
                && port.hold().read_bytes(Iova::new(u64::MAX), &mut bytes).is_err()
        );
        // Refused mappings.
        let map = |first, len, offset| memory.map(span(first, len), Access::RW, fd(), offset);
        assert_eq!(map(0x2000, 0x1000, 0), Err(Errno::EXIST));
        assert_eq!(map(0, 0x9000, 0), Err(Errno::EXIST));
        assert_eq!(map(0x9000, 0x5000, 0), Err(Errno::INVAL), "longer than the file");
        assert_eq!(map(0x9000, 0x1000, u64::MAX - 0xfff), Err(Errno::INVAL));
        assert_eq!(map(0x9008, 0x1000, 0), Err(Errno::INVAL));
        assert_eq!(map(0x9000, 0x1000, 8), Err(Errno::INVAL));
        assert_eq!(memory.map(span(0x9000, 0x1000), Access::empty(), fd(), 0), Err(Errno::INVAL));
        let file = tempfile::tempfile().unwrap();
        assert_eq!(
            memory.map(span(0x9000, 0x1000), Access::RW, Some(file.into()), 0),
            Err(Errno::INVAL),
            "not a memfd"
        );
        assert_eq!(memory.unmap(span(0x1000, 0x800)), Err(Errno::INVAL));
        assert_eq!(memory.unmap(span(0x1800, 0x1800)), Err(Errno::INVAL));
        assert_eq!(memory.unmap(span(0x4000, 0x1000)), Ok(()), "nothing is mapped there");
        assert_eq!(memory.mappings(), 3);
        memory.unmap(span(0x1000, 0x2000)).unwrap();
        assert!(port.hold().read_bytes(Iova::new(0x1000), &mut bytes).is_err());
        // Memory without a file occupies its addresses, and an access is a fault.
        memory.map(span(0x1_0000, 0x1000), Access::RW, None, 0).unwrap();
        assert_eq!(map(0x1_0000, 0x1000, 0), Err(Errno::EXIST));
        let fault = port.hold().read_bytes(Iova::new(0x1_0000), &mut bytes).unwrap_err();
        assert_eq!((fault.at, fault.reason), (Iova::new(0x1_0000), FaultReason::NotMapped));
        memory.unmap(span(0x1_0000, 0x1000)).unwrap();
        memory.set_bus_master(false);
        let fault = port.hold().read_bytes(Iova::new(0x8000), &mut bytes).unwrap_err();
        assert_eq!((fault.at, fault.reason), (Iova::new(0x8000), FaultReason::NotMapped));
        memory.set_bus_master(true);
        port.hold().read_bytes(Iova::new(0x8000), &mut bytes).unwrap();
        memory.clear();
        assert_eq!((memory.mappings(), port.hold().read_bytes(Iova::new(0x8000), &mut bytes).is_err()), (0, true));
    }

    #[test]
    fn words_go_on_in_the_next_mapping() {
        let memory = ClientMemory::new();
        let buf = MemfdHeap::starting_at(PageKind::Base).allocate(16 << 10).unwrap().share();
        let fd = || Some(buf.export().unwrap().try_clone_to_owned().unwrap());
        memory.map(span(0x1000, 0x1000), Access::RW, fd(), 0).unwrap();
        memory.map(span(0x2000, 0x1000), Access::RW, fd(), 0x3000).unwrap();
        memory.port().hold().write_words(Iova::new(0x1ff0), &[None, Some(2), Some(3), None, Some(5)]).unwrap();
        let word = |at| buf.as_volatile_slice().load_u64(at).unwrap();
        assert_eq!([0xff0, 0xff8, 0x3000, 0x3008, 0x3010, 0x3018].map(word), [0, 2, 3, 0, 5, 0]);
    }
}
