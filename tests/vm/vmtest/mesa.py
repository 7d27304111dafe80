"""Mesa of Debian sid, with the Vulkan loader and the validation layers, in a private root: nothing is installed.

lavapipe, the software GPU, binds sparse buffers from Mesa 24.2 on, which is newer than that of Debian stable.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import debian, initramfs
from .binaries import test_binaries
from .kernels import Store
from .settings import Settings, Skip

USAGE = """\
usage: scripts/mesa test [ARGUMENT...]   run the tests that use a GPU on the newest lavapipe
       scripts/mesa run PROGRAM...       run a program of this machine with it
       scripts/mesa fetch                only fetch it

Mesa comes from Debian's archive as this machine's apt knows it, into the cache that `scripts/vm --help` names.
Exit status 77: it cannot be had; the last line says why."""

PACKAGES = ["mesa-vulkan-drivers", "vulkan-validationlayers", "libvulkan1", "libstdc++6"]
LAYER = "VkLayer_khronos_validation.json"
# The command that starts a program with it in a guest, on a line of /suites.
GUEST = (
    "../bin/env {variables} VK_DRIVER_FILES=/mesa/lvp.json VK_LAYER_PATH=/mesa VK_LOADER_LAYERS_DISABLE=~implicit~ "
    "/mesa/ld-linux-x86-64.so.2 --library-path /mesa"
)
# Packages and targets, with the tests of them that use a GPU.
TESTS = {
    ("dmalane-vulkan", "dmalane_vulkan"): None, ("dmalane-cli", "it"): "gpu::vulkan",
    ("dmalane-capi", "capi"): "on_a_gpu", ("dmalane", "it"): "devices::every_kind",
}  # fmt: skip


def fetch(settings):
    """Leaves Mesa in the cache; gives the folder and the version."""
    folder = settings.cache / "mesa"
    settings.cache.mkdir(parents=True, exist_ok=True)
    with (settings.cache / "mesa.lock").open("w") as lock:
        # Parts "mesa" and "vm" of scripts/check run at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "versions").is_file() or settings.refresh:
            work = initramfs.fresh(settings.cache / "mesa.part")
            packages = Store(settings).archive().fetch_with_dependencies(PACKAGES, "sid", work)
            debian.unpack(packages, work / "root")
            package = next(file for file in packages if file.name.startswith("mesa-vulkan-drivers_"))
            command = ["dpkg-deb", "-f", package, "Version"]
            version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            (work / "versions").write_text(f"{version}\n")
            for part in ("cache", *(f"root/usr/share/{name}" for name in ("doc", "man", "locale", "info"))):
                shutil.rmtree(work / part, ignore_errors=True)
            debian.replace(work, folder)
    return folder, (folder / "versions").read_text().strip()


def libraries(root):
    """The folder of the libraries, and the program that starts others with them."""
    loader = next(root.glob("usr/lib/*-linux-*/ld-linux-*.so*"), None)
    if loader is None:
        raise Skip("the packages have no dynamic loader for this machine")
    return loader.parent, loader


def described(source, library):
    """The description of a driver or a layer whose library is elsewhere."""
    description = json.loads(source.read_text())
    part = "ICD" if "ICD" in description else "layer"
    description[part]["library_path"] = str(library)
    return json.dumps(description)


def manifest(source, library, target):
    """Copies the description of a driver or a layer, with the library where it was unpacked."""
    target.parent.mkdir(exist_ok=True)
    target.write_text(described(source, library))
    return target


def guest_files(folder):
    """The files of a guest in which programs find this Mesa: (path, mode, file or content) `GUEST` starts one."""
    root = (folder / "root").resolve()
    lib, loader = libraries(root)
    objects = {lib / "libvulkan_lvp.so", lib / "libVkLayer_khronos_validation.so", lib / "libvulkan.so.1"}
    for file in tuple(objects):
        listed = subprocess.run([loader, "--library-path", lib, "--list", file], capture_output=True, text=True)
        if listed.returncode != 0:
            raise Skip(f"{file.name} of Mesa's packages: {listed.stderr.strip()}")
        objects |= {Path(path) for path in initramfs.libraries(listed.stdout)}
    descriptions = {
        "lvp.json": (next(root.glob("usr/share/vulkan/icd.d/lvp_icd*.json")), "libvulkan_lvp.so"),
        LAYER: (root / "usr/share/vulkan/explicit_layer.d" / LAYER, "libVkLayer_khronos_validation.so"),
    }
    return [
        *((f"mesa/{file.name}", 0o755, file.resolve()) for file in sorted(objects | {loader})),
        *((f"mesa/{name}", 0o644, described(source, f"/mesa/{library}").encode())
          for name, (source, library) in descriptions.items()),
    ]  # fmt: skip


def started(folder, program):
    """The command line of a program that finds this Mesa, and its environment."""
    root = (folder / "root").resolve()
    lib, loader = libraries(root)
    driver = next(root.glob("usr/share/vulkan/icd.d/lvp_icd*.json"), None)
    if driver is None:
        raise Skip("the packages have no lavapipe")
    driver = manifest(driver, lib / "libvulkan_lvp.so", root.parent / "icd.d/lvp.json")
    layer = root / "usr/share/vulkan/explicit_layer.d" / LAYER
    layer = manifest(layer, lib / "libVkLayer_khronos_validation.so", root.parent / "layer.d" / LAYER)
    environment = {
        "VK_DRIVER_FILES": str(driver), "VK_LAYER_PATH": str(layer.parent), "VK_LOADER_LAYERS_DISABLE": "~implicit~",
    }  # fmt: skip
    runner = [str(loader), "--library-path", str(lib)]
    # For programs that tests start: a word a line.
    environment["DMALANE_RUNNER"] = "\n".join(runner)
    return [*runner, *program], os.environ | environment


def main(arguments):
    try:
        if not arguments or arguments[0] not in ("test", "run", "fetch"):
            print(USAGE, file=sys.stderr)
            return 2
        folder, version = fetch(Settings.from_environment())
        print(f"Mesa {version} of Debian sid", flush=True)
        verb, *rest = arguments
        programs = {"fetch": [], "run": [rest] if rest else []}.get(verb)
        if programs is None:
            # The binaries that part "test" of scripts/check builds, so that nothing is built again.
            options = ["--tests", "--workspace", "--all-features"]
            paths = test_binaries(*TESTS, options=options)
            # A filter of the caller is for all.
            filtered = any(not argument.startswith("-") for argument in rest)
            selections = [[only] if only and not filtered else [] for only in TESTS.values()]
            programs = [[path, *only, *rest] for path, only in zip(paths, selections, strict=True)]
        status = 0
        for program in programs:
            command, environment = started(folder, program)
            status = subprocess.run(command, env=environment).returncode or status
        return status
    except Skip as reason:
        print(f"SKIPPED: {reason}")
        return 77
