"""`safetensors.torch.load_file` and `save_file`, with the same signatures."""

from __future__ import annotations

import os
from typing import Any

from . import _load, _save
from ._arguments import Manifest
from ._lend import safe_open


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | Any = "cpu",
    *,
    plan: Any = None,
    group: Any = None,
    verify: Manifest | None = None,
) -> dict[str, Any]:
    """Loads a file into tensors of PyTorch, which own their memory. On another device than the CPU, each is moved there
    as soon as it has been read, so that host memory holds a few at a time.

    With `plan`, all ranks of `group` (a group of torch.distributed, by default all processes) call it together: each
    gets what the plan says, reads an equal share once, and the group hands round the rest. See `dmalane.plan`.

    With `verify`, a manifest, every tensor is compared with it as it arrives."""
    import torch

    target = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    if plan is not None:
        from .plan import tensors

        return dict(tensors(filename, plan, group, device=target, verify=verify))
    if target.type == "cpu":
        return _load.load_file(filename, framework="pt", verify=verify)
    with safe_open(filename, framework="pt", device=str(target), verify=verify) as f:
        return dict(f.tensors())


def save_file(
    tensors: dict[str, Any], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Writes tensors of PyTorch, as `safetensors.torch.save_file` does, in place of the file if there is one. The file
    appears whole or not at all."""
    seen: dict[tuple[int, int], str] = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {name!r} is not contiguous: call .contiguous() first")
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        key = (tensor.untyped_storage().data_ptr(), tensor.data_ptr())
        if key in seen:
            raise RuntimeError(f"tensors {seen[key]!r} and {name!r} share memory, which a file cannot say")
        seen[key] = name
    _save.save_file(tensors, filename, metadata, overwrite=True)


__all__ = ["load_file", "save_file"]
