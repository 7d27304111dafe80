//! A batch between its check and its commit.

use alloc::vec::Vec;

use dmalane_addr::{Address, DeviceVa, Span};
use dmalane_iopt::{FlushList, Format, Tables};

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
    Unbind {
        first: u64,
        last: u64,
    },
    /// By the first slot of the buffer.
    UnbindBo {
        slot: u32,
    },
}

/// What a plan needs room for. The VM keeps it from plan to plan.
#[derive(Debug)]
pub(crate) struct Scratch<A> {
    pub(crate) steps: Vec<Step>,
    /// Chunks whose nodes were touched.
    pub(crate) touched: Vec<u64>,
    pub(crate) spans: Vec<Span<DeviceVa>>,
    pub(crate) prefetches: Vec<Span<DeviceVa>>,
    pub(crate) flushes: Vec<FlushList<DeviceVa, A>>,
}

impl<A> Scratch<A> {
    pub(crate) const fn new() -> Self {
        Self { steps: Vec::new(), touched: Vec::new(), spans: Vec::new(), prefetches: Vec::new(), flushes: Vec::new() }
    }
}

/// Which request of a batch cannot be carried out, and why. The VM is as it was before the call.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("request {index} of the batch")]
pub struct PlanError {
    /// The request, from 0. When it is memory that is missing, the last one that was looked at.
    pub index: usize,
    /// What is wrong.
    #[source]
    pub error: Error,
}

/// A checked batch with all that it needs reserved. It borrows the VM, so nothing can come between plan and commit;
/// dropping it leaves the VM as it is.
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
        let vm = &mut *self.vm;
        let mut committed = Committed {
            spans: core::mem::take(&mut vm.scratch.spans),
            prefetches: core::mem::take(&mut vm.scratch.prefetches),
            flushes: core::mem::take(&mut vm.scratch.flushes),
            unmapped: 0,
            released: NONE,
        };
        for i in 0..vm.scratch.steps.len() {
            match vm.scratch.steps[i] {
                Step::Bind { first, last, record } => vm.bind(first, last, record, &mut committed),
                Step::Unbind { first, last } => vm.unbind(first, last, &mut committed),
                Step::UnbindBo { slot } => vm.unbind_bo(slot, &mut committed),
            }
        }
        // A node that was kept for a later request may stand for one leaf by now.
        let join = if vm.records.unlinks() { Join::All } else { Join::No };
        for i in 0..vm.scratch.touched.len() {
            let chunk = vm.scratch.touched[i];
            if vm.records.settle(chunk, join) {
                vm.prune(Records::<F>::chunk_pages(chunk), &mut committed);
            }
        }
        committed.released = vm.slots.end_plan();
        committed
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
    /// Undoes what planning did: nothing that can be seen.
    #[cold]
    pub(crate) fn forget_plan(&mut self) {
        for i in 0..self.scratch.touched.len() {
            self.records.settle(self.scratch.touched[i], Join::Split);
        }
        let chain = self.slots.end_plan();
        self.slots.release(chain);
        self.scratch.prefetches.clear();
    }

    #[inline]
    fn bind(&mut self, first: u64, last: u64, record: Record, committed: &mut Committed<T::Addr>) {
        let had = self.records.put(&mut self.slots, first, last, Some(record));
        if had > 0 {
            self.clear(first, last, had, committed);
        }
        let (va, access) = (Self::va(first), record.access());
        let slot = self.slots.get(record.slot());
        if first == last
            && !record.is_fixed()
            && let Some(bo) = &slot.bo
        {
            let to = bo.sg().page_at(record.page() << F::GRANULE.log2(), F::GRANULE).expect("checked by plan");
            self.table.map(va, to, F::GRANULE.bytes(), access).expect(RESERVED);
        } else {
            let segments = segments::<F>(self.null, slot, record, first, last);
            self.table.map_sg(va, segments, access).expect(RESERVED);
        }
    }

    #[inline]
    fn unbind(&mut self, first: u64, last: u64, committed: &mut Committed<T::Addr>) {
        let had = self.records.put(&mut self.slots, first, last, None);
        if had > 0 {
            self.clear(first, last, had, committed);
        }
    }

    fn unbind_bo(&mut self, mut slot: u32, committed: &mut Committed<T::Addr>) {
        while slot != NONE {
            let mut n = 0;
            while let Some((from, to)) = self.slots.place(slot, n).filter(|_| self.slots.get(slot).pages() > 0) {
                let pages = (Records::<F>::chunk_pages(from).0, Records::<F>::chunk_pages(to - 1).1);
                let (table, granule) = (&mut self.table, F::GRANULE.log2());
                self.records.take_slot(&mut self.slots, slot, pages, &mut |_, gone| match gone {
                    Gone::Pages(first, last) => {
                        let span = span_of(first, last, granule);
                        let flush = table.clear(span).expect("nothing is cut, so no table is needed");
                        committed.add(span, flush);
                    }
                    Gone::Node(first, last) => committed.keep(table.prune(span_of(first, last, granule))),
                });
                n += 1;
            }
            slot = self.slots.next_of(slot);
        }
    }

    #[inline]
    fn clear(&mut self, first: u64, last: u64, had: u64, committed: &mut Committed<T::Addr>) {
        let span = Self::span(first, last);
        let flush = self.table.clear(span).expect(RESERVED);
        debug_assert_eq!(flush.bytes(), had << F::GRANULE.log2(), "records and page table differ in {span}");
        committed.add(span, flush);
    }

    #[cold]
    fn prune(&mut self, (first, last): (u64, u64), committed: &mut Committed<T::Addr>) {
        committed.keep(self.table.prune(Self::span(first, last)));
    }

    #[inline]
    pub(crate) fn va(page: u64) -> DeviceVa {
        DeviceVa::new(page << F::GRANULE.log2())
    }

    #[inline]
    pub(crate) fn span(first: u64, last: u64) -> Span<DeviceVa> {
        span_of(first, last, F::GRANULE.log2())
    }
}

#[inline]
fn span_of(first: u64, last: u64, granule: u8) -> Span<DeviceVa> {
    let end = last << granule | ((1 << granule) - 1);
    Span::inclusive(DeviceVa::new(first << granule), DeviceVa::new(end)).expect("first <= last")
}

/// What a commit took away. Invalidate its spans on the device, then hand it to [`Vm::invalidated`].
///
/// When dropped, the tables in it are leaked, and buffers that lost their last binding stay with the VM: both are safe.
#[must_use = "invalidate the spans on the device, then hand this to Vm::invalidated"]
#[derive(Debug)]
pub struct Committed<A> {
    spans: Vec<Span<DeviceVa>>,
    prefetches: Vec<Span<DeviceVa>>,
    flushes: Vec<FlushList<DeviceVa, A>>,
    unmapped: u64,
    /// Chain of slots.
    released: u32,
}

impl<A: Address> Committed<A> {
    /// What the device must invalidate, in the order of the requests; neighbours are joined, others may repeat and
    /// overlap. Empty when the batch only bound where nothing was.
    pub fn spans(&self) -> impl ExactSizeIterator<Item = Span<DeviceVa>> {
        self.spans.iter().copied()
    }

    /// The spans of the batch's [`Prefetch`](crate::Request::Prefetch) requests.
    pub fn prefetches(&self) -> impl ExactSizeIterator<Item = Span<DeviceVa>> {
        self.prefetches.iter().copied()
    }

    /// The tables that are no longer part of the page table.
    pub fn tables(&self) -> impl Iterator<Item = A> {
        self.flushes.iter().flat_map(|flush| flush.tables().iter().copied())
    }

    /// Bytes that were unmapped, including those that the same batch bound anew.
    pub fn unmapped_bytes(&self) -> u64 {
        self.unmapped
    }

    /// True when there is nothing to invalidate.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    #[inline]
    fn add(&mut self, asked: Span<DeviceVa>, flush: FlushList<DeviceVa, A>) {
        self.unmapped += flush.bytes();
        let span = flush.span();
        debug_assert!(span.covers(&asked));
        self.add_span(span);
        self.keep(flush);
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

    /// Keeps the tables of a flush list.
    #[inline]
    fn keep(&mut self, flush: FlushList<DeviceVa, A>) {
        if !flush.tables().is_empty() {
            self.add_span(flush.span()); // the device may have cached the walk
            self.flushes.push(flush);
        }
    }

    /// The parts: buffers for the next plan, the lists of tables, the chain of slots.
    pub(crate) fn into_parts(self) -> (Scratch<A>, u32) {
        let Self { spans, prefetches, flushes, released, .. } = self;
        (Scratch { spans, prefetches, flushes, ..Scratch::new() }, released)
    }
}

/// True for spans that overlap or follow each other.
fn touch(a: &Span<DeviceVa>, b: &Span<DeviceVa>) -> bool {
    a.first().bits() <= b.last().bits().saturating_add(1) && b.first().bits() <= a.last().bits().saturating_add(1)
}
