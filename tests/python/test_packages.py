"""What packages contain, and what their scripts do; nothing is built or installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The part that cargo-deb puts into the script.
SYSUSERS = 'if [ "$1" = "configure" ]; then\n   systemd-sysusers ${DPKG_ROOT:+--root="$DPKG_ROOT"} dmalane.conf\nfi\n'


def test_the_pages_of_a_package_link_to_what_is_in_it(tmp_path):
    release = tmp_path / "release"
    for name in ("dmalane", "dmalaned", "package/man/a.1", "package/bash/a", "package/zsh/_a", "package/fish/a.fish"):
        (release / name).parent.mkdir(parents=True, exist_ok=True)
        (release / name).write_text("")
    metadata = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout
    words = [sys.executable, ROOT / "packaging/rpm.py", release, tmp_path / "work"]
    subprocess.run(words, input=metadata, check=True)
    pages = sorted((tmp_path / "work/files").rglob("*.md"))
    assert any(page.name == "README.md" for page in pages)
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^()\s:#]+)[^()\s:]*\)", page.read_text())]
    assert len(links) > 20
    assert [(str(page), link) for page, link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("has", [["systemd-sysusers", "useradd"], ["useradd"], []])
def test_the_user_of_the_daemon_is_made_with_what_there_is(tmp_path, has):
    script = (ROOT / "packaging/debian/postinst").read_text().replace("#DEBHELPER#\n", SYSUSERS)
    for name, status in [(name, 0) for name in has] + [("getent", 2)]:
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/calls\nexit {status}\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", script, "postinst", "configure"],
        env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert ("systemd-sysusers dmalane.conf" in calls) == ("systemd-sysusers" in has)
    assert ("useradd --system" in calls) == (has == ["useradd"])
    assert ("make a system user called dmalane" in done.stderr) == (not has)
