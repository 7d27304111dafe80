"""Lays out the files of the Debian package for rpmbuild: rpm.py RELEASE WORK < the JSON of `cargo metadata`.

Writes WORK/files, which the spec copies to its root, and WORK/dmalane.spec.
"""

import json
import shutil
import sys
from pathlib import Path

PACKAGING = Path(__file__).resolve().parent
CLI = PACKAGING.parent / "crates/cli"
# Where Debian has a place of its own.
PLACES = {"usr/share/zsh/vendor-completions/": "usr/share/zsh/site-functions/"}
UNITS = "usr/lib/systemd/system/"

SPEC = """\
Name: dmalane
Version: {version}
Release: 1
Summary: {summary}
License: MIT OR Apache-2.0
%global debug_package %{{nil}}
%global _build_id_links none
%global __brp_compress /bin/bash /usr/lib/rpm/brp-compress
%global use_source_date_epoch_as_buildtime 1
%global clamp_mtime_to_source_date_epoch 1
%global _buildhost dmalane

%description
{description}

%install
mkdir -p %{{buildroot}}
cp -a {files}/. %{{buildroot}}
strip %{{buildroot}}/usr/bin/*

%post
if [ -x /usr/bin/systemd-sysusers ]; then
    systemd-sysusers dmalane.conf
else
    getent passwd dmalane >/dev/null || useradd --system --user-group --home-dir / --shell /sbin/nologin dmalane || :
fi
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi

%preun
if [ $1 = 0 ] && [ -d /run/systemd/system ]; then systemctl --no-reload disable --now {units}; fi

%postun
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    if [ $1 -ge 1 ]; then systemctl try-restart {units}; fi
fi

%files
{listed}
"""


def main():
    release, work = Path(sys.argv[1]), Path(sys.argv[2])
    [package] = [one for one in json.load(sys.stdin)["packages"] if one["name"] == "dmalane-cli"]
    deb = package["metadata"]["deb"]
    units = sorted(path.name for path in PACKAGING.glob("dmalaned.*"))
    assets = [
        *deb["assets"],
        *([f"../../packaging/{unit}", UNITS, "644"] for unit in units),
        ["../../packaging/dmalane.sysusers", "usr/lib/sysusers.d/dmalane.conf", "644"],
    ]
    listed = []
    for source, place, mode in assets:
        place = PLACES.get(place, place)
        source = source.replace("target/release", str(release))
        # Those below other folders keep their folders, as with cargo-deb.
        folder, below, pattern = source.partition("/**/")
        if not below:
            folder, _, pattern = source.rpartition("/")
        found = sorted(path for path in (CLI / folder).glob(f"**/{pattern}" if below else pattern) if path.is_file())
        if not found:
            raise SystemExit(f"{source}: there is no such file")
        for path in found:
            name = path.relative_to(CLI / folder)
            listed.append(f"/{place}{name}" if place.endswith("/") else f"/{place}")
            to = work / "files" / listed[-1].lstrip("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
            to.chmod(int(mode, 8))
    # rpmbuild compresses manual pages.
    listed = [f"{path}*" if "/man/" in path else path for path in listed]
    spec = SPEC.format(
        version=package["version"].replace("-", "~"),
        summary=package["description"].rstrip("."),
        description=deb["extended-description"],
        files=work / "files",
        units=" ".join(units),
        listed="\n".join(listed),
    )
    (work / "dmalane.spec").write_text(spec)


main()
