"""Lets every machine walk the tables of every format for long; scripts/oracle calls this."""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import iopt_cpus
import iopt_oracle
import iopt_qemu
from harness import Dmalane
from iopt_machines import MACHINES

# A DMA takes many times as long as a translation, and a processor of QEMU some times as long as one of Unicorn.
QEMU_SHARE, CPU_SHARE = 200, 20


def unicorn_says(tally):
    return (
        f"{tally['addresses']} addresses in {tally['images']} images, {tally['translated']} translations and "
        f"{tally['faulted']} faults ({tally['by permission']} by permission) alike"
    )


def qemu_says(tally):
    return (
        f"{tally['addresses']} addresses in {tally['images']} images, {tally['mapped']} of them mapped "
        f"({tally['read-only']} read-only), {tally['DMAs']} DMAs alike"
    )


# module to compare with, its machines, share of the addresses, how to tell
SIDES = {
    "unicorn": (iopt_oracle, MACHINES, 1, unicorn_says),
    "cpu": (iopt_oracle, iopt_cpus.CPUS, CPU_SHARE, unicorn_says),
    "qemu": (iopt_qemu, iopt_qemu.IOMMUS, QEMU_SHARE, qemu_says),
}


def shard(binary, side, index, count, seed):
    """One part, in a process of its own."""
    module, machines = SIDES[side][:2]
    with tempfile.TemporaryDirectory() as directory:
        dmalane = Dmalane(binary)
        machine = machines[index].of(iopt_oracle.formats(dmalane))
        return module.compare(dmalane, machine, count, seed, Path(directory), per_image=max(count // 20, 500))


def unusable(machine):
    program = getattr(machine, "program", None)
    if program is not None and shutil.which(program) is None:
        return f"skipped: no {program} (Debian: apt-get install {machine.package})"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary", help="the program dmalane")
    parser.add_argument("count", type=int, help="addresses for each format")
    parser.add_argument("--format", action="append", help="only this one; may be repeated")
    parser.add_argument("--side", action="append", choices=list(SIDES), help="only this kind of machine")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    failed = False
    print(f"seed {args.seed}", flush=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        for side, (_, machines, share, says) in SIDES.items():
            for index, machine in enumerate(machines):
                if (args.format and machine.format not in args.format) or (args.side and side not in args.side):
                    continue
                name = f"{machine.format}, {side}"
                if why := unusable(machine):
                    print(f"{name}: {why}", flush=True)
                    continue
                began, count = time.monotonic(), -(-args.count // share)
                parts = [count // args.jobs + (i < count % args.jobs) for i in range(args.jobs)]
                seeds = range(args.seed * args.jobs, (args.seed + 1) * args.jobs)
                jobs = [pool.submit(shard, args.binary, side, index, n, s) for n, s in zip(parts, seeds)]
                try:
                    tally = sum((job.result() for job in jobs), Counter())
                except iopt_oracle.Difference as e:
                    failed = True
                    print(f"{name}: DIFFERENT: {e}", flush=True)
                    continue
                differs = f"; known to differ: {machine.differs}" if machine.differs else ""
                print(f"{name}: {says(tally)}, {time.monotonic() - began:.0f} s{differs}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
