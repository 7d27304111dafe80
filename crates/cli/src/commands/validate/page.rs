//! The figures of a validation as sections of a page.

use std::collections::HashSet;
use std::time::Duration;

use dmalane::validate::{Directions, Figure, Pages, Phase, Rate};

use super::outcome::ValidateOutcome;
use super::report::{self, direction, worst};
use crate::report::{Chart, ChartLine, RateBar, Section};
use crate::size::binary;

/// The properties that all figures of a series share.
type Series = (Phase, Pages);

/// The sections, in order.
pub fn sections(outcome: &ValidateOutcome) -> Vec<Section<'_>> {
    let figures = &outcome.report.figures;
    let mut series: Vec<Series> = figures.iter().map(|f| (f.phase, f.pages)).collect();
    let mut seen = HashSet::new();
    series.retain(|series| seen.insert(*series));
    let sizes = |of: &Series| {
        figures.iter().filter(|f| (f.phase, f.pages) == *of).map(|f| f.buffer).collect::<HashSet<_>>().len()
    };
    let charts = |times: bool, lines: &dyn Fn(&[&Figure]) -> Vec<ChartLine>| -> Vec<Chart> {
        let chart = |series: &Series| {
            let these: Vec<&Figure> = figures.iter().filter(|f| (f.phase, f.pages) == *series).collect();
            Chart { title: format!("{}, {}", series.0, series.1), times, lines: lines(&these) }
        };
        series.iter().filter(|of| sizes(of) > 1).map(chart).collect()
    };
    let sweep = figures.iter().any(|f| f.buffer != figures[0].buffer);
    vec![
        Section::Bars(bars(figures, &series, sweep), format!("Reference: {}.", outcome.report.reference)),
        Section::Charts(
            "Bandwidth over buffer size",
            charts(false, &bandwidth),
            "Dashed: the reference for the same work.",
        ),
        Section::Charts(
            "Latency over buffer size",
            charts(true, &latency),
            "Moving one buffer: the median, and dashed the 99th percentile; of both directions at once those of the \
             slower one.",
        ),
        Section::Table("Figures", report::figures(outcome), report::MEANING),
        Section::Table("Integrity", report::integrity(outcome), ""),
    ]
}

/// The number of the colour of a direction: blue, orange, green.
fn colour(directions: Directions) -> usize {
    match directions {
        Directions::Read => 2,
        Directions::Write => 6,
        Directions::Both => 8,
    }
}

const DIRECTIONS: [Directions; 3] = [Directions::Read, Directions::Write, Directions::Both];

/// The fastest figure of each memory, page size and direction.
fn bars(figures: &[Figure], series: &[Series], sweep: bool) -> Vec<RateBar> {
    let fastest = |(of, directions): (&Series, Directions)| {
        let these = figures.iter().filter(|f| (f.phase, f.pages) == *of && f.directions == directions);
        let f = these.max_by(|a, b| a.total().total_cmp(&b.total()))?;
        let size = if sweep { format!(", {} buffers", binary(f.buffer)) } else { String::new() };
        let name = format!("{} {}, {}{size}", f.phase, direction(f.directions), f.pages);
        Some(RateBar { name, colour: colour(directions), got: f.total(), reference: f.reference })
    };
    series.iter().flat_map(|of| DIRECTIONS.map(|directions| (of, directions))).filter_map(fastest).collect()
}

/// A line for each direction, of what `value` says.
fn lines(figures: &[&Figure], what: &str, dashed: bool, value: impl Fn(&Figure) -> Option<f64>) -> Vec<ChartLine> {
    let line = |directions| {
        let these = figures.iter().filter(|f| f.directions == directions);
        let points: Vec<_> = these.filter_map(|f| Some((f.buffer, value(f)?))).collect();
        let name = format!("{}{what}", direction(directions));
        (!points.is_empty()).then_some(ChartLine { name, colour: colour(directions), dashed, points })
    };
    DIRECTIONS.into_iter().filter_map(line).collect()
}

fn bandwidth(figures: &[&Figure]) -> Vec<ChartLine> {
    [lines(figures, ", reference", true, |f| f.reference), lines(figures, "", false, |f| Some(f.total()))].concat()
}

fn latency(figures: &[&Figure]) -> Vec<ChartLine> {
    let seconds = |get: fn(&Rate) -> Duration| move |f: &Figure| Some(worst(f, get)?.as_secs_f64());
    [lines(figures, ", 99 %", true, seconds(|r| r.p99)), lines(figures, ", median", false, seconds(|r| r.p50))].concat()
}
