//! Benchmarks of dmalane: each checks its answer and prints ratios of one run.
#![deny(unsafe_code)]

mod bar_map;
mod clock;
mod instructions;
mod iova;
mod job;
mod layers;
mod load;
mod lookup;
mod map_sg;
// Only what the peers' interfaces demand.
#[allow(unsafe_code)]
mod peers;
mod policy;
mod report;
mod subject;

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
    /// Scatter lists into page tables: the seed's two shapes, ours, the peers, the floor
    MapSg(map_sg::Options),
    /// Look-ups at random addresses
    Lookup(lookup::Options),
    /// A 32 GiB BAR, page by page and leaf by leaf
    BarMap(bar_map::Options),
    /// Free ranges of input addresses, beside mapping them
    Iova(iova::Options),
    /// Split policies over modelled links, beside the optimum
    Policy(policy::Options),
    /// One mapping of a case of map-sg by a variant, to be counted by callgrind
    #[command(hide = true)]
    One(instructions::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.bench {
        Bench::Load(options) => load::run(&options),
        Bench::MapSg(options) => map_sg::run(&options),
        Bench::Lookup(options) => lookup::run(&options),
        Bench::BarMap(options) => bar_map::run(&options),
        Bench::Iova(options) => iova::run(&options),
        Bench::Policy(options) => policy::run(&options),
        Bench::One(options) => match instructions::one(&options) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(e) => Err(e),
        },
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
