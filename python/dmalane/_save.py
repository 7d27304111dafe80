"""Writing safetensors files, and hashes of files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from . import _native
from ._arguments import Manifest, Paths, manifest_of, paths_of
from ._frameworks import describe, raw_bytes


def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a safetensors file of arrays, tensors of PyTorch or `Tensor`s, byte for byte as `safetensors` writes it.

    It appears whole or not at all, and in place of a file that exists only with `overwrite`. Blocks go past the page
    cache where the file system allows. Returns its `bytes`, and whether they went past the cache (`direct`).
    """
    described = [(name, *describe(name, value), raw_bytes(value)) for name, value in tensors.items()]
    texts = None if metadata is None else dict(metadata)
    size, direct = _native.save_file(os.fspath(path), described, texts, overwrite)
    return {"bytes": size, "direct": direct}


def manifest(path: Paths, *, sha256: bool = False) -> dict[str, Any]:
    """Hashes every tensor, header and gap of files, for `verify=`: the JSON object of docs/formats/manifest.md."""
    made: dict[str, Any] = json.loads(_native.manifest(paths_of(path), sha256))
    return made


def verify(path: Paths, manifest: Manifest) -> list[dict[str, Any]]:
    """Compares files with a manifest; returns the differences as `dmalane verify --json` has them: none is good."""
    found: list[dict[str, Any]] = json.loads(_native.verify(paths_of(path), manifest_of(manifest)))
    return found
