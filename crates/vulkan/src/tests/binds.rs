//! Binds of sparse buffers: what is seen, refused, counted, and kept when calls fail.

use dmalane_device::SpaceError;
use dmalane_vm::BindRequest;

use super::*;
use crate::sparse::Held;

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
    space.bind(&Bind { va: range.first(), bo: &bo, offset: 0, len: LEN, access: Access::RW }).unwrap();
    let at = space.at(range.first());
    let _second = gpu.queues[0].submit(fill(at)).unwrap();
    gpu.queues[0].flush();
    // The space goes first, and the queue has the last reference to the bind.
    let Opened { queues, memory, registrar, device, live, messages, .. } = gpu;
    drop((memory, registrar, device));
    drop(queues);
    assert_eq!(left(&live), [0; 6]);
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
    let bind = |bo, access| Bind { va: range.first(), bo, offset: 0, len: 1 << 20, access };
    gpu.faults.fail_call("vkQueueBindSparse", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    assert!(matches!(space.bind(&bind(&bo, Access::RW)), Err(SpaceError::Driver(_))));
    gpu.faults.heal();
    space.bind(&bind(&other, Access::RW)).unwrap();
    space.unbind(range).unwrap();
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
    let request = |bo: &Arc<Bo>| BindRequest::Bind {
        va: range.first(),
        bo: bo.clone(),
        offset: 0,
        len: 1 << 20,
        access: Access::RW,
    };
    space.apply(&[request(&bo)]).unwrap();
    let refused = space.apply(&[BindRequest::Unbind(range), request(&gone)]);
    assert!(matches!(refused, Err(SpaceError::Refused(_))), "{refused:?}");
    let at = space.at(range.first());
    let read = Operation::read(gpu.host(&[0; 4096]), at);
    assert_eq!(bytes_of(run(&mut *gpu.queues[0], vec![read]).unwrap().remove(0)), [5; 4096]);
    gpu.device.address_space().unbind(range).unwrap();
    gpu.end();
}

#[test]
fn unbinding_waits_for_copies_that_use_what_is_bound() {
    const LEN: u64 = 128 << 20;
    let Some(mut gpu) = Opened::new(true) else { return };
    let (bo, _, table) = gpu.allocate(LEN);
    let space = gpu.device.address_space();
    let range = space.reserve(&table, LEN).unwrap();
    space.bind(&Bind { va: range.first(), bo: &bo, offset: 0, len: LEN, access: Access::RW }).unwrap();
    let at = space.at(range.first());
    let _ticket = gpu.queues[0].submit(Operation::fill(at, LEN, 0x0102_0304_0506_0708)).unwrap();
    gpu.queues[0].flush();
    // The driver's own order would hide it: the space asks before it gives the driver anything.
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    let refused = gpu.device.address_space().unbind(range);
    let Err(SpaceError::Invalidate(error)) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("vkWaitSemaphores"), "{error}");
    drop(drain(&mut *gpu.queues[0], LONG));
    gpu.end();
}

#[test]
fn ranges_longer_than_a_buffer_are_refused_with_a_hint() {
    let options = VulkanOptions { largest: Some(8 << 20), ..VulkanOptions::default() };
    let Some(mut gpu) = Opened::with(&options) else { return };
    let (_, _, table) = gpu.allocate(20 << 20);
    let space = gpu.device.address_space();
    let error = space.reserve(&table, 20 << 20).unwrap_err().to_string();
    assert!(error.contains("room for 6291456") && error.contains(",flat"), "{error}");
    // Shorter ones have a buffer each, however many.
    let ranges = [(); 6].map(|()| space.reserve(&table, 4 << 20).unwrap());
    ranges.into_iter().for_each(|range| space.unbind(range).unwrap());
    gpu.end();
}

#[test]
fn ranges_longer_than_the_addresses_are_refused_with_a_hint() {
    let live = Arc::<Live>::default();
    live.addresses.store(8 << 20, Ordering::Relaxed);
    let Some(opened) = open(&VulkanOptions::default(), &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let table = device.memory().allocate(1 << 20, &Placement::Default).unwrap();
    let space = device.address_space();
    assert_eq!(space.longest(), 6 << 20);
    let error = space.reserve(&table, 8 << 20).unwrap_err().to_string();
    assert!(error.contains("room for 6291456") && error.contains(",flat"), "{error}");
    let range = space.reserve(&table, 6 << 20).unwrap();
    assert!(matches!(space.reserve(&table, 2 << 20), Err(SpaceError::Exhausted(_))));
    // Not a batch too many, but something that sparse buffers do not have.
    let error = space.apply(&[BindRequest::Null { va: range.first(), len: 65536 }]).unwrap_err().to_string();
    assert!(error.contains("no null pages"), "{error}");
    space.unbind(range).unwrap();
}

#[test]
fn binds_up_to_the_limit_are_all_seen() {
    let (options, live) = (VulkanOptions::default(), Arc::<Live>::default());
    // As many as the process may have, and a number of its own, so that tests beside it have some left.
    live.held.set(Held::new(crate::sparse::binds_left())).unwrap();
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() || device.gpu().kind != "software GPU" {
        return println!("SKIPPED: no software GPU that binds sparse buffers");
    }
    let page = device.address_space().page().bytes();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    const PAGES: u64 = 60_000;
    let table = memory.allocate(PAGES * page, &Placement::Default).unwrap();
    let first = table.segments().next().unwrap().addr.bits();
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
    let range = device.address_space().reserve(&table, PAGES * page).unwrap();
    let fill = |n: u64| Operation::fill(DeviceAddr::Card(dmalane_addr::CardAddr::new(first + n * page)), 8, n);
    let va = |n: u64| dmalane_addr::DeviceVa::new(range.first().bits() + n * page);
    // Every second page, so that each bind is one of its own with a hole on each side.
    let (mut bound, mut refused) = (0u64, false);
    while !refused && bound < PAGES / 2 {
        let batch = bound..(bound + 500).min(PAGES / 2);
        let request = |n: u64| {
            let (offset, access) = (2 * n * page, Access::RW);
            BindRequest::Bind { va: va(2 * n), bo: bo.clone(), offset, len: page, access }
        };
        let requests: Vec<_> = batch.clone().map(request).collect();
        match device.address_space().apply(&requests) {
            Ok(()) => bound = batch.end,
            Err(e) => {
                assert!(e.to_string().contains("sparse bindings at most"), "{e}");
                refused = true;
            }
        }
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    println!("{bound} binds, {maps} mappings");
    assert!(refused && bound > 1000, "{bound}");
    let heap = registrar.heap(None);
    for batch in (0..bound).collect::<Vec<_>>().chunks(500) {
        drop(run(&mut *queues[0], batch.iter().map(|n| fill(2 * n)).collect()).unwrap());
        let (buf, via) = register(&*registrar, &*heap, &[0; 4096]).unwrap();
        let mut rest = buf.into_slice();
        let reads = batch.iter().map(|n| {
            let slice = rest.split_off_front(8).unwrap();
            Operation::read(HostSlice::from((slice, via.clone())), DeviceAddr::Va(va(2 * n)))
        });
        let done = run(&mut *queues[0], reads.collect()).unwrap();
        for (n, end) in batch.iter().zip(done) {
            assert_eq!(bytes_of(end), (2 * n).to_le_bytes(), "page {n}");
        }
    }
    device.address_space().unbind(range).unwrap();
}

#[test]
fn unbinds_that_leave_too_many_pieces_are_refused() {
    const PAGES: u64 = 64;
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    live.held.set(Held::new(8)).unwrap();
    let options = VulkanOptions { validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let page = device.address_space().page().bytes();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let table = memory.allocate(PAGES * page, &Placement::Default).unwrap();
    let first = table.segments().next().unwrap().addr.bits();
    let fill = |n| Operation::fill(DeviceAddr::Card(dmalane_addr::CardAddr::new(first + n * page)), 8, n);
    drop(run(&mut *queues[0], (0..PAGES).map(fill).collect()).unwrap());
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
    let range = device.address_space().reserve(&table, PAGES * page).unwrap();
    let va = |n: u64| dmalane_addr::DeviceVa::new(range.first().bits() + n * page);
    let bind = |at, offset: u64, pages: u64| {
        let (offset, len) = (offset * page, pages * page);
        BindRequest::Bind { va: va(at), bo: bo.clone(), offset, len, access: Access::RW }
    };
    let hole = |n| BindRequest::Unbind(Span::new(va(n), page).unwrap());
    let too_many = |device: &mut VulkanDevice, requests: &[BindRequest], wanted: u32| {
        let e = device.address_space().apply(requests).unwrap_err().to_string();
        assert!(e.contains(&format!("holds 8 sparse bindings at most, and there would be {wanted} ")), "{e}");
    };
    device.address_space().apply(&[bind(0, 0, PAGES)]).unwrap();
    // A hole leaves one more, and so does a batch of them.
    too_many(&mut device, &(0..8).map(|n| hole(2 * n + 1)).collect::<Vec<_>>(), 9);
    let mut holes: Vec<u64> = (0..7).map(|n| 2 * n + 1).collect();
    holes.iter().for_each(|n| device.address_space().apply(&[hole(*n)]).unwrap());
    too_many(&mut device, &[hole(31)], 9);
    // A bind in the middle of another leaves two more.
    too_many(&mut device, &[bind(20, 0, 1)], 10);
    // What takes no more pieces is done: shorter ones, and one instead of others.
    holes.push(PAGES - 1);
    device.address_space().apply(&[hole(PAGES - 1)]).unwrap();
    device.address_space().apply(&[hole(0), bind(0, 0, 1)]).unwrap();
    let heap = registrar.heap(None);
    for n in 0..PAGES {
        let (buf, via) = register(&*registrar, &*heap, &[0; 4096]).unwrap();
        let slice = buf.into_slice().split_at(8).unwrap().0;
        let read = Operation::read(HostSlice::from((slice, via)), DeviceAddr::Va(va(n)));
        match (run(&mut *queues[0], vec![read]), holes.contains(&n)) {
            (Ok(mut done), false) => assert_eq!(bytes_of(done.remove(0)), n.to_le_bytes(), "page {n}"),
            (read, hole) => assert!(read.is_err() && hole, "page {n}: {read:?}"),
        }
    }
    device.address_space().unbind(range).unwrap();
    drop((queues, memory, device, registrar));
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}

#[test]
fn a_batch_that_fails_half_way_shows_nothing_and_keeps_what_may_be_bound() {
    const PAGES: u64 = 64;
    // Each page by a bind of its own, of which the driver gets a part at a time; the second part fails.
    for replaces in [false, true] {
        let Some(mut gpu) = Opened::new(true) else { return };
        let page = gpu.device.address_space().page().bytes();
        let [(old, _, table), (new, at, new_table)] = [(); 2].map(|()| gpu.allocate(PAGES * page));
        drop(run(&mut *gpu.queues[0], vec![Operation::fill(at, PAGES * page, 0x0505_0505_0505_0505)]).unwrap());
        let memories = left(&gpu.live)[0];
        let space = gpu.device.address_space();
        let range = space.reserve(&table, PAGES * page).unwrap();
        let va = |n: u64| dmalane_addr::DeviceVa::new(range.first().bits() + n * page);
        let backwards = |bo: &Arc<Bo>| {
            let bind = |n| {
                let offset = (PAGES - 1 - n) * page;
                BindRequest::Bind { va: va(n), bo: bo.clone(), offset, len: page, access: Access::RW }
            };
            (0..PAGES).map(bind).collect::<Vec<_>>()
        };
        if replaces {
            space.apply(&backwards(&old)).unwrap();
        }
        gpu.faults.fail_later_call("vkQueueBindSparse", 2, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
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
        gpu.device.address_space().unbind(range).unwrap();
        assert_eq!(left(&gpu.live)[0], memories - 2);
        // Binds of another range are ordered behind those that were sent.
        let (bo, at, table) = gpu.allocate(PAGES * page);
        drop(run(&mut *gpu.queues[0], vec![Operation::fill(at, PAGES * page, 0x0606_0606_0606_0606)]).unwrap());
        let space = gpu.device.address_space();
        let range = space.reserve(&table, PAGES * page).unwrap();
        space.bind(&Bind { va: range.first(), bo: &bo, offset: 0, len: PAGES * page, access: Access::RW }).unwrap();
        let at = space.at(range.first());
        let read = Operation::read(gpu.host(&[0; 4096]), at);
        assert_eq!(bytes_of(run(&mut *gpu.queues[0], vec![read]).unwrap().remove(0)), [6; 4096]);
        gpu.device.address_space().unbind(range).unwrap();
        gpu.end();
    }
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
        let page = gpu.device.address_space().page().bytes();
        let [(old, _, table), (new, _, new_table)] = [(); 2].map(|()| gpu.allocate(PAGES * page));
        let memories = left(&gpu.live)[0];
        let space = gpu.device.address_space();
        let [one, other] = [(); 2].map(|()| space.reserve(&table, PAGES * page).unwrap());
        let bind = |range: Span<dmalane_addr::DeviceVa>, bo: &Arc<Bo>, at: u64, pages: u64| BindRequest::Bind {
            va: dmalane_addr::DeviceVa::new(range.first().bits() + at * page),
            bo: bo.clone(),
            offset: at * page,
            len: pages * page,
            access: Access::RW,
        };
        space.apply(&[bind(one, &old, 0, PAGES)]).unwrap();
        // Three pieces of it replaced, which leaves four others, however much of that the driver does; twice.
        let pieces = [2, 4, 6].map(|at| bind(one, &new, at, 1));
        for _ in 0..2 {
            gpu.faults.fail_call(call, result);
            let failed = space.apply(&pieces);
            assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}");
            assert!(gpu.faults.failed().is_some());
        }
        gpu.faults.heal();
        let few = |n: u64| (0..n).map(|i| bind(other, &old, 2 * i, 1)).collect::<Vec<_>>();
        let refused = space.apply(&few(2)).unwrap_err().to_string();
        assert!(refused.contains("holds 8 sparse bindings at most, and there would be 9 "), "{call}: {refused}");
        space.apply(&few(1)).unwrap();
        // The memory stays while it may be bound.
        gpu.memory.free(new_table.segments()).unwrap();
        assert_eq!(left(&gpu.live)[0], memories, "{call}");
        let space = gpu.device.address_space();
        space.unbind(one).unwrap();
        assert_eq!(left(&gpu.live)[0], memories - 1, "{call}");
        let space = gpu.device.address_space();
        space.apply(&few(8)).unwrap();
        assert!(held.add(1).is_err());
        space.unbind(other).unwrap();
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
    let mut gpus = [(); 2].map(|()| {
        let live = Arc::<Live>::default();
        live.held.set(shared.clone()).unwrap();
        open(&VulkanOptions::default(), &Arc::default(), &live).unwrap().unwrap()
    });
    let page = gpus[0].address_space().page().bytes();
    let mut parts = gpus.each_mut().map(|device| {
        let mut memory = device.memory();
        let table = memory.allocate(32 * page, &Placement::Default).unwrap();
        let range = device.address_space().reserve(&table, 32 * page).unwrap();
        (Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap())), range, memory)
    });
    // Every second page, so that none continues another.
    let bind = |(bo, range, _): &(Arc<Bo>, Span<dmalane_addr::DeviceVa>, _), n: u64| BindRequest::Bind {
        va: dmalane_addr::DeviceVa::new(range.first().bits() + 2 * n * page),
        bo: bo.clone(),
        offset: 2 * n * page,
        len: page,
        access: Access::RW,
    };
    let five: [Vec<_>; 2] = parts.each_ref().map(|part| (0..5).map(|n| bind(part, n)).collect());
    gpus[0].address_space().apply(&five[0]).unwrap();
    let e = gpus[1].address_space().apply(&five[1]).unwrap_err().to_string();
    assert!(e.contains("holds 8 sparse bindings at most, and there would be 10 "), "{e}");
    gpus[1].address_space().apply(&five[1][..3]).unwrap();
    assert!(gpus[0].address_space().apply(&[bind(&parts[0], 6)]).is_err());
    // What one gives back the other may have, also when it goes.
    gpus[0].address_space().unbind(parts[0].1).unwrap();
    gpus[1].address_space().apply(&five[1]).unwrap();
    let [mut first, second] = gpus;
    drop(second);
    let table = parts[0].2.allocate(32 * page, &Placement::Default).unwrap();
    parts[0].1 = first.address_space().reserve(&table, 32 * page).unwrap();
    let all: Vec<_> = (0..8).map(|n| bind(&parts[0], n)).collect();
    first.address_space().apply(&all).unwrap();
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
        Err(SpaceError::Vm(dmalane_vm::Error::Misaligned { span, .. })) => assert_eq!(span, half_a_page),
        other => panic!("{other:?}"),
    }
    device.address_space().unbind(range).unwrap();
    memory.free(table.segments()).unwrap();
    drop(memory);
    use_all(&mut device).unwrap();
    dmalane_device::conformance::suite(|| Box::new(open(&options, &Arc::default(), &live).unwrap().unwrap()));
    drop(device);
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}

#[test]
fn binds_are_made_in_order() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let [(first, _, table), (second, ..)] = [(); 2].map(|()| gpu.allocate(1 << 20));
    let range = gpu.device.address_space().reserve(&table, 1 << 20).unwrap();
    for (bo, ordered) in [(&first, 0), (&second, 1), (&first, 2)] {
        let bind = BindRequest::Bind { va: range.first(), bo: bo.clone(), offset: 0, len: 1 << 20, access: Access::RW };
        gpu.device.address_space().apply(&[bind]).unwrap();
        assert_eq!(gpu.live.ordered_binds.load(Ordering::Relaxed), ordered, "each waits for the one before");
    }
    gpu.device.address_space().unbind(range).unwrap();
    gpu.end();
}

#[test]
fn a_buffer_stays_while_a_bind_to_it_may_be_under_way() {
    let Some(mut gpu) = Opened::new(true) else { return };
    let [(first, _, table), (second, ..)] = [(); 2].map(|()| gpu.allocate(1 << 20));
    let space = gpu.device.address_space();
    let ranges = [(); 2].map(|()| space.reserve(&table, 1 << 20).unwrap());
    let bind = |range: Span<dmalane_addr::DeviceVa>, bo: &Arc<Bo>| BindRequest::Bind {
        va: range.first(),
        bo: bo.clone(),
        offset: 0,
        len: 1 << 20,
        access: Access::RW,
    };
    space.apply(&[bind(ranges[0], &first)]).unwrap();
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    let failed = space.apply(&[BindRequest::Unbind(ranges[0]), bind(ranges[1], &second)]);
    assert!(matches!(failed, Err(SpaceError::Invalidate(_))), "{failed:?}");
    gpu.faults.fail_call("vkWaitSemaphores", vk::Result::TIMEOUT);
    assert!(matches!(space.unbind(ranges[1]), Err(SpaceError::Invalidate(_))), "the driver does not say that it ended");
    gpu.faults.heal();
    ranges.into_iter().for_each(|range| space.unbind(range).unwrap());
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
    space.bind(&Bind { va: range.first(), bo: &bo, offset: 0, len: LEN, access: Access::RW }).unwrap();
    let (faults, live) = (gpu.faults.clone(), gpu.live.clone());
    faults.fail_for_good(vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let Opened { queues, memory, registrar, device, .. } = gpu;
    drop((queues, memory, registrar, device));
    let [memories, _, buffers, semaphores, ..] = left(&live);
    assert!(memories >= 1 && buffers >= 2 && semaphores >= 2, "{:?}", left(&live));
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

#[test]
fn random_binds_are_seen_as_a_model_says() {
    const RANGES: usize = 24;
    const PAGES: u64 = 16;
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    let options = VulkanOptions { sparse: true, validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let page = device.address_space().page().bytes();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let heap = registrar.heap(None);
    // Every page of the buffers says which it is.
    let tables = [(); 3].map(|()| memory.allocate(PAGES * page, &Placement::Default).unwrap());
    let bos: Vec<_> = tables
        .iter()
        .map(|table| {
            Arc::new(Bo::new(table.segments().next().unwrap().addr.bits(), SgIndex::from_table(table).unwrap()))
        })
        .collect();
    let name = |bo: usize, number: u64| 0x1000_0000_0000_0000 * (bo as u64 + 1) + number;
    for (i, table) in tables.iter().enumerate() {
        let first = table.segments().next().unwrap().addr.bits();
        let fill = |n| {
            let at = DeviceAddr::Card(dmalane_addr::CardAddr::new(first + n * page));
            Operation::fill(at, page, name(i, n))
        };
        drop(run(&mut *queues[0], (0..PAGES).map(fill).collect()).unwrap());
    }
    let mut random = Random(1);
    // The reserved ranges, each with the name that its pages show; 0 where nothing is bound.
    let mut ranges: Vec<(Span<dmalane_addr::DeviceVa>, Vec<u64>)> = Vec::new();
    let rounds = std::env::var("DMALANE_BINDS").ok().and_then(|n| n.parse().ok()).unwrap_or(2000);
    for round in 0..rounds {
        let space = device.address_space();
        if ranges.len() < RANGES {
            let range = space.reserve(&tables[0], PAGES * page).unwrap();
            ranges.push((range, vec![0; PAGES as usize]));
        }
        let index = random.below(ranges.len() as u64) as usize;
        let (range, shown) = &mut ranges[index];
        if random.below(6) == 0 {
            space.unbind(*range).unwrap();
            ranges.swap_remove(index);
            continue;
        }
        let (bo, len) = (random.below(3) as usize, random.below(4) + 1);
        let (offset, at) = (random.below(PAGES - len + 1), random.below(PAGES - len + 1));
        let va = dmalane_addr::DeviceVa::new(range.first().bits() + at * page);
        let bind = Bind { va, bo: &bos[bo], offset: offset * page, len: len * page, access: Access::RW };
        let there = &mut shown[at as usize..][..len as usize];
        let bound = space.bind(&bind);
        assert_eq!(bound.is_ok(), there.iter().all(|name| *name == 0), "round {round}: {bound:?}");
        if bound.is_ok() {
            there.iter_mut().zip(offset..).for_each(|(shows, n)| *shows = name(bo, n));
        }
        if round % 100 != 99 {
            continue;
        }
        // Every page, through the GPU: what is bound shows its name, what is not is refused.
        let space = device.address_space();
        for (range, shown) in &ranges {
            for (n, name) in shown.iter().enumerate() {
                let at = space.at(dmalane_addr::DeviceVa::new(range.first().bits() + n as u64 * page));
                let (buf, via) = register(&*registrar, &*heap, &[0; 4096]).unwrap();
                let slice = buf.into_slice().split_at(8).unwrap().0;
                let read = run(&mut *queues[0], vec![Operation::read(HostSlice::from((slice, via)), at)]);
                assert_eq!(read.is_ok(), *name != 0, "round {round}, page {n} of {range}");
                if let Ok(done) = read {
                    let mut bytes = [0; 8];
                    done.into_iter().next().unwrap().operation.into_slice().unwrap().read(0, &mut bytes).unwrap();
                    assert_eq!(u64::from_le_bytes(bytes), *name, "round {round}, page {n} of {range}");
                }
            }
        }
    }
    for (range, _) in ranges {
        device.address_space().unbind(range).unwrap();
    }
    drop((queues, memory, device, registrar));
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}

#[test]
fn random_batches_are_seen_as_a_model_says() {
    const PAGES: u64 = 512;
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    // Recording takes long under the layers.
    let long = std::env::var("DMALANE_BINDS").ok().and_then(|n| n.parse::<u64>().ok());
    let validation = Some(messages.clone()).filter(|_| long.is_none());
    let options = VulkanOptions { sparse: true, validation, ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if device.sparse_pages().is_none() {
        return println!("SKIPPED: the driver cannot bind sparse buffers");
    }
    let page = device.address_space().page().bytes();
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let heap = registrar.heap(None);
    let tables = [(); 3].map(|()| memory.allocate(PAGES / 4 * page, &Placement::Default).unwrap());
    let bos: Vec<_> = tables
        .iter()
        .map(|t| Arc::new(Bo::new(t.segments().next().unwrap().addr.bits(), SgIndex::from_table(t).unwrap())))
        .collect();
    let name = |bo: u64, number: u64| 0x1000_0000_0000_0000 * (bo + 1) + number;
    for (i, table) in tables.iter().enumerate() {
        let first = table.segments().next().unwrap().addr.bits();
        let fill = |n| {
            let at = DeviceAddr::Card(dmalane_addr::CardAddr::new(first + n * page));
            Operation::fill(at, page, name(i as u64, n))
        };
        drop(run(&mut *queues[0], (0..PAGES / 4).map(fill).collect()).unwrap());
    }
    let mut random = Random(2);
    let range = device.address_space().reserve(&tables[0], PAGES * page).unwrap();
    let va = |n: u64| dmalane_addr::DeviceVa::new(range.first().bits() + n * page);
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
            requests.push(BindRequest::Bind {
                va: va(at),
                bo: bos[bo as usize].clone(),
                offset: offset * page,
                len: len * page,
                access: Access::RW,
            });
            there.iter_mut().zip(offset..).for_each(|(shows, n)| *shows = name(bo, n));
        }
        done += requests.len() as u64;
        device.address_space().apply(&requests).unwrap();
        batches += 1;
        if batches % 16 != 1 && done < long.unwrap_or(3000) {
            continue;
        }
        // The first bytes of all pages, at once; those of holes one by one, because they are refused.
        let space = device.address_space();
        let (buf, via) = register(&*registrar, &*heap, &vec![0; PAGES as usize * 8]).unwrap();
        let mut rest = buf.into_slice();
        let mut reads = Vec::new();
        for (n, name) in (0..).zip(&shown) {
            let slice = rest.split_off_front(8).unwrap();
            let read = Operation::read(HostSlice::from((slice, via.clone())), space.at(va(n)));
            match name {
                0 => assert!(run(&mut *queues[0], vec![read]).is_err(), "page {n} is a hole after {done}"),
                _ => reads.push((n, read)),
            }
        }
        let (numbers, reads): (Vec<u64>, Vec<_>) = reads.into_iter().unzip();
        for (n, end) in numbers.into_iter().zip(run(&mut *queues[0], reads).unwrap()) {
            let mut bytes = [0; 8];
            end.operation.into_slice().unwrap().read(0, &mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), shown[n as usize], "page {n} after {done} requests");
        }
    }
    println!("{done} requests in {batches} batches");
    device.address_space().unbind(range).unwrap();
    drop((queues, memory, device, registrar));
    assert_eq!(left(&live), [0; 6]);
    checked(&messages);
}
