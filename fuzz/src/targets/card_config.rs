//! A served card whose client writes all over its configuration space, tables and registers: the space changes where
//! PCI lets it, the card responds as its command register says, and it serves on.

use std::sync::OnceLock;

use crate::socket_path;
use dmalane::sim::{CardConfig, Workers};
use dmalane::vfio_user::{Error, UserBus};
use dmalane::{CARD_PCI_ID, CardServer};
use dmalane_dma::fuzzing::FuzzInput;

const ACCESSES: usize = 60;
const REGISTERS: u32 = 0;
const MEMORY: u32 = 2;
/// The table of MSI-X.
const TABLE: u32 = 4;
const CONFIG: u32 = 7;
const LEN: usize = 256;
/// The command register, with the bit that lets the card respond at its BARs.
const COMMAND: usize = 4;
const RESPONDS: u8 = 1 << 1;
/// The control and the status of the capability "advanced features".
const RESET: usize = 0x54;
const RESETTING: usize = 0x55;

fn server() -> &'static CardServer {
    static SERVER: OnceLock<CardServer> = OnceLock::new();
    SERVER.get_or_init(|| {
        let path = socket_path("card-config");
        let _ = std::fs::remove_file(&path);
        let config = CardConfig { ddr: 2 << 20, hbm: 4 << 20, channels: 2, workers: Workers::PerChannel };
        CardServer::bind(&path, config).expect("a listener")
    })
}

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    let server = server();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| server.accept().expect("a client").serve());
        drive(&UserBus::connect(&socket_path("card-config"), &[]).expect("a card"), &mut FuzzInput::new(data));
        let served = served.join().expect("the server does not panic").expect("a card is served");
        served.expect("the client was no worse than a driver may be");
    });
}

/// Reads the configuration space again after it was written. What identifies the card is as before; the tests of crate
/// `dmalane` compare the writable bits with a model.
fn look_again(bus: &UserBus, space: &mut [u8; LEN]) {
    let before = std::mem::replace(space, [0; LEN]);
    bus.read_region(CONFIG, 0, space).expect("the configuration space");
    for at in [0..4, 8..0xc, 0xe..0xf, 0x28..0x30, 0x34..0x35].into_iter().flatten() {
        assert_eq!(space[at], before[at], "byte {at:#x} of the configuration space");
    }
}

fn drive(bus: &UserBus, input: &mut FuzzInput<'_>) {
    let mut space = [0; LEN];
    bus.read_region(CONFIG, 0, &mut space).expect("the configuration space");
    assert_eq!(u16::from_le_bytes([space[0], space[1]]), CARD_PCI_ID.0);
    check_capabilities(&space);
    let mut table = vec![0; bus.region_len(TABLE) as usize];
    for _ in 0..ACCESSES {
        if input.is_empty() {
            break;
        }
        let (kind, region) = (input.u8(), [REGISTERS, MEMORY, TABLE, CONFIG][usize::from(input.u8() % 4)]);
        // Mostly in the part with registers, some across ends.
        let offset = if kind & 0x70 == 0 { input.number() } else { u64::from(input.u8()) };
        let offset = if region == REGISTERS && kind & 0x80 != 0 { offset & !3 } else { offset };
        let len = 1 << (input.u8() % 6);
        let within = offset.checked_add(len as u64).is_some_and(|end| end <= bus.region_len(region));
        let responds = region == CONFIG || space[COMMAND] & RESPONDS != 0;
        let at = offset as usize;
        let done = match kind % 4 {
            0 | 1 => {
                let mut bytes = input.bytes(len).to_vec();
                bytes.resize(len, input.u8());
                let done = bus.write_region(region, offset, &bytes);
                if done.is_ok() && region == CONFIG {
                    look_again(bus, &mut space);
                } else if done.is_ok() && region == TABLE {
                    table[at..at + len].copy_from_slice(&bytes);
                }
                done
            }
            2 => {
                let mut bytes = vec![0; len];
                let done = bus.read_region(region, offset, &mut bytes);
                if done.is_ok() && region == CONFIG {
                    for (at, byte) in (at..).zip(bytes).filter(|(at, _)| *at != RESETTING) {
                        assert_eq!(byte, space[at], "byte {at:#x} of the configuration space");
                    }
                } else if done.is_ok() && region == TABLE {
                    assert_eq!(bytes, table[at..at + len], "the table from {at:#x} on");
                }
                done
            }
            _ if kind & 4 != 0 => {
                bus.reset().expect("it stops in time");
                look_again(bus, &mut space);
                continue;
            }
            _ => {
                bus.write_region(CONFIG, RESET as u64, &[1]).expect("the reset of this function");
                look_again(bus, &mut space);
                continue;
            }
        };
        match done {
            Ok(()) => assert!(within && responds, "{len} bytes at {offset:#x} of region {region}"),
            Err(Error::BeyondRegion { .. }) => assert!(!within),
            // Registers are words, and the memory has gaps.
            Err(Error::Refused { .. }) => assert!(!responds || region == REGISTERS || region == MEMORY, "{region}"),
            Err(e) => panic!("{e}"),
        }
    }
    // Whatever was written, the capabilities are there.
    let mut now = [0; LEN];
    bus.read_region(CONFIG, 0, &mut now).expect("the configuration space");
    assert!(now[RESETTING] <= 1);
    now[RESETTING] = space[RESETTING];
    assert_eq!(now, space);
}

/// The list of capabilities ends, and does not leave the space.
fn check_capabilities(space: &[u8; LEN]) {
    let (mut at, mut seen) = (usize::from(space[0x34]), 0);
    while at != 0 {
        assert!((0x40..LEN - 4).contains(&at) && at.is_multiple_of(4), "a capability at {at:#x}");
        seen += 1;
        assert!(seen <= LEN / 4, "a circle of capabilities");
        at = usize::from(space[at + 1]);
    }
    assert_eq!(seen, 2, "MSI-X and advanced features");
}
