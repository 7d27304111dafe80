"""`python -m dmalane`, and the script `dmalane` of the package: what needs no more than the package."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import sys
from collections.abc import Sequence

from . import Error, __version__, manifest
from ._native import Files
from ._save import verified
from .compare.__main__ import main as compare
from .compare.measure import plain
from .compare.report import table

PROGRAM = (
    "the full command line is a program in Rust: from the archive of a release, or in a clone of dmalane by "
    "`cargo install --path crates/cli`"
)
COMMANDS = ("compare", "inspect", "manifest", "verify")
# Set where one program has handed a command to the other.
HANDED_OVER = "_DMALANE_PROGRAM"


def full_program() -> str | None:
    """The program in Rust, of the same name, where it is in PATH: behind this one in an environment that is active."""
    for folder in filter(os.path.isabs, os.get_exec_path()):
        path = os.path.join(folder, "dmalane")
        try:
            if os.path.isfile(path) and os.access(path, os.X_OK):
                with open(path, "rb") as file:
                    if file.read(4) == b"\x7fELF":
                        return path
        except OSError:
            continue
    return None


def inspect(files: list[str]) -> int:
    """Lists the tensors of files."""
    model = Files(files, raw=True)
    described = [(name, model.describe(name)) for name in model.keys()]
    rows = [(plain(name), dtype, str(shape), str(nbytes)) for name, (dtype, shape, nbytes, *_) in described]
    kinds = [f"{path}: {kind}" for path, kind in zip(model.paths(), model.containers(), strict=True)]
    print("\n".join([*kinds, *table([("tensor", "dtype", "shape", "bytes"), *rows], "<<<>")]))
    return 0


def differences(files: list[str], path: str, as_json: bool) -> int:
    """Prints where files differ from their manifest."""
    done = verified(files, path)
    found, unchecked = done["differences"], done["unchecked_files"]
    if as_json:
        print(json.dumps(done, indent=1))
        return int(bool(found))
    for one in found:
        print(plain(one["message"]))
    if not found:
        print("Verified in part" if unchecked else "Verified")
    else:
        print("1 difference" if len(found) == 1 else f"{len(found)} differences")
    if unchecked:
        print(f"Not checked: {unchecked} file{'s' if unchecked > 1 else ''} of the manifest not named")
    return int(bool(found))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dmalane", description="Files of models.", epilog=PROGRAM, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dmalane {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about in (
        ("inspect", "list the tensors of files (`inspect` of the program in Rust shows what is in the page cache)"),
        ("manifest", "hash every tensor of files; prints the manifest"),
        ("verify", "compare files with their manifest"),
    ):
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.add_argument("files", nargs="+", metavar="FILE", help="file, or directory or index of a model")
        if name == "manifest":
            command.add_argument("--sha256", action="store_true", help="take SHA-256 as well")
            command.add_argument("-o", "--output", metavar="FILE", help="write it there, where there is no file yet")
        if name == "verify":
            command.add_argument("--manifest", required=True, metavar="FILE")
            command.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("compare", help="compare ways to load files", add_help=False)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["compare"]:
        return compare(words[1:])
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        # Once: an executable may be a wrapper of this program.
        if (program := full_program()) and os.environ.get(HANDED_OVER) != program:
            with contextlib.suppress(OSError):
                os.execve(program, [program, *words], {**os.environ, HANDED_OVER: program})
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        meant = f"; did you mean {near[0]!r}?" if near else f"; {PROGRAM}"
        print(f"dmalane: the Python package has no command {words[0]!r}{meant}", file=sys.stderr)
        return 2
    options = parser().parse_args(words)
    try:
        if options.command == "inspect":
            return inspect(options.files)
        if options.command == "verify":
            return differences(options.files, options.manifest, options.json)
        made = json.dumps(manifest(options.files, sha256=options.sha256), indent=1)
        if options.output is None:
            print(made)
        else:
            with open(options.output, "x") as file:
                file.write(made + "\n")
        return 0
    except BrokenPipeError:
        # The reader has left, and what is buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Error, OSError) as error:
        print(f"dmalane: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
