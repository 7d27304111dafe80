"""Packages from Debian's archive as this machine's apt knows it, unpacked into private folders, not installed."""

import getpass
import re
import shutil
import subprocess
from pathlib import Path

from .settings import Skip

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Archive:
    """apt for one architecture, with lists and caches of its own."""

    def __init__(self, settings, suites, arch=None, name=None):
        self.settings = settings
        self.suites = suites
        self.arch = arch
        self.folder = settings.cache / (name or ("apt" if arch is None else f"apt-{arch}"))
        self.updated = False

    def update(self):
        """Fetches the lists, once for each run of the program."""
        if self.updated:
            return
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            raise Skip("no apt-get here to fetch packages with")
        if not KEYRING.is_file():
            raise Skip(f"no {KEYRING} to check packages with")
        self._write_sources()
        self._apt("apt-get", "update", timeout=180, failure="apt-get update: Debian's archive cannot be reached")
        self.updated = True

    def fetch(self, into, suite, patterns):
        """Unpacks the newest package that matches each pattern to `into`/root; `into`/versions has their file names."""
        self.update()
        work = into.with_name(into.name + ".part")
        shutil.rmtree(work, ignore_errors=True)
        (work / "deb").mkdir(parents=True)
        names = self._apt("apt-cache", "pkgnames", failure="apt-cache cannot list packages").split()
        for pattern in patterns:
            package = newest(names, pattern)
            if package is None:
                raise Skip(f"no package of {suite} matches {pattern} any more")
            self._apt(
                "apt-get", "download", f"{package}/{suite}", cwd=work / "deb", failure=f"cannot download {package}"
            )
        files = sorted((work / "deb").glob("*.deb"))
        unpack(files, work / "root")
        (work / "versions").write_text("".join(f"{file.name}\n" for file in files))
        shutil.rmtree(work / "deb")
        replace(work, into)

    def fetch_with_dependencies(self, packages, suite, work):
        """Downloads packages with all that they depend on, as for a machine that has nothing yet."""
        self.update()
        (work / "cache/archives/partial").mkdir(parents=True)
        (work / "status").touch()
        self._apt(
            "apt-get", "--yes", "--target-release", suite, "--no-install-recommends", "--download-only",
            "-o", f"Dir::State::status={work}/status", "-o", f"Dir::Cache={work}/cache", "install", *packages,
            failure=f"cannot download {packages[0]} of {suite}",
        )  # fmt: skip
        return sorted((work / "cache/archives").glob("*.deb"))

    def _write_sources(self):
        sources = self.folder / "sources.list"
        if sources.is_file():
            return
        (self.folder / "lists/partial").mkdir(parents=True, exist_ok=True)
        (self.folder / "cache/archives/partial").mkdir(parents=True, exist_ok=True)
        mirror = self.settings.mirror or mirror_of(self._targets())
        if mirror is None:
            raise Skip("apt knows no Debian mirror here (set DMALANE_VM_MIRROR)")
        sources.write_text("".join(f"deb [signed-by={KEYRING}] {mirror} {suite} main\n" for suite in self.suites))

    @staticmethod
    def _targets():
        command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages"]
        return subprocess.run(command, capture_output=True, text=True).stdout

    def _apt(self, tool, *arguments, failure, cwd=None, timeout=None):
        try:
            done = subprocess.run(
                [tool, *self._options(), *arguments],
                cwd=cwd, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Skip(f"{failure} within {timeout} s") from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise Skip(": ".join([failure, *lines[-1:]]))
        return done.stdout

    def _options(self):
        options = {
            "Dir::Etc::sourcelist": self.folder / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": self.folder / "lists",
            "Dir::Cache": self.folder / "cache",
            "Acquire::Check-Valid-Until": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "2",
            "APT::Update::Error-Mode": "any",
            "APT::Sandbox::User": getpass.getuser(),
            "Debug::NoLocking": "true",
        }
        if self.arch is not None:
            options |= {"APT::Architecture": self.arch, "APT::Architectures::": self.arch}
        return ["-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


def mirror_of(targets):
    """The first mirror of Debian itself in lines of "ORIGIN URI"; not that of its security updates."""
    for line in targets.splitlines():
        origin, _, uri = line.partition(" ")
        if origin == "Debian" and "security" not in uri:
            return uri.strip()
    return None


def newest(names, pattern):
    """Of the names that match the whole pattern, the one with the highest version in it."""

    def version(name):
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    return max((name for name in names if re.fullmatch(pattern, name)), key=version, default=None)


def unpack(packages, root):
    for package in packages:
        if subprocess.run(["dpkg", "-x", package, root], stdin=subprocess.DEVNULL).returncode != 0:
            raise Skip(f"cannot unpack {package}")


def replace(new, old):
    """Puts a finished folder where the old one was."""
    shutil.rmtree(old, ignore_errors=True)
    new.rename(old)
