//! A client that changes rings, registers and mappings while the daemon's worker runs them: no memory but its own.

use std::cell::OnceCell;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Iova};
use dmalane_card::regs::{self, BAR_MEMORY, BAR_REGISTERS};
use dmalane_daemon::{Client, ClientLimits, ClientOptions, Config, Listener, Server};
use dmalane_dma::fuzzing::FuzzInput;
use dmalane_dma::{Heap, Mapping, MemfdHeap, Mmio, PageKind, Registrar, SharedBuf};
use crate::socket_path;

const OPERATIONS: usize = 120;
const RING: usize = 64 << 10;

/// A daemon, and a client of it with memory that nobody else may touch.
struct Fixed {
    options: ClientOptions,
    victim: SharedBuf,
    _mapping: Mapping,
    _client: Client,
}

thread_local! {
    static FIXED: OnceCell<Fixed> = const { OnceCell::new() };
}

fn fixed() -> Fixed {
    let path = socket_path("daemon-worker");
    let _ = std::fs::remove_file(&path);
    let limits = ClientLimits { ddr: 2 << 20, hbm: 4 << 20, queues: 2, buffers: 16, bytes: 1 << 20 };
    let config = Config { ddr: 8 << 20, hbm: 16 << 20, limits, ..Config::default() };
    let listener = Listener::bind(&path, 0o600, false).expect("a listener");
    let server = Server::new(config, |_| ()).expect("a daemon");
    let (stop, stopped) = std::os::unix::net::UnixStream::pair().expect("a pair");
    std::mem::forget(stop);
    std::thread::spawn(move || server.run(listener, stopped.as_fd()).expect("the daemon runs"));
    let options = ClientOptions::new(&path);
    let client = Client::connect(options.clone()).expect("a client");
    let victim = memory(RING, 0xa5);
    let mapping = map(&client, &victim, Access::RW).expect("a mapping");
    Fixed { options, victim, _mapping: mapping, _client: client }
}

fn memory(len: usize, byte: u8) -> SharedBuf {
    let buf = MemfdHeap::starting_at(PageKind::Base).allocate(len).expect("a memfd").share();
    buf.as_volatile_slice().fill(byte);
    buf
}

fn map(client: &Client, buf: &SharedBuf, access: Access) -> Option<Mapping> {
    client.map(client.pin(&buf.reference()).ok()?, access).ok()
}

fn is_all(buf: &SharedBuf, byte: u8) -> bool {
    let mut same = true;
    buf.as_volatile_slice().for_each_block(|block| same &= block.iter().all(|b| *b == byte));
    same
}

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    FIXED.with(|cell| run(cell.get_or_init(fixed), &mut FuzzInput::new(data)));
}

fn run(fixed: &Fixed, input: &mut FuzzInput<'_>) {
    // The one of the run before may still be on its way out.
    let began = Instant::now();
    let client = loop {
        match Client::connect(fixed.options.clone()) {
            Ok(client) => break client,
            Err(e) => assert!(began.elapsed() < Duration::from_secs(10), "no new client: {e}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let ring = memory(RING, 0);
    let (readable, hidden) = (memory(16 << 10, 0x5a), memory(16 << 10, 0x3c));
    let reading = map(&client, &readable, Access::READ).expect("a mapping");
    let gone = map(&client, &hidden, Access::RW).expect("a mapping").span().first();
    let mut mapping = map(&client, &ring, Access::RW);
    let mut written = [0u32; 2];
    for _ in 0..OPERATIONS {
        if input.is_empty() {
            break;
        }
        let kind = input.u8();
        let channel = usize::from(kind >> 7);
        let base = mapping.as_ref().map_or(Iova::new(0), |m| m.span().first()).bits();
        let hosts = [base, base + 0x8000, reading.span().first().bits(), gone.bits()];
        let cards = [0, 2 << 20, (6 << 20) - 0x1000, u64::MAX - 0xfff];
        let set = |register, value| {
            let _ = client.write32(BAR_REGISTERS, regs::channel(channel as u32, register), value);
        };
        match kind & 7 {
            0 | 1 => {
                // A copy that is nearly right, and the doorbell.
                let (ends, flags) = (input.u8(), input.u8());
                let head = u64::from(flags % 9) | u64::from(flags >> 6) << 8;
                let host = hosts[usize::from(ends) % 4] + u64::from(input.u16() & 0x1fff);
                let card = cards[usize::from(ends >> 2) % 4].wrapping_add(u64::from(input.u16()));
                let len = u64::from(input.u16()) << (ends >> 6);
                let slot = written[channel] as usize % 16;
                for (i, word) in [head, host, card, len].into_iter().enumerate() {
                    ring.as_volatile_slice().store_u64(slot * 32 + 8 * i, word).expect("within the ring");
                }
                written[channel] = written[channel].wrapping_add(1);
                set(regs::CH_DOORBELL, written[channel]);
            }
            2 => {
                set(regs::CH_RING_LOG2, u32::from(input.u8() & 7));
                set(regs::CH_RING, hosts[usize::from(input.u8()) % 4] as u32);
                set(regs::CH_COMPLETIONS, hosts[usize::from(input.u8()) % 4] as u32);
                set(regs::CH_CONTROL, u32::from(input.u8() & 1));
                written[channel] = 0;
            }
            3 => set(regs::CH_DOORBELL, input.u32()),
            // Away with the rings, under the worker, and back.
            4 => mapping = None,
            5 => mapping = mapping.or_else(|| map(&client, &ring, Access::RW)),
            6 => {
                let at = usize::from(input.u16()) % (RING - 64);
                ring.as_volatile_slice().sub(at, 64).expect("within").write(input.bytes(32));
            }
            _ if kind & 8 == 0 => {
                let offset = cards[usize::from(kind >> 4) % 4];
                let _ = client.write_bytes(BAR_MEMORY, offset, input.bytes(8));
                let _ = client.write32(BAR_REGISTERS, regs::MMU_CONTROL, u32::from(kind >> 6));
            }
            _ => {
                let _ = client.write32(BAR_REGISTERS, u64::from(input.u16() & 0x3ff), input.u32());
            }
        }
    }
    assert!(client.gone().is_none(), "what a card refuses does not end the connection");
    // Unmapping waits for the worker, so nothing is written after.
    drop(mapping);
    drop(reading);
    assert!(is_all(&readable, 0x5a), "the card wrote what it may only read");
    assert!(is_all(&hidden, 0x3c), "the card wrote what is no longer mapped");
    assert!(is_all(&fixed.victim, 0xa5), "the card wrote another client's memory");
}
