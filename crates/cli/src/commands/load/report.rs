//! The outcome of a load as text, as JSON and for a page.

use std::path::PathBuf;

use dmalane::DeviceSpec;
use dmalane::addr::PageSize;
use dmalane::device::{AddressSpaceKind, IommuCounters};
use dmalane::dma::PageBacking;
use dmalane::file::FileQueue;
use dmalane::load::{Input, Loaded, LoadedFile, LoadedTensor, ReferenceRates, Stage, StageReport};
use serde::Serialize;
use serde_json::{Value, json};

use crate::layout::{Table, count, cut_front, plain, terminal, wrap};
use crate::runs::{self, LEAST, MeasuredRuns, MeasuredStage, detail};
use crate::size::{binary, per_second};

/// The results of the loads, for the report.
pub(super) struct Outcome {
    pub(super) device: DeviceSpec,
    pub(super) inputs: Vec<Input<FileQueue>>,
    /// Files that are no part of the model, each with why.
    pub(super) left_out: Vec<(PathBuf, String)>,
    /// Notes about the files, such as holes in place of tensors.
    pub(super) odd: Vec<String>,
    /// The run with the median time.
    pub(super) run: Run,
    pub(super) runs: MeasuredRuns,
    /// Measured after the last run.
    pub(super) references: Option<ReferenceRates>,
}

/// One load.
pub(super) struct Run {
    pub(super) loaded: Loaded,
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
    /// How the device was driven.
    pub(super) notes: Vec<String>,
}

fn tensors(loaded: &Loaded) -> usize {
    loaded.files.iter().map(|f| f.model.tensors.len()).sum()
}

impl Outcome {
    /// Sets the references of the stages. Only those that move bytes through memory or from the disk have one. A
    /// transfer copies its bytes, and populates the card's memory where the load touches it first. Of rates that were
    /// measured before, the higher ones count.
    pub(super) fn refer_to(&mut self, rates: ReferenceRates) {
        let rates = self.references.map_or(rates, |before| ReferenceRates {
            read: rates.read.max(before.read),
            copy: rates.copy.max(before.copy),
            first_touch: rates.first_touch.max(before.first_touch),
        });
        let touched = self.run.touched.unwrap_or(0) as f64;
        for s in self.runs.stages.iter_mut().filter(|s| s.report.bytes >= LEAST) {
            let bytes = s.report.bytes as f64;
            let best = match s.report.stage {
                Stage::Read => rates.read,
                Stage::Transfer => bytes / (bytes / rates.copy + touched / rates.first_touch),
                _ => continue,
            };
            s.reference = Some(best).filter(|best| best.is_finite() && *best > 0.0);
        }
        self.references = Some(rates);
    }
}

/// Stages, with the verification as the last where there was one.
pub(super) fn stages(loaded: &Loaded) -> Vec<MeasuredStage> {
    let was = |s: &&StageReport| s.stage != Stage::Verify || loaded.report.verified.is_some();
    let measured = |s: &StageReport| MeasuredStage::new(*s, (loaded.report.wall, loaded.report.workers));
    loaded.report.stages.iter().filter(was).map(measured).collect()
}

/// The object that `--json` prints.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    #[serde(flatten)]
    head: Value,
    files: Vec<File<'a>>,
}

/// A file in it.
#[derive(Serialize)]
struct File<'a> {
    #[serde(flatten)]
    head: Value,
    tensors: Vec<Line<'a>>,
}

/// A tensor, of which there may be millions.
#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    dtype: &'a str,
    shape: &'a [u64],
    bytes: u64,
    device_va: Option<u64>,
}

/// The outcome as what `--json` prints, described in `docs/formats/json.md`.
pub(super) fn json(o: &Outcome) -> Report<'_> {
    let r = &o.run.loaded.report;
    let leaves = |leaves: &[(PageSize, u64)]| -> Value {
        leaves.iter().map(|(page, count)| json!({ "page_bytes": page.bytes(), "count": count })).collect()
    };
    let (iommu, verified) = (o.run.iommu.as_ref(), r.verified.as_ref());
    let references = o.references.map(|rates| {
        json!({
            "read_bytes_per_s": rates.read,
            "copy_bytes_per_s": rates.copy,
            "first_touch_bytes_per_s": rates.first_touch,
        })
    });
    let (backing, fallbacks) = runs::pages_json(o.run.backing.as_ref(), buffers(o));
    let host = json!({
        "staging_buffers": r.staging.0,
        "staging_bytes": r.staging.1,
        "page_backing": backing,
        "page_backing_fallbacks": fallbacks,
        "heap_peak_bytes": o.run.heap_peak,
        "segments": r.segments,
        "iommu_leaves": iommu.map(|i| leaves(&i.leaves)),
        "iommu_tables": iommu.map(|i| i.tables),
        "faults": iommu.map(|i| i.faults),
    });
    let card = json!({
        "transfers": r.transfers,
        "device_leaves": leaves(&r.device_leaves),
        "touched_bytes": o.run.touched,
    });
    let left_out = o.left_out.iter().map(|(path, why)| json!({ "file": path.to_string_lossy(), "why": why }));
    let left_out: Vec<Value> = left_out.collect();
    let own = json!({
        "schema": 6,
        "device": o.device.to_string(),
        "device_notes": o.run.notes,
        "left_out": left_out,
        "notes": o.odd,
        "bytes": o.run.loaded.files.iter().map(|file| file.model.len).sum::<u64>(),
        "read_bytes": r.bytes,
        "workers": r.workers,
        "tensors": tensors(&o.run.loaded),
        "verified": verified.is_some(),
        "verify_s": verified.map(|wall| wall.as_secs_f64()),
        "references": references,
        "host": host,
        "card": card,
    });
    Report { head: o.runs.json(own), files: o.run.loaded.files.iter().zip(&o.inputs).map(json_file).collect() }
}

/// Bytes of the staging buffers that such a load has, with the one for reading back: three, or more that it had.
fn buffers(o: &Outcome) -> u64 {
    let (count, bytes) = o.run.loaded.report.staging;
    bytes.saturating_mul(count.max(3) as u64 + 1)
}

fn json_file<'a>((file, input): (&'a LoadedFile, &Input<FileQueue>)) -> File<'a> {
    let how = input.queue.how();
    let mut planned = planned_file(file);
    planned.head["xxh3"] = file.checksum.map(|hash| format!("{hash:016x}")).into();
    planned.head["direct"] = how.direct.into();
    planned.head["io_uring"] = how.uring.into();
    planned.head["fallbacks"] = how.reasons.iter().map(ToString::to_string).collect();
    planned
}

fn planned_file(file: &LoadedFile) -> File<'_> {
    let head = json!({
        "path": file.path.to_string_lossy(),
        "bytes": file.model.len,
        "format": file.model.container.name,
        "metadata": metadata(file),
        "device_bytes": file.device_bytes(),
    });
    File { head, tensors: file.tensors().map(line).collect() }
}

fn line(LoadedTensor { tensor: t, va }: &LoadedTensor) -> Line<'_> {
    let device_va = va.map(|va| va.first().bits());
    Line { name: &t.name, dtype: &t.dtype, shape: &t.shape, bytes: t.len, device_va }
}

/// The pairs in the header of a file.
fn metadata(file: &LoadedFile) -> Option<serde_json::Map<String, Value>> {
    let pairs = file.model.metadata.as_ref()?.iter();
    Some(pairs.map(|(key, value)| (key.clone(), value.as_str().into())).collect())
}

/// The plan of a load, as `--dry-run --json` prints it.
pub(super) fn plan_json<'a>(device: &str, placed: &'a Loaded) -> Report<'a> {
    let head = json!({
        "schema": 6,
        "command": "load",
        "dry_run": true,
        "device": device,
        "tensors": tensors(placed),
        "device_bytes": placed.files.iter().map(LoadedFile::device_bytes).sum::<u64>(),
    });
    Report { head, files: placed.files.iter().map(planned_file).collect() }
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
        let at: Vec<_> = file.ranges.iter().map(|va| range(va.first().bits(), va.len())).collect();
        let at = if at.is_empty() { String::new() } else { format!(", device VA {}", at.join(", ")) };
        out += &file_line(file, input, &format!(", {}{at}", binary(file.device_bytes())));
    }
    if list { out + &listings(placed) } else { out }
}

/// The kind of a file, and how it is read.
fn file_line(file: &LoadedFile, input: &Input<FileQueue>, at: &str) -> String {
    let (path, kind) = (plain(&file.path.to_string_lossy()), file.model.container);
    let content = match kind.parse_header {
        None => "one run of bytes".to_owned(),
        Some(_) => count(file.model.tensors.len(), "tensor"),
    };
    let hash = file.checksum.map_or(String::new(), |hash| format!("XXH3 {hash:016x}; "));
    wrap(&format!("{path}: {}, {content}{at}; {hash}{}", kind.name, plain(&input.queue.how().to_string())), 2)
}

/// The tensors that were loaded.
pub(super) fn answer(o: &Outcome) -> String {
    let tensors_of = |file: &LoadedFile| file.tensors().map(|t| t.tensor.len).sum::<u64>();
    let wanted = binary(o.run.loaded.files.iter().map(tensors_of).sum());
    let bytes = match binary(o.runs.bytes) {
        // Headers and blocks around the tensors are not worth a word.
        read if read != wanted && o.inputs.iter().any(|input| input.source.is_selected()) => {
            format!("{read} read for {wanted}")
        }
        read => read,
    };
    let (tensors, files) = (count(tensors(&o.run.loaded), "tensor"), count(o.inputs.len(), "file"));
    format!("Loaded {tensors} in {files} ({bytes})")
}

/// The outcome for people: the answer, the stages, the files, and with `verbose` everything else.
pub(super) fn text(o: &Outcome, verbose: bool, list: bool) -> String {
    let mut out = o.runs.text(&answer(o));
    let files = o.run.loaded.files.iter().zip(&o.inputs);
    files.for_each(|(file, input)| out += &file_line(file, input, ""));
    if o.run.loaded.report.verified.is_some() {
        let how = match &o.run.space {
            AddressSpaceKind::PageTables { .. } => "through the card's MMU",
            AddressSpaceKind::Flat => "from the device's memory (it has no MMU)",
            _ => "by copies from device virtual addresses",
        };
        let tensors = count(tensors(&o.run.loaded), "tensor");
        out += &format!("Verified {tensors}: read back {how}, equal to the files\n");
    }
    o.odd.iter().for_each(|note| out += &format!("Note: {}\n", plain(note)));
    if list {
        out += &listings(&o.run.loaded);
    }
    if verbose {
        out += &details(o);
    }
    out
}

/// Of each file the pairs in its header, and a line per tensor.
fn listings(loaded: &Loaded) -> String {
    let mut out = String::new();
    for file in &loaded.files {
        out.push('\n');
        if loaded.files.len() > 1 {
            out += &format!("{}\n", plain(&file.path.to_string_lossy()));
        }
        let pair = |(key, value): &(String, String)| wrap(&plain(&format!("{key} = {value}")), 2);
        let pairs: String = file.model.metadata.iter().flatten().map(pair).collect();
        let apart = if pairs.is_empty() { "" } else { "\n" };
        out += &format!("{pairs}{apart}{}", tensor_table(file.tensors()));
    }
    out
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

/// The files, for a page.
pub(super) fn files(o: &Outcome) -> Table {
    let mut table = Table::new("lrrl", ["file", "size", "tensors", "XXH3"]);
    for LoadedFile { path, model, checksum, .. } in &o.run.loaded.files {
        let hash = checksum.map_or("-".to_owned(), |hash| format!("{hash:016x}"));
        table.row([path.to_string_lossy().into_owned(), binary(model.len), model.tensors.len().to_string(), hash]);
    }
    table
}

/// The lines that only `--verbose` adds.
fn details(o: &Outcome) -> String {
    let mut out = o.runs.meaning();
    if let Some(rates) = o.references {
        let [read, copy, touch] = [rates.read, rates.copy, rates.first_touch].map(per_second);
        let touched = o.run.touched.map_or("a part that only the card knows".to_owned(), binary);
        out += &wrap(
            &format!(
                "References of this run: reading the same bytes into the same buffers {read}; for transfer, copying \
                 memory {copy}, and the first touch of {touched} of the card's memory {touch}."
            ),
            0,
        );
    }
    out.push('\n');
    let r = &o.run.loaded.report;
    for (path, why) in &o.left_out {
        out += &detail("left out", &format!("{}: {why}", plain(&path.to_string_lossy())));
    }
    o.run.notes.iter().for_each(|note| out += &detail("device", &plain(note)));
    out += &detail("host", &format!("{} of {}", count(r.staging.0, "staging buffer"), binary(r.staging.1)));
    out += &runs::pages(o.run.backing.as_ref(), buffers(o));
    out += &detail("memory", &format!("heap peak {}", binary(o.run.heap_peak)));
    let iommu = match &o.run.iommu {
        Some(i) => format!(
            "{} in {}; {}; {}",
            count(r.segments as usize, "segment"),
            leaves(&i.leaves),
            count(i.tables, "table"),
            count(i.faults as usize, "fault"),
        ),
        None => {
            let place = o.device.kind().served_by().map_or("not in this process".to_owned(), |who| format!("in {who}"));
            format!("{place}: {}", plain(&o.device.to_string()))
        }
    };
    out += &detail("IOMMU", &iommu);
    let touched = o.run.touched.map_or(String::new(), |touched| format!("; {} touched first", binary(touched)));
    let transfers = count(r.transfers as usize, "transfer");
    out + &detail("card", &format!("{transfers}{touched}; bound by {}", leaves(&r.device_leaves)))
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
    fn a_stage_of_several_workers_has_a_share_of_their_time() {
        let ms = std::time::Duration::from_millis;
        let read = StageReport { stage: Stage::Read, busy: ms(19), wall: ms(18), bytes: 1, in_flight: 2 };
        // One at a time, whoever does it.
        let transfer = StageReport { stage: Stage::Transfer, busy: ms(9), wall: ms(9), ..read };
        let allocate = StageReport { stage: Stage::Allocate, ..read };
        let stages_of = vec![allocate, read, transfer];
        let report =
            dmalane::load::Report { wall: ms(10), workers: 2, stages: stages_of, ..dmalane::load::Report::default() };
        for stage in stages(&Loaded { files: Vec::new(), report }) {
            assert!((stage.share.unwrap() - 0.9).abs() < 1e-9, "{:?}", stage.share);
        }
    }

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
