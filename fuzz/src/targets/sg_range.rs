//! Range allocation against one flag per page, then scatter-gather tables against one address per byte.

use dmalane_addr::{Iova, PageSize, PhysAddr, RangeAllocator, SgIndex, SgTable, Span};
use arbitrary::Arbitrary;

use crate::structured;

/// Pages that the allocator has to give.
const PAGES: usize = 96;

#[derive(Arbitrary, Debug)]
enum RangeOp {
    Allocate {
        pages: u8,
        align_log2: u8,
    },
    Reserve {
        page: u8,
        pages: u8,
    },
    Free {
        page: u8,
        pages: u8,
    },
    /// Neither a whole page nor a page boundary.
    Crooked {
        addr: u64,
        len: u64,
    },
}

#[derive(Arbitrary, Debug)]
struct Input {
    /// The allocator's pages are the first of the space, or the last ones below its top.
    at_the_top: bool,
    ranges: Vec<RangeOp>,
    /// Address and length of each segment, in bytes. Small ones, so that neighbours meet.
    segments: Vec<(u8, u8)>,
    /// Sub-ranges to ask for.
    questions: Vec<(u16, u16)>,
}

/// Runs the target on one input.
pub fn target(bytes: &[u8]) {
    let Some(input) = structured::<Input>(bytes) else { return };
    ranges(&input);
    tables(&input);
}

fn ranges(input: &Input) {
    let page = PageSize::SIZE_4K;
    let bytes = page.bytes();
    let base = if input.at_the_top { (PAGES as u64 * bytes).wrapping_neg() } else { 0 };
    let span = |first: usize, pages: usize| {
        let first = base.checked_add(first as u64 * bytes)?;
        Span::new(Iova::new(first), pages as u64 * bytes)
    };
    let mut allocator = RangeAllocator::new(span(0, PAGES).unwrap(), page);
    let mut taken = [false; PAGES];
    // The pages of a span that lies within, else none.
    let within = |first: usize, pages: usize| (pages > 0 && first + pages <= PAGES).then_some(first..first + pages);

    for op in input.ranges.iter().take(200) {
        match *op {
            RangeOp::Allocate { pages, align_log2 } => {
                let pages = pages as usize % (PAGES + 2);
                let Some(align) = PageSize::from_log2(align_log2 % 20) else { continue };
                let fits = |first: &usize| {
                    (base + *first as u64 * bytes).is_multiple_of(align.bytes())
                        && within(*first, pages).is_some_and(|r| taken[r].iter().all(|t| !t))
                };
                let possible = (0..PAGES).any(|first| fits(&first));
                match allocator.allocate(pages as u64 * bytes, align) {
                    Ok(got) => {
                        assert!(got.is_aligned(page) && got.first().bits().is_multiple_of(align.bytes()));
                        assert_eq!(got.len(), pages as u64 * bytes);
                        let first = ((got.first().bits() - base) / bytes) as usize;
                        assert!(fits(&first), "{got} is taken or outside");
                        taken[first..first + pages].fill(true);
                    }
                    Err(e) => assert!(!possible, "{e}, though there is room"),
                }
            }
            RangeOp::Reserve { page, pages } => {
                let (first, pages) = (page as usize, pages as usize);
                let Some(asked) = span(first, pages) else { continue };
                let free = within(first, pages).is_some_and(|r| taken[r].iter().all(|t| !t));
                assert_eq!(allocator.reserve(asked).is_ok(), free);
                if free {
                    taken[first..first + pages].fill(true);
                }
            }
            RangeOp::Free { page, pages } => {
                let (first, pages) = (page as usize, pages as usize);
                let Some(asked) = span(first, pages) else { continue };
                let held = within(first, pages).is_some_and(|r| taken[r].iter().all(|t| *t));
                assert_eq!(allocator.free(asked).is_ok(), held);
                if held {
                    taken[first..first + pages].fill(false);
                }
            }
            RangeOp::Crooked { addr, len } => {
                let Some(asked) = Span::new(Iova::new(addr), len) else { continue };
                if !asked.is_aligned(page) {
                    assert!(allocator.reserve(asked).is_err() && allocator.free(asked).is_err());
                    assert!(len.is_multiple_of(bytes) || allocator.allocate(len, page).is_err());
                }
            }
        }
        let free = taken.iter().filter(|t| !**t).count() as u64 * bytes;
        assert_eq!(allocator.free_bytes(), free);
        let longest = taken.split(|t| *t).map(<[bool]>::len).max().unwrap_or(0);
        assert_eq!(allocator.largest_free(), longest as u64 * bytes);
        let listed: Vec<_> =
            allocator.free_ranges().map(|r| ((r.first().bits() - base) / bytes, r.len() / bytes)).collect();
        assert_eq!(listed, free_runs(&taken));
    }
}

/// First page and length of each run of free pages.
fn free_runs(taken: &[bool]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (page, _) in taken.iter().enumerate().filter(|(_, t)| !**t) {
        match runs.last_mut() {
            Some((first, n)) if *first + *n == page as u64 => *n += 1,
            _ => runs.push((page as u64, 1)),
        }
    }
    runs
}

fn tables(input: &Input) {
    let mut table = SgTable::new();
    // The reference: where each byte lives.
    let mut bytes: Vec<u64> = Vec::new();
    for &(addr, len) in input.segments.iter().take(64) {
        table.push(PhysAddr::new(addr.into()), len.into()).unwrap();
        bytes.extend((0..u64::from(len)).map(|i| u64::from(addr) + i));
    }
    assert_eq!(table.push(PhysAddr::new(u64::MAX), 2), None, "it wraps");
    assert_eq!(table.len(), bytes.len() as u64);
    assert_eq!(table.is_empty(), bytes.is_empty());
    assert_eq!(table.segment_count(), table.segments().count());
    let flat = |s: dmalane_addr::Segment<PhysAddr>| (0..s.len).map(move |i| s.addr.bits() + i);
    assert!(table.segments().flat_map(flat).eq(bytes.iter().copied()));
    let breaks = bytes.windows(2).filter(|w| w[1] != w[0] + 1).count();
    assert_eq!(table.segment_count(), if bytes.is_empty() { 0 } else { breaks + 1 }, "neighbours merge");

    // Bytes make an index of one form, pages one of another.
    let mut pages = SgTable::new();
    for s in table.segments() {
        pages.push(PhysAddr::new(s.addr.bits() * 4096), s.len * 4096).unwrap();
    }
    let indices = [&table, &pages].map(|table| SgIndex::from_table(table).unwrap());
    for (index, table) in indices.iter().zip([&table, &pages]) {
        assert_eq!((index.len(), index.segment_count()), (table.len(), table.segment_count()));
        assert!(index.segments().eq(table.segments()));
    }

    // A byte of the reference, and how many follow it in memory.
    let found = |at: u64| {
        let addr = *bytes.get(at as usize)?;
        let more = bytes[at as usize..].windows(2).take_while(|w| w[1] == w[0] + 1).count() as u64;
        Some((addr, more + 1))
    };
    for &(start, end) in input.questions.iter().take(64) {
        let (start, end) = (u64::from(start), u64::from(end));
        for (index, unit) in indices.iter().zip([1, 4096]) {
            // The first byte of one unit, and the last of another.
            for (at, low) in [(start, 0), (end.saturating_sub(1), unit - 1)] {
                let ours = index.segment_at(at * unit + low).map(|s| (s.addr.bits(), s.left));
                assert_eq!(ours, found(at).map(|(addr, units)| (addr * unit + low, units * unit - low)), "{at}");
            }
            let units = |s: dmalane_addr::Segment<PhysAddr>| flat(s).step_by(unit as usize).map(move |a| a / unit);
            match index.runs(start * unit..end * unit) {
                Some(runs) => assert!(runs.flat_map(units).eq(bytes[start as usize..end as usize].iter().copied())),
                None => assert!(start > end || end > bytes.len() as u64),
            }
        }
    }
}
