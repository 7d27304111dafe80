//! Control groups with a limit of memory, for the processes of a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Time within which the processes of a group end.
const LONG: Duration = Duration::from_secs(60);

/// A version of the kernel's interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    V1,
    V2,
}

/// A control group; removed on drop, when its processes have ended.
pub struct Group {
    folder: PathBuf,
    version: Version,
}

impl Group {
    /// A group of this version.
    ///
    /// # Errors
    /// Why this machine has none.
    pub fn new(version: Version, name: &str, bytes: u64) -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/mounts").map_err(|e| format!("/proc/mounts: {e}"))?;
        let found = mounts.lines().find_map(|line| {
            let [_, place, kind, options, ..] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
            let right = match version {
                Version::V1 => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
                Version::V2 => kind == "cgroup2",
            };
            right.then(|| Path::new(place).to_owned())
        });
        let mount = found.ok_or(format!("no memory hierarchy of control groups {version:?} is mounted"))?;
        let folder = mount.join(format!("dmalane-test-{}-{name}", std::process::id()));
        fs::create_dir(&folder).map_err(|e| format!("no control group can be made: {}: {e}", folder.display()))?;
        let group = Self { folder, version };
        let limit = group.folder.join(if version == Version::V1 { "memory.limit_in_bytes" } else { "memory.max" });
        fs::write(&limit, bytes.to_string()).map_err(|e| {
            let has = fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default();
            format!("memory cannot be limited: {}: {e} (controllers: \"{}\")", limit.display(), has.trim())
        })?;
        Ok(group)
    }

    /// A group of the version that this machine has.
    pub fn any(name: &str, bytes: u64) -> Result<Self, String> {
        Self::new(Version::V2, name, bytes)
            .or_else(|v2| Self::new(Version::V1, name, bytes).map_err(|v1| format!("{v2}; {v1}")))
    }

    /// A program that begins in this group.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""]).arg(&self.folder).arg(program.as_ref());
        shell
    }

    /// Bytes in use, without the page cache, which the kernel drops before it kills.
    pub fn used(&self) -> u64 {
        let (file, prefix) = match self.version {
            Version::V1 => ("memory.usage_in_bytes", "total_"),
            Version::V2 => ("memory.current", ""),
        };
        let used: u64 = self.read(file).trim().parse().unwrap();
        let cache = |name| self.line("memory.stat", &format!("{prefix}{name}"));
        used.saturating_sub(cache("active_file") + cache("inactive_file"))
    }

    /// How many of its processes the kernel has killed for lack of memory.
    pub fn killed(&self) -> u64 {
        self.line(if self.version == Version::V1 { "memory.oom_control" } else { "memory.events" }, "oom_kill")
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.folder.join(file)).unwrap()
    }

    /// The number in a line of a file.
    fn line(&self, file: &str, name: &str) -> u64 {
        let text = self.read(file);
        let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
        found.unwrap_or_else(|| panic!("{file} has no {name}: {text}"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let start = Instant::now();
        while fs::remove_dir(&self.folder).is_err_and(|e| e.raw_os_error() == Some(16)) {
            if start.elapsed() > LONG {
                assert!(std::thread::panicking(), "the control group is busy: {}", self.read("cgroup.procs"));
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
