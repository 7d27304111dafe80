//! Memory that leaves the process: commands that inherit it, and sockets that it is sent to.

use std::fs::{self, File};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

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
        (&["read", "small", "-d", "soft", "--export", "fd", "--", "true"], 2, "--device"),
        (&["read", "small", "--map", "--send-to", "s"], 2, "--map"),
        (&["read", "small", "--repeat", "2", "--send-to", "s"], 2, "--repeat"),
        (&["read", "small", "--heap", "anonymous", "--export", "fd", "--", "true"], 1, "cannot be shared"),
        (&["read", "small", "--send-to", "nobody"], 1, "cannot connect to nobody"),
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

#[test]
fn a_socket_gets_a_message_and_a_descriptor_for_each_file() {
    let folder = folder("send-to");
    let listener = UnixListener::bind(folder.join("socket")).unwrap();
    let files = ["large", "small"];
    let send = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        command.arg("read").args(files).args(["--send-to", "socket", "--json"]).args(more).current_dir(&folder);
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    for hashed in [true, false] {
        let child = send(if hashed { &[] } else { &["--no-checksum"] });
        let (socket, _) = listener.accept().unwrap();
        let mut got = Vec::new();
        for _ in files {
            let (mut message, mut space) = ([0; 48], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))]);
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
            let received = recvmsg(&socket, &mut [IoSliceMut::new(&mut message)], &mut control, flags).unwrap();
            assert_eq!(received.bytes, 48);
            let fds: Vec<_> = control
                .drain()
                .flat_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
                    _ => Vec::new(),
                })
                .collect();
            got.push((message, fds));
        }
        // The memory outlives the sender.
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        for (i, (message, mut fds)) in got.into_iter().enumerate() {
            let bytes = fs::read(folder.join(files[i])).unwrap();
            let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
            let long = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().unwrap());
            assert_eq!(&message[..8], b"dmalane\0");
            assert_eq!([8, 12, 16, 20].map(word), [1, 1, i as u32, 2], "version, kind, index, count");
            assert_eq!((long(24), word(40), word(44)), (bytes.len() as u64, hashed.into(), 0));
            let hash = if hashed { format!("{:016x}", long(32)) } else { String::new() };
            assert_eq!(report["files"][i]["xxh3"].as_str().unwrap_or_default(), hash);
            assert_eq!(fds.len(), 1);
            let memory = File::from(fds.remove(0));
            let mut there = vec![0; bytes.len()];
            memory.read_exact_at(&mut there, 0).unwrap();
            assert!(there == bytes, "{}", files[i]);
            assert!(memory.metadata().unwrap().len().is_multiple_of(4096));
        }
    }
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
