//! Invalidations and unlinked tables that an unmap leaves to its caller.

use dmalane_addr::{Address, Span};

use crate::list::List;

/// Result of one unmap: the addresses that the device's translation caches must forget, and the tables that must live
/// until they have.
///
/// Invalidate [`span`](Self::span), including cached walks (the leaf-only kind of invalidation is not enough when
/// [`tables`](Self::tables) is not empty), wait for the device to say so, then hand the list to
/// [`PageTable::free_tables`](crate::PageTable::free_tables). A list that is dropped leaks its tables: better than a
/// device that walks memory which belongs to somebody else by now.
///
/// Lists of several unmaps may wait for one invalidation, as in a gather. Until then a device may still reach what was
/// unmapped: neither the memory behind it nor its input addresses may serve anything else.
///
/// ```
/// # #[cfg(feature = "alloc")]
/// # fn main() -> Result<(), dmalane_iopt::Error> {
/// use dmalane_addr::{Access, Iova, PhysAddr, Span};
/// use dmalane_iopt::{HeapTables, PageTable, VtdSecond48};
///
/// let mut table = PageTable::<VtdSecond48, Iova, PhysAddr, _>::new(HeapTables::new(PhysAddr::new(0x10_0000)))?;
/// let buffers = [0x1000, 0x9000, 0x20_0000].map(|at| Span::new(Iova::new(at), 4096).unwrap());
/// for buffer in buffers {
///     table.map(buffer.first(), PhysAddr::new(0x4000_0000), 4096, Access::RW)?;
/// }
///
/// let gather = buffers.iter().map(|buffer| table.unmap(*buffer)).collect::<Result<Vec<_>, _>>()?;
///
/// // One invalidation, of all that lies between; of the leaves only where no table has gone.
/// let first = gather.iter().map(|list| list.span().first()).min().expect("three");
/// let last = gather.iter().map(|list| list.span().last()).max().expect("three");
/// let leaves_only = gather.iter().all(|list| list.tables().is_empty());
/// // iommu.invalidate(Span::inclusive(first, last), leaves_only), and wait until it is done
/// assert_eq!((first.bits(), last.bits(), leaves_only), (0x1000, 0x20_0fff, false));
/// gather.into_iter().for_each(|list| table.free_tables(list));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "alloc"))]
/// # fn main() {}
/// ```
///
/// Without the feature `alloc` a list has room for 32 tables. Others that became empty stay in the tree, for the next
/// map there or a later unmap.
#[must_use = "invalidate the device's translations of the span, then hand the list to free_tables"]
#[derive(Debug)]
pub struct FlushList<I: Address, A> {
    pub(crate) span: Span<I>,
    pub(crate) bytes: u64,
    pub(crate) tables: List<A>,
}

impl<I: Address, A> FlushList<I, A> {
    /// The span to invalidate: the one asked for, widened to the whole of each large leaf that was split at its ends,
    /// since a cache may hold that leaf as one entry.
    pub fn span(&self) -> Span<I> {
        self.span
    }

    /// Bytes that were mapped and are no more. Below the length of the span when it had holes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The tables that are no longer part of the tree.
    pub fn tables(&self) -> &[A] {
        &self.tables
    }

    /// True when nothing was mapped there and no table is left over, so that there is nothing to invalidate.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0 && self.tables.is_empty()
    }
}
