//! `dmalane top`: what running commands and daemons do.

mod screen;
mod watch;

use std::io::{IsTerminal, stdout};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use dmalane::DeviceSpec;
use dmalane::devices::daemon::DaemonSpec;

use crate::device;
use crate::failure::Failure;
use crate::layout::fit;
use crate::output;
use watch::Watcher;

const EXAMPLES: &str = "\
Examples:
  dmalane top                          the commands of this user that are running
  dmalane top -d daemon                and the daemon at its default socket
  dmalane top --once                   print what was done in one second, as text
  dmalane top --json | jq '.jobs[] | [.pid, .bytes_per_s]'

Shows load, read, verify, manifest, compare, validate and card serve of this user, in any terminal. Keys: q ends, \
up and down choose a command or a daemon, Enter shows or hides its details.

Exit status: 0 success, 1 no terminal, or a daemon that --once asked does not answer; 2 usage error; 128 plus the \
number of the signal that ended it.";

/// Show what running commands and daemons do, as it changes.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Top {
    /// Show this daemon as well, as -d of other commands names it: daemon or daemon:SOCKET. May be given several times
    #[arg(short, long, value_name = "DAEMON", value_parser = device::Name, hide_possible_values = true)]
    device: Vec<DeviceSpec>,

    /// Seconds between two updates, from 0.1 to 3600 seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,

    /// Measure one interval, print it as text, and end
    #[arg(long)]
    once: bool,

    /// Print a JSON object for each interval, a line each
    #[arg(long)]
    json: bool,
}

impl Top {
    /// Shows it until it is ended.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let mut daemons = Vec::new();
        for spec in &self.device {
            let Some(daemon) = spec.get::<DaemonSpec>() else {
                let failure = Failure::usage(format!("-d {spec}: top watches daemons (-d daemon:SOCKET)"));
                return Err(failure.hint("a command that uses another device is shown by itself"));
            };
            daemons.push(daemon.client());
        }
        let mut watch = Watcher::new(daemons);
        if self.once || self.json {
            return self.print(&mut watch);
        }
        if !stdout().is_terminal() || std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb") {
            let failure = Failure::new("stdout is not a terminal that can show this");
            return Err(failure.hint("dmalane top --once prints text, --json a line for each interval"));
        }
        screen::run(watch, self.interval)
    }

    /// Prints intervals, one or all.
    fn print(&self, watch: &mut Watcher) -> Result<ExitCode, Failure> {
        watch.look();
        loop {
            std::thread::sleep(self.interval);
            let view = watch.look();
            let text = match self.json {
                true => serde_json::to_string(&view.json())? + "\n",
                false => fit(&view.text()).into_owned(),
            };
            if !output::print_or_closed(&text)? {
                return Ok(ExitCode::SUCCESS);
            }
            if self.once {
                return Ok(ExitCode::from(u8::from(view.daemons.iter().any(|daemon| daemon.status.is_err()))));
            }
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("not a number of seconds from 0.1 to 3600".to_owned()),
    }
}
