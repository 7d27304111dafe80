"""The program `dmalane` of the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from package.models import random_tensors, write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")


def program(*words, path=""):
    command = [sys.executable, "-m", "dmalane", *map(str, words)]
    environment = {**os.environ, "PATH": str(path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_the_program_knows_itself():
    assert program("--version").stdout == f"dmalane {dmalane.__version__}\n"
    said = program("--help")
    assert said.returncode == 0 and all(name in said.stdout for name in ("inspect", "manifest", "verify", "compare"))
    assert program("compare", "--help").stdout.startswith("usage: dmalane compare ")
    assert program().returncode == program("--nonsense").returncode == 2
    script = Path(sys.executable).parent / "dmalane"
    if script.exists():
        done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"dmalane {dmalane.__version__}\n"


def test_commands_of_the_other_program_are_named():
    done = program("load", "model.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("dmalane: the Python package has no command 'load'; ")
    assert "cargo install --path crates/cli" in line
    assert program("verfiy", "x").stderr.endswith("has no command 'verfiy'; did you mean 'verify'?\n")


def test_the_other_program_does_what_this_one_does_not(tmp_path):
    if "DMALANE_BIN" not in os.environ:
        pytest.skip("the program is not built: scripts/check python builds it")
    (tmp_path / "dmalane").symlink_to(os.environ["DMALANE_BIN"])
    assert program("iopt", "formats", path=tmp_path).stdout.startswith("format")


def test_tensors_are_listed(tmp_path):
    tensors = random_tensors()
    path = write_model(tmp_path / "m.safetensors", tensors)
    done = program("inspect", path)
    assert done.returncode == 0, done.stderr
    kind, head, *rows = done.stdout.splitlines()
    assert kind == f"{path}: safetensors" and head.split() == ["tensor", "dtype", "shape", "bytes"]
    assert {row.split()[0]: row.split()[-1] for row in rows} == {n: str(len(t[2])) for n, t in tensors.items()}
    missing = program("inspect", tmp_path / "missing")
    assert missing.returncode == 1 and missing.stderr.startswith("dmalane: ") and missing.stdout == ""
    with subprocess.Popen([sys.executable, "-m", "dmalane", "inspect", path], stdout=subprocess.PIPE) as process:
        process.stdout.close()
    assert process.returncode == 0


def test_files_are_compared_with_their_manifest(tmp_path):
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [3], b"abc"), "b": ("U8", [2], b"de")})
    made = program("manifest", path, "--sha256")
    assert made.returncode == 0 and json.loads(made.stdout) == dmalane.manifest(path, sha256=True)
    manifest = tmp_path / "m.manifest"
    manifest.write_text(made.stdout)
    assert (program("verify", path, "--manifest", manifest).stdout, program("verify", path).returncode) == (
        "Verified\n", 2)  # fmt: skip
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    done = program("verify", path, "--manifest", manifest)
    end = path.stat().st_size
    said = f'm.safetensors: tensor "b" differs (bytes {end - 2}..{end})\n1 difference\n'
    assert (done.returncode, done.stdout) == (1, said)
    told = program("verify", path, "--manifest", manifest, "--json")
    assert told.returncode == 1 and [one["tensor"] for one in json.loads(told.stdout)["differences"]] == ["b"]
    # Some files of the manifest, and one that was not downloaded.
    other = write_model(tmp_path / "other.safetensors", {"c": ("U8", [1], b"c")})
    both = tmp_path / "both.manifest"
    both.write_text(json.dumps(dmalane.manifest([path, other])))
    rest = "Not checked: 1 file of the manifest not named\n"
    assert program("verify", path, "--manifest", both).stdout == f"Verified in part\n{rest}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n")
    done = program("verify", path, "--manifest", both)
    assert done.stdout == (
        "m.safetensors: it is a Git LFS pointer to a file of 99 bytes, not that file; run: git lfs pull\n"
        f"1 difference\n{rest}"
    )
    if "DMALANE_BIN" in os.environ:
        words = [os.environ["DMALANE_BIN"], "verify", path, "--manifest", both, "--json"]
        full = json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
        ours = json.loads(program("verify", path, "--manifest", both, "--json").stdout)
        assert ours == {name: full[name] for name in ours}
    path.write_bytes(other.read_bytes())
    for status in (0, 1):
        done = program("manifest", path, "-o", tmp_path / "written")
        assert (done.returncode, done.stdout) == (status, "")
    assert "File exists" in done.stderr
    assert json.loads((tmp_path / "written").read_text()) == dmalane.manifest(path)
