//! `dmalane doctor`: checks of this machine, with fixes.

mod hardware;
mod host;
mod io;
mod pages;
mod slash;

pub use pages::why_not;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::layout::{bad, good, plain, wrap};
use crate::output;
use crate::probe::Probe;

const EXAMPLES: &str = "\
Examples:
  dmalane doctor
  dmalane doctor /mnt/models
  dmalane doctor --json | jq '.checks[] | select(.status == \"missing\") | .fix'

Exit status: 0 `dmalane load` can run here with the software card, even if other things are missing; \
1 it cannot; 2 usage error.";

/// Check this machine for missing features, with fixes.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Doctor {
    /// Directory or file whose file system is tested for direct I/O
    #[arg(value_name = "PATH", default_value = ".")]
    path: PathBuf,

    /// Print the checks as JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Checks this machine and the file system of the path.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let probe = Probe::machine();
        let report = report(&probe, &self.path)?;
        if self.json {
            output::print_json(&report)?;
        } else {
            output::print_text(&text(&report))?;
        }
        Ok(if report.can_load { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Ok,
    Missing,
    Note,
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    /// `dmalane load` does not run without it.
    needed: bool,
    /// Only hardware needs it; a load to the software card does not.
    real_devices: bool,
    found: String,
    why: &'static str,
    /// The command that fixes it: always set with `Missing`, and with a note about something that hardware needs.
    fix: Option<String>,
    /// The change that the command makes, and how long it lasts.
    changes: Option<&'static str>,
}

/// The change that a fix makes, by a part of its command. Other commands change nothing and show what is wrong.
const CHANGES: [(&str, &str); 15] = [
    ("/nr_hugepages", "keeps that number of pages for programs that ask for huge pages, until the machine restarts"),
    ("tee /sys/kernel/mm/transparent_hugepage/", "the setting of all programs, until the machine restarts"),
    ("/sys/fs/cgroup/", "the limit of this control group, until it is removed"),
    ("tee /sys/bus/pci/rescan", "finds devices that were added since the start"),
    ("tee /etc/default/grub.d/", "a file of the boot loader, for good"),
    ("grubby ", "the command line of all kernels, for good"),
    ("sysctl ", "allows it to all users, until the machine restarts"),
    ("ulimit ", "the limit of this shell and what it starts"),
    ("prlimit ", "the limit of this shell and what it starts"),
    ("modprobe ", "loads the driver, until the machine restarts"),
    ("setfacl ", "lets this user open it, until the machine restarts or the device is replugged"),
    ("chmod ", "lets everybody read it, for good"),
    ("usermod ", "the groups of this user, for good"),
    ("apt install ", "installs packages, for good"),
    ("systemctl enable ", "starts it now and whenever the machine starts"),
];

fn changes(fix: &str) -> &'static str {
    let command = fix.split("    #").next().unwrap_or_default();
    CHANGES.iter().find(|(part, _)| command.contains(part)).map_or("nothing", |(_, what)| what)
}

/// A check, before the result is known.
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

    /// Something that only hardware needs: if it is missing, that is a note.
    const fn for_real_devices(name: &'static str, why: &'static str) -> Self {
        Self { name, why, needed: false, real_devices: true }
    }

    /// Something that every load needs.
    const fn needed(name: &'static str, why: &'static str) -> Self {
        Self { name, why, needed: true, real_devices: false }
    }

    fn check(self, status: Status, found: &str, fix: Option<String>) -> Check {
        let Self { name, why, needed, real_devices } = self;
        let changes = fix.as_deref().map(changes);
        Check { name, status, needed, real_devices, found: plain(found), why, fix, changes }
    }

    fn ok(self, found: impl AsRef<str>) -> Check {
        self.check(Status::Ok, found.as_ref(), None)
    }

    fn note(self, found: impl AsRef<str>) -> Check {
        self.check(Status::Note, found.as_ref(), None)
    }

    fn missing(self, found: impl AsRef<str>, fix: impl Into<String>) -> Check {
        let status = if self.real_devices { Status::Note } else { Status::Missing };
        self.check(status, found.as_ref(), Some(plain(&fix.into())))
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
        hardware::bar_pages(probe),
        hardware::gpus(probe),
        hardware::vulkan(probe),
        hardware::cuda(probe),
        slash::driver(probe),
        slash::daemon(probe),
    ];
    Ok(Report {
        schema: 2,
        command: "doctor",
        path: path.to_string_lossy().into_owned(),
        can_load: !checks.iter().any(|c| c.needed && c.status == Status::Missing),
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
            text += "\nfor hardware (not needed by the software card):\n";
        }
        let status = match check.status {
            Status::Ok => good("ok     "),
            Status::Missing => bad("MISSING"),
            Status::Note => "note   ".to_owned(),
        };
        text += &wrap(&format!("{status}  {:width$}  {}", check.name, check.found), width + 11);
        // The reason matters only where something is not ok.
        if check.status != Status::Ok {
            text += &wrap(&format!("         why: {}", check.why), 14);
        }
        if let Some(fix) = &check.fix {
            // Whole, to be copied.
            let (command, remark) = fix.split_once("    #").unwrap_or((fix, ""));
            text += &format!("         fix: {command}\n");
            if !remark.is_empty() {
                text += &wrap(&format!("              #{remark}"), 16);
            }
        }
        if let Some(changes) = check.changes {
            text += &wrap(&format!("         changes: {changes}"), 18);
        }
    }
    let count = |status| report.checks.iter().filter(|c| c.status == status).count();
    text += &format!("\n{} ok, {} missing, {} notes. ", count(Status::Ok), count(Status::Missing), count(Status::Note));
    text += if report.can_load {
        "The software card runs here: dmalane load --sample 1GiB --verify -v\n"
    } else {
        "`dmalane load` cannot run here until what is needed is fixed.\n"
    };
    text
}

#[cfg(test)]
mod tests;
