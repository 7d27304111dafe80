//! A card as a device: what it says of itself, its regions, its address space.

use std::sync::Arc;

use dmalane_addr::{PageSize, SgTable};
use dmalane_card::regs::{self, BAR_REGISTERS};
use dmalane_card::{CardDevice, CardUse, Error};
use dmalane_device::{AddressSpaceKind, Counters, Device};
use dmalane_dma::Mmio;
use dmalane_iopt::{Format, X86_64_4Level};
use dmalane_queue::Route;
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

const MIB: u64 = 1 << 20;

fn bus(ddr: u64, hbm: u64, workers: Workers) -> Arc<SoftBus> {
    let host = SoftHost::new(HostConfig::default()).unwrap();
    Arc::new(SoftBus::new(host, CardConfig { ddr, hbm, channels: 2, workers }).unwrap())
}

fn open(bus: &Arc<SoftBus>, how: CardUse) -> CardDevice<SoftBus> {
    CardDevice::open(bus.clone(), how).unwrap()
}

/// Names, groups, first addresses, lengths and routes of its regions.
fn regions(device: &dyn Device) -> Vec<(String, String, u64, u64, Route)> {
    let all = device.regions().iter();
    all.map(|r| (r.name.to_string(), r.group.to_string(), r.span.first().bits(), r.span.len(), r.route)).collect()
}

#[test]
fn a_device_says_how_it_is_driven() {
    let named = |threads: Option<&str>| CardUse {
        name: "test card".into(),
        threads: threads.map(Into::into),
        concurrent: true,
        ..CardUse::default()
    };
    let info = open(&bus(8 * MIB, 8 * MIB, Workers::Inline), named(None)).info();
    assert_eq!((info.name.as_str(), info.polled, info.concurrent), ("test card", true, true));
    assert_eq!(info.notes, ["2 channels, rings of 256"]);
    let threads = bus(8 * MIB, 8 * MIB, Workers::PerChannel);
    let how = CardUse { ring: Some(16), ..named(Some("2 threads")) };
    let mut device = CardDevice::open(threads.clone(), how).unwrap();
    assert!(!device.info().polled);
    assert_eq!(device.info().notes, ["2 channels, 2 threads, rings of 16"]);
    assert!(Arc::ptr_eq(device.bus(), &threads));
    assert_eq!((device.take_queues().len(), device.take_queues().len()), (2, 0));
    let text = format!("{device:?}");
    assert!(text.contains("CardDevice") && text.contains("test card") && text.contains("hbm1"), "{text}");
    assert_eq!(device.counters(), Counters::default());
    let counters = Counters { touched: Some(4), ..Counters::default() };
    let expected = counters.clone();
    assert_eq!(device.counted(move || counters.clone()).counters(), expected);
}

/// Tables get a 128th of the card, and 128 KiB at least, from the end of the longest memory.
#[test]
fn page_tables_are_at_the_end_of_the_longest_memory() {
    let low = 1 << 38;
    let names = |ddr: u64, half: u64, hbm1: u64| {
        let (hbm, by) = ("hbm".to_owned(), Route::Channel);
        vec![
            ("ddr".to_owned(), "ddr".to_owned(), 0, ddr, Route::Shared),
            ("hbm0".to_owned(), hbm.clone(), low, half, by(0)),
            ("hbm1".to_owned(), hbm, low + half, hbm1, by(1)),
        ]
    };
    let of = |ddr, hbm, how| regions(&open(&bus(ddr * MIB, hbm * MIB, Workers::Inline), how));
    let paged = CardUse::default;
    assert_eq!(of(8, 8, paged()), names(8 * MIB - (128 << 10), 4 * MIB, 4 * MIB), "at least");
    assert_eq!(of(48, 16, paged()), names(48 * MIB - (512 << 10), 8 * MIB, 8 * MIB), "a 128th");
    assert_eq!(of(4, 8, paged()), names(4 * MIB - (128 << 10), 4 * MIB, 4 * MIB), "the first of equals");
    let mut halves = names(4 * MIB, 8 * MIB, 8 * MIB);
    halves[1].3 -= 20 * MIB / 128;
    assert_eq!(of(4, 16, paged()), halves, "the first half of HBM");
    assert_eq!(of(8, 8, CardUse { flat: true, ..paged() }), names(8 * MIB, 4 * MIB, 4 * MIB), "no tables");
}

#[test]
fn device_addresses_have_the_bits_that_were_asked_for() {
    let range = |va_bits| {
        let bus = bus(8 * MIB, 8 * MIB, Workers::Inline);
        let mut device = open(&bus, CardUse { va_bits, ..CardUse::default() });
        assert_eq!(bus.read32(BAR_REGISTERS, regs::MMU_CONTROL).unwrap(), 1, "the MMU is on");
        let space = device.address_space();
        assert_eq!(space.kind(), AddressSpaceKind::PageTables { format: X86_64_4Level::NAME });
        assert_eq!(space.reserve(&SgTable::default(), 1).unwrap().len(), PageSize::SIZE_2M.bytes());
        let range = space.vm().unwrap().range();
        (range.first().bits(), range.last().bits())
    };
    assert_eq!(range(None), (4 << 30, (1 << 47) - 1));
    assert_eq!(range(Some(64)), range(None));
    assert_eq!(range(Some(40)), (4 << 30, (1 << 40) - 1));
    assert_eq!(range(Some(33)), (2 << 30, (1 << 33) - 1));
    assert_eq!(range(Some(0)), (1 << 30, (1 << 32) - 1));
    let flat = CardUse { flat: true, ..CardUse::default() };
    let bus = bus(8 * MIB, 8 * MIB, Workers::Inline);
    assert_eq!(open(&bus, flat).address_space().kind(), AddressSpaceKind::Flat);
    assert_eq!(bus.read32(BAR_REGISTERS, regs::MMU_CONTROL).unwrap(), 0);
}

#[test]
fn an_mmu_of_another_format_is_refused_unless_it_is_left_alone() {
    let host = SoftHost::new(HostConfig::default()).unwrap();
    let config = CardConfig { ddr: 8 * MIB, hbm: 8 * MIB, channels: 2, workers: Workers::Inline };
    let bus = Arc::new(SoftBus::<X86_64_4Level, dmalane_iopt::Arm64S1_4k>::new(host, config).unwrap());
    let e = CardDevice::open(bus.clone(), CardUse::default()).err();
    assert!(matches!(e, Some(Error::OtherMmu(Some("arm64-s1-4k")))), "{e:?}");
    CardDevice::open(bus, CardUse { flat: true, ..CardUse::default() }).unwrap();
}
