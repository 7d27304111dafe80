//! Benchmarks of dmalane: each checks its answer and prints ratios of one run.
#![forbid(unsafe_code)]

mod load;
mod report;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Benchmarks of dmalane.
#[derive(Parser)]
#[command(
    after_help = "Exit status: 0, also with missed bars; 1 with --strict and a missed bar, or when an answer was wrong."
)]
struct Cli {
    /// Print JSON: schema, bench, machine, rows, bars
    #[arg(long, global = true)]
    json: bool,

    /// Exit with 1 when a bar is missed
    #[arg(long, global = true)]
    strict: bool,

    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// A file to the software card, cold and warm, against raw reads and copies
    Load(load::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.bench {
        Bench::Load(options) => load::run(&options),
    };
    let report = match result {
        Ok(report) => report,
        Err(e) => {
            eprintln!("bench: {e}");
            return ExitCode::FAILURE;
        }
    };
    if cli.json {
        println!("{}", report.json());
    } else {
        print!("{}", report.text());
    }
    if cli.strict && !report.all_met() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
