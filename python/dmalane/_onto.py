"""Tensors as they come to a device: one, a part of one, or many that are read ahead.

On a GPU of CUDA they are read through host memory that is registered once. PyTorch allocates their memory, which its
limits and statistics then count, and dmalane's queues copy to it. A read returns when the driver has said that its
copies have ended, so work on any stream comes after them; before it, the current stream is waited for, which may still
use what was in that memory. To other devices PyTorch copies them, from two buffers that it has pinned once.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ._frameworks import torch_type
from ._native import Device, Files, Tensor
from .errors import DeviceError, MemoryLimitError

_T = TypeVar("_T")
Range = tuple[int, int]
# A range of each dimension, and the shape of the result.
Part = tuple[Sequence[Range], Sequence[int]]
# Which tensors are read: all of one, or a part.
Wanted = Mapping[str, Part | None]

# Bytes of tensors that are read together, at most, except for a larger one.
BATCH = 256 << 20
# Of a slice of shorter runs that are no further apart all is read, this many bytes at a time, and cut on the GPU.
_RUN, _CUT = 64 << 10, 64 << 20
# Bytes of each of the two buffers that PyTorch pins.
_PINNED = 32 << 20
# Seconds that a GPU is kept open, with its registered memory, for the next use.
_IDLE = 10.0


def ahead(
    files: Files, items: Iterable[_T], begin: Callable[[ThreadPoolExecutor, _T], Future[Any]]
) -> Generator[tuple[_T, Any]]:
    """Items with the results of work that `begin` starts for each: for the first one now, for each other one before
    the one in front of it is handed out, unless memory lacks. To close it closes the files, which ends the work."""
    items = iter(items)
    left, begun = deque(islice(items, 1)), deque[tuple[_T, Future[Any]]]()

    def start(pool: ThreadPoolExecutor) -> None:
        if left:
            # It stays where it is if this fails.
            begun.append((left[0], begin(pool, left[0])))
            left.popleft()
            left.extend(islice(items, 1))

    def take(item: _T, result: Future[Any]) -> tuple[_T, Any]:
        return item, result.result()

    def each() -> Generator[Any]:
        pool = ThreadPoolExecutor(1, thread_name_prefix="dmalane")
        try:
            start(pool)
            yield None
            while left or begun:
                if not begun:
                    start(pool)
                try:
                    start(pool)
                except MemoryError:
                    pass
                except RuntimeError as error:
                    if not _is_out_of_memory(error):
                        raise
                # Nothing here keeps a result that was handed out.
                yield take(*begun.popleft())
        finally:
            files.close()
            pool.shutdown(cancel_futures=True)

    return primed(each())


def primed(generator: Generator[Any]) -> Generator[Any]:
    """A generator behind its first `yield`: from now on, to close it runs its `finally`."""
    next(generator)
    return generator


def _is_out_of_memory(error: RuntimeError) -> bool:
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return kind is not None and isinstance(error, kind)


def on_cuda(device: Any) -> Any:
    """The GPU of CUDA with its number that a device of PyTorch is; None for others."""
    import torch

    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


class Gpu:
    """A GPU of CUDA, as PyTorch and dmalane see it."""

    # Those in use, by process and number; those that are kept open for the next use, with their registered memory; and
    # why others cannot be opened.
    _open: weakref.WeakValueDictionary[tuple[int, int], Gpu] = weakref.WeakValueDictionary()
    _kept: set[Gpu] = set()
    _refused: set[tuple[int, int]] = set()
    _until = 0.0
    _timer: threading.Timer | None = None

    def __init__(self, device: Any) -> None:
        import torch

        self.device = device
        self._memory = Device(f"cuda:{device.index}")
        # Allocators that are plugged into PyTorch may have other memory.
        one = torch.empty(1, dtype=torch.uint8, device=device)
        self._memory.check_lent(one.data_ptr(), 1)

    @classmethod
    def of(cls, device: Any) -> Gpu | None:
        """The GPU of a device of PyTorch; None for others, and where it cannot be used, which is said."""
        import torch

        if (device := on_cuda(device)) is None:
            return None
        key = os.getpid(), device.index
        gpu = cls._open.get(key)
        if gpu is None and key not in cls._refused:
            torch.cuda.init()
            try:
                gpu = cls._open[key] = cls(device)
            except DeviceError as error:
                cls._refused.add(key)
                warnings.warn(f"{device}: PyTorch copies tensors there, after they have been read: {error}",
                              RuntimeWarning, stacklevel=4)  # fmt: skip
        if gpu is not None:
            cls._keep(gpu)
        return gpu

    @classmethod
    def _keep(cls, gpu: Gpu) -> None:
        cls._kept.add(gpu)
        cls._until = time.monotonic() + _IDLE
        # In a child of fork there is none.
        if cls._timer is None or not cls._timer.is_alive():
            cls._wait(_IDLE)

    @classmethod
    def _wait(cls, seconds: float) -> None:
        cls._timer = threading.Timer(seconds, cls._look)
        cls._timer.daemon = True
        cls._timer.start()

    @classmethod
    def _look(cls) -> None:
        if (left := cls._until - time.monotonic()) > 0:
            cls._wait(left)
        else:
            cls.let_go()

    @classmethod
    def let_go(cls) -> None:
        """Closes those that are not in use."""
        cls._kept.clear()

    def stream(self) -> Any:
        """PyTorch's current stream."""
        import torch

        return torch.cuda.current_stream(self.device)

    def empty(self, kinds: Sequence[tuple[Any, Sequence[int]]]) -> list[Any]:
        """New tensors of these types and shapes, whose memory nothing uses any more. Each has its own, as PyTorch frees
        it, records streams of it and hands it to other processes."""
        import torch

        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in kinds]
        if any(tensor.numel() for tensor in tensors):
            self.stream().synchronize()
        return tensors

    def read(self, files: Files, parts: Sequence[tuple[str, int, int, int]], tensors: Sequence[Any]) -> None:
        """Reads parts of tensors to addresses within the memory of `tensors`."""
        if parts:
            self._keep(self)
            files.read_onto(self._memory, parts, [(one.data_ptr(), one.nbytes) for one in tensors], tensors)

    def read_to(self, files: Files, targets: dict[str, Any]) -> None:
        """Reads tensors into memory of their own type and length."""
        import torch

        self.stream().synchronize()
        # As each change of a tensor does, so that gradients of what it was are refused.
        torch.autograd.graph.increment_version([one for one in targets.values() if not one.is_inference()])
        parts = [(name, 0, target.nbytes, target.data_ptr()) for name, target in targets.items()]
        self.read(files, parts, list(targets.values()))


class Pinned:
    """A device of PyTorch that is none of CUDA's, to which it copies from two buffers that it pins once."""

    _open: dict[Any, Pinned | None] = {}

    def __init__(self, device: Any) -> None:
        import torch

        self._lock = threading.Lock()
        self._buffers = [torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.Event(device) for _ in self._buffers]

    @classmethod
    def of(cls, device: Any) -> Pinned | None:
        """Those of an accelerator of this PyTorch; None for others, and where it pins no memory, which is said."""
        import torch

        current = getattr(torch, "accelerator", None) and torch.accelerator.current_accelerator()
        # Apple's GPUs share the host's memory.
        if current is None or current.type != device.type or device.type == "mps":
            return None
        if (os.getpid(), device) not in cls._open:
            try:
                cls._open[os.getpid(), device] = cls(device)
            except (RuntimeError, NotImplementedError) as error:
                cls._open[os.getpid(), device] = None
                warnings.warn(f"{device}: tensors are copied there from memory that is not pinned: {error}",
                              RuntimeWarning, stacklevel=4)  # fmt: skip
        return cls._open[os.getpid(), device]

    def copy(self, source: Any, target: Any) -> None:
        """Copies a tensor of the host to a contiguous one of the same type and length; returns when it is there."""
        import torch

        bytes_of, onto = (one.reshape(-1).view(torch.uint8) for one in (source, target))
        with self._lock:
            for n, at in enumerate(range(0, bytes_of.numel(), _PINNED)):
                piece = bytes_of[at : at + _PINNED]
                buffer, copied = self._buffers[n % 2][: piece.numel()], self._copied[n % 2]
                copied.synchronize()
                buffer.copy_(piece)
                onto[at : at + _PINNED].copy_(buffer, non_blocking=True)
                copied.record()
            for copied in self._copied:
                copied.synchronize()


def moved(source: Any, device: Any) -> Any:
    """A tensor of the host, on a device of PyTorch."""
    import torch

    pinned = Pinned.of(device)
    if pinned is None or source.numel() == 0:
        return source.to(device)
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    pinned.copy(source, target)
    return target


class Begun(NamedTuple):
    """A tensor whose memory is there: `read`, on any thread, fills it, and `finish`, on the thread that wants it, makes
    the tensor of what that gives. Until then `beside` bytes of memory are taken that are not the tensor's."""

    read: Callable[[], Any]
    finish: Callable[[Any], Any]
    beside: int = 0

    def now(self) -> Any:
        """Reads it here."""
        return self.finish(self.read())


class _Batch:
    """Tensors that are read together: `kinds` has the types and shapes of those that PyTorch has, `onto_host` reads
    the others."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kinds: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self.bytes: dict[str, Range] = {}
        self.onto_host: dict[str, Callable[[], Tensor]] = {}
        self.len = 0

    def add(self, files: Files, name: str, part: Part | None) -> None:
        dtype, of, nbytes, _, _ = files.describe(name)
        kind = torch_type(dtype, of if part is None else part[1])
        if part is not None:
            files.check_slice(name)
        self.names.append(name)
        if kind is None:
            self.onto_host[name] = lambda: files.get(name) if part is None else files.slice(name, *part)
            return
        self.kinds[name] = kind
        start, stop = (0, nbytes) if part is None or not of else (nbytes * row // of[0] for row in part[0][0])
        self.bytes[name] = start, stop
        self.len += stop - start

    def parts(self, tensors: dict[str, Any]) -> list[tuple[str, int, int, int]]:
        """Where the bytes of each tensor go."""
        return [
            (name, start, stop, tensors[name].data_ptr()) for name, (start, stop) in self.bytes.items() if start < stop
        ]


def _is_rows(files: Files, name: str, part: Part | None) -> bool:
    """Whether the bytes of a part follow each other: all of the dimensions behind the first, from byte to byte."""
    _, of, nbytes, _, _ = files.describe(name)
    if part is None or not of:
        return True
    whole = all(span == (0, dim) for span, dim in zip(part[0][1:], of[1:]))
    return whole and (not of[0] or all(nbytes * row % of[0] == 0 for row in part[0][0]))


def _batches(
    files: Files, wanted: Iterable[tuple[str, Part | None]], most: int
) -> Iterator[_Batch | tuple[str, Part]]:
    """What is read together; parts of whose bytes others lie in between are read alone."""
    batch = _Batch()
    for name, part in wanted:
        alone = part is not None and not _is_rows(files, name, part)
        if batch.names and (alone or batch.len + files.describe(name)[2] > most):
            yield batch
            batch = _Batch()
        if part is not None and alone:
            yield name, part
        else:
            batch.add(files, name, part)
    if batch.names:
        yield batch


def _in_order(files: Files, wanted: Wanted | None) -> list[tuple[str, Part | None]]:
    """What is wanted, in the order of the bytes."""
    for name in wanted or ():
        files.describe(name)
    if wanted is None:
        return [(name, None) for name in files.keys()]
    return [(name, wanted[name]) for name in files.keys() if name in wanted]


# What makes the tensors of a read that has ended.
_Come = Callable[[], Iterator[tuple[str, Any]]]


def _one(name: str, finish: Callable[[Any], Any], read: Any) -> _Come:
    return lambda: iter([(name, finish(read))])


class OnGpu:
    """The tensors of files, as PyTorch's on a GPU. Types that PyTorch lacks come as `Tensor`, on the host."""

    def __init__(self, files: Files, gpu: Gpu) -> None:
        self._files, self._gpu = files, gpu

    def tensor(self, name: str) -> Any:
        """Reads one."""
        return self.begin(name).now()

    def slice(self, name: str, ranges: Sequence[Range], shape: Sequence[int]) -> Any:
        """Reads a range of each dimension; the result has the shape `shape`."""
        return self.begin(name, ranges, shape).now()

    def tensors(
        self, wanted: Wanted | None, threads: int | None = None, most: int | None = None
    ) -> Generator[tuple[str, Any]]:
        """All, or those that are wanted, read ahead, in the order of their bytes; `most` bytes together."""
        files, gpu = self._files.apart(threads), self._gpu

        def begin(pool: ThreadPoolExecutor, batch: _Batch | tuple[str, Part]) -> Future[_Come]:
            # Allocated here: PyTorch frees memory behind the work of the stream that it was allocated on.
            if not isinstance(batch, _Batch):
                name, begun = batch[0], OnGpu(files, gpu).begin(batch[0], *batch[1])
                return pool.submit(lambda: _one(name, begun.finish, begun.read()))
            stream, tensors = gpu.stream(), dict(zip(batch.kinds, gpu.empty(list(batch.kinds.values()))))

            def read() -> _Come:
                gpu.read(files, batch.parts(tensors), list(tensors.values()))
                return lambda: self._of(batch, tensors, stream)

            return pool.submit(read)

        return self._each(ahead(files, _batches(files, _in_order(files, wanted), min(most or BATCH, BATCH)), begin))

    def _each(self, batches: Iterator[tuple[Any, _Come]]) -> Generator[tuple[str, Any]]:
        for _, come in batches:
            yield from come()

    def _of(self, batch: _Batch, tensors: dict[str, Any], stream: Any) -> Iterator[tuple[str, Any]]:
        for name in batch.names:
            host = batch.onto_host.get(name)
            # Nothing here keeps the memory of what was handed out.
            yield name, self._handed(tensors.pop(name), stream) if host is None else host()

    def _handed(self, tensor: Any, stream: Any) -> Any:
        """A tensor that was allocated on a stream, for the current one."""
        if (current := self._gpu.stream()) != stream:
            tensor.record_stream(current)
        return tensor

    def begin(self, name: str, ranges: Sequence[Range] | None = None, shape: Sequence[int] = ()) -> Begun:
        """Allocates the memory of one, or of a range of each of its dimensions with the shape `shape`."""
        gpu, files = self._gpu, self._files
        dtype, of, nbytes, _, _ = files.describe(name)
        kind = torch_type(dtype, of if ranges is None else shape)
        if ranges is not None:
            files.check_slice(name)
        if kind is None:
            if ranges is None:
                return Begun(lambda: files.get(name), lambda tensor: tensor)
            return Begun(lambda: files.slice(name, ranges, shape), lambda tensor: tensor)
        if ranges is None or math.prod(shape) == 0:
            stream, [target] = gpu.stream(), gpu.empty([kind])
            parts = [(name, 0, nbytes, target.data_ptr())] if target.numel() else []
            return Begun(lambda: gpu.read(files, parts, [target]), lambda _: self._handed(target, stream))
        # From here on, an element is a byte.
        bits = nbytes * 8 // math.prod(of)
        if of and any(bound * bits % 8 for bound in (of[-1], *ranges[-1])):
            raise ValueError(f"{name!r}: a slice of elements of {bits} bits starts and ends at whole bytes")
        dims = [*of[:-1], of[-1] * bits // 8] if of else [nbytes]
        spans = [*ranges[:-1], (ranges[-1][0] * bits // 8, ranges[-1][1] * bits // 8)] if of else [(0, nbytes)]
        inner = max((n for n, dim in enumerate(dims) if spans[n] != (0, dim)), default=0)
        below = math.prod(dims[inner + 1 :])
        run = (spans[inner][1] - spans[inner][0]) * below
        if inner > 0 and run < _RUN and dims[inner] * below < 2 * _RUN:
            return self._cut(name, dims, spans, kind)
        starts, step = [spans[inner][0] * below], below * dims[inner]
        for dim in range(inner - 1, -1, -1):
            starts = [n * step + at for n in range(*spans[dim]) for at in starts]
            step *= dims[dim]
        stream, [target] = gpu.stream(), gpu.empty([kind])
        parts = [(name, at, at + run, target.data_ptr() + n * run) for n, at in enumerate(starts)]
        return Begun(lambda: gpu.read(files, parts, [target]), lambda _: self._handed(target, stream))

    def _cut(self, name: str, dims: Sequence[int], spans: Sequence[Range], kind: tuple[Any, Sequence[int]]) -> Begun:
        """A slice of a tensor of bytes: rows are read as they are, and what is wanted of them is copied on the GPU."""
        import torch

        gpu, files, row = self._gpu, self._files, math.prod(dims[1:])
        (first, end), rows = spans[0], max(1, _CUT // row)
        inside = (slice(None), *(slice(*span) for span in spans[1:]))

        def allocate(count: int) -> Any:
            return gpu.empty([(torch.uint8, (count, *dims[1:]))])[0]

        def read(start: int, memory: Any) -> Any:
            gpu.read(files, [(name, start * row, (start + len(memory)) * row, memory.data_ptr())], [memory])
            return memory

        def shaped(cut: Any) -> Any:
            return cut.reshape(-1).view(kind[0]).view(kind[1])

        if end - first <= rows:
            stream, memory = gpu.stream(), allocate(end - first)
            return Begun(
                lambda: read(first, memory),
                lambda memory: shaped(self._handed(memory, stream)[inside].contiguous()),
                memory.nbytes - math.prod(stop - start for start, stop in spans),
            )

        def all_rows(_: None) -> Any:
            [target] = gpu.empty([(torch.uint8, [stop - start for start, stop in spans])])
            for start in range(first, end, rows):
                memory = read(start, allocate(min(rows, end - start)))
                target[start - first : start - first + rows] = memory[inside]
            return shaped(target)

        return Begun(lambda: None, all_rows)


class OnHost:
    """The tensors of files, as what `convert` makes of those in host memory."""

    def __init__(self, files: Files, convert: Callable[[Tensor], Any]) -> None:
        self._files, self._convert = files, convert

    def tensor(self, name: str) -> Any:
        """Reads one."""
        return self.begin(name).now()

    def slice(self, name: str, ranges: Sequence[Range], shape: Sequence[int]) -> Any:
        """Reads a range of each dimension; the result has the shape `shape`."""
        return self.begin(name, ranges, shape).now()

    def begin(self, name: str, ranges: Sequence[Range] | None = None, shape: Sequence[int] = ()) -> Begun:
        """One to be read, or a range of each of its dimensions with the shape `shape`."""
        if ranges is None:
            return Begun(lambda: self._files.get(name), self._convert)
        return Begun(lambda: self._files.slice(name, ranges, shape), self._convert)

    def tensors(self, wanted: Wanted | None, threads: int | None = None) -> Generator[tuple[str, Any]]:
        """All, or those that are wanted, read ahead, in the order of their bytes."""
        files, order = self._files.apart(threads), _in_order(self._files, wanted)
        whole = {name for name, part in order if part is None}
        if threads is not None and len(whole) < len(order):
            # Two reads at once would have twice as many threads.
            whole = set()
        apart = [item for item in order if item[0] not in whole]
        coming = ahead(files, apart, OnHost(files, self._convert)._part)
        return primed(self._each(files, files.stream(None if wanted is None else whole), coming, order, whole))

    def _part(self, pool: ThreadPoolExecutor, item: tuple[str, Part | None]) -> Future[Any]:
        begun = self.begin(item[0], *(item[1] or ()))

        def read() -> Callable[[], Any]:
            try:
                tensor = begun.read()
            except MemoryLimitError:
                # There may be room when it is wanted.
                return begun.now
            return lambda: begun.finish(tensor)

        return pool.submit(read)

    def _each(
        self,
        files: Files,
        stream: Iterator[Tensor],
        apart: Generator[tuple[Any, Any]],
        order: list[tuple[str, Part | None]],
        whole: set[str],
    ) -> Generator[Any]:
        try:
            yield None
            for name, _ in order:
                if name in whole:
                    tensor = next(stream)
                    item = tensor.name, self._convert(tensor)
                    # Nothing here keeps the memory while the next one is waited for.
                    del tensor
                else:
                    item = name, next(apart)[1]()
                yield item
                del item
        finally:
            files.close()
            apart.close()
