//! From measured rates to the limits that explain them.
//!
//! Streams that run together share what there is until each of them is held by a limit that is used up. So an
//! explanation is a set of limits such that in every measurement every stream goes through one that carries all it can,
//! and what a limit can carry is the most that it was ever seen to carry. Among all kinds of limits, the fewest that
//! explain everything are taken to be true; where several sets of that size do, the measurements cannot tell them
//! apart.

use std::fmt;

use dmalane::queue::Direction;
use dmalane::validate::Directions;

pub use super::Memory;
use super::{Half, Limit, Stream, Streams};
#[cfg(test)]
use super::{Link, model::ModelError};

/// Streams that ran at once, each with its rate (bytes per second).
#[derive(Clone, PartialEq, Debug)]
pub struct Measured {
    /// The streams, all of which were kept busy.
    pub flows: Vec<(Stream, f64)>,
}

/// A kind of limit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Cause {
    /// A limit on each channel in a direction.
    Channel(Directions),
    /// A limit on each half of a memory.
    Half(Memory, Directions),
    /// A limit on a memory as a whole.
    Memory(Memory, Directions),
    /// A limit on everything together in a direction.
    Shared(Directions),
}

const ALL_DIRECTIONS: [Directions; 3] = [Directions::Read, Directions::Write, Directions::Both];

/// The direction of the bytes that a limit counts; `None` for a limit on both together (half duplex).
fn direction(of: Directions) -> Option<Direction> {
    match of {
        Directions::Read => Some(Direction::ToHost),
        Directions::Write => Some(Direction::FromHost),
        Directions::Both => None,
    }
}

impl Cause {
    /// Every kind.
    pub fn all() -> Vec<Self> {
        let per_directions = |directions| {
            let memories = Memory::ALL.into_iter();
            let of_memory = memories.flat_map(move |m| [Self::Half(m, directions), Self::Memory(m, directions)]);
            [Self::Channel(directions), Self::Shared(directions)].into_iter().chain(of_memory)
        };
        ALL_DIRECTIONS.into_iter().flat_map(per_directions).collect()
    }

    /// The sets of streams that have such a limit each.
    fn members(self, channels: usize) -> Vec<Streams> {
        match self {
            Self::Channel(directions) => (0..channels)
                .map(|c| Streams { channel: Some(c), direction: direction(directions), ..Streams::ALL })
                .collect(),
            Self::Half(memory, directions) => memory
                .halves()
                .into_iter()
                .map(|h| Streams { half: Some(h), direction: direction(directions), ..Streams::ALL })
                .collect(),
            Self::Memory(memory, directions) => {
                vec![Streams { memory: Some(memory), direction: direction(directions), ..Streams::ALL }]
            }
            Self::Shared(directions) => vec![Streams { direction: direction(directions), ..Streams::ALL }],
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let directions = |w: &Directions| match w {
            Directions::Read => "reading",
            Directions::Write => "writing",
            Directions::Both => "reading and writing at once",
        };
        match self {
            Self::Channel(w) => write!(f, "each channel, {}", directions(w)),
            Self::Half(m, w) => write!(f, "each half of {}, {}", format!("{m:?}").to_uppercase(), directions(w)),
            Self::Memory(m, w) => write!(f, "all of {}, {}", format!("{m:?}").to_uppercase(), directions(w)),
            Self::Shared(w) => write!(f, "all channels together, {}", directions(w)),
        }
    }
}

/// A question about the V80's rates (`docs/bench/policy.md`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Question {
    /// Why do reads and writes at once move little more than either alone?
    DuplexHalves,
    /// Why do HBM and DDR at once move no more than one of them?
    TogetherCapped,
    /// Why is reading HBM slower than writing it?
    HbmReadsSlow,
}

impl Question {
    /// All three.
    pub const ALL: [Self; 3] = [Self::DuplexHalves, Self::TogetherCapped, Self::HbmReadsSlow];
}

/// The answer of the measurements to a question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FitAnswer {
    /// It is not so.
    NotSo,
    /// These limits are the cause, each for a part of the measurements (reads, say, and writes).
    Because(Vec<Cause>),
    /// Any of these may be the cause; an empty list when nothing was measured that bears on it.
    CannotTell(Vec<Cause>),
    /// No limits explain the measurements: they are noisier than was said, or were not all taken of the same link.
    Unexplained,
}

impl fmt::Display for FitAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSo => f.write_str("not so here"),
            Self::Because(causes) => write!(f, "limited by {}", list(causes, ", and by ")),
            Self::CannotTell(causes) if causes.is_empty() => f.write_str("cannot tell: not measured"),
            Self::CannotTell(causes) => write!(f, "cannot tell: {}", list(causes, "; or ")),
            Self::Unexplained => f.write_str("cannot tell: no limits explain the rates, which may be too noisy"),
        }
    }
}

fn list(causes: &[Cause], between: &str) -> String {
    causes.iter().map(Cause::to_string).collect::<Vec<_>>().join(between)
}

/// Limits that explain measurements.
#[derive(Clone, PartialEq, Debug)]
pub struct Fit {
    channels: usize,
    /// The kinds of limits of each explanation; all explanations are equally short.
    pub explanations: Vec<Vec<Cause>>,
    /// The limits of the first explanation.
    pub limits: Vec<Limit>,
    /// The seed's questions.
    pub answers: [(Question, FitAnswer); 3],
}

#[cfg(test)]
impl Fit {
    /// The first explanation as a link, where every stream was seen to be limited.
    ///
    /// # Errors
    /// [`ModelError::Unlimited`] for a stream about which nothing was measured.
    pub fn link(&self, latency: std::time::Duration) -> Result<Link, ModelError> {
        Link::new(self.channels, self.limits.clone(), latency)
    }
}

/// Explains `measured` by limits. Rates that differ by less than `noise` (0.03 is 3 %) each way count as equal.
///
/// Measurements with rates that are not positive numbers, and those without streams, are passed over.
pub fn fit(channels: usize, measured: &[Measured], noise: f64) -> Fit {
    let good = |m: &&Measured| !m.flows.is_empty() && m.flows.iter().all(|(_, r)| r.is_finite() && *r > 0.0);
    let points: Vec<&Measured> = measured.iter().filter(good).collect();
    // Two rates of one truth can lie this far apart.
    let close = ((1.0 - noise) / (1.0 + noise)).max(0.0);
    let kinds: Vec<Kind> = Cause::all().into_iter().map(|cause| Kind::new(cause, channels, &points, close)).collect();
    let flows = points.iter().flat_map(|p| p.flows.iter().enumerate().map(move |(i, _)| (*p, i)));
    let flows: Vec<(&Measured, usize)> = flows.collect();
    // Bit k: kind k holds this stream in this measurement.
    let holds = |(p, i): &(&Measured, usize)| {
        let bit = |(k, kind): (usize, &Kind)| usize::from(kind.holds(p, &p.flows[*i].0)) << k;
        kinds.iter().enumerate().map(bit).sum::<usize>()
    };
    let held: Vec<usize> = flows.iter().map(holds).collect();
    let explains = |set: &usize| held.iter().all(|h| h & set != 0);
    // The fewest kinds that explain everything. Where none do, something kept the streams of a measurement slower than
    // any limit.
    let of_size = |size: u32| subsets(kinds.len() as u32, size).filter(explains).collect::<Vec<_>>();
    let sizes = 0..=kinds.len() as u32;
    let sets = match held.contains(&0) {
        true => Vec::new(),
        false => sizes.map(of_size).find(|sets| !sets.is_empty()).unwrap_or_default(),
    };
    let causes = |set: usize| (0..kinds.len()).filter(move |k| set >> k & 1 == 1).map(|k| kinds[k].cause);
    let first = sets.first().copied().unwrap_or(0);
    let limits = kinds.iter().enumerate().filter(|(k, _)| first >> k & 1 == 1).flat_map(|(_, kind)| kind.limits());
    let answers = Question::ALL.map(|question| {
        let (so, relevant) = bears_on(question, &points, close);
        if relevant.is_empty() {
            return (question, FitAnswer::CannotTell(Vec::new()));
        }
        if !so {
            return (question, FitAnswer::NotSo);
        }
        if sets.is_empty() {
            return (question, FitAnswer::Unexplained);
        }
        // The limits that hold the streams of a measurement, in an explanation: common ones if possible, else those of
        // each.
        let of = |set: usize, p: &Measured| {
            let mine = flows.iter().zip(&held).filter(|((q, _), _)| std::ptr::eq(*q, p));
            common_or_each(mine.map(|(_, held)| held & set).collect())
        };
        // And so for the measurements of a way.
        let by_directions = |set: usize, directions: Directions| {
            common_or_each(
                relevant.iter().filter(|p| directions_of(p) == directions).flat_map(|p| of(set, p)).collect(),
            )
        };
        let masks =
            |set: &usize| ALL_DIRECTIONS.into_iter().flat_map(|directions| by_directions(*set, directions)).collect();
        let masks: Vec<Vec<usize>> = sets.iter().map(masks).collect();
        let union = |masks: &Vec<usize>| masks.iter().fold(0, |any, m| any | m);
        let any = masks.iter().fold(0, |any, m| any | union(m));
        let sure = masks.iter().all(|m| union(m) == any && m.iter().all(|m| m.count_ones() == 1));
        let found: Vec<Cause> = causes(any).collect();
        (question, if sure { FitAnswer::Because(found) } else { FitAnswer::CannotTell(found) })
    });
    Fit {
        channels,
        limits: limits.collect(),
        explanations: sets.iter().map(|s| causes(*s).collect()).collect(),
        answers,
    }
}

/// The sets of `size` of `bits` bits (fewer than 64), from the least number on: each is the next larger number with as
/// many bits (Gosper; Knuth, "The Art of Computer Programming" 7.1.3).
fn subsets(bits: u32, size: u32) -> impl Iterator<Item = usize> {
    let next = move |set: &usize| {
        let low = set & set.wrapping_neg();
        let carried = set.checked_add(low)?;
        // The empty set is the only one of its size.
        let rest = (set ^ carried).checked_div(low)? >> 2;
        Some(carried | rest).filter(|next| *next < 1 << bits)
    };
    std::iter::successors(Some((1usize << size) - 1).filter(|first| *first < 1 << bits), next)
}

/// A kind of limit with what each of its members can carry.
struct Kind {
    cause: Cause,
    members: Vec<(Streams, f64)>,
    close: f64,
}

fn carried(p: &Measured, streams: &Streams) -> f64 {
    p.flows.iter().filter(|(s, _)| streams.contain(s)).map(|(_, rate)| rate).sum()
}

impl Kind {
    fn new(cause: Cause, channels: usize, points: &[&Measured], close: f64) -> Self {
        let capacity = |streams: Streams| {
            let most = points.iter().map(|p| carried(p, &streams)).fold(0.0, f64::max);
            (streams, most)
        };
        Self { cause, members: cause.members(channels).into_iter().map(capacity).collect(), close }
    }

    /// True when a member that the stream goes through is used up in this measurement.
    fn holds(&self, p: &Measured, stream: &Stream) -> bool {
        self.members.iter().any(|(streams, most)| streams.contain(stream) && carried(p, streams) >= most * self.close)
    }

    fn limits(&self) -> impl Iterator<Item = Limit> + '_ {
        let name = |streams: &Streams| match (streams.channel, streams.half) {
            (Some(c), _) => format!("{} ({c})", self.cause),
            (_, Some(h)) => format!("{} ({h:?})", self.cause),
            _ => self.cause.to_string(),
        };
        let seen = self.members.iter().filter(|(_, most)| *most > 0.0);
        seen.map(move |(streams, most)| Limit::constant(name(streams), *streams, *most))
    }
}

/// The bits that all masks have, or else the masks.
fn common_or_each(masks: Vec<usize>) -> Vec<usize> {
    match masks.iter().fold(usize::MAX, |all, m| all & m) {
        0 | usize::MAX => masks,
        common => vec![common],
    }
}

fn directions_of(p: &Measured) -> Directions {
    let reads = p.flows.iter().filter(|(s, _)| s.direction == Direction::ToHost).count();
    match reads {
        0 => Directions::Write,
        n if n == p.flows.len() => Directions::Read,
        _ => Directions::Both,
    }
}

fn total(p: &Measured) -> f64 {
    carried(p, &Streams::ALL)
}

/// Whether what a question asks about is so, and the measurements that it is about: those where it shows, or, where it
/// does not show, all that bear on it.
fn bears_on<'a>(question: Question, points: &[&'a Measured], close: f64) -> (bool, Vec<&'a Measured>) {
    let same = |a: &Measured, mut like: Vec<Stream>| {
        let mut streams: Vec<Stream> = a.flows.iter().map(|(s, _)| *s).collect();
        let key = |s: &Stream| (s.channel, s.half, s.direction == Direction::ToHost);
        streams.sort_by_key(key);
        like.sort_by_key(key);
        streams == like
    };
    let find = |like: Vec<Stream>| points.iter().copied().find(|p| same(p, like.clone()));
    let (mut shows, mut not) = (Vec::new(), Vec::new());
    for &p in points {
        let streams = || p.flows.iter().map(|(s, _)| *s);
        let only = |f: &dyn Fn(&Stream) -> bool| find(streams().filter(|s| f(s)).collect());
        let reads = |s: &Stream| s.direction == Direction::ToHost;
        let hbm = |s: &Stream| Memory::of(s.half) == Memory::Hbm;
        let mixed = |f: &dyn Fn(&Stream) -> bool| streams().any(|s| f(&s)) && streams().any(|s| !f(&s));
        let so = match question {
            Question::DuplexHalves if mixed(&reads) => {
                let (read, write) = (only(&reads), only(&|s| !reads(s)));
                read.zip(write).map(|(r, w)| total(p) < close * (total(r) + total(w)))
            }
            // With the same channels: what one memory alone does over all of them.
            Question::TogetherCapped if mixed(&hbm) && !mixed(&reads) => {
                let mut channels: Vec<usize> = streams().map(|s| s.channel).collect();
                channels.sort_unstable();
                channels.dedup();
                let alone = |memory: Memory| {
                    let comparable = |q: &&&Measured| {
                        let all = |f: &dyn Fn(&Stream) -> bool| q.flows.iter().all(|(s, _)| f(s));
                        all(&|s| Memory::of(s.half) == memory && reads(s) == streams().all(|s| reads(&s)))
                            && channels.iter().all(|c| q.flows.iter().any(|(s, _)| s.channel == *c))
                    };
                    points.iter().filter(comparable).map(|q| total(q)).reduce(f64::max)
                };
                let best = [alone(Memory::Ddr), alone(Memory::Hbm)];
                best.into_iter().flatten().reduce(f64::max).map(|best| total(p) * close <= best)
            }
            Question::HbmReadsSlow if streams().all(|s| hbm(&s) && reads(&s)) => {
                let turned = streams().map(|s| Stream { direction: Direction::FromHost, ..s }).collect();
                find(turned).map(|write| total(p) < close * total(write))
            }
            _ => None,
        };
        match so {
            Some(true) => shows.push(p),
            Some(false) => not.push(p),
            None => {}
        }
    }
    if shows.is_empty() { (false, not) } else { (true, shows) }
}

/// The sets of streams that tell the kinds of limits apart, for a card with `channels` channels: each channel alone and
/// all together; on DDR, one half of HBM, both halves, HBM with DDR; reading, writing and both.
pub fn plan(channels: usize) -> Vec<Vec<Stream>> {
    let mut places: Vec<Vec<(usize, Half)>> = Vec::new();
    let halves = |h: [Half; 2]| (0..channels).map(move |c| (c, h[c % 2])).collect();
    for c in 0..channels {
        places.extend([vec![(c, Half::Ddr0)], vec![(c, Half::Hbm0)], vec![(c, Half::Hbm1)]]);
    }
    for h in [
        [Half::Ddr0; 2],
        [Half::Hbm0; 2],
        [Half::Hbm1; 2],
        [Half::Hbm0, Half::Hbm1],
        [Half::Ddr0, Half::Ddr1],
        [Half::Hbm0, Half::Ddr0],
    ] {
        places.push(halves(h));
    }
    places.dedup();
    let [read, write] = [Direction::ToHost, Direction::FromHost];
    let stream = |direction| move |&(channel, half): &(usize, Half)| Stream { channel, half, direction };
    let directions = |p: &Vec<(usize, Half)>| {
        let of = |d| p.iter().map(stream(d)).collect::<Vec<_>>();
        [of(read), of(write), [of(read), of(write)].concat()]
    };
    places.iter().flat_map(directions).collect()
}

/// The rates of these streams on a modelled link, without noise.
#[cfg(test)]
pub fn emulate(link: &Link, streams: &[Stream]) -> Measured {
    let rates = link.fair_shares(streams, std::time::Duration::ZERO);
    Measured { flows: streams.iter().copied().zip(rates).collect() }
}
