"""The programs that cargo builds for the guests, and for the newest Mesa."""

import json
import os
import subprocess

from .settings import ROOT, Failed


def cargo(*arguments, env=None):
    """Runs cargo in the root of the project; gives what it prints."""
    done = subprocess.run(
        ["cargo", *arguments],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=os.environ | (env or {}),
    )  # fmt: skip
    if done.returncode != 0:
        raise Failed(f"cargo {' '.join(arguments)}: exit status {done.returncode}")
    return done.stdout


def executables(messages):
    """The test binaries in what `cargo test --message-format=json` prints, by package and target: {("dmalane-dma",
    "dmalane_dma"): path}."""
    found = {}
    for line in messages.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("profile", {}).get("test") and message.get("executable"):
            # "path+file:///DIRECTORY#NAME@VERSION", or "...DIRECTORY/NAME#VERSION" where the directory has that name.
            location, _, fragment = message["package_id"].rpartition("#")
            package = fragment.split("@")[0] if "@" in fragment else location.rpartition("/")[2]
            found[package, message["target"]["name"]] = message["executable"]
    return found


def test_binaries(*targets, options=(), env=None):
    """The paths of libtest binaries, each named by its package and target."""
    command = ["test", "--locked", "--no-run", "--message-format=json-render-diagnostics"]
    found = executables(cargo(*command, *options, env=env))
    missing = [" ".join(target) for target in targets if target not in found]
    if missing:
        raise Failed(f"cargo built no test {', '.join(missing)}")
    return [found[target] for target in targets]
