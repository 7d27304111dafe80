//! Where tensors of a file lie in the buffer that they are read into.

use std::ops::Range;
use std::sync::Arc;

use super::block::Block;
use crate::container::Model;
use crate::fill::Extent;

/// The page that direct I/O wants memory and file offsets to agree on.
pub(super) const PAGE: u64 = 4096;
/// Tensors that cannot lie as they do in the file are aligned to a cache line.
const LINE: u64 = 64;

/// Where tensors of a file lie in their buffer.
pub(super) struct Plan {
    /// Which tensors; none for a slice of one.
    pub tensors: Range<usize>,
    /// Where each begins.
    pub places: Vec<u64>,
    pub extents: Vec<Extent>,
    pub len: u64,
    /// The memory that has them already: nothing is read.
    pub kept: Option<Arc<Block>>,
}

impl Plan {
    /// Lays some tensors of a file out in one buffer. Without `align` they lie as they do in the file, so that direct
    /// I/O puts them there together, but each is aligned to its elements. With it, each starts at a multiple of
    /// `align`, a power of two, and shares no such unit with another one.
    ///
    /// `None` when the sizes add up to more than 63 bits.
    pub fn new(model: &Model, tensors: Range<usize>, align: Option<u64>) -> Option<Self> {
        let mut plan =
            Self { tensors: tensors.clone(), places: Vec::new(), extents: Vec::<Extent>::new(), len: 0, kept: None };
        for tensor in &model.tensors[tensors] {
            let at = tensor.at.bits();
            let element = tensor.element_bytes();
            let next = match (align, plan.extents.last()) {
                (Some(align), _) => plan.len.checked_next_multiple_of(align)?,
                (None, Some(last)) if last.at.bits() + last.len == at && plan.len.is_multiple_of(element) => plan.len,
                // As in the file, from the first one on too.
                (None, _) if at.is_multiple_of(element) => plan.len + (at.wrapping_sub(plan.len) & (PAGE - 1)),
                (None, _) => plan.len.checked_next_multiple_of(LINE)?,
            };
            plan.places.push(next);
            if tensor.len == 0 {
                continue;
            }
            plan.len = next.checked_add(tensor.len).filter(|len| i64::try_from(*len).is_ok())?;
            match plan.extents.last_mut() {
                Some(last) if last.at.bits() + last.len == at && last.to + last.len == next => last.len += tensor.len,
                _ => plan.extents.push(Extent { source: 0, at: tensor.at, len: tensor.len, buffer: 0, to: next }),
            }
        }
        // An empty tensor may have been placed behind the last byte.
        plan.places.iter_mut().for_each(|place| *place = (*place).min(plan.len));
        Some(plan)
    }

    /// Tensors of a file that memory holds. `None` where one of them is not aligned to its elements there.
    pub fn kept(model: &Model, tensors: Range<usize>, block: &Arc<Block>) -> Option<Self> {
        let of = &model.tensors[tensors.clone()];
        let places = of.iter().map(|tensor| tensor.at.bits()).collect();
        let plan = Self { tensors, places, extents: Vec::new(), len: 0, kept: Some(block.clone()) };
        of.iter().all(|tensor| tensor.is_aligned()).then_some(plan)
    }

    /// Bytes of memory that its buffer takes, in pages.
    pub fn memory(&self) -> u64 {
        if self.kept.is_some() {
            return 0;
        }
        self.len.max(1).next_multiple_of(PAGE)
    }
}
