//! Memory that this process can still allocate or lock before the kernel refuses or the OOM killer acts.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory that is still available, with the limit that determines it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// The limit: the machine's memory, a cgroup, or the overcommit policy.
    pub limited_by: String,
}

/// Memory that can be allocated now, without reserved huge pages; `None` where the kernel does not report it.
///
/// The minimum of: the machine's available memory; for each memory cgroup of this process (version 1 or 2) and its
/// ancestors, the limit minus the memory that cannot be reclaimed; and without overcommit (`vm.overcommit_memory` = 2)
/// the remaining commit limit. It is a snapshot, since other processes allocate too. It serves to refuse impossible
/// requests early: a full cgroup kills its processes instead of returning an error.
pub fn room() -> Option<Room> {
    room_at(Path::new("/"))
}

/// As [`room`], of the machine whose files are below `root`.
pub fn room_at(root: &Path) -> Option<Room> {
    let machine = machine(&fs::read_to_string(root.join("proc/meminfo")).ok()?, overcommit(root) == Some(2));
    cgroups(root).iter().filter_map(Cgroup::room).chain(machine).min_by_key(|room| room.bytes)
}

/// The lowest limit of the memory cgroups that this process is in, in bytes; `None` without one. Above `memory.high`
/// the kernel does not kill, but slows every thread down.
pub fn memory_limit() -> Option<u64> {
    limit_at(Path::new("/"))
}

fn limit_at(root: &Path) -> Option<u64> {
    let limits = cgroups(root).into_iter().flat_map(|group| {
        let files = ["memory.max", "memory.high", "memory.limit_in_bytes"];
        files.into_iter().filter_map(move |file| number(&group.dir.join(file)))
    });
    // Version 1 says "none" with a huge number.
    limits.filter(|limit| *limit < 1 << 60).min()
}

fn overcommit(root: &Path) -> Option<u64> {
    number(&root.join("proc/sys/vm/overcommit_memory"))
}

fn machine(meminfo: &str, strict: bool) -> Vec<Room> {
    let field = |name| bytes_of(meminfo, name);
    let mut rooms = Vec::new();
    if let Some(bytes) = field("MemAvailable") {
        rooms.push(Room { bytes, limited_by: "the memory of the machine".into() });
    }
    if let (true, Some(limit), Some(used)) = (strict, field("CommitLimit"), field("Committed_AS")) {
        let bytes = limit.saturating_sub(used);
        rooms.push(Room { bytes, limited_by: "vm.overcommit_memory = 2 (CommitLimit)".into() });
    }
    rooms
}

/// A memory cgroup.
struct Cgroup {
    dir: PathBuf,
    /// Its path below the mount point.
    name: PathBuf,
    /// The files with its limit and what it uses, and how the lines of `memory.stat` begin that count its children too.
    files: [&'static str; 3],
}

/// The memory cgroups of this process (version 1 or 2), and their ancestors.
fn cgroups(root: &Path) -> Vec<Cgroup> {
    let mut groups = Vec::new();
    for line in fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default().lines() {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>()[..] else { continue };
        let (mount, files) = match controllers {
            "" => ("", ["memory.max", "memory.current", ""]),
            c if c.split(',').any(|c| c == "memory") => {
                ("memory", ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_"])
            }
            _ => continue,
        };
        // In a container the path may be the host's while the cgroup itself is mounted: then only the mount
        // point exists.
        for name in Path::new(path.trim_start_matches('/')).ancestors() {
            let dir = root.join("sys/fs/cgroup").join(mount).join(name);
            groups.push(Cgroup { dir, name: name.to_owned(), files });
        }
    }
    groups
}

impl Cgroup {
    fn room(&self) -> Option<Room> {
        let [limit, usage, prefix] = self.files;
        let (limit, used) = (number(&self.dir.join(limit))?, number(&self.dir.join(usage))?);
        let stat = fs::read_to_string(self.dir.join("memory.stat")).unwrap_or_default();
        let line = |name| stat.lines().find_map(|l| l.strip_prefix(prefix)?.strip_prefix(name)?.trim().parse().ok());
        // The page cache, also that which was used more than once: the kernel drops it before it kills.
        let cache: u64 = ["inactive_file ", "active_file "].into_iter().filter_map(line).fold(0, u64::saturating_add);
        let bytes = limit.saturating_sub(used.saturating_sub(cache));
        Some(Room { bytes, limited_by: format!("the memory cgroup /{}", self.name.display()) })
    }
}

/// The number in a file; `None` also for "max", which means no limit.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Bytes that this process may still lock, for io_uring registration or pinning by a driver (`RLIMIT_MEMLOCK` minus
/// `VmLck` and `VmPin`); `None` without a limit, as for a process with `CAP_IPC_LOCK`.
pub fn memlock_left() -> Option<u64> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current?;
    lockable(limit, &fs::read_to_string("/proc/self/status").unwrap_or_default())
}

/// Computes [`memlock_left`] from a limit and the text of `/proc/PID/status`.
fn lockable(limit: u64, status: &str) -> Option<u64> {
    const CAP_IPC_LOCK: u32 = 14;
    let can = field(status, "CapEff").and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    if can >> CAP_IPC_LOCK & 1 == 1 {
        return None;
    }
    let bytes = |name| bytes_of(status, name).unwrap_or(0);
    Some(limit.saturating_sub(bytes("VmLck").saturating_add(bytes("VmPin"))))
}

/// A field of a file in `/proc` with a name on each line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// One that is given in KiB.
pub(crate) fn bytes_of(text: &str, name: &str) -> Option<u64> {
    let kib: u64 = field(text, name)?.strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> PathBuf {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("dmalane-room-{}-{n}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn room_of(files: &[(&str, &str)]) -> Option<(u64, String)> {
        let root = tree(files);
        let room = room_at(&root);
        let _ = fs::remove_dir_all(root);
        room.map(|r| (r.bytes, r.limited_by))
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:  500 kB\nCommitLimit: 300 kB\nCommitted_AS: 100 kB\n");

    #[test]
    fn the_tightest_limit_counts() {
        assert_eq!(room_of(&[]), None);
        assert_eq!(room_of(&[MEMINFO]).unwrap().0, 500 << 10);
        let strict = [MEMINFO, ("proc/sys/vm/overcommit_memory", "2\n")];
        assert_eq!(room_of(&strict).unwrap(), (200 << 10, "vm.overcommit_memory = 2 (CommitLimit)".into()));
        let v2 = [
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "9\n"),
            ("sys/fs/cgroup/a/memory.max", "100000\n"),
            ("sys/fs/cgroup/a/memory.current", "60000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 15000\nactive_file 5000\n"),
        ];
        assert_eq!(room_of(&v2).unwrap(), (60000, "the memory cgroup /a".into()));
        let v1 = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/of/the/host\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "6000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "active_file 9\ntotal_inactive_file 500\ntotal_active_file 700\n"),
        ];
        assert_eq!(room_of(&v1).unwrap(), (200, "the memory cgroup /".into()));
        assert_eq!(room_of(&[MEMINFO, ("proc/self/cgroup", "nonsense\n::\n\n")]).unwrap().0, 500 << 10);
    }

    #[test]
    fn the_lowest_limit_of_all_cgroups_counts() {
        let limit = |groups: &str| {
            let root = tree(&[
                ("proc/self/cgroup", groups),
                ("sys/fs/cgroup/system.slice/dmalaned.service/memory.max", "max\n"),
                ("sys/fs/cgroup/system.slice/memory.max", "3221225472\n"),
                ("sys/fs/cgroup/system.slice/high.service/memory.max", "2147483648\n"),
                ("sys/fs/cgroup/system.slice/high.service/memory.high", "2013265920\n"),
                ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1048576\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ]);
            let limit = limit_at(&root);
            let _ = fs::remove_dir_all(root);
            limit
        };
        assert_eq!(limit("0::/system.slice/dmalaned.service\n"), Some(3 << 30));
        assert_eq!(limit("0::/system.slice/high.service\n"), Some(1920 << 20));
        assert_eq!(limit("5:cpu:/\n4:memory:/a\n0::/\n"), Some(1 << 20));
        for none in ["0::/\n", "4:memory:/\n", "", "nonsense"] {
            assert_eq!(limit(none), None, "{none}");
        }
    }

    #[test]
    fn computes_lockable_memory() {
        let status = "VmLck:\t  10 kB\nVmPin:\t       2 kB\nCapEff:\t0000000000000400\n";
        assert_eq!(lockable(100 << 10, status), Some(88 << 10));
        assert_eq!(lockable(5 << 10, status), Some(0));
        assert_eq!(lockable(7, ""), Some(7));
        assert_eq!(lockable(7, "CapEff:\t000001ffffffffff\n"), None, "no limit");
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(room().unwrap().bytes > 1 << 20);
        let _may_be_unlimited = memlock_left();
    }
}
