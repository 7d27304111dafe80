//! Tables and indices against a list of pages, and against each other in every form that can hold them.

use alloc::vec::Vec;

use proptest::prelude::*;

use super::index::{SgKind, Survey};
use super::*;
use crate::{PageSize, PhysAddr};

const KINDS: [SgKind; 6] =
    [SgKind::InPlace, SgKind::Flat, SgKind::Rank, SgKind::WideRank, SgKind::Buckets, SgKind::WideBuckets];

fn table(runs: &[(u64, u64)]) -> SgTable<PhysAddr> {
    let mut sg = SgTable::new();
    for &(addr, len) in runs {
        sg.push(PhysAddr::new(addr), len).unwrap();
    }
    sg
}

/// The index in every form that can hold the table, whether it would be chosen or not.
fn forms(table: &SgTable<PhysAddr>) -> Vec<SgIndex<PhysAddr>> {
    let survey = Survey::of(table);
    let mut forms = Vec::from([SgIndex::from_table(table).unwrap()]);
    for kind in KINDS {
        // Tests have no memory for more; forms that count pages hold up to 2^32.
        let few = survey.pages <= 1 << 16;
        let holds = match kind {
            SgKind::InPlace => table.segment_count() <= 4,
            SgKind::Flat | SgKind::Rank => few && !table.is_empty() && survey.is_near(),
            SgKind::WideRank => few,
            SgKind::Buckets => !table.is_empty() && survey.pages <= u64::from(u32::MAX) && survey.is_near(),
            SgKind::WideBuckets => !table.is_empty(),
        };
        if holds {
            let index = SgIndex::build(table, &survey, kind).unwrap();
            assert_eq!(index.kind(), kind);
            forms.push(index);
        }
    }
    forms
}

/// The address of each unit of a buffer and the units from there to the end of its segment; the last unit perhaps cut
/// short.
struct Units {
    unit: u64,
    units: Vec<(u64, u64)>,
    len: u64,
}

impl Units {
    fn new(runs: &[(u64, u64)], unit: u64) -> Self {
        let len = runs.iter().map(|r| r.1).sum();
        let addrs = runs.iter().flat_map(|&(addr, len)| (0..len.div_ceil(unit)).map(move |i| addr + i * unit));
        let mut units: Vec<(u64, u64)> = addrs.map(|addr| (addr, 1)).collect();
        for i in (1..units.len()).rev() {
            if units[i - 1].0.checked_add(unit) == Some(units[i].0) {
                units[i - 1].1 += units[i].1;
            }
        }
        Self { unit, units, len }
    }

    /// Address and bytes to the end of the segment.
    fn at(&self, offset: u64) -> Option<SegmentAt<PhysAddr>> {
        if offset >= self.len {
            return None;
        }
        let (addr, more) = self.units[(offset / self.unit) as usize];
        let low = offset % self.unit;
        let left = (more * self.unit - low).min(self.len - offset);
        Some(SegmentAt { addr: PhysAddr::new(addr + low), left })
    }
}

/// Segments of whole units, the last of any length; where in the address space they lie.
fn lists() -> impl Strategy<Value = (u64, Vec<(u64, u64)>)> {
    let shape = prop_oneof![
        // Everything, single pages mostly, long runs mostly.
        prop::collection::vec((0u64..60, 1u64..5), 0..60),
        prop::collection::vec((0u64..4000, prop_oneof![20 => Just(1u64), 1 => 1u64..20]), 0..300),
        prop::collection::vec((0u64..4000, prop_oneof![Just(1u64), 60u64..200]), 0..40),
    ];
    let log2 = prop_oneof![Just(0u32), Just(3), Just(12), Just(14), 0u32..20];
    // Frames up from here: low, around 2^32, to the very top.
    let place = prop_oneof![Just(0u64), Just((1 << 32) - 2000), Just(u64::MAX)];
    // One run may lie elsewhere: just within or just beyond what 32 bits can say.
    let far = prop_oneof![3 => Just(None), 1 => (0u64..60, (1u64 << 32) - 4200..(1 << 32) + 100).prop_map(Some)];
    (shape, log2, place, far, any::<u64>()).prop_map(|(shape, log2, place, far, cut)| {
        let unit = 1u64 << log2;
        // The highest frame leaves room for 4300 and the distant run.
        let highest = (u64::MAX >> log2) - 4300 - (1 << 32);
        let top = if place == u64::MAX { u64::MAX >> log2 } else { place };
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (i, (frame, n)) in shape.into_iter().enumerate() {
            let frame = match far {
                Some((at, frame)) if at == i as u64 => place.min(highest) + frame,
                _ if place == u64::MAX => top - frame - n + 1,
                _ => place + frame,
            };
            runs.push((frame << log2, n << log2));
        }
        if let Some(last) = runs.last_mut() {
            last.1 -= cut % unit;
        }
        (unit, runs)
    })
}

proptest! {
    #[test]
    fn agree_with_a_page_list(
        (unit, runs) in lists(),
        picks in prop::collection::vec(any::<(prop::sample::Index, u64)>(), 20),
    ) {
        let (table, units) = (table(&runs), Units::new(&runs, unit));
        prop_assert_eq!(table.len(), units.len);
        prop_assert_eq!(table.segment_count(), units.units.iter().filter(|u| u.1 == 1).count());
        let whole = table.segments().collect::<Vec<_>>();
        let offset = |(pick, low): &(prop::sample::Index, u64)| match units.units.len() {
            0 => *low % 3,
            n => pick.index(n + 1) as u64 * unit + low % unit,
        };
        let offsets: Vec<u64> = picks.iter().map(offset).collect();
        for index in forms(&table) {
            prop_assert_eq!(index.len(), units.len);
            prop_assert_eq!(index.segment_count(), table.segment_count());
            prop_assert_eq!(index.segments().collect::<Vec<_>>(), whole.clone());
            prop_assert!(index.granule().bytes() >= unit);
            for &at in &offsets {
                prop_assert_eq!(index.segment_at(at), units.at(at), "{:?}", index);
                for page in [unit, unit << 1, unit << 2, 4096].map(|n| PageSize::new(n).unwrap()) {
                    let want = units.at(at).filter(|s| s.left >= page.bytes()).map(|s| s.addr);
                    prop_assert_eq!(index.page_at(at, page), want);
                }
            }
            for pair in offsets.windows(2) {
                let range = pair[0]..pair[1];
                let ours = index.runs(range.clone()).map(|r| r.collect::<Vec<_>>());
                prop_assert_eq!(ours.is_some(), range.start <= range.end && range.end <= units.len);
                let Some(ours) = ours else { continue };
                let mut at = range.start;
                for run in ours {
                    let want = units.at(at).unwrap();
                    prop_assert_eq!((run.addr, run.len), (want.addr, want.left.min(range.end - at)));
                    at += run.len;
                }
                prop_assert_eq!(at, range.end);
            }
            for pair in offsets.windows(2).take(6) {
                // A range of whole units as often as not.
                let other = pair[1] - pair[1] % unit + pair[0] % unit;
                let range = pair[0].min(other)..pair[0].max(other);
                for page in [unit, unit << 1].map(|n| PageSize::new(n).unwrap()) {
                    let page_at = |at| units.at(at).filter(|s| s.left.min(range.end - at) >= page.bytes());
                    let each: Option<Vec<PhysAddr>> =
                        range.clone().step_by(page.bytes() as usize).map(|at| page_at(at).map(|s| s.addr)).collect();
                    let ours = index.pages(range.clone(), page);
                    if let Some(pages) = &ours {
                        let n = ((range.end - range.start) / page.bytes()) as usize;
                        prop_assert_eq!(pages.size_hint(), (n, Some(n)));
                    }
                    let each = each.filter(|_| range.end <= units.len);
                    prop_assert_eq!(ours.map(|p| p.collect::<Vec<_>>()), each);
                }
            }
        }
    }

    #[test]
    fn an_iterator_gives_the_same_index((_, runs) in lists()) {
        let segments = runs.iter().map(|&(addr, len)| Segment { addr: PhysAddr::new(addr), len });
        let index = SgIndex::try_new(segments).unwrap();
        let table = SgIndex::from_table(&table(&runs)).unwrap();
        prop_assert_eq!(alloc::format!("{index:?}"), alloc::format!("{table:?}"));
    }
}

/// `n` segments of `pages` pages each, none of which continues another, in the order of addresses or against it.
fn segments(n: u64, pages: u64, page: u64) -> Vec<(u64, u64)> {
    (0..n).map(|i| ((n - i) * (pages + 1) * page, pages * page)).collect()
}

#[test]
fn the_form_goes_by_the_segments() {
    let kind = |runs: &[(u64, u64)]| SgIndex::from_table(&table(runs)).unwrap().kind();
    assert_eq!(kind(&[]), SgKind::InPlace);
    assert_eq!(kind(&[(1, 1), (9, 7)]), SgKind::InPlace);
    assert_eq!(kind(&segments(4, 1, 4096)), SgKind::InPlace);
    assert_eq!(kind(&segments(5, 1, 4096)), SgKind::Flat);
    assert_eq!(kind(&segments(1000, 2, 4096)), SgKind::Rank);
    assert_eq!(kind(&segments(1000, 1, 2048)), SgKind::Buckets);
    // The mean is that of single pages, but the end of the long one would take long to find.
    let mut one_long = segments(1000, 1, 4096);
    one_long.push((1 << 30, 17 * 4096));
    assert_eq!(kind(&one_long), SgKind::Rank);
    one_long.last_mut().unwrap().1 = 16 * 4096;
    assert_eq!(kind(&one_long), SgKind::Flat);
    // The last segment is the lowest: page 16 of the buffer at frame 3. From there 2^32 - 1 pages, and one more.
    let far = |pages: u64| [segments(9, 2, 4096), Vec::from([((pages + 18 + 3 - 16) << 12, 4096)])].concat();
    assert_eq!(kind(&far(0xffff_ffff)), SgKind::Rank);
    assert_eq!(kind(&far(0x1_0000_0000)), SgKind::WideRank);
    // 2^32 pages and more do not fit into a block.
    let long = [segments(9, 2, 4096), Vec::from([(1 << 60, 1 << 45)])].concat();
    assert_eq!(kind(&long), SgKind::WideBuckets);
}

#[test]
fn size_is_as_promised() {
    for (n, pages) in [(100_000, 1), (20_000, 6), (5000, 44), (3, 100_000)] {
        let index = SgIndex::from_table(&table(&segments(n, pages, 1 << 14))).unwrap();
        let own = size_of::<SgIndex<PhysAddr>>();
        // A block is never cut.
        let promised = (n * pages).div_ceil(64) * 16 + n * 4;
        assert!(index.bytes() as u64 <= own as u64 + promised, "{:?}: {} of {promised}", index.kind(), index.bytes());
        assert!(own <= 112, "{own}");
    }
}

/// Large segments with a few odd ones among them, which once fell back to a binary search.
#[test]
fn odd_segments_among_large_ones() {
    let large = 2 << 20;
    for (odd, page) in [(1usize, 4096), (16, 4096), (700, 4096), (16, 1 << 14)] {
        let mut runs = segments(1024, large / page, page);
        for i in 0..odd {
            // One page each, or all of them in one place.
            let at = if odd == 700 { 500 } else { i * 61 % runs.len() };
            runs.insert(at, ((1 << 40) + i as u64 * 2 * page, page));
        }
        let (table, units) = (table(&runs), Units::new(&runs, page));
        let index = SgIndex::from_table(&table).unwrap();
        assert_eq!((index.kind(), index.granule()), (SgKind::Buckets, PageSize::new(page).unwrap()));
        assert!(index.bytes() <= 128 + table.segment_count() * 24, "{}", index.bytes());
        let mut start = 0;
        for (_, len) in &runs {
            for at in [start, start + len / 2, start + len - 1] {
                assert_eq!(index.segment_at(at), units.at(at), "{at:#x}");
            }
            start += len;
        }
        assert_eq!((index.segment_at(start), index.segment_at(u64::MAX)), (None, None));
        assert_eq!(index.segments().collect::<Vec<_>>(), table.segments().collect::<Vec<_>>());
    }
}

#[test]
fn refuses_what_wraps() {
    let segment = |(addr, len)| Segment { addr: PhysAddr::new(addr), len };
    let new = |runs: &[(u64, u64)]| SgIndex::try_new(runs.iter().copied().map(segment));
    let wraps = new(&[(0, 4), (u64::MAX - 1, 3)]).unwrap_err();
    assert_eq!(wraps, SgError::Wraps { addr: PhysAddr::new(u64::MAX - 1), len: 3 });
    assert_eq!(new(&[(0, u64::MAX), (7, 1)]).unwrap_err(), SgError::TooLong);
    let top = new(&[(u64::MAX - 1, 2), (0, 0), (0, 4)]).unwrap();
    assert_eq!((top.len(), top.segment_count()), (6, 2), "address 0 does not continue the top of the space");
    assert_eq!(top.segment_at(1), Some(SegmentAt { addr: PhysAddr::new(u64::MAX), left: 1 }));
}

#[test]
fn the_longest_buffer() {
    // 2^64 - 1 bytes, the last page of which would end at 2^64.
    let segment = |addr, len| Segment { addr: PhysAddr::new(addr), len };
    let one = SgIndex::try_new([segment(0, u64::MAX)]).unwrap();
    assert_eq!(one.segment_at(u64::MAX - 1).unwrap().left, 1);
    assert_eq!(one.segment_at(u64::MAX), None);
    assert_eq!(one.page_at(u64::MAX - 1, PageSize::SIZE_4K), None);
    let half = 1 << 63;
    let runs = [(half, half), (0, half / 2), (half, half / 2 - 1)];
    let table = table(&runs);
    for index in forms(&table) {
        assert_eq!(index.granule().log2(), 62);
        assert_eq!(index.segments().collect::<Vec<_>>(), table.segments().collect::<Vec<_>>(), "{:?}", index.kind());
        assert_eq!(index.segment_at(u64::MAX - 1).unwrap().left, 1);
    }
}
