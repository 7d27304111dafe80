//! The card's memory: who has which part of it.

use std::fmt;
use std::path::Path;

use dmalane_addr::{Address, CardAddr, PageSize, RangeAllocator, Segment, SgTable, Span};

use crate::Error;

/// Where buffers go on the card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Placement {
    /// In DDR; transfers to it are shared between the channels.
    #[default]
    Ddr,
    /// In both halves of HBM, 2 MiB here and 2 MiB there, so that both channels are busy.
    #[cfg_attr(feature = "clap", value(alias = "hbm-striped"))]
    Hbm,
    /// In one half of HBM, the one with more room; transfers take that half's channel.
    HbmHalf,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ddr => "DDR",
            Self::Hbm => "HBM",
            Self::HbmHalf => "one half of HBM",
        })
    }
}

/// Bytes per stripe: the largest leaf that a bind can use.
const STRIPE: PageSize = PageSize::SIZE_2M;

/// The free memory of a card.
#[derive(Debug)]
pub struct CardMemory {
    ddr: Option<RangeAllocator<CardAddr>>,
    hbm: Option<[RangeAllocator<CardAddr>; 2]>,
}

impl CardMemory {
    /// A card with this DDR and these two halves of HBM, all free.
    pub fn new(ddr: Option<Span<CardAddr>>, hbm: Option<[Span<CardAddr>; 2]>) -> Self {
        let all = |span| RangeAllocator::new(span, PageSize::SIZE_4K);
        Self { ddr: ddr.map(all), hbm: hbm.map(|halves| halves.map(all)) }
    }

    /// Takes one contiguous range for something other than a buffer object, such as page tables: from DDR, or from HBM
    /// where that has more room.
    ///
    /// # Errors
    /// [`Error::NoSuchMemory`] for a card without memory; [`Error::CardMemory`].
    pub fn reserve(&mut self, len: u64) -> Result<Span<CardAddr>, Error> {
        // The last of equals is taken by `max_by_key`: DDR.
        let areas = self.hbm.iter_mut().flatten().chain(&mut self.ddr);
        let from = areas.max_by_key(|area| area.largest_free());
        Ok(from.ok_or(Error::NoSuchMemory(Placement::Ddr))?.allocate(len, PageSize::SIZE_4K)?)
    }

    /// Takes memory for a buffer object of `len` bytes, rounded up to 4 KiB. `path` is for the message.
    ///
    /// # Errors
    /// [`Error::NoSuchMemory`], [`Error::CardFull`]; nothing is taken.
    pub fn allocate(&mut self, path: &Path, len: u64, placement: Placement) -> Result<SgTable<CardAddr>, Error> {
        let align = if len >= STRIPE.bytes() { STRIPE } else { PageSize::SIZE_16K };
        let full = |largest| Error::CardFull { path: path.to_owned(), needed: len, placement, align, largest };
        let mut table = SgTable::new();
        let Some(size) = PageSize::SIZE_4K.round_up(len) else { return Err(full(0)) };
        if size == 0 {
            return Ok(table);
        }
        match placement {
            Placement::Ddr | Placement::HbmHalf => {
                let area = match placement {
                    Placement::Ddr => self.ddr.as_mut(),
                    _ => self.hbm.as_mut().map(|[a, b]| if a.largest_free() >= b.largest_free() { a } else { b }),
                };
                let area = area.ok_or(Error::NoSuchMemory(placement))?;
                let span = area.allocate(size, align).map_err(|_| full(area.largest_free()))?;
                let pushed = table.push(span.first(), span.len());
                debug_assert!(pushed.is_some(), "a span does not wrap");
            }
            Placement::Hbm => {
                let [low, high] = self.hbm.as_mut().ok_or(Error::NoSuchMemory(placement))?;
                // Whole stripes alternate between the halves, the low half first.
                let stripes = size.div_ceil(STRIPE.bytes());
                let bytes = |n: u64| n.checked_mul(STRIPE.bytes());
                let (Some(in_low), Some(in_high)) = (bytes(stripes.div_ceil(2)), bytes(stripes / 2)) else {
                    return Err(full(low.largest_free().min(high.largest_free())));
                };
                let first = low.allocate(in_low, STRIPE).map_err(|_| full(low.largest_free()))?;
                let second = match in_high {
                    0 => None,
                    _ => match high.allocate(in_high, STRIPE) {
                        Ok(span) => Some(span),
                        Err(_) => {
                            low.free(first)?;
                            return Err(full(high.largest_free()));
                        }
                    },
                };
                for stripe in 0..stripes {
                    let half = if stripe % 2 == 0 { Some(first) } else { second };
                    let at = half.and_then(|h| h.sub(stripe / 2 * STRIPE.bytes(), STRIPE.bytes()));
                    let pushed = at.and_then(|s| table.push(s.first(), s.len()));
                    debug_assert!(pushed.is_some(), "both halves hold their stripes");
                }
            }
        }
        Ok(table)
    }

    /// Gives back what [`CardMemory::allocate`] handed out.
    ///
    /// # Errors
    /// [`Error::CardMemory`] when it was not handed out.
    pub fn free(&mut self, segments: impl IntoIterator<Item = Segment<CardAddr>>) -> Result<(), Error> {
        for segment in segments {
            let Some(mut span) = Span::new(segment.addr, segment.len) else { continue };
            let areas = self.ddr.iter_mut().chain(self.hbm.iter_mut().flatten());
            // A merged segment may run from one half into the other.
            for area in areas {
                if let Some(part) = area.space().intersect(&span) {
                    area.free(part)?;
                    match part.last().checked_add(1).and_then(|next| Span::inclusive(next, span.last())) {
                        Some(rest) => span = rest,
                        None => break,
                    }
                }
            }
        }
        Ok(())
    }

    /// Bytes free in all.
    pub fn free_bytes(&self) -> u64 {
        self.ddr.iter().chain(self.hbm.iter().flatten()).map(RangeAllocator::free_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory() -> CardMemory {
        let span = |start, len| Span::new(CardAddr::new(start), len).unwrap();
        CardMemory::new(Some(span(0, 64 * MIB)), Some([span(1 << 40, 32 * MIB), span((1 << 40) + 32 * MIB, 32 * MIB)]))
    }

    #[test]
    fn placements() {
        let mut m = memory();
        let free = m.free_bytes();
        let path = Path::new("x");
        let ddr = m.allocate(path, 10 * MIB, Placement::Ddr).unwrap();
        assert_eq!(ddr.segment_count(), 1);
        let hbm = m.allocate(path, 10 * MIB, Placement::HbmHalf).unwrap();
        let other = m.allocate(path, 10 * MIB, Placement::HbmHalf).unwrap();
        let half = |t: &SgTable<CardAddr>| t.segments().next().unwrap().addr.bits() - (1 << 40) >= 32 * MIB;
        assert_ne!(half(&hbm), half(&other), "the half with more room");
        let striped = m.allocate(path, 9 * MIB, Placement::Hbm).unwrap();
        assert_eq!(striped.segment_count(), 5);
        let halves: Vec<_> = striped.segments().map(|s| s.addr.bits() - (1 << 40) >= 32 * MIB).collect();
        assert_eq!(halves, [false, true, false, true, false]);
        let full = m.allocate(path, 60 * MIB, Placement::Ddr).unwrap_err();
        assert!(matches!(full, Error::CardFull { largest, .. } if largest == 54 * MIB), "{full}");
        assert!(m.allocate(path, u64::MAX, Placement::Hbm).is_err());
        assert!(m.allocate(path, 0, Placement::HbmHalf).unwrap().is_empty());
        for t in [ddr, hbm, other, striped] {
            m.free(t.segments()).unwrap();
        }
        assert_eq!(m.free_bytes(), free);
        // all of HBM, in two stripes' worth of halves that touch
        let all = m.allocate(path, 64 * MIB, Placement::Hbm).unwrap();
        m.free(all.segments()).unwrap();
        assert_eq!(m.free_bytes(), free);
        assert!(matches!(
            CardMemory::new(None, None).allocate(path, 1, Placement::HbmHalf),
            Err(Error::NoSuchMemory(Placement::HbmHalf))
        ));
    }
}
