"""Prints the crates that packages are built of, as CycloneDX: sbom.py PACKAGE... < the JSON of `cargo metadata`.

For all processors and operating systems; without the crates of tests and of build scripts.
"""

import json
import sys
from urllib.parse import quote


def main(roots):
    metadata = json.load(sys.stdin)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}

    def needs(id):
        """Of dependencies for building (kind None) only; `build` and `dev` are not part of what users get."""
        return sorted(one["pkg"] for one in nodes[id]["deps"] if any(kind["kind"] is None for kind in one["dep_kinds"]))

    def reference(id):
        package = packages[id]
        return f"pkg:cargo/{quote(package['name'])}@{quote(package['version'])}"

    waiting = [package["id"] for package in packages.values() if package["name"] in roots and not package["source"]]
    if len(waiting) != len(roots):
        raise SystemExit(f"sbom.py: not all of {', '.join(roots)} are packages of this workspace")
    version = packages[waiting[0]]["version"]
    found = set()
    while waiting:
        if (id := waiting.pop()) not in found:
            found.add(id)
            waiting += needs(id)

    def component(id):
        package = packages[id]
        described = {"type": "library", "bom-ref": reference(id)}
        described |= {key: package[key] for key in ("name", "version")}
        if package["license"]:
            # Before SPDX had expressions, "/" stood for OR.
            described["licenses"] = [{"expression": package["license"].replace("/", " OR ").replace("  ", " ")}]
        return described | {"purl": reference(id)}

    found = sorted(found, key=reference)
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": "dmalane", "name": "dmalane", "version": version}},
        "components": [component(id) for id in found],
        "dependencies": [
            {"ref": "dmalane", "dependsOn": [reference(id) for id in found if packages[id]["name"] in roots]},
            *({"ref": reference(id), "dependsOn": [reference(one) for one in needs(id)]} for id in found),
        ],
    }
    print(json.dumps(bom, indent=1))


main(sys.argv[1:])
