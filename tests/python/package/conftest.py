"""Model files and a driver for the tests of the package."""

import gc
import os
import subprocess
from pathlib import Path

import pytest
from package.fake_driver import FakeDriver
from package.models import random_tensors, write_model


@pytest.fixture
def model(tmp_path):
    """A file with every type, and what is in it."""
    tensors = random_tensors()
    return write_model(tmp_path / "every.safetensors", tensors, {"made": "here"}), tensors


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A file of 96 MiB in 24 tensors."""
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    block = os.urandom(4 << 20)
    tensors = {f"layer.{i:02}": ("F32", [1024, 1024], bytes([i]) * 64 + block[64:]) for i in range(24)}
    return write_model(path, tensors)


@pytest.fixture
def driver():
    """Built beside the program that `scripts/check` tests."""
    program = os.environ.get("DMALANE_BIN", Path(__file__).parents[3] / "target/debug/dmalane")
    path = Path(program).resolve().with_name("libdmalane_fake_cuda.so")
    if not path.is_file():
        pytest.skip(f"{path} was not built")
    driver = FakeDriver(path)
    driver.begin()
    yield driver
    gc.collect()
    driver.end()
    assert driver.report() == ["", ""], "nothing is left, and nothing was done wrong"


@pytest.fixture
def keeper(tmp_path, monkeypatch):
    """A keeper of its own; its folder."""
    program = Path(os.environ.get("DMALANE_BIN", Path(__file__).parents[3] / "target/debug/dmalane"))
    daemon = program.resolve().with_name("dmalaned")
    if not daemon.is_file():
        pytest.skip(f"{daemon} was not built")
    monkeypatch.setenv("DMALANE_KEEP", str(tmp_path / "keep.sock"))
    process = subprocess.Popen([daemon, "keep", "--memory", "256MiB"], stderr=subprocess.PIPE, text=True)
    assert "keeps up to" in process.stderr.readline()
    yield tmp_path
    process.terminate()
    process.wait()
