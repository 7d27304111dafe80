"""Turns what `scripts/vm dma-map` heard from its guests into a table: dma_map.py LOG... > table.md"""

import json
import sys

MS = 1e6


def ms(ns):
    return f"{ns / MS:.3f}" if ns < 10 * MS else f"{ns / MS:.1f}"


print("| kernel | memory | call | map, first | map, least | unmap, least |")
print("|---|---|---|---|---|---|")
for path in sys.argv[1:]:
    rows = [line.split("ROW ", 1)[1] for line in open(path, encoding="utf-8", errors="replace") if "ROW {" in line]
    if not rows:
        raise SystemExit(f"{path}: no rows")
    for row in map(json.loads, rows):
        print(
            f"| {row['kernel']} | {row['memory']} | `{row['call']}` | {ms(row['first_ns'])} | {ms(row['map_ns'])} | {ms(row['unmap_ns'])} |"
        )
