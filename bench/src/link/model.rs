//! Limits on the rate of transfers between host and card.

use std::time::Duration;

use dmalane::addr::{CardAddr, Span};
use dmalane::queue::{Area, Direction, Route};
use thiserror::Error;

/// A half of one of the card's memories.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Half {
    /// The lower half of DDR.
    Ddr0,
    /// The upper half of DDR.
    Ddr1,
    /// The lower half of HBM.
    Hbm0,
    /// The upper half of HBM.
    Hbm1,
}

impl Half {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ddr0, Self::Ddr1, Self::Hbm0, Self::Hbm1];
    /// Bytes of a half on a modelled card: 16 GiB, as an Alveo V80 has them.
    pub const LEN: u64 = 16 << 30;

    /// Where it lies on a modelled card.
    pub fn span(self) -> Span<CardAddr> {
        Span::new(self.at(0), Self::LEN).expect("a constant span")
    }

    /// The card address of byte `offset` of a half on a modelled card.
    ///
    /// # Panics
    /// When the half has no such byte.
    pub fn at(self, offset: u64) -> CardAddr {
        assert!(offset < Self::LEN, "a half has {} bytes", Self::LEN);
        let base = match self {
            Self::Ddr0 => 0,
            Self::Ddr1 => Self::LEN,
            Self::Hbm0 => 1 << 40,
            Self::Hbm1 => (1 << 40) + Self::LEN,
        };
        CardAddr::new(base + offset)
    }

    /// The half that an address of a modelled card lies in.
    pub fn of(at: CardAddr) -> Option<Self> {
        Self::ALL.into_iter().find(|h| h.span().contains(at))
    }

    /// The areas of a modelled card, as its driver would name them: DDR is shared, each half of HBM hangs off a
    /// channel.
    pub fn areas() -> Vec<Area> {
        let ddr = Span::inclusive(Self::Ddr0.at(0), Self::Ddr1.span().last()).expect("neighbours");
        vec![
            Area { span: ddr, route: Route::Shared },
            Area { span: Self::Hbm0.span(), route: Route::Channel(0) },
            Area { span: Self::Hbm1.span(), route: Route::Channel(1) },
        ]
    }
}

/// A memory of the card.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Memory {
    /// DDR.
    Ddr,
    /// HBM.
    Hbm,
}

impl Memory {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Ddr, Self::Hbm];

    /// The memory that a half belongs to.
    pub fn of(half: Half) -> Self {
        match half {
            Half::Ddr0 | Half::Ddr1 => Self::Ddr,
            Half::Hbm0 | Half::Hbm1 => Self::Hbm,
        }
    }

    /// Its halves.
    pub fn halves(self) -> [Half; 2] {
        match self {
            Self::Ddr => [Half::Ddr0, Half::Ddr1],
            Self::Hbm => [Half::Hbm0, Half::Hbm1],
        }
    }
}

/// The resources of a stream of bytes: one channel, one half of a memory, one direction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stream {
    /// Which channel.
    pub channel: usize,
    /// Which memory.
    pub half: Half,
    /// Which way.
    pub direction: Direction,
}

/// Streams that share a limit: those that match everything that is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Streams {
    /// Only this channel.
    pub channel: Option<usize>,
    /// Only this half.
    pub half: Option<Half>,
    /// Only this memory.
    pub memory: Option<Memory>,
    /// Only this direction.
    pub direction: Option<Direction>,
}

impl Streams {
    /// All of them.
    pub const ALL: Self = Self { channel: None, half: None, memory: None, direction: None };

    /// True when the stream is one of these.
    pub fn contain(&self, s: &Stream) -> bool {
        self.channel.is_none_or(|c| c == s.channel)
            && self.half.is_none_or(|h| h == s.half)
            && self.memory.is_none_or(|m| m == Memory::of(s.half))
            && self.direction.is_none_or(|d| d == s.direction)
    }
}

/// A limit on what a set of streams moves together.
#[derive(Clone, PartialEq, Debug)]
pub struct Limit {
    /// For messages.
    pub name: String,
    /// Who shares it.
    pub streams: Streams,
    /// Bytes per second from a time on; each entry holds until the next one begins.
    pub capacity: Vec<(Duration, f64)>,
}

impl Limit {
    /// A limit that does not change.
    pub fn constant(name: impl Into<String>, streams: Streams, bytes_per_s: f64) -> Self {
        Self { name: name.into(), streams, capacity: vec![(Duration::ZERO, bytes_per_s)] }
    }

    /// A limit that alternates between two capacities, `first` to begin with, each for `period`, for `times` periods;
    /// then it stays as it is.
    pub fn toggling(
        name: impl Into<String>,
        streams: Streams,
        [first, second]: [f64; 2],
        period: Duration,
        times: u32,
    ) -> Self {
        let capacity = (0..times.max(1)).map(|i| (period * i, if i % 2 == 0 { first } else { second })).collect();
        Self { name: name.into(), streams, capacity }
    }

    /// Bytes per second at a time.
    pub fn at(&self, t: Duration) -> f64 {
        let after = self.capacity.partition_point(|(from, _)| *from <= t);
        after.checked_sub(1).map_or(f64::INFINITY, |i| self.capacity[i].1)
    }
}

/// A link: channels between a host and the halves of a card's memories, and the limits on them.
#[derive(Clone, PartialEq, Debug)]
pub struct Link {
    channels: usize,
    limits: Vec<Limit>,
    latency: Duration,
}

/// Why a model makes no sense.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No channels, or more than [`Link::MAX_CHANNELS`].
    #[error("a link has 1 to 16 channels, not {0}")]
    Channels(usize),
    /// A capacity that is not a positive number, or times that do not start at 0 and go up.
    #[error("the limit {0:?} needs positive capacities, from 0 on, in the order of their times")]
    Capacity(String),
    /// A stream that nothing limits would be infinitely fast.
    #[error("nothing limits channel {} to {:?}, {:?}", .0.channel, .0.half, .0.direction)]
    Unlimited(Stream),
}

impl Link {
    /// The most channels that a link may have: as many as the software card may.
    pub const MAX_CHANNELS: usize = 16;

    /// A link with these limits. `latency` passes between the submission of an operation and its first byte; operations
    /// that wait for others spend it waiting.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn new(channels: usize, limits: Vec<Limit>, latency: Duration) -> Result<Self, ModelError> {
        if !(1..=Self::MAX_CHANNELS).contains(&channels) {
            return Err(ModelError::Channels(channels));
        }
        for l in &limits {
            let starts = l.capacity.first().is_some_and(|(t, _)| t.is_zero());
            let sorted = l.capacity.windows(2).all(|w| w[0].0 < w[1].0);
            if !starts || !sorted || !l.capacity.iter().all(|(_, c)| c.is_finite() && *c > 0.0) {
                return Err(ModelError::Capacity(l.name.clone()));
            }
        }
        let this = Self { channels, limits, latency };
        let free = this.streams().find(|s| !this.limits.iter().any(|l| l.streams.contain(s)));
        free.map_or(Ok(this), |free| Err(ModelError::Unlimited(free)))
    }

    /// The number of channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The limits.
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }

    /// From the submission of an operation to its first byte.
    pub fn latency(&self) -> Duration {
        self.latency
    }

    /// Every stream that there can be.
    pub fn streams(&self) -> impl Iterator<Item = Stream> + '_ {
        let directions = [Direction::ToHost, Direction::FromHost];
        (0..self.channels).flat_map(move |channel| {
            Half::ALL
                .into_iter()
                .flat_map(move |half| directions.into_iter().map(move |direction| Stream { channel, half, direction }))
        })
    }

    /// The link as it is from time `t` on, counted from there.
    pub fn after(&self, t: Duration) -> Self {
        let mut link = self.clone();
        for limit in &mut link.limits {
            let now = limit.at(t);
            limit.capacity.retain(|(at, _)| *at > t);
            for (at, _) in &mut limit.capacity {
                *at -= t;
            }
            limit.capacity.insert(0, (Duration::ZERO, now));
        }
        link
    }

    /// The first time after `t` at which a capacity changes.
    pub fn next_change(&self, t: Duration) -> Option<Duration> {
        let next = |l: &Limit| l.capacity.get(l.capacity.partition_point(|(at, _)| *at <= t)).map(|(at, _)| *at);
        self.limits.iter().filter_map(next).min()
    }

    /// The rate of each stream at time `t` when all run at once: max-min fair shares (bytes per second), found
    /// by filling all of them equally until a limit is full, fixing those, and going on (Bertsekas and Gallager, "Data
    /// Networks", 6.5.2).
    pub fn fair_shares(&self, streams: &[Stream], t: Duration) -> Vec<f64> {
        let mut rates = vec![0.0; streams.len()];
        let mut open = vec![true; streams.len()];
        let mut room: Vec<f64> = self.limits.iter().map(|l| l.at(t)).collect();
        loop {
            // The limit that is full first when all open streams grow alike.
            let users = |l: &Limit, open: &[bool]| {
                streams.iter().zip(open).filter(|(s, open)| **open && l.streams.contain(s)).count()
            };
            let tightest = (0..self.limits.len())
                .filter_map(|i| match users(&self.limits[i], &open) {
                    0 => None,
                    n => Some((room[i].max(0.0) / n as f64, i)),
                })
                .min_by(|a, b| a.0.total_cmp(&b.0));
            let Some((grow, tightest)) = tightest else { return rates };
            for (s, rate) in rates.iter_mut().enumerate().filter(|(s, _)| open[*s]) {
                *rate += grow;
                for (l, room) in self.limits.iter().zip(&mut room) {
                    if l.streams.contain(&streams[s]) {
                        *room -= grow;
                    }
                }
            }
            for (s, open) in streams.iter().zip(&mut open) {
                *open &= !self.limits[tightest].streams.contain(s);
            }
        }
    }
}
