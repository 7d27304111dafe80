//! One device address space.

use alloc::sync::Arc;
use alloc::vec::Vec;

use dmalane_addr::{Access, CardAddr, DeviceVa, PageSize, Segment, Span};
use dmalane_iopt::{Error as TableError, Format, FormatFacts, FormatId, Leaf, NamedAddr, PageTable, Run, Tables};

use crate::plan::{BindRun, Breaking, Invalidate, Lists, NO_PAGE, Scratch, Step};
use crate::record::Record;
use crate::records::Records;
use crate::slots::{Full, NONE, NULL, Slots, key};
use crate::{BindRequest, Binding, BindingTarget, Bo, Committed, Error, Plan, PlanError};

/// A device's virtual address space: what is bound, and the page table that the device's MMU walks.
///
/// Bindings and page table say the same at all times: every byte of a binding is mapped to the card memory of its
/// buffer object with the binding's access, every null range to the null page for reading, and nothing else is mapped.
///
/// The cost of a bind does not depend on how much is bound. Bindings are recorded page by page (`records.rs` says how),
/// 8 bytes for each page of a chunk that is partly bound, and next to nothing for the middle of large ones.
#[derive(Debug)]
pub struct Vm<F, T: Tables> {
    range: Span<DeviceVa>,
    reserved: Option<Span<DeviceVa>>,
    /// First and last page of the range.
    pages: (u64, u64),
    /// First and last page of the reserved part; the first is above the last where there is none.
    pub(crate) reserved_pages: (u64, u64),
    pub(crate) null: Option<Segment<CardAddr>>,
    pub(crate) records: Records<F>,
    pub(crate) slots: Slots,
    pub(crate) table: PageTable<F, DeviceVa, CardAddr, T>,
    /// Those of the format that `F` stands for, if it does.
    facts: &'static FormatFacts,
    /// True from the begin of a plan to its commit, or until it is taken back.
    pub(crate) planning: bool,
    pub(crate) breaking: Breaking,
    pub(crate) scratch: Scratch<T::Addr>,
}

/// State of a batch while it is planned.
pub(crate) struct Batch {
    /// True for a batch of the driver itself.
    reserved: bool,
    /// True when it binds something.
    binds: bool,
    /// Tables for chunks that are bound as a whole, and for splitting them. It takes as many nodes to split their
    /// records.
    tables: usize,
    /// First and last page of all that the batch binds.
    bound: Option<(u64, u64)>,
}

impl Batch {
    const fn new(reserved: bool) -> Self {
        Self { reserved, binds: false, tables: 0, bound: None }
    }
}

impl<F: Format, T: Tables> Vm<F, T> {
    /// An empty VM that accepts binds within `range`, its tables in `tables`.
    ///
    /// # Errors
    /// [`Error::Misaligned`] when the range is not made of whole pages, [`Error::New`] when it reaches beyond the input
    /// addresses of the format or there is no memory for the root table, [`Error::NoMemory`].
    pub fn new(range: Span<DeviceVa>, tables: T) -> Result<Self, Error> {
        Self::build(range, None, FormatFacts::of::<F>(), || PageTable::new(tables))
    }

    /// The same, with a part of it reserved for the driver itself: requests of [`plan`](Self::plan) that reach into it
    /// are refused, those of [`plan_reserved`](Self::plan_reserved) must lie within.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::OutsideVm`] when the reserved part is not within the range.
    pub fn with_reserved(range: Span<DeviceVa>, reserved: Span<DeviceVa>, tables: T) -> Result<Self, Error> {
        Self::build(range, Some(reserved), FormatFacts::of::<F>(), || PageTable::new(tables))
    }

    /// A VM of `format`, for which `F` stands.
    pub(crate) fn standing_for(
        format: FormatId,
        range: Span<DeviceVa>,
        reserved: Option<Span<DeviceVa>>,
        tables: T,
    ) -> Result<Self, Error> {
        Self::build(range, reserved, format.facts(), || PageTable::standing_for(format, tables))
    }

    fn build(
        range: Span<DeviceVa>,
        reserved: Option<Span<DeviceVa>>,
        facts: &'static FormatFacts,
        table: impl FnOnce() -> Result<PageTable<F, DeviceVa, CardAddr, T>, TableError>,
    ) -> Result<Self, Error> {
        if let Some(reserved) = reserved {
            if !reserved.is_aligned(F::GRANULE) {
                return Err(Error::Misaligned { span: reserved, granule: F::GRANULE });
            }
            if !range.covers(&reserved) {
                return Err(Error::OutsideVm { span: reserved, vm: range });
            }
        }
        if !range.is_aligned(F::GRANULE) {
            return Err(Error::Misaligned { span: range, granule: F::GRANULE });
        }
        let bits = facts.input_bits;
        if range.last().bits() >> bits != 0 {
            let source = TableError::InputRange { at: NamedAddr::of(range.first()), len: range.len(), bits };
            return Err(Error::New { vm: range, source });
        }
        let reserved_pages = reserved.map_or((u64::MAX, 0), pages_of::<F>);
        // The driver's bindings and those of others are never one, so that each can be taken away without the other.
        let fences = reserved.map_or([0; 2], |_| [reserved_pages.0, reserved_pages.1 + 1]);
        let table = table().map_err(|source| Error::New { vm: range, source })?;
        Ok(Self {
            range,
            reserved,
            pages: pages_of::<F>(range),
            reserved_pages,
            null: None,
            records: Records::new(fences, table.root_level()).map_err(|Full| Error::NoMemory { vm: range })?,
            slots: Slots::new(F::INDEX_BITS),
            table,
            facts,
            scratch: Scratch::new(),
            breaking: Breaking(None),
            planning: false,
        })
    }

    /// Sets the card memory that null ranges show from now on, `len` bytes at `addr`: zeroes that nobody writes to. The
    /// longer it is, the larger the leaves of null ranges can be: a length that is a page size of the format is best.
    /// Null ranges that are bound already stay as they are.
    ///
    /// # Errors
    /// [`Error::NullPage`] unless the length is a power of two of whole pages, the address a multiple of it, and all of
    /// it below the format's limit for output addresses.
    pub fn set_null_page(&mut self, addr: CardAddr, len: u64) -> Result<(), Error> {
        let whole = len.is_power_of_two() && len >= F::GRANULE.bytes() && addr.bits() & (len - 1) == 0;
        if !whole || (addr.bits() | (len - 1)) >> self.facts().output_bits != 0 {
            return Err(Error::NullPage { addr, len, granule: F::GRANULE });
        }
        self.null = Some(Segment { addr, len });
        Ok(())
    }

    /// From now on changes by break-before-make, as Arm's architecture asks for where a device uses what is next to a
    /// change, or what is replaced; with `None`, no more. Without it a bind over bindings writes valid entries over
    /// valid ones, and an unbind of a part of a large leaf or of a group replaces it by its parts with single stores:
    /// right for x86-64, RISC-V, VT-d, AMD and Arm's `BBML` 2, or while the device is quiet.
    ///
    /// `invalidate` is called by each commit, bind and unbind, while entries are clear: for each leaf that is split,
    /// and for what a step of a batch unmaps or replaces before anything is mapped in its place. Those spans are not
    /// among [`Committed::spans`]. A single page that is unbound is there as ever: invalidate it before the next bind.
    pub fn break_before_make(&mut self, invalidate: Option<Invalidate>) {
        self.breaking = Breaking(invalidate);
    }

    /// Checks a batch of requests and reserves whatever its commit may need in the worst case, so that it cannot fail.
    /// Later requests of the batch see what earlier ones did. An empty batch is fine.
    ///
    /// # Errors
    /// The first request that cannot be carried out, and why; [`Error::NoTables`] or [`Error::NoMemory`]. The VM is as
    /// it was, on failure and until the plan is committed; memory that was reserved stays with the VM and its
    /// [`Tables`] for later use.
    #[inline]
    pub fn plan(&mut self, requests: impl IntoIterator<Item = BindRequest>) -> Result<Plan<'_, F, T>, PlanError> {
        self.plan_batch(requests, false)
    }

    /// Binds `len` bytes from `offset` of a buffer object at `va`, now: a batch of one [`BindRequest::Bind`].
    ///
    /// # Errors
    /// As of [`plan`](Self::plan). The VM is then as it was.
    #[inline(always)] // the short way: its caller keeps in registers what it gives
    pub fn bind(
        &mut self,
        va: DeviceVa,
        bo: &Arc<Bo>,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<Committed<T::Addr>, Error> {
        self.forget_leaked();
        if len == F::GRANULE.bytes() && self.bind_page(va, bo, offset, access) {
            return Ok(Committed::nothing());
        }
        // Field by field, so that the compiler keeps what the short way gives in registers.
        let Committed { first, lists, unmapped, released } = self.bind_planned(va, bo, offset, len, access)?;
        Ok(Committed { first, lists, unmapped, released })
    }

    #[inline(never)]
    fn bind_planned(
        &mut self,
        va: DeviceVa,
        bo: &Arc<Bo>,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<Committed<T::Addr>, Error> {
        self.begin();
        let mut batch = Batch::new(false);
        let planned = self.plan_bind(va, bo, offset, len, 0, access, &mut batch);
        self.finish(planned, &batch)
    }

    /// Unbinds a span, now: a batch of one [`BindRequest::Unbind`].
    ///
    /// This and a plan of one [`BindRequest::UnbindBo`] ask for no memory and no table: binds have reserved what they
    /// may need. That holds while every [`Committed`] comes back before the next call
    /// ([`invalidated`](Self::invalidated)), and no other handle takes tables from the same memory.
    ///
    /// # Errors
    /// As of [`plan`](Self::plan). The VM is then as it was.
    #[inline(always)] // small: what is large is behind a call
    pub fn unbind(&mut self, span: Span<DeviceVa>) -> Result<Committed<T::Addr>, Error> {
        self.forget_leaked();
        if span.len() == F::GRANULE.bytes() {
            if let Some(committed) = self.unbind_page(span) {
                return Ok(committed);
            }
            if let Some(committed) = self.unbind_alone(span) {
                return Ok(committed);
            }
        }
        // Field by field, as above.
        let Committed { first, lists, unmapped, released } = self.unbind_planned(span)?;
        Ok(Committed { first, lists, unmapped, released })
    }

    #[inline(never)]
    fn unbind_planned(&mut self, span: Span<DeviceVa>) -> Result<Committed<T::Addr>, Error> {
        self.begin();
        let mut batch = Batch::new(false);
        let planned = self.plan_unbind(span, &mut batch);
        self.finish(planned, &batch)
    }

    /// Binds one page, if all is well and nothing is bound there, in a chunk that has its table, to a buffer that is
    /// bound already: then nothing has to be planned. False when that is not so; nothing has changed then.
    #[inline(always)]
    fn bind_page(&mut self, va: DeviceVa, bo: &Arc<Bo>, offset: u64, access: Access) -> bool {
        let granule = F::GRANULE;
        let page = va.bits() >> granule.log2();
        // Each by itself: the look-up of the page need not ask again then.
        if va.bits() & (granule.bytes() - 1) != 0 || offset & (granule.bytes() - 1) != 0 {
            return false;
        }
        let Some(at) = self.records.near(page).or_else(|| self.look_at(page)) else { return false };
        let Some(to) = bo.sg().page_at(offset, granule) else { return false };
        let Some(vacant) = self.records.vacant_at(at) else { return false };
        let noted = |slot| vacant.has(slot);
        let Some((number, slot)) = self.slots.for_page(bo, page, noted) else { return false };
        // Where there is a node, there is a table.
        if !self.table.map_free(va, to, access) {
            return false;
        }
        slot.count_one();
        vacant.put(number, Record::new(number, offset >> granule.log2(), access, false));
        true
    }

    /// Where the record of a page is that anybody may bind. `None` where there is none.
    #[inline(never)]
    fn look_at(&mut self, page: u64) -> Option<usize> {
        if !self.is_open(page, page) {
            return None;
        }
        let (reserved_first, reserved_last) = self.reserved_pages;
        let low = if page < reserved_first { self.pages.0 } else { self.pages.0.max(reserved_last + 1) };
        self.records.position(page, (low, open_to(page, self.pages, self.reserved_pages)))
    }

    /// True for pages within the VM, none of which is reserved.
    #[inline(always)]
    fn is_open(&self, first: u64, last: u64) -> bool {
        let (reserved_first, reserved_last) = self.reserved_pages;
        first >= self.pages.0 && last <= self.pages.1 && (first > reserved_last || last < reserved_first)
    }

    /// Unbinds one page, if it is bound, and neither the last one of its chunk nor of its buffer.
    #[inline(always)]
    fn unbind_page(&mut self, span: Span<DeviceVa>) -> Option<Committed<T::Addr>> {
        let page = span.first().bits() >> F::GRANULE.log2();
        if !span.is_aligned(F::GRANULE) || !self.is_open(page, page) {
            return None;
        }
        self.records.take_one_of_many(page, |record| self.slots.unbound_page(record.slot()))?;
        if self.table.clear_leaf(span.first()) {
            return Some(Committed::one(span, F::GRANULE.bytes()));
        }
        // A page of a group, in a chunk that stays in use: no table is needed or detached.
        let cleared = self.table.clear_into(span, &mut Vec::new(), self.breaking.hook());
        let (span, bytes) = cleared.expect("what is bound is mapped");
        Some(Committed::one(span, bytes))
    }

    /// Unbinds one page that may be the last one of its chunk or of its buffer, if its table may stay.
    #[inline(never)]
    fn unbind_alone(&mut self, span: Span<DeviceVa>) -> Option<Committed<T::Addr>> {
        let page = span.first().bits() >> F::GRANULE.log2();
        if !span.is_aligned(F::GRANULE) || !self.is_open(page, page) {
            return None;
        }
        let record = self.records.take_alone(page)?;
        self.slots.unbound(record.slot(), 1);
        let released = self.slots.end_plan();
        // A leaf of its own, or one of a group, which is then split within its table.
        let cleared = self.table.clear_into(span, &mut Vec::new(), self.breaking.hook());
        let (span, bytes) = cleared.expect("what is bound is mapped");
        Some(Committed { released, ..Committed::one(span, bytes) })
    }

    /// Commits a batch of one, or takes back what was planned.
    #[inline]
    fn finish(&mut self, planned: Result<(), Error>, batch: &Batch) -> Result<Committed<T::Addr>, Error> {
        match planned.and_then(|()| self.reserve(batch)) {
            Ok(()) => Ok(self.commit()),
            Err(e) => {
                self.forget_plan();
                Err(e)
            }
        }
    }

    #[inline]
    fn begin(&mut self) {
        self.forget_leaked();
        self.planning = true;
        self.records.begin();
    }

    /// Takes back what a plan left that was never dropped.
    #[inline(always)]
    fn forget_leaked(&mut self) {
        if self.planning {
            self.forget_plan();
        }
    }

    /// The same for the driver itself: all requests must lie within the reserved part
    /// ([`with_reserved`](Self::with_reserved)), and [`BindRequest::UnbindBo`] removes the bindings there and no
    /// others.
    ///
    /// # Errors
    /// As [`plan`](Self::plan); [`Error::Reserved`] for a span that is not within the reserved part,
    /// [`Error::NoReserved`] when there is none.
    pub fn plan_reserved(
        &mut self,
        requests: impl IntoIterator<Item = BindRequest>,
    ) -> Result<Plan<'_, F, T>, PlanError> {
        self.plan_batch(requests, true)
    }

    #[inline]
    pub(crate) fn plan_batch(
        &mut self,
        requests: impl IntoIterator<Item = BindRequest>,
        reserved: bool,
    ) -> Result<Plan<'_, F, T>, PlanError> {
        self.begin();
        let plan = Plan::new(self); // takes back what follows, should it fail
        let mut batch = Batch::new(reserved);
        let mut index = 0;
        for (i, request) in requests.into_iter().enumerate() {
            index = i;
            if let Err(error) = plan.vm.plan_request(&request, &mut batch) {
                return Err(PlanError { index, error });
            }
        }
        if let Err(error) = plan.vm.reserve(&batch) {
            return Err(PlanError { index, error });
        }
        Ok(plan)
    }

    /// Begins a plan of requests that come one by one.
    #[inline]
    pub(crate) fn begin_plan(&mut self, reserved: bool) -> (Plan<'_, F, T>, Batch) {
        self.begin();
        (Plan::new(self), Batch::new(reserved))
    }

    /// Checks one request and makes the nodes of the tree for it.
    #[inline]
    pub(crate) fn plan_request(&mut self, request: &BindRequest, batch: &mut Batch) -> Result<(), Error> {
        match *request {
            BindRequest::Bind { va, ref bo, offset, len, access } => {
                self.plan_bind(va, bo, offset, len, 0, access, batch)
            }
            BindRequest::Repeat { va, ref bo, offset, page, len, access } => {
                let pages = page >> F::GRANULE.log2();
                let span = self.check_bind(va, len, access, batch)?;
                if !page.is_power_of_two() || pages == 0 || (va.bits() | len) & (page - 1) != 0 {
                    return Err(Error::RepeatPage { page, span, granule: F::GRANULE });
                }
                self.plan_bind(va, bo, offset, len, pages, access, batch)
            }
            BindRequest::Null { va, len } => {
                let span = self.check_bind(va, len, Access::READ, batch)?;
                if self.null.is_none() {
                    return Err(Error::NoNullPage { va });
                }
                let (first, last) = pages_of::<F>(span);
                self.slots.hold(NULL, Self::chunks(first, last)).map_err(|_| self.no_memory())?;
                self.add_bind(first, last, Record::new(NULL, 0, Access::READ, true), batch)
            }
            BindRequest::Unbind(span) => self.plan_unbind(span, batch),
            BindRequest::UnbindBo(ref bo) => self.plan_unbind_bo(bo, batch),
            BindRequest::Prefetch(span) => {
                self.check_span(span, batch)?;
                self.scratch.lists.prefetches.try_reserve(1).map_err(|_| self.no_memory())?;
                self.scratch.lists.prefetches.push(span);
                Ok(())
            }
        }
    }

    /// Plans a bind, of which `repeat` pages repeat if that is not 0.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // the fields of two requests
    pub(crate) fn plan_bind(
        &mut self,
        va: DeviceVa,
        bo: &Arc<Bo>,
        offset: u64,
        len: u64,
        repeat: u64,
        access: Access,
        batch: &mut Batch,
    ) -> Result<(), Error> {
        let granule = F::GRANULE;
        if repeat == 0 && self.continues_bind(va, bo, offset, len, access, batch) {
            return Ok(());
        }
        let span = self.check_bind(va, len, access, batch)?;
        let (first, last) = pages_of::<F>(span);
        let used = if repeat == 0 { len } else { repeat << granule.log2() };
        let within = offset.checked_add(used).is_some_and(|end| end <= bo.len());
        let aligned = offset & (granule.bytes() - 1) == 0;
        let mut slot = self.slots.of(bo, repeat.saturating_sub(1));
        let known = slot != NONE && self.slots.get(slot).is_mappable();
        if !(within && aligned && known) {
            self.check_bo(va, bo, offset, used)?;
        }
        if slot == NONE {
            let mappable = bo.is_mappable(granule, self.facts().output_bits, Record::MAX_PAGES);
            let added = self.slots.add(bo, repeat.saturating_sub(1), mappable);
            slot = added.map_err(|Full| self.no_memory())?;
        }
        self.slots.hold(slot, Self::chunks(first, last)).map_err(|Full| self.no_memory())?;
        let record = Record::new(slot, offset >> granule.log2(), access, repeat > 0);
        self.add_bind(first, last, record, batch)?;
        if first == last && repeat == 0 && known {
            self.scratch.run = BindRun { page: first + 1, bo: key(bo), record };
        }
        Ok(())
    }

    /// Makes the last step longer by this bind, if it is of one page that continues those of the step in the VM: then
    /// nothing else has to be checked or prepared.
    #[inline(always)]
    fn continues_bind(
        &mut self,
        va: DeviceVa,
        bo: &Arc<Bo>,
        offset: u64,
        len: u64,
        access: Access,
        batch: &mut Batch,
    ) -> bool {
        let granule = F::GRANULE;
        let page = va.bits() >> granule.log2();
        if page != self.scratch.run.page {
            return false;
        }
        let (pages, reserved) = (self.pages, self.reserved_pages);
        let Scratch { run, steps, records, .. } = &mut self.scratch;
        let aligned = (va.bits() | offset) & (granule.bytes() - 1) == 0 && len == granule.bytes();
        let same = key(bo) == run.bo && access == run.record.access();
        if !(aligned && same && offset < bo.len()) || records.try_reserve(2).is_err() {
            return false;
        }
        match steps.last_mut() {
            Some(Step::BindEach { last, end, .. }) if page <= *end => *last = page,
            Some(step @ &mut Step::Bind { first, record, .. }) => {
                let end = self.records.prepared_to(first).min(open_to(first, pages, reserved));
                if page > end {
                    return false;
                }
                *step = Step::BindEach { first, last: page, end, at: records.len() };
                records.push(record);
            }
            _ => return false,
        }
        records.push(run.record.at(offset >> granule.log2()));
        run.page = page + 1;
        if let Some((_, high)) = &mut batch.bound {
            *high = page.max(*high);
        }
        true
    }

    /// The first and the last chunk of these pages.
    #[inline(always)]
    fn chunks(first: u64, last: u64) -> (u64, u64) {
        (Records::<F>::chunk(first), Records::<F>::chunk(last))
    }

    fn plan_unbind_bo(&mut self, bo: &Arc<Bo>, batch: &mut Batch) -> Result<(), Error> {
        if batch.reserved && self.reserved.is_none() {
            return Err(Error::NoReserved { vm: self.range });
        }
        let slot = self.slots.first_of(bo);
        if slot == NONE {
            return Ok(());
        }
        self.records.will_unlink();
        self.add_step(Step::UnbindBo { slot, reserved: batch.reserved })
    }

    #[inline(always)]
    pub(crate) fn plan_unbind(&mut self, span: Span<DeviceVa>, batch: &mut Batch) -> Result<(), Error> {
        let (first, last) = pages_of::<F>(span);
        // This request must cut what an earlier one binds as a whole.
        let cuts = batch.bound.is_some_and(|(low, high)| first <= high && low <= last);
        if let Some(Step::Unbind { last: to, end, .. }) = self.scratch.steps.last_mut()
            && *to + 1 == first
            && last <= *end
            && !cuts
            && span.is_aligned(F::GRANULE)
        {
            *to = last;
            return Ok(());
        }
        self.check_span(span, batch)?;
        self.touch(first, last, cuts)?;
        let (chunk_first, chunk_last) = Records::<F>::chunk_pages(Records::<F>::chunk(last));
        let end = open_to(last, self.pages, self.reserved_pages).min(if first <= chunk_first {
            chunk_last - 1
        } else {
            chunk_last
        });
        self.add_step(Step::Unbind { first, last, end })
    }

    /// The last page of the last step, and the page that it can grow to, if it unbinds and whatever it does then is
    /// planned already.
    #[inline]
    pub(crate) fn growing_unbind(&self, batch: &Batch) -> Option<(u64, u64)> {
        match self.scratch.steps.last() {
            Some(&Step::Unbind { last, end, .. }) if batch.bound.is_none() && last < end => Some((last, end)),
            _ => None,
        }
    }

    /// Lets the last step go on to a page that [`growing_unbind`](Self::growing_unbind) permits.
    #[inline]
    pub(crate) fn grow_unbind(&mut self, to: u64) {
        if let Some(Step::Unbind { last, .. }) = self.scratch.steps.last_mut() {
            *last = to;
        }
    }

    /// Whether the `used` bytes at `offset` of a buffer can be bound, and why not.
    #[cold]
    fn check_bo(&self, va: DeviceVa, bo: &Bo, offset: u64, used: u64) -> Result<(), Error> {
        let granule = F::GRANULE;
        if offset & (granule.bytes() - 1) != 0 {
            return Err(Error::MisalignedOffset { va, bo: bo.id(), offset, granule });
        }
        if offset.checked_add(used).is_none_or(|end| end > bo.len()) {
            return Err(Error::BeyondBo { va, bo: bo.id(), offset, len: used, bo_len: bo.len() });
        }
        if bo.len() >> granule.log2() >= Record::MAX_PAGES {
            return Err(Error::BoTooLarge { bo: bo.id(), len: bo.len(), granule });
        }
        let bits = self.facts().output_bits;
        if bo.is_mappable(granule, bits, Record::MAX_PAGES) {
            return Ok(());
        }
        // Not all of the buffer can be mapped. Perhaps this part of it can.
        for Segment { addr, len } in bo.sg().runs(offset..offset + used).into_iter().flatten() {
            let at = NamedAddr::of(addr);
            let source = match addr.bits() + (len - 1) {
                _ if (addr.bits() | len) & (granule.bytes() - 1) != 0 => TableError::Misaligned { at, len, granule },
                last if last >> bits != 0 => TableError::OutputRange { at, len, bits },
                _ => continue,
            };
            return Err(Error::Segment { va, bo: bo.id(), source });
        }
        Ok(())
    }

    #[inline(always)]
    fn add_bind(&mut self, first: u64, last: u64, record: Record, batch: &mut Batch) -> Result<(), Error> {
        if Records::<F>::covers_a_chunk(first, last) {
            self.add_chunks(first, last, batch)?;
        }
        self.touch(first, last, true)?;
        batch.binds = true;
        let (low, high) = batch.bound.unwrap_or((first, last));
        batch.bound = Some((low.min(first), high.max(last)));
        self.add_step(Step::Bind { first, last, record })
    }

    /// Prepares for binding whole chunks, for which there may be large leaves. Their tables are reserved all the same:
    /// an unbind that splits them must not ask for any.
    #[cold]
    fn add_chunks(&mut self, first: u64, last: u64, batch: &mut Batch) -> Result<(), Error> {
        let tables = PageTable::<F, DeviceVa, CardAddr, T>::max_tables_for(Self::span(first, last));
        let tables = tables - self.table.root_level() as usize; // each level above the root counts as one
        batch.tables = batch.tables.saturating_add(tables);
        if self.records.will_bind_chunks() {
            for i in 0..self.scratch.touched.len() {
                self.records.widen(self.scratch.touched[i]).map_err(|Full| self.no_memory())?;
            }
        }
        Ok(())
    }

    /// What the format says, or that which it stands for.
    #[inline(always)]
    pub(crate) fn facts(&self) -> &'static FormatFacts {
        if F::STANDS_IN { self.facts } else { FormatFacts::of::<F>() }
    }

    #[inline(always)]
    fn supports(&self, access: Access) -> bool {
        if F::STANDS_IN { (self.facts.supports)(access) } else { F::supports(access) }
    }

    /// Checks of a bind that do not need its buffer.
    #[inline(always)]
    fn check_bind(&self, va: DeviceVa, len: u64, access: Access, batch: &Batch) -> Result<Span<DeviceVa>, Error> {
        let Some(span) = Span::new(va, len) else {
            return Err(if len == 0 { Error::Empty { va } } else { Error::Wraps { va, len } });
        };
        self.check_span(span, batch)?;
        if !self.supports(access) {
            return Err(Error::Unsupported { va, access, format: self.facts().name });
        }
        Ok(span)
    }

    #[inline(always)]
    fn check_span(&self, span: Span<DeviceVa>, batch: &Batch) -> Result<(), Error> {
        let (first, last) = pages_of::<F>(span);
        if span.is_aligned(F::GRANULE) && self.is_open(first, last) && !batch.reserved {
            return Ok(());
        }
        self.check_place(span, batch)
    }

    #[cold]
    fn check_place(&self, span: Span<DeviceVa>, batch: &Batch) -> Result<(), Error> {
        if !span.is_aligned(F::GRANULE) {
            return Err(Error::Misaligned { span, granule: F::GRANULE });
        }
        if !self.range.covers(&span) {
            return Err(Error::OutsideVm { span, vm: self.range });
        }
        match self.reserved {
            Some(reserved) if batch.reserved && !reserved.covers(&span) => Err(Error::Reserved { span, reserved }),
            Some(reserved) if !batch.reserved && reserved.intersect(&span).is_some() => {
                Err(Error::Reserved { span, reserved })
            }
            None if batch.reserved => Err(Error::NoReserved { vm: self.range }),
            _ => Ok(()),
        }
    }

    /// Makes the nodes that changing these pages takes.
    #[inline(always)]
    fn touch(&mut self, first: u64, last: u64, make: bool) -> Result<(), Error> {
        self.touch_end(first, first, last, make).map_err(|Full| self.no_memory())?;
        if Records::<F>::chunk(first) != Records::<F>::chunk(last) {
            self.touch_end(last, first, last, make).map_err(|Full| self.no_memory())?;
        }
        if Records::<F>::covers_a_chunk(first, last) {
            self.records.will_unlink();
        }
        Ok(())
    }

    #[inline(always)]
    fn touch_end(&mut self, at: u64, first: u64, last: u64, make: bool) -> Result<(), Full> {
        if self.records.touch(at, first, last, make)? {
            self.note_touched(Records::<F>::chunk(at))?;
        }
        Ok(())
    }

    #[inline(never)]
    fn note_touched(&mut self, chunk: u64) -> Result<(), Full> {
        self.scratch.touched.try_reserve(1)?;
        self.scratch.touched.push(chunk);
        Ok(())
    }

    #[inline(always)]
    fn add_step(&mut self, step: Step) -> Result<(), Error> {
        self.scratch.run.page = NO_PAGE;
        self.scratch.steps.try_reserve(1).map_err(|_| self.no_memory())?;
        self.scratch.steps.push(step);
        Ok(())
    }

    /// Reserves what the planned steps need.
    #[inline(always)]
    pub(crate) fn reserve(&mut self, batch: &Batch) -> Result<(), Error> {
        let tables = batch.tables.saturating_add(self.records.missing_tables());
        // Unbinds take what was reserved when the leaves that they split were bound.
        if batch.binds && tables > 0 {
            let tables = tables.saturating_add(self.table.split_tables());
            if !self.table.reserve(tables) {
                return Err(Error::NoTables { tables, vm: self.range });
            }
        }
        if batch.binds {
            self.records.keep_nodes(batch.tables as u64).map_err(|Full| self.no_memory())?;
        }
        self.reserve_lists(if batch.binds { tables } else { 0 }).map_err(|Full| self.no_memory())
    }

    /// Reserves room for what a commit of a bind that makes at most `tables` tables may have to say, and an unbind of
    /// one span after it.
    #[inline]
    fn reserve_lists(&mut self, tables: usize) -> Result<(), Full> {
        let detached = self.table.linked_tables().saturating_add(self.table.split_tables());
        let Scratch { steps, touched, lists, room_for_lists, .. } = &mut self.scratch;
        lists.spans.try_reserve((steps.len() + touched.len()).max(3))?;
        lists.tables.try_reserve(detached.saturating_add(tables))?;
        // A span has two ends.
        touched.try_reserve(2usize.saturating_sub(touched.len()))?;
        steps.try_reserve(1usize.saturating_sub(steps.len()))?;
        Ok(room_for_lists.try_reserve(1)?)
    }

    #[cold]
    fn no_memory(&self) -> Error {
        Error::NoMemory { vm: self.range }
    }

    /// Frees the tables that a commit has detached, and lets go of the buffers that lost their last binding. Call it
    /// once the device has invalidated every span of [`Committed::spans`] and no longer walks through what it had
    /// cached.
    #[inline(always)] // small: what is large is behind a call
    pub fn invalidated(&mut self, committed: Committed<T::Addr>) {
        let Committed { lists, released, .. } = committed;
        // Most have nothing to give back.
        if released != NONE || !lists.is_empty() {
            self.take_back(lists, released);
        }
    }

    #[inline(never)]
    fn take_back(&mut self, mut room_for_lists: Vec<Lists<T::Addr>>, released: u32) {
        if released != NONE {
            self.slots.release(released);
        }
        let Some(mut lists) = room_for_lists.pop() else { return };
        if !lists.tables.is_empty() {
            self.table.free_detached(lists.tables.drain(..));
        }
        // The room is for the next plan.
        lists.spans.clear();
        lists.prefetches.clear();
        (self.scratch.lists, self.scratch.room_for_lists) = (lists, room_for_lists);
    }

    /// Makes larger leaves within the span where bindings, by many requests perhaps, continue in the buffer object and
    /// on the card: of whole tables, and of whole groups of entries in formats that have them. Returns the number of
    /// tables that this freed. Bindings stay the same.
    ///
    /// `invalidate` is called once for each table that goes and each group of leaves that forms, while its addresses
    /// are not mapped, and returns when the device has forgotten them: the break-before-make order of the Arm
    /// architecture, in which a device that uses them meanwhile sees a fault.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::OutsideVm`]; [`Error::NoTables`] when somebody else took the tables that were
    /// freed, so that unbinding a part of a leaf may fail now.
    pub fn merge(&mut self, span: Span<DeviceVa>, mut invalidate: impl FnMut(Span<DeviceVa>)) -> Result<usize, Error> {
        self.forget_leaked();
        if !span.is_aligned(F::GRANULE) {
            return Err(Error::Misaligned { span, granule: F::GRANULE });
        }
        if !self.range.covers(&span) {
            return Err(Error::OutsideVm { span, vm: self.range });
        }
        let (first, last) = pages_of::<F>(span);
        let Self { records, table, .. } = self;
        records.join(first, last);
        let larger = F::PAGE_SIZES.iter().nth(1).map_or(u64::MAX, PageSize::bytes);
        let (mut freed, mut page) = (0, first);
        while let Some((from, to, _)) = records.binding(page, last) {
            let pages = Self::span(from.max(first), to.min(last));
            if pages.len() >= larger {
                freed += table.merge(pages, &mut invalidate).expect("whole pages within the VM");
            }
            page = to + 1;
        }
        // Tables that were freed are there to be promised again, for splitting what they became.
        let tables = table.split_tables();
        if freed > 0 && !table.reserve(tables) {
            return Err(Error::NoTables { tables, vm: self.range });
        }
        Ok(freed)
    }

    /// Address range of the VM.
    pub fn range(&self) -> Span<DeviceVa> {
        self.range
    }

    /// The part that is reserved for the driver itself.
    pub fn reserved(&self) -> Option<Span<DeviceVa>> {
        self.reserved
    }

    /// All bindings by ascending address.
    pub fn bindings(&self) -> impl Iterator<Item = Binding> {
        self.bindings_within(0, u64::MAX)
    }

    /// Bindings of pages from `page` to `end`, as of [`Records::binding`].
    pub(crate) fn bindings_within(&self, mut page: u64, end: u64) -> impl Iterator<Item = Binding> {
        core::iter::from_fn(move || {
            let (first, last, record) = self.records.binding(page, end)?;
            page = last + 1;
            Some(self.binding(first, last, record))
        })
    }

    fn binding(&self, first: u64, last: u64, record: Record) -> Binding {
        let slot = self.slots.get(record.slot());
        let offset = record.page() << F::GRANULE.log2();
        let to = match &slot.bo {
            Some(bo) if record.is_fixed() => {
                BindingTarget::Repeat { bo: Arc::clone(bo), offset, page: (slot.repeat_mask + 1) << F::GRANULE.log2() }
            }
            Some(bo) => BindingTarget::Bo { bo: Arc::clone(bo), offset },
            None => BindingTarget::Null,
        };
        Binding { span: Self::span(first, last), to, access: record.access() }
    }

    /// Bytes of the buffer object that are bound, each counted as often as it is.
    pub fn bound_bytes(&mut self, bo: &Arc<Bo>) -> u64 {
        let slot = self.slots.first_of(bo);
        self.slots.all_pages(slot) << F::GRANULE.log2()
    }

    /// Bytes of memory that bookkeeping takes, tables apart; what is reserved for unbinds and was never written is not
    /// counted.
    pub fn bookkeeping_bytes(&self) -> usize {
        self.records.bytes() + self.slots.bytes()
    }

    /// The leaf that translates `va`, or `None` where nothing is bound.
    pub fn lookup(&self, va: DeviceVa) -> Option<Leaf<DeviceVa, CardAddr>> {
        self.table.lookup(va)
    }

    /// Mappings within the span, leaf by leaf.
    pub fn runs(&self, span: Span<DeviceVa>) -> impl Iterator<Item = Run<DeviceVa, CardAddr>> {
        self.table.runs(span)
    }

    /// The page table that the device walks.
    pub fn page_table(&self) -> &PageTable<F, DeviceVa, CardAddr, T> {
        &self.table
    }

    /// The memory of the tables, for example to give it more. Freeing or overwriting tables in use breaks the VM.
    pub fn tables_mut(&mut self) -> &mut T {
        self.table.tables_mut()
    }

    /// Ends the VM and gives back the memory of its tables, all of them freed. The device must not use it any more.
    pub fn into_tables(self) -> T {
        self.table.into_tables()
    }
}

/// First and last page of a span of whole pages.
#[inline]
fn pages_of<F: Format>(span: Span<DeviceVa>) -> (u64, u64) {
    (span.first().bits() >> F::GRANULE.log2(), span.last().bits() >> F::GRANULE.log2())
}

/// The last page up to which all are as a page is that a batch may change: one of the VM, and reserved or not.
#[inline]
fn open_to(page: u64, (_, last): (u64, u64), (reserved_first, reserved_last): (u64, u64)) -> u64 {
    match reserved_first <= reserved_last {
        true if page < reserved_first => last.min(reserved_first - 1),
        true if page <= reserved_last => reserved_last,
        _ => last,
    }
}
