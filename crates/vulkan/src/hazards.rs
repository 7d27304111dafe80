//! Which copies must wait for which: ranges that were read and written since the last barrier.

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

/// Ranges, disjoint: first address, and the one behind the last. They are kept in order, in leaves that are short
/// enough to insert into; no leaf is empty.
#[derive(Debug, Default)]
struct Ranges {
    leaves: Vec<Vec<(u64, u64)>>,
    count: usize,
}

/// Ranges of a leaf at most.
const LEAF: usize = 64;

impl Ranges {
    /// The place of the last range that begins before `end`: leaf, and index in it.
    #[inline]
    fn before(&self, end: u64) -> Option<(usize, usize)> {
        let leaf = self.leaves.partition_point(|leaf| leaf[0].0 < end).checked_sub(1)?;
        Some((leaf, self.leaves[leaf].partition_point(|range| range.0 < end) - 1))
    }

    fn overlap(&self, start: u64, end: u64) -> bool {
        self.before(end).is_some_and(|(leaf, i)| self.leaves[leaf][i].1 > start)
    }

    /// Adds a range that overlaps none; false, without any change, when it does.
    fn add(&mut self, start: u64, end: u64) -> bool {
        let (leaf, i) = match self.before(end) {
            Some((leaf, i)) => {
                let behind = &mut self.leaves[leaf][i].1;
                if *behind > start {
                    return false;
                }
                // Most copies go on where the one before has ended.
                if *behind == start {
                    *behind = end;
                    return true;
                }
                (leaf, i + 1)
            }
            None if self.leaves.is_empty() => {
                self.leaves.push(Vec::with_capacity(LEAF));
                (0, 0)
            }
            None => (0, 0),
        };
        let ranges = &mut self.leaves[leaf];
        ranges.insert(i, (start, end));
        self.count += 1;
        if ranges.len() == LEAF {
            let mut rest = Vec::with_capacity(LEAF);
            rest.extend(ranges.drain(LEAF / 2..));
            self.leaves.insert(leaf + 1, rest);
        }
        true
    }

    /// Adds a range that may overlap others.
    fn join(&mut self, mut start: u64, mut end: u64) {
        while !self.add(start, end) {
            let (leaf, i) = self.before(end).expect("it overlaps one");
            let (first, behind) = self.leaves[leaf][i];
            if first <= start && behind >= end {
                return;
            }
            self.leaves[leaf].remove(i);
            self.count -= 1;
            if self.leaves[leaf].is_empty() {
                self.leaves.remove(leaf);
            }
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
        let many: usize = self.read.iter().chain(&self.written).map(|r| r.count).sum();
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
        let mut leaves = 0;
        for _ in 0..100 {
            let (mut ranges, mut bytes) = (Ranges::default(), [false; 1024]);
            for _ in 0..400 {
                let start = below(1020);
                let end = (start + 1 + below(8)).min(1024);
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
                leaves = leaves.max(ranges.leaves.len());
            }
            let all: Vec<_> = ranges.leaves.iter().flatten().copied().collect();
            let covered: u64 = all.iter().map(|(s, e)| e - s).sum();
            assert_eq!(covered as usize, bytes.iter().filter(|b| **b).count());
            assert!(all.windows(2).all(|w| w[0].1 <= w[1].0) && all.len() == ranges.count, "{ranges:?}");
            assert!(ranges.leaves.iter().all(|leaf| !leaf.is_empty() && leaf.len() < LEAF), "{ranges:?}");
        }
        assert!(leaves > 1, "enough ranges for several leaves");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut hazards = Hazards::default();
        let barriers = (0..10_000u64).filter(|i| hazards.adds(None, (Side::Card, i * 10, i * 10 + 5))).count();
        assert_eq!(barriers, 10_000 / MOST);
    }
}
