//! What the daemon does: it listens, and shares its card until it is told to end.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use dmalane::daemon::{Config, Event, Limits, Listener, SOCKET, Server};
use dmalane_cli::failure::Failure;
use dmalane_cli::output;
use dmalane_cli::size::{self, Size};

use crate::system;

/// The options of the daemon.
#[derive(Args)]
pub struct Serve {
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

impl Serve {
    /// Serves until the process is told to end.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let Self { socket, mode, uids, gids, ddr, hbm, clients, spin, quiet, .. } = self;
        let limits = Limits {
            ddr: self.client_ddr.bytes(),
            hbm: self.client_hbm.bytes(),
            queues: self.client_queues,
            buffers: self.client_buffers,
            bytes: self.client_bytes.bytes(),
        };
        // A mode for the owner alone, or a list with one user.
        let handed = system::handed_over()?;
        let alone = (handed.is_none() && mode & 0o077 == 0) || (uids.len() == 1 && gids.is_empty());
        let config = Config {
            user_clients: self.user_clients.or(alone.then_some(clients)),
            user_ddr: self.user_ddr.or(alone.then_some(ddr)).map(Size::bytes),
            user_hbm: self.user_hbm.or(alone.then_some(hbm)).map(Size::bytes),
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
            return Err(Failure::usage(e.to_string()).hint("dmalaned --help lists the options that set it"));
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
}

fn mode(text: &str) -> Result<u32, &'static str> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not an octal mode such as 660"),
    }
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
