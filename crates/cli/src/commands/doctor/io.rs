//! Checks of the ways to read a file: they are tried, as a load uses them.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::time::Duration;

use dmalane::addr::FileOffset;
use dmalane::dma::{AnonHeap, Heap};
use dmalane::file::{Error, Fallback, FileHandle, FileQueue, Io, Mode};
use dmalane::queue::{OpError, Operation, RunError, run};
use dmalane::{FileOptions, error_chain};

use super::check::{Check, Subject};
use super::hardware::kernel_option;
use crate::failure::Failure;
use crate::layout::shell_words;
use crate::probe::Probe;

pub fn io_uring(probe: &Probe) -> Check {
    let subject =
        Subject::useful("io_uring", "several direct reads in flight at once; without it files are read with pread");
    if probe.place("/") != Path::new("/") {
        return subject.note("not looked for");
    }
    let options = FileOptions { io: Io::Uring, mode: Mode::Buffered, ..FileOptions::default() };
    let why = match FileQueue::open("/proc/self/exe", options) {
        Ok(_) => return subject.ok("a ring was set up"),
        Err(Error::NoUring { source, .. }) => source.to_string(),
        Err(e) => return subject.note(error_chain(&e)),
    };
    let filtered = probe.field("/proc/self/status", "Seccomp").as_deref() == Some("2");
    let fix = match probe.number("/proc/sys/kernel/io_uring_disabled") {
        Some(1 | 2) => "sudo sysctl kernel.io_uring_disabled=0".to_owned(),
        _ if filtered => {
            "docker run --security-opt seccomp=unconfined ...    # or allow io_uring_setup, _enter and _register"
                .to_owned()
        }
        _ => kernel_option("CONFIG_IO_URING"),
    };
    subject.missing(why, fix)
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
    let options = FileOptions::for_mode(Mode::Direct);
    let opened = match kind.is_dir().then(|| scratch(path)) {
        None => FileQueue::open(path, options),
        Some(Ok(file)) => FileQueue::of_handle(FileHandle::new(file, path), options),
        Some(Err(e)) => {
            return Ok(
                subject.note(format!("not tried: cannot create a file in {at} ({e}); name a file in it instead"))
            );
        }
    };
    Ok(match opened {
        Ok(mut queue) => match read_block(&mut queue) {
            Ok(()) => subject.ok(format!("{at}: memory and offsets aligned to {} B", queue.alignment())),
            Err(e) => refused(subject, &format!("{at} opens with O_DIRECT, but a read fails: {}", error_chain(&*e))),
        },
        Err(Error::NoDirect { source: why @ Fallback::InMemory(_), .. }) => subject.note(format!("{at}: {why}")),
        Err(Error::Open { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
            subject.missing(format!("not tried: {at}: {source}"), permit(kind.is_block_device(), path))
        }
        Err(e) => refused(subject, &error_chain(&e)),
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

/// A file in `dir` that is gone from it before this returns.
fn scratch(dir: &Path) -> io::Result<File> {
    // Not O_TMPFILE: overlayfs and NFS have none. One name per process is enough; a leftover of another is not ours to
    // remove.
    let path = dir.join(format!(".dmalane-doctor-{}", std::process::id()));
    let scratch = File::create_new(&path)?;
    let written = scratch.write_all_at(&[0; 4096], 0);
    let _ = fs::remove_file(&path);
    written.map(|()| scratch)
}

/// Some file systems refuse at the first read, not when the file is opened.
fn read_block(queue: &mut FileQueue) -> Result<(), Box<dyn std::error::Error>> {
    let block = AnonHeap::new().allocate(queue.alignment())?.share().into_slice();
    match run(queue, Operation::read(block, FileOffset::new(0)), Duration::from_secs(10)) {
        Ok(_) | Err(RunError { error: OpError::EndOfFile { .. }, .. }) => Ok(()),
        Err(e) => Err(e.error.into()),
    }
}
