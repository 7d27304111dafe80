//! Free ranges by where they begin between two multiples of an alignment.

use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;

use crate::{Address, PageSize};

/// Finds a range that has enough bytes from a phase on, which lies before its first aligned address.
///
/// A range begins `r` bytes behind a multiple of the alignment. It has `len` bytes from a phase on if `r` is not above
/// the phase and `reach`, which is counted from that multiple, is `phase + len` at least. A tree over all `r` has the
/// longest reach below each node, and so leads to the nearest `r` in as many steps as `r` has bits.
#[derive(Clone, Debug)]
pub(crate) struct Phases<A> {
    pub(crate) align: PageSize,
    page: PageSize,
    /// (r in pages, reach less one, first).
    ranges: BTreeSet<(usize, u64, A)>,
    /// The longest reach less one below each node. Node 1 is the root, nodes `2 * n` and `2 * n + 1` are below node
    /// `n`, the leaves are the last half.
    longest: Vec<Option<u64>>,
}

impl<A: Address> Phases<A> {
    /// More phases than this are too many for a tree.
    const MOST: u64 = 1 << 18;

    /// An empty set; `None` for an alignment of too many pages.
    pub(crate) fn new(align: PageSize, page: PageSize) -> Option<Self> {
        let phases = align.bytes() / page.bytes();
        let longest = || vec![None; 2 * phases as usize];
        (phases <= Self::MOST).then(|| Self { align, page, ranges: BTreeSet::new(), longest: longest() })
    }

    fn key(&self, first: A, last: A) -> (usize, u64, A) {
        let multiple = first.align_down(self.align).bits();
        (((first.bits() - multiple) / self.page.bytes()) as usize, last.bits() - multiple, first)
    }

    pub(crate) fn insert(&mut self, first: A, last: A) {
        let key = self.key(first, last);
        self.ranges.insert(key);
        self.update(key.0);
    }

    pub(crate) fn remove(&mut self, first: A, last: A) {
        let key = self.key(first, last);
        self.ranges.remove(&key);
        self.update(key.0);
    }

    fn update(&mut self, r: usize) {
        let longest = self.ranges.range(..(r + 1, 0, A::new(0))).next_back().filter(|(of, ..)| *of == r);
        let mut node = self.longest.len() / 2 + r;
        self.longest[node] = longest.map(|(_, reach, _)| *reach);
        while node > 1 {
            node /= 2;
            self.longest[node] = self.longest[2 * node].max(self.longest[2 * node + 1]);
        }
    }

    /// The first address of the range with `len` bytes from the phase on that begins nearest to the phase, the shortest
    /// of them.
    pub(crate) fn find(&self, phase: u64, len: u64) -> Option<A> {
        let reach = phase.checked_add(len - 1)?;
        let reaches = |node: usize| self.longest[node] >= Some(reach);
        let leaves = self.longest.len() / 2;
        // Up, until what lies left of the phase has one; then down on the right.
        let mut node = leaves + (phase / self.page.bytes()) as usize;
        while !reaches(node) {
            while node.is_multiple_of(2) {
                node /= 2;
            }
            node = if node > 1 { node - 1 } else { return None };
        }
        while node < leaves {
            node = 2 * node + usize::from(reaches(2 * node + 1));
        }
        self.ranges.range((node - leaves, reach, A::new(0))..).next().map(|(.., first)| *first)
    }
}
