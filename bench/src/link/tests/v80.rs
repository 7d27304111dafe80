//! The V80's reported rates on the links that may be behind them, and the measurements that tell these links apart.

use dmalane::queue::Direction;
use dmalane::validate::Directions;

use crate::link::assumptions::{Assumption, v80};
use crate::link::fit::{Cause, Fit, FitAnswer, Measured, Question, emulate, fit, plan};
use crate::link::{Half, Memory, Stream};

const READ: Direction = Direction::ToHost;
const WRITE: Direction = Direction::FromHost;

/// GB/s of these streams, at the rates that the link gives them when all run at once.
fn rate(link: &Assumption, streams: &[(usize, Half, Direction)]) -> f64 {
    let streams = streams.iter().map(|&(channel, half, direction)| Stream { channel, half, direction });
    let measured = emulate(&link.link, &streams.collect::<Vec<_>>());
    (measured.flows.iter().map(|flow| flow.1).sum::<f64>() / 1e8).round() / 10.0
}

/// Both channels, each with these halves and directions.
fn both(moves: &[(Half, Direction)]) -> Vec<(usize, Half, Direction)> {
    moves.iter().flat_map(|&(half, direction)| [(0, half, direction), (1, half, direction)]).collect()
}

#[test]
fn each_link_gives_the_reported_rates_as_v80_smi_places_buffers() {
    use Half::{Ddr0, Hbm0};
    for link in v80() {
        // Eight buffers at a distance of 512 MB: the lower half. Raw transfers alternate channels; both directions have
        // reads on one channel and writes on the other.
        let rates = [
            rate(&link, &both(&[(Ddr0, READ)])),
            rate(&link, &both(&[(Ddr0, WRITE)])),
            rate(&link, &both(&[(Hbm0, WRITE), (Ddr0, WRITE)])),
            rate(&link, &[(0, Ddr0, READ), (1, Ddr0, WRITE)]),
        ];
        assert_eq!(rates, [23.0; 4], "{}", link.name);
        // Transfers through the daemon take the channel of their half: one of them here.
        let raw = rate(&link, &both(&[(Hbm0, READ)]));
        let routed = rate(&link, &[(0, Hbm0, READ)]);
        let reported = if link.name == "v80 channel" { routed } else { raw };
        assert_eq!(reported, 12.0, "{}", link.name);
        let write = if link.name == "v80 channel" { vec![(0, Hbm0, WRITE)] } else { both(&[(Hbm0, WRITE)]) };
        assert_eq!(rate(&link, &write), 23.0, "{}", link.name);
    }
}

#[test]
fn four_measurements_tell_the_links_apart() {
    use Half::{Ddr0, Hbm0, Hbm1};
    let seen: Vec<_> = v80()
        .iter()
        .map(|link| {
            let rates = [
                rate(link, &[(0, Hbm0, WRITE)]),
                rate(link, &both(&[(Hbm0, READ)])),
                rate(link, &[(0, Hbm0, READ), (1, Hbm1, READ)]),
                rate(link, &both(&[(Ddr0, READ), (Ddr0, WRITE)])),
            ];
            (link.name, rates)
        })
        .collect();
    println!("one channel to HBM, both from a half, paired from HBM, both directions over both channels: {seen:?}");
    // The table of docs/bench/policy.md.
    let expected = [
        ("v80 placement", [11.5, 12.0, 23.0, 46.0]),
        ("v80 half", [12.0, 12.0, 23.0, 23.0]),
        ("v80 hbm", [12.0, 12.0, 12.0, 23.0]),
        ("v80 channel", [23.0, 23.0, 23.0, 23.0]),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn the_asymmetry_is_found_again() {
    let limits = |link: &Assumption, noise: f64| {
        let mut state = 7u64;
        let mut disturb = |rate: f64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            rate * (1.0 + noise * ((state >> 33) as f64 / (1u64 << 30) as f64 - 1.0))
        };
        let mut points: Vec<Measured> = plan(2).iter().map(|streams| emulate(&link.link, streams)).collect();
        points.iter_mut().flat_map(|p| &mut p.flows).for_each(|flow| flow.1 = disturb(flow.1));
        fit(2, &points, noise.max(0.005))
    };
    let slow_hbm = |found: &Fit| found.answers.iter().find(|a| a.0 == Question::HbmReadsSlow).unwrap().1.clone();
    for noise in [0.0, 0.01] {
        for (link, cause) in v80().iter().zip([
            Some(Cause::Half(Memory::Hbm, Directions::Read)),
            Some(Cause::Half(Memory::Hbm, Directions::Read)),
            Some(Cause::Memory(Memory::Hbm, Directions::Read)),
            Some(Cause::Channel(Directions::Read)),
        ]) {
            let found = limits(link, noise);
            println!("{} {noise}: {:?}\n{:?}", link.name, found.answers, found.explanations);
            let answer = slow_hbm(&found);
            match cause {
                Some(cause) => assert_eq!(answer, FitAnswer::Because(vec![cause]), "{} at {noise}", link.name),
                None => assert_eq!(answer, FitAnswer::NotSo, "{} at {noise}", link.name),
            }
            // Each limit that is named has its capacity, to the noise and what several streams of it add up to.
            for limit in &found.limits {
                let Some(planted) = link.link.limits().iter().find(|l| l.streams == limit.streams) else { continue };
                let error = limit.capacity[0].1 / planted.capacity[0].1 - 1.0;
                assert!(error.abs() <= noise + 1e-9, "{} {}: {error}", link.name, limit.name);
            }
        }
    }
}
