"""Which tensors are the model: the same on every face, for random folders of models.

DMALANE_SETS says how many, 40 by default (scripts/nightly: 500); DMALANE_FUZZ_SEED where they begin.
"""

import ctypes
import json
import os
import subprocess
from pathlib import Path

import pytest
from package.sets import Refused, expected, random_folder

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")

COUNT = int(os.environ.get("DMALANE_SETS", 40))
SEED = int(os.environ.get("DMALANE_FUZZ_SEED", 1))
PROGRAM = Path(os.environ.get("DMALANE_BIN", Path(__file__).parents[3] / "target/debug/dmalane")).resolve()


class Failed(Exception):
    """What a face says in place of a model."""


def value(data):
    return memoryview(bytes(data)).cast("f")[0]


def python_host(path):
    """The tensors in host memory."""
    try:
        tensors = dmalane.load_file(path, framework="bytes")
    except dmalane.Error as error:
        raise Failed(str(error)) from None
    return {name: value(tensor) for name, tensor in tensors.items()}


def python_lazy(path):
    try:
        with dmalane.safe_open(path, framework="bytes") as file:
            return {name: value(file.get_tensor(name)) for name in file.keys()}
    except dmalane.Error as error:
        raise Failed(str(error)) from None


def on_device(spec):
    def load(path):
        try:
            with_tensors = dmalane.load_file(path, device=dmalane.open(spec))
        except dmalane.Error as error:
            raise Failed(str(error)) from None
        return {name: value(tensor.tobytes()) for name, tensor in with_tensors.items()}

    return load


def run(*command):
    # Messages with each cause in a line.
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "10000"})
    if done.returncode:
        assert done.returncode == 1, done.stderr
        raise Failed(done.stderr)
    return done.stdout


def command_line(path):
    """The files of the tensors, which say their values."""
    files = json.loads(run(PROGRAM, "load", path, "-d", "ram:1MiB", "--json"))["files"]
    return {tensor["name"]: Path(file["path"]).name for file in files for tensor in file["tensors"]}


def rust(path):
    """The names alone."""
    lines = run(PROGRAM.parent / "examples/load", path).splitlines()
    return {line.split()[0]: None for line in lines[:-1]}


class C:
    """A model as C has it."""

    class Filled(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("len", ctypes.c_uint64), ("checksum", ctypes.c_uint64)]

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))

    def check(self, answer):
        if answer < 0:
            text = ctypes.create_string_buffer(1 << 16)
            self.library.dml_last_error(text, ctypes.c_size_t(len(text)))
            raise Failed(text.value.decode())

    def __call__(self, path):
        model, tensors, index = ctypes.c_uint64(), {}, 0
        paths = (ctypes.c_char_p * 1)(os.fsencode(path))
        config = (ctypes.c_uint64 * 3)(24)
        self.check(self.library.dml_model_open(paths, ctypes.c_size_t(1), config, ctypes.byref(model)))
        tensor, name = ctypes.create_string_buffer(8 * 11 + 16), ctypes.create_string_buffer(256)
        while self.library.dml_model_tensor(model, ctypes.c_uint64(index), tensor, name, ctypes.c_size_t(256)) == 0:
            host, filled = ctypes.c_uint64(), self.Filled()
            read = self.library.dml_model_read(model, name, ctypes.byref(host), ctypes.byref(filled))
            self.check(read)
            tensors[name.value.decode()] = value(ctypes.string_at(filled.data, filled.len))
            self.check(self.library.dml_host_tensor_destroy(host))
            index += 1
        self.check(self.library.dml_model_destroy(model))
        return tensors


@pytest.fixture(scope="module")
def faces():
    """Each face: the tensors of a path. Built beside the program that `scripts/check` tests."""
    all_of_them = {"host": python_host, "lazy": python_lazy, "ram": on_device("ram:1MiB")}
    cuda = PROGRAM.with_name("libdmalane_fake_cuda.so")
    library = next((path for path in (PROGRAM.parent.glob("**/libdmalane_capi.so"))), None)
    if cuda.is_file():
        all_of_them["cuda"] = on_device(f"cuda:0,lib={cuda}")
    if library:
        all_of_them["C"] = C(library)
    if PROGRAM.is_file():
        all_of_them["command line"] = command_line
    if (PROGRAM.parent / "examples/load").is_file():
        all_of_them["Rust"] = rust
    missing = {"cuda", "C", "command line", "Rust"} - set(all_of_them)
    if missing:
        pytest.skip(f"not built: {', '.join(sorted(missing))}")
    return all_of_them


def test_every_face_has_the_same_model(faces, tmp_path):
    refused = 0
    for seed in range(SEED, SEED + COUNT):
        folder = random_folder(seed)
        place = tmp_path / str(seed)
        place.mkdir()
        path = folder.write(place)
        try:
            model, words = expected(folder), ()
        except Refused as refusal:
            model, words = None, refusal.args
            refused += 1
        for name, face in faces.items():
            about = f"seed {seed}, {name}: {folder}"
            try:
                got = face(path)
            except Failed as failure:
                assert model is None, f"{about}: {failure}"
                assert all(word in str(failure) for word in words), f"{about}: {words} in {failure}"
                continue
            assert model is not None, f"{about}: {words}"
            wanted = {tensor: (file, number, None) for tensor, (file, number) in model.items()}
            assert set(got) == set(wanted), about
            assert all(got[tensor] in wanted[tensor] for tensor in got), f"{about}: {got}"
    assert COUNT < 40 or 0.2 < refused / COUNT < 0.8, "the folders are of both kinds"
