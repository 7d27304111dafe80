//! Limits found again in what emulated cards measure.

use std::time::Duration;

use dmalane::queue::Direction;
use dmalane::validate::Directions;

use crate::link::fit::{Cause, FitAnswer, Measured, Memory, Question, emulate, fit, plan};
use crate::link::{Half, Limit, Link, Stream, Streams};

const GB: f64 = 1e9;

/// The limits of an emulated card, beside 12 GB/s for each channel and direction.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Card {
    channel_duplex: bool,
    /// All channels together, both directions.
    shared: bool,
    /// All channels together, each direction by itself.
    per_direction: bool,
    hbm_reads: bool,
}

impl Card {
    fn link(self) -> Link {
        let mut limits = Vec::new();
        let all = Streams::ALL;
        for channel in [0, 1].map(Some) {
            for direction in [Direction::ToHost, Direction::FromHost].map(Some) {
                limits.push(Limit::constant("channel", Streams { channel, direction, ..all }, 12.0 * GB));
            }
            if self.channel_duplex {
                limits.push(Limit::constant("duplex", Streams { channel, ..all }, 15.0 * GB));
            }
        }
        if self.shared {
            limits.push(Limit::constant("shared", all, 20.0 * GB));
        }
        if self.per_direction {
            for direction in [Direction::ToHost, Direction::FromHost].map(Some) {
                limits.push(Limit::constant("shared", Streams { direction, ..all }, 17.0 * GB));
            }
        }
        if self.hbm_reads {
            for half in [Half::Hbm0, Half::Hbm1].map(Some) {
                let streams = Streams { half, direction: Some(Direction::ToHost), ..all };
                limits.push(Limit::constant("half", streams, 8.0 * GB));
            }
        }
        Link::new(2, limits, Duration::ZERO).unwrap()
    }

    fn all() -> impl Iterator<Item = Self> {
        (0..16).map(|i| Self {
            channel_duplex: i & 1 != 0,
            shared: i & 2 != 0,
            per_direction: i & 4 != 0,
            hbm_reads: i & 8 != 0,
        })
    }
}

/// Uniform in plus and minus `noise`.
struct Noise(u64, f64);

impl Noise {
    fn on(&mut self, rate: f64) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        rate * (1.0 + self.1 * ((self.0 >> 33) as f64 / (1u64 << 30) as f64 - 1.0))
    }
}

fn measure(card: Card, noise: &mut Noise) -> Vec<Measured> {
    let link = card.link();
    let mut points: Vec<Measured> = plan(2).iter().map(|streams| emulate(&link, streams)).collect();
    for rate in points.iter_mut().flat_map(|p| &mut p.flows).map(|f| &mut f.1) {
        *rate = noise.on(*rate);
    }
    points
}

fn answer(points: &[Measured], noise: f64, question: Question) -> FitAnswer {
    let found = fit(2, points, noise);
    found.answers.into_iter().find(|a| a.0 == question).unwrap().1
}

fn names(answer: &FitAnswer) -> Vec<Cause> {
    match answer {
        FitAnswer::NotSo | FitAnswer::Unexplained => Vec::new(),
        FitAnswer::Because(list) | FitAnswer::CannotTell(list) => list.clone(),
    }
}

#[test]
fn all_combinations_are_found_again() {
    let (mut sure, mut unsure) = (0, 0);
    for card in Card::all() {
        for (seed, noise) in [(0, 0.0), (1, 0.03), (2, 0.03), (3, 0.03), (4, 0.03), (5, 0.03)] {
            let points = measure(card, &mut Noise(seed, noise));
            let found = fit(2, &points, noise.max(0.005));
            for (question, answer) in &found.answers {
                let what =
                    format!("{card:?} noise {noise} seed {seed} {question:?}: {answer:?} {:?}", found.explanations);
                // Which limits can be the cause is known from how the card was made.
                let causes: Vec<Cause> = match question {
                    Question::DuplexHalves if card.channel_duplex || card.shared => {
                        let channel = card.channel_duplex.then_some(Cause::Channel(Directions::Both));
                        channel.into_iter().chain(card.shared.then_some(Cause::Shared(Directions::Both))).collect()
                    }
                    Question::DuplexHalves => vec![],
                    Question::HbmReadsSlow if card.hbm_reads => vec![Cause::Half(Memory::Hbm, Directions::Read)],
                    Question::HbmReadsSlow => vec![],
                    Question::TogetherCapped => {
                        let direction = [Directions::Read, Directions::Write].map(Cause::Shared);
                        let half = card.hbm_reads.then_some(Cause::Half(Memory::Hbm, Directions::Read));
                        match (card.per_direction, card.shared) {
                            (true, _) => direction.to_vec(),
                            (false, true) => vec![Cause::Shared(Directions::Both)],
                            (false, false) => [Directions::Read, Directions::Write]
                                .map(Cause::Channel)
                                .into_iter()
                                .chain(half)
                                .collect(),
                        }
                    }
                };
                match answer {
                    FitAnswer::NotSo => assert!(causes.is_empty(), "{what}"),
                    FitAnswer::Unexplained => panic!("{what}"),
                    FitAnswer::Because(found) => {
                        assert!(!found.is_empty() && found.iter().all(|c| causes.contains(c)), "{what}");
                        sure += 1;
                    }
                    FitAnswer::CannotTell(found) => {
                        assert!(found.iter().any(|c| causes.contains(c)), "{what}");
                        println!("{what}");
                        unsure += 1;
                    }
                }
            }
        }
    }
    println!("{sure} named, {unsure} not told apart");
    assert!(sure >= 20 * unsure, "{sure} named, {unsure} not");
}

#[test]
fn a_card_like_the_seeds() {
    // All share 20 GB/s, reads of HBM are slow.
    let card = Card { channel_duplex: false, shared: true, per_direction: false, hbm_reads: true };
    for noise in [0.0, 0.03] {
        let points = measure(card, &mut Noise(7, noise));
        let noise = noise.max(0.005);
        assert_eq!(
            answer(&points, noise, Question::DuplexHalves),
            FitAnswer::Because(vec![Cause::Shared(Directions::Both)])
        );
        assert_eq!(
            answer(&points, noise, Question::HbmReadsSlow),
            FitAnswer::Because(vec![Cause::Half(Memory::Hbm, Directions::Read)])
        );
    }
}

#[test]
fn the_capacities_come_back() {
    let card = Card { channel_duplex: true, shared: false, per_direction: false, hbm_reads: true };
    let found = fit(2, &measure(card, &mut Noise(3, 0.03)), 0.03);
    let capacity = |streams: Streams| found.limits.iter().find(|l| l.streams == streams).unwrap().capacity[0].1 / GB;
    for channel in [0, 1].map(Some) {
        let duplex = capacity(Streams { channel, ..Streams::ALL });
        assert!((duplex / 15.0 - 1.0).abs() < 0.035, "{duplex}");
    }
    let half = capacity(Streams { half: Some(Half::Hbm0), direction: Some(Direction::ToHost), ..Streams::ALL });
    assert!((half / 8.0 - 1.0).abs() < 0.035, "{half}");
    assert!(found.link(Duration::ZERO).is_ok());
}

#[test]
fn what_was_not_measured_is_not_known() {
    let card = Card { channel_duplex: true, shared: false, per_direction: false, hbm_reads: false };
    let all = measure(card, &mut Noise(0, 0.0));
    assert_eq!(answer(&[], 0.03, Question::DuplexHalves), FitAnswer::CannotTell(vec![]));
    let one_way: Vec<Measured> =
        all.iter().filter(|p| p.flows.iter().all(|f| f.0.direction == Direction::ToHost)).cloned().collect();
    assert_eq!(answer(&one_way, 0.01, Question::DuplexHalves), FitAnswer::CannotTell(vec![]));
    assert_eq!(answer(&one_way, 0.01, Question::HbmReadsSlow), FitAnswer::CannotTell(vec![]));
    // Without a channel by itself in both directions, what channels share looks like what each of them has.
    let together: Vec<Measured> =
        all.iter().filter(|p| p.flows.iter().any(|f| f.0.channel != p.flows[0].0.channel)).cloned().collect();
    let told = answer(&together, 0.01, Question::DuplexHalves);
    assert!(matches!(&told, FitAnswer::CannotTell(list) if list.len() > 1), "{told:?}");
    assert!(names(&told).contains(&Cause::Channel(Directions::Both)), "{told:?}");
}

#[test]
fn rates_that_no_limits_explain_are_called_so() {
    let card = Card { channel_duplex: false, shared: true, per_direction: false, hbm_reads: true };
    let mut points = measure(card, &mut Noise(0, 0.0));
    // Something else kept these streams from running, and no limit is used up.
    let disturbed = points.iter().position(|p| p.flows.len() == 4).unwrap();
    points[disturbed].flows.iter_mut().for_each(|f| f.1 *= 0.5);
    assert!(points[disturbed].flows.iter().all(|f| f.1 > 0.0));
    let found = fit(2, &points, 0.03);
    assert!(found.explanations.is_empty() && found.limits.is_empty());
    assert!(
        found.answers.iter().all(|a| matches!(a.1, FitAnswer::Unexplained | FitAnswer::NotSo)),
        "{:?}",
        found.answers
    );
}

#[test]
fn nonsense_is_passed_over() {
    let stream = Stream { channel: 7, half: Half::Ddr0, direction: Direction::ToHost };
    for rate in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        let points = [Measured { flows: vec![(stream, rate)] }, Measured { flows: Vec::new() }];
        assert!(fit(2, &points, 0.03).limits.is_empty());
    }
    // A channel that there is not is held by what all share.
    assert!(!fit(2, &[Measured { flows: vec![(stream, 1.0)] }], f64::NAN).answers.is_empty());
}
