//! Cutting a stretch of a file into pieces with one destination each.

use dmalane_addr::{CardAddr, SgIndex};

use crate::{Layout, Model};

/// The next `len` bytes of a stretch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cut {
    /// Bytes, at least one.
    pub(crate) len: u64,
    /// The tensor they belong to and where they go; `None` for bytes of no tensor, such as the header.
    pub(crate) to: Option<(usize, CardAddr)>,
}

/// Cuts the `len` bytes from file offset `at` at tensor boundaries, where the card memory `sg` of the file has a
/// discontinuity, and at `max` bytes.
pub(crate) fn cut(
    model: &Model,
    layout: &Layout,
    sg: Option<&SgIndex<CardAddr>>,
    at: u64,
    len: u64,
    max: u64,
) -> Vec<Cut> {
    let end = at + len;
    let mut at = at;
    let mut cuts = Vec::new();
    let first = model.tensors.partition_point(|t| t.at.bits() + t.len <= at);
    for (index, (tensor, place)) in model.tensors.iter().zip(&layout.places).enumerate().skip(first) {
        let start = tensor.at.bits().max(at);
        let stop = (tensor.at.bits() + tensor.len).min(end);
        if start >= end {
            break;
        }
        if start >= stop {
            continue;
        }
        if start > at {
            cuts.push(Cut { len: start - at, to: None });
        }
        let from = place.bo_offset + (start - tensor.at.bits());
        let runs = sg.and_then(|sg| sg.runs(from..from + (stop - start)));
        for run in runs.expect("the buffer object holds every tensor") {
            let mut done = 0;
            while done < run.len {
                let len = (run.len - done).min(max);
                // Within a segment, which does not wrap.
                let to = CardAddr::new(run.addr.bits() + done);
                cuts.push(Cut { len, to: Some((index, to)) });
                done += len;
            }
        }
        at = stop;
    }
    if at < end {
        cuts.push(Cut { len: end - at, to: None });
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;
    use dmalane_addr::{FileOffset, SgTable};
    use proptest::prelude::*;

    proptest! {
        /// The reference asks for the destination of every byte.
        #[test]
        fn every_byte_has_its_place(
            header in 0u64..50,
            sizes in prop::collection::vec(prop_oneof![Just(0u64), 1u64..9000], 0..12),
            segments in prop::collection::vec(1u64..6, 40),
            range in any::<(prop::sample::Index, prop::sample::Index)>(),
            max in 1u64..5000,
        ) {
            let mut at = header;
            let tensors = sizes.iter().map(|&len| {
                let begin = FileOffset::new(at);
                let t = Tensor { name: String::new(), dtype: String::new(), shape: vec![], at: begin, len };
                at += len;
                t.into()
            });
            let model = Model { tensors: tensors.collect(), len: at, metadata: None, safetensors: true };
            let layout = Layout::new(&model).unwrap();
            let mut sg = SgTable::new();
            for (i, pages) in segments.iter().cycle().enumerate() {
                if sg.len() >= layout.bo_len {
                    break;
                }
                sg.push(CardAddr::new((i as u64) << 20), pages * 4096).unwrap();
            }
            let (a, b) = (range.0.index(model.len as usize + 1) as u64, range.1.index(model.len as usize + 1) as u64);
            let (from, to) = (a.min(b), a.max(b));
            let sg = SgIndex::from_table(&sg).unwrap();
            let cuts = cut(&model, &layout, Some(&sg), from, to - from, max);
            let mut at = from;
            for c in cuts {
                prop_assert!(c.len > 0);
                if let Some((index, addr)) = c.to {
                    prop_assert!(c.len <= max);
                    for n in [0, c.len - 1] {
                        let t = &model.tensors[index];
                        let in_tensor = at + n - t.at.bits();
                        prop_assert!(in_tensor < t.len);
                        let want = sg.segment_at(layout.places[index].bo_offset + in_tensor).unwrap().addr;
                        prop_assert_eq!(addr.bits() + n, want.bits());
                    }
                } else {
                    prop_assert!((at..at + c.len).all(|b| model.tensor_at(FileOffset::new(b)).is_none()));
                }
                at += c.len;
            }
            prop_assert_eq!(at, to);
        }
    }
}
