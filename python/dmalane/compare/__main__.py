"""`python -m dmalane.compare`, and `dmalane compare`."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from ..errors import Error
from .measure import CACHES, Comparison, Loader
from .report import as_csv, as_text, size

EPILOG = """\
examples:
  dmalane compare model.safetensors
  dmalane compare models/llama --rounds 11 --json
  dmalane compare model.safetensors --only dmalane --only safetensors-clone
  dmalane compare model.safetensors --device cuda:0
  dmalane compare model.safetensors --with 'mine=./my-loader --fast'

Each loader runs in a process of its own, in turns, with the files evicted from the page cache (cold) and in it (warm).
Time is from the first call of the loader until all bytes are in its memory. Only memory that a driver can pin is
DMA-ready: mappings of the page cache are listed as what they are. The bytes of every loader are hashed once and
compared. Ctrl-C ends it with the results so far. docs/how-to/compare-loaders.md says what a loader of --with prints.

exit status: 0 compared; 1 wrong bytes, no loader could run, or the files cannot be read; 2 usage error;
130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dmalane compare",
        description="Compare loaders: the same files, cold and warm, each in a process of its own.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, form = parser.add_argument, parser.add_mutually_exclusive_group()
    add("files", nargs="+", metavar="FILE", help="file to load, or directory or index of a model")
    add("--rounds", type=int, default=5, metavar="N", help="each runs every loader cold and warm [default: 5]")
    add("--only", action="append", default=[], metavar="LOADER", help="run this loader; may be given several times")
    add("--with", dest="extra", type=custom, action="append", default=[], metavar="NAME=COMMAND", help="add a loader")
    add("--device", metavar="DEVICE", help="device of PyTorch for the tensors, cuda:0 [default: host memory]")
    add("--timeout", type=float, default=300, metavar="SECONDS", help="give up on a run after this [default: 300]")
    form.add_argument("--json", action="store_true", help="print the result as JSON")
    form.add_argument("--csv", action="store_true", help="print the result as CSV")
    add("-q", "--quiet", action="store_true", help="show no progress")
    return parser


def custom(text: str) -> Loader:
    """Parses NAME=COMMAND."""
    name, _, command = text.partition("=")
    if not name or not command.strip():
        raise argparse.ArgumentTypeError("not NAME=COMMAND")
    return Loader(name, tuple(shlex.split(command)))


def show(step: str) -> None:
    """Shows the step that runs on stderr: in one line of a terminal, else a line for each."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{step[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
    elif step:
        print(f"dmalane compare: {step}", file=sys.stderr, flush=True)


def stop(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def text(comparison: Comparison) -> str:
    """The comparison for people."""
    count = len(comparison.files)
    answers = [f"{size(comparison.bytes)} in {count} file{'s' * (count > 1)}"]
    if not comparison.finished:
        answers.append("Interrupted: these are the results so far")
    for cache in CACHES:
        name, why = comparison.winner(cache)
        memory = f"memory of {comparison.device}" if comparison.device else "DMA-ready memory"
        answers.append(f"Fastest into {memory}, {cache}: {name or 'no winner'} ({why})")
    return as_text(comparison.json(), answers)


def main(words: Sequence[str] | None = None) -> int:
    """Compares, prints the result, and returns the exit status."""
    options = parser().parse_args(words)
    if options.rounds < 1 or not options.timeout > 0:
        parser().error("--rounds and --timeout are at least 1 and more than 0")
    try:
        comparison = Comparison(
            options.files,
            only=options.only,
            extra=options.extra,
            device=options.device,
            rounds=options.rounds,
            timeout=options.timeout,
        )
    except (Error, OSError) as error:
        return failed(error)
    except ValueError as error:
        parser().error(str(error))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    progress = (lambda _: None) if options.quiet else show
    interrupted = 0
    try:
        comparison.run(progress)
    except KeyboardInterrupt as interrupt:
        interrupted = 128 + interrupt.args[0]
    except (Error, OSError) as error:
        return failed(error)
    finally:
        progress("")
    if options.json:
        print(json.dumps(comparison.json(), indent=2))
    else:
        print(as_csv(comparison.json()) if options.csv else text(comparison), end="")
    wrong = [loader.name for loader in comparison.loaders if loader.first and not loader.bytes_right]
    if interrupted:
        return interrupted
    if wrong:
        return failed(f"not the bytes of the files: {', '.join(wrong)}")
    return 0 if any(loader.first for loader in comparison.loaders) else failed("no loader could run")


def failed(why: object) -> int:
    print(f"dmalane compare: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
