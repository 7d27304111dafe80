//! Destinations of a file's bytes: tensors, and the segments of the device memory that they lie in.

use dmalane_queue::DeviceAddr;

use crate::device::LoadedFile;
use crate::parts::{Runs, add_run};

impl LoadedFile {
    /// The ranges of the file that go to the device, and where. Neighbours of a run of the layout that are neighbours
    /// in the file too go together; bytes of no tensor, such as the header, stay on the host.
    pub(crate) fn places(&self) -> Runs {
        let (mut all, mut of_run) = (Runs::new(), Runs::new());
        let mut run = 0;
        for (tensor, place) in self.model.tensors.iter().zip(&self.layout.places) {
            if place.run != run {
                all.append(&mut of_run);
                run = place.run;
            }
            let (mut at, end) = (tensor.at.bits(), place.bo_offset + tensor.len);
            if tensor.len == 0 {
                continue;
            }
            let segments = self.bo.as_ref().and_then(|bo| bo.sg().runs(place.bo_offset..end));
            for segment in segments.expect("the buffer object holds every tensor") {
                add_run(&mut of_run, at..at + segment.len, DeviceAddr::Card(segment.addr));
                at += segment.len;
            }
        }
        all.append(&mut of_run);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::sync::Arc;

    use crate::container::{Model, Tensor, raw};
    use crate::fill::Targets;
    use crate::layout::Layout;
    use crate::parts::{Parts, Places};
    use dmalane_addr::{CardAddr, FileOffset, SgIndex, SgTable};
    use dmalane_vm::Bo;
    use proptest::prelude::*;

    proptest! {
        /// The reference asks for the destination of every byte.
        #[test]
        fn every_byte_has_its_place(
            header in 0u64..50,
            sizes in prop::collection::vec(prop_oneof![Just(0u64), 1u64..9000], 0..12),
            segments in prop::collection::vec(1u64..6, 40),
            range in any::<(prop::sample::Index, prop::sample::Index)>(),
            (max, align) in (1u64..5000, (0u32..13).prop_map(|log2| 1u64 << log2)),
        ) {
            let mut at = header;
            let tensors = sizes.iter().map(|&len| {
                let begin = FileOffset::new(at);
                let t = Tensor { name: String::new(), dtype: Arc::default(), shape: Box::default(), at: begin, len };
                at += len;
                t.into()
            });
            let tensors = tensors.collect();
            let container = &raw::CONTAINER;
            let model = Model { tensors, len: at, metadata: None, by_columns: false, container };
            let layout = Layout::new(&model, align.try_into().unwrap(), u64::MAX).unwrap();
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
            let mut file = LoadedFile::new("model".into(), Arc::new(model), layout, 0);
            file.bo = Some(Arc::new(Bo::new(1, sg)));
            let places = Places { parts: Parts::new([(at, None)]), runs: vec![file.places()] };
            places.cut(0, from..to, max, &mut cuts).unwrap();
            let LoadedFile { model, layout, bo: Some(bo), .. } = &file else { unreachable!() };
            let mut at = from;
            for c in cuts {
                prop_assert!(c.len > 0);
                if let Some(to) = c.to {
                    let DeviceAddr::Card(addr) = to else { panic!("{to:?}") };
                    prop_assert!(c.len <= max);
                    let first = layout.places[model.index_at(FileOffset::new(at))].run;
                    for n in 0..c.len {
                        let index = model.index_at(FileOffset::new(at + n));
                        prop_assert_eq!(layout.places[index].run, first);
                        let t = &model.tensors[index];
                        let in_tensor = at + n - t.at.bits();
                        prop_assert!(in_tensor < t.len);
                        let want = bo.sg().segment_at(layout.places[index].bo_offset + in_tensor).unwrap().addr;
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
