//! `dmalane doctor`: what this machine offers and lacks.

mod hardware;
mod host;
mod io;
mod pages;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{self, plain};
use crate::probe::Probe;

const EXAMPLES: &str = "\
Examples:
  dmalane doctor
  dmalane doctor /mnt/models
  dmalane doctor --json | jq '.checks[] | select(.status == \"lack\") | .mend'

Exit status: 0 `dmalane load` can run here on the software card, whatever else is lacking; 1 it cannot.";

/// Say what this machine offers and lacks, and how to mend it.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Doctor {
    /// The directory or file whose file system is tried for direct I/O
    #[arg(value_name = "PATH", default_value = ".")]
    path: PathBuf,

    /// Print the checks as JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Looks at this machine, and at the file system of the path.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let report = report(&Probe::machine(), &self.path)?;
        if self.json {
            output::print_json(&report)?;
        } else {
            output::print(&text(&report))?;
        }
        Ok(if report.can_load { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Ok,
    Lack,
    Note,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    /// Without it `dmalane load` does not run at all.
    needed: bool,
    /// Only real devices want it; a load to the software card does not.
    real_devices: bool,
    found: String,
    why: &'static str,
    /// The command that mends it: with a lack always, with a note where real devices want it.
    mend: Option<String>,
}

/// What is looked at, before it is known how it stands.
struct Subject {
    name: &'static str,
    why: &'static str,
    needed: bool,
    real_devices: bool,
}

impl Subject {
    /// Something that makes a load faster.
    const fn useful(name: &'static str, why: &'static str) -> Self {
        Self { name, why, needed: false, real_devices: false }
    }

    /// Something that only real devices want: missing, it is no lack.
    const fn for_real_devices(name: &'static str, why: &'static str) -> Self {
        Self { name, why, needed: false, real_devices: true }
    }

    /// Something without which no load runs.
    const fn needed(name: &'static str, why: &'static str) -> Self {
        Self { name, why, needed: true, real_devices: false }
    }

    fn check(self, status: Status, found: &str, mend: Option<String>) -> Check {
        let Self { name, why, needed, real_devices } = self;
        Check { name, status, needed, real_devices, found: plain(found), why, mend }
    }

    fn ok(self, found: impl AsRef<str>) -> Check {
        self.check(Status::Ok, found.as_ref(), None)
    }

    fn note(self, found: impl AsRef<str>) -> Check {
        self.check(Status::Note, found.as_ref(), None)
    }

    fn lack(self, found: impl AsRef<str>, mend: impl Into<String>) -> Check {
        let status = if self.real_devices { Status::Note } else { Status::Lack };
        self.check(status, found.as_ref(), Some(plain(&mend.into())))
    }
}

/// `word` as a shell reads it back.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[derive(Serialize)]
struct Report {
    schema: u32,
    command: &'static str,
    path: String,
    can_load: bool,
    checks: Vec<Check>,
}

fn report(probe: &Probe, path: &Path) -> Result<Report, Failure> {
    let checks = vec![
        host::kernel(probe),
        host::cores(probe),
        host::memory(probe),
        host::cgroup_memory(probe),
        host::memfd(),
        pages::reserved_2m(probe),
        pages::reserved_1g(probe),
        pages::transparent(probe),
        pages::transparent_shared(probe),
        io::io_uring(probe),
        io::direct(path)?,
        host::memlock(probe),
        host::pagemap(probe),
        hardware::dma_heaps(probe),
        hardware::udmabuf(probe),
        hardware::vfio(probe),
        hardware::iommufd(probe),
        hardware::iommu_groups(probe),
        hardware::gpus(probe),
    ];
    Ok(Report {
        schema: 1,
        command: "doctor",
        path: path.to_string_lossy().into_owned(),
        can_load: !checks.iter().any(|c| c.needed && c.status == Status::Lack),
        checks,
    })
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let width = report.checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    let (ours, real): (Vec<_>, Vec<_>) = report.checks.iter().partition(|c| !c.real_devices);
    let first_real = real.first().map(|c| c.name);
    for check in ours.into_iter().chain(real) {
        if first_real == Some(check.name) {
            text += "\nfor real devices (not needed by the software card):\n";
        }
        let status = match check.status {
            Status::Ok => "ok",
            Status::Lack => "LACK",
            Status::Note => "note",
        };
        text += &format!("{status:<4}  {:width$}  {}\n", check.name, check.found);
        // What is in order needs no reason.
        if check.status != Status::Ok {
            text += &format!("      why:  {}\n", check.why);
        }
        if let Some(mend) = &check.mend {
            text += &format!("      mend: {mend}\n");
        }
    }
    let count = |status| report.checks.iter().filter(|c| c.status == status).count();
    text += &format!("\n{} ok, {} lacking, {} to note. ", count(Status::Ok), count(Status::Lack), count(Status::Note));
    text += if report.can_load {
        "The software card runs here: dmalane load --sample 1GiB --explain --verify\n"
    } else {
        "`dmalane load` cannot run here before what is needed is mended.\n"
    };
    text
}

#[cfg(test)]
mod tests;
