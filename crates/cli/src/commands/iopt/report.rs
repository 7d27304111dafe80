//! The output of `dmalane iopt`.

use std::path::Path;
use std::process::ExitCode;

use dmalane::addr::{Access, PageSize};
use dmalane::iopt::{FaultKind, FormatId, Register, TableImage, WalkFault, Walked};
use serde_json::{Value, json};

use super::formats::{DumpRun, Dumped};
use super::number::Number;
use super::source::ImageSource;
use crate::failure::Failure;
use crate::layout::{Table, count, plain};
use crate::{output, size};

/// The page-table formats.
pub fn formats(json: bool) -> Result<ExitCode, Failure> {
    let format = |format: &FormatId| {
        json!({
            "format": format.name(),
            "page_bytes": format.facts().page_sizes.iter().map(PageSize::bytes).collect::<Vec<_>>(),
            "input_bits": format.facts().input_bits,
            "output_bits": format.facts().output_bits,
            "access": accesses(*format),
        })
    };
    let all = || {
        let formats: Value = FormatId::ALL.iter().map(format).collect();
        json!({ "schema": 1, "command": "iopt formats", "formats": formats })
    };
    output::tell(json, all, || {
        let mut table = Table::new("lrrl", ["format", "input", "output", "page sizes"]);
        for format in FormatId::ALL {
            let facts = format.facts();
            let pages: Vec<_> = facts.page_sizes.iter().map(|size| size.to_string()).collect();
            let [input, output] = [facts.input_bits, facts.output_bits].map(|bits| format!("{bits} bits"));
            table.row([format.name().to_owned(), input, output, pages.join(" ")]);
        }
        table.text()
    })
}

/// The rights that a leaf can grant.
fn accesses(format: FormatId) -> Vec<String> {
    let all = (1..=Access::all().bits()).map(Access::from_bits_truncate);
    all.filter(|access| (format.facts().supports)(*access)).map(|access| access.to_string()).collect()
}

/// The tables that were built.
pub fn built(format: FormatId, output: &Path, base: u64, built: &TableImage, json: bool) -> Result<ExitCode, Failure> {
    let leaf = |(page, count): (PageSize, u64)| json!({ "page_bytes": page.bytes(), "count": count });
    let register = |r: &Register| json!({ "name": r.name, "value": Number(r.value) });
    let all = || {
        json!({
            "schema": 1,
            "command": "iopt build",
            "format": format.name(),
            "image": output.to_string_lossy(),
            "root": Number(base),
            "base": Number(base),
            "bytes": built.bytes().len(),
            "tables": built.tables(),
            "mapped_bytes": built.leaf_counts().map(|(page, count)| page.bytes() * count).sum::<u64>(),
            "leaves": built.leaf_counts().map(leaf).collect::<Value>(),
            "registers": built.registers().map(|r| register(&r)).collect::<Value>(),
        })
    };
    output::tell(json, all, || built_text(format, output, base, built))
}

fn built_text(format: FormatId, output: &Path, base: u64, built: &TableImage) -> String {
    let bytes = size::binary(built.bytes().len() as u64);
    let leaves: Vec<_> =
        built.leaf_counts().filter(|l| l.1 > 0).map(|(page, count)| format!("{count} x {page}")).collect();
    let leaves = if leaves.is_empty() { "none".to_owned() } else { leaves.join(", ") };
    let mut text = format!(
        "image      {}, {bytes} at {base:#x}\nformat     {}\ntables     {}\nleaves     {leaves}\nroot       {:#x}\n",
        plain(&output.to_string_lossy()),
        format.name(),
        built.tables(),
        base
    );
    let width = built.registers().map(|r| r.name.len()).max().unwrap_or(0);
    for (i, register) in built.registers().enumerate() {
        let label = if i == 0 { "registers" } else { "" };
        text += &format!("{label:<11}{:<width$}  {:#x}\n", register.name, register.value);
    }
    text
}

/// Where addresses lead.
pub fn walked(source: &ImageSource, walks: &[(u64, Result<Walked, WalkFault>)]) -> Result<ExitCode, Failure> {
    let line = |&(va, walk): &(u64, Result<Walked, WalkFault>)| match walk {
        Ok(leaf) => format!("{va:#x} -> {:#x}  {}  {}\n", leaf.to, leaf.access, leaf.size),
        Err(fault) => format!("{va:#x} -> fault at level {}: {}\n", fault.level, fault.kind),
    };
    let all = || {
        let mut report = head("iopt walk", source);
        report["translations"] = walks.iter().map(|&(va, walk)| translation(va, walk)).collect();
        report
    };
    output::tell(source.json, all, || walks.iter().map(line).collect())
}

fn head(command: &str, source: &ImageSource) -> Value {
    json!({
        "schema": 1,
        "command": command,
        "format": source.format.name(),
        "image": source.image.to_string_lossy(),
        "root": Number(source.root.0),
        "base": Number(source.base()),
    })
}

fn translation(va: u64, walk: Result<Walked, WalkFault>) -> Value {
    let kind = |fault: WalkFault| match fault.kind {
        FaultKind::NotPresent => "not_present",
        FaultKind::NotUnderstood => "not_understood",
        FaultKind::Denied => "denied",
        FaultKind::BadTable => "bad_table",
        FaultKind::OutOfRange => "out_of_range",
        _ => "other",
    };
    json!({
        "va": Number(va),
        "pa": walk.ok().map(|leaf| Number(leaf.to)),
        "page_bytes": walk.ok().map(|leaf| leaf.size.bytes()),
        "access": walk.ok().map(|leaf| leaf.access.to_string()),
        "fault": walk.err().map(|fault| json!({ "level": fault.level, "kind": kind(fault) })),
    })
}

/// The mappings of the tables.
pub fn dumped(source: &ImageSource, dumped: &Dumped) -> Result<ExitCode, Failure> {
    let Dumped { runs, not_understood } = dumped;
    // A table that is reached by many ways is mapped as often: the sum may be more than 64 bits hold.
    let mapped_bytes = runs.iter().fold(0u64, |sum, run| sum.saturating_add(run.len));
    let run = |run: &DumpRun| {
        json!({
            "va": Number(run.va),
            "pa": Number(run.pa),
            "len": run.len,
            "access": run.access.to_string(),
            "page_bytes": run.page.bytes(),
            "count": run.count,
        })
    };
    let all = || {
        let mut report = head("iopt dump", source);
        report["mapped_bytes"] = mapped_bytes.into();
        report["not_understood"] = (*not_understood).into();
        report["runs"] = runs.iter().map(run).collect();
        report
    };
    output::tell(source.json, all, || {
        let w = runs.last().map_or(0, |run| format!("{:x}", run.va + (run.len - 1)).len()) + 2;
        let line = |run: &DumpRun| {
            let (va, last, DumpRun { pa, access, count, page, .. }) = (run.va, run.va + (run.len - 1), run);
            format!("{va:#0w$x}..={last:#0w$x} -> {pa:#x}  {access}  {count} x {page}\n")
        };
        let lines: String = runs.iter().map(line).collect();
        let others = match *not_understood {
            0 => String::new(),
            n => format!(", valid but not understood: {n}"),
        };
        format!("{lines}{}, {} mapped{others}\n", count(runs.len(), "run"), size::binary(mapped_bytes))
    })
}
