//! `dmalane vm`: device virtual memory.

mod bench;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use dmalane::iopt::{FormatId, UnknownFormat};
use dmalane::vm::Error as VmError;
use dmalane::vm::trace::{self, Lines, TraceError, TraceHeader};

use super::iopt::FORMAT;
use crate::failure::Failure;
use crate::layout::count;
use crate::output;
use crate::source::SourceFile;
use report::ReplayReport;

const EXAMPLES: &str = "\
Examples:
  dmalane vm replay binds.jsonl
  dmalane load --sample 64MiB --record new.jsonl && dmalane vm replay new.jsonl
  dmalane vm replay - --json < binds.jsonl | jq '.results[] | select(.result != \"ok\")'
  dmalane vm replay binds.jsonl --format riscv-sv39 --times

A trace, one JSON object a line, with numbers or \"0x\" texts (docs/formats/vm-trace.md):
  {\"trace\": \"dmalane-vm\", \"version\": 1, \"format\": \"agx-uat\"}
  {\"op\": \"bo\", \"id\": 1, \"segments\": [{\"pa\": \"0x100000000\", \"len\": \"0x200000\"}]}
  {\"op\": \"bind\", \"va\": \"0x40000000\", \"bo\": 1, \"offset\": 0, \"len\": 65536, \"access\": \"rw\"}
  {\"op\": \"unbind\", \"va\": \"0x40004000\", \"len\": 16384}

Exit status: 0 replayed, 1 bad trace or a refused operation, 2 usage error.";

/// Bind and unbind in device virtual memory.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Vm {
    #[command(subcommand)]
    command: VmCommand,
}

#[derive(Subcommand)]
enum VmCommand {
    Replay(Replay),
    Bench(bench::Bench),
}

/// Replay a trace of binds and unbinds, and print what is mapped at the end.
///
/// Prints the result of each line. A refused line has no effect, and the replay continues.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
struct Replay {
    /// The trace; - for standard input
    #[arg(value_name = "TRACE")]
    trace: PathBuf,

    /// The page-table format, as `dmalane iopt formats` names it [default: that of the trace]
    #[arg(short, long, value_parser = FORMAT, hide_possible_values = true)]
    format: Option<FormatId>,

    /// Print how long the first bind, the other binds and the unbinds took, without reading the trace
    #[arg(long)]
    times: bool,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl Vm {
    /// Runs the subcommand.
    pub fn run(self) -> Result<ExitCode, Failure> {
        match self.command {
            VmCommand::Replay(replay) => replay.run(),
            VmCommand::Bench(bench) => bench.run(),
        }
    }
}

impl Replay {
    /// Replays a trace and prints the results.
    fn run(self) -> Result<ExitCode, Failure> {
        let source = SourceFile::open(&self.trace)?;
        let name = source.path.display().to_string();
        let from = source.reader()?;
        let wrong = |e: TraceError| Failure::because(format!("{name} cannot be replayed"), &e);
        let shorter = |format: FormatId| {
            let bits = format.input_bits();
            let load = format!("`dmalane load --record` chooses such with -d soft,va-bits={bits}");
            format!("{format} translates addresses of {bits} bits; {load}")
        };
        let mut lines = Lines::new(from);
        let header = TraceHeader::read(&mut lines).map_err(wrong)?;
        let format = self.format.map_or_else(|| of_trace(&header, &name), Ok)?;
        let vm = header.vm(format).map_err(|e| match e {
            TraceError::Vm(VmError::New { .. }) => wrong(e).hint(shorter(format)),
            e => wrong(e),
        })?;
        let mut replay = trace::Replay::new(vm);
        let mut report = ReplayReport::new(&name, format, replay.vm(), self.json);
        let (mut operations, mut refused, mut first_refused) = (0u64, 0u64, 0);
        let (mut stopped, mut outside) = (None, false);
        for outcome in replay.lines(lines) {
            let (line, outcome) = match outcome {
                Ok(outcome) => outcome,
                Err(e) => {
                    stopped = Some(e);
                    break;
                }
            };
            operations += 1;
            if outcome.result.is_err() {
                refused += 1;
                outside |= outcome.name() == "outside_vm";
                first_refused = if refused == 1 { line } else { first_refused };
            }
            report.outcome(line, &outcome);
        }
        output::written(report.finish(&replay, operations, refused, stopped.as_ref(), self.times))?;
        if let Some(error) = stopped {
            return Err(Failure::because(format!("{name} cannot be read to its end"), &error));
        }
        if refused > 0 {
            let of = count(operations as usize, "operation");
            let failure = Failure::new(format!("{name}: {refused} of {of} refused, the first in line {first_refused}"));
            return Err(if outside && header.range.is_none() { failure.hint(shorter(format)) } else { failure });
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The format that a trace names.
fn of_trace(header: &TraceHeader, name: &str) -> Result<FormatId, Failure> {
    let Some(format) = &header.format else {
        return Err(Failure::new(format!("{name} does not say which page-table format it is for"))
            .hint("name one with --format; `dmalane iopt formats` lists them"));
    };
    format.parse().map_err(|e: UnknownFormat| {
        Failure::because(format!("{name} cannot be replayed"), &e)
            .hint("name another with --format; `dmalane iopt formats` lists them")
    })
}
