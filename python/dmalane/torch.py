"""`safetensors.torch`, with the same signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _load, _save
from ._arguments import Backend, Manifest, Path, Paths, check_backend
from ._frameworks import torch_device


def load_file(
    filename: Paths,
    device: str | int | Any = "cpu",
    *,
    backend: Backend = "mmap",
    plan: Any = None,
    group: Any = None,
    verify: Manifest | None = None,
) -> dict[str, Any]:
    """Loads a file into tensors of PyTorch, which own their memory. On another device than the CPU, each is moved there
    as soon as it has been read, so that host memory holds a few at a time. `backend` is checked and changes nothing.

    With `plan`, all ranks of `group` (a group of torch.distributed, by default all processes) call it together: each
    gets what the plan says, reads an equal share once, and the group hands round the rest. See `dmalane.plan`.

    With `verify`, a manifest, every tensor is compared with it as it arrives."""
    check_backend(backend)
    target = torch_device(device)
    if plan is not None:
        from .plan import tensors

        return dict(tensors(filename, plan, group, device=target, verify=verify))
    return _load.load_file(filename, "pt", target, verify=verify)


def load(data: bytes) -> dict[str, Any]:
    """The tensors in the bytes of a file."""
    return _load.load(data, "pt")


def load_model(
    model: Any, filename: Paths, strict: bool = True, device: str | int | Any = "cpu", *, backend: Backend = "mmap"
) -> tuple[list[str], list[str]]:
    """Loads a file into a `torch.nn.Module`; returns the names that the file lacks, and those that the module lacks.
    With `strict`, there must be none. A tensor that lies in the memory of one that the file has is not missing."""
    state = load_file(filename, device, backend=backend)
    missing, unexpected = map(list, model.load_state_dict(state, strict=False))
    tensors, lost = model.state_dict(), set(missing)
    for names in _sharing(tensors):
        there = [tensors[name] for name in names - lost]
        filled = {name for name in names & lost if any(_holds(one, tensors[name]) for one in there)}
        missing = [name for name in missing if name not in filled]
    if strict and (missing or unexpected):
        parts = [("missing in the file", missing), ("not in the model", unexpected)]
        said = "; ".join(f"{what}: {', '.join(sorted(names))}" for what, names in parts if names)
        raise RuntimeError(f"{type(model).__name__} and {filename} differ: {said}")
    return missing, unexpected


def save_file(
    tensors: Mapping[str, Any],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = True,
) -> dict[str, Any]:
    """Writes tensors of PyTorch as `dmalane.save_file` does, and as `safetensors.torch.save_file` refuses tensors that
    share memory and those that are not contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {name!r} is not contiguous: call .contiguous() first")
    for names in _sharing(tensors):
        said = ", ".join(map(repr, sorted(names)))
        raise RuntimeError(f"tensors {said} share memory, which a file cannot say: clone() them, or use save_model")
    return _save.save_file(tensors, filename, metadata, overwrite=overwrite)


def save_model(
    model: Any, filename: Path, metadata: Mapping[str, str] | None = None, force_contiguous: bool = True
) -> dict[str, Any]:
    """Writes a `torch.nn.Module` for `load_model`. Of tensors that share memory, one that has all of it is written, and
    the metadata says for each of the others which."""
    state, names_of = model.state_dict(), dict(metadata or {})
    for names in _sharing(state):
        whole = [name for name in sorted(names) if _has_all(state[name])]
        if not whole:
            raise RuntimeError(f"tensors {', '.join(sorted(names))} are parts of the same memory: clone() them first")
        for name in names - {whole[0]}:
            names_of.setdefault(name, whole[0])
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    return save_file(state, filename, names_of or metadata)


def _sharing(state: Mapping[str, Any]) -> list[set[str]]:
    """The names of tensors that share memory, in groups of two or more."""
    places = []
    for name, tensor in state.items():
        if tensor.numel() and tensor.device.type != "meta":
            places.append((*_place(tensor), name))
    groups: list[set[str]] = []
    until = ("", 0)
    for device, start, end, name in sorted(places):
        if (device, start) < until and device == until[0]:
            groups[-1].add(name)
        else:
            groups.append({name})
        until = max(until, (device, end)) if device == until[0] else (device, end)
    return [names for names in groups if len(names) > 1]


def _place(tensor: Any) -> tuple[str, int, int]:
    """Device, first byte and end of the memory of a tensor that has elements."""
    last = sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _holds(one: Any, other: Any) -> bool:
    """Whether a tensor has all bytes of another one, with which it shares memory."""
    (_, first, after), (_, start, end) = _place(one), _place(other)
    is_dense = one.numel() * one.element_size() == after - first
    return bool(one.is_set_to(other) or (is_dense and first <= start and end <= after))


def _has_all(tensor: Any) -> bool:
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


__all__ = ["load", "load_file", "load_model", "save_file", "save_model"]
