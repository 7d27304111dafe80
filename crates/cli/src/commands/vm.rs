//! `dmalane vm`: device virtual memory.

mod bench;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Bind and unbind in device virtual memory.
#[derive(Args)]
#[command(after_help = bench::EXAMPLES)]
pub(crate) struct Vm {
    #[command(subcommand)]
    command: VmCommand,
}

#[derive(Subcommand)]
enum VmCommand {
    Bench(bench::Bench),
}

impl Vm {
    /// Runs the subcommand.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let VmCommand::Bench(bench) = self.command;
        bench.run()
    }
}
