"""The counts of instrumented programs (rustc's `-C instrument-coverage`), brought out of the guest.

Each program leaves its counts in a file when it ends. After all suites the guest packs these files and prints the
archive on the port of the tests, as lines of base64: every kernel has that port, and needs no driver more.
"""

import base64
import binascii
import io
import tarfile
import zlib

from .settings import Failed

# Every program of the guest may write there, those that run as an ordinary user too.
VARIABLE = "LLVM_PROFILE_FILE=/tmp/%p.profraw"
SUITE = "profiles"
PACKED = "/profiles.tar.gz"


def lines(suites):
    """The lines of /suites whose programs leave counts, and those that bring the counts out."""
    counted = []
    for line in suites:
        name, stage, command = line.split(maxsplit=2)
        program = command if command.startswith("../") else f"/tests/{command}"
        program = program.removeprefix("../bin/env ")
        counted.append(f"{name} {stage} ../bin/env {VARIABLE} {program}")
    # The shell of tests/vm/init finds the files.
    return [
        *counted,
        f"pack devices ../bin/tar -czf {PACKED} -C /tmp *.profraw",
        f"{SUITE} devices ../bin/base64 {PACKED}",
    ]


def files(encoded):
    """The files of the archive that a guest printed, by name."""
    try:
        data = base64.b64decode("".join(encoded), validate=True)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            return {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isfile()}
    except (binascii.Error, tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise Failed(f"the guest's counts did not arrive whole: {error}") from None


def keep(folder, kernel, encoded):
    """Leaves the counts of a guest in a folder, where llvm-profdata looks for them; gives how many files there are."""
    found = files(encoded)
    if not found:
        raise Failed("no program of the guest left counts: were they built with -C instrument-coverage?")
    for old in folder.glob(f"guest-{kernel}-*.profraw"):
        old.unlink()
    for name, content in found.items():
        (folder / f"guest-{kernel}-{name}").write_bytes(content)
    return len(found)
