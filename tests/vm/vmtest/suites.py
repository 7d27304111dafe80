"""Which tests run in which guest, and the runs behind the commands."""

import json
import os
import subprocess

from . import initramfs, qemu, report
from .settings import ROOT, Failed

ARM64 = "aarch64-unknown-linux-musl"
LIBTEST = "--test-threads=1 --show-output"
# What this machine's processor takes for a table of `bar-map` is an hour.
BAR_MAP_SECONDS, DMA_MAP_SECONDS, SUITE_SECONDS = 7200, 3600, 420


def cargo(*arguments, env=None):
    """Runs cargo in the root of the project; gives what it prints."""
    done = subprocess.run(
        ["cargo", *arguments],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=os.environ | (env or {}),
    )  # fmt: skip
    if done.returncode != 0:
        raise Failed(f"cargo {' '.join(arguments)}: exit status {done.returncode}")
    return done.stdout


def executable(messages):
    """The last test binary in what `cargo test --message-format=json` prints; None where it built none."""
    found = None
    for line in messages.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("profile", {}).get("test"):
            found = message.get("executable") or found
    return found


def test_binary(package, *arguments, arch=None):
    """The path of the libtest binary of a package; cross-built and linked statically for another architecture."""
    command = ["test", "--locked", "--no-run", "--message-format=json", "--package", package, *arguments]
    env = {}
    if arch is not None:
        command += ["--target", ARM64]
        env = {
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER": "rust-lld",
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUSTFLAGS": "-C strip=debuginfo",
        }
    found = executable(cargo(*command, env=env))
    if found is None:
        raise Failed(f"cargo built no test of {package}")
    return found


def suite_lines(kernel, name_filter):
    """The lines of /suites: NAME STAGE PROGRAM ARGUMENTS; tests/vm/init knows the stages."""
    skipped = " ".join(f"--skip {module}::" for module in ("bare", "untyped", "child", "measure"))
    vfio = f"{LIBTEST} {skipped} {name_filter}"
    if kernel.is_built:
        # It has all that it has from the start, and both backends of VFIO.
        lines = [
            f"{backend} devices ../bin/env DMALANE_VFIO_WAY={backend} /tests/kernel {vfio}"
            for backend in ("iommufd", "type1")
        ]
    else:
        lines = [
            f"bare bare kernel {LIBTEST} bare::{name_filter}",
            f"untyped untyped kernel {LIBTEST} untyped::{name_filter}",
            f"vfio devices kernel {vfio}",
        ]
    return [
        *lines,
        f"unit devices unit {LIBTEST} {name_filter}",
        f"heaps devices mem {LIBTEST} heap::tests::{name_filter}",
    ]


def run_suites(store, kernel):
    """Boots the kernel and runs the suites of the driver and of the heaps; True where all passed."""
    settings = store.settings
    work = initramfs.fresh(settings.cache / f"run-{kernel.name}")
    programs = {
        "kernel": test_binary("dmalane-vfio", "--test", "kernel", arch=kernel.arch),
        "unit": test_binary("dmalane-vfio", "--lib", arch=kernel.arch),
        "mem": test_binary("dmalane-dma", "--lib", arch=kernel.arch),
    }
    initramfs.build(store, kernel, work, suite_lines(kernel, settings.filter), programs)
    machine = qemu.x86 if kernel.arch is None else qemu.arm64
    command = machine(store.folder(kernel) / "vmlinuz", work, qemu.suite_devices(work))
    passed = booted(command, work, settings.seconds or SUITE_SECONDS)
    passed &= report.show(kernel.name, work)
    for name in ("bar", "disk", "initramfs"):
        (work / name).unlink(missing_ok=True)
    return passed


def booted(command, work, seconds):
    """Runs a guest; says why and gives False where that failed. What the guest said may still be worth reading."""
    try:
        qemu.boot(command, work, seconds)
    except Failed as failure:
        print(failure)
        return False
    return True


def measured(store, kernel, name, work, devices, seconds):
    """Runs a guest that measures; gives the log that the tables of `name` are made from."""
    command = qemu.x86(store.folder(kernel) / "vmlinuz", work, devices)
    text = ""
    try:
        qemu.boot(command, work, store.settings.seconds or seconds)
        text = report.text_of(work / qemu.TESTS).replace("\r", "")
        if not report.read(kernel.name, text).passed:
            raise Failed("the guest did not run to its end")
    except Failed as failure:
        last = (text or report.text_of(work / qemu.CONSOLE)).splitlines()[-20:]
        raise Failed("\n".join([*last, str(failure)])) from None
    (work / "initramfs").unlink()
    log = store.settings.cache / f"{name}-{kernel.name}.log"
    log.write_text(text)
    return log


def bar_map_lines(settings, backends):
    """The lines of /suites for the table of BARs, and the devices that they name."""
    lines, devices = [], []
    for number, gib in enumerate(settings.gib, start=0x10):
        devices += ["-device", f"pci-testdev,membar={gib}G,addr={number:#x}"]
        command = f"devices dmalane bar-map -d vfio:0000:00:{number:x}.0"
        for backend in backends:
            for align in settings.align:
                rounds = f"--times {settings.rounds} --json"
                lines.append(f"{backend}-{gib}-{align} {command} --way {backend} --align {align} {rounds}")
        # Where mmap puts it differs from process to process.
        if gib == 1:
            again = [f"none-again-{i} {command} --way type1 --align none --json" for i in range(1, 6)]
    return lines + (again if 1 in settings.gib else []), devices


def bar_map(store, kernel):
    """Measures what mapping a BAR costs, for docs/bench/bar-map.md; gives the log."""
    settings = store.settings
    work = initramfs.fresh(settings.cache / f"bar-{kernel.name}")
    cargo("build", "--locked", "--release", "--package", "dmalane-cli")
    lines, devices = bar_map_lines(settings, ("type1", "iommufd") if kernel.is_built else ("type1",))
    initramfs.build(store, kernel, work, lines, {"dmalane": settings.target / "release/dmalane"})
    return measured(store, kernel, "bar-map", work, devices, BAR_MAP_SECONDS)


def dma_map(store, kernel):
    """Measures what mapping host memory for a device costs, for docs/bench/dma-map.md; gives the log."""
    if not kernel.is_built:
        raise Failed("only a kernel with iommufd can compare the two: scripts/vm dma-map")
    work = initramfs.fresh(store.settings.cache / f"dma-{kernel.name}")
    programs = {"kernel": test_binary("dmalane-vfio", "--test", "kernel", "--release")}
    lines = ["dma-map devices kernel --exact --nocapture measure::mapping_of_host_memory"]
    initramfs.build(store, kernel, work, lines, programs)
    devices = ["-device", qemu.EDU, *qemu.EDU_BEHIND_BRIDGE]
    return measured(store, kernel, "dma-map", work, devices, DMA_MAP_SECONDS)
