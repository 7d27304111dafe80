//! Worst-case number of tables for a batch of changes.

use core::marker::PhantomData;

use dmalane_addr::{Address, Segment, Span};

use crate::format::{MAX_LEVELS, entries, index, input_len, page_size, shift};
use crate::map::{Source, check_room, check_start};
use crate::unmap::Cut;
use crate::{Error, Format};

/// The worst-case number of tables for a series of calls, whatever the page table holds: what to
/// [`reserve`](crate::Tables::reserve) so that the calls cannot fail for want of tables.
///
/// Say what will be called, in the same order.
///
/// ```
/// # use dmalane_addr::{CardAddr, DeviceVa, Segment, Span};
/// # use dmalane_iopt::{TableEstimate, X86_64_4Level};
/// let mut estimate = TableEstimate::<X86_64_4Level>::new();
/// let va = DeviceVa::new(1 << 30);
/// estimate.map_sg(va, [Segment { addr: CardAddr::new(0), len: 32 << 30 }])?; // 32 leaves of 1 GiB
/// assert_eq!(estimate.tables(), 1);
/// estimate.unmap(Span::new(va, 4096).unwrap()); // splits the first one, twice
/// assert_eq!(estimate.tables(), 3);
/// # Ok::<(), dmalane_iopt::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TableEstimate<F> {
    tables: usize,
    /// By level, the last table counted, by its position in the input space: it exists while nothing is unmapped.
    counted: [Option<u64>; MAX_LEVELS],
    format: PhantomData<fn() -> F>,
}

impl<F: Format> Default for TableEstimate<F> {
    fn default() -> Self {
        Self::new()
    }
}

impl<F: Format> TableEstimate<F> {
    /// No calls, no tables.
    pub fn new() -> Self {
        Self { tables: 0, counted: [None; MAX_LEVELS], format: PhantomData }
    }

    /// The number of tables that the calls so far can take.
    pub fn tables(&self) -> usize {
        self.tables
    }

    /// Adds a [`map_sg`](crate::PageTable::map_sg). Tables that continue the previous list are counted once.
    ///
    /// # Errors
    /// Those of `map_sg` for the list itself: [`Error::Misaligned`], [`Error::InputRange`] and
    /// [`Error::OutputRange`]. The estimate is of no more use then.
    pub fn map_sg<I: Address, O: Address>(
        &mut self,
        at: I,
        segments: impl IntoIterator<Item = Segment<O>>,
    ) -> Result<(), Error> {
        check_start::<F, I>(at, input_len::<F>())?;
        let mut at = at.bits();
        let mut source = Source::<F, O, _>::new(segments.into_iter());
        while source.next()? {
            check_room::<I>(at, source.now.len, input_len::<F>())?;
            let level = source.leaf_kind(at, F::PAGE_SIZES)?.level;
            for l in (1..=level).rev() {
                let table = Some(at >> shift::<F>(l - 1));
                if self.counted[l as usize] == table {
                    break; // and so are the tables above it
                }
                self.counted[l as usize] = table;
                self.tables = self.tables.saturating_add(1);
            }
            // Leaves of this size up to the end of their table; pages also from the segments that follow.
            let page = page_size::<F>(level).bytes();
            let mut room = page * (entries::<F>(level) - index::<F>(at, level)) as u64;
            loop {
                let bytes = source.now.len.min(room) & !(page - 1);
                source.now.skip(bytes);
                (at, room) = (at + bytes, room - bytes);
                if room == 0 || level != F::LEVELS - 1 || !source.next()? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Adds an [`unmap`](crate::PageTable::unmap): the tables for splitting the largest leaf at both ends of the span.
    pub fn unmap<I: Address>(&mut self, span: Span<I>) {
        let ends = [Some(span.first().bits()), span.last().bits().checked_add(1)];
        let tables = Cut::tables::<F>(ends.map(|at| at.and_then(Cut::worst::<F>)));
        self.tables = self.tables.saturating_add(tables);
        // This call may unlink tables that were counted; they are needed again then.
        self.counted = [None; MAX_LEVELS];
    }
}
