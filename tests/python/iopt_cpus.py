"""Processors of QEMU 7.2, which know formats that Unicorn (QEMU 5.0) does not: a program of some thirty instructions
runs on each, tries the addresses that lie in its memory and writes down what its MMU says.

Arm's processor is asked by its instructions for that (AT, then PAR_EL1), which tell where an address leads; they have
no form for fetching. RISC-V has none: there the program reads, writes and jumps, and notes which trap follows. The
addresses lead where there is no memory, so that nothing is changed; a fault of the MMU has another number than a
missing memory. Where an address leads is asked of QEMU's monitor.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import struct
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
from iopt_machines import ARM64, ARM64_S1, ARM64_S2, RISCV, Machine
from iopt_qemu import Qemu

# Seconds until a program that does not answer has failed.
TIMEOUT = 60


@dataclass(frozen=True)
class Cpu(Machine):
    """A processor of QEMU."""

    program: str = ""
    package: str = ""
    # Output addresses below this may be memory or devices of the machine.
    outputs_from: int = 0
    # In its memory.
    tables: range = range(0)

    @property
    def outputs(self):
        return self.outputs_from, 1 << self.output_bits

    def table_base(self, rng):
        return int(rng.integers(self.tables.start, self.tables.stop)) // self.root_align * self.root_align

    @contextlib.contextmanager
    def walker(self, registers, base, image, _directory):
        machine = running(self.start)
        machine.prepare(self.format, registers, base, image)
        try:
            yield machine
        finally:
            if machine.process.poll() is None:
                machine.sleep()


@functools.cache
def running(kind):
    """The one machine of this kind; it is stopped when this process ends."""
    directory = tempfile.TemporaryDirectory(prefix="dmalane-cpu-")
    machine = kind(Path(directory.name))
    # Unlike `atexit`, this is also done at the end of a worker process.
    Finalize(None, machine.close, exitpriority=2)
    Finalize(None, directory.cleanup, exitpriority=1)
    return machine


class Program(Qemu):
    """A machine whose processor runs a program of ours while it is awake."""

    # Where the program finds what it shall do; behind it the addresses, and there the results go.
    MAILBOX = ADDRESSES = RESULTS = 0
    MOST = 1 << 20

    def sleep(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def run(self, words, addresses, result_bytes):
        """The results of the program for these addresses; `words` follow their number in the mailbox."""
        assert len(addresses) <= self.MOST
        self.poke(self.ADDRESSES, addresses.astype("<u8").tobytes())
        self.poke(self.MAILBOX + 8, struct.pack(f"<{1 + len(words)}Q", len(addresses), *words))
        self.poke(self.MAILBOX, struct.pack("<Q", 1))
        self.wake()
        end = time.monotonic() + TIMEOUT
        while self.peek(self.MAILBOX, 8) != bytes(8):
            assert self.process.poll() is None, f"QEMU ended: {self.log.read_text()[-2000:]}"
            assert time.monotonic() < end, "the program does not answer"
            time.sleep(0.0005)
        return self.peek(self.RESULTS, len(addresses) * result_bytes)


# ---- Arm -----------------------------------------------------------------------------------------------------------

ARM_RAM, ARM_BYTES = 0x4000_0000, 1 << 30
ARM_START = ARM_RAM + (8 << 20)


def system(read, op0, op1, crn, crm, op2, register):
    """MRS, MSR or SYS."""
    return 0xD500_0000 | read << 21 | op0 << 19 | op1 << 16 | crn << 12 | crm << 8 | op2 << 5 | register


def write_register(name, register):
    crn, crm, op0, op1, op2 = ARM64[name]
    return system(0, op0, op1, crn, crm, op2, register)


ISB, DSB = 0xD503_3FDF, 0xD503_3F9F
TLBI_ALLE1 = system(0, 1, 4, 8, 7, 4, 31)
# As EL0, through both stages, of which one is on.
AT_S12E0R, AT_S12E0W = (system(0, 1, 4, 7, 8, op2, 6) for op2 in (6, 7))
READ_PAR, WRITE_PAR = (system(read, 3, 0, 7, 4, 0, 7) for read in (1, 0))
READ_ELR, WRITE_ELR = (system(read, 3, 4, 4, 0, 1, 2) for read in (1, 0))
WRITE_VBAR = system(0, 3, 4, 12, 0, 0, 2)


class Arm(Program):
    """`-cpu max`, at EL2."""

    MAILBOX, ADDRESSES, RESULTS = ARM_RAM + (9 << 20), ARM_RAM + (16 << 20), ARM_RAM + (32 << 20)
    # In the order of the mailbox.
    REGISTERS = ("MAIR_EL1", "TCR_EL1", "TTBR0_EL1", "VTCR_EL2", "VTTBR_EL2", "HCR_EL2", "SCTLR_EL1")

    def __init__(self, directory):
        machine = ["-machine", "virt,virtualization=on,memory-backend=ram", "-cpu", "max"]
        machine += ["-device", f"loader,file={{halt}},addr={ARM_START:#x},cpu-num=0,force-raw=on"]
        code = self.code()
        super().__init__(
            "qemu-system-aarch64", machine, ARM_RAM, ARM_BYTES, struct.pack(f"<{len(code)}I", *code), directory
        )

    def code(self):
        load = lambda register, offset: 0xF940_0000 | offset // 8 << 10 | register  # noqa: E731  ldr x?, [x0, #offset]
        branch = lambda by: 0x1400_0000 | by & 0x3FF_FFFF  # noqa: E731
        if_zero = lambda register, by: 0xB400_0000 | (by & 0x7_FFFF) << 5 | register  # noqa: E731
        constant = lambda register, high: 0xD2A0_0000 | high >> 16 << 5 | register  # noqa: E731  movz, lsl 16
        ask = [READ_PAR, 0xF800_84A7]  # str x7, [x5], #8
        setup = [constant(4, self.ADDRESSES), constant(5, self.RESULTS), load(3, 8)]
        for i, name in enumerate(self.REGISTERS):
            setup += [load(2, 16 + 8 * i), write_register(name, 2)]
        setup += [DSB, TLBI_ALLE1, DSB, ISB]
        each = [0xF840_8486, AT_S12E0R, ISB, *ask, AT_S12E0W, ISB, *ask, 0xD100_0463]  # ldr x6, [x4], #8; sub x3, x3, 1
        loop = [if_zero(3, len(each) + 2), *each, branch(-len(each) - 1)]
        done = [DSB, 0xF900_001F]  # str xzr, [x0]
        wait = [load(1, 0), if_zero(1, -1)]
        body = [*setup, *loop, *done]
        start = [constant(0, self.MAILBOX), constant(2, ARM_START), WRITE_VBAR]
        main = [*start, *wait, *body, branch(-len(body) - len(wait))]
        # A table where no memory is makes AT itself fail. Vectors begin at multiples of 0x80; this one is 0x200.
        failed = [0x9280_0007, WRITE_PAR, READ_ELR, 0x9100_1042, WRITE_ELR, 0xD69F_03E0]  # mov x7, -1; add 4; eret
        to_main = branch((0x280 - 0) // 4)
        return [to_main, *[0] * (0x200 // 4 - 1), *failed, *[0] * (0x80 // 4 - len(failed)), *main]

    def prepare(self, name, registers, base, image):
        self.poke(base, image)
        known = dict.fromkeys(self.REGISTERS, 0) | {"HCR_EL2": 1 << 31}
        if name == "armv7-lpae-s1":
            # EL1 in AArch32; its registers are the lower halves of these.
            mair = registers["MAIR0"] | registers.get("MAIR1", 0) << 32
            known |= {"HCR_EL2": 0, "SCTLR_EL1": 1, "TCR_EL1": registers["TTBCR"], "MAIR_EL1": mair}
            known |= {"TTBR0_EL1": registers["TTBR0"]}
        elif name == "armv7-lpae-s2":
            # VTCR has its size as 4 bits with a sign, VTCR_EL2 as 6 without, and a size of output addresses.
            control = registers["VTCR"] & ~0x1F | 64 - 40 | 0b010 << 16
            known |= {"HCR_EL2": 1 << 31 | 1, "VTTBR_EL2": registers["VTTBR"], "VTCR_EL2": control}
        elif "VTCR_EL2" in registers:
            known |= registers | {"HCR_EL2": 1 << 31 | 1}
        else:
            known |= registers | {"SCTLR_EL1": 1}
        assert set(known) == set(self.REGISTERS), known
        self.words, self.asked = [known[name] for name in self.REGISTERS], None

    def translate(self, letter, addresses):
        if self.asked is not addresses:
            self.asked = addresses
            self.results = np.frombuffer(self.run(self.words, addresses, 16), "<u8").reshape(-1, 2)
        par = self.results[:, "rw".index(letter)]
        lost = par == ~np.uint64(0)
        assert not lost.any(), f"a table is where no memory is, for {addresses[lost][0]:#x} and {lost.sum() - 1} more"
        page = np.uint64(0xFFF)
        return par & np.uint64(1) != 0, par & np.uint64(0xF_FFFF_FFFF_F000) | addresses & page


def arm_cpu(name, flips, **more):
    # QEMU takes a page at the first two levels of 52 bits, where the architecture has tables alone.
    flips = tuple(bit for bit in flips if bit != 1)
    return Cpu(
        name, Arm, flips=flips, kinds=("r", "w"), root_align=1 << 18,
        program="qemu-system-aarch64", package="qemu-system-arm",
        tables=range(ARM_RAM + (64 << 20), ARM_RAM + ARM_BYTES // 2), **more,
    )  # fmt: skip


# ---- RISC-V --------------------------------------------------------------------------------------------------------

RISCV_RAM, RISCV_BYTES = 0x8000_0000, 1 << 30

# Registers by their numbers.
ZERO, T0, T1, CAUSE, RETURN = 0, 5, 6, 7, 9
MAIL, FROM, TO, LEFT, MPRV, MPP, IDLE = 8, 10, 11, 18, 19, 20, 21
MSTATUS, MTVEC, MEPC, MCAUSE, SATP, PMPCFG0, PMPADDR0 = 0x300, 0x305, 0x341, 0x342, 0x180, 0x3A0, 0x3B0


def load(width, to, base, offset):
    return offset << 20 | base << 15 | width << 12 | to << 7 | 0x03


def store(width, source, base, offset):
    return offset >> 5 << 25 | source << 20 | base << 15 | width << 12 | (offset & 31) << 7 | 0x23


def add(to, base, value):
    return (value & 0xFFF) << 20 | base << 15 | to << 7 | 0x13


def shift_left(to, by):
    return by << 20 | to << 15 | 1 << 12 | to << 7 | 0x13


def control(number, what, source):
    """CSRRW (1), CSRRS (2) or CSRRC (3), without the old value."""
    return number << 20 | source << 15 | what << 12 | 0x73


def read_control(number, to):
    return number << 20 | 2 << 12 | to << 7 | 0x73


def behind(to, instructions):
    """The address `instructions` instructions behind this pair of them."""
    return [to << 7 | 0x17, add(to, to, 4 * instructions + 8)]  # auipc to, 0


def branch_if_zero(register, by):
    at = 4 * by
    bits = (at >> 12 & 1) << 31 | (at >> 5 & 0x3F) << 25 | (at >> 1 & 0xF) << 8 | (at >> 11 & 1) << 7
    return bits | register << 15 | 0x63


def jump(by):
    at = 4 * by
    return (at >> 20 & 1) << 31 | (at >> 1 & 0x3FF) << 21 | (at >> 11 & 1) << 20 | (at >> 12 & 0xFF) << 12 | 0x6F


class Riscv(Program):
    """A processor with Svnapot and Svpbmt, whose accesses are those of a user."""

    MAILBOX, ADDRESSES, RESULTS = (RISCV_RAM + (n << 24) for n in (1, 2, 3))
    BYTE, DOUBLE = 0, 3
    # Read, written, fetched: the trap for a page that is missing or does not permit it. Others say that no memory is
    # there, or nothing that could be executed.
    REFUSED = {"r": 13, "w": 15, "x": 12}
    ALLOWED = {"r": (0, 5), "w": (0, 7), "x": (1, 2)}

    def __init__(self, directory):
        machine = ["-machine", "virt,memory-backend=ram", "-cpu", "rv64,svnapot=true,svpbmt=true", "-bios", "none"]
        machine += ["-device", f"loader,file={{halt}},addr={RISCV_RAM:#x},force-raw=on"]
        control = directory / "qmp"
        machine += ["-qmp", f"unix:{control},server=on,wait=off"]
        # QEMU's TLB lets data accesses of users pass in the page in which the program runs: let that be one that is
        # near no edge of a mapping.
        distance = 0x5A << 12
        code = struct.pack("<I", jump(distance // 4)).ljust(distance, b"\0")
        code += b"".join(struct.pack("<I", word) for word in self.code())
        super().__init__("qemu-system-riscv64", machine, RISCV_RAM, RISCV_BYTES, code, directory)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(control))
        self.monitor = connection.makefile("rw")
        self.monitor.readline()
        self.command("qmp_capabilities")

    def command(self, name, **arguments):
        return self.commands((name, arguments))[0]

    def commands(self, *all_of_them):
        for name, arguments in all_of_them:
            self.monitor.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
        self.monitor.flush()
        answers = []
        while len(answers) < len(all_of_them):
            answer = json.loads(self.monitor.readline())
            assert "error" not in answer, answer
            if "return" in answer:
                answers.append(answer["return"])
        return answers

    def code(self):
        constant = lambda register, at: [add(register, ZERO, at >> 24), shift_left(register, 24)]  # noqa: E731
        read_mail = lambda register, n: load(self.DOUBLE, register, MAIL, 8 * n)  # noqa: E731
        # A trap arrives here: notes its number and goes where RETURN says, still in machine mode.
        trap = [read_control(MCAUSE, CAUSE), RETURN << 15 | 0x67]
        setup = [
            *behind(T0, 1), jump(len(trap) + 1), *trap, control(MTVEC, 1, T0),
            # A reset keeps most of the state. Physical memory is not protected.
            control(MSTATUS, 1, ZERO),
            add(T0, ZERO, -1), control(PMPADDR0, 1, T0), add(T0, ZERO, 0x1F), control(PMPCFG0, 1, T0),
            *constant(MAIL, self.MAILBOX), *constant(FROM, self.ADDRESSES), *constant(TO, self.RESULTS),
        ]  # fmt: skip
        wait = [read_mail(T0, 0), branch_if_zero(T0, -1)]
        given = [
            read_mail(LEFT, 1), read_mail(T0, 2), control(SATP, 1, T0), 0x1200_0073,  # sfence.vma
            read_mail(MPRV, 3), read_mail(MPP, 4), read_mail(IDLE, 5),
        ]  # fmt: skip

        def attempt(n, body):
            # As a user: MPP = 0. Data accesses are such only while MPRV is set.
            begin, end = [control(MSTATUS, 3, MPP)], [control(MSTATUS, 3, MPRV), store(self.BYTE, CAUSE, TO, n)]
            body = [*begin, add(CAUSE, ZERO, 0), *body]
            return [*behind(RETURN, len(body)), *body, *end]

        each = [
            load(self.DOUBLE, T1, FROM, 0),
            *attempt(0, [control(MSTATUS, 2, MPRV), load(self.BYTE, T0, T1, 0)]),
            *attempt(1, [control(MSTATUS, 2, MPRV), store(self.BYTE, ZERO, T1, 0)]),
            *attempt(2, [control(MEPC, 1, T1), 0x3020_0073]),  # mret
            add(FROM, FROM, 8), add(TO, TO, 4), add(LEFT, LEFT, -1),
        ]  # fmt: skip
        loop = [branch_if_zero(LEFT, len(each) + 2), *each, jump(-len(each) - 1)]
        # From now on the monitor translates as this state says, and nothing can be loaded any more.
        done = [store(self.DOUBLE, ZERO, MAIL, 0), control(MSTATUS, 1, IDLE), jump(0)]
        return [*setup, *wait, *given, *loop, *done]

    def prepare(self, _name, registers, base, image):
        self.wake()
        self.poke(self.MAILBOX, bytes(8))
        self.command("system_reset")
        self.poke(base, image)
        # For the monitor: as the kernel, which may read what users may, and executable pages too.
        mprv, mpp, kernel, user_too, executable_too = 1 << 17, 3 << 11, 1 << 11, 1 << 18, 1 << 19
        self.words, self.asked = [registers["satp"], mprv, mpp, mprv | kernel | user_too | executable_too], None

    def wait_until_idle(self):
        """The program says that it is done before the state of which the monitor is asked: there it could not."""
        end = time.monotonic() + TIMEOUT
        while True:
            says = self.command("human-monitor-command", **{"command-line": "info registers"})
            (status,) = [int(line.split()[1], 16) for line in says.splitlines() if line.split()[:1] == ["mstatus"]]
            if status & self.words[3] == self.words[3]:
                return
            assert time.monotonic() < end, "the program does not end"

    def translate(self, letter, addresses):
        if self.asked is not addresses:
            causes = np.frombuffer(self.run(self.words, addresses, 4), np.uint8).reshape(-1, 4)
            self.wait_until_idle()
            asked = [("human-monitor-command", {"command-line": f"gva2gpa {at:#x}"}) for at in addresses.tolist()]
            says = [answer.split() for answer in self.commands(*asked)]
            to = [int(words[1], 16) if words[0] == "gpa:" else 0 for words in says]
            self.asked, self.causes, self.to = addresses, causes, np.array(to, np.uint64)
        cause = self.causes[:, "rwx".index(letter)]
        refused = cause == self.REFUSED[letter]
        assert (refused | np.isin(cause, self.ALLOWED[letter])).all(), f"traps {set(cause.tolist())} for {letter}"
        return refused, self.to


def riscv_cpu(name):
    return Cpu(
        f"riscv-{name}", Riscv, signed=True, cost=4, program="qemu-system-riscv64", package="qemu-system-misc",
        flips=RISCV,
        # Above what the machine has.
        tables=range(RISCV_RAM + (64 << 20), RISCV_RAM + RISCV_BYTES // 2), outputs_from=1 << 40,
    )  # fmt: skip


CPUS = [
    *(arm_cpu(f"arm64-s1-{name}", ARM64_S1) for name in [
        "4k-52", "4k-dirty", "16k-52", "16k-52-contiguous", "64k-52", "64k-48-52-contiguous-dirty",
    ]),
    *(arm_cpu(f"arm64-s2-{name}", ARM64_S2) for name in [
        "4k", "4k-52", "4k-52-contiguous", "4k-40-contiguous-dirty", "16k", "64k", "64k-52", "64k-48-52-contiguous",
    ]),
    arm_cpu("armv7-lpae-s1", ARM64_S1, address_bits=32),
    arm_cpu("armv7-lpae-s2", ARM64_S2),
    *map(riscv_cpu, ["sv39-napot", "sv48-napot", "sv48-pbmt", "sv57-napot"]),
]  # fmt: skip
