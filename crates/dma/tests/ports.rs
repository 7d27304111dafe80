//! The ports from the side of implementers and users: registrations, register files, memory seen by a device.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{
    AnonHeap, BufferRef, BufferSlice, CopyHint, DeviceMem, DmaFault, Error, FaultReason, FileMapping, Heap, HeldMem,
    Mapping, MemfdHeap, Mmio, PageKind, Pinned, Registrar, SharedBuf, Undo, VolatileSlice,
};

const PAGE: usize = 4096;
/// Where the memory of [`Stretches`] begins for the device.
const BASE: u64 = 0x1_0000;
/// Bytes of each of its stretches.
const STRETCH: usize = 100;

fn buffer(len: usize) -> SharedBuf {
    let mut buf = AnonHeap::starting_at(PageKind::Base).allocate(len).unwrap();
    buf.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
    buf.share()
}

/// A device's view of a buffer that the IOMMU gives in stretches, and that ends with the buffer.
struct Stretches(SharedBuf);

impl DeviceMem for Stretches {
    type Held<'a> = Held<'a>;

    fn hold(&mut self) -> Held<'_> {
        Held(&self.0)
    }
}

/// The same while it is held.
struct Held<'a>(&'a SharedBuf);

impl HeldMem for Held<'_> {
    fn access(
        &mut self,
        at: Iova,
        len: usize,
        wanted: Access,
        mut each: impl FnMut(usize, VolatileSlice<'_>) -> bool,
    ) -> Result<(), DmaFault> {
        let mut done = 0;
        while done < len {
            let offset = (at.bits() - BASE) as usize + done;
            let stretch = STRETCH.min(len - done);
            let Some(bytes) = self.0.as_volatile_slice().sub(offset, stretch) else {
                let (at, done) = (Iova::new(BASE + offset as u64), done as u64);
                return Err(DmaFault { at, wanted, reason: FaultReason::NotMapped, done });
            };
            if !each(done, bytes) {
                break;
            }
            done += stretch;
        }
        Ok(())
    }

    fn write_word(&mut self, into: Iova, value: u64) -> Result<(), DmaFault> {
        self.write_words(into, &[Some(value)])
    }

    fn write_words(&mut self, into: Iova, words: &[Option<u64>]) -> Result<(), DmaFault> {
        for (i, word) in words.iter().enumerate() {
            let at = into + 8 * i as u64;
            let fault = DmaFault { at, wanted: Access::WRITE, reason: FaultReason::Misaligned, done: 0 };
            if let Some(word) = word {
                self.0.as_volatile_slice().store_u64((at.bits() - BASE) as usize, *word).ok_or(fault)?;
            }
        }
        Ok(())
    }
}

#[test]
fn accesses_of_a_device_are_made_of_stretches() {
    let mut memory = Stretches(buffer(PAGE));
    let at = |offset: u64| Iova::new(BASE + offset);
    let (inside, outside) = (buffer(PAGE), buffer(PAGE));
    let expected: Vec<u8> = (30..30 + 350).map(|i: usize| (i % 251) as u8).collect();
    let mut bytes = vec![0; 350];
    memory.hold().read_bytes(at(30), &mut bytes).unwrap();
    assert_eq!(bytes, expected);
    memory.hold().read(at(30), inside.as_volatile_slice().sub(7, 350).unwrap(), CopyHint::default()).unwrap();
    inside.as_volatile_slice().sub(7, 350).unwrap().read(&mut bytes);
    assert_eq!(bytes, expected);
    assert_eq!(memory.hold().compare(at(30), inside.as_volatile_slice().sub(7, 350).unwrap()).unwrap(), None);
    for differs in [0, 99, 100, 101, 349] {
        let byte = inside.as_volatile_slice().sub(7 + differs, 1).unwrap();
        byte.write(&[!expected[differs]]);
        let with = inside.as_volatile_slice().sub(7, 350).unwrap();
        assert_eq!(memory.hold().compare(at(30), with).unwrap(), Some(differs));
        byte.write(&[expected[differs]]);
    }
    // Of more bytes than are compared at a time, and no multiple of these.
    let long = [buffer(3 * PAGE), buffer(3 * PAGE)];
    let difference = || {
        let [one, two] = [0, 1].map(|i: usize| long[i].as_volatile_slice().sub(0, 2 * PAGE + 10).unwrap());
        one.first_difference(two)
    };
    assert_eq!(difference(), None);
    long[0].as_volatile_slice().sub(2 * PAGE + 9, 1).unwrap().write(&[255]);
    assert_eq!(difference(), Some(2 * PAGE + 9));
    // Writes, of bytes and of memory; what is beside them stays.
    let written: Vec<u8> = (0..350).map(|i| !(i as u8)).collect();
    let all = |memory: &Stretches| {
        let mut all = vec![0; PAGE];
        memory.0.as_volatile_slice().read(&mut all);
        all
    };
    let mut model = all(&memory);
    memory.hold().write_bytes(at(1000), &written).unwrap();
    model[1000..1350].copy_from_slice(&written);
    assert!(all(&memory) == model);
    outside.as_volatile_slice().write(&written);
    memory.hold().write(at(2000), outside.as_volatile_slice().sub(0, 350).unwrap(), CopyHint::default()).unwrap();
    model[2000..2350].copy_from_slice(&written);
    assert!(all(&memory) == model);
    memory.hold().write_word(at(3000), 0x0123_4567_89ab_cdef).unwrap();
    model[3000..3008].copy_from_slice(&0x0123_4567_89ab_cdef_u64.to_le_bytes());
    assert!(all(&memory) == model);
    assert!(memory.try_hold().is_some(), "nobody else holds it");
    assert_eq!(memory.hold().entries_read(), 0, "not counted");
    // The end of what is mapped.
    let end = PAGE as u64 - 150;
    let fault = memory.hold().write_bytes(at(end), &[9; 350]).unwrap_err();
    assert_eq!((fault.at, fault.done, fault.reason), (at(end + 100), 100, FaultReason::NotMapped));
    let fault = memory.hold().read_bytes(at(end), &mut bytes).unwrap_err();
    assert_eq!(fault.to_string(), format!("device fault: r-- access to {} is not mapped", at(end + 100)));
    assert_eq!(memory.hold().write_word(at(3001), 0).unwrap_err().reason, FaultReason::Misaligned);
    for (reason, text) in [
        (FaultReason::NotPermitted, "is not permitted by the mapping"),
        (FaultReason::PastTheTop, "runs past the top of the IOVA space"),
        (FaultReason::Misaligned, "is not aligned"),
    ] {
        assert_eq!(reason.to_string(), text);
    }
}

/// A registrar that counts, and a device whose registers record what was written.
struct Bus {
    undo: Arc<Counts>,
    iovas: Mutex<RangeCache<Iova>>,
    written: Mutex<Vec<(u8, u64, Vec<u8>)>>,
}

#[derive(Default)]
struct Counts {
    unmapped: AtomicU64,
    unpinned: AtomicU64,
}

impl Undo for Counts {
    fn unmap(&self, lease: Lease<Iova>) -> bool {
        self.unmapped.fetch_add(lease.span().len(), Ordering::Relaxed);
        true
    }

    fn unpin(&self, pages: &SgTable<PhysAddr>) {
        self.unpinned.fetch_add(pages.segments().map(|s| s.len).sum(), Ordering::Relaxed);
    }
}

impl Bus {
    fn new() -> Self {
        let space = Span::new(Iova::new(1 << 20), 1 << 30).unwrap();
        let iovas = Mutex::new(RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K)));
        Self { undo: Arc::default(), iovas, written: Mutex::default() }
    }

    fn counts(&self) -> (u64, u64) {
        (self.undo.unmapped.load(Ordering::Relaxed), self.undo.unpinned.load(Ordering::Relaxed))
    }
}

impl Registrar for Bus {
    fn pin_range(&self, buffer: &BufferRef, range: Range<usize>) -> Result<Pinned, Error> {
        buffer.check_pages(&range, PAGE)?;
        let mut pages = SgTable::new();
        pages.push(PhysAddr::new(1 << 30), range.len() as u64).unwrap();
        Ok(Pinned::new(buffer.clone(), range, Some(pages), self.undo.clone()))
    }

    fn map_list(&self, mut list: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        let len = Pinned::admit_all(&mut list, &self.undo, access)?;
        let lease = self.iovas.lock().unwrap().allocate(len, PageSize::SIZE_4K)?;
        Ok(Mapping::new(list, lease, access))
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        mapping.pinned().is_from(&self.undo)
    }
}

impl Mmio for Bus {
    /// BAR 2 has four words, each with its offset in every byte, and one more.
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, Error> {
        match (bar, offset) {
            (2, 0 | 4 | 8 | 12) => Ok(0x0101_0101 * offset as u32 + 0x0403_0201),
            _ => Err(Error::NoRegister { bar, offset, bytes: 4 }),
        }
    }

    fn write32(&self, bar: u8, offset: u64, _: u32) -> Result<(), Error> {
        Err(Error::NoRegister { bar, offset, bytes: 4 })
    }

    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.written.lock().unwrap().push((bar, offset, bytes.to_vec()));
        Ok(())
    }

    fn wait(&self, _: Duration) -> bool {
        false
    }
}

#[test]
fn a_device_has_what_its_driver_does_not_change() {
    let bus = Bus::new();
    bus.write64(2, 0x40, 0x0102_0304_0506_0708).unwrap();
    assert_eq!(*bus.written.lock().unwrap(), [(2, 0x40, vec![8, 7, 6, 5, 4, 3, 2, 1])]);
    let mut bytes = [0; 7];
    bus.read_bytes(2, 3, &mut bytes).unwrap();
    assert_eq!(bytes, [4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(bus.read64(2, 8).unwrap(), 0x100f_0e0d_0c0b_0a09);
    assert!(bus.read64(2, 12).is_err() && bus.read_bytes(2, u64::MAX, &mut bytes).is_err());
    bus.read_bytes(7, 0, &mut []).unwrap();
    assert!(!bus.progress() && bus.works_alone());
    assert_eq!(bus.heap(Some(PageKind::Base)).allocate(PAGE).unwrap().len(), PAGE);
    assert_eq!(bus.heap(None).allocate(PAGE).unwrap().len(), PAGE);
}

#[test]
fn a_reference_says_where_the_memory_is() {
    let buf = MemfdHeap::starting_at(PageKind::Base).allocate(2 * PAGE).unwrap().share();
    let reference = buf.reference();
    assert_eq!((reference.len(), reference.address()), (2 * PAGE, buf.as_volatile_slice().as_ptr().addr()));
    let other = MemfdHeap::starting_at(PageKind::Base).allocate(PAGE).unwrap().share().reference();
    assert!(reference.same_memory(&buf.reference()) && !reference.same_memory(&other));
    assert!(reference.id() == buf.reference().id() && reference.id() != other.id());
    for range in [0..PAGE, PAGE..2 * PAGE, 0..2 * PAGE] {
        reference.check_pages(&range, PAGE).unwrap();
    }
    #[allow(clippy::reversed_empty_ranges)]
    for range in [0..0, PAGE..PAGE, 2 * PAGE..PAGE, 1..PAGE, 0..PAGE + 1, 0..3 * PAGE, 2 * PAGE..3 * PAGE] {
        let refused = reference.check_pages(&range, PAGE);
        assert!(matches!(refused, Err(Error::BadRange { len: 8192, .. })), "{range:?}");
    }
}

#[test]
fn a_mapping_of_a_file_goes_with_its_value() {
    let name = format!("ports-{}", std::process::id());
    let file = rustix::fs::memfd_create(&name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 8192).unwrap();
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains(&name);
    let mapping = FileMapping::new(file.as_fd(), 0..8192).unwrap();
    assert!(mapped());
    drop(mapping);
    assert!(!mapped());
}

#[test]
fn mappings_say_where_slices_are_and_undo_themselves() {
    let bus = Bus::new();
    let (one, two, three) = (buffer(3 * PAGE), buffer(2 * PAGE), buffer(PAGE));
    let pinned = |buf: &SharedBuf| bus.pin(&buf.reference()).unwrap();
    let list = vec![bus.pin_range(&one.reference(), PAGE..3 * PAGE).unwrap(), pinned(&two), pinned(&three)];
    assert_eq!((list[0].range(), list[1].range()), (PAGE..3 * PAGE, 0..2 * PAGE));
    assert_eq!(list[0].pages().unwrap().segments().map(|s| s.len).sum::<u64>(), 2 * PAGE as u64);
    assert!(list[0].reference().same_memory(&one.reference()));
    let mapping = bus.map_list(list, Access::RW).unwrap();
    assert!(bus.owns(&mapping) && !Bus::new().owns(&mapping));
    assert_eq!((mapping.span().len(), mapping.access()), (5 * PAGE as u64, Access::RW));
    let base = mapping.span().first().bits();
    let place = |slice: &BufferSlice| mapping.iova_of(slice).map(|span| (span.first().bits() - base, span.len()));
    // Of the first buffer all but a page.
    let (before, rest) = one.into_slice().split_at(PAGE).unwrap();
    let (first, second) = rest.split_at(PAGE + 5).unwrap();
    assert_eq!((place(&before), place(&first)), (None, Some((0, PAGE as u64 + 5))));
    assert_eq!(place(&second), Some((PAGE as u64 + 5, PAGE as u64 - 5)));
    let across = before.join(first).unwrap();
    assert_eq!(place(&across), None, "part of it is not mapped");
    // The second lies behind it.
    let (third, mut fourth) = two.into_slice().split_at(PAGE).unwrap();
    assert_eq!(place(&third), Some((2 * PAGE as u64, PAGE as u64)));
    assert_eq!(place(&fourth), Some((3 * PAGE as u64, PAGE as u64)));
    assert_eq!(place(&three.into_slice()), Some((4 * PAGE as u64, PAGE as u64)));
    assert_eq!(place(&buffer(PAGE).into_slice()), None);
    assert_eq!(bus.counts(), (0, 0));
    assert!(fourth.with_bytes(|_| ()).is_none(), "the device may write");
    drop(mapping);
    assert_eq!(bus.counts(), (5 * PAGE as u64, 5 * PAGE as u64));
    assert!(fourth.with_bytes(|_| ()).is_some());
}

#[test]
fn what_cannot_be_mapped_is_refused() {
    let (bus, other) = (Bus::new(), Bus::new());
    let buf = buffer(PAGE);
    let pinned = || bus.pin(&buf.reference()).unwrap();
    assert!(matches!(bus.map_list(Vec::new(), Access::RW), Err(Error::WholeBuffers)));
    assert!(matches!(other.map(pinned(), Access::RW), Err(Error::ForeignPin)));
    let mixed = vec![pinned(), other.pin(&buf.reference()).unwrap()];
    assert!(matches!(bus.map_list(mixed, Access::RW), Err(Error::ForeignPin)));
    assert!(matches!(bus.map(pinned(), Access::empty()), Err(Error::NoAccess(_))));
    assert!(format!("{:?}", pinned()).starts_with("Pinned"));
    let reading = bus.map(pinned(), Access::READ).unwrap();
    let mut slice = buf.into_slice();
    assert!(slice.with_bytes(|bytes| bytes[1] == 1).unwrap(), "the device only reads");
    drop(reading);
}
