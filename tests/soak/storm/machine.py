"""What the kernel says of processes and control groups, whatever the processes say of themselves."""

import os
import pathlib
import time

# Users of the machine that need not exist.
USERS = [64001, 64002]


def children(pid):
    """Processes that this one has started and that have not ended."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(child) for child in children.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        if not children.parent.exists():
            return []
    # A kernel without that list.
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def identity(pid):
    """A value that no other process has had since the machine was started; None where there is no process."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # One that has ended and was not waited for has nothing any more.
    return None if fields[0] in "ZX" else (pid, fields[19])


def usage(pid):
    """Descriptors and KiB of memory of a process; None where it has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in (status + rollup).splitlines() if ":" in line)
    number = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "Pss_Anon", "Pss_Shmem")}
    return {"descriptors": descriptors, **number}


def gone(identities, seconds=20):
    """Waits until these processes have ended; gives those that have not."""
    until = time.monotonic() + seconds
    while True:
        left = [pid for pid, started in identities if identity(pid) == (pid, started)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


class Group:
    """A control group for memory, of version 1 or 2, removed by `remove`."""

    def __init__(self, name, limit):
        mounts = [line.split(" ") for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
        first = [pathlib.Path(place) for _, place, kind, options, *_ in mounts
                 if kind == "cgroup" and "memory" in options.split(",")]
        second = [pathlib.Path(place) for _, place, kind, *_ in mounts if kind == "cgroup2"]
        self.is_first = bool(first)
        if not first + second:
            raise OSError("no control groups are mounted")
        self.folder = (first + second)[0] / f"dmalane-soak-{os.getpid()}-{name}"
        self.folder.mkdir()
        try:
            (self.folder / ("memory.limit_in_bytes" if self.is_first else "memory.max")).write_text(str(limit))
        except OSError:
            self.folder.rmdir()
            raise

    def join(self):
        """Puts this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def processes(self):
        return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]

    def used(self):
        """KiB in use, without the page cache, which the kernel drops when it needs memory."""
        used = int((self.folder / ("memory.usage_in_bytes" if self.is_first else "memory.current")).read_text())
        cache = sum(self.line("memory.stat", f"{which}_file") for which in ("active", "inactive"))
        return max(0, used - cache) // 1024

    def killed(self):
        """Processes that the kernel has killed since they had no more memory."""
        return self.line("memory.oom_control" if self.is_first else "memory.events", "oom_kill")

    def line(self, file, name):
        lines = dict(line.split() for line in (self.folder / file).read_text().splitlines())
        return int(lines[name])

    def remove(self):
        """Gives what keeps the group busy, if anything."""
        until = time.monotonic() + 20
        while True:
            try:
                return self.folder.rmdir()
            except OSError as e:
                if time.monotonic() > until:
                    return e
                time.sleep(0.01)


def groups(limits):
    """A group for each name, with its limit in bytes; or the reason why there are none."""
    made = {}
    try:
        for name, limit in limits.items():
            made[name] = Group(name, limit)
    except OSError as e:
        for group in made.values():
            group.remove()
        return dict.fromkeys(limits), f"no control groups: {e}"
    return made, None
