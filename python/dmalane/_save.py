"""Writing safetensors files, and hashes of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import _native
from ._arguments import Manifest, Path, Paths, manifest_of, path_of, paths_of
from ._frameworks import describe, raw_bytes


def save_file(
    tensors: Mapping[str, Any],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = True,
) -> dict[str, Any]:
    """Writes a safetensors file of arrays, tensors of PyTorch or `Tensor`s, byte for byte as `safetensors` writes it.

    It appears whole or not at all, in place of the file if there is one, unless `overwrite` is False. Returns its
    `bytes`.
    """
    described = [(name, *describe(name, value), raw_bytes(value)) for name, value in tensors.items()]
    texts = None if metadata is None else dict(metadata)
    return {"bytes": _native.save_file(path_of(filename), described, texts, overwrite)}


def manifest(filename: Paths, *, sha256: bool = False) -> dict[str, Any]:
    """Hashes every tensor, header and gap of files, for `verify=`: the JSON object of docs/formats/manifest.md."""
    made: dict[str, Any] = json.loads(_native.manifest(paths_of(filename), sha256))
    return made


def verify(filename: Paths, manifest: Manifest) -> list[dict[str, Any]]:
    """Compares files with a manifest; returns the differences as `dmalane verify --json` has them: none is good."""
    found: list[dict[str, Any]] = verified(filename, manifest)["differences"]
    return found


def verified(filename: Paths, manifest: Manifest) -> dict[str, Any]:
    """The object of `dmalane verify --json`, without times."""
    found: dict[str, Any] = json.loads(_native.verify(paths_of(filename), manifest_of(manifest)))
    return found
