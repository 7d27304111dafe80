//! Buffers of 16 KiB pages as lists of segments: single pages, runs as a buddy allocator leaves them, one long run.

use dmalane::addr::{CardAddr, Segment};

use crate::mt19937::Mt19937;

pub const PAGE: u64 = 16 << 10;

/// How the pages of a buffer lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Layout {
    /// U: every page a segment.
    Single,
    /// B: runs of powers of two, 6 pages on average.
    Buddy,
    /// S: the same, 44 pages on average: a buffer of 4 GiB is 5962 runs.
    Long,
    /// A: one run of 2^24 pages, then single pages.
    OneLong,
}

impl Layout {
    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "U",
            Self::Buddy => "B",
            Self::Long => "S",
            Self::OneLong => "A",
        }
    }
}

/// A buffer of `count` segments.
pub fn of_segments(layout: Layout, count: usize) -> Vec<Segment<CardAddr>> {
    let mut random = Mt19937::new(count as u32);
    let lengths = (0..count).map(|i| match layout {
        Layout::OneLong if i == 0 => 1 << 24,
        _ => length(layout, &mut random),
    });
    place(lengths.collect(), &mut random)
}

/// A buffer of `pages` pages.
pub fn of_pages(layout: Layout, pages: u64) -> Vec<Segment<CardAddr>> {
    let mut random = Mt19937::new(pages as u32);
    let (mut lengths, mut left) = (Vec::new(), pages);
    while left > 0 {
        let n = length(layout, &mut random).min(left);
        lengths.push(n);
        left -= n;
    }
    if layout == Layout::Long {
        // The weights give a little fewer than the research page has; a buddy allocator halves the longest.
        let count = (pages * 5962).div_ceil(262_144).min(pages) as usize;
        while lengths.len() < count {
            let Some((at, &n)) = lengths.iter().enumerate().max_by_key(|(_, n)| **n) else { break };
            lengths[at] = n / 2;
            lengths.push(n - n / 2);
        }
    }
    place(lengths, &mut random)
}

/// A buffer of `count` blocks of 2 MiB, and among them `odd` single pages at equal distances.
pub fn blocks(count: usize, odd: usize) -> Vec<Segment<CardAddr>> {
    let mut lengths = vec![(2 << 20) / PAGE; count];
    for n in (0..odd).rev() {
        lengths.insert(n * count / odd + 1, 1);
    }
    place(lengths, &mut Mt19937::new(7))
}

/// Pages of the next run.
fn length(layout: Layout, random: &mut Mt19937) -> u64 {
    // How many runs of a hundred have 1, 2, 4, 8 pages and so on.
    let weights: &[u64] = match layout {
        Layout::Single | Layout::OneLong => &[100],
        Layout::Buddy => &[28, 24, 20, 13, 9, 6],
        Layout::Long => &[12, 12, 12, 12, 11, 11, 11, 10, 9],
    };
    let mut pick = random.below(100);
    for (order, &weight) in weights.iter().enumerate() {
        if pick < weight {
            return 1 << order;
        }
        pick -= weight;
    }
    1
}

/// Segments of these lengths, anywhere, none of which continues another.
fn place(lengths: Vec<u64>, random: &mut Mt19937) -> Vec<Segment<CardAddr>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    random.shuffle(&mut order);
    let mut segments = vec![Segment { addr: CardAddr::new(0), len: 0 }; lengths.len()];
    let mut frame: u64 = 1 << 16;
    for i in order {
        // Aligned to its length, as buddies are, with a page between.
        frame = (frame + 1).next_multiple_of(lengths[i].next_power_of_two());
        segments[i] = Segment { addr: CardAddr::new(frame * PAGE), len: lengths[i] * PAGE };
        frame += lengths[i];
    }
    segments
}

/// Pages of a buffer.
pub fn pages_of(segments: &[Segment<CardAddr>]) -> u64 {
    segments.iter().map(|s| s.len / PAGE).sum()
}
