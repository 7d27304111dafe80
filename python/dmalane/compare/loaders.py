"""One load by one loader: `python -P loaders.py LOADER FILE...` prints what it took as a line of JSON.

It runs as a script, in a process of its own, and imports nothing but the standard library and the loader. The
environment says whether to touch memory before and to hash what was loaded, as it does to a loader of `--with`, and
which device of PyTorch is to have the tensors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import mmap
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

# What a file was loaded into: the values of its tensors by their names, or all of its bytes under None. Empty where the
# loader keeps nothing.
Loaded = dict[str | None, Any]
# The version of a library, and its way to load a file.
Prepared = tuple[str | None, Callable[[str], Loaded]]


class Missing(Exception):
    """The loader cannot run, with the reason."""


def libraries(packages: dict[str, str]) -> list[Any]:
    """Imports modules, each of a package."""
    found, missing = [], []
    for name, package in packages.items():
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0]:
                raise
            missing.append(package)
    if missing:
        raise Missing(f"not installed: {shlex.quote(sys.executable)} -m pip install {' '.join(missing)}")
    return found


def names(path: str) -> list[str]:
    """The names of the tensors of a safetensors file, in the order of their bytes."""
    if not path.endswith(".safetensors"):
        raise Missing("loads safetensors files alone")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(min(length, 100_000_000)))
    tensors.pop("__metadata__", None)
    return sorted(tensors, key=lambda name: (tensors[name]["data_offsets"], name))


# ---- the loaders -----------------------------------------------------------------------------------------------------


def of_dmalane() -> Prepared:
    (library,) = libraries({"dmalane": "dmalane"})

    def load(path: str) -> Loaded:
        if path.endswith(".safetensors"):
            return {name: tensor for name, tensor in library.load_file(path, framework="bytes").items()}
        return {None: library.alloc_and_read(path)}

    return library.__version__, load


def plain_read() -> Prepared:
    def load(path: str) -> Loaded:
        with open(path, "rb", buffering=0) as file:
            return {None: file.readall()}

    return None, load


def cat() -> Prepared:
    block = bytearray(128 << 10)

    def load(path: str) -> Loaded:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass
        return {}

    return None, load


def mapped() -> Prepared:
    def load(path: str) -> Loaded:
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        bytes(memoryview(mapping)[:: mmap.PAGESIZE])
        return {None: mapping}

    return None, load


def numpy_fromfile() -> Prepared:
    (numpy,) = libraries({"numpy": "numpy"})
    return numpy.__version__, lambda path: {None: numpy.fromfile(path, dtype=numpy.uint8)}


def of_safetensors(clone: bool = False, **options: str) -> Prepared:
    (library,) = libraries({"safetensors": "safetensors"})
    kind = framework()

    def load(path: str) -> Loaded:
        order = names(path)
        with library.safe_open(path, framework=kind, **options) as file:
            tensors: Loaded = {name: copied(file.get_tensor(name), clone) for name in order}
        # Pages of a mapping are not in memory before they are read.
        if any_mapped(list(tensors.values()), [path]):
            for tensor in tensors.values():
                bytes(octets(tensor)[:: mmap.PAGESIZE])
        return tensors

    return library.__version__, load


def framework() -> str:
    """PyTorch where it is installed, for it has all types; else NumPy, which has those of models by ml_dtypes."""
    if importlib.util.find_spec("torch"):
        # Imported here, before the time of a load begins.
        libraries({"torch": "torch"})
        return "pt"
    libraries({"numpy": "numpy", "ml_dtypes": "ml_dtypes"})
    return "numpy"


def copied(tensor: Any, clone: bool) -> Any:
    if not clone:
        return tensor
    return tensor.clone() if hasattr(tensor, "clone") else tensor.copy()


def runai() -> Prepared:
    library, _ = libraries({"runai_model_streamer": "runai-model-streamer", "torch": "torch"})

    def load(path: str) -> Loaded:
        names(path)
        with library.SafetensorsStreamer() as streamer:
            streamer.stream_file(path)
            # The streamer uses its buffer again, so what is kept must be copied.
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return version("runai-model-streamer"), load


def fastsafetensors() -> Prepared:
    library, _ = libraries({"fastsafetensors": "fastsafetensors", "torch": "torch"})
    kept = []

    def load(path: str) -> Loaded:
        order = names(path)
        opened = library.fastsafe_open(filenames=[path], nogds=True, device="cpu")
        file = opened.__enter__()
        kept.append(opened)
        return {name: file.get_tensor(name) for name in order}

    return version("fastsafetensors"), load


def kvikio() -> Prepared:
    os.environ.setdefault("KVIKIO_COMPAT_MODE", "ON")
    library, numpy = libraries({"kvikio": "kvikio-cu12", "numpy": "numpy"})

    def load(path: str) -> Loaded:
        array = numpy.empty(os.path.getsize(path), dtype=numpy.uint8)
        with library.CuFile(path, "r") as file:
            file.read(array)
        return {None: array}

    return library.__version__, load


def nixl() -> Prepared:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    library, numpy = libraries({"nixl._api": "nixl", "numpy": "numpy"})
    # The agent and its plugin are there before a server loads anything.
    agent = library.nixl_agent("compare", library.nixl_agent_config(enable_prog_thread=False, backends=["POSIX"]))
    block = 16 << 20

    def load(path: str) -> Loaded:
        array = numpy.empty(os.path.getsize(path), dtype=numpy.uint8)
        file = os.open(path, os.O_RDONLY)
        cuts = [(at, min(block, array.size - at)) for at in range(0, array.size, block)]
        memory = agent.register_memory([(array.ctypes.data, array.size, 0, "")], "DRAM")
        source = agent.register_memory([(0, array.size, file, "")], "FILE")
        into = agent.get_xfer_descs([(array.ctypes.data + at, size, 0) for at, size in cuts], "DRAM")
        of = agent.get_xfer_descs([(at, size, file) for at, size in cuts], "FILE")
        request = agent.initialize_xfer("READ", into, of, agent.name)
        state = agent.transfer(request)
        while state == "PROC":
            state = agent.check_xfer_state(request)
        if state != "DONE":
            raise OSError(f"the transfer ended as {state}")
        agent.release_xfer_handle(request)
        agent.deregister_memory(memory)
        agent.deregister_memory(source)
        os.close(file)
        return {None: array}

    return version("nixl"), load


LOADERS: dict[str, Callable[[], Prepared]] = {
    "dmalane": of_dmalane,
    "plain-read": plain_read,
    "numpy-fromfile": numpy_fromfile,
    "safetensors-clone": partial(of_safetensors, clone=True),
    "safetensors-pread": partial(of_safetensors, backend="pread"),
    "runai-model-streamer": runai,
    "fastsafetensors": fastsafetensors,
    "kvikio": kvikio,
    "nixl-posix": nixl,
    "safetensors-mmap": of_safetensors,
    "mmap": mapped,
    "cat": cat,
}

def onto(device: str) -> dict[str, Callable[[], Prepared]]:
    """The loaders onto a device of PyTorch, which is ready before they begin."""

    def prepared(modules: dict[str, str]) -> list[Any]:
        found = libraries({**modules, "torch": "torch"})
        found[-1].empty(1, device=device)
        return found

    def of_dmalane() -> Prepared:
        library, _ = prepared({"dmalane": "dmalane"})
        return library.__version__, lambda path: {**library.load_file(path, "pt", device)}

    def ahead(module: str) -> Prepared:
        library, _ = prepared({module: module})
        if not hasattr(library.safe_open, "prefetch"):
            raise Missing(f"{module} {library.__version__} has no prefetch: it came with 0.9")

        def load(path: str) -> Loaded:
            with library.safe_open(path, framework="pt", device=device) as file, file.prefetch() as coming:
                return dict(coming)

        return library.__version__, load

    def opened(**options: str) -> Prepared:
        library, _ = prepared({"safetensors": "safetensors"})

        def load(path: str) -> Loaded:
            order = names(path)
            with library.safe_open(path, framework="pt", device=device, **options) as file:
                return {name: file.get_tensor(name) for name in order}

        return library.__version__, load

    def streamed() -> Prepared:
        library, _ = prepared({"runai_model_streamer": "runai-model-streamer"})

        def load(path: str) -> Loaded:
            with library.SafetensorsStreamer() as streamer:
                streamer.stream_file(path)
                return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}

        return version("runai-model-streamer"), load

    def fast() -> Prepared:
        library, _ = prepared({"fastsafetensors": "fastsafetensors"})
        kept = []

        def load(path: str) -> Loaded:
            order = names(path)
            opened = library.fastsafe_open(filenames=[path], nogds=True, device=device)
            file = opened.__enter__()
            kept.append(opened)
            return {name: file.get_tensor(name) for name in order}

        return version("fastsafetensors"), load

    def instant() -> Prepared:
        library, _ = prepared({"instanttensor": "instanttensor"})

        def load(path: str) -> Loaded:
            with library.safe_open([path], framework="pt", device=device) as file:
                return dict(file.tensors())

        return version("instanttensor"), load

    return {
        "dmalane": of_dmalane,
        "dmalane-prefetch": partial(ahead, "dmalane"),
        "safetensors-mmap": opened,
        "safetensors-pread": partial(opened, backend="pread"),
        "safetensors-prefetch": partial(ahead, "safetensors"),
        "fastsafetensors": fast,
        "instanttensor": instant,
        "runai-model-streamer": streamed,
    }


# ---- what a load took ------------------------------------------------------------------------------------------------


def octets(value: Any) -> memoryview:
    """The bytes of an array, a tensor or a buffer, without a copy where that can be."""
    if hasattr(value, "data_ptr"):
        torch = importlib.import_module("torch")
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif hasattr(value, "ctypes"):
        numpy = importlib.import_module("numpy")
        value = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
    return memoryview(value).cast("B")


def address(value: Any) -> int | None:
    if hasattr(value, "data_ptr"):
        return int(value.data_ptr())
    if hasattr(value, "ctypes"):
        return int(value.ctypes.data)
    return getattr(value, "address", None)


def any_mapped(values: list[Any], paths: list[str]) -> bool:
    """Whether one of the values lies in a mapping of one of these files."""
    files = {os.path.realpath(path) for path in paths}
    ranges = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            words = line.rstrip("\n").split(None, 5)
            if len(words) == 6 and words[5] in files:
                first, last = (int(word, 16) for word in words[0].split("-"))
                ranges.append(range(first, last))
    return any(address(value) in one for value in values for one in ranges)


def memory_of(values: list[Any], paths: list[str]) -> tuple[str, bool]:
    """The memory that values are in, and whether a driver can pin it."""
    if not values:
        return "nothing is kept", False
    if any_mapped(values, paths) or any(isinstance(value, mmap.mmap) for value in values):
        return "page cache, mapped", False
    return "private memory", True


def digest(paths: list[str], loaded: list[Loaded]) -> str:
    """SHA-256 of the tensors' bytes in the order of the file; of all bytes of a file that is no safetensors file."""
    sha256 = hashlib.sha256()
    for path, values in zip(paths, loaded, strict=True):
        tensors = path.endswith(".safetensors")
        if tensors and values and None not in values:
            for name in names(path):
                sha256.update(octets(values[name]))
            continue
        if values:
            data = octets(values[None])
        else:
            with open(path, "rb") as file:
                data = memoryview(file.read())
        sha256.update(data[8 + int.from_bytes(data[:8], "little") if tensors else 0 :])
    return sha256.hexdigest()


def processor_seconds() -> float:
    """Processor time of this process, and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak() -> int:
    """The most memory that this process had: resident pages, and huge pages, which are not counted among them."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return sum(int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("VmHWM", "HugetlbPages"))


def touch_memory(size: int) -> None:
    """Touches and frees memory. The host of a virtual machine takes back what a guest leaves free, and the next one to
    use it waits a second or more for each GB, whichever loader that is."""

    def reset_peak() -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    try:
        reset_peak()
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory[:: mmap.PAGESIZE] = bytes(-(-size // mmap.PAGESIZE))
        reset_peak()
    except (OSError, ValueError):
        pass


def measured(loader: str, paths: list[str]) -> dict[str, Any]:
    device = os.environ.get("DMALANE_COMPARE_DEVICE")
    release, load = (onto(device) if device else LOADERS)[loader]()
    if size := int(os.environ.get("DMALANE_COMPARE_TOUCH", "0")):
        touch_memory(size)
    processor, begin = processor_seconds(), time.perf_counter()
    loaded = [load(path) for path in paths]
    if device:
        # Until the copies have ended.
        getattr(importlib.import_module("torch"), device.partition(":")[0]).synchronize()
    seconds, cpu_s = time.perf_counter() - begin, processor_seconds() - processor
    peak_rss_bytes = peak()
    values = [value for one in loaded for value in one.values()]
    memory, dma_ready = (f"memory of {device}", True) if device else memory_of(values, paths)
    sha256 = digest(paths, loaded) if os.environ.get("DMALANE_COMPARE_HASH") == "1" else None
    return {
        "version": release or f"Python {platform.python_version()}",
        "seconds": seconds,
        "cpu_s": cpu_s,
        "peak_rss_bytes": peak_rss_bytes,
        "memory": memory,
        "dma_ready": dma_ready,
        "sha256": sha256,
    }


def main() -> None:
    try:
        result = measured(sys.argv[1], sys.argv[2:])
    except Missing as reason:
        result = {"skipped": str(reason)}
    except Exception as error:  # noqa: BLE001: whatever a loader fails with is the result
        result = {"skipped": f"fails: {type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
