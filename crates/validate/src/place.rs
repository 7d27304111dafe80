//! Where on a device the buffers of a phase lie.

use std::fmt;

use dmalane_addr::{CardAddr, Span};

use crate::ValidateError;

/// The longest stripe: as long as `--placement hbm` makes them.
const STRIPE: u64 = 2 << 20;
const PAGE: u64 = 4096;

/// Which memory a measurement is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// HBM: each buffer striped over both halves.
    Hbm,
    /// DDR.
    Ddr,
    /// Each buffer half in HBM, half in DDR.
    Both,
    /// The only memory of a device that has no others.
    Device,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Hbm => "HBM",
            Self::Ddr => "DDR",
            Self::Both => "HBM+DDR",
            Self::Device => "device",
        })
    }
}

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
    /// Bytes at the front of each memory that are left alone.
    pub offset: u64,
    /// A buffer in one piece, instead of stripes.
    pub raw: bool,
}

impl Layout {
    /// The places of buffer `slot` of `slots`, in order.
    pub fn places(&self, phase: Phase, slot: u64, slots: u64, len: u64) -> Result<Vec<(CardAddr, u64)>, ValidateError> {
        match (phase, self.memories) {
            (Phase::Device, Memories::One(memory)) => {
                let first = self.within("the device", memory.map_or(0, |m| m.len()), slot, slots, len)?;
                Ok(vec![(CardAddr::new(memory.map_or(0, |m| m.first().bits()) + first), len)])
            }
            (Phase::Ddr, Memories::Card { ddr, .. }) => {
                let first = self.within("DDR", ddr.len(), slot, slots, len)?;
                Ok(vec![(CardAddr::new(ddr.first().bits() + first), len)])
            }
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
            (phase, _) => Err(ValidateError::NoMemory(phase)),
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
        if self.raw {
            // In one piece, the buffers of neighbouring threads in different halves.
            let first = self.within("a half of HBM", half, slot / 4 * 2 + slot % 2, slots.div_ceil(4) * 2, len)?;
            return Ok(vec![(CardAddr::new(halves[(slot / 2 % 2) as usize].first().bits() + first), len)]);
        }
        // A buffer of two pages or more lies in both halves.
        let stripe = (len / 2 / PAGE * PAGE).clamp(PAGE, STRIPE);
        let first = self.within("HBM", 2 * half, slot, slots, len)?;
        let (mut at, end, mut places) = (first, first + len, Vec::new());
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

    /// Where the buffer begins in a memory that must have room for all.
    fn within(&self, memory: &'static str, have: u64, slot: u64, slots: u64, len: u64) -> Result<u64, ValidateError> {
        let needed = slots.checked_mul(len).and_then(|all| all.checked_add(self.offset)).unwrap_or(u64::MAX);
        match needed > have {
            true => Err(ValidateError::TooSmall { memory, needed, have }),
            false => Ok(self.offset + slot * len),
        }
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
            pages in 1u64..2000, slots in 1u64..9, raw: bool, offset in 0u64..100, phase in 0usize..3,
        ) {
            let memories = card(256 << 20, 256 << 20);
            let layout = Layout { memories, offset: offset * PAGE, raw };
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
                prop_assert!(raw || phase != Phase::Hbm || pages < 2 || halves == 2, "striped over both halves");
            }
            spans.sort_by_key(|s| s.first());
            prop_assert!(spans.windows(2).all(|w| w[0].last() < w[1].first()), "{:?}", spans);
        }
    }

    #[test]
    fn what_does_not_fit_says_what_would() {
        let layout = |memories| Layout { memories, offset: 4096, raw: false };
        let error = layout(card(1 << 20, 4 << 20)).places(Phase::Ddr, 0, 4, 1 << 20).unwrap_err();
        let TooSmall { memory: "DDR", needed, have } = error else { panic!("{error}") };
        assert_eq!((needed, have), ((4 << 20) + 4096, 1 << 20));
        let one = |bytes| Memories::One(Span::new(CardAddr::new(1 << 20), bytes));
        let places = layout(one(8192)).places(Phase::Device, 0, 1, 4096).unwrap();
        assert_eq!(places, [(CardAddr::new((1 << 20) + 4096), 4096)]);
        assert!(layout(one(8191)).places(Phase::Device, 0, 1, 4096).is_err());
        assert!(layout(one(1 << 62)).places(Phase::Device, 0, u64::MAX, 4096).is_err());
        assert!(layout(one(0)).places(Phase::Device, 0, 1, 4096).is_err());
        for phase in [Phase::Hbm, Phase::Ddr, Phase::Both] {
            let error = layout(Memories::One(None)).places(phase, 0, 1, 4096);
            assert!(matches!(error, Err(ValidateError::NoMemory(_))));
        }
    }

    use ValidateError::TooSmall;
}
