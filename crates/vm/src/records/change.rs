//! Changes that a commit makes: it only stores.

use dmalane_iopt::Format;

use super::node::MIXED;
use super::{Gone, ROOT, Records, write_run};
use crate::record::Record;
use crate::slots::{Place, Slots};

impl<F: Format> Records<F> {
    /// Binds pages `first..=last`, which have been touched, to what begins with `record`, or unbinds them. Gives the
    /// number of pages that were bound.
    #[inline(always)]
    pub(crate) fn put(&mut self, slots: &mut Slots, first: u64, last: u64, record: Option<Record>) -> u64 {
        let chunk = Self::chunk(first);
        let (whole_first, whole_last) = Self::chunk_pages(chunk);
        let part = chunk == Self::chunk(last) && (first > whole_first || last < whole_last);
        // The cursor, which is where the plan ended, follows what the commit goes through.
        let had = if part && self.seek(first).is_some() || !part && self.is_at_whole(chunk, last) {
            let id = self.cursor.path[Self::LAST as usize];
            if first == last {
                self.put_page(id, slots, first, record)
            } else {
                self.put_pages(id, slots, first, last, record)
            }
        } else {
            self.put_below(ROOT, self.top(), slots, first, last, record)
        };
        if let Some(record) = record {
            slots.bound(record.slot(), Place { first, end: last + 1 });
        }
        had
    }

    /// True when the cursor is at the node of a chunk with which a span of whole chunks begins and ends.
    fn is_at_whole(&self, chunk: u64, last: u64) -> bool {
        let node = &self.nodes[self.cursor.path[Self::LAST as usize] as usize];
        chunk == self.cursor.chunk && chunk == Self::chunk(last) && node.covers(0, Self::entries(Self::LAST) - 1)
    }

    /// Binds pages of one slot from `first` on, which have been touched and lie in one chunk, if nothing is bound
    /// there. False where something is; nothing has changed then.
    pub(crate) fn put_each(&mut self, slots: &mut Slots, first: u64, new: &[Record]) -> bool {
        let Some((node, words)) = self.seek(first) else { return false };
        let i = Self::index(first, Self::LAST);
        let words = &mut words.all[node.positions(i, i + new.len() - 1)];
        if words.len() < new.len() || words.iter().fold(0, |any, word| any | word) != 0 {
            return false;
        }
        words.iter_mut().zip(new).for_each(|(entry, record)| *entry = record.word());
        let slot = new[0].slot();
        node.note(slot, new.len() as u32);
        node.used += new.len() as u32;
        slots.bound(slot, Place { first, end: first + new.len() as u64 });
        true
    }

    /// The same as [`put`](Self::put) for one page.
    #[inline(always)]
    fn put_page(&mut self, id: u32, slots: &mut Slots, page: u64, record: Option<Record>) -> u64 {
        let node = &mut self.nodes[id as usize];
        if let Some(record) = record {
            node.note(record.slot(), 1);
        }
        let i = Self::index(page, Self::LAST);
        let had = Record::from_word(node.get(&self.words, i));
        node.set(&mut self.words, i, record.map_or(0, Record::word));
        node.used = node.used + u32::from(record.is_some()) - u32::from(had.is_some());
        if let Some(old) = had {
            node.note_gone(old.slot(), 1);
            slots.unbound(old.slot(), 1);
        }
        u64::from(had.is_some())
    }

    /// The same in one node of the last level.
    #[inline(never)]
    fn put_pages(&mut self, id: u32, slots: &mut Slots, first: u64, last: u64, record: Option<Record>) -> u64 {
        let node = &mut self.nodes[id as usize];
        let (i, j) = (Self::index(first, Self::LAST), Self::index(last, Self::LAST));
        let all_of = node.all_of();
        if let Some(record) = record {
            node.note(record.slot(), (j - i + 1) as u32);
        }
        let words = &mut self.words.all[node.positions(i, j)];
        let mut gone = |gone, pages| {
            slots.unbound(gone, pages);
            node.note_gone(gone, pages as u32);
        };
        let had = match all_of {
            Some(slot) => {
                gone(slot, words.len() as u64);
                words.len() as u64
            }
            None => Self::count_out(words, gone),
        };
        let mut put = 0;
        match record {
            None => words.fill(0),
            Some(record) => {
                put = words.len() as u32;
                assert!(words.len() == j - i + 1, "a plan makes room for what its commit changes");
                write_run(words, record.word(), record.step());
            }
        }
        node.used = node.used + put - had as u32;
        had
    }

    /// Gives the pages that are bound, and will be no more, to `gone`, with their slots. Gives their number.
    #[inline]
    fn count_out(words: &[u64], mut gone: impl FnMut(u32, u64)) -> u64 {
        let (Some(&old), pages) = (words.first(), words.len() as u64) else { return 0 };
        let (every, any) = words.iter().fold((!0, 0), |(every, any), word| (every & word, any | word));
        let differs = every ^ any;
        match Record::from_word(old) {
            // All or nothing, as most often: the loop above is a few instructions for several pages.
            Some(record) if Record::is_of_one_slot(differs) => {
                gone(record.slot(), pages);
                pages
            }
            None if differs == 0 => 0,
            _ => Self::count_out_each(words, gone),
        }
    }

    /// The same, pages of one slot together.
    fn count_out_each(words: &[u64], mut gone: impl FnMut(u32, u64)) -> u64 {
        let (mut had, mut run, mut slot) = (0, 0, 0);
        for old in words.iter().filter_map(|&word| Record::from_word(word)) {
            if old.slot() != slot {
                gone(slot, run); // at first no pages of null ranges
                (had, run, slot) = (had + run, 0, old.slot());
            }
            run += 1;
        }
        gone(slot, run);
        had + run
    }

    #[inline(never)]
    fn put_below(
        &mut self,
        id: u32,
        level: u32,
        slots: &mut Slots,
        first: u64,
        last: u64,
        mut record: Option<Record>,
    ) -> u64 {
        if level == Self::LAST {
            return self.put_pages(id, slots, first, last, record);
        }
        let mut had = 0;
        let mut at = first;
        for i in Self::index(first, level)..=Self::index(last, level) {
            let (entry_first, entry_last) = Self::entry(at, level);
            let end = entry_last.min(last);
            let whole = at == entry_first && end == entry_last;
            let old = self.nodes[id as usize].get(&self.words, i);
            let child = if Record::from_word(old).is_none() && old != 0 { Some(Self::child(old)) } else { None };
            match child {
                // A later request of the batch counts on it.
                Some(child) if !whole || self.nodes[child as usize].plan == self.plan => {
                    had += self.put_below(child, level + 1, slots, at, end, record);
                }
                _ if whole => {
                    if let Some(child) = child {
                        had += self.take_down(child, level + 1, slots);
                    } else if let Some(old) = Record::from_word(old) {
                        had += end - at + 1;
                        slots.unbound(old.slot(), end - at + 1);
                    }
                    self.replace(id, level, i, record.map_or(0, Record::word));
                }
                _ => assert!(old == 0 && record.is_none(), "a plan touches what its commit changes"),
            }
            record = record.map(|r| r.advance(end - at + 1));
            at = end.wrapping_add(1);
        }
        had
    }

    /// Takes a node away with all that is below, which is bound no more. Gives the number of pages.
    fn take_down(&mut self, id: u32, level: u32, slots: &mut Slots) -> u64 {
        let mut had = 0;
        if level == Self::LAST {
            let node = &self.nodes[id as usize];
            had = u64::from(node.used);
            if node.slot == MIXED {
                Self::count_out(&self.words.all[node.range()], |slot, pages| slots.unbound(slot, pages));
            } else {
                debug_assert!(node.is_as_noted(&self.words));
                for (slot, pages) in [(node.slot, node.used - node.others), (node.other, node.others)] {
                    if pages > 0 {
                        slots.unbound(slot, pages.into());
                    }
                }
            }
        } else {
            for n in self.nodes[id as usize].range() {
                let word = self.words.all[n];
                if let Some(record) = Record::from_word(word) {
                    self.splits -= Self::splits_of(level);
                    had += 1 << Self::shift(level);
                    slots.unbound(record.slot(), 1 << Self::shift(level));
                } else if word != 0 {
                    had += self.take_down(Self::child(word), level + 1, slots);
                }
            }
        }
        self.give(id, true);
        had
    }

    /// Unbinds everything of a slot within `first..=last` and gives each maximal entry of it to `gone`, with the pages
    /// of the node that became empty in the same step, if one did.
    pub(crate) fn take_slot(
        &mut self,
        slots: &mut Slots,
        slot: u32,
        (first, last): (u64, u64),
        gone: &mut impl FnMut(Gone),
    ) {
        self.take_slot_below(ROOT, self.top(), slots, slot, first, last, gone);
    }

    #[allow(clippy::too_many_arguments)] // a recursion
    fn take_slot_below(
        &mut self,
        id: u32,
        level: u32,
        slots: &mut Slots,
        slot: u32,
        first: u64,
        last: u64,
        gone: &mut impl FnMut(Gone),
    ) {
        let (mut at, mut skip) = (first, 0);
        for i in Self::index(first, level)..=Self::index(last, level) {
            const SOME: usize = 64;
            if level == Self::LAST && (at == first || i.is_multiple_of(SOME)) {
                // Most have none. A few instructions for several entries say so.
                let to = (i | (SOME - 1)).min(Self::index(last, level));
                if !self.nodes[id as usize].may_have(&self.words, slot, i, to) {
                    skip = to + 1;
                }
            }
            if i < skip {
                at += 1;
                continue;
            }
            let (entry_first, entry_last) = Self::entry(at, level);
            let end = entry_last.min(last);
            let word = self.nodes[id as usize].get(&self.words, i);
            if let Some(record) = Record::from_word(word) {
                if record.slot() == slot {
                    let pages = entry_last - entry_first + 1;
                    self.replace(id, level, i, 0);
                    if level == Self::LAST {
                        self.nodes[id as usize].note_gone(slot, 1);
                    }
                    slots.unbound(slot, pages);
                    gone(Gone::Pages(entry_first, entry_last));
                }
            } else if word != 0 {
                let child = Self::child(word);
                self.take_slot_below(child, level + 1, slots, slot, at, end, gone);
                if self.nodes[child as usize].used == 0 && self.nodes[child as usize].plan != self.plan {
                    self.give(child, false);
                    self.replace(id, level, i, 0);
                    gone(Gone::Node { first: entry_first, last: entry_last, level: level + 1 });
                }
            }
            at = end.wrapping_add(1);
        }
    }
}
