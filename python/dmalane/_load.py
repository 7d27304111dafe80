"""Tensors that own their memory, and memory that exists already."""

from __future__ import annotations

import os
import sys
import warnings
from bisect import bisect
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, overload

from ._arguments import Manifest, Path, Paths, Progress, manifest_of, parse_size, path_of, paths_of, watched
from ._frameworks import TORCH, Framework, converter, describe, device_name, on_cpu, torch_device, torch_on_gpu
from ._last import remember
from ._lend import safe_open
from ._native import Buffer, Device, DeviceTensor, Files, Tensor
from ._native import alloc_and_read as _alloc_and_read
from ._onto import Gpu, OnGpu, Pinned, Range, moved, on_cuda
from .errors import DeviceError, KeptError, UnknownTensorError


@overload
def load_file(
    filename: Paths,
    framework: Literal["bytes"],
    device: Literal["cpu"] = "cpu",
    *,
    align: int | None = None,
    memory_limit: int | str | None = None,
    direct: bool | None = None,
    verify: Manifest | None = None,
    keep: bool = False,
    progress: Progress | bool | None = None,
) -> dict[str, Tensor]: ...
@overload
def load_file(
    filename: Paths,
    framework: Literal["numpy"] = "numpy",
    *,
    device: Device,
    direct: bool | None = None,
    verify: Manifest | None = None,
    keep: bool = False,
    progress: Progress | bool | None = None,
) -> dict[str, DeviceTensor]: ...
@overload
def load_file(
    filename: Paths,
    framework: Framework = "numpy",
    device: str | int | Any = "cpu",
    *,
    align: int | None = None,
    memory_limit: int | str | None = None,
    direct: bool | None = None,
    verify: Manifest | None = None,
    keep: bool = False,
    progress: Progress | bool | None = None,
) -> dict[str, Any]: ...
def load_file(
    filename: Paths,
    framework: Framework = "numpy",
    device: str | int | Any = "cpu",
    *,
    align: int | None = None,
    memory_limit: int | str | None = None,
    direct: bool | None = None,
    verify: Manifest | None = None,
    keep: bool = False,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Loads all tensors of files. Each owns its memory, together with the others of its file.

    filename: a file, a directory, a `*.safetensors.index.json`, or several of these.
    framework: "numpy", "pt" or "bytes". Types that the framework does not have come as `Tensor`, which is their bytes.
    device: "cpu" for host memory. With framework "pt" a device of PyTorch, as `safe_open` has it. Else the name of a
        device of dmalane or an open one; then the values are `DeviceTensor`, and align, memory_limit and direct,
        which are about host memory, are refused.
    align: each tensor starts at a multiple of this power of two, at most 4096, and shares no such unit with another.
    memory_limit: refuse to allocate more host memory than this (4096, "4GiB").
    direct: past the page cache (True) or through it (False); by default what is cached decides.
    verify: the path of a manifest, or one that `manifest` made: everything is compared with it as it arrives, and
        `IntegrityError` names the first tensor that differs.
    keep: attach to the model in the memory of the keeper (`dmalaned keep`, whose `--memory` limits it), which gets it
        first if it has it not, or if a file has changed: in host memory, or in that of the GPU that `device` is, where
        it can be lent and no memory_limit is given. Tensors are then shared with other processes, and to be read alone;
        see `attach`.
    progress: called with bytes done and in all, about 25 times a second; True for a bar of tqdm.
    """
    watch = watched(progress)
    convert = converter(framework)
    if on_cpu(device):
        files = Files(paths_of(filename), parse_size(memory_limit), direct, manifest_of(verify), keep=keep)
        tensors = files.load(align, watch)
        remember(files.report)
        return {tensor.name: convert(tensor) for tensor in tensors}
    host = {"align": align, "memory_limit": memory_limit, "direct": None if keep else direct}
    on = _device_of(framework, device) if keep and memory_limit is None and align is None else None
    if on is not None and (lent := _kept(on, filename, framework, device, direct, verify, watch)) is not None:
        return lent
    on = on if framework not in TORCH else None
    if framework in TORCH and on is None and not isinstance(device, Device):
        if align is not None:
            raise ValueError(f"align: for host memory only, and device is {device!r}")
        options = {"memory_limit": memory_limit, "direct": direct, "verify": verify, "keep": keep}
        with safe_open(filename, framework, device, **options) as f:
            return _moved(f, watch)
    if given := [name for name, value in host.items() if value is not None]:
        raise ValueError(f"{', '.join(given)}: for host memory only, and device is {device!r}")
    on = on or _device_of(framework, device)
    on_device, report = on.load(paths_of(filename), manifest=manifest_of(verify), progress=watch)
    remember(report.copy)
    return {tensor.name: tensor for tensor in on_device}


def _kept(
    on: Device, filename: Paths, framework: Framework, device: Any, direct: bool | None, verify: Manifest | None,
    watch: Progress | None,
) -> dict[str, Any] | None:  # fmt: skip
    """The tensors of a model that is kept in memory of a device; None where that is for PyTorch and cannot be lent."""
    try:
        lent = on.attach_or_keep(paths_of(filename), direct, manifest_of(verify), True)
    except KeptError as error:
        # Host memory may do, where this GPU has no room, or cannot lend, or the keeper is another user's.
        if framework not in TORCH:
            raise
        warnings.warn(f"{device}: the model is kept in host memory: {error}", RuntimeWarning, stacklevel=3)
        return None
    nbytes = sum(tensor.nbytes for tensor in lent)
    remember({"bytes": nbytes}.copy)
    if watch:
        watch(nbytes, nbytes)
    return _lent(lent, framework, device)


def attach(
    name: str, framework: Framework = "numpy", device: str | int | Any = "cpu", *, verify: bool = False
) -> dict[str, Any]:
    """The tensors of a model that a keeper (`dmalaned keep`) holds: nothing is read or copied, except onto a `device`.

    name: of the model, the beginning of its hash, or `USER:NAME` for one that another user shares.
    framework, device: as of `load_file`. Tensors in host memory are shared with other processes, and to be read alone;
        what is written to one of PyTorch is a copy of this process's own. `dmalane keep -d cuda:0` keeps a model in
        memory of a GPU: then nothing is copied there, and tensors are to be read alone, of which PyTorch knows nothing:
        a write to one is an error of the GPU, after which this process may not be able to use it.
    verify: compare the bytes with the model's manifest first, which reads all of them.
    """
    convert, on = converter(framework), None if on_cpu(device) else _device_of(framework, device)
    files = Files.attached(name, verify, on)
    if files is None:
        return _lent(on.attach(name, verify), framework, device)
    if on_cpu(device):
        return {tensor.name: convert(tensor) for tensor in files.load()}
    if framework in TORCH and not isinstance(device, Device):
        with safe_open("", framework, device, _files=files) as f:
            return _moved(f, None)
    return load_file(f"kept:{name.removeprefix('kept:')}", framework, on)


def kept_on_gpu(filename: Paths, device: Any, verify: Manifest | None) -> dict[str, Any] | None:
    """The tensors of PyTorch of a model that was kept from these files in memory of a GPU; None if there is none."""
    try:
        on = _device_of("pt", device)
        lent = on and on.attach_or_keep(paths_of(filename), None, manifest_of(verify), False)
    except KeptError:
        # As it may be said for the host's memory.
        return None
    return None if lent is None else _lent(lent, "pt", device)


def _device_of(framework: Framework, device: Any) -> Device | None:
    """The device of dmalane for one; None for one of PyTorch that is no GPU of CUDA, or cannot be used here."""
    if framework in TORCH and not isinstance(device, Device):
        gpu = on_cuda(torch_device(device))
        try:
            return gpu and Device(f"cuda:{gpu.index}")
        except DeviceError:
            return None
    if framework not in ("numpy", "np"):
        raise ValueError(f"framework={framework!r}: device={device!r} gives DeviceTensors, so leave framework out")
    if device in get_args(Framework):
        raise ValueError(f"device={device!r} is no device, but a framework: load_file(filename, framework={device!r})")
    return device if isinstance(device, Device) else Device(device_name(device))


def _lent(tensors: list[DeviceTensor], framework: Framework, device: Any) -> dict[str, Any]:
    """Tensors of a framework over memory of a GPU."""
    if framework not in TORCH:
        return {tensor.name: tensor for tensor in tensors}
    return {tensor.name: torch_on_gpu(tensor, device) for tensor in tensors}


def _moved(f: safe_open, watch: Progress | None) -> dict[str, Any]:
    """All tensors, on the device of an open model."""
    moved, done, total = {}, 0, sum(f._files.describe(name)[2] for name in f)
    for name, tensor in f.tensors():
        moved[name] = tensor
        done += f._files.describe(name)[2]
        if watch:
            watch(done, total)
    remember(f._files.report)
    return moved


def load(data: bytes | bytearray | memoryview, framework: Framework = "numpy") -> dict[str, Any]:
    """The tensors in the bytes of a file."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data is the bytes of a file, not {type(data).__name__}: load_file takes names")
    convert = converter(framework)
    with open(os.memfd_create("dmalane"), "wb") as file:
        file.write(data)
        file.flush()
        files = Files.opened(f"/proc/self/fd/{file.fileno()}", "data")
    tensors = files.load()
    remember(files.report)
    return {tensor.name: convert(tensor) for tensor in tensors}


def load_into(
    tensors: Mapping[str, Any],
    filename: Paths,
    *,
    memory_limit: int | str = "128MiB",
    strict: bool = True,
    direct: bool | None = None,
    verify: Manifest | None = None,
) -> None:
    """Reads files into arrays or tensors that exist already, through buffers of `memory_limit` at most, or of twice the
    largest tensor if that is more.

    Types and shapes must be those of the file. With `strict`, so must the names. Contiguous tensors on GPUs of CUDA
    are read where they are, without those buffers, others there (and all with `verify`) through buffers on the GPU. To
    other devices PyTorch copies them.
    With `verify`, a manifest, no tensor is written whose bytes differ, but others may have been when `IntegrityError`
    is raised.
    """
    files = Files(paths_of(filename), None, direct, manifest_of(verify))
    names = files.keys()
    if strict and (unknown := set(tensors).symmetric_difference(names)):
        name = min(unknown)
        where = "the files have" if name in tensors else "the dictionary has"
        raise UnknownTensorError(f"{where} no tensor {name!r}", tensor=name)
    for name in set(tensors) & set(names):
        dtype, shape, nbytes, file, _ = files.describe(name)
        target = tensors[name]
        if isinstance(target, Buffer):
            if target.nbytes != nbytes:
                raise ValueError(f"tensor {name!r} has {nbytes} bytes in {file}, the buffer {target.nbytes}")
        elif describe(name, target) != (dtype, list(shape)):
            raise ValueError(f"tensor {name!r} is {dtype} {list(shape)} in {file}, not {describe(name, target)}")
    wanted = set(tensors) & set(names)
    largest = max((files.describe(name)[2] for name in wanted), default=0)
    limit = max(parse_size(memory_limit), 2 * largest + (1 << 20))
    wanted -= _read_there(files, {name: tensors[name] for name in wanted}, limit, verify is not None)
    files = files.within(limit)
    stream = files.stream(wanted)
    while (tensor := next(stream, None)) is not None:
        if tensor.nbytes:
            _copy(tensors[tensor.name], tensor)
        # The next one may need its memory.
        del tensor
    remember(files.report)


def _read_there(files: Files, targets: dict[str, Any], limit: int, verified: bool) -> set[str]:
    """Reads those on GPUs of CUDA, where they are if they may have bytes that are not compared yet; returns their
    names. The others are read into memory of the GPU first, `limit` bytes of it at most."""
    torch = sys.modules.get("torch")
    by_gpu: dict[Gpu, dict[str, Any]] = {}
    for name, target in targets.items():
        if torch is not None and isinstance(target, torch.Tensor) and target.device.type == "cuda" and target.numel():
            if (gpu := Gpu.of(target.device)) is not None:
                by_gpu.setdefault(gpu, {})[name] = target
    for gpu, there in by_gpu.items():
        at_once = {} if verified else {name: target for name, target in there.items() if _is_plain(target)}
        for apart in rounds({name: at_once[name] for name in files.keys() if name in at_once}):
            gpu.read_to(files, apart)
        if rest := dict.fromkeys(there.keys() - at_once.keys()):
            for name, tensor in OnGpu(files, gpu).tensors(rest, most=limit // 2):
                with torch.no_grad():
                    _assign(there[name], tensor)
                # The next one may need its memory.
                del tensor
    return {name for there in by_gpu.values() for name in there}


def _is_plain(target: Any) -> bool:
    """Whether the memory of a tensor has its bytes in order: that of a conjugated view has those of what it views."""
    return target.is_contiguous() and not (target.is_conj() or target.is_neg())


def rounds(targets: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits them where one shares memory with one in front of it: what is read last stays, as it does on the host."""
    now: dict[str, Any] = {}
    taken: list[Range] = []
    for name, target in targets.items():
        start, stop = target.data_ptr(), target.data_ptr() + target.nbytes
        at = bisect(taken, (start, stop))
        if (at and taken[at - 1][1] > start) or (at < len(taken) and taken[at][0] < stop):
            yield now
            now, taken, at = {}, [], 0
        now[name] = target
        taken.insert(at, (start, stop))
    if now:
        yield now


def _copy(target: Any, tensor: Tensor) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.Tensor):
        with torch.no_grad():
            source, pinned = converter("pt")(tensor), Pinned.of(target.device)
            if pinned is not None and _is_plain(target) and source.dtype == target.dtype:
                pinned.copy(source, target)
            else:
                _assign(target, source if pinned is None else moved(source, target.device))
        return
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(target, numpy.ndarray):
        source = numpy.frombuffer(tensor, target.dtype).reshape(target.shape)
        numpy.copyto(target, source)
        return
    memoryview(target).cast("B")[:] = memoryview(tensor)


def _assign(target: Any, source: Any) -> None:
    import torch

    # Not all operations know the types of one byte.
    as_bytes = source.dtype == target.dtype and source.dtype.itemsize == 1
    (target.view(torch.uint8) if as_bytes else target).copy_(source.view(torch.uint8) if as_bytes else source)


def alloc_and_read(
    filename: Path, start: int = 0, stop: int | None = None, *, direct: bool | None = None
) -> Buffer:
    """Reads bytes of a file, by default all, into a new buffer while that is still being allocated."""
    buffer, report = _alloc_and_read(path_of(filename), start, stop, direct)
    remember(report.copy)
    return buffer
