"""The tables of the pages in docs/bench that are measured in guests, out of what these said."""

import json

from .settings import Failed

MS = 1e6
SIZES = (("GiB", 30), ("MiB", 20), ("KiB", 10))


def size(n):
    for unit, log in SIZES:
        if n >= 1 << log:
            return f"{n >> log} {unit}"
    return str(n)


def ms(ns, digits=0):
    """Milliseconds with three digits below 10, and with `digits` from there on."""
    return f"{ns / MS:.{3 if ns < 10 * MS else digits}f}"


def reports(log):
    """The JSON that programs printed, in a guest's log."""
    lines = None
    for line in log.read_text(errors="replace").splitlines():
        match line.split():
            case ["VM", "begin", *_]:
                lines = []
            case ["VM", "end", _, status, *_]:
                if status != "0":
                    raise Failed("\n".join([f"{log}: {line}", *lines]))
                # Programs may say something before it.
                begin = next((i for i, line in enumerate(lines) if line.startswith("{")), None)
                if begin is not None:
                    yield json.loads("\n".join(lines[begin:]))
                lines = None
            case _ if lines is not None:
                lines.append(line)


def bar_map(logs):
    """The lines of the table, and of how much faster the best alignment is."""
    heads = "kernel, BAR, method, `--align`, aligned to, map first, map least, unmap least, rounds, all rounds"
    heads = heads.split(", ")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    rows = {}
    for report, bar in ((report, bar) for log in logs for report in reports(log) for bar in report["bars"]):
        kernel = ".".join(report["kernel"].split(".")[:2])
        runs = bar["runs"]
        row = {
            "first": runs[0]["map_ns"],
            "map": min(run["map_ns"] for run in runs),
            "unmap": min(run["unmap_ns"] for run in runs),
            "all": sum(run["map_ns"] + run["unmap_ns"] for run in runs),
        }
        rows.setdefault((kernel, bar["bytes"], bar["method"], report["align"]), row)
        cells = [
            kernel, size(bar["bytes"]), bar["method"], report["align"], size(bar["alignment"]),
            ms(row["first"]),
            ms(row["map"]), ms(row["unmap"]), len(runs), ms(row["all"]),
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    for (kernel, length, backend, align), row in rows.items():
        # From 6.15 on, Linux maps a BAR that is aligned by its largest pages.
        if align == "auto" and tuple(map(int, kernel.split("."))) >= (6, 15) and row["map"] >= MS:
            raise Failed(f"Linux {kernel}, {size(length)}, {backend}: aligned, and a map takes {ms(row['map'])} ms")
        plain = rows.get((kernel, length, backend, "none"))
        if align == "auto" and plain:
            first, later, total = (plain[key] / row[key] for key in ("first", "map", "all"))
            yield (
                f"Linux {kernel}, {size(length)}, {backend}: none takes {first:.2f} times the instructions of auto at "
                f"first, {later:.2f} times later, {total:.2f} times for all rounds."
            )


def dma_map(logs):
    """The lines of the table."""
    yield "| kernel | memory | call | map, first | map, least | unmap, least |"
    yield "|---|---|---|---|---|---|"
    for log in logs:
        found = [line.split("ROW ", 1)[1] for line in log.read_text(errors="replace").splitlines() if "ROW {" in line]
        if not found:
            raise Failed(f"{log}: no rows")
        for row in map(json.loads, found):
            times = (ms(row[key], digits=1) for key in ("first_ns", "map_ns", "unmap_ns"))
            yield f"| {row['kernel']} | {row['memory']} | `{row['call']}` | {' | '.join(times)} |"


def alloc_read(logs):
    """The lines of the table: nanoseconds by row, cold, with a column for each size."""
    for log in logs:
        rows, cases = {}, {}
        for row in (row for report in reports(log) for row in report["rows"]):
            if row["case"].endswith(" cold"):
                cases[row["case"]] = row["samples"]
                rows.setdefault(row["variant"], {})[row["case"]] = f"{round(row['median_s'] * 1e9):,}"
        yield f"| cold | {' | '.join(case.removesuffix(' cold') for case in cases)} |"
        yield "|---" * (len(cases) + 1) + "|"
        for name, times in rows.items():
            yield f"| {name} | {' | '.join(times.get(case, '-') for case in cases)} |"
        yield ""
        yield f"Rounds: {', '.join(map(str, cases.values()))}."


TABLES = {"bar-map": bar_map, "dma-map": dma_map, "alloc-read": alloc_read}
