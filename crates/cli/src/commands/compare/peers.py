"""Loads files by one of the loaders of Python, and prints what it took as JSON.

Run by `dmalane compare` as: python3 -c SCRIPT LOADER HASH FILE...
"""

import sys

# A file of the current directory must not pose as a module.
sys.path = [path for path in sys.path if path]

import hashlib
import json
import os
import time

LOADER, HASH, FILES = sys.argv[1], sys.argv[2] == "hash", sys.argv[3:]


class Missing(Exception):
    """The loader cannot run, with the reason."""


def module(name, package):
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name.split(".")[0]:
            raise Missing(f"not installed: pip install {package}") from error
        raise Missing(f"cannot be imported: {error}") from error


def header(path):
    """The names of the tensors of a safetensors file in the order of their bytes; None for another file."""
    if not path.endswith(".safetensors"):
        return None
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(min(length, 100_000_000)))
    tensors.pop("__metadata__", None)
    return sorted(tensors, key=lambda name: (tensors[name]["data_offsets"], name))


def names(path):
    found = header(path)
    if found is None:
        raise Missing("loads safetensors files alone")
    return found


def octets(value):
    """The bytes of an array or a tensor, without a copy where that can be."""
    if hasattr(value, "address"):  # of the package dmalane
        return memoryview(value.tobytes())
    if hasattr(value, "data_ptr"):
        import torch

        return memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    if hasattr(value, "dtype"):
        import numpy

        return memoryview(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
    return memoryview(value)


def touch(tensors, path):
    """Reads every page of tensors that are a mapping of the file, which are not in memory before."""
    for tensor in tensors.values():
        if is_mapped_file(address(tensor), [path]):
            bytes(octets(tensor)[::4096])


def address(value):
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    if hasattr(value, "ctypes"):
        return value.ctypes.data
    if hasattr(value, "address"):
        return value.address
    return None


def framework():
    """torch where it is installed, for it has all types; else numpy."""
    try:
        import torch  # noqa: F401

        return "pt"
    except ImportError:
        module("numpy", "numpy")
    try:
        import ml_dtypes  # noqa: F401: gives numpy the types of models
    except ImportError:
        pass
    return "numpy"


def read_file(path):
    import numpy

    return numpy.fromfile(path, dtype=numpy.uint8)


def numpy_fromfile():
    version = module("numpy", "numpy").__version__
    return version, lambda path: {None: read_file(path)}


def mmap_touch():
    import mmap

    def load(path):
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        bytes(memoryview(mapping)[::4096])
        return {None: mapping}

    return sys.version.split()[0], load


def dmalane_package():
    library = module("dmalane", "dmalane")

    def load(path):
        names(path)
        return library.load_file(path, framework="bytes")

    return version("dmalane"), load


def copied(tensor):
    """The same in memory of its own."""
    return tensor.clone() if hasattr(tensor, "clone") else tensor.copy()


def safetensors(backend, clone=False):
    def prepare():
        library = module("safetensors", "safetensors")
        kind = framework()
        extra = {} if backend is None else {"backend": backend}

        def load(path):
            order = names(path)
            try:
                file = library.safe_open(path, framework=kind, **extra)
            except TypeError as error:
                raise Missing(f"safetensors {library.__version__} has no backend={backend!r}") from error
            try:
                with file:
                    get = (lambda name: copied(file.get_tensor(name))) if clone else file.get_tensor
                    tensors = {name: get(name) for name in order}
            except TypeError as error:
                raise Missing(f"numpy alone: {error}; pip install torch, or ml_dtypes") from error
            touch(tensors, path)
            return tensors

        return library.__version__, load

    return prepare


def runai():
    library = module("runai_model_streamer", "runai-model-streamer")
    module("torch", "torch")

    def load(path):
        names(path)
        with library.SafetensorsStreamer() as streamer:
            streamer.stream_file(path)
            # The streamer uses its buffer again, so what is kept must be copied.
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return version("runai-model-streamer"), load


def fastsafetensors():
    library = module("fastsafetensors", "fastsafetensors")
    module("torch", "torch")

    def load(path):
        order = names(path)
        keep = library.fastsafe_open(filenames=[path], nogds=True, device="cpu")
        file = keep.__enter__()
        KEPT.append(keep)
        return {name: file.get_tensor(name) for name in order}

    return version("fastsafetensors"), load


def nixl():
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    library = module("nixl._api", "nixl")
    numpy = module("numpy", "numpy")
    # The agent and its plugin are there before a server loads anything.
    agent = library.nixl_agent("compare", library.nixl_agent_config(enable_prog_thread=False, backends=["POSIX"]))
    block = 16 << 20

    def load(path):
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


def kvikio():
    os.environ.setdefault("KVIKIO_COMPAT_MODE", "ON")
    library = module("kvikio", "kvikio-cu12")
    numpy = module("numpy", "numpy")

    def load(path):
        array = numpy.empty(os.path.getsize(path), dtype=numpy.uint8)
        with library.CuFile(path, "r") as file:
            file.read(array)
        return {None: array}

    return library.__version__, load


def version(package):
    from importlib import metadata

    return metadata.version(package)


LOADERS = {
    "dmalane-python": dmalane_package,
    "mmap": mmap_touch,
    "numpy-fromfile": numpy_fromfile,
    "safetensors-mmap": safetensors(None),
    "safetensors-clone": safetensors(None, clone=True),
    "safetensors-pread": safetensors("pread"),
    "runai-model-streamer": runai,
    "fastsafetensors": fastsafetensors,
    "kvikio": kvikio,
    "nixl-posix": nixl,
}
KEPT = []


def peak():
    """The most memory that this process had: resident pages, and huge pages, which are not counted among them."""
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    kib = lambda name: int(fields.get(name, "0 kB").split()[0]) * 1024  # noqa: E731
    return kib("VmHWM") + kib("HugetlbPages")


def is_mapped_file(where, paths):
    """Whether an address lies in a mapping of one of these files."""
    if where is None:
        return False
    paths = {os.path.realpath(path) for path in paths}
    for line in open("/proc/self/maps"):
        words = line.rstrip("\n").split(None, 5)
        first, last = (int(word, 16) for word in words[0].split("-"))
        if first <= where < last:
            return len(words) == 6 and words[5] in paths
    return False


def touch_memory(size):
    """Touches and frees memory, as the loaders of the program do before their clock starts."""
    import mmap

    def reset():
        with open("/proc/self/clear_refs", "w") as peak_of_this_process:
            peak_of_this_process.write("5")

    try:
        reset()
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory[::4096] = bytes(-(-size // 4096))
        reset()
    except (OSError, ValueError):
        pass


def main():
    release, load = LOADERS[LOADER]()
    if touch := int(os.environ.get("DMALANE_COMPARE_TOUCH", 0)):
        touch_memory(touch)
    before, cpu = time.perf_counter(), time.process_time()
    loaded = [load(path) for path in FILES]
    seconds, cpu = time.perf_counter() - before, time.process_time() - cpu
    values = [value for tensors in loaded for value in tensors.values()]
    mapped = LOADER == "mmap" or any(is_mapped_file(address(value), FILES) for value in values)
    result = {
        "version": release,
        "seconds": seconds,
        "cpu_s": cpu,
        "peak_rss_bytes": peak(),
        "memory": "page cache, mapped" if mapped else "private memory",
        "dma_ready": not mapped,
    }
    if HASH:
        digest = hashlib.sha256()
        for path, tensors in zip(FILES, loaded):
            order = header(path)
            if order is None:
                digest.update(octets(tensors[None]))
            elif None in tensors:
                data = octets(tensors[None])
                digest.update(data[8 + int.from_bytes(data[:8], "little") :])
            else:
                for name in order:
                    digest.update(octets(tensors[name]))
        result["sha256"] = digest.hexdigest()
    print(json.dumps(result))


try:
    main()
except Missing as reason:
    print(json.dumps({"skipped": str(reason)}))
except Exception as error:  # noqa: BLE001: whatever a loader fails with is the result
    print(json.dumps({"skipped": f"fails: {type(error).__name__}: {error}"[:500]}))
