//! The test suite that every device takes.
//!
//! A device joins with one call of [`suite`] from one test.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, SgIndex, SgTable, Span};
use dmalane_dma::{BufferSlice, Heap, Registrar};
use dmalane_queue::{
    Capabilities, Completion, DeviceAddr, DeviceQueue, Direction, OpError, Operation, Refusal, Registered, Route,
    RunError, drain, run,
};
use dmalane_vm::{BindRequest, Bo};

use crate::{
    AddressSpace, AddressSpaceKind, Bounce, Device, DeviceMemory, DriverCopy, LentMemory, NoIommu, Placement, Region,
    SpaceError,
};

const LONG: Duration = Duration::from_secs(30);
/// Bytes that are moved at each edge: a page, and a length that is no multiple of anything.
const LENGTHS: [u64; 2] = [4096, 2 * 4096 + 13];

/// Runs all tests; each opens devices of its own, which need 64 KiB of memory or more in each region, and 16 granules
/// in the first.
///
/// # Panics
/// When a test fails.
pub fn suite(mut open: impl FnMut() -> Box<dyn Device>) {
    suite_aligned(&mut open, 1);
}

/// The same for a device whose addresses, lengths and host memory are multiples of `align`.
///
/// # Panics
/// When a test fails.
pub fn suite_aligned(open: &mut dyn FnMut() -> Box<dyn Device>, align: u64) {
    regions_are_disjoint_and_named(&*open());
    queues_are_taken_once(&mut *open());
    host_memory_is_registered(&*open());
    every_queue_reaches_the_edges_of_its_regions(&mut *open(), align);
    impossible_operations_come_back(&mut *open(), align);
    blocking_calls_move_bytes(&mut *open(), align);
    drivers_copy_as_queues_do(&mut *open());
    memory_is_lent_or_refused(open, align);
    // One device at a time: some have no room for two.
    let kind = open().address_space().kind();
    match kind {
        AddressSpaceKind::Flat => a_flat_space_shows_memory_where_it_lies(&mut *open()),
        _ => binds_are_seen_until_they_are_unbound(&mut *open(), align),
    }
    dropped_with_operations_in_flight(open, align);
}

/// A device with its queues taken.
struct Taken<'a> {
    device: &'a mut dyn Device,
    queues: Vec<Box<DeviceQueue>>,
    registrar: Arc<dyn Registrar>,
    heap: Arc<dyn Heap>,
}

impl<'a> Taken<'a> {
    fn new(device: &'a mut dyn Device) -> Self {
        let (queues, registrar) = (device.take_queues(), device.registrar());
        let heap = registrar.heap(None);
        Self { device, queues, registrar, heap }
    }

    /// A registered buffer of exactly these bytes.
    fn host(&self, bytes: &[u8]) -> (BufferSlice, Registered) {
        let mut buf = self.heap.allocate(bytes.len()).unwrap();
        buf[..bytes.len()].copy_from_slice(bytes);
        let buf = buf.share();
        let via = Registered::new(&*self.registrar, &buf, Access::RW).unwrap();
        (buf.into_slice().split_at(bytes.len()).unwrap().0, via)
    }

    fn write(&mut self, queue: usize, at: DeviceAddr, bytes: &[u8]) {
        let host = self.host(bytes);
        run(&mut *self.queues[queue], Operation::write(host, at), LONG).unwrap();
    }

    fn read(&mut self, queue: usize, at: DeviceAddr, len: u64) -> Result<Vec<u8>, RunError<DeviceAddr>> {
        let host = self.host(&vec![0xa5; len as usize]);
        let ended = run(&mut *self.queues[queue], Operation::read(host, at), LONG)?;
        let mut bytes = vec![0; len as usize];
        ended.into_slice().unwrap().read(0, &mut bytes).unwrap();
        Ok(bytes)
    }

    /// The part of each region that may be used: all of it, or 4 MiB that the driver allocates.
    fn places(&self) -> (DeviceMemory, Vec<(Region, Span<CardAddr>)>) {
        let mut memory = self.device.memory();
        let place = |region: &Region| {
            let placement = Placement::Named(region.name.clone());
            let span = match memory.is_driven() {
                true => one(&memory.allocate(region.span.len().min(4 << 20), &placement).unwrap()),
                false => region.span,
            };
            (region.clone(), span)
        };
        let places = self.device.regions().iter().map(place).collect();
        (memory, places)
    }

    /// Whether a queue reaches a region.
    fn reaches(&self, queue: usize, region: &Region) -> bool {
        match region.route {
            Route::Shared => true,
            Route::Channel(only) => only % self.queues.len() == queue,
        }
    }
}

/// Bytes that are different for each seed (SplitMix64).
fn noise(seed: u64, len: u64) -> Vec<u8> {
    let byte = |i: u64| {
        let mut z = (seed << 40).wrapping_add(i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 56) as u8
    };
    (0..len).map(byte).collect()
}

fn regions_are_disjoint_and_named(device: &dyn Device) {
    let regions = device.regions();
    assert!(!regions.is_empty(), "a device has memory");
    for (i, region) in regions.iter().enumerate() {
        assert!(region.span.is_aligned(region.granule), "{region:?} is not made of whole pages");
        assert!(!region.name.is_empty() && !region.group.is_empty(), "{region:?} has no name");
        for other in &regions[..i] {
            assert!(region.span.intersect(&other.span).is_none(), "{region:?} overlaps {other:?}");
            assert_ne!(region.name, other.name, "two regions of this name");
        }
    }
    assert!(!device.info().name.is_empty(), "a device has a name for people");
}

fn queues_are_taken_once(device: &mut dyn Device) {
    let queues = device.take_queues();
    assert!(!queues.is_empty(), "a device has queues");
    let copies = Capabilities::FROM_HOST | Capabilities::TO_HOST;
    assert!(queues.iter().any(|q| q.capabilities().contains(Capabilities::FROM_HOST)), "nothing can be written");
    assert!(queues.iter().all(|q| q.capabilities().intersects(copies)), "a queue that copies nothing");
    assert!(queues.iter().all(|q| q.in_flight() == 0 && q.halted().is_none() && q.limits().capacity > 0));
    assert!(device.take_queues().is_empty(), "queues can be taken once");
}

fn host_memory_is_registered(device: &dyn Device) {
    let (registrar, foreign) = (device.registrar(), NoIommu::new());
    for best in [None, Some(dmalane_dma::PageKind::Base)] {
        let heap = registrar.heap(best);
        let buf = heap.allocate(3 * 4096).unwrap().share();
        let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
        assert!(registrar.owns(via.mapping()) && !foreign.owns(via.mapping()), "a registration has one owner");
        let other = Registered::new(&foreign, &buf, Access::RW).unwrap();
        assert!(!registrar.owns(other.mapping()), "what another registrar has mapped means nothing here");
        drop(other);
        assert_eq!(via.mapping().access(), Access::RW);
        let (front, rest) = buf.into_slice().split_at(4096).unwrap();
        let (a, b) = (via.iova_of(&front).unwrap(), via.iova_of(&rest).unwrap());
        assert_eq!(a.last().checked_add(1), Some(b.first()), "contiguous IOVAs");
        drop(front.join(rest).unwrap());
        assert_eq!(heap.stats().live, 3 * 4096, "the registration holds the memory");
        via.deregister().unwrap();
        assert_eq!(heap.stats().live, 0, "nothing holds the memory any more");
    }
}

fn every_queue_reaches_the_edges_of_its_regions(device: &mut dyn Device, align: u64) {
    let mut taken = Taken::new(device);
    let (_memory, places) = taken.places();
    let mut seed = 0;
    for (region, span) in &places {
        let len = span.len();
        assert!(len >= 64 << 10, "{region:?} is too small for this suite");
        for queue in (0..taken.queues.len()).filter(|q| taken.reaches(*q, region)).collect::<Vec<_>>() {
            for n in LENGTHS.map(|n| n.next_multiple_of(align)) {
                for offset in [0, (len / 2).next_multiple_of(align) - align, len - n] {
                    seed += 1;
                    let at = DeviceAddr::Card(span.first() + offset);
                    // The bytes beside it stay as they are.
                    let (before, after) = (offset.min(align), (len - n - offset).min(align));
                    let around = span.sub(offset - before, before + n + after).unwrap();
                    let around_at = DeviceAddr::Card(around.first());
                    let mut expected = noise(seed, around.len());
                    taken.write(queue, around_at, &expected);
                    let bytes = noise(seed + 1_000_000, n);
                    taken.write(queue, at, &bytes);
                    expected[before as usize..][..n as usize].copy_from_slice(&bytes);
                    let back = taken.read(queue, around_at, around.len()).unwrap();
                    assert!(back == expected, "{} bytes at {at:?} by queue {queue}", around.len());
                }
            }
        }
    }
}

fn impossible_operations_come_back(device: &mut dyn Device, align: u64) {
    let regions = device.regions().to_vec();
    let mut taken = Taken::new(device);
    let (_memory, places) = taken.places();
    let bytes = noise(7, 8192u64.next_multiple_of(align));
    let first = DeviceAddr::Card(places[0].1.first());
    // Where no region is: behind each region, unless another one begins there, and far away.
    let behind = regions.iter().filter_map(|r| r.span.last().checked_add(1));
    let free = behind.filter(|at| regions.iter().all(|r| !r.span.contains(*at)));
    let nowhere = free.chain([CardAddr::new(1 << 62), CardAddr::new(u64::MAX - 4095)]).collect::<Vec<_>>();
    for queue in 0..taken.queues.len() {
        let limits = taken.queues[queue].limits();
        assert!(limits.max_len >= bytes.len() as u64, "an operation of two pages");
        for direction in [Direction::FromHost, Direction::ToHost] {
            for at in &nowhere {
                let host = taken.host(&bytes);
                let operation = Operation::copy(direction, host, DeviceAddr::Card(*at));
                let slice = match run(&mut *taken.queues[queue], operation, LONG) {
                    Err(RunError { operation: Some(operation), .. }) => operation.into_slice(),
                    // Memory that belongs to the device itself may be there, of which it says nothing.
                    Ok(operation) if at.bits() < 1 << 62 => operation.into_slice(),
                    other => panic!("{direction:?} at {at}: {other:?}"),
                };
                assert_eq!(slice.map(|s| s.len()), Some(bytes.len()), "the buffer comes back whole");
            }
            // A registration of other memory.
            let ((slice, _), (_, via)) = (taken.host(&bytes), taken.host(&bytes));
            let refused = taken.queues[queue].submit(Operation::copy(direction, (slice, via), first)).unwrap_err();
            assert_eq!(refused.reason, Refusal::NotRegistered, "{direction:?} through a foreign registration");
            // None at all: refused where one is needed, and never tried.
            let (slice, _) = taken.host(&bytes);
            match run(&mut *taken.queues[queue], Operation::copy(direction, slice, first), LONG) {
                Ok(operation) => assert_eq!(operation.bytes(), bytes.len() as u64),
                Err(RunError { error, .. }) => {
                    assert_eq!(error, OpError::Refused(Refusal::NotRegistered), "{direction:?}");
                }
            }
            let (slice, via) = taken.host(&bytes);
            let empty = slice.split_at(0).unwrap().0;
            let refused = taken.queues[queue].submit(Operation::copy(direction, (empty, via), first)).unwrap_err();
            assert_eq!(refused.reason, Refusal::Empty);
        }
        assert_eq!(taken.queues[queue].in_flight(), 0);
        // And after all that, it works.
        if taken.reaches(queue, &regions[0]) {
            taken.write(queue, first, &bytes);
            assert!(taken.read(queue, first, bytes.len() as u64).unwrap() == bytes);
        }
    }
}

fn blocking_calls_move_bytes(device: &mut dyn Device, align: u64) {
    let mut taken = Taken::new(device);
    let (_memory, places) = taken.places();
    // Several operations each, the last of them short.
    let mut bounce = Bounce::new(&*taken.registrar, &*taken.heap, 8192, LONG).unwrap();
    let bytes = noise(9, 20_000u64.next_multiple_of(align));
    let at = |offset: u64| DeviceAddr::Card(places[0].1.sub(offset, 1).unwrap().first());
    let queue: &mut DeviceQueue = &mut *taken.queues[0];
    bounce.write(queue, at(0), &bytes).unwrap();
    bounce.copy(queue, at(0), at(24 << 10), bytes.len() as u64).unwrap();
    let mut back = vec![0; bytes.len()];
    for place in [at(0), at(24 << 10)] {
        back.fill(0);
        bounce.read(queue, place, &mut back).unwrap();
        assert!(back == bytes, "what was written to {place:?}");
    }
    let top = DeviceAddr::Card(CardAddr::new(u64::MAX - 4095));
    assert!(bounce.write(queue, top, &bytes).is_err() && bounce.read(queue, top, &mut back).is_err());
    assert_eq!(bounce.len(), 8192, "the buffer is whole again");
    bounce.read(queue, at(0), &mut back).unwrap();
    assert!(back == bytes);
}

fn drivers_copy_as_queues_do(device: &mut dyn Device) {
    let mut taken = Taken::new(device);
    let Some(mut driver) = taken.device.driver_copies().unwrap() else { return };
    let (_memory, places) = taken.places();
    let at = |offset: u64| places[0].1.sub(offset, 1).unwrap().first();
    let (up, down) = (noise(21, 8192), noise(22, 4096));
    taken.write(0, DeviceAddr::Card(at(16 << 10)), &down);
    let ((_from, from), (to, into)) = (taken.host(&up), taken.host(&[0xa5; 4096]));
    let copy = |direction, host: &Registered, offset, at, len| {
        let host = host.clone();
        DriverCopy { direction, host, offset, at, len }
    };
    let right = [
        copy(Direction::FromHost, &from, 4096, at(0), 4000),
        copy(Direction::ToHost, &into, 0, at(16 << 10), 4096),
        copy(Direction::FromHost, &from, 0, at(32 << 10), 4096),
    ];
    driver.copy(&right, 5).unwrap();
    assert!(taken.read(0, DeviceAddr::Card(at(0)), 4000).unwrap() == up[4096..8096], "to the device");
    assert!(taken.read(0, DeviceAddr::Card(at(32 << 10)), 4096).unwrap() == up[..4096], "to the device");
    let mut back = vec![0; 4096];
    to.read(0, &mut back).unwrap();
    assert!(back == down, "to the host");
    let elsewhere = taken.heap.allocate(4096).unwrap().share();
    let foreign = Registered::new(&NoIommu::new(), &elsewhere, Access::RW).unwrap();
    let readable = Registered::new(&*taken.registrar, &elsewhere, Access::READ).unwrap();
    for wrong in [
        copy(Direction::FromHost, &from, 4096, at(0), 4097),
        copy(Direction::ToHost, &from, u64::MAX, at(0), 4096),
        copy(Direction::ToHost, &foreign, 0, at(0), 4096),
        copy(Direction::ToHost, &readable, 0, at(0), 4096),
        copy(Direction::FromHost, &from, 0, CardAddr::new(1 << 62), 4096),
    ] {
        assert!(driver.copy(std::slice::from_ref(&wrong), 1).is_err(), "{wrong:?}");
    }
    driver.copy(&right, 1).unwrap();
    assert!(taken.read(0, DeviceAddr::Card(at(0)), 4000).unwrap() == up[4096..8096], "nothing else was written");
}

fn table(spans: &[Span<CardAddr>]) -> SgTable<CardAddr> {
    let mut table = SgTable::new();
    spans.iter().for_each(|s| table.push(s.first(), s.len()).unwrap());
    table
}

/// The one range of a table.
fn one(memory: &SgTable<CardAddr>) -> Span<CardAddr> {
    let mut segments = memory.segments();
    let only = segments.next().and_then(|s| Span::new(s.addr, s.len)).expect("a buffer of one segment");
    assert!(segments.next().is_none(), "one segment");
    only
}

fn bo(memory: &SgTable<CardAddr>) -> Arc<Bo> {
    Arc::new(Bo::new(1, SgIndex::from_table(memory).unwrap()))
}

/// Another device reads memory that one lends, and does nothing else; also when the lender and the descriptor are gone.
fn memory_is_lent_or_refused(open: &mut dyn FnMut() -> Box<dyn Device>, align: u64) {
    let mut device = open();
    let lending = match device.lending() {
        Ok(lending) => lending,
        Err(why) => return assert!(why.to_string().contains(' '), "a reason in words, not {why}"),
    };
    let (mut memory, len) = (device.memory(), 2 * device.regions()[0].granule.bytes());
    let mut allocate = || one(&memory.allocate(len, &Placement::Default).unwrap());
    let private = allocate();
    lending.allow(true);
    let lendable = allocate();
    lending.allow(false);
    let later = allocate();
    for span in [private, later, lendable.sub(0, len / 2).unwrap(), Span::new(lendable.first(), 2 * len).unwrap()] {
        assert!(lending.lend(span).is_err(), "only what was allocated for it, as a whole");
    }
    let bytes = noise(17, len);
    let mut taken = Taken::new(&mut *device);
    taken.write(0, DeviceAddr::Card(lendable.first()), &bytes);
    let (fds, again) = (lending.lend(lendable).unwrap(), lending.lend(lendable).unwrap());
    let mut other = open();
    let borrower = other.lending().unwrap();
    let borrow = |pieces: &[(OwnedFd, u64)]| {
        borrower.take(&pieces.iter().map(|(fd, len)| (fd.as_fd(), *len)).collect::<Vec<_>>())
    };
    assert!(!lending.device().is_empty() && borrower.device() == lending.device(), "one device, one name");
    // A driver may have made it a little longer.
    for wrong in [0, len + (64 << 20), u64::MAX] {
        let first = fds[0].0.try_clone().unwrap();
        assert!(borrow(&[(first, wrong)]).is_err(), "{wrong} bytes of {len}");
    }
    let null = |len| (OwnedFd::from(std::fs::File::open("/dev/null").unwrap()), len);
    assert!(borrow(&[null(len)]).is_err() && borrow(&[]).is_err(), "no memory");
    assert!(borrow(&[null(len), null(len)]).is_err() && borrow(&[null(u64::MAX), null(len)]).is_err());
    let (lent, twice) = (borrow(&fds).unwrap(), borrow(&again).unwrap());
    assert!(lent.at.len() == len && lent.at.intersect(&twice.at).is_none());
    let mut there = Taken::new(&mut *other);
    let at = |lent: &LentMemory| DeviceAddr::Card(lent.at.first());
    assert!(there.read(0, at(&lent), len).unwrap() == bytes, "the same bytes");
    taken.write(0, DeviceAddr::Card(lendable.first()), &bytes[align as usize..][..4096]);
    assert!(there.read(0, at(&twice), 4096).unwrap() == bytes[align as usize..][..4096], "the same memory");
    assert!(run_write(&mut there, 0, at(&lent), &bytes[..4096]).is_err(), "it is lent for reading");
    taken.write(0, DeviceAddr::Card(lendable.first()), &bytes);
    drop((taken, memory, lending));
    drop((device, fds, again, twice));
    assert!(there.read(0, at(&lent), len).unwrap() == bytes, "who has lent it is gone");
    let gone = at(&lent);
    drop(lent);
    assert!(there.read(0, gone, 4096).is_err(), "it was given back");
}

fn a_flat_space_shows_memory_where_it_lies(device: &mut dyn Device) {
    let (mut memory, page) = (device.memory(), device.regions()[0].granule.bytes());
    let buffer = memory.allocate(4 * page, &Placement::Default).unwrap();
    let span = one(&buffer);
    let apart = table(&[span.sub(0, page).unwrap(), span.sub(2 * page, page).unwrap()]);
    let space = device.address_space();
    assert!(matches!(space.reserve(&apart, 2 * page), Err(SpaceError::Fragmented(2))), "a buffer is one segment");
    let range = space.reserve(&buffer, span.len()).unwrap();
    assert_eq!((range.first().bits(), range.len()), (span.first().bits(), span.len()));
    assert_eq!(space.at(range.first()), DeviceAddr::Card(span.first()));
    let bo = bo(&buffer);
    let at = |offset: u64| range.first() + offset;
    let bind = |va, offset| [BindRequest::Bind { va, bo: bo.clone(), offset, len: page, access: Access::READ }];
    space.apply(&bind(at(page), page)).unwrap();
    assert!(space.apply(&bind(at(page), 0)).is_err(), "it does not lie there");
    assert!(space.apply(&bind(at(span.len()), 0)).is_err(), "that is not reserved");
    needs_tables(space, range, &bo);
    assert!(space.vm().is_none());
    space.release(range).unwrap();
    assert!(matches!(space.release(range), Err(SpaceError::NotReserved(_))), "only once");
}

/// A space without page tables of ours refuses what it would not do, a batch as a whole.
fn needs_tables(space: &mut dyn AddressSpace, range: Span<DeviceVa>, bo: &Arc<Bo>) {
    let (va, len, page) = (range.first(), space.page().bytes(), space.page().bytes());
    let bind = |access| BindRequest::Bind { va, bo: bo.clone(), offset: 0, len, access };
    for request in [
        bind(Access::RW | Access::MMIO),
        bind(Access::READ | Access::PRIVILEGED),
        bind(Access::RW | Access::UNCACHED),
        BindRequest::Null { va, len },
        BindRequest::Repeat { va, bo: bo.clone(), offset: 0, page, len, access: Access::READ },
    ] {
        let refused = space.apply(&[BindRequest::Prefetch(range), request.clone()]);
        assert!(matches!(refused, Err(SpaceError::NoTables)), "{request:?}: {refused:?}");
    }
}

fn binds_are_seen_until_they_are_unbound(device: &mut dyn Device, align: u64) {
    let (mut memory, page) = (device.memory(), device.regions()[0].granule.bytes());
    let fragments = [(); 2].map(|()| {
        let whole = one(&memory.allocate(3 * page, &Placement::Default).unwrap());
        whole.sub(0, 2 * page).unwrap()
    });
    let buffer = table(&fragments);
    let bo = bo(&buffer);
    let mut taken = Taken::new(device);
    let (half, whole) = (2 * page, 4 * page);
    let bytes = noise(11, whole);
    for (fragment, half) in fragments.iter().zip(bytes.chunks(half as usize)) {
        taken.write(0, DeviceAddr::Card(fragment.first()), half);
    }
    let space = taken.device.address_space();
    let range = space.reserve(&buffer, whole).unwrap();
    let other = space.reserve(&buffer, page).unwrap();
    assert!(range.len() >= whole && range.intersect(&other).is_none(), "ranges are nobody else's");
    if matches!(space.kind(), AddressSpaceKind::Driver { .. }) {
        needs_tables(space, range, &bo);
    }
    space
        .apply(&[BindRequest::Bind { va: range.first(), bo: bo.clone(), offset: 0, len: whole, access: Access::READ }])
        .unwrap();
    let at = space.at(range.first());
    for queue in 0..taken.queues.len() {
        assert!(taken.read(queue, at, whole).unwrap() == bytes, "through the address space, by queue {queue}");
        let odd = at_offset(at, half - align);
        let expected = &bytes[(half - align) as usize..][..2 * align as usize];
        assert!(taken.read(queue, odd, 2 * align).unwrap() == expected);
        let denied = run_write(&mut taken, queue, at, &bytes[..4096]);
        assert!(denied.is_err_and(|e| e.operation.is_some()), "it is bound for reading");
    }
    taken.device.address_space().release(range).unwrap();
    for queue in 0..taken.queues.len() {
        let gone = taken.read(queue, at, 4096);
        assert!(gone.is_err_and(|e| e.operation.is_some()), "what was unbound is not seen by queue {queue}");
    }
    let space = taken.device.address_space();
    space.release(other).unwrap();
    let again = space.reserve(&buffer, whole).unwrap();
    space
        .apply(&[BindRequest::Bind { va: again.first(), bo: bo.clone(), offset: half, len: half, access: Access::RW }])
        .unwrap();
    let at = space.at(again.first());
    let (front, back) = bytes.split_at(half as usize);
    assert!(taken.read(0, at, half).unwrap() == back);
    taken.write(0, at, front);
    assert!(taken.read(0, DeviceAddr::Card(fragments[1].first()), half).unwrap() == front);
    // Of the two pages that are bound, a batch replaces the first and takes the second away.
    let second = Span::new(again.sub(page, 1).unwrap().first(), page).unwrap();
    let first = BindRequest::Bind { va: again.first(), bo: bo.clone(), offset: 0, len: page, access: Access::READ };
    taken.device.address_space().apply(&[first, BindRequest::Unbind(second)]).unwrap();
    assert!(taken.read(0, at, page).unwrap() == bytes[..page as usize], "the page that was bound instead");
    assert!(taken.read(0, at_offset(at, page), page).is_err(), "the page that was taken away");
    taken.device.address_space().release(again).unwrap();
}

fn at_offset(at: DeviceAddr, offset: u64) -> DeviceAddr {
    dmalane_queue::QueueAddr::advance(at, offset).unwrap()
}

fn run_write(
    taken: &mut Taken<'_>,
    queue: usize,
    at: DeviceAddr,
    bytes: &[u8],
) -> Result<Operation, RunError<DeviceAddr>> {
    let host = taken.host(bytes);
    run(&mut *taken.queues[queue], Operation::write(host, at), LONG)
}

fn dropped_with_operations_in_flight(open: &mut dyn FnMut() -> Box<dyn Device>, align: u64) {
    for device_first in [false, true] {
        let mut device = open();
        let heap = device.registrar().heap(None);
        let taken = Taken::new(&mut *device);
        let (_memory, places) = taken.places();
        let Taken { mut queues, registrar, .. } = taken;
        let bytes = noise(13, 16384u64.next_multiple_of(align));
        let live = heap.stats().live;
        for queue in &mut queues {
            for _ in 0..queue.limits().capacity.min(8) {
                let mut buf = heap.allocate(bytes.len()).unwrap();
                buf[..bytes.len()].copy_from_slice(&bytes);
                let buf = buf.share();
                let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
                let slice = buf.into_slice().split_at(bytes.len()).unwrap().0;
                let at = DeviceAddr::Card(places[0].1.first());
                let _ticket = queue.submit(Operation::write((slice, via), at)).unwrap();
            }
            queue.flush();
        }
        if device_first {
            drop(device);
            let ended: Vec<Completion> = queues.iter_mut().flat_map(|q| drain(&mut **q, LONG)).collect();
            let fine = |c: &Completion| c.result.is_ok() || matches!(c.result, Err(OpError::Stopped(_)));
            assert!(ended.iter().all(fine), "queues outlive their device, or stop with it");
            drop((ended, queues));
        } else {
            drop(queues);
            drop(device);
        }
        drop(registrar);
        assert_eq!(heap.stats().live, live, "all host memory is free again");
    }
}
