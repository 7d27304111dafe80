//! Entry points for fuzzers: a card whose driver is hostile, and a driver whose card is.
//!
//! Each takes any bytes, panics when a promise is broken, and ends soon. Not for other use.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::DevicePort;
use crate::{HostConfig, SoftHost};
use dmalane_addr::{Access, CardAddr, Iova};
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{AnonHeap, BufferRef, DeviceMem, Error, Heap, HeldMem, Mapping, Mmio, Pinned, Registrar, SharedBuf};
use dmalane_queue::{Cancelled, DeviceAddr, Direction, HostSlice, Operation, Queue, Registered, Shape, Ticket};

use crate::memory::HBM_BASE;
use crate::{CardConfig, SoftBus, Workers};
use dmalane_card::regs::{self, BAR_MEMORY, BAR_REGISTERS};
use dmalane_card::{Card, CompletionEntry};

/// Most operations of one run, and most steps of the card.
const OPERATIONS: usize = 200;
const STEPS: usize = 400;

fn host() -> SoftHost {
    let config = HostConfig { memory: 64 << 20, fragmentation: 0.0, seed: 1 };
    SoftHost::new(config).expect("a host")
}

fn patterned(heap: &AnonHeap, len: usize, byte: u8) -> SharedBuf {
    let mut buf = heap.allocate(len).expect("a buffer");
    buf.fill(byte);
    buf.share()
}

fn is_all(buf: &SharedBuf, byte: u8) -> bool {
    let mut same = true;
    buf.as_volatile_slice().for_each_block(|block| same &= block.iter().all(|b| *b == byte));
    same
}

/// Interprets `bytes` as what a hostile driver does to registers, rings, page tables and card memory, and lets the card
/// work in between.
///
/// # Panics
/// When the card writes memory that is not mapped for writing, or panics itself.
pub fn fuzz_ring(bytes: &[u8]) {
    let input = &mut FuzzInput::new(bytes);
    let heap = AnonHeap::new();
    // In IOVA order: what the card may write, what it may only read, what it could reach once.
    let open = patterned(&heap, 64 << 10, 0);
    let (readable, hidden) = (patterned(&heap, 16 << 10, 0x5a), patterned(&heap, 16 << 10, 0xa5));
    let config = CardConfig { ddr: 4 << 20, hbm: 4 << 20, channels: 2, workers: Workers::Inline };
    let bus: SoftBus = SoftBus::new(host(), config).expect("a card");
    let map = |buf: &SharedBuf, access| bus.map(bus.pin(&buf.reference())?, access);
    let mapped = map(&open, Access::RW).expect("a mapping");
    let readonly = map(&readable, Access::READ).expect("a mapping");
    let gone = map(&hidden, Access::RW).expect("a mapping").span().first();
    let hosts = [mapped.span().first(), readonly.span().first(), gone, Iova::new(u64::MAX - 0xfff)].map(|a| a.bits());
    let cards = [0, (4 << 20) - 0x8000, HBM_BASE, HBM_BASE + (4 << 20) - 0x8000, 0x4000_0000, u64::MAX - 0xfff];
    let mut driver = Driver { bus, open, hosts, cards, written: [0; 2], steps: 0 };
    for _ in 0..OPERATIONS {
        if input.is_empty() || driver.operation(input).is_none() {
            break;
        }
    }
    driver.work(STEPS);
    assert!(is_all(&readable, 0x5a), "the card wrote what it may only read");
    assert!(is_all(&hidden, 0xa5), "the card wrote what is no longer mapped");
}

/// A hostile driver, and what it plays with.
struct Driver {
    bus: SoftBus,
    /// The rings, and data among them.
    open: SharedBuf,
    hosts: [u64; 4],
    cards: [u64; 6],
    /// Descriptors appended to each channel's ring.
    written: [u32; 2],
    steps: usize,
}

impl Driver {
    fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            self.steps += 1;
            if self.steps >= STEPS || !self.bus.progress() {
                break;
            }
        }
    }

    fn operation(&mut self, input: &mut FuzzInput<'_>) -> Option<()> {
        let kind = input.u8();
        let channel = kind >> 7;
        let written = self.written[usize::from(channel)];
        let bus = &self.bus;
        let set = |register, value| bus.write32(BAR_REGISTERS, regs::channel(channel.into(), register), value).ok();
        match kind & 7 {
            0 => {
                let (offset, value) = (u64::from(input.u16() & 0x13ff), input.u32());
                let _ = bus.write32(BAR_REGISTERS, offset, value);
                let _ = bus.read32(BAR_REGISTERS, offset);
            }
            1 => {
                let at = usize::from(input.u16());
                self.open.as_volatile_slice().sub(at & 0x7fff, 64)?.write(input.bytes(32));
            }
            2 => {
                // A descriptor that is nearly right, after the one before.
                let (ends, flags, shift) = (input.u8(), input.u8(), input.u16());
                let host = self.hosts[usize::from(ends) % self.hosts.len()].wrapping_add(shift.into());
                let card = self.cards[usize::from(ends >> 4) % self.cards.len()].wrapping_add(input.u16().into());
                let opcode = 1 + u64::from(flags & 1) + u64::from(ends >> 1 & 6);
                let len = u64::from(input.u16() >> (flags >> 2 & 7)) << if flags & 0x20 != 0 { 12 } else { 0 };
                // Chained, virtual source, cache.
                let more = u64::from(input.u8());
                let more = (more & 1) << 2 | (more >> 1 & 1) << 1 | (more >> 2 & 3) << 4;
                let head = opcode | (u64::from(flags & 2) << 7) | more << 8 | (u64::from(flags >> 6) << 16);
                // Of copies within the card the source, of shapes both pitches, of fences nothing at all.
                let (host, card, len) = match opcode {
                    3 => (self.cards[usize::from(ends) % self.cards.len()].wrapping_add(shift.into()), card, len),
                    6 => (shift.into(), u64::from(shift >> 3) << (ends >> 4), len & 0xff),
                    7 => (0, 0, 0),
                    _ => (host, card, len),
                };
                for (i, word) in [head, host, card, len].into_iter().enumerate() {
                    self.open.as_volatile_slice().store_u64((written % 256) as usize * 32 + 8 * i, word)?;
                }
                self.written[usize::from(channel)] += 1;
            }
            3 => {
                let b = input.u8();
                set(regs::CH_DOORBELL, if b < 0xfc { written } else { b.into() })?;
            }
            4 => {
                let steps = input.u8() % 16;
                self.work(steps.into());
            }
            5 => {
                // Rings where they should be, or nearly so.
                let (log2, which) = (input.u8(), input.u8());
                set(regs::CH_CONTROL, 0)?;
                bus.progress();
                set(regs::CH_RING_LOG2, u32::from(log2 & 15))?;
                set(regs::CH_RING, self.hosts[usize::from(which) % 3] as u32)?;
                set(regs::CH_COMPLETIONS, (self.hosts[usize::from(which >> 4) % 3] + 0x8000) as u32)?;
                set(regs::CH_CONTROL, 1)?;
                bus.progress();
                self.written[usize::from(channel)] = 0;
            }
            6 => {
                // A page-table entry that is nearly right, or anything.
                let (place, what) = (input.u8(), input.u8());
                let at = self.cards[usize::from(place) % self.cards.len()].wrapping_add(u64::from(place >> 5) * 8);
                let flags = [0x27, 0x25, 0xa7, 0x67][usize::from(what & 3)];
                let entry = (u64::from(what >> 3) << 12 | flags).to_le_bytes();
                let any = input.bytes(8);
                let _ = bus.write_bytes(BAR_MEMORY, at, if what & 4 == 0 { &entry } else { any });
            }
            _ => {
                let root = u32::from(input.u16() & 0x0f07) << 8;
                bus.write32(BAR_REGISTERS, regs::MMU_ROOT, root).ok()?;
                bus.write32(BAR_REGISTERS, regs::MMU_CONTROL, 1).ok()?;
            }
        }
        Some(())
    }
}

/// Drives a card that answers registers, and fills the completion ring, with what `bytes` says.
///
/// # Panics
/// When the driver panics, or when a buffer comes back twice or never.
pub fn fuzz_driver(bytes: &[u8]) {
    let host = host();
    let script = Script { input: bytes.to_vec(), at: 0, completions: 0, doorbell: 0, completed: 0, fresh: false };
    let bus = Arc::new(HostileBus { host: host.clone(), script: Mutex::new((script, host.port())) });
    let heap = AnonHeap::new();
    let Ok(card) = Card::open_with_rings(bus.clone(), &heap, 4) else { return };
    let Ok(mut queue) = card.queue(0) else { return };
    let buf = heap.allocate(64 << 10).expect("a buffer").share();
    let via = Registered::new(&*bus, &buf, Access::RW).expect("a registration");
    let mut rest = buf.into_slice();
    let at = DeviceAddr::Card(CardAddr::new(0));
    let (mut done, mut taken, mut ended, mut back) = (Vec::new(), 0, 0, 0);
    for i in 0..24u64 {
        let mut slice = || {
            let whole = std::mem::replace(&mut rest, heap.allocate(1).expect("a page").share().into_slice());
            let (slice, more) = whole.split_at(2048).expect("long enough");
            rest = more;
            slice
        };
        let direction = if i & 1 == 0 { Direction::FromHost } else { Direction::ToHost };
        let operation = match i % 6 {
            0..3 => Operation::copy(direction, (slice(), via.clone()), at),
            3 => {
                let host = (0..2).map(|_| HostSlice::from((slice(), via.clone()))).collect();
                Operation::gather(direction, host, vec![(at, 1000), (at, 2048), (at, 1048)])
            }
            4 => {
                let shape = Shape { row: 48, rows: 32, host_pitch: 64, device_pitch: 100 };
                let (front, _) = slice().split_at(31 * 64 + 48).expect("short enough");
                Operation::compare((front, via.clone()), at).shaped(shape)
            }
            _ => Operation::fence(),
        };
        let ticket = queue.submit(operation);
        taken += usize::from(ticket.is_ok());
        if i % 3 == 1
            && let Ok(ticket) = ticket
            && let Cancelled::Removed(_) = queue.cancel(ticket)
        {
            back += 1;
        }
        ended += queue.poll(&mut done);
        ended += queue.wait(&mut done, Duration::from_micros(50));
        if let Some(e) = done.last()
            && i % 5 == 4
        {
            queue.cancel(e.ticket);
            queue.cancel(Ticket::new(e.ticket.number() + 1));
        }
        assert_eq!(taken, ended + back + queue.in_flight(), "every buffer is in one place");
        assert_eq!(done.len(), ended);
    }
    assert!(done.iter().all(|e| e.bytes <= e.operation.bytes()), "more bytes than there are");
    done.sort_by_key(|c| c.ticket.number());
    assert!(done.windows(2).all(|w| w[0].ticket != w[1].ticket), "a buffer came back twice");
    drop(queue);
}

/// A card that does what the input says. When that has ended, it has stopped.
struct HostileBus {
    host: SoftHost,
    script: Mutex<(Script, DevicePort)>,
}

struct Script {
    input: Vec<u8>,
    at: usize,
    completions: u64,
    doorbell: u32,
    completed: u32,
    /// Just started.
    fresh: bool,
}

impl Script {
    fn next(&mut self) -> Option<u8> {
        self.at += 1;
        self.input.get(self.at - 1).copied()
    }
}

impl Registrar for HostileBus {
    fn pin_range(&self, buffer: &BufferRef, range: std::ops::Range<usize>) -> Result<Pinned, Error> {
        self.host.pin_range(buffer, range)
    }

    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, Error> {
        self.host.map_list(pinned, access)
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        self.host.owns(mapping)
    }
}

impl Mmio for HostileBus {
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, Error> {
        let script = &mut self.script.lock().expect("no panic so far").0;
        let good = match offset {
            regs::ID => regs::ID_VALUE,
            regs::VERSION => regs::VERSION_VALUE,
            regs::CHANNELS => 1,
            regs::RING_LOG2_MAX => 4,
            regs::LEN_MAX => regs::MAX_LEN,
            regs::DDR_LEN => 1 << 20,
            regs::HBM_BASE => 1 << 20,
            regs::HBM_HALF => 3 << 19,
            regs::HBM_LEN => 1 << 21,
            _ if offset == regs::channel(0, regs::CH_STATUS) => match script.next() {
                None => u32::from(std::mem::take(&mut script.fresh)),
                Some(b) if b < 0xf0 => regs::STATUS_RUNNING,
                Some(b) => u32::from(b & 3),
            },
            _ => 0,
        };
        // Up to the reset, now and then, a register lies.
        if offset < regs::CONTROL && script.next().is_some_and(|b| b == 0xff) {
            return Ok(u32::from(script.next().unwrap_or(0)) << 8);
        }
        if bar == BAR_REGISTERS { Ok(good) } else { Err(Error::NoRegister { bar, offset, bytes: 4 }) }
    }

    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), Error> {
        let script = &mut self.script.lock().expect("no panic so far").0;
        if offset == regs::channel(0, regs::CH_CONTROL) {
            script.fresh = value == 1;
        }
        if offset == regs::channel(0, regs::CH_COMPLETIONS) {
            script.completions = value.into();
        }
        if offset == regs::channel(0, regs::CH_DOORBELL) {
            script.doorbell = value;
            if script.next() == Some(0xfe) {
                return Err(Error::NoRegister { bar, offset, bytes: 4 });
            }
        }
        Ok(())
    }

    fn write_bytes(&self, _: u8, _: u64, _: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    /// Completes the oldest operation properly, or writes nearly a completion somewhere in the ring.
    fn progress(&self) -> bool {
        let (script, port) = &mut *self.script.lock().expect("no panic so far");
        let Some(b) = script.next() else { return false };
        let number = script.completed;
        let sequence = CompletionEntry::sequence_of(number);
        let mut slot = number % 4;
        let mut word = CompletionEntry { cookie: number, status: b & 15, sequence }.word();
        if b >= 0xf8 {
            slot = u32::from(b & 3);
            word ^= 1 << script.next().unwrap_or(0).min(63);
        } else if b & 0x20 != 0 || number == script.doorbell {
            return b & 0x10 != 0;
        } else {
            script.completed += 1;
        }
        // A ring that is not mapped any more is the card's problem.
        let _ = port.hold().write_word(Iova::new(script.completions + u64::from(slot) * 16 + 8), word);
        b & 0x10 != 0
    }

    fn wait(&self, _: Duration) -> bool {
        false
    }
}
