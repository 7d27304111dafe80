//! Where each tensor of a file goes: its offset in the buffer object, and its distance in device virtual memory.

use dmalane_addr::PageSize;

use crate::Model;

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
    /// Bytes from the start of the file's device virtual range, a multiple of 16 KiB. Tensors of 2 MiB and
    /// more lie as their `bo_offset` does modulo 2 MiB, so that their middle takes 2 MiB leaves.
    pub va_offset: u64,
}

/// Where the tensors of a file go.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// One place per tensor, in the order of [`Model::tensors`].
    pub places: Vec<Place>,
    /// Bytes of the buffer object; 0 when no tensor has any.
    pub bo_len: u64,
    /// Bytes of device virtual memory, gaps included.
    pub va_len: u64,
}

impl Layout {
    /// Lays out a file. Tensors keep their order; on the card they are packed at 4 KiB, in virtual memory at least 16
    /// KiB of nothing follow each, so that an overrun faults.
    ///
    /// `None` when the sizes add up to more than 64 bits.
    pub fn new(model: &Model) -> Option<Self> {
        let mut layout = Self::default();
        for tensor in &model.tensors {
            let large = tensor.len >= LARGE.bytes();
            // A large tensor lies at a multiple of 16 KiB on the card too, because its address is equal modulo 2 MiB.
            let bo_offset = if large { ALIGN } else { PAGE }.round_up(layout.bo_len)?;
            let mut va_offset = ALIGN.round_up(layout.va_len)?;
            if large {
                va_offset = LARGE.round_up(va_offset)?.checked_add(bo_offset % LARGE.bytes())?;
            }
            let bound = PAGE.round_up(tensor.len)?;
            layout.places.push(Place { bo_offset, bound, va_offset });
            if bound > 0 {
                layout.bo_len = bo_offset.checked_add(bound)?;
                layout.va_len = va_offset.checked_add(bound)?.checked_add(ALIGN.bytes())?;
            }
        }
        Some(layout)
    }

    /// Lays out a file for a device without an MMU: addresses follow the memory, without gaps.
    ///
    /// `None` when the sizes add up to more than 64 bits.
    pub fn flat(model: &Model) -> Option<Self> {
        let mut layout = Self::new(model)?;
        layout.places.iter_mut().for_each(|place| place.va_offset = place.bo_offset);
        layout.va_len = layout.bo_len;
        Some(layout)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Container, Tensor};
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
        Model { len: 0, tensors: sizes.iter().map(tensor).collect(), metadata: None, container: Container::Safetensors }
    }

    #[test]
    fn overflow_is_refused() {
        assert_eq!(Layout::new(&model(&[u64::MAX])), None);
        assert_eq!(Layout::new(&model(&[1 << 63, 1 << 63])), None);
        assert_eq!(Layout::new(&model(&[0, 0])).unwrap().bo_len, 0);
    }

    proptest! {
        #[test]
        fn places_are_aligned_and_apart(
            sizes in prop::collection::vec(prop_oneof![0u64..20_000, 0u64..9 << 20], 0..60),
        ) {
            let layout = Layout::new(&model(&sizes)).unwrap();
            let (mut bo, mut va) = (0, 0);
            for (place, len) in layout.places.iter().zip(&sizes) {
                prop_assert!(place.bo_offset.is_multiple_of(PAGE.bytes()));
                prop_assert!(place.va_offset.is_multiple_of(ALIGN.bytes()));
                prop_assert!(place.bo_offset >= bo && place.va_offset >= va);
                prop_assert!(place.bound >= *len && place.bound < len + 4096);
                if *len >= LARGE.bytes() {
                    prop_assert_eq!(place.va_offset % LARGE.bytes(), place.bo_offset % LARGE.bytes());
                }
                if place.bound > 0 {
                    bo = place.bo_offset + place.bound;
                    va = place.va_offset + place.bound + ALIGN.bytes();
                }
            }
            prop_assert_eq!((layout.bo_len, layout.va_len), (bo, va));
        }
    }
}
