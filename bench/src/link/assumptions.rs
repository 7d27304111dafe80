//! The links that may be behind the rates that were measured on the Alveo V80, and the transfers to try on them.
//!
//! Xilinx SLASH, pull request 126, reports about 23 GB/s to and from DDR, 23 GB/s to HBM and 12 GB/s from HBM over two
//! channels, and nothing gained from using both memories or both directions at once. It does not say why. Each of these
//! links would explain some of it.

use std::time::Duration;

use dmalane::addr::CardAddr;
use dmalane::queue::Direction;

use super::{Demand, Half, Limit, Link, LinkCopy, Memory, Streams};

/// A link, and what it assumes.
pub struct Assumption {
    /// In a few words.
    pub name: &'static str,
    /// The link.
    pub link: Link,
    /// True when all channels are alike all of the time, so that sharing out equally is right.
    pub equal: bool,
}

const GB: f64 = 1e9;
/// Per channel and direction.
const CHANNEL: f64 = 12.0 * GB;
/// Submission to first byte: what a doorbell, a descriptor fetch and a read over PCIe take together.
const LATENCY: Duration = Duration::from_micros(2);

fn streams(channel: Option<usize>, half: Option<Half>, direction: Option<Direction>) -> Streams {
    Streams { channel, half, direction, ..Streams::ALL }
}

/// Two channels with limits for each direction, made by `channel`; reads from a half of HBM limited to `half_egress`.
fn link(half_egress: f64, channel: impl Fn(usize, Direction) -> Limit, shared: Option<f64>) -> Link {
    let mut limits = Vec::new();
    for c in 0..2 {
        limits.extend([Direction::ToHost, Direction::FromHost].map(|d| channel(c, d)));
    }
    for half in [Half::Hbm0, Half::Hbm1] {
        let name = format!("{half:?} egress");
        limits.push(Limit::constant(name, streams(None, Some(half), Some(Direction::ToHost)), half_egress));
    }
    limits.extend(shared.map(|cap| Limit::constant("shared", Streams::ALL, cap)));
    Link::new(2, limits, LATENCY).expect("constants that make sense")
}

fn constant(rates: [f64; 2]) -> impl Fn(usize, Direction) -> Limit {
    move |c, d| Limit::constant(format!("channel {c} {d:?}"), streams(Some(c), None, Some(d)), rates[c])
}

/// The four of the policy study (half egress 14 and 24, all shared 23, a channel contended to 6), then channel 1
/// contended every other millisecond, and two channels that are a little and very unequal.
pub fn all() -> Vec<Assumption> {
    let of = |name, link, equal| Assumption { name, link, equal };
    vec![
        of("half egress 14", link(14.0 * GB, constant([CHANNEL; 2]), None), true),
        of("half egress 24", link(24.0 * GB, constant([CHANNEL; 2]), None), true),
        of("shared 23", link(14.0 * GB, constant([CHANNEL; 2]), Some(23.0 * GB)), true),
        of("contended to 6", link(14.0 * GB, constant([CHANNEL, 6.0 * GB]), None), false),
        toggling(Duration::from_millis(1)),
        of("12 and 9", link(14.0 * GB, constant([CHANNEL, 9.0 * GB]), None), false),
        of("12 and 1", link(14.0 * GB, constant([CHANNEL, 1.0 * GB]), None), false),
    ]
}

/// Half egress 14; channel 1 is contended every other `period`, 10 000 times.
pub fn toggling(period: Duration) -> Assumption {
    let channel = |c: usize, d: Direction| {
        let s = streams(Some(c), None, Some(d));
        match c {
            0 => Limit::constant("channel 0", s, CHANNEL),
            _ => Limit::toggling("channel 1", s, [CHANNEL, CHANNEL / 2.0], period, 10_000),
        }
    };
    Assumption { name: "toggling 12 and 6", link: link(14.0 * GB, channel, None), equal: false }
}

/// Four links, each of which has the V80's reported rates, as `v80-smi validate` places its buffers and chooses
/// channels: 23 GB/s to and from DDR and to HBM, 12 GB/s from HBM, 23 GB/s to both memories, 23 GB/s in both
/// directions.
///
/// - *v80 placement*: 11.5 GB/s for each channel and direction, 12 GB/s from each half of HBM. All of the reported
///   limits come from placement: buffers in one half, reads on one channel, writes on the other.
/// - *v80 half*: 12 GB/s for each channel and direction, 12 GB/s from each half of HBM, 23 GB/s together.
/// - *v80 hbm*: the same, but 12 GB/s from all of HBM.
/// - *v80 channel*: 12 GB/s from the card and 23 GB/s to it for each channel, 23 GB/s together; its HBM is slow to read
///   where one channel reads it.
pub fn v80() -> Vec<Assumption> {
    let [read, write] = [Direction::ToHost, Direction::FromHost];
    let channels = |rates: [f64; 2]| -> Vec<Limit> {
        let of = |c: usize, d: Direction, rate| {
            Limit::constant(format!("channel {c} {d:?}"), streams(Some(c), None, Some(d)), rate * GB)
        };
        (0..2).flat_map(|c| [of(c, read, rates[0]), of(c, write, rates[1])]).collect()
    };
    let halves = || {
        let of = |half| Limit::constant(format!("{half:?} egress"), streams(None, Some(half), Some(read)), 12.0 * GB);
        Memory::Hbm.halves().map(of)
    };
    let hbm = Streams { memory: Some(Memory::Hbm), direction: Some(read), ..Streams::ALL };
    let hbm = Limit::constant("HBM egress", hbm, 12.0 * GB);
    let shared = || Limit::constant("shared", Streams::ALL, 23.0 * GB);
    let of = |name, limits: [Vec<Limit>; 2]| {
        let link = Link::new(2, limits.concat(), LATENCY).expect("constants that make sense");
        Assumption { name, link, equal: true }
    };
    vec![
        of("v80 placement", [channels([11.5, 11.5]), halves().to_vec()]),
        of("v80 half", [channels([12.0, 12.0]), [&halves()[..], &[shared()]].concat()]),
        of("v80 hbm", [channels([12.0, 12.0]), vec![hbm, shared()]]),
        of("v80 channel", [channels([12.0, 23.0]), vec![shared()]]),
    ]
}

/// Transfers to try on a link.
pub struct Workload {
    /// In a few words.
    pub name: &'static str,
    /// The copies, all submitted at once.
    pub copies: Vec<LinkCopy>,
}

/// Bytes of a stripe: the largest page that a card's MMU maps here.
const STRIPE: u64 = 2 << 20;

fn copy(at: CardAddr, direction: Direction, bytes: u64) -> LinkCopy {
    LinkCopy { at, direction, bytes }
}

/// A buffer that lies in stripes on both halves of HBM by turns, a copy for each.
fn striped(direction: Direction, bytes: u64) -> Vec<LinkCopy> {
    let stripe = |i: u64| {
        let half = if i.is_multiple_of(2) { Half::Hbm0 } else { Half::Hbm1 };
        copy(half.at(i / 2 * STRIPE), direction, STRIPE.min(bytes - i * STRIPE))
    };
    (0..bytes.div_ceil(STRIPE)).map(stripe).collect()
}

/// The five columns of the policy study, and two more with HBM beside DDR. `bytes` in all, read from the card; as much
/// again written to it in the duplex case.
pub fn loads(bytes: u64) -> Vec<Workload> {
    let d = Direction::ToHost;
    let [ddr, hbm] = [Half::Ddr0, Half::Hbm0].map(|h| h.at(0));
    let of = |name, copies| Workload { name, copies };
    let mut both = striped(d, bytes / 2);
    both.insert(0, copy(ddr, d, bytes / 2));
    vec![
        of("DDR", vec![copy(ddr, d, bytes)]),
        of("HBM, one half", vec![copy(hbm, d, bytes)]),
        of("HBM, striped", striped(d, bytes)),
        of("HBM, two buffers", vec![copy(hbm, d, bytes / 2), copy(Half::Hbm1.at(0), d, bytes / 2)]),
        of("HBM + DDR", both),
        of("HBM half + DDR", vec![copy(hbm, d, bytes / 2), copy(ddr, d, bytes / 2)]),
        of("duplex DDR", vec![copy(ddr, d, bytes), copy(Half::Ddr1.at(0), Direction::FromHost, bytes)]),
    ]
}

/// The demand of copies on each half and direction.
pub fn demands(copies: &[LinkCopy]) -> Vec<Demand> {
    let mut demands: Vec<Demand> = Vec::new();
    for c in copies {
        let Some(half) = Half::of(c.at) else { continue };
        match demands.iter_mut().find(|d| d.half == half && d.direction == c.direction) {
            Some(d) => d.bytes += c.bytes,
            None => demands.push(Demand { half, direction: c.direction, bytes: c.bytes }),
        }
    }
    demands
}
