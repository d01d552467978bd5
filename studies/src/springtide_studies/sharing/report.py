"""Figures and verdict of the bench of shared devices, from its trials. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from springtide_studies.sharing.load import LoadReply
from springtide_studies.sharing.trial import JOB, SERVICES, OfferedLoad, SharingTrial, TrialArm, is_violation

EXCLUSIVE, STATIC, OURS = "exclusive", "static", "ours"
MOST_VIOLATIONS_RATIO = 1.3
LEAST_OF_REQUEST = 0.9
# The services' objective is a 99th percentile: one request in a hundred may miss it. Where the exclusive arm misses
# fewer, this is what the others are compared with, because a ratio of one or two requests says nothing.
FLOOR_FRACTION = 0.01
# CPU time is counted in steps of 10 ms, and quotas are refilled a little late.
DEVICE_TOLERANCE = 0.06


class SharingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What was set and measured before the trials; CPU seconds are of one request alone, and in a batch of four."""

    seed: int
    device_cpus: float
    request_cpu_s: float
    request_of_four_cpu_s: float
    machine: Mapping[str, Any]


def percentile(values: Sequence[float], fraction: float) -> float:
    """The nearest-rank percentile; infinity for no values at all."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else math.inf


def make_report(
    arms: Sequence[TrialArm], load: OfferedLoad, trials: Sequence[SharingTrial], figures: SharingFigures
) -> dict[str, Any]:
    """Return {"bench", "machine", "setting", "arms", "trials", "rows", "problems", "criterion", "passed"}."""
    told: dict[str, dict[str, Any]] = {}
    for arm in arms:
        mine = [trial for trial in trials if trial.arm == arm.name]
        if mine:
            told[arm.name] = _arm(arm, load, mine, told.get(EXCLUSIVE), figures)
    rows = _rows(told)
    problems = _problems(arms, trials, told)
    return {
        "bench": "sharing",
        "machine": dict(figures.machine),
        "setting": {
            "seed": figures.seed,
            "device_cpus": figures.device_cpus,
            "request_cpu_ms": round(figures.request_cpu_s * 1000, 2),
            "request_in_batch_of_four_cpu_ms": round(figures.request_of_four_cpu_s * 1000, 2),
            "slo_s": load.slo_s,
            "rate_per_s": load.rate_per_s,
            "duration_s": load.duration_s,
            "surges": [[msgspec.to_builtins(surge) for surge in surges] for surges in load.surges],
            "num_repetitions": 1 + max((trial.repetition for trial in trials), default=-1),
            "violations_floor_fraction": FLOOR_FRACTION,
        },
        "arms": list(told.values()),
        "trials": [_trial(trial, load) for trial in trials],
        "rows": rows,
        "problems": problems,
        "criterion": (
            f"each service misses its objective at most {MOST_VIOLATIONS_RATIO:g} times as often as exclusive (which "
            f"counts as at least {FLOOR_FRACTION:.0%}: the objective is a p99), and training keeps at least "
            f"{LEAST_OF_REQUEST:.0%} of its request"
        ),
        "passed": not problems and all(row["is_met"] for row in rows if "is_met" in row),
    }


def arms_table(report: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows of a table for people: one line for each arm and service."""
    rows: list[Sequence[str]] = []
    for arm in report["arms"]:
        for number, (name, service) in enumerate(arm["services"].items()):
            whole = (
                str(arm["num_devices"]),
                f"{arm['training_of_exclusive']:.0%}",
                f"{arm['training_of_request']:.0%}",
                f"{arm['sum_of_exclusive']:.2f}",
                f"{arm['device_used_sum']:.2f}",
            )
            times = [_milliseconds(service[key]) for key in ("p50_s", "p95_s", "p99_s")]
            missed = f"{service['num_violations']} of {service['num_requests']}"
            fraction = f"{service['violation_fraction']:.2%}"
            head = (arm["arm"], *whole) if number == 0 else ("",) * (1 + len(whole))
            rows.append((*head, name, missed, fraction, *times))
    header = (
        "ARM",
        "DEVICES",
        "TRAINING",
        "OF REQUEST",
        "SUM",
        "USED",
        "SERVICE",
        "TOO LATE",
        "",
        "P50",
        "P95",
        "P99 ms",
    )
    return header, rows


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def _arm(
    arm: TrialArm,
    load: OfferedLoad,
    trials: Sequence[SharingTrial],
    exclusive: Mapping[str, Any] | None,
    figures: SharingFigures,
) -> dict[str, Any]:
    """The figures of one arm over all its trials; rates of work are also given as fractions of the exclusive arm's."""
    wall_s = math.fsum(trial.duration_s for trial in trials)
    steps_per_s = sum(trial.num_steps for trial in trials) / wall_s
    services = {
        name: _service([answer for trial in trials for answer in trial.answers[number]], load, number, wall_s)
        for number, name in enumerate(SERVICES)
    }
    full = steps_per_s if exclusive is None else exclusive["training_steps_per_s"]
    of_exclusive = steps_per_s / full if full else 0.0
    reference = services if exclusive is None else exclusive["services"]
    good = [services[name]["in_time_per_s"] / (reference[name]["in_time_per_s"] or math.inf) for name in SERVICES]
    request = arm.job.request if arm.job is not None else 1.0
    used = {
        name: math.fsum(trial.cpu_s.get(name, 0.0) for trial in trials) / (wall_s * figures.device_cpus)
        for name in (*SERVICES, JOB)
    }
    states: dict[str, int] = {}
    for trial in trials:
        for state, times in trial.states.items():
            states[state] = states.get(state, 0) + times
    devices = max(len(set(trial.devices.values())) for trial in trials)
    sharing = trials[-1].sharing
    return {
        "arm": arm.name,
        "what": arm.what,
        "num_devices": devices,
        "services": services,
        "training_steps_per_s": steps_per_s,
        "training_of_exclusive": of_exclusive,
        "training_of_request": of_exclusive / request,
        "request": request,
        "sum_of_exclusive": of_exclusive + math.fsum(good),
        # Below 1: a process that computes in short turns finds its caches cold, and does less in the same CPU time.
        "training_per_cpu_of_exclusive": 1.0 if exclusive is None else _per_cpu(of_exclusive, used, exclusive),
        "device_used": used,
        "device_used_sum": math.fsum(used.values()),
        "states_seen": states,
        "mechanism": sharing.mechanism,
        "enforced": sharing.enforced,
        "late_p99_s": max(trial.sharing.late_p99_s for trial in trials),
        "reaction_p99_s": max(trial.sharing.reaction_p99_s for trial in trials),
        "load_1m": [round(trial.load_1m, 2) for trial in trials],
    }


def _per_cpu(of_exclusive: float, used: Mapping[str, float], exclusive: Mapping[str, Any]) -> float:
    """Steps for each CPU second, as a fraction of the exclusive arm's."""
    mine, full = used[JOB], exclusive["device_used"][JOB]
    return of_exclusive * full / mine if mine else 0.0


def _service(answers: Sequence[LoadReply], load: OfferedLoad, number: int, wall_s: float) -> dict[str, Any]:
    latencies = [answer.answered_s - answer.due_s if answer.status == 200 else math.inf for answer in answers]
    late = [answer for answer in answers if is_violation(answer, load.slo_s)]
    surges = load.surges[number]
    in_surge = [answer for answer in late if any(surge.from_s <= answer.due_s < surge.until_s for surge in surges)]
    return {
        "num_requests": len(answers),
        "num_violations": len(late),
        "num_violations_in_surge": len(in_surge),
        "violation_fraction": len(late) / len(answers) if answers else 0.0,
        "num_unanswered": sum(answer.status != 200 for answer in answers),
        "in_time_per_s": (len(answers) - len(late)) / wall_s,
        "p50_s": _finite(percentile(latencies, 0.5)),
        "p95_s": _finite(percentile(latencies, 0.95)),
        "p99_s": _finite(percentile(latencies, 0.99)),
        # What of it is the load's own process: on a busy machine it is late itself, and that counts as latency.
        "sent_late_p99_s": _finite(percentile([answer.sent_s - answer.due_s for answer in answers], 0.99)),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _trial(trial: SharingTrial, load: OfferedLoad) -> dict[str, Any]:
    return {
        "arm": trial.arm,
        "repetition": trial.repetition,
        "num_violations": [sum(is_violation(answer, load.slo_s) for answer in each) for each in trial.answers],
        "num_requests": [len(each) for each in trial.answers],
        "num_steps": trial.num_steps,
        "devices": trial.devices,
        "cpu_s": trial.cpu_s,
        "load_1m": trial.load_1m,
    }


def _rows(told: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the verdict rests on, and the same for every other arm beside it."""
    if EXCLUSIVE not in told or OURS not in told:
        return []
    rows: list[dict[str, Any]] = []
    exclusive, ours = told[EXCLUSIVE], told[OURS]
    for name in SERVICES:
        missed = ours["services"][name]["violation_fraction"]
        base = exclusive["services"][name]["violation_fraction"]
        counted = max(base, FLOOR_FRACTION)
        rows.append(
            {
                "case": f"{name} misses its objective",
                "ours": 100 * missed,
                "baseline": 100 * base,
                "baseline_name": EXCLUSIVE,
                "ratio": missed / counted,
                "bound": 100 * MOST_VIOLATIONS_RATIO * counted,
                "unit": "%",
                "is_met": missed <= MOST_VIOLATIONS_RATIO * counted,
            }
        )
    least = LEAST_OF_REQUEST * ours["request"]
    rows.append(
        {
            "case": "training of exclusive",
            "ours": 100 * ours["training_of_exclusive"],
            "baseline": 100 * ours["request"],
            "baseline_name": "its request",
            "ratio": ours["training_of_request"],
            "bound": 100 * least,
            "unit": "%",
            "is_met": ours["training_of_exclusive"] >= least,
        }
    )
    rows += [_beside(ours, other) for name, other in told.items() if name not in (EXCLUSIVE, OURS)]
    return rows


def _beside(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both services' misses together against those of an arm that also has one device only."""
    mine, theirs = (
        sum(service["num_violations"] for service in arm["services"].values())
        / max(1, sum(service["num_requests"] for service in arm["services"].values()))
        for arm in (ours, other)
    )
    return {
        "case": f"both miss, training {100 * other['training_of_exclusive']:.0f} % there",
        "ours": 100 * mine,
        "baseline": 100 * theirs,
        "baseline_name": other["arm"],
        "ratio": mine / theirs if theirs else None,
        "bound": None,
        "unit": "%",
    }


def _problems(
    arms: Sequence[TrialArm], trials: Sequence[SharingTrial], told: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Why figures cannot be compared: a replica on an unintended device, or more computed than one device can."""
    problems = []
    for trial in trials:
        num_devices = len(set(trial.devices.values()))
        meant = len(trial.devices) if trial.arm == EXCLUSIVE else 1
        if num_devices != meant or len(trial.devices) != len(SERVICES) + 1:
            problems.append(f"{trial.arm} {trial.repetition + 1}: {num_devices} devices held where {meant} was meant")
    if any(trial.sharing.mechanism in ("none", "mps") for trial in trials):
        problems.append(f"nobody is held to a share on this machine ({trials[-1].sharing.enforced}): nothing compares")
    for arm in told.values():
        most = max(arm["device_used"].values()) if arm["arm"] == EXCLUSIVE else arm["device_used_sum"]
        if most > 1.0 + DEVICE_TOLERANCE:
            problems.append(f"{arm['arm']}: {most:.2f} of a device was used, so it was no device of the same size")
    return problems
