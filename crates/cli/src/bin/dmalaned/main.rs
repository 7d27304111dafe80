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
  dmalaned --socket /tmp/card.sock --mode 600         for this user alone
  dmalaned --ddr 64GiB --client-ddr 8GiB --clients 8  larger shares for fewer clients
  dmalaned status                                     who has what
  systemctl enable --now dmalaned.socket              by systemd, when the first client comes

Sizes: MB and GB are powers of 10, MiB and GiB are powers of 2; without a unit, bytes.
What was never touched of a memory of the card costs nothing.

Exit status:
  0  it was told to end (SIGTERM, SIGINT) and has let go of everything
  1  it could not run; `status`: nobody listens
  2  the command line was wrong";

/// Shares a card between processes.
///
/// Each client gets a function of the card: registers, queues, an MMU, memory and an IOMMU domain of its own. Bytes never pass through the
/// daemon's socket. When a client ends, however it ends, its queues are stopped and everything of its is released.
#[derive(Parser)]
#[command(name = "dmalaned", version, after_help = EXAMPLES, max_term_width = 100, args_conflicts_with_subcommands = true)]
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
