"""What this machine offers: its GPUs, or CPU slots where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess

from springtide.core.errors import InvalidRequest
from springtide.core.resources import Node, make_node

_QUERY_TIMEOUT_S = 10.0


def discover_node(num_slots: int | None = None, *, name: str = "local") -> Node:
    """Return this machine as a node: one device for each GPU, else `num_slots` CPU slots (default: one a core).

    Raises InvalidRequest for fewer than one slot. With GPUs, `num_slots` limits how many of them are offered.
    """
    if num_slots is not None and num_slots < 1:
        raise InvalidRequest(f"a machine needs at least one slot, got {num_slots}; for example 2")
    num_gpus = count_gpus()
    if num_gpus:
        return make_node(name, min(num_gpus, num_slots or num_gpus), kind="gpu")
    return make_node(name, num_slots or os.cpu_count() or 1, kind="cpu")


def count_gpus() -> int:
    """Return how many GPUs the driver lists; 0 where there is no driver or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if listing.returncode != 0:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
