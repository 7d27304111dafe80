//! Where on a device the buffers of a phase lie.

use dmalane_addr::{CardAddr, Span};

use crate::error::ValidateError;
use crate::settings::Phase;

/// The longest stripe: as long as `--placement hbm` makes them.
const STRIPE: u64 = 2 << 20;
const PAGE: u64 = 4096;

/// The memories of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memories {
    Card {
        ddr: Span<CardAddr>,
        hbm: [Span<CardAddr>; 2],
    },
    /// One memory, or none.
    One(Option<Span<CardAddr>>),
}

/// How buffers are laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub memories: Memories,
    /// First byte of each memory that is used.
    pub offset: u64,
    /// Bytes between positions; `None` for packed buffers.
    pub stride: Option<u64>,
    /// Bytes from the region of even positions to that of odd ones; `Some(None)` for half of the memory.
    pub paired: Option<Option<u64>>,
}

impl Layout {
    /// The places of the buffer at a position: one, or two where it crosses from one half of HBM to the other.
    pub fn at_position(
        &self,
        phase: Phase,
        position: u64,
        positions: u64,
        len: u64,
    ) -> Result<Vec<(CardAddr, u64)>, ValidateError> {
        let (memory, name, first, second) = match (phase, self.memories) {
            (Phase::Device, Memories::One(memory)) => (memory, "the device", memory, None),
            (Phase::Ddr, Memories::Card { ddr, .. }) => (Some(ddr), "DDR", Some(ddr), None),
            (Phase::Hbm, Memories::Card { hbm, .. }) => (Some(hbm[0]), "HBM", Some(hbm[0]), Some(hbm[1])),
            (phase, _) => return Err(ValidateError::NoMemory(phase)),
        };
        let first_len = memory.map_or(0, |m| m.len());
        let have = first_len.saturating_add(second.map_or(0, |m: Span<CardAddr>| m.len()));
        let (at, end) = self.fitting(name, position, positions, len, have)?;
        let within = |span: Option<Span<CardAddr>>, at: u64| CardAddr::new(span.map_or(0, |s| s.first().bits()) + at);
        Ok(match () {
            () if end <= first_len => vec![(within(first, at), len)],
            () if at >= first_len => vec![(within(second, at - first_len), len)],
            () => vec![(within(first, at), first_len - at), (within(second, 0), end - first_len)],
        })
    }

    /// As [`Self::offset_of`], where the buffer fits into the memory.
    fn fitting(
        &self,
        memory: &'static str,
        position: u64,
        positions: u64,
        len: u64,
        have: u64,
    ) -> Result<(u64, u64), ValidateError> {
        match self.offset_of(position, positions, len, (memory, have))? {
            (_, needed) if needed > have => Err(ValidateError::TooSmall { memory, needed, have }),
            place => Ok(place),
        }
    }

    /// Where in a memory of so many bytes the buffer at a position begins and ends.
    fn offset_of(
        &self,
        position: u64,
        positions: u64,
        len: u64,
        (memory, have): (&'static str, u64),
    ) -> Result<(u64, u64), ValidateError> {
        let stride = self.stride.unwrap_or(len);
        let end = |index: u64| {
            let at = index.checked_mul(stride)?.checked_add(self.offset)?;
            Some((at, at.checked_add(len)?))
        };
        let too_small = || ValidateError::TooSmall { memory, needed: u64::MAX, have };
        let Some(region) = self.paired else {
            return end(position).ok_or_else(too_small);
        };
        let region = region.unwrap_or(have / 2 / PAGE * PAGE);
        let last = end(positions.div_ceil(2).saturating_sub(1)).map_or(u64::MAX, |(_, end)| end);
        if last > region {
            return Err(ValidateError::TooSmall { memory: "the region of a channel", needed: last, have: region });
        }
        // Both fit into the region, whose sum is checked.
        let (at, to) = end(position / 2).ok_or_else(too_small)?;
        let base = region * (position % 2);
        to.checked_add(base).map(|to| (at + base, to)).ok_or_else(too_small)
    }

    /// Bytes that buffers of these lengths at all positions reach to, from the start of a memory.
    pub fn end(&self, positions: u64, len: u64) -> Result<u64, ValidateError> {
        let memory = ("the memory", self.memories.least());
        let mut ends = (0..positions).map(|position| Ok(self.offset_of(position, positions, len, memory)?.1));
        ends.try_fold(0, |most, end: Result<u64, ValidateError>| Ok(most.max(end?)))
    }

    /// The places of buffer `slot` of `slots`, in order, packed and in HBM striped.
    pub fn places(&self, phase: Phase, slot: u64, slots: u64, len: u64) -> Result<Vec<(CardAddr, u64)>, ValidateError> {
        match (phase, self.memories) {
            (Phase::Hbm, Memories::Card { hbm, .. }) => self.hbm(hbm, slot, slots, len),
            (Phase::Both, Memories::Card { .. }) => {
                // Whole pages to each; of a single one, every other buffer's to either.
                let first = (len / 2).next_multiple_of(PAGE).min(len);
                let mut places = match (first == len, slot / 2 % 2) {
                    (true, 1) => return self.places(Phase::Ddr, slot, slots, len),
                    _ => self.places(Phase::Hbm, slot, slots, first)?,
                };
                if first < len {
                    places.extend(self.places(Phase::Ddr, slot, slots, len - first)?);
                }
                Ok(places)
            }
            (phase, _) => self.at_position(phase, slot, slots, len),
        }
    }

    fn hbm(
        &self,
        halves: [Span<CardAddr>; 2],
        slot: u64,
        slots: u64,
        len: u64,
    ) -> Result<Vec<(CardAddr, u64)>, ValidateError> {
        let half = halves[0].len().min(halves[1].len());
        // A buffer of two pages or more lies in both halves.
        let stripe = (len / 2 / PAGE * PAGE).clamp(PAGE, STRIPE);
        let (mut at, end) = self.fitting("HBM", slot, slots, len, 2 * half)?;
        let mut places = Vec::new();
        while at < end {
            let n = (stripe - at % stripe).min(end - at);
            let (number, within) = (at / stripe, at % stripe);
            let offset = number / 2 * stripe + within;
            if offset + n > half {
                return Err(ValidateError::TooSmall { memory: "a half of HBM", needed: offset + n, have: half });
            }
            places.push((CardAddr::new(halves[(number % 2) as usize].first().bits() + offset), n));
            at += n;
        }
        Ok(places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn card(ddr: u64, hbm: u64) -> Memories {
        let span = |first, len| Span::new(CardAddr::new(first), len).unwrap();
        let base = 1 << 38;
        Memories::Card { ddr: span(0, ddr), hbm: [span(base, hbm / 2), span(base + hbm / 2, hbm / 2)] }
    }

    proptest! {
        #[test]
        fn no_two_buffers_touch_and_all_lie_in_their_memory(
            pages in 1u64..2000, slots in 1u64..9, offset in 0u64..100, phase in 0usize..3,
        ) {
            let memories = card(256 << 20, 256 << 20);
            let layout = Layout { memories, offset: offset * PAGE, stride: None, paired: None };
            let phase = [Phase::Hbm, Phase::Ddr, Phase::Both][phase];
            let (slots, len) = (2 * slots, pages * PAGE);
            let all: Result<Vec<_>, _> = (0..slots).map(|slot| layout.places(phase, slot, slots, len)).collect();
            let Ok(all) = all else { return Ok(()) };
            let Memories::Card { ddr, hbm } = memories else { unreachable!() };
            let mut spans = Vec::new();
            for places in &all {
                prop_assert_eq!(places.iter().map(|p| p.1).sum::<u64>(), len);
                for (at, n) in places {
                    let span = Span::new(*at, *n).unwrap();
                    prop_assert!(hbm.iter().chain([&ddr]).any(|m| m.covers(&span)), "{}", span);
                    prop_assert!(phase == Phase::Both || ddr.covers(&span) == (phase == Phase::Ddr));
                    spans.push(span);
                }
                let halves = hbm.iter().filter(|h| places.iter().any(|(at, _)| h.contains(*at))).count();
                prop_assert!(phase != Phase::Hbm || pages < 2 || halves == 2, "striped over both halves");
            }
            spans.sort_by_key(|s| s.first());
            prop_assert!(spans.windows(2).all(|w| w[0].last() < w[1].first()), "{:?}", spans);
        }
    }

    proptest! {
        #[test]
        fn buffers_at_positions_lie_apart_in_one_piece(
            pages in 1u64..3000, stride in 0u64..5000, slots in 1u64..9, offset in 0u64..100,
            region in proptest::option::of(proptest::option::of(1u64..70000)), hbm: bool,
        ) {
            let memories = card(256 << 20, 256 << 20);
            let (len, stride) = (pages * PAGE, (pages + stride) * PAGE);
            let paired = region.map(|stride| stride.map(|pages| pages * PAGE));
            let layout = Layout { memories, offset: offset * PAGE, stride: Some(stride), paired };
            let phase = if hbm { Phase::Hbm } else { Phase::Ddr };
            let all: Result<Vec<_>, _> =
                (0..2 * slots).map(|position| layout.at_position(phase, position, 2 * slots, len)).collect();
            let Ok(all) = all else { return Ok(()) };
            let base = if hbm { 1 << 38 } else { 0 };
            let region = paired.map(|region| region.unwrap_or(128 << 20));
            let mut ends = Vec::new();
            for (position, places) in (0..).zip(&all) {
                let at = match region {
                    Some(region) => position % 2 * region + position / 2 * stride,
                    None => position * stride,
                };
                prop_assert_eq!(places[0].0.bits(), base + offset * PAGE + at);
                prop_assert_eq!(places.iter().map(|p| p.1).sum::<u64>(), len);
                prop_assert!(places.windows(2).all(|w| w[0].0.bits() + w[0].1 == w[1].0.bits()));
                ends.push((places[0].0.bits(), places[0].0.bits() + len));
            }
            ends.sort_unstable();
            prop_assert!(ends.windows(2).all(|w| w[0].1 <= w[1].0), "{:?}", ends);
            prop_assert!(ends.iter().all(|(_, end)| *end <= base + (256 << 20)));
        }
    }

    #[test]
    fn positions_that_do_not_fit_are_refused() {
        let layout = |stride, paired| Layout { memories: card(64 << 20, 64 << 20), offset: PAGE, stride, paired };
        let at = |layout: Layout, position| layout.at_position(Phase::Hbm, position, 4, 1 << 20);
        assert_eq!(
            at(layout(Some(2 << 20), None), 3).unwrap(),
            [(CardAddr::new((1 << 38) + (6 << 20) + 4096), 1 << 20)]
        );
        let crosses = at(layout(Some(31 << 20), None), 1).unwrap();
        assert_eq!(
            crosses,
            [
                (CardAddr::new((1 << 38) + (31 << 20) + 4096), (1 << 20) - 4096),
                (CardAddr::new((1 << 38) + (32 << 20)), 4096)
            ]
        );
        let upper = at(layout(None, Some(None)), 3).unwrap();
        assert_eq!(upper, [(CardAddr::new((1 << 38) + (33 << 20) + 4096), 1 << 20)]);
        for (layout, memory) in [
            (layout(Some(32 << 20), None), "HBM"),
            (layout(Some(u64::MAX - 4095), None), "HBM"),
            (layout(None, Some(Some(1 << 20))), "the region of a channel"),
            (layout(None, Some(Some(63 << 20))), "HBM"),
            (layout(None, Some(Some(u64::MAX - 4095))), "HBM"),
        ] {
            let error = at(layout, 3).unwrap_err();
            assert!(matches!(error, TooSmall { memory: named, .. } if named == memory), "{memory}: {error}");
        }
        assert!(matches!(layout(None, None).at_position(Phase::Device, 0, 1, PAGE), Err(ValidateError::NoMemory(_))));
    }

    #[test]
    fn what_does_not_fit_says_what_would() {
        let layout = |memories| Layout { memories, offset: 4096, stride: None, paired: None };
        let error = layout(card(1 << 20, 4 << 20)).places(Phase::Ddr, 3, 4, 1 << 20).unwrap_err();
        let TooSmall { memory: "DDR", needed, have } = error else { panic!("{error}") };
        assert_eq!((needed, have), ((4 << 20) + 4096, 1 << 20));
        let one = |bytes| Memories::One(Span::new(CardAddr::new(1 << 20), bytes));
        let places = layout(one(8192)).places(Phase::Device, 0, 1, 4096).unwrap();
        assert_eq!(places, [(CardAddr::new((1 << 20) + 4096), 4096)]);
        assert!(layout(one(8191)).places(Phase::Device, 0, 1, 4096).is_err());
        assert!(layout(one(1 << 62)).places(Phase::Device, u64::MAX - 1, u64::MAX, 4096).is_err());
        assert!(layout(one(0)).places(Phase::Device, 0, 1, 4096).is_err());
        for phase in [Phase::Hbm, Phase::Ddr, Phase::Both] {
            let error = layout(Memories::One(None)).places(phase, 0, 1, 4096);
            assert!(matches!(error, Err(ValidateError::NoMemory(_))));
        }
    }

    use ValidateError::TooSmall;
}
