//! A kernel that refuses io_uring, and cachestat: by a real seccomp filter, and by its own switch. Files are read all
//! the same, and the reason is told.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use serde_json::Value;

/// The numbers are the same on every architecture (asm-generic/unistd.h).
const IO_URING_SETUP: i64 = 425;
const CACHESTAT: i64 = 451;
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
const LEN: usize = 5_000_000;

/// Runs `dmalane read` from a thread for which these calls end with `errno`; the process that it starts inherits that.
fn read_where(calls: &[i64], errno: u32, args: &[&str]) -> Output {
    run_where(calls, errno, &[&["read"], args].concat())
}

fn run_where(calls: &[i64], errno: u32, args: &[&str]) -> Output {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            if !calls.is_empty() {
                let rules: BTreeMap<i64, Vec<_>> = calls.iter().map(|call| (*call, Vec::new())).collect();
                let arch = std::env::consts::ARCH.try_into().unwrap();
                let filter =
                    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(errno), arch).unwrap();
                apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
            }
            Command::new(env!("CARGO_BIN_EXE_dmalane")).args(args).output().unwrap()
        });
        thread.join().unwrap()
    })
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A file on a disk, of which nothing is cached where the file system lets go of it.
fn file(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, (0..LEN as u32).map(|i| (i ^ i >> 8) as u8).collect::<Vec<u8>>()).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    path
}

/// A root-owned file is cached for everyone: another user is told about as much, and reads it through the page cache.
#[test]
fn another_users_file_is_seen_to_be_cached() {
    use std::os::unix::process::CommandExt;
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: needs root, to be somebody else");
    }
    let folder = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir_in("/var/tmp").unwrap();
    let (path, program) = (folder.path().join("model"), folder.path().join("dmalane"));
    std::fs::write(&path, vec![7; 8 << 20]).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_dmalane"), &program).unwrap();
    let mut command = Command::new(program);
    let output = command.args(["read", "--json"]).arg(&path).uid(65534).gid(65534).output().unwrap();
    let read = json(&output);
    let file = &read["files"][0];
    let share = file["cached_before"].as_f64().unwrap() / f64::from(8 << 20);
    assert!(share > 0.9 || file["cached_before"].as_f64() == Some(1.0), "{file}");
    assert_eq!(file["direct"], false, "what is cached is not read from the disk again: {file}");
}

#[test]
fn a_seccomp_filter_that_forbids_io_uring() {
    let path = file("forbidden");
    let path = path.to_str().unwrap();
    let free = json(&read_where(&[], 0, &[path, "--json", "--direct"]));
    let free = &free["files"][0];
    for (errno, said) in [(EPERM, "seccomp profile forbids it"), (ENOSYS, "a seccomp profile hides it")] {
        for calls in [&[IO_URING_SETUP][..], &[IO_URING_SETUP, CACHESTAT]] {
            for mode in [Some("--direct"), Some("--buffered"), None] {
                let args = [path, "--json", "--chunk", "256KiB"];
                let args: Vec<_> = args.into_iter().chain(mode).collect();
                let read = json(&read_where(calls, errno, &args));
                let mode = mode.unwrap_or("auto");
                let file = &read["files"][0];
                assert_eq!((&file["xxh3"], &file["bytes"]), (&free["xxh3"], &LEN.into()), "{errno} {mode}");
                assert_eq!(file["io_uring"], false, "{errno} {mode}");
                let why = file["fallbacks"].to_string();
                // Through the page cache nobody asks for a ring.
                if file["direct"] == true {
                    assert!(why.contains("io_uring refused: ") && why.contains(said), "{errno} {mode}: {why}");
                    assert_eq!((mode != "--buffered", free["direct"] == true), (true, true));
                }
                // Without cachestat, probes tell what is cached.
                if mode == "auto" {
                    assert!(file["cached_before"].is_number(), "{errno}: {file}");
                }
            }
        }
        let text = read_where(&[IO_URING_SETUP], errno, &[path, "--direct", "-v"]);
        // Long lines are wrapped.
        let text = String::from_utf8(text.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        let by_threads = text.contains("direct I/O, pread on ") && text.contains("(io_uring refused: ");
        assert!(free["direct"] == false || by_threads && text.contains(said), "{text}");
    }
    // And onto a device.
    let args = ["load", path, "--json", "-d", "soft", "--verify"];
    let sent = json(&run_where(&[IO_URING_SETUP], EPERM, &args));
    assert_eq!((&sent["files"][0]["xxh3"], &sent["verified"]), (&free["xxh3"], &true.into()));
}

/// The kernel's switch is that of the whole machine, so this is done only when asked for, as root.
#[test]
fn the_kernel_switch() {
    const SWITCH: &str = "/proc/sys/kernel/io_uring_disabled";
    if std::env::var_os("DMALANE_TEST_IO_URING_DISABLED").is_none() {
        return println!(
            "SKIPPED: DMALANE_TEST_IO_URING_DISABLED=1 lets this test switch io_uring off for a moment, as root"
        );
    }
    struct PutBack(String);
    impl Drop for PutBack {
        fn drop(&mut self) {
            std::fs::write(SWITCH, &self.0).unwrap();
        }
    }
    let path = file("switched-off");
    let before = PutBack(std::fs::read_to_string(SWITCH).unwrap());
    std::fs::write(SWITCH, "2").unwrap();
    let read = json(&read_where(&[], 0, &[path.to_str().unwrap(), "--json", "--direct"]));
    drop(before);
    let file = &read["files"][0];
    assert_eq!((&file["io_uring"], &file["bytes"]), (&false.into(), &LEN.into()));
    assert!(file["fallbacks"].to_string().contains("kernel.io_uring_disabled = 2 forbids it"), "{file}");
}
