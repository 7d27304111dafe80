//! Memory of nodes: taking and giving it back, and what is reserved for the nodes that later unbinds need.

use dmalane_iopt::{Format, MAX_LEVELS};

use super::node::{ALL, Node};
use super::{Cursor, NO_CHUNK, ROOT, Records, Window};
use crate::record::Record;
use crate::slots::Full;
use crate::words::Words;

impl<F: Format> Records<F> {
    /// Bytes of memory in use; what is reserved for unbinds is not.
    pub(crate) fn bytes(&self) -> usize {
        self.words.all.len() * 8 + self.nodes.len() * size_of::<Node<F>>() + self.spare.capacity() * size_of::<u32>()
    }

    /// All groups of a node below the root.
    const GROUPS: u64 = Node::<F>::groups_of(0, Self::entries(Self::LAST) - 1);
    pub(super) const IN_GROUP: usize = 1 << Node::<F>::GROUP;

    /// An empty node below the root, with memory for entries `i` to `j`; what that holds is to be written if not
    /// `zeroed`. Such that there is still memory for `keep` whole nodes.
    pub(super) fn take(&mut self, i: usize, j: usize, keep: u64, zeroed: bool) -> Result<u32, Full> {
        let (class, groups) = Self::block(Node::<F>::groups_of(i, j));
        self.keep_numbers(keep.saturating_add(1))?;
        let at = self.words.take(class, keep, zeroed)?;
        let node = Node::new(at, 1 << (Node::<F>::GROUP + class), if groups == Self::GROUPS { ALL } else { groups });
        Ok(match self.spare.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32 // `keep_numbers` says that it fits
            }
        })
    }

    /// The class of the smallest block of memory for these groups, and all groups that it has memory for then.
    fn block(mut groups: u64) -> (u32, u64) {
        let class = Words::class(groups.count_ones());
        while groups.count_ones() < 1 << class {
            // One next to those that are there.
            let above = groups << 1 & !groups & Self::GROUPS;
            let next = if above != 0 { above } else { groups >> 1 & !groups };
            groups |= next & next.wrapping_neg();
        }
        (class, groups)
    }

    /// Makes room for `count` nodes more, their words apart.
    fn keep_numbers(&mut self, count: u64) -> Result<(), Full> {
        let Some(fresh) = count.checked_sub(self.spare.len() as u64) else { return Ok(()) };
        let fresh = u32::try_from(fresh + self.nodes.len() as u64).map_err(|_| Full)? as usize - self.nodes.len();
        self.nodes.try_reserve(fresh)?;
        // So that a commit need not ask for memory.
        Ok(self.spare.try_reserve(self.nodes.len() + fresh - self.spare.len())?)
    }

    /// Reserves the memory for making records of single pages of all that is bound, and of records that take `more`
    /// nodes for that.
    pub(crate) fn keep_nodes(&mut self, more: u64) -> Result<(), Full> {
        let keep = self.splits.saturating_add(more);
        self.keep_numbers(keep)?;
        self.words.keep(keep)
    }

    /// The nodes that it takes to make records of single pages of one at `level`.
    pub(super) const fn splits_of(level: u32) -> u64 {
        let (mut nodes, mut at) = (0, Self::LAST);
        while at > level {
            nodes = 1 + (nodes << F::INDEX_BITS);
            at -= 1;
        }
        nodes
    }

    /// Gives entries `i` to `j` of a node memory.
    #[inline]
    pub(super) fn cover(&mut self, id: u32, i: usize, j: usize) -> Result<(), Full> {
        if self.nodes[id as usize].covers(i, j) { Ok(()) } else { self.add_groups(id, i, j) }
    }

    #[cold]
    fn add_groups(&mut self, id: u32, i: usize, j: usize) -> Result<(), Full> {
        let node = &mut self.nodes[id as usize];
        let (old, need) = (node.groups, Node::<F>::groups_of(i, j));
        // Where groups in use go on, there are four times as many, and from half of all on there are all.
        let (low, high) = (need.trailing_zeros(), 64 - need.leading_zeros());
        let below = if low > 0 { (old << (64 - low)).leading_ones() } else { 0 };
        let above = if high < 64 { (old >> high).trailing_ones() } else { 0 };
        let mask = |from: u32, count: u32| if count == 0 { 0 } else { ALL >> (64 - count) << from };
        let (below, above) = ((3 * below).min(64 - high), (3 * above).min(low));
        let more = mask(high, below) | mask(low - above, above);
        let (class, groups) = Self::block((old | need | more) & Self::GROUPS);
        let (from, mut at) = (node.range(), node.at);
        let to = self.words.take(class, self.splits, true)?;
        let mut next = to;
        let mut left = groups;
        while left != 0 {
            let bit = left & left.wrapping_neg();
            if old & bit != 0 {
                self.words.all.copy_within(at..at + Self::IN_GROUP, next);
                at += Self::IN_GROUP;
            }
            next += Self::IN_GROUP;
            left ^= bit;
        }
        self.words.give(from, true);
        self.cursor.window = Window::CLOSED;
        node.move_to(to, next - to, if groups == Self::GROUPS { ALL } else { groups });
        Ok(())
    }

    /// Gives all nodes above a chunk that the plan has touched, and its own, memory for all their entries.
    pub(crate) fn widen(&mut self, chunk: u64) -> Result<(), Full> {
        let page = Self::chunk_pages(chunk).0;
        let mut id = ROOT;
        for level in self.top()..Self::LAST {
            let word = self.nodes[id as usize].get(&self.words, Self::index(page, level));
            if word == 0 || Record::from_word(word).is_some() {
                break;
            }
            id = Self::child(word);
            self.cover(id, 0, Self::entries(level + 1) - 1)?;
        }
        Ok(())
    }

    /// Takes a node away. If it is not empty, it is `dirty`.
    pub(super) fn give(&mut self, id: u32, dirty: bool) {
        self.cursor = Cursor::at(NO_CHUNK, [ROOT; MAX_LEVELS]);
        let node = &mut self.nodes[id as usize];
        self.words.give(node.range(), dirty);
        *node = Node::new(0, 0, 0);
        self.spare.push(id); // there is room: `keep_numbers`
    }

    /// Replaces an entry of a node at `level`.
    pub(super) fn replace(&mut self, id: u32, level: u32, i: usize, word: u64) {
        let node = &mut self.nodes[id as usize];
        let old = node.get(&self.words, i);
        node.set(&mut self.words, i, word);
        let splits = |word| Record::from_word(word).map_or(0, |_| Self::splits_of(level));
        self.splits = self.splits + splits(word) - splits(old);
        node.used = node.used + u32::from(word != 0) - u32::from(old != 0);
    }
}
