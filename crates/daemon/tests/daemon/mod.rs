//! A daemon for a test: in this process, so that what it holds can be counted, or in one of its own, so that it can be
//! killed.
#![allow(dead_code)] // each test file uses some of it

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dmalane_daemon::{Client, Config, Listener, Options, Report, Server, Totals, report};

/// One test at a time, so that what is left is left by this one.
static ONE: Mutex<()> = Mutex::new(());

pub struct Daemon {
    pub path: PathBuf,
    folder: tempfile::TempDir,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<Totals>>,
    /// Descriptors of this process before it began.
    fds: usize,
    /// Dropped last.
    _one: MutexGuard<'static, ()>,
}

/// Waits for the test before.
pub fn one() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Daemon {
    pub fn start(config: Config) -> Self {
        let _one = one();
        let fds = open_files();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, 0o600).unwrap();
        let server = Server::new(config, |event| println!("{event}")).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        Self { path, folder, stop: Some(stop), thread: Some(thread), fds, _one }
    }

    pub fn options(&self) -> Options {
        Options::new(&self.path)
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.options()).unwrap()
    }

    pub fn report(&self) -> Report {
        report(&self.path).unwrap()
    }

    /// Waits until nobody but who asks is there, and nothing of theirs.
    pub fn wait_until_empty(&self) -> Report {
        self.wait_for("everything is released", |r| r.clients.len() == 1 && r.ddr.0 == 0 && r.hbm.0 == 0)
    }

    pub fn wait_for(&self, what: &str, right: impl Fn(&Report) -> bool) -> Report {
        let start = Instant::now();
        loop {
            let report = self.report();
            if right(&report) {
                return report;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{what}: {report:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn stop(&mut self) -> Totals {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap()
    }

    /// Ends a daemon that has no clients, and finds nothing of it left.
    pub fn end_empty(mut self) -> Totals {
        self.wait_until_empty();
        let totals = self.stop();
        assert_eq!((totals.served, totals.quarantined), (totals.released, 0));
        assert!(!self.path.exists());
        assert_eq!(open_files(), self.fds, "descriptors are left");
        totals
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop();
        }
    }
}

/// Waits until this process, daemon included, has so many descriptors and mappings of memfds: the daemon sees a moment
/// later that somebody has gone.
pub fn settles_at(want: (usize, usize)) {
    let start = Instant::now();
    while (open_files(), memfd_mappings()) != want {
        let left = (open_files(), memfd_mappings());
        assert!(start.elapsed() < Duration::from_secs(10), "descriptors and mappings: {left:?}, before {want:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Descriptors that this process has open.
pub fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Mappings of memfds that this process has.
pub fn memfd_mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("/memfd:dmalane")).count()
}
