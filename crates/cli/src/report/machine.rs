//! The machine and the command of a measurement, for reports that outlive both.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::probe::Probe;
use crate::program::command_line;
use crate::size::binary;

/// The command and the machine: names and values.
pub struct Machine(Vec<(&'static str, String)>);

impl Machine {
    /// This machine and this process, now.
    pub fn this() -> Self {
        let probe = Probe::machine();
        let kernel = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        let memory = probe.field("/proc/meminfo", "MemTotal");
        let memory = memory.and_then(|kib| kib.strip_suffix(" kB")?.parse::<u64>().ok());
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(vec![
            ("command", command_line()),
            ("version", format!("dmalane {}", env!("CARGO_PKG_VERSION"))),
            ("date", date(now.as_secs())),
            ("processor", probe.field("/proc/cpuinfo", "model name").unwrap_or_else(|| text(kernel.machine()))),
            ("processors", processors.to_string()),
            ("memory", memory.map_or("unknown".to_owned(), |kib| binary(kib << 10))),
            ("kernel", format!("{} {}", text(kernel.sysname()), text(kernel.release()))),
        ])
    }

    /// Names and values.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(name, value)| (*name, value.as_str()))
    }

    /// An object with the names and values.
    pub fn json(&self) -> Value {
        self.rows().map(|(name, value)| (name.to_owned(), Value::from(value))).collect()
    }
}

/// Seconds since 1970 as date and time of UTC.
fn date(seconds: u64) -> String {
    // Days are counted in eras of 400 years that begin on 1 March, so that leap days come last.
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3600, rest / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
            (1_795_392_000, "2026-11-23 00:00 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }
}
