//! Instructions, counted by callgrind: a column without noise.
//!
//! A run under valgrind of the hidden subcommand `one CASE VARIANT OPERATION` warms the variant up, then does the
//! operation once through the function that is timed; callgrind counts only what happens inside of that.

use std::error::Error;
use std::process::Command;

use crate::job::Job;
use crate::map_sg::cases;
use crate::subject::{Subject, timed_find, timed_map, timed_unmap};

#[derive(clap::Args)]
pub struct Options {
    /// The case
    case: String,
    /// The variant
    variant: String,
    /// Its operation
    operation: Operation,
}

/// The event that is counted.
#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
pub enum Operation {
    Map,
    Unmap,
    /// Look-ups of every leaf
    Find,
}

impl Operation {
    /// As it is called in rows and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Unmap => "unmap",
            Self::Find => "find",
        }
    }
}

/// One operation on a case by a variant.
pub fn one(options: &Options) -> Result<(), Box<dyn Error>> {
    let cases = cases(&|name| name == options.case);
    let mut case = cases.into_iter().next().ok_or("no such case")?;
    let subject = case.subjects.iter_mut().find(|s| s.name() == options.variant).ok_or("no such variant")?;
    // To warm up: tables have been made, and every path was taken.
    subject.map(&case.job);
    if options.operation != Operation::Find {
        subject.unmap(&case.job);
        subject.reset();
    }
    perform(subject.as_mut(), &case.job, options.operation);
    Ok(())
}

fn perform(subject: &mut dyn Subject, job: &Job, operation: Operation) {
    match operation {
        Operation::Map => timed_map(subject, job),
        Operation::Unmap => {
            subject.map(job);
            timed_unmap(subject, job);
        }
        Operation::Find => {
            let at: Vec<u64> = job.places().map(|(at, _)| at).collect();
            timed_find(subject, &at);
        }
    }
}

/// Instructions of one operation on a case by a variant.
pub fn of(case: &str, variant: &str, operation: Operation) -> Result<u64, Box<dyn Error>> {
    count(&format!("*subject*timed_{}*", operation.name()), &["one", case, variant, operation.name()])
}

/// Instructions within the functions whose name has this form, when this program runs with these arguments.
pub fn count(functions: &str, arguments: &[&str]) -> Result<u64, Box<dyn Error>> {
    let out = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(format!("--toggle-collect={functions}"))
        .arg(std::env::current_exe()?)
        // Valgrind counts `rep stosb` once a byte; with this libc clears tables by vector stores, as many as there are.
        .env("GLIBC_TUNABLES", "glibc.cpu.x86_rep_stosb_threshold=1073741824")
        .args(arguments)
        .output()
        .map_err(|e| format!("valgrind: {e}"))?;
    let text = String::from_utf8_lossy(&out.stderr);
    let count = text.lines().find_map(|l| l.split_once("Collected :")).and_then(|(_, n)| n.trim().parse().ok());
    match (out.status.success(), count) {
        (true, Some(n)) if n > 0 => Ok(n),
        _ => Err(format!("callgrind counted nothing for {arguments:?}:\n{text}").into()),
    }
}
