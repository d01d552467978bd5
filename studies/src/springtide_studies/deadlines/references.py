"""Results of others on the same traces: the published artifact, the paper's numbers, the offline bound.

Read from `artifact_results.csv`, `published_results.csv` and `upper_bounds.csv` where a folder of traces has them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from springtide.core.errors import InvalidRequest

# Our policy, and the one whose results stand beside its own.
OURS, BASELINE = "springtide", "elasticflow"
# Their names for policies, and ours.
POLICY_OF = MappingProxyType(
    {
        "ef-accessctrl": "elasticflow",
        "ef": "edf+elastic",
        "edf+elastic(ef)": "edf+elastic",
        "edf-accessctrl": "edf+admission",
        "dlas-gpu": "tiresias",
    }
)
# Tags of the artifact with its faults mended: admission one by one without a veto, and EDF with the caps of its paper.
_MENDED = ("nopoison", "fairmax")
_FIG9_TRACE, _FIG11_TRACE = "gen_fig9_1000jobs_lam1500", "gen_fig11_200jobs_lam900_be"
Key = tuple[str, int, str]


class PublishedArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """What the published artifact printed for one policy, as it is and with its faults mended."""

    met: int | None = None
    ratio: float | None = None
    mended_met: int | None = None
    mended_ratio: float | None = None
    makespan_h: float | None = None
    jct_best_effort_s: float | None = None


class References(msgspec.Struct, frozen=True, kw_only=True):
    """By (trace, devices, policy of ours); devices 0 where the paper names none. Bounds in jobs by (trace, devices)."""

    artifact: dict[Key, PublishedArtifact] = {}
    published: dict[Key, float] = {}
    bounds: dict[tuple[str, int], int] = {}


def read_references(folders: Sequence[Path]) -> References:
    """Read what lies in these folders or one above; what is missing stays empty. Raises InvalidRequest."""
    places = [place for folder in folders for place in (folder, folder.resolve().parent)]
    return References(
        artifact=_read(places, "artifact_results.csv", _artifact),
        published=_read(places, "published_results.csv", _published),
        bounds=_read(places, "upper_bounds.csv", _bounds),
    )


def _read(places: Sequence[Path], name: str, take: Callable[[Iterator[dict[str, str]]], dict[Any, Any]]) -> Any:
    """What `take` makes of the rows of the first such file; nothing without one."""
    path = next((place / name for place in places if (place / name).is_file()), None)
    if path is None:
        return {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return take(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError, TypeError) as error:
        raise InvalidRequest(f"{path.name} cannot be read: {error!r}; move it away to do without it") from error


def _bounds(rows: Iterator[dict[str, str]]) -> dict[tuple[str, int], int]:
    return {(row["trace"], int(row["gpus"])): int(row["offline_LP_upper_bound_jobs"]) for row in rows}


def _artifact(rows: Iterator[dict[str, str]]) -> dict[Key, PublishedArtifact]:
    found: dict[Key, PublishedArtifact] = {}
    for row in rows:
        name, _, tag = row["policy"].partition(" [")
        devices = re.search(r"\((\d+)\)", row["cluster"])
        if devices is None or not row["met_by_artifact"]:
            continue
        key = (row["trace"], int(devices[1]), POLICY_OF.get(name, name))
        known = found.get(key, PublishedArtifact())
        met, ratio = int(row["met_by_artifact"]), float(row["ratio_by_artifact"])
        if any(mend in tag for mend in _MENDED):
            found[key] = msgspec.structs.replace(known, mended_met=met, mended_ratio=ratio)
        elif not tag and known.met is None:
            found[key] = msgspec.structs.replace(
                known,
                met=met,
                ratio=ratio,
                makespan_h=_number(row["makespan_h"]),
                jct_best_effort_s=_number(row["avg_jct_s_best_effort"]),
            )
    return found


def _number(text: str) -> float | None:
    return float(text) if text else None


def _published(rows: Iterator[dict[str, str]]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for row in rows:
        setting, figure = row["trace_or_setting"], row["figure"]
        devices = 0
        if figure == "9":
            setting, devices = _FIG9_TRACE, int(setting.split()[0])
        elif figure == "11":
            setting = _FIG11_TRACE + setting.split()[1]
        elif setting == "philly":
            setting = "philly_103959"
        else:
            setting = setting.removesuffix(" testbed")
        policy = POLICY_OF.get(row["policy"], row["policy"])
        found[setting, devices, policy] = float(row["deadline_satisfactory_ratio"])
    return found
