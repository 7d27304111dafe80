//! The test suite that every queue takes.
//!
//! A queue joins by describing itself as a [`Fixture`] and calling [`suite`] from one test. Capabilities that it has
//! are compared with a [`OperationModel`] that moves one byte after the other in two plain vectors; operations for
//! which it does not have the capability must be refused.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dmalane_addr::{Access, Iova, Lease, PageSize, PhysAddr, RangeAllocator, RangeCache, SgTable, Span};
use dmalane_dma::{AnonHeap, BufferSlice, Heap, Mapping, Pinned, Undo};

use crate::{
    CacheHint, Cancelled, Capabilities, Completion, Direction, HostSlice, OpError, Operation, Queue, QueueAddr,
    Refusal, Registered, Shape, StopReason, Ticket, Work, drain, run,
};

/// A queue under test, and the memory that its operations target.
pub trait Fixture {
    /// The queue's type.
    type Queue: Queue;

    /// A queue to a target of [`Fixture::target_len`] bytes.
    fn queue(&mut self) -> Self::Queue;

    /// Bytes of the target: at least 4 KiB and two alignments, better 1 MiB.
    fn target_len(&self) -> u64;

    /// The address at this offset of the target. An operation past `target_len` must fail, not be refused.
    fn at(&self, offset: u64) -> AddrOf<Self>;

    /// A slice of exactly `len` bytes of a buffer of its own, registered where the queue needs that.
    fn host(&mut self, len: usize) -> HostSlice;

    /// Reads the target without the queue.
    fn peek(&mut self) -> Vec<u8>;

    /// Writes the target without the queue, from its start on.
    fn poke(&mut self, bytes: &[u8]);

    /// Addresses, lengths and memory are multiples of this.
    fn align(&self) -> usize {
        1
    }

    /// The number of random copies in each direction: fewer for a device that takes long for each. The environment
    /// variable `DMALANE_ROUNDS` sets it, for runs under slow tools.
    fn rounds(&self) -> u64 {
        std::env::var("DMALANE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(60)
    }
}

/// The addresses of a fixture's queue.
pub type AddrOf<F> = <<F as Fixture>::Queue as Queue>::Addr;

const LONG: Duration = Duration::from_secs(60);

/// Runs all tests.
///
/// # Panics
/// When a test fails.
pub fn suite<F: Fixture>(fixture: &mut F) {
    copies_exactly_what_was_submitted(fixture);
    refuses_what_makes_no_sense(fixture);
    refuses_what_it_does_not_support(fixture);
    reports_a_target_that_does_not_exist(fixture);
    holds_its_capacity(fixture);
    keeps_many_in_flight(fixture);
    if fixture.align() == 1 {
        does_what_the_model_does(fixture);
        compares_to_the_byte(fixture);
        skips_the_rest_of_a_failed_operation(fixture);
    }
    takes_back_and_cancels(fixture);
    stops_and_starts_again(fixture);
    waits_when_dropped(fixture);
}

/// Pseudo-random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(n)) >> 64) as u64
    }

    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.word().to_le_bytes()[..chunk.len()]);
        }
        bytes
    }
}

/// A model of an operation, byte by byte.
#[derive(Clone, Debug)]
pub struct OperationModel {
    /// The memory at the other end.
    pub target: Vec<u8>,
}

impl OperationModel {
    /// Does an operation on the model. `host` are the bytes of the operation's slices, one behind the other; `at` gives
    /// the offset of an address. Gives the offset at which a comparison found a difference.
    ///
    /// # Panics
    /// When the operation does not lie within the memory.
    pub fn apply<A: QueueAddr>(
        &mut self,
        operation: &Operation<A>,
        host: &mut [u8],
        at: &dyn Fn(A) -> u64,
    ) -> Option<u64> {
        self.apply_first(u64::MAX, operation, host, at)
    }

    /// The same for the first bytes of the operation only.
    ///
    /// # Panics
    /// As [`OperationModel::apply`].
    pub fn apply_first<A: QueueAddr>(
        &mut self,
        bytes: u64,
        operation: &Operation<A>,
        host: &mut [u8],
        at: &dyn Fn(A) -> u64,
    ) -> Option<u64> {
        let total = operation.bytes().min(bytes);
        // The offset of the payload's byte `i` on either side.
        let shape = operation.shape.as_deref().copied();
        let host_at = |i: u64| shape.map_or(i, |s| i / s.row * s.host_pitch + i % s.row) as usize;
        let device = |i: u64| shape.map_or(i, |s| i / s.row * s.device_pitch + i % s.row) as usize;
        match &operation.work {
            Work::Copy { direction, at: place, .. } => {
                let base = at(*place) as usize;
                for i in 0..total {
                    match direction {
                        Direction::FromHost => self.target[base + device(i)] = host[host_at(i)],
                        Direction::ToHost => host[host_at(i)] = self.target[base + device(i)],
                    }
                }
            }
            Work::Compare { at: place, .. } => {
                let base = at(*place) as usize;
                return (0..total).find(|i| self.target[base + device(*i)] != host[host_at(*i)]);
            }
            Work::Gather(g) => {
                let places = g.device.iter().flat_map(|(place, len)| {
                    let base = at(*place);
                    (0..*len).map(move |i| (base + i) as usize)
                });
                for (i, place) in places.take(total as usize).enumerate() {
                    match g.direction {
                        Direction::FromHost => self.target[place] = host[i],
                        Direction::ToHost => host[i] = self.target[place],
                    }
                }
            }
            Work::Within { from, to, .. } => {
                let (from, to) = (at(*from) as usize, at(*to) as usize);
                for i in 0..total {
                    self.target[to + device(i)] = self.target[from + host_at(i)];
                }
            }
            Work::Fill { at: place, pattern, .. } => {
                let base = at(*place) as usize;
                let row = shape.map_or(u64::MAX, |s| s.row);
                for i in 0..total {
                    self.target[base + device(i)] = pattern.to_le_bytes()[(i % row % 8) as usize];
                }
            }
            Work::Fence => {}
        }
        None
    }
}

/// A random operation that lies within the memory and moves at most about `most` bytes, and the bytes of its host side,
/// in order. Copies within the device never overlap, and rows that are written do not either.
pub fn operation<F: Fixture>(
    fixture: &mut F,
    random: &mut Random,
    capabilities: Capabilities,
    most: u64,
) -> (Operation<AddrOf<F>>, Vec<u8>) {
    let target_len = fixture.target_len();
    loop {
        let kind = random.below(8);
        let shaped = capabilities.contains(Capabilities::SHAPE) && random.below(3) == 0 && kind < 6;
        let len = random.below(most.min(target_len / 4)) + 1;
        let (shape, host_len, device_len) = match shaped {
            false => (None, len, len),
            true => {
                let row = random.below(len.min(3000)) + 1;
                let rows = (len / row).clamp(1, 200) as u32;
                let (host_pitch, device_pitch) = (row + random.below(100), row + random.below(100));
                let shape = Shape { row, rows, host_pitch, device_pitch };
                let (host_len, device_len) = (shape.extent(host_pitch), shape.extent(device_pitch));
                (Some(shape), host_len.expect("short"), device_len.expect("short"))
            }
        };
        if host_len > target_len / 2 || device_len > target_len / 2 {
            continue;
        }
        let payload = shape.map_or(len, |s| s.row * u64::from(s.rows));
        // Two halves, so that a source and a destination do not overlap.
        let (low, high) = (
            random.below(target_len / 2 - host_len + 1),
            target_len / 2 + random.below(target_len / 2 - device_len + 1),
        );
        let anywhere = random.below(target_len - device_len + 1);
        let direction = if random.below(2) == 0 { Direction::FromHost } else { Direction::ToHost };
        let bytes = random.bytes(host_len as usize);
        let mut host = |bytes: &[u8]| {
            let mut host = fixture.host(bytes.len());
            host.slice.write(0, bytes).expect("as long as it");
            host
        };
        let (work, bytes): (Work<_>, Vec<u8>) = match kind {
            0..=2 => (Work::Copy { direction, host: host(&bytes), at: fixture.at(anywhere) }, bytes),
            3 => (Work::Compare { host: host(&bytes), at: fixture.at(anywhere) }, bytes),
            4 => (Work::Within { from: fixture.at(low), to: fixture.at(high), len: payload }, Vec::new()),
            5 => {
                let pattern = random.below(u64::MAX);
                (Work::Fill { at: fixture.at(anywhere), len: payload, pattern }, Vec::new())
            }
            6 => {
                // Both sides cut at random; the device's fragments in one of the four quarters each, so that none
                // overlap.
                let cut = |random: &mut Random| {
                    let mut left = len;
                    let mut fragments = Vec::new();
                    while left > 0 {
                        let n = if fragments.len() == 3 { left } else { random.below(left) + 1 };
                        fragments.push(n);
                        left -= n;
                    }
                    fragments
                };
                let mut at = 0;
                let host: Vec<HostSlice> = cut(random)
                    .into_iter()
                    .map(|n| {
                        at += n as usize;
                        host(&bytes[at - n as usize..at])
                    })
                    .collect();
                let fragments = cut(random);
                let quarter = target_len / 4;
                let device = fragments.into_iter().enumerate().map(|(i, n)| {
                    let place = i as u64 * quarter + random.below(quarter - n + 1);
                    (fixture.at(place), n)
                });
                let device = device.collect();
                (Operation::gather(direction, host, device).work, bytes)
            }
            _ => (Work::Fence, Vec::new()),
        };
        let mut operation = Operation::from(work);
        operation.shape = shape.map(Box::new);
        operation.cache =
            [crate::CacheHint::Auto, crate::CacheHint::Hot, crate::CacheHint::Cold][random.below(3) as usize];
        if capabilities.contains(operation.needs()) {
            return (operation, bytes);
        }
    }
}

/// The bytes of an operation's slices, in order.
pub fn host_bytes<A>(operation: &Operation<A>) -> Vec<u8> {
    let slices: Vec<&HostSlice> = match &operation.work {
        Work::Copy { host, .. } | Work::Compare { host, .. } => vec![host],
        Work::Gather(g) => g.host.iter().collect(),
        _ => Vec::new(),
    };
    slices.into_iter().flat_map(|host| bytes_of(&host.slice)).collect()
}

fn bytes_of(slice: &BufferSlice) -> Vec<u8> {
    let mut bytes = vec![0; slice.len()];
    slice.read(0, &mut bytes).expect("all of it");
    bytes
}

/// Offsets of addresses, as [`Fixture::at`] makes them.
pub fn offset_of<F: Fixture>(fixture: &F) -> impl Fn(AddrOf<F>) -> u64 + use<F> {
    let base = fixture.at(0).bits();
    move |at| at.bits() - base
}

/// A number below `n` and a multiple of `align`.
fn pick(random: &mut Random, n: u64, align: usize) -> u64 {
    random.below(n.max(1)) / align as u64 * align as u64
}

/// The directions that a queue copies in.
fn directions(queue: &impl Queue) -> Vec<Direction> {
    let all = [Direction::ToHost, Direction::FromHost];
    all.into_iter().filter(|d| queue.capabilities().contains(Capabilities::copy(*d))).collect()
}

/// The length of a copy of which many are made: 64 KiB, or what the queue does.
fn medium<F: Fixture>(fixture: &F, queue: &F::Queue) -> u64 {
    let len = (64 << 10).min(queue.limits().max_len).min(fixture.target_len());
    len / fixture.align() as u64 * fixture.align() as u64
}

/// A copy of the first bytes of the target, as few as possible.
fn small<F: Fixture>(fixture: &mut F, direction: Direction) -> Operation<AddrOf<F>> {
    let align = fixture.align();
    Operation::copy(direction, fixture.host(align), fixture.at(0))
}

fn one<Q: Queue>(queue: &mut Q, operation: Operation<Q::Addr>) -> Completion<Q::Addr> {
    let ticket = queue.submit(operation).expect("there is room");
    let mut done = drain(queue, LONG);
    assert_eq!((done.len(), done[0].ticket, queue.in_flight()), (1, ticket, 0));
    done.remove(0)
}

/// Submits an operation once there is room for it.
fn submit<Q: Queue>(queue: &mut Q, mut operation: Operation<Q::Addr>, done: &mut Vec<Completion<Q::Addr>>) -> Ticket {
    loop {
        match queue.submit(operation) {
            Ok(ticket) => return ticket,
            Err(refused) => {
                assert_eq!(refused.reason, Refusal::Full);
                assert!(queue.wait(done, LONG) > 0, "a full queue makes progress");
                operation = refused.operation;
            }
        }
    }
}

fn copies_exactly_what_was_submitted<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let (target_len, align) = (fixture.target_len(), fixture.align());
    let mut random = Random(1);
    for round in 0..fixture.rounds() {
        let len = match round {
            0 => align as u64,
            1 => target_len.min(queue.limits().max_len) / align as u64 * align as u64,
            _ => {
                let most = (target_len / 2).min(queue.limits().max_len - align as u64);
                pick(&mut random, most, align) + align as u64
            }
        };
        let at = pick(&mut random, target_len - len + 1, align);
        let before = random.bytes(target_len as usize);
        for direction in directions(&queue) {
            fixture.poke(&before);
            let HostSlice { mut slice, via } = fixture.host(len as usize + 2 * align);
            let inside = random.bytes(slice.len());
            slice.write(0, &inside).unwrap();
            let (head, rest) = slice.split_at(align).unwrap();
            let (middle, tail) = rest.split_at(len as usize).unwrap();
            let copy = Operation::copy(direction, HostSlice { slice: middle, via }, fixture.at(at));
            let copied = run(&mut queue, copy.hint(CacheHint::Hot), LONG).unwrap();
            assert_eq!(copied.cache, CacheHint::Hot, "the operation comes back as it was");
            let Work::Copy { direction: moved, host, at: place } = copied.work else { panic!("another operation") };
            assert_eq!((moved, place.bits()), (direction, fixture.at(at).bits()));
            let whole = head.join(host.slice).unwrap().join(tail).unwrap();
            let (mut expected, mut there) = (inside.clone(), before.clone());
            let (h, t) = (align..align + len as usize, at as usize..(at + len) as usize);
            match direction {
                Direction::ToHost => expected[h].copy_from_slice(&before[t]),
                Direction::FromHost => there[t].copy_from_slice(&inside[h]),
            }
            assert!(bytes_of(&whole) == expected, "host memory, round {round} {direction:?} {len} at {at}");
            assert!(fixture.peek() == there, "target, round {round} {direction:?} {len} at {at}");
        }
    }
}

fn refuses_what_makes_no_sense<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let at = fixture.at(0);
    let shape = |row, rows, host_pitch, device_pitch| Shape { row, rows, host_pitch, device_pitch };
    let direction = directions(&queue)[0];
    let HostSlice { slice, via } = fixture.host(fixture.align());
    let (empty, rest) = slice.split_at(0).unwrap();
    let refused = queue.submit(Operation::copy(direction, HostSlice { slice: empty, via }, at)).unwrap_err();
    assert_eq!(refused.reason, Refusal::Empty);
    assert!(refused.operation.into_slice().unwrap().join(rest).is_ok(), "the slice comes back");
    let align = fixture.align() as u64;
    let a = fixture.host(100);
    let b = fixture.host(100);
    let cases: Vec<(Operation<AddrOf<F>>, Refusal)> = vec![
        (Operation::fill(at, 0, 1), Refusal::Empty),
        (Operation::within(at, at, 0), Refusal::Empty),
        (Operation::within(at, fixture.at(align), 2 * align), Refusal::Overlap),
        (Operation::within(fixture.at(align), at, 2 * align), Refusal::Overlap),
        (Operation::fill(at, u64::MAX, 1), Refusal::PastTheTop),
        (Operation::fill(at, 10, 1).shaped(shape(3, 3, 3, 3)), Refusal::Mismatch),
        (Operation::fill(at, 9, 1).shaped(shape(3, 0, 3, 3)), Refusal::Empty),
        (Operation::fill(at, 9, 1).shaped(shape(3, 3, 3, u64::MAX)), Refusal::PastTheTop),
        // 100 bytes of host memory for rows that cover 101.
        (Operation::write(a, at).shaped(shape(1, 2, 100, 1)), Refusal::Mismatch),
        (Operation::gather(Direction::FromHost, vec![b], vec![(at, 99)]), Refusal::Mismatch),
        (Operation::gather(Direction::FromHost, vec![], vec![]), Refusal::Empty),
        (Operation::fence().shaped(shape(1, 1, 1, 1)), Refusal::Mismatch),
    ];
    for (operation, reason) in cases {
        if queue.capabilities().contains(operation.needs()) {
            assert_eq!(queue.submit(operation).expect_err("refused").reason, reason);
        }
    }
    let via = Some(registered_elsewhere());
    let slice = fixture.host(fixture.align()).slice;
    let refused = queue.submit(Operation::copy(direction, HostSlice { slice, via }, at)).unwrap_err();
    assert_eq!(refused.reason, Refusal::NotRegistered, "registered is other memory");
    assert_eq!(queue.in_flight(), 0);
}

/// A registration of memory that no operation uses.
fn registered_elsewhere() -> Registered {
    struct Nothing;
    impl Undo for Nothing {
        fn unmap(&self, _: Lease<Iova>) -> bool {
            true
        }
        fn unpin(&self, _: &SgTable<PhysAddr>) {}
    }
    let buf = AnonHeap::new().allocate(1 << 16).unwrap().share();
    let space = Span::new(Iova::new(0), 1 << 16).unwrap();
    let lease = RangeCache::new(RangeAllocator::new(space, PageSize::SIZE_4K)).reserve(space).unwrap();
    let pinned = Pinned::new(buf.reference(), 0..buf.len(), None, Arc::new(Nothing));
    Registered::from_mapping(Mapping::new(vec![pinned], lease, Access::RW))
}

fn refuses_what_it_does_not_support<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let (at, align) = (fixture.at(0), fixture.align());
    let len = align as u64;
    let row = Shape { row: len, rows: 1, host_pitch: len, device_pitch: len };
    let operations = [
        small(fixture, Direction::ToHost),
        small(fixture, Direction::FromHost),
        Operation::within(at, fixture.at(len), len),
        Operation::fill(at, len, 1),
        Operation::compare(fixture.host(align), at),
        small(fixture, directions(&queue)[0]).shaped(row),
        Operation::gather(directions(&queue)[0], vec![fixture.host(align)], vec![(at, len)]),
        Operation::fence(),
    ];
    for operation in operations {
        let (missing, bytes) = (operation.needs() - queue.capabilities(), operation.bytes());
        if !missing.is_empty() {
            let refused = queue.submit(operation).expect_err("refused");
            assert_eq!((refused.reason, refused.operation.bytes()), (Refusal::Unsupported(missing), bytes));
        }
    }
    assert_eq!(queue.in_flight(), 0);
    assert!(!matches!(queue.cancel(Ticket::new(u64::MAX)), Cancelled::Removed(_) | Cancelled::Requested));
}

fn reports_a_target_that_does_not_exist<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let (target_len, align) = (fixture.target_len(), fixture.align() as u64);
    for direction in directions(&queue) {
        for at in [target_len, target_len - align, target_len + (1 << 40)] {
            let at = at / align * align;
            let host = fixture.host(2 * align as usize);
            let end = one(&mut queue, Operation::copy(direction, host, fixture.at(at)));
            let there = target_len.saturating_sub(at);
            assert!(end.result.is_err() && end.bytes <= there, "{direction:?} at {at} of {target_len}");
        }
        // The queue still works.
        let operation = small(fixture, direction);
        assert_eq!(one(&mut queue, operation).result, Ok(()));
    }
}

fn holds_its_capacity<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let (capacity, direction) = (queue.limits().capacity, directions(&queue)[0]);
    let mut taken = 0;
    let refused = loop {
        match queue.submit(small(fixture, direction)) {
            Ok(_ticket) => taken += 1,
            Err(refused) => break refused,
        }
        assert!(taken <= capacity && queue.in_flight() == taken);
    };
    assert_eq!((refused.reason, taken), (Refusal::Full, capacity));
    assert_eq!(drain(&mut queue, LONG).len(), capacity);
    assert_eq!(queue.in_flight(), 0);
    assert_eq!(one(&mut queue, refused.operation).result, Ok(()));
}

fn keeps_many_in_flight<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let (align, target_len) = (fixture.align(), fixture.target_len());
    if !queue.capabilities().contains(Capabilities::TO_HOST) {
        return;
    }
    let mut random = Random(5);
    let there = random.bytes(target_len as usize);
    fixture.poke(&there);
    let count = 4 * queue.limits().capacity.min(200);
    let mut done = Vec::new();
    let mut expected = HashMap::new();
    for _ in 0..count {
        let len = pick(&mut random, medium(fixture, &queue) - align as u64, align) as usize + align;
        let at = pick(&mut random, target_len - len as u64 + 1, align);
        let operation = Operation::read(fixture.host(len), fixture.at(at));
        let ticket = submit(&mut queue, operation, &mut done);
        assert!(expected.insert(ticket, (at, len)).is_none(), "tickets are unique");
    }
    done.extend(drain(&mut queue, LONG));
    assert_eq!(done.len(), count);
    for end in done {
        let (at, len) = expected.remove(&end.ticket).expect("each operation ends once");
        assert_eq!((end.result, end.bytes), (Ok(()), len as u64));
        assert!(host_bytes(&end.operation) == there[at as usize..at as usize + len]);
    }
    assert!(expected.is_empty());
}

fn does_what_the_model_does<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let mut random = Random(1);
    let mut model = OperationModel { target: random.bytes(fixture.target_len() as usize) };
    fixture.poke(&model.target);
    let at = offset_of(fixture);
    let capabilities = queue.capabilities();
    let (mut done, mut expected) = (Vec::new(), HashMap::new());
    let mut last = None;
    // One by one; then many at once, where their order is certain, so that the model may run ahead.
    for round in 0..6 * fixture.rounds() {
        let most = 9000.min(queue.limits().max_len);
        let (operation, mut bytes) = operation(fixture, &mut random, capabilities, most);
        let differs = model.apply(&operation, &mut bytes, &at);
        let total = operation.bytes();
        let ticket = submit(&mut queue, operation, &mut done);
        expected.insert(ticket, (bytes, differs, total));
        if !capabilities.contains(Capabilities::ORDERED) && capabilities.contains(Capabilities::FENCE) {
            let fence = submit(&mut queue, Operation::fence(), &mut done);
            expected.insert(fence, (Vec::new(), None, 0));
        }
        if !capabilities.intersects(Capabilities::ORDERED | Capabilities::FENCE) || round < 100 || random.below(8) == 0
        {
            done.extend(drain(&mut queue, LONG));
        }
        if round + 1 == 6 * fixture.rounds() {
            done.extend(drain(&mut queue, LONG));
        }
        for end in done.drain(..) {
            let (bytes, differs, total) = expected.remove(&end.ticket).expect("each ends once");
            let in_order = last.replace(end.ticket).is_none_or(|before| before < end.ticket);
            assert!(in_order || !capabilities.contains(Capabilities::ORDERED), "in order");
            let (result, moved) = match differs {
                None => (Ok(()), total),
                Some(offset) => (Err(OpError::Differs { offset }), offset),
            };
            assert_eq!((end.result, end.bytes), (result, moved), "{:?}", end.operation);
            assert!(host_bytes(&end.operation) == bytes, "host memory, {:?}", end.operation);
        }
        if queue.in_flight() == 0 {
            assert!(fixture.peek() == model.target, "target, round {round}");
        }
    }
    assert!(expected.is_empty());
}

fn compares_to_the_byte<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    if !queue.capabilities().contains(Capabilities::COMPARE) {
        return;
    }
    let mut random = Random(2);
    let target = random.bytes(fixture.target_len() as usize);
    fixture.poke(&target);
    for flip in [0, 1, 4095, 4096, 20_000, 29_999] {
        let mut host = fixture.host(30_000);
        host.slice.write(0, &target[77..30_077]).unwrap();
        let end = one(&mut queue, Operation::compare(host, fixture.at(77)));
        assert_eq!((end.result, end.bytes), (Ok(()), 30_000));
        let mut host = end.operation.into_host().remove(0);
        host.slice.write(flip, &[target[77 + flip] ^ 0x10]).unwrap();
        let end = one(&mut queue, Operation::compare(host, fixture.at(77)));
        assert_eq!(end.result, Err(OpError::Differs { offset: flip as u64 }));
        assert_eq!(end.bytes, flip as u64);
    }
    assert!(fixture.peek() == target, "nothing was changed");
}

fn skips_the_rest_of_a_failed_operation<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    if !queue.capabilities().contains(Capabilities::GATHER) {
        return;
    }
    let target_len = fixture.target_len();
    fixture.poke(&vec![1; target_len as usize]);
    let mut host = fixture.host(300);
    host.slice.write(0, &[2; 300]).unwrap();
    let device = vec![(fixture.at(0), 100), (fixture.at(target_len), 100), (fixture.at(1000), 100)];
    let gather = Operation::gather(Direction::FromHost, vec![host], device);
    let after = Operation::fill(fixture.at(2000), 10, u64::MAX);
    let (a, b) = (queue.submit(gather).unwrap(), queue.submit(after).unwrap());
    let mut done = drain(&mut queue, LONG);
    done.sort_by_key(|end| end.ticket); // a queue without ORDERED may end the second first
    assert_eq!((done[0].ticket, done[1].ticket), (a, b));
    assert!(done[0].result.is_err() && done[0].bytes == 100, "{:?}", done[0]);
    assert_eq!(done[1].result, Ok(()), "the next operation does not depend on it");
    let target = fixture.peek();
    assert!(
        target[..100].iter().all(|b| *b == 2) && target[1000..1100].iter().all(|b| *b == 1),
        "the third range is skipped"
    );
}

fn takes_back_and_cancels<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    if !queue.capabilities().contains(Capabilities::CANCEL | Capabilities::FILL) {
        return;
    }
    fixture.poke(&vec![0; fixture.target_len() as usize]);
    let mut random = Random(3);
    for round in 0..60u64 {
        let byte = round as u8 + 1;
        let pattern = u64::from_le_bytes([byte; 8]);
        let fills: Vec<_> =
            (0..8).map(|i| queue.submit(Operation::fill(fixture.at(i * 4096), 4096, pattern)).expect("room")).collect();
        let victim = random.below(8) as usize;
        if round & 1 == 1 {
            queue.flush();
        }
        let before = fixture.peek();
        let (mut asked, mut taken) = (false, false);
        match queue.cancel(fills[victim]) {
            Cancelled::Removed(operation) => {
                taken = true;
                assert!(round & 1 == 0 && matches!(operation.work, Work::Fill { .. }));
                assert!(matches!(queue.cancel(fills[victim]), Cancelled::Unknown), "it is back");
            }
            Cancelled::Requested => asked = true,
            other => assert!(matches!(other, Cancelled::TooLate | Cancelled::Unknown), "{other:?}"),
        }
        assert!(taken || round & 1 == 1, "the device has not received it");
        assert_eq!(queue.in_flight(), 8 - usize::from(taken));
        let done = drain(&mut queue, LONG);
        let target = fixture.peek();
        for end in done {
            let i = fills.iter().position(|t| *t == end.ticket).expect("one of these");
            let there = &target[i * 4096..(i + 1) * 4096];
            match end.result {
                Ok(()) => assert!(there.iter().all(|b| *b == byte)),
                Err(OpError::Cancelled) => assert!(asked && i == victim && end.bytes < 4096),
                Err(e) => panic!("{e}"),
            }
        }
        if taken {
            let there = victim * 4096..(victim + 1) * 4096;
            assert!(target[there.clone()] == before[there], "it did not happen");
        }
    }
    assert!(matches!(queue.cancel(Ticket::new(u64::MAX)), Cancelled::Unknown));
}

fn stops_and_starts_again<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let reason = || StopReason::Requested("for a test".into());
    let direction = directions(&queue)[0];
    assert!(!queue.restart() && queue.halted().is_none(), "it runs");
    if !queue.capabilities().contains(Capabilities::STOP) {
        queue.stop(reason());
        assert!(queue.halted().is_none() && !queue.restart(), "it ignores that");
        let operation = small(fixture, direction);
        assert_eq!(one(&mut queue, operation).result, Ok(()));
        return;
    }
    let operation = small(fixture, direction);
    let Work::Copy { host, .. } = &operation.work else { panic!("a copy") };
    let share = host.slice.reference();
    let ticket = queue.submit(operation).unwrap();
    queue.stop(reason());
    let refused = queue.submit(small(fixture, direction)).expect_err("stopped");
    assert_eq!(refused.reason, Refusal::Stopped(reason()));
    let end = drain(&mut queue, LONG).remove(0);
    assert_eq!((end.ticket, end.result), (ticket, Err(OpError::Stopped(reason()))));
    assert!(end.operation.into_slice().unwrap().reference().same_memory(&share));
    assert_eq!(queue.halted(), Some(reason()), "until it is started again");
    let begun = Instant::now();
    while !queue.restart() {
        assert!(begun.elapsed() < LONG, "it starts again once the device has stopped");
        std::thread::yield_now();
    }
    assert!(queue.halted().is_none());
    let operation = small(fixture, direction);
    let end = one(&mut queue, operation);
    assert!(end.result == Ok(()) && end.ticket > ticket, "tickets go on");
}

fn waits_when_dropped<F: Fixture>(fixture: &mut F) {
    for round in 0..8 {
        let mut queue = fixture.queue();
        let len = medium(fixture, &queue) as usize;
        // Writes to the target where the queue can: there it shows when one comes late.
        let direction = *directions(&queue).last().expect("a direction");
        let mut random = Random(round);
        let mut shares = Vec::new();
        for i in 0..queue.limits().capacity.min((fixture.target_len() / len as u64) as usize) {
            let mut host = fixture.host(len);
            host.slice.write(0, &random.bytes(len)).unwrap();
            shares.push(host.slice.reference());
            let at = fixture.at((i * len) as u64);
            let _ticket = queue.submit(Operation::copy(direction, host, at)).unwrap();
        }
        queue.poll(&mut Vec::new());
        drop(queue);
        let after = fixture.peek();
        assert!(shares.iter().all(|s| s.is_last()), "every buffer was released");
        std::thread::sleep(Duration::from_millis(5));
        assert!(fixture.peek() == after, "nothing is moved after the drop");
    }
}
