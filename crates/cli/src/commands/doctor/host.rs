//! Checks of the kernel, its memory and its limits.

use dmalane::dma::{Room, room_at};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::check::{Check, Subject};
use crate::probe::{CAP_IPC_LOCK, Probe};
use crate::size::binary;

/// Host buffers of a load with the default `--chunk`.
pub const HOST_BUFFERS: u64 = 4 * (16 << 20);
/// Host buffers, and as much again for a small file on the card.
const LEAST_MEMORY: u64 = 2 * HOST_BUFFERS;
/// statx tells the alignment that direct I/O needs.
const DIO_ALIGN_SINCE: (u64, u64) = (6, 1);

/// The version of the running kernel.
pub fn version(probe: &Probe) -> Option<(u64, u64)> {
    let release = probe.text("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub fn kernel(probe: &Probe) -> Check {
    let subject =
        Subject::useful("kernel", "statx tells the alignment of direct I/O since Linux 6.1; before that it is guessed");
    let release = probe.text("/proc/sys/kernel/osrelease").unwrap_or_else(|| "of unknown version".to_owned());
    let page = rustix::param::page_size() as u64;
    let found = format!("Linux {release}, {}, {} pages", std::env::consts::ARCH, binary(page));
    match version(probe) {
        Some(version) if version >= DIO_ALIGN_SINCE && page == 4096 => subject.ok(found),
        _ => subject.note(found),
    }
}

pub fn memory(probe: &Probe) -> Check {
    let subject =
        Subject::needed("memory", "the software card keeps what is loaded in it, besides 4 x --chunk of host buffers");
    let Some(Room { bytes, limited_by, .. }) = room_at(&probe.place("/")) else { return subject.note("unknown") };
    let found = format!("{} available ({limited_by})", binary(bytes));
    if bytes < LEAST_MEMORY {
        let fix = "ps -eo pid,rss,comm --sort=-rss | head    # and end what is not needed, or raise the limit";
        return subject.missing(format!("{found}; {} are needed", binary(LEAST_MEMORY)), fix);
    }
    subject.ok(found)
}

pub fn memfd() -> Check {
    let subject = Subject::needed("memfd", "the memory of the software card is one");
    let attempt = || {
        let fd = memfd_create("dmalane-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, 4096)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK)
    };
    match attempt() {
        Ok(()) => subject.ok("created and sealed"),
        Err(e) => subject.missing(
            format!("refused: {e}"),
            "docker run --security-opt seccomp=unconfined ...    # or allow memfd_create in the sandbox that is in use",
        ),
    }
}

pub fn memlock(probe: &Probe) -> Check {
    let subject =
        Subject::useful("memlock", "registered io_uring buffers and buffers pinned for VFIO count against it");
    let limits = probe.text("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|l| l.strip_prefix("Max locked memory"));
    let mut words = line.unwrap_or("").split_whitespace().map(|word| match word {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    });
    let (Some(Some(soft)), Some(Some(hard))) = (words.next(), words.next()) else {
        return subject.note("unknown");
    };
    let show = |limit| if limit == u64::MAX { "unlimited".to_owned() } else { binary(limit) };
    let found = format!("soft {}, hard {}", show(soft), show(hard));
    if probe.capable(CAP_IPC_LOCK) {
        subject.ok(format!("{found}; this process has CAP_IPC_LOCK, so neither applies"))
    } else if soft >= HOST_BUFFERS {
        subject.ok(found)
    } else if hard == u64::MAX {
        subject.missing(found, "ulimit -l unlimited")
    } else if hard >= HOST_BUFFERS {
        subject.missing(found, format!("ulimit -l {}", hard / 1024))
    } else {
        subject.missing(found, "sudo prlimit --pid $$ --memlock=unlimited")
    }
}
