//! `dmalane card serve`, and a client of it.

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dmalane::card::regs;
use dmalane::dma::Mmio;
use dmalane::vfio_user::UserBus;
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn a_card_is_served_to_one_client() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("card");
    let mut server = Command::new(env!("CARGO_BIN_EXE_dmalane"))
        .args(["card", "serve", "--once", "-d", "soft,ddr=3MB,hbm=1,channels=3", "--vfio-user"])
        .arg(&path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let bus = loop {
        match UserBus::connect(&path, &[]) {
            Ok(bus) => break bus,
            Err(_) if began.elapsed() < Duration::from_secs(60) => std::thread::sleep(Duration::from_millis(10)),
            Err(e) => panic!("{e}"),
        }
    };
    assert_eq!(bus.read32(0, regs::ID).unwrap(), regs::ID_VALUE);
    assert_eq!((bus.read32(0, regs::CHANNELS).unwrap(), bus.read32(0, regs::DDR_LEN).unwrap()), (3, 4 << 20));
    drop(bus);
    let output = server.wait_with_output();
    let output = output.unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text, format!("listening at {}\nclient 1: disconnected\n", path.display()));
    assert!(!path.exists());
    // Somebody else's file stays.
    std::fs::write(&path, "x").unwrap();
    server = Command::new(env!("CARGO_BIN_EXE_dmalane"))
        .args(["card", "serve", "--vfio-user"])
        .arg(&path)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let output = server.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot listen at"));
}

/// A served card, and what it was told.
struct Served {
    server: Child,
    dir: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("card");
        let server = Command::new(env!("CARGO_BIN_EXE_dmalane"))
            .args(["card", "serve", "-d", "soft,ddr=6GiB,hbm=64MiB", "--vfio-user"])
            .arg(&path)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let began = Instant::now();
        // It is there before it is listened at, and before the server knows which file it is.
        while UnixStream::connect(&path).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "no socket");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { server, dir }
    }

    fn dmalane(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        let (verb, rest) = words.split_first().unwrap();
        let device = format!("vfio-user:{}", self.dir.path().join("card").display());
        command.arg(verb).args(["-d", &device, "-q"]).args(rest).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The output of a command; checks its exit status.
    fn says(&self, words: &[&str], status: i32) -> String {
        let output = self.dmalane(words).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{text}");
        text
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn files_are_loaded_onto_a_served_card_and_come_back() {
    let card = Served::new();
    let path = card.dir.path().join("m.safetensors");
    crate::sample(&path, 20 << 20, 1);
    let path = path.to_str().unwrap();
    for placement in ["ddr", "hbm-half", "hbm"] {
        let text = card.says(&["load", path, "--verify", "--placement", placement], 0);
        assert!(text.contains("Verified 5 tensors: read back through the card's MMU"), "{text}");
    }
    let text = card.says(&["load", "--sample", "1MiB", "-v", "--chunk", "64KiB"], 0);
    assert!(text.contains("IOMMU      in the process that serves it: vfio-user:"), "{text}");
    let text = card.says(&["load", "--sample", "65MiB", "--placement", "hbm-half"], 1);
    // Lines end where the path of the socket leaves room.
    assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains("32 MiB for a file"), "{text}");
    let text = card.says(&["validate", "-j", "2", "--buffer-size", "256KiB", "--iterations", "2"], 0);
    assert!(text.contains("the card vfio-user:") && text.contains("2/2 OK"), "{text}");
}

#[test]
fn a_server_that_is_stopped_removes_its_socket_and_no_other() {
    let stop = |mut card: Served, signal| {
        kill_process(Pid::from_child(&card.server), signal).unwrap();
        assert_eq!(card.server.wait().unwrap().code(), Some(0), "{signal:?}");
        card.dir.path().join("card").exists()
    };
    assert!(!stop(Served::new(), Signal::TERM));
    let card = Served::new();
    let _client = UserBus::connect(&card.dir.path().join("card"), &[]).unwrap();
    assert!(!stop(card, Signal::INT));
    let card = Served::new();
    std::fs::remove_file(card.dir.path().join("card")).unwrap();
    let _other = UnixListener::bind(card.dir.path().join("card")).unwrap();
    assert!(stop(card, Signal::TERM), "somebody else listens there");
}

#[test]
fn no_card_at_the_socket_is_an_error_with_a_hint() {
    let card = Served::new();
    std::fs::remove_file(card.dir.path().join("card")).unwrap();
    // A file that is not there is told before any card is looked for.
    let text = card.says(&["load", "/nonexistent/typo.safetensors"], 1);
    assert!(text.contains("cannot open /nonexistent/typo.safetensors"), "{text}");
    for verb in [&["load", "--sample", "1MiB"][..], &["validate"]] {
        let text = card.says(verb, 1);
        assert!(text.contains("cannot connect to") && text.contains("hint: `dmalane card serve --vfio-user"), "{text}");
    }
}

#[test]
fn a_card_that_is_killed_while_it_is_loaded_is_an_error_and_no_hang() {
    let mut card = Served::new();
    let file = card.dir.path().join("large.bin");
    std::fs::File::create(&file).unwrap().set_len(5 << 30).unwrap();
    let load = card.dmalane(&["load", file.to_str().unwrap()]).spawn().unwrap();
    // In the middle of it: some of the card's memory is there, and most of it not.
    let status = format!("/proc/{}/status", card.server.id());
    let shared = || {
        let text = std::fs::read_to_string(&status).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix("RssShmem:")).unwrap().to_owned();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    };
    let began = Instant::now();
    while shared() < 128 {
        assert!(began.elapsed() < Duration::from_secs(60), "nothing is loaded");
        std::thread::sleep(Duration::from_millis(5));
    }
    card.server.kill().unwrap();
    let began = Instant::now();
    let output = load.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    // Its work for the load just then: mapping memory, or moving bytes.
    assert!(text.contains("the load failed") && text.contains("does not answer"), "{text}");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}: {text}", began.elapsed());
}
