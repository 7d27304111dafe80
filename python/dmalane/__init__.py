"""Model weights in memory that any driver can register, with the time explained.

Two contracts: `load_file` gives tensors that own their memory; `safe_open` lends them within a limit of memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import errors
from ._frameworks import converter as _converter
from ._native import Buffer, Device, DeviceTensor, Files, Registration, Tensor, __version__
from ._native import alloc_and_read as _alloc_and_read
from ._native import save_file as _save_file
from .errors import *  # noqa: F403

Progress = Callable[[int, int], object]
Manifest = "str | os.PathLike[str] | Mapping[str, Any]"
Paths = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

_last = threading.local()


def _paths(path: Any) -> list[str]:
    if isinstance(path, (str, os.PathLike)):
        return [os.fspath(path)]
    return [os.fspath(one) for one in path]


def parse_size(size: int | str | None) -> int | None:
    """Bytes of a size such as 4096, "256MiB" or "4GB"."""
    if size is None or isinstance(size, int):
        return size
    text = size.strip().replace(" ", "")
    for suffix, unit in _UNITS:
        if text.lower().endswith(suffix):
            number = text[: -len(suffix)]
            break
    else:
        number, unit = text, 1
    try:
        bytes_ = int(number) * unit if number.isdigit() else int(float(number) * unit)
    except (ValueError, OverflowError):
        raise ValueError(f"{size!r} is no size: write for example 4096, 256MiB or 4GB") from None
    if bytes_ < 0:
        raise ValueError(f"{size!r} is negative")
    return bytes_


_UNITS = [
    ("kib", 1 << 10), ("mib", 1 << 20), ("gib", 1 << 30), ("tib", 1 << 40), ("kb", 10**3), ("mb", 10**6),
    ("gb", 10**9), ("tb", 10**12), ("b", 1),
]  # fmt: skip


def _watch(progress: Progress | bool | None) -> Progress | None:
    """The function to call with bytes done and in all; of `True` a bar of tqdm."""
    if progress is None or progress is False:
        return None
    if progress is not True:
        return progress
    from tqdm.auto import tqdm

    bar = tqdm(unit="B", unit_scale=True, unit_divisor=1024)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return update


def last_report() -> dict[str, Any] | None:
    """Report of the last load of this thread (`load_file`, `load_into`, `alloc_and_read`, `plan.tensors`): bytes,
    stages with their times, and for each file how it was read and why. None before the first."""
    report: Callable[[], dict[str, Any]] | None = getattr(_last, "report", None)
    return report and report()


def open(spec: str) -> Device:  # noqa: A001
    """Opens a device by name: "soft", "ram:64MiB", "vulkan:0", "cuda:0" and so on (`dmalane devices` lists them)."""
    return Device(spec)


def load_file(
    path: Any,
    device: str | Device = "cpu",
    framework: str = "numpy",
    *,
    align: int | None = None,
    memory_limit: int | str | None = None,
    direct: bool | None = None,
    verify: Manifest | None = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Loads all tensors of files. Each owns its memory, together with the others of its file.

    path: a file, a directory, a `*.safetensors.index.json`, or several of these.
    device: "cpu" for host memory, else the name of a device or an open one; then the values are `DeviceTensor`, and
        framework, align, memory_limit and direct, which are about host memory, are refused.
    framework: "numpy", "pt" or "bytes". Types that the framework does not have come as `Tensor`, which is their bytes.
    align: each tensor starts at a multiple of this power of two, at most 4096, and shares no such unit with another.
    memory_limit: refuse to allocate more than this (4096, "4GiB").
    direct: past the page cache (True) or through it (False); by default what is cached decides.
    verify: the path of a manifest, or one that `manifest` made: everything is compared with it as it arrives, and
        `IntegrityError` names the first tensor that differs.
    progress: called with bytes done and in all, about 25 times a second; True for a bar of tqdm.
    """
    watch = _watch(progress)
    if device != "cpu":
        host = {"align": align, "memory_limit": memory_limit, "direct": direct}
        if given := [name for name, value in host.items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: for host memory only, and device is {device!r}")
        if framework != "numpy":
            raise ValueError(f"framework={framework!r}: device={device!r} gives DeviceTensors (dmalane.torch: tensors)")
        on = Device(device) if isinstance(device, str) else device
        on_device, report = on.load(_paths(path), manifest=_manifest(verify), progress=watch)
        _last.report = report.copy
        return {tensor.name: tensor for tensor in on_device}
    convert = _converter(framework)
    files = Files(_paths(path), parse_size(memory_limit), direct, _manifest(verify))
    tensors = files.load(align, watch)
    _last.report = files.report
    return {tensor.name: convert(tensor) for tensor in tensors}


class Slice:
    """A tensor that is read in part: `f.get_slice(name)[:, 2:4]`."""

    def __init__(self, owner: "safe_open", name: str) -> None:
        self._owner, self._name = owner, name
        self._dtype, self._shape, *_ = owner._files.describe(name)

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The type, as the file spells it."""
        return self._dtype

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        given = sum(one is not Ellipsis for one in indices)
        if len(indices) - given > 1:
            raise IndexError("an index has one ellipsis at most")
        if given > len(self._shape):
            raise IndexError(f"{given} indices for {len(self._shape)} dimensions")
        rest = [slice(None)] * (len(self._shape) - given)
        at = next((i for i, one in enumerate(indices) if one is Ellipsis), len(indices))
        indices = (*indices[:at], *rest, *indices[at + 1 :])
        ranges, shape = [], []
        for one, dim in zip(indices, self._shape):
            if isinstance(one, slice):
                start, stop, step = one.indices(dim)
                if step != 1:
                    raise IndexError("slices have steps of 1")
                stop = max(start, stop)
                ranges.append((start, stop))
                shape.append(stop - start)
            else:
                n = one.__index__()
                if not -dim <= n < dim:
                    raise IndexError(f"index {n} is not within a dimension of {dim}")
                ranges.append((n % dim, n % dim + 1))
        return self._owner._convert(self._owner._files.slice(self._name, ranges, shape))


class safe_open:  # noqa: N801
    """Opens files and lends their tensors, within a limit of memory.

    with dmalane.safe_open(path, framework="numpy", memory_limit="1GiB") as f:
        for name, tensor in f.tensors():
            ...

    Memory counts until the last array over it dies, or `Tensor.release()`. A loop variable keeps a tensor while the
    next one is read, so the limit holds at least two of the largest tensors. With `verify`, a manifest, headers are
    compared here, and each tensor when it is read; slices are refused.
    """

    def __init__(
        self,
        paths: Any,
        framework: str = "numpy",
        device: str = "cpu",
        *,
        memory_limit: int | str | None = None,
        direct: bool | None = None,
        verify: Manifest | None = None,
    ) -> None:
        if device != "cpu":
            to_device = _to_device(framework, device)
        else:
            to_device = None
        convert = _converter(framework)
        self._convert = (lambda tensor: to_device(convert(tensor))) if to_device else convert
        self._files = Files(_paths(paths), parse_size(memory_limit), direct, _manifest(verify))

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuses further reads, and ends those of other threads. Tensors that were lent keep their memory."""
        self._files.close()

    def keys(self) -> list[str]:
        """The names, in the order of the bytes."""
        return self._files.keys()

    offset_keys = keys

    def __len__(self) -> int:
        return len(self._files.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._files.keys()

    def metadata(self) -> dict[str, str] | None:
        """The text pairs of the headers; None where they have none."""
        return self._files.metadata()

    def get_tensor(self, name: str) -> Any:
        """Reads one tensor."""
        return self._convert(self._files.get(name))

    def get_slice(self, name: str) -> Slice:
        """A tensor to read a part of."""
        return Slice(self, name)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
        """The tensors with their names, in the order in which their bytes arrive, read ahead on a thread; all of them,
        or those of `names`."""
        stream = self._files.stream(None if names is None else set(names))
        while (tensor := next(stream, None)) is not None:
            item = tensor.name, self._convert(tensor)
            # Nothing here keeps the memory while the next one is waited for.
            del tensor
            yield item
            del item

    def report(self, *, reference: bool = False) -> dict[str, Any]:
        """The reads so far: bytes, stages, and for each file how and why; memory in use and its limit.

        With `reference`, also rates to compare the stages with, in bytes per second, which are measured now, with the
        first 256 MiB at most: `read`, of the same files in the same way into memory that is there, and `first_touch`,
        of making that memory."""
        report = self._files.report()
        if reference:
            report["reference"] = self._files.references()
        return report


def _to_device(framework: str, device: str) -> Callable[[Any], Any]:
    if framework not in ("pt", "torch", "pytorch"):
        raise ValueError('safe_open lends host memory; device= takes a device of PyTorch with framework="pt"')
    import torch

    return lambda tensor: tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor


def load_into(
    tensors: Mapping[str, Any],
    path: Any,
    *,
    memory_limit: int | str = "128MiB",
    strict: bool = True,
    direct: bool | None = None,
    verify: Manifest | None = None,
) -> None:
    """Reads files into arrays or tensors that exist already, through buffers of `memory_limit` at most, or of twice the
    largest tensor if that is more.

    Types and shapes must be those of the file. With `strict`, so must the names. Tensors of any device of PyTorch are
    written by their own `copy_`. With `verify`, a manifest, no tensor is written whose bytes differ, but others may
    have been when `IntegrityError` is raised.
    """
    from ._frameworks import describe

    files = Files(_paths(path), None, direct, _manifest(verify))
    names = files.keys()
    if strict and (unknown := set(tensors).symmetric_difference(names)):
        name = min(unknown)
        where = "the files" if name in tensors else "the dictionary"
        raise UnknownTensorError(f"{where} have no tensor {name!r}", tensor=name)  # noqa: F405
    for name in set(tensors) & set(names):
        dtype, shape, nbytes, file, _ = files.describe(name)
        target = tensors[name]
        if isinstance(target, Buffer):
            if target.nbytes != nbytes:
                raise ValueError(f"tensor {name!r} has {nbytes} bytes in {file}, the buffer {target.nbytes}")
        elif describe(name, target) != (dtype, list(shape)):
            raise ValueError(f"tensor {name!r} is {dtype} {list(shape)} in {file}, not {describe(name, target)}")
    largest = max((files.describe(name)[2] for name in names), default=0)
    files = files.within(max(parse_size(memory_limit) or 0, 2 * largest + (1 << 20)))
    stream = files.stream(set(tensors) & set(names))
    while (tensor := next(stream, None)) is not None:
        if tensor.nbytes:
            _copy(tensors[tensor.name], tensor)
        # The next one may need its memory.
        del tensor
    _last.report = files.report


def _copy(target: Any, tensor: Tensor) -> None:
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.Tensor):
        with torch.no_grad():
            source = _converter("pt")(tensor)
            if source.dtype == target.dtype and not source.dtype.is_complex and source.dtype.itemsize == 1:
                target.view(torch.uint8).copy_(source.view(torch.uint8))
            else:
                target.copy_(source)
        return
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(target, numpy.ndarray):
        source = numpy.frombuffer(tensor, target.dtype).reshape(target.shape)
        numpy.copyto(target, source)
        return
    memoryview(target).cast("B")[:] = memoryview(tensor)


def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a safetensors file of arrays, tensors of PyTorch or `Tensor`s, byte for byte as `safetensors` writes it.

    It appears whole or not at all, and in place of a file that exists only with `overwrite`. Blocks go past the page
    cache where the file system allows. Returns its `bytes`, and whether they went past the cache (`direct`).
    """
    from ._frameworks import describe, raw_bytes

    described = [(name, *describe(name, value), raw_bytes(value)) for name, value in tensors.items()]
    size, direct = _save_file(os.fspath(path), described, dict(metadata) if metadata is not None else None, overwrite)
    return {"bytes": size, "direct": direct}


def validate(spec: str, *options: str) -> dict[str, Any]:
    """Checks a device's data and measures its speed: the JSON object of `dmalane validate --json -d SPEC OPTIONS...`.

    The content of the device's memory is overwritten. Raises `DeviceError` if it cannot be measured.
    """
    return _program(DeviceError, "validate", "-d", spec, "--json", *options)  # noqa: F405


def manifest(path: Any, *, sha256: bool = False) -> dict[str, Any]:
    """Hashes every tensor, header and gap of files, for `verify=`: the JSON object of `dmalane manifest`."""
    return _program(Error, "manifest", "--quiet", *["--sha256"] * sha256, "--", *_paths(path))  # noqa: F405


def verify(path: Any, manifest: Manifest) -> list[dict[str, Any]]:
    """Compares files with a manifest; returns the differences as `dmalane verify --json` has them: none is good."""
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".manifest") as file:
        name = _manifest(manifest)
        if isinstance(name, bytes):
            file.write(name)
            file.flush()
            name = file.name
        words = ("verify", "--json", "--manifest", name, "--", *_paths(path))
        return _program(Error, *words)["differences"]  # type: ignore[no-any-return]  # noqa: F405


def compare(path: Any, *options: str) -> dict[str, Any]:
    """Loads files by every loader that this Python and the program have: the JSON object of `dmalane compare --json
    --python THIS OPTIONS... PATH...`."""
    import sys

    words = ("compare", "--json", "--python", sys.executable, *options, "--", *_paths(path))
    return _program(Error, *words)  # noqa: F405


def _manifest(given: Manifest | None) -> str | bytes | None:
    if given is None or isinstance(given, (str, os.PathLike)):
        return None if given is None else os.fspath(given)
    import json

    return json.dumps(given).encode()


def _program(failure: type[Exception], *words: str) -> dict[str, Any]:
    """The JSON object that the program prints."""
    import json
    import subprocess
    import sys

    command = [sys.executable, "-m", "dmalane", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)  # type: ignore[no-any-return]
    except ValueError:
        raise failure(done.stderr.strip() or f"exit status {done.returncode}") from None


def alloc_and_read(
    path: str | os.PathLike[str], start: int = 0, stop: int | None = None, *, direct: bool | None = None
) -> Buffer:
    """Reads bytes of a file, by default all, into a new buffer while that is still being allocated."""
    buffer, report = _alloc_and_read(os.fspath(path), start, stop, direct)
    _last.report = report.copy
    return buffer


__all__ = [
    "Buffer",
    "Device",
    "DeviceTensor",
    "Registration",
    "Slice",
    "Tensor",
    "__version__",
    "alloc_and_read",
    "compare",
    "errors",
    "last_report",
    "load_file",
    "load_into",
    "manifest",
    "open",
    "parse_size",
    "safe_open",
    "save_file",
    "validate",
    "verify",
    *errors.__all__,
]
