//! Queues under random use, through a bus that can lose, stall and reset; shared queues; the registration cache.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dmalane_addr::{Access, CardAddr, Iova};
use dmalane_card::regs::{self, BAR_REGISTERS};
use dmalane_card::{Card, CardQueue};
use dmalane_dma::{
    self as mem, AnonHeap, BufferRef, DeviceMem, Heap, HeldMem, Mapping, Mmio, Pinned, Registrar, SharedBuf,
};
use dmalane_queue::conformance::{Fixture, OperationModel, Random, host_bytes, offset_of, operation};
use dmalane_queue::{
    Cancelled, Completion, DeviceAddr, Direction, HaltWatch, HostSlice, OpError, Operation, Queue, Refusal, Registered,
    SharedOptions, SharedQueue, StallWatch, StopReason, Work, run,
};
use dmalane_sim::{CardConfig, HostConfig, SoftBus, SoftHost, Workers};

const MIB: u64 = 1 << 20;
const FAR_LEN: u64 = 128 << 10;
const LONG: Duration = Duration::from_secs(60);

/// A software card behind a bus with faults.
struct Faulty {
    bus: SoftBus,
    /// The card does nothing, and hears nothing.
    stalled: AtomicBool,
    /// It was pulled out: reads give ones.
    unplugged: AtomicBool,
    /// The completion of the descriptor with this number is undone, once.
    lose: AtomicU64,
    completions: AtomicU64,
    /// How often somebody slept for the card.
    naps: AtomicU64,
    port: Mutex<dmalane_sim::DevicePort>,
}

const NONE: u64 = u64::MAX;

impl Faulty {
    fn new(workers: Workers) -> Arc<Self> {
        let host: SoftHost = SoftHost::new(HostConfig::default()).unwrap();
        let config = CardConfig { ddr: 128 * MIB, hbm: 4 * MIB, channels: 2, workers };
        let port = Mutex::new(host.port());
        let bus = SoftBus::new(host, config).unwrap();
        let (lose, completions, naps) = (AtomicU64::new(NONE), AtomicU64::new(0), AtomicU64::new(0));
        let [stalled, unplugged] = [AtomicBool::new(false), AtomicBool::new(false)];
        Arc::new(Self { bus, stalled, unplugged, lose, completions, naps, port })
    }
}

impl Registrar for Faulty {
    fn pin_range(&self, buffer: &BufferRef, range: std::ops::Range<usize>) -> Result<Pinned, mem::Error> {
        self.bus.pin_range(buffer, range)
    }
    fn map_list(&self, list: Vec<Pinned>, access: Access) -> Result<Mapping, mem::Error> {
        self.bus.map_list(list, access)
    }
    fn owns(&self, mapping: &Mapping) -> bool {
        self.bus.owns(mapping)
    }
}

impl Mmio for Faulty {
    fn read32(&self, bar: u8, offset: u64) -> Result<u32, mem::Error> {
        if self.unplugged.load(Ordering::Relaxed) { Ok(u32::MAX) } else { self.bus.read32(bar, offset) }
    }
    fn write32(&self, bar: u8, offset: u64, value: u32) -> Result<(), mem::Error> {
        if offset == regs::channel(0, regs::CH_COMPLETIONS) {
            self.completions.store(value.into(), Ordering::Relaxed);
        }
        if self.stalled.load(Ordering::Relaxed) { Ok(()) } else { self.bus.write32(bar, offset, value) }
    }
    fn write_bytes(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), mem::Error> {
        self.bus.write_bytes(bar, offset, bytes)
    }
    fn progress(&self) -> bool {
        if self.stalled.load(Ordering::Relaxed) {
            return false;
        }
        let worked = self.bus.progress();
        let lost = self.lose.load(Ordering::Relaxed);
        if lost != NONE && u64::from(self.read32(0, regs::channel(0, regs::CH_HEAD)).unwrap()) > lost {
            // Of the first lap: before, the slot was empty.
            let at = self.completions.load(Ordering::Relaxed) + lost * 16 + 8;
            self.port.lock().unwrap().hold().write_word(Iova::new(at), 0).unwrap();
            self.lose.store(NONE, Ordering::Relaxed);
        }
        worked
    }
    fn works_alone(&self) -> bool {
        self.bus.works_alone()
    }
    fn wait(&self, timeout: Duration) -> bool {
        self.naps.fetch_add(1, Ordering::Relaxed);
        self.bus.wait(timeout)
    }
}

/// A card and what its operations need.
struct Bench {
    bus: Arc<Faulty>,
    card: Card<Faulty>,
    heap: AnonHeap,
}

impl Bench {
    fn new(workers: Workers, entries: usize) -> Self {
        let bus = Faulty::new(workers);
        let heap = AnonHeap::new();
        let card = Card::open_with_rings(bus.clone(), &heap, entries).unwrap();
        Self { bus, card, heap }
    }

    fn buffer(&self, len: usize) -> (SharedBuf, Registered) {
        let mut buf = self.heap.allocate(len).unwrap();
        for (i, byte) in buf.iter_mut().enumerate() {
            *byte = (i ^ i >> 8 ^ i >> 16) as u8;
        }
        let buf = buf.share();
        let via = Registered::new(&*self.bus, &buf, Access::RW).unwrap();
        (buf, via)
    }

    fn copy(&self, len: usize) -> Operation {
        let (buf, via) = self.buffer(len);
        Operation::copy(Direction::FromHost, (buf.into_slice(), via), at(0))
    }

    /// Only the rings are pinned, nothing was given up.
    fn assert_clean(&self) {
        let rings = 4; // of at most 256 entries: one page each for completions, two for descriptors of 256
        let pinned = self.bus.bus.host().stats().pinned_frames;
        assert!((rings..=6).contains(&pinned), "{pinned} frames are pinned");
        assert_eq!(self.card.quarantined(), 0);
    }
}

impl Fixture for Bench {
    type Queue = CardQueue<Faulty>;
    fn queue(&mut self) -> Self::Queue {
        self.card.queue(0).unwrap()
    }
    fn target_len(&self) -> u64 {
        FAR_LEN
    }
    fn at(&self, offset: u64) -> DeviceAddr {
        at(offset)
    }
    fn host(&mut self, len: usize) -> HostSlice {
        let (buf, via) = self.buffer(len);
        (buf.into_slice().split_at(len).unwrap().0, via).into()
    }

    fn peek(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; FAR_LEN as usize];
        self.bus.bus.memory().read(CardAddr::new(0), &mut bytes).unwrap();
        bytes
    }
    fn poke(&mut self, bytes: &[u8]) {
        self.bus.bus.memory().write(CardAddr::new(0), bytes).unwrap();
    }
}

fn at(offset: u64) -> DeviceAddr {
    DeviceAddr::Card(CardAddr::new(offset))
}

fn drain<Q: Queue>(queue: &mut Q) -> Vec<Completion<Q::Addr>> {
    let mut ended = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, LONG);
    }
    ended
}

/// Random operations, cancellations, drops, stops and time-outs; each byte is compared with the model.
/// 10 000 operations, or fewer where `DMALANE_ROUNDS` makes the suites short: for runs under slow tools.
fn survives(workers: Workers, seed: u64) {
    let operations = std::env::var("DMALANE_ROUNDS").map_or(10_000, |n| n.parse::<u64>().unwrap() * 500).min(10_000);
    let mut bench = Bench::new(workers, 16);
    let mut random = Random(seed);
    let mut model = OperationModel { target: random.bytes(FAR_LEN as usize) };
    bench.poke(&model.target);
    let mut queue = bench.queue();
    let place = offset_of(&bench);
    let mut waiting = std::collections::HashMap::new();
    let (mut ended, mut taken_back, mut cancelled, mut stopped, mut dropped) = (Vec::new(), 0, 0u64, 0u64, 0u64);
    let mut shares: Vec<BufferRef> = Vec::new();
    let mut count = 0;
    while count < operations {
        match random.below(100) {
            0..70 => {
                let (operation, bytes) = operation(&mut bench, &mut random, queue.capabilities(), 4000);
                match queue.submit(operation) {
                    Ok(ticket) => {
                        count += 1;
                        assert!(waiting.insert(ticket, bytes).is_none(), "tickets are unique");
                    }
                    // Stopped with nothing in flight.
                    Err(rejected) if matches!(rejected.reason, Refusal::Stopped(_)) => {
                        assert_eq!(queue.in_flight(), 0);
                        queue.restart();
                    }
                    Err(rejected) => assert_eq!(rejected.reason, Refusal::Full),
                }
            }
            70..80 => queue.flush(),
            80..85 => {
                let tickets: Vec<_> = waiting.keys().copied().collect();
                if !tickets.is_empty() {
                    let ticket = tickets[random.below(tickets.len() as u64) as usize];
                    if let Cancelled::Removed(operation) = queue.cancel(ticket) {
                        taken_back += 1;
                        let bytes = waiting.remove(&ticket).expect("in flight");
                        assert!(host_bytes(&operation) == bytes, "untouched");
                    }
                }
            }
            85..96 => {
                queue.poll(&mut ended);
            }
            96 => {
                queue.wait(&mut ended, Duration::from_micros(random.below(300)));
            }
            97 if random.below(4) == 0 => {
                // The drop finishes operations in flight; nobody hears of it.
                dropped += waiting.len() as u64;
                shares.clear();
                drop(queue);
                queue = bench.queue();
                bench.assert_clean();
                waiting.clear();
                ended.clear();
                model.target = bench.peek();
            }
            98 if random.below(4) == 0 => {
                // Stopped while it stalls: wait for the end of all, go on.
                bench.bus.stalled.store(workers == Workers::Inline, Ordering::Relaxed);
                queue.stop(StopReason::Requested("for a test".into()));
                queue.wait(&mut ended, Duration::from_millis(2));
                bench.bus.stalled.store(false, Ordering::Relaxed);
                ended.extend(drain(&mut queue));
            }
            _ => {}
        }
        let mut resync = false;
        for Completion { ticket, operation, result, bytes: done } in ended.drain(..) {
            let mut bytes = waiting.remove(&ticket).expect("each ends once");
            let total = operation.bytes();
            match result {
                Ok(()) => {
                    assert_eq!(done, total);
                    assert_eq!(model.apply(&operation, &mut bytes, &place), None);
                }
                Err(OpError::Differs { offset }) => {
                    assert_eq!(model.apply(&operation, &mut bytes, &place), Some(offset));
                }
                Err(OpError::Cancelled) => {
                    cancelled += 1;
                    model.apply_first(done, &operation, &mut bytes, &place);
                }
                Err(OpError::Stopped(_)) => {
                    // Any part of it may have been done: nothing to compare with.
                    stopped += 1;
                    resync = true;
                    continue;
                }
                Err(e) => panic!("{operation:?}: {e}"),
            }
            assert!(host_bytes(&operation) == bytes, "host memory: {operation:?}");
        }
        if resync {
            assert_eq!(queue.in_flight(), 0);
            assert!(queue.restart());
            model.target = bench.peek();
        } else if queue.in_flight() == 0 && random.below(20) == 0 {
            assert!(bench.peek() == model.target, "device memory after {count} operations");
        }
    }
    drop(drain(&mut queue));
    drop(queue);
    bench.assert_clean();
    assert!(taken_back > 0 && stopped > 0 && dropped > 0, "{taken_back} {cancelled} {stopped} {dropped}");
    println!(
        "{workers:?}: {count} operations, {taken_back} taken back, {cancelled} cancelled, {stopped} stopped, \
         {dropped} dropped"
    );
}

#[test]
fn ten_thousand_operations_inline() {
    survives(Workers::Inline, 1);
}

#[test]
fn ten_thousand_operations_with_a_worker() {
    survives(Workers::One, 2);
}

#[test]
fn ten_thousand_operations_with_workers() {
    survives(Workers::PerChannel, 3);
}

#[test]
fn a_lost_completion_stops_the_channel_and_frees_nothing_early() {
    let bench = Bench::new(Workers::Inline, 16);
    let mut queue = bench.card.queue(0).unwrap();
    bench.bus.lose.store(2, Ordering::Relaxed);
    for _ in 0..5 {
        let _ticket = queue.submit(bench.copy(4096)).unwrap();
    }
    let (mut ended, mut watch) = (Vec::new(), StallWatch::default());
    while queue.in_flight() > 0 {
        match queue.wait(&mut ended, Duration::from_millis(1)) {
            0 => watch.lost(Duration::from_millis(5)).into_iter().for_each(|why| queue.stop(why)),
            _ => watch.moved(),
        }
    }
    assert_eq!(ended.len(), 5);
    assert!(ended[..2].iter().all(|e| e.result == Ok(())));
    for end in &ended[2..] {
        assert!(
            matches!(&end.result, Err(OpError::Stopped(StopReason::Timeout(t))) if *t == Duration::from_millis(5)),
            "{:?}",
            end.result
        );
    }
    assert!(queue.restart());
    let _ticket = queue.submit(bench.copy(4096)).unwrap();
    assert_eq!(drain(&mut queue)[0].result, Ok(()));
    drop((queue, ended));
    bench.assert_clean();
}

#[test]
fn a_stalled_channel_keeps_its_memory_until_it_has_stopped() {
    let bench = Bench::new(Workers::Inline, 16);
    let mut queue = bench.card.queue(0).unwrap();
    let _ticket = queue.submit(bench.copy(4096)).unwrap();
    bench.bus.stalled.store(true, Ordering::Relaxed);
    let mut ended = Vec::new();
    assert_eq!(queue.wait(&mut ended, Duration::from_millis(5)), 0);
    queue.stop(StopReason::Timeout(Duration::from_millis(5)));
    assert_eq!(queue.wait(&mut ended, Duration::from_millis(5)), 0, "not before the card has confirmed");
    assert_eq!(queue.in_flight(), 1);
    assert!(!queue.restart());
    bench.bus.stalled.store(false, Ordering::Relaxed);
    // It did not hear of the stop, so it is told again.
    assert!(matches!(drain(&mut queue)[0].result, Err(OpError::Stopped(_))));
    assert!(queue.restart());
    drop(queue);
    bench.assert_clean();
}

/// Its memory may still be reached: a card of which only the driver hears nothing goes on.
#[test]
fn a_card_that_is_pulled_out_is_lost_and_keeps_the_memory_in_flight() {
    let bench = Bench::new(Workers::Inline, 16);
    let mut queue = bench.card.queue(0).unwrap();
    bench.bus.stalled.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        let _ticket = queue.submit(bench.copy(4096)).unwrap();
    }
    bench.bus.unplugged.store(true, Ordering::Relaxed);
    let (mut ended, mut watch, start) = (Vec::new(), HaltWatch::default(), Instant::now());
    let why = loop {
        queue.wait(&mut ended, Duration::from_millis(50));
        if let Some(why) = watch.lost(&queue) {
            break why;
        }
        assert!(start.elapsed() < LONG);
    };
    assert!(matches!(why, StopReason::Lost(_)) && why.to_string() == "the device is gone", "{why}");
    assert_eq!((ended.len(), queue.in_flight()), (0, 3));
    assert!(start.elapsed() >= Duration::from_secs(2) && !queue.restart());
    let refused = queue.submit(bench.copy(4096)).unwrap_err();
    assert!(matches!(refused.reason, Refusal::Stopped(StopReason::Lost(_))));
    drop(queue);
    assert_eq!(bench.card.quarantined(), 3);
}

/// Who waits for a card that does nothing lets others have the processor.
#[test]
fn a_long_wait_sleeps() {
    let bench = Bench::new(Workers::Inline, 16);
    let mut queue = bench.card.queue(0).unwrap();
    bench.bus.stalled.store(true, Ordering::Relaxed);
    let _ticket = queue.submit(bench.copy(4096)).unwrap();
    let naps = || bench.bus.naps.load(Ordering::Relaxed);
    // More than once, since another process may have had the processor for all of the time.
    for _ in 0..200 {
        assert_eq!(queue.wait(&mut Vec::new(), Duration::from_millis(5)), 0);
        if naps() > 0 {
            break;
        }
    }
    assert!(naps() > 0);
    bench.bus.stalled.store(false, Ordering::Relaxed);
    queue.stop(StopReason::Requested("it never heard of the operation".into()));
    assert!(matches!(drain(&mut queue)[0].result, Err(OpError::Stopped(_))));
}

/// A wait ends with the first operation that does, and says how many have.
#[test]
fn a_wait_is_for_one_operation() {
    let bench = Bench::new(Workers::Inline, 16);
    let mut queue = bench.card.queue(0).unwrap();
    for _ in 0..2 {
        let _ticket = queue.submit(bench.copy(32 << 20)).unwrap();
    }
    let mut ended = Vec::new();
    assert_eq!((queue.wait(&mut ended, LONG), queue.in_flight()), (1, 1));
    assert_eq!((queue.wait(&mut ended, LONG), queue.in_flight()), (1, 0));
    // With no time to wait it is a poll.
    let mut count = 0;
    for len in [4096, 32 << 20, 4096] {
        let _ticket = queue.submit(bench.copy(len)).unwrap();
    }
    while queue.in_flight() > 0 {
        count += queue.wait(&mut ended, Duration::ZERO);
    }
    assert_eq!((count, ended.len()), (3, 5));
}

#[test]
fn a_flipped_bit_is_found_by_a_comparison() {
    let bench = Bench::new(Workers::Inline, 16);
    let mut queue = bench.card.queue(0).unwrap();
    let _ticket = queue.submit(bench.copy(3 << 20)).unwrap();
    let mut host = drain(&mut queue).remove(0).operation.into_host();
    let mut byte = [0];
    bench.bus.bus.memory().read(CardAddr::new(2_345_678), &mut byte).unwrap();
    bench.bus.bus.memory().write(CardAddr::new(2_345_678), &[byte[0] ^ 4]).unwrap();
    let host = host.remove(0);
    let _ticket = queue.submit(Operation::compare(host, at(0))).unwrap();
    let end = drain(&mut queue).remove(0);
    assert_eq!((end.result, end.bytes), (Err(OpError::Differs { offset: 2_345_678 }), 2_345_678));
}

#[test]
fn a_reset_in_mid_transfer_ends_everything_and_the_channel_comes_back() {
    for workers in [Workers::Inline, Workers::One, Workers::PerChannel] {
        let bench = Bench::new(workers, 16);
        let mut queue = bench.card.queue(0).unwrap();
        for _ in 0..4 {
            let _ticket = queue.submit(bench.copy(32 << 20)).unwrap();
        }
        let mut ended = Vec::new();
        queue.poll(&mut ended);
        bench.bus.write32(BAR_REGISTERS, regs::CONTROL, 1).unwrap();
        ended.extend(drain(&mut queue));
        assert_eq!(ended.len(), 4);
        assert!(matches!(ended[3].result, Err(OpError::Stopped(_))), "{:?}", ended[3].result);
        assert!(queue.restart());
        let _ticket = queue.submit(bench.copy(4096)).unwrap();
        assert_eq!(drain(&mut queue)[0].result, Ok(()));
        drop((queue, ended));
        bench.assert_clean();
    }
}

#[test]
fn a_long_copy_is_cancelled_in_the_middle() {
    let bench = Bench::new(Workers::Inline, 16);
    let mut queue = bench.card.queue(0).unwrap();
    let long = queue.submit(bench.copy(64 << 20)).unwrap();
    let next = queue.submit(bench.copy(32 << 20)).unwrap();
    let mut ended = Vec::new();
    queue.poll(&mut ended);
    assert!(matches!(queue.cancel(long), Cancelled::Requested));
    assert!(matches!(queue.cancel(next), Cancelled::Requested));
    let ended = drain(&mut queue);
    assert_eq!(ended[0].result, Err(OpError::Cancelled));
    assert!(ended[0].bytes >= 1 << 20 && ended[0].bytes < 64 << 20, "{}", ended[0].bytes);
    assert_eq!(ended[1].result, Err(OpError::Cancelled), "the next wish is told when the first has come true");
}

#[test]
fn sixty_four_threads_share_a_queue() {
    for workers in [Workers::Inline, Workers::One] {
        let bench = Bench::new(workers, 64);
        let shared = SharedQueue::new(bench.card.queue(0).unwrap(), SharedOptions::default());
        std::thread::scope(|s| {
            for thread in 0..64u64 {
                let (shared, bench) = (&shared, &bench);
                s.spawn(move || {
                    let mut random = Random(thread);
                    let place = at(thread * 8192);
                    for _ in 0..3 {
                        let mut handle = shared.handle();
                        for _ in 0..7 {
                            let bytes = random.bytes(8192);
                            let (buf, via) = bench.buffer(8192);
                            buf.as_volatile_slice().write(&bytes);
                            run(&mut handle, Operation::write((buf.into_slice(), via), place), LONG).unwrap();
                            let (buf, via) = bench.buffer(8192);
                            let read = Operation::read((buf.into_slice(), via), place);
                            let read = run(&mut handle, read, LONG).unwrap();
                            assert!(host_bytes(&read) == bytes, "thread {thread}");
                        }
                    }
                });
            }
        });
        assert_eq!(shared.in_flight(), 0);
        drop(shared);
        bench.assert_clean();
    }
}

#[test]
fn what_waits_outside_is_taken_back_and_detached_operations_go_on() {
    let bench = Bench::new(Workers::Inline, 2);
    let shared = SharedQueue::new(
        bench.card.queue(0).unwrap(),
        SharedOptions { inside: 1, each: 1, ..SharedOptions::default() },
    );
    let mut handles = [0, 1, 2].map(|_| shared.handle());
    let tickets = handles.each_mut().map(|handle| handle.submit(bench.copy(4096)).unwrap());
    assert_eq!(handles[0].submit(bench.copy(4096)).unwrap_err().reason, Refusal::Full);
    assert!(matches!(handles[0].cancel(tickets[1]), Cancelled::Unknown), "it belongs to another handle");
    let Cancelled::Removed(operation) = handles[1].cancel(tickets[1]) else { panic!("it waits outside") };
    assert_eq!((operation.bytes(), handles[1].in_flight()), (4096, 0));
    let [first, second, mut third] = handles;
    first.detach();
    assert_eq!(drain(&mut third)[0].result, Ok(()));
    assert_eq!(shared.in_flight(), 0);
    drop((shared, operation, second, third));
    bench.assert_clean();
}

#[test]
fn a_refusal_that_only_the_queue_can_give_ends_the_operation() {
    let bench = Bench::new(Workers::Inline, 2);
    let shared = SharedQueue::new(bench.card.queue(0).unwrap(), SharedOptions::default());
    let mut handle = shared.handle();
    let unregistered = bench.heap.allocate(4096).unwrap().share().into_slice();
    let _ticket = handle.submit(Operation::write(unregistered, at(0))).unwrap();
    assert_eq!(drain(&mut handle)[0].result, Err(OpError::Refused(Refusal::NotRegistered)));
}

#[test]
fn a_copy_past_the_end_of_the_address_space_is_refused() {
    let bench = Bench::new(Workers::Inline, 16);
    let mut queue = bench.card.queue(0).unwrap();
    let mut submit = |offset| {
        let (buf, via) = bench.buffer(4096);
        let copy = Operation::copy(Direction::FromHost, (buf.into_slice(), via), at(offset));
        queue.submit(copy).map_err(|refused| refused.reason)
    };
    let refused = submit(u64::MAX - 4094).unwrap_err();
    assert_eq!(refused, Refusal::PastTheTop);
    // The last bytes that there are: the card says that it has none there.
    let _ticket = submit(u64::MAX - 4095).unwrap();
    assert!(matches!(drain(&mut queue)[0].result, Err(OpError::NoCardMemory(_))));
}

#[test]
fn a_list_of_buffers_is_one_range_for_the_device() {
    let bench = Bench::new(Workers::Inline, 16);
    let bufs: Vec<SharedBuf> = [4096, 12 << 10, 3 << 20].map(|n| bench.heap.allocate(n).unwrap().share()).into();
    let via = Registered::of_list(&*bench.bus, &bufs.iter().collect::<Vec<_>>(), Access::RW).unwrap();
    assert_eq!(via.mapping().span().len(), (16 << 10) + (3 << 20));
    let mut next = via.mapping().span().first().bits();
    for buf in bufs {
        let part = buf.into_slice();
        let span = via.iova_of(&part).expect("each is in it");
        assert_eq!((span.first().bits(), span.len()), (next, part.len() as u64));
        next += span.len();
    }
    let other = bench.heap.allocate(4096).unwrap().share().into_slice();
    assert!(via.iova_of(&other).is_none());
    assert!(matches!(bench.bus.bus.map_list(Vec::new(), Access::RW), Err(mem::Error::WholeBuffers)));
    // Ranges of one buffer, out of order.
    let buf = bench.heap.allocate(64 << 10).unwrap().share();
    let pin = |range| bench.bus.pin_range(&buf.reference(), range).unwrap();
    let list = vec![pin(32 << 10..64 << 10), pin(0..4096)];
    let via = Registered::from_mapping(bench.bus.map_list(list, Access::RW).unwrap());
    let (head, rest) = buf.into_slice().split_at(4096).unwrap();
    let (middle, tail) = rest.split_at(28 << 10).unwrap();
    let first = via.mapping().span().first().bits();
    assert_eq!(via.iova_of(&tail).unwrap().first().bits(), first);
    assert_eq!(via.iova_of(&head).unwrap().first().bits(), first + (32 << 10));
    assert!(via.iova_of(&middle).is_none());
    assert!(matches!(bench.bus.pin_range(&head.reference(), 1..4097), Err(mem::Error::BadRange { .. })));
    let mut queue = bench.card.queue(0).unwrap();
    let refused = queue.submit(Operation::copy(Direction::ToHost, (middle, via), at(0))).unwrap_err();
    assert_eq!(refused.reason, Refusal::NotRegistered);
    let Work::Copy { .. } = refused.operation.work else { panic!() };
}
