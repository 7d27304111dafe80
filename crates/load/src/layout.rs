//! Where each tensor of a file goes: its offset in the buffer object, and its distance in device virtual memory.

use dmalane_addr::PageSize;

use crate::container::Model;

/// Tensors start at multiples of this in device virtual memory: the page size of the GPUs with the largest pages (Apple
/// AGX).
pub const ALIGN: PageSize = PageSize::SIZE_16K;

/// Tensors start at multiples of this on the card: the page of its MMU. More would waste memory with small tensors.
pub const PAGE: PageSize = PageSize::SIZE_4K;

/// The page size that large tensors are laid out for.
pub const LARGE: PageSize = PageSize::SIZE_2M;

/// Where one tensor goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Bytes from the start of the buffer object, a multiple of 4 KiB.
    pub bo_offset: u64,
    /// Bytes to bind: the tensor rounded up to 4 KiB pages; 0 for a tensor of no bytes.
    pub bound: u64,
    /// Which of the file's device virtual ranges.
    pub range: usize,
    /// Bytes from the start of that range, a multiple of 16 KiB, or of 4 KiB where the file is bound as a whole.
    /// Tensors of 2 MiB and more lie as their `bo_offset` does modulo 2 MiB, so that their middle takes 2 MiB leaves.
    pub va_offset: u64,
}

/// A device virtual range of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VaRange {
    /// Bytes of the buffer object before its first tensor; where the file is bound as a whole, before the range.
    pub bo_offset: u64,
    /// Bytes, gaps included.
    pub len: u64,
}

/// Where the tensors of a file go.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// One place per tensor, in the order of [`Model::tensors`].
    pub places: Vec<Place>,
    /// Bytes of the buffer object; 0 when no tensor has any.
    pub bo_len: u64,
    /// One, or as many as a device with short ranges needs; none when no tensor has any bytes.
    pub ranges: Vec<VaRange>,
}

impl Layout {
    /// Lays out a file. Tensors keep their order; on the card they are packed at 4 KiB, in virtual memory at least 16
    /// KiB of nothing follow each, so that an overrun faults. A range longer than `longest` has one tensor.
    ///
    /// `None` when the sizes add up to more than 64 bits.
    pub fn new(model: &Model, longest: u64) -> Option<Self> {
        let mut layout = Self::default();
        for tensor in &model.tensors {
            let large = tensor.len >= LARGE.bytes();
            // A large tensor lies at a multiple of 16 KiB on the card too, because its address is equal modulo 2 MiB.
            let bo_offset = if large { ALIGN } else { PAGE }.round_up(layout.bo_len)?;
            let bound = PAGE.round_up(tensor.len)?;
            // Behind `before` bytes of a range: the offset, and the end.
            let behind = |before: u64| {
                let at = match large {
                    true => LARGE.round_up(ALIGN.round_up(before)?)?.checked_add(bo_offset % LARGE.bytes())?,
                    false => ALIGN.round_up(before)?,
                };
                Some((at, at.checked_add(bound)?.checked_add(ALIGN.bytes())?))
            };
            let (mut va_offset, mut end) = behind(layout.ranges.last().map_or(0, |range| range.len))?;
            if bound > 0 {
                if layout.ranges.is_empty() || end > longest {
                    (va_offset, end) = behind(0)?;
                    layout.ranges.push(VaRange { bo_offset, len: 0 });
                }
                layout.bo_len = bo_offset.checked_add(bound)?;
                layout.ranges.last_mut()?.len = end;
            }
            let range = layout.ranges.len().saturating_sub(1);
            layout.places.push(Place { bo_offset, bound, range, va_offset });
        }
        Some(layout)
    }

    /// Lays out a file so that addresses follow the memory, without gaps: for a device without an MMU, or one that
    /// binds the file as a whole, in pages of `page`. A range longer than `longest` has one tensor, and a page in which
    /// one range ends and the next begins is part of both.
    ///
    /// `None` when the sizes add up to more than 64 bits.
    pub fn whole(model: &Model, page: PageSize, longest: u64) -> Option<Self> {
        let mut layout = Self { ranges: Vec::new(), ..Self::new(model, u64::MAX)? };
        for place in &mut layout.places {
            let end = place.bo_offset + place.bound;
            if place.bound > 0 {
                let long = |range: &VaRange| page.round_up(end).is_none_or(|end| end - range.bo_offset > longest);
                if layout.ranges.last().is_none_or(long) {
                    // The first range begins where the memory does.
                    let bo_offset =
                        if layout.ranges.is_empty() { 0 } else { place.bo_offset / page.bytes() * page.bytes() };
                    layout.ranges.push(VaRange { bo_offset, len: 0 });
                }
                let last = layout.ranges.last_mut()?;
                last.len = page.round_up(end)? - last.bo_offset;
            }
            place.range = layout.ranges.len().saturating_sub(1);
            place.va_offset = place.bo_offset - layout.ranges.last().map_or(0, |range| range.bo_offset);
        }
        Some(layout)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::container::{Tensor, raw};
    use dmalane_addr::FileOffset;
    use proptest::prelude::*;

    fn model(sizes: &[u64]) -> Model {
        let tensor = |len: &u64| {
            Arc::new(Tensor {
                name: String::new(),
                dtype: Arc::default(),
                shape: Box::default(),
                at: FileOffset::new(0),
                len: *len,
            })
        };
        Model {
            len: 0,
            tensors: sizes.iter().map(tensor).collect(),
            metadata: None,
            by_columns: false,
            container: &raw::CONTAINER,
        }
    }

    #[test]
    fn overflow_is_refused() {
        for longest in [1 << 20, u64::MAX] {
            assert_eq!(Layout::new(&model(&[u64::MAX]), longest), None);
            assert_eq!(Layout::new(&model(&[1 << 63, 1 << 63]), longest), None);
            let empty = Layout::new(&model(&[0, 0]), longest).unwrap();
            assert_eq!((empty.bo_len, empty.ranges.len()), (0, 0));
        }
    }

    proptest! {
        #[test]
        fn places_are_aligned_and_apart(
            sizes in prop::collection::vec(prop_oneof![0u64..20_000, 0u64..9 << 20], 0..60),
            longest in prop_oneof![Just(u64::MAX), 1u64 << 20..32 << 20],
        ) {
            let layout = Layout::new(&model(&sizes), longest).unwrap();
            let (mut bo, mut va) = (0, vec![0; layout.ranges.len()]);
            let mut tensors = vec![0; layout.ranges.len()];
            for (place, len) in layout.places.iter().zip(&sizes) {
                prop_assert!(place.bo_offset.is_multiple_of(PAGE.bytes()));
                prop_assert!(place.va_offset.is_multiple_of(ALIGN.bytes()));
                prop_assert!(place.bound >= *len && place.bound < len + 4096);
                if *len >= LARGE.bytes() {
                    prop_assert_eq!(place.va_offset % LARGE.bytes(), place.bo_offset % LARGE.bytes());
                }
                if place.bound > 0 {
                    prop_assert!(place.bo_offset >= bo && place.va_offset >= va[place.range]);
                    prop_assert!(place.bo_offset >= layout.ranges[place.range].bo_offset);
                    bo = place.bo_offset + place.bound;
                    va[place.range] = place.va_offset + place.bound + ALIGN.bytes();
                    tensors[place.range] += 1;
                }
            }
            prop_assert_eq!(layout.bo_len, bo);
            for ((range, end), tensors) in layout.ranges.iter().zip(va).zip(tensors) {
                prop_assert!(range.len == end && (end <= longest || tensors == 1));
            }
            prop_assert!(longest < u64::MAX || layout.ranges.len() <= 1);
        }

        #[test]
        fn files_that_are_bound_whole_keep_the_order_of_their_memory(
            sizes in prop::collection::vec(prop_oneof![0u64..20_000, 0u64..9 << 20], 0..60),
            longest in prop_oneof![Just(u64::MAX), 1u64 << 20..32 << 20],
        ) {
            let page = PageSize::SIZE_64K;
            let layout = Layout::whole(&model(&sizes), page, longest).unwrap();
            let mut tensors = vec![0; layout.ranges.len()];
            for (place, _) in layout.places.iter().zip(&sizes).filter(|(_, len)| **len > 0) {
                let range = layout.ranges[place.range];
                prop_assert_eq!(place.va_offset + range.bo_offset, place.bo_offset);
                prop_assert!(place.va_offset + place.bound <= range.len);
                tensors[place.range] += 1;
            }
            let mut end = 0;
            for (range, tensors) in layout.ranges.iter().zip(tensors) {
                prop_assert!(range.bo_offset.is_multiple_of(page.bytes()) && range.len.is_multiple_of(page.bytes()));
                prop_assert!(range.len <= longest || tensors == 1);
                // Nothing is left out between two ranges.
                prop_assert!(end == 0 || range.bo_offset + page.bytes() >= end);
                end = range.bo_offset + range.len;
            }
            prop_assert!(end >= layout.bo_len && end < layout.bo_len + page.bytes());
        }
    }
}
