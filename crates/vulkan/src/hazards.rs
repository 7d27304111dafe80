//! Which copies must wait for which: ranges that were read and written since the last barrier.

use std::collections::BTreeMap;

/// Sets of addresses that have nothing to do with each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    /// Memory of this process.
    Host,
    /// Card addresses, also of what is reached by another address.
    Card,
    /// The queue's own patterns.
    Scratch,
}

/// Ranges, disjoint: first address to the one behind the last.
#[derive(Debug, Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn overlap(&self, start: u64, end: u64) -> bool {
        self.0.range(..end).next_back().is_some_and(|(_, behind)| *behind > start)
    }

    /// Adds a range that overlaps none; false, without any change, when it does.
    fn add(&mut self, start: u64, end: u64) -> bool {
        match self.0.range_mut(..end).next_back() {
            Some((_, behind)) if *behind > start => return false,
            // Most copies go on where the one before has ended.
            Some((_, behind)) if *behind == start => *behind = end,
            _ => drop(self.0.insert(start, end)),
        }
        true
    }

    /// Adds a range that may overlap others.
    fn join(&mut self, mut start: u64, mut end: u64) {
        while !self.add(start, end) {
            let (first, behind) = self.0.range(..end).next_back().map(|(f, b)| (*f, *b)).expect("it overlaps one");
            if first <= start && behind >= end {
                return;
            }
            self.0.remove(&first);
            (start, end) = (start.min(first), end.max(behind));
        }
    }
}

/// Ranges that are read and written between two barriers.
#[derive(Debug, Default)]
pub(crate) struct Hazards {
    read: [Ranges; 3],
    written: [Ranges; 3],
}

/// Ranges that are remembered; a barrier costs less than looking through more.
const MOST: usize = 4096;

/// A range: where, its first address, and the one behind its last.
pub(crate) type Place = (Side, u64, u64);

impl Hazards {
    /// Notes what a command reads and writes. True when there must be a barrier before it.
    pub fn adds(&mut self, reads: Option<Place>, writes: Place) -> bool {
        let (side, start, end) = writes;
        let side = side as usize;
        let many: usize = self.read.iter().chain(&self.written).map(|r| r.0.len()).sum();
        let mut waits = many > MOST || self.read[side].overlap(start, end);
        if let Some((side, start, end)) = reads {
            waits |= self.written[side as usize].overlap(start, end);
        }
        waits = waits || !self.written[side].add(start, end);
        if waits {
            self.clear();
            self.written[side].join(start, end);
        }
        if let Some((side, start, end)) = reads {
            self.read[side as usize].join(start, end);
        }
        waits
    }

    /// There was a barrier.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_wait_for_what_they_depend_on_and_for_nothing_else() {
        let mut hazards = Hazards::default();
        let card = |start, end| (Side::Card, start, end);
        let host = |start, end| (Side::Host, start, end);
        assert!(!hazards.adds(Some(host(0, 10)), card(0, 10)));
        assert!(!hazards.adds(Some(host(10, 20)), card(10, 20)), "beside it");
        assert!(!hazards.adds(Some(host(0, 20)), card(20, 40)), "the same source");
        assert!(hazards.adds(Some(host(40, 41)), card(19, 20)), "write after write");
        assert!(!hazards.adds(Some(host(41, 42)), card(0, 10)), "the barrier was for all");
        assert!(hazards.adds(Some(card(5, 6)), host(100, 101)), "read after write");
        assert!(hazards.adds(Some(host(0, 1)), card(5, 6)), "write after read");
        assert!(!hazards.adds(None, card(7, 8)));
        assert!(hazards.adds(None, card(7, 8)));
        // A copy onto itself is one command.
        assert!(!hazards.adds(Some(card(50, 60)), card(60, 70)));
    }

    #[test]
    fn ranges_are_joined_as_a_plain_list_of_bytes_says() {
        let mut seed = 1u64;
        let mut below = move |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for _ in 0..300 {
            let (mut ranges, mut bytes) = (Ranges::default(), [false; 64]);
            for _ in 0..20 {
                let start = below(60);
                let end = start + 1 + below(64 - start);
                let there = bytes[start as usize..end as usize].iter().any(|b| *b);
                assert_eq!(ranges.overlap(start, end), there, "{ranges:?} {start}..{end}");
                match below(3) {
                    0 => ranges.join(start, end),
                    1 if ranges.add(start, end) => assert!(!there),
                    1 => {
                        assert!(there);
                        continue;
                    }
                    _ => continue,
                }
                bytes[start as usize..end as usize].fill(true);
            }
            let covered: u64 = ranges.0.iter().map(|(s, e)| e - s).sum();
            assert_eq!(covered as usize, bytes.iter().filter(|b| **b).count());
            let apart = ranges.0.iter().zip(ranges.0.iter().skip(1)).all(|((_, end), (start, _))| end <= start);
            assert!(apart, "{ranges:?}");
        }
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut hazards = Hazards::default();
        let barriers = (0..10_000u64).filter(|i| hazards.adds(None, (Side::Card, i * 10, i * 10 + 5))).count();
        assert_eq!(barriers, 10_000 / MOST);
    }
}
