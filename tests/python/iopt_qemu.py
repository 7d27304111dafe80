"""QEMU's IOMMUs, without a guest: the device `edu` does DMA through page tables built by `dmalane iopt build`.

Debian's QEMU has no `-accel qtest`. An idle processor and a virtual clock that jumps to its next timer serve as well:
QEMU does what is typed into its test port, and nothing else.
"""

import mmap
import os
import struct
import subprocess
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Callable

import numpy as np
from iopt_machines import Machine
from iopt_oracle import Difference, build
from iopt_spec import random_addresses, random_spec

BUFFER = 0x40000  # of the device, within its BAR


class Qemu:
    """A machine that stands still, with its memory mapped here too."""

    def __init__(self, program, args, ram_base, ram_bytes, halt, directory):
        self.ram_base = ram_base
        (directory / "halt.bin").write_bytes(halt)
        memory = os.memfd_create("ram")  # sparse
        os.ftruncate(memory, ram_bytes)
        self.ram = mmap.mmap(memory, ram_bytes)
        # It ends with this process, however that ends.
        command = ["setpriv", "--pdeathsig", "KILL", program]
        command += ["-display", "none", "-nodefaults", "-serial", "none", "-monitor", "none"]
        command += ["-accel", "tcg", "-icount", "shift=0,sleep=off", "-qtest", "stdio", "-qtest-log", "none"]
        command += ["-m", f"{ram_bytes >> 20}M"]
        path = f"/proc/{os.getpid()}/fd/{memory}"
        command += ["-object", f"memory-backend-file,id=ram,size={ram_bytes},mem-path={path},share=on"]
        command += [a.format(halt=directory / "halt.bin") for a in args]
        with (directory / "qemu.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1 << 16
            )
        self.log = directory / "qemu.log"
        self.ask("endianness")  # it is up
        os.close(memory)  # both have mapped it

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.ram.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def ask(self, *commands):
        """Gives the answers to commands of the test port."""
        try:
            self.process.stdin.write("".join(c + "\n" for c in commands))
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answers = []
        while len(answers) < len(commands):
            line = self.process.stdout.readline()
            assert line, f"QEMU ended: {self.log.read_text()[-2000:]}"
            if line.startswith("IRQ"):
                continue
            assert line.startswith("OK"), f"{commands}: {line}"
            answers.append(line.split()[-1])
        return answers

    def write32(self, at, value):
        self.ask(f"writel {at:#x} {value:#x}")

    def write64(self, at, value):
        self.ask(f"writeq {at:#x} {value:#x}")

    def read32(self, at):
        return int(self.ask(f"readl {at:#x}")[0], 16)

    def poke(self, at, data):
        """Into its memory, without asking it."""
        self.ram[at - self.ram_base : at - self.ram_base + len(data)] = data

    def peek(self, at, length=4):
        return self.ram[at - self.ram_base : at - self.ram_base + length]

    def plug_edu(self, config, bar):
        """Gives the device an address and lets it do DMA."""
        assert self.read32(config) == 0x11E8_1234, "the device edu is not there"
        self.write32(config + 0x10, bar)
        self.write32(config + 4, 6)
        self.edu = bar

    def forget(self):
        """Empties the translation cache, where that is needed."""

    def dma(self, memory, to_memory, length=4):
        """Lets the device copy between its buffer and an address that its IOMMU translates."""
        source, to = (BUFFER, memory) if to_memory else (memory, BUFFER)
        edu = self.edu
        self.ask(
            f"writeq {edu + 0x80:#x} {source:#x}", f"writeq {edu + 0x88:#x} {to:#x}",
            f"writeq {edu + 0x90:#x} {length}", f"writeq {edu + 0x98:#x} {3 if to_memory else 1}",
        )  # fmt: skip
        for _ in range(100_000):
            if not int(self.ask(f"readq {edu + 0x98:#x}")[0], 16) & 1:
                return
        raise AssertionError("the DMA does not end")


@dataclass(frozen=True)
class Iommu(Machine):
    """An IOMMU of QEMU: `start` takes registers, base, image and a directory, and gives a `Qemu` with `fault()`."""

    program: str = ""
    package: str = ""
    # Where the page tables go, and what is left of the memory behind them.
    tables: int = 0
    ram: tuple = ()
    # The fault record of a refused access, given whether the address is mapped, "read" or "write", and the address.
    refusal: Callable = None

    @property
    def outputs(self):
        """Where there is memory that the machine itself does not need."""
        return self.ram


# ---- SMMUv3 --------------------------------------------------------------------------------------------------------

RAM = 0x4000_0000
RAM_BYTES = 8 << 30
# The lowest 256 MiB: the idle loop, queues, stream table, context descriptor; page tables at 64 MiB.
STREAMS, CONTEXT, COMMANDS, EVENTS = RAM + 0x10_0000, RAM + 0x11_0000, RAM + 0x12_0000, RAM + 0x13_0000
TABLES = RAM + (64 << 20)
EVENTS_LOG2 = 7
SMMU, EDU_SLOT = 0x0905_0000, 1
FAULTS = {0x10: "translation", 0x11: "address size", 0x12: "access flag", 0x13: "permission"}
CONFIG, BAR = 0x40_1000_0000, 0x1000_0000


class Smmu(Qemu):
    """The SMMUv3 of the machine `virt`. Its fault records are read one by one."""

    def __init__(self, registers, base, image, directory):
        machine = ["-machine", "virt,iommu=smmuv3,memory-backend=ram", "-cpu", "cortex-a57"]
        machine += ["-device", "loader,file={halt},addr=0x40800000,cpu-num=0,force-raw=on"]
        machine += ["-device", f"edu,addr={EDU_SLOT:#x},dma_mask=0xffffffffffffffff"]
        halt = struct.pack("<II", 0xD503207F, 0x17FFFFFF)  # wfi; b .-4
        super().__init__("qemu-system-aarch64", machine, RAM, RAM_BYTES, halt, directory)
        self.poke(base, image)
        tcr = registers["TCR_EL1"]
        # Stream table entry: valid, stage 1 translates, stage 2 does not.
        self.poke(STREAMS + 64 * (EDU_SLOT << 3), struct.pack("<QQ", CONTEXT | 0b101 << 1 | 1, 0))
        # Context descriptor: TCR in its own order, TTB1 off, terminate and record faults (A, R), AA64.
        low = tcr & 0x3F | (tcr >> 14 & 3) << 6 | (tcr >> 8 & 0x3F) << 8 | 1 << 30 | 1 << 31
        high = tcr >> 32 & 7 | 1 << 9 | 1 << 13 | 1 << 14
        self.poke(CONTEXT, struct.pack("<IIQQQ", low, high, registers["TTBR0_EL1"], 0, registers["MAIR_EL1"]))
        self.write64(SMMU + 0x80, STREAMS)
        self.write32(SMMU + 0x88, 8)  # linear, 2^8 entries
        self.write64(SMMU + 0x90, COMMANDS | 4)
        self.write64(SMMU + 0xA0, EVENTS | EVENTS_LOG2)
        self.write32(SMMU + 0x20, 1 << 0 | 1 << 2 | 1 << 3)
        assert self.read32(SMMU + 0x24) == 0b1101
        self.consumed = 0
        self.plug_edu(CONFIG + (EDU_SLOT << 15), BAR)

    def fault(self):
        """Kind and address of the new fault records, or None. One access may leave the same record twice."""
        produced, wrap, found = self.read32(SMMU + 0x100A8), (2 << EVENTS_LOG2) - 1, set()
        while self.consumed != produced:
            record = self.peek(EVENTS + 32 * (self.consumed & (wrap >> 1)), 32)
            kind, address = record[0], struct.unpack_from("<Q", record, 16)[0]
            found.add((FAULTS.get(kind, kind), address))
            self.consumed = (self.consumed + 1) & wrap
            self.write32(SMMU + 0x100AC, self.consumed)
        assert len(found) <= 1, found
        return found.pop() if found else None


def smmu(name):
    # Addresses above 48 bits do not reach the SMMU: QEMU gives it a window of that size.
    return Iommu(
        name, Smmu, privileged=True, machine_bits=44, address_bits=48, tables=TABLES,
        program="qemu-system-aarch64", package="qemu-system-arm", ram=(RAM + (256 << 20), RAM + RAM_BYTES),
        refusal=lambda mapped, _, at: ("permission" if mapped else "translation", at),
    )  # fmt: skip


# ---- VT-d ----------------------------------------------------------------------------------------------------------

# Memory from 2 GiB on appears from 4 GiB on; that part is used.
HIGH, HIGH_BYTES, LOW_BYTES = 4 << 30, 6 << 30, 2 << 30
ROOTS, CONTEXTS, HIGH_TABLES = HIGH, HIGH + 0x1000, HIGH + (64 << 20)
VTD, PCI_BAR = 0xFED9_0000, 0xE000_0000


class Vtd(Qemu):
    """The intel-iommu of the machine `q35`, with second-stage tables of a given number of levels."""

    LEVELS = 4

    def __init__(self, registers, base, image, directory):
        self.start(["-device", f"intel-iommu,aw-bits={12 + 9 * self.LEVELS}"], directory)
        self.poke(base, image)
        self.poke(ROOTS, struct.pack("<QQ", CONTEXTS | 1, 0))
        # Present, requests translated by second-stage tables; address width; domain 1 is our business.
        low, high = (registers[f"context entry, bits {bits}"] for bits in ["63:0", "127:64"])
        self.poke(CONTEXTS + 16 * (EDU_SLOT << 3), struct.pack("<QQ", low, 1 << 8 | high))
        self.write64(VTD + 0x20, ROOTS)
        self.write32(VTD + 0x18, 1 << 30)  # take the root table pointer
        self.write32(VTD + 0x18, 1 << 31)  # translate
        assert self.read32(VTD + 0x1C) >> 30 == 3
        self.record = VTD + (self.read32(VTD + 8) >> 24 | (self.read32(VTD + 12) & 3) << 8) * 16
        self.invalidate = VTD + (self.read32(VTD + 0x10) >> 8 & 0x3FF) * 16 + 8
        self.plug_edu(EDU_SLOT << 11, PCI_BAR)

    def start(self, iommu, directory):
        machine = ["-machine", "q35,memory-backend=ram", "-bios", "{halt}"]
        machine += ["-device", f"edu,addr={EDU_SLOT:#x},dma_mask=0xffffffffffffffff", *iommu]
        halt = b"\xf4" * 0xFFF0 + b"\xfa\xf4\xeb\xfd".ljust(16)  # reset: cli; hlt; jmp hlt
        super().__init__("qemu-system-x86_64", machine, HIGH - LOW_BYTES, LOW_BYTES + HIGH_BYTES, halt, directory)

    def forget(self):
        # QEMU records no fault when a cached translation refuses.
        self.write64(self.invalidate, 1 << 63 | 1 << 60)

    def config32(self, at, value=None):
        self.ask(f"outl 0xcf8 {0x8000_0000 | at:#x}")
        return self.ask("inl 0xcfc" if value is None else f"outl 0xcfc {value:#x}")[0]

    def plug_edu(self, config, bar):
        assert int(self.config32(config), 16) == 0x11E8_1234, "the device edu is not there"
        self.config32(config + 0x10, bar)
        self.config32(config + 4, 6)
        self.edu = bar

    def fault(self):
        """Read or write and the page, of the fault record; or None."""
        high = self.read32(self.record + 12)
        if not high >> 31:
            return None
        answers = self.ask(f"readq {self.record:#x}", f"writel {self.record + 12:#x} {1 << 31:#x}")
        reason = high & 0xFF
        kind = {5: "write", 6: "read"}.get(reason, reason)
        assert (high >> 30 & 1) == (kind == "read")
        return kind, int(answers[0], 16)


class Vtd39(Vtd):
    """The same with three levels."""

    LEVELS = 3


class Amd(Vtd):
    """The amd-iommu of the machine `q35`. It leaves no record of most refusals."""

    BASE = 0xFED8_0000
    DEVICES, COMMANDS = HIGH, HIGH + 0x20_0000
    COMMANDS_LOG2 = 8

    def __init__(self, registers, base, image, directory):
        self.start(["-device", "amd-iommu"], directory)
        self.poke(base, image)
        entry = registers["device table entry, bits 63:0"]
        self.poke(self.DEVICES + 32 * (EDU_SLOT << 3), struct.pack("<4Q", entry, 1, 0, 0))  # domain 1
        # Invalidate everything, as often as there is room.
        self.poke(self.COMMANDS, struct.pack("<4I", 0, 8 << 28, 0, 0) * (1 << self.COMMANDS_LOG2))
        self.write64(self.BASE, self.DEVICES | 0x1FF)
        self.write64(self.BASE + 8, self.COMMANDS | self.COMMANDS_LOG2 << 56)
        self.write64(self.BASE + 0x18, 1 << 12 | 1)
        self.tail = 0
        self.plug_edu(EDU_SLOT << 11, PCI_BAR)

    def forget(self):
        # QEMU's cache takes addresses apart by their lowest 51 bits.
        self.tail = (self.tail + 16) % (16 << self.COMMANDS_LOG2)
        self.write64(self.BASE + 0x2008, self.tail)

    def fault(self):
        return None


def vtd(name, start, bits):
    return Iommu(
        name, start, machine_bits=39, address_bits=bits, cost=4, tables=HIGH_TABLES,
        program="qemu-system-x86_64", package="qemu-system-x86", ram=(HIGH + (256 << 20), HIGH + HIGH_BYTES),
        refusal=lambda _, kind, at: (kind, at >> 12 << 12),
    )  # fmt: skip


def amd(name):
    bits = {"3": 39, "4": 48, "5": 57, "6": 63}[name[0]]
    # It takes an address without its upper bits.
    return Iommu(
        f"amd-v1-{name}", Amd, machine_bits=39, address_bits=bits, cost=4, tables=HIGH_TABLES,
        program="qemu-system-x86_64", package="qemu-system-x86", ram=(HIGH + (256 << 20), HIGH + HIGH_BYTES),
        refusal=lambda *_: None,
    )  # fmt: skip


IOMMUS = [
    smmu("arm64-s1-4k"),
    smmu("arm64-s1-16k"),
    smmu("arm64-s1-64k"),
    vtd("vtd-second-39", Vtd39, 39),
    vtd("vtd-second-48", Vtd, 48),
    *map(amd, ["3level", "3level-groups", "4level", "4level-groups", "5level", "6level"]),
]


# ---- comparing -----------------------------------------------------------------------------------------------------


def compare(dmalane, iommu, count, seed, directory, per_image=10_000):
    """Reads and writes at `count` addresses by DMA. Gives what was counted."""
    tally = Counter()
    while tally["addresses"] < count:
        n, image = min(per_image, count - tally["addresses"]), tally["images"]
        rng = np.random.default_rng([seed, image, zlib.crc32(iommu.format.encode())])
        tally += compare_image(dmalane, iommu, rng, n, f"{iommu.format}, QEMU, seed {seed}, image {image}", directory)
    return tally


def compare_image(dmalane, iommu, rng, count, name, directory):
    spec = random_spec(rng, iommu)
    built, image = build(dmalane, iommu, spec, rng, iommu.tables, directory)
    registers = {r["name"]: int(r["value"], 16) for r in built["registers"]}
    at = random_addresses(rng, spec, iommu, count) & ~np.uint64(3)
    input_at, taken = iommu.input(at)
    mapped, to, which = spec.lookup(input_at)
    mapped &= taken
    # The device writes the bytes that it has read here, where they can be seen.
    va, pa, _, _ = next(m for m in spec.mappings if {"r", "w"} <= set(iommu.permits(m[3])))
    seen_va, seen_pa = int(iommu.address(np.array([va], np.uint64))[0]), pa
    tally = Counter({"images": 1, "addresses": count})

    def check(good, what):
        if not good:
            raise Difference(f"{name}: {what}")

    with iommu.start(registers, iommu.tables, image, directory) as qemu:

        def dma(*args):
            tally["DMAs"] += 1
            qemu.forget()
            qemu.dma(*args)
            return qemu.fault()

        for i, (at, mapped, to, access) in enumerate(zip(at.tolist(), mapped, to.tolist(), spec.access[which])):
            access = iommu.permits(access)
            read, written, other = (struct.pack("<I", 0x1000_0000 * k + i) for k in (1, 2, 3))
            if mapped:
                qemu.poke(to, read)
            fault = dma(at, False)
            if mapped and "r" in access:
                check(fault is None, f"read at {at:#x}: {fault}, expected -> {to:#x}")
                check(dma(seen_va, True) is None, "the result cannot be written")
                check(qemu.peek(seen_pa) == read, f"read at {at:#x}: not the bytes at {to:#x}")
            else:
                refused = iommu.refusal(mapped, "read", at)
                check(fault == refused, f"read at {at:#x}: {fault}, expected {refused}")
                qemu.poke(seen_pa, other)
                check(dma(seen_va, True) is None, "the result cannot be written")
                check(qemu.peek(seen_pa) == bytes(4), f"read at {at:#x}: refused, and yet something was read")
            qemu.poke(seen_pa, written)
            check(dma(seen_va, False) is None, "what is to be written cannot be read")
            if mapped:
                qemu.poke(to, other)
            fault = dma(at, True)
            if mapped and "w" in access:
                check(fault is None, f"write at {at:#x}: {fault}, expected -> {to:#x}")
                check(qemu.peek(to) == written, f"write at {at:#x}: not to {to:#x}")
            else:
                refused = iommu.refusal(mapped, "write", at)
                check(fault == refused, f"write at {at:#x}: {fault}, expected {refused}")
                check(not mapped or qemu.peek(to) == other, f"write at {at:#x}: refused, and yet done")
            tally["mapped"] += bool(mapped)
            tally["read-only"] += bool(mapped and "w" not in access)
    return tally
