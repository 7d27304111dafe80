"""Manifests: made, compared, and checked while files are loaded."""

import json
import random
import re
from pathlib import Path

import pytest
from package.models import write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")


def shards(folder, model):
    """A model of three files: every type, empty tensors, and one whose bytes are at odd offsets."""
    chance = random.Random(3)
    folder.mkdir()
    first = folder / "model-00001-of-00003.safetensors"
    first.write_bytes(Path(model[0]).read_bytes())
    for n, pad in ((2, 8), (3, 7)):
        tensors = {f"{n}.{i}": ("U8", [size], chance.randbytes(size)) for i, size in enumerate([0, 1, 70_001, 0, 3])}
        write_model(folder / f"model-0000{n}-of-00003.safetensors", tensors, {"n": str(n)}, pad=pad)
    return sorted(folder.glob("*.safetensors"))


def test_every_way_to_load_takes_good_files(model, tmp_path):
    files = shards(tmp_path / "model", model)
    tmp_path = tmp_path / "model"
    manifest = dmalane.manifest(tmp_path, sha256=True)
    path = tmp_path / "weights.manifest"
    path.write_text(json.dumps(manifest))
    plain = {name: t.tobytes() for name, t in dmalane.load_file(tmp_path, framework="bytes").items()}
    for verify in (manifest, path, str(path)):
        for align in (None, 4096):
            loaded = dmalane.load_file(tmp_path, framework="bytes", align=align, verify=verify)
            assert {name: t.tobytes() for name, t in loaded.items()} == plain
    with dmalane.safe_open(tmp_path, "bytes", memory_limit="2MiB", verify=manifest) as f:
        assert {name: t.tobytes() for name, t in f.tensors()} == plain
        assert f.get_tensor("2.2").tobytes() == plain["2.2"]
        with pytest.raises(ValueError, match="a part of a tensor"):
            f.get_slice("2.2")[1:3]
    into = {name: dmalane.Buffer(max(1, len(data))) for name, data in plain.items() if data}
    dmalane.load_into(into, tmp_path, strict=False, verify=manifest)
    assert all(into[name].tobytes() == plain[name] for name in into)
    on_device = dmalane.load_file(files, device="soft", verify=path)
    assert all(t.tobytes() == plain[name] for name, t in on_device.items())
    assert dmalane.verify(tmp_path, manifest) == dmalane.verify(files, str(path)) == []
    # One file of several, and one that was renamed.
    assert len(dmalane.load_file(files[1], verify=manifest)) == 5
    alone = dmalane.manifest(files[2])
    assert len(dmalane.load_file(files[2].rename(tmp_path / "other.safetensors"), verify=alone)) == 5


def test_each_flipped_bit_is_found_and_named(model, tmp_path):
    files = shards(tmp_path / "model", model)
    manifest = dmalane.manifest(files)
    regions = [(path, region) for path, file in zip(files, manifest["files"]) for region in file["regions"]]
    regions = [(path, region) for path, region in regions if region["start"] < region["end"]]
    chance = random.Random(4)
    for n, (path, region) in enumerate(regions):
        good = path.read_bytes()
        at, bit = chance.randrange(region["start"], region["end"]), 1 << chance.randrange(8)
        path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        loads = [lambda: dmalane.load_file(files, framework="bytes", verify=manifest)]
        if region["kind"] == "tensor":
            name = region["name"]
            with dmalane.safe_open(files, "bytes", verify=manifest) as f:
                loads += [lambda: f.get_tensor(name), lambda: dict(f.tensors())]
                for load in loads:
                    with pytest.raises(dmalane.IntegrityError) as error:
                        load()
                    found = error.value
                    assert (found.path, found.tensor, found.offset) == (path.name, name, region["start"])
                assert f.report()["memory_used"] == 0
            if n % 16 == 0:
                assert [d["tensor"] for d in dmalane.verify(files, manifest)] == [name]
        else:
            # The parser may refuse what the header has become before its hash is looked at.
            with pytest.raises((dmalane.IntegrityError, dmalane.FormatError)) as error:
                loads[0]()
            assert error.value.tensor is None or isinstance(error.value, dmalane.FormatError)
        path.write_bytes(good)
    assert dmalane.load_file(files, verify=manifest)


def test_differences_name_the_file_that_was_given(model, tmp_path):
    path = Path(model[0])
    manifest = dmalane.manifest(path)
    renamed = path.rename(tmp_path / "renamed.safetensors")
    assert dmalane.verify(renamed, manifest) == dmalane.verify(tmp_path, manifest) == []
    good = renamed.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
    for bad, problem, says in (
        (good[:-1] + bytes([good[-1] ^ 1]), "changed", rf"\(bytes \d+..{len(good)}\)"),
        (good[:-1], "short", f"{len(good) - 1} of {len(good)} bytes are there"),
        (good + b"1", "long", f"1 bytes follow its end at {len(good)}"),
        (pointer, "lfs_pointer", "git lfs pull"),
    ):
        renamed.write_bytes(bad)
        (difference,) = (one for one in dmalane.verify(renamed, manifest) if one["problem"] == problem)
        assert difference["file"] == "renamed.safetensors"
        assert re.search(f"^renamed.safetensors: .*{says}", difference["message"])
    renamed.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for load in (dmalane.load_file, lambda path, **options: dmalane.load_file(path, device="soft", **options)):
        with pytest.raises(dmalane.IntegrityError, match="^renamed.safetensors: tensor") as error:
            load(renamed, verify=manifest)
        assert error.value.path == "renamed.safetensors"


@pytest.mark.parametrize("indexed", [False, True])
def test_a_shard_that_is_missing_hides_no_other_damage(model, tmp_path, indexed):
    files = shards(tmp_path / "model", model)
    folder = files[0].parent
    if indexed:
        names = {name: file.name for file in files for name in dmalane.load_file(file, "bytes")}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    manifest = dmalane.manifest(folder)
    files[1].unlink()
    good = files[2].read_bytes()
    files[2].write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    found = [(one["file"], one["problem"], one["tensor"]) for one in dmalane.verify(folder, manifest)]
    assert found == [(files[2].name, "changed", "3.4"), (files[1].name, "missing", None)]
    # What the manifest does not have is missing all the same, where an index lists it.
    alone = dmalane.manifest([files[0], files[2]])
    assert [one["file"] for one in dmalane.verify(folder, alone)] == [files[1].name]
    for whole in (dmalane.manifest, dmalane.load_file):
        with pytest.raises(dmalane.FileMissingError, match=files[1].name):
            whole(folder)


def test_other_files_and_bad_manifests_are_refused(model, tmp_path):
    path = Path(model[0])
    manifest = dmalane.manifest(path)
    other = write_model(tmp_path / "other.safetensors", {"a": ("U8", [3], b"abc")})
    for files in ([path, other], [other]):
        with pytest.raises(dmalane.IntegrityError):
            dmalane.load_file(files, verify=manifest)
    grown = tmp_path / "grown.safetensors"
    grown.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(dmalane.Error):
        dmalane.load_file(grown, verify=manifest)
    (difference,) = dmalane.verify(grown, manifest)
    assert (difference["problem"], difference["found_bytes"] - difference["expected_bytes"]) == ("long", 1)
    with pytest.raises(dmalane.IntegrityError):
        dmalane.load_file(other, device="soft", verify=manifest)
    # Two tensors that changed their names: only a manifest that somebody edited says so.
    regions = manifest["files"][0]["regions"]
    named = [region for region in regions if region["kind"] == "tensor"]
    named[0]["name"], named[3]["name"] = named[3]["name"], named[0]["name"]
    with pytest.raises(dmalane.IntegrityError, match="is not in the manifest"):
        dmalane.load_file(path, verify=manifest)
    for broken in ({}, {"schema": 1, "command": "manifest", "files": []}, tmp_path / "none"):
        with pytest.raises(dmalane.Error):
            dmalane.load_file(path, verify=broken)
    with pytest.raises(dmalane.Error, match="cannot"):
        dmalane.manifest(tmp_path / "none.safetensors")
