//! One node of the tree: which of its entries have memory, and what is known of all of them.

use core::marker::PhantomData;
use core::ops::Range;

use dmalane_iopt::Format;

use crate::record::Record;
use crate::words::Words;

/// As large as a cache line, so that finding one takes a shift.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Node<F> {
    /// Where in the words of all nodes the groups of entries are that have memory, in order. All other entries are
    /// empty.
    pub(super) at: usize,
    /// Which groups these are, a bit each; [`ALL`] when all are.
    pub(super) groups: u64,
    /// The last plan that touched it.
    pub(super) plan: u64,
    /// Words that it has.
    pub(super) len: u32,
    /// The first entry with memory and the number of all that have, if these are all in a row; else 0.
    pub(super) first: u16,
    pub(super) in_a_row: u16,
    /// Entries that are not empty.
    pub(super) used: u32,
    /// Number of requests of that plan that may have unlinked tables and came before the last touch.
    pub(super) after: u32,
    /// In a node of the last level that is not empty: the slot of all its records but `others`, or [`MIXED`].
    pub(super) slot: u32,
    pub(super) other: u32,
    /// Records of the slot `other`.
    pub(super) others: u32,
    /// True when `plan` made it of a record.
    pub(super) split: bool,
    format: PhantomData<fn() -> F>,
}

/// All groups, as many as there are.
pub(super) const ALL: u64 = u64::MAX;

/// Records of three slots or more, or they were.
pub(super) const MIXED: u32 = u32::MAX;

impl<F: Format> Node<F> {
    /// Logarithm of the entries of a group: at least 32, and at least a 64th of a table.
    pub(super) const GROUP: u32 = if F::INDEX_BITS > 11 { F::INDEX_BITS - 6 } else { 5 };

    /// The bits of the groups that entries `i` to `j` lie in.
    pub(super) const fn groups_of(i: usize, j: usize) -> u64 {
        let (first, last) = (i >> Self::GROUP, j >> Self::GROUP);
        ALL >> (63 - (last - first)) << first
    }

    /// A node that nothing is in, with memory for these groups.
    pub(super) fn new(at: usize, len: usize, groups: u64) -> Self {
        let mut node = Self {
            at,
            groups,
            plan: 0,
            len: 0,
            first: 0,
            in_a_row: 0,
            used: 0,
            after: 0,
            slot: MIXED,
            other: MIXED,
            others: 0,
            split: false,
            format: PhantomData,
        };
        node.move_to(at, len, groups);
        node
    }

    /// Notes where its words are now.
    pub(super) fn move_to(&mut self, at: usize, len: usize, groups: u64) {
        const { assert!(size_of::<Self>() == 64 && F::INDEX_BITS < 16) }
        let (first, count) = (groups.trailing_zeros(), groups.count_ones());
        let in_a_row = count > 0 && (groups >> first).trailing_ones() == count;
        (self.at, self.len, self.groups) = (at, len as u32, groups); // a table has fewer entries
        (self.first, self.in_a_row) = if in_a_row { ((first << Self::GROUP) as u16, len as u16) } else { (0, 0) };
    }

    /// Where all of its words are.
    #[inline]
    pub(super) fn range(&self) -> Range<usize> {
        self.at..self.at + self.len as usize
    }

    /// Where the word of an entry is, if it has one and all others that have follow each other.
    #[inline(always)]
    pub(super) fn in_a_row(&self, i: usize) -> Option<usize> {
        let k = i.wrapping_sub(self.first as usize);
        if k < self.in_a_row as usize { Some(self.at + k) } else { None }
    }

    /// Where the word of an entry is; beyond all words when the entry has no memory.
    #[inline(always)]
    pub(super) fn position(&self, i: usize) -> usize {
        self.in_a_row(i).unwrap_or_else(|| self.at.saturating_add(self.position_in_group(i)))
    }

    #[inline]
    fn position_in_group(&self, i: usize) -> usize {
        let bit = 1 << (i >> Self::GROUP);
        if self.groups & bit == 0 {
            return usize::MAX;
        }
        ((self.groups & (bit - 1)).count_ones() as usize) << Self::GROUP | i & ((1 << Self::GROUP) - 1)
    }

    /// Where the words of those of the entries `i` to `j` are that have memory.
    #[inline]
    pub(super) fn positions(&self, i: usize, j: usize) -> Range<usize> {
        if let (Some(i), Some(j)) = (self.in_a_row(i), self.in_a_row(j)) {
            return i..j + 1;
        }
        let end = |i: usize| match self.position_in_group(i) {
            // Behind the groups in front of it.
            usize::MAX => ((self.groups & ((1 << (i >> Self::GROUP)) - 1)).count_ones() as usize) << Self::GROUP,
            position => position,
        };
        let has_last = self.groups >> (j >> Self::GROUP) & 1;
        self.at + end(i)..self.at + end(j) + has_last as usize
    }

    /// The entry whose word is at a position.
    fn index_at(&self, position: usize) -> usize {
        let position = position - self.at;
        if self.in_a_row > 0 {
            return position + self.first as usize;
        }
        let mut groups = self.groups;
        for _ in 0..position >> Self::GROUP {
            groups &= groups - 1;
        }
        (groups.trailing_zeros() as usize) << Self::GROUP | position & ((1 << Self::GROUP) - 1)
    }

    /// An entry.
    #[inline(always)]
    pub(super) fn get(&self, words: &Words, i: usize) -> u64 {
        words.all.get(self.position(i)).copied().unwrap_or(0)
    }

    /// Replaces an entry that has memory, or empties one.
    #[inline(always)]
    pub(super) fn set(&self, words: &mut Words, i: usize, word: u64) {
        match words.all.get_mut(self.position(i)) {
            Some(entry) => *entry = word,
            None => assert!(word == 0, "a plan makes room for what its commit changes"),
        }
    }

    /// The first entry from `i` to `last` that is not empty, with its index.
    pub(super) fn next_used(&self, words: &Words, i: usize, last: usize) -> Option<(usize, u64)> {
        let range = self.positions(i, last);
        let found = range.start + words.all[range].iter().position(|&word| word != 0)?;
        Some((self.index_at(found), words.all[found]))
    }

    /// True when entries `i` to `j` have memory.
    #[inline(always)]
    pub(super) fn covers(&self, i: usize, j: usize) -> bool {
        let in_a_row = self.in_a_row(i).is_some() && self.in_a_row(j).is_some();
        in_a_row || Self::groups_of(i, j) & !self.groups == 0
    }

    /// True when some entries `i` to `j` are records of a slot, or not records: what they are takes longer to find out.
    pub(super) fn may_have(&self, words: &Words, slot: u32, i: usize, j: usize) -> bool {
        let of_slot = |&word: &u64| Record::from_word(word).is_some_and(|record| record.slot() == slot);
        words.all[self.positions(i, j)].iter().fold(false, |any, word| any | of_slot(word))
    }

    /// True when there are records of a slot, and that is noted.
    #[inline]
    pub(super) fn has(&self, slot: u32) -> bool {
        self.slot == slot && self.used > self.others || self.other == slot && self.others > 0
    }

    /// The slot of the records of all pages, if it is one.
    #[inline]
    pub(super) fn all_of(&self) -> Option<u32> {
        let all = self.used as usize == 1 << F::INDEX_BITS && self.others == 0 && self.slot != MIXED;
        all.then_some(self.slot)
    }

    /// Notes that records of a slot come in; call it before they are counted.
    #[inline(always)]
    pub(super) fn note(&mut self, slot: u32, records: u32) {
        // No branch asks which of two buffers it is: nobody can predict that.
        let other = self.other == slot;
        self.others += records * u32::from(other);
        if !(other | (self.slot == slot)) {
            self.note_new(slot, records);
        }
    }

    #[inline(never)]
    fn note_new(&mut self, slot: u32, records: u32) {
        if self.used == self.others {
            self.slot = slot; // all that are there, if any, are others
        } else if self.slot != MIXED && self.others == 0 {
            (self.other, self.others) = (slot, records);
        } else {
            (self.slot, self.other, self.others) = (MIXED, MIXED, 0);
        }
    }

    /// Notes that records of a slot go.
    #[inline(always)]
    pub(super) fn note_gone(&mut self, slot: u32, records: u32) {
        self.others -= records * u32::from(self.other == slot);
    }

    /// Whether all is as `slot`, `others` and `used` say.
    pub(super) fn is_as_noted(&self, words: &Words) -> bool {
        let words = &words.all[self.range()];
        let of = |slot| words.iter().filter(|&&w| Record::from_word(w).is_some_and(|r| r.slot() == slot)).count();
        let used = words.iter().filter(|&&w| w != 0).count() as u32;
        let others = if self.others > 0 { of(self.other) as u32 } else { 0 };
        (self.used, self.others) == (used, others) && of(self.slot) as u32 + others == used
    }
}
