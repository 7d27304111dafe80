//! One check of `doctor`: what was found, why it matters, and the command that fixes it.

use serde::Serialize;

use crate::layout::plain;

/// The verdict of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    Ok,
    Missing,
    Note,
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) status: Status,
    /// `dmalane load` does not run without it.
    pub(super) needed: bool,
    /// Only hardware needs it; a load to the software card does not.
    pub(super) real_devices: bool,
    pub(super) found: String,
    pub(super) why: &'static str,
    /// The command that fixes it: always set with `Missing`, and with a note about something that hardware needs.
    pub(super) fix: Option<String>,
    /// The change that the command makes, and how long it lasts.
    pub(super) changes: Option<&'static str>,
}

/// The change that a fix makes, by a part of its command. Other commands change nothing and show what is wrong.
const CHANGES: [(&str, &str); 14] = [
    ("/nr_hugepages", "keeps so many pages for programs that ask for huge pages, until the machine restarts"),
    ("tee /sys/kernel/mm/transparent_hugepage/", "the setting of all programs, until the machine restarts"),
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

/// Parts of commands for the kernel, which a container has from its host.
const OF_KERNEL: [&str; 7] = ["/sys/", "uname -r", "sysctl ", "modprobe ", "modinfo ", "grub", "dmesg "];

pub(super) fn changes(fix: &str) -> &'static str {
    let command = fix.split("    #").next().unwrap_or_default();
    CHANGES.iter().find(|(part, _)| command.contains(part)).map_or("nothing", |(_, what)| what)
}

impl Check {
    /// The check in a container: some fixes are for its host.
    pub(super) fn in_container(mut self) -> Self {
        if let Some(fix) = self.fix.as_mut().filter(|fix| OF_KERNEL.iter().any(|part| fix.contains(part))) {
            *fix += if fix.contains("    #") { "; on" } else { "    # on" };
            *fix += " the host of this container";
        }
        self
    }
}

/// A check, before the result is known.
pub(super) struct Subject {
    name: &'static str,
    why: &'static str,
    needed: bool,
    real_devices: bool,
}

impl Subject {
    /// Something that makes a load faster.
    pub(super) const fn useful(name: &'static str, why: &'static str) -> Self {
        Self { name, why, needed: false, real_devices: false }
    }

    /// Something that only hardware needs: if it is missing, that is a note.
    pub(super) const fn for_real_devices(name: &'static str, why: &'static str) -> Self {
        Self { name, why, needed: false, real_devices: true }
    }

    /// Something that every load needs.
    pub(super) const fn needed(name: &'static str, why: &'static str) -> Self {
        Self { name, why, needed: true, real_devices: false }
    }

    fn check(self, status: Status, found: &str, fix: Option<String>) -> Check {
        let Self { name, why, needed, real_devices } = self;
        let changes = fix.as_deref().map(changes);
        Check { name, status, needed, real_devices, found: plain(found), why, fix, changes }
    }

    pub(super) fn ok(self, found: impl AsRef<str>) -> Check {
        self.check(Status::Ok, found.as_ref(), None)
    }

    pub(super) fn note(self, found: impl AsRef<str>) -> Check {
        self.check(Status::Note, found.as_ref(), None)
    }

    pub(super) fn missing(self, found: impl AsRef<str>, fix: impl Into<String>) -> Check {
        let status = if self.real_devices { Status::Note } else { Status::Missing };
        self.check(status, found.as_ref(), Some(plain(&fix.into())))
    }
}
