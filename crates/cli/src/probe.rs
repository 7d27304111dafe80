//! Reading what the kernel says about the machine, from a root that tests can replace.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Access, access};

use crate::layout::plain;

/// The most that is read of one file: enough for any of `/proc`, and for a kernel's configuration and its list of
/// modules, and little enough when a tree is hostile.
const LIMIT: u64 = 8 << 20;

/// The files of a machine. Paths are given as on the machine, from `/`.
pub struct Probe {
    root: PathBuf,
}

impl Probe {
    /// The files of the machine whose `/` is at `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// This machine.
    pub fn machine() -> Self {
        Self::new("/")
    }

    /// Where `path` really is: below the root, whatever it contains.
    pub fn place(&self, path: impl AsRef<Path>) -> PathBuf {
        let inside = path.as_ref().components().filter(|c| matches!(c, Component::Normal(_)));
        inside.fold(self.root.clone(), |whole, part| whole.join(part))
    }

    /// The contents of a file without the white space around them.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.place(path)).ok()?.take(LIMIT).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The number that a file says.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// The rest of the first line that starts with `key:`.
    pub fn field(&self, path: impl AsRef<Path>, key: &str) -> Option<String> {
        let text = self.text(path)?;
        let line = text.lines().find_map(|l| l.strip_prefix(key)?.trim_start().strip_prefix(':'))?;
        Some(line.trim().to_owned())
    }

    /// The word in brackets: `always [madvise] never`.
    pub fn choice(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = self.text(path)?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }

    /// The names in a directory, sorted; none if there is no such directory.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.place(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|e| plain(&e.file_name().to_string_lossy())).collect();
        names.sort();
        names
    }

    /// Is it there, and may this process read and write it?
    pub fn node(&self, path: impl AsRef<Path>) -> NodeState {
        let place = self.place(path);
        match (place.exists(), access(&place, Access::READ_OK | Access::WRITE_OK)) {
            (false, _) => NodeState::Missing,
            (true, Err(_)) => NodeState::Closed,
            (true, Ok(())) => NodeState::Open,
        }
    }

    /// Has this process the capability with this number?
    pub fn capable(&self, bit: u32) -> bool {
        let effective = self.field("/proc/self/status", "CapEff").and_then(|t| u64::from_str_radix(&t, 16).ok());
        effective.is_some_and(|set| set >> bit & 1 == 1)
    }
}

/// The state of a device node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeState {
    /// No such node.
    Missing,
    /// There, for others.
    Closed,
    /// There, readable and writable.
    Open,
}

/// Pins any amount of memory.
pub const CAP_IPC_LOCK: u32 = 14;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_the_root_is_read() {
        let probe = Probe::new("/nowhere/at/all");
        assert_eq!(probe.place("/../../etc/./passwd"), Path::new("/nowhere/at/all/etc/passwd"));
        assert_eq!(probe.text("/etc/passwd"), None);
        assert_eq!(probe.names("/etc"), Vec::<String>::new());
        assert_eq!(probe.node("/dev/null"), NodeState::Missing);
        assert_eq!(Probe::machine().node("/dev/null"), NodeState::Open);
    }

    #[test]
    fn a_key_is_a_whole_word() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("f"), b"Mem: 1\nMemTotal:  2 kB\nvendor_id\t: x\n[a] b [c\xff").unwrap();
        let probe = Probe::new(root.path());
        assert_eq!(probe.field("/f", "Mem").as_deref(), Some("1"));
        assert_eq!(probe.field("/f", "MemTotal").as_deref(), Some("2 kB"));
        assert_eq!(probe.field("/f", "vendor_id").as_deref(), Some("x"));
        assert_eq!(probe.field("/f", "Total"), None);
        assert_eq!(probe.choice("/f").as_deref(), Some("a"));
    }
}
