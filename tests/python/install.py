"""Installs the package from an extension module that is built already: install.py MODULE.so

`maturin build` chooses features for this package alone, so it builds every crate once more than the tests of the
workspace do. `scripts/nightly wheel` tests the wheel that users get.
"""

import pathlib
import subprocess
import sys
import tempfile
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def wheel(module: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes a wheel with the package's Python files, the module, and what pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    info = f"{project['name']}-{version}.dist-info"
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    files = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups.items()
    )
    package = ROOT / "python"
    sources = [path for path in package.rglob("*") if path.suffix in (".py", ".pyi") or path.name == "py.typed"]
    path = folder / f"{project['name']}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for source in sources:
            archive.write(source, source.relative_to(package).as_posix())
        archive.write(module, "dmalane/_native.abi3.so")
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in archive.namelist()))
    return path


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = wheel(pathlib.Path(sys.argv[1]), pathlib.Path(folder))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--force-reinstall", str(made)], check=True)
