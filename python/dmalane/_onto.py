"""Tensors of PyTorch on a GPU of CUDA, read through host memory that is registered once.

PyTorch allocates their memory, which its limits and statistics then count, and dmalane's queues copy to it. A read
returns when the driver has said that its copies have ended, so work on any stream comes after them; before it, the
current stream is waited for, which may still use what was in that memory.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

from ._frameworks import torch_type
from ._native import Device, Files, Tensor
from .errors import DeviceError

_T = TypeVar("_T")
Part = tuple[str, int, int, int]

# Bytes of tensors that are allocated and read together, at most, except for a larger one.
BATCH = 256 << 20
# Where tensors begin in their memory, as the widest loads of a GPU want it; and those that do not follow each other.
_WIDE, _ALIGN = 16, 256
# A slice of shorter runs is read with what lies between them, up to so many times its bytes, and cut on the GPU.
_RUN, _BETWEEN = 64 << 10, 8


def ahead(
    items: Iterable[_T], begin: Callable[[ThreadPoolExecutor, _T], Future[Any]]
) -> Generator[tuple[_T, Any]]:
    """Items with the results of work that `begin` starts for each: for the first one now, for each other one before
    the one in front of it is handed out."""
    pool, left = ThreadPoolExecutor(1, thread_name_prefix="dmalane"), iter(items)

    def start() -> tuple[_T, Future[Any]] | None:
        return next(((item, begin(pool, item)) for item in left), None)

    def each(current: tuple[_T, Future[Any]] | None) -> Generator[tuple[_T, Any]]:
        with pool:
            while current is not None:
                following = start()
                yield current[0], current[1].result()
                current = following

    return each(start())


class Gpu:
    """A GPU of CUDA, as PyTorch and dmalane see it."""

    # Those in use, by process and number.
    _open: weakref.WeakValueDictionary[tuple[int, int], Gpu] = weakref.WeakValueDictionary()

    def __init__(self, device: Any) -> None:
        self.device = device
        self._memory = Device(f"cuda:{device.index}")

    @classmethod
    def of(cls, device: Any) -> Gpu | None:
        """The GPU of a device of PyTorch; None for others, and where its driver does not let it be opened, which is
        said."""
        import torch

        if device.type != "cuda" or torch.version.hip is not None:
            return None
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        key = os.getpid(), device.index
        gpu = cls._open.get(key)
        if gpu is None:
            torch.cuda.init()
            try:
                gpu = cls._open[key] = cls(device)
            except DeviceError as error:
                warnings.warn(f"{device}: tensors are copied there by PyTorch, at the rate of memory that is not "
                              f"registered: {error}", RuntimeWarning, stacklevel=4)  # fmt: skip
        return gpu

    def memory(self, nbytes: int) -> Any:
        """New memory of PyTorch, which nothing uses any more."""
        import torch

        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.wait()
        return memory

    def wait(self) -> None:
        """Waits for what the current stream does, maybe with memory that is read to next."""
        import torch

        torch.cuda.current_stream(self.device).synchronize()

    def read(self, files: Files, memory: Any, parts: Sequence[Part]) -> Any:
        """Reads parts of tensors to their places in memory of `memory`, and returns it."""
        files.read_onto(self._memory, memory.data_ptr(), parts, [(memory.data_ptr(), memory.numel())], memory)
        return memory

    def read_to(self, files: Files, targets: dict[str, Any]) -> None:
        """Reads tensors into memory of their own type and length."""
        parts = [(name, 0, files.describe(name)[2], target.data_ptr()) for name, target in targets.items()]
        self.wait()
        files.read_onto(self._memory, 0, parts, [(at, nbytes) for _, _, nbytes, at in parts], list(targets.values()))


class _Batch:
    """Tensors that are read together: their types, and where they lie."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Any, int, int]] = []
        self.len = 0
        self._end: tuple[str, int] | None = None

    def add(self, name: str, kind: Any, nbytes: int, path: str, at: int) -> None:
        # As in the file where that is wide enough: copied with the one before it.
        if self._end != (path, at) or self.len % _WIDE:
            self.len = -(-self.len // _ALIGN) * _ALIGN
        self.tensors.append((name, kind, self.len, nbytes))
        self.len, self._end = self.len + nbytes, (path, at + nbytes)

    def parts(self) -> list[Part]:
        return [(name, 0, nbytes, place) for name, kind, place, nbytes in self.tensors if kind and nbytes]


def _batches(files: Files, names: Iterable[str], most: int) -> Iterator[_Batch]:
    batch = _Batch()
    for name in names:
        dtype, shape, nbytes, path, at = files.describe(name)
        if batch.tensors and batch.len + nbytes > most:
            yield batch
            batch = _Batch()
        batch.add(name, torch_type(dtype, shape), nbytes, path, at)
    if batch.tensors:
        yield batch


class OnGpu:
    """The tensors of files, as PyTorch's on a GPU. Types that PyTorch lacks come as `Tensor`, on the host."""

    def __init__(self, files: Files, gpu: Gpu) -> None:
        self._files, self._gpu = files, gpu

    def tensor(self, name: str) -> Any:
        """Reads one."""
        [batch] = _batches(self._files, [name], BATCH)
        memory = self._gpu.memory(batch.len)
        if parts := batch.parts():
            self._gpu.read(self._files, memory, parts)
        return next(self._of(batch, memory))[1]

    def tensors(self, names: set[str] | None, most: int = BATCH) -> Generator[tuple[str, Any]]:
        """All, or those of these names, read ahead, in the order of their bytes. Memory of up to `most` bytes is freed
        together."""
        for name in names or ():
            self._files.describe(name)
        files, gpu = self._files.apart(), self._gpu
        wanted = (name for name in files.keys() if names is None or name in names)

        def begin(pool: ThreadPoolExecutor, batch: _Batch) -> Future[Any]:
            # Allocated here: PyTorch frees memory behind the work of the stream that it was allocated on.
            return pool.submit(gpu.read, files, gpu.memory(batch.len), batch.parts())

        return self._each(files, ahead(_batches(files, wanted, most), begin))

    def _each(self, files: Files, batches: Generator[tuple[_Batch, Any]]) -> Generator[tuple[str, Any]]:
        # Closed first, which ends a read that nobody waits for any more.
        with closing(batches), closing(files):
            for batch, memory in batches:
                yield from self._of(batch, memory)
                del memory

    def _of(self, batch: _Batch, memory: Any) -> Iterator[tuple[str, Any]]:
        import torch
        from torch.utils.dlpack import from_dlpack, to_dlpack

        for name, kind, place, nbytes in batch.tensors:
            if kind is None:
                yield name, self._files.get(name)
            elif nbytes == 0:
                yield name, torch.empty(kind[1], dtype=kind[0], device=self._gpu.device)
            else:
                # By DLPack each has a storage of its own bytes, and keeps the memory of all.
                own = from_dlpack(to_dlpack(memory[place : place + nbytes]))
                yield name, own.view(kind[0]).view(kind[1])

    def slice(self, name: str, ranges: Sequence[tuple[int, int]], shape: Sequence[int]) -> Any:
        """Reads a range of each dimension; the result has the shape `shape`."""
        import torch

        dtype, of, nbytes, _, _ = self._files.describe(name)
        kind, elements = torch_type(dtype, shape), math.prod(of)
        if kind is None:
            return self._files.slice(name, ranges, shape)
        if math.prod(shape) == 0:
            return torch.empty(kind[1], dtype=kind[0], device=self._gpu.device)
        inner = max((n for n, whole in enumerate(of) if ranges[n] != (0, whole)), default=0)
        below = math.prod(of[inner + 1 :])
        starts, step = [ranges[inner][0] * below if of else 0], below * (of[inner] if of else 1)
        run = (ranges[inner][1] - ranges[inner][0]) * below if of else 1
        for dim in range(inner - 1, -1, -1):
            starts = [n * step + at for n in range(*ranges[dim]) for at in starts]
            step *= of[dim]
        bits = nbytes * 8 // elements
        if bits % 8 and (run * bits % 8 or any(at * bits % 8 for at in starts)):
            raise ValueError(f"{name!r}: a slice of elements of {bits} bits starts and ends at whole bytes")
        run_bytes, rows = run * bits // 8, nbytes // of[0] if of else nbytes
        cover = (ranges[0][1] - ranges[0][0]) * rows if of else nbytes
        if len(starts) > 1 and run_bytes < _RUN and bits % 8 == 0 and cover <= _BETWEEN * run_bytes * len(starts):
            memory = self._gpu.memory(cover)
            self._gpu.read(self._files, memory, [(name, ranges[0][0] * rows, ranges[0][1] * rows, 0)])
            whole = memory.view(kind[0]).view(ranges[0][1] - ranges[0][0], *of[1:])
            cut = whole[(slice(None), *(slice(*one) for one in ranges[1:]))]
            return cut.contiguous().view(kind[1])
        memory = self._gpu.memory(run_bytes * len(starts))
        parts = [(name, at * bits // 8, at * bits // 8 + run_bytes, n * run_bytes) for n, at in enumerate(starts)]
        self._gpu.read(self._files, memory, parts)
        return memory.view(kind[0]).view(kind[1])


class OnHost:
    """The tensors of files, as what `convert` makes of those in host memory."""

    def __init__(self, files: Files, convert: Callable[[Tensor], Any]) -> None:
        self._files, self._convert = files, convert

    def tensor(self, name: str) -> Any:
        """Reads one."""
        return self._convert(self._files.get(name))

    def tensors(self, names: set[str] | None, most: int = BATCH) -> Generator[tuple[str, Any]]:
        """All, or those of these names, read ahead, in the order of their bytes."""
        stream = self._files.stream(names)
        return self._each(stream)

    def _each(self, stream: Iterator[Tensor]) -> Generator[tuple[str, Any]]:
        while (tensor := next(stream, None)) is not None:
            item = tensor.name, self._convert(tensor)
            # Nothing here keeps the memory while the next one is waited for.
            del tensor
            yield item
            del item

    def slice(self, name: str, ranges: Sequence[tuple[int, int]], shape: Sequence[int]) -> Any:
        """Reads a range of each dimension; the result has the shape `shape`."""
        return self._convert(self._files.slice(name, ranges, shape))
