"""`dmalane compare`: loaders that are there, loaders that are not, and one that returns wrong bytes."""

import csv
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
from package.models import random_tensors, write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")

from dmalane.compare import Comparison, Loader, measure  # noqa: E402
from dmalane.compare.__main__ import text  # noqa: E402


@pytest.fixture
def file(tmp_path):
    tensors = {f"t{i}": ("U8", [size], os.urandom(size)) for i, size in enumerate([1, 0, 4096, 300_001, 7])}
    return write_model(tmp_path / "model.safetensors", tensors)


def compare(*words, **options):
    command = [sys.executable, "-m", "dmalane.compare", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


def script(folder, name, lines):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return f"--with={name}={path}"


def by_name(done):
    return {loader["name"]: loader for loader in json.loads(done.stdout)["loaders"]}


def sample(seconds=1.0, *, ready=True, memory="private memory"):
    return measure.Sample("1", seconds, 0.5, 1 << 20, memory, ready, None)


def test_loaders_have_the_same_bytes(file, tmp_path):
    pytest.importorskip("safetensors")
    pytest.importorskip("numpy")
    # A file beside the model does not pose as a library.
    (tmp_path / "safetensors.py").write_text("raise SystemExit('taken in')")
    of_safetensors = ["safetensors-mmap", "safetensors-clone", "safetensors-pread"]
    names = ["dmalane", "plain-read", "numpy-fromfile", "mmap", "cat", *of_safetensors]
    only = [f"--only={name}" for name in names]
    done = compare(file.name, "--json", "--rounds", 1, *only, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "round 1 of 1: dmalane, cold\n" in done.stderr
    report = json.loads(done.stdout)
    assert (report["files"], report["bytes"], report["finished"]) == ([file.name], file.stat().st_size, True)
    loaders = by_name(done)
    assert sorted(loaders) == sorted(names)
    # With PyTorch, the tensors of safetensors are parts of the mapping.
    mapped = {"mmap", "cat", "safetensors-mmap"} if find_spec("torch") else {"mmap", "cat"}
    for name, loader in loaders.items():
        assert loader["skipped"] is None and loader["bytes_right"], loader
        assert loader["dma_ready"] == (name not in mapped), loader
        for cache in ("cold", "warm"):
            # Where the file cannot be evicted, no run counts as cold.
            runs = loader[cache]
            assert (runs is None) == (loader[f"not_{cache}"] == 1), loader
            assert runs is None or (len(runs["runs_s"]) == 1 and runs["peak_rss_bytes"] > 1e6 and runs["cpu_s"] >= 0)
    assert loaders["mmap"]["memory"] == "page cache, mapped"


def test_files_without_structure_are_compared_whole(file, tmp_path):
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(range(200)) * 1000)
    done = compare(file, other, "--csv", "--quiet", "--rounds=1", "--only=dmalane", "--only=plain-read")
    assert (done.returncode, done.stderr) == (0, "")
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [(row["loader"], row["cache"]) for row in rows if row["loader"] == "dmalane"] == [
        ("dmalane", "cold"), ("dmalane", "warm")]  # fmt: skip
    assert len(rows) == 4 and all(row["bytes_right"] == row["dma_ready"] == "true" for row in rows)


def test_a_loader_that_returns_wrong_bytes_is_named(file, tmp_path):
    rest = '"cpu_s":0.1,"peak_rss_bytes":1,"memory":"private memory","dma_ready":true'
    wrong = f"""echo 'library chatter'; echo '{{"seconds":0.25,{rest},"sha256":"{"0" * 64}"}}'"""
    loaders = {
        "wrong": wrong,
        "silent": "exit 0",
        "fails": "printf 'no such \\033[2J card\\n' >&2; exit 3",
        "slow": "sleep 100 & exec sleep 100",
        "huge": "exec cat /dev/zero",
        "honest": """echo '{"skipped": "needs a card"}'""",
        "timeless": f"""echo '{{"seconds":0,{rest}}}'""",
    }
    custom = [script(tmp_path, name, lines) for name, lines in loaders.items()]
    only = [f"--only={name}" for name in [*loaders, "plain-read"]]
    done = compare(file, "--json", "--rounds=1", "--timeout=3", *custom, *only)
    assert done.returncode == 1 and "not the bytes of the files: wrong\n" in done.stderr
    found = by_name(done)
    assert (found["wrong"]["bytes_right"], found["plain-read"]["bytes_right"]) == (False, True)
    for name, why in {
        "silent": "prints no result",
        "fails": "fails (exit status 3): no such \ufffd[2J card",
        "slow": "did not end within 3 s",
        "honest": "needs a card",
        "timeless": "says that it took no time",
        "huge": "",
    }.items():
        assert why in found[name]["skipped"], found[name]


def test_loaders_are_told_what_to_do(file, tmp_path):
    told = """rest='"cpu_s":0,"peak_rss_bytes":1,"memory":"","dma_ready":true'
echo "{\\"seconds\\":$((DMALANE_COMPARE_TOUCH + DMALANE_COMPARE_HASH + 1)),$rest}" """
    done = compare(file, "--json", "--rounds=1", "--only=told", script(tmp_path, "told", told))
    # They touch as much memory as they need, and as much page cache.
    (loader,) = by_name(done).values()
    assert loader["warm"]["median_s"] == 2 * file.stat().st_size + 1


def test_an_interrupted_comparison_has_what_was_measured(file, tmp_path):
    rest = '"cpu_s":0.1,"peak_rss_bytes":1,"memory":"","dma_ready":true'
    # The second run of each is the first that counts, and the fourth lasts.
    lines = f"""cd {shlex.quote(str(tmp_path))}; echo >>runs
[ $(wc -l <runs) -lt 4 ] || exec sleep 100
echo '{{"seconds":1,{rest}}}'"""
    custom = script(tmp_path, "mine", lines)
    words = [sys.executable, "-m", "dmalane.compare", file, "--json", "--only=mine", custom, "--rounds=4"]
    for number in (signal.SIGINT, signal.SIGTERM):
        (tmp_path / "runs").unlink(missing_ok=True)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while "round 2" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(number)
            out, _ = process.communicate(timeout=60)
        report = json.loads(out)
        assert process.returncode == 128 + number
        assert not report["finished"] and report["loaders"][0]["warm"]["runs_s"][:1] == [1]


def test_runs_of_another_state_do_not_count(file, monkeypatch):
    monkeypatch.setattr(measure, "prepare", lambda path, cold: not cold)
    comparison = Comparison(file, only=["plain-read"], rounds=2)
    comparison.run()
    (loader,) = comparison.json()["loaders"]
    assert loader["cold"] is None and loader["not_cold"] == 2
    assert len(loader["warm"]["runs_s"]) == 2 and loader["not_warm"] == 0
    assert "plain-read: 2 runs left out: the files were not cold" in text(comparison)


def test_a_winner_has_five_runs_and_no_range_overlaps(file):
    comparison = Comparison(file, only=["dmalane", "plain-read", "mmap"])
    loaders = {loader.name: loader for loader in comparison.loaders}
    for loader in loaders.values():
        loader.first, loader.bytes_right = sample(ready=loader.name != "mmap"), True

    def winner(ours, theirs):
        for name, seconds in {"dmalane": ours, "plain-read": theirs, "mmap": [0.001]}.items():
            loaders[name].runs["cold"] = [sample(one) for one in seconds]
        return comparison.winner("cold")

    ours = [1.0, 1.1, 1.2, 1.3, 2.0]
    assert winner(ours, [2.5] * 5)[0] == "dmalane"
    assert winner([3.0] * 5, [2.5] * 5)[0] == "plain-read"
    assert winner(ours, [1.9] * 5) == (None, "the ranges of dmalane and plain-read overlap")
    assert winner(ours[:4], [2.5] * 5) == (None, "4 of the 5 runs that it takes")
    assert winner(ours, [])[0] is None
    loaders["plain-read"].bytes_right = False
    assert winner(ours, [2.5] * 5) == (None, "no two loaders to compare")
    # The median of an even number lies between the middle two.
    winner([1.0, 2.0], [1.0])
    (ours,) = (loader for loader in comparison.json()["loaders"] if loader["name"] == "dmalane")
    assert ours["cold"]["median_s"] == 1.5


def test_bars_are_those_of_memory_for_drivers(file):
    comparison = Comparison(file, only=["dmalane", "plain-read", "mmap"])
    for loader, seconds in zip(comparison.loaders, (1.0, 2.0, 0.01), strict=True):
        loader.first, loader.bytes_right = sample(ready=loader.name != "mmap", memory="page cache, mapped"), True
        loader.runs["cold"] = [sample(seconds)]
    said = text(comparison)
    bars = {line.split()[0]: line.count("█") for line in said.splitlines() if " cold " in line and "█" in line}
    assert bars == {"dmalane": 16, "plain-read": 8, "mmap": 16} and "█+" in said
    assert "mmap: page cache, mapped, not DMA-ready" in said and "Interrupted" in said
    assert all(len(line) <= 100 for line in said.splitlines()), said


def test_what_is_not_installed_is_said_with_the_command_that_installs_it(file):
    done = compare(file, "--rounds=1", "--only=kvikio")
    if "not installed" not in done.stdout:
        pytest.skip("KvikIO is installed")
    assert done.returncode == 1 and done.stderr.endswith("dmalane compare: no loader could run\n")
    assert f"kvikio: not compared: not installed: {sys.executable} -m pip install kvikio" in done.stdout


def test_usage(tmp_path, file):
    for words, status, why in [
        ([], 2, "FILE"),
        ([file, "--only", "nobody"], 2, "no loader is called nobody; there are dmalane, "),
        ([file, "--with", "x"], 2, "NAME=COMMAND"),
        ([file, "--rounds", "0"], 2, "at least 1"),
        ([file, "--json", "--csv"], 2, "not allowed with"),
        ([tmp_path / "missing"], 1, "missing"),
    ]:
        done = compare(*words)
        assert done.returncode == status and why in done.stderr, done
    with pytest.raises(ValueError, match="nobody"):
        Comparison(file, only=["nobody"])
    mine = Loader("mine", ("true",))
    assert [loader.name for loader in Comparison([file], extra=[mine], only=["mine"]).loaders] == ["mine"]


def test_a_model_stands_for_its_files(tmp_path):
    for n in (1, 2):
        tensors = {f"{n}.{name}": tensor for name, tensor in random_tensors(n).items()}
        write_model(tmp_path / f"model-0000{n}-of-00002.safetensors", tensors)
    assert len(Comparison(tmp_path).files) == 2


def test_loaders_onto_a_device(file):
    done = compare(file, "--json", "--rounds=1", "--quiet", "--device=cpu")
    report = json.loads(done.stdout)
    assert report["device"] == "cpu"
    found = {loader["name"]: loader for loader in report["loaders"]}
    assert set(found) >= {"dmalane", "dmalane-prefetch", "safetensors-prefetch", "instanttensor"}
    if importlib.util.find_spec("torch") is None:
        assert done.returncode == 1 and "no loader could run" in done.stderr
        assert all("torch" in loader["skipped"] for loader in found.values())
        return
    assert done.returncode == 0, done.stderr
    for name in ("dmalane", "dmalane-prefetch", "safetensors-mmap", "safetensors-pread"):
        assert found[name]["bytes_right"] and found[name]["memory"] == "memory of cpu", found[name]


def test_a_library_is_imported_before_the_time_begins(tmp_path):
    (tmp_path / "torch.py").touch()
    says = "import sys\nfrom dmalane.compare import loaders\nprint(loaders.framework(), 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", says], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "pt True\n"
