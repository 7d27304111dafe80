//! Synthetic physical frames, whose free memory is fragmented on purpose.
//!
//! An unprivileged process cannot see frame numbers, so the software host makes up its own. Physical memory comes in
//! zones of 64 MiB, added as they are needed. A new zone is first strewn with frames that "somebody else" holds; what
//! is left between them are runs whose lengths depend on the fragmentation:
//!
//! * 0: no holes. Buffers are contiguous.
//! * 0.5: runs of 1 to 512 frames, uniform in their logarithm, as on a machine that has been up for a week.
//! * 1: every other frame is taken. No two frames of a buffer are neighbours.
//!
//! In between, the range of logarithms moves from [9, 18] at nearly 0 over [0, 9] at 0.5 to [0, 0] at 1.
//!
//! With fragmentation, allocation takes the runs as they come, shuffled, so that a buffer looks like the memory it came
//! from and does not skim off the longest runs.

use dmalane_addr::{PageSize, PhysAddr, RangeAllocator, SgTable, Span};

pub(super) const FRAME: u64 = 4096;
/// Frames per zone.
pub(super) const ZONE: u32 = 1 << 14;
/// The first frame's number: above 4 GiB, so that a truncated address is a wrong one.
const BASE: u64 = (4 << 30) / FRAME;

/// A frame, numbered from the first synthetic one.
type Frame = u32;

pub(super) struct Frames {
    /// The frames of zones that were not added yet are not free.
    free: RangeAllocator<PhysAddr>,
    /// Frames in zones.
    total: u32,
    limit: u32,
    fragmentation: f64,
    random: Random,
}

impl Frames {
    /// At most `limit` frames, rounded down to whole zones.
    pub(super) fn new(limit: u32, fragmentation: f64, seed: u64) -> Self {
        let limit = limit / ZONE * ZONE;
        let all = frames(0, limit.max(ZONE));
        let mut free = RangeAllocator::new(all, PageSize::SIZE_4K);
        free.exclude(all);
        Self { free, total: 0, limit, fragmentation: fragmentation.clamp(0.0, 1.0), random: Random(seed) }
    }

    pub(super) fn limit(&self) -> u64 {
        u64::from(self.limit)
    }

    pub(super) fn free_frames(&self) -> u64 {
        self.free.free_bytes() / FRAME
    }

    /// Takes `count` frames, or none.
    pub(super) fn allocate(&mut self, count: u64) -> Option<SgTable<PhysAddr>> {
        // Zones have holes, so this may still fail, but not after adding zone after zone for nothing.
        if count > self.free_frames() + u64::from(self.limit - self.total) {
            return None;
        }
        while self.free_frames() < count {
            self.add_zone()?;
        }
        let (mut runs, mut left) = (Vec::new(), count * FRAME);
        while left > 0 {
            let run = self.take(left);
            left -= run.len();
            runs.push(run);
        }
        if self.fragmentation > 0.0 {
            // In no order, as on a machine that has been up for a while (Fisher and Yates' shuffle).
            for i in (1..runs.len()).rev() {
                runs.swap(i, self.random.below(i as u64 + 1) as usize);
            }
        }
        let mut table = SgTable::new();
        runs.iter().try_for_each(|run| table.push(run.first(), run.len()))?;
        Some(table)
    }

    /// Gives frames back. The table came from [`Frames::allocate`].
    pub(super) fn release(&mut self, table: &SgTable<PhysAddr>) {
        for segment in table.segments() {
            let freed = Span::new(segment.addr, segment.len).map(|run| self.free.free(run));
            debug_assert!(matches!(freed, Some(Ok(()))), "{segment:?} freed twice");
        }
    }

    /// A run of at most `most` bytes. The caller knows that there is one.
    fn take(&mut self, most: u64) -> Span<PhysAddr> {
        if self.fragmentation == 0.0 {
            // As a kernel with much free memory gives it: in one piece that large pages fit.
            let align = if most >= PageSize::SIZE_2M.bytes() { PageSize::SIZE_2M } else { PageSize::SIZE_4K };
            if let Ok(run) = self.free.allocate(most, align) {
                return run;
            }
        }
        let first = self.free.free_ranges().next();
        let run = first.and_then(|run| Span::new(run.first(), run.len().min(most))).expect("frames are free");
        self.free.reserve(run).expect("it is free");
        run
    }

    fn add_zone(&mut self) -> Option<()> {
        if self.total >= self.limit {
            return None;
        }
        let (mut at, end) = (self.total, self.total + ZONE);
        self.total = end;
        while at < end {
            let run = self.draw_run().min(end - at);
            self.free.free(frames(at, run)).expect("it was of no zone");
            at += run + 1; // behind the frame that somebody else holds
        }
        Some(())
    }

    fn draw_run(&mut self) -> u32 {
        let f = self.fragmentation;
        if f == 0.0 {
            return ZONE;
        }
        let low = 9.0 * (1.0 - 2.0 * f).max(0.0);
        let width = 9.0 * (2.0 * (1.0 - f)).min(1.0);
        let exponent = low + width * (self.random.below(1 << 32) as f64 / (1u64 << 32) as f64);
        exponent.exp2() as u32
    }
}

fn frames(first: Frame, count: u32) -> Span<PhysAddr> {
    Span::new(PhysAddr::new((BASE + u64::from(first)) * FRAME), u64::from(count) * FRAME).expect("below 2^45")
}

/// The number of the frame that holds `addr`; `None` outside the synthetic memory.
pub(super) fn frame_of(addr: PhysAddr) -> Option<Frame> {
    let frame = (addr.bits() / FRAME).checked_sub(BASE)?;
    Frame::try_from(frame).ok()
}

/// SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n` (0 when `n` is 0).
    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fragmentation_sets_the_length_of_runs() {
        let mean = |f: f64| {
            let table = Frames::new(1 << 20, f, 1).allocate(4096).unwrap();
            4096 / table.segment_count()
        };
        assert_eq!(mean(0.0), 4096, "contiguous");
        assert_eq!(mean(1.0), 1, "single frames");
        let (quarter, half, most) = (mean(0.25), mean(0.5), mean(0.75));
        assert!(quarter > half && half > most && most >= 1, "{quarter} {half} {most}");
        assert!((4..200).contains(&half), "{half}");
    }

    #[test]
    fn the_same_seed_gives_the_same_frames() {
        for fragmentation in [0.5, 1.0] {
            let table = |seed| {
                let t = Frames::new(1 << 20, fragmentation, seed).allocate(1000).unwrap();
                t.segments().map(|segment| segment.addr).collect::<Vec<_>>()
            };
            assert_eq!(table(7), table(7));
            assert_ne!(table(7), table(8));
            assert!(!table(7).is_sorted());
        }
    }

    #[test]
    fn a_refusal_takes_nothing() {
        let mut frames = Frames::new(ZONE * 2, 0.5, 3);
        assert!(frames.allocate(u64::from(ZONE) * 2 + 1).is_none());
        assert_eq!(frames.free_frames(), 0, "a hopeless request adds no zone");
        assert!(frames.allocate(u64::from(ZONE) * 2).is_none(), "holes");
        let free = frames.free_frames();
        let all = frames.allocate(free).unwrap();
        assert!(frames.allocate(1).is_none());
        frames.release(&all);
        assert_eq!(frames.free_frames(), free);
        assert!(Frames::new(ZONE - 1, 0.0, 3).allocate(1).is_none(), "less than a zone");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn no_frame_is_handed_out_twice(
            f in prop_oneof![Just(0.0), Just(0.5), Just(1.0), 0.0..1.0f64],
            seed: u64,
            sizes in prop::collection::vec((1u64..3000, any::<bool>()), 1..40),
        ) {
            let mut frames = Frames::new(ZONE * 64, f, seed);
            let mut taken = std::collections::HashSet::new();
            let mut held = Vec::new();
            let pages = |t: &SgTable<PhysAddr>| {
                t.segments()
                    .flat_map(|s| (0..s.len / FRAME).map(move |i| s.addr.bits() / FRAME + i))
                    .collect::<Vec<_>>()
            };
            for (n, give_back) in sizes {
                let table = frames.allocate(n).unwrap();
                prop_assert_eq!(table.len(), n * FRAME);
                for p in pages(&table) {
                    prop_assert!(taken.insert(p));
                }
                held.push(table);
                if give_back {
                    let table = held.swap_remove(held.len() / 2);
                    for p in pages(&table) {
                        taken.remove(&p);
                    }
                    frames.release(&table);
                }
            }
            let before = frames.free_frames();
            let out: u64 = held.iter().map(|t| t.len() / FRAME).sum();
            for table in held.drain(..) {
                frames.release(&table);
            }
            prop_assert_eq!(frames.free_frames(), before + out);
        }
    }
}
