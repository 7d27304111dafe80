//! Memory that leaves the process: commands that inherit it.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with files of odd sizes.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    for (name, len) in [("large", 5_000_001), ("small", 70_003), ("empty", 0)] {
        let bytes: Vec<u8> = (0..len).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::write(folder.join(name), bytes).unwrap();
    }
    folder
}

fn dmalane(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dmalane")).args(args).current_dir(folder).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Hashes what it inherited through a mapping, and the files that are named.
const CHILD: &str = r#"
import hashlib, mmap, os, sys
fds, sizes = os.environ["DMALANE_FD"].split(), os.environ["DMALANE_SIZE"].split()
assert os.environ["DMALANE_KIND"] == "memfd" and len(fds) == len(sizes) == len(sys.argv) - 1
for fd, size, path in zip(map(int, fds), map(int, sizes), sys.argv[1:]):
    with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
        rest = memory[size:]
        assert rest == bytes(len(rest)), "what follows is zero"
        print(hashlib.sha256(memory[:size]).hexdigest() == hashlib.sha256(open(path, "rb").read()).hexdigest())
"#;

#[test]
fn a_command_maps_what_it_inherits() {
    let folder = folder("export");
    if Command::new("python3").arg("-c").arg("").status().is_err() {
        return println!("SKIPPED: no python3");
    }
    for options in [["--pages", "2m"], ["--pages", "4k"], ["--pages", "thp"], ["--heap", "memfd"]] {
        let files = ["large", "small", "empty"];
        let read = [&["read"], &files[..], &options[..], &["--export", "fd", "--", "python3", "-c", CHILD], &files[..]];
        let output = dmalane(&folder, &read.concat());
        assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
        assert_eq!((text(&output.stdout), text(&output.stderr)), ("True\n".repeat(3), String::new()), "{options:?}");
    }
}

#[test]
fn status_and_signals_are_those_of_the_command() {
    let folder = folder("export-status");
    let run = |words: &[&str]| dmalane(&folder, &[&["read", "small", "--export", "fd", "--"], words].concat());
    assert_eq!(run(&["sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(run(&["sh", "-c", "kill -TERM $$"]).status.signal(), Some(15));
    // The default action, which Rust's programs otherwise change.
    assert_eq!(run(&["sh", "-c", "kill -PIPE $$; exit 3"]).status.signal(), Some(13));
    let missing = run(&["./no-such-command"]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(text(&missing.stderr).contains("cannot run ./no-such-command"), "{}", text(&missing.stderr));
    assert_eq!(run(&["./small"]).status.code(), Some(126), "not executable");
    // The process stays the same one, so a signal that is sent to it reaches the command.
    let words = ["read", "small", "--export", "fd", "--", "sleep", "60"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    let mut child = command.args(words).current_dir(&folder).spawn().unwrap();
    let name = format!("/proc/{}/comm", child.id());
    while fs::read_to_string(&name).unwrap() != "sleep\n" {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    // The report is on stderr, and only on request.
    let output = dmalane(&folder, &["read", "small", "--json", "--export", "fd", "--", "echo", "mine"]);
    assert_eq!(text(&output.stdout), "mine\n");
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&output.stderr).unwrap()["bytes"], 70_003);
}

#[test]
fn exports_that_cannot_be_are_refused() {
    let folder = folder("export-refused");
    for (args, status, why) in [
        (&["read", "small", "--export", "fd"][..], 2, "COMMAND"),
        (&["read", "small", "--", "true"], 2, "--export"),
        (&["read", "small", "--export", "pipe", "--", "true"], 2, "pipe"),
        (&["read", "small", "--repeat", "2", "--export", "fd", "--", "true"], 2, "--repeat"),
        (&["read", "small", "--heap", "anonymous", "--export", "fd", "--", "true"], 1, "cannot be shared"),
    ] {
        let output = dmalane(&folder, args);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(status), true), "{args:?}: {said}");
        assert!(said.contains(why), "{args:?}: {said}");
    }
    let output = dmalane(&folder, &["read", "large", "--dma-buf", "--export", "fd", "--", "printenv", "DMALANE_KIND"]);
    match Path::new("/dev/udmabuf").exists() || Path::new("/dev/dma_heap/system").exists() {
        true => assert_eq!(text(&output.stdout), "dma-buf\n", "{}", text(&output.stderr)),
        false => {
            assert!(text(&output.stderr).contains("there is no /dev/udmabuf"), "{}", text(&output.stderr));
            assert_eq!(output.status.code(), Some(1));
        }
    }
}

#[test]
fn memory_of_the_kernels_dma_buf_heap_is_exported_as_what_it_is() {
    let folder = folder("export-dma-heap");
    if File::open("/dev/dma_heap/system").is_err() {
        return println!("SKIPPED: no /dev/dma_heap/system");
    }
    let read = ["read", "large", "--heap", "dma-heap", "--export", "fd", "--", "printenv", "DMALANE_KIND"];
    let output = dmalane(&folder, &read);
    assert_eq!(text(&output.stdout), "dma-buf\n", "{}", text(&output.stderr));
}

/// As the help has it: the memory is whole pages, the file is not.
#[test]
fn a_command_reads_as_many_bytes_as_the_file_has() {
    let folder = folder("export-size");
    let command = "head -c $DMALANE_SIZE /dev/fd/$DMALANE_FD | wc -c";
    let help = text(&dmalane(&folder, &["read", "--help"]).stdout);
    assert!(help.contains(&format!("dmalane read model.bin --export fd -- sh -c '{command}'")), "{help}");
    let output = dmalane(&folder, &["read", "small", "--export", "fd", "--", "sh", "-c", command]);
    assert!(text(&output.stdout).trim_start().starts_with("70003"), "{output:?}");
}
