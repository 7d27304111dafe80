"""Tensors of PyTorch whose bytes are read when something needs them: of one that is narrowed first, only that part.

Loaders of models that are split over ranks take their part of a tensor by `narrow`, `chunk` and indices, those of
experts also by `unsqueeze` and `unbind`. Layers are alike, so what was taken of a tensor is read ahead of the next one
that is called so but for its numbers.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ._frameworks import torch_type
from ._native import Files
from ._onto import Begun, OnGpu, OnHost
from .errors import MemoryLimitError

# Shorter tensors are read whole, together, ahead.
_SMALL = 256 << 10
# Bytes that are read ahead of what is asked for, at most.
_AHEAD = 256 << 20

_NO_MEMORY = (MemoryLimitError, torch.cuda.OutOfMemoryError)

Ranges = tuple[tuple[int, int], ...]
# Dimensions of the file's tensor that a view has, in order; None for one of a single element that was added.
Dims = tuple[int | None, ...]
_aten = torch.ops.aten


class _Source:
    """A tensor of a file, and the reads of it that were begun ahead."""

    def __init__(self, ahead: _Ahead, name: str, shape: Sequence[int], habit: str) -> None:
        self._ahead, self.name, self.habit = ahead, name, habit
        self.whole: Ranges = tuple((0, dim) for dim in shape)
        # The parts that were asked for.
        self.asked: list[Ranges] = []
        self.begun: dict[Ranges, tuple[Begun, Future[Any]]] = {}

    def read(self, part: Ranges) -> Any:
        """A part, with all dimensions."""
        self.asked.append(part)
        try:
            if (guessed := self.begun.pop(part, None)) is not None:
                begun, come = guessed
                return begun.finish(come.result())
            return self.begin(part).now()
        except _NO_MEMORY:
            # Nothing that was guessed has to be there.
            self._ahead.drop()
            self.begun.clear()
            return self.begin(part).now()

    def begin(self, part: Ranges) -> Begun:
        """A part to be read."""
        if part == self.whole:
            return self._ahead.reader.begin(self.name)
        return self._ahead.reader.begin(self.name, part, [stop - start for start, stop in part])


class Later(torch.Tensor):
    """A range of each dimension of a tensor of a file. Its type and shape are known; whatever else is done with it
    reads its bytes first."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: _Source, part: Ranges, at: Dims, dtype: Any, device: Any) -> Later:
        shape = [1 if dim is None else part[dim][1] - part[dim][0] for dim in at]
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, source: _Source, part: Ranges, at: Dims, dtype: Any, device: Any) -> None:
        # Dimensions with an index are not in `at`.
        self._source, self._part, self._at = source, part, at
        self._read: Any = None

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<Later: {self.dtype} {list(self.shape)}, {'' if self._read is not None else 'not '}read>"

    def now(self) -> Any:
        """The tensor with its bytes."""
        if self._read is None:
            self._read = self._source.read(self._part).view(self.shape)
        return self._read

    def within(self, dim: int, start: int, stop: int, index: bool = False) -> Later:
        """A range of a dimension; with `index`, of one element and without that dimension."""
        of, part = self._at[dim], self._part
        if of is not None:
            first = part[of][0]
            part = (*part[:of], (first + start, first + stop), *part[of + 1 :])
        at = tuple(one for n, one in enumerate(self._at) if not index or n != dim % len(self._at))
        return Later(self._source, part, at, self.dtype, self.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known = _VIEWS.get(func)
        if known is not None and isinstance(args[0], Later) and args[0]._read is None:
            result = known(*args, **(kwargs or {}))
            if result is not None:
                return result
        args, kwargs = tree_map_only(Later, Later.now, (args, kwargs or {}))
        return func(*args, **kwargs)


def _slice(of: Later, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Later | None:
    start, stop, step = slice(start, end, step).indices(of.shape[dim])
    if step != 1 or (of._at[dim] is None and (start, stop) != (0, 1)):
        return None
    return of.within(dim, start, max(start, stop))


def _select(of: Later, dim: int, index: int) -> Later | None:
    count = of.shape[dim]
    if not -count <= index < count:
        return None
    index %= count
    return of.within(dim, index, index + 1, index=True)


def _split(of: Later, size: int, dim: int = 0) -> list[Later] | None:
    count = of.shape[dim]
    if size < 1 or not count or of._at[dim] is None:
        return None
    return [of.within(dim, at, min(at + size, count)) for at in range(0, count, size)]


def _split_with_sizes(of: Later, sizes: Sequence[int], dim: int = 0) -> list[Later] | None:
    if min(sizes, default=-1) < 0 or sum(sizes) != of.shape[dim] or of._at[dim] is None:
        return None
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [of.within(dim, end - size, end) for size, end in zip(sizes, ends)]


def _unbind(of: Later, dim: int = 0) -> list[Later]:
    return [of.within(dim, n, n + 1, index=True) for n in range(of.shape[dim])]


def _unsqueeze(of: Later, dim: int) -> Later | None:
    if not -of.dim() - 1 <= dim <= of.dim():
        return None
    dim %= of.dim() + 1
    return Later(of._source, of._part, (*of._at[:dim], None, *of._at[dim:]), of.dtype, of.device)


def _same(of: Later) -> Later:
    return Later(of._source, of._part, of._at, of.dtype, of.device)


# None where PyTorch is to say, with the bytes, what is wrong. A transposed tensor is read whole: its rows are columns
# of the file, of which each part would read what lies between.
_VIEWS = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
}


class _Ahead:
    """Reads that are begun before they are asked for: of each tensor the parts that were asked for of the last one
    that is called so but for its numbers."""

    def __init__(
        self, reader: OnGpu | OnHost, pool: ThreadPoolExecutor, sources: list[tuple[str, Any, str]], most: int
    ) -> None:
        self.reader, self._pool, self._most = reader, pool, most
        self._coming = deque(_Source(self, *one) for one in sources)
        self._begun: deque[tuple[_Source, int]] = deque()
        self._habits: dict[str, tuple[list[Ranges], int]] = {}
        self._bytes = 0

    def next(self) -> _Source:
        """The next tensor. Those behind it are begun."""
        source, size = self._begun.popleft() if self._begun else (self._coming.popleft(), 0)
        self._bytes -= size
        while self._coming and (habit := self._habits.get(self._coming[0].habit)) is not None:
            parts, each = habit
            # One of which nothing is asked for, as of another rank's layers, takes its place among those ahead, too.
            counted = parts or [self._coming[0].whole]
            size = sum(math.prod(stop - start for start, stop in part) for part in counted) * each
            if self._bytes + size > self._most:
                break
            try:
                # Its memory is allocated here, as PyTorch wants it for the stream of this thread.
                begun = {part: self._coming[0].begin(part) for part in parts}
            except _NO_MEMORY:
                # There may be room when it is wanted.
                break
            following, size = self._coming.popleft(), size + sum(one.beside for one in begun.values())
            following.begun = {part: (one, self._pool.submit(one.read)) for part, one in begun.items()}
            self._begun.append((following, size))
            self._bytes += size
        return source

    def done(self, source: _Source, nbytes: int) -> None:
        """Notes what was asked for of a tensor of this size."""
        asked = list(dict.fromkeys(source.asked))
        self._habits[source.habit] = asked, nbytes // math.prod(stop for _, stop in source.whole)
        for _, one in source.begun.values():
            one.cancel()
        source.begun.clear()

    def drop(self) -> None:
        """Ends what was begun."""
        for source, _ in self._begun:
            for _, one in source.begun.values():
                one.cancel()
            source.begun.clear()


def tensors(
    files: Files, reader: OnGpu | OnHost, names: Iterable[str], device: Any, limit: int | None = None
) -> Generator[tuple[str, Any]]:
    """The tensors of these names, in the order of their bytes, as `Later`; small ones, and those of types that PyTorch
    lacks, are read. `limit` is that of the files' memory."""
    wanted, large = set(names), {}
    for name in wanted:
        dtype, shape, nbytes, _, _ = files.describe(name)
        kind = torch_type(dtype, shape)
        if kind is not None and nbytes >= _SMALL and list(kind[1]) == list(shape):
            large[name] = kind[0], shape, nbytes
    order = [name for name in files.keys() if name in wanted]
    sources = [
        (name, large[name][1], re.sub(r"\d+", "#", name) + repr(large[name])) for name in order if name in large
    ]
    small = reader.tensors(dict.fromkeys(wanted - large.keys()))
    with ThreadPoolExecutor(1, thread_name_prefix="dmalane-later") as pool:
        ahead = _Ahead(reader, pool, sources, _AHEAD if limit is None else min(_AHEAD, limit // 4))
        try:
            for name in order:
                if name not in large:
                    yield next(small)
                    continue
                dtype, shape, nbytes = large[name]
                source = ahead.next()
                yield name, Later(source, source.whole, tuple(range(len(shape))), dtype, device)
                ahead.done(source, nbytes)
        finally:
            ahead.drop()
            small.close()
