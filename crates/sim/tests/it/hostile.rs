//! The card against hostile drivers, the driver against hostile cards.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane_addr::{Access, CardAddr, Iova};
use dmalane_card::{Card, CardDevice, CardQueue, CardUse, CompletionEntry, Error, Status, regs};
use dmalane_device::Device;
use dmalane_dma::{
    self as mem, AnonHeap, BufferRef, DeviceMem, DmaFault, FaultReason, Heap, HeldMem, Mapping, Mmio, Pinned, Registrar,
};
use dmalane_queue::{DeviceAddr, Direction, OpError, Operation, Queue, Refusal, Registered, drain};
use dmalane_sim::fuzzing::{fuzz_driver, fuzz_ring};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};
use proptest::prelude::*;

/// Time after which something that is waited for does not come.
const LONG: Duration = Duration::from_secs(60);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_card_survives_its_driver(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz_ring(&bytes);
    }

    /// Mostly well-formed starts, descriptors and page tables, so that copies really happen.
    #[test]
    fn the_card_survives_a_plausible_driver(
        ops in prop::collection::vec((prop::sample::select(b"222222334446701".to_vec()), any::<[u8; 8]>()), 1..120),
    ) {
        // The rings of both channels in the buffer that may be written, of 2^8 entries; an MMU whose root is its own
        // only table.
        let mut bytes = vec![5, 8, 0, 5 | 0x80, 8, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0];
        for (kind, mut rest) in ops {
            if kind == b'2' {
                rest[1] &= 0x1f; // no reserved flag
            }
            let operands = [6, 34, 9, 1, 1, 2, 10, 2][usize::from(kind & 7)];
            bytes.push(kind & 7 | rest[7] & 0x80);
            bytes.extend(rest.iter().cycle().take(operands));
        }
        fuzz_ring(&bytes);
    }

    #[test]
    fn the_driver_survives_its_card(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
        fuzz_driver(&bytes);
    }

    #[test]
    fn the_driver_survives_a_plausible_card(bytes in prop::collection::vec(0u8..0xf9, 400..3000)) {
        fuzz_driver(&bytes);
    }
}

/// A good card, but for some registers that lie and a moment at which it dies.
struct Liar {
    bus: SoftBus,
    lies: Mutex<HashMap<u64, u32>>,
    dead: AtomicBool,
    completions: AtomicU64,
}

impl Liar {
    fn new() -> Arc<Self> {
        let host = SoftHost::new(HostConfig::default()).unwrap();
        let config = CardConfig { ddr: 2 << 20, hbm: 4 << 20, channels: 1, workers: Workers::Inline };
        let bus = SoftBus::new(host, config).unwrap();
        Arc::new(Self { bus, lies: Mutex::default(), dead: AtomicBool::new(false), completions: AtomicU64::new(0) })
    }

    fn open(self: &Arc<Self>) -> Result<Card<Liar>, Error> {
        Card::open_with_rings(self.clone(), &AnonHeap::new(), 4)
    }
}

impl Registrar for Liar {
    fn pin_range(&self, buffer: &BufferRef, range: std::ops::Range<usize>) -> Result<Pinned, mem::Error> {
        self.bus.pin_range(buffer, range)
    }

    fn map_list(&self, pinned: Vec<Pinned>, access: Access) -> Result<Mapping, mem::Error> {
        self.bus.map_list(pinned, access)
    }

    fn owns(&self, mapping: &Mapping) -> bool {
        self.bus.owns(mapping)
    }
}

impl Mmio for Liar {
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, mem::Error> {
        let truth = self.bus.read32(bar, offset)?;
        Ok(self.lies.lock().unwrap().get(&offset).copied().unwrap_or(truth))
    }

    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), mem::Error> {
        if offset == regs::channel(0, regs::CH_COMPLETIONS) {
            self.completions.store(value.into(), Ordering::Relaxed);
        }
        if self.dead.load(Ordering::Relaxed) { Ok(()) } else { self.bus.write32(bar, offset, value) }
    }

    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), mem::Error> {
        self.bus.write_bytes(bar, offset, bytes)
    }

    fn progress(&self) -> bool {
        !self.dead.load(Ordering::Relaxed) && self.bus.progress()
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.bus.wait(timeout)
    }
}

fn submit(bus: &Arc<Liar>, channel: &mut CardQueue<Liar>) -> Result<(), Refusal> {
    submit_read(bus, channel, 4096).map(drop)
}

/// Submits a read of `len` bytes; gives where in host memory they go.
fn submit_read(bus: &Arc<Liar>, channel: &mut CardQueue<Liar>, len: usize) -> Result<Iova, Refusal> {
    let buf = AnonHeap::new().allocate(len).unwrap().share();
    let via = Registered::new(&**bus, &buf, Access::RW).unwrap();
    let to = via.mapping().span().first();
    let read = Operation::read((buf.into_slice(), via), DeviceAddr::Card(CardAddr::new(0)));
    channel.submit(read).map(|_| to).map_err(|refused| refused.reason)
}

#[test]
fn the_driver_believes_no_impossible_register() {
    let lie = |lies: &[(u64, u32)]| {
        let bus = Liar::new();
        bus.lies.lock().unwrap().extend(lies.iter().copied());
        bus.open().err()
    };
    assert!(lie(&[]).is_none());
    assert!(lie(&[(regs::VERSION, 0x0001_0007)]).is_none(), "a newer minor version");
    assert!(matches!(lie(&[(regs::ID, 0xffff_ffff)]), Some(Error::NotACard(0xffff_ffff))));
    assert!(matches!(lie(&[(regs::VERSION, 0x0002_0000)]), Some(Error::Version(_))));
    for lies in [
        vec![(regs::CHANNELS, 0)],
        vec![(regs::CHANNELS, u32::MAX)],
        vec![(regs::LEN_MAX, u32::MAX)],
        vec![(regs::RING_LOG2_MAX, 32)],
        vec![(regs::DDR_LEN, 0)],
        vec![(regs::DDR_LEN, 5)],
        vec![(regs::DDR_LEN + 4, u32::MAX), (regs::DDR_BASE + 4, u32::MAX)],
        vec![(regs::HBM_BASE + 4, 0)],
        vec![(regs::HBM_HALF + 4, 0)],
        vec![(regs::HBM_HALF, 0)],
    ] {
        assert!(matches!(lie(&lies), Some(Error::BadCapability { .. })), "{lies:x?}");
    }
    assert!(matches!(lie(&[(regs::CONTROL, 1)]), Some(Error::Timeout { .. })), "never done with its reset");
}

/// A card whose longest memory is what page tables need at least has no room for anything else.
#[test]
fn a_card_too_small_for_page_tables_is_refused() {
    let opened = |ddr: u32| {
        let bus = Liar::new();
        let half = (regs::HBM_HALF, 4096);
        bus.lies.lock().unwrap().extend([(regs::DDR_LEN, ddr), (regs::HBM_LEN, 8192), half]);
        CardDevice::open(bus, CardUse::default()).map(|device| device.regions()[0].span.len())
    };
    for ddr in [64 << 10, 128 << 10] {
        assert!(matches!(opened(ddr), Err(Error::TooSmall { needed: 0x2_0000 })), "{ddr}");
    }
    assert_eq!(opened(132 << 10).unwrap(), 4096);
}

#[test]
fn a_completion_that_was_not_asked_for_stops_the_channel() {
    let bus = Liar::new();
    let card = bus.open().unwrap();
    let mut port = bus.bus.host().port();
    // As (cookie, status, descriptor number): another cookie, a status that does not exist, a mark of another lap.
    for (cookie, status, number) in [(7, 0, 0), (0, 200, 0), (0, 0, 12)] {
        let mut channel = card.queue(0).unwrap();
        submit(&bus, &mut channel).unwrap();
        let at = Iova::new(bus.completions.load(Ordering::Relaxed) + 8);
        let word = CompletionEntry { cookie, status, sequence: CompletionEntry::sequence_of(number) }.word();
        bus.dead.store(true, Ordering::Relaxed);
        port.hold().write_word(at, word).unwrap();
        let mut done = Vec::new();
        assert_eq!(channel.wait(&mut done, Duration::from_millis(20)), 0, "not before the card has stopped");
        assert_eq!(channel.in_flight(), 1);
        assert!(matches!(submit(&bus, &mut channel), Err(Refusal::Stopped(_))));
        bus.dead.store(false, Ordering::Relaxed);
        // The card did not hear of the stop either.
        bus.write32(0, regs::channel(0, regs::CH_CONTROL), 0).unwrap();
        let done = drain(&mut channel, LONG);
        assert!(matches!(done[0].result, Err(OpError::Stopped(_))), "{:?}", done[0].result);
    }
    assert_eq!(card.quarantined(), 0);
}

#[test]
fn an_operation_is_as_long_as_the_card_takes_at_most() {
    let bus = Liar::new();
    bus.lies.lock().unwrap().insert(regs::LEN_MAX, 4096);
    let card = bus.open().unwrap();
    let mut channel = card.queue(0).unwrap();
    assert_eq!(submit_read(&bus, &mut channel, 8192), Err(Refusal::TooLong { len: 8192, max: 4096 }));
    submit(&bus, &mut channel).unwrap();
    assert_eq!(drain(&mut channel, LONG)[0].result, Ok(()));
}

/// The card says where the IOMMU stopped it, and so how much was done before.
#[test]
fn a_fault_of_the_iommu_says_where_and_why() {
    let bus = Liar::new();
    let card = bus.open().unwrap();
    let mut port = bus.bus.host().port();
    let mut channel = card.queue(0).unwrap();
    bus.dead.store(true, Ordering::Relaxed);
    let ring = bus.completions.load(Ordering::Relaxed);
    let cases =
        [(Status::HostNotMapped, FaultReason::NotMapped), (Status::HostNotPermitted, FaultReason::NotPermitted)];
    for (number, (status, reason)) in (0..).zip(cases) {
        let to = submit_read(&bus, &mut channel, 4096).unwrap();
        let at = to + 512;
        let entry = Iova::new(ring + u64::from(number) * CompletionEntry::BYTES as u64);
        let sequence = CompletionEntry::sequence_of(number);
        let word = CompletionEntry { cookie: number, status: status.code(), sequence }.word();
        port.hold().write_word(entry, at.bits()).unwrap();
        port.hold().write_word(entry + 8, word).unwrap();
        let done = drain(&mut channel, LONG);
        let fault = DmaFault { at, wanted: Direction::ToHost.host_access(), reason, done: 512 };
        assert_eq!((&done[0].result, done[0].bytes), (&Err(OpError::Fault(fault)), 512));
    }
    bus.dead.store(false, Ordering::Relaxed);
}

#[test]
fn what_a_dead_card_may_still_touch_is_never_released() {
    let bus = Liar::new();
    let card = bus.open().unwrap();
    let mut channel = card.queue(0).unwrap();
    bus.dead.store(true, Ordering::Relaxed);
    submit(&bus, &mut channel).unwrap();
    submit(&bus, &mut channel).unwrap();
    drop(channel);
    assert_eq!(card.quarantined(), 2);
    assert!(matches!(card.queue(0), Err(Error::ChannelTaken(0))));
    drop(card);
    assert_eq!(bus.bus.host().stats().pinned_frames, 4, "two rings and two buffers");
}
