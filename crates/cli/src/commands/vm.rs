//! `dmalane vm`: device virtual memory.

mod bench;

use std::process::ExitCode;

use clap::Subcommand;

use crate::failure::Failure;

/// Bind and unbind in device virtual memory.
#[derive(Subcommand)]
#[command(after_help = bench::EXAMPLES)]
pub(crate) enum Vm {
    Bench(bench::Bench),
}

impl Vm {
    /// Runs the subcommand.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let Self::Bench(bench) = self;
        bench.run()
    }
}
