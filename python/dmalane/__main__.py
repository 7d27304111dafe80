"""The program `dmalane`: `python -m dmalane`, or `dmalane` where pip puts scripts."""

import signal
import sys

from ._native import command_line


def main() -> int:
    """Runs the program with the words of this process."""
    # The program runs without the interpreter, whose handler would only note the signal.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command_line(["dmalane", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
