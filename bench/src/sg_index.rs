//! Finding a page of a buffer by its offset: list walk, the patch's binary search, the usual structures, ours.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use dmalane::addr::{CardAddr, PageSize, Segment, SgIndex, SgTable};

use crate::buffers::{self, Layout, PAGE, of_pages, of_segments, pages_of};
use crate::clock::{cpu_time, pin, time};
use crate::instructions;
use crate::mt19937::{self, Mt19937};
use crate::report::{Details, Report};

#[derive(clap::Args)]
pub struct Options {
    /// Rounds of the hot look-ups; the median counts
    #[arg(long, default_value_t = 21)]
    rounds: usize,

    /// Cold look-ups of each structure; the median counts
    #[arg(long, default_value_t = 101)]
    cold: usize,

    /// Also count instructions: run every structure once more under valgrind
    #[arg(long)]
    instructions: bool,
}

#[derive(clap::Args)]
pub struct One {
    /// U, B, S or A
    layout: String,
    /// The structure
    variant: String,
}

/// Segments of the buffers that are compared.
const SEGMENTS: usize = 262_144;
/// Look-ups in one sample, and of the list walk, which takes a quarter of a millisecond each.
const LOOKUPS: usize = 16_384;
const WALKS: usize = 64;

const PATCH: &str = "the posted patch: 24-byte entries, binary search";
const BTREE: &str = "BTreeMap";
const INDEX: &str = "ours: SgIndex";

/// The result: the address of a page, and the bytes to the end of its segment if the structure says so.
pub type Found = Option<(u64, u64)>;

/// A structure that finds pages.
pub trait Structure {
    fn name(&self) -> &'static str;

    /// Looks up one page. A structure that cannot tell where the segment ends gives the page.
    fn find(&self, offset: u64) -> Found;

    /// Looks up all, each after the one before has been found, and adds up the addresses.
    fn find_all(&self, offsets: &[u64]) -> u64;

    /// Bytes it takes; 0 where it does not tell.
    fn bytes(&self) -> usize;

    /// True when it says where the segment ends.
    fn tells_end(&self) -> bool {
        true
    }
}

/// The loop that is timed and counted. The next offset waits for what was found, by a zero that the compiler cannot
/// see.
#[inline(never)]
fn timed_look_ups(offsets: &[u64], find: impl Fn(u64) -> Found) -> u64 {
    let zero = std::hint::black_box(0);
    let (mut sum, mut last) = (0u64, 0);
    for &offset in offsets {
        let (addr, left) = find(offset ^ last & zero).unwrap_or_default();
        last = addr | left;
        sum = sum.wrapping_add(addr);
    }
    sum
}

macro_rules! structure {
    ($name:ident, $label:expr, $end:literal, |$s:ident, $offset:ident| $find:expr, $bytes:expr) => {
        impl Structure for $name {
            fn name(&self) -> &'static str {
                $label
            }
            fn find(&self, $offset: u64) -> Found {
                let $s = self;
                $find
            }
            fn find_all(&self, offsets: &[u64]) -> u64 {
                let $s = self;
                timed_look_ups(
                    offsets,
                    #[inline(always)]
                    |$offset| $find,
                )
            }
            fn bytes(&self) -> usize {
                let $s = self;
                $bytes
            }
            fn tells_end(&self) -> bool {
                $end
            }
        }
    };
}

/// The list as the driver has it: Linux's `struct scatterlist`, 32 bytes each, in pages that are chained by their last
/// entry, walked from the start as `sg_next` does.
pub struct Linear(Vec<[ListEntry; CHAINED]>);

const CHAINED: usize = 128;
/// The flags of the kernel's `page_link`: the entry is a link to the next page of entries; it is the last of all.
const CHAIN: u64 = 1;
const END: u64 = 2;

#[derive(Clone, Copy, Default)]
struct ListEntry {
    link: u64,
    _offset_and_length: u64,
    addr: u64,
    len: u64,
}

impl Linear {
    pub fn new(segments: &[Segment<CardAddr>]) -> Self {
        let mut pages: Vec<[ListEntry; CHAINED]> = Vec::new();
        for some in segments.chunks(CHAINED - 1) {
            let mut page = [ListEntry::default(); CHAINED];
            for (entry, s) in page.iter_mut().zip(some) {
                *entry = ListEntry { link: 0, _offset_and_length: s.len, addr: s.addr.bits(), len: s.len };
            }
            page[CHAINED - 1].link = (pages.len() as u64 + 1) << 2 | CHAIN;
            pages.push(page);
        }
        if let Some(page) = pages.last_mut() {
            page[(segments.len() - 1) % (CHAINED - 1)].link = END;
        }
        Self(pages)
    }

    /// Address and bytes left.
    #[inline]
    pub fn look_up(&self, offset: u64) -> Found {
        let (mut page, mut at, mut left) = (self.0.first()?, 0, offset);
        loop {
            let entry = page.get(at)?;
            if left < entry.len {
                return Some((entry.addr + left, entry.len - left));
            }
            left -= entry.len;
            if entry.link & END != 0 {
                return None;
            }
            at += 1;
            if let Some(next) = page.get(at)
                && next.link & CHAIN != 0
            {
                (page, at) = (self.0.get((next.link >> 2) as usize)?, 0);
            }
        }
    }

    fn bytes(&self) -> usize {
        size_of_val(self.0.as_slice())
    }
}

structure!(Linear, "linear: the list", true, |s, offset| s.look_up(offset), s.bytes());

/// The posted patch's: entries of 24 bytes {offset, address, length} in an array, `binary_search` over them.
pub struct BinarySearch(Vec<(u64, u64, u64)>);

impl BinarySearch {
    pub fn new(segments: &[Segment<CardAddr>]) -> Self {
        let mut start = 0;
        let entry = |s: &Segment<CardAddr>| {
            start += s.len;
            (start - s.len, s.addr.bits(), s.len)
        };
        Self(segments.iter().map(entry).collect())
    }

    /// Address and bytes left.
    #[inline]
    pub fn look_up(&self, offset: u64) -> Found {
        let at = match self.0.binary_search_by(|e| e.0.cmp(&offset)) {
            Ok(at) => at,
            Err(behind) => behind.checked_sub(1)?,
        };
        let &(start, addr, len) = self.0.get(at)?;
        (offset - start < len).then(|| (addr + (offset - start), len - (offset - start)))
    }
}

structure!(BinarySearch, PATCH, true, |s, offset| s.look_up(offset), s.0.len() * 24);

/// By the start of each segment. `rangemap` is a map like this one inside, too.
struct Map(BTreeMap<u64, (u64, u64)>);

impl Map {
    fn new(segments: &[Segment<CardAddr>]) -> Self {
        let mut start = 0;
        let entry = |s: &Segment<CardAddr>| {
            start += s.len;
            (start - s.len, (s.addr.bits(), s.len))
        };
        // One by one, in order, as a driver would fill it.
        let mut map = BTreeMap::new();
        map.extend(segments.iter().map(entry));
        Self(map)
    }
}

structure!(
    Map,
    BTREE,
    true,
    |s, offset| {
        let (start, (addr, len)) = s.0.range(..=offset).next_back()?;
        (offset - start < *len).then(|| (addr + (offset - start), len - (offset - start)))
    },
    {
        let _ = s;
        0
    }
);

/// A frame for each page.
struct Frames(Vec<u32>);

structure!(
    Frames,
    "flat: u32 a page (no end of segment)",
    false,
    |s, offset| s.0.get((offset / PAGE) as usize).map(|&f| (u64::from(f) * PAGE + offset % PAGE, 0)),
    s.0.len() * 4
);

struct Index(SgIndex<CardAddr>);

structure!(Index, INDEX, true, |s, offset| s.0.segment_at(offset).map(|f| (f.addr.bits(), f.left)), s.0.bytes());

/// The address only, as a bind of one page asks for it.
struct IndexPage(SgIndex<CardAddr>);

structure!(
    IndexPage,
    "ours: SgIndex, page_at (no end of segment)",
    false,
    |s, offset| s.0.page_at(offset, PageSize::SIZE_16K).map(|a| (a.bits(), 0)),
    s.0.bytes()
);

/// All structures over these segments.
fn structures(segments: &[Segment<CardAddr>]) -> Result<Vec<Box<dyn Structure>>, Box<dyn std::error::Error>> {
    let index = SgIndex::try_new(segments.iter().copied())?;
    let frames = segments.iter().flat_map(|s| (0..s.len / PAGE).map(|i| (s.addr.bits() / PAGE + i) as u32));
    Ok(vec![
        Box::new(Linear::new(segments)),
        Box::new(BinarySearch::new(segments)),
        Box::new(Map::new(segments)),
        Box::new(Frames(frames.collect())),
        Box::new(Index(index.clone())),
        Box::new(IndexPage(index)),
    ])
}

/// Offsets to look up: pages at random, as the original program draws them. In a buffer with one long run that would be
/// that run nearly always, so there the segment is drawn first.
fn picks(layout: Layout, segments: &[Segment<CardAddr>], count: usize) -> Vec<u64> {
    let mut random = Mt19937::new(42);
    let pages = pages_of(segments);
    if layout != Layout::OneLong {
        return (0..count).map(|_| PAGE * random.below(pages)).collect();
    }
    let starts: Vec<u64> = segments.iter().scan(0, |end, s| Some(std::mem::replace(end, *end + s.len))).collect();
    let pick = |_| {
        let at = random.below(starts.len() as u64) as usize;
        starts[at] + PAGE * random.below(segments[at].len / PAGE)
    };
    (0..count).map(pick).collect()
}

/// Every structure gives the right page, and where its segment ends, for each offset and nothing beyond the end.
fn check(all: &[Box<dyn Structure>], segments: &[Segment<CardAddr>], offsets: &[u64]) -> Result<(), String> {
    let starts: Vec<u64> = segments.iter().scan(0, |end, s| Some(std::mem::replace(end, *end + s.len))).collect();
    for structure in all {
        // The walk is the reference; it need not be checked at every offset.
        let few = if structure.name().starts_with("linear") { WALKS } else { offsets.len() };
        for &offset in &offsets[..few.min(offsets.len())] {
            let at = starts.partition_point(|&s| s <= offset) - 1;
            let within = offset - starts[at];
            let want = (segments[at].addr.bits() + within, segments[at].len - within);
            let right = |(addr, left)| addr == want.0 && (left == want.1 || !structure.tells_end());
            let found = structure.find(offset);
            if !found.is_some_and(right) {
                return Err(format!("{}: offset {offset:#x} gives {found:x?}, not {want:x?}", structure.name()));
            }
        }
        let end = pages_of(segments) * PAGE;
        if structure.find(end).is_some() {
            return Err(format!("{} finds what lies beyond the end", structure.name()));
        }
    }
    Ok(())
}

/// Medians by (layout, structure): hot and cold.
type Medians = HashMap<(Layout, &'static str), (f64, f64)>;

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    mt19937::check()?;
    let mut report = Report::new("sg-index");
    pin();
    let mut medians = Medians::new();
    let mut size = 0.0f64;
    for layout in [Layout::Single, Layout::Buddy, Layout::OneLong] {
        let segments = of_segments(layout, SEGMENTS);
        let all = structures(&segments)?;
        let offsets = picks(layout, &segments, LOOKUPS);
        check(&all, &segments, &offsets)?;
        let hot = hot(&all, &offsets, options.rounds);
        let cold = cold(&all, &offsets, options.cold);
        for (k, structure) in all.iter().enumerate() {
            let (name, n) = (structure.name(), look_ups(structure.as_ref()));
            let mut details = Details { items: Some(n as u64), ..Details::default() };
            let bytes = match structure.bytes() {
                0 => memory_of(layout)?,
                bytes => bytes as f64,
            };
            details.bytes_per_item = Some(bytes / SEGMENTS as f64);
            if options.instructions {
                let count = instructions::count("*timed_look_ups*", &["one-sg-index", layout.name(), name])?;
                details.instructions_per_item = Some(count as f64 / n as f64);
            }
            let case = |how: &str| format!("{} {how}", layout.name());
            let warm = report.detailed_row(&case("hot"), name, n as u64 * PAGE, &hot[k], details);
            let one = Details { items: Some(1), ..Details::default() };
            let first = report.detailed_row(&case("cold"), name, PAGE, &cold[k], one);
            medians.insert((layout, name), (warm / n as f64, first));
            if name == INDEX {
                // 0.25 bytes a page, where a block of 64 pages is never cut, and 4 a segment. The object itself is
                // apart.
                let goal = pages_of(&segments).div_ceil(64) as f64 * 16.0 + segments.len() as f64 * 4.0;
                size = size.max((bytes - size_of::<SgIndex<CardAddr>>() as f64) / goal);
                report.note(layout.name(), "SgIndex, bytes", bytes);
            }
        }
    }
    let ratio = |layout, cold: bool| {
        let of = |name| medians.get(&(layout, name)).map_or(f64::NAN, |m| if cold { m.1 } else { m.0 });
        of(PATCH) / of(INDEX)
    };
    report.at_least("U, hot: the posted patch / ours", 8.0, ratio(Layout::Single, false));
    report.at_least("B, hot: the posted patch / ours", 5.0, ratio(Layout::Buddy, false));
    for layout in [Layout::Single, Layout::Buddy, Layout::OneLong] {
        report.at_least(&format!("{}, cold: the posted patch / ours", layout.name()), 2.0, ratio(layout, true));
    }
    report.at_most("bytes of the index / (0.25 a page + 4 a segment), the worst", 1.0, size);
    odd_segments(&mut report, options.rounds)?;
    by_size(&mut report)?;
    Ok(report)
}

/// Blocks of 2 MiB, a few odd pages among them: nothing larger than a page is aligned any more.
fn odd_segments(report: &mut Report, rounds: usize) -> Result<(), Box<dyn std::error::Error>> {
    const ODD: [usize; 5] = [0, 1, 16, 256, 2048];
    let mut cases = Vec::new();
    for odd in ODD {
        let segments = buffers::blocks(8192, odd);
        let index = SgIndex::try_new(segments.iter().copied())?;
        let bytes = index.bytes();
        let all: Vec<Box<dyn Structure>> = vec![Box::new(BinarySearch::new(&segments)), Box::new(Index(index))];
        let offsets = picks(Layout::Single, &segments, LOOKUPS);
        check(&all, &segments, &offsets)?;
        cases.push((format!("8192 blocks of 2 MiB, {odd} odd pages"), bytes, all, offsets));
    }
    let mut samples = vec![vec![Vec::new(); 2]; cases.len()];
    for _ in 0..rounds {
        for ((_, _, all, offsets), samples) in cases.iter().zip(&mut samples) {
            for (one, samples) in hot(all, offsets, 1).into_iter().zip(samples) {
                samples.extend(one);
            }
        }
    }
    let mut medians = Vec::new();
    for ((case, bytes, all, _), samples) in cases.iter().zip(&samples) {
        for (structure, samples) in all.iter().zip(samples) {
            let details = Details { items: Some(LOOKUPS as u64), ..Details::default() };
            let median = report.detailed_row(case, structure.name(), LOOKUPS as u64 * PAGE, samples, details);
            if structure.name() == INDEX {
                medians.push(median);
                report.note(case, "SgIndex, bytes", *bytes as f64);
            }
        }
    }
    for (odd, median) in ODD.iter().zip(&medians).skip(1) {
        report.at_most(&format!("8192 blocks of 2 MiB: {odd} odd pages / none"), 2.0, median / medians[0]);
    }
    Ok(())
}

fn look_ups(structure: &dyn Structure) -> usize {
    if structure.name().starts_with("linear") { WALKS } else { LOOKUPS }
}

/// Samples of all look-ups in a row. Of two goes the second counts.
fn hot(all: &[Box<dyn Structure>], offsets: &[u64], rounds: usize) -> Vec<Vec<f64>> {
    let mut samples = vec![Vec::new(); all.len()];
    for round in 0..rounds {
        for turn in 0..all.len() {
            let k = (round + turn) % all.len();
            let offsets = &offsets[..look_ups(all[k].as_ref())];
            std::hint::black_box(all[k].find_all(offsets));
            samples[k].push(cpu_time(|| {
                std::hint::black_box(all[k].find_all(offsets));
            }));
        }
    }
    samples
}

/// Samples of one look-up each with nothing in the caches, less what looking at the clock takes.
fn cold(all: &[Box<dyn Structure>], offsets: &[u64], count: usize) -> Vec<Vec<f64>> {
    let evict = crate::memory::Evict::new();
    let mut samples = vec![Vec::new(); all.len()];
    let mut clock: Vec<f64> = (0..1001).map(|_| time(|| ())).collect();
    clock.sort_by(f64::total_cmp);
    let clock = clock[clock.len() / 2];
    for &offset in &offsets[..count.min(offsets.len())] {
        for (structure, samples) in all.iter().zip(&mut samples) {
            let start = Instant::now();
            std::hint::black_box(structure.find(std::hint::black_box(0)));
            let _ = start.elapsed();
            evict.run(); // its code, too
            let seconds = time(|| {
                std::hint::black_box(structure.find(std::hint::black_box(offset)));
            });
            samples.push((seconds - clock).max(0.0));
        }
    }
    samples
}

/// The memory of a map, measured in a process that makes nothing else.
fn memory_of(layout: Layout) -> Result<f64, Box<dyn std::error::Error>> {
    crate::memory::of(&["one-sg-index", layout.name(), "bytes"])
}

/// The look-ups of one structure, for callgrind; or the bytes of the map.
pub fn one(options: &One) -> Result<(), Box<dyn std::error::Error>> {
    let layouts = [Layout::Single, Layout::Buddy, Layout::Long, Layout::OneLong];
    let layout = layouts.into_iter().find(|l| l.name() == options.layout).ok_or("no such layout")?;
    let segments = of_segments(layout, SEGMENTS);
    if options.variant == "bytes" {
        let before = crate::memory::resident();
        let map = Map::new(&segments);
        println!("{}", crate::memory::resident() - before);
        std::hint::black_box(map);
        return Ok(());
    }
    let all = structures(&segments)?;
    let structure = all.iter().find(|s| s.name() == options.variant).ok_or("no such structure")?;
    let offsets = picks(layout, &segments, look_ups(structure.as_ref()));
    std::hint::black_box(structure.find_all(&offsets));
    Ok(())
}

/// From which size on an index is worth having: what it costs to make, and what it saves.
fn by_size(report: &mut Report) -> Result<(), Box<dyn std::error::Error>> {
    for layout in [Layout::Single, Layout::Buddy] {
        for pages in [1u64, 4, 8, 16, 32, 64, 256, 1024, 4096, 16_384, 65_536, 262_144] {
            let segments = of_pages(layout, pages);
            let offsets = picks(layout, &segments, 4096);
            let walks = (1 << 22) / segments.len().max(1 << 10);
            let mut table = SgTable::new();
            for s in &segments {
                table.push(s.addr, s.len).ok_or("longer than the address space")?;
            }
            let index = SgIndex::from_table(&table)?;
            let bytes = index.bytes();
            let all: [Box<dyn Structure>; 3] =
                [Box::new(Linear::new(&segments)), Box::new(BinarySearch::new(&segments)), Box::new(Index(index))];
            check(&all, &segments, &offsets)?;
            let makes = ((1 << 18) / segments.len()).clamp(1, 4096);
            let mut samples: [Vec<f64>; 4] = Default::default();
            for _ in 0..11 {
                for (structure, samples) in all.iter().zip(&mut samples) {
                    let linear = structure.name().starts_with("linear");
                    let offsets = &offsets[..if linear { walks.min(offsets.len()) } else { offsets.len() }];
                    std::hint::black_box(structure.find_all(offsets));
                    let seconds = cpu_time(|| {
                        std::hint::black_box(structure.find_all(offsets));
                    });
                    samples.push(seconds / offsets.len() as f64);
                }
                let seconds = cpu_time(|| {
                    for _ in 0..makes {
                        std::hint::black_box(SgIndex::from_table(std::hint::black_box(&table)).is_ok());
                    }
                });
                samples[3].push(seconds / makes as f64);
            }
            let case = format!("{} {pages} pages", layout.name());
            let details = Details { items: Some(1), ..Details::default() };
            let steps = Some(segments.len() as u64);
            let medians: Vec<f64> = ["linear", "the posted patch", "ours", "ours: make the index"]
                .iter()
                .zip(&samples)
                .map(|(name, samples)| {
                    let details = match *name {
                        "ours" => Details { bytes_per_item: Some(bytes as f64), ..details },
                        "ours: make the index" => Details { steps, ..details },
                        _ => details,
                    };
                    report.detailed_row(&case, name, PAGE, samples, details)
                })
                .collect();
            report.note(&case, "look-ups after which making it has paid, against the list", {
                (medians[3] / (medians[0] - medians[2]).max(0.0)).ceil()
            });
        }
    }
    Ok(())
}
