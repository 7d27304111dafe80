//! The results of a validation as text, JSON and CSV.

use std::fmt::Write;
use std::time::Duration;

use dmalane::validate::link::fit::{Answer, Cause, Question};
use dmalane::validate::{Allocation, Directions, Figure, Pages, Phase, Rate, Stop};
use serde::Serialize;

use super::Outcome;
use crate::output::plain;
use crate::size::binary;

/// The output of `--json`, described in `docs/formats/json.md`.
#[derive(Serialize)]
struct Json<'a> {
    schema: u32,
    command: &'static str,
    device: &'a str,
    notes: &'a [String],
    passed: bool,
    complete: bool,
    settings: JsonSettings,
    integrity: Vec<JsonIntegrity<'a>>,
    figures: Vec<JsonFigure>,
    ceiling: &'a str,
    skipped: &'a [String],
    fit: Option<JsonFit>,
}

#[derive(Serialize)]
struct JsonSettings {
    threads: usize,
    offset: u64,
    allocation: &'static str,
    raw: bool,
    registered: bool,
    iterations: Option<u64>,
    duration_s: Option<f64>,
}

#[derive(Serialize)]
struct JsonIntegrity<'a> {
    memory: String,
    buffer_bytes: u64,
    pages: &'static str,
    ok: usize,
    threads: usize,
    mismatches: &'a [String],
}

#[derive(Serialize)]
struct JsonFigure {
    memory: String,
    buffer_bytes: u64,
    pages: &'static str,
    page_kind: String,
    direction: &'static str,
    read: Option<JsonRate>,
    write: Option<JsonRate>,
    total_mb_per_s: f64,
    ceiling_mb_per_s: Option<f64>,
}

#[derive(Serialize)]
struct JsonRate {
    mb_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    buffers: u64,
}

#[derive(Serialize)]
struct JsonFit {
    noise: f64,
    points: Vec<Vec<JsonFlow>>,
    limits: Vec<JsonLimit>,
    explanations: Vec<Vec<String>>,
    answers: Vec<JsonAnswer>,
}

#[derive(Serialize)]
struct JsonFlow {
    channel: usize,
    half: String,
    direction: &'static str,
    mb_per_s: f64,
}

#[derive(Serialize)]
struct JsonLimit {
    name: String,
    mb_per_s: f64,
}

#[derive(Serialize)]
struct JsonAnswer {
    question: &'static str,
    answer: &'static str,
    causes: Vec<String>,
}

const MB: f64 = 1e6;

fn direction(directions: Directions) -> &'static str {
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

fn us(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e9).round() / 1e3
}

/// Rounded to a kilobyte per second; finer digits are noise.
fn mb(rate: f64) -> f64 {
    (rate / 1e3).round() / 1e3
}

pub fn json(outcome: &Outcome) -> impl Serialize + '_ {
    let Outcome { settings, report, .. } = outcome;
    let rate =
        |r: &Rate| JsonRate { mb_per_s: mb(r.bytes_per_s), p50_us: us(r.p50), p99_us: us(r.p99), buffers: r.buffers };
    Json {
        schema: 2,
        command: "validate",
        device: &outcome.device,
        notes: &outcome.notes,
        passed: report.passed(),
        complete: outcome.complete,
        settings: JsonSettings {
            threads: settings.threads,
            offset: settings.offset,
            allocation: match settings.allocation {
                Allocation::Auto => "auto",
                Allocation::Paired => "paired",
            },
            raw: settings.raw,
            registered: settings.registered,
            iterations: match settings.stop {
                Stop::After(n) => Some(n),
                Stop::For(_) => None,
            },
            duration_s: match settings.stop {
                Stop::After(_) => None,
                Stop::For(time) => Some(time.as_secs_f64()),
            },
        },
        integrity: report
            .integrity
            .iter()
            .map(|i| JsonIntegrity {
                memory: i.phase.to_string(),
                buffer_bytes: i.buffer,
                pages: pages(i.pages),
                ok: i.ok,
                threads: i.threads,
                mismatches: &i.wrong,
            })
            .collect(),
        figures: report
            .figures
            .iter()
            .map(|f| JsonFigure {
                memory: f.phase.to_string(),
                buffer_bytes: f.buffer,
                pages: pages(f.pages),
                page_kind: f.kind.to_string(),
                direction: direction(f.way),
                read: f.read.as_ref().map(rate),
                write: f.write.as_ref().map(rate),
                total_mb_per_s: mb(f.total()),
                ceiling_mb_per_s: f.ceiling.map(mb),
            })
            .collect(),
        ceiling: report.ceiling,
        skipped: &report.left_out,
        fit: outcome.fit.as_ref().map(|(fit, settings)| JsonFit {
            noise: settings.noise,
            points: fit.points.iter().map(|p| p.flows.iter().map(flow).collect()).collect(),
            limits: fit
                .fit
                .limits
                .iter()
                .map(|l| JsonLimit { name: l.name.clone(), mb_per_s: mb(l.capacity[0].1) })
                .collect(),
            explanations: fit.fit.explanations.iter().map(|e| names(e)).collect(),
            answers: fit.fit.answers.iter().map(|(question, answer)| json_answer(*question, answer)).collect(),
        }),
    }
}

fn flow((stream, rate): &(dmalane::validate::link::Stream, f64)) -> JsonFlow {
    let direction = if stream.direction == dmalane::queue::Direction::ToHost { "read" } else { "write" };
    JsonFlow { channel: stream.channel, half: format!("{:?}", stream.half), direction, mb_per_s: mb(*rate) }
}

fn names(causes: &[Cause]) -> Vec<String> {
    causes.iter().map(Cause::to_string).collect()
}

fn json_answer(question: Question, answer: &Answer) -> JsonAnswer {
    let question = match question {
        Question::DuplexHalves => "duplex_halves",
        Question::TogetherCapped => "together_capped",
        Question::HbmReadsSlow => "hbm_reads_slow",
    };
    let (answer, causes) = match answer {
        Answer::NotSo => ("not_so", Vec::new()),
        Answer::Because(causes) => ("because", names(causes)),
        Answer::CannotTell(causes) => ("cannot_tell", names(causes)),
        Answer::Unexplained => ("unexplained", Vec::new()),
    };
    JsonAnswer { question, answer, causes }
}

pub fn csv(outcome: &Outcome) -> String {
    let mut out = String::from(
        "memory,buffer_bytes,pages,direction,read_mb_per_s,write_mb_per_s,total_mb_per_s,ceiling_mb_per_s,\
         read_p50_us,read_p99_us,write_p50_us,write_p99_us,buffers\n",
    );
    let cell = |value: Option<f64>| value.map_or(String::new(), |v| v.to_string());
    for f in &outcome.report.figures {
        let of = |rate: &Option<Rate>, get: fn(&Rate) -> f64| cell(rate.as_ref().map(get));
        let buffers: u64 = f.read.iter().chain(&f.write).map(|r| r.buffers).sum();
        let cells = [
            f.phase.to_string(),
            f.buffer.to_string(),
            pages(f.pages).to_owned(),
            direction(f.way).to_owned(),
            of(&f.read, |r| mb(r.bytes_per_s)),
            of(&f.write, |r| mb(r.bytes_per_s)),
            mb(f.total()).to_string(),
            cell(f.ceiling.map(mb)),
            of(&f.read, |r| us(r.p50)),
            of(&f.read, |r| us(r.p99)),
            of(&f.write, |r| us(r.p50)),
            of(&f.write, |r| us(r.p99)),
            buffers.to_string(),
        ];
        out.push_str(&cells.join(","));
        out.push('\n');
    }
    out
}

pub fn text(outcome: &Outcome, explain: bool) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_text(&mut out, outcome, explain);
    out
}

fn write_text(out: &mut String, outcome: &Outcome, explain: bool) -> std::fmt::Result {
    let Outcome { settings, report, .. } = outcome;
    let registered = if settings.registered { "registered once" } else { "registered for each transfer" };
    let raw = if settings.raw { ", raw transfers" } else { "" };
    let threads = if settings.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", settings.threads) };
    writeln!(out, "{}: {threads}, buffers {registered}{raw}", plain(&outcome.device))?;
    if explain {
        for note in &outcome.notes {
            writeln!(out, "  {}", plain(note))?;
        }
    }
    writeln!(out)?;
    for i in &report.integrity {
        let verdict = if i.ok == i.threads && i.wrong.is_empty() { "OK" } else { "FAILED" };
        writeln!(
            out,
            "integrity  {:8} {:>9}  {} pages  {}/{} {verdict}",
            i.phase,
            binary(i.buffer),
            pages(i.pages),
            i.ok,
            i.threads
        )?;
    }
    if !report.figures.is_empty() {
        writeln!(out, "\nMB/s (10^6 bytes per second), all threads together; p50 and p99 of moving one buffer")?;
        writeln!(
            out,
            "{:8} {:>9}  {:6} {:>9} {:>9} {:>9}  {:>17} {:>10} {:>10}  2 MiB pages",
            "memory", "buffer", "dir", "Read", "Write", "Total", "ceiling", "p50 us", "p99 us"
        )?;
    }
    for figure in &report.figures {
        // The figure with the other page size is in the same line.
        let same = |f: &&Figure| (f.phase, f.buffer, f.way) == (figure.phase, figure.buffer, figure.way);
        let small = report.figures.iter().filter(same).find(|f| f.pages == Pages::Small);
        let huge = report.figures.iter().filter(same).find(|f| f.pages == Pages::Huge);
        if small.is_some() && figure.pages == Pages::Huge {
            continue;
        }
        let rate = |r: &Option<Rate>| r.as_ref().map_or("-".to_owned(), |r| format!("{:.0}", r.bytes_per_s / MB));
        let worst = |get: fn(&Rate) -> Duration| {
            figure.read.iter().chain(&figure.write).map(get).max().map_or("-".to_owned(), |t| format!("{:.1}", us(t)))
        };
        let ceiling =
            figure.ceiling.map_or("-".to_owned(), |c| format!("{:.0} ({:.0} %)", c / MB, figure.total() / c * 100.0));
        let huge = match (huge, small) {
            (Some(huge), Some(small)) => {
                format!("{:.0} (x {:.2}, {})", huge.total() / MB, huge.total() / small.total(), huge.kind)
            }
            (Some(huge), None) => format!("these ({})", huge.kind),
            (None, _) => "-".to_owned(),
        };
        writeln!(
            out,
            "{:8} {:>9}  {:6} {:>9} {:>9} {:>9}  {ceiling:>17} {:>10} {:>10}  {huge}",
            figure.phase,
            binary(figure.buffer),
            direction(figure.way),
            rate(&figure.read),
            rate(&figure.write),
            format!("{:.0}", figure.total() / MB),
            worst(|r| r.p50),
            worst(|r| r.p99),
        )?;
    }
    if !report.figures.is_empty() {
        writeln!(out, "ceiling: {}", report.ceiling)?;
    }
    if !outcome.complete {
        writeln!(out, "incomplete: see the error")?;
    }
    for left in &report.left_out {
        writeln!(out, "not measured: {}", plain(left))?;
    }
    if let Some((fit, settings)) = &outcome.fit {
        let (points, noise) = (fit.points.len(), settings.noise * 100.0);
        writeln!(out, "\nlimits that explain {points} measurements (rates within {noise:.0} % count as equal)")?;
        for limit in &fit.fit.limits {
            writeln!(out, "  {:9.0} MB/s  {}", limit.capacity[0].1 / MB, limit.name)?;
        }
        if fit.fit.explanations.len() > 1 {
            writeln!(out, "  (one of {} explanations that are equally short)", fit.fit.explanations.len())?;
        }
        for (question, answer) in &fit.fit.answers {
            writeln!(out, "{}\n  {answer}", asked(*question))?;
        }
    }
    Ok(())
}

fn asked(question: Question) -> &'static str {
    match question {
        Question::DuplexHalves => "Why do reads and writes at once move little more than either alone?",
        Question::TogetherCapped => "Why do HBM and DDR at once move no more than one of them?",
        Question::HbmReadsSlow => "Why is reading HBM slower than writing it?",
    }
}

/// The name of a series of figures.
pub fn series(phase: Phase, of: Directions, on: Pages) -> String {
    format!("{phase} {}, {} pages", direction(of), pages(on))
}
