//! The dmalane command line.

mod bar_map;
mod card;
mod cli;
mod devices;
mod doctor;
mod failure;
mod inspect;
mod iopt;
mod load;
mod output;
mod pci;
mod pci_card;
mod probe;
mod progress;
mod read;
mod size;
mod validate;
mod vm;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run().unwrap_or_else(|failure| failure.report())
}
