//! The test suite that every channel takes.
//!
//! A channel joins by describing itself as a [`Fixture`] and calling [`suite`] from one test.

use std::time::Duration;

use dmalane_dma::BufferSlice;

use crate::{Channel, Direction, Far, OpError, Refusal, Transfer, drain, run};

/// A channel under test and what lies at its far end.
pub trait Fixture {
    /// The channel's type.
    type Channel: Channel;

    /// A channel to a far end of [`Fixture::far_len`] bytes.
    fn channel(&mut self) -> Self::Channel;

    /// Bytes at the far end, at least two alignments; at least 1 MiB where the channel has that.
    fn far_len(&self) -> u64;

    /// The far end at this offset. A transfer past `far_len` must fail, not be refused.
    fn far(&mut self, offset: u64, part: &BufferSlice) -> <Self::Channel as Channel>::Far;

    /// A buffer of host memory that this channel can use, of at least `len` bytes.
    fn part(&mut self, len: usize) -> BufferSlice;

    /// Reads the far end behind the channel's back.
    fn peek(&mut self, offset: u64, len: usize) -> Vec<u8>;

    /// Writes the far end behind the channel's back.
    fn poke(&mut self, offset: u64, bytes: &[u8]);

    /// Lets go of whatever the fixture itself holds of the buffers that it handed out, such as registrations.
    fn forget(&mut self) {}

    /// Transfers start and end at multiples of this.
    fn align(&self) -> usize {
        1
    }

    /// How many random transfers each way: fewer for a device that takes long for each.
    fn rounds(&self) -> u64 {
        60
    }

    /// The directions that the channel does.
    fn directions(&self) -> &[Direction] {
        &[Direction::ToHost, Direction::FromHost]
    }
}

const LONG: Duration = Duration::from_secs(30);

/// Runs all tests.
///
/// # Panics
/// When a test fails.
pub fn suite<F: Fixture>(fixture: &mut F) {
    moves_exactly_what_it_is_told(fixture);
    gives_back_what_it_refuses(fixture);
    reports_a_far_end_that_is_not_there(fixture);
    keeps_many_in_flight(fixture);
    may_be_dropped_with_work_in_flight(fixture);
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    (0..len).map(|_| next() as u8).collect()
}

/// A number below `n` and a multiple of `align`.
fn pick(seed: &mut u64, n: u64, align: usize) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let align = align as u64;
    (*seed >> 33) % n.max(1) / align * align
}

fn moves_exactly_what_it_is_told<F: Fixture>(fixture: &mut F) {
    let mut channel = fixture.channel();
    let (far_len, align) = (fixture.far_len(), fixture.align());
    let mut seed = 1;
    for round in 0..fixture.rounds() {
        let len = match round {
            0 => align as u64,
            1 => far_len.min(channel.limits().max_len) / align as u64 * align as u64,
            _ => pick(&mut seed, (far_len / 2).min(channel.limits().max_len - align as u64), align) + align as u64,
        };
        let at = pick(&mut seed, far_len - len + 1, align);
        let before = pattern(round, far_len as usize);
        for &direction in fixture.directions().to_vec().iter() {
            fixture.poke(0, &before);
            let mut part = fixture.part(len as usize + 2 * align);
            let inside = pattern(round + 1000, part.len());
            part.write(0, &inside).unwrap();
            let (head, rest) = part.split_at(align).unwrap();
            let (middle, tail) = rest.split_at(len as usize).unwrap();
            let far = fixture.far(at, &middle);
            let transfer = run(&mut channel, Transfer { part: middle, direction, far }, LONG).unwrap();
            let whole = head.join(transfer.part).unwrap().join(tail).unwrap();
            let mut got = vec![0; whole.len()];
            whole.read(0, &mut got).unwrap();
            let (mut host, mut there) = (inside.clone(), before.clone());
            let (h, t) = (align..align + len as usize, at as usize..(at + len) as usize);
            match direction {
                Direction::ToHost => host[h].copy_from_slice(&before[t]),
                Direction::FromHost => there[t].copy_from_slice(&inside[h]),
            }
            assert!(got == host, "host memory, round {round} {direction:?} {len} at {at}");
            assert!(fixture.peek(0, far_len as usize) == there, "far end, round {round} {direction:?} {len} at {at}");
        }
    }
}

fn gives_back_what_it_refuses<F: Fixture>(fixture: &mut F) {
    let mut channel = fixture.channel();
    let direction = fixture.directions()[0];
    let align = fixture.align();
    let part = fixture.part(align);
    let far = fixture.far(0, &part);
    let (empty, rest) = part.split_at(0).unwrap();
    let refused = channel.submit(Transfer { part: empty, direction, far: far.clone() }).unwrap_err();
    assert_eq!(refused.reason, Refusal::Empty);
    assert!(refused.transfer.part.join(rest).is_ok(), "the part comes back");
    for direction in [Direction::ToHost, Direction::FromHost] {
        if !fixture.directions().contains(&direction) {
            let part = fixture.part(align);
            let far = fixture.far(0, &part);
            let refused = channel.submit(Transfer { part, direction, far }).unwrap_err();
            assert_eq!(refused.reason, Refusal::Unsupported(direction));
        }
    }
    // Fill it up: the one too many comes back as Full, and after a drain there is room again.
    let capacity = channel.limits().capacity;
    let mut refused = None;
    for _ in 0..=capacity {
        let part = fixture.part(align);
        let far = fixture.far(0, &part);
        match channel.submit(Transfer { part, direction, far }) {
            Ok(_ticket) => assert!(channel.in_flight() <= capacity),
            Err(r) => {
                assert_eq!(r.reason, Refusal::Full);
                refused = Some(r.transfer);
                break;
            }
        }
    }
    let transfer = refused.expect("a channel refuses more than its capacity");
    assert_eq!(drain(&mut channel, LONG).len(), capacity);
    assert_eq!(channel.in_flight(), 0);
    run(&mut channel, transfer, LONG).unwrap();
}

fn reports_a_far_end_that_is_not_there<F: Fixture>(fixture: &mut F) {
    let mut channel = fixture.channel();
    let (far_len, align) = (fixture.far_len(), fixture.align() as u64);
    let direction = fixture.directions()[0];
    for at in [far_len, far_len - align, far_len + (1 << 40)] {
        let part = fixture.part(2 * align as usize);
        let (part, _) = part.split_at(2 * align as usize).unwrap();
        let far = fixture.far(at / align * align, &part);
        let _ticket = channel.submit(Transfer { part, direction, far }).unwrap();
        let done = drain(&mut channel, LONG);
        assert_eq!(done.len(), 1);
        assert!(done[0].result.is_err(), "{direction:?} at {at} of {far_len}");
    }
    // The channel still works.
    let part = fixture.part(align as usize);
    let far = fixture.far(0, &part);
    assert!(far.advance(1).is_some());
    let _: Result<(), OpError> = run(&mut channel, Transfer { part, direction, far }, LONG).map(drop).map_err(|e| {
        panic!("after a failed operation: {e}");
    });
}

fn keeps_many_in_flight<F: Fixture>(fixture: &mut F) {
    let mut channel = fixture.channel();
    let align = fixture.align();
    let (far_len, direction) = (fixture.far_len(), Direction::ToHost);
    if !fixture.directions().contains(&direction) {
        return;
    }
    let there = pattern(77, far_len as usize);
    fixture.poke(0, &there);
    let count = 4 * channel.limits().capacity.min(200);
    let mut seed = 5;
    let mut done = Vec::new();
    let mut expected = std::collections::HashMap::new();
    for _ in 0..count {
        let len = pick(&mut seed, some(far_len, &channel) - align as u64, align) as usize + align;
        let at = pick(&mut seed, far_len - len as u64 + 1, align);
        let (part, _) = fixture.part(len).split_at(len).unwrap();
        let far = fixture.far(at, &part);
        let mut transfer = Transfer { part, direction, far };
        let ticket = loop {
            match channel.submit(transfer) {
                Ok(ticket) => break ticket,
                Err(r) => {
                    assert_eq!(r.reason, Refusal::Full);
                    assert!(channel.wait(&mut done, LONG) > 0, "a full channel makes progress");
                    transfer = r.transfer;
                }
            }
        };
        assert!(expected.insert(ticket, (at, len)).is_none(), "tickets are unique");
    }
    done.extend(drain(&mut channel, LONG));
    assert_eq!(done.len(), count);
    for c in done {
        let (at, len) = expected.remove(&c.ticket).expect("each operation ends once");
        assert_eq!(c.result, Ok(()));
        let mut got = vec![0; len];
        c.transfer.part.read(0, &mut got).unwrap();
        assert!(got == there[at as usize..at as usize + len]);
    }
    assert!(expected.is_empty());
}

/// The length of a transfer of which many are made: 64 KiB, or what the channel does.
fn some(far_len: u64, channel: &impl Channel) -> u64 {
    (64 << 10).min(channel.limits().max_len).min(far_len)
}

fn may_be_dropped_with_work_in_flight<F: Fixture>(fixture: &mut F) {
    for round in 0..8 {
        let mut channel = fixture.channel();
        let len = some(fixture.far_len(), &channel) as usize / fixture.align() * fixture.align();
        // Writes to the far end where the channel can: there it shows when one comes late.
        let direction = *fixture.directions().last().expect("a direction");
        let mut memories = Vec::new();
        for i in 0..channel.limits().capacity.min((fixture.far_len() / len as u64) as usize) {
            let (mut part, _) = fixture.part(len).split_at(len).unwrap();
            part.write(0, &pattern(round + 1, len)).unwrap();
            memories.push(part.reference());
            let far = fixture.far((i * len) as u64, &part);
            let _ticket = channel.submit(Transfer { part, direction, far }).unwrap();
        }
        channel.poll(&mut Vec::new());
        drop(channel);
        fixture.forget();
        let far_len = fixture.far_len() as usize;
        let after = fixture.peek(0, far_len);
        assert!(memories.iter().all(|s| s.is_last()), "every buffer was let go of");
        std::thread::sleep(Duration::from_millis(5));
        assert!(fixture.peek(0, far_len) == after, "nothing is moved after the drop");
    }
}
