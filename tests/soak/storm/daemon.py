"""A daemon in the storm: its processes, and what each of them has when nobody uses it."""

import json
import os
import signal
import subprocess
import time

from . import machine

# KiB that a process, and the control group, may have more than before the first client: what is allocated once, and
# what the kernel charges in advance for each processor. Memory that is shared is the table of all processes.
MORE = 2 << 10
MORE_IN_GROUP = (4 << 10) + 512 * (os.cpu_count() or 1)
SHARED = 1 << 10
# How long a daemon may take to give back what clients had.
LONG = 60


class Daemon:
    """`program` serves at `socket`. `broken` is told what is wrong, `leaked` what stays."""

    def __init__(self, name, program, socket, group, log, broken, leaked, mode):
        self.name, self.socket, self.group, self.log = name, socket, group, log
        self.broken, self.leaked = broken, leaked
        self.program = program
        self.command = [program, "--socket", socket, "--mode", mode, "--ddr", "256MiB", "--hbm", "256MiB"]
        self.command += ["--client-ddr", "16MiB", "--client-hbm", "16MiB"]
        self.before = self.group_before = None
        self.process = None
        self.checks = 0
        self.start()
        self.settled()

    @property
    def device(self):
        return f"daemon:{self.socket}"

    # ---- processes

    def start(self):
        # A process group of its own, which is stopped as a whole.
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True,
            preexec_fn=self.group.join if self.group else None,
        )

    def processes(self):
        """The processes by kind, as far as they are there."""
        main = self.process.pid
        forkers = machine.children(main)
        clients = [client for forker in forkers for client in machine.children(forker)]
        return {"main": [main], "forker": forkers, "client": clients}

    def identities(self):
        of_kinds = self.processes().values()
        return [identity for pids in of_kinds for pid in pids if (identity := machine.identity(pid))]

    def signal(self, kind, number):
        """Sends a signal to all processes of a kind, or of all kinds."""
        for pid in [pid for of, pids in self.processes().items() if kind in (of, "all") for pid in pids]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def end(self, kind, number):
        """Ends the daemon by a signal to one of its processes, and starts another one. None of the old one may stay."""
        old = self.identities()
        self.signal(kind, number)
        # Of a forker that ends the daemon hears; of SIGTERM too, and then it waits for its clients' queues.
        try:
            status = self.process.wait(timeout=LONG)
        except subprocess.TimeoutExpired:
            self.broken(f"daemon {self.name} does not end after {signal.strsignal(number)} of {kind}")
            self.signal("all", signal.SIGKILL)
            status = self.process.wait()
        right = {("main", signal.SIGKILL): -signal.SIGKILL, ("main", signal.SIGTERM): 0, ("forker", signal.SIGKILL): 1}
        if status != right[kind, number]:
            self.broken(f"daemon {self.name} ends with {status} after {signal.strsignal(number)} of {kind}")
        left = machine.gone(old)
        if left:
            self.leaked(f"processes of daemon {self.name} outlive it: {left}")

    # ---- what it has

    def status(self):
        command = [self.program, "status", "--socket", self.socket, "--json"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=LONG)
        except subprocess.TimeoutExpired:
            return None
        return json.loads(done.stdout) if done.returncode == 0 else None

    def settled(self):
        """Waits until the daemon has nothing of anybody; what it still has in the end is kept for nobody. Gives what
        each process has."""
        until, kept = time.monotonic() + LONG, None
        while time.monotonic() < until:
            status = self.status()
            if not status or status["clients"] or status["ddr_bytes"] or status["hbm_bytes"]:
                kept = f"its status is {status}"
            elif not (kept := self.kept()):
                self.checks += 1
                return {f"{self.name}: {name}": value for name, value in self.figures().items()}
            time.sleep(0.05)
        self.leaked(f"daemon {self.name}: {kept}")
        return {}

    def kept(self):
        """What the processes have that they had not before the first client; None for nothing."""
        processes = self.processes()
        if processes["client"] or len(processes["forker"]) != 1:
            return f"its processes are {processes}"
        usage = {kind: machine.usage(pids[0]) for kind, pids in processes.items() if pids}
        if not all(usage.values()):
            return "a process has ended"
        in_group = self.group.used() if self.group else 0
        if self.before is None:
            self.before, self.group_before = usage, in_group
        for kind, now in usage.items():
            before = self.before[kind]
            if now["descriptors"] > before["descriptors"] or now["RssShmem"] > SHARED:
                return f"{kind} has {now}, and had {before}"
            if now["RssAnon"] > before["RssAnon"] + MORE:
                return f"{kind} has {now}, and had {before}"
        if in_group > self.group_before + MORE_IN_GROUP:
            return f"its control group has {in_group} KiB, and had {self.group_before}"
        if self.group and self.group.killed():
            return f"the kernel has killed {self.group.killed()} of its processes for lack of memory"
        if self.group:
            strangers = set(self.group.processes()) - {pid for pids in processes.values() for pid in pids}
            if strangers:
                return f"processes that are nobody's are in its control group: {strangers}"
        return None

    def figures(self):
        """KiB, to see how they grow."""
        usage = {kind: machine.usage(pids[0]) for kind, pids in self.processes().items() if pids}
        figures = {f"{kind}, {name}": of[name] for kind, of in usage.items() if of for name in ("RssAnon", "Pss_Shmem")}
        return figures | ({"control group": self.group.used()} if self.group else {})
