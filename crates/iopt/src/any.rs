//! A page table whose format is known only at run time.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::ControlFlow;

use dmalane_addr::{Access, Address, PageSize, Segment, Span};

use crate::{Error, FlushList, Format, FormatId, Gather, Leaf, PageTable, Register, Run, Tables, with_format};

/// A [`PageTable`] of any format, for callers that choose the format at run time: made by [`FormatId::table`]. Each
/// function is that of the page table.
///
/// ```
/// use dmalane_addr::{Access, Iova, PhysAddr};
/// use dmalane_iopt::{FormatId, HeapTables};
///
/// let format: FormatId = "vtd-second-48".parse()?;
/// let mut table = format.table::<Iova, PhysAddr, _>(HeapTables::new(PhysAddr::new(0x8000_0000)))?;
/// table.map(Iova::new(0x20_0000), PhysAddr::new(0x4000_0000), 2 << 20, Access::RW)?;
/// assert_eq!(table.lookup(Iova::new(0x20_1000)).unwrap().size.bytes(), 2 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait AnyTable<I: Address, O: Address, T: Tables> {
    /// [`Format::NAME`].
    fn format(&self) -> &'static str;

    /// [`Format::GRANULE`].
    fn granule(&self) -> PageSize;

    /// [`PageTable::map`].
    ///
    /// # Errors
    /// As there.
    fn map(&mut self, at: I, to: O, len: u64, access: Access) -> Result<(), Error>;

    /// [`PageTable::map_sg`].
    ///
    /// # Errors
    /// As there.
    fn map_sg(&mut self, at: I, list: &mut dyn Iterator<Item = Segment<O>>, access: Access) -> Result<u64, Error>;

    /// [`PageTable::unmap`].
    ///
    /// # Errors
    /// As there.
    fn unmap(&mut self, span: Span<I>) -> Result<FlushList<I, T::Addr>, Error>;

    /// [`PageTable::free_tables`].
    fn free_tables(&mut self, list: FlushList<I, T::Addr>);

    /// [`PageTable::flush`].
    fn flush(&mut self, gather: &mut Gather<I, T::Addr>, invalidate: &mut dyn FnMut(&[Span<I>]));

    /// [`PageTable::cut`].
    ///
    /// # Errors
    /// As there.
    fn cut(&mut self, at: I, invalidate: &mut dyn FnMut(Span<I>)) -> Result<(), Error>;

    /// [`PageTable::merge`].
    ///
    /// # Errors
    /// As there.
    fn merge(&mut self, span: Span<I>, invalidate: &mut dyn FnMut(Span<I>)) -> Result<usize, Error>;

    /// [`PageTable::take_dirty`].
    ///
    /// # Errors
    /// As there.
    fn take_dirty(&mut self, span: Span<I>, each: &mut dyn FnMut(Leaf<I, O>)) -> Result<usize, Error>;

    /// [`PageTable::lookup`].
    fn lookup(&self, at: I) -> Option<Leaf<I, O>>;

    /// The leaves of [`PageTable::runs`], until `each` breaks off.
    fn runs(&self, span: Span<I>, each: &mut dyn FnMut(Run<I, O>) -> ControlFlow<()>);

    /// [`PageTable::leaf_counts`].
    fn leaf_counts(&self) -> Vec<(PageSize, u64)>;

    /// [`PageTable::root`].
    fn root(&self) -> T::Addr;

    /// [`PageTable::registers`].
    fn registers(&self) -> Vec<Register>;

    /// [`PageTable::tables`].
    fn tables(&self) -> &T;

    /// [`PageTable::tables_mut`].
    fn tables_mut(&mut self) -> &mut T;
}

impl<F: Format, I: Address, O: Address, T: Tables> AnyTable<I, O, T> for PageTable<F, I, O, T> {
    fn format(&self) -> &'static str {
        F::NAME
    }

    fn granule(&self) -> PageSize {
        F::GRANULE
    }

    fn map(&mut self, at: I, to: O, len: u64, access: Access) -> Result<(), Error> {
        self.map(at, to, len, access)
    }

    fn map_sg(&mut self, at: I, list: &mut dyn Iterator<Item = Segment<O>>, access: Access) -> Result<u64, Error> {
        self.map_sg(at, list, access)
    }

    fn unmap(&mut self, span: Span<I>) -> Result<FlushList<I, T::Addr>, Error> {
        self.unmap(span)
    }

    fn free_tables(&mut self, list: FlushList<I, T::Addr>) {
        self.free_tables(list);
    }

    fn flush(&mut self, gather: &mut Gather<I, T::Addr>, invalidate: &mut dyn FnMut(&[Span<I>])) {
        self.flush(gather, invalidate);
    }

    fn cut(&mut self, at: I, invalidate: &mut dyn FnMut(Span<I>)) -> Result<(), Error> {
        self.cut(at, invalidate)
    }

    fn merge(&mut self, span: Span<I>, invalidate: &mut dyn FnMut(Span<I>)) -> Result<usize, Error> {
        self.merge(span, invalidate)
    }

    fn take_dirty(&mut self, span: Span<I>, each: &mut dyn FnMut(Leaf<I, O>)) -> Result<usize, Error> {
        self.take_dirty(span, each)
    }

    fn lookup(&self, at: I) -> Option<Leaf<I, O>> {
        self.lookup(at)
    }

    fn runs(&self, span: Span<I>, each: &mut dyn FnMut(Run<I, O>) -> ControlFlow<()>) {
        let _ = self.runs(span).try_for_each(each);
    }

    fn leaf_counts(&self) -> Vec<(PageSize, u64)> {
        self.leaf_counts().collect()
    }

    fn root(&self) -> T::Addr {
        self.root()
    }

    fn registers(&self) -> Vec<Register> {
        self.registers()
    }

    fn tables(&self) -> &T {
        self.tables()
    }

    fn tables_mut(&mut self) -> &mut T {
        self.tables_mut()
    }
}

impl FormatId {
    /// An empty page table of this format.
    ///
    /// # Errors
    /// As of [`PageTable::new`].
    pub fn table<'t, I, O, T>(self, tables: T) -> Result<Box<dyn AnyTable<I, O, T> + 't>, Error>
    where
        I: Address + 't,
        O: Address + 't,
        T: Tables + 't,
    {
        with_format!(self, F => Ok(Box::new(PageTable::<F, I, O, T>::new(tables)?)))
    }
}
