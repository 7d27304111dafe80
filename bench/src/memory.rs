//! What a process of this program takes: memory of structures that cannot tell.

use std::error::Error;
use std::process::Command;

/// Bytes resident in this process.
pub fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// The number that this program prints when it runs with these arguments.
pub fn of(arguments: &[&str]) -> Result<f64, Box<dyn Error>> {
    let out = Command::new(std::env::current_exe()?).args(arguments).output()?;
    let text = String::from_utf8_lossy(&out.stdout);
    text.trim().parse().map_err(|_| format!("{arguments:?} printed {text:?}").into())
}
