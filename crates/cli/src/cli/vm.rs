//! The options of `dmalane vm` and their help.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::iopt::formats;
use crate::failure::Failure;
use crate::iopt::Format;
use crate::vm;

const EXAMPLES: &str = "\
Examples:
  dmalane vm replay binds.jsonl
  dmalane vm replay binds.jsonl --format agx-uat --json

Exit status: 0 replayed, 1 bad trace or a refused operation, 2 wrong command line.";

const REPLAY_EXAMPLES: &str = "\
Examples:
  dmalane load --sample 64MiB --record binds.jsonl && dmalane vm replay binds.jsonl
  dmalane vm replay - --json < binds.jsonl | jq '.results[] | select(.result != \"ok\")'
  dmalane vm replay binds.jsonl --format agx-uat

A trace, one JSON object a line, with numbers or \"0x\" texts (docs/formats/vm-trace.md):
  {\"trace\": \"dmalane-vm\", \"version\": 1, \"format\": \"agx-uat\"}
  {\"op\": \"bo\", \"id\": 1, \"segments\": [{\"pa\": \"0x100000000\", \"len\": \"0x200000\"}]}
  {\"op\": \"bind\", \"va\": \"0x40000000\", \"bo\": 1, \"offset\": 0, \"len\": 65536, \"access\": \"rw\"}
  {\"op\": \"unbind\", \"va\": \"0x40004000\", \"len\": 16384}

Exit status: 0 replayed, 1 bad trace or a refused operation, 2 wrong command line.";

/// Bind and unbind in a device's virtual memory, without a device.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct VmOptions {
    #[command(subcommand)]
    command: VmCommand,
}

#[derive(Subcommand)]
enum VmCommand {
    Replay(ReplayOptions),
}

/// Replay a trace of binds and unbinds, and print what is mapped at the end.
///
/// Prints the result of each line. A line that is refused has no effect, and the replay goes on.
#[derive(Args)]
#[command(after_help = REPLAY_EXAMPLES)]
struct ReplayOptions {
    /// The trace, or - for stdin
    #[arg(value_name = "TRACE")]
    trace: PathBuf,

    /// The page-table format [default: that of the trace]
    #[arg(short, long, value_parser = formats())]
    format: Option<&'static Format>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `dmalane vm`.
pub fn run(options: VmOptions) -> Result<ExitCode, Failure> {
    match options.command {
        VmCommand::Replay(o) => vm::replay(&o.trace, o.format, o.json),
    }
}
