//! Limits named from measurements of cards behind modelled links, where the truth is known.

use std::time::Duration;

use dmalane::validate::Directions as Side;

use crate::link::fit::{Cause, FitAnswer, Question};
use crate::link::measure::{FitSettings, SlowCard, emulations, fit_link};
use crate::link::{Limit, Link, Memory};

/// The answers that the fit must give for the assumptions of the policy study. A busy machine may need several tries.
fn limits_are_named<const N: usize>(cases: [(&str, [Vec<Cause>; 3]); N]) {
    for (name, causes) in cases {
        let (_, link) = emulations().into_iter().find(|(known, _)| *known == name).unwrap();
        let (mut said, mut noisy) = (String::new(), false);
        let right = (0..4).any(|attempt| {
            let time = Duration::from_millis(50 << attempt);
            let settings = FitSettings { time, runs: 3 + 2 * attempt, noise: 0.05 };
            let card = SlowCard::new(super::card(), link.clone(), Duration::from_millis(20)).unwrap();
            let found = fit_link(Box::new(card), &settings).unwrap();
            said = format!("{name}, {time:?}: {:?} {:?}", found.fit.answers, found.fit.explanations);
            // No limits explain the rates: threads did not get to run.
            noisy = found.fit.explanations.is_empty();
            let expected = Question::ALL.into_iter().zip(&causes).all(|(question, causes)| {
                let answer = &found.fit.answers.iter().find(|a| a.0 == question).unwrap().1;
                match answer {
                    FitAnswer::NotSo => causes.is_empty(),
                    FitAnswer::Unexplained => false,
                    FitAnswer::Because(found) | FitAnswer::CannotTell(found) => {
                        !causes.is_empty() && found.iter().any(|c| causes.contains(c))
                    }
                }
            });
            println!("{said}");
            expected && capacities_are_right(name, &link, &found.fit.limits)
        });
        match (noisy || is_busy()) && !right {
            true => println!("SKIPPED: this machine is too busy to measure {name}: {said}"),
            false => assert!(right, "{said}"),
        }
    }
}

/// True where twice as many threads want to run as there are processors: then rates say little about limits.
fn is_busy() -> bool {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    load > 2.0 * std::thread::available_parallelism().map_or(1, usize::from) as f64
}

/// Limits that were planted and found have their capacity, to 10 %: 5 % for rates that count as equal, and what a
/// throttle that lets late threads catch up adds.
fn capacities_are_right(name: &str, link: &Link, found: &[Limit]) -> bool {
    found.iter().all(|limit| {
        let planted = link.limits().iter().find(|planted| planted.streams == limit.streams);
        let error = planted.map_or(0.0, |planted| limit.capacity[0].1 / planted.capacity[0].1 - 1.0);
        println!("{name}: {}: {:+.1} %", limit.name, error * 100.0);
        error.abs() < 0.1
    })
}

fn channels() -> Vec<Cause> {
    [Side::Read, Side::Write].map(Cause::Channel).into()
}

fn slow_to_read() -> Vec<Cause> {
    vec![Cause::Half(Memory::Hbm, Side::Read)]
}

#[test]
fn the_limits_of_emulated_cards_are_named() {
    let shared = vec![Cause::Shared(Side::Both)];
    limits_are_named([("v80-hbm", [shared.clone(), shared, vec![Cause::Memory(Memory::Hbm, Side::Read)]])]);
}

#[test]
#[ignore = "a minute more; scripts/nightly runs it"]
fn the_limits_of_more_emulated_cards_are_named() {
    let shared = vec![Cause::Shared(Side::Both)];
    // A card of halves is not half duplex; both memories at once are held by the channels; and a half that gives 14 to
    // two channels of 12 each is slow to read.
    limits_are_named([
        ("half-egress-14", [vec![], channels(), slow_to_read()]),
        ("half-egress-24", [vec![], channels(), vec![]]),
        ("shared-23", [shared.clone(), shared.clone(), slow_to_read()]),
        ("contended-to-6", [vec![], channels(), slow_to_read()]),
        ("v80-placement", [vec![], channels(), slow_to_read()]),
        ("v80-half", [shared.clone(), shared.clone(), slow_to_read()]),
        ("v80-channel", [shared.clone(), shared, vec![Cause::Channel(Side::Read)]]),
    ]);
}
