"""Tensors that are lent, within a limit of memory."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeVar

from ._arguments import Backend, Manifest, Paths, check_backend, integer, manifest_of, parse_size, paths_of
from ._frameworks import TORCH, Framework, converter, on_cpu, torch_device
from ._native import Files, Tensor
from ._onto import Gpu, OnGpu, OnHost, Part, moved
from .errors import UnknownTensorError

_T = TypeVar("_T")
# Tensors to read ahead: all of one, or a range of some of its first dimensions.
Plan = Mapping[str, slice | tuple[slice, ...] | None]


class Slice:
    """A tensor that is read in part: `f.get_slice(name)[:, 2:4]`."""

    def __init__(self, owner: safe_open, name: str, read: Callable[..., Any]) -> None:
        self._name, self._read = name, read
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
        return self._read(self._name, *self.part(index))

    def part(self, index: Any) -> Part:
        """A range of each dimension for an index, and the shape of what it gives."""
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
                    raise IndexError(f"a slice has a step of 1, not {step}: take a step of what it gives")
                stop = max(start, stop)
                ranges.append((start, stop))
                shape.append(stop - start)
            elif (n := integer(one)) is None:
                raise TypeError(f"an index is an integer, a slice or an ellipsis, not {one!r}: index what it gives")
            elif not -dim <= n < dim:
                raise IndexError(f"index {n} is not within a dimension of {dim}")
            else:
                ranges.append((n % dim, n % dim + 1))
        return ranges, shape


class TensorMeta(NamedTuple):
    """What the header of a file says of a tensor."""

    dtype: str
    shape: list[int]
    # First byte and end, counted from the first byte after the header.
    data_offsets: tuple[int, int]


class Prefetch:
    """Tensors that are read ahead, each handed out once: by `take(name)`, or by iterating."""

    def __init__(
        self, owner: safe_open, plan: Plan, reader: OnHost | OnGpu, threads: int | None
    ) -> None:
        wanted: dict[str, Part | None] = {}
        for name, part in plan.items():
            of = Slice(owner, name, reader.slice)
            indices = part if isinstance(part, tuple) else (part,)
            if part is not None and not all(isinstance(one, slice) and one.step in (None, 1) for one in indices):
                raise ValueError(f"{name!r}: a plan has None, or a slice with a step of 1 of some first dimensions")
            if part is not None and len(indices) > len(of.get_shape()):
                raise ValueError(f"{name!r} has {len(of.get_shape())} dimensions to slice, not {len(indices)}")
            wanted[name] = None if part is None else of.part(part)
        self._names = [name for name in owner.keys() if name in plan]
        self._left = {name: wanted[name] for name in self._names}
        self._reader = reader
        # Read, and not asked for yet.
        self._ready: dict[str, Any] = {}
        self._coming = reader.tensors(wanted, threads=threads)

    def __repr__(self) -> str:
        return f"<Prefetch of {len(self._names)} tensors, {len(self._left)} not taken>"

    def names(self) -> list[str]:
        """The names that it hands out, in the order of the bytes."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> Any:
        """A tensor, which is waited for; of one that is planned as a slice, that. Those that are read before it take
        memory until they are taken."""
        if name not in self._left:
            raise KeyError(f"{name!r} was taken, or is not in the plan")
        taken = self._read(name)
        # Not before: what could not be read can be asked for again.
        del self._left[name]
        return taken

    def _read(self, name: str) -> Any:
        while name not in self._ready:
            item = next(self._coming, None)
            if item is None:
                # The stream has failed: the rest is read one by one.
                part = self._left[name]
                return self._reader.tensor(name) if part is None else self._reader.slice(name, *part)
            self._ready[item[0]] = item[1]
            # Nothing here keeps the memory while the next one is waited for.
            del item
        return self._ready.pop(name)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name in list(self._left):
            if name in self._left:
                yield name, self.take(name)

    def close(self) -> None:
        """Ends the reads, and drops what was not taken."""
        self._left.clear()
        self._ready.clear()
        self._coming.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class safe_open:
    """Opens files and lends their tensors, within a limit of memory.

    with dmalane.safe_open(path, framework="numpy", memory_limit="1GiB") as f:
        for name, tensor in f.tensors():
            ...

    framework: "numpy", "pt" or "bytes".
    device: of PyTorch, with framework "pt". GPUs of CUDA are read onto through memory that is registered once; to other
        devices PyTorch moves each tensor when it has been read.
    backend: of safetensors; it is checked, and changes nothing, since no tensor is a mapping of a file.

    keep: attach to the model in the memory of the keeper, as `load_file` has it.

    Memory counts until the last array over it dies, or `Tensor.release()`. A loop variable keeps a tensor while the
    next one is read, so the limit holds at least two of the largest tensors. With `verify`, a manifest, headers are
    compared here, and each tensor when it is read; slices are refused.
    """

    def __init__(
        self,
        filename: Paths,
        framework: Framework = "numpy",
        device: str | int | Any = "cpu",
        *,
        backend: Backend = "mmap",
        memory_limit: int | str | None = None,
        direct: bool | None = None,
        verify: Manifest | None = None,
        keep: bool = False,
        _files: Files | None = None,
    ) -> None:
        check_backend(backend)
        self._framework, self._device = framework, device
        self._to = _target(framework, device)
        self._files = _files or Files(
            paths_of(filename), parse_size(memory_limit), direct, manifest_of(verify), keep=keep
        )
        self._made: OnHost | OnGpu | None = None
        self._paths = self._files.paths()
        self._starts: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<safe_open of {', '.join(self._paths)}>"

    @property
    def _reader(self) -> OnHost | OnGpu:
        # Not before something is read: a header needs no GPU.
        if self._made is None:
            self._made = _reader(self._files, self._framework, self._to)
        return self._made

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
        return self._of(name, lambda name: self._reader.tensor(name))

    def get_tensors(self) -> dict[str, Any]:
        """Reads all tensors, one after the other."""
        return dict(self.tensors())

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Type, shape and place of a tensor, as the header has them."""
        dtype, shape, nbytes, path, at = self._of(name, self._files.describe)
        if path not in self._starts:
            places = (self._files.describe(one)[3:] for one in self.keys())
            self._starts[path] = min(first for file, first in places if file == path)
        start = at - self._starts[path]
        return TensorMeta(dtype, list(shape), (start, start + nbytes))

    def prefetch(
        self,
        plan: Plan | None = None,
        *,
        device: str | int | Any = None,
        threads: int | None = None,
    ) -> Prefetch:
        """Begins to read tensors: all, or those of `plan`: whole (None), a slice of the first dimension, or a tuple of
        slices of the first ones.

        device: where they go; by default that of this object. threads: that read, at most 64, each a block at a time;
        by default as many reads at once as make the bytes come faster."""
        if threads is not None and (integer(threads) is None or threads < 1):
            raise ValueError(f"threads={threads!r} is not 1 or more")
        reader = self._reader
        if device is not None:
            reader = _reader(self._files, self._framework, _target(self._framework, device))
        return Prefetch(self, dict.fromkeys(self.keys()) if plan is None else plan, reader, threads)

    def get_slice(self, name: str) -> Slice:
        """A tensor to read a part of."""
        return Slice(self, name, self._reader.slice)

    def tensors(self, names: Iterable[str] | None = None) -> Generator[tuple[str, Any]]:
        """The tensors with their names, in the order in which their bytes arrive, read ahead on a thread; all of them,
        or those of `names`."""
        if isinstance(names, str):
            raise TypeError(f"names are several: tensors([{names!r}])")
        return self._reader.tensors(None if names is None else dict.fromkeys(names))

    def report(self, *, reference: bool = False) -> dict[str, Any]:
        """The reads so far: bytes, stages, and for each file how and why; memory in use and its limit.

        With `reference`, also rates to compare the stages with, in bytes per second, which are measured now, with the
        first 256 MiB at most: `read`, of the same files in the same way into memory that is there, and `first_touch`,
        of making that memory."""
        report = self._files.report()
        if reference:
            report["reference"] = self._files.references()
        return report


def _target(framework: Framework, device: object) -> Any:
    """The device of PyTorch that tensors go to; None for host memory."""
    converter(framework)
    if on_cpu(device):
        return None
    if framework not in TORCH:
        raise ValueError(f'device={device!r}: safe_open lends host memory, or PyTorch\'s tensors with framework="pt"')
    return torch_device(device)


def _reader(files: Files, framework: Framework, to: Any) -> OnHost | OnGpu:
    """How tensors are read for a framework, and a device of PyTorch or host memory."""
    convert, gpu = converter(framework), None if to is None else Gpu.of(to)
    if gpu is not None:
        return OnGpu(files, gpu)
    if to is None:
        return OnHost(files, convert)
    import torch

    def move(tensor: Tensor) -> Any:
        converted = convert(tensor)
        return moved(converted, to) if isinstance(converted, torch.Tensor) else converted

    return OnHost(files, move)
