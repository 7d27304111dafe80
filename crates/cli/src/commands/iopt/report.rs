//! The output of `dmalane iopt`.

use std::path::Path;
use std::process::ExitCode;

use dmalane::addr::{Access, PageSize};
use dmalane::iopt::{FaultKind, FormatId, WalkFault, Walked};
use serde::{Serialize, Serializer};

use super::Source;
use super::formats::{self, Run};
use crate::failure::Failure;
use crate::{output, size};

/// An address in JSON: a text, since not every reader keeps all digits of a number above 2^53.
fn as_hex<S: Serializer>(address: &u64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&format!("{address:#x}"))
}

#[derive(Serialize)]
struct Report<'a, T> {
    schema: u32,
    command: &'static str,
    format: &'static str,
    image: std::borrow::Cow<'a, str>,
    #[serde(serialize_with = "as_hex")]
    root: u64,
    #[serde(serialize_with = "as_hex")]
    base: u64,
    #[serde(flatten)]
    result: T,
}

#[derive(Serialize)]
struct FormatsReport {
    schema: u32,
    command: &'static str,
    formats: Vec<FormatReport>,
}

#[derive(Serialize)]
struct FormatReport {
    format: &'static str,
    page_bytes: Vec<u64>,
    input_bits: u32,
    output_bits: u32,
    access: Vec<String>,
}

/// The page-table formats.
pub fn formats(json: bool) -> Result<ExitCode, Failure> {
    if json {
        let format = |format: &FormatId| FormatReport {
            format: format.name(),
            page_bytes: format.page_sizes().iter().map(PageSize::bytes).collect(),
            input_bits: format.input_bits(),
            output_bits: format.output_bits(),
            access: accesses(*format),
        };
        let formats = FormatId::ALL.iter().map(format).collect();
        output::print_json(&FormatsReport { schema: 1, command: "iopt formats", formats })?;
    } else {
        let width = FormatId::ALL.iter().map(|format| format.name().len()).max().unwrap_or(0);
        let line = |format: &FormatId| {
            let pages: Vec<_> = format.page_sizes().iter().map(|size| size.to_string()).collect();
            let (input, output) = (format.input_bits(), format.output_bits());
            format!("{format:<width$}  {input} to {output} bits  {}\n", pages.join(" "))
        };
        output::print(&FormatId::ALL.iter().map(line).collect::<String>())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The rights that a leaf can grant.
fn accesses(format: FormatId) -> Vec<String> {
    let all = (1..=Access::all().bits()).map(Access::from_bits_truncate);
    all.filter(|access| format.supports(*access)).map(|access| access.to_string()).collect()
}

#[derive(Serialize)]
struct BuiltResult {
    bytes: u64,
    tables: u64,
    mapped_bytes: u64,
    leaves: Vec<Leaves>,
    registers: Vec<Value>,
}

#[derive(Serialize)]
struct Value {
    name: &'static str,
    #[serde(serialize_with = "as_hex")]
    value: u64,
}

#[derive(Serialize)]
struct Leaves {
    page_bytes: u64,
    count: u64,
}

/// The tables that were built.
pub fn built(
    format: FormatId,
    output: &Path,
    base: u64,
    built: &formats::Built,
    json: bool,
) -> Result<ExitCode, Failure> {
    if json {
        let leaves = built.leaves.iter().map(|&(page, count)| Leaves { page_bytes: page.bytes(), count });
        output::print_json(&Report {
            schema: 1,
            command: "iopt build",
            format: format.name(),
            image: output.to_string_lossy(),
            root: built.root,
            base,
            result: BuiltResult {
                bytes: built.bytes.len() as u64,
                tables: built.tables,
                mapped_bytes: mapped_bytes(&built.leaves),
                leaves: leaves.collect(),
                registers: built.registers.iter().map(|r| Value { name: r.name, value: r.value }).collect(),
            },
        })?;
    } else {
        output::print(&built_text(format, output, base, built))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn mapped_bytes(leaves: &[(PageSize, u64)]) -> u64 {
    leaves.iter().map(|&(page, count)| page.bytes() * count).sum()
}

fn built_text(format: FormatId, output: &Path, base: u64, built: &formats::Built) -> String {
    let bytes = size::binary(built.bytes.len() as u64);
    let leaves: Vec<_> =
        built.leaves.iter().filter(|l| l.1 > 0).map(|&(page, count)| format!("{count} x {page}")).collect();
    let leaves = if leaves.is_empty() { "none".to_owned() } else { leaves.join(", ") };
    let mut text = format!(
        "image      {}, {bytes} at {base:#x}\nformat     {}\ntables     {}\nleaves     {leaves}\nroot       {:#x}\n",
        output::plain(&output.to_string_lossy()),
        format.name(),
        built.tables,
        built.root
    );
    let width = built.registers.iter().map(|r| r.name.len()).max().unwrap_or(0);
    for (i, register) in built.registers.iter().enumerate() {
        let label = if i == 0 { "registers" } else { "" };
        text += &format!("{label:<11}{:<width$}  {:#x}\n", register.name, register.value);
    }
    text
}

#[derive(Serialize)]
struct WalkedResult {
    translations: Vec<Translation>,
}

#[derive(Serialize)]
struct Translation {
    #[serde(serialize_with = "as_hex")]
    va: u64,
    pa: Option<String>,
    page_bytes: Option<u64>,
    access: Option<String>,
    fault: Option<Fault>,
}

#[derive(Serialize)]
struct Fault {
    level: u32,
    kind: &'static str,
}

/// Where addresses lead.
pub fn walked(source: &Source, walks: &[(u64, Result<Walked, WalkFault>)]) -> Result<ExitCode, Failure> {
    if source.json {
        let translations = walks.iter().map(|&(va, walk)| translation(va, walk)).collect();
        output::print_json(&report("iopt walk", source, WalkedResult { translations }))?;
    } else {
        let line = |&(va, walk): &(u64, Result<Walked, WalkFault>)| match walk {
            Ok(leaf) => format!("{va:#x} -> {:#x}  {}  {}\n", leaf.to, leaf.access, leaf.size),
            Err(fault) => format!("{va:#x} -> fault at level {}: {}\n", fault.level, fault.kind),
        };
        output::print(&walks.iter().map(line).collect::<String>())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn report<'a, T>(command: &'static str, source: &'a Source, result: T) -> Report<'a, T> {
    Report {
        schema: 1,
        command,
        format: source.format.name(),
        image: source.image.to_string_lossy(),
        root: source.root.0,
        base: source.base(),
        result,
    }
}

fn translation(va: u64, walk: Result<Walked, WalkFault>) -> Translation {
    match walk {
        Ok(leaf) => Translation {
            va,
            pa: Some(format!("{:#x}", leaf.to)),
            page_bytes: Some(leaf.size.bytes()),
            access: Some(leaf.access.to_string()),
            fault: None,
        },
        Err(fault) => {
            let kind = match fault.kind {
                FaultKind::NotPresent => "not_present",
                FaultKind::Denied => "denied",
                FaultKind::BadTable => "bad_table",
                FaultKind::OutOfRange => "out_of_range",
            };
            let fault = Fault { level: fault.level, kind };
            Translation { va, pa: None, page_bytes: None, access: None, fault: Some(fault) }
        }
    }
}

#[derive(Serialize)]
struct DumpedResult {
    mapped_bytes: u64,
    runs: Vec<DumpedRun>,
}

#[derive(Serialize)]
struct DumpedRun {
    #[serde(serialize_with = "as_hex")]
    va: u64,
    #[serde(serialize_with = "as_hex")]
    pa: u64,
    len: u64,
    access: String,
    page_bytes: u64,
    count: u64,
}

/// The mappings of the tables.
pub fn dumped(source: &Source, runs: &[Run]) -> Result<ExitCode, Failure> {
    // A table that is reached by many ways is mapped as often: the sum may be more than 64 bits hold.
    let mapped_bytes = runs.iter().fold(0u64, |sum, run| sum.saturating_add(run.len));
    if source.json {
        let runs = runs.iter().map(|run| DumpedRun {
            va: run.va,
            pa: run.pa,
            len: run.len,
            access: run.access.to_string(),
            page_bytes: run.page.bytes(),
            count: run.count,
        });
        output::print_json(&report("iopt dump", source, DumpedResult { mapped_bytes, runs: runs.collect() }))?;
    } else {
        let width = runs.last().map_or(0, |run| format!("{:x}", run.va + (run.len - 1)).len());
        let mut text = String::new();
        for run in runs {
            text += &format!(
                "{:#0w$x}..={:#0w$x} -> {:#x}  {}  {} x {}\n",
                run.va,
                run.va + (run.len - 1),
                run.pa,
                run.access,
                run.count,
                run.page,
                w = width + 2,
            );
        }
        let plural = if runs.len() == 1 { "" } else { "s" };
        text += &format!("{} run{plural}, {} mapped\n", runs.len(), size::binary(mapped_bytes));
        output::print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}
