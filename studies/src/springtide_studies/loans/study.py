"""The study of loans: FaPES's figure 11 under a tide, strategy by strategy and for several sizes of the inference pool.

FaPES (SoCC'24), sections 7.1 and 7.2. Each strategy is a policy of the registry; here are the competitors and
the figures reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.scheduling.registry import check_policy_name
from springtide.simulator.parallel_runs import Progress, play_in_processes
from springtide.workloads.cluster import parse_cluster
from springtide_studies.loans.play import LoanSetting, play_loans

CLUSTER, N_R_MAX, DAYS = "16x8@6+6+4", (2, 4, 6, 8), 3
MAX_DAYS = 60
# The product as it ships: our strategy over our training policy.
PRODUCT = "tide/springtide"
# FaPES, section 7.2: least and largest change of queueing and of completion times, least and largest factor of use.
PUBLISHED: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"queueing": (1.0 - 0.147, 1.0 - 0.696), "jct": (1.0 - 0.090, 1.0 - 0.428), "utilisation": (1.09, 1.67)}
)
_FIGURES: Mapping[str, str] = MappingProxyType(
    {"queueing": "queueing_mean_s", "jct": "jct_mean_s", "utilisation": "utilisation"}
)
_BASELINES = ("dedicated", "one-way")
# Over the sizes of the inference pool: sums of _COUNTED, the worst of _WORST, means of all else.
_COUNTED = frozenset(
    (
        *("jobs", "deadline_jobs", "deadlines_met", "admitted", "declined", "promised", "admitted_and_broken"),
        *("best_effort_jobs", "resizes", "preemptions", "gpu_hours", "overhead_gpu_hours", "scattered_gpu_hours"),
        *("decisions", "cpu_s", "steps", "num_faults", "minimums", "minimums_broken", "loans", "interruptions"),
        *("reclaims", "reclaims_forced", "reclaims_interrupting", "reclaims_shrinking", "reclaim_cost_device_s"),
    )
)
_WORST = frozenset(
    ("reclaim_p95_s", "reclaim_max_s", "latest_s", "decision_ms_max", "minimum_wait_p95_s", "minimum_wait_max_s")
)


class _Row(msgspec.Struct, frozen=True):
    """A policy of the study, and whether the servers let parts of themselves be loaned."""

    policy: str
    isolates_devices: bool = False


def rows_of(training: str, *, ablations: bool = False) -> dict[str, _Row]:
    """The rows: name and policy. `springtide` is the product, `tide` its strategy over the rows' training policy."""
    rows = {
        "dedicated": _Row(f"dedicated/{training}"),
        "one-way": _Row(f"one-way/{training}"),
        "two-way": _Row(f"two-way/{training}"),
        "tide": _Row(f"tide/{training}"),
        "springtide": _Row(PRODUCT),
    }
    if f"tide/{training}" == PRODUCT:
        del rows["tide"]
    if ablations:
        for name, policy in [(name, rows[name].policy) for name in ("tide", "springtide") if name in rows]:
            _, _, rest = policy.partition("/")
            rows[f"{name} without forecast"] = _Row(f"tide:ahead=no/{rest}")
            rows[f"{name}, victims by gain"] = _Row(f"tide:victims=gain/{rest}")
            rows[f"{name}, any victims"] = _Row(f"tide:victims=any/{rest}")
            rows[f"{name}, no shrinking"] = _Row(f"tide:shrink=no/{rest}")
            rows[f"{name}, parts of servers"] = _Row(policy, isolates_devices=True)
    return rows


def study_loaning(
    *,
    n_r_max: Sequence[int] = N_R_MAX,
    days: int = DAYS,
    seed: int = 0,
    training: str = "fifo",
    cluster: str = CLUSTER,
    ablations: bool = False,
    only: Sequence[str] = (),
    num_processes: int = 1,
    timer: Callable[[], float] | None = None,
    on_progress: Progress | None = None,
    play: Callable[..., dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Play every strategy on every size of the inference pool and return the figures, as `simulate` does.

    `n_r_max` are the numbers of servers that the guaranteed minimums need at the highest tide. `only` names some of
    the rows. Figures at the top of a policy are over all sizes: sums of what is counted, the worst of what is bounded,
    means of the rest; `n_r_max` holds those of each. A row that fails is named under `errors`. `play` is for tests.
    Raises InvalidRequest on what cannot be.
    """
    sizes = list(dict.fromkeys(n_r_max))
    _check(sizes, days, cluster)
    rows = rows_of(training, ablations=ablations)
    if only:
        unknown = [name for name in only if name not in rows]
        if unknown:
            raise InvalidRequest(f"the study has no row {unknown[0]!r}; choose among {', '.join(rows)}")
        rows = {name: rows[name] for name in only}
    for row in rows.values():
        check_policy_name(row.policy)
    runs = {
        f"{name}@{size}": LoanSetting(
            policy=row.policy,
            n_r_max=size,
            days=days,
            seed=seed,
            cluster=cluster,
            isolates_devices=row.isolates_devices,
        )
        for name, row in rows.items()
        for size in sizes
    }
    answer = _play_all(runs, num_processes=num_processes, timer=timer, on_progress=on_progress, play=play)
    figures: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in rows}
    for key, found in answer["policies"].items():
        name, _, size = key.rpartition("@")
        figures[name][size] = found
    policies = {name: _over_sizes(by_size) for name, by_size in figures.items() if by_size}
    told = {
        "trace": f"tide:{days} days",
        "cluster": cluster,
        "seed": seed,
        "study": "loaning",
        "days": days,
        "training": training,
        "rows": {name: row.policy for name, row in rows.items()},
        "policies": policies,
        "ratios": ratios_of(policies),
    }
    if answer.get("errors"):
        told["errors"] = answer["errors"]
    return told


def play_run(name: str, arguments: Mapping[str, Any], **told: Any) -> dict[str, Any]:
    """One run of the study, from plain values: what another process is asked for. Raises InvalidRequest."""
    return {"policies": {name: play_loans(msgspec.convert(dict(arguments), LoanSetting), **told)}}


def _check(sizes: Sequence[int], days: int, cluster: str) -> None:
    num_nodes, _ = parse_cluster(cluster)
    if not sizes:
        raise InvalidRequest("no size of the inference pool is named; give some, as in --n-r-max 2,4,6,8")
    for size in sizes:
        if not 1 <= size < num_nodes:
            raise InvalidRequest(
                f"{size} servers of inference do not leave any of {num_nodes}; give 1 to {num_nodes - 1}"
            )
    if not 1 <= days <= MAX_DAYS:
        raise InvalidRequest(f"a study of {days} days cannot be played; give 1 to {MAX_DAYS}")


def _play_all(
    runs: Mapping[str, LoanSetting],
    *,
    num_processes: int,
    timer: Callable[[], float] | None,
    on_progress: Progress | None,
    play: Callable[..., dict[str, Any]] | None,
) -> dict[str, Any]:
    if play is None and num_processes > 1 and len(runs) > 1:
        return play_in_processes(
            "springtide_studies.loans.study:play_run",
            {name: msgspec.to_builtins(setting) for name, setting in runs.items()},
            num_processes=num_processes,
            is_timed=timer is not None,
            on_progress=on_progress,
        )
    found: dict[str, Any] = {"policies": {}}
    for name, setting in runs.items():
        told = None if on_progress is None else _telling(on_progress, name)
        found["policies"][name] = (play or play_loans)(setting, timer=timer, on_progress=told)
    return found


def _telling(on_progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda num_ended, num_jobs: on_progress(name, num_ended, num_jobs)


def _over_sizes(by_size: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over all sizes, and those of each under `n_r_max`."""
    keys = dict.fromkeys(key for figures in by_size.values() for key in figures)
    found: dict[str, Any] = {}
    for key in keys:
        values = [figures[key] for figures in by_size.values() if _is_number(figures.get(key))]
        if values:
            found[key] = sum(values) if key in _COUNTED else max(values) if key in _WORST else sum(values) / len(values)
        elif all(figures.get(key) is None for figures in by_size.values()):
            found[key] = None
    return found | {"n_r_max": {size: dict(figures) for size, figures in by_size.items()}}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def ratios_of(policies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Ours over the baselines by figure, policy, baseline and size; and the paper's ranges, the least gain first."""
    found: dict[str, Any] = {"paper": {name: list(bounds) for name, bounds in PUBLISHED.items()}}
    for name, key in _FIGURES.items():
        found[name] = {
            ours: {
                baseline: by_size
                for baseline in _BASELINES
                if baseline in policies and (by_size := _by_size(policies[ours], policies[baseline], key))
            }
            for ours in policies
            if ours not in _BASELINES
        }
    return found


def _by_size(ours: Mapping[str, Any], baseline: Mapping[str, Any], key: str) -> dict[str, float | None]:
    others = baseline["n_r_max"]
    return {
        size: _ratio(figures.get(key), others[size].get(key))
        for size, figures in ours["n_r_max"].items()
        if size in others
    }


def _ratio(ours: float | None, baseline: float | None) -> float | None:
    return None if ours is None or not baseline else ours / baseline


def parse_sizes(text: str) -> list[int]:
    """`2,4,6,8` as numbers. Raises InvalidRequest."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts):
        raise InvalidRequest(f"cannot read {text!r:.60} as sizes of the inference pool; write 2,4,6,8")
    return [int(part) for part in parts]
