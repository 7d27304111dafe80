//! The dmalaned command line: a daemon that shares a software card between processes.

mod keep;
mod serve;
mod status;
mod system;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use dmalane_cli::program::{self, Completions, Man};

const EXAMPLES: &str = "\
Examples:
  dmalaned                                            serve at /run/dmalane/dmalaned.sock
  dmalaned --socket /tmp/card.sock --mode 600         for this user only
  dmalaned --ddr 64GiB --client-ddr 8GiB --clients 8  more memory for fewer clients
  dmalaned status                                     clients and their resources
  systemctl enable --now dmalaned.socket              by systemd, when the first client comes

Sizes: MB and GB are powers of 10, MiB and GiB are powers of 2; without a unit, bytes.
Card memory that was never touched takes no host memory.

Exit status:
  0  terminated by SIGTERM or SIGINT, and all resources are released
  1  the daemon could not run; `status`: no daemon is listening
  2  usage error";

/// Shares a software card between processes.
///
/// Each client gets a function of the card: registers, queues, an MMU, memory and an IOMMU domain of its own. No
/// payload passes through the daemon's socket. When a client exits or crashes, the daemon stops its queues and
/// releases its resources.
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
    Keep(keep::Keep),
    #[command(hide = true)]
    Hold(keep::Hold),
    Completions(Completions),
    #[command(hide = true)]
    Man(Man),
}

fn main() -> ExitCode {
    program::start(std::env::args_os().collect(), |dmalaned: Dmalaned| match dmalaned.command {
        None => dmalaned.serve.run(),
        Some(Command::Status(status)) => status.run(),
        Some(Command::Keep(keep)) => keep.run(),
        Some(Command::Hold(hold)) => hold.run(),
        Some(Command::Completions(completions)) => completions.run::<Dmalaned>(),
        Some(Command::Man(man)) => man.run::<Dmalaned>(),
    })
}
