//! Where each tensor of a file goes: its offset in the buffer object, and its distance in device virtual memory.

use dmalane_addr::PageSize;
use thiserror::Error;

use crate::container::{Model, Tensor};

/// Bound ranges start at multiples of this in device virtual memory: the page size of the GPUs with the largest pages
/// (Apple AGX).
pub const ALIGN: PageSize = PageSize::SIZE_16K;

/// Bound ranges start at multiples of this on the card: the page of its MMU.
pub const PAGE: PageSize = PageSize::SIZE_4K;

/// The page size that large tensors are laid out for.
pub const LARGE: PageSize = PageSize::SIZE_2M;

/// Shorter tensors share pages: to fill its last page each longer one wastes a quarter of its bytes at most.
const SHARED_BELOW: u64 = 16 << 10;

/// Multiples of how many bytes tensors start at, at least, on a device and in its addresses. From 4 KiB on each tensor
/// has pages of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TensorAlign(PageSize);

/// A number of bytes that tensors cannot be aligned to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("tensors are aligned to a power of two of at most 2 MiB, not to {0} bytes")]
pub struct BadAlign(u64);

impl Default for TensorAlign {
    /// 64 bytes: a line of a processor's cache, its longest vectors, and a multiple of all types of elements.
    fn default() -> Self {
        Self(PageSize::from_log2(6).expect("a power of two"))
    }
}

impl TryFrom<u64> for TensorAlign {
    type Error = BadAlign;

    /// Never less than the default.
    fn try_from(bytes: u64) -> Result<Self, BadAlign> {
        let align = PageSize::new(bytes).filter(|align| *align <= LARGE).ok_or(BadAlign(bytes))?;
        Ok(Self(align).max(Self::default()))
    }
}

/// Where one tensor goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Bytes from the start of the buffer object.
    pub bo_offset: u64,
    /// Which of the file's runs it is part of.
    pub run: u32,
}

/// A tensor, or several short ones behind each other, whose pages are bound at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TensorRun {
    /// Bytes from the start of the buffer object, a multiple of 4 KiB.
    pub bo_offset: u64,
    /// Bytes to bind, rounded up to 4 KiB pages; 0 for tensors of no bytes.
    pub bound: u64,
    /// Bytes of its tensors.
    pub filled: u64,
    /// Which of the file's device virtual ranges.
    pub range: usize,
    /// Bytes from the start of that range, a multiple of 16 KiB, or 0 where the file is bound as a whole. Runs of
    /// 2 MiB and more lie as their `bo_offset` does modulo 2 MiB, so that their middle takes 2 MiB leaves.
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
    /// In the order of their bytes.
    pub runs: Vec<TensorRun>,
    /// Bytes of the buffer object; 0 when no tensor has any.
    pub bo_len: u64,
    /// One, or as many as a device with short ranges needs; none when no tensor has any bytes.
    pub ranges: Vec<VaRange>,
}

impl Layout {
    /// Lays out a file. Tensors keep their order. On the card a tensor of 16 KiB and more begins a page; shorter ones
    /// that follow each other make a run that does, unless `align` gives each pages of its own. In virtual memory at
    /// least 16 KiB of nothing follow each run, so that an overrun of it faults. A range longer than `longest` has one
    /// tensor.
    ///
    /// `None` when the sizes add up to more than 64 bits.
    pub fn new(model: &Model, TensorAlign(align): TensorAlign, longest: u64) -> Option<Self> {
        let mut layout = Self { places: Vec::with_capacity(model.tensors.len()), ..Self::default() };
        let shares = |tensor: &Tensor| tensor.len < SHARED_BELOW && align < PAGE;
        while let Some(first) = model.tensors.get(layout.places.len()) {
            let run = u32::try_from(layout.runs.len()).ok()?;
            let (begin, mut len, mut filled) = (layout.places.len(), first.len, first.len);
            layout.places.push(Place { bo_offset: 0, run });
            while let Some(next) = model.tensors.get(layout.places.len()).filter(|next| shares(first) && shares(next)) {
                // Of no bytes there is no place.
                let at = if next.len == 0 { len } else { align.round_up(len)? };
                let end = at.checked_add(next.len)?;
                if PAGE.round_up(end)?.checked_add(ALIGN.bytes())? > longest {
                    break;
                }
                layout.places.push(Place { bo_offset: at, run });
                (len, filled) = (end, filled + next.len);
            }
            let large = len >= LARGE.bytes();
            // A large run lies at a multiple of 16 KiB on the card too, because its address is equal modulo 2 MiB.
            let bo_offset = if large { ALIGN } else { PAGE }.max(align).round_up(layout.bo_len)?;
            let bound = PAGE.round_up(len)?;
            for place in &mut layout.places[begin..] {
                place.bo_offset = place.bo_offset.checked_add(bo_offset)?;
            }
            // Behind `before` bytes of a range: the offset, and the end.
            let behind = |before: u64| {
                let at = match large {
                    true => LARGE.round_up(ALIGN.round_up(before)?)?.checked_add(bo_offset % LARGE.bytes())?,
                    false => ALIGN.max(align).round_up(before)?,
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
            layout.runs.push(TensorRun { bo_offset, bound, filled, range, va_offset });
        }
        // Memory of 2 MiB and more begins at a multiple of that, and less of it at one of 16 KiB.
        if align > ALIGN && layout.bo_len > 0 {
            layout.bo_len = layout.bo_len.max(LARGE.bytes());
        }
        Some(layout)
    }

    /// Lays out a file so that addresses follow the memory, without gaps: for a device without an MMU, or one that
    /// binds the file as a whole, in pages of `page`. A range longer than `longest` has one tensor, and a page in which
    /// one range ends and the next begins is part of both. Each range is a run.
    ///
    /// `None` when the sizes add up to more than 64 bits.
    pub fn whole(model: &Model, align: TensorAlign, page: PageSize, longest: u64) -> Option<Self> {
        // A range is longer than its tensors by parts of two pages.
        let shorter = if longest == u64::MAX { longest } else { longest.saturating_sub(2 * page.bytes()) };
        let mut layout = Self::new(model, align, shorter)?;
        let runs = std::mem::take(&mut layout.runs);
        layout.ranges.clear();
        let mut now = Vec::with_capacity(runs.len());
        for run in runs {
            let end = run.bo_offset + run.bound;
            if run.bound > 0 {
                let long = |range: &VaRange| page.round_up(end).is_none_or(|end| end - range.bo_offset > longest);
                if layout.ranges.last().is_none_or(long) {
                    // The first range begins where the memory does.
                    let bo_offset = if layout.ranges.is_empty() { 0 } else { run.bo_offset & !(page.bytes() - 1) };
                    let range = layout.ranges.len();
                    layout.ranges.push(VaRange { bo_offset, len: 0 });
                    layout.runs.push(TensorRun { bo_offset, range, ..TensorRun::default() });
                }
                let (range, whole) = (layout.ranges.last_mut()?, layout.runs.last_mut()?);
                range.len = page.round_up(end)? - range.bo_offset;
                (whole.bound, whole.filled) = (end - whole.bo_offset, whole.filled + run.filled);
            }
            now.push(u32::try_from(layout.runs.len().saturating_sub(1)).ok()?);
        }
        for place in &mut layout.places {
            place.run = now[place.run as usize];
        }
        Some(layout)
    }

    /// The range of a tensor, and bytes from its start.
    pub fn address(&self, place: &Place) -> Option<(usize, u64)> {
        let run = self.runs.get(place.run as usize)?;
        Some((run.range, run.va_offset + (place.bo_offset - run.bo_offset)))
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
        let align = TensorAlign::default();
        for longest in [1 << 20, u64::MAX] {
            assert_eq!(Layout::new(&model(&[u64::MAX]), align, longest), None);
            assert_eq!(Layout::new(&model(&[1 << 63, 1 << 63]), align, longest), None);
            let empty = Layout::new(&model(&[0, 0]), align, longest).unwrap();
            assert_eq!((empty.bo_len, empty.ranges.len()), (0, 0));
        }
    }

    #[test]
    fn alignments_are_powers_of_two_up_to_a_large_page() {
        for bad in [0, 3, 96, 4 << 20, u64::MAX] {
            assert_eq!(TensorAlign::try_from(bad), Err(BadAlign(bad)));
        }
        assert_eq!(TensorAlign::try_from(1), Ok(TensorAlign::default()));
        assert!(TensorAlign::try_from(2 << 20).unwrap() > TensorAlign::try_from(128).unwrap());
    }

    #[test]
    fn small_tensors_share_pages_and_large_ones_do_not() {
        let of = |sizes: &[u64], align: u64| {
            let layout = Layout::new(&model(sizes), align.try_into().unwrap(), u64::MAX).unwrap();
            let places: Vec<u64> = layout.places.iter().map(|place| place.bo_offset).collect();
            (places, layout.runs.len(), layout.bo_len)
        };
        assert_eq!(of(&[1, 65, 0, 16_383, 1], 1), (vec![0, 64, 129, 192, 16_576], 1, 20_480));
        assert_eq!(of(&[1, 16 << 10, 1, 1], 256), (vec![0, 4096, 20_480, 20_736], 3, 24_576));
        assert_eq!(of(&[1, 65, 16_383], 4096), (vec![0, 4096, 8192], 3, 24_576));
        assert_eq!(of(&[1, 65], 65_536), (vec![0, 65_536], 2, 2 << 20));
        assert_eq!(of(&[1024; 200_000], 64).2, 200_000 << 10);
    }

    fn alignment() -> impl Strategy<Value = TensorAlign> {
        (0u32..22).prop_map(|log2| (1u64 << log2).try_into().unwrap())
    }

    /// The slow way: where the tensors of a file go on the card.
    fn places_one_by_one(sizes: &[u64], align: u64) -> Vec<u64> {
        let (mut end, mut places, mut shared) = (0u64, Vec::new(), false);
        // A run of 2 MiB and more begins at a multiple of 16 KiB: known when it ends.
        for (i, len) in sizes.iter().enumerate() {
            let shares = *len < 16 << 10 && align < 4096;
            if !(shares && shared) {
                let run: Vec<u64> = sizes[i..].iter().copied().take_while(|len| shares && *len < 16 << 10).collect();
                let bytes = if shares { length(&run, align) } else { *len };
                let large = bytes >= 2 << 20;
                end = end.next_multiple_of(if large { 16 << 10 } else { 4096 }.max(align));
            } else if *len > 0 {
                end = end.next_multiple_of(align);
            }
            places.push(end);
            end += len;
            shared = shares;
            if !shares {
                end = end.next_multiple_of(4096);
            }
        }
        places
    }

    fn length(sizes: &[u64], align: u64) -> u64 {
        sizes.iter().fold(0, |end: u64, len| if *len == 0 { end } else { end.next_multiple_of(align) + len })
    }

    proptest! {
        #[test]
        fn places_are_those_of_the_slow_way(
            sizes in prop::collection::vec(prop_oneof![0u64..100, 0u64..20_000, 0u64..5 << 20], 0..60),
            align in alignment(),
        ) {
            let layout = Layout::new(&model(&sizes), align, u64::MAX).unwrap();
            let places: Vec<u64> = layout.places.iter().map(|place| place.bo_offset).collect();
            prop_assert_eq!(places, places_one_by_one(&sizes, align.0.bytes()));
        }

        #[test]
        fn places_are_aligned_and_apart(
            sizes in prop::collection::vec(prop_oneof![0u64..100, 0u64..20_000, 0u64..9 << 20], 0..60),
            longest in prop_oneof![Just(u64::MAX), 1u64 << 20..32 << 20],
            align in alignment(),
        ) {
            let layout = Layout::new(&model(&sizes), align, longest).unwrap();
            let (mut bo, mut va) = (0, vec![0; layout.ranges.len()]);
            let mut runs = vec![0; layout.ranges.len()];
            let mut filled = vec![0; layout.runs.len()];
            for (place, len) in layout.places.iter().zip(&sizes) {
                let (run, (_, va)) = (&layout.runs[place.run as usize], layout.address(place).unwrap());
                filled[place.run as usize] += len;
                prop_assert!(place.bo_offset >= run.bo_offset);
                prop_assert!(place.bo_offset + len <= run.bo_offset + run.bound);
                if *len > 0 {
                    prop_assert!(place.bo_offset.is_multiple_of(align.0.bytes()) && va.is_multiple_of(align.0.bytes()));
                }
            }
            for (run, filled) in layout.runs.iter().zip(&filled) {
                prop_assert_eq!(run.filled, *filled);
                prop_assert!(run.bo_offset.is_multiple_of(PAGE.bytes()) && run.bound.is_multiple_of(PAGE.bytes()));
                prop_assert!(run.va_offset.is_multiple_of(ALIGN.bytes()));
                if run.bound >= LARGE.bytes() && run.va_offset % LARGE.bytes() != run.bo_offset % LARGE.bytes() {
                    // Rounded up to that.
                    prop_assert!(run.bound == LARGE.bytes());
                }
                if run.bound > 0 {
                    prop_assert!(run.bo_offset >= bo && run.va_offset >= va[run.range]);
                    prop_assert!(run.bo_offset >= layout.ranges[run.range].bo_offset);
                    bo = run.bo_offset + run.bound;
                    va[run.range] = run.va_offset + run.bound + ALIGN.bytes();
                    runs[run.range] += 1;
                }
            }
            prop_assert_eq!(layout.bo_len, if align.0 > ALIGN && bo > 0 { bo.max(LARGE.bytes()) } else { bo });
            for ((range, end), runs) in layout.ranges.iter().zip(va).zip(runs) {
                prop_assert!(range.len == end && (end <= longest || runs == 1));
            }
            prop_assert!(longest < u64::MAX || layout.ranges.len() <= 1);
        }

        #[test]
        fn files_that_are_bound_whole_keep_the_order_of_their_memory(
            sizes in prop::collection::vec(prop_oneof![0u64..100, 0u64..20_000, 0u64..9 << 20], 0..60),
            longest in prop_oneof![Just(u64::MAX), 1u64 << 20..32 << 20],
            align in alignment(),
        ) {
            let page = PageSize::SIZE_64K;
            let layout = Layout::whole(&model(&sizes), align, page, longest).unwrap();
            for (place, len) in layout.places.iter().zip(&sizes).filter(|(_, len)| **len > 0) {
                let (range, va) = layout.address(place).unwrap();
                let range = layout.ranges[range];
                prop_assert_eq!(va + range.bo_offset, place.bo_offset);
                prop_assert!(va + len <= range.len && va.is_multiple_of(align.0.bytes()));
            }
            let (mut end, bytes) = (0, layout.runs.iter().map(|run| run.filled).sum::<u64>());
            prop_assert_eq!(bytes, sizes.iter().sum::<u64>());
            for range in &layout.ranges {
                prop_assert!(range.bo_offset.is_multiple_of(page.bytes()) && range.len.is_multiple_of(page.bytes()));
                let inside = |place: &&Place| layout.ranges[layout.runs[place.run as usize].range] == *range;
                let filled = layout.places.iter().zip(&sizes).filter(|(_, len)| **len > 0);
                let tensors = filled.filter(|(place, _)| inside(place)).count();
                prop_assert!(range.len <= longest || tensors == 1);
                // Nothing is left out between two ranges.
                prop_assert!(end == 0 || range.bo_offset + page.bytes() >= end);
                end = range.bo_offset + range.len;
            }
            let used = layout.runs.iter().map(|run| run.bo_offset + run.bound).max().unwrap_or(0);
            prop_assert!(used <= layout.bo_len && end >= used && end < used + page.bytes());
        }
    }
}
