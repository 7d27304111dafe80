//! Single pages, bound and unbound without a plan.

use dmalane_iopt::Format;

use super::node::Node;
use super::{NO_CHUNK, ROOT, Records, Window};
use crate::record::Record;

impl<F: Format> Records<F> {
    /// The entry of a page to which nothing is bound and whose chunk has a node with room for it: then binding it needs
    /// no plan.
    #[inline(always)]
    pub(crate) fn vacant(&mut self, page: u64) -> Option<Vacant<'_, F>> {
        let (node, words) = self.seek(page)?;
        let entry = words.all.get_mut(node.position(Self::index(page, Self::LAST)))?;
        if *entry != 0 {
            return None;
        }
        Some(Vacant { node, entry })
    }

    /// Where the word of a page is, if the page is in the cursor's window.
    #[inline(always)]
    pub(crate) fn near(&self, page: u64) -> Option<usize> {
        let Window { first, pages, at } = self.cursor.window;
        let k = page.wrapping_sub(first);
        if k < pages { Some(at + k as usize) } else { None }
    }

    /// [`vacant`](Self::vacant) by where the word is, in the cursor's chunk.
    #[inline(always)]
    pub(crate) fn vacant_at(&mut self, position: usize) -> Option<Vacant<'_, F>> {
        let entry = self.words.all.get_mut(position).filter(|entry| **entry == 0)?;
        Some(Vacant { node: &mut self.nodes[self.cursor.path[Self::LAST as usize] as usize], entry })
    }

    /// Where the word of a page is, if its chunk has a node. The second time in a chunk this opens the cursor's window,
    /// as far as pages from `low` to `high` go.
    #[inline(always)]
    pub(crate) fn position(&mut self, page: u64, (low, high): (u64, u64)) -> Option<usize> {
        let again = self.cursor.chunk == Self::chunk(page);
        let i = Self::index(page, Self::LAST);
        let (node, words) = self.seek(page)?;
        let (at, first, entries) = (node.position(i), usize::from(node.first), usize::from(node.in_a_row));
        let exists = at < words.all.len();
        if again && exists {
            let (first, entries) =
                if entries > 0 { (first, entries) } else { (i & !(Self::IN_GROUP - 1), Self::IN_GROUP) };
            let all = page - (i - first) as u64;
            let (first, end) = (low.max(all), (high + 1).min(all + entries as u64));
            self.cursor.window = Window { first, pages: end - first, at: at - (page - first) as usize };
        }
        exists.then_some(at)
    }

    /// Unbinds a page whose chunk has a node with more in it, which needs no plan, if `counted` agrees to its record.
    #[inline(always)]
    pub(crate) fn take_one_of_many(&mut self, page: u64, counted: impl FnOnce(Record) -> bool) -> Option<()> {
        let (node, words) = self.seek(page)?;
        if node.used <= 1 {
            return None;
        }
        let entry = words.all.get_mut(node.position(Self::index(page, Self::LAST)))?;
        let record = Record::from_word(*entry).filter(|&record| counted(record))?;
        *entry = 0;
        node.note_gone(record.slot(), 1);
        node.used -= 1;
        Some(())
    }

    /// Unbinds a page that may be the last one of its chunk, whose node stays as the idle one then. `None` when that
    /// takes a plan: nothing is bound, or there is another idle node.
    pub(crate) fn take_alone(&mut self, page: u64) -> Option<Record> {
        let chunk = Self::chunk(page);
        let idle = self.idle == chunk || !self.is_idle(self.idle);
        let (node, words) = self.seek(page)?;
        if node.used == 1 && !idle {
            return None;
        }
        let entry = words.all.get_mut(node.position(Self::index(page, Self::LAST)))?;
        let record = Record::from_word(*entry)?;
        *entry = 0;
        node.note_gone(record.slot(), 1);
        node.used -= 1;
        if node.used == 0 {
            self.idle = chunk;
        }
        Some(record)
    }

    /// True when a chunk has a node, and nothing is bound there.
    fn is_idle(&self, chunk: u64) -> bool {
        if chunk == NO_CHUNK {
            return false;
        }
        let (page, mut id) = (Self::chunk_pages(chunk).0, ROOT);
        for level in self.top()..Self::LAST {
            let word = self.nodes[id as usize].get(&self.words, Self::index(page, level));
            if word == 0 || Record::from_word(word).is_some() {
                return false;
            }
            id = Self::child(word);
        }
        self.nodes[id as usize].used == 0
    }

    /// True when there may be an idle node among these pages; there is none any more.
    #[inline]
    pub(crate) fn end_idle(&mut self, first: u64, last: u64) -> bool {
        let (idle_first, idle_last) = Self::chunk_pages(self.idle & (u64::MAX >> F::INDEX_BITS));
        let ends = self.idle != NO_CHUNK && first <= idle_first && idle_last <= last;
        if ends {
            self.idle = NO_CHUNK;
        }
        ends
    }
}

/// An entry to which nothing is bound.
pub(crate) struct Vacant<'a, F> {
    node: &'a mut Node<F>,
    entry: &'a mut u64,
}

impl<F: Format> Vacant<'_, F> {
    /// True when other pages of the chunk are bound to the slot, and that is noted.
    #[inline(always)]
    pub(crate) fn has(&self, slot: u32) -> bool {
        self.node.has(slot)
    }

    /// Binds the page to a record of this slot.
    #[inline(always)]
    pub(crate) fn put(self, slot: u32, record: Record) {
        self.node.note(slot, 1);
        *self.entry = record.word();
        self.node.used += 1;
    }
}
