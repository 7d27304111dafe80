//! Cutting a range of a file at tensor boundaries and where device memory has a discontinuity.

use std::collections::VecDeque;
use std::ops::Range;

use dmalane_addr::{CardAddr, FileOffset, SgIndex};
use dmalane_queue::DeviceAddr;

use crate::fill::Target;
use crate::{Layout, Model};

/// Cuts a range of a file at tensor boundaries, where the card memory `sg` of the file has a discontinuity, and at
/// `max` bytes. Bytes of no tensor, such as the header, have no destination.
pub(crate) fn cut(
    model: &Model,
    layout: &Layout,
    sg: Option<&SgIndex<CardAddr>>,
    range: Range<u64>,
    max: u64,
    out: &mut VecDeque<Target>,
) {
    let Range { start: mut at, end } = range;
    let first = model.index_at(FileOffset::new(at));
    for (tensor, place) in model.tensors.iter().zip(&layout.places).skip(first) {
        let start = tensor.at.bits().max(at);
        let stop = (tensor.at.bits() + tensor.len).min(end);
        if start >= end {
            break;
        }
        if start >= stop {
            continue;
        }
        if start > at {
            out.push_back(Target { len: start - at, to: None });
        }
        let from = place.bo_offset + (start - tensor.at.bits());
        let runs = sg.and_then(|sg| sg.runs(from..from + (stop - start)));
        for run in runs.expect("the buffer object holds every tensor") {
            let mut done = 0;
            while done < run.len {
                let len = (run.len - done).min(max);
                // Within a segment, which does not wrap.
                let to = DeviceAddr::Card(CardAddr::new(run.addr.bits() + done));
                out.push_back(Target { len, to: Some(to) });
                done += len;
            }
        }
        at = stop;
    }
    if at < end {
        out.push_back(Target { len: end - at, to: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;
    use dmalane_addr::SgTable;
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
            let mut cuts = VecDeque::new();
            cut(&model, &layout, Some(&sg), from..to, max, &mut cuts);
            let mut at = from;
            for c in cuts {
                prop_assert!(c.len > 0);
                if let Some(to) = c.to {
                    let DeviceAddr::Card(addr) = to else { panic!("{to:?}") };
                    let index = model.index_at(FileOffset::new(at));
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
