"""Which tests run in which guest, and the runs behind the commands."""

import os
import subprocess
from pathlib import Path

from . import initramfs, mesa, newer_qemu, profiles, qemu, report
from .binaries import cargo, test_binaries
from .settings import ROOT, Failed, Skip

ARM64 = "aarch64-unknown-linux-musl"
LIBTEST = "--test-threads=1 --show-output"
# Limits of a guest. The tables of `bar-map` took 35 minutes in all, on a machine that was not busy.
BAR_MAP_SECONDS, DMA_MAP_SECONDS, ALLOC_READ_SECONDS, SUITE_SECONDS = 7200, 3600, 7200, 600


def suite_programs(arch, settings):
    """The test binaries that the suites run, and the program that one of them runs; for another architecture
    cross-built and linked statically, without the program."""
    if arch is None:
        # What part "test" of scripts/check builds, so that nothing is built again: not --lib, which takes libraries
        # without tests too.
        options, units, env = ["--workspace", "--all-features"], "--tests", {}
    else:
        options, units = ["--package", "dmalane-vfio", "--package", "dmalane-dma", "--target", ARM64], "--lib"
        env = {
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER": "rust-lld",
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUSTFLAGS": "-C strip=debuginfo",
        }
    kernels, targets = {"kernel": ("dmalane-vfio", "kernel")}, {
        "unit": ("dmalane-vfio", "dmalane_vfio"),
        "mem": ("dmalane-dma", "dmalane_dma"),
    }
    if arch is None:
        kernels["slash"] = ("dmalane-slash", "kernel")
        targets["bar"] = ("dmalane-slash", "dmalane_slash")
        targets["vulkan"] = ("dmalane-vulkan", "dmalane_vulkan")
    commands = {"commands": ("dmalane-cli", "it")} if arch is None else {}
    programs = {}
    for found, selection in ((kernels, ["--test", "kernel"]), (targets, [units]), (commands, ["--test", "it"])):
        if not found:
            continue
        paths = test_binaries(*found.values(), options=[*selection, *options], env=env)
        programs |= zip(found, paths, strict=True)
    if arch is None:
        # With the examples, dependencies get the features that the tests need: nothing is built again. Job "coverage"
        # of scripts/nightly has built the tests alone.
        beside = "--tests" if settings.profiles else "--examples"
        cargo("build", "--locked", *options, beside, "--bin", "dmalane", "--bin", "dmalaned")
        programs |= {name: settings.target / "debug" / name for name in ("dmalane", "dmalaned")}
    return programs


def suite_lines(kernel, name_filter):
    """The lines of /suites: NAME STAGE PROGRAM ARGUMENTS; tests/vm/init knows the stages."""
    skipped = ["bare", "untyped", "child", "measure"]
    if kernel.is_built:
        skipped.append("page_tables")  # without /dev/mem
    vfio = " ".join([LIBTEST, *(f"--skip {module}::" for module in skipped), name_filter])
    if kernel.is_built:
        # It has all that it has from the start, and both backends of VFIO.
        lines = [
            f"{backend} devices ../bin/env DMALANE_VFIO_BACKEND={backend} /tests/kernel {vfio}"
            for backend in ("iommufd", "type1")
        ]
    else:
        lines = [
            f"bare bare kernel {LIBTEST} bare::{name_filter}",
            f"untyped untyped kernel {LIBTEST} untyped::{name_filter}",
            f"vfio devices kernel {vfio}",
        ]
    # On this machine's architecture they have nothing more to say than outside.
    elsewhere = "" if kernel.arch else "--skip iova:: --skip bar::tests::words"
    return [
        *lines,
        f"unit devices unit {LIBTEST} {elsewhere} {name_filter}",
        f"heaps devices mem {LIBTEST} heap::tests::{name_filter}",
    ]


def daemon_lines(name_filter):
    """The lines of /suites for the daemon's memory in control groups of version 2, which few machines of tests have."""
    test = "dmalaned_memory::memory_attacks_in_control_groups_of_version_2"
    if name_filter and name_filter not in test:
        return []
    # A guest has one processor, which is emulated.
    rounds = 5 if os.environ.get("DMALANE_LONG") else 2
    env = f"../bin/env DMALANE_TEST_DMALANED=/tests/dmalaned DMALANE_MEMORY_ROUNDS={rounds}"
    return [f"daemon devices {env} /tests/commands {LIBTEST} --exact {test}"]


def vulkan_lines(name_filter):
    """The lines of /suites for dma-bufs through Vulkan: a guest has them, and a GPU, so no test may be skipped."""
    start = mesa.GUEST.format(
        variables="DMALANE_NEED_GPU=1 DMALANE_NEED_DMA_BUF=1 DMALANE_TEST_DMALANED=/tests/dmalaned"
    )
    tests = f"dma_buf::{name_filter}" if name_filter else "dma_buf:: the_layers_are_heard a_flat_gpu_takes_the_suite"
    lines = [f"vulkan devices {start} /tests/vulkan {LIBTEST} {tests}"]
    if not name_filter:
        read = "read /mesa/libstdc++.so.6 -q --dma-buf"
        for heap in ("memfd", "dma-heap"):
            lines.append(f"read-{heap} devices {start} /tests/dmalane {read} --heap {heap}")
    kept = "keep::a_model_is_kept_in_memory_of_a_gpu_of_vulkan"
    if name_filter in kept:
        lines.append(f"vulkan-kept devices {start} /tests/commands {LIBTEST} --exact {kept}")
    return lines


def run_suites(store, kernels):
    """Boots kernels of one architecture side by side, and runs the suites of the driver and of the heaps in them.

    True where all passed.
    """
    settings = store.settings
    programs = suite_programs(kernels[0].arch, settings)
    vulkan, extra = [], []
    if "vulkan" in programs:
        try:
            folder, version = mesa.fetch(settings)
            vulkan, extra = vulkan_lines(settings.filter), mesa.guest_files(folder)
            print(f"== Mesa {version}")
        except Skip as reason:
            print("\n".join(report.ignored("vulkan_dma_bufs", reason)))
    guests = []
    for kernel in kernels:
        work = initramfs.fresh(settings.cache / f"run-{kernel.name}")
        lines, stub = suite_lines(kernel, settings.filter), None
        if "slash" in programs:
            lines.append(f"bar devices bar {LIBTEST} bar::tests::{settings.filter}")
            try:
                stub = store.stub(kernel)
                lines.append(f"slash devices slash {LIBTEST} {settings.filter}")
            except Skip as reason:
                print("\n".join(report.ignored(f"slash_stub_{kernel.name}", reason)))
        if "dmalaned" in programs:
            lines += daemon_lines(settings.filter)
        lines += vulkan
        if settings.profiles:
            lines = profiles.lines(lines)
        initramfs.build(store, kernel, work, lines, programs, extra, stub)
        machine = qemu.x86 if kernel.arch is None else qemu.arm64
        command = machine(store.folder(kernel) / "vmlinuz", work, qemu.suite_devices(work))
        guests.append(qemu.Guest(kernel.name, command, work, settings.seconds or SUITE_SECONDS))
    return passed_in(guests, settings.profiles)


def run_iommus(store, kernel):
    """Runs the driver's suite with each of QEMU's other IOMMUs; True where all passed."""
    settings = store.settings
    if kernel.is_built:
        raise Failed(f"{kernel.name} does not show its memory: scripts/vm iommus 7.2")
    options = ["--workspace", "--all-features", "--test", "kernel"]
    [binary] = test_binaries(("dmalane-vfio", "kernel"), options=options)
    guests = []

    def add(name, iommu, env=None, **options):
        work = initramfs.fresh(settings.cache / f"{name}-{kernel.name}")
        initramfs.build(store, kernel, work, [iommu_line(kernel, settings.filter, iommu)], {"kernel": binary})
        image, devices = store.folder(kernel) / "vmlinuz", qemu.suite_devices(work)
        command = qemu.x86(image, work, devices, iommu=iommu, **options)
        guests.append(qemu.Guest(f"{kernel.name}-{name}", command, work, settings.seconds or SUITE_SECONDS, env))

    for name, iommu in qemu.IOMMUS.items():
        add(name, iommu)
    try:
        print(f"== {newer_qemu.fetch(store)}")
    except Skip as reason:
        print("\n".join(report.ignored("iommus_of_a_newer_qemu", reason)))
    else:
        program, env = newer_qemu.program(settings.cache / "qemu")
        for name, iommu in qemu.NEWER_IOMMUS.items():
            add(name, iommu, env, program=program)
    return passed_in(guests)


def iommu_line(kernel, name_filter, iommu):
    """The line of /suites for the driver with one of QEMU's other IOMMUs."""
    [line] = [line for line in suite_lines(kernel, name_filter) if line.startswith("vfio ")]
    # QEMU's amd-iommu does not report what it stops.
    return f"{line} --skip dma_after_unmap" if iommu.startswith("amd-iommu") else line


def passed_in(guests, counts=None):
    """Runs guests side by side, and prints what they said; True where all passed. `counts` as for `report.show`."""
    passed = True
    for guest in qemu.run(guests):
        print(f"== kernel {guest.name}: {guest.took():.0f} s")
        if guest.failure is not None:
            print(guest.failure)
            passed = False
        # Its output may be worth reading all the same.
        passed &= report.show(guest.name, guest.work, counts)
        for file in ("bar", "disk", "initramfs"):
            (guest.work / file).unlink(missing_ok=True)
    return passed


def measured(store, kernel, name, work, devices, seconds, **options):
    """Runs a guest that measures; gives the log that the tables of `name` are made from."""
    command = qemu.x86(store.folder(kernel) / "vmlinuz", work, devices, **options)
    text = ""
    try:
        qemu.boot(kernel.name, command, work, store.settings.seconds or seconds)
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
                lines.append(f"{backend}-{gib}-{align} {command} --backend {backend} --align {align} {rounds}")
        # Where mmap puts it differs from process to process.
        if gib == 1:
            again = [f"none-again-{i} {command} --backend type1 --align none --json" for i in range(1, 6)]
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
    options = ["--package", "dmalane-vfio", "--test", "kernel", "--release"]
    [binary] = test_binaries(("dmalane-vfio", "kernel"), options=options)
    lines = ["dma-map devices kernel --exact --nocapture measure::mapping_of_host_memory"]
    initramfs.build(store, kernel, work, lines, {"kernel": binary})
    devices = ["-device", qemu.EDU, *qemu.EDU_BEHIND_BRIDGE]
    return measured(store, kernel, "dma-map", work, devices, DMA_MAP_SECONDS)


def alloc_read_lines(settings):
    """The lines of /suites for the table of files read into new memory, and the files that they need."""
    options = f"--cold --folder /disk --json --rounds {settings.rounds} --seconds 100000"

    def of_size(size):
        # Of large files without direct sendfile, which takes seventy times as many instructions as others.
        rows = f"normal,{'buffered' if size > 64 << 20 else 'sendfile'},udmabuf,dma-buf"
        return f"alloc-read-{size} devices bench alloc-read --sizes {size} --only {rows} {options}"

    lines = [
        "folder devices ../bin/mkdir /disk",
        "disk devices ../bin/mount -t ext4 /dev/vda /disk",
        # A udmabuf has at most 64 MiB otherwise.
        "limit devices ../bin/cp /limit /sys/module/udmabuf/parameters/size_limit_mb",
        *map(of_size, settings.sizes),
    ]
    return lines, [("limit", 0o644, b"65536\n")]


def alloc_read(store, kernel):
    """Measures reads into udmabufs and memory of a dma-buf heap, for docs/bench/seeds.md; gives the log."""
    settings = store.settings
    work = initramfs.fresh(settings.cache / f"read-{kernel.name}")
    cargo("build", "--locked", "--release", "--manifest-path", "bench/Cargo.toml")
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "bench/target")
    lines, extra = alloc_read_lines(settings)
    initramfs.build(store, kernel, work, lines, {"bench": target / "release/dmalane-bench"}, extra)
    disk = work / "disk"
    made = ["mke2fs", "-q", "-F", "-t", "ext4", disk, f"{max(settings.sizes) // 1024 + (256 << 10)}k"]
    if subprocess.run(made, stdin=subprocess.DEVNULL).returncode != 0:
        raise Failed("mke2fs cannot make a disk for the guest")
    devices = ["-drive", f"if=none,id=disk,format=raw,file={disk}", "-device", "virtio-blk-pci,drive=disk"]
    try:
        # For the largest file four times: kept, in its buffer, and what is touched before a row twice.
        options = {"memory": "12G", "icount": qemu.WAITING}
        return measured(store, kernel, "alloc-read", work, devices, ALLOC_READ_SECONDS, **options)
    finally:
        disk.unlink(missing_ok=True)
