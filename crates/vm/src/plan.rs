//! A batch between its check and its commit.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use dmalane_addr::{Access, Address, DeviceVa, Span};
use dmalane_iopt::{Format, Tables};

use crate::record::Record;
use crate::records::{Gone, Join, Records};
use crate::segments::segments;
use crate::slots::NONE;
use crate::{Error, Vm};

/// A request that has been checked, in pages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Bind {
        first: u64,
        last: u64,
        record: Record,
    },
    /// Binds of single pages one after another in one chunk, all of one slot and with the same access: their records
    /// are in [`Scratch::records`] from `at` on. The step can go on until page `end`.
    BindEach {
        first: u64,
        last: u64,
        end: u64,
        at: usize,
    },
    /// The step can go on until page `end`: in the same chunk, and without all of it. Then no other nodes are needed,
    /// and no other tables detached.
    Unbind {
        first: u64,
        last: u64,
        end: u64,
    },
    /// By the first slot of the buffer; in the reserved part, or elsewhere.
    UnbindBo {
        slot: u32,
        reserved: bool,
    },
}

/// Scratch memory of a plan. The VM keeps it from plan to plan.
#[derive(Debug)]
pub(crate) struct Scratch<A> {
    pub(crate) steps: Vec<Step>,
    pub(crate) records: Vec<Record>,
    pub(crate) run: BindRun,
    /// Chunks whose nodes were touched.
    pub(crate) touched: Vec<u64>,
    pub(crate) lists: Lists<A>,
    /// Room for the lists of one commit.
    pub(crate) room_for_lists: Vec<Lists<A>>,
}

/// Conditions for a bind to continue the last step, one of a single page or of several such: then all that must be
/// checked or prepared for it was so for them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BindRun {
    /// Its page; [`NO_PAGE`] where none can continue.
    pub(crate) page: u64,
    /// The address of its buffer.
    pub(crate) bo: usize,
    /// That of the page before it.
    pub(crate) record: Record,
}

/// No page has this number.
pub(crate) const NO_PAGE: u64 = u64::MAX;

impl BindRun {
    pub(crate) const NONE: Self = Self { page: NO_PAGE, bo: 0, record: Record::new(0, 0, Access::empty(), false) };
}

/// Has a device forget its translations of a span, and returns when it has: see [`Vm::break_before_make`].
pub type Invalidate = Box<dyn FnMut(Span<DeviceVa>) + Send>;

/// That of a VM, if it goes by break-before-make.
pub(crate) struct Breaking(pub(crate) Option<Invalidate>);

impl Breaking {
    #[inline]
    pub(crate) fn hook(&mut self) -> Option<&mut dyn FnMut(Span<DeviceVa>)> {
        self.0.as_mut().map(|invalidate| &mut **invalidate as _)
    }

    /// Has the device forget a span that was unmapped, now or by the caller.
    #[inline]
    fn unmapped<A>(&mut self, span: Span<DeviceVa>, lists: &mut Lists<A>) {
        match self.hook() {
            Some(invalidate) => invalidate(span),
            None => lists.add_span(span),
        }
    }
}

impl fmt::Debug for Breaking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Breaking").field(&self.0.is_some()).finish()
    }
}

/// Lists that a commit gives to the caller.
#[derive(Debug)]
pub(crate) struct Lists<A> {
    pub(crate) spans: Vec<Span<DeviceVa>>,
    pub(crate) prefetches: Vec<Span<DeviceVa>>,
    /// Detached tables.
    pub(crate) tables: Vec<A>,
}

impl<A> Scratch<A> {
    pub(crate) const fn new() -> Self {
        Self {
            steps: Vec::new(),
            records: Vec::new(),
            run: BindRun::NONE,
            touched: Vec::new(),
            lists: Lists::new(),
            room_for_lists: Vec::new(),
        }
    }

    /// Forgets the steps of a plan, and keeps their memory.
    fn clear_steps(&mut self) {
        self.steps.clear();
        self.records.clear();
        self.touched.clear();
        self.run.page = NO_PAGE;
    }
}

/// Which request of a batch cannot be carried out, and why. The VM is as it was before the call.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("request {index} of the batch")]
pub struct PlanError {
    /// The request, from 0. When it is memory that is missing, the last one that was looked at.
    pub index: usize,
    /// The error.
    #[source]
    pub error: Error,
}

/// A checked batch with all that it needs reserved. It borrows the VM, so nothing can come between plan and commit;
/// dropping it leaves the VM as it is. (One that is leaked, as by `mem::forget`, is
/// taken back by the next call that changes something.)
#[must_use = "a plan does nothing until it is committed"]
#[derive(Debug)]
pub struct Plan<'a, F: Format, T: Tables> {
    pub(crate) vm: &'a mut Vm<F, T>,
    committed: bool,
}

/// The calls that could fail, did `Vm::plan` not rule it out: spans and segments are checked, what a bind replaces is
/// unmapped first, and the worst case of tables is reserved.
const RESERVED: &str = "a planned step has its tables: Tables::reserve said so";

impl<'a, F: Format, T: Tables> Plan<'a, F, T> {
    #[inline]
    pub(crate) fn new(vm: &'a mut Vm<F, T>) -> Self {
        Self { vm, committed: false }
    }

    /// Applies the whole batch.
    ///
    /// New bindings are visible to the device when this returns. Old ones are gone from the tables, but the device may
    /// remember them until it has invalidated [`Committed::spans`]; buffers that lost their last binding must not be
    /// reused before that either.
    ///
    /// # Panics
    /// Only when `T` breaks its word: an allocation fails that [`Tables::reserve`] has promised, or a table comes at an
    /// address that the format cannot hold.
    #[inline]
    pub fn commit(mut self) -> Committed<T::Addr> {
        self.committed = true;
        self.vm.commit()
    }
}

impl<F: Format, T: Tables> Drop for Plan<'_, F, T> {
    #[inline]
    fn drop(&mut self) {
        if !self.committed {
            self.vm.forget_plan();
        }
    }
}

impl<F: Format, T: Tables> Vm<F, T> {
    /// Carries out what was planned.
    #[inline]
    pub(crate) fn commit(&mut self) -> Committed<T::Addr> {
        let mut unmapped = 0;
        for i in 0..self.scratch.steps.len() {
            unmapped += match self.scratch.steps[i] {
                Step::Bind { first, last, record } => self.bind_pages(first, last, record),
                Step::BindEach { first, last, at, .. } => self.bind_each(first, last, at),
                Step::Unbind { first, last, .. } => self.unbind_pages(first, last),
                Step::UnbindBo { slot, reserved } => self.unbind_bo(slot, reserved),
            };
        }
        // A node that was kept for a later request may represent one leaf by now.
        let join = if self.records.unlinks() { Join::All } else { Join::No };
        for i in 0..self.scratch.touched.len() {
            let chunk = self.scratch.touched[i];
            if let Some(emptied) = self.records.settle(chunk, join) {
                self.detach(chunk, emptied);
            }
        }
        self.scratch.clear_steps();
        self.planning = false;
        let released = self.slots.end_plan();
        let lists = &mut self.scratch.lists;
        let mut room_for_lists = Vec::new();
        if !lists.is_empty() {
            room_for_lists = core::mem::take(&mut self.scratch.room_for_lists);
            room_for_lists.push(core::mem::replace(lists, Lists::new())); // there is room: `Vm::reserve`
        }
        Committed { first: None, lists: room_for_lists, unmapped: unmapped << F::GRANULE.log2(), released }
    }

    /// Undoes what planning did: nothing that can be seen.
    #[cold]
    pub(crate) fn forget_plan(&mut self) {
        for i in 0..self.scratch.touched.len() {
            self.records.settle(self.scratch.touched[i], Join::Split);
        }
        self.scratch.clear_steps();
        self.planning = false;
        let chain = self.slots.end_plan();
        self.slots.release(chain);
        self.scratch.lists.prefetches.clear();
    }

    /// Binds pages and gives the number of those that were unmapped for it.
    #[inline]
    fn bind_pages(&mut self, first: u64, last: u64, record: Record) -> u64 {
        if first == last
            && !record.is_fixed()
            && let Some(vacant) = self.records.vacant(first)
            && let Some(bo) = self.slots.count_page(record.slot(), first, |slot| vacant.has(slot))
        {
            // As of `Vm::bind`.
            let to = bo.sg().page_at(record.page() << F::GRANULE.log2(), F::GRANULE).expect("checked by plan");
            vacant.put(record.slot(), record);
            self.table.map(Self::va(first), to, F::GRANULE.bytes(), record.access()).expect(RESERVED);
            return 0;
        }
        let had = self.records.put(&mut self.slots, first, last, Some(record));
        if had > 0 || self.records.end_idle(first, last) {
            self.replace_pages(first, last, record, had);
        } else {
            self.map_pages(first, last, record);
        }
        had
    }

    /// Maps pages over what is mapped there: pages of a table that stays at once, whole tables after they were cleared.
    fn replace_pages(&mut self, first: u64, last: u64, record: Record, had: u64) {
        let (mut at, mut unmapped) = (first, 0);
        while at <= last {
            let (chunk_first, chunk_last) = Records::<F>::chunk_pages(Records::<F>::chunk(at));
            let mut end = chunk_last.min(last);
            let mut from = at;
            if at == chunk_first && end == chunk_last {
                end = Records::<F>::chunk_pages(Records::<F>::chunk(last + 1)).0 - 1;
            } else if self.breaking.0.is_none() {
                let (pages, record) = ((end - at + 1) as usize, record.advance(at - first));
                let segments = segments::<F>(self.null, self.slots.get(record.slot()), record, at, end);
                let (done, old) = self.table.replace_pages(Self::va(at), pages, segments, record.access());
                if done > 0 {
                    from += done as u64;
                    unmapped += old;
                    self.scratch.lists.add_span(Self::span(at, from - 1));
                }
            }
            if from <= end {
                unmapped += self.clear(from, end);
                self.map_pages(from, end, record.advance(from - first));
            }
            at = end + 1;
        }
        debug_assert_eq!(unmapped, had, "records and page table differ in {}", Self::span(first, last));
    }

    /// Binds single pages one after another, and gives the number of those that were unmapped for it.
    fn bind_each(&mut self, first: u64, last: u64, at: usize) -> u64 {
        let Self { records, slots, table, scratch, .. } = self;
        let new = &scratch.records[at..][..(last - first + 1) as usize];
        if !records.put_each(slots, first, new) {
            // Some are replaced.
            return (first..=last)
                .zip(at..)
                .map(|(page, at)| self.bind_pages(page, page, self.scratch.records[at]))
                .sum();
        }
        let Some(bo) = &slots.get(new[0].slot()).bo else { return 0 };
        let to = |i: usize| bo.sg().page_at(new[i].page() << F::GRANULE.log2(), F::GRANULE);
        let done = table.map_each(Self::va(first), new.len(), new[0].access(), to);
        for (i, record) in new.iter().enumerate().skip(done) {
            let to = to(i).expect("checked by plan");
            table.map(Self::va(first + i as u64), to, F::GRANULE.bytes(), record.access()).expect(RESERVED);
        }
        0
    }

    #[inline(never)]
    fn map_pages(&mut self, first: u64, last: u64, record: Record) {
        let segments = segments::<F>(self.null, self.slots.get(record.slot()), record, first, last);
        self.table.map_sg(Self::va(first), segments, record.access()).expect(RESERVED);
    }

    #[inline]
    fn unbind_pages(&mut self, first: u64, last: u64) -> u64 {
        let had = self.records.put(&mut self.slots, first, last, None);
        if had > 0 || self.records.end_idle(first, last) {
            let unmapped = self.clear(first, last);
            debug_assert_eq!(unmapped, had, "records and page table differ in {}", Self::span(first, last));
        }
        had
    }

    /// Unbinds a buffer, by its first slot, in the reserved part or elsewhere.
    fn unbind_bo(&mut self, mut slot: u32, reserved: bool) -> u64 {
        let mut unmapped = 0;
        while slot != NONE {
            let mut n = 0;
            while let Some(place) = self.slots.place(slot, n).filter(|_| self.slots.get(slot).pages() > 0) {
                for pages in self.parts((place.first, place.end - 1), reserved).into_iter().flatten() {
                    unmapped += self.unbind_slot(slot, pages);
                }
                n += 1;
            }
            slot = self.slots.next_of(slot);
        }
        unmapped
    }

    /// The pages of these that are in the reserved part, or elsewhere: at most two ranges.
    fn parts(&self, (first, last): (u64, u64), reserved: bool) -> [Option<(u64, u64)>; 2] {
        let some = |first: u64, last: u64| (first <= last).then_some((first, last));
        let (reserved_first, reserved_last) = self.reserved_pages;
        if reserved {
            return [some(first.max(reserved_first), last.min(reserved_last)), None];
        }
        if reserved_first > reserved_last {
            return [some(first, last), None];
        }
        let below = reserved_first.checked_sub(1).and_then(|end| some(first, last.min(end)));
        [below, some(first.max(reserved_last + 1), last)]
    }

    fn unbind_slot(&mut self, slot: u32, pages: (u64, u64)) -> u64 {
        let Self { table, records, slots, scratch, breaking, .. } = self;
        let lists = &mut scratch.lists;
        let mut unmapped = 0;
        records.take_slot(slots, slot, pages, &mut |gone| match gone {
            Gone::Pages(first, last) => {
                let cleared = table.clear_into(Self::span(first, last), &mut lists.tables, breaking.hook());
                breaking.unmapped(cleared.expect("nothing is cut: no table is needed").0, lists);
                unmapped += last - first + 1;
            }
            Gone::Node { first, last, level } => {
                if table.detach_empty(Self::va(first), level, &mut lists.tables) {
                    breaking.unmapped(Self::span(first, last), lists);
                }
            }
        });
        unmapped
    }

    /// Unmaps pages, and gives the number of those that were mapped.
    #[inline]
    fn clear(&mut self, first: u64, last: u64) -> u64 {
        let Self { table, scratch: Scratch { lists, .. }, breaking, .. } = self;
        let cleared = table.clear_into(Self::span(first, last), &mut lists.tables, breaking.hook());
        let (span, bytes) = cleared.expect(RESERVED);
        breaking.unmapped(span, lists);
        bytes >> F::GRANULE.log2()
    }

    /// Takes tables away that the nodes of a chunk at these levels had, which are empty.
    #[cold]
    fn detach(&mut self, chunk: u64, (top, bottom): (u32, u32)) {
        let (first, last) = Records::<F>::chunk_pages(chunk);
        let Self { table, scratch, breaking, .. } = self;
        let mut any = false;
        for level in (top..=bottom).rev() {
            any |= table.detach_empty(Self::va(first), level, &mut scratch.lists.tables);
        }
        if any {
            breaking.unmapped(Self::span(first, last), &mut scratch.lists); // the device may have cached the walk
        }
    }

    #[inline]
    pub(crate) fn va(page: u64) -> DeviceVa {
        DeviceVa::new(page << F::GRANULE.log2())
    }

    #[inline]
    pub(crate) fn span(first: u64, last: u64) -> Span<DeviceVa> {
        let end = last << F::GRANULE.log2() | (F::GRANULE.bytes() - 1);
        Span::inclusive(Self::va(first), DeviceVa::new(end)).expect("first <= last")
    }
}

/// Result of a commit. Invalidate its spans on the device, then hand it to [`Vm::invalidated`].
///
/// When dropped, the tables in it are leaked, and buffers that lost their last binding stay with the VM: both are safe.
#[must_use = "invalidate the spans on the device, then hand this to Vm::invalidated"]
#[derive(Debug)]
pub struct Committed<A> {
    /// In front of those of the lists.
    pub(crate) first: Option<Span<DeviceVa>>,
    /// One or none: most commits have nothing else to say, and are small to be fast.
    pub(crate) lists: Vec<Lists<A>>,
    pub(crate) unmapped: u64,
    /// Chain of slots.
    pub(crate) released: u32,
}

impl<A: Address> Committed<A> {
    /// That of a bind where nothing was.
    #[inline]
    pub(crate) const fn nothing() -> Self {
        Self { first: None, lists: Vec::new(), unmapped: 0, released: NONE }
    }

    /// That of an unmap that detached no table.
    #[inline]
    pub(crate) fn one(span: Span<DeviceVa>, bytes: u64) -> Self {
        Self { first: Some(span), lists: Vec::new(), unmapped: bytes, released: NONE }
    }

    /// Spans that the device must invalidate, in the order of the requests; neighbours are joined, others may repeat
    /// and overlap. Empty when the batch only bound where nothing was, and without what the device was made to forget
    /// already ([`Vm::break_before_make`]).
    pub fn spans(&self) -> impl Iterator<Item = Span<DeviceVa>> {
        self.first.into_iter().chain(self.lists.iter().flat_map(|lists| lists.spans.iter().copied()))
    }

    /// The spans of the batch's [`Prefetch`](crate::BindRequest::Prefetch) requests.
    pub fn prefetches(&self) -> impl Iterator<Item = Span<DeviceVa>> {
        self.lists.iter().flat_map(|lists| lists.prefetches.iter().copied())
    }

    /// The tables that are no longer part of the page table.
    pub fn tables(&self) -> &[A] {
        self.lists.first().map_or(&[], |lists| &lists.tables)
    }

    /// Bytes that were unmapped, including those that the same batch bound anew.
    pub fn unmapped_bytes(&self) -> u64 {
        self.unmapped
    }

    /// True when there is nothing to invalidate.
    pub fn is_empty(&self) -> bool {
        self.first.is_none() && self.lists.iter().all(|lists| lists.spans.is_empty())
    }
}

impl<A> Lists<A> {
    pub(crate) const fn new() -> Self {
        Self { spans: Vec::new(), prefetches: Vec::new(), tables: Vec::new() }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.tables.is_empty() && self.prefetches.is_empty()
    }

    /// Adds a span, joined to the last one where they touch, or where there is no room for another.
    #[inline]
    fn add_span(&mut self, span: Span<DeviceVa>) {
        let room = self.spans.len() < self.spans.capacity();
        match self.spans.last_mut() {
            Some(last) if !room || touch(last, &span) => {
                let (first, end) = (last.first().min(span.first()), last.last().max(span.last()));
                *last = Span::inclusive(first, end).unwrap_or(span);
            }
            _ => self.spans.push(span),
        }
    }
}

/// True for spans that overlap or follow each other.
fn touch(a: &Span<DeviceVa>, b: &Span<DeviceVa>) -> bool {
    a.first().bits() <= b.last().bits().saturating_add(1) && b.first().bits() <= a.last().bits().saturating_add(1)
}
