//! The options, their help, and what they start.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use dmalane::daemon::{Config, Event, Limits, Listener, SOCKET, Server};

use crate::failure::Failure;
use crate::size::{self, Size};
use crate::{output, status, system};

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

const STATUS_EXAMPLES: &str = "\
Examples:
  dmalaned status
  dmalaned status --socket /tmp/card.sock --json | jq '.clients[].pid'

Exit status: 0 the daemon answered, 1 it did not, 2 wrong command line.";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  dmalaned completions bash > ~/.local/share/bash-completion/completions/dmalaned
  dmalaned completions zsh > \"${fpath[1]}/_dmalaned\"
  dmalaned completions fish > ~/.config/fish/completions/dmalaned.fish";

/// Shares a card between processes.
///
/// Each client gets a function of the card: registers, queues, an MMU, memory and an IOMMU domain of its own. Bytes never pass through the
/// daemon's socket. When a client ends, however it ends, its queues are stopped and everything of its is released.
#[derive(Parser)]
#[command(name = "dmalaned", version, after_help = EXAMPLES, max_term_width = 100, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    serve: ServeOptions,
}

#[derive(Subcommand)]
enum Command {
    Status(StatusOptions),
    Completions(CompletionsOptions),
    #[command(hide = true)]
    Man(ManOptions),
}

#[derive(Args)]
struct ServeOptions {
    /// Where to listen; not used when systemd hands a socket over
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,

    /// Who may open the socket, as an octal mode
    #[arg(long, value_name = "MODE", default_value = "660", value_parser = mode)]
    mode: u32,

    /// Let this user connect, by number, and only who is named so; may be repeated
    #[arg(long = "allow-uid", value_name = "UID")]
    uids: Vec<u32>,

    /// Let users with this primary group connect, by number, and only who is named so; may be repeated
    #[arg(long = "allow-gid", value_name = "GID")]
    gids: Vec<u32>,

    /// DDR of the card, in multiples of 2MiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(32), value_parser = size::nonzero)]
    ddr: Size,

    /// HBM of the card, in multiples of 4MiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(32), value_parser = size::nonzero)]
    hbm: Size,

    /// Clients at one time
    #[arg(long, value_name = "N", default_value_t = 64)]
    clients: usize,

    /// Clients of one user at one time [default: three quarters of --clients; all, where only one user may connect]
    #[arg(long, value_name = "N")]
    user_clients: Option<usize>,

    /// DDR that the clients of one user may have together [default: three quarters of --ddr; all, where only one user may connect]
    #[arg(long, value_name = "SIZE", value_parser = size::nonzero)]
    user_ddr: Option<Size>,

    /// HBM that the clients of one user may have together [default: three quarters of --hbm; all, where only one user may connect]
    #[arg(long, value_name = "SIZE", value_parser = size::nonzero)]
    user_hbm: Option<Size>,

    /// DDR that one client may have
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(1), value_parser = size::nonzero)]
    client_ddr: Size,

    /// HBM that one client may have
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(1), value_parser = size::nonzero)]
    client_hbm: Size,

    /// Queues that one client may have, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 2)]
    client_queues: u32,

    /// Buffers that one client may have registered
    #[arg(long, value_name = "N", default_value_t = 256)]
    client_buffers: u32,

    /// Bytes that these may have together
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(4), value_parser = size::nonzero)]
    client_bytes: Size,

    /// How long to look for work before sleeping, in microseconds
    #[arg(long, value_name = "US", default_value_t = 100)]
    spin: u64,

    /// Say nothing about clients that come and go
    #[arg(short, long)]
    quiet: bool,
}

/// Show what a daemon does and who uses it.
#[derive(Args)]
#[command(after_help = STATUS_EXAMPLES)]
struct StatusOptions {
    /// The daemon's socket
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,

    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

/// Print a completion script for a shell.
#[derive(Args)]
#[command(after_help = COMPLETIONS_EXAMPLES)]
struct CompletionsOptions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Write manual pages.
#[derive(Args)]
struct ManOptions {
    /// Where to
    directory: PathBuf,
}

pub fn run() -> Result<ExitCode, Failure> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return not_a_command(&error),
    };
    match cli.command {
        None => serve(cli.serve),
        Some(Command::Status(options)) => status::run(&options.socket, options.json),
        Some(Command::Completions(options)) => {
            // Into memory first: the generator panics when a pipe breaks.
            let mut script = Vec::new();
            clap_complete::generate(options.shell, &mut Cli::command(), "dmalaned", &mut script);
            output::print(&String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Man(options)) => {
            clap_mangen::generate_to(Cli::command(), options.directory)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Help and version were asked for; anything else is a mistake, told in our words.
fn not_a_command(error: &clap::Error) -> Result<ExitCode, Failure> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        output::written(error.print())?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").map_or(text.clone(), |rest| format!("dmalaned: {rest}"));
    // Nobody is left to hear that stderr is closed.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.replace("\n  tip: ", "\nhint: ").as_bytes());
    Ok(ExitCode::from(2))
}

fn mode(text: &str) -> Result<u32, &'static str> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not an octal mode such as 660"),
    }
}

fn serve(options: ServeOptions) -> Result<ExitCode, Failure> {
    let ServeOptions { socket, mode, uids, gids, ddr, hbm, clients, spin, quiet, .. } = options;
    let limits = Limits {
        ddr: options.client_ddr.bytes(),
        hbm: options.client_hbm.bytes(),
        queues: options.client_queues,
        buffers: options.client_buffers,
        bytes: options.client_bytes.bytes(),
    };
    // A mode for the owner alone, or a list with one user.
    let handed = system::handed_over()?;
    let alone = (handed.is_none() && mode & 0o077 == 0) || (uids.len() == 1 && gids.is_empty());
    let config = Config {
        user_clients: options.user_clients.or(alone.then_some(clients)),
        user_ddr: options.user_ddr.or(alone.then_some(ddr)).map(Size::bytes),
        user_hbm: options.user_hbm.or(alone.then_some(hbm)).map(Size::bytes),
        ddr: ddr.bytes(),
        hbm: hbm.bytes(),
        limits,
        clients,
        uids,
        gids,
        spin: Duration::from_micros(spin),
        ..Config::default()
    };
    if let Err(e) = config.check() {
        let text = format!("dmalaned: {e}\nhint: dmalaned --help lists the options that set it\n");
        let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
        return Ok(ExitCode::from(2));
    }
    let descriptors = system::raise_file_limit();
    for warning in config.warnings(descriptors, system::overcommit().as_deref()) {
        say(&format!("warning: {warning}"));
    }
    let stop = system::until_told_to_end()?;
    let (listener, place) = match handed {
        Some(socket) => (Listener::from_socket(socket)?, "the socket that systemd handed over".to_owned()),
        None => (listen(&socket, mode)?, socket.display().to_string()),
    };
    let log = move |event: &Event| {
        if !quiet {
            say(&event.to_string());
        }
    };
    let server = Server::new(config, log)?;
    if !quiet {
        say(&format!("serving at {place}"));
    }
    system::notify("READY=1");
    let totals = server.run(listener, stop.as_fd())?;
    if !quiet {
        say(&format!("ended; {} clients served, {} released", totals.served, totals.released));
    }
    Ok(ExitCode::SUCCESS)
}

fn listen(path: &Path, mode: u32) -> Result<Listener, Failure> {
    Listener::bind(path, mode).map_err(|e| {
        let failure = Failure::because(e.to_string(), &e);
        match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() && !parent.exists() => {
                failure.hint(format!("mkdir -p {}, or name another place with --socket", parent.display()))
            }
            _ => failure,
        }
    })
}

/// A line for the log: stderr, which the journal keeps.
fn say(line: &str) {
    let _ =
        std::io::Write::write_all(&mut std::io::stderr(), format!("dmalaned: {}\n", output::plain(line)).as_bytes());
}
