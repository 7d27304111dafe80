//! The outcome of a load, as text and as JSON.

use std::fmt::Write;
use std::time::Duration;

use dmalane::addr::PageSize;
use dmalane::device::AddressSpaceKind;
use dmalane::load::{Container, LoadedTensor, Stage, StageReport};
use serde::Serialize;

use super::Outcome;
use crate::output::plain;
use crate::size::{binary, decimal, duration, per_second, rate};

/// The output of `--json`, described in `docs/formats/json.md`.
#[derive(Serialize)]
struct Json {
    schema: u32,
    command: &'static str,
    device: String,
    bytes: u64,
    tensors: usize,
    wall_s: f64,
    bytes_per_s: f64,
    verified: bool,
    verify_s: Option<f64>,
    slowest_stage: Option<String>,
    stages: Vec<JsonStage>,
    ceilings: Option<JsonCeilings>,
    host: JsonHost,
    card: JsonCard,
    files: Vec<JsonFile>,
}

#[derive(Serialize)]
struct JsonStage {
    stage: String,
    busy_s: f64,
    wall_s: f64,
    share: Option<f64>,
    bytes: u64,
    bytes_per_s: Option<f64>,
    ceiling_bytes_per_s: Option<f64>,
}

#[derive(Serialize)]
struct JsonCeilings {
    read_bytes_per_s: f64,
    copy_bytes_per_s: f64,
    first_touch_bytes_per_s: f64,
}

#[derive(Serialize)]
struct JsonHost {
    staging_buffers: usize,
    staging_bytes: u64,
    page_backing: Option<String>,
    page_backing_fallbacks: Vec<String>,
    heap_peak_bytes: u64,
    resident_before_bytes: u64,
    resident_peak_bytes: u64,
    segments: u64,
    iommu_leaves: Option<Vec<JsonLeaves>>,
    iommu_tables: Option<usize>,
    iotlb_hits: Option<u64>,
    iotlb_misses: Option<u64>,
    faults: Option<u64>,
}

#[derive(Serialize)]
struct JsonCard {
    transfers: u64,
    device_leaves: Vec<JsonLeaves>,
    touched_bytes: Option<u64>,
}

#[derive(Serialize)]
struct JsonLeaves {
    page_bytes: u64,
    count: u64,
}

#[derive(Serialize)]
struct JsonFile {
    path: String,
    bytes: u64,
    format: &'static str,
    xxh3: String,
    direct: bool,
    io_uring: bool,
    fallbacks: Vec<String>,
    tensors: Vec<JsonTensor>,
}

#[derive(Serialize)]
struct JsonTensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    device_va: Option<u64>,
}

fn tensors(o: &Outcome) -> usize {
    o.loaded.files.iter().map(|f| f.model.tensors.len()).sum()
}

/// A rate over fewer bytes measures start-up time.
const LEAST: u64 = 1 << 20;

/// The reference rate of a stage. Only stages that move bytes through memory or from the disk have one. A transfer
/// copies its bytes, and populates the card's memory where the load touches it first.
fn ceiling(s: &StageReport, o: &Outcome) -> Option<f64> {
    let c = o.loaded.report.reference.filter(|_| s.bytes >= LEAST)?;
    let best = match s.stage {
        Stage::Read => c.read,
        Stage::Transfer => s.bytes as f64 / (s.bytes as f64 / c.copy + o.touched.unwrap_or(0) as f64 / c.first_touch),
        _ => return None,
    };
    (best.is_finite() && best > 0.0).then_some(best)
}

/// The rate of a stage that moved bytes.
fn reached(s: &StageReport) -> Option<f64> {
    let moves = !matches!(s.stage, Stage::Register | Stage::Map | Stage::Bind);
    (moves && s.bytes >= LEAST && !s.busy.is_zero()).then(|| s.bytes as f64 / s.busy.as_secs_f64())
}

/// The share of the wall time that the pipeline spent on a stage; verification follows the wall time.
fn share(s: &StageReport, wall: Duration) -> Option<f64> {
    (s.stage != Stage::Verify && !wall.is_zero()).then(|| s.held.as_secs_f64() / wall.as_secs_f64())
}

/// Stages, with the verification as the last where there was one.
fn stages(o: &Outcome) -> Vec<StageReport> {
    let mut stages = o.loaded.report.stages.clone();
    if o.verified {
        let bytes = o.loaded.files.iter().flat_map(|f| &f.model.tensors).map(|t| t.len).sum();
        for s in stages.iter_mut().filter(|s| s.stage == Stage::Verify) {
            (s.busy, s.held, s.bytes) = (o.loaded.report.verify_wall, o.loaded.report.verify_wall, bytes);
        }
    } else {
        stages.retain(|s| s.stage != Stage::Verify);
    }
    stages
}

/// The outcome as what `--json` prints.
pub(super) fn json(o: &Outcome) -> impl Serialize + use<> {
    let wall = o.loaded.report.wall.as_secs_f64();
    let leaves = |leaves: &[(PageSize, u64)]| {
        leaves.iter().map(|(page, count)| JsonLeaves { page_bytes: page.bytes(), count: *count }).collect()
    };
    let (backing, iommu) = (o.backing.as_ref(), o.iommu.as_ref());
    let ceilings = o.loaded.report.reference;
    Json {
        schema: 2,
        command: "load",
        device: o.device.clone(),
        bytes: o.loaded.report.bytes,
        tensors: tensors(o),
        wall_s: wall,
        bytes_per_s: if wall > 0.0 { o.loaded.report.bytes as f64 / wall } else { 0.0 },
        verified: o.verified,
        verify_s: o.verified.then_some(o.loaded.report.verify_wall.as_secs_f64()),
        slowest_stage: o.loaded.report.slowest().map(|s| s.stage.to_string()),
        stages: stages(o)
            .iter()
            .map(|s| JsonStage {
                stage: s.stage.to_string(),
                busy_s: s.busy.as_secs_f64(),
                wall_s: s.held.as_secs_f64(),
                share: share(s, o.loaded.report.wall),
                bytes: s.bytes,
                bytes_per_s: reached(s),
                ceiling_bytes_per_s: ceiling(s, o),
            })
            .collect(),
        ceilings: ceilings.map(|c| JsonCeilings {
            read_bytes_per_s: c.read,
            copy_bytes_per_s: c.copy,
            first_touch_bytes_per_s: c.first_touch,
        }),
        host: JsonHost {
            staging_buffers: o.loaded.report.staging.0,
            staging_bytes: o.loaded.report.staging.1,
            page_backing: backing.map(|r| r.kind.to_string()),
            page_backing_fallbacks: backing
                .map_or(Vec::new(), |r| r.passed_over.iter().map(|(kind, why)| format!("{kind}: {why}")).collect()),
            heap_peak_bytes: o.heap_peak,
            resident_before_bytes: o.loaded.report.resident_before,
            resident_peak_bytes: o.resident_peak,
            segments: o.loaded.report.segments,
            iommu_leaves: iommu.map(|i| leaves(&i.leaves)),
            iommu_tables: iommu.map(|i| i.tables),
            iotlb_hits: iommu.map(|i| i.hits),
            iotlb_misses: iommu.map(|i| i.misses),
            faults: iommu.map(|i| i.faults),
        },
        card: JsonCard {
            transfers: o.loaded.report.transfers,
            device_leaves: leaves(&o.loaded.report.device_leaves),
            touched_bytes: o.touched,
        },
        files: o
            .loaded
            .files
            .iter()
            .zip(&o.inputs)
            .map(|(f, input)| {
                let how = input.queue.how();
                JsonFile {
                    path: f.path.to_string_lossy().into_owned(),
                    bytes: f.model.len,
                    format: f.model.container.name(),
                    xxh3: format!("{:016x}", f.checksum),
                    direct: how.direct,
                    io_uring: how.uring,
                    fallbacks: how.reasons.clone(),
                    tensors: f
                        .tensors()
                        .map(|t| JsonTensor {
                            name: t.tensor.name.clone(),
                            dtype: t.tensor.dtype.clone(),
                            shape: t.tensor.shape.clone(),
                            bytes: t.tensor.len,
                            device_va: t.va.map(|va| va.first().bits()),
                        })
                        .collect(),
                }
            })
            .collect(),
    }
}

/// The outcome for people.
pub(super) fn text(o: &Outcome, explain: bool, list: bool) -> String {
    let mut out = String::new();
    let r = &o.loaded.report;
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "loaded {} in {} ({}, {}) in {}, {}",
        count(tensors(o), "tensor"),
        count(o.loaded.files.len(), "file"),
        decimal(r.bytes),
        binary(r.bytes),
        duration(r.wall),
        rate(r.bytes, r.wall),
    );
    for (file, input) in o.loaded.files.iter().zip(&o.inputs) {
        let path = plain(&file.path.to_string_lossy());
        let content = match file.model.container {
            Container::Raw => "raw, one run of bytes".to_owned(),
            kind => format!("{}, {}", kind.name(), count(file.model.tensors.len(), "tensor")),
        };
        let _ = writeln!(out, "  {path}: {content}; XXH3 {:016x}; {}", file.checksum, input.queue.how());
    }
    if o.verified {
        let how = match o.space {
            AddressSpaceKind::PageTables { .. } => "through the card's MMU",
            AddressSpaceKind::Driver { .. } => "by device virtual address",
            AddressSpaceKind::Flat => "from the device's memory (it has no MMU)",
        };
        let _ = writeln!(out, "verified {}: read back {how}, equal to the files", count(tensors(o), "tensor"));
    }
    if list {
        for file in &o.loaded.files {
            if o.loaded.files.len() > 1 {
                let _ = writeln!(out, "\n{}", plain(&file.path.to_string_lossy()));
            } else {
                out.push('\n');
            }
            out.push_str(&table(file.tensors()));
        }
    }
    if explain {
        explain_stages(o, &mut out);
        explain_memory(o, &mut out);
    }
    out
}

/// The most columns that a name or a shape takes.
const WIDEST: usize = 48;

/// A line per tensor, in columns.
fn table<'a>(tensors: impl Iterator<Item = &'a LoadedTensor>) -> String {
    let head = ["tensor", "dtype", "shape", "bytes", "device VA"].map(str::to_owned);
    let rows = tensors.map(|LoadedTensor { tensor: t, va }| {
        let dtype = if t.dtype.is_empty() { "-".to_owned() } else { plain(&t.dtype) };
        let shape: Vec<_> = t.shape.iter().map(u64::to_string).collect();
        let shape = if t.dtype.is_empty() { "-".to_owned() } else { format!("[{}]", shape.join(",")) };
        let va = va.map_or("-".to_owned(), |va| format!("{:#x}-{:#x}", va.first().bits(), va.last().bits()));
        [cut(&plain(&t.name)), dtype, cut(&shape), t.len.to_string(), va]
    });
    let rows: Vec<_> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let [name, dtype, shape, bytes] = [0, 1, 2, 3].map(width);
    let line =
        |r: &[String; 5]| format!("{:name$}  {:dtype$}  {:shape$}  {:>bytes$}  {}\n", r[0], r[1], r[2], r[3], r[4]);
    rows.iter().map(line).collect()
}

/// Both ends of a text that is too long: layers differ in front, their parts behind.
fn cut(text: &str) -> String {
    let all: Vec<char> = text.chars().collect();
    if all.len() <= WIDEST {
        return text.to_owned();
    }
    let end = (WIDEST - 3) / 2;
    let ends = (&all[..WIDEST - 3 - end], &all[all.len() - end..]);
    ends.0.iter().chain(&['.'; 3]).chain(ends.1).collect()
}

fn explain_stages(o: &Outcome, out: &mut String) {
    let none = || "-".to_owned();
    let _ = writeln!(out, "\nstage       busy ms   wall ms   of wall       bytes        rate   ceiling");
    // So many digits that something is left of a short load.
    let digits = if o.loaded.report.wall < Duration::from_millis(10) { 3 } else { 1 };
    for s in stages(o) {
        let of_ceiling = match (reached(&s), ceiling(&s, o)) {
            (Some(got), Some(best)) => format!("{} ({:.0} %)", per_second(best), got / best * 100.0),
            _ => none(),
        };
        let _ = writeln!(
            out,
            "{:<10} {:>8.digits$} {:>9.digits$} {:>9} {:>11} {:>11}  {of_ceiling}",
            s.stage.to_string(),
            s.busy.as_secs_f64() * 1e3,
            s.held.as_secs_f64() * 1e3,
            share(&s, o.loaded.report.wall).map_or_else(none, |share| format!("{:.1} %", share * 100.0)),
            decimal(s.bytes),
            reached(&s).map_or_else(none, per_second),
        );
    }
    let _ = writeln!(
        out,
        "busy: time with work under way in the stage; stages overlap. wall: time in which the pipeline only worked \
        on the stage \
         or waited for it. of wall: that time as a share of the load. verify follows the load. -: less than 1 MiB \
         moved."
    );
    if let Some(c) = o.loaded.report.reference {
        let _ = match o.touched {
            Some(touched) => writeln!(
                out,
                "The ceiling of transfer: copying its bytes ({}) plus the first touch of {} of the card's memory ({}).",
                per_second(c.copy),
                decimal(touched),
                per_second(c.first_touch)
            ),
            None => writeln!(
                out,
                "The ceiling of transfer: copying its bytes ({}). Only the card knows how much of its memory is \
                touched first, \
                 which takes longer.",
                per_second(c.copy)
            ),
        };
    }
    if let Some(s) = o.loaded.report.slowest() {
        let _ = writeln!(
            out,
            "Bottleneck: {} ({:.0} % of the wall time).",
            s.stage,
            share(s, o.loaded.report.wall).unwrap_or(0.0) * 100.0
        );
    }
    if let Some(c) = o.loaded.report.reference {
        let _ = writeln!(
            out,
            "Ceilings of this run: reading the same files into the same buffers {}, copying memory {}, first touch \
            of the \
             card's memory {}.",
            per_second(c.read),
            per_second(c.copy),
            per_second(c.first_touch)
        );
    }
}

fn explain_memory(o: &Outcome, out: &mut String) {
    let r = &o.loaded.report;
    let _ = writeln!(out, "\nhost       {} of {}", count(r.staging.0, "staging buffer"), binary(r.staging.1));
    if let Some(backing) = &o.backing {
        let _ = writeln!(out, "           on {}", backing.kind);
        for (kind, why) in &backing.passed_over {
            let _ = writeln!(out, "           not on {kind}: {why}");
        }
    }
    let _ = writeln!(
        out,
        "           heap peak {}; RssAnon + HugetlbPages {} before, {} peak (before the \
         ceilings were measured; without the card's memory)",
        binary(o.heap_peak),
        binary(r.resident_before),
        binary(o.resident_peak)
    );
    let _ = match &o.iommu {
        Some(i) => writeln!(
            out,
            "IOMMU      {} in {}; {}; IOTLB {} hits, {} misses; {}",
            count(r.segments as usize, "segment"),
            leaves(&i.leaves),
            count(i.tables, "table"),
            i.hits,
            i.misses,
            count(i.faults as usize, "fault"),
        ),
        None if o.device.starts_with("daemon") => writeln!(out, "IOMMU      in the daemon: {}", plain(&o.device)),
        None => writeln!(out, "IOMMU      not in this process: {}", plain(&o.device)),
    };
    let touched =
        o.touched.map_or(String::new(), |touched| format!("; {} touched for the first time", binary(touched)));
    let transfers = count(r.transfers as usize, "transfer");
    let _ = writeln!(out, "card       {transfers}{touched}; bound by {}", leaves(&r.device_leaves));
}

fn leaves(leaves: &[(PageSize, u64)]) -> String {
    let present: Vec<_> = leaves.iter().filter(|(_, n)| *n > 0).map(|(page, n)| format!("{n} x {page}")).collect();
    if present.is_empty() { "no leaves".to_owned() } else { format!("leaves {}", present.join(", ")) }
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
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
                dtype: "F32".to_owned(),
                shape: shape.to_vec(),
                at: FileOffset::new(0),
                len,
            }),
            va,
        };
        let va = Span::new(DeviceVa::new(1 << 32), 48);
        let tensors = [tensor("a\x1b[2J", &[3, 4], 48, va), tensor(&"\u{e9}".repeat(99), &[9; 60], 0, None)];
        let text = table(tensors.iter());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].starts_with("a\u{fffd}[2J ") && lines[1].ends_with("  48  0x100000000-0x10000002f"), "{text}");
        let column =
            |line: &str| line.chars().collect::<String>().chars().count() - line.rsplit("  ").next().unwrap().len();
        assert!(lines.iter().all(|l| column(l) == column(lines[0])), "{text}");
        assert!(lines[2].contains("\u{e9}...\u{e9}") && lines[2].ends_with("  -"), "{text}");
    }
}
