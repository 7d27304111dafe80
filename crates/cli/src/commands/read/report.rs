//! The outcome of reading, as text, JSON and CSV.

use std::path::PathBuf;
use std::sync::Arc;

use dmalane::dma::{Heap, Picked};
use dmalane::load::fill::FillReport;
use dmalane::load::{Stage, StageReport};
use dmalane::{DeviceSpec, ReadMethod};
use serde_json::{Value, json};

use crate::commands::doctor::why_not;
use crate::layout::{Table, bottleneck, good, plain, unbroken, wrap};
use crate::output::WallTimes;
use crate::report::{RateBar, Section};
use crate::size::{binary, duration, per_second, rate};
use crate::source::Copied;

/// The result of reading, for the report.
pub(super) struct Outcome {
    pub(super) picked: Picked,
    /// The copies that were made before the first run.
    pub(super) copied: Copied,
    /// The run with the median time.
    pub(super) run: Run,
    /// The times of all runs.
    pub(super) runs: WallTimes,
    /// The device that got them.
    pub(super) device: Option<DeviceSpec>,
    /// True when the data on the device was read back and compared.
    pub(super) verified: bool,
    /// The manifest that the files were compared with.
    pub(super) manifest: Option<PathBuf>,
    /// The files that were written.
    pub(super) traced: Option<PathBuf>,
    pub(super) reported: Option<PathBuf>,
}

/// Results of one run.
pub(super) struct Run {
    pub(super) report: FillReport,
    pub(super) files: Vec<ReadFile>,
    /// Physically contiguous segments of the buffers, where the kernel tells.
    pub(super) segments: Option<u64>,
    /// Device mappings of the buffers; `None` if none were asked for.
    pub(super) mappings: Option<usize>,
    /// The heap of the device, where it reaches no other memory.
    pub(super) heap: Option<Arc<dyn Heap>>,
    /// How the device was driven.
    pub(super) notes: Vec<String>,
}

/// A file that was read.
pub(super) struct ReadFile {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) checksum: Option<u64>,
    pub(super) method: ReadMethod,
}

fn per_stage(s: &StageReport) -> Option<f64> {
    (!s.busy.is_zero()).then(|| s.bytes as f64 / s.busy.as_secs_f64())
}

/// The outcome as what `--json` prints, described in `docs/formats/json.md`.
pub(super) fn json(o: &Outcome) -> Value {
    let r = &o.run.report;
    let wall = r.wall.as_secs_f64();
    let can = o.picked.heap.capabilities();
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.to_string_lossy().into_owned());
    let stage = |s: &StageReport| {
        json!({
            "stage": s.stage.to_string(),
            "busy_s": s.busy.as_secs_f64(),
            "wall_s": s.wall.as_secs_f64(),
            "bytes": s.bytes,
            "bytes_per_s": per_stage(s),
        })
    };
    let pages = r.backing.iter().flat_map(|backing| &backing.passed_over);
    let memory = json!({
        "heap": o.picked.heap.name(),
        "heap_fallbacks": o.picked.passed_over.iter().map(|(heap, why)| format!("{heap}: {why}")).collect::<Value>(),
        "shareable": can.shareable,
        "dma_buf": can.dma_buf,
        "page_backing": r.backing.as_ref().map(|backing| backing.kind.to_string()),
        "page_backing_fallbacks": pages.map(|pages| why_not(pages, r.bytes, str::to_owned)).collect::<Value>(),
        "segments": o.run.segments,
        "mappings": o.run.mappings,
    });
    let file = |ReadFile { path, bytes, checksum, method }: &ReadFile| {
        json!({
            "path": path.to_string_lossy(),
            "bytes": bytes,
            "xxh3": checksum.map(|hash| format!("{hash:016x}")),
            "direct": method.how.direct,
            "io_uring": method.how.uring,
            "direct_bytes": method.moved.direct,
            "buffered_bytes": method.moved.buffered,
            "reason": method.reason,
            "fallbacks": method.how.reasons.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "cached_before": method.cached.map(|cached| cached.share()),
        })
    };
    json!({
        "schema": 3,
        "command": "read",
        "bytes": r.bytes,
        "wall_s": wall,
        "bytes_per_s": if wall > 0.0 { r.bytes as f64 / wall } else { 0.0 },
        "copied_first_bytes": o.copied.bytes,
        "copied_first_s": o.copied.time.as_secs_f64(),
        "first_chunk_s": r.first_chunk.as_secs_f64(),
        "workers": r.workers,
        "bottleneck": slowest(o).map(|s| s.stage.to_string()),
        "runs_s": o.runs.runs_s,
        "median_s": o.runs.median_s,
        "fastest_s": o.runs.fastest_s,
        "slowest_s": o.runs.slowest_s,
        "stages": r.stages.iter().map(stage).collect::<Value>(),
        "memory": memory,
        "device": o.device.as_ref().map(|device| {
            json!({ "name": device.to_string(), "notes": o.run.notes, "verified": o.verified })
        }),
        "manifest": path(&o.manifest),
        "traced": path(&o.traced),
        "reported": path(&o.reported),
        "files": o.run.files.iter().map(file).collect::<Value>(),
    })
}

/// The stage that held the workers up for longest.
fn slowest(o: &Outcome) -> Option<&StageReport> {
    o.run.report.stages.iter().max_by_key(|s| s.wall)
}

/// The line with size and rate, without a line end, and the line that names the bottleneck.
pub(super) fn answer(o: &Outcome) -> (String, String) {
    let r = &o.run.report;
    let files = match o.run.files.len() {
        1 => "1 file".to_owned(),
        n => format!("{n} files"),
    };
    // The stages' times are summed over the workers.
    let whole = r.wall.as_secs_f64() * r.workers.max(1) as f64;
    let answer = format!(
        "Read {files} ({}) into memory{} in {}: {}",
        binary(r.bytes),
        o.device.as_ref().map_or(String::new(), |device| format!(" and onto {}", plain(&device.to_string()))),
        duration(r.wall),
        rate(r.bytes, r.wall),
    );
    (answer, bottleneck(r.stages.iter().map(|s| (s.stage, s.wall.as_secs_f64() / whole.max(1e-9)))))
}

/// The outcome for people: the answer, the stages, the files, and with `verbose` everything else.
pub(super) fn text(o: &Outcome, verbose: bool) -> String {
    let r = &o.run.report;
    let (answer, mut out) = answer(o);
    out += &format!(
        "{answer}{}\n",
        match (o.verified, o.manifest.is_some()) {
            (true, true) => format!(", {}, as in the manifest", good("verified")),
            (true, false) => format!(", {}", good("verified")),
            (false, true) => format!(", {}", good("as in the manifest")),
            (false, false) => String::new(),
        },
    );
    out += &o.runs.text();
    out += &o.copied.text();
    if !r.stages.is_empty() {
        out.push('\n');
        out += &stage_table(o);
    }
    out.push('\n');
    for file in &o.run.files {
        let hash = file.checksum.map_or(String::new(), |hash| format!("XXH3 {hash:016x}; "));
        let (path, method) = (plain(&file.path.to_string_lossy()), plain(&file.method.to_string()));
        out += &wrap(&format!("{path}: {}; {hash}{method}", binary(file.bytes)), 2);
    }
    if o.verified {
        out += "Verified: read back from the device and compared, equal\n";
    }
    for (label, path) in [("Timeline", &o.traced), ("Report", &o.reported)] {
        if let Some(path) = path {
            out += &format!("{label}: {}\n", plain(&path.to_string_lossy()));
        }
    }
    if verbose {
        out += &details(o);
    }
    out
}

const STAGE_HEAD: [&str; 5] = ["stage", "busy ms", "wall ms", "size", "rate"];

fn stage_table(o: &Outcome) -> String {
    let mut table = Table::new("lrrrr", STAGE_HEAD);
    rows(o).for_each(|row| table.row(row));
    table.text()
}

/// The rates of the stages for a page.
pub(super) fn page_rates(o: &Outcome) -> Section<'static> {
    let bar = |s: &StageReport| {
        Some(RateBar { name: s.stage.to_string(), colour: s.stage as usize, got: per_stage(s)?, reference: None })
    };
    let moves = |s: &&StageReport| matches!(s.stage, Stage::Read | Stage::Checksum | Stage::Transfer);
    Section::Bars(o.run.report.stages.iter().filter(moves).filter_map(bar).collect(), String::new())
}

/// The stages for a page.
pub(super) fn page_stages(o: &Outcome) -> Section<'static> {
    let meaning = "busy: time with work under way in the stage; stages overlap. wall: time in which workers only \
                   worked on the stage or waited for it, summed over the workers.";
    let rows = std::iter::once(STAGE_HEAD.map(str::to_owned)).chain(rows(o)).map(Vec::from).collect();
    Section::Table("Stages", rows, meaning)
}

/// The files for a page.
pub(super) fn page_files(o: &Outcome) -> Section<'static> {
    let head = ["file", "size", "XXH3", "direct", "page cache"].map(str::to_owned).to_vec();
    let file = |file: &ReadFile| {
        let hash = file.checksum.map_or("-".to_owned(), |hash| format!("{hash:016x}"));
        let (path, moved) = (file.path.to_string_lossy().into_owned(), file.method.moved);
        vec![path, binary(file.bytes), hash, binary(moved.direct), binary(moved.buffered)]
    };
    Section::Table("Files", std::iter::once(head).chain(o.run.files.iter().map(file)).collect(), "")
}

fn rows(o: &Outcome) -> impl Iterator<Item = [String; 5]> {
    o.run.report.stages.iter().map(|s| {
        [
            s.stage.to_string(),
            format!("{:.3}", s.busy.as_secs_f64() * 1e3),
            format!("{:.3}", s.wall.as_secs_f64() * 1e3),
            binary(s.bytes),
            per_stage(s).map_or("-".to_owned(), per_second),
        ]
    })
}

/// The lines that only `--verbose` adds.
fn details(o: &Outcome) -> String {
    let r = &o.run.report;
    let mut out = String::from("\n");
    let workers = match r.workers {
        1 => "1 worker".to_owned(),
        n => format!("{n} workers, whose times are summed"),
    };
    let first = duration(r.first_chunk);
    out += &wrap(&format!("The first read began after {first}; {workers}. Stages overlap."), 0);
    out.push('\n');
    let mut line = |label: &str, text: &str| out += &wrap(&format!("{label:<10} {text}"), 11);
    line("heap", &o.picked.to_string());
    if let Some(backing) = &r.backing {
        let recycled = if r.recycled { ", recycled" } else { "" };
        line("pages", &format!("{}{recycled}", backing.kind));
        for pages in &backing.passed_over {
            line("", &format!("not {}", why_not(pages, r.bytes, unbroken)));
        }
    }
    match o.run.segments {
        Some(n) => line("physical", &format!("{n} contiguous segments")),
        None => line("physical", "the kernel does not report physical addresses to this process"),
    }
    if let Some(n) = o.run.mappings {
        let sent = if o.device.is_some() { "; transferred while the rest was read" } else { "" };
        o.run.notes.iter().for_each(|note| line("device", &plain(note)));
        line("device", &format!("mapped in {n} chunks, each as soon as its memory was allocated{sent}"));
    }
    for file in &o.run.files {
        let (direct, buffered) = (binary(file.method.moved.direct), binary(file.method.moved.buffered));
        let path = plain(&file.path.to_string_lossy());
        line("file", &format!("{path}: {direct} by direct I/O, {buffered} through the page cache"));
    }
    out
}
