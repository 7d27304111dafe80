//! The memory of a device: which part of it is free.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::str::FromStr;

use dmalane_addr::{Address, CardAddr, PageSize, RangeAllocator, RangeError, Segment, SgTable, Span};
use thiserror::Error;

use crate::Region;
use crate::size::{binary, binary_up};

/// Where a buffer goes in a device's memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Placement {
    /// In the device's first region.
    #[default]
    Default,
    /// In the region of this name; or in all regions of the group of this name in turns, 2 MiB each, so that all their
    /// queues are busy.
    Named(Cow<'static, str>),
    /// In one region of this group, the one with the longest free range.
    OneOf(Cow<'static, str>),
}

impl Placement {
    /// The region "ddr".
    pub const DDR: Self = Self::Named(Cow::Borrowed("ddr"));
    /// The region or the group "hbm".
    pub const HBM: Self = Self::Named(Cow::Borrowed("hbm"));
    /// One region of the group "hbm".
    pub const HBM_HALF: Self = Self::OneOf(Cow::Borrowed("hbm"));
}

impl FromStr for Placement {
    type Err = BadPlacement;

    /// `default`; the name of a region, or of a group, which can also be written `GROUP-striped`; or `GROUP-half` for
    /// one region of a group.
    fn from_str(text: &str) -> Result<Self, BadPlacement> {
        match (text.strip_suffix("-half"), text.strip_suffix("-striped").unwrap_or(text)) {
            (_, "default") => Ok(Self::Default),
            (None, name) if !name.is_empty() => Ok(Self::Named(name.to_owned().into())),
            (Some(group), _) if !group.is_empty() => Ok(Self::OneOf(group.to_owned().into())),
            _ => Err(BadPlacement),
        }
    }
}

/// A text that names no place in a device's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("not a placement; write the name of a region or a group such as ddr, hbm or hbm-half")]
#[non_exhaustive]
pub struct BadPlacement;

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Named(name) => f.write_str(name),
            Self::OneOf(group) => write!(f, "{group}-half"),
        }
    }
}

/// Why memory was not allocated or freed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// No region and no group has this name.
    #[error("the device has no {}", match &**regions {
        "" => "memory".to_owned(),
        _ => format!("{placement} memory, only {regions}"),
    })]
    NoRegion {
        /// The placement that was requested.
        placement: Placement,
        /// The names of the regions and groups, with commas between them; none where there is no memory.
        regions: String,
    },
    /// No free range is long enough.
    #[error(
        "too little device memory is free{}: {} are needed, {} of them in one piece at a multiple of {align}, and the \
         largest free piece has {}",
        place(placement), binary_up(*needed), binary_up(*range), binary(*largest)
    )]
    Full {
        /// Bytes asked for.
        needed: u64,
        /// Bytes that must be contiguous: all of them, or the share of one region.
        range: u64,
        /// Where.
        placement: Placement,
        /// Alignment asked for.
        align: PageSize,
        /// The longest free range there, in bytes.
        largest: u64,
    },
    /// The device's driver has no memory for it.
    #[error("cannot allocate {} of device memory{}", binary_up(*len), place(placement))]
    Driver {
        /// Bytes of the range.
        len: u64,
        /// Where.
        placement: Placement,
        /// The driver's answer.
        source: Box<dyn Error + Send + Sync>,
    },
    /// Memory was given back wrongly: a bug.
    #[error(transparent)]
    Range(#[from] RangeError<CardAddr>),
}

/// Where memory was asked for, for people; nothing for the memory that is taken by default.
fn place(placement: &Placement) -> String {
    match placement {
        Placement::Default => String::new(),
        named => format!(" in {named}"),
    }
}

impl MemoryError {
    /// True where less at a time, or memory that others give back, would help.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Full { .. } => true,
            Self::Driver { source, .. } => source
                .downcast_ref::<std::io::Error>()
                .is_some_and(|error| error.kind() == std::io::ErrorKind::OutOfMemory),
            _ => false,
        }
    }
}

/// Bytes per stripe: the largest leaf that a bind can use.
const STRIPE: PageSize = PageSize::SIZE_2M;

/// Allocates memory of a device whose driver does that, for example a GPU. Where it lies among the addresses of its
/// region is decided by [`DeviceMemory`].
pub trait MemoryDriver: Send {
    /// Allocates the memory of a range of whole granules of one region; it may be used when this returns.
    ///
    /// # Errors
    /// When the driver has none, an [`std::io::Error`] of [`std::io::ErrorKind::OutOfMemory`]; others. Nothing is
    /// allocated.
    fn allocate(&mut self, range: Span<CardAddr>) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Frees a range as it was allocated, at the latest when the memory is dropped. Nothing is bound to it, and no
    /// operation on it is in flight.
    fn free(&mut self, range: Span<CardAddr>);

    /// Bytes that it could allocate now; `None` where only trying tells. Other programs may use the device, so they may
    /// be fewer than its regions have free, and change at any time.
    fn free_bytes(&self) -> Option<u64> {
        None
    }
}

/// The end of a region at which memory shall lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum End {
    /// At its lowest addresses.
    First,
    /// At its highest addresses.
    Last,
}

/// Grants blocks of a device's regions at addresses that it chooses, for example a daemon that shares a device.
pub trait MemoryGrants: Send {
    /// Grants a block of a region, of about `len` bytes: more, or less where it has no such block. `None` when nothing
    /// is left. The end is a wish. The block is made of whole granules of the region, and overlaps with no other that
    /// was granted and not given back.
    ///
    /// # Errors
    /// When it cannot be asked.
    fn grant(
        &mut self,
        region: &Region,
        len: u64,
        end: End,
    ) -> Result<Option<Span<CardAddr>>, Box<dyn Error + Send + Sync>>;

    /// Takes a block back as it was granted. No operation on it is in flight.
    fn take_back(&mut self, block: Span<CardAddr>);
}

/// The blocks that were granted; given back when dropped.
struct Granted {
    by: Box<dyn MemoryGrants>,
    blocks: Vec<Span<CardAddr>>,
}

impl Granted {
    /// Bytes of a region that were not granted, and may be or not.
    fn unknown(&self, region: &Region) -> u64 {
        let here = self.blocks.iter().filter(|block| region.span.covers(block));
        region.span.len().saturating_sub(here.map(Span::len).sum())
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        self.blocks.drain(..).for_each(|block| self.by.take_back(block));
    }
}

/// The ranges that a driver allocated; freed when dropped.
struct Driven {
    by: Box<dyn MemoryDriver>,
    ranges: Vec<Span<CardAddr>>,
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.ranges.drain(..).for_each(|range| self.by.free(range));
    }
}

/// The free memory of a device.
pub struct DeviceMemory {
    areas: Vec<(Region, RangeAllocator<CardAddr>)>,
    driver: Option<Driven>,
    granted: Option<Granted>,
    /// Buffers are one range: there is no MMU that could show several as one.
    contiguous: bool,
}

impl DeviceMemory {
    /// Memory of these regions, all of it free.
    pub fn new(regions: &[Region]) -> Self {
        let free = |r: &Region| (r.clone(), RangeAllocator::new(r.span, r.granule));
        Self { areas: regions.iter().map(free).collect(), driver: None, granted: None, contiguous: false }
    }

    /// Memory of these regions that is granted block by block when it is needed. A block is given back once nothing in
    /// it is allocated. For a device without an MMU, as [`DeviceMemory::contiguous`].
    pub fn granted(regions: &[Region], by: impl MemoryGrants + 'static) -> Self {
        let mut this = Self::new(regions).contiguous();
        for (_, area) in &mut this.areas {
            // All of it is taken until it is granted.
            for range in area.free_ranges().collect::<Vec<_>>() {
                let taken = area.reserve(range);
                debug_assert!(taken.is_ok(), "it is free");
            }
        }
        Self { granted: Some(Granted { by: Box::new(by), blocks: Vec::new() }), ..this }
    }

    /// The same, for a device whose driver allocates memory.
    #[must_use]
    pub fn driven_by(self, driver: impl MemoryDriver + 'static) -> Self {
        Self { driver: Some(Driven { by: Box::new(driver), ranges: Vec::new() }), ..self }
    }

    /// The same, for a device without an MMU: instead of being striped over the regions of a group, a buffer is one
    /// range that lies in two of them, half in each where there is room, if these touch; else it lies in the one with
    /// the most room.
    #[must_use]
    pub fn contiguous(self) -> Self {
        Self { contiguous: true, ..self }
    }

    /// True for a device whose memory a driver allocates or a daemon grants: only what was allocated here may be used.
    pub fn is_driven(&self) -> bool {
        self.driver.is_some() || self.granted.is_some()
    }

    /// Allocates one contiguous range of `len` bytes, rounded up to pages, in the region with the most room.
    ///
    /// # Errors
    /// [`MemoryError::NoRegion`] for a device without memory; [`MemoryError::Full`], [`MemoryError::Driver`].
    pub fn reserve(&mut self, len: u64) -> Result<Span<CardAddr>, MemoryError> {
        let none = self.no_region(&Placement::Default);
        let all: Vec<usize> = (0..self.areas.len()).collect();
        self.grow_one(&all, len, PageSize::SIZE_4K, &Placement::Default)?;
        // The last of equals is taken by `max_by_key`: the first region.
        let area = self.areas.iter_mut().rev().max_by_key(|(_, a)| a.largest_free()).ok_or(none)?;
        let taken = take(area, len, PageSize::SIZE_4K, &Placement::Default);
        let span = taken.inspect_err(|_| self.trim())?;
        self.drive([span], &Placement::Default)?;
        Ok(span)
    }

    /// Allocates memory for a buffer of `len` bytes, rounded up to pages.
    ///
    /// # Errors
    /// [`MemoryError::NoRegion`], [`MemoryError::Full`], [`MemoryError::Driver`]; nothing is taken.
    pub fn allocate(&mut self, len: u64, placement: &Placement) -> Result<SgTable<CardAddr>, MemoryError> {
        let none = self.no_region(placement);
        self.grow(len, placement)?;
        let mut areas = self.areas_of(placement);
        if let Placement::OneOf(_) = placement {
            // The last of equals is taken by `max_by_key`: the first region.
            areas = areas.into_iter().rev().max_by_key(|i| self.areas[*i].1.largest_free()).into_iter().collect();
        }
        let areas: Vec<_> = self.areas.iter_mut().enumerate().filter(|(i, _)| areas.contains(i)).map(|a| a.1).collect();
        let taken = match &mut { areas }[..] {
            [] => return Err(none),
            _ if len == 0 => Ok(Vec::new()),
            [area] => take(area, len, alignment(len), placement).map(|span| vec![span]),
            several if self.contiguous => across(several, len, placement),
            several => stripe(several, len, placement),
        };
        let mut table = SgTable::new();
        for span in taken.inspect_err(|_| self.trim())? {
            let pushed = table.push(span.first(), span.len());
            debug_assert!(pushed.is_some(), "a span does not wrap");
        }
        self.drive(table.segments().filter_map(|s| Span::new(s.addr, s.len)), placement)?;
        Ok(table)
    }

    /// The areas that a placement names.
    fn areas_of(&self, placement: &Placement) -> Vec<usize> {
        let within = |wanted: &dyn Fn(&Region) -> bool| {
            let areas = self.areas.iter().enumerate();
            areas.filter(|(_, (region, _))| wanted(region)).map(|(i, _)| i).collect::<Vec<_>>()
        };
        match placement {
            Placement::Default => (0..self.areas.len().min(1)).collect(),
            Placement::Named(name) => match &within(&|region| region.name == *name)[..] {
                [] => within(&|region| region.group == *name),
                named => named.to_vec(),
            },
            Placement::OneOf(group) => within(&|region| region.group == *group),
        }
    }

    /// Requests the memory that an allocation still needs, where memory is granted.
    fn grow(&mut self, len: u64, placement: &Placement) -> Result<(), MemoryError> {
        let areas = self.areas_of(placement);
        if self.granted.is_none() || len == 0 {
            return Ok(());
        }
        if let Placement::Named(_) = placement {
            for (low, high) in areas.iter().zip(areas.iter().skip(1)) {
                // Half on either side of the border.
                let half = alignment(len).round_up(len.div_ceil(2)).unwrap_or(u64::MAX);
                let beside = |this: &Self| border(&this.areas[*low], &this.areas[*high]);
                let missing = |this: &Self| Some(half.saturating_sub(beside(this)?.1));
                self.ask(*low, End::Last, placement, missing)?;
                let missing = |this: &Self| Some(half.saturating_sub(beside(this)?.2));
                self.ask(*high, End::First, placement, missing)?;
                if beside(self).is_some_and(|(_, before, after)| before >= half && after >= half) {
                    return Ok(());
                }
                self.trim();
            }
        }
        self.grow_one(&areas, len, alignment(len), placement)
    }

    /// Asks until one of the areas has a free range for it, or nothing is left.
    fn grow_one(
        &mut self,
        areas: &[usize],
        len: u64,
        align: PageSize,
        placement: &Placement,
    ) -> Result<(), MemoryError> {
        let Some(granted) = &self.granted else { return Ok(()) };
        let fits = |this: &mut Self, at: usize| {
            let (region, area) = &mut this.areas[at];
            let found = region.granule.round_up(len).and_then(|whole| area.allocate(whole, align).ok());
            found.is_some_and(|span| area.free(span).is_ok())
        };
        let mut areas = areas.to_vec();
        // Where most may be left first.
        areas.sort_by_key(|at| std::cmp::Reverse(granted.unknown(&self.areas[*at].0)));
        for at in areas {
            if self.areas[at].0.span.len() < len {
                continue;
            }
            while !fits(self, at) {
                let missing = len.saturating_sub(self.areas[at].1.largest_free()).max(1);
                if !self.ask_once(at, missing, End::First, placement)? {
                    break;
                }
            }
            if fits(self, at) {
                break;
            }
        }
        Ok(())
    }

    /// Asks for blocks of an area while bytes are lacking, and each leaves fewer.
    fn ask(
        &mut self,
        at: usize,
        end: End,
        placement: &Placement,
        missing: impl Fn(&Self) -> Option<u64>,
    ) -> Result<(), MemoryError> {
        let mut before = u64::MAX;
        while let Some(bytes) = missing(self).filter(|bytes| (1..before).contains(bytes)) {
            before = bytes;
            if !self.ask_once(at, bytes, end, placement)? {
                break;
            }
        }
        Ok(())
    }

    /// Asks for a block of an area; false when there is none.
    fn ask_once(&mut self, at: usize, len: u64, end: End, placement: &Placement) -> Result<bool, MemoryError> {
        let (region, area) = &mut self.areas[at];
        let Some(granted) = &mut self.granted else { return Ok(false) };
        let of = |source| MemoryError::Driver { len, placement: placement.clone(), source };
        let Some(block) = granted.by.grant(region, len, end).map_err(of)? else { return Ok(false) };
        granted.blocks.push(block);
        area.free(block).map(|()| true).map_err(MemoryError::Range)
    }

    /// Gives back the blocks in which nothing is allocated.
    fn trim(&mut self) {
        let Some(Granted { by, blocks }) = &mut self.granted else { return };
        blocks.retain(|block| {
            let mut areas = self.areas.iter_mut();
            let used = areas.find(|a| a.0.span.covers(block)).is_none_or(|(_, area)| area.reserve(*block).is_err());
            if !used {
                by.take_back(*block);
            }
            used
        });
    }

    /// Has the driver allocate ranges that were taken; if it cannot, they are free again.
    fn drive(
        &mut self,
        ranges: impl IntoIterator<Item = Span<CardAddr>>,
        placement: &Placement,
    ) -> Result<(), MemoryError> {
        let Some(Driven { by, ranges: done }) = &mut self.driver else { return Ok(()) };
        let (before, mut failed, mut taken) = (done.len(), None, Vec::new());
        for range in ranges {
            taken.push(Segment { addr: range.first(), len: range.len() });
            match &failed {
                Some(_) => {}
                None => match by.allocate(range) {
                    Ok(()) => done.push(range),
                    Err(source) => failed = Some((range.len(), source)),
                },
            }
        }
        let Some((len, source)) = failed else { return Ok(()) };
        done.drain(before..).for_each(|range| by.free(range));
        self.give_back(taken)?;
        Err(MemoryError::Driver { len, placement: placement.clone(), source })
    }

    /// The largest buffer that could be allocated there now, in bytes; 0 where there is no such region. Where memory is
    /// granted, it may be less.
    pub fn room(&self, placement: &Placement) -> u64 {
        let largest = |(region, area): &(Region, RangeAllocator<CardAddr>)| {
            area.largest_free().max(self.granted.as_ref().map_or(0, |granted| granted.unknown(region)))
        };
        let areas: Vec<_> = self.areas_of(placement).into_iter().map(|at| &self.areas[at]).collect();
        let free = areas.iter().map(|area| largest(area));
        let room = match placement {
            Placement::Named(_) if self.granted.is_some() => free.sum(),
            Placement::Named(_) if self.contiguous => {
                let both = areas.windows(2).filter_map(|two| border(two[0], two[1])).map(|(_, a, b)| a + b);
                both.chain(free).max().unwrap_or(0)
            }
            Placement::Named(_) => free.min().map_or(0, |least| least * areas.len() as u64),
            Placement::Default | Placement::OneOf(_) => free.max().unwrap_or(0),
        };
        room.min(self.driver_has())
    }

    /// Bytes that the driver could allocate, if that is known.
    fn driver_has(&self) -> u64 {
        self.driver.as_ref().and_then(|driver| driver.by.free_bytes()).unwrap_or(u64::MAX)
    }

    /// Gives back what was allocated.
    ///
    /// # Errors
    /// [`MemoryError::Range`] when it was not.
    pub fn free(&mut self, segments: impl IntoIterator<Item = Segment<CardAddr>>) -> Result<(), MemoryError> {
        let segments: Vec<_> = segments.into_iter().collect();
        self.give_back(segments.iter().copied())?;
        if let Some(Driven { by, ranges }) = &mut self.driver {
            // A merged segment is of several ranges.
            for freed in segments.iter().filter_map(|s| Span::new(s.addr, s.len)) {
                ranges.extract_if(.., |range| freed.covers(range)).for_each(|range| by.free(range));
            }
        }
        self.trim();
        Ok(())
    }

    fn give_back(&mut self, segments: impl IntoIterator<Item = Segment<CardAddr>>) -> Result<(), MemoryError> {
        for segment in segments {
            // A merged segment may run from one region into the next.
            let mut rest = Span::new(segment.addr, segment.len);
            while let Some(span) = rest {
                let area = self.areas.iter_mut().find(|(r, _)| r.span.contains(span.first()));
                let (region, area) = area.ok_or(RangeError::NotAllocated(span))?;
                let here = region.span.intersect(&span).expect("its first address lies there");
                area.free(here)?;
                rest = here.last().checked_add(1).and_then(|next| Span::inclusive(next, span.last()));
            }
        }
        Ok(())
    }

    /// The regions.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &Region> {
        self.areas.iter().map(|(region, _)| region)
    }

    /// Bytes free in all, as of now: with those that were not granted, where memory is granted, and no more than the
    /// driver has.
    pub fn free_bytes(&self) -> u64 {
        let unknown = |region| self.granted.as_ref().map_or(0, |granted| granted.unknown(region));
        let free: u64 = self.areas.iter().map(|(region, area)| area.free_bytes() + unknown(region)).sum();
        free.min(self.driver_has())
    }

    fn no_region(&self, placement: &Placement) -> MemoryError {
        let mut names: Vec<&str> = Vec::new();
        for name in self.regions().flat_map(|r| [&*r.group, &*r.name]) {
            if !name.is_empty() && !names.contains(&name) {
                names.push(name);
            }
        }
        MemoryError::NoRegion { placement: placement.clone(), regions: names.join(", ") }
    }
}

dmalane_dma::debug_as!(DeviceMemory, |it| "DeviceMemory {{ areas: {:?}, .. }}", it.areas);

/// The alignment of a buffer of `len` bytes.
fn alignment(len: u64) -> PageSize {
    if len >= STRIPE.bytes() { STRIPE } else { PageSize::SIZE_16K }
}

/// Allocates one range.
fn take(
    (region, area): &mut (Region, RangeAllocator<CardAddr>),
    len: u64,
    align: PageSize,
    placement: &Placement,
) -> Result<Span<CardAddr>, MemoryError> {
    let (placement, largest) = (placement.clone(), area.largest_free());
    let whole = region.granule.round_up(len);
    let span = whole.and_then(|whole| area.allocate(whole, align).ok());
    span.ok_or(MemoryError::Full { needed: len, range: len, placement, align, largest })
}

/// Where two areas touch, with the free bytes on either side.
fn border(
    (low, below): &(Region, RangeAllocator<CardAddr>),
    (high, above): &(Region, RangeAllocator<CardAddr>),
) -> Option<(CardAddr, u64, u64)> {
    let border = low.span.last().checked_add(1).filter(|at| *at == high.span.first())?;
    let before = below.free_ranges().find(|r| r.last() == low.span.last()).map_or(0, |r| r.len());
    let after = above.free_ranges().find(|r| r.first() == border).map_or(0, |r| r.len());
    Some((border, before, after))
}

/// Allocates one range that lies in two areas, or else in the one with the most room. Gives its parts.
fn across(
    areas: &mut [&mut (Region, RangeAllocator<CardAddr>)],
    len: u64,
    placement: &Placement,
) -> Result<Vec<Span<CardAddr>>, MemoryError> {
    for i in 1..areas.len() {
        let (low, high) = areas.split_at_mut(i);
        let (low, high) = (&mut *low[i - 1], &mut *high[0]);
        let Some((border, before, after)) = border(low, high) else { continue };
        let Some(whole) = low.0.granule.max(high.0.granule).round_up(len) else { continue };
        if before == 0 || after == 0 || before.checked_add(after).is_none_or(|room| whole > room) {
            continue;
        }
        let half = STRIPE.round_up(whole / 2).unwrap_or(whole).min(whole);
        let below = half.clamp(whole.saturating_sub(after), before);
        let (first, above) = (CardAddr::new(border.bits() - below), whole - below);
        let (Some(first), Some(second)) = (Span::new(first, below), Span::new(border, above)) else { continue };
        if low.1.reserve(first).is_ok() {
            match high.1.reserve(second) {
                Ok(()) => return Ok(vec![first, second]),
                Err(_) => low.1.free(first)?,
            }
        }
    }
    let roomiest = areas.iter_mut().rev().max_by_key(|area| area.1.largest_free());
    roomiest.map_or_else(|| Ok(Vec::new()), |area| take(area, len, alignment(len), placement).map(|span| vec![span]))
}

/// Allocates whole stripes in all areas in turns, and gives them in the order of the buffer.
fn stripe(
    areas: &mut [&mut (Region, RangeAllocator<CardAddr>)],
    len: u64,
    placement: &Placement,
) -> Result<Vec<Span<CardAddr>>, MemoryError> {
    let (n, stripes) = (areas.len() as u64, len.div_ceil(STRIPE.bytes()));
    let mut taken: Vec<Span<CardAddr>> = Vec::new();
    // As many in each, one more in the first of them.
    let counts = (0..n).map(|i| stripes.saturating_sub(i).div_ceil(n)).take_while(|count| *count > 0);
    for (at, count) in counts.enumerate() {
        let bytes = count.saturating_mul(STRIPE.bytes());
        match take(areas[at], bytes, STRIPE, placement) {
            Ok(span) => taken.push(span),
            Err(mut e) => {
                for (area, span) in areas.iter_mut().zip(taken) {
                    area.1.free(span)?;
                }
                if let MemoryError::Full { needed, .. } = &mut e {
                    *needed = len;
                }
                return Err(e);
            }
        }
    }
    let stripe = |s: u64| taken[(s % n) as usize].sub(s / n * STRIPE.bytes(), STRIPE.bytes());
    Ok((0..stripes).map(|s| stripe(s).expect("each area holds its stripes")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory() -> DeviceMemory {
        let region = |name, start, len| Region::new(name, Span::new(CardAddr::new(start), len).unwrap());
        DeviceMemory::new(&[
            region("ddr", 0, 64 * MIB),
            region("hbm0", 1 << 40, 32 * MIB).in_group("hbm"),
            region("hbm1", (1 << 40) + 32 * MIB, 32 * MIB).in_group("hbm"),
        ])
    }

    #[test]
    fn placements() {
        let mut m = memory();
        let free = m.free_bytes();
        let ddr = m.allocate(10 * MIB, &Placement::Default).unwrap();
        assert_eq!((ddr.segment_count(), ddr.segments().next().unwrap().addr.bits()), (1, 0));
        let hbm = m.allocate(10 * MIB, &Placement::HBM_HALF).unwrap();
        let other = m.allocate(10 * MIB, &Placement::HBM_HALF).unwrap();
        let half = |t: &SgTable<CardAddr>| t.segments().next().unwrap().addr.bits() - (1 << 40) >= 32 * MIB;
        assert_ne!(half(&hbm), half(&other), "the half with more room");
        let striped = m.allocate(9 * MIB, &Placement::HBM).unwrap();
        assert_eq!(striped.segment_count(), 5);
        let halves: Vec<_> = striped.segments().map(|s| s.addr.bits() - (1 << 40) >= 32 * MIB).collect();
        assert_eq!(halves, [false, true, false, true, false]);
        let full = m.allocate(60 * MIB, &Placement::DDR).unwrap_err();
        assert!(matches!(full, MemoryError::Full { largest, .. } if largest == 54 * MIB), "{full}");
        assert!(m.allocate(u64::MAX, &Placement::HBM).is_err());
        assert!(m.allocate(u64::MAX, &Placement::DDR).is_err());
        assert!(m.allocate(0, &Placement::HBM_HALF).unwrap().is_empty());
        let named = m.allocate(MIB, &"hbm1".parse().unwrap()).unwrap();
        assert!(half(&named));
        for t in [ddr, hbm, other, striped, named] {
            m.free(t.segments()).unwrap();
        }
        assert_eq!(m.free_bytes(), free);
        // All of HBM, in stripes that merge where the halves touch.
        let all = m.allocate(64 * MIB, &Placement::HBM).unwrap();
        assert!(m.allocate(MIB, &Placement::HBM).is_err());
        m.free(all.segments()).unwrap();
        assert_eq!(m.free_bytes(), free);
        assert!(m.free([Segment { addr: CardAddr::new(64 * MIB), len: 4096 }]).is_err(), "no such memory");
        for (placement, room) in [("default", 64), ("hbm", 64), ("hbm-half", 32), ("hbm0", 32), ("nvm", 0)] {
            assert_eq!(m.room(&placement.parse().unwrap()), room * MIB, "{placement}");
        }
        // The roomiest region, and of equals the first.
        assert_eq!(m.reserve(63 * MIB).unwrap().first().bits(), 0);
        assert_eq!(m.reserve(5000).unwrap().len(), 8192);
    }

    /// A driver with a number of bytes, which counts what it gave.
    struct Driver(u64, std::sync::Arc<std::sync::Mutex<Vec<Span<CardAddr>>>>);

    impl MemoryDriver for Driver {
        fn allocate(&mut self, range: Span<CardAddr>) -> Result<(), Box<dyn Error + Send + Sync>> {
            let mut given = self.1.lock().unwrap();
            if given.iter().map(Span::len).sum::<u64>() + range.len() > self.0 {
                return Err("out of memory".into());
            }
            given.push(range);
            Ok(())
        }

        fn free(&mut self, range: Span<CardAddr>) {
            let mut given = self.1.lock().unwrap();
            let at = given.iter().position(|r| *r == range).expect("allocated as it is freed");
            given.remove(at);
        }

        fn free_bytes(&self) -> Option<u64> {
            Some(self.0 - self.1.lock().unwrap().iter().map(Span::len).sum::<u64>())
        }
    }

    #[test]
    fn a_full_memory_says_so_in_sizes_and_words() {
        let mut m = memory();
        let refused = m.allocate(1 << 40, &Placement::Default).unwrap_err().to_string();
        assert!(refused.starts_with("too little device memory is free: 1 TiB are needed, "), "{refused}");
        let refused = m.allocate(1 << 40, &Placement::HBM).unwrap_err().to_string();
        assert!(refused.starts_with("too little device memory is free in hbm: 1 TiB are needed, "), "{refused}");
    }

    #[test]
    fn a_driver_allocates_what_is_taken_and_its_refusal_takes_nothing() {
        let given = std::sync::Arc::default();
        let mut m = memory().driven_by(Driver(6 * MIB, std::sync::Arc::clone(&given)));
        let free = m.free_bytes();
        let live = |bytes: u64| {
            assert_eq!(given.lock().unwrap().iter().map(Span::len).sum::<u64>(), bytes);
        };
        let ddr = m.allocate(MIB, &Placement::DDR).unwrap();
        live(MIB);
        // Others may have the rest of the region.
        assert_eq!((free, m.free_bytes(), m.room(&Placement::DDR)), (6 * MIB, 5 * MIB, 5 * MIB));
        let refused = m.allocate(10 * MIB, &Placement::HBM).unwrap_err();
        assert_eq!(dmalane_dma::error_chain(&refused), "cannot allocate 2 MiB of device memory in hbm: out of memory");
        assert!(matches!(m.reserve(6 * MIB), Err(MemoryError::Driver { .. })));
        live(MIB);
        let span = m.reserve(5 * MIB).unwrap();
        live(6 * MIB);
        m.free([Segment { addr: span.first(), len: span.len() }]).unwrap();
        m.free(ddr.segments()).unwrap();
        live(0);
        assert_eq!(m.free_bytes(), free);
        // One behind the other, and freed as one.
        let [first, second] = [MIB, MIB].map(|len| m.reserve(len).unwrap());
        assert_eq!(first.last().checked_add(1), Some(second.first()));
        m.free([Segment { addr: first.first(), len: 2 * MIB }]).unwrap();
        live(0);
        m.reserve(2 * MIB).unwrap();
        live(2 * MIB);
        drop(m);
        live(0);
    }

    /// Grants blocks of 8 MiB from the lowest or the highest address on, and lists them.
    #[derive(Clone, Default)]
    struct Blocks(std::sync::Arc<std::sync::Mutex<Grants>>);

    #[derive(Default)]
    struct Grants {
        given: Vec<Span<CardAddr>>,
        /// Where the blocks of others begin.
        taken: Vec<u64>,
    }

    impl MemoryGrants for Blocks {
        fn grant(
            &mut self,
            region: &Region,
            len: u64,
            end: End,
        ) -> Result<Option<Span<CardAddr>>, Box<dyn Error + Send + Sync>> {
            assert!(len > 0);
            let Grants { given, taken } = &mut *self.0.lock().unwrap();
            let mut places: Vec<u64> = (0..region.span.len() / (8 * MIB)).collect();
            if end == End::Last {
                places.reverse();
            }
            let blocks = places.into_iter().filter_map(|i| region.span.sub(i * 8 * MIB, 8 * MIB));
            let free = |block: &Span<CardAddr>| !given.contains(block) && !taken.contains(&block.first().bits());
            let block = { blocks }.find(free);
            given.extend(block);
            Ok(block)
        }

        fn take_back(&mut self, block: Span<CardAddr>) {
            let given = &mut self.0.lock().unwrap().given;
            let at = given.iter().position(|p| *p == block).expect("as it was granted");
            given.remove(at);
        }
    }

    #[test]
    fn memory_is_granted_when_it_is_needed_and_given_back_after_that() {
        let blocks = Blocks::default();
        let regions: Vec<Region> = memory().regions().cloned().collect();
        let mut m = DeviceMemory::granted(&regions, blocks.clone());
        let granted = || blocks.0.lock().unwrap().given.len() as u64 * 8 * MIB;
        let all = m.free_bytes();
        assert!(m.is_driven() && all == 128 * MIB && m.room(&Placement::HBM) == 64 * MIB);
        let at = |t: &SgTable<CardAddr>| t.segments().map(|s| (s.addr.bits(), s.len)).collect::<Vec<_>>();
        let small = m.allocate(MIB, &Placement::Default).unwrap();
        assert_eq!((at(&small), granted()), (vec![(0, MIB)], 8 * MIB));
        let other = m.allocate(MIB, &Placement::DDR).unwrap();
        assert_eq!(granted(), 8 * MIB, "there was room");
        let long = m.allocate(20 * MIB, &Placement::DDR).unwrap();
        assert_eq!((at(&long).len(), granted()), (1, 24 * MIB), "blocks that touch are one");
        assert_eq!(m.free_bytes(), all - 22 * MIB);
        m.free(long.segments()).unwrap();
        assert_eq!(granted(), 8 * MIB, "what is not used is given back");
        // Half of it on either side of the border.
        let both = m.allocate(20 * MIB, &Placement::HBM).unwrap();
        assert_eq!(at(&both), [((1 << 40) + 22 * MIB, 20 * MIB)]);
        assert_eq!(granted(), 40 * MIB);
        m.free(both.segments()).unwrap();
        // The border is somebody's.
        blocks.0.lock().unwrap().taken.push((1 << 40) + 24 * MIB);
        let low = m.allocate(20 * MIB, &Placement::HBM).unwrap();
        assert_eq!((at(&low).len(), granted()), (1, 32 * MIB));
        assert_eq!(at(&low)[0].0, 1 << 40, "in one half");
        m.free(low.segments()).unwrap();
        let half = m.allocate(9 * MIB, &Placement::HBM_HALF).unwrap();
        assert_eq!(granted(), 24 * MIB);
        // More than there is leaves things as they were.
        assert!(matches!(m.allocate(70 * MIB, &Placement::DDR), Err(MemoryError::Full { .. })));
        assert!(matches!(m.allocate(30 * MIB, &"hbm0".parse().unwrap()), Err(MemoryError::Full { .. })));
        assert!(matches!(m.allocate(u64::MAX, &Placement::HBM), Err(MemoryError::Full { .. })));
        assert_eq!(granted(), 24 * MIB);
        let reserved = m.reserve(40 * MIB).unwrap();
        assert_eq!(reserved.len(), 40 * MIB);
        m.free([Segment { addr: reserved.first(), len: reserved.len() }]).unwrap();
        [small, other, half].iter().for_each(|t| m.free(t.segments()).unwrap());
        assert_eq!((granted(), m.free_bytes()), (0, all));
        let _left = m.allocate(MIB, &Placement::DDR).unwrap();
        drop(m);
        assert_eq!(granted(), 0);
    }

    #[test]
    fn without_an_mmu_a_buffer_is_one_range_in_both_halves() {
        let mut m = memory().contiguous();
        let (free, half) = (m.free_bytes(), (1 << 40) + 32 * MIB);
        assert_eq!(m.room(&Placement::HBM), 64 * MIB);
        let one = |t: &SgTable<CardAddr>| {
            let segments: Vec<_> = t.segments().collect();
            assert_eq!(segments.len(), 1, "one range");
            (segments[0].addr.bits(), segments[0].len)
        };
        let both = m.allocate(10 * MIB + 1, &Placement::HBM).unwrap();
        assert_eq!(one(&both), (half - 6 * MIB, 10 * MIB + 4096));
        // The border is taken: the half with more room.
        let other = m.allocate(20 * MIB, &Placement::HBM).unwrap();
        assert!(one(&other).0 >= half && m.room(&Placement::HBM) == 26 * MIB);
        m.free(other.segments()).unwrap();
        m.free(both.segments()).unwrap();
        assert_eq!(m.free_bytes(), free);
        // As much in each as there is room for.
        let most = m.allocate(20 * MIB, &"hbm0".parse().unwrap()).unwrap();
        assert_eq!(m.room(&Placement::HBM), 44 * MIB);
        let all = m.allocate(44 * MIB, &Placement::HBM).unwrap();
        assert_eq!(one(&all), (half - 12 * MIB, 44 * MIB));
        assert!(m.allocate(4096, &Placement::HBM).is_err());
        for len in [0, u64::MAX] {
            assert_eq!(m.allocate(len, &Placement::HBM).is_ok(), len == 0);
        }
        m.free(all.segments()).unwrap();
        m.free(most.segments()).unwrap();
        assert_eq!(m.free_bytes(), free);
    }

    #[test]
    fn a_stripe_that_does_not_fit_takes_nothing() {
        let mut m = memory();
        let most = m.allocate(30 * MIB, &"hbm1".parse().unwrap()).unwrap();
        let free = m.free_bytes();
        assert!(
            matches!(m.allocate(8 * MIB, &Placement::HBM), Err(MemoryError::Full { largest, .. }) if largest < 4 * MIB)
        );
        assert_eq!(m.free_bytes(), free);
        m.free(most.segments()).unwrap();
    }

    #[test]
    fn names_are_read_and_those_that_are_not_there_say_what_is() {
        for (text, placement) in [
            ("ddr", Placement::DDR),
            ("hbm", Placement::HBM),
            ("hbm-half", Placement::HBM_HALF),
            ("default", Placement::Default),
        ] {
            assert_eq!((text.parse(), placement.to_string()), (Ok(placement.clone()), text.to_owned()));
        }
        assert_eq!("hbm-striped".parse(), Ok(Placement::HBM));
        assert!("".parse::<Placement>().is_err() && "-half".parse::<Placement>().is_err());
        for missing in ["nvm", "nvm-half"] {
            let error = memory().allocate(1, &missing.parse().unwrap()).unwrap_err().to_string();
            assert_eq!(error, format!("the device has no {missing} memory, only ddr, hbm, hbm0, hbm1"));
        }
        let none = DeviceMemory::new(&[]).reserve(1).unwrap_err();
        assert!(matches!(none, MemoryError::NoRegion { .. }));
        assert_eq!(none.to_string(), "the device has no memory");
    }
}
