//! Memory that a binding maps, as a list of segments.

use dmalane_addr::{Address, CardAddr, Segment, SgIndex, SgRuns};
use dmalane_iopt::Format;

use crate::record::Record;
use crate::slots::Slot;

/// The card memory behind pages `first..=last` of a binding whose record at `first` is given.
pub(crate) fn segments<F: Format>(
    null: Option<Segment<CardAddr>>,
    slot: &Slot,
    record: Record,
    first: u64,
    last: u64,
) -> Segments<'_> {
    let granule = F::GRANULE.log2();
    let offset = record.page() << granule;
    let (at, left) = (first << granule, (last - first + 1) << granule);
    match &slot.bo {
        // An offset beyond the buffer gives nothing; plan has refused it.
        Some(bo) if !record.is_fixed() => Segments::Once(bo.sg().runs(offset..offset + left)),
        Some(bo) => {
            let page = (slot.repeat_mask + 1) << granule;
            Segments::Again { of: Some((bo.sg(), offset)), page, phase: at & (page - 1), left, null: CardAddr::new(0) }
        }
        None => {
            let Some(null) = null else { return Segments::Once(None) };
            Segments::Again { of: None, page: null.len, phase: at & (null.len - 1), left, null: null.addr }
        }
    }
}

#[derive(Clone)]
pub(crate) enum Segments<'a> {
    Once(Option<SgRuns<'a, CardAddr>>),
    Again {
        /// The buffer and the offset of the first byte that repeats; none for the null page.
        of: Option<(&'a SgIndex<CardAddr>, u64)>,
        /// Bytes that repeat.
        page: u64,
        /// Which of them comes next.
        phase: u64,
        /// Bytes still to come.
        left: u64,
        /// The null page.
        null: CardAddr,
    },
}

impl Iterator for Segments<'_> {
    type Item = Segment<CardAddr>;

    #[inline]
    fn next(&mut self) -> Option<Segment<CardAddr>> {
        match self {
            Self::Once(runs) => runs.as_mut()?.next(),
            Self::Again { left: 0, .. } => None,
            Self::Again { of, page, phase, left, null } => {
                let (addr, run) = match of {
                    Some((sg, offset)) => {
                        let at = sg.segment_at(*offset + *phase)?;
                        (at.addr, at.left)
                    }
                    None => (null.checked_add(*phase)?, u64::MAX),
                };
                let len = run.min(*page - *phase).min(*left);
                *left -= len;
                *phase = (*phase + len) & (*page - 1);
                Some(Segment { addr, len })
            }
        }
    }
}
