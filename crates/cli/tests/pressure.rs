//! Reading under limits: an error with a reason, never the OOM killer.

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use dmalane::addr::FileOffset;
use dmalane::dma::{AnonHeap, Heap, PageKind, Pool};
use dmalane::load::Error;
use dmalane::load::fill::{BufferMemory, Extent, FillError, FillOptions, Job, Sink, fill};
use dmalane::{DeviceSpec, FileOptions, OpenOptions, open_file};

const LARGE: u64 = 192 << 20;
const LIMIT: u64 = 64 << 20;

fn file() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(LARGE).unwrap();
    file
}

fn run(before: &str, args: &str, file: &Path) -> Output {
    command("read", before, args, file)
}

fn command(command: &str, before: &str, args: &str, file: &Path) -> Output {
    let line = format!("{before} exec {} {command} {} {args}", env!("CARGO_BIN_EXE_dmalane"), file.display());
    // Messages with each cause in a line.
    Command::new("sh").args(["-c", &line]).env("COLUMNS", "10000").output().unwrap()
}

fn refused(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.signal(), None, "killed: {text}");
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("dmalane: ") && !text.contains("panicked"), "{text}");
    text
}

/// A memory cgroup with a limit, inside the one that this process is in.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(bytes: u64) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
        let of = |controllers: &str| {
            let line = own.lines().find(|l| l.split(':').nth(1) == Some(controllers))?;
            Some(line.splitn(3, ':').nth(2)?.trim_start_matches('/').to_owned())
        };
        let (mount, limit, path) = match of("memory") {
            Some(path) => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", path),
            None => ("/sys/fs/cgroup", "memory.max", of("").ok_or("no memory cgroup")?),
        };
        let dir = Path::new(mount).join(path).join(format!("dmalane-test-{}-{bytes}", std::process::id()));
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let cgroup = Self(dir);
        let written = fs::write(cgroup.0.join(limit), bytes.to_string());
        written.map_err(|e| format!("{}: {e}", cgroup.0.join(limit).display()))?;
        Ok(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_memory_cgroup() {
    let cgroup = match Cgroup::new(LIMIT) {
        Ok(cgroup) => cgroup,
        Err(e) => return println!("SKIPPED: cannot make a memory cgroup: {e}"),
    };
    let join = format!("echo $$ > {}/cgroup.procs || exit 99;", cgroup.0.display());
    let file = file();
    for args in ["", "--buffered", "--heap memfd", "--pages 4k --chunk 64KiB", "--buffered --chunk 1MiB"] {
        let output = run(&join, args, file.path());
        if output.status.code() == Some(99) {
            return println!("SKIPPED: cannot enter {}", cgroup.0.display());
        }
        let text = refused(&output);
        assert!(text.contains("the buffers need 192 MiB, and the memory cgroup /"), "{text}");
        assert!(text.contains("\nhint: read less at a time with --range\n"), "{text}");
    }
    // The memory of a device in software is this machine's.
    for device in ["soft", "ram:256MiB"] {
        let text = refused(&command("load", &join, &format!("-d {device}"), file.path()));
        let says = "the device, whose memory is this machine's, and the buffers need";
        assert!(text.contains(says) && text.contains("the memory cgroup /"), "{device}: {text}");
        assert!(text.contains("\nhint: "), "{text}");
    }
    // A range that fits is read, though the whole file would not fit.
    let output = run(&join, "--range 16MiB..48MiB --buffered", file.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Bytes of the file that a test in a cgroup of its own reads, and the variable with its name.
const BYTES: usize = 100 << 20;
const FILE: &str = "DMALANE_TEST_FILE";

/// Runs a test of these again, in a memory cgroup.
fn again_within(limit: u64, test: &str) {
    let cgroup = match Cgroup::new(limit) {
        Ok(cgroup) => cgroup,
        Err(e) => return println!("SKIPPED: cannot make a memory cgroup: {e}"),
    };
    let file = file();
    file.as_file().set_len(BYTES as u64).unwrap();
    let (procs, program) = (cgroup.0.join("cgroup.procs"), std::env::current_exe().unwrap());
    let line = format!("echo $$ > {} || exit 99; exec {} --exact {test}", procs.display(), program.display());
    let output = Command::new("sh").args(["-c", &line]).env(FILE, file.path()).output().unwrap();
    match output.status.code() {
        Some(99) => println!("SKIPPED: cannot enter {}", cgroup.0.display()),
        _ => assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stdout)),
    }
}

/// Device memory that was freed is there already, but only where it was.
#[test]
fn two_memories_of_a_device_after_each_other() {
    let Some(path) = std::env::var_os(FILE) else {
        return again_within(220 << 20, "two_memories_of_a_device_after_each_other");
    };
    let device: DeviceSpec = "soft,ddr=256MiB,hbm=256MiB".parse().unwrap();
    let mut device = OpenOptions::default().open(&device).unwrap();
    let mut load = |placement: &str| {
        let mut inputs = [open_file(&path, FileOptions::default()).unwrap()];
        let loaded = device.load(&mut inputs, &placement.parse().unwrap(), &mut |_| ())?;
        device.unload(loaded)
    };
    load("ddr").unwrap();
    load("ddr").unwrap();
    let refused = load("hbm0").unwrap_err();
    assert!(matches!(refused, Error::Fill(FillError::NoRoom { .. })), "{refused}");
}

#[test]
fn buffers_that_have_their_memory_need_no_more() {
    let Some(path) = std::env::var_os(FILE) else {
        return again_within(160 << 20, "buffers_that_have_their_memory_need_no_more");
    };
    let pool = Pool::new(AnonHeap::starting_at(PageKind::Base), 2 * BYTES);
    pool.allocate(BYTES).unwrap().fill(1);
    assert_eq!(pool.pool_stats().cached, BYTES);
    let extent = Extent { source: 0, at: FileOffset::new(0), len: BYTES as u64, buffer: 0, to: 0 };
    let job = Job { buffers: vec![BYTES as u64], extents: vec![extent] };
    let mut workers = [vec![open_file(&path, FileOptions::default()).unwrap().queue]];
    let mut watch = |_| ControlFlow::Continue(());
    let sink = Sink::Memory(BufferMemory::of(&pool));
    fill(sink, &job, &mut workers, &FillOptions::default(), &mut watch).unwrap();
}

#[test]
fn address_space_and_descriptors() {
    let file = file();
    let text = refused(&run("ulimit -v 150000;", "", file.path()));
    let says = "cannot allocate 201326592 bytes of anonymous memory\ncause: Cannot allocate memory";
    assert!(text.contains(says), "{text}");
    // Too few descriptors for a ring: plain reads do, and it is told.
    let mut without_ring = false;
    for n in 4..16 {
        let output = run(&format!("ulimit -n {n};"), &format!("--range {}MiB..{}MiB", 8 * n, 8 * n + 4), file.path());
        match output.status.code() {
            Some(0) => without_ring |= String::from_utf8_lossy(&output.stdout).contains("(io_uring refused: "),
            Some(127) => {} // too few for the loader of programs
            _ => drop(refused(&output)),
        }
    }
    if !without_ring {
        println!(
            "SKIPPED: no limit of descriptors lets a file be opened and a ring not (or there is no direct I/O here)"
        );
    }
    // Pages for locked memory are not needed.
    let output = run("ulimit -l 0;", "--range ..16MiB", file.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
