//! The outcome of a load, as text and as JSON.

use std::fmt::Write;

use dmalane::addr::PageSize;
use dmalane::load::{Ceilings, Stage, StageReport};
use serde::Serialize;

use super::Outcome;
use crate::output::plain;
use crate::size::{binary, decimal, rate};

/// What `--json` prints; described in `docs/formats/json.md`.
#[derive(Serialize)]
struct Json {
    schema: u32,
    command: &'static str,
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
    held_s: f64,
    share: f64,
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
    pages: Option<String>,
    pages_passed_over: Vec<String>,
    heap_peak_bytes: u64,
    resident_before_bytes: u64,
    resident_peak_bytes: u64,
    segments: u64,
    iommu_leaves: Vec<JsonLeaves>,
    iommu_tables: usize,
    iotlb_hits: u64,
    iotlb_misses: u64,
    faults: u64,
}

#[derive(Serialize)]
struct JsonCard {
    transfers: u64,
    device_leaves: Vec<JsonLeaves>,
    touched_bytes: u64,
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

/// What a stage could do at best. Only stages that move bytes through memory or from the disk have a ceiling.
fn ceiling(stage: Stage, ceilings: &Ceilings) -> Option<f64> {
    match stage {
        Stage::Read => Some(ceilings.read),
        Stage::Transfer => Some(ceilings.copy),
        _ => None,
    }
}

fn per_second(s: &StageReport) -> Option<f64> {
    let seconds = s.busy.as_secs_f64();
    (seconds > 0.0 && s.bytes > 0).then(|| s.bytes as f64 / seconds)
}

/// Stages, with the verification as the last where there was one.
fn stages(o: &Outcome) -> Vec<StageReport> {
    let mut stages = o.report.stages.clone();
    if o.verified {
        let bytes = o.loaded.files.iter().flat_map(|f| &f.model.tensors).map(|t| t.len).sum();
        for s in stages.iter_mut().filter(|s| s.stage == Stage::Verify) {
            (s.busy, s.held, s.bytes) = (o.report.verify_wall, o.report.verify_wall, bytes);
        }
    } else {
        stages.retain(|s| s.stage != Stage::Verify);
    }
    stages
}

/// The outcome as what `--json` prints.
pub(super) fn json(o: &Outcome) -> impl Serialize + use<> {
    let wall = o.report.wall.as_secs_f64();
    let host = o.soft.bus.host().stats();
    let leaves = |leaves: &[(PageSize, u64)]| {
        leaves.iter().map(|(page, count)| JsonLeaves { page_bytes: page.bytes(), count: *count }).collect()
    };
    let rung = o.soft.device.staging_rung();
    let ceilings = o.report.ceilings;
    Json {
        schema: 1,
        command: "load",
        bytes: o.report.bytes,
        tensors: tensors(o),
        wall_s: wall,
        bytes_per_s: if wall > 0.0 { o.report.bytes as f64 / wall } else { 0.0 },
        verified: o.verified,
        verify_s: o.verified.then_some(o.report.verify_wall.as_secs_f64()),
        slowest_stage: o.report.slowest().map(|s| s.stage.to_string()),
        stages: stages(o)
            .iter()
            .map(|s| JsonStage {
                stage: s.stage.to_string(),
                busy_s: s.busy.as_secs_f64(),
                held_s: s.held.as_secs_f64(),
                share: if wall > 0.0 { s.held.as_secs_f64() / wall } else { 0.0 },
                bytes: s.bytes,
                bytes_per_s: per_second(s),
                ceiling_bytes_per_s: ceilings.and_then(|c| ceiling(s.stage, &c)),
            })
            .collect(),
        ceilings: ceilings.map(|c| JsonCeilings {
            read_bytes_per_s: c.read,
            copy_bytes_per_s: c.copy,
            first_touch_bytes_per_s: c.first_touch,
        }),
        host: JsonHost {
            staging_buffers: o.report.staging.0,
            staging_bytes: o.report.staging.1,
            pages: rung.map(|r| r.kind.to_string()),
            pages_passed_over: rung
                .map_or(Vec::new(), |r| r.passed_over.iter().map(|(kind, why)| format!("{kind}: {why}")).collect()),
            heap_peak_bytes: o.heap_peak,
            resident_before_bytes: o.report.resident_before,
            resident_peak_bytes: o.report.resident_peak,
            segments: o.report.segments,
            iommu_leaves: leaves(&host.leaves),
            iommu_tables: host.tables,
            iotlb_hits: host.iotlb_hits,
            iotlb_misses: host.iotlb_misses,
            faults: host.faults,
        },
        card: JsonCard {
            transfers: o.report.transfers,
            device_leaves: leaves(&o.report.device_leaves),
            touched_bytes: touched(o),
        },
        files: o
            .loaded
            .files
            .iter()
            .zip(&o.inputs)
            .map(|(f, input)| {
                let how = input.channel.how();
                JsonFile {
                    path: f.path.to_string_lossy().into_owned(),
                    bytes: f.model.len,
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

fn touched(o: &Outcome) -> u64 {
    let (ddr, hbm) = o.soft.bus.memory().touched();
    ddr + hbm
}

/// The outcome for people.
pub(super) fn text(o: &Outcome, explain: bool) -> String {
    let mut out = String::new();
    let r = &o.report;
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "loaded {} in {} ({}, {}) in {:.3} s, {}",
        count(tensors(o), "tensor"),
        count(o.loaded.files.len(), "file"),
        decimal(r.bytes),
        binary(r.bytes),
        r.wall.as_secs_f64(),
        rate(r.bytes, r.wall),
    );
    for (file, input) in o.loaded.files.iter().zip(&o.inputs) {
        let path = plain(&file.path.to_string_lossy());
        let _ = writeln!(out, "  {path}: XXH3 {:016x}, {}", file.checksum, input.channel.how());
    }
    if o.verified {
        let _ = writeln!(
            out,
            "verified {}: read back through the card's MMU, equal to the files",
            count(tensors(o), "tensor")
        );
    }
    if explain {
        explain_stages(o, &mut out);
        explain_memory(o, &mut out);
    }
    out
}

fn explain_stages(o: &Outcome, out: &mut String) {
    let wall = o.report.wall.as_secs_f64();
    let _ = writeln!(out, "\nstage       busy ms   held ms   of wall       bytes        rate   ceiling");
    for s in stages(o) {
        let share = if wall > 0.0 { s.held.as_secs_f64() / wall * 100.0 } else { 0.0 };
        let at_best = o.report.ceilings.as_ref().and_then(|c| ceiling(s.stage, c));
        let of_ceiling = match (per_second(&s), at_best) {
            (Some(got), Some(best)) if best > 0.0 => {
                format!("  {:.2} GB/s ({:.0} %)", best / 1e9, got / best * 100.0)
            }
            _ => String::new(),
        };
        let rate = if s.bytes > 0 { rate(s.bytes, s.busy) } else { "-".into() };
        let _ = writeln!(
            out,
            "{:<10} {:>8.1} {:>9.1} {:>7.1} % {:>11} {:>11}{of_ceiling}",
            s.stage.to_string(),
            s.busy.as_secs_f64() * 1e3,
            s.held.as_secs_f64() * 1e3,
            share,
            decimal(s.bytes),
            rate,
        );
    }
    let _ = writeln!(
        out,
        "busy: the stage had work under way (stages overlap). held: the pipeline worked on it or waited for it, and did nothing \
         else; the share of the wall time is of that. verify comes after the wall time."
    );
    if let Some(s) = o.report.slowest() {
        let _ = writeln!(out, "The stage that cost most: {}.", s.stage);
    }
    if let Some(c) = o.report.ceilings {
        let _ = writeln!(
            out,
            "Ceilings of this run: reading the same files into the same buffers {:.2} GB/s, copying memory {:.2} GB/s, first \
             touch of the card's memory {:.2} GB/s.",
            c.read / 1e9,
            c.copy / 1e9,
            c.first_touch / 1e9
        );
    }
}

fn explain_memory(o: &Outcome, out: &mut String) {
    let r = &o.report;
    let host = o.soft.bus.host().stats();
    let _ = writeln!(out, "\nhost       {} of {}", count(r.staging.0, "staging buffer"), binary(r.staging.1));
    if let Some(rung) = o.soft.device.staging_rung() {
        let _ = writeln!(out, "           on {}", rung.kind);
        for (kind, why) in &rung.passed_over {
            let _ = writeln!(out, "           not on {kind}: {why}");
        }
    }
    let _ = writeln!(
        out,
        "           heap at most {}; RssAnon + HugetlbPages {} before, {} at most (the card's memory is apart)",
        binary(o.heap_peak),
        binary(r.resident_before),
        binary(r.resident_peak)
    );
    let _ = writeln!(
        out,
        "IOMMU      {} in {}; {}; IOTLB {} hits, {} misses; {}",
        count(r.segments as usize, "segment"),
        leaves(&host.leaves),
        count(host.tables, "table"),
        host.iotlb_hits,
        host.iotlb_misses,
        count(host.faults as usize, "fault"),
    );
    let _ = writeln!(
        out,
        "card       {}; {} touched; bound by {}",
        count(r.transfers as usize, "transfer"),
        binary(touched(o)),
        leaves(&r.device_leaves)
    );
}

fn leaves(leaves: &[(PageSize, u64)]) -> String {
    let present: Vec<_> = leaves.iter().filter(|(_, n)| *n > 0).map(|(page, n)| format!("{n} x {page}")).collect();
    if present.is_empty() { "no leaves".to_owned() } else { format!("leaves {}", present.join(", ")) }
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}
