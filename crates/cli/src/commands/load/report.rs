//! The outcome of a load, and how it is told: as text, as JSON and for a page.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use dmalane::DeviceSpec;
use dmalane::addr::PageSize;
use dmalane::device::{AddressSpaceKind, IommuCounters};
use dmalane::dma::PageBacking;
use dmalane::file::FileQueue;
use dmalane::load::{Input, Loaded, LoadedFile, LoadedTensor, ReferenceRates, Stage, StageReport, Verified};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::commands::doctor::why_not;
use crate::layout::{Table, bottleneck, count, cut_front, good, plain, terminal, unbroken, wrap};
use crate::output::WallTimes;
use crate::phases::Phases;
use crate::report::{RateBar, Section};
use crate::size::{binary, duration, per_second, rate};
use crate::source::Copied;

/// The results of the loads, for the report.
pub(super) struct Outcome {
    pub(super) device: DeviceSpec,
    pub(super) inputs: Vec<Input<FileQueue>>,
    /// The copies that were made before the first run.
    pub(super) copied: Copied,
    /// The run with the median time.
    pub(super) run: Run,
    /// The times of all runs.
    pub(super) runs: WallTimes,
    pub(super) verified: bool,
    /// The manifest that the files were compared with.
    pub(super) manifest: Option<PathBuf>,
    /// The files that were written.
    pub(super) recorded: Option<PathBuf>,
    pub(super) traced: Option<PathBuf>,
    pub(super) reported: Option<PathBuf>,
    /// Measured after the last run.
    pub(super) references: Option<ReferenceRates>,
    /// A stage was much faster than its reference, twice.
    pub(super) disturbed: bool,
    pub(super) phases: Phases,
}

/// One load.
pub(super) struct Run {
    pub(super) loaded: Loaded,
    /// The trace of the binds, of the last run.
    pub(super) recorded: Option<Vec<u8>>,
    /// Where tensors were bound, and so how they were read back.
    pub(super) space: AddressSpaceKind,
    /// The pages behind the staging buffers.
    pub(super) backing: Option<PageBacking>,
    /// At the end of the load, before reading back; of a card in this process.
    pub(super) iommu: Option<IommuCounters>,
    /// Bytes of card memory that the load touched first; of a card in this process.
    pub(super) touched: Option<u64>,
    /// High-water mark of the heap, reading back included.
    pub(super) heap_peak: u64,
    /// High-water mark of the process, reading back included.
    pub(super) resident_peak: u64,
    /// How the device was driven.
    pub(super) notes: Vec<String>,
}

fn tensors(loaded: &Loaded) -> usize {
    loaded.files.iter().map(|f| f.model.tensors.len()).sum()
}

/// A rate over fewer bytes measures start-up time.
const LEAST: u64 = 1 << 20;

/// The reference rate of a stage. Only stages that move bytes through memory or from the disk have one. A transfer
/// copies its bytes, and populates the card's memory where the load touches it first.
fn reference(s: &StageReport, o: &Outcome) -> Option<f64> {
    let rates = o.references.filter(|_| s.bytes >= LEAST)?;
    let touched = o.run.touched.unwrap_or(0) as f64;
    let best = match s.stage {
        Stage::Read => rates.read,
        Stage::Transfer => s.bytes as f64 / (s.bytes as f64 / rates.copy + touched / rates.first_touch),
        _ => return None,
    };
    (best.is_finite() && best > 0.0).then_some(best)
}

/// A stage that is faster than its reference by more than this was measured on a machine that was busy for one of them.
const EXCEEDED: f64 = 1.2;

/// Whether a stage was much faster than its reference.
pub(super) fn exceeds_references(o: &Outcome) -> bool {
    let of_reference = |s: &StageReport| Some(reached(s)? / reference(s, o)?);
    stages(o).iter().filter_map(of_reference).any(|share| share > EXCEEDED)
}

/// The rate of a stage that moved bytes.
fn reached(s: &StageReport) -> Option<f64> {
    let moves = !matches!(s.stage, Stage::Parse | Stage::Register | Stage::Map | Stage::Bind);
    (moves && s.bytes >= LEAST && !s.busy.is_zero()).then(|| s.bytes as f64 / s.busy.as_secs_f64())
}

/// The share of the wall time that the pipeline spent on a stage; verification follows the wall time.
fn share(s: &StageReport, wall: Duration) -> Option<f64> {
    (s.stage != Stage::Verify && !wall.is_zero()).then(|| s.wall.as_secs_f64() / wall.as_secs_f64())
}

/// Stages, with the verification as the last where there was one.
fn stages(o: &Outcome) -> Vec<StageReport> {
    let loaded = &o.run.loaded;
    let mut stages = loaded.report.stages.clone();
    if let Some(verified) = &loaded.report.verified {
        let bytes = loaded.files.iter().flat_map(|f| &f.model.tensors).map(|t| t.len).sum();
        for s in stages.iter_mut().filter(|s| s.stage == Stage::Verify) {
            (s.busy, s.wall, s.bytes) = (verified.wall, verified.wall, bytes);
        }
    } else {
        stages.retain(|s| s.stage != Stage::Verify);
    }
    stages
}

/// The object that `--json` prints. Files and tensors are made as they are printed: there may be millions.
#[derive(Serialize)]
struct Report<F> {
    #[serde(flatten)]
    head: Value,
    files: F,
}

/// A file in it.
#[derive(Serialize)]
struct File<T> {
    #[serde(flatten)]
    head: Value,
    tensors: T,
}

/// A list whose items are made one by one.
struct Each<F>(F);

impl<I: Iterator<Item: Serialize>, F: Fn() -> I> Serialize for Each<F> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq((self.0)())
    }
}

/// The outcome as what `--json` prints, described in `docs/formats/json.md`.
pub(super) fn json(o: &Outcome) -> impl Serialize {
    let r = &o.run.loaded.report;
    let wall = r.wall.as_secs_f64();
    let leaves = |leaves: &[(PageSize, u64)]| -> Value {
        leaves.iter().map(|(page, count)| json!({ "page_bytes": page.bytes(), "count": count })).collect()
    };
    let (backing, iommu, verified) = (o.run.backing.as_ref(), o.run.iommu.as_ref(), r.verified.as_ref());
    let stage = |s: &StageReport| {
        json!({
            "stage": s.stage.to_string(),
            "busy_s": s.busy.as_secs_f64(),
            "wall_s": s.wall.as_secs_f64(),
            "share": share(s, r.wall),
            "bytes": s.bytes,
            "bytes_per_s": reached(s),
            "reference_bytes_per_s": reference(s, o),
        })
    };
    let references = o.references.map(|rates| {
        json!({
            "read_bytes_per_s": rates.read,
            "copy_bytes_per_s": rates.copy,
            "first_touch_bytes_per_s": rates.first_touch,
            "disturbed": o.disturbed,
        })
    });
    let passed_over = backing.iter().flat_map(|r| &r.passed_over);
    let host = json!({
        "staging_buffers": r.staging.0,
        "staging_bytes": r.staging.1,
        "page_backing": backing.map(|r| r.kind.to_string()),
        "page_backing_fallbacks": passed_over.map(|pages| why_not(pages, buffers(o), str::to_owned)).collect::<Value>(),
        "heap_peak_bytes": o.run.heap_peak,
        "resident_before_bytes": r.resident_before,
        "resident_peak_bytes": o.run.resident_peak,
        "segments": r.segments,
        "iommu_leaves": iommu.map(|i| leaves(&i.leaves)),
        "iommu_tables": iommu.map(|i| i.tables),
        "iotlb_hits": iommu.map(|i| i.hits),
        "iotlb_misses": iommu.map(|i| i.misses),
        "faults": iommu.map(|i| i.faults),
    });
    let card = json!({
        "transfers": r.transfers,
        "device_leaves": leaves(&r.device_leaves),
        "touched_bytes": o.run.touched,
    });
    let head = json!({
        "schema": 3,
        "command": "load",
        "device": o.device.to_string(),
        "device_notes": o.run.notes,
        "bytes": o.run.loaded.files.iter().map(|file| file.model.len).sum::<u64>(),
        "read_bytes": r.bytes,
        "tensors": tensors(&o.run.loaded),
        "wall_s": wall,
        "bytes_per_s": if wall > 0.0 { r.bytes as f64 / wall } else { 0.0 },
        "copied_first_bytes": o.copied.bytes,
        "copied_first_s": o.copied.time.as_secs_f64(),
        "verified": o.verified,
        "manifest": path(o.manifest.as_ref()),
        "verify_s": verified.map(|v| v.wall.as_secs_f64()),
        "verified_by": verified.map(|v| if v.by_copies.is_none() { "program" } else { "copies" }),
        "verified_by_reason": verified.and_then(|v| v.by_copies.as_ref()).map(ToString::to_string),
        "bottleneck": r.slowest().map(|s| s.stage.to_string()),
        "runs_s": o.runs.runs_s,
        "median_s": o.runs.median_s,
        "fastest_s": o.runs.fastest_s,
        "slowest_s": o.runs.slowest_s,
        "stages": stages(o).iter().map(stage).collect::<Value>(),
        "references": references,
        "host": host,
        "card": card,
        "recorded": path(o.recorded.as_ref()),
        "traced": path(o.traced.as_ref()),
        "reported": path(o.reported.as_ref()),
    });
    Report { head, files: Each(|| o.run.loaded.files.iter().zip(&o.inputs).map(json_file)) }
}

/// Bytes of the staging buffers that a load has at most.
fn buffers(o: &Outcome) -> u64 {
    o.run.loaded.report.staging.1.saturating_mul(4)
}

fn path(path: Option<&PathBuf>) -> Option<Cow<'_, str>> {
    path.map(|path| path.to_string_lossy())
}

fn json_file<'a>((file, input): (&'a LoadedFile, &Input<FileQueue>)) -> File<impl Serialize + use<'a>> {
    let how = input.queue.how();
    let head = json!({
        "path": file.path.to_string_lossy(),
        "bytes": file.model.len,
        "format": file.model.container.name,
        "metadata": metadata(file),
        "xxh3": file.checksum.map(|hash| format!("{hash:016x}")),
        "direct": how.direct,
        "io_uring": how.uring,
        "fallbacks": how.reasons.iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    File { head, tensors: json_tensors(file) }
}

fn planned_file(file: &LoadedFile) -> File<impl Serialize> {
    let head = json!({
        "path": file.path.to_string_lossy(),
        "bytes": file.model.len,
        "format": file.model.container.name,
        "metadata": metadata(file),
        "device_bytes": file.device_bytes(),
    });
    File { head, tensors: json_tensors(file) }
}

/// The pairs in the header of a file.
fn metadata(file: &LoadedFile) -> Option<serde_json::Map<String, Value>> {
    let pairs = file.model.metadata.as_ref()?.iter();
    Some(pairs.map(|(key, value)| (key.clone(), value.as_str().into())).collect())
}

fn json_tensors(file: &LoadedFile) -> impl Serialize {
    let tensor = |t: &LoadedTensor| {
        json!({
            "name": t.tensor.name,
            "dtype": &*t.tensor.dtype,
            "shape": t.tensor.shape,
            "bytes": t.tensor.len,
            "device_va": t.va.map(|va| va.first().bits()),
        })
    };
    Each(move || file.tensors().map(tensor))
}

/// The plan of a load, as `--dry-run --json` prints it.
pub(super) fn plan_json(device: &str, placed: &Loaded) -> impl Serialize {
    let head = json!({
        "schema": 3,
        "command": "load",
        "dry_run": true,
        "device": device,
        "tensors": tensors(placed),
        "device_bytes": placed.files.iter().map(LoadedFile::device_bytes).sum::<u64>(),
    });
    Report { head, files: Each(|| placed.files.iter().map(planned_file)) }
}

/// The plan of a load, as text.
pub(super) fn plan_text(device: &str, placed: &Loaded, inputs: &[Input<FileQueue>], list: bool) -> String {
    let bytes = placed.files.iter().map(LoadedFile::device_bytes).sum();
    let mut out = wrap(
        &format!(
            "Would load {} in {} onto {}: {} of its memory",
            count(tensors(placed), "tensor"),
            count(placed.files.len(), "file"),
            plain(device),
            binary(bytes),
        ),
        2,
    );
    for (file, input) in placed.files.iter().zip(inputs) {
        let path = plain(&file.path.to_string_lossy());
        let (kind, tensors) = (file.model.container.name, count(file.model.tensors.len(), "tensor"));
        let at: Vec<_> = file.ranges.iter().map(|va| range(va.first().bits(), va.len())).collect();
        let at = if at.is_empty() { String::new() } else { format!(", device VA {}", at.join(", ")) };
        let how = plain(&input.queue.how().to_string());
        out += &wrap(&format!("{path}: {kind}, {tensors}, {}{at}; {how}", binary(file.device_bytes())), 2);
    }
    for file in placed.files.iter().filter(|_| list) {
        out += &format!("\n{}\n", plain(&file.path.to_string_lossy()));
        out += &listing(file);
    }
    out
}

/// The line with size and rate, without a line end, and the line that names the bottleneck.
pub(super) fn answer(o: &Outcome) -> (String, String) {
    let r = &o.run.loaded.report;
    let tensors_of = |file: &LoadedFile| file.tensors().map(|t| t.tensor.len).sum::<u64>();
    let wanted = binary(o.run.loaded.files.iter().map(tensors_of).sum());
    let bytes = match binary(r.bytes) {
        // Headers and blocks around the tensors are not worth a word.
        read if read != wanted && o.inputs.iter().any(|input| input.source.is_selected()) => {
            format!("{read} read for {wanted}")
        }
        read => read,
    };
    let answer = format!(
        "Loaded {} in {} ({}) in {}: {}",
        count(tensors(&o.run.loaded), "tensor"),
        count(o.inputs.len(), "file"),
        bytes,
        duration(r.wall),
        rate(r.bytes, r.wall),
    );
    (answer, bottleneck(r.stages.iter().filter_map(|s| Some((s.stage, share(s, r.wall)?)))))
}

/// The outcome for people: the answer, the stages, the files, and with `verbose` everything else.
pub(super) fn text(o: &Outcome, verbose: bool, list: bool) -> String {
    let (answer, mut out) = self::answer(o);
    out += &answer;
    out += &match (o.verified, o.manifest.is_some()) {
        (true, true) => format!(", {}, as in the manifest\n", good("verified")),
        (true, false) => format!(", {}\n", good("verified")),
        (false, true) => format!(", {}\n", good("as in the manifest")),
        (false, false) => "\n".to_owned(),
    };
    out += &o.runs.text();
    out += &o.copied.text();
    out.push('\n');
    out += &stage_table(o);
    out.push('\n');
    for (file, input) in o.run.loaded.files.iter().zip(&o.inputs) {
        let path = plain(&file.path.to_string_lossy());
        let kind = file.model.container;
        let content = match kind.parse_header {
            None => format!("{}, one run of bytes", kind.name),
            Some(_) => format!("{}, {}", kind.name, count(file.model.tensors.len(), "tensor")),
        };
        let hash = file.checksum.map_or(String::new(), |hash| format!("XXH3 {hash:016x}; "));
        out += &wrap(&format!("{path}: {content}; {hash}{}", plain(&input.queue.how().to_string())), 2);
    }
    if let Some(Verified { by_copies, .. }) = &o.run.loaded.report.verified {
        let how = match (by_copies, &o.run.space) {
            (None, _) => "by a program on the device".to_owned(),
            (Some(_), AddressSpaceKind::PageTables { .. }) => "through the card's MMU".to_owned(),
            (Some(why), AddressSpaceKind::Driver { .. }) => format!("by copies from device virtual addresses ({why})"),
            (Some(_), AddressSpaceKind::Flat) => "from the device's memory (it has no MMU)".to_owned(),
        };
        let tensors = count(tensors(&o.run.loaded), "tensor");
        out += &format!("Verified {tensors}: read back {how}, equal to the files\n");
    }
    for (label, path) in [("Recorded", &o.recorded), ("Timeline", &o.traced), ("Report", &o.reported)] {
        if let Some(path) = path {
            out += &format!("{label}: {}\n", plain(&path.to_string_lossy()));
        }
    }
    if list {
        for file in &o.run.loaded.files {
            out.push('\n');
            if o.run.loaded.files.len() > 1 {
                out += &format!("{}\n", plain(&file.path.to_string_lossy()));
            }
            out += &listing(file);
        }
    }
    if verbose {
        out += &details(o);
    }
    out
}

/// The pairs in the header of a file, and a line per tensor.
fn listing(file: &LoadedFile) -> String {
    let pair = |(key, value): &(String, String)| wrap(&plain(&format!("{key} = {value}")), 2);
    let mut pairs: String = file.model.metadata.iter().flatten().map(pair).collect();
    if !pairs.is_empty() {
        pairs.push('\n');
    }
    pairs + &tensor_table(file.tensors())
}

/// A line per tensor, in columns.
fn tensor_table<'a>(tensors: impl Iterator<Item = &'a LoadedTensor>) -> String {
    let terminal = terminal();
    let mut table = Table::new("lllrl", ["tensor", "dtype", "shape", "bytes", "device VA"]);
    for LoadedTensor { tensor: t, va } in tensors {
        let dtype = if t.dtype.is_empty() { "-".to_owned() } else { plain(&t.dtype) };
        let shape: Vec<_> = t.shape.iter().map(u64::to_string).collect();
        let shape = if t.dtype.is_empty() { "-".to_owned() } else { format!("[{}]", shape.join(",")) };
        let va = va.map_or("-".to_owned(), |va| range(va.first().bits(), va.len()));
        table.row([cut_front(&plain(&t.name), terminal), dtype, cut_front(&shape, terminal), t.len.to_string(), va]);
    }
    table.text()
}

/// Addresses as `START..END`, without `END`.
fn range(start: u64, len: u64) -> String {
    // A range may end with the last address.
    format!("{start:#x}..{:#x}", u128::from(start) + u128::from(len))
}

const STAGE_HEAD: [&str; 8] = ["stage", "busy ms", "wall ms", "of wall", "size", "rate", "reference", "reached"];

fn stage_table(o: &Outcome) -> String {
    let mut table = Table::new("lrrrrrrr", STAGE_HEAD);
    rows(o).into_iter().for_each(|row| table.row(row));
    table.text()
}

/// The rates of the stages for a page.
pub(super) fn page_rates(o: &Outcome) -> Section<'static> {
    let bar = |s: &StageReport| {
        Some(RateBar {
            name: s.stage.to_string(),
            colour: s.stage as usize,
            got: reached(s)?,
            reference: reference(s, o),
        })
    };
    let meaning =
        "Measured rates above references: what this machine reached in the same run when it did nothing else.";
    let moving = stages(o).into_iter().filter(|s| s.stage != Stage::Allocate);
    Section::Bars(moving.filter_map(|s| bar(&s)).collect(), meaning.to_owned())
}

/// The stages for a page.
pub(super) fn page_stages(o: &Outcome) -> Section<'static> {
    let head = STAGE_HEAD.map(str::to_owned);
    let meaning = "busy: time with work under way in the stage; stages overlap. wall: time in which the pipeline only \
                   worked on the stage or waited for it.";
    Section::Table("Stages", std::iter::once(head).chain(rows(o)).map(Vec::from).collect(), meaning)
}

/// The stages.
fn rows(o: &Outcome) -> Vec<[String; 8]> {
    let none = || "-".to_owned();
    let wall = o.run.loaded.report.wall;
    // So many digits that something is left of a short load.
    let digits = if wall < Duration::from_millis(10) { 3 } else { 1 };
    let ms = |time: Duration| format!("{:.digits$}", time.as_secs_f64() * 1e3);
    let row = |s: &StageReport| {
        let of_reference = reached(s).zip(reference(s, o));
        [
            s.stage.to_string(),
            ms(s.busy),
            ms(s.wall),
            share(s, wall).map_or_else(none, |share| format!("{:.1} %", share * 100.0)),
            binary(s.bytes),
            reached(s).map_or_else(none, per_second),
            of_reference.map_or(String::new(), |(_, best)| per_second(best)),
            of_reference.map_or(String::new(), |(got, best)| format!("{:.0} %", got / best * 100.0)),
        ]
    };
    stages(o).iter().map(row).collect()
}

/// The lines that only `--verbose` adds.
fn details(o: &Outcome) -> String {
    let mut out = String::from("\n");
    out += &wrap(
        "busy: time with work under way in the stage; stages overlap. wall: time in which the pipeline only worked on \
         the stage or waited for it. verify follows the load. -: less than 1 MiB moved.",
        0,
    );
    if let Some(rates) = o.references {
        let (read, copy, touch) = (per_second(rates.read), per_second(rates.copy), per_second(rates.first_touch));
        out += &wrap(
            &format!(
                "References of this run: reading the same bytes into the same buffers {read}, copying memory {copy}, \
                 first touch of the card's memory {touch}."
            ),
            0,
        );
        out += &wrap(
            &match o.run.touched {
                Some(touched) => format!(
                    "The reference of transfer: copying its bytes plus the first touch of {} of the card's memory.",
                    binary(touched)
                ),
                None => "The reference of transfer: copying its bytes. Only the card knows how much of its memory is \
                         touched first, which takes longer."
                    .to_owned(),
            },
            0,
        );
    }
    if o.disturbed {
        out += &wrap("The references are disturbed: a stage was faster, and is compared with a busy machine.", 0);
    }
    out += &wrap(&o.phases.text(), 2);
    out.push('\n');
    let r = &o.run.loaded.report;
    let mut line = |label: &str, text: &str| out += &wrap(&format!("{label:<10} {text}"), 11);
    o.run.notes.iter().for_each(|note| line("device", &plain(note)));
    line("host", &format!("{} of {}", count(r.staging.0, "staging buffer"), binary(r.staging.1)));
    if let Some(backing) = &o.run.backing {
        line("pages", &backing.kind.to_string());
        for pages in &backing.passed_over {
            line("", &format!("not {}", why_not(pages, buffers(o), unbroken)));
        }
    }
    let (before, peak) = (binary(r.resident_before), binary(o.run.resident_peak));
    line(
        "memory",
        &format!(
            "heap peak {}; RssAnon + HugetlbPages {before} before, {peak} peak (before the references were measured; \
             without the card's memory)",
            binary(o.run.heap_peak)
        ),
    );
    let iommu = match &o.run.iommu {
        Some(i) => format!(
            "{} in {}; {}; IOTLB {} hits, {} misses; {}",
            count(r.segments as usize, "segment"),
            leaves(&i.leaves),
            count(i.tables, "table"),
            i.hits,
            i.misses,
            count(i.faults as usize, "fault"),
        ),
        None => {
            let place = o.device.kind().served_by().map_or("not in this process".to_owned(), |who| format!("in {who}"));
            format!("{place}: {}", plain(&o.device.to_string()))
        }
    };
    line("IOMMU", &iommu);
    let touched = o.run.touched.map_or(String::new(), |touched| format!("; {} touched first", binary(touched)));
    let transfers = count(r.transfers as usize, "transfer");
    line("card", &format!("{transfers}{touched}; bound by {}", leaves(&r.device_leaves)));
    out
}

fn leaves(leaves: &[(PageSize, u64)]) -> String {
    let present: Vec<_> = leaves.iter().filter(|(_, n)| *n > 0).map(|(page, n)| format!("{n} x {page}")).collect();
    if present.is_empty() { "no leaves".to_owned() } else { format!("leaves {}", present.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane::addr::{DeviceVa, FileOffset, Span};
    use dmalane::load::Tensor;

    #[test]
    fn the_table_is_aligned_whatever_the_names() {
        let tensor = |name: &str, shape: &[u64], len, va| LoadedTensor {
            tensor: std::sync::Arc::new(Tensor {
                name: name.to_owned(),
                dtype: "F32".into(),
                shape: shape.into(),
                at: FileOffset::new(0),
                len,
            }),
            va,
        };
        let va = Span::new(DeviceVa::new(1 << 32), 48);
        let tensors = [tensor("a\x1b[2J", &[3, 4], 48, va), tensor(&"\u{e9}".repeat(99), &[9; 60], 0, None)];
        let text = tensor_table(tensors.iter());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].starts_with("a\\u{1b}[2J ") && lines[1].ends_with("  48  0x100000000..0x100000030"), "{text}");
        let column =
            |line: &str| line.chars().collect::<String>().chars().count() - line.rsplit("  ").next().unwrap().len();
        assert!(lines.iter().all(|l| column(l) == column(lines[0])), "{text}");
        assert!(
            lines[2].starts_with(&"\u{e9}".repeat(99)) && lines[2].ends_with("  -"),
            "a pipe has whole names: {text}"
        );
    }
}
