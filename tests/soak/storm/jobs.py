"""Jobs of the storm: each is a process, which may be killed or stopped, and what it may do and may not.

What a job says of bytes is not believed: hashes are those of other programs, of what is on the device afterwards or in
the memory that a file was read into.
"""

import collections
import hashlib
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import threading
import time

from . import machine

# A job that takes longer than the time-outs of client and driver together hangs.
TIMEOUT = 120
SIZES = [1, 4095, 4096, 65537, 1 << 20, 3_000_001, 7 << 20]
TENSORS = [4, 100_000, 1 << 20, 2_000_000]
CLIENT = pathlib.Path(__file__).with_name("client.py")
# Hashes the memory that `dmalane read` hands over.
HASH = 'head -c "$DMALANE_SIZE" "/dev/fd/$DMALANE_FD" | sha256sum'


class Files:
    """Files to load, and the hashes of their tensors by Python."""

    def __init__(self, folder, random):
        self.tensors = {}
        for i, size in enumerate(SIZES):
            data = random.randbytes(size)
            path = folder / f"file-{i}.bin"
            path.write_bytes(data)
            self.tensors[path] = [[size, sha256(data)]]
        parts = [random.randbytes(size) for size in TENSORS]
        starts = [sum(TENSORS[:i]) for i in range(len(TENSORS))]
        header = {
            f"t{i}": {"dtype": "U8", "shape": [len(part)], "data_offsets": [start, start + len(part)]}
            for i, (part, start) in enumerate(zip(parts, starts))
        }
        header = json.dumps(header).encode()
        path = folder / "model.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(parts))
        self.tensors[path] = [[len(part), sha256(part)] for part in parts]
        self.whole = {path: sha256(path.read_bytes()) for path in self.tensors}
        self.paths = list(self.tensors)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class User:
    """Who runs jobs: a number, or None for the user of the storm; with a folder to write to."""

    def __init__(self, number, folder):
        self.number, self.folder = number, folder
        folder.mkdir()
        if number is not None:
            os.chown(folder, number, number)

    def become(self):
        if self.number is not None:
            os.setgroups([])
            os.setgid(self.number)
            os.setuid(self.number)


class Jobs:
    """`quiet`: nothing happens to the daemons, and each job that the storm leaves alone must succeed."""

    def __init__(self, program, client, files, users, daemons, groups, broken):
        self.program, self.client, self.files = program, client, files
        self.users, self.daemons = users, daemons
        self.clients, self.small = groups["clients"], groups["small"]
        self.broken = broken
        self.quiet = True
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.faults = collections.Counter()

    def count(self, name):
        with self.lock:
            self.counts[name] += 1

    def fault(self, name):
        with self.lock:
            self.faults[name] += 1

    def one(self, random):
        """Any job, of any user, with any daemon."""
        path, user = random.choice(self.files.paths), random.choice(self.users)
        device = random.choice(self.daemons).device
        kinds = ["copied_back"] * 4 + ["load", "read", "manifest", "pipe", "cut", "full", "missing", "limits"]
        getattr(self, random.choice(kinds))(path, device, user, random)

    # ---- one process

    def process(self, command, user, group=None, limit=None, source=None, **more):
        """Starts a process of a user in the control group of clients, or in another; with a limit of a resource."""
        group = group or self.clients

        def prepare():
            # Writing beyond a limit is an error and not a signal.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            if group:
                group.join()
            user.become()
            if limit:
                resource.setrlimit(limit[0], (limit[1], limit[1]))

        return subprocess.Popen(
            command, stdin=source or subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=prepare,
            env=dict(os.environ, RUST_BACKTRACE="0"), cwd=user.folder, **more,
        )

    def run(self, command, user, random, group=None, limit=None, source=None, fails=False, may_fail=False):
        """One process, which the storm may kill or stop. Gives what it printed when it succeeded. It `fails` for sure,
        or it `may_fail` although nothing happens to it."""
        process = self.process(command, user, group, limit, source, stderr=subprocess.PIPE)
        killed = False
        what = random.random()
        if what < 0.25:
            time.sleep(random.random() * 0.3)
            killed = process.poll() is None
            process.kill()
            if killed:
                self.fault("client killed")
        elif what < 0.30:
            time.sleep(random.random() * 0.2)
            process.send_signal(signal.SIGSTOP)
            time.sleep(random.random())
            process.send_signal(signal.SIGCONT)
            self.fault("client stopped")
        text = " ".join(map(str, command))
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.broken(f"{text} hangs")
            return None
        self.count("jobs")
        status = process.returncode
        if (killed or group) and status == -signal.SIGKILL:
            self.count("killed")
            # Its output has a hidden name until it is whole.
            for left in user.folder.glob(f".*{threading.get_ident()}*.dmalane-*"):
                left.unlink()
                self.count("files of killed jobs")
            return None
        if status == 0:
            self.count("succeeded")
            if fails:
                self.broken(f"{text} succeeds")
            return out.decode()
        self.count("failed")
        # An error is status 1 or 2 with a reason; a panic is 101, wrong bytes are 3, and any other signal is nobody's.
        why = err.decode(errors="replace")
        may_fail = may_fail or fails or not self.quiet
        if status not in (1, 2) or not why.strip() or "panicked" in why or not may_fail:
            self.broken(f"{text}: status {status}: {why[-300:]}")
        return None

    # ---- kinds of jobs

    def copied_back(self, path, device, user, random):
        """Loads through the C interface, and hashes what the device has then."""
        placement = random.choice([[], ["hbm"]])
        command = [*self.client, "load", device, path, *placement]
        if out := self.run(command, user, random):
            self.expect(path, json.loads(out), self.files.tensors[path], self.files.whole[path])

    def expect(self, path, found, tensors, whole):
        self.count("hashes of devices")
        if found["tensors"] != tensors:
            self.broken(f"{path.name}: the device has {found['tensors']}, not {tensors}")
        if found["read"][1] != whole:
            self.broken(f"{path.name}: read as {found['read']}, not {whole}")

    def load(self, path, device, user, random):
        command = [self.program, "load", path, "-d", device, "--verify", "--json"]
        if out := self.run(command, user, random):
            report = json.loads(out)
            if report["verified"] is not True or report["bytes"] != path.stat().st_size:
                self.broken(f"load of {path.name}: {report}")

    def read(self, path, device, user, random):
        """Reads a file into memory, which another program hashes."""
        command = [self.program, "read", path, "--export", "fd", "--", "sh", "-c", HASH]
        if out := self.run(command, user, random):
            self.hashed(path.name, out, self.files.whole[path])

    def hashed(self, name, out, right):
        self.count("hashes of memory")
        if out.split()[:1] != [right]:
            self.broken(f"{name}: read as {out.strip()}, not {right}")

    def manifest(self, path, device, user, random):
        if out := self.run([self.program, "manifest", "--sha256", path], user, random):
            regions = json.loads(out)["files"][0]["regions"]
            found = [[r["end"] - r["start"], r["sha256"]] for r in regions if r["kind"] == "tensor"]
            self.count("hashes of manifests")
            if found != self.files.tensors[path]:
                self.broken(f"manifest of {path.name}: {found}, not {self.files.tensors[path]}")

    def pipe(self, path, device, user, random):
        """Standard input that comes piecemeal, and may end early."""
        data = path.read_bytes()
        sent = data[: random.randrange(len(data))] if random.random() < 0.3 else data
        reader, writer = os.pipe()
        pieces = [random.choice([1, 100, 4096, 65536, 1 << 20]) for _ in range(64)]

        def write():
            at = turn = 0
            with os.fdopen(writer, "wb", buffering=0) as pipe:
                try:
                    while at < len(sent):
                        at += pipe.write(sent[at : at + pieces[turn % len(pieces)]])
                        turn += 1
                except BrokenPipeError:
                    pass

        thread = threading.Thread(target=write)
        thread.start()
        command = [self.program, "read", "-", "--export", "fd", "--", "sh", "-c", HASH]
        try:
            out = self.run(command, user, random, source=reader, may_fail=not sent)
        finally:
            os.close(reader)
            thread.join()
        self.fault("pipe in pieces")
        if out:
            self.hashed(f"{len(sent)} bytes through a pipe", out, sha256(sent))

    def cut(self, path, device, user, random):
        """A file that is cut short while it is loaded: what comes is as long as the file was before or after."""
        copy = user.folder / f"cut-{threading.get_ident()}.bin"
        shutil.copyfile(path, copy)
        data = path.read_bytes()

        def cut():
            time.sleep(random.random() * 0.2)
            os.truncate(copy, len(data) // 2)

        thread = threading.Thread(target=cut)
        thread.start()
        command = [*self.client, "load", device, copy]
        out = self.run(command, user, random, may_fail=True)
        thread.join()
        self.fault("file cut short")
        if out:
            self.count("hashes of devices")
            found = json.loads(out)
            half = data[: len(data) // 2]
            if found["tensors"] not in (self.files.tensors[path], [[len(half), sha256(half)]]):
                self.broken(f"{len(data)} bytes, cut to half: the device has {found['tensors']}")
        copy.unlink()

    def full(self, path, device, user, random):
        """No room for what is to be written."""
        traced = user.folder / f"full-{threading.get_ident()}.json"
        command = [self.program, "load", path, "-d", device, "--trace", traced, "--json"]
        self.run(command, user, random, fails=True, limit=(resource.RLIMIT_FSIZE, 64))
        self.fault("disk full")
        if traced.exists():
            self.broken(f"a full disk leaves {traced.stat().st_size} bytes")

    def missing(self, path, device, user, random):
        """Errors of reading: a directory, no file, and memory that cannot be read (EIO)."""
        source = random.choice([user.folder, user.folder / "missing", "/proc/self/mem"])
        self.run([self.program, "load", source, "-d", device, "--json"], user, random, fails=True)
        self.fault("file that cannot be read")

    def limits(self, path, device, user, random):
        """Too little of what a process needs: descriptors, pinned memory, or memory at all."""
        command = [self.program, "load", path, "-d", random.choice(["card", device]), "--verify", "--json"]
        limits = [(resource.RLIMIT_NOFILE, random.randrange(4, 24)), (resource.RLIMIT_MEMLOCK, 4096)]
        limit = random.choice([*limits, None])
        if limit is None and self.small is None:
            # Reported at the end: the storm was one without these.
            return self.count("cgroup faults skipped")
        out = self.run(command, user, random, limit=limit, group=None if limit else self.small, may_fail=True)
        self.fault("resource limit" if limit else "cgroup limit")
        if out and json.loads(out)["verified"] is not True:
            self.broken(f"load of {path.name}: {out}")


class Witness:
    """A client that outlives daemons: it keeps what it has of one until that is lost, and comes to the next."""

    def __init__(self, jobs, user, device, path, leaked):
        command = [*jobs.client, "witness", device, path]
        # Not in the group of clients, which is empty between rounds.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=user.become, text=True, bufsize=1,
        )
        self.name = f"witness {user.number if user.number is not None else 'of this user'}"
        self.jobs, self.leaked, self.before = jobs, leaked, None

    def tell(self):
        """Begins, or ends."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.jobs.broken(f"{self.name} has ended with {self.process.poll()}")

    def rest(self):
        """Ends, and gives what it has then."""
        self.tell()
        line = self.process.stdout.readline()
        if not line:
            self.jobs.broken(f"{self.name} has ended with {self.process.wait()}")
            return {}
        said = json.loads(line)
        for what in said["wrong"]:
            self.jobs.broken(f"{self.name}: {what}")
        for what, count in said["seen"].items():
            self.jobs.counts[f"witnesses: {what}"] += count
        lost = sum(count for what, count in said["seen"].items() if what.startswith("lost"))
        if self.jobs.quiet and lost:
            self.jobs.broken(f"{self.name}: a daemon is lost to which nothing happened: {said['seen']}")
        has = machine.usage(self.process.pid)
        self.before = self.before or has
        if has["descriptors"] > self.before["descriptors"]:
            self.leaked(f"{self.name} has {has}, and had {self.before}")
        return {f"{self.name}: RssAnon": has["RssAnon"]}

    def end(self):
        self.process.stdin.close()
        if self.process.wait(timeout=TIMEOUT):
            self.jobs.broken(f"{self.name} has ended with {self.process.returncode}")
