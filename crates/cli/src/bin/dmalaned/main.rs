//! The dmalaned command line: a daemon that shares a card between processes.

mod serve;
mod status;
mod system;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use dmalane_cli::completion_examples;
use dmalane_cli::program::{self, Completions, Man};

const EXAMPLES: &str = "\
Examples:
  dmalaned                                            serve at /run/dmalane/dmalaned.sock
  dmalaned --socket /tmp/card.sock --mode 600         for this user only
  dmalaned --ddr 64GiB --client-ddr 8GiB --clients 8  fewer clients with larger shares
  dmalaned status                                     show the clients
  systemctl enable --now dmalaned.socket              start by systemd on the first connection

Sizes: MB and GB are powers of 10, MiB and GiB are powers of 2; without a unit, bytes.
Card memory uses host memory only once it is touched.

Exit status:
  0  stopped by SIGTERM or SIGINT, and everything is released
  1  the daemon cannot run; `status`: no daemon answers
  2  usage error";

/// Shares a card between processes.
///
/// Each client gets its own function of the card: registers, queues, an MMU, memory and an IOMMU domain. Data never
/// passes through the daemon's socket. When a client exits or dies, its queues are stopped and its resources are
/// released.
#[derive(Parser)]
#[command(name = "dmalaned", version, after_help = EXAMPLES, max_term_width = 100)]
#[command(args_conflicts_with_subcommands = true)]
struct Dmalaned {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    serve: serve::Serve,
}

#[derive(Subcommand)]
enum Command {
    Status(status::Status),
    #[command(after_help = completion_examples!("dmalaned"))]
    Completions(Completions),
    #[command(hide = true)]
    Man(Man),
}

fn main() -> ExitCode {
    program::start(|dmalaned: Dmalaned| match dmalaned.command {
        None => dmalaned.serve.run(),
        Some(Command::Status(status)) => status.run(),
        Some(Command::Completions(completions)) => completions.run::<Dmalaned>(),
        Some(Command::Man(man)) => man.run::<Dmalaned>(),
    })
}
