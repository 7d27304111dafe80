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

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use dmalane_iopt::{Format, MAX_LEVELS};

use crate::record::Record;
use crate::slots::{Full, Place, Slots};
use crate::words::Words;

/// As large as a cache line, so that finding one takes a shift.
#[derive(Debug)]
#[repr(align(64))]
struct Node<F> {
    /// Where in [`Records::words`] the groups of entries are that have memory, in order. All other entries are empty.
    at: usize,
    /// Which groups these are, a bit each; [`ALL`] when all are.
    groups: u64,
    /// The last plan that touched it.
    plan: u64,
    /// Low and high half of [`Records::run`]'s answer, so that it need not be searched again.
    run: [AtomicU32; 2],
    /// Words that it has.
    len: u32,
    /// The first entry with memory and the number of all that have, if these are all in a row; else 0.
    first: u16,
    in_a_row: u16,
    /// Entries that are not empty.
    used: u32,
    /// Number of requests of that plan that may have unlinked tables and came before the last touch.
    after: u32,
    /// In a node of the last level that is not empty: the slot of all its records but `others`, or [`MIXED`].
    slot: u32,
    other: u32,
    /// Records of the slot `other`.
    others: u32,
    /// True when `plan` made it of a record.
    split: bool,
    /// Logarithm of the entries of the node above, the one of this node first, that are known to be one run. Their
    /// index is a multiple of their number. Where this is not 0, `run` is known of each node in them.
    block: AtomicU8,
    /// True when a node below may have a `block`.
    blocks: AtomicBool,
    format: PhantomData<fn() -> F>,
}

/// All groups, as many as there are.
const ALL: u64 = u64::MAX;

/// Records of three slots or more, or they were.
const MIXED: u32 = u32::MAX;

impl<F: Format> Node<F> {
    /// Logarithm of the entries of a group: at least 32, and so many that 64 groups are a table.
    const GROUP: u32 = if F::INDEX_BITS > 11 { F::INDEX_BITS - 6 } else { 5 };

    /// The bits of the groups that entries `i` to `j` lie in.
    const fn groups_of(i: usize, j: usize) -> u64 {
        let (first, last) = (i >> Self::GROUP, j >> Self::GROUP);
        ALL >> (63 - (last - first)) << first
    }

    /// A node that nothing is in, with memory for these groups.
    fn new(at: usize, len: usize, groups: u64) -> Self {
        let mut node = Self {
            at,
            groups,
            plan: 0,
            run: [const { AtomicU32::new(0) }; 2],
            len: 0,
            first: 0,
            in_a_row: 0,
            used: 0,
            after: 0,
            slot: MIXED,
            other: MIXED,
            others: 0,
            split: false,
            block: AtomicU8::new(0),
            blocks: AtomicBool::new(false),
            format: PhantomData,
        };
        node.move_to(at, len, groups);
        node
    }

    /// Notes where its words are now.
    fn move_to(&mut self, at: usize, len: usize, groups: u64) {
        const { assert!(size_of::<Self>() == 64 && F::INDEX_BITS < 16 && Records::<F>::entries(0) < 1 << 16) }
        let (first, count) = (groups.trailing_zeros(), groups.count_ones());
        let in_a_row = count > 0 && (groups >> first).trailing_ones() == count;
        (self.at, self.len, self.groups) = (at, len as u32, groups); // a table has fewer entries
        (self.first, self.in_a_row) = if in_a_row { ((first << Self::GROUP) as u16, len as u16) } else { (0, 0) };
    }

    /// Where all of its words are.
    #[inline]
    fn range(&self) -> Range<usize> {
        self.at..self.at + self.len as usize
    }

    /// Where the word of an entry is, if it has one and all others that have follow each other.
    #[inline(always)]
    fn in_a_row(&self, i: usize) -> Option<usize> {
        let k = i.wrapping_sub(self.first as usize);
        if k < self.in_a_row as usize { Some(self.at + k) } else { None }
    }

    /// Where the word of an entry is; beyond all words when the entry has no memory.
    #[inline(always)]
    fn position(&self, i: usize) -> usize {
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
    fn positions(&self, i: usize, j: usize) -> Range<usize> {
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
    fn get(&self, words: &Words, i: usize) -> u64 {
        words.all.get(self.position(i)).copied().unwrap_or(0)
    }

    /// Replaces an entry that has memory, or empties one.
    #[inline(always)]
    fn set(&self, words: &mut Words, i: usize, word: u64) {
        match words.all.get_mut(self.position(i)) {
            Some(entry) => *entry = word,
            None => assert!(word == 0, "a plan makes room for what its commit changes"),
        }
    }

    /// The first entry from `i` to `last` that is not empty, with its index.
    fn next_used(&self, words: &Words, i: usize, last: usize) -> Option<(usize, u64)> {
        let range = self.positions(i, last);
        let found = range.start + words.all[range].iter().position(|&word| word != 0)?;
        Some((self.index_at(found), words.all[found]))
    }

    /// True when entries `i` to `j` have memory.
    #[inline(always)]
    fn covers(&self, i: usize, j: usize) -> bool {
        let in_a_row = self.in_a_row(i).is_some() && self.in_a_row(j).is_some();
        in_a_row || Self::groups_of(i, j) & !self.groups == 0
    }

    /// True when some entries `i` to `j` are records of a slot, or not records: what they are takes longer to find out.
    fn may_have(&self, words: &Words, slot: u32, i: usize, j: usize) -> bool {
        let of_slot = |&word: &u64| Record::from_word(word).is_some_and(|record| record.slot() == slot);
        words.all[self.positions(i, j)].iter().fold(false, |any, word| any | of_slot(word))
    }

    /// True when there are records of a slot, and that is noted.
    #[inline]
    fn has(&self, slot: u32) -> bool {
        self.slot == slot && self.used > self.others || self.other == slot && self.others > 0
    }

    /// The slot of the records of all pages, if it is one.
    #[inline]
    fn all_of(&self) -> Option<u32> {
        let all = self.used as usize == 1 << F::INDEX_BITS && self.others == 0 && self.slot != MIXED;
        all.then_some(self.slot)
    }

    /// Notes that records of a slot come in; call it before they are counted.
    #[inline(always)]
    fn note(&mut self, slot: u32, records: u32) {
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
    fn note_gone(&mut self, slot: u32, records: u32) {
        self.others -= records * u32::from(self.other == slot);
    }

    /// Whether all is as `slot`, `others` and `used` say.
    fn is_as_noted(&self, words: &Words) -> bool {
        let words = &words.all[self.range()];
        let of = |slot| words.iter().filter(|&&w| Record::from_word(w).is_some_and(|r| r.slot() == slot)).count();
        let used = words.iter().filter(|&&w| w != 0).count() as u32;
        let others = if self.others > 0 { of(self.other) as u32 } else { 0 };
        (self.used, self.others) == (used, others) && of(self.slot) as u32 + others == used
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
    /// Nodes that it takes to make records of single pages of all records. So many can be made without asking for
    /// memory: an unbind need not.
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

    /// No records; of those to come, none will go across the start of either page.
    pub(crate) fn new(fences: [u64; 2]) -> Result<Self, Full> {
        let root = Self::entries(0);
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
            format: PhantomData,
        };
        it.nodes.try_reserve(1)?;
        it.nodes.push(Node::new(0, root, ALL));
        Ok(it)
    }

    /// True when no record goes across the start of this page.
    pub(crate) fn is_fence(&self, page: u64) -> bool {
        self.fences.contains(&page)
    }

    /// True when a fence is inside of these pages.
    fn is_fenced(&self, first: u64, last: u64) -> bool {
        self.fences.iter().any(|&fence| first < fence && fence <= last)
    }

    /// Bytes of memory in use; what is reserved for unbinds is not.
    pub(crate) fn bytes(&self) -> usize {
        self.words.all.len() * 8 + self.nodes.len() * size_of::<Node<F>>() + self.spare.capacity() * size_of::<u32>()
    }

    /// Gives back the memory of words that are not in use.
    ///
    /// # Errors
    /// No memory to put the others into.
    pub(crate) fn trim(&mut self) -> Result<(), Full> {
        let len = |node: &Node<F>| node.len as usize;
        let (root, below) = (len(&self.nodes[0]), &mut self.nodes[1..]);
        let mut words = Words::new(root, Node::<F>::GROUP, F::INDEX_BITS)?;
        words.all.try_reserve_exact(below.iter().map(len).sum())?;
        for node in below.iter().filter(|node| node.len > 0) {
            words.take(Words::class(node.len >> Node::<F>::GROUP), 0, true)?; // one behind the other
        }
        words.keep(self.splits)?;
        words.all[..root].copy_from_slice(&self.words.all[..root]);
        let mut at = root;
        for node in below.iter_mut().filter(|node| node.len > 0) {
            words.all[at..at + len(node)].copy_from_slice(&self.words.all[node.range()]);
            node.at = at;
            at += len(node);
        }
        self.words = words;
        self.cursor.window = Window::CLOSED;
        Ok(())
    }

    /// All groups of a node below the root.
    const GROUPS: u64 = Node::<F>::groups_of(0, Self::entries(Self::LAST) - 1);
    const IN_GROUP: usize = 1 << Node::<F>::GROUP;

    /// An empty node below the root, with memory for entries `i` to `j`; what that holds is to be written if not
    /// `zeroed`. Such that there is still memory for `keep` whole nodes.
    fn take(&mut self, i: usize, j: usize, keep: u64, zeroed: bool) -> Result<u32, Full> {
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

    /// Makes room for so many nodes more, their words apart.
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
    const fn splits_of(level: u32) -> u64 {
        let (mut nodes, mut at) = (0, Self::LAST);
        while at > level {
            nodes = 1 + (nodes << F::INDEX_BITS);
            at -= 1;
        }
        nodes
    }

    /// Gives entries `i` to `j` of a node memory.
    #[inline]
    fn cover(&mut self, id: u32, i: usize, j: usize) -> Result<(), Full> {
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
        let new = (old | need | more) & Self::GROUPS;
        let all = 2 * new.count_ones() > Self::GROUPS.count_ones();
        let groups = if all { Self::GROUPS } else { new };
        let (class, groups) = Self::block(groups);
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
        for level in 0..Self::LAST {
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
    fn give(&mut self, id: u32, dirty: bool) {
        self.cursor = Cursor::at(NO_CHUNK, [ROOT; MAX_LEVELS]);
        let node = &mut self.nodes[id as usize];
        self.words.give(node.range(), dirty);
        *node = Node::new(0, 0, 0);
        self.spare.push(id); // there is room: `keep_numbers`
    }

    /// Replaces an entry of a node at `level`.
    fn replace(&mut self, id: u32, level: u32, i: usize, word: u64) {
        let node = &mut self.nodes[id as usize];
        let old = node.get(&self.words, i);
        node.set(&mut self.words, i, word);
        let splits = |word| Record::from_word(word).map_or(0, |_| Self::splits_of(level));
        self.splits = self.splits + splits(word) - splits(old);
        node.used = node.used + u32::from(word != 0) - u32::from(old != 0);
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
        let (mut node_first, mut node_last) = (0, ((Self::entries(0) as u64) << Self::shift(0)) - 1);
        for level in 0..F::LEVELS {
            let id = path[level as usize];
            // A later request may bind all of what this one unbinds a part of.
            if make || self.wide {
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
                    self.forget_run(at, level);
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
            if self.nodes[id as usize].run[1].load(Relaxed) != 0 {
                self.forget_run(first, Self::LAST);
            }
            if first == last {
                self.put_page(id, slots, first, record)
            } else {
                self.put_pages(id, slots, first, last, record)
            }
        } else {
            self.put_below(ROOT, 0, slots, first, last, record)
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
        for level in 0..Self::LAST {
            let word = self.nodes[path[level as usize] as usize].get(&self.words, Self::index(page, level));
            if word == 0 || Record::from_word(word).is_some() {
                return false;
            }
            path[level as usize + 1] = Self::child(word);
        }
        self.cursor = Cursor::at(Self::chunk(page), path);
        true
    }

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
        if node.used <= 1 || node.run[1].load(Relaxed) != 0 {
            return None; // a full one: the nodes above may know something of it too
        }
        let entry = words.all.get_mut(node.position(Self::index(page, Self::LAST)))?;
        let record = Record::from_word(*entry).filter(|&record| counted(record))?;
        *entry = 0;
        node.note_gone(record.slot(), 1);
        node.used -= 1;
        Some(())
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

    /// The last page that can be bound with nothing more to prepare than for `page`, the last one touched.
    #[inline]
    pub(crate) fn prepared_to(&self, page: u64) -> u64 {
        let (first, last) = Self::chunk_pages(Self::chunk(page));
        let node = &self.nodes[self.cursor.path[Self::LAST as usize] as usize];
        let group = Self::index(page, Self::LAST) >> Node::<F>::GROUP;
        let groups = u64::from((node.groups >> (group & 63)).trailing_ones());
        if node.groups == ALL { last } else { last.min(first + ((group as u64 + groups) << Node::<F>::GROUP) - 1) }
    }

    /// Unbinds a page that may be the last one of its chunk, whose node stays as the idle one then. `None` when that
    /// takes a plan: nothing is bound, or there is another idle node.
    pub(crate) fn take_alone(&mut self, page: u64) -> Option<Record> {
        let chunk = Self::chunk(page);
        let idle = self.idle == chunk || !self.is_idle(self.idle);
        let (node, words) = self.seek(page)?;
        if node.used == 1 && !idle || node.run[1].load(Relaxed) != 0 {
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
        for level in 0..Self::LAST {
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
                if run > 0 {
                    gone(slot, run);
                }
                (had, run, slot) = (had + run, 0, old.slot());
            }
            run += 1;
        }
        if run > 0 {
            gone(slot, run);
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
        self.forget(id, level, first);
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
        self.forget(id, level, first);
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
        let mut level = 0;
        while level < Self::LAST {
            let word = self.nodes[path[level as usize] as usize].get(&self.words, Self::index(page, level));
            if word == 0 || Record::from_word(word).is_some() {
                break;
            }
            level += 1;
            path[level as usize] = Self::child(word);
        }
        let mut emptied = None;
        while level > 0 {
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
            let word = self.nodes[id as usize].get(&self.words, i);
            if word != 0 && Record::from_word(word).is_none() {
                let child = Self::child(word);
                if level + 1 < Self::LAST {
                    self.join_below(child, level + 1, at, end, joined);
                }
                if at == entry_first
                    && end == entry_last
                    && let Some(record) = self.uniform(child, level + 1, entry_first)
                {
                    self.give(child, true);
                    self.nodes[id as usize].set(&mut self.words, i, record.word());
                    self.splits += 1; // as above
                    joined(entry_first, entry_last);
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

    /// The first maximal entry that is bound at or after `page`, whole.
    pub(crate) fn next(&self, mut page: u64) -> Option<Extent> {
        let end = (Self::entries(0) as u64) << Self::shift(0);
        'from_the_root: while page < end {
            let mut id = ROOT;
            for level in 0..F::LEVELS {
                let i = Self::index(page, level);
                let Some((used, word)) = self.nodes[id as usize].next_used(&self.words, i, Self::entries(level) - 1)
                else {
                    if level == 0 {
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

    /// The run that all pages of a node, the one at `level` with this page, are bound to, if it is one. The answer is
    /// kept until something below the node changes: where one is, all nodes below have theirs.
    fn run(&self, id: u32, level: u32, page: u64) -> Option<Record> {
        const NONE: u32 = 1;
        #[cfg(test)]
        tests::VISITS.set(tests::VISITS.get() + 1);
        let node = &self.nodes[id as usize];
        if (node.used as usize) < Self::entries(level) {
            return None;
        }
        match node.run[1].load(Acquire) {
            0 => {}
            NONE => return None,
            high => return Record::from_word(u64::from(high) << 32 | u64::from(node.run[0].load(Relaxed))),
        }
        let (first, last) = Self::entry(page, level - 1);
        let words = &self.words.all[node.range()];
        let run = self.run_of(words[0], level, first).filter(|&record| {
            !self.is_fenced(first, last)
                && if level == Self::LAST {
                    counts_up(words, record.word(), record.step())
                } else {
                    let mut run = Run::new(first, 1 << Self::shift(level), record);
                    self.extend(id, level, 1, true, &mut run)
                }
        });
        // Concurrent callers store the same. A node above may become a run while it does not change itself.
        if run.is_some() || level == Self::LAST {
            let word = run.map_or(u64::from(NONE) << 32, Record::word);
            node.run[0].store(word as u32, Relaxed);
            node.run[1].store((word >> 32) as u32, Release);
        }
        run
    }

    /// The run that all pages of an entry at `level`, the first of which is `page`, are bound to, if it is one.
    fn run_of(&self, word: u64, level: u32, page: u64) -> Option<Record> {
        if word == 0 || level == Self::LAST {
            return Record::from_word(word);
        }
        Record::from_word(word).or_else(|| self.run(Self::child(word), level + 1, page))
    }

    /// The node that an entry above the last level links to.
    fn linked(&self, id: u32, i: usize) -> Option<u32> {
        let word = self.nodes[id as usize].get(&self.words, i);
        (word != 0 && Record::from_word(word).is_none()).then_some(Self::child(word))
    }

    /// Entries from the one with this page on change in a node at `level`, and the nodes there forget too: forgets what
    /// the node knows of itself, and what those below know of blocks that the entries are in.
    fn forget(&mut self, id: u32, level: u32, page: u64) {
        let node = &mut self.nodes[id as usize];
        (*node.run[1].get_mut(), *node.block.get_mut()) = (0, 0);
        if level < Self::LAST && *node.blocks.get_mut() {
            self.forget_blocks(id, level, Self::index(page, level));
        }
    }

    #[cold]
    fn forget_blocks(&mut self, id: u32, level: u32, i: usize) {
        for size in 1..=Self::entries(level).ilog2() {
            if let Some(child) = self.linked(id, i >> size << size) {
                let block = self.nodes[child as usize].block.get_mut();
                *block = (*block).min(size as u8 - 1);
            }
        }
    }

    /// Something below the node at `level` with this page changes: forgets what it and those above know.
    #[cold]
    fn forget_run(&mut self, page: u64, level: u32) {
        let mut id = ROOT;
        for above in 0..=level {
            self.forget(id, above, page);
            match self.linked(id, Self::index(page, above)) {
                Some(child) if above < level => id = child,
                _ => break,
            }
        }
    }

    /// All pages around `page` that continue each other, first and last, with what the first is bound to.
    pub(crate) fn run_around(&self, page: u64) -> Option<(u64, u64, Record)> {
        let mut path = [ROOT; MAX_LEVELS];
        let mut level = 0;
        let mut word = self.nodes[ROOT as usize].get(&self.words, Self::index(page, 0));
        while level < Self::LAST && word != 0 && Record::from_word(word).is_none() {
            level += 1;
            path[level as usize] = Self::child(word);
            word = self.nodes[path[level as usize] as usize].get(&self.words, Self::index(page, level));
        }
        let mut record = Record::from_word(word)?;
        while level > 0
            && let Some(run) = self.run(path[level as usize], level, page)
        {
            record = run;
            level -= 1;
        }
        let mut run = Run::new(Self::entry(page, level).0, 1 << Self::shift(level), record);
        for up in [false, true] {
            for above in (0..=level).rev() {
                let from = Self::index(page, above) + usize::from(up);
                if !self.extend(path[above as usize], above, from, up, &mut run) {
                    break;
                }
            }
        }
        Some((run.first, run.end - 1, run.record))
    }

    /// Moves an end of a run through entries of a node, up from `at` or down from the one before it, as far as they
    /// continue it. True when all of them do.
    fn extend(&self, id: u32, level: u32, mut at: usize, up: bool, run: &mut Run) -> bool {
        if level == Self::LAST {
            return self.extend_last(id, at, up, run);
        }
        let entries = Self::entries(level);
        while at != if up { entries } else { 0 } {
            let size = (at | entries).trailing_zeros();
            let first = if up { at } else { at - (1 << size) };
            if !self.extend_block(id, level, first, size, up, run) {
                return false;
            }
            at = if up { at + (1 << size) } else { first };
        }
        true
    }

    /// The same for `1 << size` entries, the first of which has an index that is a multiple of that.
    fn extend_block(&self, id: u32, level: u32, first: usize, size: u32, up: bool, run: &mut Run) -> bool {
        let child = self.linked(id, first);
        if size > 0 && child.is_none_or(|child| size > self.nodes[child as usize].block.load(Relaxed).into()) {
            let half = size - 1;
            let (low, high) = (first, first + (1 << half));
            let (near, far) = if up { (low, high) } else { (high, low) };
            let all =
                self.extend_block(id, level, near, half, up, run) && self.extend_block(id, level, far, half, up, run);
            if all && let Some(child) = child {
                // Concurrent callers may store less, which is true as well.
                self.nodes[id as usize].blocks.store(true, Relaxed);
                self.nodes[child as usize].block.store(size as u8, Relaxed);
            }
            return all;
        }
        let pages = 1 << (Self::shift(level) + size);
        let page = if up { run.end } else { run.first - pages };
        let word = self.nodes[id as usize].get(&self.words, first);
        match (self.run_of(word, level, page), child) {
            (Some(record), _) if !self.fences.contains(if up { &run.end } else { &run.first }) => {
                run.join(record, pages, up)
            }
            (None, Some(child)) => {
                self.extend(child, level + 1, if up { 0 } else { Self::entries(level + 1) }, up, run);
                false
            }
            _ => false,
        }
    }

    /// The same as [`extend`](Self::extend) in a node of the last level.
    fn extend_last(&self, id: u32, mut at: usize, up: bool, run: &mut Run) -> bool {
        let to_fence = |fence: u64| if up { fence.checked_sub(run.end) } else { run.first.checked_sub(fence) };
        let mut allowed = self.fences.into_iter().filter_map(to_fence).min().unwrap_or(u64::MAX);
        let step = run.record.step();
        while at != if up { Self::entries(Self::LAST) } else { 0 } {
            // The words of a group follow each other.
            let group = (if up { at } else { at - 1 }) & !(Self::IN_GROUP - 1);
            let position = self.nodes[id as usize].position(group);
            let Some(words) = self.words.all.get(position..) else { return false };
            let words = if up { &words[at - group..Self::IN_GROUP] } else { &words[..at - group] };
            let len = words.len() as u64;
            let word = if up { run.next.word() } else { run.record.word().wrapping_sub(len * step) };
            let differs = |(k, &entry): (usize, &u64)| entry != word.wrapping_add(k as u64 * step);
            let mut pages = len;
            if !counts_up(words, word, step) {
                let mut entries = words.iter().enumerate();
                let same = if up { entries.position(differs) } else { entries.rev().position(differs) };
                pages = same.map_or(len, |same| same as u64);
            }
            pages = pages.min(allowed);
            allowed -= pages;
            if up {
                (run.end, run.next) = (run.end + pages, run.next.advance(pages));
                at += pages as usize;
            } else {
                (run.first, run.record) = (run.first - pages, run.record.back(pages));
                at -= pages as usize;
            }
            if pages < len {
                return false;
            }
        }
        true
    }
}

/// Pages that continue each other, from `first` to before `end`: what the first is bound to, and what would continue
/// the last.
struct Run {
    first: u64,
    end: u64,
    record: Record,
    next: Record,
}

impl Run {
    fn new(first: u64, pages: u64, record: Record) -> Self {
        Self { first, end: first + pages, record, next: record.advance(pages) }
    }

    /// Adds the pages behind it, or in front, which are bound to `record`, if they continue it.
    fn join(&mut self, record: Record, pages: u64, up: bool) -> bool {
        let next = record.advance(pages);
        if up && record == self.next {
            (self.end, self.next) = (self.end + pages, next);
        } else if !up && next == self.record {
            (self.first, self.record) = (self.first - pages, record);
        } else {
            return false;
        }
        true
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

/// A part of what [`Records::take_slot`] takes away.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gone {
    /// First and last page of an entry.
    Pages(u64, u64),
    /// First and last page of what an empty node at `level` covered.
    Node { first: u64, last: u64, level: u32 },
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

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;
    use alloc::vec::Vec;
    use core::cell::Cell;

    use dmalane_addr::{Access, CardAddr, DeviceVa, Segment, Span};
    use dmalane_iopt::{HeapTables, X86_64_4Level};

    use crate::{BindRequest, Bo, Vm};

    std::thread_local! {
        /// Nodes that were asked for their run.
        pub(super) static VISITS: Cell<usize> = const { Cell::new(0) };
    }

    const PAGE: u64 = 4096;
    const TABLE: u64 = 512;

    type TestVm = Vm<X86_64_4Level, HeapTables<CardAddr>>;

    fn span(page: u64, pages: u64) -> Span<DeviceVa> {
        Span::new(DeviceVa::new(page * PAGE), pages * PAGE).unwrap()
    }

    fn vm(pages: u64, reserved: Span<DeviceVa>) -> (TestVm, Arc<Bo>) {
        // No two pages are next to each other on the card, so that none makes a large leaf.
        let page = |n: u64| Segment { addr: CardAddr::new((1 << 40) + 2 * n * PAGE), len: PAGE };
        let bo = Bo::of_segments(1, (0..pages).map(page)).unwrap();
        let tables = HeapTables::new(CardAddr::new(0));
        (Vm::with_reserved(span(0, 1 << 28), reserved, tables).unwrap(), Arc::new(bo))
    }

    /// Binds pages to a buffer from a page of it on, or unbinds them.
    fn put(vm: &mut TestVm, page: u64, pages: u64, to: Option<(&Arc<Bo>, u64)>) {
        let reserved = vm.reserved().unwrap();
        let cuts =
            [reserved.first().bits(), reserved.last().bits() + 1].map(|cut| (cut / PAGE).clamp(page, page + pages));
        for (first, end) in [(page, cuts[0]), (cuts[0], cuts[1]), (cuts[1], page + pages)] {
            let Some(va) = Span::new(DeviceVa::new(first * PAGE), (end - first) * PAGE) else { continue };
            let request = match to {
                None => BindRequest::Unbind(va),
                Some((bo, from)) => BindRequest::Bind {
                    va: va.first(),
                    bo: bo.clone(),
                    offset: (from + first - page) * PAGE,
                    len: va.len(),
                    access: Access::RW,
                },
            };
            let plan = if reserved.covers(&va) { vm.plan_reserved([request]) } else { vm.plan([request]) };
            let done = plan.unwrap().commit();
            vm.invalidated(done);
        }
    }

    /// The span around a page, and the nodes that finding it took.
    fn around(vm: &TestVm, page: u64) -> (Option<Span<DeviceVa>>, usize) {
        VISITS.set(0);
        (vm.binding_at(DeviceVa::new(page * PAGE)).map(|b| b.span), VISITS.get())
    }

    #[test]
    fn the_binding_around_a_page_takes_few_nodes() {
        let pages = 600 * TABLE + 77;
        let (mut vm, bo) = vm(pages, span(1 << 27, 1));
        let at = TABLE - 3;
        (0..pages).for_each(|n| put(&mut vm, at + n, 1, Some((&bo, n))));
        let all = Some(span(at, pages));
        let places = [0, 1, 300 * TABLE, 511 * TABLE, 512 * TABLE + 5, 599 * TABLE, pages - 1];
        assert_eq!(around(&vm, at).0, all);
        for n in places {
            let (found, nodes) = around(&vm, at + n);
            assert!(found == all && nodes <= 40, "page {n}: {nodes} nodes");
        }
        // Right after a change the same, but for what is above the page that has changed.
        for n in places {
            put(&mut vm, at + n, 1, None);
            assert_eq!(around(&vm, at + n).0, None);
            put(&mut vm, at + n, 1, Some((&bo, n)));
            let (found, nodes) = around(&vm, at + pages / 2);
            assert!(found == all && nodes <= 80, "page {n} has changed: {nodes} nodes");
        }
    }

    /// Changes at random of pages, tables and more, each after most was looked up, against a walk over all bindings.
    #[test]
    fn the_binding_around_any_page_after_any_change() {
        let pages = 40 * TABLE;
        let base = 490 * TABLE; // the node above changes in the middle
        let mut state = 1u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        // The reserved part begins or ends with a table, or neither.
        for reserved in [span(base + 5 * TABLE, 6 * TABLE + 100), span(base + 30 * TABLE - 7, 4 * TABLE + 7)] {
            let (mut vm, bo) = vm(2 * pages, reserved);
            for round in 0..300 {
                let unit = [1, TABLE, TABLE, 8 * TABLE][below(4) as usize];
                let page = below(pages / unit) * unit + below(2) * below(unit);
                let len = (unit + below(2) * below(3 * unit)).min(pages - page);
                let at = base + page;
                // What is bound elsewhere heals when it is bound again.
                let from = page + below(4) / 3 * below(3);
                match below(8) {
                    0 | 1 => put(&mut vm, at, len, None),
                    2 | 3 => (0..len).for_each(|n| put(&mut vm, at + n, 1, Some((&bo, from + n)))),
                    4 => drop(vm.merge(vm.range(), |_| ()).unwrap()),
                    _ => put(&mut vm, at, len, Some((&bo, from))),
                }
                let spans: Vec<_> = vm.bindings().map(|b| b.span).collect();
                for _ in 0..20 {
                    let page = base + below(pages);
                    let expected = spans.iter().find(|span| span.contains(DeviceVa::new(page * PAGE))).copied();
                    assert_eq!(around(&vm, page).0, expected, "round {round}, page {page}");
                }
            }
        }
    }
}
