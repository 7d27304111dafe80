//! The software card behind a modelled link: real bytes, at the link's rates, shared out by the policy that ships.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dmalane::addr::{Access, CardAddr};
use dmalane::card::Card;
use dmalane::dma::{AnonHeap, Heap};
use dmalane::queue::{BalancePolicy, DeviceAddr, Direction, Operation, Piece, Policy, Queue, Registered, Split, run};
use dmalane::sim::{CardConfig, HostConfig, SoftBus, SoftHost};

use crate::link::{Half, Limit, Link, Slow, Streams};

const MIB: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A policy that a test can look into.
struct Seen(Arc<Mutex<BalancePolicy>>);

impl Policy for Seen {
    fn arrive(&mut self, transfer: u64, direction: Direction, at: Option<CardAddr>, len: u64, channels: usize) {
        self.0.lock().unwrap().arrive(transfer, direction, at, len, channels);
    }

    fn next(&mut self, channel: usize, now: Duration) -> Option<Piece> {
        self.0.lock().unwrap().next(channel, now)
    }

    fn ended(&mut self, channel: usize, piece: &Piece, now: Duration, moved: bool) {
        self.0.lock().unwrap().ended(channel, piece, now, moved);
    }

    fn forget(&mut self, transfer: u64) {
        self.0.lock().unwrap().forget(transfer);
    }
}

#[test]
fn a_slow_channel_gets_less_and_the_bytes_are_right() {
    let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
    let config = CardConfig { ddr: 64 << 20, hbm: 4 << 20, ..CardConfig::default() };
    let bus: Arc<SoftBus> = Arc::new(SoftBus::new(host, config).unwrap());
    let heap = AnonHeap::new();
    let card = Card::open(bus.clone(), &heap).unwrap();
    let channels = vec![card.queue(0).unwrap(), card.queue(1).unwrap()];
    let channel = |c, rate| Limit::constant(format!("channel {c}"), Streams { channel: Some(c), ..Streams::ALL }, rate);
    // Far below what this machine copies, so that the link is what limits.
    let link = Link::new(2, vec![channel(0, 400e6), channel(1, 100e6)], Duration::ZERO).unwrap();
    let slow = Slow::new(channels, link, Duration::from_millis(1), |_| Half::Ddr0);
    let policy = Arc::new(Mutex::new(BalancePolicy::new(card.areas())));
    let mut split = Split::new(slow, Box::new(Seen(policy.clone())));
    let len = 16 * MIB;
    let mut bytes: Vec<u8> = (0..len).map(|i| (i / 7 + i / 4096) as u8).collect();
    let buf = heap.allocate(len).unwrap().share();
    let via = Registered::new(&*bus, &buf, Access::RW).unwrap();
    let mut slice = buf.into_slice();
    let at = card.layout().ddr.first();
    // On a busy machine both channels may be looked at equally late; not again and again.
    let mut told_apart = [false; 2];
    for round in 0..40 {
        let direction = [Direction::FromHost, Direction::ToHost][round % 2];
        if told_apart[round % 2] {
            continue;
        }
        if direction == Direction::FromHost {
            bytes.rotate_left(3);
            slice.write(0, &bytes).unwrap();
        } else {
            bytes.rotate_left(5);
            bus.memory().write(at, &bytes).unwrap();
        }
        let began = std::time::Instant::now();
        let copy = Operation::copy(direction, (slice, via.clone()), DeviceAddr::Card(at));
        let back = run(&mut split, copy, TIMEOUT).unwrap();
        // Never faster than the link; but for what may be saved up, a millisecond each.
        let fastest = (len as f64 - 0.5e6) / 500e6;
        assert!(began.elapsed().as_secs_f64() > fastest, "{:?}", began.elapsed());
        slice = back.into_slice().unwrap();
        let mut got = vec![0; len];
        match direction {
            Direction::FromHost => bus.memory().read(at, &mut got).unwrap(),
            Direction::ToHost => slice.read(0, &mut got).unwrap(),
        }
        assert!(got == bytes, "{direction:?}");
        let rate = |c| policy.lock().unwrap().rate(c, direction).unwrap();
        told_apart[round % 2] = rate(0) > 1.5 * rate(1);
    }
    assert_eq!(told_apart, [true; 2], "the channels are as four to one");
    assert_eq!(split.in_flight(), 0);
    assert_eq!(card.quarantined(), 0);
}
