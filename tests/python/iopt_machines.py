"""The MMUs of Unicorn, one descriptor for each page-table format that it can walk.

Unicorn is GPL-2.0: a tool of the tests, no part of the product.
"""

import contextlib
import ctypes
from dataclasses import dataclass, replace
from typing import Callable

import numpy as np
import unicorn
from unicorn import Uc
from unicorn import arm64_const as arm64
from unicorn import arm_const as arm
from unicorn import riscv_const as riscv
from unicorn import x86_const as x86
from unicorn.unicorn_py3.unicorn import uclib

# uc_vmem_translate(engine, address, protection, result) has no method of its own in Python.
translate = uclib.uc_vmem_translate
translate.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint64)]
translate.restype = ctypes.c_int

# letter of an access -> protection asked for, error when it is refused (be it no mapping or no permission)
KINDS = {
    "r": (unicorn.UC_PROT_READ, unicorn.UC_ERR_READ_PROT),
    "w": (unicorn.UC_PROT_WRITE, unicorn.UC_ERR_WRITE_PROT),
    "x": (unicorn.UC_PROT_EXEC, unicorn.UC_ERR_FETCH_PROT),
}


class UnicornWalker:
    """Asks an engine for the addresses one by one."""

    def __init__(self, uc):
        self.uc = uc

    def translate(self, letter, addresses):
        """Whether accesses of this kind are refused, and where the others lead."""
        protection, refused = KINDS[letter]
        out = ctypes.c_uint64()
        reference, handle = ctypes.byref(out), self.uc._uch
        answers, errors = np.empty(len(addresses), np.uint64), np.empty(len(addresses), np.int32)
        for i, address in enumerate(addresses.tolist()):
            errors[i] = translate(handle, address, protection, reference)
            answers[i] = out.value
        assert np.isin(errors, [0, refused]).all(), f"errors {set(errors.tolist())} for {letter}"
        return errors != 0, answers


@dataclass(frozen=True)
class Machine:
    """How Unicorn walks one format."""

    format: str
    # Takes the registers that `iopt build` gives, by name, and the address and bytes of the image.
    start: Callable
    # The program's answers about the format; see `of`.
    # Logarithms of the page sizes.
    leaves: tuple = ()
    input_bits: int = 0
    output_bits: int = 64
    # Rights that the format can express.
    accesses: tuple = ()
    # Output bits that the machine has; the format may have more.
    machine_bits: int = 64
    # The MMU's space has two halves: an address whose highest bit is set has all bits above it set as well.
    signed: bool = False
    # Bits of an address as the MMU takes it.
    address_bits: int = 64
    # Accesses: reading, writing, fetching.
    kinds: tuple = tuple(KINDS)
    # Its accesses are privileged: they reach the pages that others do not.
    privileged: bool = False
    # It checks permissions. (The rules of AGX are not those of the MMU that stands in for it.)
    checks: bool = True
    # At least the size of the root table.
    root_align: int = 1 << 16
    # Below this the tables are.
    table_bits: int = 36
    # Bits that the test of foreign tables flips.
    flips: tuple = ()
    # Bytes of an entry.
    entry_bytes: int = 8
    # How many times as long as the fastest it takes.
    cost: int = 1
    # Where Unicorn is known to differ from the architecture.
    differs: str = ""

    def of(self, formats):
        """The same with what `dmalane iopt formats` says of the format."""
        said = formats[self.format]
        return replace(
            self,
            leaves=tuple(size.bit_length() - 1 for size in said["page_bytes"]),
            input_bits=said["input_bits"],
            output_bits=min(said["output_bits"], self.machine_bits),
            accesses=tuple(access.replace("-", "") for access in said["access"]),
        )

    def permits(self, access):
        """The letters that the MMU permits for an access."""
        letters, *words = access.split(",")
        if not self.checks:
            return "r"
        return letters if self.privileged or "privileged" not in words else ""

    @property
    def outputs(self):
        """The first output address that a specification may have, and the end."""
        return 0, 1 << self.output_bits

    def address(self, at):
        """The accesses of the MMU to reach these input addresses of the format."""
        if not self.signed:
            return at
        upper = np.uint64((1 << 64) - (1 << self.input_bits))
        return np.where(at >> np.uint64(self.input_bits - 1) == 0, at, at | upper)

    def table_base(self, rng):
        """Where an image goes."""
        return int(rng.integers(1, 1 << self.table_bits)) // self.root_align * self.root_align

    def walker(self, registers, base, image, _directory):
        """The machine for this image, for use in `with`."""
        return contextlib.nullcontext(UnicornWalker(self.start(registers, base, image)))

    def input(self, address):
        """The input address of the format for each address, and whether the MMU takes that address at all."""
        at = address & np.uint64((1 << self.input_bits) - 1)
        return at, self.address(at) == address


def engine(arch, mode, model, base, image):
    """A machine with the image in its memory."""
    uc = Uc(arch, mode)
    if model is not None:
        uc.ctl_set_cpu_model(model)
    uc.mem_map(base, (len(image) + 0xFFFF) // 0x10000 * 0x10000)
    uc.mem_write(base, image)
    return uc


# crn, crm, op0, op1, op2
ARM64 = {
    "SCR_EL3": (1, 1, 3, 6, 0),
    "HCR_EL2": (1, 1, 3, 4, 0),
    "SCTLR_EL1": (1, 0, 3, 0, 0),
    "TTBR0_EL1": (2, 0, 3, 0, 0),
    "TCR_EL1": (2, 0, 3, 0, 2),
    "MAIR_EL1": (10, 2, 3, 0, 0),
    "VTTBR_EL2": (2, 1, 3, 4, 0),
    "VTCR_EL2": (2, 1, 3, 4, 2),
}


def arm64_engine(base, image):
    uc = engine(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM, arm64.UC_CPU_ARM64_MAX, base, image)

    def write(name, value):
        uc.reg_write(arm64.UC_ARM64_REG_CP_REG, (*ARM64[name], value))

    # Non-secure, and EL2 and EL1 in AArch64: without these EL1 would walk as AArch32, and say nothing of it.
    write("SCR_EL3", 0x401)
    write("HCR_EL2", 1 << 31)
    return uc, write


def arm64_stage1(registers, base, image):
    uc, write = arm64_engine(base, image)
    # As EL0, like the transactions of a device: EL1 may not execute what EL0 may write. Unicorn takes note of the level
    # only when a system register is written after it.
    uc.reg_write(arm64.UC_ARM64_REG_PSTATE, 0)
    for name, value in registers.items():
        write(name, value)
    write("SCTLR_EL1", uc.reg_read(arm64.UC_ARM64_REG_CP_REG, ARM64["SCTLR_EL1"]) | 1)
    return uc


def agx(registers, base, image):
    """As stage 1 with 16 KiB granules and 39 bits, for privileged software: geometry and addresses are the same."""
    uc, write = arm64_engine(base, image)
    write("TTBR0_EL1", registers["TTBR"] & ~1)
    write("TCR_EL1", 25 | 0b01 << 8 | 0b01 << 10 | 0b11 << 12 | 0b10 << 14 | 1 << 23 | 0b101 << 32 | 1 << 41)
    write("MAIR_EL1", 0xFF_FFFF)
    write("SCTLR_EL1", uc.reg_read(arm64.UC_ARM64_REG_CP_REG, ARM64["SCTLR_EL1"]) | 1)
    return uc


def arm64_stage2(registers, base, image):
    uc, write = arm64_engine(base, image)
    uc.reg_write(arm64.UC_ARM64_REG_PSTATE, 0)
    for name, value in registers.items():
        write(name, value)
    write("HCR_EL2", 1 << 31 | 1)
    # Stage 1 stays off; the write makes Unicorn look at all of the above.
    write("SCTLR_EL1", uc.reg_read(arm64.UC_ARM64_REG_CP_REG, ARM64["SCTLR_EL1"]) & ~1)
    return uc


# coprocessor, 64 bits, secure, crn, crm, opc1, opc2
ARM = {
    "SCTLR": (15, 0, 0, 1, 0, 0, 0),
    "TTBR0": (15, 0, 0, 2, 0, 0, 0),
    "TTBCR": (15, 0, 0, 2, 0, 0, 2),
    "DACR": (15, 0, 0, 3, 0, 0, 0),
}


def arm_short(registers, base, image):
    uc = engine(unicorn.UC_ARCH_ARM, unicorn.UC_MODE_ARM, arm.UC_CPU_ARM_CORTEX_A15, base, image)
    # User mode, as AArch64 above.
    uc.reg_write(arm.UC_ARM_REG_CPSR, 0x10)
    for name, value in registers.items():
        uc.reg_write(arm.UC_ARM_REG_CP_REG, (*ARM[name], value))
    control = uc.reg_read(arm.UC_ARM_REG_CP_REG, ARM["SCTLR"]) | 1
    uc.reg_write(arm.UC_ARM_REG_CP_REG, (*ARM["SCTLR"], control))
    return uc


def riscv64(registers, base, image):
    uc = engine(unicorn.UC_ARCH_RISCV, unicorn.UC_MODE_RISCV64, None, base, image)
    uc.reg_write(riscv.UC_RISCV_REG_SATP, registers["satp"])
    uc.reg_write(riscv.UC_RISCV_REG_MSTATUS, 0)
    uc.reg_write(riscv.UC_RISCV_REG_PRIV, 0)  # user mode; last, since satp cannot be written there
    return uc


def x86_64(registers, base, image):
    uc = engine(unicorn.UC_ARCH_X86, unicorn.UC_MODE_64, None, base, image)
    # 1 << 10: long mode is active, which follows from the rest.
    uc.reg_write(x86.UC_X86_REG_MSR, (0xC000_0080, registers["IA32_EFER"] | 1 << 10))
    uc.reg_write(x86.UC_X86_REG_CR3, registers["CR3"])
    uc.reg_write(x86.UC_X86_REG_CR4, registers["CR4"])
    uc.reg_write(x86.UC_X86_REG_CR0, 1 << 31 | 1 << 16 | 1)
    return uc


def stage2(name):
    # The processor has 44 bits of physical address, and takes no more of intermediate address.
    return Machine(name, arm64_stage2, machine_bits=44, root_align=1 << 18, flips=ARM64_S2)


# Bits of entries that other software may write otherwise than dmalane does: valid, rights, memory types, limits of
# tables.
ARM64_S1 = (0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 51, 53, 54, 55, 59, 60, 61, 62)
ARM64_S2 = (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 53, 54, 55)
X86 = (0, 1, 2, 3, 4, 5, 6, 7, 8, 63)
ARM_SHORT = (0, 1, 2, 3, 4, 9, 10, 11, 15, 16, 17)
# Unicorn sets A and D itself, and does not mind U in a pointer.
RISCV = (0, 1, 2, 3, 5, 8, 9)

# Formats that Unicorn can walk, a line each. Geometry and rights are those that the program tells.
MACHINES = [
    Machine("arm64-s1-4k", arm64_stage1, flips=ARM64_S1),
    Machine("arm64-s1-4k-39", arm64_stage1, flips=ARM64_S1),
    Machine("arm64-s1-16k", arm64_stage1, flips=ARM64_S1),
    Machine("arm64-s1-64k", arm64_stage1, flips=ARM64_S1),
    Machine("arm64-s1-4k-contiguous", arm64_stage1, flips=ARM64_S1),
    Machine("arm64-s1-16k-contiguous", arm64_stage1, flips=ARM64_S1),
    Machine("arm64-s1-64k-contiguous", arm64_stage1, flips=ARM64_S1),
    stage2("arm64-s2-4k-40"),
    stage2("arm64-s2-16k-40"),
    stage2("arm64-s2-64k-40"),
    stage2("arm64-s2-4k-40-contiguous"),
    stage2("arm64-s2-16k-40-contiguous"),
    stage2("arm64-s2-64k-40-contiguous"),
    Machine("armv7-short", arm_short, table_bits=32, address_bits=32, flips=ARM_SHORT, entry_bytes=4),
    Machine("x86-64-4level", x86_64, machine_bits=40, signed=True, privileged=True, flips=X86),
    Machine("x86-64-5level", x86_64, machine_bits=40, signed=True, privileged=True, flips=X86),
    Machine("riscv-sv39", riscv64, signed=True, flips=RISCV),
    Machine("riscv-sv48", riscv64, signed=True, flips=RISCV),
    Machine("riscv-sv57", riscv64, signed=True, flips=RISCV),
    Machine(
        "agx-uat", agx, machine_bits=48, kinds=("r",), checks=False,
        differs="permissions follow rules of the GPU and are not compared",
    ),
]  # fmt: skip
