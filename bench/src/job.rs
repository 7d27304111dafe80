//! The mappings of a job: scatter lists and their addresses.

use dmalane::addr::{PhysAddr, Segment};

pub const PAGE: u64 = 4096;
pub const BLOCK: u64 = 2 << 20;
/// Where the first list goes: a multiple of 1 GiB, so that only the lists decide what the tables look like.
pub const BASE: u64 = 1 << 39;

/// One call: `count` segments from `first` on, mapped from `at` on.
#[derive(Clone, Copy)]
pub struct Call {
    pub at: u64,
    pub first: usize,
    pub count: usize,
    pub len: u64,
}

/// Lists to map, one call each, into new tables.
pub struct Job {
    pub name: String,
    pub segments: Vec<Segment<PhysAddr>>,
    pub calls: Vec<Call>,
    /// Bytes of the leaves that the lists allow: 4 KiB, 2 MiB or 1 GiB.
    pub leaf: u64,
    /// True when every segment is one leaf.
    pub single: bool,
}

impl Job {
    /// The same list over and over, in calls that follow each other in the input space.
    pub fn new(name: &str, list: &[Segment<PhysAddr>], repeat: usize, leaf: u64) -> Self {
        let len = list.iter().map(|s| s.len).sum();
        let call = |k: usize| Call { at: BASE + k as u64 * len, first: k * list.len(), count: list.len(), len };
        Self {
            name: name.to_owned(),
            segments: list.iter().copied().cycle().take(list.len() * repeat).collect(),
            calls: (0..repeat).map(call).collect(),
            leaf,
            single: list.iter().all(|s| s.len == leaf),
        }
    }

    /// `pages` discrete pages, as often as it takes to make up 8192.
    pub fn discrete(name: &str, pages: usize) -> Self {
        Self::new(name, &discrete(pages, PAGE), 8192usize.div_ceil(pages), PAGE)
    }

    /// One page for each call, the places in no order.
    pub fn anywhere(name: &str, pages: usize) -> Self {
        let mut job = Self::discrete(name, 1);
        job.segments = discrete(pages, PAGE);
        let mut random = Random(7);
        let mut places: Vec<u64> = (0..pages as u64).collect();
        random.shuffle(&mut places);
        job.calls = (0..pages).map(|k| Call { at: BASE + places[k] * PAGE, first: k, count: 1, len: PAGE }).collect();
        job
    }

    pub fn list(&self, call: Call) -> &[Segment<PhysAddr>] {
        &self.segments[call.first..call.first + call.count]
    }

    pub fn bytes(&self) -> u64 {
        self.calls.iter().map(|c| c.len).sum()
    }

    /// Leaves in all: what the time is divided by.
    pub fn leaves(&self) -> u64 {
        self.bytes() / self.leaf
    }

    /// One address in every 4 KiB page or larger leaf, with where it leads.
    pub fn places(&self) -> impl Iterator<Item = (u64, u64)> {
        self.calls.iter().flat_map(move |&call| {
            let mut at = call.at;
            self.list(call).iter().flat_map(move |s| {
                let start = at;
                at += s.len;
                let offsets = (0..s.len).step_by(self.leaf as usize);
                // Not the first byte: an offset within the page must survive.
                offsets.map(move |o| (start + o + 0x128, s.addr.bits() + o + 0x128))
            })
        })
    }

    /// The tables of four levels that these lists cannot do without, the root included.
    pub fn least_tables(&self) -> usize {
        let (first, end) = (BASE, BASE + self.bytes());
        let tables = |shift: u32| ((end - 1) >> shift) - (first >> shift) + 1;
        let levels = [48, 39, 30, 21].into_iter().filter(|&shift| 1 << shift > self.leaf);
        levels.map(|shift| tables(shift) as usize).sum()
    }
}

/// Leaves in no order, none of which continues another.
pub fn discrete(count: usize, leaf: u64) -> Vec<Segment<PhysAddr>> {
    let mut random = Random(1);
    // Every second leaf of memory, from 4 GiB up.
    let mut places: Vec<u64> = (0..count as u64).map(|k| (4 << 30) + 2 * k * leaf).collect();
    random.shuffle(&mut places);
    places.into_iter().map(|p| Segment { addr: PhysAddr::new(p), len: leaf }).collect()
}

/// One segment whose distance to the input address rules out leaves larger than `leaf`.
pub fn contiguous(len: u64, leaf: u64) -> Vec<Segment<PhysAddr>> {
    vec![Segment { addr: PhysAddr::new((4 << 30) + leaf), len }]
}

/// Pages that continue each other from a multiple of 2 MiB on, each a segment.
pub fn joined(pages: u64) -> Vec<Segment<PhysAddr>> {
    (0..pages).map(|k| Segment { addr: PhysAddr::new((4 << 30) + k * PAGE), len: PAGE }).collect()
}

/// Segments of these lengths in pages, none of which continues another, in no order.
pub fn runs_of(lengths: &[u64]) -> Vec<Segment<PhysAddr>> {
    let mut next = (4u64 << 30) + PAGE;
    let mut list: Vec<_> = lengths
        .iter()
        .map(|pages| {
            let segment = Segment { addr: PhysAddr::new(next), len: pages * PAGE };
            next += (pages + 1) * PAGE;
            segment
        })
        .collect();
    Random(3).shuffle(&mut list);
    list
}

/// The research page's mixed list: 2106 entries that cover 8192 pages, most of them short, some long.
pub fn mixed() -> Vec<Segment<PhysAddr>> {
    let mut random = Random(5);
    let mut lengths: Vec<u64> = (0..2106)
        .map(|_| match random.below(100) {
            0..55 => 1,
            55..80 => 2 + random.below(3),
            80..95 => 4 + random.below(9),
            _ => 16 + random.below(17),
        })
        .collect();
    let mut total: u64 = lengths.iter().sum();
    while total != 8192 {
        let k = random.below(lengths.len() as u64) as usize;
        if total < 8192 {
            lengths[k] += 1;
            total += 1;
        } else if lengths[k] > 1 {
            lengths[k] -= 1;
            total -= 1;
        }
    }
    runs_of(&lengths)
}

/// xorshift64*: the same lists on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % limit
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}
