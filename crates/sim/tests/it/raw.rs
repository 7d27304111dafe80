//! The card by its registers and rings alone, as the specification of them says.

use std::sync::Arc;

use dmalane_addr::{Access, CardAddr, DeviceVa, Iova, Span};
use dmalane_card::regs::{self, BAR_REGISTERS, MAX_LEN};
use dmalane_card::{Card, CardTables, Descriptor, Status, Task};
use dmalane_dma::{AnonHeap, Heap, Mmio, SharedBuf};
use dmalane_iopt::{PageTable, X86_64_4Level};
use dmalane_queue::{DeviceAddr, Direction, Operation, Registered, run};
use dmalane_sim::{CardConfig, CardMemory, DevicePort, HostConfig, SoftBus, SoftCard, SoftHost, Workers};

const MIB: u64 = 1 << 20;
const ENTRIES: u32 = 16;
const COMPLETIONS: usize = 4096;

fn bus() -> Arc<SoftBus> {
    let host = SoftHost::new(HostConfig::default()).unwrap();
    let config = CardConfig { ddr: 8 * MIB, hbm: 8 * MIB, channels: 1, workers: Workers::Inline };
    Arc::new(SoftBus::new(host, config).unwrap())
}

/// One channel, started on a ring of its own.
struct Raw {
    bus: Arc<SoftBus>,
    ring: SharedBuf,
    data: SharedBuf,
    registered: [Registered; 2],
    written: u32,
}

impl Raw {
    fn new() -> Self {
        Self::with_data(64 << 10)
    }

    fn with_data(len: usize) -> Self {
        let bus = bus();
        let buffer = |len| {
            let buf = AnonHeap::new().allocate(len).unwrap().share();
            let via = Registered::new(&*bus, &buf, Access::RW).unwrap();
            (buf, via)
        };
        let ((ring, ring_map), (data, data_map)) = (buffer(8192), buffer(len));
        let this = Self { bus, ring, data, registered: [ring_map, data_map], written: 0 };
        let base = this.registered[0].mapping().span().first().bits() as u32;
        this.set(regs::CH_RING_LOG2, ENTRIES.ilog2());
        this.set(regs::CH_RING, base);
        this.set(regs::CH_COMPLETIONS, base + COMPLETIONS as u32);
        this.set(regs::CH_CONTROL, 1);
        this.work();
        this
    }

    fn set(&self, register: u64, value: u32) {
        self.bus.write32(BAR_REGISTERS, regs::channel(0, register), value).unwrap();
    }

    fn get(&self, register: u64) -> u32 {
        self.bus.read32(BAR_REGISTERS, regs::channel(0, register)).unwrap()
    }

    fn work(&self) {
        while self.bus.progress() {}
    }

    fn completions(&self) -> u64 {
        self.registered[0].mapping().span().first().bits() + COMPLETIONS as u64
    }

    /// Stops the channel and starts it with its completions there.
    fn restart(&mut self, completions: u64) {
        self.set(regs::CH_CONTROL, 0);
        self.work();
        self.set(regs::CH_COMPLETIONS, completions as u32);
        self.set(regs::CH_COMPLETIONS + 4, (completions >> 32) as u32);
        self.set(regs::CH_CONTROL, 1);
        self.work();
        self.written = 0;
    }

    fn data_at(&self, offset: u64) -> Iova {
        Iova::new(self.registered[1].mapping().span().first().bits() + offset)
    }

    fn write(&mut self, words: [u64; 4]) {
        let slot = (self.written % ENTRIES) as usize;
        for (i, word) in words.into_iter().enumerate() {
            self.ring.as_volatile_slice().store_u64(slot * 32 + i * 8, word).unwrap();
        }
        self.written += 1;
    }

    fn push(&mut self, task: Task, chained: bool) {
        let cookie = self.written;
        self.write(Descriptor { chained, cookie, ..task.into() }.encode());
    }

    /// Rings the doorbell for all that was written and gives the status of the last `count`.
    fn statuses(&self, count: u32) -> Vec<u8> {
        self.set(regs::CH_DOORBELL, self.written);
        self.work();
        let status = |number: u32| {
            let slot = (number % ENTRIES) as usize;
            (self.ring.as_volatile_slice().load_u64(COMPLETIONS + slot * 16 + 8).unwrap() >> 32) as u8
        };
        (self.written - count..self.written).map(status).collect()
    }

    fn card_bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.bus.memory().read(CardAddr::new(at), &mut bytes).unwrap();
        bytes
    }
}

fn at(bits: u64) -> DeviceAddr {
    DeviceAddr::Card(CardAddr::new(bits))
}

#[test]
fn a_doorbell_that_goes_back_halts_the_channel() {
    for back in [1, 2, 3] {
        let mut raw = Raw::new();
        for _ in 0..3 {
            raw.push(Task::Fence, false);
        }
        assert_eq!(raw.statuses(3), [Status::Ok.code(); 3]);
        assert_eq!(raw.get(regs::CH_HEAD), 3);
        raw.set(regs::CH_DOORBELL, 3 - back);
        raw.work();
        let halted = (raw.get(regs::CH_STATUS), raw.get(regs::CH_ERROR));
        assert_eq!(halted, (regs::STATUS_HALTED, 2), "back by {back}");
        assert_eq!(raw.get(regs::CH_HEAD), 3, "nothing is done again");
    }
}

#[test]
fn a_ring_that_is_not_a_page_or_beyond_the_top_does_not_start() {
    let top = u64::MAX << 12;
    // Entries are of 32 and of 16 bytes: 256 of them are two pages and one.
    let (log2, last) = (8, top - 4096);
    let (ring, completions) = (regs::CH_RING, regs::CH_COMPLETIONS);
    for (register, bad) in [ring, completions].into_iter().flat_map(|r| [8, 4095, top].map(|bad| (r, bad))) {
        let bus = bus();
        let set = |register, value| bus.write32(BAR_REGISTERS, regs::channel(0, register), value).unwrap();
        let start = |at: [u64; 2]| {
            set(regs::CH_CONTROL, 0);
            while bus.progress() {}
            set(regs::CH_RING_LOG2, log2);
            for (register, at) in [ring, completions].into_iter().zip(at) {
                set(register, at as u32);
                set(register + 4, (at >> 32) as u32);
            }
            set(regs::CH_CONTROL, 1);
            while bus.progress() {}
            let get = |register| bus.read32(BAR_REGISTERS, regs::channel(0, register)).unwrap();
            (get(regs::CH_STATUS), get(regs::CH_ERROR))
        };
        let halted = (regs::STATUS_HALTED, 1);
        let at = [ring, completions].map(|r| if r == register { bad } else { 4096 });
        assert_eq!(start(at), halted, "{at:x?}");
        assert_eq!(start([last - 4096, last]), (regs::STATUS_RUNNING, 0), "below the top");
    }
}

/// A request to cancel names an operation by its number, which begins anew when the channel does.
#[test]
fn a_request_to_cancel_ends_with_the_channel() {
    for is_stopped in [false, true] {
        let mut raw = Raw::new();
        raw.set(regs::CH_CANCEL, 0);
        raw.set(regs::CH_CANCEL + 4, 1);
        if is_stopped {
            raw.set(regs::CH_CONTROL, 0);
            raw.work();
            raw.set(regs::CH_CONTROL, 1);
            raw.work();
        }
        raw.push(Task::Fill { pattern: 7, card: at(0), len: 4096 }, false);
        let status = if is_stopped { Status::Ok } else { Status::Cancelled };
        assert_eq!(raw.statuses(1), [status.code()]);
    }
}

/// The cost of the steps of a new card that does this, with its memory present or not.
fn costs(is_present: bool, tasks: &[Task]) -> Vec<u64> {
    let host = SoftHost::new(HostConfig::default()).unwrap();
    let memory = CardMemory::new(8 * MIB, 8 * MIB).unwrap();
    if is_present {
        memory.populate(memory.ddr()).unwrap();
    }
    let card: SoftCard<DevicePort> = SoftCard::new(memory, (1, Workers::Inline), || host.port(), |_| ()).unwrap();
    let ring = AnonHeap::new().allocate(8192).unwrap().share();
    let via = Registered::new(&host, &ring, Access::RW).unwrap();
    let base = via.mapping().span().first().bits() as u32;
    let set = |register, value| card.write32(BAR_REGISTERS, regs::channel(0, register), value).unwrap();
    set(regs::CH_RING_LOG2, ENTRIES.ilog2());
    set(regs::CH_RING, base);
    set(regs::CH_COMPLETIONS, base + COMPLETIONS as u32);
    set(regs::CH_CONTROL, 1);
    card.step(0, u64::MAX).expect("it starts");
    let encode = |task: &Task| {
        // A shape is for the task behind it.
        Descriptor { chained: matches!(task, Task::Shape { .. }), ..(*task).into() }.encode()
    };
    for (i, word) in tasks.iter().flat_map(encode).enumerate() {
        ring.as_volatile_slice().store_u64(8 * i, word).unwrap();
    }
    set(regs::CH_DOORBELL, tasks.len() as u32);
    std::iter::from_fn(|| card.step(0, u64::MAX)).map(|step| step.cost).collect()
}

#[test]
fn a_step_costs_a_mebibyte_at_most() {
    let costs = costs(true, &[Task::Fill { pattern: 7, card: at(0), len: 4 * MIB as u32 }]);
    assert!(costs.len() >= 4 && costs.iter().all(|cost| *cost < 2 * MIB), "{costs:?}");
}

#[test]
fn first_touches_and_short_rows_cost_more_than_their_bytes() {
    let fill = |len| Task::Fill { pattern: 7, card: at(0), len };
    let total = |is_present, tasks: &[Task]| costs(is_present, tasks).into_iter().sum::<u64>();
    let one = total(true, &[fill(1)]);
    assert_eq!(total(false, &[fill(1)]) - one, 4 * 2 * MIB, "a block was made present");
    // Too few for a look at the clock.
    let rows = Task::Shape { host_pitch: 0, card_pitch: 64, rows: 15 };
    assert_eq!(total(true, &[rows, fill(1)]) - one, 14 * 512);
}

#[test]
fn rows_are_as_long_as_the_longest_operation_in_all() {
    let mut raw = Raw::new();
    for (rows, status) in [(2, Status::NoCardMemory), (3, Status::BadShape)] {
        raw.push(Task::Shape { host_pitch: 0, card_pitch: 0, rows }, true);
        raw.push(Task::Fill { pattern: 7, card: at(0), len: MAX_LEN / 2 }, false);
        assert_eq!(raw.statuses(1), [status.code()], "{rows} rows");
    }
}

/// An operation that has failed or that has a shape, of which the rest did not come before the channel was stopped.
#[test]
fn an_operation_ends_with_the_channel() {
    let outside = Task::Fill { pattern: 7, card: at(8 * MIB), len: 16 };
    let shape = Task::Shape { host_pitch: 0, card_pitch: 64, rows: 2 };
    for (task, status) in [(outside, Status::NoCardMemory), (shape, Status::Ok)] {
        let mut raw = Raw::new();
        raw.push(task, true);
        assert_eq!(raw.statuses(1), [status.code()]);
        raw.restart(raw.completions());
        raw.push(Task::Fill { pattern: !0, card: at(0), len: 16 }, false);
        assert_eq!(raw.statuses(1), [Status::Ok.code()], "after {task:?}");
        assert_eq!(raw.card_bytes(0, 128), [vec![0xff; 16], vec![0; 112]].concat(), "after {task:?}");
    }
}

#[test]
fn completions_that_could_not_be_written_are_not_for_the_next_ring() {
    let mut raw = Raw::new();
    let nowhere = 1 << 40;
    raw.restart(nowhere);
    raw.push(Task::Fill { pattern: 7, card: at(8 * MIB), len: 16 }, false);
    raw.set(regs::CH_DOORBELL, raw.written);
    raw.work();
    assert_eq!((raw.get(regs::CH_STATUS), raw.get(regs::CH_ERROR)), (regs::STATUS_HALTED, 4));
    raw.restart(raw.completions());
    raw.push(Task::Fill { pattern: 7, card: at(0), len: 16 }, false);
    assert_eq!(raw.statuses(1), [Status::Ok.code()]);
    assert_eq!(raw.ring.as_volatile_slice().load_u64(COMPLETIONS + 16 + 8), Some(0), "one has ended");
}

/// Rows whose last byte has no address, on one side alone.
#[test]
fn rows_beyond_the_top_move_nothing() {
    let (from_host, to_host) = (Direction::FromHost, Direction::ToHost);
    // Four rows of 32 bytes: the last byte is 415 behind the first.
    let shape = Task::Shape { host_pitch: 128, card_pitch: 128, rows: 4 };
    let (high, fits) = (u64::MAX - 414, u64::MAX - 415);
    let mut raw = Raw::new();
    let low = raw.data_at(0);
    let tasks = |high: u64| {
        [
            Task::Copy { direction: from_host, card: at(high), host: low, len: 32 },
            Task::Copy { direction: to_host, card: at(high), host: low, len: 32 },
            Task::Copy { direction: from_host, card: at(0), host: Iova::new(high), len: 32 },
            Task::Copy { direction: to_host, card: at(0), host: Iova::new(high), len: 32 },
            Task::Within { from: at(high), to: at(0), len: 32 },
            Task::Within { from: at(0), to: at(high), len: 32 },
        ]
    };
    for (task, other) in tasks(high).into_iter().zip(tasks(fits)) {
        raw.push(shape, true);
        raw.push(task, false);
        assert_eq!(raw.statuses(1), [Status::Wraps.code()], "{task:?}");
        raw.push(shape, true);
        raw.push(other, false);
        let status = raw.statuses(1);
        assert!([Status::NoCardMemory, Status::HostNotMapped].map(Status::code).contains(&status[0]), "{other:?}");
        assert_eq!(raw.get(regs::CH_STATUS), regs::STATUS_RUNNING);
    }
}

#[test]
fn a_full_ring_is_done_and_one_more_halts() {
    let mut raw = Raw::new();
    for _ in 0..ENTRIES {
        raw.push(Task::Fence, false);
    }
    assert_eq!(raw.statuses(ENTRIES), vec![Status::Ok.code(); ENTRIES as usize]);
    raw.set(regs::CH_DOORBELL, 2 * ENTRIES + 1);
    raw.work();
    assert_eq!((raw.get(regs::CH_STATUS), raw.get(regs::CH_ERROR)), (regs::STATUS_HALTED, 2));
}

/// An operation that runs off the end of card memory fails before its first byte, on either side.
/// A step ends after 1 MiB, also where operations fail after all but the last of their bytes.
#[test]
fn failed_work_costs_what_it_would_have() {
    let mut raw = Raw::with_data(MIB as usize);
    raw.data.as_volatile_slice().sub(MIB as usize - 1, 1).unwrap().write(&[1]);
    raw.card_bytes(0, 1); // no first touches in the steps
    let (card, len) = (at(0), MIB as u32);
    let beyond = Task::Copy { direction: Direction::FromHost, host: raw.data_at(4096), card, len };
    let differs = Task::Compare { host: raw.data_at(0), card, len };
    for (task, chained, status) in [
        (beyond, false, Status::HostNotMapped),
        (beyond, true, Status::HostNotMapped),
        (differs, false, Status::Differs),
    ] {
        // A chained copy is alone in its operation: a fence ends it.
        let pushed = |raw: &mut Raw| {
            raw.push(task, chained);
            if chained {
                raw.push(Task::Fence, false);
            }
        };
        let operations = if chained { ENTRIES / 2 } else { ENTRIES };
        (0..operations).for_each(|_| pushed(&mut raw));
        raw.set(regs::CH_DOORBELL, raw.written);
        let steps = (0..).take_while(|_| raw.bus.progress()).count();
        assert!(steps >= operations as usize - 1, "{operations} operations of 1 MiB in {steps} steps");
        assert_eq!(raw.statuses(ENTRIES)[0], status.code());
    }
}

#[test]
fn a_range_that_ends_outside_moves_nothing() {
    let end = 8 * MIB;
    let mut raw = Raw::new();
    raw.data.as_volatile_slice().fill(0x77);
    let host = raw.data_at(0);
    let (from_host, to_host) = (Direction::FromHost, Direction::ToHost);
    let tasks = [
        Task::Copy { direction: from_host, card: at(end - 4096), host, len: 8192 },
        Task::Copy { direction: to_host, card: at(end - 4096), host, len: 8192 },
        Task::Within { from: at(0), to: at(end - 4096), len: 8192 },
        Task::Within { from: at(end - 4096), to: at(0), len: 8192 },
        Task::Fill { pattern: 0x5555, card: at(end - 4096), len: 8192 },
        Task::Compare { card: at(end - 4096), host, len: 8192 },
    ];
    raw.bus.memory().write(CardAddr::new(end - 4096), &[0x11; 4096]).unwrap();
    raw.bus.memory().write(CardAddr::new(0), &[0x22; 4096]).unwrap();
    for task in tasks {
        raw.push(task, false);
        assert_eq!(raw.statuses(1), [Status::NoCardMemory.code()], "{task:?}");
        assert_eq!(raw.card_bytes(end - 4096, 4096), vec![0x11; 4096], "{task:?}");
        assert_eq!(raw.card_bytes(0, 4096), vec![0x22; 4096], "{task:?}");
        let mut host = vec![0; 8192];
        raw.data.as_volatile_slice().read(&mut host);
        assert_eq!(host, vec![0x77; 8192], "{task:?}");
    }
    // Of rows, the last one counts.
    raw.push(Task::Shape { host_pitch: 8192, card_pitch: 16, rows: 2 }, true);
    raw.push(Task::Within { from: at(end - 4096), to: at(0), len: 16 }, false);
    assert_eq!(raw.statuses(1), [Status::NoCardMemory.code()]);
    assert_eq!(raw.card_bytes(0, 16), [0x22; 16]);
    raw.push(Task::Shape { host_pitch: 16, card_pitch: 2048, rows: 3 }, true);
    raw.push(Task::Copy { direction: from_host, card: at(end - 4096), host: raw.data_at(0), len: 16 }, false);
    assert_eq!(raw.statuses(1), [Status::NoCardMemory.code()]);
    assert_eq!(raw.card_bytes(end - 4096, 4096), vec![0x11; 4096]);
    raw.push(Task::Shape { host_pitch: 16, card_pitch: 2048, rows: 2 }, true);
    raw.push(Task::Copy { direction: from_host, card: at(end - 4096), host: raw.data_at(0), len: 16 }, false);
    assert_eq!(raw.statuses(2), [Status::Ok.code(); 2]);
    assert_eq!(raw.card_bytes(end - 2048, 17), [&[0x77; 16][..], &[0x11]].concat());
}

/// A shape is for the next descriptor alone, also when that one cannot be carried out, or not even read.
#[test]
fn the_shape_of_a_failed_operation_is_forgotten() {
    let mut raw = Raw::new();
    raw.data.as_volatile_slice().fill(0x44);
    let shape = Task::Shape { host_pitch: 64, card_pitch: 128, rows: 4 };
    let plain = |raw: &Raw| Task::Copy { direction: Direction::FromHost, card: at(0), host: raw.data_at(0), len: 32 };
    let failing: [fn(&Raw) -> [u64; 4]; 3] = [
        |_| [0xff, 0, 0, 32], // no such opcode
        |raw| {
            let (host, card) = (raw.data_at(0), at(u64::MAX - 4096));
            Descriptor::from(Task::Copy { direction: Direction::FromHost, card, host, len: 32 }).encode()
        },
        |_| Descriptor::from(Task::Fence).encode(), // has no rows
    ];
    for words in failing {
        raw.bus.memory().write(CardAddr::new(0), &[0; 1024]).unwrap();
        raw.push(shape, true);
        let words = words(&raw);
        raw.write(words);
        let task = plain(&raw);
        raw.push(task, false);
        let statuses = raw.statuses(3);
        assert_eq!((statuses[0], statuses[2]), (Status::Ok.code(), Status::Ok.code()), "{statuses:?}");
        assert_ne!(statuses[1], Status::Ok.code());
        assert_eq!(raw.card_bytes(0, 1024), [vec![0x44; 32], vec![0; 992]].concat(), "one row and no more");
    }
}

#[test]
fn a_new_root_forgets_the_translations_of_the_old_one() {
    let bus = bus();
    let card = Card::open_with_rings(bus.clone(), &AnonHeap::new(), 16).unwrap();
    let mut channel = card.queue(0).unwrap();
    let tables = |first| card.tables(Span::new(CardAddr::new(first), MIB).unwrap()).unwrap();
    let mut roots = Vec::new();
    let va = DeviceVa::new(0x7000_0000);
    for (first, to) in [(6 * MIB, MIB), (7 * MIB, 2 * MIB)] {
        let mut mmu: PageTable<X86_64_4Level, DeviceVa, CardAddr, CardTables<SoftBus>> =
            PageTable::new(tables(first)).unwrap();
        mmu.map(va, CardAddr::new(to), 4096, Access::RW).unwrap();
        roots.push(mmu);
    }
    for (round, mmu) in roots.iter().enumerate() {
        // Only the two registers: nothing asks for an invalidation.
        card.set_mmu_root(mmu.root()).unwrap();
        let buf = AnonHeap::new().allocate(4096).unwrap().share();
        buf.as_volatile_slice().fill(round as u8 + 1);
        let via = Registered::new(&*bus, &buf, Access::READ).unwrap();
        let write = Operation::write((buf.into_slice(), via), DeviceAddr::Va(va));
        run(&mut channel, write, std::time::Duration::from_secs(60)).unwrap();
    }
    let byte = |at| {
        let mut byte = [0];
        bus.memory().read(CardAddr::new(at), &mut byte).unwrap();
        byte[0]
    };
    assert_eq!((byte(MIB), byte(2 * MIB)), (1, 2));
}
