//! The linear programme against brute force, and the simulation against what can be worked out by hand.

use std::time::Duration;

use dmalane::queue::{AddressPolicy, BalancePolicy, Direction};
use proptest::prelude::*;

use crate::link::{Demand, Half, Limit, Link, LinkCopy, Rig, Stream, Streams, best_rate, shortest};

const GB: f64 = 1e9;
const MIB: u64 = 1 << 20;

fn channel(c: usize, rate: f64) -> Limit {
    Limit::constant(format!("channel {c}"), Streams { channel: Some(c), ..Streams::ALL }, rate)
}

/// The shortest time over all ways to share each demand out between two channels in steps of 1/`steps`: for fixed
/// shares, a move takes as long as its slowest limit needs for what goes through it.
fn brute_force(link: &Link, demands: &[Demand], steps: u64) -> f64 {
    let mut best = f64::INFINITY;
    let n = (steps + 1).pow(demands.len() as u32);
    for mut code in 0..n {
        let shares: Vec<f64> = demands
            .iter()
            .map(|_| {
                let share = (code % (steps + 1)) as f64 / steps as f64;
                code /= steps + 1;
                share
            })
            .collect();
        let through = |l: &Limit| {
            let of = |(d, share): (&Demand, &f64)| {
                let by = |channel, share: f64| {
                    let s = Stream { channel, half: d.half, direction: d.direction };
                    if l.streams.contain(&s) { d.bytes as f64 * share } else { 0.0 }
                };
                by(0, *share) + by(1, 1.0 - share)
            };
            demands.iter().zip(&shares).map(of).sum::<f64>() / l.at(Duration::ZERO)
        };
        best = best.min(link.limits().iter().map(through).fold(0.0, f64::max));
    }
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn the_programme_finds_what_brute_force_finds(
        rates in [1u32..30, 1u32..30],
        halves in [1u32..30, 1u32..30],
        shared in 1u32..60,
        bytes in [1u64..64, 1u64..64, 1u64..64],
    ) {
        let mut limits: Vec<Limit> = (0..2).map(|c| channel(c, f64::from(rates[c]) * GB)).collect();
        for (half, rate) in [Half::Hbm0, Half::Hbm1].into_iter().zip(halves) {
            let streams = Streams { half: Some(half), direction: Some(Direction::ToHost), ..Streams::ALL };
            limits.push(Limit::constant("half", streams, f64::from(rate) * GB));
        }
        limits.push(Limit::constant("shared", Streams::ALL, f64::from(shared) * GB));
        let link = Link::new(2, limits, Duration::ZERO).unwrap();
        let demand = |half, direction, mib: u64| Demand { half, direction, bytes: mib * MIB };
        let demands = [
            demand(Half::Hbm0, Direction::ToHost, bytes[0]),
            demand(Half::Hbm1, Direction::ToHost, bytes[1]),
            demand(Half::Ddr0, Direction::FromHost, bytes[2]),
        ];
        let (got, brute) = (shortest(&link, &demands, &[]).unwrap(), brute_force(&link, &demands, 40));
        prop_assert!(got <= brute * 1.000_001, "{got} {brute}");
        // The steps can miss this: half a step of each demand on the slowest channel.
        let coarse = bytes.iter().sum::<u64>() as f64 * MIB as f64 / 80.0 / (f64::from(rates[0].min(rates[1])) * GB);
        prop_assert!(got >= brute - coarse - 1e-9, "{got} {brute} {coarse}");
    }

    /// No policy can be faster than the optimum, whatever the capacities do.
    #[test]
    fn nothing_beats_the_optimum(
        rates in [1u32..30, 1u32..30],
        other in 1u32..30,
        period in 100u64..3000,
        mib in [1u64..96, 1u64..96],
    ) {
        let streams = Streams { channel: Some(1), ..Streams::ALL };
        let caps = [f64::from(rates[1]) * GB, f64::from(other) * GB];
        let toggling = Limit::toggling("channel 1", streams, caps, Duration::from_micros(period), 60);
        let link = Link::new(2, vec![channel(0, f64::from(rates[0]) * GB), toggling], Duration::ZERO).unwrap();
        let copies = [(Half::Hbm0, mib[0]), (Half::Hbm1, mib[1])]
            .map(|(half, mib)| LinkCopy { at: half.at(0), direction: Direction::ToHost, bytes: mib * MIB });
        let demands = copies.map(|c| Demand { half: Half::of(c.at).unwrap(), direction: c.direction, bytes: c.bytes });
        let run = Rig::new(link.clone(), AddressPolicy::new(Half::areas())).run(&copies).unwrap();
        let best = shortest(&link, &demands, &[]).unwrap();
        prop_assert!(run.seconds >= best * 0.999_999, "{} {best}", run.seconds);
    }
}

#[test]
fn periods_are_used_up_one_after_another() {
    // 12 GB/s for a millisecond, then 6 GB/s: 15 MB take 1.5 ms.
    let streams = Streams { channel: Some(0), ..Streams::ALL };
    let limit = Limit::toggling("channel 0", streams, [12.0 * GB, 6.0 * GB], Duration::from_millis(1), 2);
    let link = Link::new(1, vec![limit], Duration::ZERO).unwrap();
    let demand = Demand { half: Half::Ddr0, direction: Direction::ToHost, bytes: 15_000_000 };
    assert!((shortest(&link, &[demand], &[]).unwrap() - 1.5e-3).abs() < 1e-9);
    assert!((best_rate(&link, &[demand], &[0]).unwrap() - 10.0 * GB).abs() < 1.0);
    assert!(shortest(&link, &[demand], &[3]).is_err(), "no such channel");
    let run = Rig::new(link.clone(), AddressPolicy::new(Half::areas()))
        .run(&[LinkCopy { at: Half::Ddr0.at(0), direction: Direction::ToHost, bytes: 15_000_000 }])
        .unwrap();
    assert!((run.seconds - 1.5e-3).abs() < 1e-8, "{}", run.seconds);
    // From half a millisecond on, half of the first period is over.
    let later = shortest(&link.after(Duration::from_micros(500)), &[demand], &[]).unwrap();
    assert!((later - 2e-3).abs() < 1e-9, "{later}");
}

#[test]
fn shares_are_max_min_fair() {
    // Channel 0 is held to 2 by its own limit; the other two share what is left of 12.
    let limits =
        vec![channel(0, 2.0), channel(1, 100.0), channel(2, 100.0), Limit::constant("all", Streams::ALL, 12.0)];
    let link = Link::new(3, limits, Duration::ZERO).unwrap();
    let streams: Vec<Stream> =
        (0..3).map(|channel| Stream { channel, half: Half::Ddr0, direction: Direction::ToHost }).collect();
    assert_eq!(link.fair_shares(&streams, Duration::ZERO), [2.0, 5.0, 5.0]);
}

#[test]
fn models_that_make_no_sense_are_refused() {
    let ok = || vec![channel(0, 1.0)];
    assert!(Link::new(0, ok(), Duration::ZERO).is_err());
    assert!(Link::new(17, ok(), Duration::ZERO).is_err());
    assert!(Link::new(2, ok(), Duration::ZERO).is_err(), "nothing limits channel 1");
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(Link::new(1, vec![channel(0, bad)], Duration::ZERO).is_err());
    }
    let late = Limit { capacity: vec![(Duration::from_secs(1), 1.0)], ..channel(0, 1.0) };
    assert!(Link::new(1, vec![late], Duration::ZERO).is_err());
    let never = Limit { capacity: vec![], ..channel(0, 1.0) };
    assert!(Link::new(1, vec![never], Duration::ZERO).is_err());
    assert!(Link::new(1, ok(), Duration::ZERO).is_ok());
}

#[test]
fn memory_that_is_not_there_fails_the_copy() {
    let link = Link::new(1, vec![channel(0, GB)], Duration::ZERO).unwrap();
    let mut rig = Rig::new(link, AddressPolicy::only(0));
    let copy = |at, bytes| LinkCopy { at, direction: Direction::ToHost, bytes };
    let past = Half::Ddr1.span().last();
    assert!(rig.run(&[copy(past, MIB)]).is_err());
    assert!(rig.run(&[copy(Half::Ddr1.at(0), MIB)]).is_ok());
}

/// Two channels of which one is slower.
#[test]
fn a_balanced_copy_comes_close_to_the_optimum() {
    let link = Link::new(2, vec![channel(0, 12.0 * GB), channel(1, 6.0 * GB)], Duration::from_micros(2)).unwrap();
    let mut rig = Rig::new(link.clone(), BalancePolicy::new(Half::areas()));
    let got = rig.run(&[LinkCopy { at: Half::Ddr0.at(0), direction: Direction::FromHost, bytes: 64 * MIB }]).unwrap();
    let demand = Demand { half: Half::Ddr0, direction: Direction::FromHost, bytes: 64 * MIB };
    let best = best_rate(&link, &[demand], &[]).unwrap();
    assert!((best - 18.0 * GB).abs() < 1.0 && got.rate > 0.97 * best, "{} {best}", got.rate);
}
