//! A card and its driver in normal operation and after faults.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, CardAddr, DeviceVa, Iova, Span};
use dmalane_card::regs::{self, BAR_MEMORY, BAR_REGISTERS};
use dmalane_card::{Card, CardQueue, CardTables, ChannelError, Descriptor, Error, Halt, Task};
use dmalane_dma::{AnonHeap, Heap, Mmio, SharedBuf};
use dmalane_iopt::{Format, PageTable, Tables, X86_64_4Level};
use dmalane_queue::{
    AddressPolicy, DeviceAddr, Direction, OpError, Operation, Queue, Refusal, Registered, Route, Shape, Split,
    StopReason, drain, run,
};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

type Bus = SoftBus;
type Mmu = PageTable<X86_64_4Level, DeviceVa, CardAddr, CardTables<Bus>>;

fn bus(threads: bool) -> Arc<Bus> {
    let host = SoftHost::new(HostConfig::default()).unwrap();
    let workers = if threads { Workers::PerChannel } else { Workers::Inline };
    Arc::new(SoftBus::new(host, CardConfig { ddr: 8 * MIB, hbm: 8 * MIB, channels: 2, workers }).unwrap())
}

fn card(bus: &Arc<Bus>, entries: usize) -> Card<Bus> {
    Card::open_with_rings(bus.clone(), &AnonHeap::new(), entries).unwrap()
}

fn buffer(bus: &Bus, len: usize, access: Access) -> (SharedBuf, Registered) {
    let mut buf = AnonHeap::new().allocate(len).unwrap();
    for (i, b) in buf.iter_mut().enumerate() {
        *b = (i ^ (i >> 8)) as u8;
    }
    let buf = buf.share();
    let via = Registered::new(bus, &buf, access).unwrap();
    (buf, via)
}

fn to_card(buf: SharedBuf, via: &Registered, at: DeviceAddr) -> Operation {
    Operation::write((buf.into_slice(), via.clone()), at)
}

/// Runs one transfer of a new buffer; the error when it fails.
fn copy(channel: &mut CardQueue<Bus>, bus: &Bus, direction: Direction, at: DeviceAddr) -> Result<(), OpError> {
    let (buf, via) = buffer(bus, 8192, Access::RW);
    match run(channel, Operation::copy(direction, (buf.into_slice(), via), at), LONG) {
        Ok(_) => Ok(()),
        Err(e) => Err(e.error),
    }
}

fn at(bits: u64) -> DeviceAddr {
    DeviceAddr::Card(CardAddr::new(bits))
}

#[test]
fn says_what_it_has() {
    let bus = bus(false);
    let card = card(&bus, 16);
    let layout = card.layout();
    assert_eq!((layout.ddr.first().bits(), layout.ddr.len()), (0, 8 * MIB));
    assert_eq!((layout.hbm.first().bits(), layout.hbm.len()), (1 << 38, 8 * MIB));
    assert_eq!(layout.hbm_half.bits(), (1 << 38) + 4 * MIB);
    let routes: Vec<_> = card.areas().into_iter().map(|a| (a.route, a.span.len())).collect();
    assert_eq!(routes, [(Route::Shared, 8 * MIB), (Route::Channel(0), 4 * MIB), (Route::Channel(1), 4 * MIB)]);
    assert_eq!((card.channels(), card.mmu_format()), (2, Some(X86_64_4Level::NAME)));
    let channel = card.queue(1).unwrap();
    assert_eq!((channel.limits().capacity, channel.limits().max_len), (16, 1 << 30));
    assert!(matches!(card.queue(1), Err(Error::ChannelTaken(1))));
    assert!(matches!(card.queue(2), Err(Error::NoChannel { index: 2, channels: 2 })));
    drop(channel);
    card.queue(1).unwrap();
    for entries in [0, 1, 3, 1 << 17] {
        let card = Card::open_with_rings(bus.clone(), &AnonHeap::new(), entries);
        assert!(matches!(card, Err(Error::RingSize { .. })));
    }
    for (channels, hbm) in [(0, 8 * MIB), (17, 8 * MIB), (2, 2 * MIB)] {
        let config = CardConfig { ddr: 8 * MIB, hbm, channels, workers: Workers::Inline };
        assert!(matches!(Bus::new(bus.host().clone(), config), Err(dmalane_sim::Error::BadConfig { .. })));
    }
}

#[test]
fn refuses_what_the_registration_does_not_permit() {
    let bus = bus(false);
    let card = card(&bus, 16);
    let mut channel = card.queue(0).unwrap();
    let (buf, via) = buffer(&bus, 4096, Access::READ);
    let refused = channel.submit(Operation::read((buf.into_slice(), via), at(0))).unwrap_err();
    assert_eq!(refused.reason, Refusal::NotPermitted);
    let (_, other) = buffer(&bus, 4096, Access::RW);
    let part = refused.operation.into_slice().unwrap();
    let refused = channel.submit(Operation::read((part, other), at(0))).unwrap_err();
    assert_eq!(refused.reason, Refusal::NotRegistered);
    let refused = channel.submit(Operation::read(refused.operation.into_slice().unwrap(), at(0))).unwrap_err();
    assert_eq!(refused.reason, Refusal::NotRegistered, "not at all");
    // Registered, but with the bus of another card: its IOVA would be somebody else's memory here.
    let (buf, via) = buffer(&self::bus(false), 4096, Access::RW);
    assert_eq!(channel.submit(to_card(buf, &via, at(0))).unwrap_err().reason, Refusal::NotRegistered);
    let (buf, via) = buffer(&bus, 4096, Access::RW);
    let refused = channel.submit(to_card(buf, &via, at(u64::MAX - 4094))).unwrap_err();
    assert_eq!(refused.reason, Refusal::PastTheTop);
    assert_eq!(channel.in_flight(), 0);
}

#[test]
fn a_tiny_ring_goes_round_many_times() {
    for workers in [false, true] {
        let bus = bus(workers);
        let mut channel = card(&bus, 2).queue(0).unwrap();
        let (buf, via) = buffer(&bus, 1000 * 8, Access::RW);
        let (mut rest, mut done, mut ended) = (buf.into_slice(), Vec::new(), 0);
        for i in 0..1000u64 {
            let (part, more) = rest.split_at(8).unwrap();
            rest = more;
            let mut operation = Operation::write((part, via.clone()), at(i * 8));
            loop {
                match channel.submit(operation) {
                    Ok(ticket) => break assert_eq!(ticket.number(), i),
                    Err(refused) => operation = refused.operation,
                }
                ended += channel.wait(&mut done, LONG);
            }
        }
        ended += drain(&mut channel, LONG).len();
        assert_eq!(ended, 1000);
        let mut there = vec![0; 8000];
        bus.memory().read(CardAddr::new(0), &mut there).unwrap();
        assert!(there.iter().enumerate().all(|(i, b)| *b == (i ^ (i >> 8)) as u8));
    }
}

#[test]
fn errors_say_where() {
    let bus = bus(false);
    let card = card(&bus, 16);
    let mut channel = card.queue(0).unwrap();
    let outside = 8 * MIB - 4096;
    let e = copy(&mut channel, &bus, Direction::FromHost, at(outside)).unwrap_err();
    assert_eq!(e, OpError::NoCardMemory(CardAddr::new(outside)));
    let va = DeviceVa::new(0x5000);
    let e = copy(&mut channel, &bus, Direction::FromHost, DeviceAddr::Va(va)).unwrap_err();
    assert_eq!(e, OpError::MmuFault(va), "the MMU is off");
    copy(&mut channel, &bus, Direction::FromHost, at(0)).unwrap();
    assert_eq!(bus.host().stats().faults, 0);
}

/// A descriptor written past the driver: the card's word for it is in the completion.
#[test]
fn the_iommu_stops_a_descriptor_at_the_byte() {
    let bus = bus(false);
    let (ring, ring_map) = buffer(&bus, 8192, Access::RW);
    let (_data, data_map) = buffer(&bus, 8192, Access::READ);
    let end = data_map.mapping().span().last().bits() + 1;
    let set = |r, v| bus.write32(BAR_REGISTERS, regs::channel(0, r), v).unwrap();
    let base = ring_map.mapping().span().first().bits() as u32;
    set(regs::CH_RING_LOG2, 6);
    set(regs::CH_RING, base);
    set(regs::CH_COMPLETIONS, base + 4096);
    set(regs::CH_CONTROL, 1);
    while bus.progress() {}
    let descriptor = |slot: usize, direction, host| {
        let task = Task::Copy { direction, card: at(0), host: Iova::new(host), len: 8192 };
        let d = Descriptor { cookie: 77, ..task.into() };
        for (i, word) in d.encode().into_iter().enumerate() {
            ring.as_volatile_slice().store_u64(slot * 32 + i * 8, word).unwrap();
        }
    };
    descriptor(0, Direction::FromHost, end - 4096); // runs off the end of what is mapped
    descriptor(1, Direction::ToHost, end - 8192); // may not be written
    set(regs::CH_DOORBELL, 2);
    while bus.progress() {}
    let completion = |slot: usize| [0, 8].map(|i| ring.as_volatile_slice().load_u64(4096 + slot * 16 + i).unwrap());
    assert_eq!(completion(0), [end, 77 | 7 << 32 | 1 << 40]);
    assert_eq!(completion(1), [end - 8192, 77 | 8 << 32 | 2 << 40]);
    assert_eq!(bus.host().stats().faults, 2, "one not mapped, one not permitted");
    assert_eq!(bus.read32(0, regs::channel(0, regs::CH_FAILED)).unwrap(), 2);

    // A doorbell beyond the ring halts the channel, and so does a ring that goes away.
    set(regs::CH_DOORBELL, 2 + 65);
    while bus.progress() {}
    let get = |r| bus.read32(BAR_REGISTERS, regs::channel(0, r)).unwrap();
    assert_eq!((get(regs::CH_STATUS), get(regs::CH_ERROR)), (regs::STATUS_HALTED, 2));
    set(regs::CH_CONTROL, 0);
    while bus.progress() {}
    assert_eq!((get(regs::CH_STATUS), get(regs::CH_ERROR)), (0, 0));
    set(regs::CH_CONTROL, 1);
    while bus.progress() {}
    drop(ring_map);
    set(regs::CH_DOORBELL, 1);
    while bus.progress() {}
    assert_eq!((get(regs::CH_STATUS), get(regs::CH_ERROR)), (regs::STATUS_HALTED, 3));
    assert_eq!(get(regs::CH_ERROR_IOVA), base);
    bus.write32(BAR_REGISTERS, regs::CONTROL, 1).unwrap();
    while bus.progress() {}
    assert_eq!((get(regs::CH_STATUS), bus.read32(BAR_REGISTERS, regs::CONTROL).unwrap()), (0, 0));
}

#[test]
fn a_halted_channel_stops_and_a_new_one_works() {
    for workers in [false, true] {
        let bus = bus(workers);
        let card = card(&bus, 16);
        let mut channel = card.queue(0).unwrap();
        copy(&mut channel, &bus, Direction::FromHost, at(0)).unwrap();
        // Somebody else writes the doorbell: the card halts.
        bus.write32(BAR_REGISTERS, regs::channel(0, regs::CH_DOORBELL), 1000).unwrap();
        while bus.read32(BAR_REGISTERS, regs::channel(0, regs::CH_STATUS)).unwrap() != regs::STATUS_HALTED {
            bus.progress();
        }
        let (buf, via) = buffer(&bus, 4096, Access::RW);
        let ticket = channel.submit(to_card(buf, &via, at(0))).unwrap();
        let done = drain(&mut channel, LONG);
        assert_eq!((done.len(), done[0].ticket), (1, ticket));
        let Err(OpError::Stopped(StopReason::Device(why))) = &done[0].result else { panic!("{:?}", done[0].result) };
        let halt = why.downcast_ref();
        assert!(matches!(halt, Some(ChannelError::Halted { halt: Halt::BadDoorbell, .. })), "{why}");
        let (buf, via) = buffer(&bus, 4096, Access::RW);
        assert!(matches!(channel.submit(to_card(buf, &via, at(0))).unwrap_err().reason, Refusal::Stopped(_)));
        drop(channel);
        let mut channel = card.queue(0).unwrap();
        copy(&mut channel, &bus, Direction::ToHost, at(0)).unwrap();
        assert_eq!(card.quarantined(), 0);
    }
}

/// Also who only polls learns of a halt.
#[test]
fn a_halt_is_seen_by_polling() {
    let bus = bus(false);
    let mut channel = card(&bus, 16).queue(0).unwrap();
    bus.write32(BAR_REGISTERS, regs::channel(0, regs::CH_DOORBELL), 1000).unwrap();
    while bus.progress() {}
    let (buf, via) = buffer(&bus, 4096, Access::RW);
    let _ticket = channel.submit(to_card(buf, &via, at(0))).unwrap();
    let mut done = Vec::new();
    for _ in 0..1000 {
        channel.poll(&mut done);
    }
    let results: Vec<_> = done.iter().map(|c| &c.result).collect();
    assert!(matches!(results[..], [Err(OpError::Stopped(StopReason::Device(_)))]), "{results:?}");
}

/// Operations in flight when a channel is stopped end as stopped, though the card may have executed them by then, and a
/// restart that comes too early loses none.
#[test]
fn what_is_in_flight_at_a_stop_ends_as_stopped() {
    let bus = bus(false);
    let mut channel = card(&bus, 16).queue(0).unwrap();
    for _ in 0..3 {
        let (buf, via) = buffer(&bus, 4096, Access::RW);
        let _ticket = channel.submit(to_card(buf, &via, at(0))).unwrap();
    }
    channel.flush();
    while bus.progress() {}
    let reason = StopReason::Requested("enough".into());
    channel.stop(reason.clone());
    assert!(!channel.restart(), "three have not been collected");
    let done = drain(&mut channel, LONG);
    assert_eq!(done.len(), 3);
    assert!(done.iter().all(|c| c.result == Err(OpError::Stopped(reason.clone()))), "{done:?}");
    assert!(channel.restart());
    copy(&mut channel, &bus, Direction::FromHost, at(0)).unwrap();
}

/// A list takes a place of the ring for each fragment: all of them at most.
#[test]
fn a_list_takes_a_place_for_each_fragment() {
    let bus = bus(false);
    let mut channel = card(&bus, 4).queue(0).unwrap();
    let list = |fragments: u64| {
        let (buf, via) = buffer(&bus, 4096, Access::RW);
        let len = |i| if i == 0 { 4096 - 100 * (fragments - 1) } else { 100 };
        let device = (0..fragments).map(|i| (at(8192 * i), len(i))).collect();
        Operation::gather(Direction::FromHost, vec![(buf.into_slice(), via).into()], device)
    };
    assert_eq!(channel.submit(list(5)).unwrap_err().reason, Refusal::TooManyParts { parts: 5, max: 4 });
    for fragments in [2, 4] {
        let _ticket = channel.submit(list(fragments)).unwrap();
        assert_eq!(channel.room() as u64, 4 - fragments);
        assert!(format!("{channel:?}").contains("in_flight: 1"), "{channel:?}");
        assert_eq!(channel.submit(list(5 - fragments)).unwrap_err().reason, Refusal::Full);
        assert_eq!(drain(&mut channel, LONG)[0].result, Ok(()));
    }
}

/// Where rows follow each other, a fault says how much was done before; where they overlap, nobody knows.
#[test]
fn a_fault_within_rows_says_what_is_known_to_be_done() {
    let bus = bus(false);
    let card = card(&bus, 16);
    let mut channel = card.queue(0).unwrap();
    let mut mmu = Mmu::new(card.tables(Span::new(CardAddr::new(7 * MIB), MIB).unwrap()).unwrap()).unwrap();
    card.set_mmu_root(mmu.root()).unwrap();
    let va = 0x7000_0000;
    mmu.map(DeviceVa::new(va), CardAddr::new(MIB), 8192, Access::RW).unwrap();
    for (device_pitch, bytes) in [(8192, 8192), (4096, 0)] {
        let shape = Shape { row: 8192, rows: 3, host_pitch: 0, device_pitch };
        let fill = Operation::fill(DeviceAddr::Va(DeviceVa::new(va)), 3 * 8192, 7).shaped(shape);
        let _ticket = channel.submit(fill).unwrap();
        let done = drain(&mut channel, LONG);
        let fault = Err(OpError::MmuFault(DeviceVa::new(va + 8192)));
        assert_eq!((&done[0].result, done[0].bytes), (&fault, bytes), "pitch {device_pitch}");
    }
}

#[test]
fn the_mmu_walks_what_the_page_table_wrote() {
    for workers in [false, true] {
        let bus = bus(workers);
        let card = card(&bus, 16);
        let mut channel = card.queue(0).unwrap();
        let mut mmu = Mmu::new(card.tables(Span::new(CardAddr::new(7 * MIB), MIB).unwrap()).unwrap()).unwrap();
        card.set_mmu_root(mmu.root()).unwrap();
        let va = DeviceVa::new(0x7000_0000);
        let far = DeviceAddr::Va(va);
        // Two pages that are not neighbours in card memory.
        mmu.map(va, CardAddr::new(MIB), 4096, Access::RW).unwrap();
        mmu.map(DeviceVa::new(0x7000_1000), CardAddr::new(0x5000), 4096, Access::RW).unwrap();
        copy(&mut channel, &bus, Direction::FromHost, far).unwrap();
        let mut there = [0; 2];
        bus.memory().read(CardAddr::new(MIB + 0xff), &mut there).unwrap();
        assert_eq!(there, [0xff, 0x01]);
        bus.memory().read(CardAddr::new(0x50ff), &mut there).unwrap();
        assert_eq!(there, [0xff ^ 0x10, 0x11], "the second page of the buffer");

        // Unbound and invalidated: gone, though it was in the TLB a moment ago.
        let flush = mmu.unmap(Span::new(va, 8192).unwrap()).unwrap();
        card.invalidate_mmu().unwrap();
        mmu.free_tables(flush);
        assert_eq!(copy(&mut channel, &bus, Direction::ToHost, far), Err(OpError::MmuFault(va)));

        // Read-only: may be copied to the host, not overwritten.
        mmu.map(va, CardAddr::new(MIB), 8192, Access::READ).unwrap();
        assert_eq!(copy(&mut channel, &bus, Direction::FromHost, far), Err(OpError::MmuFault(va)));
        copy(&mut channel, &bus, Direction::ToHost, far).unwrap();

        // The second page missing: the fault names it.
        let flush = mmu.unmap(Span::new(DeviceVa::new(0x7000_1000), 4096).unwrap()).unwrap();
        card.invalidate_mmu().unwrap();
        mmu.free_tables(flush);
        let fault = OpError::MmuFault(DeviceVa::new(0x7000_1000));
        assert_eq!(copy(&mut channel, &bus, Direction::ToHost, far), Err(fault));

        // A page beyond the card's memory.
        let away = DeviceVa::new(0x9000_0000);
        mmu.map(away, CardAddr::new(64 * MIB), 8192, Access::RW).unwrap();
        let e = copy(&mut channel, &bus, Direction::ToHost, DeviceAddr::Va(away));
        assert_eq!(e, Err(OpError::NoCardMemory(CardAddr::new(64 * MIB))));
        assert!(mmu.tables().error().is_none());
    }
}

#[test]
fn invalidation_waits_for_copies_by_old_translations() {
    let bus = bus(true);
    let card = card(&bus, 16);
    let mut channel = card.queue(0).unwrap();
    let mut mmu = Mmu::new(card.tables(Span::new(CardAddr::new(7 * MIB), MIB).unwrap()).unwrap()).unwrap();
    card.set_mmu_root(mmu.root()).unwrap();
    let va = DeviceVa::new(0x4000_0000);
    for round in 0..20u8 {
        mmu.map(va, CardAddr::new(0), 4 * MIB, Access::RW).unwrap();
        let mut buf = AnonHeap::new().allocate(4 << 20).unwrap();
        buf.fill(round);
        let buf = buf.share();
        let via = Registered::new(&*bus, &buf, Access::READ).unwrap();
        let _ticket = channel.submit(to_card(buf, &via, DeviceAddr::Va(va))).unwrap();
        channel.flush();
        std::thread::sleep(Duration::from_micros(u64::from(round) * 40));
        let flush = mmu.unmap(Span::new(va, 4 * MIB).unwrap()).unwrap();
        card.invalidate_mmu().unwrap();
        mmu.free_tables(flush);
        // From here on nothing of this round may land.
        bus.memory().write(CardAddr::new(0), &vec![0xee; 4 << 20]).unwrap();
        assert_eq!(drain(&mut channel, LONG).len(), 1);
        let mut there = vec![0; 4 << 20];
        bus.memory().read(CardAddr::new(0), &mut there).unwrap();
        assert!(there.iter().all(|b| *b == 0xee));
    }
}

#[test]
fn table_memory_ends_and_comes_back() {
    let bus = bus(false);
    let card = card(&bus, 16);
    let span = |first, len| Span::new(CardAddr::new(first), len).unwrap();
    for bad in [span(8 * MIB - 4096, 8192), span(16 * MIB, 4096), span(1, 8190)] {
        assert!(matches!(card.tables(bad), Err(Error::NoTables(_))), "{bad}");
    }
    bus.memory().write(CardAddr::new(4096), &[0xff; 3 * 4096]).unwrap();
    let mut tables = card.tables(span(4096, 3 * 4096)).unwrap();
    assert!(tables.reserve(2));
    let mut there = [0; 3 * 4096];
    bus.memory().read(CardAddr::new(4096), &mut there).unwrap();
    assert!(there[..8192] == [0; 8192] && there[8192..] == [0xff; 4096], "two are on the card");
    assert!(tables.reserve(3) && !tables.reserve(4));
    let all: Vec<_> = std::iter::from_fn(|| tables.allocate()).collect();
    assert_eq!((all.len(), tables.in_use(), tables.limit()), (3, 3, 3));
    tables.store(all[1], 511, 0x1234);
    let add = |words: &mut [u64]| {
        words.iter_mut().for_each(|word| *word += 9);
        words.len()
    };
    assert_eq!(tables.edit(all[1], 1..5, add), 4);
    let word = |a: CardAddr, i: u64| bus.read32(BAR_MEMORY, a.bits() + 8 * i).unwrap();
    assert_eq!((word(all[1], 511), word(all[1], 0), word(all[1], 4), word(all[1], 5)), (0x1234, 0, 9, 0));
    assert_eq!((tables.load(all[1], 511), tables.load(all[1], 4)), (0x1234, 9));
    tables.free(all[1]);
    assert!(tables.reserve(1) && !tables.reserve(2));
    assert_eq!(tables.allocate(), Some(all[1]));
    assert_eq!((word(all[1], 511), word(all[1], 4)), (0, 0), "zeroed again");
    // A table that is mapped over several times has every entry where the walker looks.
    let mut mmu = PageTable::<X86_64_4Level, DeviceVa, CardAddr, _>::new(card.tables(span(MIB, MIB)).unwrap()).unwrap();
    mmu.map(DeviceVa::new(0), CardAddr::new(0), 3 * MIB, Access::RW).unwrap();
    let e = mmu.map(DeviceVa::new(1 << 40), CardAddr::new(0x1000), 1 << 40, Access::RW);
    assert!(e.is_err(), "too many tables for one MiB");
    mmu.map(DeviceVa::new(1 << 40), CardAddr::new(0), 4096, Access::RW).unwrap();
}

#[test]
fn a_drop_in_the_middle_waits() {
    for workers in [false, true] {
        let bus = bus(workers);
        let card = card(&bus, 16);
        for _ in 0..3 {
            let mut channel = card.queue(0).unwrap();
            for _ in 0..8 {
                let (buf, via) = buffer(&bus, 4 << 20, Access::RW);
                let _ticket = channel.submit(to_card(buf, &via, at(0))).unwrap();
            }
            channel.flush();
            drop(channel);
            assert_eq!(bus.host().stats().pinned_frames, 4, "only the rings are pinned");
        }
        assert_eq!(card.quarantined(), 0);
    }
}

#[test]
fn hbm_halves_go_their_own_ways() {
    let bus = bus(false);
    let card = card(&bus, 16);
    let channels = vec![card.queue(0).unwrap(), card.queue(1).unwrap()];
    let mut split = Split::new(channels, Box::new(AddressPolicy::new(card.areas())));
    let (buf, via) = buffer(&bus, 2 << 20, Access::RW);
    let start = card.layout().hbm_half.bits() - (1 << 19);
    run(&mut split, to_card(buf, &via, at(start)), LONG).unwrap();
    let moved = |i| bus.read32(BAR_REGISTERS, regs::channel(i, regs::CH_BYTES_H2C)).unwrap();
    assert_eq!((moved(0), moved(1)), (1 << 19, 3 << 19));
    assert_eq!(bus.memory().touched(), (0, 4 * MIB), "the two blocks around the boundary");
}

#[test]
fn waits_no_longer_than_told_and_sleeps_through_long_copies() {
    let bus = bus(true);
    let mut channel = card(&bus, 16).queue(0).unwrap();
    let start = Instant::now();
    assert_eq!(channel.wait(&mut Vec::new(), Duration::from_secs(100)), 0, "nothing is in flight");
    assert!(start.elapsed() < LONG);
    for _ in 0..50 {
        let (buf, via) = buffer(&bus, 4 << 20, Access::RW);
        let _ticket = channel.submit(to_card(buf, &via, at(0))).unwrap();
        let mut done = Vec::new();
        let start = Instant::now();
        while channel.wait(&mut done, Duration::from_micros(100)) == 0 {
            assert!(start.elapsed() < LONG);
        }
        assert_eq!(done[0].result, Ok(()));
    }
}

#[test]
fn registers_that_are_not_there() {
    let bus = bus(false);
    for (bar, offset) in [(0, 1), (0, 2), (0, 0x44), (0, 0x800), (0, 0x1200), (0, 0x1060), (0, u64::MAX), (1, 0)] {
        assert!(bus.read32(bar, offset).is_err(), "BAR {bar} {offset:#x}");
        assert!(bus.write32(bar, offset, 1).is_err(), "BAR {bar} {offset:#x}");
    }
    assert!(bus.read32(BAR_MEMORY, 8 * MIB).is_err() && bus.read32(BAR_MEMORY, 2).is_err());
    assert!(bus.write_bytes(BAR_REGISTERS, 0, &[0; 4]).is_err());
    assert!(bus.write_bytes(BAR_MEMORY, 8 * MIB - 4, &[0; 8]).is_err());
    bus.write32(BAR_REGISTERS, regs::ID, 5).unwrap();
    assert_eq!(bus.read32(BAR_REGISTERS, regs::ID).unwrap(), regs::ID_VALUE);
    bus.write32(BAR_MEMORY, 1 << 38, 0x0403_0201).unwrap();
    assert_eq!(bus.read32(BAR_MEMORY, 1 << 38).unwrap(), 0x0403_0201);
}
