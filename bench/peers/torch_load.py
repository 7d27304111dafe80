"""Loads a safetensors file onto a GPU by dmalane and by other loaders of PyTorch, in turns, cached and cold.

python3 torch_load.py FILE DEVICE: dmalane's package and PyTorch with this device (cuda:0) are needed; loaders that are
not installed are left out. All run in this process. Before each load PyTorch gives back the memory that it keeps, and
the first tensors of each are compared with those of the first loader. Rates are printed with their ratios to the link,
from memory that PyTorch has pinned, and to the fastest peer; a loader that ends the process leaves the lines before it.
"""

import gc
import json
import os
import statistics
import sys
import time

import torch
from dmalane.compare import loaders

PATH, NAME = sys.argv[1:3]
THERE = torch.device(NAME)
SIZE = os.path.getsize(PATH)
BLOCK = min(1 << 30, SIZE)
ROUNDS = {"cached": 5, "cold": 3}


def timed(run):
    """Seconds until the device has done it, and what was returned."""
    torch.cuda.synchronize(THERE)
    began = time.perf_counter()
    kept = run()
    torch.cuda.synchronize(THERE)
    return time.perf_counter() - began, kept


def say(text):
    print(text, flush=True)


def copied(what, run):
    """The rate of a copy of a block, GB/s."""
    rate = BLOCK / statistics.median(timed(run)[0] for _ in range(5)) / 1e9
    say(f"{what}: {rate:.1f} GB/s")
    return rate


def allocated(what, sizes):
    torch.cuda.empty_cache()
    seconds, _ = timed(lambda: [torch.empty(size, dtype=torch.uint8, device=THERE) for size in sizes])
    say(f"memory for {what}: {seconds * 1e3:.1f} ms")


def ring():
    """The least that a loader could do: bytes through three pinned buffers into one allocation."""
    buffers = [torch.empty(64 << 20, dtype=torch.uint8).pin_memory() for _ in range(3)]
    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}

    def load(path):
        events, at, turn = [None] * 3, 0, 0
        with open(path, "rb", buffering=0) as file:
            there = torch.empty(os.path.getsize(path), dtype=torch.uint8, device=THERE)
            while True:
                here, event = buffers[turn % 3], events[turn % 3]
                if event:
                    event.synchronize()
                if not (n := file.readinto(here.numpy())):
                    break
                there[at : at + n].copy_(here[:n], non_blocking=True)
                events[turn % 3] = torch.cuda.Event()
                events[turn % 3].record()
                at, turn = at + n, turn + 1
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        found = {}
        for name, of in header.items():
            if name != "__metadata__":
                start, stop = (8 + length + one for one in of["data_offsets"])
                # A copy on the device where the file's place does not suit the type.
                part = there[start:stop] if start % 16 == 0 else there[start:stop].clone()
                found[name] = part.view(types[of["dtype"]]).view(of["shape"])
        return found

    return torch.__version__, load


def evict():
    with open(PATH, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main():
    plain = torch.empty(BLOCK, dtype=torch.uint8).fill_(1)
    pinned, there = plain.pin_memory(), torch.empty(BLOCK, dtype=torch.uint8, device=THERE)
    copied("copy from memory that is not registered", lambda: there.copy_(plain))
    link = copied("copy from pinned memory", lambda: there.copy_(pinned, non_blocking=True))
    del plain, pinned, there
    allocated("tensors of 2 MiB", [2 << 20] * (SIZE >> 21))
    allocated("as many bytes in one", [SIZE])
    ready, right = {}, None
    for name, prepare in {**loaders.onto(NAME), "three pinned buffers": ring}.items():
        try:
            version, load = prepare()
            tensors = load(PATH)
        except Exception as error:  # noqa: BLE001: whatever a loader fails with is the result
            say(f"{name}: skipped: {type(error).__name__}: {error}")
            continue
        right = right or {name: tensor.clone() for name, tensor in tensors.items()}
        same = tensors.keys() == right.keys() and all(torch.equal(tensors[name], right[name]) for name in right)
        if not same:
            sys.exit(f"{name}: other tensors than those of {next(iter(ready))}")
        ready[name] = version, load
        del tensors
    for state, rounds in ROUNDS.items():
        times = {name: [] for name in ready}
        for _ in range(rounds):
            for name, (_, load) in ready.items():
                gc.collect()
                torch.cuda.empty_cache()
                if state == "cold":
                    evict()
                else:
                    with open(PATH, "rb", buffering=0) as file:
                        while file.read(64 << 20):
                            pass
                times[name].append(timed(lambda load=load: load(PATH))[0])
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        peer = min((median for name, median in medians.items() if not name.startswith("dmalane")), default=None)
        for name, seconds in times.items():
            rate, least, most = (SIZE / one / 1e9 for one in (medians[name], max(seconds), min(seconds)))
            beside = f", {peer / medians[name]:.2f} of the fastest peer" if peer else ""
            say(f"{state}: {name} {ready[name][0]}: {rate:.1f} GB/s ({least:.1f} to {most:.1f}), "
                f"{rate / link:.2f} of the link{beside}")  # fmt: skip


if __name__ == "__main__":
    main()
