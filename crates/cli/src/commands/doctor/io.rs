//! Checks of the ways to read a file.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, OFlags, StatxFlags, statx};

use super::check::{Check, Subject};
use super::host;
use crate::failure::Failure;
use crate::layout::shell_words;
use crate::probe::{CAP_SYS_ADMIN, Probe};

pub fn io_uring(probe: &Probe) -> Check {
    let subject =
        Subject::useful("io_uring", "several direct reads in flight at once; without it files are read with pread");
    let sandbox = "docker run --security-opt seccomp=unconfined ...    # or allow io_uring_setup, _enter and _register";
    let allow = "sudo sysctl kernel.io_uring_disabled=0";
    let disabled = probe.number("/proc/sys/kernel/io_uring_disabled");
    let filtered = probe.field("/proc/self/status", "Seccomp").as_deref() == Some("2");
    let tried = probe.ring.map(|set_up| set_up());
    match (tried, disabled) {
        (Some(Ok(())), _) => subject.ok("a ring was set up"),
        (_, Some(2)) => subject.missing("switched off (kernel.io_uring_disabled = 2)", allow),
        (_, Some(1)) if !probe.capable(CAP_SYS_ADMIN) => {
            subject.missing("switched off for this user (kernel.io_uring_disabled = 1)", allow)
        }
        (Some(Err(e)), _) if filtered => subject.missing(format!("refused, likely by a seccomp filter: {e}"), sandbox),
        (Some(Err(e)), _) => subject.missing(format!("refused: {e}"), "grep IO_URING /boot/config-$(uname -r)"),
        (None, _) if host::version(probe).is_some_and(|v| v < (5, 1)) => {
            subject.missing("the kernel is older than 5.1", "uname -r    # and boot a newer one")
        }
        (None, _) if filtered => subject.note("not switched off, but a seccomp filter is on and may refuse it"),
        (None, Some(_)) => subject.ok("allowed"),
        (None, None) => subject.note("not switched off, as far as can be seen"),
    }
}

/// Tries direct I/O on the file system of `path`.
pub fn direct(path: &Path) -> Result<Check, Failure> {
    let subject =
        Subject::useful("direct_io", "reads past the page cache, straight into the buffers that a device maps");
    let at = path.display();
    let kind = fs::metadata(path).map_err(|e| Failure::because(format!("cannot look at {at}"), &e))?.file_type();
    if !(kind.is_dir() || kind.is_file() || kind.is_block_device()) {
        return Err(Failure::new(format!("{at} is neither a directory nor a file"))
            .hint("name the directory or the file that is to be loaded"));
    }
    if let Some(name) = rustix::fs::statfs(path).ok().and_then(|s| in_memory(s.f_type as u32)) {
        return Ok(subject.note(format!("{at}: {name} keeps its files in memory: read through the page cache")));
    }
    let opened = if kind.is_dir() { open_scratch(path) } else { open_direct(path).map_err(Trouble::Open) };
    let file = match opened {
        Ok(file) => file,
        Err(Trouble::Create(e)) => {
            return Ok(
                subject.note(format!("not tried: cannot create a file in {at} ({e}); name a file in it instead"))
            );
        }
        Err(Trouble::Open(e)) if e.kind() == ErrorKind::PermissionDenied => {
            return Ok(subject.missing(format!("not tried: {at}: {e}"), permit(kind.is_block_device(), path)));
        }
        Err(Trouble::Open(e)) => return Ok(refused(subject, &format!("{at} cannot be opened with O_DIRECT: {e}"))),
    };
    let alignment = statx(file.as_fd(), "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|s| s.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .map(|s| (s.stx_dio_mem_align, s.stx_dio_offset_align));
    if let Err(e) = read_block(&file, alignment.map_or(4096, |(memory, offset)| memory.max(offset))) {
        return Ok(refused(subject, &format!("{at} opens with O_DIRECT, but a read fails: {e}")));
    }
    Ok(match alignment {
        Some((0, _) | (_, 0)) => {
            refused(subject, &format!("{at} takes O_DIRECT, but statx says that it reads through the page cache"))
        }
        Some((memory, offset)) => subject.ok(format!("{at}: memory aligned to {memory} B, offsets to {offset} B")),
        None => subject.note(format!("{at} takes O_DIRECT, but does not tell its alignment (4096 is assumed)")),
    })
}

/// The command that lets this user read a file or a block device. A disk holds the files of all users, so nobody else
/// is let in there; its node is made anew, with the old mode, when the machine starts or the disk is plugged in.
pub fn permit(is_block_device: bool, path: &Path) -> String {
    let path = shell_words(&[path.to_string_lossy()]);
    match is_block_device {
        true => format!("sudo setfacl -m u:$USER:r {path}"),
        false => format!("sudo chmod a+r {path}"),
    }
}

fn refused(subject: Subject, found: &str) -> Check {
    subject.missing(found, "dmalane load --buffered FILE    # or move the files to ext4 or xfs")
}

enum Trouble {
    Create(io::Error),
    Open(io::Error),
}

fn open_direct(path: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECT | OFlags::NONBLOCK;
    fs::OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

/// A file in `dir` that is gone from it before this returns.
fn open_scratch(dir: &Path) -> Result<File, Trouble> {
    // Not O_TMPFILE: overlayfs and NFS have none. One name per process is enough; a leftover of another is not ours to
    // remove.
    let path = dir.join(format!(".dmalane-doctor-{}", std::process::id()));
    let scratch = File::create_new(&path).map_err(Trouble::Create)?;
    let written = scratch.write_all_at(&[0; BLOCK], 0);
    let direct = open_direct(&path);
    let _ = fs::remove_file(&path);
    written.map_err(Trouble::Create)?;
    direct.map_err(Trouble::Open)
}

const BLOCK: usize = 4096;

/// Some file systems refuse at the first read, not when the file is opened.
fn read_block(file: &File, alignment: u32) -> io::Result<()> {
    // A file system with a block beyond 1 MiB is lying; the read then fails and says so.
    let align = (alignment as usize).next_power_of_two().clamp(BLOCK, 1 << 20);
    let mut memory = vec![0; 2 * align];
    let start = memory.as_ptr().align_offset(align);
    let block = memory.get_mut(start..start.saturating_add(align)).ok_or(ErrorKind::Unsupported)?;
    file.read_at(block, 0).map(drop)
}

/// The file systems of which a load knows that there is no disk to read directly. (An overlay says only that it is
/// one.)
fn in_memory(magic: u32) -> Option<&'static str> {
    match magic {
        0x0102_1994 => Some("tmpfs"),
        0x8584_58f6 => Some("ramfs"),
        0x9584_58f6 => Some("hugetlbfs"),
        _ => None,
    }
}
