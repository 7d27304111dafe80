//! The limits of a card's link, found by measuring sets of streams.

use std::time::Duration;

use dmalane::{DeviceSpec, OpenOptions};

use crate::link::fit::Question;
use crate::link::measure::{FitReport, FitSettings, SLOWER, SlowCard, emulations, fit_link, names};
use crate::report::Report;

#[derive(clap::Args)]
pub struct Options {
    /// The card; the beginning of each half of its memories is overwritten
    #[arg(short, long, value_name = "DEVICE", default_value = "soft")]
    device: DeviceSpec,

    /// Put the card behind a modelled link with known limits
    #[arg(long, value_name = "LINK", value_parser = emulation)]
    emulate: Option<String>,

    /// Runs of each set of streams, of which the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    runs: u64,
}

/// Time that each set of streams runs.
const TIME: Duration = Duration::from_millis(100);
/// A busy machine's late threads shall not look like a limit.
const CATCH_UP: Duration = Duration::from_millis(20);

fn emulation(text: &str) -> Result<String, String> {
    let known: Vec<String> = emulations().into_iter().map(|(name, _)| name).collect();
    match known.iter().any(|name| name == text) {
        true => Ok(text.to_owned()),
        false => Err(format!("no such link; the links are {}", known.join(", "))),
    }
}

pub fn run(options: &Options) -> Result<Report, Box<dyn std::error::Error>> {
    let mut report = Report::new("limits");
    let mut device = OpenOptions { flat: true, ..OpenOptions::default() }.device(&options.device)?;
    let link = emulations().into_iter().find(|(name, _)| Some(name) == options.emulate.as_ref());
    report.say(device.info().name);
    if let Some((name, link)) = link {
        report.say(format!("behind the modelled link {name}, whose rates are divided by {SLOWER}"));
        device = Box::new(SlowCard::new(device, link, CATCH_UP).map_err(plain)?);
    }
    let settings = FitSettings { time: TIME, runs: options.runs as usize, noise: 0.05 };
    let FitReport { points, fit } = fit_link(device, &settings).map_err(plain)?;
    for point in &points {
        let streams: Vec<_> = point.flows.iter().map(|flow| flow.0).collect();
        let rate: f64 = point.flows.iter().map(|flow| flow.1).sum();
        let bytes = rate * TIME.as_secs_f64();
        report.row(&names(&streams), "together", bytes as u64, &[TIME.as_secs_f64()]);
    }
    report.say(format!("limits that explain {} measurements (rates within 5 % count as equal):", points.len()));
    for limit in &fit.limits {
        report.say(format!("  {:>7.3} GB/s  {}", limit.capacity[0].1 / 1e9, limit.name));
    }
    if fit.explanations.len() > 1 {
        report.say(format!("  (one of {} explanations that are equally short)", fit.explanations.len()));
    }
    for (question, answer) in &fit.answers {
        report.say(format!("{}\n  {answer}", asked(*question)));
    }
    Ok(report)
}

fn plain(error: Box<dyn std::error::Error + Send + Sync>) -> Box<dyn std::error::Error> {
    error
}

fn asked(question: Question) -> &'static str {
    match question {
        Question::DuplexHalves => "Why do reads and writes at once move little more than either alone?",
        Question::TogetherCapped => "Why do HBM and DDR at once move no more than one of them?",
        Question::HbmReadsSlow => "Why is reading HBM slower than writing it?",
    }
}
