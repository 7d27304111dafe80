"""The lists of kernels and modules; fetching a kernel from Debian's archive, or building one from its source there."""

import lzma
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .debian import Archive, replace, unpack
from .settings import ROOT, Failed, Skip

FOLDER = ROOT / "tests/vm"
FRAGMENT = FOLDER / "iommufd.config"
# The version in a package's file name, by which its headers are called.
STUB_VERSION = re.compile(r"linux-(?:image|binary|binary-unsigned)-([0-9.]+\+deb[0-9]+-amd64)(?:-unsigned)?_")

# The programs that make of the kernel's tree calls, besides what the headers depend on.
STUB_TOOLS = ["make", "bash", "dash", "coreutils", "sed", "grep", "gawk", "findutils", "base-files"]
STUB_BUILD = """\
mount --rbind /dev "$1/dev" && mount --rbind /proc "$1/proc" || exit 77
exec chroot "$1" /usr/bin/env -i PATH=/usr/bin:/bin make -s -C "/usr/src/$2" M=/module modules"""
# How unshare, mount and chroot fail; make ends with 2.
NO_ROOT = (1, 77, 125)


@dataclass(frozen=True)
class Kernel:
    """A line of tests/vm/kernels."""

    name: str
    command: str
    suite: str
    packages: tuple[str, ...]

    @property
    def arch(self):
        """Debian's name for an architecture that is not this machine's; None for x86-64."""
        return "arm64" if self.command == "arm64" else None

    @property
    def is_built(self):
        return self.command == "iommufd"


def lines_of(text):
    """The lines of a list without comments."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def parse_kernels(text):
    kernels = []
    for line in lines_of(text):
        name, command, suite, *packages = line.split()
        if not packages:
            raise ValueError(f"kernel {name} has no package")
        kernels.append(Kernel(name, command, suite, tuple(packages)))
    return kernels


def all_kernels():
    return parse_kernels((FOLDER / "kernels").read_text())


def all_modules():
    """The modules of tests/vm/modules, in the order in which the guest loads them."""
    return lines_of((FOLDER / "modules").read_text())


class Store:
    """The kernels and programs that were fetched, in the cache."""

    def __init__(self, settings):
        self.settings = settings
        self.archives = {}

    def archive(self, arch=None):
        if arch not in self.archives:
            suites = sorted({"bookworm", *(kernel.suite for kernel in all_kernels())})
            self.archives[arch] = Archive(self.settings, suites, arch)
        return self.archives[arch]

    def folder(self, kernel):
        return self.settings.cache / kernel.name

    def versions(self, kernel):
        return (self.folder(kernel) / "versions").read_text().split()

    def busybox(self, arch=None):
        """The guest's shell and tools, of its architecture."""
        folder = self.settings.cache / ("busybox" if arch is None else f"busybox-{arch}")
        if not (folder / "root/bin/busybox").is_file():
            self.settings.cache.mkdir(parents=True, exist_ok=True)
            self.archive(arch).fetch(folder, "bookworm", ["busybox-static"])
        return folder / "root/bin/busybox"

    def fetch(self, kernel):
        """Leaves vmlinuz, modules/ and versions in the kernel's folder."""
        self.busybox(kernel.arch)
        if not self.settings.refresh and self._is_current(kernel):
            return
        new = self.settings.cache / f"{kernel.name}.new"
        self.archive(kernel.arch).fetch(new, kernel.suite, kernel.packages)
        if kernel.is_built:
            self._build(kernel, new)
        else:
            take_image_and_modules(kernel, new, all_modules())
        replace(new, self.folder(kernel))

    def stub(self, kernel):
        """Builds tests/vm/slash_stub for a kernel of Debian's, in a private root with its headers and its compiler;
        gives the module."""
        folder = self.settings.cache / f"{kernel.name}-stub"
        [version] = {match[1] for file in self.versions(kernel) if (match := STUB_VERSION.match(file))} or {None}
        if version is None:
            raise Skip("no package of Debian's, so no headers")
        headers = f"linux-headers-{version}"
        if not same_text(folder / "packages", headers):
            work = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(work, ignore_errors=True)
            # Its own suites alone: packages of several do not fit together.
            suites = [kernel.suite.removesuffix("-backports"), kernel.suite]
            archive = Archive(self.settings, dict.fromkeys(suites), name=f"apt-{kernel.suite}")
            files = archive.fetch_with_dependencies([headers, *STUB_TOOLS], kernel.suite, work)
            unpack(files, work / "root")
            shutil.rmtree(work / "cache")
            (work / "root/usr/bin/awk").symlink_to("gawk")
            # Only for type information, which needs one more tool.
            (work / "root/usr/src" / headers / "vmlinux").unlink(missing_ok=True)
            (work / "packages").write_text(headers)
            replace(work, folder)
        root = folder / "root"
        shutil.rmtree(root / "module", ignore_errors=True)
        shutil.copytree(FOLDER / "slash_stub", root / "module")
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", STUB_BUILD, "sh", root, headers]
        made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if made.returncode in NO_ROOT:
            said = made.stderr.strip().splitlines() or ["unshare has failed"]
            raise Skip(f"no private root for the compiler: {said[-1]}")
        if made.returncode != 0:
            raise Failed(f"slash_stub cannot be built for {kernel.name}:\n{made.stdout}{made.stderr}")
        return root / "module/slash_stub.ko"

    def _is_current(self, kernel):
        """False as well for a kernel that was fetched for other modules, or built with other options."""
        folder = self.folder(kernel)
        if not (folder / "vmlinuz").is_file():
            return False
        if kernel.is_built:
            return same_text(folder / "fragment", FRAGMENT.read_text())
        return same_text(folder / "wanted", wanted(all_modules()))

    def _build(self, kernel, new):
        """Builds the kernel whose source package was unpacked to `new`."""
        tools = [tool for tool in ("gcc", "make", "flex", "bison", "bc", "m4", "xz") if not shutil.which(tool)]
        if not Path("/usr/include/gelf.h").exists():
            tools.append("libelf-dev")
        if tools:
            missing = " ".join(tools)
            raise Skip(f"cannot build a kernel without {missing} (apt-get install {missing})")
        archive = next((new / "root/usr/src").glob("linux-source-*.tar.xz"), None)
        if archive is None:
            raise Skip("the package has no source")
        source = new / "source"
        source.mkdir()
        # Most of it is for other machines, and never looked at.
        excluded = [f"--exclude=*/{part}/*" for part in ("Documentation", "tools/testing", "tools/perf")]
        if subprocess.run(["tar", "xf", archive, "-C", source, "--strip-components=1", *excluded]).returncode != 0:
            raise Skip(f"cannot unpack {archive}")
        shutil.rmtree(new / "root")
        (source / "Documentation/Kconfig").touch()
        shutil.copy(FRAGMENT, source / "kernel/configs/dmalane.config")
        log = self.settings.cache / f"{kernel.name}.log"
        with log.open("w") as out:
            for targets in (["-s", "tinyconfig", "dmalane.config"], [f"-j{self.settings.jobs}", "bzImage"]):
                command = ["nice", "-n", "15", "make", "-C", str(source), *targets]
                if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode != 0:
                    raise Skip(f"the kernel cannot be built: {log}")
        config = (source / ".config").read_text()
        missing = missing_options(FRAGMENT.read_text(), config)
        if missing:
            raise Skip(f"this version has no {', '.join(missing)}: change {FRAGMENT.relative_to(ROOT)}")
        shutil.copy(source / "arch/x86/boot/bzImage", new / "vmlinuz")
        (new / "config").write_text(config)
        (new / "fragment").write_text(FRAGMENT.read_text())
        (new / "modules").mkdir()
        shutil.rmtree(source)


def same_text(file, text):
    return file.is_file() and file.read_text() == text


def wanted(modules):
    return "".join(f"{module}\n" for module in sorted(modules))


def missing_options(fragment, config):
    """The options of a configuration fragment that the configuration does not have: make leaves them out in silence."""
    have = set(config.splitlines())
    return [line for line in fragment.splitlines() if re.match("CONFIG_", line) and line not in have]


def take_image_and_modules(kernel, folder, modules):
    """Of the unpacked packages, keeps the image and, of some 4000 modules, those that are listed."""
    root = folder / "root"
    image = next((file for file in sorted(root.rglob("vmlinuz*")) if file.is_file() and not file.is_symlink()), None)
    if image is None:
        raise Skip(f"the packages of {kernel.name} have no kernel image")
    image.rename(folder / "vmlinuz")
    (folder / "modules").mkdir()
    files = {file.name: file for file in root.rglob("*.ko*")}
    for module in modules:
        unpacked = folder / "modules" / f"{module}.ko"
        for ending, unpack in UNPACK.items():
            if file := files.get(f"{module}.ko{ending}"):
                unpacked.write_bytes(unpack(file))
                break  # none found: built in, or not in this version
    (folder / "wanted").write_text(wanted(modules))
    shutil.rmtree(root)


def unpack_zstd(file):
    try:
        return subprocess.run(["zstd", "-qdc", file], check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skip(f"cannot unpack {file.name}: {error}") from None


UNPACK = {"": Path.read_bytes, ".xz": lambda file: lzma.decompress(file.read_bytes()), ".zst": unpack_zstd}
