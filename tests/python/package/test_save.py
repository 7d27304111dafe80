"""Saving, and the package itself."""

import ast
import errno
import os
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import safetensors
from package.models import write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")


def test_files_are_those_of_the_format_s_library(tmp_path):
    from safetensors.numpy import save_file

    chance = np.random.default_rng(1)
    arrays = {
        f"{t}.{n}": chance.integers(0, 2, shape).astype(t)
        for t in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "bool", "c8")
        for n, shape in (("a", (3, 5)), ("scalar", ()), ("empty", (0, 3)), ("long", (300_000,)))
    }
    for i, metadata in enumerate((None, {"one": "1"})):
        ours, theirs = tmp_path / f"ours{i}", tmp_path / f"theirs{i}"
        save_file(arrays, theirs, metadata)
        saved = dmalane.save_file(arrays, ours, metadata)
        assert ours.read_bytes() == theirs.read_bytes()
        assert saved["bytes"] == theirs.stat().st_size


def test_every_type_survives_a_round_trip(tmp_path, model):
    path, tensors = model
    for framework in ("numpy", "bytes"):
        saved = tmp_path / f"{framework}.safetensors"
        dmalane.save_file(dmalane.load_file(path, framework=framework), saved)
        theirs = dict(safetensors.deserialize(saved.read_bytes()))
        assert {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in theirs.items()} == {
            n: (dtype, shape, data) for n, (dtype, shape, data) in tensors.items()
        }


def test_a_view_is_saved_as_it_looks(tmp_path):
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    dmalane.save_file({"t": array.T, "part": array[1:3, ::2]}, tmp_path / "m.safetensors")
    loaded = dmalane.load_file(tmp_path / "m.safetensors")
    assert np.array_equal(loaded["t"], array.T) and np.array_equal(loaded["part"], array[1:3, ::2])


def test_a_write_that_fails_names_the_file_and_leaves_none(tmp_path):
    path, limits = tmp_path / "m.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(dmalane.FileError, match="cannot write") as error:
            dmalane.save_file({"a": np.zeros(1 << 20, np.uint8)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (error.value.path, error.value.errno) == (str(path), errno.EFBIG) and os.listdir(tmp_path) == []


def test_a_place_that_takes_no_file_is_refused_as_python_does(tmp_path):
    write_model(tmp_path / "m.safetensors", {"a": ("U8", [2], b"ab")})
    for path, kind, number in [
        (tmp_path, IsADirectoryError, errno.EISDIR),
        (tmp_path / "m.safetensors" / "x", NotADirectoryError, errno.ENOTDIR),
        (tmp_path / "none" / "x", FileNotFoundError, errno.ENOENT),
    ]:
        with pytest.raises(dmalane.FileError) as error:
            dmalane.save_file({"b": np.zeros(3)}, path)
        assert isinstance(error.value, kind) and error.value.errno == number


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [2], b"ab")})
    before = path.read_bytes()
    with pytest.raises(dmalane.FileError, match="exists") as error:
        dmalane.save_file({"b": np.zeros(3)}, path, overwrite=False)
    assert error.value.path == str(path)
    for bad in ({"x": np.zeros(3, "datetime64[s]")}, {"x": object()}, {"x": np.zeros(2, ">i4")}):
        with pytest.raises(TypeError):
            dmalane.save_file(bad, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.safetensors"]
    loaded = dmalane.load_file(path)
    assert dmalane.save_file({"b": np.ones(3)}, path)["bytes"] == path.stat().st_size
    assert loaded["a"].tobytes() == b"ab", "what was loaded does not depend on the file"
    assert dmalane.load_file(path)["b"].tolist() == [1, 1, 1]
    link = tmp_path / "missing" / "m.safetensors"
    with pytest.raises(FileNotFoundError):
        dmalane.save_file({"b": np.ones(3)}, link)
    with pytest.raises(NotADirectoryError):
        dmalane.save_file({"b": np.ones(3)}, path / "m.safetensors")


def test_stubs_name_what_there_is():
    import dmalane._native as native

    stub = ast.parse((Path(dmalane.__file__).parent / "_native.pyi").read_text())
    named = {}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            named[node.name] = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            named[node.name] = None
        elif isinstance(node, ast.AnnAssign):
            named[node.target.id] = None
    public = {name for name in vars(native) if not name.startswith("__") or name == "__version__"}
    assert public == set(named)
    for name, members in named.items():
        if members is not None:
            own = {member for member in vars(getattr(native, name)) if not member.startswith("__")}
            assert own == {member for member in members if not member.startswith("__")}, name
    assert all(hasattr(dmalane, name) for name in dmalane.__all__)


def test_modules_read_one_way():
    """No module imports one that imports it, at any distance, not even within a function."""
    package = Path(dmalane.__file__).parent
    files = [path.relative_to(package.parent).with_suffix("") for path in package.rglob("*.py")]
    files = {".".join(path.parts).removesuffix(".__init__"): path for path in files}
    uses = {}
    for module, path in files.items():
        uses[module] = set()
        for node in ast.walk(ast.parse((package.parent / path).with_suffix(".py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = ".".join([*path.parts[: -node.level], *filter(None, [node.module])])
                found = {f"{base}.{alias.name}" for alias in node.names} & {*files, "dmalane._native"}
                uses[module] |= (found or {base}) & set(files)
    assert uses["dmalane.torch"] and uses["dmalane.compare.report"]
    while free := [module for module in uses if not uses[module] & set(uses)]:
        for module in free:
            del uses[module]
    assert not uses, "these import each other, or what does"


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter has its lock")
def test_the_module_leaves_the_interpreter_without_its_lock():
    """Python takes the lock back when it imports a module that does not say that it needs none, and warns."""
    program = "import sys, dmalane; assert 'numpy' not in sys.modules; print(sys._is_gil_enabled())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", done.stderr
