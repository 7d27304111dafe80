"""What the guest said on its second serial port, as `cargo test` would print it.

Around what the tests print, the guest (tests/vm/init) says:
    VM kernel RELEASE          once
    VM begin SUITE             before the output of a test binary, which is libtest's: "test NAME ... ok"
    VM end SUITE STATUS        behind it, with its exit status
    VM check FILE OFFSET HEX NAME    (from a test) the host finds these bytes in that file when the guest is gone
    VM kill card               (from a test) the host kills the process that serves the card
    VM failed WHAT             something of the guest itself
    VM done                    last: without it the guest died
"""

from dataclasses import dataclass, field

from . import profiles, qemu
from .settings import Failed


@dataclass
class Outcome:
    """The lines to print, whether all suites passed and the guest got to its end, what the host has to check, and the
    archive of the programs' counts."""

    lines: list[str] = field(default_factory=list)
    passed: bool = True
    checks: list[tuple[str, int, bytes, str]] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)


def result(name, passed, reason=""):
    """A test of the host's, in libtest's words; scripts/check counts it."""
    verdict = "ok" if passed else "FAILED" + (f": {reason}" if reason else "")
    return [
        f"test {name} ... {verdict}",
        f"test result: {'ok' if passed else 'FAILED'}. {int(passed)} passed; {int(not passed)} failed; 0 ignored; "
        "0 measured; 0 filtered out",
    ]


def ignored(name, reason):
    """A test of the host's that could not run."""
    return [
        f"test {name} ... ignored, {reason}",
        "test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
    ]


def read(kernel, text):
    """Takes the guest's lines apart; `kernel` is the name that they are printed under."""
    outcome = Outcome()
    suite, ran, done = None, 0, False
    for line in text.replace("\r", "").splitlines():
        match line.split():
            case ["VM", "begin", suite, *_]:
                outcome.lines.append(f"     Running {kernel}:{suite}")
            case ["VM", "end", _, status, *_]:
                outcome.passed &= status == "0"
                suite = None
                ran += 1
            case ["VM", "kernel", release, *_]:
                outcome.lines.append(f"Linux {release}")
            case ["VM", "done"]:
                done = True
            case ["VM", "check", file, offset, expected, name]:
                check = (file, int(offset), bytes.fromhex(expected), name)
                if check not in outcome.checks:
                    outcome.checks.append(check)
            case ["VM", "kill", _]:
                pass
            case _ if suite == profiles.SUITE:
                outcome.counts.append(line)
            case _:
                outcome.lines.append(line)
                outcome.passed &= not line.startswith("VM failed ")
    if not done or not ran:
        outcome.passed = False
        outcome.lines += result(f"{suite or 'guest'}_ran_to_its_end", False)
    return outcome


def show(kernel, work, counts=None):
    """Prints what a guest said and what the host finds; True where all of it passed. `counts`: a folder for the counts
    of its programs."""
    outcome = read(kernel, text_of(work / qemu.TESTS))
    for file, offset, expected, name in outcome.checks:
        passed = bytes_at(work / file, offset, len(expected)) == expected
        outcome.passed &= passed
        outcome.lines += result(name, passed, f"bytes at {offset} of {file} are not what was written")
    print("\n".join(outcome.lines))
    if counts is not None:
        try:
            print(f"== kernel {kernel}: counts of {profiles.keep(counts, kernel, outcome.counts)} programs")
        except Failed as failure:
            outcome.passed = False
            print(failure)
    if not outcome.passed:
        print(f"the kernel's last lines ({work / qemu.CONSOLE}):")
        print("\n".join(text_of(work / qemu.CONSOLE).replace("\r", "").splitlines()[-30:]))
        print(text_of(work / "qemu.log"), end="")
    return outcome.passed


def text_of(file):
    return file.read_text(errors="replace") if file.is_file() else ""


def bytes_at(file, offset, length):
    if not file.is_file():
        return b""
    with file.open("rb") as source:
        source.seek(offset)
        return source.read(length)
