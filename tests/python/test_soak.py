"""A few seconds of the storm of faults of scripts/soak, which takes minutes otherwise, and how it sees what grows."""

import json
import pathlib
import random
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOAK = ROOT / "scripts" / "soak"
sys.path.insert(0, str(ROOT / "tests" / "soak"))

from storm import growth  # noqa: E402


def test_nothing_is_lost_and_nothing_leaks():
    done = subprocess.run(
        [sys.executable, SOAK, "0.2", "--seed", "1", "--jobs", "2"], capture_output=True, text=True, timeout=400
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["wrong"] == report["leaked"] == [], report
    assert report["succeeded"] > 0 and report["checks"] >= 4, report
    assert report["hashes of devices"] > 0 and report["witnesses: lives"] > 0, report


def leaks(minutes, kib_an_hour, scatter, late, seed):
    """What is seen of values that grow so, and scatter, in rounds of 20 s: a share of them are of something that the
    kernel has not freed yet."""
    chooser, found = random.Random(seed), growth.Growth()
    for at in range(0, 60 * minutes, 20):
        # The first round allocates.
        value = (0 if at == 0 else 500) + kib_an_hour * at / 3600 + chooser.uniform(-scatter, scatter)
        found.add(at, {"it": value + (2000 if chooser.random() < late else 0)})
    return found.leaks()


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_of_a_mebibyte_an_hour_is_seen(seed):
    assert leaks(12, 1100, scatter=8, late=0, seed=seed), "of a process"
    assert leaks(30, 1400, scatter=100, late=0.05, seed=seed), "of a control group"
    assert leaks(1, 1000 << 10, scatter=100, late=0.05, seed=seed), "a large one at once"


@pytest.mark.parametrize("seed", range(20))
def test_values_that_scatter_are_no_leak(seed):
    for minutes in 1, 12, 30:
        assert not leaks(minutes, 0, scatter=100, late=0.1, seed=seed)
        assert not leaks(minutes, 0, scatter=1000, late=0.1, seed=seed)


@pytest.mark.parametrize("at", range(0, 720, 20))
def test_a_step_is_no_leak(at):
    """An allocator that gets more from the kernel once."""
    found = growth.Growth()
    for seconds in range(0, 720, 20):
        found.add(seconds, {"it": 10_000 + (4000 if seconds >= at else 0)})
    assert not found.leaks()
