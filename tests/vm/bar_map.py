"""Turns what `scripts/vm bar-map` heard from its guests into a table: bar_map.py LOG... > table.md"""

import json
import sys

MS = 1e6


def runs(path):
    """Yields (kernel, report) of each `dmalane bar-map --json` in a guest's log."""
    text = []
    inside = False
    for line in open(path, encoding="utf-8", errors="replace"):
        line = line.rstrip("\r\n")
        if line.startswith("VM begin "):
            inside, text = True, []
        elif line.startswith("VM end "):
            inside = False
            status = line.split()[3]
            if status != "0":
                raise SystemExit(f"{path}: {line}\n" + "\n".join(text))
            yield json.loads("\n".join(text))
        elif inside:
            text.append(line)


def size(n):
    for unit, log in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << log:
            return f"{n >> log} {unit}"
    return str(n)


def ms(ns):
    return f"{ns / MS:.3f}" if ns < 10 * MS else f"{ns / MS:.0f}"


print("| kernel | BAR | way | `--align` | aligned to | map, first | map, least | unmap, least | rounds | all of them |")
print("|---|---|---|---|---|---|---|---|---|---|")
rows = {}
for path in sys.argv[1:]:
    for report in runs(path):
        kernel = ".".join(report["kernel"].split(".")[:2])
        all_runs = report["runs"]
        row = {key: min(r[key] for r in all_runs) for key in ("map_ns", "unmap_ns")}
        row["first_ns"] = all_runs[0]["map_ns"]
        row["all_ns"] = sum(r["map_ns"] + r["unmap_ns"] for r in all_runs)
        rows.setdefault((kernel, report["bytes"], report["way"], report["align"]), row)
        print(
            f"| {kernel} | {size(report['bytes'])} | {report['way']} | {report['align']} | {size(report['alignment'])} | {ms(row['first_ns'])} | "
            f"{ms(row['map_ns'])} | {ms(row['unmap_ns'])} | {len(all_runs)} | {ms(row['all_ns'])} |"
        )
print()
for (kernel, size_, way, align), row in rows.items():
    plain = rows.get((kernel, size_, way, "none"))
    if align == "auto" and plain:
        print(f"Linux {kernel}, {size(size_)}, {way}: none takes {plain['first_ns'] / row['first_ns']:.2f} times the instructions of auto at first, {plain['map_ns'] / row['map_ns']:.2f} times later, {plain['all_ns'] / row['all_ns']:.2f} times for all rounds.")
