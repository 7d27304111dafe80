//! The outcome of a comparison, as text, JSON, CSV and HTML.

use serde::Serialize;
use serde_json::{Value, json};

use super::loaders::Sample;
use super::{Compared, Outcome};
use crate::layout::{Table, bad, count, plain, wrap};
use crate::output::csv_line;
use crate::size::{binary, giga};

/// A loader in every form of the report.
#[derive(Serialize)]
struct Row {
    name: String,
    version: Option<String>,
    skipped: Option<String>,
    memory: Option<String>,
    dma_ready: Option<bool>,
    bytes_right: Option<bool>,
    cold: Option<Runs>,
    warm: Option<Runs>,
}

#[derive(Serialize)]
struct Runs {
    runs_s: Vec<f64>,
    median_s: f64,
    fastest_s: f64,
    slowest_s: f64,
    bytes_per_s: f64,
    cpu_s: f64,
    peak_rss_bytes: u64,
    not_cold: u32,
}

/// The middle of numbers; of an even number of them, the smaller one.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

fn runs(samples: &[Sample], bytes: u64, not_cold: u32) -> Option<Runs> {
    if samples.is_empty() {
        return None;
    }
    let runs_s: Vec<f64> = samples.iter().map(|sample| sample.seconds).collect();
    let median_s = median(runs_s.clone());
    Some(Runs {
        median_s,
        fastest_s: runs_s.iter().copied().fold(f64::INFINITY, f64::min),
        slowest_s: runs_s.iter().copied().fold(0.0, f64::max),
        runs_s,
        bytes_per_s: bytes as f64 / median_s,
        cpu_s: median(samples.iter().map(|sample| sample.cpu_s).collect()),
        peak_rss_bytes: samples.iter().map(|sample| sample.peak_rss_bytes).max().unwrap_or(0),
        not_cold,
    })
}

fn loader(of: &Compared, bytes: u64) -> Row {
    let first = of.first.as_ref().ok();
    Row {
        name: of.name.clone(),
        version: first.map(|sample| sample.version.clone()),
        skipped: of.first.as_ref().err().cloned(),
        memory: first.map(|sample| sample.memory.clone()),
        dma_ready: first.map(|sample| sample.dma_ready),
        bytes_right: first.map(|_| of.right),
        cold: runs(&of.cold, bytes, of.not_cold).filter(|_| first.is_some()),
        warm: runs(&of.warm, bytes, 0).filter(|_| first.is_some()),
    }
}

/// The loaders in the order of a report: DMA-ready memory first, then the fastest; those that cannot run are last.
fn ordered(o: &Outcome) -> Vec<Row> {
    let mut loaders: Vec<Row> = o.loaders.iter().map(|of| loader(of, o.bytes)).collect();
    let key = |l: &Row| l.cold.as_ref().map_or(f64::INFINITY, |runs| runs.median_s);
    loaders.sort_by(|a, b| b.dma_ready.cmp(&a.dma_ready).then(key(a).total_cmp(&key(b))));
    loaders
}

/// The outcome as what `--json` prints.
pub fn json(o: &Outcome) -> Value {
    let files: Vec<_> = o.files.iter().map(|path| path.to_string_lossy()).collect();
    let Outcome { bytes, rounds, .. } = o;
    json!({
        "schema": 1, "command": "compare", "files": files, "bytes": bytes, "rounds": rounds, "loaders": ordered(o),
        "reported": o.reported.as_ref().map(|path| path.to_string_lossy()),
    })
}

/// The outcome as CSV: a line for each loader and cache state.
pub fn csv(o: &Outcome) -> String {
    let head = ["loader", "cache", "dma_ready", "bytes_right", "median_s", "fastest_s", "slowest_s", "bytes_per_s"];
    let mut out = head.join(",") + ",cpu_s,peak_rss_bytes,not_cold,skipped\n";
    for l in ordered(o) {
        let flag = |flag: Option<bool>| flag.map_or(String::new(), |flag| flag.to_string());
        let of = |cache: &str, runs: Option<&Runs>| {
            let number = |of: fn(&Runs) -> f64| runs.map_or(String::new(), |runs| of(runs).to_string());
            csv_line([
                l.name.clone(),
                cache.to_owned(),
                flag(l.dma_ready),
                flag(l.bytes_right),
                number(|r| r.median_s),
                number(|r| r.fastest_s),
                number(|r| r.slowest_s),
                number(|r| r.bytes_per_s),
                number(|r| r.cpu_s),
                runs.map_or(String::new(), |r| r.peak_rss_bytes.to_string()),
                runs.map_or(String::new(), |r| r.not_cold.to_string()),
                l.skipped.clone().unwrap_or_default(),
            ])
        };
        match l.skipped.is_some() {
            true => out += &of("", None),
            false => out += &(of("cold", l.cold.as_ref()) + &of("warm", l.warm.as_ref())),
        }
    }
    out
}

/// A median with its spread.
fn time(runs: Option<&Runs>) -> String {
    let Some(r) = runs else { return "-".to_owned() };
    // Milliseconds, to three digits.
    let of = |seconds: f64| giga(seconds * 1e12);
    format!("{} ({}..{})", of(r.median_s), of(r.fastest_s), of(r.slowest_s))
}

fn rate(runs: Option<&Runs>) -> String {
    runs.map_or("-".to_owned(), |r| giga(r.bytes_per_s))
}

/// The outcome for people: the answer, the loaders, and those that cannot run.
pub fn text(o: &Outcome) -> String {
    let loaders = ordered(o);
    let mut out = wrap(&answer(o, &loaders), 2) + "\n";
    let mut table =
        Table::new("lrrrrrrl", ["loader", "cold, ms", "GB/s", "CPU, s", "warm, ms", "GB/s", "memory", "bytes"]);
    let (ready, other): (Vec<_>, Vec<_>) =
        loaders.iter().filter(|l| l.skipped.is_none()).partition(|l| l.dma_ready == Some(true));
    let mut row = |l: &Row| {
        let cpu = l.cold.as_ref().map_or("-".to_owned(), |r| format!("{:.2}", r.cpu_s));
        let rss = l.cold.as_ref().map_or("-".to_owned(), |r| binary(r.peak_rss_bytes));
        let (cold, warm) = (l.cold.as_ref(), l.warm.as_ref());
        let right = if l.bytes_right == Some(true) { "right" } else { "WRONG" }.to_owned();
        let name = plain(&l.name);
        table.row([name, time(cold), rate(cold), cpu, time(warm), rate(warm), rss, right]);
    };
    ready.iter().for_each(|l| row(l));
    other.iter().for_each(|l| row(l));
    out += &table.text();
    for l in &other {
        let why = format!("{}: {}, which is not DMA-ready", plain(&l.name), l.memory.as_deref().unwrap_or_default());
        out += &wrap(&plain(&why), 2);
    }
    for l in loaders.iter().filter(|l| l.bytes_right == Some(false)) {
        out += &wrap(&bad(&format!("{}: these are not the bytes of the files", plain(&l.name))), 2);
    }
    for l in loaders.iter().filter(|l| l.cold.as_ref().is_some_and(|runs| runs.not_cold > 0)) {
        let runs = l.cold.as_ref().map_or(0, |runs| runs.not_cold);
        out += &wrap(&format!("{}: {} of the cold runs were not cold", plain(&l.name), runs), 2);
    }
    let skipped: Vec<&Row> = loaders.iter().filter(|l| l.skipped.is_some()).collect();
    if !skipped.is_empty() {
        out.push_str("\nNot compared:\n");
        for l in skipped {
            out += &wrap(&format!("  {}: {}", plain(&l.name), l.skipped.as_deref().unwrap_or_default()), 4);
        }
    }
    if let Some(path) = &o.reported {
        out += &format!("\nReport: {}\n", plain(&path.to_string_lossy()));
    }
    out
}

/// The fastest into DMA-ready memory, cold and warm.
fn answer(o: &Outcome, loaders: &[Row]) -> String {
    let fastest = |of: fn(&Row) -> Option<&Runs>| {
        let runs = loaders.iter().filter(|l| l.dma_ready == Some(true) && l.bytes_right == Some(true));
        let runs = runs.filter_map(|l| Some((&l.name, of(l)?.median_s)));
        runs.min_by(|a, b| a.1.total_cmp(&b.1)).map_or("none".to_owned(), |(name, _)| plain(name))
    };
    format!(
        "Fastest into DMA-ready memory: {} cold, {} warm ({} in {}, median of {})",
        fastest(|l| l.cold.as_ref()),
        fastest(|l| l.warm.as_ref()),
        binary(o.bytes),
        count(o.files.len(), "file"),
        count(o.rounds as usize, "round"),
    )
}

/// Text within HTML.
fn escaped(text: &str) -> String {
    let text = plain(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;")
}

/// The outcome as a page that needs no other file.
pub fn html(o: &Outcome) -> String {
    let loaders = ordered(o);
    let every = loaders.iter().flat_map(|l| [&l.cold, &l.warm]).flatten();
    let most = every.map(|runs| runs.bytes_per_s).fold(1.0, f64::max);
    let mut rows = String::new();
    for l in &loaders {
        let name = escaped(&l.name);
        if let Some(why) = &l.skipped {
            rows += &format!("<tr class=\"skipped\"><th>{name}</th><td colspan=\"6\">{}</td></tr>\n", escaped(why));
            continue;
        }
        let class = if l.dma_ready == Some(true) { "ready" } else { "other" };
        let bars: String = [("cold", &l.cold), ("warm", &l.warm)]
            .iter()
            .map(|(cache, runs)| {
                let width = runs.as_ref().map_or(0.0, |runs| runs.bytes_per_s / most * 100.0);
                let (rate, time) = (rate(runs.as_ref()), escaped(&time(runs.as_ref())));
                format!(
                    "<div class=\"bar {cache}\" style=\"width:{width:.1}%\"></div>{cache} {rate} GB/s, {time} ms<br>"
                )
            })
            .collect();
        let cold = l.cold.as_ref();
        rows += &format!(
            "<tr class=\"{class}\"><th>{name}<br><small>{}</small></th><td class=\"bars\">{bars}</td><td>{:.2} s</td>\
             <td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
            escaped(l.version.as_deref().unwrap_or_default()),
            cold.map_or(0.0, |runs| runs.cpu_s),
            cold.map_or(String::new(), |runs| binary(runs.peak_rss_bytes)),
            escaped(l.memory.as_deref().unwrap_or_default()),
            if l.bytes_right == Some(true) { "right" } else { "<b>WRONG</b>" },
            cold.map_or(0, |runs| runs.not_cold),
        );
    }
    let files: String = o.files.iter().map(|path| escaped(&path.to_string_lossy()) + "<br>").collect();
    format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>Loaders compared</title>\n<style>\n\
         body {{ font: 15px sans-serif; margin: 2em; max-width: 75em }}\n\
         table {{ border-collapse: collapse; width: 100% }}\n\
         th, td {{ text-align: left; padding: .4em .8em; border-bottom: 1px solid #ccc; vertical-align: top }}\n\
         .bars {{ width: 45% }} .bar {{ height: .6em; border-radius: 2px }}\n\
         .cold {{ background: #4472c4 }} .warm {{ background: #ed9b40 }} .other, .skipped {{ color: #777 }}\n\
         </style>\n<h1>Loaders compared</h1>\n<p>{}</p><p>{files}</p>\n\
         <table><tr><th>Loader</th><th>Rate and time: median (fastest..slowest)</th><th>CPU, cold</th>\
         <th>Peak memory</th><th>Bytes are in</th><th>Bytes</th><th>Runs not cold</th></tr>\n{rows}</table>\n\
         <p>Made by dmalane {}. Grey: not DMA-ready, or not compared.</p></html>\n",
        escaped(&answer(o, &loaders)),
        env!("CARGO_PKG_VERSION"),
    )
}
