//! The results of a validation as text and JSON.

use std::path::Path;
use std::time::Duration;

use dmalane::validate::{Allocation, Directions, Figure, Pages, Rate};
use serde_json::{Value, json};

use super::outcome::ValidateOutcome;
use crate::layout::{Table, bad, count, good, plain, wrap};
use crate::progress;
use crate::runs::reached;
use crate::size::{binary, giga, per_second};

pub fn direction(directions: Directions) -> &'static str {
    match directions {
        Directions::Read => "read",
        Directions::Write => "write",
        Directions::Both => "both",
    }
}

fn pages(pages: Pages) -> &'static str {
    match pages {
        Pages::Small => "4KiB",
        Pages::Huge => "2MiB",
    }
}

pub fn us(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e9).round() / 1e3
}

/// The outcome as what `--json` prints, described in `docs/formats/json.md`.
pub fn json(outcome: &ValidateOutcome, page: Option<&Path>) -> Value {
    let ValidateOutcome { settings, report, .. } = outcome;
    let duration = settings.iterations.is_none().then_some(settings.duration.as_secs_f64());
    let options = json!({
        "threads": settings.threads,
        "iodepth": settings.iodepth,
        "starting_offset": settings.starting_offset.unwrap_or(0),
        "offset": settings.stride,
        "channel_region_stride": settings.region_stride,
        "channels": settings.channels.entries(),
        "allocation": match settings.allocation {
            Allocation::Auto => "auto",
            Allocation::Paired => "paired",
        },
        "raw": settings.raw,
        "iterations": settings.iterations,
        "duration_s": duration,
    });
    let integrity = report.integrity.iter().map(|i| {
        json!({
            "memory": i.phase.to_string(),
            "buffer_bytes": i.buffer,
            "pages": pages(i.pages),
            "ok": i.ok,
            "threads": i.threads,
            "mismatches": i.wrong,
        })
    });
    let rate = |r: &Rate| {
        json!({
            "bytes_per_s": r.bytes_per_s,
            "p50_us": us(r.p50),
            "p99_us": us(r.p99),
            "buffers": r.buffers,
        })
    };
    let figures = report.figures.iter().map(|f| {
        json!({
            "memory": f.phase.to_string(),
            "buffer_bytes": f.buffer,
            "pages": pages(f.pages),
            "page_kind": f.kind.to_string(),
            "direction": direction(f.directions),
            "read": f.read.as_ref().map(rate),
            "write": f.write.as_ref().map(rate),
            "total_bytes_per_s": f.total(),
            "reference_bytes_per_s": f.reference,
        })
    });
    json!({
        "schema": 5,
        "command": "validate",
        "device": outcome.device,
        "notes": outcome.notes,
        "passed": report.passed(),
        "complete": outcome.complete,
        "settings": options,
        "integrity": integrity.collect::<Value>(),
        "figures": figures.collect::<Value>(),
        "reference": report.reference,
        "reported": page.map(|path| path.to_string_lossy()),
        "skipped": report.left_out,
    })
}

/// The outcome for people: the answer, integrity, figures, and with `verbose` how the device is driven.
pub fn text(outcome: &ValidateOutcome, page: Option<&Path>, verbose: bool) -> String {
    let report = &outcome.report;
    let colour = if report.passed() && outcome.complete { good } else { bad };
    let mut out = wrap(&answer(outcome, &colour(verdict(outcome))), 2);
    out += &wrap(&plain(&how(outcome)), 2);
    for note in outcome.notes.iter().filter(|_| verbose) {
        out += &format!("  {}", wrap(&plain(note), 4));
    }
    if verbose {
        out += &format!("  {}", progress::whole_time());
    }
    out.push('\n');
    out += &integrity(outcome).text();
    if !report.figures.is_empty() {
        out += &format!("\n{MEANING}\n{}", figures(outcome).text());
        out += &wrap(&format!("reference (ref): {}", report.reference), 2);
    }
    for left in &report.left_out {
        out += &wrap(&format!("not measured: {}", plain(left)), 2);
    }
    if let Some(path) = page {
        out += &format!("Report: {}\n", plain(&path.to_string_lossy()));
    }
    out
}

/// The device, and how it was measured.
pub fn how(outcome: &ValidateOutcome) -> String {
    let ValidateOutcome { device, settings, .. } = outcome;
    let raw = if settings.raw { ", raw transfers" } else { "" };
    let depth = match settings.iodepth {
        1 => String::new(),
        n => format!(" with {n} buffers in flight each way"),
    };
    format!("{device}: {}{depth}{raw}", count(settings.threads, "thread"))
}

/// Whether the data were right.
pub fn verdict(outcome: &ValidateOutcome) -> &'static str {
    match (outcome.report.passed(), outcome.complete) {
        (false, _) => "Data read back differs",
        (true, true) => "Data intact",
        (true, false) => "Incomplete",
    }
}

/// The verdict, and the fastest figures.
pub fn answer(outcome: &ValidateOutcome, verdict: &str) -> String {
    match fastest(outcome) {
        rates if rates.is_empty() => verdict.to_owned(),
        rates => format!("{verdict}: {rates}"),
    }
}

/// The fastest figure of each direction.
fn fastest(outcome: &ValidateOutcome) -> String {
    let figures = &outcome.report.figures;
    let rates = [(Directions::Read, "reads"), (Directions::Write, "writes"), (Directions::Both, "both")];
    let rates = rates.into_iter().filter_map(|(directions, name)| {
        let these = figures.iter().filter(|f| f.directions == directions);
        let f = these.max_by(|a, b| a.total().total_cmp(&b.total()))?;
        let share = f.reference.map_or(String::new(), |r| match reached(f.total(), r) {
            share if share.ends_with('%') => format!(" ({share} of reference)"),
            disturbed => format!(" (reference {disturbed})"),
        });
        Some(format!("{name} up to {}{share}", per_second(f.total())))
    });
    rates.collect::<Vec<_>>().join(", ")
}

/// The meaning of the figures' columns.
pub const MEANING: &str = "GB/s of all threads together; us for one buffer, from a histogram with a resolution of 1 %";

/// The comparisons.
pub fn integrity(outcome: &ValidateOutcome) -> Table {
    let mut table = Table::new("lrlll", ["integrity", "buffer", "pages", "equal", "different"]);
    for i in &outcome.report.integrity {
        let verdict = if i.ok == i.threads && i.wrong.is_empty() { "OK" } else { "FAILED" };
        let equal = format!("{}/{} {verdict}", i.ok, i.threads);
        let wrong = plain(&i.wrong.join("; "));
        table.row([i.phase.to_string(), binary(i.buffer), i.pages.to_string(), equal, wrong]);
    }
    table
}

/// The figure of the same work with these pages.
fn with_pages<'a>(outcome: &'a ValidateOutcome, figure: &Figure, pages: Pages) -> Option<&'a Figure> {
    let key = |f: &Figure| (f.phase, f.buffer, f.directions);
    outcome.report.figures.iter().find(|f| key(f) == key(figure) && f.pages == pages)
}

/// The longer of the times of both directions.
fn worst(figure: &Figure, get: fn(&Rate) -> Duration) -> Option<Duration> {
    figure.read.iter().chain(&figure.write).map(get).max()
}

/// A line for each figure; the one with the other page size is in the same line.
pub fn figures(outcome: &ValidateOutcome) -> Table {
    let large = "2 MiB pages";
    let head = ["memory", "buffer", "dir", "Read", "Write", "Total", "ref", "of ref", "p50 us", "p99 us", large];
    let mut table = Table::new("lrlrrrrrrrr", head);
    let other = |f: &&Figure| f.pages == Pages::Huge && with_pages(outcome, f, Pages::Small).is_some();
    for figure in outcome.report.figures.iter().filter(|f| !other(f)) {
        let none = || "-".to_owned();
        let rate = |r: &Option<Rate>| r.as_ref().map_or_else(none, |r| rate_of(r.bytes_per_s));
        let worst = |get| worst(figure, get).map_or_else(none, |t| three_digits(us(t)));
        table.row([
            figure.phase.to_string(),
            binary(figure.buffer),
            direction(figure.directions).to_owned(),
            rate(&figure.read),
            rate(&figure.write),
            rate_of(figure.total()),
            figure.reference.map_or_else(none, rate_of),
            figure.reference.map_or(String::new(), |r| reached(figure.total(), r)),
            worst(|r| r.p50),
            worst(|r| r.p99),
            match (with_pages(outcome, figure, Pages::Huge), figure.pages) {
                (Some(huge), Pages::Small) => {
                    format!("{} x{:.2}", rate_of(huge.total()), huge.total() / figure.total())
                }
                (Some(_), Pages::Huge) => "these".to_owned(),
                (None, _) => none(),
            },
        ]);
    }
    table
}

/// GB/s, aligned at the point where they are not small.
fn rate_of(rate: f64) -> String {
    if rate < 1e8 { giga(rate) } else { format!("{:.2}", rate / 1e9) }
}

/// `value` to three digits.
pub fn three_digits(value: f64) -> String {
    giga(value * 1e9)
}
