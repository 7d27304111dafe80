//! `dmalane doctor`: checks of this machine, with fixes.

mod check;
mod hardware;
mod host;
mod io;
mod pages;
mod slash;

use check::{Check, Status};
pub use pages::why_not;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::layout::{bad, good, wrap};
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
        let told = output::tell(self.json, || &report, || text(&report))?;
        Ok(if report.can_load { told } else { ExitCode::FAILURE })
    }
}

/// Files of a container: of Docker, of Podman, of Kubernetes, and of managers that systemd knows.
const CONTAINER: [&str; 4] =
    ["/.dockerenv", "/run/.containerenv", "/run/secrets/kubernetes.io", "/run/systemd/container"];

#[derive(Serialize)]
struct Report {
    schema: u32,
    command: &'static str,
    path: String,
    can_load: bool,
    checks: Vec<Check>,
}

fn report(probe: &Probe, path: &Path) -> Result<Report, Failure> {
    let mut checks = vec![
        host::kernel(probe),
        host::memory(probe),
        host::memfd(),
        pages::reserved_2m(probe),
        pages::transparent(probe),
        pages::transparent_shared(probe),
        io::io_uring(probe),
        io::direct(path)?,
        host::memlock(probe),
        hardware::dma_heaps(probe),
        hardware::udmabuf(probe),
        hardware::vfio(probe),
        hardware::iommu_groups(probe),
        hardware::vulkan(probe),
        hardware::cuda(probe),
        slash::driver(probe),
        slash::daemon(probe),
    ];
    if CONTAINER.iter().any(|path| probe.place(path).exists()) {
        checks = checks.into_iter().map(Check::in_container).collect();
    }
    Ok(Report {
        schema: 3,
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
    text += match (report.can_load, count(Status::Missing)) {
        (true, 0) => "The software card runs here: dmalane load --sample 1GiB --verify -v\n",
        (true, _) => "The software card runs here without them:\ndmalane load --sample 1GiB --verify -v\n",
        (false, _) => "`dmalane load` cannot run here until what is needed is fixed.\n",
    };
    text
}

#[cfg(test)]
mod tests;
