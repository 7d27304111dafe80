"""A few seconds of the storm of faults of scripts/soak, which takes minutes otherwise."""

import json
import pathlib
import subprocess
import sys

import pytest

SOAK = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "soak"


def test_nothing_is_lost_and_nothing_leaks():
    done = subprocess.run(
        [sys.executable, SOAK, "0.2", "--seed", "1", "--jobs", "2"], capture_output=True, text=True, timeout=400
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["wrong"] == [], report
    assert report["succeeded"] > 0 and report["checks"] >= 3, report
