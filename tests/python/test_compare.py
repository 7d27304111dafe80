"""`dmalane compare` with the loaders of this Python, and `dmalane manifest` beside its xxhash and hashlib."""

import hashlib
import importlib.util
import json
import subprocess
import sys

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


def test_peers_have_the_same_bytes(dmalane, tmp_path):
    path, _ = model(tmp_path)
    # A file beside the model does not pose as a library.
    (tmp_path / "safetensors.py").write_text("raise SystemExit('taken in')")
    of_safetensors = ["safetensors-mmap", "safetensors-clone", "safetensors-pread"]
    peers = ["plain-read", "dmalane", "mmap", "numpy-fromfile", *of_safetensors]
    if importlib.util.find_spec("dmalane"):
        peers.append("dmalane-python")
    only = [word for name in peers for word in ("--only", name)]
    options = ["--python", sys.executable, "--json", "--rounds"]
    result = json.loads(run(dmalane, "compare", path.name, *options, 2, *only, cwd=tmp_path))
    loaders = {loader["name"]: loader for loader in result["loaders"]}
    assert sorted(loaders) == sorted(peers)
    for name, loader in loaders.items():
        assert loader["skipped"] is None and loader["bytes_right"], loader
        assert len(loader["cold"]["runs_s"]) == len(loader["warm"]["runs_s"]) == 2
        assert loader["dma_ready"] == (name != "mmap"), loader
    # Where no loader could run, the report says why, and the status that there is nothing to compare.
    none = subprocess.run(
        dmalane.command("compare", path, *options, 1, "--only", "kvikio"), capture_output=True, text=True
    )
    assert none.returncode == 1 and "no loader could run here" in none.stderr, none
    assert json.loads(none.stdout)["loaders"][0]["skipped"] == "not installed: pip install kvikio-cu12"


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
