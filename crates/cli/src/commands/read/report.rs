//! The outcome of reading, as text and as JSON.

use std::fmt::Write;

use dmalane::load::StageReport;
use serde::Serialize;

use super::Outcome;
use crate::output::plain;
use crate::size::{binary, decimal, duration, per_second, rate};

/// The output of `--json`, described in `docs/formats/json.md`.
#[derive(Serialize)]
struct Json {
    schema: u32,
    command: &'static str,
    bytes: u64,
    wall_s: f64,
    bytes_per_s: f64,
    first_chunk_s: f64,
    workers: usize,
    stages: Vec<JsonStage>,
    memory: JsonMemory,
    device: Option<JsonDevice>,
    files: Vec<JsonFile>,
}

#[derive(Serialize)]
struct JsonStage {
    stage: String,
    busy_s: f64,
    wall_s: f64,
    bytes: u64,
    bytes_per_s: Option<f64>,
}

#[derive(Serialize)]
struct JsonDevice {
    name: String,
    verified: bool,
}

#[derive(Serialize)]
struct JsonMemory {
    heap: &'static str,
    heap_fallbacks: Vec<String>,
    shareable: bool,
    dma_buf: bool,
    page_backing: Option<String>,
    page_backing_fallbacks: Vec<String>,
    segments: Option<u64>,
    mappings: Option<usize>,
}

#[derive(Serialize)]
struct JsonFile {
    path: String,
    bytes: u64,
    xxh3: Option<String>,
    direct: bool,
    io_uring: bool,
    direct_bytes: u64,
    buffered_bytes: u64,
    reason: String,
    fallbacks: Vec<String>,
    cached_before: Option<f64>,
}

fn per_stage(s: &StageReport) -> Option<f64> {
    (!s.busy.is_zero()).then(|| s.bytes as f64 / s.busy.as_secs_f64())
}

/// The outcome as what `--json` prints.
pub(super) fn json(o: &Outcome) -> impl Serialize + use<> {
    let r = &o.filled.report;
    let wall = r.wall.as_secs_f64();
    let can = o.picked.heap.abilities();
    let stage = |s: &StageReport| JsonStage {
        stage: s.stage.to_string(),
        busy_s: s.busy.as_secs_f64(),
        wall_s: s.held.as_secs_f64(),
        bytes: s.bytes,
        bytes_per_s: per_stage(s),
    };
    Json {
        schema: 2,
        command: "read",
        bytes: r.bytes,
        wall_s: wall,
        bytes_per_s: if wall > 0.0 { r.bytes as f64 / wall } else { 0.0 },
        first_chunk_s: r.first_chunk.as_secs_f64(),
        workers: r.workers,
        stages: r.stages.iter().map(stage).collect(),
        memory: JsonMemory {
            heap: o.picked.heap.name(),
            heap_fallbacks: o.picked.passed_over.iter().map(|(heap, why)| format!("{heap}: {why}")).collect(),
            shareable: can.shareable,
            dma_buf: can.dma_buf,
            page_backing: r.backing.as_ref().map(|backing| backing.kind.to_string()),
            page_backing_fallbacks: r
                .backing
                .iter()
                .flat_map(|backing| &backing.passed_over)
                .map(|(kind, why)| format!("{kind}: {why}"))
                .collect(),
            segments: o.segments,
            mappings: o.mappings,
        },
        device: o.device.as_ref().map(|device| JsonDevice { name: device.to_string(), verified: o.verified }),
        files: o
            .files
            .iter()
            .zip(&o.filled.buffers)
            .zip(&o.methods)
            .map(|((path, buffer), method)| JsonFile {
                path: path.to_string_lossy().into_owned(),
                bytes: buffer.len() as u64,
                xxh3: buffer.checksum().map(|hash| format!("{hash:016x}")),
                direct: method.how.direct,
                io_uring: method.how.uring,
                direct_bytes: method.moved.direct,
                buffered_bytes: method.moved.buffered,
                reason: method.reason.clone(),
                fallbacks: method.how.reasons.clone(),
                cached_before: method.cached.map(|cached| cached.share()),
            })
            .collect(),
    }
}

/// The outcome for people.
pub(super) fn text(o: &Outcome, explain: bool) -> String {
    let mut out = String::new();
    let r = &o.filled.report;
    let files = match o.files.len() {
        1 => "1 file".to_owned(),
        n => format!("{n} files"),
    };
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "read {files} ({}, {}) into memory{} in {}, {}",
        decimal(r.bytes),
        binary(r.bytes),
        o.device.as_ref().map_or(String::new(), |device| format!(" and onto {}", plain(&device.to_string()))),
        duration(r.wall),
        rate(r.bytes, r.wall)
    );
    for ((path, buffer), method) in o.files.iter().zip(&o.filled.buffers).zip(&o.methods) {
        let hash = buffer.checksum().map_or(String::new(), |hash| format!("XXH3 {hash:016x}; "));
        let path = plain(&path.to_string_lossy());
        let _ = writeln!(out, "  {path}: {}; {hash}{method}", decimal(buffer.len() as u64));
    }
    if o.verified {
        let _ = writeln!(out, "  read back from the device and compared: equal");
    }
    if !explain {
        return out;
    }
    if !r.stages.is_empty() {
        let _ = writeln!(out, "\nstage       busy ms   wall ms       bytes        rate");
    }
    for s in &r.stages {
        let _ = writeln!(
            out,
            "{:<10} {:>8.3} {:>9.3} {:>11} {:>11}",
            s.stage.to_string(),
            s.busy.as_secs_f64() * 1e3,
            s.held.as_secs_f64() * 1e3,
            decimal(s.bytes),
            per_stage(s).map_or("-".to_owned(), per_second)
        );
    }
    let workers = match r.workers {
        1 => "one worker".to_owned(),
        n => format!("{n} workers, whose times are summed"),
    };
    let _ = writeln!(out, "The first read began after {}; {workers}. Stages overlap.", duration(r.first_chunk));
    let _ = writeln!(out, "\nheap       {}", o.picked);
    if let Some(backing) = &r.backing {
        let recycled = if r.recycled { ", recycled" } else { "" };
        let _ = writeln!(out, "pages      {}{recycled}", backing.kind);
        for (kind, why) in &backing.passed_over {
            let _ = writeln!(out, "           not {kind}: {why}");
        }
    }
    let _ = match o.segments {
        Some(n) => writeln!(out, "physical   {n} contiguous segments"),
        None => writeln!(out, "physical   the kernel does not report physical addresses to this process"),
    };
    if let Some(n) = o.mappings {
        let sent = if o.device.is_some() { "; transferred while the rest was read" } else { "" };
        let _ = writeln!(out, "device     mapped in {n} chunks, each as soon as its memory was allocated{sent}");
    }
    for (path, method) in o.files.iter().zip(&o.methods) {
        let moved = format!("{} direct, {} buffered", decimal(method.moved.direct), decimal(method.moved.buffered));
        let _ = writeln!(out, "file       {}: {moved}", plain(&path.to_string_lossy()));
    }
    out
}
