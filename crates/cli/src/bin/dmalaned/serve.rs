//! `dmalaned`: listens and shares its card until it is terminated.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use dmalane::daemon::{ClientLimits, Config, Listener, SOCKET, Server, ServerEvent};
use dmalane::dma::memory_limit;
use dmalane::keep::inherited;
use dmalane_cli::failure::Failure;
use dmalane_cli::layout::plain;
use dmalane_cli::program::termination;
use dmalane_cli::size::{self, Size};

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::system;

/// The options of the daemon.
#[derive(Args)]
pub struct Serve {
    /// Socket to listen on; not used when systemd passes a socket
    #[arg(long, value_name = "PATH", default_value = SOCKET, env = "DMALANE_SOCKET", hide_env_values = true)]
    socket: PathBuf,

    /// File mode of the socket, in octal
    #[arg(long, value_name = "MODE", default_value = "660", value_parser = mode)]
    mode: u32,

    /// DDR size of the card, a multiple of 2MiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(32), value_parser = size::nonzero)]
    ddr: Size,

    /// HBM size of the card, a multiple of 4MiB
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(32), value_parser = size::nonzero)]
    hbm: Size,

    /// Most clients at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,

    /// Memory of this machine for all clients: card memory that was touched, page tables, and their processes
    /// [default: 64MiB less than the limit of the control group, if it has one]
    #[arg(long, value_name = "SIZE", value_parser = size::nonzero)]
    memory: Option<Size>,

    /// Percent of the clients, of DDR, HBM and memory that one user may have [default: 75; 100, where only one user may
    /// connect]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    user_share: Option<u32>,

    /// DDR for one client
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(1), value_parser = size::nonzero)]
    client_ddr: Size,

    /// HBM for one client
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(1), value_parser = size::nonzero)]
    client_hbm: Size,

    /// Queues of one client, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    client_queues: u32,

    /// Registered buffers of one client
    #[arg(long, value_name = "N", default_value_t = 256)]
    client_buffers: u32,

    /// Bytes of all registered buffers of one client
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(4), value_parser = size::nonzero)]
    client_bytes: Size,

    /// Do not log clients that connect and disconnect
    #[arg(short, long)]
    quiet: bool,
}

impl Serve {
    /// Serves until the process is terminated.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let Self { socket, mode, ddr, hbm, clients, quiet, .. } = self;
        let limits = ClientLimits {
            ddr: self.client_ddr.bytes(),
            hbm: self.client_hbm.bytes(),
            queues: self.client_queues,
            buffers: self.client_buffers,
            bytes: self.client_bytes.bytes(),
        };
        // The mode admits the owner alone.
        let mut passed = inherited();
        if passed.len() > 1 {
            return Err(Failure::new(format!("{} sockets were passed, but one is expected", passed.len())));
        }
        let inherited = passed.pop().map(|(_, socket)| socket);
        let alone = inherited.is_none() && mode & 0o077 == 0;
        let memory = self.memory.map(Size::bytes).or_else(|| {
            // The daemon itself takes 64 MiB; in a small group, half of the limit.
            memory_limit().map(|limit| limit.saturating_sub(64 << 20).max(limit / 2).max(16 << 20))
        });
        let descriptors = system::raise_file_limit();
        let (subordinates, dropped) = Config::system_subordinates();
        let config = Config {
            memory,
            user_percent: self.user_share.unwrap_or(if alone { 100 } else { 75 }),
            ddr: ddr.bytes(),
            hbm: hbm.bytes(),
            limits,
            clients: clients.into(),
            subordinates,
            ..Config::default()
        };
        if let Err(e) = config.check() {
            return Err(Failure::usage(e.to_string()).hint("dmalaned --help lists the options that set it"));
        }
        if let Some(warning) = config.warning(descriptors) {
            say(&format!("warning: {warning}"));
        }
        if !dropped.is_empty() {
            say(&format!(
                "warning: /etc/subuid has lines with an unknown owner or range, whose users count as users of their \
                 own: {}",
                dropped.join(", ")
            ));
        }
        let stop = termination(&[SIGTERM, SIGINT])?;
        let (listener, place) = match inherited {
            Some(socket) => (Listener::from_socket(socket)?, "the socket from systemd".to_owned()),
            None => (listen(&socket, mode, false)?, socket.display().to_string()),
        };
        let log = move |event: &ServerEvent| {
            if !quiet || event.is_warning {
                say(&event.text);
            }
        };
        let server = Server::new(config, log)?;
        if !quiet {
            say(&format!("serving at {place}"));
        }
        system::notify("READY=1");
        server.run(listener, stop.as_fd())?;
        if !quiet {
            say("stopped");
        }
        Ok(ExitCode::SUCCESS)
    }
}

pub fn mode(text: &str) -> Result<u32, &'static str> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not an octal mode such as 660"),
    }
}

/// Listens; `rights` says whether the first messages of clients may have descriptors.
pub fn listen(path: &Path, mode: u32, rights: bool) -> Result<Listener, Failure> {
    Listener::bind(path, mode, rights).map_err(|e| {
        let failure = Failure::of(&e);
        match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() && !parent.exists() => {
                failure.hint(format!("mkdir -p {}, or choose another path with --socket", parent.display()))
            }
            _ => failure,
        }
    })
}

/// Writes a line to the log: stderr, which systemd's journal records.
pub fn say(line: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("dmalaned: {}\n", plain(line)).as_bytes());
}
