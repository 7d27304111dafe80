//! The daemon's program as its users meet it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dmalane::addr::Access;
use dmalane::card::regs::BAR_MEMORY;
use dmalane::daemon::{Client, ClientOptions};
use dmalane::dma::{Mmio, Registrar, error_chain};
use dmalane::queue::Registered;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;

use crate::group::Group;

/// Time after which something that is waited for does not come.
const LONG: Duration = Duration::from_secs(60);

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalaned"));
    command.args(args).env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS").envs(crate::WIDE);
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Waits until something listens.
fn wait_for(path: &Path) -> Client {
    connected(&ClientOptions::new(path))
}

fn connected(options: &ClientOptions) -> Client {
    let start = Instant::now();
    loop {
        match Client::connect(options.clone()) {
            Ok(client) => return client,
            Err(e) => assert!(start.elapsed() < LONG, "{e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn end(child: Child, signal: Signal) -> Output {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn every_help_has_an_example_and_the_exit_status() {
    for (args, example) in [
        (&["--help"][..], "Examples:\n  dmalaned  "),
        (&["status", "--help"], "Examples:\n  dmalaned status"),
        (&["completions", "-h"], "Examples:\n  dmalaned completions"),
    ] {
        let help = run(args);
        assert!(help.status.success() && help.stderr.is_empty());
        assert!(text(&help.stdout).contains(example), "{}", text(&help.stdout));
        assert!(text(&help.stdout).lines().all(|l| l.chars().count() <= 100), "wrapped");
    }
    assert_eq!(text(&run(&["--version"]).stdout), format!("dmalaned {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn mistakes_are_told() {
    let nowhere = "/nonexistent/place/socket";
    let folder = tempfile::tempdir().unwrap();
    let left = folder.path().join("left");
    drop(std::os::unix::net::UnixListener::bind(&left).unwrap());
    let left = left.to_str().unwrap();
    for (args, status, said) in [
        (&["--mode", "999"][..], 2, "octal"),
        (&["--client-queues", "17"], 2, "is not in 1..=16"),
        (&["--client-ddr", "3"], 2, "multiple of 2 MiB"),
        (&["--ddr", "1GiB", "--client-ddr", "2GiB"], 2, "DDR of a client"),
        (&["--socket", nowhere], 1, "hint: mkdir -p /nonexistent/place"),
        (&["status", "--socket", nowhere], 1, "is dmalaned running"),
        (&["status", "--socket", left], 1, "nobody listens there"),
        (&["no-such-command"], 2, "no-such-command"),
    ] {
        let output = run(args);
        let said_at_all = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {said_at_all}");
        assert!(said_at_all.starts_with("dmalaned: ") && said_at_all.contains(said), "{args:?}: {said_at_all}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn it_serves_until_it_is_told_to_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let socket = path.to_str().unwrap();
    let child = command(&["--socket", socket, "--mode", "600", "--client-ddr", "64MiB"]).stderr(Stdio::piped()).spawn();
    let child = child.unwrap();
    let client = wait_for(&path);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let buf = client.buffer(1 << 20).unwrap();
    let _mapped = Registered::new(&client, &buf, Access::RW).unwrap();
    // Another one cannot have the place.
    let second = run(&["--socket", socket]);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("another process is listening"));
    // That one connected to see whether anybody listens, and counts until the daemon has seen it leave.
    let begun = Instant::now();
    let json = loop {
        let json: Value = serde_json::from_slice(&run(&["status", "--socket", socket, "--json"]).stdout).unwrap();
        if json["clients"].as_array().unwrap().len() == 1 {
            break json;
        }
        assert!(begun.elapsed() < LONG, "{json}");
    };
    assert_eq!((&json["schema"], &json["command"]), (&2.into(), &"status".into()));
    let row = &json["clients"][0];
    assert_eq!((&row["pid"], &row["ddr_bytes"]), (&std::process::id().into(), &(64 << 20).into()));
    assert_eq!((&row["buffers"], &row["buffer_bytes"]), (&1.into(), &(1 << 20).into()));
    let shown = run(&["status", "--socket", socket]);
    assert!(text(&shown.stdout).contains("DDR 64 MiB of 32 GiB") && text(&shown.stdout).contains("1 MiB"));
    let output = end(child, Signal::TERM);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stderr).contains("stopped"), "{}", text(&output.stderr));
    assert!(client.gone().is_some() && !path.exists());
}

#[test]
fn what_clients_would_meet_is_said_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let script = "ulimit -n 300; exec \"$0\" --socket \"$1\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_dmalaned")]).arg(&path).stderr(Stdio::piped());
    let child = shell.spawn().unwrap();
    drop(wait_for(&path));
    let output = end(child, Signal::TERM);
    let said = text(&output.stderr);
    assert!(
        said.contains("dmalaned: warning: a process of the daemon needs") && said.contains("and may have 300"),
        "{said}"
    );
}

/// Waits for a process that ends by itself.
fn ended(mut child: Child) -> std::process::ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if begun.elapsed() > LONG {
            let _ = child.kill();
            panic!("it does not end");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_status_is_watched_until_nobody_can_see_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let socket = path.to_str().unwrap();
    let daemon = command(&["--socket", socket, "-q"]).spawn().unwrap();
    drop(wait_for(&path));
    let watch = |args: &[&str]| command(&[&["status", "--socket", socket, "--watch=0.1"], args].concat());
    // Two looks and more.
    let mut child = watch(&["--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines: Vec<String> =
        BufReader::new(child.stdout.take().unwrap()).lines().take(2).collect::<Result<_, _>>().unwrap();
    for line in lines {
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["command"], "status");
    }
    assert_eq!(ended(child).code(), Some(0), "its reader has left");
    for signal in [Signal::TERM, Signal::INT] {
        let (child, _screen) = on_terminal(watch(&[]));
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(ended(child).signal(), Some(signal.as_raw()));
    }
    let (child, screen) = on_terminal(watch(&[]));
    drop(screen);
    // Nobody sends SIGHUP: it is not the terminal of the session.
    assert_eq!(ended(child).code(), Some(1));
    assert_eq!(end(daemon, Signal::TERM).status.code(), Some(0));
}

/// Starts a command on a terminal of its own, and waits until it shows something there.
fn on_terminal(mut command: Command) -> (Child, File) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let slave = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let end = || Stdio::from(slave.try_clone().unwrap());
    let child = command.stdin(Stdio::null()).stdout(end()).stderr(end()).spawn().unwrap();
    let mut screen = File::from(master);
    assert!(screen.read(&mut [0; 64]).unwrap() > 0);
    (child, screen)
}

#[test]
fn files_are_loaded_and_the_card_is_measured_through_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let socket = path.to_str().unwrap();
    let mut daemon = command(&["--socket", socket, "--client-ddr", "64MiB", "--client-hbm", "64MiB"]);
    let child = daemon.stderr(Stdio::piped()).spawn().unwrap();
    drop(wait_for(&path));
    let device = format!("daemon:{socket}");
    let dmalane =
        |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_dmalane")).args(args).envs(crate::WIDE).output().unwrap();
    let load = |more: &[&str]| dmalane(&[&["load", "-q", "-d", &device], more].concat());

    let bytes: Vec<u8> = (0..5_000_001u32).map(|i| (i ^ i >> 9) as u8).collect();
    let file = folder.path().join("weights.bin");
    std::fs::write(&file, &bytes).unwrap();
    let file = file.to_str().unwrap();
    let output = load(&[file, "--verify", "--chunk", "1MiB", "--placement", "hbm-striped", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["device"], &json["verified"]), (&device.as_str().into(), &true.into()));
    assert!(json["host"]["iommu_tables"].is_null() && json["card"]["touched_bytes"].is_null());
    let output = load(&["--sample", "8MiB", "--verify", "-v"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains(&format!("IOMMU      in the daemon: {device}")));
    let output = dmalane(&["load", "-q", "-d", "daemon:/nonexistent", "/nonexistent/typo"]);
    assert!(text(&output.stderr).contains("cannot open /nonexistent/typo"), "{}", text(&output.stderr));
    // Of the rest of the card there is nothing to be had.
    let output = load(&["--sample", "65MiB"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("does not fit: daemon"), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("onto a device with more memory"), "{}", text(&output.stderr));
    let output = dmalane(&["load", "-q", "--sample", "1MiB", "-d", &format!("{device},ddr=128MiB")]);
    assert!(text(&output.stderr).contains("a client may have 67108864"), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("-d daemon:SOCKET,ddr=SIZE,hbm=SIZE asks for less"),
        "{}",
        text(&output.stderr)
    );

    let quick = ["validate", "-q", "-j", "2", "--buffer-size", "64KiB", "--iterations", "3", "--json"];
    let output = dmalane(&[&quick[..], &["-d", &device]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["integrity"].as_array().unwrap().len(), 3, "{json}");
    assert_eq!(json["figures"].as_array().unwrap().len(), 9, "{json}");
    let output = dmalane(&[&quick[..], &["-d", &format!("{device},channels=1")]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));

    let output = end(child, Signal::TERM);
    assert!(text(&output.stderr).contains("stopped"), "{}", text(&output.stderr));
    let output = load(&[file]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("is dmalaned running"), "{}", text(&output.stderr));
}

/// Whenever it is killed: tables of the card cannot be had then, queues stop, and what is bound after a failure is no
/// reason for it.
#[test]
fn a_daemon_that_is_killed_is_the_reason_for_a_load_that_fails() {
    const TENSORS: usize = 3000;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("many.safetensors");
    let tensor = |i: usize| {
        let at = [4096 * i, 4096 * i + 4096];
        (format!("t{i}"), serde_json::json!({"dtype": "U8", "shape": [4096], "data_offsets": at}))
    };
    let header = serde_json::to_vec(&(0..TENSORS).map(tensor).collect::<serde_json::Map<_, _>>()).unwrap();
    let len = (header.len() as u64).to_le_bytes();
    std::fs::write(&file, [&len[..], &header, &vec![7; 4096 * TENSORS]].concat()).unwrap();
    for run in 0..12 {
        let path = folder.path().join(format!("socket-{run}"));
        let child = command(&["--socket", path.to_str().unwrap()]).stderr(Stdio::piped()).spawn().unwrap();
        drop(wait_for(&path));
        let mut load = Command::new(env!("CARGO_BIN_EXE_dmalane"));
        load.args(["load", "-q", "-d", &format!("daemon:{}", path.display())]).arg(&file).envs(crate::WIDE);
        let load = load.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20 * run));
        end(child, Signal::KILL);
        let output = load.wait_with_output().unwrap();
        let (told, done) = (text(&output.stderr), output.status.success());
        let gone = told.contains("is gone, with all that was on its card") || told.contains("cannot connect to");
        assert!(done || gone, "run {run}: {told}");
    }
}

#[test]
fn a_service_manager_hands_a_socket_over_and_hears_that_it_is_ready() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    let folder = tempfile::tempdir().unwrap();
    let (path, notify) = (folder.path().join("socket"), folder.path().join("notify"));
    let heard = std::os::unix::net::UnixDatagram::bind(&notify).unwrap();
    heard.set_read_timeout(Some(LONG)).unwrap();
    // A shell puts it where sd_listen_fds(3) has it, and becomes the daemon: so the process number is right too.
    let listen = |kind: SocketType, path: &Path| {
        let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&socket, 8).unwrap();
        socket
    };
    let start = |socket: &OwnedFd| {
        let socket = socket.try_clone().unwrap();
        let mut shell = Command::new("sh");
        let script = "exec 3<&0; exec env LISTEN_PID=$$ LISTEN_FDS=1 \"$0\" --quiet 0</dev/null";
        shell.args(["-c", script, env!("CARGO_BIN_EXE_dmalaned")]).env("NOTIFY_SOCKET", &notify);
        shell.stdin(Stdio::from(socket)).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let socket = listen(SocketType::SEQPACKET, &path);
    let child = start(&socket);
    let mut said = [0; 64];
    // With a time-out it is interrupted by whatever signal comes, such as that of another test's child.
    let n = loop {
        match heard.recv(&mut said) {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            other => break other.unwrap(),
        }
    };
    assert_eq!(&said[..n], b"READY=1");
    let client = wait_for(&path);
    drop(client);
    let output = end(child, Signal::INT);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    assert!(path.exists(), "it belongs to the service manager");
    // Who connects while no daemon runs is served by the next one.
    let waiting = std::thread::spawn({
        let path = path.clone();
        move || Client::connect(ClientOptions { timeout: LONG, ..ClientOptions::new(&path) }).map(drop)
    });
    let backlog = || std::fs::read_to_string("/proc/net/unix").unwrap().matches(path.to_str().unwrap()).count();
    let start_of_wait = Instant::now();
    while backlog() < 2 {
        assert!(start_of_wait.elapsed() < LONG, "the client has not connected");
        std::thread::sleep(Duration::from_millis(1));
    }
    let child = start(&socket);
    waiting.join().unwrap().unwrap();
    assert_eq!(end(child, Signal::TERM).status.code(), Some(0));
    let output = start(&listen(SocketType::STREAM, &folder.path().join("other"))).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("ListenSequentialPacket="), "{}", text(&output.stderr));
}

#[test]
fn manual_pages_are_written() {
    let folder = tempfile::tempdir().unwrap();
    assert!(run(&["man", folder.path().to_str().unwrap()]).status.success());
    for page in ["dmalaned.1", "dmalaned-status.1"] {
        let page = std::fs::read_to_string(folder.path().join(page)).unwrap();
        assert!(page.contains(".TH dmalaned") && page.contains("socket"));
        let (_, help) = page.split_once(".SH EXTRA\n").unwrap();
        // Between two requests nothing is filled: an example keeps its line and its columns.
        let lines: Vec<_> = help.lines().collect();
        let examples = lines.windows(3).filter(|three| three[1].starts_with("  dmalaned"));
        assert!(examples.clone().count() > 0 && examples.clone().all(|three| (three[0], three[2]) == (".nf", ".fi")));
        assert!(help.starts_with("Examples:\n.br\n"), "{help}");
    }
}

#[test]
fn the_files_of_the_package_are_there() {
    // The files that cargo-deb packs, and those that the units name.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let (socket, service) = (read("packaging/dmalaned.socket"), read("packaging/dmalaned.service"));
    assert!(socket.contains(&format!("ListenSequentialPacket={}", dmalane::daemon::SOCKET)));
    assert!(service.contains("Type=notify") && service.contains("ExecStart=/usr/bin/dmalaned\n"));
    for user in ["User=dmalane\n", "Group=dmalane\n"] {
        assert!(service.contains(user) && socket.contains(&format!("Socket{user}")));
    }
    assert!(service.contains("Slice=dmalane.slice\n") && read("packaging/dmalane.slice").contains("CPUWeight="));
    assert!(read("packaging/dmalane.sysusers").contains("u dmalane "));
    assert!(read("packaging/debian/postinst").contains("#DEBHELPER#"));
}

#[test]
fn the_unit_leaves_little_exposed() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/dmalaned.service");
    let mut analyse = Command::new("systemd-analyze");
    let Ok(output) = analyse.args(["security", "--offline=true", "--threshold=10"]).arg(&unit).output() else {
        return println!("SKIPPED: no systemd-analyze");
    };
    if text(&output.stderr).contains("unrecognized option") {
        return println!("SKIPPED: this systemd-analyze does not work offline");
    }
    // The threshold is in tenths.
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let unit = std::fs::read_to_string(unit).unwrap();
    for line in ["LimitCORE=0", "MemoryMax=", "MemorySwapMax=0", "OOMPolicy=", "TasksMax=", "IPAddressDeny=any"] {
        assert!(unit.contains(line), "{line}");
    }
    assert!(!unit.contains("\nPrivateUsers="), "all users would be one");
}

/// A daemon in a control group.
fn serve_in(group: &Group, path: &Path) -> Child {
    let mut daemon = group.command(env!("CARGO_BIN_EXE_dmalaned"));
    daemon.arg("--socket").arg(path).args(["--mode", "600", "--clients", "64"]);
    daemon.stderr(Stdio::piped()).spawn().unwrap()
}

/// Page tables and notes of many mappings of single pages count.
#[test]
fn a_daemon_with_little_memory_refuses_mappings_of_single_pages() {
    const LIMIT: u64 = 120 << 20;
    let group = match Group::any("pages", LIMIT) {
        Ok(group) => group,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut child = serve_in(&group, &path);
    let clients = [wait_for(&path), wait_for(&path)];
    let before = group.used();
    let mut mapped = Vec::new();
    for client in &clients {
        let buf = client.buffer(128 << 12).unwrap();
        let refused = loop {
            let pin = |page: usize| client.pin_range(&buf.reference(), page << 12..(page + 1) << 12).unwrap();
            match client.map_list((0..128).rev().map(pin).collect(), Access::RW) {
                Ok(mapping) => mapped.push(mapping),
                Err(e) => break error_chain(&e),
            }
        };
        assert!(child.try_wait().unwrap().is_none(), "the daemon was killed");
        assert!(refused.contains("--memory") || refused.contains("mappings"), "{refused}");
    }
    println!("{} bytes for a segment", (group.used() - before) / (128 * mapped.len() as u64));
    assert!(group.used() < LIMIT - LIMIT / 8, "{} bytes are in use", group.used());
    drop((mapped, clients));
    assert_eq!(end(child, Signal::TERM).status.code(), Some(0));
    drop(group);
}

#[test]
fn a_daemon_with_little_memory_refuses_before_it_is_killed() {
    let group = match Group::any("buffers", 300 << 20) {
        Ok(group) => group,
        Err(why) => return println!("SKIPPED: {why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut child = serve_in(&group, &path);
    let clients: Vec<Client> = (0..24).map(|_| wait_for(&path)).collect();
    // Card memory, a block of 2 MiB after the other; buffers are the clients' own memory.
    let (mut touched, mut refused) = (0, Vec::new());
    for i in 0..16u64 {
        for client in &clients {
            match client.write_bytes(BAR_MEMORY, i << 21, &[1]) {
                Ok(()) => touched += 1,
                Err(e) => refused.push(error_chain(&e)),
            }
        }
    }
    assert!((70..=118).contains(&touched), "{touched}");
    assert!(refused.iter().all(|why| why.contains("limit of memory")), "{refused:?}");
    assert!(clients.iter().all(|client| client.gone().is_none()), "a client's process was killed");
    assert!(child.try_wait().unwrap().is_none(), "the daemon was killed");
    drop(clients);
    assert_eq!(end(child, Signal::TERM).status.code(), Some(0));
    drop(group);
}
