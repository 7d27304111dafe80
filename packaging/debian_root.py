"""Unpacks packages of a Debian with all that they depend on: debian_root.py SUITE ARCHITECTURE ROOT PACKAGE...

Prints how a program of ROOT starts there: the loader, with the folders of its libraries. Nothing is installed. Exit
status 77, with a reason, where the packages cannot be had.
"""

import platform
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/vm"))
sys.dont_write_bytecode = True
from vmtest import debian  # noqa: E402
from vmtest.settings import Settings, Skip  # noqa: E402


def start(root):
    """Libraries are in usr/lib or, before Debian 12, in lib; there the loader's usual name is an absolute link."""
    found = [path for path in sorted(root.glob("**/ld-*.so*")) if path.is_file() and not path.is_symlink()]
    if not found:
        raise Skip(f"the packages in {root} have no dynamic loader")
    if platform.machine() not in str(found[0]):
        return f"qemu-aarch64-static -L {root}"
    folders = [root / top / found[0].parent.name for top in ("lib", "usr/lib")]
    return f"{found[0]} --library-path {':'.join(str(folder) for folder in folders if folder.is_dir())}"


def main(suite, arch, root, *packages):
    root = Path(root).resolve()
    done = root / ".complete"
    if not done.is_file():
        archive = debian.Archive(Settings.from_environment(), [suite], arch, f"apt-{suite}-{arch}")
        work = root.with_name(root.name + ".part")
        for folder in (root, work):
            shutil.rmtree(folder, ignore_errors=True)
        debian.unpack(archive.fetch_with_dependencies(packages, suite, work), work / "root")
        debian.replace(work / "root", root)
        shutil.rmtree(work)
        done.touch()
    print(start(root))


try:
    main(*sys.argv[1:])
except Skip as reason:
    print(reason, file=sys.stderr)
    sys.exit(77)
