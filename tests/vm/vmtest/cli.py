"""The commands of `scripts/vm`."""

import argparse
import platform
import shutil
import signal
import subprocess
import sys

from . import newer_qemu, report, served, suites, tables
from .kernels import Store, all_kernels
from .settings import Failed, Settings, Skip

SKIPPED = 77

COMMANDS = {
    "run": "boots kernels and runs the suites in them, each test by name (default: those of scripts/check)",
    "fetch": "only fetches kernels",
    "list": "prints the kernels of tests/vm/kernels",
    "iommufd": "builds a kernel with iommufd, once (6 minutes of a processor, 3 GB meanwhile), and runs the suites on "
    "both backends of VFIO",
    "iommus": "the driver's suite with QEMU's other IOMMUs: AMD's, and Intel's with tables of four levels; with a QEMU "
    "of Debian's sid also AMD's of 64 bits and Intel's with a processor's tables",
    "arm64": "the suites on arm64, with an SMMUv3 and pages of 4 and 16 KiB; cross-built (5 minutes)",
    "vfio-user": "the served card in a guest: `dmalane card serve` on this machine, a QEMU from 10.1 on out of "
    "Debian's sid in a folder of its own, and in the guest the driver's tests, `dmalane load --verify` with a real "
    "model file, and the card's process killed",
    "bar-map": "prints the table of docs/bench/bar-map.md: BARs of 1, 8 and 32 GiB, aligned in several ways "
    "(35 minutes)",
    "dma-map": "prints the table of docs/bench/dma-map.md: memory of each page size, mapped by type1 and by iommufd",
    "alloc-read": "prints a table of docs/bench/seeds.md: files read into udmabufs and dma-buf heaps",
}
# Which kernels of tests/vm/kernels a command takes where none is named.
DEFAULT_KERNELS = {"iommufd": "iommufd", "dma-map": "iommufd", "arm64": "arm64"}

EPILOG = """\
Kernels come from Debian's archive as this machine's apt knows it, into private folders: nothing is installed. They are
kept in $DMALANE_VM_CACHE (default target/vm). Exit status 77: nothing could be run, with the reason in the last line.

environment:
  DMALANE_VM_SECONDS=600  a guest that takes longer has failed
  DMALANE_VM_FILTER=      only tests whose name contains this
  DMALANE_VM_GIB="1 8 32", DMALANE_VM_ALIGN="auto 1GiB 2MiB 4KiB none": the rows of the table of bar-map
  DMALANE_VM_ROUNDS=10    how often each row maps and unmaps, or reads (alloc-read)
  DMALANE_VM_SIZES="524288 8388608"  the files of alloc-read, in bytes
  DMALANE_VM_JOBS=1       compilers at work on a kernel
  DMALANE_VM_MIRROR=      Debian's archive, where apt here knows none
  DMALANE_VM_PROFILES=    a folder for what `run` and `iommufd` count, with the environment of `cargo llvm-cov show-env`
"""


def parser():
    parser = argparse.ArgumentParser(
        prog="scripts/vm", description="Runs the project's tests on stock kernels under QEMU.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        if name != "list":
            command.add_argument("kernels", metavar="KERNEL", nargs="*", help="a name in tests/vm/kernels")
            command.add_argument("--refresh", action="store_true", help="look for newer packages")
    return parser


def chosen(command, names, kernels):
    """The kernels of a command line. One of another architecture than the command's is an error."""
    if not names:
        return [kernel for kernel in kernels if kernel.command == DEFAULT_KERNELS.get(command, "run")]
    by_name = {kernel.name: kernel for kernel in kernels}
    found = []
    for name in names:
        kernel = by_name.get(name)
        if kernel is None:
            raise ValueError(f"tests/vm/kernels has no {name}")
        if command != "fetch" and (kernel.arch == "arm64") != (command == "arm64"):
            raise ValueError(f"{name} is not for `scripts/vm {command}`")
        found.append(kernel)
    return found


def require_machine(command):
    """Skips where this machine cannot run the guests of a command."""
    if command == "arm64":
        if not shutil.which("qemu-system-aarch64"):
            raise Skip("no qemu-system-aarch64 (Debian: qemu-system-arm)")
        require_target(suites.ARM64)
        return
    if command not in ("fetch", "vfio-user") and not shutil.which("qemu-system-x86_64"):
        raise Skip("no qemu-system-x86_64 (Debian: qemu-system-x86)")
    if platform.machine() != "x86_64":
        raise Skip("the guests run the binaries of this machine, which is no x86-64")


def require_target(target):
    """Skips where Rust cannot build for a target; its linker comes with it."""

    def run(*command):
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)

    folder = run("rustc", "--print", "target-libdir", "--target", target)
    if folder.returncode == 0 and run("test", "-d", folder.stdout.strip()).returncode == 0:
        return
    if not shutil.which("rustup"):
        raise Skip(f"no Rust target {target}, and no rustup to fetch it with")
    if run("rustup", "target", "add", target).returncode != 0:
        raise Skip(f"rustup cannot fetch the target {target}")


def run_kernels(command, store, kernels):
    """Runs a command on kernels that are there; True where all of it passed."""
    match command:
        case "run" | "iommufd" | "arm64":
            return suites.run_suites(store, kernels)
        case "iommus":
            return all([suites.run_iommus(store, kernel) for kernel in kernels])
        case "vfio-user":
            return all([served.run(store, kernel) for kernel in kernels])
        case "bar-map" | "dma-map" | "alloc-read":
            measure = {"bar-map": suites.bar_map, "dma-map": suites.dma_map, "alloc-read": suites.alloc_read}[command]
            print("\n".join(tables.TABLES[command]([measure(store, kernel) for kernel in kernels])))
    return True


def execute(command, kernels, settings):
    """Runs a command on kernels; gives the exit status."""
    require_machine(command)
    store = Store(settings)
    if command == "vfio-user":
        print(f"== {newer_qemu.fetch(store)}")
    fetched, reasons = [], []
    for kernel in kernels:
        try:
            store.fetch(kernel)
        except Skip as reason:
            reasons.append(f"kernel {kernel.name}: {reason}")
            print("\n".join(report.ignored(f"kernel_{kernel.name}", reason)))
        else:
            fetched.append(kernel)
            print(f"== kernel {kernel.name}: {' '.join(store.versions(kernel))}")
    if not fetched:
        raise Skip("; ".join(reasons))
    try:
        return 0 if run_kernels(command, store, fetched) else 1
    except Failed as failure:
        print(failure)
        return 1


def main(arguments):
    sys.stdout.reconfigure(line_buffering=True)  # in step with what programs print themselves
    # As an exception, so that guests end with the script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    args = parser().parse_args(arguments)
    if args.command == "list":
        for kernel in all_kernels():
            print(kernel.name, kernel.command, kernel.suite, *kernel.packages)
        return 0
    try:
        kernels = chosen(args.command, args.kernels, all_kernels())
    except ValueError as error:
        print(f"scripts/vm: {error}", file=sys.stderr)
        return 2
    try:
        return execute(args.command, kernels, Settings.from_environment(refresh=args.refresh))
    except Skip as reason:
        print(f"SKIPPED: {reason}")
        return SKIPPED
    except KeyboardInterrupt:
        return 130
