//! `dmalaned status`: clients and their resources.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use dmalane::daemon::{ClientOptions, ClientStatus, DaemonStatus, SOCKET, status};
use dmalane_cli::failure::Failure;
use dmalane_cli::layout::{Table, fit};
use dmalane_cli::output;
use dmalane_cli::size::{binary, seconds};
use serde_json::{Value, json};

const EXAMPLES: &str = "\
Examples:
  dmalaned status
  dmalaned status --socket /tmp/card.sock --json | jq '.clients[].pid'
  dmalaned status --watch

Exit status: 0 the daemon answered, 1 it did not, 2 usage error.";

/// Clears a terminal.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Show a daemon's clients and what they use.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Status {
    /// The daemon's socket
    #[arg(long, value_name = "PATH", default_value = SOCKET, env = "DMALANE_SOCKET", hide_env_values = true)]
    socket: PathBuf,

    /// Trust a daemon of this user (by number), besides root and oneself; may be repeated
    #[arg(long = "server-uid", value_name = "UID")]
    server_uids: Vec<u32>,

    /// Print JSON; with --watch an object a line
    #[arg(long)]
    json: bool,

    /// Show it again every second, or as often as said, until it is interrupted or nobody reads it
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = seconds(0.1))]
    watch: Option<Duration>,
}

impl Status {
    /// Queries the daemon and prints the answer, once or until it is ended.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let Some(every) = self.watch else {
            let status = self.ask()?;
            return output::tell(self.json, || json(&self.socket, &status), || text(&status));
        };
        loop {
            let status = self.ask()?;
            let shown = match self.json {
                true => format!("{}\n", json(&self.socket, &status)),
                false if io::stdout().is_terminal() => format!("{CLEAR}{}", fit(&text(&status))),
                false => text(&status),
            };
            // A terminal that is gone is an error of the write.
            if !output::print_or_closed(&shown)? {
                return Ok(ExitCode::SUCCESS);
            }
            std::thread::sleep(every);
        }
    }

    /// Queries the daemon.
    fn ask(&self) -> Result<DaemonStatus, Failure> {
        let mut options = ClientOptions::new(&self.socket);
        options.server_uids.extend(&self.server_uids);
        let mut status = status(&options)?;
        // Leave out the connection of this query.
        let me = std::process::id();
        status.clients.retain(|c| c.pid != me || c.queues > 0);
        Ok(status)
    }
}

fn json(socket: &Path, status: &DaemonStatus) -> Value {
    let DaemonStatus { uptime, ddr, hbm, clients } = status;
    let client = |c: &ClientStatus| {
        json!({
            "client": c.client,
            "pid": c.pid,
            "uid": c.uid,
            "queues": c.queues,
            "buffers": c.buffers,
            "buffer_bytes": c.bytes,
            "mappings": c.mappings,
            "ddr_bytes": c.ddr,
            "hbm_bytes": c.hbm,
            "moved_bytes": c.moved(),
            "link": { "h2c_bytes": c.h2c, "c2h_bytes": c.c2h },
            "errors": c.errors,
            "in_flight": c.in_flight,
            "faults": c.faults,
            "closing": c.closing != 0,
        })
    };
    json!({
        "schema": 2,
        "command": "status",
        "socket": socket.to_string_lossy(),
        "uptime_s": uptime,
        "ddr_bytes": ddr.0,
        "ddr_total_bytes": ddr.1,
        "hbm_bytes": hbm.0,
        "hbm_total_bytes": hbm.1,
        "clients": clients.iter().map(client).collect::<Value>(),
    })
}

fn text(status: &DaemonStatus) -> String {
    let DaemonStatus { uptime, ddr, hbm, clients } = status;
    let mut out = format!(
        "up for {uptime} s; DDR {} of {}, HBM {} of {}\n",
        binary(ddr.0),
        binary(ddr.1),
        binary(hbm.0),
        binary(hbm.1),
    );
    if clients.is_empty() {
        return out + "no clients\n";
    }
    let mut table = Table::new("rrrrrrrrrrrrl", HEAD);
    for c in clients {
        let closing = if c.closing != 0 { "closing" } else { "" };
        let numbers = [c.pid, c.uid, c.queues, c.buffers, c.mappings].map(|number| number.to_string());
        let [pid, uid, queues, buffers, mappings] = numbers;
        let [bytes, ddr, hbm, h2c, c2h] = [c.bytes, c.ddr, c.hbm, c.h2c, c.c2h].map(binary);
        let (client, errors) = (c.client.to_string(), c.errors.to_string());
        table.row([client, pid, uid, queues, buffers, bytes, mappings, ddr, hbm, h2c, c2h, errors, closing.to_owned()]);
    }
    out += &table.text();
    out
}

/// The columns of the clients.
const HEAD: [&str; 13] =
    ["client", "pid", "uid", "queues", "buffers", "bytes", "mappings", "ddr", "hbm", "H2C", "C2H", "errors", ""];
