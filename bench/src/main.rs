//! Benchmarks of dmalane: each checks its answer and prints ratios of one run.

mod alloc_read;
mod bar_map;
mod binders;
mod buffers;
mod clock;
mod cores;
mod cuda;
mod daemon;
mod fresh;
mod gpuvm;
mod instructions;
mod iova;
mod job;
mod keep;
mod large;
mod late;
mod layers;
mod limits;
mod link;
mod load;
mod lookup;
mod many;
mod map_sg;
mod memory;
mod mt19937;
// Only what the peers' interfaces demand.
mod overlap;
mod peers;
mod policy;
mod report;
mod sg_index;
mod shared;
mod slow;
mod subject;
mod tensors;
mod threads;
mod transfer;
mod vm_bind;
mod vm_shapes;
mod vulkan;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Benchmarks of dmalane.
#[derive(Parser)]
#[command(
    after_help = "Exit status: 0, also with missed goals; 1 after a wrong answer, or with --strict and a missed goal. \
                  A goal of fewer than 3 rounds is not judged, and not missed."
)]
struct Cli {
    /// Print JSON: schema, bench, machine, rows, goals
    #[arg(long, global = true)]
    json: bool,

    /// Exit with 1 when a goal is missed
    #[arg(long, global = true)]
    strict: bool,

    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// A file to the software card, cold and warm, against raw reads and copies
    Load(load::Options),
    /// A file into a buffer, allocated and read at once: the original report's table, beside the reference
    AllocRead(alloc_read::Options),
    /// Files of sources with latency, read and loaded, beside the best raw reads
    Slow(slow::Options),
    /// A file from a modelled disk over a modelled link to a GPU, beside the slower of the two
    Overlap(overlap::Options),
    /// Models of many files, cached and served late, beside threads that read the same files
    Many(many::Options),
    /// A cached file by several workers, and a model of more processors
    Cores(cores::Options),
    /// Reads of cores, to be counted by strace
    #[command(hide = true)]
    OneCores(cores::One),
    /// Files of many small tensors, loaded beside files of one
    Tensors(tensors::Options),
    /// A cached file into memory that nobody has touched: loaded, beside a read and a copy
    Fresh(fresh::Options),
    /// Attaching to models that a keeper holds, beside loading them
    Keep(keep::Options),
    /// The server of slow and many
    #[command(hide = true)]
    LateServer(late::Serve),
    /// Scatter lists into page tables: Linux before and after the patch, ours, the peers, the floor
    MapSg(map_sg::Options),
    /// A scatter list of 64 GiB into page tables in memory that nobody has used
    Large(large::Options),
    /// One mapping by a variant of large
    #[command(hide = true)]
    OneLarge(large::One),
    /// Look-ups at random addresses
    Lookup(lookup::Options),
    /// A 32 GiB BAR, page by page and leaf by leaf
    BarMap(bar_map::Options),
    /// Free ranges of input addresses, beside mapping them
    Iova(iova::Options),
    /// Two threads on disjoint ranges of one tree, against one and against a mutex
    Threads(threads::Options),
    /// Find a page of a scattered buffer: the posted patch's method, the usual structures, ours
    SgIndex(sg_index::Options),
    /// Bind and unbind single pages of a large buffer: the original program, by the driver before the patch, the posted
    /// patch, maps,
    /// ours
    VmBind(vm_bind::Options),
    /// One variant of vm-bind, to be counted by callgrind or weighed
    #[command(hide = true)]
    OneVmBind(vm_bind::One),
    /// One structure of sg-index, to be counted by callgrind
    #[command(hide = true)]
    OneSgIndex(sg_index::One),
    /// Copies by the card, hot and cold, inline and with a worker, beside plain and streaming copies
    Transfer(transfer::Options),
    /// Threads that share a queue, beside a queue for each
    Shared(shared::Options),
    /// The same copies by a card in this process and through a daemon, and two clients of a daemon
    Daemon(daemon::Options),
    /// Split policies over modelled links, beside the optimum
    Policy(policy::Options),
    /// The limits of a card's link, from the rates of streams that run at once
    Limits(limits::Options),
    /// Copies and binds of a GPU through Vulkan, beside the same written by hand
    Vulkan(vulkan::Options),
    /// Copies and binds of a GPU through CUDA, beside the same by the driver alone
    Cuda(cuda::Options),
    /// One mapping of a case of map-sg by a variant, to be counted by callgrind
    #[command(hide = true)]
    One(instructions::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = |result: Result<(), Box<dyn std::error::Error>>| match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {}", dmalane::error_chain(&*e));
            ExitCode::FAILURE
        }
    };
    let result = match cli.bench {
        Bench::Load(options) => load::run(&options),
        Bench::AllocRead(options) => alloc_read::run(&options),
        Bench::Slow(options) => slow::run(&options),
        Bench::Overlap(options) => overlap::run(&options),
        Bench::Many(options) => many::run(&options),
        Bench::Cores(options) => cores::run(&options),
        Bench::OneCores(options) => return done(cores::one(&options)),
        Bench::Tensors(options) => tensors::run(&options),
        Bench::Fresh(options) => fresh::run(&options),
        Bench::Keep(options) => keep::run(&options),
        Bench::LateServer(options) => return done(late::serve(&options)),
        Bench::MapSg(options) => map_sg::run(&options),
        Bench::Large(options) => large::run(&options),
        Bench::OneLarge(options) => return done(large::one(&options)),
        Bench::Lookup(options) => lookup::run(&options),
        Bench::BarMap(options) => bar_map::run(&options),
        Bench::Iova(options) => iova::run(&options),
        Bench::Threads(options) => threads::run(&options),
        Bench::SgIndex(options) => sg_index::run(&options),
        Bench::VmBind(options) => vm_bind::run(&options),
        Bench::OneVmBind(options) => return done(vm_bind::one(&options)),
        Bench::OneSgIndex(options) => return done(sg_index::one(&options)),
        Bench::Transfer(options) => transfer::run(&options),
        Bench::Shared(options) => shared::run(&options),
        Bench::Daemon(options) => daemon::run(&options),
        Bench::Policy(options) => policy::run(&options),
        Bench::Limits(options) => limits::run(&options),
        Bench::Vulkan(options) => vulkan::run(&options),
        Bench::Cuda(options) => cuda::run(&options),
        Bench::One(options) => return done(instructions::one(&options)),
    };
    let report = match result {
        Ok(report) => report,
        Err(e) => {
            eprintln!("bench: {}", dmalane::error_chain(&*e));
            return ExitCode::FAILURE;
        }
    };
    if cli.json {
        println!("{}", report.json());
    } else {
        print!("{}", report.text());
    }
    if cli.json && report.not_judged() > 0 {
        eprintln!("bench: {}", report.unjudged());
    }
    if cli.strict && report.has_missed() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
