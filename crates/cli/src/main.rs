//! The dmalane command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    dmalane_cli::run(std::env::args_os().collect())
}
