"""What the authors of Pollux published of each job, beside what the same policy does here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from springtide.core.errors import InvalidRequest

_FILES = {"0.5": "0.5", "1": "1.0", "1.5": "1.5", "2": "2.0"}
_PUBLISHED = ("pollux", "optimus", "tiresias")
# Which policies here decide as the published ones do.
_AS_PUBLISHED = {"pollux": "pollux", "optimus-oracle": "optimus", "tiresias-tuned": "tiresias"}


class _Summary(msgspec.Struct, frozen=True):
    """Workload -> job -> seconds from submission to end."""

    jcts: dict[str, dict[str, float]]


def read_published(data: Path, load: str) -> dict[str, dict[str, dict[str, float]]]:
    """Policy -> workload -> job -> completion time, as far as files are there. Raises InvalidRequest on a bad one."""
    found = {}
    for policy in _PUBLISHED:
        path = data / "published-osdi21" / f"jobload_{policy}-{_FILES.get(load, load)}.json"
        if path.is_file():
            try:
                found[policy] = msgspec.json.decode(path.read_bytes(), type=_Summary).jcts
            except msgspec.MsgspecError as error:
                raise InvalidRequest(f"{path.name} is no summary of published runs: {error}") from error
    return found


def compare(
    by_policy: Mapping[str, Mapping[str, Any]],
    published: Mapping[str, Mapping[str, Mapping[str, float]]],
    workload: str,
) -> dict[str, dict[str, Any]]:
    """For each policy that was published on this workload: its published mean, and how far ours is off it.

    `difference_percent` is ours over theirs less 100 %, over all jobs and by application (the jobs' names begin with
    theirs).
    """
    compared: dict[str, dict[str, Any]] = {}
    for policy, figures in by_policy.items():
        theirs = published.get(_AS_PUBLISHED.get(policy.partition(":")[0], ""), {}).get(workload)
        ours: Mapping[str, float] | None = figures.get("jobs")
        if theirs is None or ours is None or set(theirs) != set(ours):
            continue
        applications = sorted({job.rpartition("-")[0] for job in theirs})
        compared[policy] = {
            "jct_mean_s": sum(theirs.values()) / len(theirs),
            "difference_percent": _difference(list(ours), ours, theirs),
            "difference_percent_by_application": {
                name: _difference([job for job in theirs if job.rpartition("-")[0] == name], ours, theirs)
                for name in applications
            },
        }
    return compared


def _difference(jobs: list[str], ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    return 100.0 * (sum(ours[job] for job in jobs) / sum(theirs[job] for job in jobs) - 1.0)
