//! A daemon for tests, in this process so that its descriptors and mappings can be counted.
#![allow(dead_code)] // each test file uses some of it

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dmalane_daemon::{Client, ClientOptions, Config, DaemonStatus, Listener, Server, status};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

/// Time after which something that is waited for does not come: far more than a busy machine needs.
const LONG: Duration = Duration::from_secs(60);

/// Runs one test at a time, so that a leak is attributed to the right test.
static ONE: Mutex<()> = Mutex::new(());

pub struct Daemon {
    pub path: PathBuf,
    folder: tempfile::TempDir,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    /// Open descriptors of this process before the daemon started.
    fds: usize,
    /// Dropped last.
    _one: MutexGuard<'static, ()>,
}

/// Waits for the previous test.
pub fn one() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects, and waits for the end of the connection: its place is free again. False where nobody listens.
fn has_served(path: &Path) -> bool {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    if rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).is_err() {
        return false;
    }
    rustix::net::shutdown(&socket, rustix::net::Shutdown::Write).unwrap();
    while rustix::net::recv(&socket, &mut [0], rustix::net::RecvFlags::empty()).is_ok_and(|(n, _)| n > 0) {}
    true
}

impl Daemon {
    pub fn start(config: Config) -> Self {
        let _one = one();
        let fds = open_files();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600, false).unwrap();
        let server = Server::new(config, |event| println!("{}", event.text)).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        // Once it serves, the listening socket is no descriptor of this process any more.
        assert!(has_served(&path));
        Self { path, folder, stop: Some(stop), thread: Some(thread), fds, _one }
    }

    /// A daemon in a process of its own, which this command starts: it listens at the path that the
    /// command is made for, and ends with its standard input.
    pub fn apart(command: impl FnOnce(&Path) -> Command) -> Self {
        let _one = one();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut child = command(&path).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        // It has a path before it listens.
        while !has_served(&path) {
            assert!(start.elapsed() < LONG, "the daemon did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        let (stop, mut stopped) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || {
            let _ = std::io::Read::read(&mut stopped, &mut [0]);
            drop(child.stdin.take());
            child.wait().unwrap();
        });
        Self { path, folder, stop: Some(stop), thread: Some(thread), fds: open_files(), _one }
    }

    pub fn options(&self) -> ClientOptions {
        ClientOptions { timeout: LONG, ..ClientOptions::new(&self.path) }
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.options()).unwrap()
    }

    pub fn status(&self) -> DaemonStatus {
        status(&self.options()).unwrap()
    }

    /// Waits until only the status connection is left, and all card memory is free.
    pub fn wait_until_empty(&self) -> DaemonStatus {
        self.wait_for("everything is released", |r| r.clients.len() == 1 && r.ddr.0 == 0 && r.hbm.0 == 0)
    }

    pub fn wait_for(&self, what: &str, right: impl Fn(&DaemonStatus) -> bool) -> DaemonStatus {
        let start = Instant::now();
        loop {
            let report = self.status();
            if right(&report) {
                return report;
            }
            assert!(start.elapsed() < LONG, "{what}: {report:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn stop(&mut self) {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap()
    }

    /// Stops a daemon without clients, and checks that it leaks nothing.
    pub fn end_empty(mut self) {
        self.wait_until_empty();
        self.stop();
        assert!(!self.path.exists());
        // Descriptors of an earlier daemon may have been open when this one began, and close apart.
        let start = Instant::now();
        while open_files() > self.fds {
            assert!(start.elapsed() < LONG, "{} descriptors, {} before", open_files(), self.fds);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop();
        }
    }
}

/// Waits until this process, including the daemon, has this many descriptors and mappings of memfds: the daemon notices
/// a disconnect a little later.
pub fn settles_at(want: (usize, usize)) {
    let start = Instant::now();
    while (open_files(), memfd_mappings()) != want {
        let left = (open_files(), memfd_mappings());
        assert!(start.elapsed() < LONG, "descriptors and mappings: {left:?}, before {want:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Number of open descriptors of this process.
pub fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Number of memfd mappings of this process.
pub fn memfd_mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("/memfd:dmalane")).count()
}
