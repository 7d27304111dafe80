//! Memory shared as dma-bufs, both ways. The guests of `scripts/vm` run these with real ones (`DMALANE_NEED_DMA_BUF`);
//! without udmabuf a memfd stands in for imported ones, which a GPU in software maps alike.

use std::os::fd::{AsFd, OwnedFd};

use dmalane_dma::{AnonHeap, DmaHeap, MemfdHeap, PageKind, error_chain, export_dma_buf};

use super::*;
use crate::channel::Channel;

const SIZE: usize = 256 << 10;

/// Says why a test is skipped, which is a failure where dma-bufs are [needed](must_be).
fn skip(why: impl std::fmt::Display) {
    must_be(&why);
    println!("SKIPPED: {why}");
}

/// Fails where `DMALANE_NEED_DMA_BUF` is set, because something is missing.
fn must_be(why: impl std::fmt::Display) {
    assert!(std::env::var_os("DMALANE_NEED_DMA_BUF").is_none(), "DMALANE_NEED_DMA_BUF is set: {why}");
}

/// As many bytes, another pattern for each seed.
fn pattern(seed: usize) -> Vec<u8> {
    (0..SIZE).map(|i| ((i + seed) * 7 % 253) as u8).collect()
}

fn write(buf: &SharedBuf, bytes: &[u8]) {
    // Memory that is no dma-buf needs no access.
    buf.cpu_access(true, |to| to.write(bytes)).unwrap_or_else(|_| buf.as_volatile_slice().write(bytes));
}

fn read(buf: &SharedBuf) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    buf.cpu_access(false, |from| from.read(&mut bytes)).unwrap_or_else(|_| buf.as_volatile_slice().read(&mut bytes));
    bytes
}

fn memfd() -> SharedBuf {
    MemfdHeap::starting_at(PageKind::Base).allocate(SIZE).unwrap().share()
}

/// Memory of each kind that drivers import as a dma-buf, as far as the kernel has it: a memfd, wrapped when it is
/// exported; one that another process has wrapped; a buffer of the kernel's heap.
fn kinds() -> Vec<(&'static str, SharedBuf)> {
    let mut found = vec![("memfd", memfd())];
    match export_dma_buf(&memfd().reference()) {
        Ok(fd) => found.push(("udmabuf", SharedBuf::import_dma_buf(fd).unwrap())),
        Err(e) => must_be(e),
    }
    match DmaHeap::open("system") {
        Ok(heap) => found.push(("dma-buf heap", heap.allocate(SIZE).unwrap().share())),
        Err(e) => must_be(e),
    }
    found
}

/// A descriptor that the driver takes for a dma-buf.
fn descriptor(buf: &SharedBuf, software: bool) -> Option<OwnedFd> {
    match export_dma_buf(&buf.reference()) {
        Err(_) if software => buf.export()?.try_clone_to_owned().ok(),
        made => made.ok(),
    }
}

/// Transfers of ownership, and queues that were waited for because of it.
fn owned(live: &Live) -> (u64, u64) {
    (live.transfers.load(Ordering::Relaxed), live.handovers.load(Ordering::Relaxed))
}

#[test]
fn host_memory_is_imported() {
    let (faults, live, messages) = (Arc::<Faults>::default(), Arc::<Live>::default(), Messages::new());
    let options = VulkanOptions { validation: Some(messages.clone()), ..VulkanOptions::default() };
    let Some(opened) = open(&options, &faults, &live) else { return };
    let device = opened.unwrap();
    let info = device.gpu();
    if !info.dma_buf_import || info.host_import.is_none() {
        return skip("the driver does not import dma-bufs, and memory to compare with");
    }
    let gpu = device.shared();
    for (seed, (kind, buf)) in kinds().into_iter().enumerate() {
        let Some(fd) = descriptor(&buf, info.kind == "software GPU") else {
            skip("no udmabuf");
            continue;
        };
        // Each call that fails is named, and keeps nothing.
        let (before, again) = (left(&live), || fd.try_clone().unwrap());
        for number in 1.. {
            faults.fail(number, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
            let imported = gpu.import_dma_buf(Some(&buf.reference()), SIZE as u64, again());
            let Some(call) = faults.failed() else {
                imported.unwrap();
                break;
            };
            assert!(error_chain(&imported.err().unwrap()).contains(call), "{kind}: {call}");
            assert_eq!(left(&live), before, "{kind}: {call}");
        }
        faults.heal();
        let longer =
            gpu.import_dma_buf(Some(&buf.reference()), 2 * SIZE as u64, again()).err().expect("beyond its end");
        assert!(longer.to_string().contains("too short"), "{kind}: {longer}");
        let imported = gpu.import_dma_buf(Some(&buf.reference()), SIZE as u64, fd).unwrap();
        assert_eq!([left(&live)[0], left(&live)[1]], [before[0] + 1, before[1] + 1]);
        // Written after the import, so that a copy made by it would not have them.
        let bytes = pattern(seed);
        write(&buf, &bytes);
        let back = AnonHeap::new().allocate(SIZE).unwrap().share();
        let target = gpu.import(&back.reference(), 0, SIZE).unwrap();
        let before = owned(&live);
        let mut channel = Channel::new(gpu, 0).unwrap();
        let mut recording = channel.begin().unwrap();
        let region = vk::BufferCopy { src_offset: 0, dst_offset: 0, size: SIZE as u64 };
        channel.copy(&mut recording, &imported, &target, &[region]);
        channel.show_host(&recording);
        channel.submit(recording, None, ()).map_err(|((), e)| e).unwrap();
        channel.wait(LONG).unwrap();
        channel.ended(drop).unwrap();
        assert!(read(&back) == bytes, "{kind}: the GPU's copy");
        let transfers = if info.foreign_queues { 2 } else { 0 };
        assert_eq!(owned(&live), (before.0 + transfers, before.1), "{kind}: not what was imported by its address");
    }
    drop(device);
    assert_eq!(left(&live), [0; 5]);
    checked(&messages);
}

#[test]
fn memory_that_is_not_imported_by_its_address_is_imported_as_one() {
    let Some(mut gpu) = Opened::new(false) else { return };
    let info = gpu.device.gpu();
    if !info.dma_buf_import || info.host_import.is_none() || info.kind != "software GPU" {
        return skip("no software GPU that imports dma-bufs");
    }
    let (_, at, _table) = gpu.allocate(SIZE as u64);
    // Two parts of one buffer, so that the second does not begin where the dma-buf does.
    let through = |gpu: &Opened, buf: SharedBuf| {
        gpu.faults.fail_call("vkGetMemoryHostPointerPropertiesEXT", vk::Result::ERROR_INVALID_EXTERNAL_HANDLE);
        let via = Registered::new(&*gpu.registrar, &buf, Access::RW).unwrap();
        assert_eq!(gpu.faults.failed(), Some("vkGetMemoryHostPointerPropertiesEXT"));
        assert!(gpu.faults.called("vkGetMemoryFdPropertiesKHR"), "as a dma-buf");
        gpu.faults.heal();
        buf.into_slice()
            .split_at(SIZE / 2)
            .map(|(a, b)| [a, b].map(|half| HostSlice::from((half, via.clone()))))
            .unwrap()
    };
    let DeviceAddr::Card(first) = at else { panic!("a card address") };
    let half = |n: u64| DeviceAddr::Card(first + n * SIZE as u64 / 2);
    for (seed, ((kind, from), (_, to))) in kinds().into_iter().zip(kinds()).enumerate() {
        let bytes = pattern(seed);
        write(&from, &bytes);
        let [a, b] = through(&gpu, from);
        drop(run(&mut *gpu.queues[0], vec![Operation::write(a, half(0)), Operation::write(b, half(1))]).unwrap());
        let [a, b] = through(&gpu, to);
        let done = run(&mut *gpu.queues[0], vec![Operation::read(a, half(0)), Operation::read(b, half(1))]).unwrap();
        let got: Vec<u8> = done.into_iter().flat_map(bytes_of).collect();
        assert!(got == bytes, "{kind}: what went to the GPU and back");
    }
    // Where that fails too, both reasons are named.
    let buf = memfd();
    gpu.faults.fail_for_good_from("vkGetMemoryHostPointerPropertiesEXT", vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let error = error_chain(&Registered::new(&*gpu.registrar, &buf, Access::RW).unwrap_err());
    gpu.faults.heal();
    assert!(
        error.contains("vkGetMemoryHostPointerPropertiesEXT failed") && error.contains("as a dma-buf: vk"),
        "{error}"
    );
    drop(buf);
    gpu.end();
}

/// A file that is read into one memfd is registered chunk by chunk, and the kernel's udmabufs have 64 MiB at most.
#[test]
fn a_part_of_a_large_memfd_is_imported_alone() {
    const LARGE: usize = 256 << 20;
    let Some(mut gpu) = Opened::new(false) else { return };
    let info = gpu.device.gpu();
    if !info.dma_buf_import || info.host_import.is_none() || info.kind != "software GPU" {
        return skip("no software GPU that imports dma-bufs");
    }
    let (_, at, _table) = gpu.allocate(SIZE as u64);
    // The rest never has pages.
    let mut reserved = MemfdHeap::starting_at(PageKind::Base).reserve(LARGE).unwrap();
    let before = reserved.next(LARGE / 2).unwrap();
    let mut slice = reserved.next(SIZE).unwrap().populate().unwrap();
    let bytes = pattern(5);
    slice.write(0, &bytes).unwrap();
    gpu.faults.fail_call("vkGetMemoryHostPointerPropertiesEXT", vk::Result::ERROR_INVALID_EXTERNAL_HANDLE);
    let range = slice.offset()..slice.offset() + SIZE;
    let via = Registered::of_range(&*gpu.registrar, &slice.reference(), range, Access::RW).unwrap();
    assert!(gpu.faults.called("vkGetMemoryFdPropertiesKHR"), "as a dma-buf");
    gpu.faults.heal();
    drop(run(&mut *gpu.queues[0], vec![Operation::write(HostSlice::from((slice, via)), at)]).unwrap());
    let back = Operation::read(gpu.host(&[0; SIZE]), at);
    assert!(bytes_of(run(&mut *gpu.queues[0], vec![back]).unwrap().remove(0)) == bytes);
    drop((before, reserved));
    gpu.end();
}

/// A GPU whose memory can be exported.
fn exporter(sparse: bool) -> Option<Opened> {
    let gpu = Opened::with(&VulkanOptions { exportable: true, sparse, ..VulkanOptions::default() })?;
    if gpu.device.gpu().dma_buf_export {
        return Some(gpu);
    }
    skip("the driver exports no memory");
    None
}

/// The memory of a table as a dma-buf, which must begin where the memory does; `None` where the processor cannot map
/// it.
fn exported(gpu: &Opened, table: &SgTable<dmalane_addr::CardAddr>) -> Option<SharedBuf> {
    let only = table.segments().next().unwrap();
    let (fd, offset) = gpu.device.export_dma_buf(Span::new(only.addr, only.len).unwrap()).unwrap();
    assert_eq!(offset, 0);
    let shared = SharedBuf::import_dma_buf(fd).map_err(skip).ok()?;
    assert!(shared.len() >= SIZE);
    Some(shared)
}

#[test]
fn device_memory_is_exported() {
    let Some(gpu) = exporter(false) else { return };
    bytes_are_shared(gpu);
}

/// The layers check it, which is all that another driver would do.
#[test]
fn device_memory_is_exported_by_drivers_that_take_dedicated_allocations_only() {
    let live = Arc::<Live>::default();
    live.dedicated.store(true, Ordering::Relaxed);
    let options = VulkanOptions { exportable: true, ..VulkanOptions::default() };
    let Some(gpu) = Opened::limited(&VulkanOptions { sparse: false, ..options.clone() }, live.clone()) else { return };
    if !gpu.device.gpu().dma_buf_export {
        return skip("the driver exports no memory");
    }
    bytes_are_shared(gpu);
    let mut device = open(&options, &Arc::default(), &live).unwrap().unwrap();
    assert_eq!(device.address_space().kind(), AddressSpaceKind::Flat, "sparse buffers would need the memory too");
}

fn bytes_are_shared(mut gpu: Opened) {
    let (_, at, table) = gpu.allocate(SIZE as u64);
    let (ones, others) = (pattern(1), pattern(2));
    let host = gpu.host(&ones);
    drop(run(&mut *gpu.queues[0], vec![Operation::write(host, at)]).unwrap());
    let Some(shared) = exported(&gpu, &table) else { return };
    assert!(read(&shared) == ones, "what the GPU has written");
    write(&shared, &others);
    let back = Operation::read(gpu.host(&[0; SIZE]), at);
    assert!(bytes_of(run(&mut *gpu.queues[0], vec![back]).unwrap().remove(0)) == others, "what the GPU reads");
    // A part that begins later; more than there is; a call that fails.
    let only = table.segments().next().unwrap();
    let of = |offset: u64, len: u64| gpu.device.export_dma_buf(Span::new(only.addr + offset, len).unwrap());
    assert_eq!(of(4096, 4096).unwrap().1, 4096);
    assert!(matches!(of(0, only.len * 2), Err(Error::NotAllocated(_) | Error::Range(_))));
    gpu.faults.fail_call("vkGetMemoryFdKHR", vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    let error = of(0, only.len).unwrap_err();
    assert!(error_chain(&error).contains("vkGetMemoryFdKHR"), "{error}");
    gpu.faults.heal();
    // The memory lives as long as the dma-buf.
    gpu.memory.free(table.segments()).unwrap();
    gpu.end();
    assert!(read(&shared) == others, "after the end of the device");
}

#[test]
fn one_device_imports_what_another_exports() {
    let Some(mut one) = exporter(false) else { return };
    let Some(mut other) = Opened::new(false) else { return };
    let (_, from, table) = one.allocate(SIZE as u64);
    let (_, to, _table) = other.allocate(SIZE as u64);
    let Some(shared) = exported(&one, &table) else { return };
    let via = {
        other.faults.fail_call("vkGetMemoryHostPointerPropertiesEXT", vk::Result::ERROR_INVALID_EXTERNAL_HANDLE);
        let via = Registered::new(&*other.registrar, &shared, Access::RW).unwrap();
        assert!(other.faults.called("vkGetMemoryFdPropertiesKHR"), "as a dma-buf");
        other.faults.heal();
        via
    };
    let bytes = pattern(3);
    let host = one.host(&bytes);
    drop(run(&mut *one.queues[0], vec![Operation::write(host, from)]).unwrap());
    drop(run(&mut *other.queues[0], vec![Operation::write(HostSlice::from((shared.into_slice(), via)), to)]).unwrap());
    let back = Operation::read(other.host(&[0; SIZE]), to);
    assert!(bytes_of(run(&mut *other.queues[0], vec![back]).unwrap().remove(0)) == bytes);
    one.end();
    other.end();
}

/// In one piece, in as many as the driver's limits ask for, and as dedicated allocations.
#[test]
fn another_device_reads_what_was_lent() {
    for (largest, dedicated) in [(None, false), (Some(64 << 10), false), (None, true)] {
        let live = || {
            let live = Arc::<Live>::default();
            live.dedicated.store(dedicated, Ordering::Relaxed);
            live
        };
        let options = VulkanOptions { sparse: false, largest, ..VulkanOptions::default() };
        let Some(mut one) = Opened::limited(&options, live()) else { return };
        let lending = match one.device.lending() {
            Ok(lending) => lending,
            Err(why) => return skip(why),
        };
        lending.allow(true);
        let (_, from, table) = one.allocate(SIZE as u64);
        lending.allow(false);
        let bytes = pattern(5);
        let host = one.host(&bytes);
        drop(run(&mut *one.queues[0], vec![Operation::write(host, from)]).unwrap());
        let only = table.segments().next().unwrap();
        let fds = lending.lend(Span::new(only.addr, only.len).unwrap()).unwrap();
        assert_eq!(fds.len() as u64, largest.map_or(1, |most| SIZE as u64 / most));
        drop(lending);
        one.memory.free(table.segments()).unwrap();
        one.end();

        let mut other = Opened::limited(&options, live()).unwrap();
        let borrower = other.device.lending().unwrap();
        let pieces: Vec<_> = fds.iter().map(|(fd, len)| (fd.as_fd(), *len)).collect();
        let mut wrong = vec![Vec::new(), vec![(pieces[0].0, 64 << 20)], vec![(pieces[0].0, 0)]];
        if pieces.len() > 1 {
            let short = [&[(pieces[0].0, pieces[0].1 / 2)], &pieces[1..]].concat();
            let empty = [&pieces[..], &[(pieces[0].0, 0)]].concat();
            let huge = pieces.iter().map(|(fd, _)| (*fd, u64::MAX / 2)).collect();
            wrong.extend([short, empty, huge]);
        }
        for wrong in wrong {
            let lens: Vec<u64> = wrong.iter().map(|(_, len)| *len).collect();
            assert!(borrower.take(&wrong).is_err(), "{lens:?}");
        }
        let (lent, twice) = (borrower.take(&pieces).unwrap(), borrower.take(&pieces).unwrap());
        assert_eq!(lent.at.len(), SIZE as u64);
        assert!(lent.at.intersect(&twice.at).is_none());
        drop(twice);
        let at = DeviceAddr::Card(lent.at.first());
        let back = Operation::read(other.host(&[0; SIZE]), at);
        assert!(bytes_of(run(&mut *other.queues[0], vec![back]).unwrap().remove(0)) == bytes, "the same bytes");
        let change = Operation::write(other.host(&[1; SIZE]), at);
        assert!(run(&mut *other.queues[0], vec![change]).is_err(), "for reading");
        let seen = other.device.address_of(lent.at.first()).is_some();
        assert_eq!(seen, other.device.gpu().device_address, "by programs on the GPU");
        drop(lent);
        let gone = Operation::read(other.host(&[0; SIZE]), at);
        assert!(run(&mut *other.queues[0], vec![gone]).is_err(), "it was given back");
        drop(borrower);
        other.end();
    }
    let Some(bound) = Opened::new(true) else { return };
    let why = bound.device.lending().err().unwrap().to_string();
    assert!(why.ends_with("it binds sparse buffers; open it as vulkan:NAME,flat"), "{why}");
    bound.end();
}

#[test]
fn memory_that_can_be_exported_is_bound() {
    let Some(mut gpu) = exporter(true) else { return };
    let (bo, _, table) = gpu.allocate(SIZE as u64);
    let space = gpu.device.address_space();
    let range = space.reserve(&table, SIZE as u64).unwrap();
    space
        .apply(&[BindRequest::Bind {
            va: range.first(),
            bo: bo.clone(),
            offset: 0,
            len: SIZE as u64,
            access: Access::RW,
        }])
        .unwrap();
    let (at, bytes) = (space.at(range.first()), pattern(4));
    let (host, before) = (gpu.host(&bytes), owned(&gpu.live).0);
    drop(run(&mut *gpu.queues[0], vec![Operation::write(host, at)]).unwrap());
    let transfers = if gpu.device.gpu().foreign_queues { 2 } else { 0 };
    assert_eq!(owned(&gpu.live).0 - before, transfers, "of the memory behind the sparse buffer");
    if let Some(shared) = exported(&gpu, &table) {
        assert!(read(&shared) == bytes, "what was written at the bound address");
    }
    gpu.device.address_space().release(range).unwrap();
    gpu.end();
}

#[test]
fn memory_of_a_queue_alone_stays_its_own() {
    let Some(mut gpu) = exporter(false) else { return };
    let (_, at, _table) = gpu.allocate(SIZE as u64);
    // What is foreign is the memory that was allocated, and not the pattern that the fill copies.
    let transfers = if gpu.device.gpu().foreign_queues { 2 } else { 0 };
    let before = owned(&gpu.live).0;
    drop(run(&mut *gpu.queues[0], vec![Operation::fill(at, 1001, 0x0807_0605_0403_0201)]).unwrap());
    assert_eq!(owned(&gpu.live).0 - before, transfers, "of a fill");
    gpu.end();
}

#[test]
fn memory_that_was_not_allocated_for_it_is_not_exported() {
    let Some(mut gpu) = Opened::new(false) else { return };
    let (_, _, table) = gpu.allocate(SIZE as u64);
    let only = table.segments().next().unwrap();
    let refused = gpu.device.export_dma_buf(Span::new(only.addr, only.len).unwrap());
    assert!(matches!(refused, Err(Error::NotExportable)), "{refused:?}");
    gpu.end();
}

#[test]
fn a_descriptor_that_is_no_dma_buf_is_refused_and_closed() {
    let Some(gpu) = Opened::new(false) else { return };
    if !gpu.device.gpu().dma_buf_import {
        return skip("the driver does not import dma-bufs");
    }
    let ((reader, mut writer), buf) = (std::io::pipe().unwrap(), memfd());
    let error = gpu.device.shared().import_dma_buf(Some(&buf.reference()), SIZE as u64, reader.into()).err().unwrap();
    assert!(matches!(error, Error::Descriptor(_)), "{error}");
    let written = std::io::Write::write(&mut writer, &[0]);
    assert_eq!(written.unwrap_err().kind(), std::io::ErrorKind::BrokenPipe, "a copy of the descriptor is left");
    drop(buf);
    gpu.end();
}

#[test]
fn a_queue_owns_memory_after_all_that_owned_it_before() {
    const HALF: u64 = SIZE as u64 / 2;
    let Some(gpu) = Opened::new(false) else { return };
    let (device, info) = (gpu.device.shared(), gpu.device.gpu());
    if !info.dma_buf_import || !info.foreign_queues {
        return skip("the driver imports no dma-bufs, or has no VK_EXT_queue_family_foreign");
    }
    let mut buffers = Vec::new();
    for buf in [memfd(), memfd()] {
        let Some(fd) = descriptor(&buf, info.kind == "software GPU") else { return skip("no udmabuf") };
        buffers.push(device.import_dma_buf(Some(&buf.reference()), SIZE as u64, fd).unwrap());
    }
    let mut queues = [(); 2].map(|()| Channel::new(device, 0).unwrap());
    let mut use_all = |queue: usize, used: &[usize], fails: bool| {
        let (before, channel) = (owned(&gpu.live), &mut queues[queue]);
        let mut recording = channel.begin().unwrap();
        for half in 0..2 {
            for buffer in used {
                channel.fill(&mut recording, &buffers[*buffer], half * HALF, HALF, 7);
            }
        }
        if fails {
            gpu.faults.fail_call("vkQueueSubmit", vk::Result::ERROR_OUT_OF_HOST_MEMORY);
        }
        assert_eq!(channel.submit(recording, None, ()).is_err(), fails);
        gpu.faults.heal();
        let (transfers, handovers) = owned(&gpu.live);
        assert_eq!(transfers - before.0, 2 * used.len() as u64, "acquired once, and released");
        handovers - before.1
    };
    let waits = [
        (0, &[0][..], 0),
        (0, &[0], 0),
        (1, &[1], 0),
        (0, &[1, 0], 1),
        // For the one queue that had both, once.
        (1, &[0, 1], 1),
        (0, &[1], 1),
    ];
    for (number, (queue, used, for_others)) in waits.into_iter().enumerate() {
        assert_eq!(use_all(queue, used, false), for_others, "submission {number}");
    }
    // One that was not sent owns nothing.
    assert_eq!(use_all(1, &[1], true), 1);
    assert_eq!(use_all(0, &[1], false), 0);
    assert_eq!(use_all(1, &[1], false), 1);
    for queue in &mut queues {
        while queue.in_flight() > 0 {
            queue.wait(LONG).unwrap();
            queue.ended(drop).unwrap();
        }
    }
    drop((queues, buffers));
    gpu.end();
}

#[test]
fn the_processor_makes_no_copies_of_memory_that_can_be_exported() {
    let (live, messages) = (Arc::<Live>::default(), Messages::new());
    let validation = Some(messages.clone());
    let options =
        VulkanOptions { sparse: false, exportable: true, direct: SIZE as u64, validation, ..VulkanOptions::default() };
    let Some(opened) = open(&options, &Arc::default(), &live) else { return };
    let mut device = opened.unwrap();
    if !device.gpu().dma_buf_export || !device.gpu().foreign_queues || !device.shared().maps_memory() {
        return skip("the driver exports no memory, has no VK_EXT_queue_family_foreign, or maps no memory");
    }
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let table = memory.allocate(SIZE as u64, &Placement::Default).unwrap();
    let at = DeviceAddr::Card(table.segments().next().unwrap().addr);
    let (buf, via) = register(&*registrar, &*registrar.heap(None), &[7; 4096]).unwrap();
    let (write, before) = (Operation::write(HostSlice::from((buf.into_slice(), via)), at), owned(&live).0);
    drop(run(&mut *queues[0], vec![write]).unwrap());
    assert_eq!(owned(&live).0 - before, 2, "of the GPU's copy");
    drop((queues, memory, registrar, device));
    assert_eq!(left(&live), [0; 5]);
    checked(&messages);
}

#[test]
fn only_memory_that_no_other_device_takes_over_is_shared_by_families() {
    use crate::gpu::sharing;
    for (foreign, families, expected) in [
        (false, &[0][..], vk::SharingMode::EXCLUSIVE),
        (false, &[1, 0], vk::SharingMode::CONCURRENT),
        (true, &[0], vk::SharingMode::EXCLUSIVE),
        (true, &[1, 0, 2], vk::SharingMode::EXCLUSIVE),
    ] {
        assert!(sharing(foreign, families) == expected, "foreign: {foreign}, families {families:?}");
    }
}
