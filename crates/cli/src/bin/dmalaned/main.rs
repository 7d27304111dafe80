//! The dmalaned command line: a daemon that shares a card between processes.

// What the two programs say in the same way.
#[allow(dead_code)]
#[path = "../../failure.rs"]
mod failure;
#[path = "../../output.rs"]
mod output;
#[allow(dead_code)]
#[path = "../../size.rs"]
mod size;

mod cli;
mod status;
mod system;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run().unwrap_or_else(|failure| failure.report())
}
