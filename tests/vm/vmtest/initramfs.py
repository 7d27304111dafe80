"""The guest's file system: busybox, modules, the programs to run, and the libraries that they were linked with."""

import re
import shutil
import stat
import subprocess
from pathlib import Path, PurePosixPath

from .kernels import FOLDER, all_modules
from .settings import Failed


def write_cpio(out, files):
    """Writes a cpio archive in the "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst in Linux).

    `files` has (path, mode, content) with the content as bytes or as the path of a file. Directories are added.
    """
    number = 0

    def entry(name, mode, size):
        nonlocal number
        number += 1
        encoded = name.encode() + b"\0"
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = [number, mode, 0, 0, links, 0, size, 0, 0, 0, 0, len(encoded), 0]
        header = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
        out.write(header + padding(len(header)))

    known = set()
    for path, mode, content in files:
        for parent in reversed(PurePosixPath(path).parents[:-1]):
            if parent not in known:
                known.add(parent)
                entry(str(parent), stat.S_IFDIR | 0o755, 0)
        data = content.read_bytes() if isinstance(content, Path) else content
        entry(path, stat.S_IFREG | mode, len(data))
        out.write(data)
        out.write(padding(len(data)))
    entry("TRAILER!!!", 0, 0)


def padding(length):
    """Padding to a multiple of 4."""
    return b"\0" * (-length % 4)


def libraries(ldd):
    """The paths in what ldd prints."""
    return re.findall(r"^(?:.*=> |\s*)(/\S*) \(", ldd, re.MULTILINE)


def program_files(programs, work, is_static):
    """The programs, without symbols, below tests/, with their libraries where they were linked."""
    files, linked = [], {}
    for name, binary in programs.items():
        if is_static:  # and stripped by the linker
            files.append((f"tests/{name}", 0o755, Path(binary)))
            continue
        stripped = work / f"{name}.stripped"
        for command in (["strip", "-o", stripped, binary], ["ldd", binary]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise Failed(f"{command[0]} {binary}: {done.stderr.strip()}")
        files.append((f"tests/{name}", 0o755, stripped.read_bytes()))
        stripped.unlink()
        linked |= {path: Path(path).resolve() for path in libraries(done.stdout)}
    return files + [(path.lstrip("/"), 0o755, file) for path, file in linked.items()]


def build(store, kernel, work, suites, programs, extra=(), stub=None):
    """Writes `work`/initramfs. `suites` are the lines of /suites; see tests/vm/init for what they mean. `stub`: a
    module of ours, loaded after the others."""
    folder = store.folder(kernel) / "modules"
    # In today's order, whenever they were fetched.
    modules = [module for module in all_modules() if (folder / f"{module}.ko").is_file()]
    files = {module: folder / f"{module}.ko" for module in modules} | ({stub.stem: stub} if stub else {})
    contents = [
        ("bin/busybox", 0o755, store.busybox(kernel.arch)),
        ("init", 0o755, FOLDER / "init"),
        ("suites", 0o644, "".join(f"{line}\n" for line in suites).encode()),
        ("modules/order", 0o644, "".join(f"{module}\n" for module in files).encode()),
        *((f"modules/{module}.ko", 0o644, file) for module, file in files.items()),
        *program_files(programs, work, is_static=kernel.arch is not None),
        *extra,
    ]
    with (work / "initramfs").open("wb") as out:
        write_cpio(out, contents)


def fresh(folder):
    """An empty folder in place of the one of the last run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
