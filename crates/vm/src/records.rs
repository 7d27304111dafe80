//! The bindings of a VM: a tree of [`Record`]s in the shape of the page table.
//!
//! A node has an entry for each entry of the page table's table in its place. An entry is empty, a record that holds
//! for all of its pages, or a node one level down. So binding a page is one store, a large binding takes as few entries
//! as its ends allow, and bindings need not be kept as objects: a binding is a run of entries that continue each other.
//! A node has memory for the groups of entries that are in use, which a plan adds to: a page far from all others costs
//! little.
//!
//! Between plans every node but the root holds something, and where there is a node, the page table has a table: what
//! is below it is smaller than its entry. So a plan knows from the nodes which tables are missing.
//!
//! A plan makes the nodes that its requests will need ([`touch`](Records::touch)), which changes nothing that is bound;
//! its commit only stores. Nodes that were touched stay until the batch is over, whatever its requests do to them, and
//! are taken away or joined to a record afterwards ([`settle`](Records::settle)).
//!
//! Unbinding a part of a record takes nodes. The bind that makes the record reserves them
//! ([`keep_nodes`](Records::keep_nodes)), at most 8 bytes for each of its pages, of which none are written until then.

mod change;
mod memory;
mod node;
mod page;

use alloc::vec::Vec;
use core::marker::PhantomData;

use dmalane_iopt::{Format, MAX_LEVELS};

use self::node::{ALL, Node};
use crate::record::Record;
use crate::slots::Full;
use crate::words::Words;

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
    window: Window,
}

impl Cursor {
    const fn at(chunk: u64, path: [u32; MAX_LEVELS]) -> Self {
        Self { chunk, path, window: Window::CLOSED }
    }
}

/// Pages of a chunk that anybody may bind, and whose words follow each other: so one comparison says of a page that all
/// of this holds. Closed when the node's words move.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: u64,
    pages: u64,
    /// Where the word of the first page is.
    at: usize,
}

impl Window {
    const CLOSED: Self = Self { first: 0, pages: 0, at: 0 };
}

/// No chunk has this number.
const NO_CHUNK: u64 = u64::MAX;

const ROOT: u32 = 0;

/// The tree. All addresses in it are page numbers: granules from address 0. A *chunk* is what a node of the last level
/// covers.
#[derive(Debug)]
pub(crate) struct Records<F> {
    nodes: Vec<Node<F>>,
    words: Words,
    /// Nodes that are not in use, and have no words.
    spare: Vec<u32>,
    /// Nodes that it takes to make records of single pages of all records. There is room for them: an unbind need not
    /// ask for memory.
    splits: u64,
    /// The chunk of an empty node that stays with its table until a plan touches it: what unbinds a page alone and
    /// binds one there again need not make them each time.
    idle: u64,
    cursor: Cursor,
    plan: u64,
    /// Requests of the plan so far that may unlink tables.
    unlinking: u32,
    /// True when the plan binds whole chunks: then nodes that it touches have memory for all their entries.
    wide: bool,
    /// No record goes across the start of either of these pages.
    fences: [u64; 2],
    /// Tables that the plan may have to make for what it touched.
    tables: usize,
    /// [`PageTable::root_level`](dmalane_iopt::PageTable::root_level), used where the format is a stand-in.
    root_level: u32,
    format: PhantomData<fn() -> F>,
}

/// A maximal entry: these pages from `first` on are bound to `record`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) first: u64,
    pub(crate) pages: u64,
    pub(crate) record: Record,
}

/// A part of what [`Records::take_slot`] takes away.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gone {
    /// First and last page of an entry.
    Pages(u64, u64),
    /// First and last page of what an empty node at `level` covered.
    Node { first: u64, last: u64, level: u32 },
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

    /// The level of the root, of which the node has the number [`ROOT`].
    #[inline(always)]
    fn top(&self) -> u32 {
        if F::STANDS_IN { self.root_level } else { 0 }
    }

    /// No records; of those to come, none will go across the start of either page. The root of the page table is at
    /// `root_level`.
    pub(crate) fn new(fences: [u64; 2], root_level: u32) -> Result<Self, Full> {
        const { assert!(Self::entries(0) < 1 << 16, "a node counts its entries in 16 bits") }
        let root = Self::entries(root_level);
        let mut it = Self {
            nodes: Vec::new(),
            words: Words::new(root, Node::<F>::GROUP, F::INDEX_BITS)?,
            spare: Vec::new(),
            splits: 0,
            idle: NO_CHUNK,
            cursor: Cursor::at(NO_CHUNK, [ROOT; MAX_LEVELS]),
            plan: 0,
            unlinking: 0,
            wide: false,
            fences,
            tables: 0,
            root_level,
            format: PhantomData,
        };
        it.nodes.try_reserve(1)?;
        it.nodes.push(Node::new(0, root, ALL));
        Ok(it)
    }

    /// Behind the last page.
    fn end(&self) -> u64 {
        (Self::entries(self.top()) as u64) << Self::shift(self.top())
    }

    /// True when no record goes across the start of this page.
    pub(crate) fn is_fence(&self, page: u64) -> bool {
        self.fences.contains(&page)
    }

    /// True when a fence is inside of these pages.
    fn is_fenced(&self, first: u64, last: u64) -> bool {
        self.fences.iter().any(|&fence| first < fence && fence <= last)
    }

    /// Begins a plan.
    #[inline]
    pub(crate) fn begin(&mut self) {
        self.plan += 1;
        self.unlinking = 0;
        self.wide = false;
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
        self.unlinking = self.unlinking.saturating_add(1);
    }

    /// Says that a request of the plan binds a whole chunk. True for the first one: then
    /// [`widen`](Self::widen) what was touched already.
    pub(crate) fn will_bind_chunks(&mut self) -> bool {
        !core::mem::replace(&mut self.wide, true)
    }

    /// Makes the nodes that changing pages `first..=last` needs at the end `at`, one of the two. Where nothing is
    /// bound, and `make` is false, none is needed. True when the plan has not touched one of them before.
    #[inline(always)]
    pub(crate) fn touch(&mut self, at: u64, first: u64, last: u64, make: bool) -> Result<bool, Full> {
        let (plan, unlinking) = (self.plan, self.unlinking);
        let (whole_first, whole_last) = Self::chunk_pages(Self::chunk(at));
        let (first_here, last_here) = (first.max(whole_first), last.min(whole_last));
        // A node that the plan has touched, and those above it with it, will do for a part of its pages.
        if (first_here > whole_first || last_here < whole_last)
            && let Some((node, _)) = self.seek(at)
            && (node.plan, node.after) == (plan, unlinking)
            && (!make || node.covers(Self::index(first_here, Self::LAST), Self::index(last_here, Self::LAST)))
        {
            return Ok(false);
        }
        self.touch_path(at, first, last, make)
    }

    #[inline(never)]
    fn touch_path(&mut self, at: u64, first: u64, last: u64, make: bool) -> Result<bool, Full> {
        let mut path = [ROOT; MAX_LEVELS];
        let mut new = false;
        // The pages of the present node.
        let (mut node_first, mut node_last) = (0, self.end() - 1);
        for level in self.top()..F::LEVELS {
            let id = path[level as usize];
            // A later request may bind all of what this one unbinds a part of. The root has memory for all.
            if level > self.top() && (make || self.wide) {
                let (i, j) = self.within(level, (first, last), (node_first, node_last));
                self.cover(id, i, j)?;
            }
            if level == Self::LAST {
                break;
            }
            let (entry_first, entry_last) = Self::entry(at, level);
            if first <= entry_first && entry_last <= last {
                return Ok(new); // a record of this level will do
            }
            let i = Self::index(at, level);
            let word = self.nodes[id as usize].get(&self.words, i);
            let child = match Record::from_word(word) {
                Some(record) => {
                    // This node is no more to be reserved. Those for its entries are.
                    let child = self.take(0, Self::entries(level + 1) - 1, self.splits - 1, false)?;
                    self.splits -= 1;
                    self.fill(child, level + 1, record);
                    self.nodes[id as usize].set(&mut self.words, i, Self::link(child));
                    // The leaf may have to be split into a table.
                    self.mark(child, true);
                    self.nodes[child as usize].split = true;
                    new = true;
                    child
                }
                None if word != 0 => Self::child(word),
                None if !make => return Ok(new),
                None => {
                    let (i_below, j_below) = self.within(level + 1, (first, last), (entry_first, entry_last));
                    let child = self.take(i_below, j_below, self.splits, true)?;
                    self.replace(id, level, i, Self::link(child));
                    child
                }
            };
            new |= self.mark(child, false);
            path[level as usize + 1] = child;
            (node_first, node_last) = (entry_first, entry_last);
        }
        self.cursor = Cursor::at(Self::chunk(at), path);
        Ok(new)
    }

    /// The entries of a node at `level` that pages of a request lie in: those of the node itself are given too.
    fn within(&self, level: u32, (first, last): (u64, u64), (node_first, node_last): (u64, u64)) -> (usize, usize) {
        if self.wide && level > 0 {
            return (0, Self::entries(level) - 1);
        }
        (Self::index(first.max(node_first), level), Self::index(last.min(node_last), level))
    }

    /// Notes that the plan touches a node, and counts its table if that may have to be made. True when it is the first
    /// time.
    fn mark(&mut self, id: u32, missing: bool) -> bool {
        let node = &mut self.nodes[id as usize];
        let first = node.plan != self.plan;
        if first || node.after != self.unlinking {
            self.tables += usize::from(missing || node.used == 0 || self.unlinking > 0);
            (node.plan, node.after) = (self.plan, self.unlinking);
        }
        if first {
            node.split = false;
        }
        first
    }

    /// Makes a record of all pages of an empty node, which has memory for all entries.
    fn fill(&mut self, id: u32, level: u32, record: Record) {
        let node = &mut self.nodes[id as usize];
        write_run(&mut self.words.all[node.range()], record.word(), record.step() << Self::shift(level));
        (node.used, node.slot, node.others) = (node.len, record.slot(), 0);
    }

    const fn link(child: u32) -> u64 {
        child as u64 // never 0, as no entry points to the root
    }

    const fn child(word: u64) -> u32 {
        word as u32
    }

    /// The node of a page's chunk, if there is one, which the cursor finds from now on.
    #[inline(always)]
    fn seek(&mut self, page: u64) -> Option<(&mut Node<F>, &mut Words)> {
        if Self::chunk(page) != self.cursor.chunk && !self.seek_path(page) {
            return None;
        }
        Some((&mut self.nodes[self.cursor.path[Self::LAST as usize] as usize], &mut self.words))
    }

    #[inline(never)]
    fn seek_path(&mut self, page: u64) -> bool {
        let mut path = [ROOT; MAX_LEVELS];
        for level in self.top()..Self::LAST {
            let word = self.nodes[path[level as usize] as usize].get(&self.words, Self::index(page, level));
            if word == 0 || Record::from_word(word).is_some() {
                return false;
            }
            path[level as usize + 1] = Self::child(word);
        }
        self.cursor = Cursor::at(Self::chunk(page), path);
        true
    }

    /// The last page that can be bound with nothing more to prepare than for `page`, the last one touched.
    #[inline]
    pub(crate) fn prepared_to(&self, page: u64) -> u64 {
        let (first, last) = Self::chunk_pages(Self::chunk(page));
        let node = &self.nodes[self.cursor.path[Self::LAST as usize] as usize];
        let group = Self::index(page, Self::LAST) >> Node::<F>::GROUP;
        let groups = u64::from((node.groups >> (group & 63)).trailing_ones());
        if node.groups == ALL { last } else { last.min(first + ((group as u64 + groups) << Node::<F>::GROUP) - 1) }
    }

    /// Ends a plan at a chunk that was touched: empty nodes are taken away, nodes that are all one record may become
    /// it. Gives the first and the last level of the nodes that were empty, if any was.
    #[inline(always)]
    pub(crate) fn settle(&mut self, chunk: u64, join: Join) -> Option<(u32, u32)> {
        if join == Join::No
            && chunk == self.cursor.chunk
            && self.nodes[self.cursor.path[Self::LAST as usize] as usize].used > 0
        {
            return None;
        }
        self.settle_path(chunk, join)
    }

    #[inline(never)]
    fn settle_path(&mut self, chunk: u64, join: Join) -> Option<(u32, u32)> {
        let page = Self::chunk_pages(chunk).0;
        let mut path = [ROOT; MAX_LEVELS];
        let mut level = self.top();
        while level < Self::LAST {
            let word = self.nodes[path[level as usize] as usize].get(&self.words, Self::index(page, level));
            if word == 0 || Record::from_word(word).is_some() {
                break;
            }
            level += 1;
            path[level as usize] = Self::child(word);
        }
        let mut emptied = None;
        while level > self.top() {
            let id = path[level as usize];
            let node = &self.nodes[id as usize];
            let new = if node.used == 0 {
                if join == Join::Split && level == Self::LAST && chunk == self.idle {
                    break; // its table is there
                }
                emptied = Some((level, emptied.map_or(level, |(_, bottom)| bottom)));
                self.give(id, false);
                0
            } else if (join == Join::All || join == Join::Split && node.split && node.plan == self.plan)
                && let Some(record) = self.uniform(id, level, page)
            {
                self.give(id, true);
                record.word()
            } else {
                break;
            };
            level -= 1;
            if new != 0 {
                self.splits += 1; // the node; its records are counted
            }
            let i = Self::index(page, level);
            self.nodes[path[level as usize] as usize].set(&mut self.words, i, new);
            self.nodes[path[level as usize] as usize].used -= u32::from(new == 0);
        }
        emptied
    }

    /// Makes one record of each node within pages `first..=last` that is all one. Not while there is a plan.
    pub(crate) fn join(&mut self, first: u64, last: u64) {
        self.join_below(ROOT, self.top(), first, last);
    }

    fn join_below(&mut self, id: u32, level: u32, first: u64, last: u64) {
        let mut at = first;
        for i in Self::index(first, level)..=Self::index(last, level) {
            let (entry_first, entry_last) = Self::entry(at, level);
            let end = entry_last.min(last);
            let word = self.nodes[id as usize].get(&self.words, i);
            if word != 0 && Record::from_word(word).is_none() {
                let child = Self::child(word);
                if level + 1 < Self::LAST {
                    self.join_below(child, level + 1, at, end);
                }
                if at == entry_first
                    && end == entry_last
                    && let Some(record) = self.uniform(child, level + 1, entry_first)
                {
                    self.give(child, true);
                    self.nodes[id as usize].set(&mut self.words, i, record.word());
                    self.splits += 1; // as above
                }
            }
            at = end.wrapping_add(1);
        }
    }

    /// The record that all entries of a node, the one at `level` with this page, continue.
    fn uniform(&self, id: u32, level: u32, page: u64) -> Option<Record> {
        let node = &self.nodes[id as usize];
        let full = node.used as usize == Self::entries(level);
        let record = Record::from_word(self.words.all[node.at]).filter(|_| full)?;
        let step = record.step() << Self::shift(level);
        let (first, last) = Self::entry(page, level - 1);
        let (words, word) = (&self.words.all[node.range()], record.word());
        // Most that are not one record do not end as they would.
        if words.last() != Some(&word.wrapping_add(step * (words.len() as u64 - 1))) {
            return None;
        }
        (counts_up(words, word, step) && !self.is_fenced(first, last)).then_some(record)
    }

    /// The binding at or after `page`, if it begins at `end` or before: first page, last page and first record. What of
    /// it lies before `page`, and behind `end`, may be missing: a binding may have millions of records.
    pub(crate) fn binding(&self, page: u64, end: u64) -> Option<(u64, u64, Record)> {
        let extent = self.next(page).filter(|extent| extent.first <= end)?;
        let first = extent.first;
        let mut page = first + extent.pages;
        while page <= end
            && let Some(next) = self.next(page)
            && next.first == page
            && next.record == extent.record.advance(page - first)
            && !self.is_fence(page)
        {
            page += next.pages;
        }
        Some((first, page - 1, extent.record))
    }

    /// The first maximal entry that is bound at or after `page`, whole.
    pub(crate) fn next(&self, mut page: u64) -> Option<Extent> {
        let end = self.end();
        'from_the_root: while page < end {
            let mut id = ROOT;
            for level in self.top()..F::LEVELS {
                let i = Self::index(page, level);
                let Some((used, word)) = self.nodes[id as usize].next_used(&self.words, i, Self::entries(level) - 1)
                else {
                    if level == self.top() {
                        return None;
                    }
                    page = Self::entry(page, level - 1).1 + 1;
                    continue 'from_the_root;
                };
                if used > i {
                    page = Self::entry(page, level).0 + (((used - i) as u64) << Self::shift(level));
                }
                let (first, last) = Self::entry(page, level);
                if let Some(record) = Record::from_word(word) {
                    return Some(Extent { first, pages: last - first + 1, record });
                }
                id = Self::child(word);
            }
        }
        None
    }
}

/// True when words count up from `word`.
fn counts_up(words: &[u64], mut word: u64, step: u64) -> bool {
    // No end before the last: so it takes several at once.
    let differ = words.iter().fold(0, |differ, &entry| {
        let differ = differ | (entry ^ word);
        word = word.wrapping_add(step);
        differ
    });
    differ == 0
}

/// Writes words that count up.
fn write_run(words: &mut [u64], mut word: u64, step: u64) {
    for entry in words {
        *entry = word;
        word = word.wrapping_add(step); // only after the last one
    }
}
