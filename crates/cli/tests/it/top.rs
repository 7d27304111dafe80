//! `dmalane top`: in a pseudo-terminal, as text, as JSON, and among hostile sockets.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;
use tempfile::TempDir;

use crate::lists::{keys, page};

/// Time after which something that is waited for does not come.
const LONG: Duration = Duration::from_secs(60);

/// `dmalane` with a directory of its own for the sockets of jobs.
fn dmalane(runtime: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmalane"));
    command.args(args).env("XDG_RUNTIME_DIR", runtime).env("TERM", "xterm-256color").env_remove("NO_COLOR");
    command
}

pub(crate) fn folder() -> TempDir {
    // Short: the path of a socket has at most 107 bytes.
    tempfile::Builder::new().prefix("top").tempdir_in("/tmp").unwrap()
}

/// A process that does not outlive its test.
struct Background(Child);

impl Background {
    fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn id(&self) -> u32 {
        self.0.id()
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A job that reads what it is given, and ends when that ends.
struct Slow {
    child: Child,
    input: ChildStdin,
}

impl Slow {
    fn start(runtime: &Path) -> Self {
        let mut child = dmalane(runtime, &["read", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        Self { child, input }
    }

    fn feed(&mut self, mib: usize) {
        self.input.write_all(&vec![7; mib << 20]).unwrap();
    }

    fn end(self) {
        let Self { mut child, input } = self;
        drop(input);
        assert!(child.wait().unwrap().success());
    }
}

/// A terminal with `dmalane top` in it.
struct Terminal {
    child: Child,
    master: Arc<OwnedFd>,
    slave: OwnedFd,
    screen: Arc<Mutex<(vt100::Parser, Vec<u8>)>>,
}

impl Terminal {
    fn start(mut command: Command, rows: u16, columns: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let parser = vt100::Parser::new(some(rows), some(columns), 0);
        let (master, screen) = (Arc::new(master), Arc::new(Mutex::new((parser, Vec::new()))));
        let this =
            |child| Self { child, master: master.clone(), slave: slave.try_clone().unwrap(), screen: screen.clone() };
        tcsetwinsize(&*master, size(rows, columns)).unwrap();
        let end = || Stdio::from(slave.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let (from, to) = (master.clone(), screen.clone());
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = rustix::io::read(&*from, &mut bytes) {
                let mut to = to.lock().unwrap();
                to.0.process(&bytes[..n]);
                to.1.extend_from_slice(&bytes[..n]);
            }
        });
        this(child)
    }

    fn key(&self, bytes: &[u8]) {
        assert_eq!(rustix::io::write(&*self.master, bytes).unwrap(), bytes.len());
    }

    fn resize(&self, rows: u16, columns: u16) {
        self.screen.lock().unwrap().0.screen_mut().set_size(some(rows), some(columns));
        tcsetwinsize(&*self.master, size(rows, columns)).unwrap();
        kill_process(self.pid(), Signal::WINCH).unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).unwrap()
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().0.screen().contents()
    }

    /// Waits until the screen shows something.
    fn until(&self, what: &str, shown: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let text = self.text();
            if shown(&text) {
                return text;
            }
            assert!(start.elapsed() < LONG, "{what} does not come:\n{text}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The line that is shown in reverse.
    fn chosen(&self) -> Option<String> {
        let screen = self.screen.lock().unwrap();
        let screen = screen.0.screen();
        let (rows, columns) = screen.size();
        let row = (0..rows.get()).find(|row| screen.cell(*row, 0).is_some_and(vt100::Cell::inverse))?;
        screen.rows(0, columns.get()).nth(row.into())
    }

    /// Waits for the end. The terminal must be as it was.
    fn end(mut self) -> (ExitStatus, Vec<u8>) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < LONG, "it does not end:\n{}", self.text());
            thread::sleep(Duration::from_millis(20));
        };
        assert!(tcgetattr(&self.slave).unwrap().local_modes.contains(LocalModes::ECHO | LocalModes::ICANON), "cooked");
        loop {
            let screen = self.screen.lock().unwrap();
            if !screen.0.screen().alternate_screen() && !screen.0.screen().hide_cursor() {
                return (status, screen.1.clone());
            }
            assert!(start.elapsed() < LONG, "the screen is not restored");
            drop(screen);
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn some(n: u16) -> NonZero<u16> {
    NonZero::new(n).unwrap()
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// The fields of an object of `top` are in its section of `json.md`, or are those of `dmalaned status`.
fn documented(view: &Value) {
    let page = page("formats/json.md");
    let section = |of: &str| page.split("\n## ").find(|section| section.starts_with(of)).expect(of);
    let sections = ["`dmalane top --json`", "`dmalaned status --json`"].map(section);
    for word in keys(view).iter().filter(|word| !["schema", "command"].contains(&word.as_str())) {
        assert!(sections.iter().any(|section| section.contains(&format!("`{word}`"))), "{word} is not in json.md");
    }
}

/// Runs `dmalane top --once` and gives its object.
fn once(runtime: &Path, args: &[&str]) -> Value {
    let output =
        dmalane(runtime, &[&["top", "--once", "--json", "--interval", "0.1"], args].concat()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The jobs, as soon as there are `n` of which all `fit`.
pub(crate) fn jobs(runtime: &Path, n: usize, fit: impl Fn(&Value) -> bool) -> Vec<Value> {
    let start = Instant::now();
    loop {
        let view = once(runtime, &[]);
        let jobs = view["jobs"].as_array().unwrap();
        if jobs.len() == n && jobs.iter().all(&fit) {
            return jobs.clone();
        }
        assert!(start.elapsed() < LONG, "{view}");
    }
}

/// The text of `dmalane top --once`, as soon as it has all of these: on a busy machine a job may answer late.
fn text_with(runtime: &Path, parts: &[&str]) -> String {
    let start = Instant::now();
    loop {
        let output = dmalane(runtime, &["top", "--once", "--interval", "0.1"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        if output.status.success() && parts.iter().all(|part| text.contains(part)) {
            return text;
        }
        assert!(start.elapsed() < LONG, "{text}");
    }
}

#[test]
fn a_terminal_shows_jobs_as_they_are() {
    let runtime = folder();
    let screen = Terminal::start(dmalane(runtime.path(), &["top", "--interval", "0.1"]), 24, 90);
    screen.until("an empty list", |text| text.contains("No command of this user is running"));
    let mut slow = Slow::start(runtime.path());
    slow.feed(8);
    // Drawn in pieces: the first picture with the bytes may lack the rest.
    screen.until("what was read", |text| {
        (text.contains("8.0 MiB") || text.contains("8 MiB"))
            && text.contains("dmalane top  1 command")
            && text.contains("pid  phase")
            && text.lines().any(|line| line.contains("dmalane read -") && line.contains("read"))
    });
    slow.feed(8);
    screen.until("more that was read", |text| text.contains("16.0 MiB") || text.contains("16 MiB"));
    let sample = ["load", "--sample", "64MiB", "--repeat", "1000", "--json"];
    let mut load = Background::start(&mut dmalane(runtime.path(), &sample));
    screen.until("two commands", |text| text.contains("2 commands") && text.contains("--sample 64MiB"));
    let chosen = |what: &str| {
        let start = Instant::now();
        while screen.chosen().is_none_or(|line| !line.contains(what)) {
            assert!(start.elapsed() < LONG, "{what} is not chosen:\n{}", screen.text());
            thread::sleep(Duration::from_millis(20));
        }
    };
    // In the order of their process IDs, which may have begun anew.
    let below = load.id() > slow.child.id();
    let (to_load, to_read) = if below { (b"\x1b[B", b"\x1b[A") } else { (b"\x1b[A", b"\x1b[B") };
    screen.key(to_load);
    chosen("--sample 64MiB");
    screen.until("the stages of the load", |text| {
        ["transfer", "IOTLB", "in flight", "busy", "0 faults"].iter().all(|part| text.contains(part))
    });
    screen.until("a bar", |text| text.contains(" of 64") || text.contains(" of 65"));
    screen.key(b"\r");
    screen.until("no details", |text| !text.contains("transfer") && text.contains("2 commands"));
    screen.key(b"\r");
    screen.until("details", |text| text.contains("transfer"));
    screen.key(to_read);
    chosen("dmalane read -");
    // A terminal of any size.
    for (rows, columns) in [(5, 20), (1, 1), (60, 200), (24, 90)] {
        screen.resize(rows, columns);
        thread::sleep(Duration::from_millis(100));
    }
    screen.until("everything again", |text| text.contains("2 commands") && text.contains("q end"));
    load.kill();
    slow.end();
    screen.until("an empty list again", |text| text.contains("No command of this user is running"));
    let left: Vec<_> = fs::read_dir(runtime.path().join("dmalane")).unwrap().collect();
    assert!(left.is_empty(), "of jobs that ended and of one that was killed: {left:?}");
    screen.key(b"q");
    let (status, bytes) = screen.end();
    assert_eq!(status.code(), Some(0));
    assert!(coloured(&bytes));
}

/// Whether a foreground colour was set.
fn coloured(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    text.split("\x1b[").skip(1).any(|rest| {
        let end = rest.find(|c: char| !(c.is_ascii_digit() || c == ';')).unwrap_or(0);
        rest[end..].starts_with('m') && rest[..end].split(';').any(|n| matches!(n.parse(), Ok(30..=37 | 38 | 90..=97)))
    })
}

#[test]
fn no_colour_where_none_is_wanted_and_the_terminal_is_restored_after_a_signal() {
    let runtime = folder();
    let sample = ["load", "--sample", "32MiB", "--repeat", "1000", "--json"];
    let mut load = Background::start(&mut dmalane(runtime.path(), &sample));
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut command = dmalane(runtime.path(), &["top", "--interval", "0.1"]);
        command.env("NO_COLOR", "1");
        let screen = Terminal::start(command, 30, 100);
        screen.until("a load", |text| text.contains("transfer") && text.contains("rate, at most"));
        kill_process(screen.pid(), signal).unwrap();
        let (status, bytes) = screen.end();
        assert_eq!(status.code(), Some(128 + signal.as_raw()), "{signal:?}");
        assert!(!coloured(&bytes));
    }
    load.kill();
}

#[test]
fn without_a_terminal_it_names_what_prints_text() {
    let runtime = folder();
    let output = dmalane(runtime.path(), &["top"]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("not a terminal") && text.contains("hint: dmalane top --once"), "{text}");
    assert!(output.stdout.is_empty());
    for (args, why) in [
        (&["-d", "soft"][..], "top watches daemons"),
        (&["--interval", "0"], "not a number of seconds"),
        (&["--interval", "NaN"], "not a number of seconds"),
        (&["-d", "daemon:/x,server-uid=me"], "is not the number of a user"),
    ] {
        let output = dmalane(runtime.path(), &[&["top", "--once"], args].concat()).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && text.contains(why), "{args:?}: {text}");
    }
    let gone = runtime.path().join("gone.sock");
    let daemon = format!("daemon:{}", gone.display());
    let Output { status, stdout, .. } =
        dmalane(runtime.path(), &["top", "--once", "-d", &daemon, "--interval", "0.1"]).output().unwrap();
    let text = String::from_utf8(stdout).unwrap();
    assert!(status.code() == Some(1) && text.contains("cannot connect"), "{text}");
}

#[test]
fn text_and_json_say_what_jobs_do() {
    let runtime = folder();
    let mut slow = Slow::start(runtime.path());
    slow.feed(4);
    let job = jobs(runtime.path(), 1, |job| job["stages"][0]["bytes"] == 4 << 20).remove(0);
    assert_eq!((&job["pid"], &job["error"]), (&slow.child.id().into(), &Value::Null));
    assert_eq!((&job["phase"], &job["unit"], &job["total"]), (&"read".into(), &"bytes".into(), &Value::Null));
    assert_eq!((&job["stages"][0]["stage"], &job["iommu"]), (&"read".into(), &Value::Null));
    assert!(job["command"].as_str().unwrap().ends_with("dmalane read -") && job["elapsed_s"].as_f64().unwrap() > 0.0);
    let validate = ["validate", "--duration", "600", "-j", "1", "--ddr-only", "-q"];
    let validate = Background::start(&mut dmalane(runtime.path(), &validate));
    let both = jobs(runtime.path(), 2, |job| job["unit"] == "bytes" || job["done"].as_u64() > Some(0));
    let steps = both.iter().find(|job| job["unit"] == "steps").unwrap();
    assert!(steps["phase"].as_str().unwrap().starts_with("validate: "), "{steps}");
    assert!(steps["total"].as_u64() > Some(1) && steps["bytes_per_s"].is_null(), "{steps}");
    assert!(steps["iommu"]["hits"].is_u64(), "{steps}");
    both.iter().for_each(documented);
    let text = text_with(runtime.path(), &["dmalane read -", " steps"]);
    assert!(!text.contains('\x1b'), "{text}");
    drop(validate);
    // A line for each interval, until nobody reads.
    let mut stream =
        dmalane(runtime.path(), &["top", "--json", "--interval", "0.1"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(stream.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        let view: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!((&view["schema"], &view["command"]), (&1.into(), &"top".into()));
        assert!(view["time_s"].as_f64().unwrap() > 1.6e9 && view["daemons"].as_array().unwrap().is_empty());
    }
    drop(lines);
    assert!(stream.wait().unwrap().success());
    slow.end();
}

#[test]
fn a_daemon_is_watched_too() {
    let runtime = folder();
    let socket = runtime.path().join("d.sock");
    let mut daemon = Background::start(
        Command::new(env!("CARGO_BIN_EXE_dmalaned"))
            .args(["--socket", socket.to_str().unwrap(), "--quiet"])
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS"),
    );
    let start = Instant::now();
    while std::os::unix::net::UnixStream::connect(&socket).is_err_and(|e| e.raw_os_error() != Some(91)) {
        assert!(start.elapsed() < LONG);
        thread::sleep(Duration::from_millis(10));
    }
    let device = format!("daemon:{}", socket.display());
    let sample = ["load", "--sample", "16MiB", "--repeat", "1000", "--json", "-d", &device];
    let mut load = Background::start(&mut dmalane(runtime.path(), &sample));
    let view = loop {
        let view = once(runtime.path(), &["-d", &device]);
        let client = &view["daemons"][0]["clients"][0];
        // All at one moment: the load does not always wait for the card, and its first operation has moved nothing yet.
        let counts =
            [&client["in_flight"], &client["link"]["h2c_bytes"], &client["iommu"]["hits"], &client["iommu"]["misses"]];
        if client["pid"] == load.id() && counts.iter().all(|count| count.as_u64() > Some(0)) {
            break view;
        }
        assert!(start.elapsed() < LONG, "{view}");
    };
    let daemon_view = &view["daemons"][0];
    documented(&view);
    assert_eq!(daemon_view["socket"], socket.to_str().unwrap());
    assert!(daemon_view["ddr_total_bytes"].as_u64() > Some(0) && daemon_view["error"].is_null(), "{view}");
    assert_eq!(daemon_view["clients"][0]["iommu"]["faults"], 0, "{view}");
    // It loads, and reads nothing back.
    let (client, link) = (&daemon_view["clients"][0], &daemon_view["clients"][0]["link"]);
    assert_eq!((&link["c2h_bytes"], &link["c2h_bytes_per_s"]), (&0.into(), &0.0.into()), "{view}");
    assert_eq!(link["h2c_bytes_per_s"], client["bytes_per_s"], "{view}");
    let screen = Terminal::start(dmalane(runtime.path(), &["top", "--interval", "0.1", "-d", &device]), 40, 120);
    screen.until("a load and a daemon", |text| text.contains("1 command, 1 daemon") && text.contains("dmalaned at"));
    screen.key(b"\x1b[B");
    let text = screen.until("its clients", |text| text.contains("in flight") && text.contains("requests"));
    assert!(text.contains(&load.id().to_string()), "{text}");
    load.kill();
    daemon.kill();
    screen.until("that it is gone", |text| text.contains("cannot connect"));
    screen.key(b"q");
    assert!(screen.end().0.success());
}

#[test]
fn a_served_card_is_shown_with_its_client() {
    let runtime = folder();
    let socket = runtime.path().join("card.sock");
    let serve = ["card", "serve", "-d", "soft,ddr=1GiB,hbm=64MiB", "--vfio-user", socket.to_str().unwrap()];
    let served = Background::start(&mut dmalane(runtime.path(), &serve));
    let card = jobs(runtime.path(), 1, |job| job["phase"] == "serve: no client").remove(0);
    assert_eq!((&card["done"], &card["iommu"]["faults"]), (&0.into(), &0.into()));
    let device = format!("vfio-user:{}", socket.display());
    let load = ["load", "--sample", "16MiB", "--repeat", "1000", "--json", "-d", &device];
    let mut load = Background::start(&mut dmalane(runtime.path(), &load));
    // At some moment: the client is not always waiting for the card.
    jobs(runtime.path(), 2, |job| job["iommu"]["hits"] != 0 || job["in_flight"].as_u64() > Some(0));
    let both = jobs(runtime.path(), 2, |job| job["bytes_per_s"].as_f64() > Some(0.0));
    let card = both.iter().find(|job| job["pid"] == served.id()).unwrap();
    assert!(card["phase"].as_str().unwrap().starts_with("serve: client "), "{card}");
    assert!(card["command"].as_str().unwrap().contains("card serve"), "{card}");
    // Loads go to the card, which writes little but completions.
    let [to, from] = ["h2c_bytes", "c2h_bytes"].map(|name| card["link"][name].as_u64().unwrap());
    assert!(to >= from && card["done"] == to + from, "{card}");
    documented(card);
    text_with(runtime.path(), &["serve: client ", "\nH2C ", " operations in flight; 0 faults\n"]);
    load.kill();
    jobs(runtime.path(), 1, |job| job["phase"] == "serve: no client" && job["done"].as_u64() > Some(0));
}

/// Answers every connection.
fn listen(path: &Path, answer: impl Fn(&mut dyn Write) + Send + 'static) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            answer(&mut stream);
        }
    });
}

#[test]
fn hostile_entries_are_told_apart_and_do_no_harm() {
    let runtime = folder();
    let place = runtime.path().join("dmalane");
    DirBuilder::new().mode(0o700).create(&place).unwrap();
    let at = |name: &str| place.join(name);
    fs::write(at("1-garbage"), "{}").unwrap();
    File::create(at("2-huge")).unwrap().set_len(1 << 40).unwrap();
    symlink("/etc/passwd", at("3-link")).unwrap();
    symlink(at("gone"), at("4-dangling")).unwrap();
    fs::create_dir(at("5-folder")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, at("6-pipe"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    drop(UnixListener::bind(at("7-stale")).unwrap());
    // A link to a socket that answers.
    let valid = r#"{"schema":1,"command":"c\u001b[2J\u202e","phase":"p\u0007","elapsed_s":-1e300,
        "done":18446744073709551615,"total":1,"bytes":true,
        "iommu":{"hits":18446744073709551615,"misses":18446744073709551615,"faults":0},
        "stages":[{"stage":"s\u001b","busy_s":-1e308,"wall_s":1e308,"bytes":18446744073709551615,"in_flight":9}]}"#;
    listen(&runtime.path().join("elsewhere"), |to| drop(to.write_all(b"{}")));
    symlink(runtime.path().join("elsewhere"), at("8-link")).unwrap();
    listen(&at("a-valid"), |to| drop(to.write_all(valid.as_bytes())));
    listen(&at("b-garbage"), |to| drop(to.write_all(&[0xff; 100])));
    listen(&at("c-empty"), |_| {});
    listen(&at("d-endless"), |to| while to.write_all(&[b' '; 4096]).is_ok() {});
    listen(&at("e-silent"), |_| thread::sleep(LONG));
    listen(&at("f-slow"), |to| {
        while to.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(50));
        }
    });
    listen(&at("g-types"), |to| drop(to.write_all(br#"{"schema":"1","stages":7}"#)));
    listen(&at("h-other"), |to| drop(to.write_all(valid.replacen(":1,", ":99,", 1).as_bytes())));
    let deep = "[".repeat(50_000);
    listen(&at("i-deep"), move |to| drop(to.write_all(deep.as_bytes())));
    let many = format!(
        r#"{{"schema":1,"command":"{0}","phase":"{0}","elapsed_s":1,"done":0,"total":0,"bytes":false,
        "iommu":null,"stages":[]}}"#,
        "x".repeat(30_000)
    );
    listen(&at("j-long"), move |to| drop(to.write_all(many.as_bytes())));
    let view = once(runtime.path(), &[]);
    let jobs = view["jobs"].as_array().unwrap();
    let errors: Vec<_> = jobs.iter().filter_map(|job| job["error"].as_str()).collect();
    assert_eq!(jobs.len(), 10, "{view}");
    assert!(errors.len() >= 8, "only two are valid: {view}");
    for (job, error) in
        [("e-silent", "no answer"), ("g-types", "no valid answer"), ("h-other", "another version of dmalane")]
    {
        // On a busy machine any of them may be late.
        let at = usize::from(job.as_bytes()[0] - b'a');
        let said = jobs[at]["error"].as_str();
        assert!(said == Some(error) || said == Some("no answer"), "{job}: {view}");
    }
    assert!(!at("7-stale").exists() && at("8-link").exists() && at("2-huge").exists());
    let text = dmalane(runtime.path(), &["top", "--once", "--interval", "0.1"]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(!text.contains('\x1b') && !text.contains('\u{202e}') && !text.contains('\u{7}'), "{text}");
    let screen = Terminal::start(dmalane(runtime.path(), &["top", "--interval", "0.1"]), 24, 80);
    screen.until("them", |text| text.contains("10 commands"));
    for _ in 0..12 {
        screen.key(b"\x1b[B");
        thread::sleep(Duration::from_millis(30));
    }
    screen.until("them still", |text| text.contains("10 commands"));
    screen.key(b"q");
    assert!(screen.end().0.success());
}

#[test]
fn a_directory_that_others_can_use_is_not_used() {
    for prepare in [
        &(|place: &Path| DirBuilder::new().mode(0o755).create(place).unwrap()) as &dyn Fn(&Path),
        &|place| {
            DirBuilder::new().mode(0o700).create(place.with_file_name("other")).unwrap();
            symlink("other", place).unwrap();
        },
        &|place| fs::write(place, "").unwrap(),
    ] {
        let runtime = folder();
        let place = runtime.path().join("dmalane");
        prepare(&place);
        let mut slow = Slow::start(runtime.path());
        slow.feed(1);
        assert_eq!(once(runtime.path(), &[])["jobs"].as_array().unwrap().len(), 0);
        let entries = fs::read_dir(&place).map_or(0, Iterator::count);
        assert_eq!(entries, 0, "nothing is put there");
        slow.end();
    }
    // The files of a job are accessible to its user only.
    let runtime = folder();
    fs::set_permissions(runtime.path(), Permissions::from_mode(0o777)).unwrap();
    let slow = Slow::start(runtime.path());
    jobs(runtime.path(), 1, |_| true);
    let mode = fs::metadata(runtime.path().join("dmalane")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    slow.end();
}
