//! The program `dmalane`, as a function for embedding.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands;
use crate::program::{self, Completions, Man};

const EXAMPLES: &str = "\
Examples:
  dmalane load --sample 1GiB --verify -v  make a file, load it, and show where the time goes
  dmalane load model.safetensors          load a model
  dmalane read model.safetensors -v       only read it into memory, and say how
  dmalane validate                        check a device's data and measure its speed
  dmalane doctor                          check this machine for missing features

Sizes: MB and GB are powers of 10, MiB and GiB are powers of 2; without a unit, bytes.
Ranges of bytes and addresses: START..END, without END. Rates: GB/s, 10^9 bytes per second.

Exit status:
  0  success
  1  the job failed: a bad file, a mismatch, a machine that cannot do it
  2  usage error";

/// Loads model files onto devices from user space, and shows where the time goes.
#[derive(Parser)]
#[command(name = "dmalane", version, after_help = EXAMPLES, max_term_width = 100)]
#[command(help_template = commands::help_template())]
struct Dmalane {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Work(commands::Commands),
    Completions(Completions),
    #[command(hide = true)]
    Man(Man),
}

/// Runs the program `dmalane` with these words, of which the first is its name.
pub fn run(words: Vec<OsString>) -> ExitCode {
    program::start(words, |dmalane: Dmalane| match dmalane.command {
        Command::Work(command) => command.run(),
        Command::Completions(completions) => completions.run::<Dmalane>(),
        Command::Man(man) => man.run::<Dmalane>(),
    })
}

/// The commands of the program `dmalane`, with their arguments.
pub fn definition() -> clap::Command {
    program::command::<Dmalane>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        definition().debug_assert();
    }
}
