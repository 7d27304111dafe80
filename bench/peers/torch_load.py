"""Loads a safetensors file onto an NVIDIA GPU by dmalane and by torch, in turns, from the page cache and the disk.

python3 torch_load.py DMALANE [FILE]: the program to measure; a file of 4 GiB is made in /tmp unless there is one. Needs
torch, safetensors, a GPU, and root to drop the page cache.
"""

import json
import os
import statistics
import subprocess
import sys
import time

DMALANE = sys.argv[1]
FILE = sys.argv[2] if len(sys.argv) > 2 else "/tmp/dmalane-peers.safetensors"
ROUNDS = 5

MAKE = """
import sys, torch, safetensors.torch
g = torch.Generator().manual_seed(1)
tensor = lambda: torch.randint(-(2**31), 2**31 - 1, (32 << 20,), dtype=torch.int32, generator=g)
safetensors.torch.save_file({f"layer.{i}.w": tensor() for i in range(32)}, sys.argv[1])
"""

LOAD_FILE = """
import sys, time, torch, safetensors.torch
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
begin = time.perf_counter()
tensors = safetensors.torch.load_file(sys.argv[1], device="cuda:0"); torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""

PINNED = """
import os, sys, time, torch
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
begin = time.perf_counter()
size, chunk = os.path.getsize(sys.argv[1]), 64 << 20
there = torch.empty(size, dtype=torch.uint8, device="cuda")
ring = [torch.empty(chunk, dtype=torch.uint8).pin_memory() for _ in range(3)]
events, at, turn = [None] * 3, 0, 0
with open(sys.argv[1], "rb", buffering=0) as file:
    while at < size:
        here, event = ring[turn % 3], events[turn % 3]
        if event: event.synchronize()
        n = file.readinto(memoryview(here.numpy())[: min(chunk, size - at)])
        there[at : at + n].copy_(here[:n], non_blocking=True)
        events[turn % 3] = torch.cuda.Event(); events[turn % 3].record()
        at, turn = at + n, turn + 1
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def dmalane(*options):
    done = subprocess.run([DMALANE, "load", FILE, "-d", "cuda:0", "--json", *options], capture_output=True, check=True)
    return json.loads(done.stdout)["wall_s"]


def python(program):
    done = subprocess.run([sys.executable, "-c", program, FILE], capture_output=True, check=True)
    return float(done.stdout.split()[-1])


def dd():
    begin = time.perf_counter()
    subprocess.run(["dd", f"if={FILE}", "of=/dev/null", "bs=16M", "iflag=direct"], capture_output=True, check=True)
    return time.perf_counter() - begin


LOADERS = {
    "dmalane load": dmalane,
    "dmalane load --direct": lambda: dmalane("--direct"),
    "safetensors.torch.load_file": lambda: python(LOAD_FILE),
    "torch, three pinned buffers": lambda: python(PINNED),
}


def main():
    if not os.path.exists(FILE):
        subprocess.run([sys.executable, "-c", MAKE, FILE], check=True)
    # Read back and compared once, before any time counts.
    dmalane("--verify")
    for state in ["cached", "cold"]:
        loaders = LOADERS | ({"dd, reading alone": dd} if state == "cold" else {})
        times = {name: [] for name in loaders}
        for _ in range(ROUNDS):
            for name, load in loaders.items():
                if state == "cold":
                    os.sync()
                    with open("/proc/sys/vm/drop_caches", "w") as drop:
                        drop.write("3")
                else:
                    subprocess.run(["dd", f"if={FILE}", "of=/dev/null", "bs=16M"], capture_output=True, check=True)
                times[name].append(load())
        for name, seconds in times.items():
            median = statistics.median(seconds)
            rate = os.path.getsize(FILE) / median / 1e9
            print(f"{state:6} {name:28} {median:.3f} s ({min(seconds):.3f}-{max(seconds):.3f}) {rate:.2f} GB/s")


if __name__ == "__main__":
    main()
