"""The reasons for a job's number of devices where measured speeds alone decide it."""

from __future__ import annotations

from collections.abc import Mapping

WHY_TRIED = "idle devices, to measure its speed on them again: it may have been slow there for once"


def why_fewer(samples_per_s: Mapping[int, float], held: int, count: int) -> str:
    """Why a job goes from `held` devices to `count` though no other job asks for them; speeds by number of devices."""
    more, fewer = samples_per_s.get(held, 0.0), samples_per_s.get(count, 0.0)
    if 0.0 < more <= fewer:
        return f"{held} devices were no faster than {count}: {more:.3g} against {fewer:.3g} samples a second"
    return f"by what was measured {held} devices are no faster than {count}"
