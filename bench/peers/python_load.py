"""Two goals of the Python package that `dmalane compare` does not measure: a small file, and the memory of a stream.

python3 python_load.py small FILE     load_file of dmalane and of safetensors, by turns, from the page cache
python3 python_load.py stream FILE    what tensors() with memory_limit="256MiB" adds to the resident memory
"""

import statistics
import sys
import time

import dmalane

ROUNDS, CALLS = 11, 100


def small(path):
    import dmalane.torch
    import numpy
    import safetensors.numpy
    import safetensors.torch
    import torch

    def pages(tensors):
        """Touches every page, which is what brings a mapped file into memory."""
        for tensor in tensors.values():
            tensor.view(torch.uint8).view(-1)[::4096].sum()

    def every(tensors):
        """Reads every byte, as a user of the tensor does."""
        for tensor in tensors.values():
            flat = tensor.view(torch.uint8).view(-1) if isinstance(tensor, torch.Tensor) else tensor
            flat = flat.numpy() if isinstance(flat, torch.Tensor) else flat.reshape(-1).view(numpy.uint8)
            bytes(flat)

    def then(load, read=None):
        return lambda: read(load(path)) if read else load(path)

    cases = {
        "torch: dmalane": then(dmalane.torch.load_file),
        "torch: safetensors, pages touched": then(safetensors.torch.load_file, pages),
        "torch: dmalane, bytes read": then(dmalane.torch.load_file, every),
        "torch: safetensors, bytes read": then(safetensors.torch.load_file, every),
        "numpy: dmalane, bytes read": then(dmalane.load_file, every),
        "numpy: safetensors, bytes read": then(safetensors.numpy.load_file, every),
    }
    times = {name: [] for name in cases}
    for _ in range(ROUNDS + 1):
        for name, case in cases.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                case()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    for name, of in times.items():
        of = sorted(of[1:])  # the first round warms up
        print(f"{name:36} {statistics.median(of):7.0f} us  ({of[0]:.0f}..{of[-1]:.0f})")


def stream(path):
    def status(field):
        line = next(line for line in open("/proc/self/status") if line.startswith(field))
        return int(line.split()[1]) / 1024

    with dmalane.safe_open(path, framework="bytes", memory_limit="256MiB") as f:
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        before, begin, total = status("VmRSS"), time.perf_counter(), 0
        for _, tensor in f.tensors():
            total += tensor.nbytes
        seconds = time.perf_counter() - begin
    print(f"{total / 1e9:.2f} GB in {seconds:.2f} s, peak RSS {status('VmHWM') - before:.0f} MiB more than before")


{"small": small, "stream": stream}[sys.argv[1]](sys.argv[2])
