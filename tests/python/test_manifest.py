"""`dmalane manifest` beside xxhash and hashlib of Python."""

import hashlib
import json
import subprocess

import numpy as np
import xxhash
from safetensors.numpy import save_file


def run(dmalane, *words, **options):
    return subprocess.run(dmalane.command(*words), capture_output=True, text=True, check=True, **options).stdout


def model(folder):
    rng = np.random.default_rng(5)
    tensors = {f"t{i}": rng.integers(0, 255, size, np.uint8) for i, size in enumerate([1, 0, 4096, 300_001, 7])}
    tensors["f"] = rng.random((30, 50), np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"a": "b"})
    return folder / "model.safetensors", tensors


def test_a_manifest_has_the_hashes_of_every_region(dmalane, tmp_path):
    path, tensors = model(tmp_path)
    manifest = json.loads(run(dmalane, "manifest", path, "--sha256"))
    (file,) = manifest["files"]
    data, at, names = path.read_bytes(), 0, []
    assert (file["name"], file["bytes"], file["format"]) == ("model.safetensors", len(data), "safetensors")
    for region in file["regions"]:
        piece = data[region["start"] : region["end"]]
        assert region["start"] == at
        assert region["xxh3"] == xxhash.xxh3_64_hexdigest(piece)
        assert region["sha256"] == hashlib.sha256(piece).hexdigest()
        if region["kind"] == "tensor":
            names.append(region["name"])
            assert piece == tensors[region["name"]].tobytes()
            assert tuple(region["shape"]) == tensors[region["name"]].shape
        at = region["end"]
    assert at == len(data) and sorted(names) == sorted(tensors)
