"""Reference for `dmalane compare`: --with 'direct reads=python3 bench/peers/direct_read.py'.

Direct reads of 2 MiB by 8 threads into huge pages that are there before the clock starts: what the disk can do, without
the memory that a loader has to get. It is memory that a driver can pin, but no loader: nobody parses anything.
"""

import hashlib
import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

BLOCK, THREADS = 2 << 20, 8
FILES = sys.argv[1:]


def read(file, view, size):
    def one(at):
        return os.preadv(file, [view[at : at + BLOCK]], at)

    with ThreadPoolExecutor(THREADS) as pool:
        if sum(pool.map(one, range(0, size, BLOCK))) != size:
            raise SystemExit("a read was short")


memory, files = [], []
for path in FILES:
    size = os.path.getsize(path)
    there = mmap.mmap(-1, -(-size // BLOCK) * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    there.madvise(mmap.MADV_HUGEPAGE)
    there[::4096] = bytes(len(there) // 4096)
    memory.append((there, size))
    files.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
begin, cpu = time.perf_counter(), time.process_time()
for file, (there, size) in zip(files, memory):
    read(file, memoryview(there), size)
seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
result = {"seconds": seconds, "cpu_s": cpu, "memory": "memory that was there", "dma_ready": True,
          "peak_rss_bytes": sum(size for _, size in memory)}  # fmt: skip
if os.environ.get("DMALANE_COMPARE_HASH") == "1":
    digest = hashlib.sha256()
    for path, (there, size) in zip(FILES, memory):
        start = int.from_bytes(there[:8], "little") + 8 if path.endswith(".safetensors") else 0
        digest.update(memoryview(there)[start:size])
    result["sha256"] = digest.hexdigest()
print(json.dumps(result))
