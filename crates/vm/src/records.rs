//! What is bound where: a tree of [`Record`]s in the shape of the page table.
//!
//! A node has an entry for each entry of the page table's table in its place. An entry is empty, a record that holds
//! for all of its pages, or a node one level down. So binding a page is one store, a large binding takes as few entries
//! as its ends allow, and bindings need not be kept as objects: a binding is a run of entries that continue each other.
//!
//! Between plans every node but the root holds something, and where there is a node, the page table has a table: what
//! is below it is smaller than its entry. So a plan knows from the nodes which tables are missing.
//!
//! A plan makes the nodes that its requests will need ([`touch`](Records::touch)), which changes nothing that is bound;
//! its commit only stores. Nodes that were touched stay until the batch is over, whatever its requests do to them, and
//! are taken away or joined to a record afterwards ([`settle`](Records::settle)).

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::marker::PhantomData;

use dmalane_iopt::{Format, MAX_LEVELS};

use crate::record::Record;
use crate::slots::{Full, Slots};

/// As large as a cache line, so that finding one takes a shift.
#[derive(Debug)]
#[repr(align(64))]
struct Node {
    words: Box<[u64]>,
    /// True for a spare node whose words are still those of its last use.
    stale: bool,
    /// Entries that are not empty.
    used: usize,
    /// The last plan that touched it.
    plan: u64,
    /// How many requests of that plan, that may have unlinked tables, came before the last touch.
    after: u64,
    /// The plan that made it of a record.
    split: u64,
    /// In a node of the last level that is not empty: the slot of all its records, or [`MIXED`].
    slot: u32,
}

/// Records of several slots, or they were.
const MIXED: u32 = u32::MAX;

impl Node {
    /// Notes that a record of a slot comes in; call it before it is counted.
    #[inline(always)]
    fn note(&mut self, slot: u32) {
        if self.slot != slot {
            self.slot = if self.used == 0 { slot } else { MIXED };
        }
    }

    /// Whether all is as `slot` and `used` say.
    fn of_one_slot(&self) -> bool {
        let mut records = self.words.iter().filter_map(|&word| Record::from_word(word));
        records.all(|record| record.slot() == self.slot) && self.used == self.words.iter().filter(|&&w| w != 0).count()
    }
}

/// Which nodes become a record again when a plan ends, if they could be one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Join {
    /// None.
    No,
    /// Those that the plan made of one.
    Split,
    /// All.
    All,
}

/// The nodes down to the pages of the chunk used last.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    chunk: u64,
    path: [u32; MAX_LEVELS],
}

/// No chunk has this number.
const NO_CHUNK: u64 = u64::MAX;

const ROOT: u32 = 0;

/// The tree. All addresses in it are page numbers: granules from address 0. A *chunk* is what a node of the last level
/// covers.
#[derive(Debug)]
pub(crate) struct Records<F> {
    nodes: Vec<Node>,
    /// Nodes that are not in use.
    spare: Vec<u32>,
    cursor: Cursor,
    plan: u64,
    /// Requests of the plan so far that may unlink tables.
    unlinking: u64,
    /// Tables that the plan may have to make for what it touched.
    tables: usize,
    format: PhantomData<fn() -> F>,
}

/// A maximal entry: these pages from `first` on are bound to `record`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) first: u64,
    pub(crate) pages: u64,
    pub(crate) record: Record,
}

impl<F: Format> Records<F> {
    const LAST: u32 = F::LEVELS - 1;

    /// Logarithm of the pages that an entry at `level` covers.
    const fn shift(level: u32) -> u32 {
        (Self::LAST - level) * F::INDEX_BITS
    }

    const fn entries(level: u32) -> usize {
        if level == 0 { 1 << (F::INPUT_BITS - F::GRANULE.log2() as u32 - Self::shift(0)) } else { 1 << F::INDEX_BITS }
    }

    const fn index(page: u64, level: u32) -> usize {
        (page >> Self::shift(level)) as usize & (Self::entries(level) - 1)
    }

    /// First and last page of the entry at `level` that covers `page`.
    const fn entry(page: u64, level: u32) -> (u64, u64) {
        let mask = (1 << Self::shift(level)) - 1;
        (page & !mask, page | mask)
    }

    /// The chunk that holds a page.
    pub(crate) const fn chunk(page: u64) -> u64 {
        page >> F::INDEX_BITS
    }

    /// First and last page of a chunk.
    pub(crate) const fn chunk_pages(chunk: u64) -> (u64, u64) {
        (chunk << F::INDEX_BITS, (chunk << F::INDEX_BITS) | ((1 << F::INDEX_BITS) - 1))
    }

    /// True when these pages contain all of some chunk.
    pub(crate) const fn covers_a_chunk(first: u64, last: u64) -> bool {
        (first + (1 << F::INDEX_BITS) - 1) >> F::INDEX_BITS < (last + 1) >> F::INDEX_BITS
    }

    pub(crate) fn new() -> Result<Self, Full> {
        let mut it = Self {
            nodes: Vec::new(),
            spare: Vec::new(),
            cursor: Cursor { chunk: NO_CHUNK, path: [ROOT; MAX_LEVELS] },
            plan: 0,
            unlinking: 0,
            tables: 0,
            format: PhantomData,
        };
        it.push(Self::entries(0))?;
        Ok(it)
    }

    /// Bytes of memory in use.
    pub(crate) fn bytes(&self) -> usize {
        let words: usize = self.nodes.iter().map(|node| node.words.len()).sum();
        words * 8 + self.nodes.capacity() * size_of::<Node>() + self.spare.capacity() * size_of::<u32>()
    }

    /// Gives back the memory of nodes that are not in use.
    pub(crate) fn trim(&mut self) {
        for &node in &self.spare {
            self.nodes[node as usize].words = Box::default();
        }
    }

    fn push(&mut self, entries: usize) -> Result<u32, Full> {
        let id = u32::try_from(self.nodes.len()).map_err(|_| Full)?;
        self.nodes.try_reserve(1)?;
        self.spare.try_reserve(self.nodes.len() + 1 - self.spare.len())?; // so that a commit need not ask for memory
        let words = zeroed(entries)?;
        self.nodes.push(Node { words, stale: false, used: 0, plan: 0, after: 0, split: 0, slot: MIXED });
        Ok(id)
    }

    /// An empty node below the root.
    fn take(&mut self) -> Result<u32, Full> {
        let Some(&id) = self.spare.last() else { return self.push(1 << F::INDEX_BITS) };
        let node = &mut self.nodes[id as usize];
        if node.words.is_empty() {
            node.words = zeroed(1 << F::INDEX_BITS)?;
        } else if node.stale {
            node.words.fill(0);
        }
        node.stale = false;
        self.spare.pop();
        Ok(id)
    }

    fn give(&mut self, id: u32) {
        self.cursor.chunk = NO_CHUNK;
        self.spare.push(id); // there is room: `push`
    }

    /// Begins a plan.
    #[inline]
    pub(crate) fn begin(&mut self) {
        self.plan += 1;
        self.unlinking = 0;
        self.tables = 0;
    }

    /// Tables of the page table that may be missing for what was touched.
    #[inline]
    pub(crate) fn missing_tables(&self) -> usize {
        self.tables
    }

    /// True when a request of the plan may unlink tables.
    pub(crate) fn unlinks(&self) -> bool {
        self.unlinking > 0
    }

    /// Says that a request of the plan may unlink tables: one that contains a whole chunk.
    pub(crate) fn will_unlink(&mut self) {
        self.unlinking += 1;
    }

    /// Makes the nodes that changing pages `first..=last` needs at the end `at`, one of the two. Where nothing is
    /// bound, and `make` is false, none is needed.
    #[inline(always)]
    pub(crate) fn touch(&mut self, at: u64, first: u64, last: u64, make: bool) -> Result<(), Full> {
        let chunk = Self::chunk(at);
        let whole = Self::chunk_pages(chunk);
        if chunk == self.cursor.chunk && self.unlinking == 0 && (first > whole.0 || last < whole.1) {
            for level in 1..F::LEVELS {
                let node = &mut self.nodes[self.cursor.path[level as usize] as usize];
                if node.plan != self.plan {
                    (node.plan, node.after) = (self.plan, 0);
                    self.tables += usize::from(node.used == 0);
                }
            }
            return Ok(());
        }
        self.touch_path(at, first, last, make)
    }

    #[inline(never)]
    fn touch_path(&mut self, at: u64, first: u64, last: u64, make: bool) -> Result<(), Full> {
        let mut path = [ROOT; MAX_LEVELS];
        for level in 0..Self::LAST {
            let (entry_first, entry_last) = Self::entry(at, level);
            if first <= entry_first && entry_last <= last {
                return Ok(()); // a record of this level will do
            }
            let (id, i) = (path[level as usize], Self::index(at, level));
            let word = self.nodes[id as usize].words[i];
            let child = match Record::from_word(word) {
                Some(record) => {
                    let child = self.take()?;
                    self.fill(child, level + 1, record);
                    self.nodes[id as usize].words[i] = Self::link(child);
                    // The leaf may have to be split into a table.
                    self.mark(child, true);
                    self.nodes[child as usize].split = self.plan;
                    child
                }
                None if word != 0 => Self::child(word),
                None if !make => return Ok(()),
                None => {
                    let child = self.take()?;
                    let node = &mut self.nodes[id as usize];
                    node.words[i] = Self::link(child);
                    node.used += 1;
                    child
                }
            };
            self.mark(child, false);
            path[level as usize + 1] = child;
        }
        self.cursor = Cursor { chunk: Self::chunk(at), path };
        Ok(())
    }

    /// Notes that the plan touches a node, and counts its table if that may have to be made.
    fn mark(&mut self, id: u32, missing: bool) {
        let node = &mut self.nodes[id as usize];
        let first = node.plan != self.plan;
        if first || node.after != self.unlinking {
            self.tables += usize::from(missing || node.used == 0 || self.unlinking > 0);
            (node.plan, node.after) = (self.plan, self.unlinking);
        }
    }

    /// Makes a record of all pages of an empty node.
    fn fill(&mut self, id: u32, level: u32, record: Record) {
        let node = &mut self.nodes[id as usize];
        let (mut word, step) = (record.word(), record.step() << Self::shift(level));
        for entry in &mut node.words {
            *entry = word;
            word = word.wrapping_add(step); // only after the last one
        }
        (node.used, node.slot) = (node.words.len(), record.slot());
    }

    const fn link(child: u32) -> u64 {
        child as u64 // never 0, as no entry points to the root
    }

    const fn child(word: u64) -> u32 {
        word as u32
    }

    /// Binds pages `first..=last`, which have been touched, to what begins with `record`, or unbinds them. Gives the
    /// number of pages that were bound.
    #[inline(always)]
    pub(crate) fn put(&mut self, slots: &mut Slots, first: u64, last: u64, record: Option<Record>) -> u64 {
        let chunk = Self::chunk(first);
        let (whole_first, whole_last) = Self::chunk_pages(chunk);
        let part = chunk == Self::chunk(last) && (first > whole_first || last < whole_last);
        // The cursor, which is where the plan ended, follows what the commit goes through.
        let had = if part && self.seek(first).is_some() || chunk == self.cursor.chunk && chunk == Self::chunk(last) {
            let id = self.cursor.path[Self::LAST as usize];
            if first == last {
                self.put_page(id, slots, first, record)
            } else {
                self.put_pages(id, slots, first, last, record)
            }
        } else {
            self.put_below(ROOT, 0, slots, first, last, record)
        };
        if let Some(record) = record {
            slots.bound(record.slot(), last - first + 1, (chunk, Self::chunk(last) + 1));
        }
        had
    }

    /// The entry of a page whose chunk has a node, which the cursor finds from now on.
    #[inline(always)]
    fn seek(&mut self, page: u64) -> Option<(&mut Node, usize)> {
        if Self::chunk(page) != self.cursor.chunk {
            let mut path = [ROOT; MAX_LEVELS];
            for level in 0..Self::LAST {
                let word = self.nodes[path[level as usize] as usize].words[Self::index(page, level)];
                if word == 0 || Record::from_word(word).is_some() {
                    return None;
                }
                path[level as usize + 1] = Self::child(word);
            }
            self.cursor = Cursor { chunk: Self::chunk(page), path };
        }
        let node = &mut self.nodes[self.cursor.path[Self::LAST as usize] as usize];
        Some((node, Self::index(page, Self::LAST)))
    }

    /// True when nothing is bound to a page whose chunk has a node: then [`put`](Self::put) needs no plan.
    #[inline(always)]
    pub(crate) fn is_vacant(&mut self, page: u64) -> bool {
        self.seek(page).is_some_and(|(node, i)| node.words[i] == 0)
    }

    /// Binds a vacant page.
    #[inline(always)]
    pub(crate) fn put_vacant(&mut self, page: u64, record: Record) {
        if let Some((node, i)) = self.seek(page) {
            node.words[i] = record.word();
            node.note(record.slot());
            node.used += 1;
        }
    }

    /// Unbinds a page whose chunk has a node with more in it, which needs no plan, if `counted` agrees to its record.
    #[inline(always)]
    pub(crate) fn take_one_of_many(&mut self, page: u64, counted: impl FnOnce(Record) -> bool) -> Option<()> {
        let (node, i) = self.seek(page).filter(|(node, _)| node.used > 1)?;
        let entry = node.words.get_mut(i)?;
        Record::from_word(*entry).filter(|&record| counted(record))?;
        *entry = 0;
        node.used -= 1;
        Some(())
    }

    /// The same as [`put`](Self::put) for one page.
    #[inline(always)]
    fn put_page(&mut self, id: u32, slots: &mut Slots, page: u64, record: Option<Record>) -> u64 {
        let node = &mut self.nodes[id as usize];
        if let Some(record) = record {
            node.note(record.slot());
        }
        let entry = &mut node.words[Self::index(page, Self::LAST)];
        let old = core::mem::replace(entry, record.map_or(0, Record::word));
        let had = Record::from_word(old);
        node.used = node.used + usize::from(record.is_some()) - usize::from(had.is_some());
        if let Some(old) = had {
            slots.unbound(old.slot(), 1);
        }
        u64::from(had.is_some())
    }

    /// The same in one node of the last level.
    #[inline(never)]
    fn put_pages(&mut self, id: u32, slots: &mut Slots, first: u64, last: u64, record: Option<Record>) -> u64 {
        let node = &mut self.nodes[id as usize];
        if let Some(record) = record {
            node.note(record.slot());
        }
        let words = &mut node.words[Self::index(first, Self::LAST)..=Self::index(last, Self::LAST)];
        let pages = words.len();
        let had = Self::count_out(words, slots);
        match record {
            None => words.fill(0),
            Some(record) => {
                let step = record.step();
                words.iter_mut().zip(0..).for_each(|(entry, n)| *entry = record.word().wrapping_add(n * step));
            }
        }
        node.used += if record.is_some() { pages } else { 0 };
        node.used -= had as usize;
        had
    }

    /// Counts the pages that are bound, and will be no more. Gives their number.
    #[inline]
    fn count_out(words: &[u64], slots: &mut Slots) -> u64 {
        let (old, pages) = (words[0], words.len() as u64);
        let (every, any) = words.iter().fold((!0, 0), |(every, any), word| (every & word, any | word));
        let differs = every ^ any;
        match Record::from_word(old) {
            // All or nothing, as most often: the loop above is a few instructions for several pages.
            Some(record) if Record::is_of_one_slot(differs) => {
                slots.unbound(record.slot(), pages);
                pages
            }
            None if differs == 0 => 0,
            _ => Self::count_out_each(words, slots),
        }
    }

    /// The same, pages of one slot together.
    fn count_out_each(words: &[u64], slots: &mut Slots) -> u64 {
        let (mut had, mut run, mut slot) = (0, 0, 0);
        for old in words.iter().filter_map(|&word| Record::from_word(word)) {
            if old.slot() != slot {
                if run > 0 {
                    slots.unbound(slot, run);
                }
                (had, run, slot) = (had + run, 0, old.slot());
            }
            run += 1;
        }
        if run > 0 {
            slots.unbound(slot, run);
        }
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
            let old = self.nodes[id as usize].words[i];
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
                    let new = record.map_or(0, Record::word);
                    let node = &mut self.nodes[id as usize];
                    node.words[i] = new;
                    node.used = node.used + usize::from(new != 0) - usize::from(old != 0);
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
            had = node.used as u64;
            if node.slot == MIXED {
                Self::count_out(&node.words, slots);
            } else {
                debug_assert!(node.of_one_slot());
                slots.unbound(node.slot, had);
            }
        } else {
            for i in 0..self.nodes[id as usize].words.len() {
                let word = self.nodes[id as usize].words[i];
                if let Some(record) = Record::from_word(word) {
                    had += 1 << Self::shift(level);
                    slots.unbound(record.slot(), 1 << Self::shift(level));
                } else if word != 0 {
                    had += self.take_down(Self::child(word), level + 1, slots);
                }
            }
        }
        let node = &mut self.nodes[id as usize];
        (node.stale, node.used) = (true, 0);
        self.give(id);
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
        self.take_slot_below(ROOT, 0, slots, slot, first, last, gone);
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
        let mut at = first;
        for i in Self::index(first, level)..=Self::index(last, level) {
            let (entry_first, entry_last) = Self::entry(at, level);
            let end = entry_last.min(last);
            let word = self.nodes[id as usize].words[i];
            if let Some(record) = Record::from_word(word) {
                if record.slot() == slot {
                    let pages = entry_last - entry_first + 1;
                    let node = &mut self.nodes[id as usize];
                    node.words[i] = 0;
                    node.used -= 1;
                    slots.unbound(slot, pages);
                    gone(Gone::Pages(entry_first, entry_last));
                }
            } else if word != 0 {
                let child = Self::child(word);
                self.take_slot_below(child, level + 1, slots, slot, at, end, gone);
                if self.nodes[child as usize].used == 0 && self.nodes[child as usize].plan != self.plan {
                    self.give(child);
                    let node = &mut self.nodes[id as usize];
                    node.words[i] = 0;
                    node.used -= 1;
                    gone(Gone::Node(entry_first, entry_last));
                }
            }
            at = end.wrapping_add(1);
        }
    }

    /// Ends a plan at a chunk that was touched: empty nodes are taken away, nodes that are all one record may become
    /// it. True when the node of the chunk, or one above it, was empty.
    #[inline(always)]
    pub(crate) fn settle(&mut self, chunk: u64, join: Join) -> bool {
        if join == Join::No
            && chunk == self.cursor.chunk
            && self.nodes[self.cursor.path[Self::LAST as usize] as usize].used > 0
        {
            return false;
        }
        self.settle_path(chunk, join)
    }

    #[inline(never)]
    fn settle_path(&mut self, chunk: u64, join: Join) -> bool {
        let page = Self::chunk_pages(chunk).0;
        let mut path = [ROOT; MAX_LEVELS];
        let mut level = 0;
        while level < Self::LAST {
            let word = self.nodes[path[level as usize] as usize].words[Self::index(page, level)];
            if word == 0 || Record::from_word(word).is_some() {
                break;
            }
            level += 1;
            path[level as usize] = Self::child(word);
        }
        let mut emptied = false;
        while level > 0 {
            let id = path[level as usize];
            let new = if self.nodes[id as usize].used == 0 {
                emptied = true;
                0
            } else if (join == Join::All || join == Join::Split && self.nodes[id as usize].split == self.plan)
                && let Some(record) = self.uniform(id, level)
            {
                self.empty(id);
                record.word()
            } else {
                break;
            };
            if new == 0 {
                self.give(id);
            }
            level -= 1;
            let node = &mut self.nodes[path[level as usize] as usize];
            node.words[Self::index(page, level)] = new;
            node.used -= usize::from(new == 0);
        }
        emptied
    }

    /// Makes one record of each node within pages `first..=last` that is all one, lower ones first, and gives first and
    /// last page of each to `joined`. Not while there is a plan.
    pub(crate) fn join(&mut self, first: u64, last: u64, joined: &mut impl FnMut(u64, u64)) {
        self.join_below(ROOT, 0, first, last, joined);
    }

    fn join_below(&mut self, id: u32, level: u32, first: u64, last: u64, joined: &mut impl FnMut(u64, u64)) {
        let mut at = first;
        for i in Self::index(first, level)..=Self::index(last, level) {
            let (entry_first, entry_last) = Self::entry(at, level);
            let end = entry_last.min(last);
            let word = self.nodes[id as usize].words[i];
            if word != 0 && Record::from_word(word).is_none() {
                let child = Self::child(word);
                if level + 1 < Self::LAST {
                    self.join_below(child, level + 1, at, end, joined);
                }
                if at == entry_first
                    && end == entry_last
                    && let Some(record) = self.uniform(child, level + 1)
                {
                    self.empty(child);
                    self.nodes[id as usize].words[i] = record.word();
                    joined(entry_first, entry_last);
                }
            }
            at = end.wrapping_add(1);
        }
    }

    /// Puts a full node among the spare ones.
    fn empty(&mut self, id: u32) {
        let node = &mut self.nodes[id as usize];
        node.words.fill(0);
        node.used = 0;
        self.give(id);
    }

    /// The record that all entries of a node continue.
    fn uniform(&self, id: u32, level: u32) -> Option<Record> {
        let node = &self.nodes[id as usize];
        let record = Record::from_word(node.words[0]).filter(|_| node.used == node.words.len())?;
        let step = record.step() << Self::shift(level);
        let mut word = record.word();
        for &entry in &node.words {
            if entry != word {
                return None;
            }
            word = word.wrapping_add(step);
        }
        Some(record)
    }

    /// The first maximal entry that is bound at or after `page`, whole.
    pub(crate) fn next(&self, mut page: u64) -> Option<Extent> {
        let end = (Self::entries(0) as u64) << Self::shift(0);
        'from_the_root: while page < end {
            let mut id = ROOT;
            for level in 0..F::LEVELS {
                let (first, last) = Self::entry(page, level);
                let word = self.nodes[id as usize].words[Self::index(page, level)];
                if let Some(record) = Record::from_word(word) {
                    return Some(Extent { first, pages: last - first + 1, record });
                }
                if word == 0 {
                    page = last + 1;
                    continue 'from_the_root;
                }
                id = Self::child(word);
            }
        }
        None
    }
}

/// What [`Records::take_slot`] has taken away.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gone {
    /// First and last page of an entry.
    Pages(u64, u64),
    /// First and last page of what an empty node covered.
    Node(u64, u64),
}

fn zeroed(words: usize) -> Result<Box<[u64]>, Full> {
    let mut v = Vec::new();
    v.try_reserve_exact(words)?;
    v.resize(words, 0);
    Ok(v.into_boxed_slice())
}
