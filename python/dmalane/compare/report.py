"""The JSON object of a comparison as a text for people, and as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from .measure import CACHES

# Characters of the longest bar: the fastest into memory that a driver can pin.
BAR = 16
FIGURES = ("median_s", "fastest_s", "slowest_s", "bytes_per_s", "cpu_s", "peak_rss_bytes")
HEAD = ("loader", "", "GB/s", "", "ms (least..most)", "CPU, s", "memory")


def as_csv(report: dict[str, Any]) -> str:
    """A line for each loader and state of the cache."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["loader", "cache", "dma_ready", "bytes_right", *FIGURES, "left_out", "skipped"])
    for loader in report["loaders"]:
        facts = [str(loader[name]).lower() if loader["version"] else "" for name in ("dma_ready", "bytes_right")]
        for cache in CACHES:
            figures = [(loader[cache] or {}).get(name) for name in FIGURES]
            writer.writerow([loader["name"], cache, *facts, *figures, loader[f"not_{cache}"], loader["skipped"]])
    return out.getvalue()


def as_text(report: dict[str, Any], answers: list[str]) -> str:
    """The answers, a table of the loaders, and what is to be known of them."""
    loaders = report["loaders"]
    ready = [loader[cache] for loader in loaders if loader["dma_ready"] for cache in CACHES if loader[cache]]
    fastest = max((runs["bytes_per_s"] for runs in ready), default=0.0)
    rows = [row for loader in loaders if loader["version"] is not None for row in rows_of(loader, fastest)]
    notes = [note for loader in loaders for note in notes_of(loader)]
    parts = [answers, table([HEAD, *rows], "<<><>>>") if rows else [], notes]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def rows_of(loader: dict[str, Any], fastest: float) -> list[tuple[str, ...]]:
    """The cells of a loader, a row for each state of the cache."""
    rows: list[tuple[str, ...]] = []
    for cache, name in zip(CACHES, (loader["name"], "  " + loader["version"]), strict=True):
        if (runs := loader[cache]) is None:
            rows.append((name, cache, "-", "", "-", "-", "-"))
            continue
        rate = runs["bytes_per_s"]
        # A mapping, which is no memory for a driver, may be faster than the longest bar.
        bar = "█" * min(round(rate / fastest * BAR), BAR) + "+" * (rate > fastest) if fastest else ""
        median, least, most = (digits(runs[f"{name}_s"] * 1e3) for name in ("median", "fastest", "slowest"))
        cpu, memory = f"{runs['cpu_s']:.2f}", size(runs["peak_rss_bytes"])
        rows.append((name, cache, digits(rate / 1e9), bar, f"{median} ({least}..{most})", cpu, memory))
    return rows


def notes_of(loader: dict[str, Any]) -> list[str]:
    notes = [f"{'stopped' if loader['version'] else 'not compared'}: {loader['skipped']}"] if loader["skipped"] else []
    if loader["bytes_right"] is False:
        notes.append("WRONG: these are not the bytes of the files")
    if loader["dma_ready"] is False:
        notes.append(f"{loader['memory']}, not DMA-ready")
    left_out = ((cache, loader[f"not_{cache}"]) for cache in CACHES)
    notes += [f"{runs} run{'s' * (runs > 1)} left out: the files were not {cache}" for cache, runs in left_out if runs]
    return [f"{loader['name']}: {note}" for note in notes]


def table(rows: list[tuple[str, ...]], align: str) -> list[str]:
    """Rows with their columns aligned: "<" to the left, ">" to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(align, widths, strict=True))
    return [form.format(*row).rstrip() for row in rows]


def digits(number: float) -> str:
    """Three significant digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
