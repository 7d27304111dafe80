"""fio as a loader for `dmalane compare`: --with 'fio=python3 bench/peers/fio_read.py', and `direct` for direct I/O.

It keeps nothing: its buffers are overwritten. By default 1 MiB at a time by pread through the page cache; `direct`
means 16 reads of 2 MiB in flight by io_uring past it.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys

DIRECT = sys.argv[1] == "direct"
FILES = sys.argv[2:] if DIRECT else sys.argv[1:]
HOW = ["--direct=1", "--ioengine=io_uring", "--iodepth=16", "--bs=2M"] if DIRECT else ["--bs=1M"]

seconds = cpu = 0.0
for path in FILES:
    # fio would evict the file first, and stops before a last block that is cut short: that block is read as it is.
    command = ["fio", "--name=read", "--rw=read", "--invalidate=0", "--output-format=json", f"--filename={path}", *HOW]
    report = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    job = report["jobs"][0]
    seconds += job["read"]["runtime"] / 1e3
    cpu += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["read"]["runtime"] / 1e3
    if job["read"]["io_bytes"] < os.path.getsize(path) * 0.99:
        raise SystemExit(f"fio has read {job['read']['io_bytes']} bytes of {path}")
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
result = {"version": report["fio version"], "seconds": seconds, "cpu_s": cpu, "peak_rss_bytes": peak}
result |= {"memory": "nothing is kept", "dma_ready": False}
if os.environ.get("DMALANE_COMPARE_HASH") == "1":
    digest = hashlib.sha256()
    for path in FILES:
        with open(path, "rb") as file:
            start = int.from_bytes(file.read(8), "little") + 8 if path.endswith(".safetensors") else 0
            file.seek(start)
            while block := file.read(1 << 20):
                digest.update(block)
    result["sha256"] = digest.hexdigest()
print(json.dumps(result))
