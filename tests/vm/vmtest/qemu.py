"""The command lines of the guests, and running one to its end."""

import os
import signal
import subprocess
import time

from .settings import Failed

# Variables of tests, for guests too: the kernel gives its first process what it does not know itself.
PASSED_ON = " ".join(f"{name}={os.environ[name]}" for name in ["DMALANE_ROUNDS"] if name in os.environ)
# Where the tests' devices and disk are; see the protocol in report.py for the second serial port.
CONSOLE = "console.log"
TESTS = "tests.log"

# -icount: the guest's clock counts its instructions and jumps while it sleeps, so that the 100 ms of QEMU's edu device
# cost next to nothing and a time is the same every time.
ICOUNT = ["-icount", "shift=0,sleep=off"]
# For guests that measure a disk: the clock goes with this machine's while the guest waits, or hundreds of its seconds
# would pass until a request is answered.
WAITING = ["-icount", "shift=0,sleep=on"]
# Without fast `rep movsb`, with which kernel and libc move bytes one by one here, and clear pages so.
CPU = ["-cpu", "max,-erms"]
BARE = ["-nographic", "-no-reboot", "-nodefaults", "-monitor", "none"]
HUGE_2M = "hugepagesz=2M hugepages=64"
HUGE_1G = "hugepagesz=1G hugepages=1"
EDU = "edu,dma_mask=0xffffffffffff"
# Behind a bridge, so in an IOMMU group of its own.
EDU_BEHIND_BRIDGE = [
    "-device", "pcie-root-port,id=bridge1,chassis=1", "-device", "edu,bus=bridge1,dma_mask=0xffffffffffff",
]  # fmt: skip


# The IOMMU of the suites, with tables of three levels, and others by name.
INTEL, AMD = "intel-iommu,intremap=on", "amd-iommu,intremap=on"
IOMMUS = {"vtd48": f"{INTEL},aw-bits=48", "amd": AMD}
# Those of QEMU 11: tables that grow with the addresses, to six levels, and a processor's tables. Without `dma-remap`
# copies of a device do not arrive where its tables say.
NEWER_IOMMUS = {"amd64": f"{AMD},dma-remap=on", "vtd-first": f"{INTEL},scalable-mode=on,fsts=on"}


def x86(
    image, work, devices, memory="4G", iommu=INTEL, program=("qemu-system-x86_64",), icount=ICOUNT
):  # fmt: skip
    """A PC with an IOMMU, whose registers the driver's tests may read (`iomem`)."""
    return [
        *program, "-M", "q35,kernel-irqchip=split", "-accel", "tcg", *CPU, "-smp", "1", "-m", memory,
        *icount, *BARE, "-serial", f"file:{work}/{CONSOLE}", "-serial", f"file:{work}/{TESTS}",
        "-kernel", f"{image}", "-initrd", f"{work}/initramfs",
        "-append", f"console=ttyS0 quiet panic=-1 intel_iommu=on iomem=relaxed {HUGE_1G} {HUGE_2M} {PASSED_ON}",
        "-device", iommu, *devices,
    ]  # fmt: skip


def arm64(image, work, devices):
    """An arm64 machine with an SMMUv3. It has one serial port of its own, so that of the tests is a PCI device."""
    return [
        "qemu-system-aarch64", "-M", "virt,iommu=smmuv3,gic-version=3", "-cpu", "neoverse-n1", "-smp", "1", "-m", "4G",
        *ICOUNT, *BARE, "-serial", f"file:{work}/{CONSOLE}",
        "-chardev", f"file,id=tests,path={work}/{TESTS}", "-device", "pci-serial,chardev=tests",
        "-kernel", f"{image}", "-initrd", f"{work}/initramfs",
        "-append", f"console=ttyAMA0 quiet panic=-1 tests=ttyS0 iomem=relaxed {HUGE_1G} {HUGE_2M} {PASSED_ON}",
        *devices,
    ]  # fmt: skip


def served(program, image, work, socket):
    """A PC with a device that a process on this machine serves; `program` starts a QEMU that knows vfio-user.

    Without -icount: the card works in this machine's time, and the guest must not jump over what it waits for.
    """
    return [
        *program, "-accel", "tcg", *CPU, "-smp", "1", "-m", "2G",
        "-object", "memory-backend-memfd,id=ram,size=2G,share=on",
        "-machine", "q35,kernel-irqchip=split,memory-backend=ram", *BARE,
        "-serial", f"file:{work}/{CONSOLE}", "-serial", f"file:{work}/{TESTS}",
        "-kernel", f"{image}", "-initrd", f"{work}/initramfs",
        "-append", f"console=ttyS0 quiet panic=-1 intel_iommu=on {HUGE_2M}",
        "-device", "intel-iommu,intremap=on,caching-mode=on", "-device", EDU,
        "-device", f'{{"driver":"vfio-user-pci","socket":{{"type":"unix","path":"{socket}"}}}}',
    ]  # fmt: skip


def suite_devices(work):
    """The devices of the driver's tests: edu twice, a BAR of memory, a large BAR, a disk for direct I/O, and a device
    that shares its IOMMU group with one of the kernel's."""
    (work / "disk").write_bytes(b"".join(b"%d\n" % n for n in range(1_000_000, 2_000_000)))
    return [
        "-device", EDU, *EDU_BEHIND_BRIDGE,
        "-object", f"memory-backend-file,id=bar,size=1G,mem-path={work}/bar,share=on",
        "-device", "ivshmem-plain,memdev=bar", "-device", "pci-testdev,membar=32G",
        "-drive", f"if=none,id=disk,format=raw,file={work}/disk", "-device", "virtio-blk-pci,drive=disk",
        "-device", "pcie-pci-bridge,id=shared", "-device", "pci-testdev,bus=shared,addr=1",
        "-device", "virtio-rng-pci,bus=shared,addr=2",
    ]  # fmt: skip


class Guest:
    """A QEMU that runs until its time is over. It leaves its logs in `work`; `watch` is called as long as it runs."""

    def __init__(self, name, command, work, seconds, env=None, watch=lambda: None):
        self.name, self.command, self.work, self.env = name, command, work, os.environ | (env or {})
        self.seconds, self.watch, self.failure = seconds, watch, None

    def start(self):
        self.began = time.monotonic()
        with (self.work / "qemu.log").open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env
            )

    def is_running(self):
        """False at the end, with the reason in `failure` where it failed."""
        status = self.process.poll()
        if status is None:
            self.watch()
            if self.took() < self.seconds:
                return True
            stop(self.process)
            self.failure = Failed(f"qemu was stopped after {self.seconds} s")
        elif status != 0:
            self.failure = QemuFailed(status)
        return False

    def took(self):
        """Seconds since the start."""
        return time.monotonic() - self.began


def run(guests):
    """Runs guests to their ends, side by side, and yields each that has ended. They end when this function ends."""
    running = []
    try:
        for guest in guests:
            guest.start()
            running.append(guest)
        while running:
            for guest in list(running):
                if not guest.is_running():
                    running.remove(guest)
                    yield guest
            time.sleep(0.2)
    finally:
        for guest in running:
            stop(guest.process)


def boot(*arguments, **named):
    """Runs one guest to its end; raises where it failed."""
    for guest in run([Guest(*arguments, **named)]):
        if guest.failure is not None:
            raise guest.failure


class QemuFailed(Failed):
    """QEMU ended by itself, with an exit status or by a signal (negative)."""

    def __init__(self, status):
        super().__init__(
            f"qemu ended with status {status}" if status > 0 else f"qemu ended by {signal.Signals(-status).name}"
        )
        self.status = status


def stop(process):
    """Ends a process, however it takes it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
