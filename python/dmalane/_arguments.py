"""Arguments that several functions take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

# What functions take.
Progress = Callable[[int, int], object]
Manifest = str | os.PathLike[str] | Mapping[str, Any]
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def paths_of(path: Paths) -> list[str]:
    if isinstance(path, (str, os.PathLike)):
        return [os.fspath(path)]
    return [os.fspath(one) for one in path]


def parse_size(size: int | str | None) -> int | None:
    """Bytes of a size such as 4096, "256MiB" or "4GB"."""
    if size is None or isinstance(size, int):
        return size
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
