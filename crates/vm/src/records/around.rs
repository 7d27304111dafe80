//! All pages around one that continue each other: the binding that it is in.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use dmalane_iopt::{Format, MAX_LEVELS};

use super::{ROOT, Records, counts_up};
use crate::record::Record;

impl<F: Format> Records<F> {
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
    pub(super) fn forget(&mut self, id: u32, level: u32, page: u64) {
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
    pub(super) fn forget_run(&mut self, page: u64, level: u32) {
        let mut id = ROOT;
        for above in self.top()..=level {
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
        let mut level = self.top();
        let mut word = self.nodes[ROOT as usize].get(&self.words, Self::index(page, level));
        while level < Self::LAST && word != 0 && Record::from_word(word).is_none() {
            level += 1;
            path[level as usize] = Self::child(word);
            word = self.nodes[path[level as usize] as usize].get(&self.words, Self::index(page, level));
        }
        let mut record = Record::from_word(word)?;
        while level > self.top()
            && let Some(run) = self.run(path[level as usize], level, page)
        {
            record = run;
            level -= 1;
        }
        let mut run = Run::new(Self::entry(page, level).0, 1 << Self::shift(level), record);
        for up in [false, true] {
            for above in (self.top()..=level).rev() {
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
                // Displaced ranges merge again once they are bound in place.
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
