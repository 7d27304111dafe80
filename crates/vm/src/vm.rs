//! One device address space.

use dmalane_addr::{CardAddr, DeviceVa, Span};
use dmalane_iopt::{Format, Leaf, PageTable, Place, Run, TableEstimate, Tables};

use crate::bindings::Bindings;
use crate::plan::Step;
use crate::{Binding, Committed, Error, Plan, Request};

/// A device's virtual address space: its bindings, and the page table that the device's MMU walks.
///
/// Bindings and page table say the same at all times: every byte of a binding is mapped to the card memory of its
/// buffer object with the binding's access, and nothing else is mapped.
#[derive(Debug)]
pub struct Vm<F, T: Tables> {
    range: Span<DeviceVa>,
    pub(crate) bindings: Bindings,
    pub(crate) table: PageTable<F, DeviceVa, CardAddr, T>,
    failed: bool,
}

impl<F: Format, T: Tables> Vm<F, T> {
    /// An empty VM that accepts binds within `range`, its tables in `tables`.
    ///
    /// # Errors
    /// [`Error::Misaligned`] when the range is not made of whole pages, [`Error::New`] when it reaches beyond the input
    /// addresses of the format or there is no memory for the root table.
    pub fn new(range: Span<DeviceVa>, tables: T) -> Result<Self, Error> {
        if !range.is_aligned(F::GRANULE) {
            return Err(Error::Misaligned { span: range, granule: F::GRANULE });
        }
        let bits = F::INPUT_BITS;
        if range.last().bits() >> bits != 0 {
            let source = dmalane_iopt::Error::InputRange { at: Place::of(range.first()), len: range.len(), bits };
            return Err(Error::New { vm: range, source });
        }
        let table = PageTable::new(tables).map_err(|source| Error::New { vm: range, source })?;
        Ok(Self { range, bindings: Bindings::default(), table, failed: false })
    }

    /// Checks a batch of requests and reserves the tables it may need in the worst case. Later requests of the batch see
    /// what earlier ones did. An empty batch is fine.
    ///
    /// # Errors
    /// Anything of [`Error`] but [`Error::New`]. The VM is as it was, on failure and until the plan is committed; memory
    /// that was reserved stays with the [`Tables`] for later use.
    pub fn plan(&mut self, requests: impl IntoIterator<Item = Request>) -> Result<Plan<'_, F, T>, Error> {
        let mut steps = alloc::vec::Vec::new();
        let mut estimate = TableEstimate::<F>::new();
        // The highest address that the batch binds so far: a bind above it does not replace one of the same batch.
        let mut bound: Option<DeviceVa> = None;
        for request in requests {
            if self.failed && !matches!(request, Request::Unbind(_)) {
                return Err(Error::Failed);
            }
            let step = Step::check::<F>(request, self.range)?;
            let span = step.span();
            if bound >= Some(span.first()) || self.bindings.overlaps(span) {
                estimate.unmap(span);
            }
            if let Step::Bind(b) = &step {
                let segments = b.bo.sg().runs(b.offset..b.offset + span.len()).into_iter().flatten();
                let segment = |source| Error::Segment { va: span.first(), bo: b.bo.id(), source };
                estimate.map_sg(span.first(), segments).map_err(segment)?;
                bound = bound.max(Some(span.last()));
            }
            steps.push(step);
        }
        let tables = estimate.tables();
        if tables > 0 && !self.table.tables_mut().reserve(tables) {
            return Err(Error::NoTables { tables, vm: self.range });
        }
        Ok(Plan::new(self, steps))
    }

    /// Frees the tables that a commit has detached. Call it once the device has invalidated every span of
    /// [`Committed::spans`] and no longer walks through what it had cached.
    pub fn invalidated(&mut self, committed: Committed<T::Addr>) {
        for flush in committed.flushes {
            self.table.free_tables(flush);
        }
    }

    /// Marks the VM as failed, for good: a batch that others rely on was not applied. From now on only unbinds are planned.
    pub fn fail(&mut self) {
        self.failed = true;
    }

    /// True once the VM has failed: see [`BindQueue`](crate::BindQueue).
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// What the VM covers.
    pub fn range(&self) -> Span<DeviceVa> {
        self.range
    }

    /// All bindings by ascending address.
    pub fn bindings(&self) -> impl DoubleEndedIterator<Item = &Binding> + ExactSizeIterator {
        self.bindings.iter()
    }

    /// The leaf that translates `va`, or `None` where nothing is bound.
    pub fn lookup(&self, va: DeviceVa) -> Option<Leaf<DeviceVa, CardAddr>> {
        self.table.lookup(va)
    }

    /// What is mapped within the span, leaf by leaf.
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
