//! A driver that fails on command: no buffer is lost, and none is given back while the card may use it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, CardAddr};
use dmalane_device::Device;
use dmalane_dma::error_chain;
use dmalane_dma::quarantined_bytes;
use dmalane_queue::conformance::Random;
use dmalane_queue::{DeviceAddr, Direction, OpError, Operation, Registered, StallWatch, StopReason};
use dmalane_slash::model::{DriverModel, Fault, Version};
use dmalane_slash::{DDR, HBM, Request};

use crate::suites::{LONG, VERSIONS, open};

const LEN: usize = 48 << 10;

/// One device and a script of faults; gives how many operations failed.
fn one(seed: u64, faults: &mut u64) {
    let model = DriverModel::new(VERSIONS[(seed % 2) as usize]).unwrap();
    let mut device = open(&model).unwrap();
    let (registrar, mut queues) = (device.registrar(), device.take_queues());
    let mut random = Random(seed);
    let kinds = [
        Fault::Fails(libc::ETIME),
        Fault::Fails(libc::EIO),
        Fault::Fails(libc::EINTR),
        Fault::Fails(libc::EINVAL),
        Fault::Short,
        Fault::Excess,
        Fault::Hangs,
    ];
    // Each transfer fails with one chance in four.
    let mut script = random.clone();
    let hits = Arc::new(AtomicU64::new(0));
    let counter = hits.clone();
    model.fail(move |request| {
        let fails = request == Request::Transfer && script.below(4) == 0;
        counter.fetch_add(fails.into(), Ordering::Relaxed);
        fails.then(|| kinds[script.below(kinds.len() as u64) as usize])
    });
    let mut wrong = 0;
    for round in 0..12 {
        let queue = &mut queues[(round % 2) as usize];
        let mut shares = Vec::new();
        for _ in 0..random.below(6) + 1 {
            let buf = registrar.heap(None).allocate(LEN).unwrap().share();
            let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
            let skip = [0, 0, 1, 4095, 4096][random.below(5) as usize];
            let (_, mut part) = buf.into_slice().split_at(skip).unwrap();
            let bytes = random.bytes(part.len());
            part.write(0, &bytes).unwrap();
            shares.push(part.reference());
            let at = [DDR.0, HBM.0 + HBM.1 / 2 - 4096][random.below(2) as usize] + random.below(9 << 10);
            let direction = [Direction::FromHost, Direction::ToHost][random.below(2) as usize];
            let operation = Operation::copy(direction, (part, via), DeviceAddr::Card(CardAddr::new(at)));
            match queue.submit(operation) {
                Ok(_ticket) => {}
                Err(refused) => panic!("{refused}"),
            }
        }
        let (mut done, begun, mut watch) = (Vec::new(), Instant::now(), StallWatch::default());
        while queue.in_flight() > 0 {
            match queue.wait(&mut done, Duration::from_millis(5)) {
                0 => watch.lost(Duration::from_millis(20)).into_iter().for_each(|why| queue.stop(why)),
                _ => watch.moved(),
            }
            assert!(begun.elapsed() < LONG, "seed {seed}: operations end");
            if done.iter().any(|c| c.result.is_err()) {
                assert!(!model.goes_on(), "seed {seed}: a buffer is back while the card uses it");
            }
        }
        assert_eq!(done.len(), shares.len(), "seed {seed}: every operation comes back");
        for end in &done {
            match &end.result {
                Ok(()) => {}
                Err(OpError::Stopped(_)) => wrong += 1,
                Err(other) => panic!("seed {seed}: {other}"),
            }
        }
        drop(done);
        assert!(shares.iter().all(|s| s.is_last()), "seed {seed}: nothing else holds a buffer");
        if queue.halted().is_some() {
            let begun = Instant::now();
            while !queue.restart() {
                assert!(begun.elapsed() < LONG, "seed {seed}: it starts again");
                std::thread::yield_now();
            }
        }
    }
    // It works after all that.
    model.fail(|_| None);
    for queue in &mut queues {
        let buf = registrar.heap(None).allocate(LEN).unwrap().share();
        let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
        let at = DeviceAddr::Card(CardAddr::new(DDR.0));
        dmalane_queue::run(&mut **queue, Operation::write((buf.into_slice(), via), at), LONG).unwrap();
    }
    let hits = hits.load(Ordering::Relaxed);
    assert!(wrong >= hits.min(1), "a fault is reported");
    *faults += hits;
    drop((queues, registrar, device));
    assert_eq!((model.violations(), model.pairs(), model.counts().buffers.0), (Vec::new(), 0, 0), "seed {seed}");
}

#[test]
fn a_thousand_faults_lose_no_buffer_and_free_none_early() {
    let (mut faults, mut seed) = (0, 0);
    while faults < 1000 {
        one(seed, &mut faults);
        seed += 1;
    }
    println!("{faults} faults with {seed} seeds");
}

#[test]
fn a_queue_that_cannot_be_stopped_keeps_its_buffers_for_ever() {
    for gone in [false, true] {
        let model = DriverModel::new(Version::KNOWN).unwrap();
        let mut device = open(&model).unwrap();
        let (registrar, mut queues) = (device.registrar(), device.take_queues());
        model.fail(move |request| match request {
            Request::Transfer if gone => Some(Fault::Gone),
            Request::Transfer => Some(Fault::Fails(libc::ETIME)),
            Request::PairOp => Some(Fault::Fails(libc::EIO)),
            _ => None,
        });
        let queue = &mut queues[0];
        let (mut shares, before) = (Vec::new(), quarantined_bytes());
        for i in 0..3 {
            let buf = registrar.heap(None).allocate(LEN).unwrap().share();
            let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
            shares.push(buf.reference());
            let at = DeviceAddr::Card(CardAddr::new(DDR.0 + i * LEN as u64));
            let _ticket = queue.submit(Operation::write((buf.into_slice(), via), at)).unwrap();
        }
        let mut done = Vec::new();
        let begun = Instant::now();
        while queue.halted().is_none() || done.is_empty() {
            queue.wait(&mut done, Duration::from_millis(20));
            assert!(begun.elapsed() < LONG);
        }
        // Two parts were in the call; the third was never begun.
        assert_eq!((done.len(), queue.in_flight()), (1, 2));
        assert!(matches!(queue.halted(), Some(StopReason::Lost(_))), "{:?}", queue.halted());
        assert!(!queue.restart());
        let halted = error_chain(&queue.halted().unwrap());
        assert!(
            halted.contains("buffers are never freed") && (!gone || halted.contains("removing or resetting")),
            "{halted}"
        );
        drop((done, queues, registrar, device));
        let held: Vec<_> = shares.iter().map(|s| s.is_last()).collect();
        assert_eq!(held, [false, false, true]);
        assert!(quarantined_bytes() >= before + 2 * LEN as u64);
        assert!(model.violations().is_empty(), "{:?}", model.violations());
    }
}

#[test]
fn commands_are_in_flight_together_and_end_in_order() {
    let model = DriverModel::new(VERSIONS[1]).unwrap();
    let mut device = open(&model).unwrap();
    let (registrar, mut queues) = (device.registrar(), device.take_queues());
    // Each of the first four transfers waits until all of them are with the driver.
    let together = Arc::new(Barrier::new(4));
    let mut left = 4;
    model.before_transfers(move || {
        left -= 1;
        (left >= 0).then(|| together.clone())
    });
    let heap = registrar.heap(None);
    for i in 0..8 {
        let buf = heap.allocate(LEN).unwrap().share();
        let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
        // Not beside each other, and two parts make a call.
        let at = DeviceAddr::Card(CardAddr::new(DDR.0 + i * 2 * LEN as u64));
        let _ticket = queues[0].submit(Operation::write((buf.into_slice(), via), at)).unwrap();
    }
    let done = dmalane_queue::drain(&mut *queues[0], LONG);
    let tickets: Vec<_> = done.iter().map(|c| (c.ticket.number(), c.result.is_ok())).collect();
    assert_eq!(tickets, (0..8).map(|i| (i, true)).collect::<Vec<_>>());
}
