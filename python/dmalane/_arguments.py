"""Arguments that several functions take."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

# What functions take.
Progress = Callable[[int, int], object]
Manifest = str | os.PathLike[str] | Mapping[str, Any]
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def paths_of(path: Paths) -> list[str]:
    """The paths of files: of one, or of several."""
    several = [path] if isinstance(path, (str, os.PathLike)) else path
    if isinstance(several, (bytes, Mapping)) or not isinstance(several, Iterable):
        raise TypeError(f"a path is a str or an os.PathLike, or several of these, not {path!r}")
    paths = [os.fspath(one) for one in several]
    if wrong := [one for one in paths if not isinstance(one, str)]:
        raise TypeError(f"a path is a str or an os.PathLike, not {wrong[0]!r}")
    return paths


def parse_size(size: int | str | None) -> int | None:
    """Bytes of a size such as 4096, "256MiB" or "4GB"."""
    if size is None:
        return None
    if not isinstance(size, str):
        if (size := operator.index(size)) < 0:
            raise ValueError(f"{size} is negative")
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
