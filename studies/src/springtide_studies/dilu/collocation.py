"""The study of collocation: pairs of tenants on one modelled GPU under every arm, beside each alone on its own.

Dilu, section 5.2: training-inference, inference-inference and training-training pairs, Poisson, Gamma and bursty load.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from springtide.core.shares import Share, has_room, load_of
from springtide_studies.dilu.collocation_models import (
    GpuModel,
    builtin_models,
    inference_share,
    measured_models,
    training_share,
)
from springtide_studies.dilu.gpu_baselines import NoControl, arms_for
from springtide_studies.dilu.gpu_execution import TenantFigures, run_device
from springtide_studies.dilu.gpu_execution_work import (
    IterationPlan,
    ModelledTenant,
    bursty_arrivals,
    gamma_arrivals,
    plan_iteration,
    poisson_arrivals,
)

ARMS = ("exclusive", "none", "time-slices", "mps-l", "mps-r", "tgs", "fast-gs", "rckm", "springtide")
KINDS = ("training-inference", "inference-inference", "training-training")
HORIZON_S, SMALL_HORIZON_S = 40.0, 15.0
LOAD_FRACTIONS = (0.2, 0.5, 0.8)
VARIATIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
# Gamma and bursty load have these means, as fractions of exclusive capacity; a burst is four times the calm rate.
GAMMA_FRACTION, BURSTY_FRACTION = 0.2, 0.35
TRAINING_BATCH, TRAINING_IDLE = 32, 0.2
INFERENCE_BANDWIDTH, TRAINING_BANDWIDTH = 0.5, 0.7
# What the paper reports (section 5.2), as ratios to Exclusive unless said otherwise: on A100s, not on this model.
PAPER = {
    "training-inference p50": 1.24,
    "training-inference p95": 1.28,
    "training-inference training throughput": 0.972,
    "training-training throughput": 1.76,
    "p95 of mps-l over Dilu's at CV 6": 2.08,
    "p95 of mps-r over Dilu's at CV 6": 4.76,
}


class TenantLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How requests come: `poisson`, `gamma` with a coefficient of variation, or `bursty`, at this mean load."""

    pattern: str
    fraction: float
    variation: float = 1.0

    @property
    def name(self) -> str:
        """What the load is called in tables."""
        return (
            f"{self.pattern} CV {self.variation:g}"
            if self.pattern == "gamma"
            else f"{self.pattern} {self.fraction:.0%}"
        )


class CollocationCase(msgspec.Struct, frozen=True, kw_only=True):
    """A pair on one device under one load (None: no requests are served)."""

    kind: str
    pair: tuple[str, str]
    load: TenantLoad | None = None

    @property
    def name(self) -> str:
        """What the case is called in tables."""
        load = f", {self.load.name}" if self.load is not None else ""
        return f"{' + '.join(self.pair)}{load}"


def run_study(
    *, data: Path | None, seed: int, is_small: bool, on_progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Play every case under every arm. `data`: a folder with surfaces in `profiles/` (None: made-up models)."""
    models = builtin_models() if data is None else measured_models(data)
    cases = make_cases(models, is_small=is_small)
    horizon_s = SMALL_HORIZON_S if is_small else HORIZON_S
    rows = []
    for number, case in enumerate(cases):
        rows.append(play_case(case, models, horizon_s, seed))
        on_progress("collocation", number + 1, len(cases))
    return {
        "study": "dilu-collocation",
        "seed": seed,
        "is_small": is_small,
        "horizon_s": horizon_s,
        "models": {
            name: msgspec.to_builtins(model)
            | {
                "inference_share": msgspec.to_builtins(inference_share(model)[1]),
                "inference_batch_size": inference_share(model)[0],
                "training_share": msgspec.to_builtins(_training_share(model)),
            }
            for name, model in models.items()
        },
        "cases": rows,
        "summary": summarise(rows),
        "paper": PAPER,
    }


def make_cases(models: Mapping[str, GpuModel], *, is_small: bool) -> list[CollocationCase]:
    """Return the cases whose shares fit one device: every pair of models under every load (small: some of them)."""
    loads = [TenantLoad(pattern="poisson", fraction=fraction) for fraction in LOAD_FRACTIONS]
    variations = (VARIATIONS[0], VARIATIONS[-1]) if is_small else VARIATIONS
    loads += [TenantLoad(pattern="gamma", fraction=GAMMA_FRACTION, variation=variation) for variation in variations]
    loads.append(TenantLoad(pattern="bursty", fraction=BURSTY_FRACTION))
    cases: list[CollocationCase] = []
    for kind in KINDS:
        pairs = itertools.permutations(models, 2) if kind == KINDS[0] else itertools.combinations(models, 2)
        fitting = [pair for pair in pairs if _fits(CollocationCase(kind=kind, pair=pair), models)]
        chosen = fitting[:: max(1, len(fitting) // 2)][:2] if is_small else fitting
        for pair in chosen:
            cases += [
                CollocationCase(kind=kind, pair=pair, load=load) for load in (loads if kind != KINDS[2] else [None])
            ]
    return cases


def _fits(case: CollocationCase, models: Mapping[str, GpuModel]) -> bool:
    first, second = _shares(case, models)
    return has_room(load_of([first]), second)


def _shares(case: CollocationCase, models: Mapping[str, GpuModel]) -> tuple[Share, Share]:
    first, second = models[case.pair[0]], models[case.pair[1]]
    return (
        _training_share(first) if case.kind == "training-training" else inference_share(first)[1],
        inference_share(second)[1] if case.kind == "inference-inference" else _training_share(second),
    )


def _training_share(model: GpuModel) -> Share:
    return training_share(_training_plan(model))


def _training_plan(model: GpuModel) -> IterationPlan:
    return plan_iteration(
        model.latency,
        TRAINING_BATCH,
        passes=3.0,
        idle_fraction=TRAINING_IDLE,
        bandwidth_fraction=TRAINING_BANDWIDTH,
    )


def tenants_of(
    case: CollocationCase, models: Mapping[str, GpuModel], horizon_s: float, seed: int
) -> list[ModelledTenant]:
    """Return the two tenants of a case with all their requests. The same for every arm."""
    tenants = []
    for place, (name, share) in enumerate(zip(case.pair, _shares(case, models), strict=True)):
        model = models[name]
        is_slo = case.kind == "inference-inference" or (case.kind == "training-inference" and place == 0)
        if not is_slo:
            plan = _training_plan(model)
            tenants.append(
                ModelledTenant(
                    tenant_id=f"{place} train {name}", share=share, is_slo=False, plans={TRAINING_BATCH: plan}
                )
            )
            continue
        largest = inference_share(model)[0]
        plans = {
            size: plan_iteration(model.latency, size, bandwidth_fraction=INFERENCE_BANDWIDTH)
            for size in range(1, largest + 1)
        }
        assert case.load is not None
        capacity_per_s = largest / plans[largest].alone_s
        tenants.append(
            ModelledTenant(
                tenant_id=f"{place} serve {name}",
                share=share,
                is_slo=True,
                plans=plans,
                arrivals=_arrivals(case.load, case.load.fraction * capacity_per_s, horizon_s, (seed, place)),
                slo_s=model.slo_s,
            )
        )
    return tenants


def _arrivals(load: TenantLoad, rate_per_s: float, horizon_s: float, seeds: Sequence[int]) -> tuple[float, ...]:
    rng = np.random.default_rng(seeds)
    if load.pattern == "gamma":
        return gamma_arrivals(rng, rate_per_s, horizon_s, load.variation)
    if load.pattern == "bursty":
        return bursty_arrivals(rng, rate_per_s, horizon_s)
    return poisson_arrivals(rng, rate_per_s, horizon_s)


def play_case(case: CollocationCase, models: Mapping[str, GpuModel], horizon_s: float, seed: int) -> dict[str, Any]:
    """Play one case under every arm and compare each tenant with itself alone."""
    tenants = tenants_of(case, models, horizon_s, seed)
    alone = {
        tenant.tenant_id: run_device([tenant], NoControl([tenant]), horizon_s)[tenant.tenant_id] for tenant in tenants
    }
    arms = {"exclusive": compare(alone, alone)}
    for arm in arms_for(tenants):
        arms[arm.name] = compare(run_device(tenants, arm, horizon_s, seed), alone)
    return {
        "kind": case.kind,
        "name": case.name,
        "load": case.load.name if case.load is not None else "",
        "shares": {tenant.tenant_id: msgspec.to_builtins(tenant.share) for tenant in tenants},
        "arms": arms,
    }


def compare(figures: Mapping[str, TenantFigures], alone: Mapping[str, TenantFigures]) -> dict[str, Any]:
    """Return each tenant's figures as they are and as ratios to those alone, and what the pair did together.

    `aggregate_throughput` sums throughputs over those alone; `saved_gpu_fraction` is which part of the device time that
    exclusive devices would need for the same work is saved by one device.
    """
    tenants: dict[str, Any] = {}
    aggregate = 0.0
    for tenant_id, own in figures.items():
        reference = alone[tenant_id]
        row: dict[str, Any] = msgspec.to_builtins(own)
        done, could = (
            (own.requests_per_s, reference.requests_per_s)
            if own.is_slo
            else (own.iterations_per_s, reference.iterations_per_s)
        )
        row["throughput_ratio"] = done / could if could else 1.0
        if own.is_slo:
            row["p50_ratio"] = own.p50_s / reference.p50_s if reference.p50_s else 1.0
            row["p95_ratio"] = own.p95_s / reference.p95_s if reference.p95_s else 1.0
        aggregate += row["throughput_ratio"]
        tenants[tenant_id] = row
    return {
        "tenants": tenants,
        "aggregate_throughput": aggregate,
        "saved_gpu_fraction": max(0.0, 1.0 - 1.0 / aggregate) if aggregate else 0.0,
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by kind and arm, ratios over cases: geometric means and the worst of latencies, means of the others."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for kind in (*KINDS, "gamma CV 6"):
        chosen = [row for row in rows if kind in (row["kind"], row["load"])]
        if not chosen:
            continue
        summary[kind] = {arm: _summary([row["arms"][arm] for row in chosen]) for arm in ARMS}
    return summary


def _summary(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    tenants = [tenant for outcome in outcomes for tenant in outcome["tenants"].values()]
    served = [tenant for tenant in tenants if tenant["is_slo"]]
    trained = [tenant for tenant in tenants if not tenant["is_slo"]]
    found = {
        "aggregate_throughput": _mean([outcome["aggregate_throughput"] for outcome in outcomes]),
        "saved_gpu_fraction": _mean([outcome["saved_gpu_fraction"] for outcome in outcomes]),
    }
    if served:
        found["p50_ratio"] = _geometric_mean([tenant["p50_ratio"] for tenant in served])
        found["p95_ratio"] = _geometric_mean([tenant["p95_ratio"] for tenant in served])
        found["worst_p95_ratio"] = max(tenant["p95_ratio"] for tenant in served)
        found["violation_fraction"] = _mean([tenant["violation_fraction"] for tenant in served])
    if trained:
        found["training_throughput"] = _mean([tenant["throughput_ratio"] for tenant in trained])
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(_mean([math.log(max(value, 1e-9)) for value in values]))


def study_text(answer: Mapping[str, Any]) -> str:
    """Return the summary as tables, one for each kind of pair, with what the paper reports."""
    columns = (
        ("p50_ratio", "P50"),
        ("p95_ratio", "P95"),
        ("worst_p95_ratio", "WORST P95"),
        ("violation_fraction", "VIOLATIONS"),
        ("training_throughput", "TRAINING"),
        ("aggregate_throughput", "AGGREGATE"),
        ("saved_gpu_fraction", "GPU SAVED"),
    )
    percents = {"violation_fraction", "saved_gpu_fraction", "training_throughput"}
    lines = []
    for kind, arms in answer["summary"].items():
        num_cases = sum(kind in (row["kind"], row["load"]) for row in answer["cases"])
        lines += [f"{kind} ({num_cases} cases of {answer['horizon_s']:g} s; ratios to Exclusive)", ""]
        lines.append("ARM         " + "".join(f"{title:>12}" for _, title in columns))
        for arm, found in arms.items():
            cells = [
                "-" if key not in found else f"{found[key]:.1%}" if key in percents else f"{found[key]:.2f}x"
                for key, _ in columns
            ]
            lines.append(f"{arm:12}" + "".join(f"{cell:>12}" for cell in cells))
        lines.append("")
    lines.append("The paper's figures (A100s, its own models and loads):")
    lines += [f"  {name}: {value:g}" for name, value in answer["paper"].items()]
    return "\n".join(lines)
