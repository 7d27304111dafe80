"""The report of the last load of each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_last = threading.local()


def remember(report: Callable[[], dict[str, Any]]) -> None:
    """Notes what gives the report of a load of this thread."""
    _last.report = report


def last_report() -> dict[str, Any] | None:
    """Report of the last load of this thread (`load_file`, `load_into`, `alloc_and_read`, `plan.tensors`): bytes,
    stages with their times, and for each file how it was read and why. None before the first."""
    report: Callable[[], dict[str, Any]] | None = getattr(_last, "report", None)
    return report and report()
