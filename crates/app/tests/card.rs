//! `dmalane card serve`, and a client of it.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dmalane::card::regs;
use dmalane::mem::HostBus;
use dmalane::vfio::user::UserBus;

#[test]
fn a_card_is_served_to_one_client() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("card");
    let mut server = Command::new(env!("CARGO_BIN_EXE_dmalane"))
        .args(["card", "serve", "--once", "--card-ddr", "3MB", "--card-hbm", "1", "--channels", "3", "--vfio-user"])
        .arg(&path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let bus = loop {
        match UserBus::connect(&path) {
            Ok(bus) => break bus,
            Err(_) if began.elapsed() < Duration::from_secs(20) => std::thread::sleep(Duration::from_millis(10)),
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
    assert_eq!(text, format!("listening at {}\nclient 1: gone\n", path.display()));
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
