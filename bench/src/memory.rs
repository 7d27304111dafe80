//! Memory of a process of this program: for structures that cannot tell their size.

use std::error::Error;
use std::process::Command;

/// Bytes resident in this process.
pub fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("Rss:"));
    line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse().ok()).map_or(0, |kib: u64| kib * 1024)
}

/// The number that this program prints when it runs with these arguments.
pub fn of(arguments: &[&str]) -> Result<f64, Box<dyn Error>> {
    let out = Command::new(std::env::current_exe()?).args(arguments).output()?;
    let text = String::from_utf8_lossy(&out.stdout);
    text.trim().parse().map_err(|_| format!("{arguments:?} printed {text:?}").into())
}
