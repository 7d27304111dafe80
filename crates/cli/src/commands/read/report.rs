//! The outcome of reading as text, as JSON and for a page.

use std::path::PathBuf;

use dmalane::ReadMethod;
use dmalane::dma::Picked;
use dmalane::load::fill::FillReport;
use serde_json::{Value, json};

use crate::layout::{Table, count, plain, wrap};
use crate::runs::{self, MeasuredRuns, detail};
use crate::size::{binary, duration};

/// The result of reading, for the report.
pub(super) struct Outcome {
    pub(super) picked: Picked,
    /// The run with the median time.
    pub(super) run: Run,
    pub(super) runs: MeasuredRuns,
}

/// Results of one run.
pub(super) struct Run {
    pub(super) report: FillReport,
    pub(super) files: Vec<ReadFile>,
    /// Physically contiguous segments of the buffers, where the kernel tells.
    pub(super) segments: Option<u64>,
}

/// A file that was read.
pub(super) struct ReadFile {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) checksum: Option<u64>,
    pub(super) method: ReadMethod,
}

/// The outcome as what `--json` prints, described in `docs/formats/json.md`.
pub(super) fn json(o: &Outcome) -> Value {
    let r = &o.run.report;
    let can = o.picked.heap.capabilities();
    let (backing, fallbacks) = runs::pages_json(r.backing.as_ref(), r.bytes);
    let memory = json!({
        "heap": o.picked.heap.name(),
        "heap_fallbacks": o.picked.passed_over.iter().map(|(heap, why)| format!("{heap}: {why}")).collect::<Value>(),
        "shareable": can.shareable,
        "dma_buf": can.dma_buf,
        "page_backing": backing,
        "page_backing_fallbacks": fallbacks,
        "segments": o.run.segments,
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
    o.runs.json(json!({
        "bytes": r.bytes,
        "first_chunk_s": r.first_chunk.as_secs_f64(),
        "workers": r.workers,
        "memory": memory,
        "files": o.run.files.iter().map(file).collect::<Value>(),
    }))
}

/// The files that were read.
pub(super) fn answer(o: &Outcome) -> String {
    format!("Read {} ({}) into memory", count(o.run.files.len(), "file"), binary(o.run.report.bytes))
}

/// The outcome for people: the answer, the stages, the files, and with `verbose` everything else.
pub(super) fn text(o: &Outcome, verbose: bool) -> String {
    let mut out = o.runs.text(&answer(o));
    for file in &o.run.files {
        let hash = file.checksum.map_or(String::new(), |hash| format!("XXH3 {hash:016x}; "));
        let (path, method) = (plain(&file.path.to_string_lossy()), plain(&file.method.to_string()));
        out += &wrap(&format!("{path}: {}; {hash}{method}", binary(file.bytes)), 2);
    }
    if verbose {
        out += &details(o);
    }
    out
}

/// The files, for a page.
pub(super) fn files(o: &Outcome) -> Table {
    let mut table = Table::new("lrlrr", ["file", "size", "XXH3", "direct", "page cache"]);
    for ReadFile { path, bytes, checksum, method } in &o.run.files {
        let hash = checksum.map_or("-".to_owned(), |hash| format!("{hash:016x}"));
        let [size, direct, cached] = [*bytes, method.moved.direct, method.moved.buffered].map(binary);
        table.row([path.to_string_lossy().into_owned(), size, hash, direct, cached]);
    }
    table
}

/// The lines that only `--verbose` adds.
fn details(o: &Outcome) -> String {
    let r = &o.run.report;
    let mut out = o.runs.meaning();
    let workers = count(r.workers, "worker");
    out += &wrap(&format!("The first read began after {}; {workers}.", duration(r.first_chunk)), 0);
    out.push('\n');
    out += &detail("heap", &o.picked.to_string());
    out += &runs::pages(r.backing.as_ref(), r.bytes);
    out += &detail(
        "physical",
        &match o.run.segments {
            Some(n) => format!("{n} contiguous segments"),
            None => "the kernel does not report physical addresses to this process".to_owned(),
        },
    );
    for file in &o.run.files {
        let (direct, buffered) = (binary(file.method.moved.direct), binary(file.method.moved.buffered));
        let path = plain(&file.path.to_string_lossy());
        out += &detail("file", &format!("{path}: {direct} by direct I/O, {buffered} through the page cache"));
    }
    out
}
