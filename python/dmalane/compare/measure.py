"""Runs loaders by turns, each run in a process of its own, with files that are evicted from the page cache or in it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from .._arguments import Paths, paths_of
from .._native import Files, cached_share, room
from .loaders import LOADERS, onto

# The states of the page cache in which loaders are compared.
CACHES = ("cold", "warm")
# A file counts as evicted when no more of it than this is cached, and as cached when no more of it is missing.
STRAY = 0.01
# A winner has as many runs, and so have those that it is compared with.
LEAST_RUNS = 5
# A loader that prints more than this is not listened to.
MOST_OUTPUT = 1 << 20


class NotRun(Exception):
    """A loader did not load, with the reason."""


@dataclass(frozen=True)
class Sample:
    """What a load took, as the loader prints it."""

    version: str
    seconds: float
    cpu_s: float
    peak_rss_bytes: int
    memory: str
    dma_ready: bool
    sha256: str | None

    @classmethod
    def parse(cls, line: str) -> Sample:
        try:
            given = json.loads(line)
            if given.get("skipped") is not None:
                raise NotRun(plain(given["skipped"]))
            version, memory = plain(given.get("version") or ""), plain(given["memory"])
            figures = float(given["seconds"]), float(given["cpu_s"]), int(given["peak_rss_bytes"])
            sample = cls(version, *figures, memory, bool(given["dma_ready"]), given.get("sha256"))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise NotRun(plain(f"prints no result: {type(error).__name__}: {error}")) from None
        if not 0 < sample.seconds < float("inf"):
            raise NotRun("says that it took no time")
        return sample


@dataclass
class Loader:
    """A command that gets files as further arguments and prints a line of JSON; and what came of it."""

    name: str
    command: tuple[str, ...]
    # The run in which its bytes were hashed.
    first: Sample | None = None
    bytes_right: bool = False
    # Why it cannot run, or runs no more.
    skipped: str | None = None
    # The runs that count, by the state of the page cache.
    runs: dict[str, list[Sample]] = field(default_factory=lambda: {cache: [] for cache in CACHES})
    # Runs that were left out, because the files could not be evicted, or be cached.
    left_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CACHES, 0))

    def seconds(self, cache: str) -> list[float]:
        """The times of its runs."""
        return [sample.seconds for sample in self.runs[cache]]

    def run(self, files: list[str], device: str, hashed: bool, touch: int, timeout: float) -> Sample:
        """Runs it once, with `touch` bytes of memory touched before."""
        environment = {
            **os.environ,
            "DMALANE_COMPARE_HASH": str(int(hashed)),
            "DMALANE_COMPARE_TOUCH": str(touch),
            "DMALANE_COMPARE_DEVICE": device,
        }
        pipe = subprocess.PIPE
        try:
            # In a group of its own, so that its children end with it.
            child = subprocess.Popen(
                [*self.command, *files],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                process_group=0,
            )
        except OSError as error:
            raise NotRun(plain(f"cannot run {self.command[0]}: {error.strerror}")) from None
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.submit(listen, child.stdout), pool.submit(listen, child.stderr)
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                raise NotRun(f"did not end within {timeout:g} s") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        # Libraries may have printed something before.
        line = next((line for line in reversed(out.result()) if line.lstrip().startswith("{")), "")
        if status == 0 or '"skipped"' in line:
            return Sample.parse(line)
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        raise NotRun(plain(": ".join([f"fails ({how})", *err.result()[-1:]])))


class Comparison:
    """Loaders compared on the same files. What `run` has measured until it is interrupted stays."""

    def __init__(
        self,
        filename: Paths,
        *,
        only: Sequence[str] = (),
        extra: Sequence[Loader] = (),
        device: str | None = None,
        rounds: int = 5,
        timeout: float = 300,
    ) -> None:
        """Takes files, or the model of a directory or an index. All loaders are those that this Python has and `extra`
        ones; `only` chooses some by name. `device` is one of PyTorch that is to have the tensors, by default host
        memory. ValueError for a name that none has."""
        script = str(Path(__file__).with_name("loaders.py"))
        # Without the folder of the script and the current one: a file in them must not pose as a module.
        loaders = [Loader(name, (sys.executable, "-P", script, name)) for name in (onto(device) if device else LOADERS)]
        loaders += extra
        there = [loader.name for loader in loaders]
        if unknown := [name for name in only if name not in there]:
            raise ValueError(f"no loader is called {', '.join(unknown)}; there are {', '.join(there)}")
        self.loaders = [loader for loader in loaders if not only or loader.name in only]
        self.files = Files(paths_of(filename), raw=True).paths()
        self.bytes = sum(os.path.getsize(path) for path in self.files)
        self.device = device
        self.rounds, self.timeout, self.finished = rounds, timeout, False

    def run(self, progress: Callable[[str], object] = lambda _: None) -> None:
        """Hashes what each loader loads, then runs each in every round, cold and warm."""
        progress("hashing the files")
        right = sha256_of(self.files)
        for loader in self.loaders:
            progress(f"hashing what {loader.name} loads")
            try:
                loader.first = loader.run(self.files, self.device or "", True, 0, self.timeout)
                loader.bytes_right = loader.first.sha256 == right
            except NotRun as reason:
                loader.skipped = str(reason)
        for number in range(self.rounds):
            # Nobody always follows the same one.
            turn = number % len(self.loaders)
            for cache in CACHES:
                for loader in self.loaders[turn:] + self.loaders[:turn]:
                    if loader.skipped is None:
                        progress(f"round {number + 1} of {self.rounds}: {loader.name}, {cache}")
                        self._run(loader, cache)
        self.finished = True

    def _run(self, loader: Loader, cache: str) -> None:
        if not all(prepare(path, cache == "cold") for path in self.files):
            loader.left_out[cache] += 1
            return
        # The memory that a loader needs, including its page cache; or half of the memory that is there.
        touch = min(2 * self.bytes, (room() or 0) // 2)
        try:
            sample = loader.run(self.files, self.device or "", False, touch, self.timeout)
            loader.runs[cache].append(sample)
        except NotRun as reason:
            loader.skipped = str(reason)

    def winner(self, cache: str) -> tuple[str | None, str]:
        """The loader that is fastest into memory that a driver can pin, if that is clear; and why, in words."""
        able = [x for x in self.loaders if x.first and x.first.dma_ready and x.bytes_right and x.runs[cache]]
        able.sort(key=lambda loader: median(loader.seconds(cache)))
        if len(able) < 2:
            return None, "no two loaders to compare"
        if (fewest := min(len(loader.runs[cache]) for loader in able)) < LEAST_RUNS:
            return None, f"{fewest} of the {LEAST_RUNS} runs that it takes"
        first, *others = able
        slowest = max(first.seconds(cache))
        near = [loader.name for loader in others if min(loader.seconds(cache)) <= slowest]
        if near:
            return None, f"the ranges of {first.name} and {', '.join(near)} overlap"
        return first.name, f"median of {fewest} runs, no range overlaps"

    def json(self) -> dict[str, Any]:
        """The object that docs/formats/json.md describes."""

        def place(loader: Loader) -> tuple[bool, bool, float]:
            seconds = loader.seconds("cold") or loader.seconds("warm")
            first = loader.first
            return first is None, not (first and first.dma_ready), median(seconds) if seconds else float("inf")

        return {
            "schema": 1,
            "command": "compare",
            "files": self.files,
            "bytes": self.bytes,
            "device": self.device,
            "rounds": self.rounds,
            "finished": self.finished,
            "winners": {cache: self.winner(cache)[0] for cache in CACHES},
            "loaders": [self._json_of(loader) for loader in sorted(self.loaders, key=place)],
        }

    def _json_of(self, loader: Loader) -> dict[str, Any]:
        first = loader.first
        return {
            "name": loader.name,
            "version": first and first.version,
            "skipped": loader.skipped,
            "memory": first and first.memory,
            "dma_ready": first and first.dma_ready,
            "bytes_right": loader.bytes_right if first else None,
            **{cache: self._figures(loader.runs[cache]) for cache in CACHES},
            **{f"not_{cache}": loader.left_out[cache] for cache in CACHES},
        }

    def _figures(self, runs: list[Sample]) -> dict[str, Any] | None:
        if not runs:
            return None
        seconds = [run.seconds for run in runs]
        return {
            "runs_s": seconds,
            "median_s": median(seconds),
            "fastest_s": min(seconds),
            "slowest_s": max(seconds),
            "bytes_per_s": self.bytes / median(seconds),
            "cpu_s": median(run.cpu_s for run in runs),
            "peak_rss_bytes": max(run.peak_rss_bytes for run in runs),
        }


def listen(pipe: IO[bytes] | None) -> list[str]:
    """The lines that a process prints, up to a limit, at which its pipe breaks."""
    assert pipe is not None
    with pipe:
        text = pipe.read(MOST_OUTPUT).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def prepare(path: str, cold: bool) -> bool:
    """Evicts a file from the page cache, or reads it into it. True where it is so then, or nobody knows."""
    with open(path, "rb", buffering=0) as file:
        if cold:
            # Pages that are not on the disk yet cannot be evicted.
            os.fdatasync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            block = bytearray(1 << 20)
            while file.readinto(block):
                pass
    share = cached_share(path)
    return share is None or (share <= STRAY if cold else share >= 1 - STRAY)


def sha256_of(files: list[str]) -> str:
    """SHA-256 of the tensors' bytes, as a loader takes it."""
    sha256 = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            if path.endswith(".safetensors"):
                file.seek(8 + int.from_bytes(file.read(8), "little"))
            while block := file.read(1 << 20):
                sha256.update(block)
    return sha256.hexdigest()


def plain(text: str) -> str:
    """Text of others, no longer than a line of a report, without characters that drive a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in str(text)[:300])
