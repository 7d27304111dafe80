//! The test suite that every queue takes.
//!
//! A queue joins by describing itself as a [`Fixture`] and calling [`suite`] from one test. Every operation is also done by
//! [`Model`], slowly: one byte after the other in two plain vectors.

use std::time::Duration;

use dmalane_dma::BufferSlice;

use crate::{
    Abilities, Cancelled, DeviceAddr, Direction, Ended, HostPart, OpError, Operation, Queue, Refusal, Registered,
    Shape, Work,
};

/// A queue under test and the device memory at its far end.
pub trait Fixture {
    /// The queue's type.
    type Queue: Queue;

    /// A queue to device memory of [`Fixture::far_len`] bytes.
    fn queue(&mut self) -> Self::Queue;

    /// Bytes of device memory, at least 64 KiB.
    fn far_len(&self) -> u64;

    /// The device memory at this offset. What runs past `far_len` must fail, not be refused.
    fn far(&self, offset: u64) -> DeviceAddr;

    /// A buffer of exactly so many bytes, registered.
    fn host(&mut self, len: usize) -> (BufferSlice, Registered);

    /// Reads the device memory behind the queue's back.
    fn peek(&mut self) -> Vec<u8>;

    /// Writes the device memory behind the queue's back.
    fn poke(&mut self, bytes: &[u8]);
}

const LONG: Duration = Duration::from_secs(60);

/// Runs all tests.
///
/// # Panics
/// When a test fails.
pub fn suite<F: Fixture>(fixture: &mut F) {
    does_what_the_model_does(fixture);
    compares_to_the_byte(fixture);
    gives_back_what_it_refuses(fixture);
    skips_what_is_left_of_an_operation(fixture);
    takes_back_and_cancels(fixture);
    stops_and_starts_again(fixture);
}

/// Pseudo-random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * u128::from(n)) >> 64) as u64
    }

    /// Bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }
}

/// What an operation does, byte by byte.
#[derive(Clone, Debug)]
pub struct Model {
    /// Device memory.
    pub far: Vec<u8>,
}

impl Model {
    /// Does an operation on the model. `host` are the bytes of the operation's parts, one behind the other; `at` gives the offset of a place.
    /// Gives the offset at which a comparison found a difference.
    ///
    /// # Panics
    /// When the operation does not lie within the memory.
    pub fn apply(&mut self, operation: &Operation, host: &mut [u8], at: &dyn Fn(DeviceAddr) -> u64) -> Option<u64> {
        self.apply_first(u64::MAX, operation, host, at)
    }

    /// The same for the first bytes of the operation only.
    ///
    /// # Panics
    /// As [`Model::apply`].
    pub fn apply_first(
        &mut self,
        bytes: u64,
        operation: &Operation,
        host: &mut [u8],
        at: &dyn Fn(DeviceAddr) -> u64,
    ) -> Option<u64> {
        let total = operation.bytes().min(bytes);
        // The place of the payload's byte `i` on either side.
        let shape = operation.shape.as_deref().copied();
        let near = |i: u64| shape.map_or(i, |s| i / s.row * s.near_pitch + i % s.row) as usize;
        let far = |i: u64| shape.map_or(i, |s| i / s.row * s.far_pitch + i % s.row) as usize;
        match &operation.work {
            Work::Copy { direction, at: place, .. } => {
                let base = at(*place) as usize;
                for i in 0..total {
                    match direction {
                        Direction::FromHost => self.far[base + far(i)] = host[near(i)],
                        Direction::ToHost => host[near(i)] = self.far[base + far(i)],
                    }
                }
            }
            Work::Compare { at: place, .. } => {
                let base = at(*place) as usize;
                return (0..total).find(|i| self.far[base + far(*i)] != host[near(*i)]);
            }
            Work::Gather(g) => {
                let places = g.device.iter().flat_map(|(place, len)| {
                    let base = at(*place);
                    (0..*len).map(move |i| (base + i) as usize)
                });
                for (i, place) in places.take(total as usize).enumerate() {
                    match g.direction {
                        Direction::FromHost => self.far[place] = host[i],
                        Direction::ToHost => host[i] = self.far[place],
                    }
                }
            }
            Work::Within { from, to, .. } => {
                let (from, to) = (at(*from) as usize, at(*to) as usize);
                for i in 0..total {
                    self.far[to + far(i)] = self.far[from + near(i)];
                }
            }
            Work::Fill { at: place, pattern, .. } => {
                let base = at(*place) as usize;
                let row = shape.map_or(u64::MAX, |s| s.row);
                for i in 0..total {
                    self.far[base + far(i)] = pattern.to_le_bytes()[(i % row % 8) as usize];
                }
            }
            Work::Fence => {}
        }
        None
    }
}

/// A random operation that lies within the memory and moves at most about `most` bytes, and the bytes of its host side, in order. Copies within the
/// device never overlap, and rows that are written do not either.
pub fn operation<F: Fixture>(
    fixture: &mut F,
    random: &mut Random,
    abilities: Abilities,
    most: u64,
) -> (Operation, Vec<u8>) {
    let far_len = fixture.far_len();
    loop {
        let kind = random.below(8);
        let shaped = abilities.contains(Abilities::SHAPE) && random.below(3) == 0 && kind < 6;
        let len = random.below(most.min(far_len / 4)) + 1;
        let (shape, near, far) = match shaped {
            false => (None, len, len),
            true => {
                let row = random.below(len.min(3000)) + 1;
                let rows = (len / row).clamp(1, 200) as u32;
                let (near_pitch, far_pitch) = (row + random.below(100), row + random.below(100));
                let shape = Shape { row, rows, near_pitch, far_pitch };
                let (near, far) = (shape.extent(near_pitch), shape.extent(far_pitch));
                (Some(shape), near.expect("short"), far.expect("short"))
            }
        };
        if near > far_len / 2 || far > far_len / 2 {
            continue;
        }
        let payload = shape.map_or(len, |s| s.row * u64::from(s.rows));
        // Two halves, so that a source and a destination do not overlap.
        let (low, high) = (random.below(far_len / 2 - near + 1), far_len / 2 + random.below(far_len / 2 - far + 1));
        let anywhere = random.below(far_len - far + 1);
        let direction = if random.below(2) == 0 { Direction::FromHost } else { Direction::ToHost };
        let bytes = random.bytes(near as usize);
        let mut host = |bytes: &[u8]| {
            let (mut part, via) = fixture.host(bytes.len());
            part.write(0, bytes).expect("as long as it");
            HostPart { part, via }
        };
        let (work, bytes): (Work, Vec<u8>) = match kind {
            0..=2 => (Work::Copy { direction, host: host(&bytes), at: fixture.far(anywhere) }, bytes),
            3 => (Work::Compare { host: host(&bytes), at: fixture.far(anywhere) }, bytes),
            4 => (Work::Within { from: fixture.far(low), to: fixture.far(high), len: payload }, Vec::new()),
            5 => {
                let pattern = random.below(u64::MAX);
                (Work::Fill { at: fixture.far(anywhere), len: payload, pattern }, Vec::new())
            }
            6 => {
                // Both sides cut at random; the device's pieces in one of the four quarters each, so that none overlap.
                let cut = |random: &mut Random| {
                    let mut left = len;
                    let mut pieces = Vec::new();
                    while left > 0 {
                        let n = if pieces.len() == 3 { left } else { random.below(left) + 1 };
                        pieces.push(n);
                        left -= n;
                    }
                    pieces
                };
                let mut at = 0;
                let host: Vec<HostPart> = cut(random)
                    .into_iter()
                    .map(|n| {
                        at += n as usize;
                        host(&bytes[at - n as usize..at])
                    })
                    .collect();
                let pieces = cut(random);
                let quarter = far_len / 4;
                let device = pieces.into_iter().enumerate().map(|(i, n)| {
                    let place = i as u64 * quarter + random.below(quarter - n + 1);
                    (fixture.far(place), n)
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
        if abilities.contains(operation.needs()) {
            return (operation, bytes);
        }
    }
}

/// The bytes of an operation's parts, in order.
pub fn host_bytes(operation: &Operation) -> Vec<u8> {
    let parts: Vec<&HostPart> = match &operation.work {
        Work::Copy { host, .. } | Work::Compare { host, .. } => vec![host],
        Work::Gather(g) => g.host.iter().collect(),
        _ => Vec::new(),
    };
    let mut bytes = Vec::new();
    for HostPart { part, .. } in parts {
        let mut these = vec![0; part.len()];
        part.read(0, &mut these).expect("all of it");
        bytes.extend(these);
    }
    bytes
}

/// Offsets of places, as [`Fixture::far`] makes them.
pub fn offset_of<F: Fixture>(fixture: &F) -> impl Fn(DeviceAddr) -> u64 + use<F> {
    let bits = |at: DeviceAddr| match at {
        DeviceAddr::Card(a) => dmalane_addr::Address::bits(a),
        DeviceAddr::Va(a) => dmalane_addr::Address::bits(a),
    };
    let base = bits(fixture.far(0));
    move |at| bits(at) - base
}

fn one<Q: Queue>(queue: &mut Q, operation: Operation) -> Ended {
    let ticket = queue.enqueue(operation).expect("there is room");
    let mut ended = Vec::new();
    while ended.is_empty() {
        assert!(queue.wait(&mut ended, LONG) > 0 || queue.in_flight() > 0, "it ends");
    }
    assert_eq!((ended.len(), ended[0].ticket, queue.in_flight()), (1, ticket, 0));
    ended.remove(0)
}

fn does_what_the_model_does<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let mut random = Random(1);
    let mut model = Model { far: random.bytes(fixture.far_len() as usize) };
    fixture.poke(&model.far);
    let at = offset_of(fixture);
    let abilities = queue.abilities();
    // One by one, then many at once: they end in order, so the model may run ahead.
    let mut ended = Vec::new();
    let mut expected = std::collections::VecDeque::new();
    let mut before = queue.stats();
    let (mut bytes_done, mut failed, mut count) = (0, 0, 0u64);
    for round in 0..400u64 {
        let (operation, mut bytes) = operation(fixture, &mut random, abilities, 9000);
        let differs = model.apply(&operation, &mut bytes, &at);
        let total = operation.bytes();
        let mut operation = Some(operation);
        let ticket = loop {
            match queue.enqueue(operation.take().expect("given back")) {
                Ok(ticket) => break ticket,
                Err(rejected) => {
                    assert_eq!(rejected.reason, Refusal::Full);
                    assert!(queue.wait(&mut ended, LONG) > 0, "a full queue makes progress");
                    operation = Some(rejected.operation);
                }
            }
        };
        expected.push_back((ticket, bytes, differs, total));
        if round < 100 || random.below(8) == 0 {
            while queue.in_flight() > 0 {
                queue.wait(&mut ended, LONG);
            }
        }
        for end in ended.drain(..) {
            let (ticket, bytes, differs, total) = expected.pop_front().expect("each ends once");
            assert_eq!(end.ticket, ticket, "in order");
            let (result, done) = match differs {
                None => (Ok(()), total),
                Some(offset) => (Err(OpError::Differs { offset }), offset),
            };
            assert_eq!((end.result, end.bytes), (result, done), "{:?}", end.operation);
            assert!(host_bytes(&end.operation) == bytes, "host memory, {:?}", end.operation);
            bytes_done += done;
            failed += u64::from(differs.is_some());
            count += 1;
        }
        if queue.in_flight() == 0 {
            assert!(fixture.peek() == model.far, "device memory, round {round}");
        }
    }
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, LONG);
    }
    assert_eq!(ended.len(), expected.len());
    for (end, (.., differs, _)) in ended.drain(..).zip(expected.drain(..)) {
        bytes_done += end.bytes;
        failed += u64::from(differs.is_some());
        count += 1;
    }
    assert!(fixture.peek() == model.far);
    let stats = queue.stats();
    before.submitted += count;
    assert_eq!((stats.submitted, stats.ok, stats.failed), (before.submitted, count - failed, failed));
    assert_eq!(stats.bytes, bytes_done);
    assert!(stats.latency.count() > 0 && stats.latency.p50() <= stats.latency.p99());
}

fn compares_to_the_byte<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    if !queue.abilities().contains(Abilities::COMPARE) {
        return;
    }
    let mut random = Random(2);
    let far = random.bytes(fixture.far_len() as usize);
    fixture.poke(&far);
    for flip in [0, 1, 4095, 4096, 20_000, 29_999] {
        let (mut part, via) = fixture.host(30_000);
        part.write(0, &far[77..30_077]).unwrap();
        let end = one(&mut queue, Operation::compare(part, via, fixture.far(77)));
        assert_eq!((end.result, end.bytes), (Ok(()), 30_000));
        let HostPart { mut part, via } = end.operation.into_parts().remove(0);
        part.write(flip, &[far[77 + flip] ^ 0x10]).unwrap();
        let end = one(&mut queue, Operation::compare(part, via, fixture.far(77)));
        assert_eq!(end.result, Err(OpError::Differs { offset: flip as u64 }));
        assert_eq!(end.bytes, flip as u64);
    }
    assert!(fixture.peek() == far, "nothing was changed");
}

fn gives_back_what_it_refuses<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    let (at, far_len) = (fixture.far(0), fixture.far_len());
    let shape = |row, rows, near_pitch, far_pitch| Shape { row, rows, near_pitch, far_pitch };
    let host = |fixture: &mut F, len| {
        let (part, via) = fixture.host(len);
        HostPart { part, via }
    };
    let a = host(fixture, 100);
    let b = host(fixture, 100);
    let (empty, via) = {
        let (part, via) = fixture.host(8);
        (part.split_at(0).expect("nothing").0, via)
    };
    let cases: Vec<(Operation, Refusal)> = vec![
        (Operation::copy(Direction::FromHost, empty, via, at), Refusal::Empty),
        (Operation::fill(at, 0, 1), Refusal::Empty),
        (Operation::within(at, at, 0), Refusal::Empty),
        (Operation::fill(at, u64::MAX, 1), Refusal::PastTheTop),
        (Operation::fill(at, 10, 1).shaped(shape(3, 3, 3, 3)), Refusal::Mismatch),
        (Operation::fill(at, 9, 1).shaped(shape(3, 0, 3, 3)), Refusal::Empty),
        (Operation::fill(at, 9, 1).shaped(shape(3, 3, 3, u64::MAX)), Refusal::PastTheTop),
        (Work::Copy { direction: Direction::FromHost, host: a, at }.into(), Refusal::Mismatch),
        (Operation::gather(Direction::FromHost, vec![b], vec![(at, 99)]), Refusal::Mismatch),
        (Operation::gather(Direction::FromHost, vec![], vec![]), Refusal::Empty),
        (Operation::fence().shaped(shape(1, 1, 1, 1)), Refusal::Mismatch),
    ];
    for (operation, reason) in cases {
        let operation = match (&operation.work, &reason) {
            // 100 bytes of host memory for rows that cover 101.
            (Work::Copy { .. }, Refusal::Mismatch) => operation.shaped(shape(1, 2, 100, 1)),
            _ => operation,
        };
        if queue.abilities().contains(operation.needs()) {
            assert_eq!(queue.enqueue(operation).expect_err("refused").reason, reason);
        }
    }
    let missing = Abilities::all() - queue.abilities();
    if missing.contains(Abilities::FENCE) {
        let refused = queue.enqueue(Operation::fence()).expect_err("refused").reason;
        assert_eq!(refused, Refusal::Unable(Abilities::FENCE));
    }
    // What runs past the end fails, and the next operation works.
    let (part, via) = fixture.host(200);
    let end = one(&mut queue, Operation::copy(Direction::FromHost, part, via, fixture.far(far_len - 100)));
    assert!(end.result.is_err() && end.bytes <= 100, "{:?}", end.result);
    let (part, via) = fixture.host(200);
    assert_eq!(one(&mut queue, Operation::copy(Direction::ToHost, part, via, at)).result, Ok(()));
    // Full is full, and after a drain there is room again.
    let mut taken = 0;
    let refused = loop {
        let (part, via) = fixture.host(8);
        match queue.enqueue(Operation::copy(Direction::ToHost, part, via, at)) {
            Ok(_ticket) => taken += 1,
            Err(rejected) => break rejected,
        }
    };
    assert_eq!((refused.reason, taken), (Refusal::Full, queue.limits().capacity));
    assert_eq!(queue.stats().full, 1);
    let mut ended = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, LONG);
    }
    assert_eq!(ended.len(), taken);
    assert_eq!(one(&mut queue, refused.operation).result, Ok(()));
}

fn skips_what_is_left_of_an_operation<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    if !queue.abilities().contains(Abilities::GATHER) {
        return;
    }
    let far_len = fixture.far_len();
    fixture.poke(&vec![1; far_len as usize]);
    let (mut part, via) = fixture.host(300);
    part.write(0, &[2; 300]).unwrap();
    let device = vec![(fixture.far(0), 100), (fixture.far(far_len), 100), (fixture.far(1000), 100)];
    let operation = Operation::gather(Direction::FromHost, vec![HostPart { part, via }], device);
    let after = Operation::fill(fixture.far(2000), 10, u64::MAX);
    let (a, b) = (queue.enqueue(operation).unwrap(), queue.enqueue(after).unwrap());
    let mut ended = Vec::new();
    while ended.len() < 2 {
        assert!(queue.wait(&mut ended, LONG) > 0);
    }
    assert_eq!((ended[0].ticket, ended[1].ticket), (a, b));
    assert!(ended[0].result.is_err() && ended[0].bytes == 100, "{:?}", ended[0]);
    assert_eq!(ended[1].result, Ok(()), "the next operation is none of its business");
    let far = fixture.peek();
    assert!(
        far[..100].iter().all(|b| *b == 2) && far[1000..1100].iter().all(|b| *b == 1),
        "the third piece is skipped"
    );
}

fn takes_back_and_cancels<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    if !queue.abilities().contains(Abilities::CANCEL) {
        return;
    }
    fixture.poke(&vec![0; fixture.far_len() as usize]);
    let mut random = Random(3);
    let mut ended = Vec::new();
    for round in 0..60u64 {
        let byte = round as u8 + 1;
        let pattern = u64::from_le_bytes([byte; 8]);
        let fills: Vec<_> = (0..8)
            .map(|i| queue.enqueue(Operation::fill(fixture.far(i * 4096), 4096, pattern)).expect("room"))
            .collect();
        let victim = random.below(8) as usize;
        if round & 1 == 1 {
            queue.doorbell();
        }
        let before = fixture.peek();
        let (mut asked, mut taken) = (false, false);
        match queue.cancel(fills[victim]) {
            Cancelled::TakenBack(operation) => {
                taken = true;
                assert!(round & 1 == 0 && matches!(operation.work, Work::Fill { .. }));
                assert!(matches!(queue.cancel(fills[victim]), Cancelled::Unknown), "it is back");
            }
            Cancelled::Asked => asked = true,
            other => assert!(matches!(other, Cancelled::TooLate | Cancelled::Unknown), "{other:?}"),
        }
        assert_eq!(queue.in_flight(), 8 - usize::from(taken));
        while queue.in_flight() > 0 {
            queue.wait(&mut ended, LONG);
        }
        let far = fixture.peek();
        for end in ended.drain(..) {
            let i = fills.iter().position(|t| *t == end.ticket).expect("one of these");
            let there = &far[i * 4096..(i + 1) * 4096];
            match end.result {
                Ok(()) => assert!(there.iter().all(|b| *b == byte)),
                Err(OpError::Cancelled) => assert!(asked && i == victim && end.bytes < 4096),
                Err(e) => panic!("{e}"),
            }
        }
        if taken {
            let there = victim * 4096..(victim + 1) * 4096;
            assert!(far[there.clone()] == before[there], "it did not happen");
        }
    }
    assert!(queue.stats().cancelled >= 30, "{:?}", queue.stats());
    assert!(matches!(queue.cancel(crate::Ticket::new(u64::MAX)), Cancelled::Unknown));
}

fn stops_and_starts_again<F: Fixture>(fixture: &mut F) {
    let mut queue = fixture.queue();
    assert!(!queue.restart() && queue.halted().is_none(), "it runs");
    let (part, via) = fixture.host(4096);
    let memory = part.reference();
    let ticket = queue.enqueue(Operation::copy(Direction::ToHost, part, via, fixture.far(0))).unwrap();
    queue.stop("for a test");
    assert_eq!(queue.halted().as_deref(), Some("for a test"));
    let (part, via) = fixture.host(4096);
    let refused = queue.enqueue(Operation::copy(Direction::ToHost, part, via, fixture.far(0)));
    assert!(matches!(refused.expect_err("stopped").reason, Refusal::Stopped(_)));
    let mut ended = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, LONG);
    }
    let end = ended.remove(0);
    assert_eq!((end.ticket, end.result), (ticket, Err(OpError::Stopped("for a test".into()))));
    let parts = end.operation.into_parts();
    assert!(parts[0].part.reference().same_memory(&memory));
    assert_eq!(queue.halted().as_deref(), Some("for a test"), "until it is started again");
    assert!(queue.restart() && queue.halted().is_none(), "it starts again");
    let (part, via) = fixture.host(4096);
    let end = one(&mut queue, Operation::copy(Direction::ToHost, part, via, fixture.far(0)));
    assert!(end.result == Ok(()) && end.ticket.number() > ticket.number(), "tickets go on");
    assert_eq!(queue.stats().stops, 1);
}
