"""Arguments that several functions take."""

from __future__ import annotations

import importlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, overload

# What functions take.
Progress = Callable[[int, int], object]
Manifest = str | os.PathLike[str] | Mapping[str, Any]
Path = str | os.PathLike[str]
Paths = Path | Iterable[Path]
# How safetensors reads.
Backend = Literal["mmap", "pread"]


def path_of(filename: Path) -> str:
    """The path of a file."""
    path = os.fspath(filename) if isinstance(filename, (str, os.PathLike)) else filename
    if not isinstance(path, str):
        raise TypeError(f"a file name is a str or an os.PathLike, not {type(filename).__name__}")
    return path


def paths_of(filename: Paths) -> list[str]:
    """The paths of files: of one, or of several."""
    if isinstance(filename, (str, os.PathLike)):
        return [path_of(filename)]
    if isinstance(filename, (bytes, bytearray, memoryview, Mapping)) or not isinstance(filename, Iterable):
        raise TypeError(f"a file name is a str or an os.PathLike, or several of these, not {type(filename).__name__}")
    paths = [path_of(one) for one in filename]
    if not paths:
        raise ValueError("there are no file names: give one, or a directory")
    return paths


def needed(module: str, why: str) -> Any:
    """Imports a package that dmalane does without until somebody asks for what needs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(why, name=module) from error


def integer(value: object) -> int | None:
    """The value of an integer of any kind; None for all else, also for a bool."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else None


def check_backend(backend: object) -> None:
    """Checks safetensors' choice of how to read, which changes nothing here: nothing is a mapping of a file."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is none of {', '.join(map(repr, get_args(Backend)))}")


@overload
def parse_size(size: int | str) -> int: ...
@overload
def parse_size(size: None) -> None: ...
def parse_size(size: int | str | None) -> int | None:
    """Bytes of a size such as 4096, "256MiB" or "4GB"."""
    if size is None:
        return None
    if not isinstance(size, str):
        if (bytes_ := integer(size)) is None:
            raise TypeError(f'a size is a number of bytes, or a text such as "256MiB", not {size!r}')
        if bytes_ < 0:
            raise ValueError(f"{bytes_} is negative")
        return bytes_
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


def watched(progress: Progress | bool | None) -> Progress | None:
    """The function to call with bytes done and in all; of `True` a bar of tqdm."""
    if progress is None or progress is False:
        return None
    if progress is not True:
        return progress
    needed("tqdm", "progress=True draws a bar of tqdm: pip install tqdm, or give a function")
    from tqdm.auto import tqdm

    bar = tqdm(unit="B", unit_scale=True, unit_divisor=1024)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return update


@overload
def manifest_of(given: Manifest) -> str | bytes: ...
@overload
def manifest_of(given: None) -> None: ...
def manifest_of(given: Manifest | None) -> str | bytes | None:
    """The path of a manifest, or its JSON."""
    if given is None or isinstance(given, (str, os.PathLike)):
        return None if given is None else os.fspath(given)
    return json.dumps(given).encode()
