"""Tensors that are lent, within a limit of memory."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

from ._arguments import Manifest, Paths, manifest_of, parse_size, paths_of
from ._frameworks import TORCH, Framework, converter
from ._native import Files
from .errors import UnknownTensorError

_T = TypeVar("_T")


class Slice:
    """A tensor that is read in part: `f.get_slice(name)[:, 2:4]`."""

    def __init__(self, owner: safe_open, name: str) -> None:
        self._owner, self._name = owner, name
        self._dtype, self._shape, *_ = owner._of(name, owner._files.describe)

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The type, as the file spells it."""
        return self._dtype

    def __repr__(self) -> str:
        return f"<Slice of {self._name!r}: {self._dtype} {self.get_shape()}>"

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
                n = _integer(one)
                if not -dim <= n < dim:
                    raise IndexError(f"index {n} is not within a dimension of {dim}")
                ranges.append((n % dim, n % dim + 1))
        return self._owner._convert(self._owner._files.slice(self._name, ranges, shape))


def _integer(index: Any) -> int:
    try:
        if not isinstance(index, bool):
            return operator.index(index)
    except TypeError:
        pass
    raise TypeError(f"an index is an integer, a slice or an ellipsis, not {index!r}")


class safe_open:
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
        path: Paths,
        framework: Framework = "numpy",
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
        convert = converter(framework)
        self._convert = (lambda tensor: to_device(convert(tensor))) if to_device else convert
        self._files = Files(paths_of(path), parse_size(memory_limit), direct, manifest_of(verify))

    def __repr__(self) -> str:
        return f"<safe_open of {', '.join(self._files.paths())}>"

    def _of(self, name: str, read: Callable[[str], _T]) -> _T:
        """What `read` gives for a name; if there is no such tensor, the error names one that is called almost so."""
        try:
            return read(name)
        except UnknownTensorError as error:
            near = difflib.get_close_matches(name, self._files.keys(), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownTensorError(f"{error}{hint}", tensor=name) from None

    def __enter__(self) -> Self:
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
        return self._convert(self._of(name, self._files.get))

    def get_slice(self, name: str) -> Slice:
        """A tensor to read a part of."""
        return Slice(self, name)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
        """The tensors with their names, in the order in which their bytes arrive, read ahead on a thread; all of them,
        or those of `names`."""
        if isinstance(names, str):
            raise TypeError(f"names are several: tensors([{names!r}])")
        return self._tensors(None if names is None else set(names))

    def _tensors(self, names: set[str] | None) -> Iterator[tuple[str, Any]]:
        stream = self._files.stream(names)
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


def _to_device(framework: Framework, device: str) -> Callable[[Any], Any]:
    if framework not in TORCH:
        raise ValueError('safe_open lends host memory; device= takes a device of PyTorch with framework="pt"')
    import torch

    return lambda tensor: tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor
