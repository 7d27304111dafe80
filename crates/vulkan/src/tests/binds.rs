//! Binds of sparse buffers: what is seen, refused, counted, and kept when calls fail.

use std::sync::{Mutex, MutexGuard, PoisonError};

use dmalane_addr::DeviceVa;
use dmalane_device::{AddressSpace, SpaceError};
use dmalane_dma::error_chain;

use super::*;
use crate::sparse::Held;

/// An address in a range.
fn within(range: Span<DeviceVa>, offset: u64) -> DeviceVa {
    range.first() + offset
}

/// A bind of bytes `offset..offset + len` of a buffer.
fn request(va: DeviceVa, bo: &Arc<Bo>, offset: u64, len: u64) -> BindRequest {
    BindRequest::Bind { va, bo: bo.clone(), offset, len, access: Access::RW }
}

impl Opened {
    fn page(&mut self) -> u64 {
        self.device.address_space().page().bytes()
    }

    /// Fills the beginnings of pages of memory, each with its name.
    fn name_pages(&mut self, at: DeviceAddr, numbers: impl IntoIterator<Item = u64>, name: impl Fn(u64) -> u64) {
        let page = self.page();
        let DeviceAddr::Card(first) = at else { panic!("a card address") };
        let at = |n| DeviceAddr::Card(first + n * page);
        let fills = numbers.into_iter().map(|n| Operation::fill(at(n), 8, name(n)));
        drop(run(&mut *self.queues[0], fills.collect()).unwrap());
    }

    /// The names at these addresses, which are read at once, or why one of them cannot be read.
    fn names(&mut self, at: impl IntoIterator<Item = DeviceVa>) -> Result<Vec<u64>, String> {
        let at: Vec<DeviceVa> = at.into_iter().collect();
        let zeroes = vec![0; (at.len() * 8).next_multiple_of(4096)];
        let (buf, via) = register(&*self.registrar, &*self.registrar.heap(None), &zeroes)?;
        let mut rest = buf.into_slice();
        let space = self.device.address_space();
        let reads = at.into_iter().map(|at| {
            let slice = rest.split_off_front(8).expect("8 bytes each");
            Operation::read(HostSlice::from((slice, via.clone())), space.at(at))
        });
        let done = run(&mut *self.queues[0], reads.collect())?;
        Ok(done.into_iter().map(|end| u64::from_le_bytes(bytes_of(end).try_into().expect("8 bytes"))).collect())
    }
}

#[test]
fn a_bind_stays_known_to_the_copies_that_wait_for_it() {
    const LEN: u64 = 128 << 20;
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, at, table) = gpu.allocate(LEN);
    let space = gpu.device.address_space();
    let range = space.reserve(&table, LEN).unwrap();
    let fill = |at| Operation::fill(at, LEN, 0x0102_0304_0506_0708);
    // The bind waits for this one on the same queue of the driver, and the next for the bind.
    let _first = gpu.queues[0].submit(fill(at)).unwrap();
    gpu.queues[0].flush();
    space
        .apply(&[BindRequest::Bind { va: range.first(), bo: bo.clone(), offset: 0, len: LEN, access: Access::RW }])
        .unwrap();
    let at = space.at(range.first());
    let _second = gpu.queues[0].submit(fill(at)).unwrap();
    gpu.queues[0].flush();
    // The space goes first, and the queue has the last reference to the bind.
    let Opened { queues, memory, registrar, device, live, messages, .. } = gpu;
    drop((memory, registrar, device));
    drop(queues);
    assert_eq!(left(&live), [0; 5]);
    checked(&messages);
}

#[test]
fn a_bind_that_failed_keeps_only_its_own_memory() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, _, table) = gpu.allocate(1 << 20);
    let (other, _, other_table) = gpu.allocate(1 << 20);
    let held = left(&gpu.live)[0];
    let space = gpu.device.address_space();
    let range = space.reserve(&table, 1 << 20).unwrap();
    let bind = |bo: &Arc<Bo>| [request(range.first(), bo, 0, 1 << 20)];
    gpu.faults.fail_call("vkQueueBindSparse", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    assert!(matches!(space.apply(&bind(&bo)), Err(SpaceError::Driver(_))));
    gpu.faults.heal();
    space.apply(&bind(&other)).unwrap();
    space.release(range).unwrap();
    gpu.memory.free(table.segments()).unwrap();
    gpu.memory.free(other_table.segments()).unwrap();
    assert_eq!(left(&gpu.live)[0], held - 2, "that of the bind that the driver did not get is its own again too");
    gpu.end();
}

#[test]
fn a_batch_that_is_refused_leaves_old_binds() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, at, table) = gpu.allocate(1 << 20);
    let (gone, _, gone_table) = gpu.allocate(1 << 20);
    drop(run(&mut *gpu.queues[0], vec![Operation::fill(at, 1 << 20, 0x0505_0505_0505_0505)]).unwrap());
    gpu.memory.free(gone_table.segments()).unwrap();
    let space = gpu.device.address_space();
    let range = space.reserve(&table, 1 << 20).unwrap();
    let bind = |bo| request(range.first(), bo, 0, 1 << 20);
    space.apply(&[bind(&bo)]).unwrap();
    let refused = space.apply(&[BindRequest::Unbind(range), bind(&gone)]);
    assert!(matches!(refused, Err(SpaceError::Refused(_))), "{refused:?}");
    let at = space.at(range.first());
    let read = Operation::read(gpu.host(&[0; 4096]), at);
    assert_eq!(bytes_of(run(&mut *gpu.queues[0], vec![read]).unwrap().remove(0)), [5; 4096]);
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn unbinding_waits_for_copies_that_use_what_is_bound() {
    const LEN: u64 = 128 << 20;
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, _, table) = gpu.allocate(LEN);
    let space = gpu.device.address_space();
    let range = space.reserve(&table, LEN).unwrap();
    space
        .apply(&[BindRequest::Bind { va: range.first(), bo: bo.clone(), offset: 0, len: LEN, access: Access::RW }])
        .unwrap();
    let at = space.at(range.first());
    let _ticket = gpu.queues[0].submit(Operation::fill(at, LEN, 0x0102_0304_0506_0708)).unwrap();
    gpu.queues[0].flush();
    // The driver's own order would hide it: the space asks before it gives the driver anything.
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    let refused = gpu.device.address_space().release(range);
    let Err(SpaceError::Invalidate(error)) = refused else { panic!("{refused:?}") };
    assert!(error_chain(&*error).contains("vkWaitSemaphores"), "{error}");
    drop(drain(&mut *gpu.queues[0], LONG));
    gpu.end();
}

#[test]
fn ranges_longer_than_a_buffer_are_refused_with_a_hint() {
    let options = VulkanOptions { largest: Some(8 << 20), ..VulkanOptions::default() };
    let Some(mut gpu) = Opened::with(&options) else { return };
    let (_, _, table) = gpu.allocate(20 << 20);
    let space = gpu.device.address_space();
    let error = error_chain(&space.reserve(&table, 20 << 20).unwrap_err());
    assert!(error.contains("room for 6291456") && error.contains(",flat"), "{error}");
    // Shorter ones have a buffer each, however many.
    let ranges = [(); 6].map(|()| space.reserve(&table, 4 << 20).unwrap());
    ranges.into_iter().for_each(|range| space.release(range).unwrap());
    gpu.end();
}

#[test]
fn ranges_longer_than_the_addresses_are_refused_with_a_hint() {
    let live = Arc::<Live>::default();
    live.addresses.store(8 << 20, Ordering::Relaxed);
    let Some(mut gpu) = Opened::limited(&VulkanOptions::default(), live) else { return };
    let (_, _, table) = gpu.allocate(1 << 20);
    let space = gpu.device.address_space();
    assert_eq!((space.longest(), space.room()), (6 << 20, 6 << 20));
    let error = error_chain(&space.reserve(&table, 8 << 20).unwrap_err());
    assert!(error.contains("room for 6291456") && error.contains(",flat"), "{error}");
    let range = space.reserve(&table, 6 << 20).unwrap();
    assert_eq!(space.room(), 0);
    let error = error_chain(&space.reserve(&table, 2 << 20).unwrap_err());
    assert!(error.contains("0 of the driver's 8388608 bytes") && error.contains(",flat"), "{error}");
    // Not a batch too many, but something that sparse buffers do not have.
    let error = error_chain(&space.apply(&[BindRequest::Null { va: range.first(), len: 65536 }]).unwrap_err());
    assert!(error.contains("only parts of buffers are bound"), "{error}");
    space.release(range).unwrap();
    gpu.end();
}

/// A GPU in software that may bind as many ranges as the process may have, and how many these are; `None`, and why on
/// stdout, where there is none. No other test of this process may do the same meanwhile.
fn up_to_the_limit() -> Option<(MutexGuard<'static, ()>, Opened, u64)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (live, limit) = (Arc::<Live>::default(), crate::sparse::binds_left());
    // A number of its own, so that tests beside it have some left.
    live.held.set(Held::new(limit)).unwrap();
    // Not under the layers, which take minutes for these binds. The GPU reads, not the processor, which does not see
    // what the driver has bound.
    let gpu = Opened::as_given(&VulkanOptions { direct: 0, ..VulkanOptions::default() }, live)?;
    if gpu.device.gpu().kind != "software GPU" {
        println!("SKIPPED: no software GPU");
        return None;
    }
    Some((alone, gpu, limit))
}

/// Mappings of this process that begin in a range, of a GPU in software.
fn mappings(range: Span<DeviceVa>) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let firsts = maps.lines().filter_map(|line| u64::from_str_radix(line.split('-').next()?, 16).ok());
    firsts.filter(|first| (range.first().bits()..=range.last().bits()).contains(first)).count() as u64
}

#[test]
fn binds_up_to_the_limit_are_all_seen() {
    let Some((_alone, mut gpu, _)) = up_to_the_limit() else { return };
    let page = gpu.page();
    const PAGES: u64 = 60_000;
    let (bo, at, table) = gpu.allocate(PAGES * page);
    let range = gpu.device.address_space().reserve(&table, PAGES * page).unwrap();
    // Every second page, so that each bind is one of its own with a hole on each side.
    let (mut bound, mut refused) = (0u64, false);
    while !refused && bound < PAGES / 2 {
        let batch = bound..(bound + 500).min(PAGES / 2);
        let offsets = batch.clone().map(|n| 2 * n * page);
        let requests: Vec<_> = offsets.map(|offset| request(within(range, offset), &bo, offset, page)).collect();
        match gpu.device.address_space().apply(&requests) {
            Ok(()) => bound = batch.end,
            Err(e) => {
                assert!(error_chain(&e).contains("sparse bindings at most"), "{e}");
                refused = true;
            }
        }
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    println!("{bound} binds, {maps} mappings");
    assert!(refused && bound > 1000, "{bound}");
    for batch in (0..bound).map(|n| 2 * n).collect::<Vec<_>>().chunks(500) {
        gpu.name_pages(at, batch.iter().copied(), |n| n);
        assert_eq!(gpu.names(batch.iter().map(|n| within(range, n * page))).unwrap(), batch);
    }
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn binds_near_the_limit_are_seen_when_others_were_unbound_singly() {
    for at_once in [false, true] {
        let Some((_alone, mut gpu, limit)) = up_to_the_limit() else { return };
        let page = gpu.page();
        let (bo, at, table) = gpu.allocate(limit * page);
        let numbers: Vec<u64> = (0..limit).collect();
        numbers.chunks(500).for_each(|part| gpu.name_pages(at, part.iter().copied(), |n| n));
        let space = gpu.device.address_space();
        let range = space.reserve(&table, 4 * limit * page).unwrap();
        // Every second page of the upper half, and then of the lower.
        let (low, high) = (|n: u64| within(range, 2 * n * page), |n: u64| within(range, 2 * (limit + n) * page));
        let binds = |to: &dyn Fn(u64) -> DeviceVa| (0..limit).map(|n| request(to(n), &bo, n * page, page)).collect();
        let (mut bind_low, bind_high): (Vec<_>, Vec<_>) = (binds(&low), binds(&high));
        let mut moves: Vec<_> = (0..limit).map(|n| BindRequest::Unbind(Span::new(high(n), page).unwrap())).collect();
        space.apply(&bind_high).unwrap();
        if at_once {
            moves.append(&mut bind_low);
            space.apply(&moves).unwrap();
        } else {
            moves.into_iter().for_each(|unbind| space.apply(&[unbind]).unwrap());
            space.apply(&bind_low).unwrap();
        }
        for part in numbers.chunks(500) {
            assert_eq!(gpu.names(part.iter().map(|n| low(*n))).unwrap(), part);
        }
        let mapped = mappings(range);
        assert!((limit..=2 * limit + 1).contains(&mapped), "{mapped} mappings for {limit} binds");
        gpu.device.address_space().release(range).unwrap();
        gpu.end();
    }
}

#[test]
fn a_batch_at_the_limit_takes_away_before_it_cuts() {
    let Some((_alone, mut gpu, limit)) = up_to_the_limit() else { return };
    let page = gpu.page();
    let half = limit / 2;
    let (bo, at, table) = gpu.allocate(3 * page);
    gpu.name_pages(at, 0..3, |n| n + 1);
    let space = gpu.device.address_space();
    // Three pages in four.
    let range = space.reserve(&table, 8 * half * page).unwrap();
    let va = |n: u64, page_in: u64| within(range, (4 * n + page_in) * page);
    let binds: Vec<_> = (0..2 * half).map(|n| request(va(n, 0), &bo, 0, 3 * page)).collect();
    space.apply(&binds).unwrap();
    let unbind = |at, pages| BindRequest::Unbind(Span::new(at, pages * page).unwrap());
    let cut = (0..half).map(|n| unbind(va(n, 1), 1));
    let changes: Vec<_> = cut.chain((half..2 * half).map(|n| unbind(va(n, 0), 3))).collect();
    space.apply(&changes).unwrap();
    assert!((4 * half - 1..=4 * half + 1).contains(&mappings(range)), "{} of {half} with holes", mappings(range));
    for n in (0..half).step_by(500) {
        assert_eq!(gpu.names([va(n, 0), va(n, 2)]).unwrap(), [1, 3]);
    }
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn a_batch_at_the_limit_takes_away_before_it_replaces() {
    let Some((_alone, mut gpu, limit)) = up_to_the_limit() else { return };
    let page = gpu.page();
    let (bo, at, table) = gpu.allocate((2 * limit + 1) * page);
    let numbers: Vec<u64> = (0..2 * limit).collect();
    numbers.chunks(500).for_each(|part| gpu.name_pages(at, part.iter().copied(), |n| n));
    let space = gpu.device.address_space();
    let range = space.reserve(&table, 4 * limit * page).unwrap();
    // One range, which gets others in every second page, and many above it, which one takes the place of.
    let whole = limit / 2 * 2 - 2;
    let low = |n: u64, offset: u64, pages: u64| request(within(range, n * page), &bo, offset * page, pages * page);
    let high = |n: u64, pages: u64| request(within(range, (2 * limit + n) * page), &bo, n * page, pages * page);
    let mut binds = vec![low(0, 0, whole)];
    binds.extend((0..limit - 1).map(|n| high(2 * n, 1)));
    space.apply(&binds).unwrap();
    let mut changes: Vec<_> = (0..whole / 2).map(|n| low(2 * n, 2 * n + 1, 1)).collect();
    changes.push(high(0, 2 * limit));
    space.apply(&changes).unwrap();
    for part in numbers[..whole as usize].chunks(500) {
        let names: Vec<u64> = part.iter().map(|n| n | 1).collect();
        assert_eq!(gpu.names(part.iter().map(|n| within(range, n * page))).unwrap(), names);
    }
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn mappings_of_holes_do_not_add_up() {
    const PAGES: u64 = 2000;
    let Some(mut gpu) = Opened::new(true) else { return };
    if gpu.device.gpu().kind != "software GPU" {
        return println!("SKIPPED: no software GPU");
    }
    let page = gpu.page();
    let (bo, at, table) = gpu.allocate(page);
    gpu.name_pages(at, [0], |_| 7);
    let range = gpu.device.address_space().reserve(&table, PAGES * page).unwrap();
    // One page at a time, at ever new addresses.
    for n in 0..PAGES {
        let (va, space) = (within(range, n * page), gpu.device.address_space());
        space.apply(&[request(va, &bo, 0, page)]).unwrap();
        if n % 500 == 0 {
            assert_eq!(gpu.names([va]).unwrap(), [7]);
        }
        let space = gpu.device.address_space();
        space.apply(&[BindRequest::Unbind(Span::new(va, page).unwrap())]).unwrap();
    }
    // Pages between others that stay: each leaves a hole, until those go too.
    let numbers: Vec<u64> = (0..PAGES).collect();
    let space = gpu.device.address_space();
    space.apply(&numbers.iter().map(|n| request(within(range, n * page), &bo, 0, page)).collect::<Vec<_>>()).unwrap();
    let unbind = |n: &u64| BindRequest::Unbind(Span::new(within(range, n * page), page).unwrap());
    let (even, odd): (Vec<u64>, Vec<u64>) = numbers.iter().partition(|n| *n % 2 == 0);
    space.apply(&even.iter().map(unbind).collect::<Vec<_>>()).unwrap();
    let many = mappings(range);
    odd.iter().for_each(|n| space.apply(&[unbind(n)]).unwrap());
    let few = mappings(range);
    assert!((PAGES - 1..=PAGES + 1).contains(&many) && few <= 3, "{many} mappings, and then {few}");
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn unbinds_that_leave_too_many_pieces_are_refused() {
    const PAGES: u64 = 64;
    let live = Arc::<Live>::default();
    live.held.set(Held::new(8)).unwrap();
    let Some(mut gpu) = Opened::limited(&VulkanOptions::default(), live) else { return };
    let page = gpu.page();
    let (bo, at, table) = gpu.allocate(PAGES * page);
    gpu.name_pages(at, 0..PAGES, |n| n);
    let space = gpu.device.address_space();
    let range = space.reserve(&table, PAGES * page).unwrap();
    let va = |n: u64| within(range, n * page);
    let bind = |at, offset: u64, pages: u64| request(va(at), &bo, offset * page, pages * page);
    let hole = |n| BindRequest::Unbind(Span::new(va(n), page).unwrap());
    let too_many = |space: &mut dyn AddressSpace, requests: &[BindRequest], wanted: u32| {
        let e = error_chain(&space.apply(requests).unwrap_err());
        assert!(e.contains(&format!("holds 8 sparse bindings at most, and there would be {wanted} ")), "{e}");
    };
    space.apply(&[bind(0, 0, PAGES)]).unwrap();
    // A hole leaves one more, and so does a batch of them.
    too_many(space, &(0..8).map(|n| hole(2 * n + 1)).collect::<Vec<_>>(), 9);
    let mut holes: Vec<u64> = (0..7).map(|n| 2 * n + 1).collect();
    holes.iter().for_each(|n| space.apply(&[hole(*n)]).unwrap());
    too_many(space, &[hole(31)], 9);
    // A bind in the middle of another leaves two more.
    too_many(space, &[bind(20, 0, 1)], 10);
    // Changes that need no more pieces are made: shorter ones, and one instead of others.
    holes.push(PAGES - 1);
    space.apply(&[hole(PAGES - 1)]).unwrap();
    space.apply(&[hole(0), bind(0, 0, 1)]).unwrap();
    for n in 0..PAGES {
        let read = gpu.names([va(n)]).ok();
        assert_eq!(read, Some(vec![n]).filter(|_| !holes.contains(&n)), "page {n}");
    }
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn a_batch_that_fails_half_way_shows_nothing_and_keeps_what_may_be_bound() {
    const PAGES: u64 = 64;
    // Each page by a bind of its own, of which the driver gets a part at a time. Some replace others, also only those
    // of later parts than the one that fails.
    for (replaced, fails) in [(0..0, 2), (0..PAGES, 2), (PAGES - 2..PAGES, 2)] {
        let replaces = !replaced.is_empty();
        let Some(mut gpu) = Opened::new(true) else { return };
        let page = gpu.device.address_space().page().bytes();
        let [(old, _, table), (new, at, new_table)] = [(); 2].map(|()| gpu.allocate(PAGES * page));
        drop(run(&mut *gpu.queues[0], vec![Operation::fill(at, PAGES * page, 0x0505_0505_0505_0505)]).unwrap());
        let memories = left(&gpu.live)[0];
        let space = gpu.device.address_space();
        let range = space.reserve(&table, PAGES * page).unwrap();
        let va = |n: u64| range.first() + n * page;
        let backwards = |bo: &Arc<Bo>| {
            let bind = |n| {
                let offset = (PAGES - 1 - n) * page;
                BindRequest::Bind { va: va(n), bo: bo.clone(), offset, len: page, access: Access::RW }
            };
            (0..PAGES).map(bind).collect::<Vec<_>>()
        };
        if replaces {
            space.apply(&backwards(&old)[replaced.start as usize..]).unwrap();
        }
        gpu.faults.fail_later_call("vkQueueBindSparse", fails, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
        let failed = space.apply(&backwards(&new));
        match replaces {
            true => assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}"),
            false => assert!(matches!(failed, Err(SpaceError::Driver(_))), "{failed:?}"),
        }
        gpu.faults.heal();
        for n in [0, PAGES - 1] {
            let at = gpu.device.address_space().at(va(n));
            let read = Operation::read(gpu.host(&[0; 4096]), at);
            assert!(run(&mut *gpu.queues[0], vec![read]).is_err(), "page {n} of a batch that failed");
        }
        gpu.memory.free(table.segments()).unwrap();
        gpu.memory.free(new_table.segments()).unwrap();
        let kept = if replaces { memories } else { memories - 1 };
        assert_eq!(left(&gpu.live)[0], kept, "what may be bound stays");
        gpu.device.address_space().release(range).unwrap();
        assert_eq!(left(&gpu.live)[0], memories - 2);
        // Binds of another range are ordered behind those that were sent.
        let (bo, at, table) = gpu.allocate(PAGES * page);
        drop(run(&mut *gpu.queues[0], vec![Operation::fill(at, PAGES * page, 0x0606_0606_0606_0606)]).unwrap());
        let space = gpu.device.address_space();
        let range = space.reserve(&table, PAGES * page).unwrap();
        space
            .apply(&[BindRequest::Bind {
                va: range.first(),
                bo: bo.clone(),
                offset: 0,
                len: PAGES * page,
                access: Access::RW,
            }])
            .unwrap();
        let at = space.at(range.first());
        let read = Operation::read(gpu.host(&[0; 4096]), at);
        assert_eq!(bytes_of(run(&mut *gpu.queues[0], vec![read]).unwrap().remove(0)), [6; 4096]);
        gpu.device.address_space().release(range).unwrap();
        gpu.end();
    }
}

#[test]
fn what_a_batch_takes_away_goes_before_it_binds() {
    const LEN: u64 = 1 << 20;
    let Some(mut gpu) = Opened::new(true) else { return };
    let [(old, _, table), (new, _, new_table)] = [(); 2].map(|()| gpu.allocate(LEN));
    let memories = left(&gpu.live)[0];
    let space = gpu.device.address_space();
    let range = space.reserve(&table, 2 * LEN).unwrap();
    space.apply(&[request(within(range, LEN), &old, 0, LEN)]).unwrap();
    gpu.faults.fail_call("vkQueueBindSparse", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    let unbind = BindRequest::Unbind(Span::new(within(range, LEN), LEN).unwrap());
    let failed = space.apply(&[request(range.first(), &new, 0, LEN), unbind]);
    assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}");
    gpu.faults.heal();
    gpu.memory.free(table.segments()).unwrap();
    gpu.memory.free(new_table.segments()).unwrap();
    assert_eq!(left(&gpu.live)[0], memories - 1, "the driver was not given the bind at the lower address yet");
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn binds_that_failed_count_until_they_are_taken_away() {
    const PAGES: u64 = 32;
    // The driver may have made all of them, also where its call failed.
    let fails = [
        ("vkQueueBindSparse", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY),
        ("vkWaitSemaphores", vk::Result::ERROR_OUT_OF_HOST_MEMORY),
        ("vkWaitSemaphores", vk::Result::TIMEOUT),
    ];
    for (call, result) in fails {
        let (live, held) = (Arc::<Live>::default(), Held::new(8));
        live.held.set(held.clone()).unwrap();
        let Some(mut gpu) = Opened::limited(&VulkanOptions::default(), live) else { return };
        let page = gpu.page();
        let [(old, _, table), (new, _, new_table)] = [(); 2].map(|()| gpu.allocate(PAGES * page));
        let memories = left(&gpu.live)[0];
        let space = gpu.device.address_space();
        let [one, other] = [(); 2].map(|()| space.reserve(&table, PAGES * page).unwrap());
        let bind = |range, bo, at: u64, pages| request(within(range, at * page), bo, at * page, pages * page);
        space.apply(&[bind(one, &old, 0, PAGES)]).unwrap();
        // Three pieces of it replaced, which leaves four others, however much of that the driver does; twice.
        let pieces = [2, 4, 6].map(|at| bind(one, &new, at, 1));
        for _ in 0..2 {
            // The driver unbinds by a call of its own, before it binds.
            gpu.faults.fail_later_call(call, if call == "vkQueueBindSparse" { 2 } else { 1 }, result);
            let failed = space.apply(&pieces);
            assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}");
            assert!(gpu.faults.failed().is_some());
        }
        gpu.faults.heal();
        let few = |n: u64| (0..n).map(|i| bind(other, &old, 2 * i, 1)).collect::<Vec<_>>();
        let refused = error_chain(&space.apply(&few(2)).unwrap_err());
        assert!(refused.contains("holds 8 sparse bindings at most, and there would be 9 "), "{call}: {refused}");
        space.apply(&few(1)).unwrap();
        // The memory stays while it may be bound.
        gpu.memory.free(new_table.segments()).unwrap();
        assert_eq!(left(&gpu.live)[0], memories, "{call}");
        let space = gpu.device.address_space();
        space.release(one).unwrap();
        assert_eq!(left(&gpu.live)[0], memories - 1, "{call}");
        let space = gpu.device.address_space();
        space.apply(&few(8)).unwrap();
        assert!(held.add(1).is_err());
        space.release(other).unwrap();
        gpu.end();
        assert!(held.add(8).is_ok(), "nothing is counted twice");
    }
}

#[test]
fn devices_of_one_process_share_the_limit_of_binds() {
    let Some([one, other]) = Opened::new(true).zip(Opened::new(true)).map(<[_; 2]>::from) else { return };
    if one.device.gpu().kind != "software GPU" {
        return println!("SKIPPED: no software GPU");
    }
    assert!(one.device.shares_limit_with(&other.device), "without a number of their own");
    drop((one, other));
    let shared = Held::new(8);
    let gpus = [(); 2].map(|()| {
        let live = Arc::<Live>::default();
        live.held.set(shared.clone()).unwrap();
        let mut gpu = Opened::limited(&VulkanOptions::default(), live).unwrap();
        let page = gpu.page();
        let (bo, _, table) = gpu.allocate(32 * page);
        let range = gpu.device.address_space().reserve(&table, 32 * page).unwrap();
        (gpu, bo, range)
    });
    let [(mut first, bo, range), (mut second, other_bo, other_range)] = gpus;
    let (page, space, other_space) = (first.page(), first.device.address_space(), second.device.address_space());
    // Every second page, so that none continues another.
    let binds = |range, bo| -> Vec<_> {
        (0..8).map(|n| 2 * n * page).map(|offset| request(within(range, offset), bo, offset, page)).collect()
    };
    let (one, other) = (binds(range, &bo), binds(other_range, &other_bo));
    space.apply(&one[..5]).unwrap();
    let e = error_chain(&other_space.apply(&other[..5]).unwrap_err());
    assert!(e.contains("holds 8 sparse bindings at most, and there would be 10 "), "{e}");
    other_space.apply(&other[..3]).unwrap();
    assert!(space.apply(&one[6..7]).is_err());
    // One may have the pieces that the other gives back, also when it goes.
    space.release(range).unwrap();
    other_space.apply(&other[..5]).unwrap();
    second.end();
    let (_, _, table) = first.allocate(32 * page);
    let space = first.device.address_space();
    let range = space.reserve(&table, 32 * page).unwrap();
    space.apply(&binds(range, &bo)).unwrap();
    space.release(range).unwrap();
    first.end();
}

#[test]
fn sparse_buffers_may_lie_in_the_upper_half_of_the_addresses() {
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    // Where RADV has them.
    live.high.store(0xffff_8000_0000_0000, Ordering::Relaxed);
    let options = VulkanOptions { validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let mut memory = device.memory();
    let table = memory.allocate(4 << 20, &Placement::Default).unwrap();
    let range = device.address_space().reserve(&table, 4 << 20).unwrap();
    assert!(range.first().bits() >= 0xffff_8000_0000_0000, "{range}");
    let half_a_page = Span::new(range.first(), 2048).unwrap();
    match device.address_space().apply(&[BindRequest::Unbind(half_a_page)]) {
        Err(SpaceError::Refused(e)) => assert!(error_chain(&*e).starts_with(&half_a_page.to_string()), "{e}"),
        other => panic!("{other:?}"),
    }
    device.address_space().release(range).unwrap();
    memory.free(table.segments()).unwrap();
    drop(memory);
    use_all(&mut device).unwrap();
    dmalane_device::conformance::suite(|| Box::new(open(&options, &Arc::default(), &live).unwrap().unwrap()));
    drop(device);
    assert_eq!(left(&live), [0; 5]);
    checked(&messages);
}

#[test]
fn binds_are_made_in_order() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let [(first, _, table), (second, ..)] = [(); 2].map(|()| gpu.allocate(1 << 20));
    let range = gpu.device.address_space().reserve(&table, 1 << 20).unwrap();
    for (bo, ordered) in [(&first, 0), (&second, 1), (&first, 2)] {
        gpu.device.address_space().apply(&[request(range.first(), bo, 0, 1 << 20)]).unwrap();
        // A GPU in software unbinds first, by a call of its own.
        let calls = if gpu.device.gpu().kind == "software GPU" { 2 * ordered } else { ordered };
        assert_eq!(gpu.live.ordered_binds.load(Ordering::Relaxed), calls, "each waits for the one before");
    }
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn a_buffer_stays_while_a_bind_to_it_may_be_under_way() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let [(first, _, table), (second, ..)] = [(); 2].map(|()| gpu.allocate(1 << 20));
    let space = gpu.device.address_space();
    let ranges = [(); 2].map(|()| space.reserve(&table, 1 << 20).unwrap());
    let bind = |range: Span<DeviceVa>, bo| request(range.first(), bo, 0, 1 << 20);
    space.apply(&[bind(ranges[0], &first)]).unwrap();
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    let failed = space.apply(&[BindRequest::Unbind(ranges[0]), bind(ranges[1], &second)]);
    assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}");
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    assert!(
        matches!(space.release(ranges[1]), Err(SpaceError::Invalidate(_))),
        "the driver does not say that it ended"
    );
    gpu.faults.heal();
    ranges.into_iter().for_each(|range| space.release(range).unwrap());
    gpu.end();
}

#[test]
fn binds_that_a_driver_may_still_make_keep_their_memory() {
    const LEN: u64 = 64 << 20;
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, at, table) = gpu.allocate(LEN);
    // The bind waits for this on the same queue of the driver.
    let _ticket = gpu.queues[0].submit(Operation::fill(at, LEN, 0x0102_0304_0506_0708)).unwrap();
    gpu.queues[0].flush();
    let space = gpu.device.address_space();
    let range = space.reserve(&table, LEN).unwrap();
    space
        .apply(&[BindRequest::Bind { va: range.first(), bo: bo.clone(), offset: 0, len: LEN, access: Access::RW }])
        .unwrap();
    let (faults, live) = (gpu.faults.clone(), gpu.live.clone());
    faults.fail_for_good(vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let Opened { queues, memory, registrar, device, .. } = gpu;
    drop((queues, memory, registrar, device));
    let [memories, _, buffers, semaphores, ..] = left(&live);
    assert!(memories >= 1 && buffers >= 2 && semaphores >= 2, "{:?}", left(&live));
}

#[test]
fn memory_that_a_failed_call_may_have_left_bound_stays_too() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let [(first, _, table), (second, _, other)] = [(); 2].map(|()| gpu.allocate(1 << 20));
    let space = gpu.device.address_space();
    let range = space.reserve(&table, 1 << 20).unwrap();
    space.apply(&[request(range.first(), &first, 0, 1 << 20)]).unwrap();
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    let failed = space.apply(&[request(range.first(), &second, 0, 1 << 20)]);
    assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}");
    gpu.faults.heal();
    let both = [table, other].map(|table| gpu.memory.free(table.segments()).unwrap());
    let (faults, live) = (gpu.faults.clone(), gpu.live.clone());
    faults.fail_for_good(vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let Opened { queues, memory, registrar, device, .. } = gpu;
    drop((queues, memory, registrar, device));
    assert!(left(&live)[0] >= both.len() as u64, "{:?}", left(&live));
}

/// Numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// How many random binds are asked for.
fn random_binds() -> Option<u64> {
    std::env::var("DMALANE_BINDS").ok().and_then(|n| n.parse().ok())
}

/// Three buffers of `pages` pages, of which each says which it is, and a table of the first.
fn three_buffers(gpu: &mut Opened, pages: u64) -> ([Arc<Bo>; 3], SgTable<dmalane_addr::CardAddr>) {
    let page = gpu.page();
    let buffers = [0, 1, 2].map(|number| {
        let (bo, at, table) = gpu.allocate(pages * page);
        gpu.name_pages(at, 0..pages, |n| name(number, n));
        (bo, table)
    });
    let [(first, table), (second, _), (third, _)] = buffers;
    ([first, second, third], table)
}

/// The name of a page of a buffer.
fn name(bo: u64, number: u64) -> u64 {
    0x1000_0000_0000_0000 * (bo + 1) + number
}

#[test]
fn random_binds_are_seen_as_a_model_says() {
    const RANGES: usize = 24;
    const PAGES: u64 = 16;
    let Some(mut gpu) = Opened::new(true) else { return };
    let page = gpu.page();
    let (bos, table) = three_buffers(&mut gpu, PAGES);
    let mut random = Random(1);
    // The reserved ranges, each with the name that its pages show; 0 where nothing is bound.
    let mut ranges: Vec<(Span<DeviceVa>, Vec<u64>)> = Vec::new();
    for round in 0..random_binds().unwrap_or(2000) {
        let space = gpu.device.address_space();
        if ranges.len() < RANGES {
            let range = space.reserve(&table, PAGES * page).unwrap();
            ranges.push((range, vec![0; PAGES as usize]));
        }
        let index = random.below(ranges.len() as u64) as usize;
        let (range, shown) = &mut ranges[index];
        if random.below(6) == 0 {
            space.release(*range).unwrap();
            ranges.swap_remove(index);
            continue;
        }
        let (bo, len) = (random.below(3), random.below(4) + 1);
        let (offset, at) = (random.below(PAGES - len + 1), random.below(PAGES - len + 1));
        let (va, bytes) = (within(*range, at * page), len * page);
        space.apply(&[request(va, &bos[bo as usize], offset * page, bytes)]).unwrap();
        let there = &mut shown[at as usize..][..len as usize];
        there.iter_mut().zip(offset..).for_each(|(shows, n)| *shows = name(bo, n));
        if round % 100 != 99 {
            continue;
        }
        // Every page, through the GPU: what is bound shows its name, what is not is refused.
        for (range, shown) in &ranges {
            for (n, name) in (0..).zip(shown) {
                let seen = gpu.names([within(*range, n * page)]).ok();
                let shows = Some(vec![*name]).filter(|_| *name != 0);
                assert_eq!(seen, shows, "round {round}, page {n} of {range}");
            }
        }
    }
    for (range, _) in ranges {
        gpu.device.address_space().release(range).unwrap();
    }
    gpu.end();
}

#[test]
fn random_batches_are_seen_as_a_model_says() {
    const PAGES: u64 = 512;
    // Recording takes long under the layers.
    let long = random_binds();
    let validation = Some(Messages::new()).filter(|_| long.is_none());
    let options = VulkanOptions { direct: 0, validation, ..VulkanOptions::default() };
    let Some(mut gpu) = Opened::as_given(&options, Arc::default()) else { return };
    let page = gpu.page();
    let (bos, table) = three_buffers(&mut gpu, PAGES / 4);
    let mut random = Random(2);
    let range = gpu.device.address_space().reserve(&table, PAGES * page).unwrap();
    let va = |n: u64| within(range, n * page);
    let mut shown = vec![0; PAGES as usize];
    let (mut done, mut batches) = (0, 0u64);
    while done < long.unwrap_or(3000) {
        let mut requests = Vec::new();
        for _ in 0..random.below(64) + 1 {
            let len = random.below(8) + 1;
            let at = random.below(PAGES - len + 1);
            let there = &mut shown[at as usize..][..len as usize];
            if random.below(4) == 0 {
                requests.push(BindRequest::Unbind(Span::new(va(at), len * page).unwrap()));
                there.fill(0);
                continue;
            }
            let (bo, offset) = (random.below(3), random.below(PAGES / 4 - len + 1));
            requests.push(request(va(at), &bos[bo as usize], offset * page, len * page));
            there.iter_mut().zip(offset..).for_each(|(shows, n)| *shows = name(bo, n));
        }
        done += requests.len() as u64;
        gpu.device.address_space().apply(&requests).unwrap();
        batches += 1;
        if batches % 16 != 1 && done < long.unwrap_or(3000) {
            continue;
        }
        // All pages, at once; those of holes one by one, because they are refused.
        let (holes, bound): (Vec<_>, Vec<_>) = (0..).zip(&shown).partition(|(_, name)| **name == 0);
        for (n, _) in holes {
            assert!(gpu.names([va(n)]).is_err(), "page {n} is a hole after {done}");
        }
        let seen = gpu.names(bound.iter().map(|(n, _)| va(*n))).unwrap();
        for ((n, name), seen) in bound.into_iter().zip(seen) {
            assert_eq!(seen, *name, "page {n} after {done} requests");
        }
    }
    println!("{done} requests in {batches} batches");
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}
