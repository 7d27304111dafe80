//! Instructions, counted by callgrind: a column without noise.
//!
//! A run under valgrind of the hidden subcommand `one CASE VARIANT` warms the variant up, then maps once through
//! [`timed_map`]; callgrind counts only what happens inside of that.

use std::error::Error;
use std::process::Command;

use crate::map_sg::cases;
use crate::subject::timed_map;

#[derive(clap::Args)]
pub struct Options {
    /// The case
    case: String,
    /// The variant
    variant: String,
}

/// One mapping of a case by a variant.
pub fn one(options: &Options) -> Result<(), Box<dyn Error>> {
    let cases = cases(&|name| name == options.case);
    let mut case = cases.into_iter().next().ok_or("no such case")?;
    let subject = case.subjects.iter_mut().find(|s| s.name() == options.variant).ok_or("no such variant")?;
    subject.map(&case.job);
    subject.reset();
    timed_map(subject.as_mut(), &case.job);
    Ok(())
}

/// Instructions of one mapping of a case by a variant.
pub fn of(case: &str, variant: &str) -> Result<u64, Box<dyn Error>> {
    let out = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=*subject*timed_map*"])
        .arg(std::env::current_exe()?)
        .args(["one", case, variant])
        .output()
        .map_err(|e| format!("valgrind: {e}"))?;
    let text = String::from_utf8_lossy(&out.stderr);
    let count = text.lines().find_map(|l| l.split_once("Collected :")).and_then(|(_, n)| n.trim().parse().ok());
    match (out.status.success(), count) {
        (true, Some(n)) if n > 0 => Ok(n),
        _ => Err(format!("callgrind counted nothing for {case}, {variant}:\n{text}").into()),
    }
}
