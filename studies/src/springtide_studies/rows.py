"""Parts that the benches' reports share: facts about the machine, ratios, tables for a page of results."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any


def machine_load() -> float:
    """How many processes wanted a processor over the last minute."""
    return os.getloadavg()[0]


def machine_facts(load_before: float) -> dict[str, Any]:
    """The facts about the machine that affect times; `load_before` is its load when the bench began."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_1m_before": round(load_before, 2),
    }


def ratio(ours: float | None, baseline: float | None) -> float | None:
    """Ours over the baseline; None where one is missing or the baseline is 0."""
    return None if ours is None or not baseline else ours / baseline


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown writes it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
