"""QEMU of Debian's sid: it speaks vfio-user, and its IOMMUs have more tables than those of this machine's QEMU."""

import shutil
import subprocess

from . import debian, initramfs
from .settings import Skip


def fetch(store):
    """Leaves QEMU of sid in the cache, with all that it is linked with; gives its version."""
    folder = store.settings.cache / "qemu"
    versions = folder / "versions"
    if not versions.is_file() or store.settings.refresh:
        work = initramfs.fresh(store.settings.cache / "qemu.part")
        packages = store.archive().fetch_with_dependencies(["qemu-system-x86"], "sid", work)
        debian.unpack(packages, work / "root")
        package = next(file for file in packages if file.name.startswith("qemu-system-x86_"))
        version = subprocess.run(
            ["dpkg-deb", "-f", package, "Version"], capture_output=True, text=True, check=True
        ).stdout.strip()
        upstream = version.partition(":")[2] or version
        if subprocess.run(["dpkg", "--compare-versions", upstream, "ge", "10.1"]).returncode != 0:
            raise Skip(f"sid has QEMU {version}, and vfio-user came with 10.1")
        (work / "versions").write_text(f"qemu-system-x86 {version} and {len(packages) - 1} packages\n")
        for part in ("cache", *(f"root/usr/share/{name}" for name in ("doc", "man", "locale", "info"))):
            shutil.rmtree(work / part, ignore_errors=True)
        debian.replace(work, folder)
    return versions.read_text().strip()


def program(folder):
    """How that QEMU starts with its own libraries: the first words of its command line, and its environment."""
    usr = folder / "root/usr"
    lib = usr / "lib/x86_64-linux-gnu"
    words = [
        f"{lib}/ld-linux-x86-64.so.2", "--library-path", f"{lib}", f"{usr}/bin/qemu-system-x86_64",
        "-L", f"{usr}/share/qemu", "-L", f"{usr}/share/seabios",
    ]  # fmt: skip
    return words, {"QEMU_MODULE_DIR": f"{lib}/qemu"}
