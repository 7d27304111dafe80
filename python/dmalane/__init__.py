"""Model weights in memory that any driver can register, with the time explained.

Two contracts: `load_file` gives tensors that own their memory; `safe_open` lends them within a limit of memory.
"""

from __future__ import annotations

from typing import Any

from . import errors
from ._arguments import parse_size
from ._frameworks import device_name
from ._last import last_report
from ._lend import Prefetch, Slice, safe_open
from ._load import alloc_and_read, attach, load, load_file, load_into
from ._native import Buffer, Device, DeviceTensor, Tensor, __version__
from ._save import manifest, save_file, verify
from .errors import *  # noqa: F403


def open(device: str | int | Any) -> Device:  # noqa: A001
    """Opens a device by name: "soft", "ram:64MiB", "vulkan:0", "cuda:0" and so on (`dmalane devices` lists them); those
    of CUDA also by number or `torch.device`."""
    return Device(device_name(device))


__all__ = [
    "Buffer",
    "Device",
    "DeviceTensor",
    "Prefetch",
    "Slice",
    "Tensor",
    "__version__",
    "alloc_and_read",
    "attach",
    "errors",
    "last_report",
    "load",
    "load_file",
    "load_into",
    "manifest",
    "open",
    "parse_size",
    "safe_open",
    "save_file",
    "verify",
    *errors.__all__,
]
