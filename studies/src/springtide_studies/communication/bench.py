"""`springtide bench communication`: how far predictors of communication time are off on placements never seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import InvalidRequest
from springtide.perf.communication.baselines import AlphaBeta, BytesOverBandwidth
from springtide.perf.communication.fabric import Subgraph
from springtide.perf.communication.gnn import GraphModel, region_of
from springtide.perf.communication.gnn_layers import Sizes
from springtide.perf.communication.query import CommunicationModel, Query, read_samples
from springtide_studies.communication.communication_trees import TreeModel
from springtide_studies.communication.gnn_training import Training, train
from springtide_studies.communication.pollux_form import PolluxForm
from springtide_studies.fapes.nccl_samples import Drawn, draw_sets
from springtide_studies.options import folder_of, seed_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

# The aims: mean error on unseen placements, and beside the best baseline's; time for a list of candidates.
AIM_ERROR, AIM_RATIO, AIM_LIST_US = 0.12, 0.5, 1000.0
NUM_CANDIDATES = 64
REGIONS = ("one server", "one switch", "several switches")
BANDS = (
    ("< 32 KB", 0, 1 << 15),
    ("32 KB - 1 MB", 1 << 15, 1 << 20),
    ("1 - 32 MB", 1 << 20, 1 << 25),
    (">= 32 MB", 1 << 25, 1 << 62),
)
_OURS, _FLOOR = GraphModel.name, "no noise"
# The same network without messages between nodes, as an ablation of the graph.
_BLIND = "no messages"
_PAPER_ERROR = 0.36
# Measured samples are few: every placement is held out once, in one of so many rounds.
NUM_ROUNDS = 4
# A step sees every placement of a small file, so fewer do.
_FEW_STEPS = 400


class PredictionErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors, |predicted - measured| / measured, of one predictor on one set of samples."""

    model: str
    samples: str
    num_samples: int
    num_placements: int
    mean: float
    median: float
    p95: float
    # Against the times before noise, where these are known.
    true_mean: float | None
    by_size: dict[str, float]
    by_region: dict[str, float]
    us_each: float | None
    train_s: float | None


def run_bench(
    *,
    seed: int,
    timer: Callable[[], float],
    tell: Callable[[str], None] = lambda line: None,
    samples: Path | None = None,
    drawn: Mapping[str, Drawn] | None = None,
    training: Training | None = None,
) -> dict[str, Any]:
    """Train on one set of placements, test on others. `samples` names a file of measured ones; without it the analytic
    NCCL stands in. `timer` gives CPU seconds. Raises InvalidRequest for a file without enough placements.
    """
    load = machine_load()
    if samples is not None:
        rounds = _measured_rounds(samples, seed)
        training = training or Training(num_steps=_FEW_STEPS)
    else:
        rounds = [dict(drawn) if drawn is not None else draw_sets(seed)]
    tallies: dict[tuple[str, str], _Tally] = {}
    ours: GraphModel | None = None
    for sets in rounds:
        models = _fit(sets["train"], seed, training, timer, tell)
        ours = next(model for name, model, _ in models if name == _OURS and isinstance(model, GraphModel))
        for set_name, one in sets.items():
            if set_name == "train" or not one.queries:
                continue
            if one.true_s is not None:
                tallies.setdefault((set_name, _FLOOR), _Tally()).add(one, one.true_s, 0.0, 0.0)
            for name, model, train_s in models:
                model.predict_s(one.queries[:1])
                began_s = timer()
                predicted = model.predict_s(one.queries)
                tallies.setdefault((set_name, name), _Tally()).add(one, predicted, timer() - began_s, train_s)
    assert ours is not None
    found = [tally.errors(name, set_name) for (set_name, name), tally in tallies.items()]
    lists = _list_times(ours, rounds[-1]["train"], timer)
    judged = found[-1].samples
    rows = _rows(found, judged, lists)
    return {
        "bench": "communication",
        "seed": seed,
        "source": "the analytic model of NCCL (no hardware)" if samples is None else read_samples(samples).source,
        "num_rounds": len(rounds),
        "num_samples": len(rounds[0]["train"].queries),
        "num_placements": len(_subgraphs(rounds[0]["train"].queries)),
        "models": [msgspec.to_builtins(one) for one in found],
        "candidate_lists": lists,
        "spread": msgspec.to_builtins(ours.spread),
        "rows": rows,
        "criterion": (
            f"aims on {judged}: mean error <= {AIM_ERROR:.0%}, at most {AIM_RATIO} of the best baseline's; "
            f"{NUM_CANDIDATES} candidates in {AIM_LIST_US / 1000:g} ms"
        ),
        "passed": all(row["bound"] is None or row["ours"] <= row["bound"] for row in rows),
        "machine": machine_facts(load),
    }


def _fit(
    learned: Drawn, seed: int, training: Training | None, timer: Callable[[], float], tell: Callable[[str], None]
) -> list[tuple[str, CommunicationModel, float]]:
    """Every predictor that can be had here, fitted, with the CPU seconds that it took."""
    models: list[tuple[str, CommunicationModel, float]] = []
    for name, make in _makers(seed, training).items():
        tell(f"fitting {name} to {len(learned.queries)} samples ...")
        began_s = timer()
        try:
            model = make(learned.queries, learned.measured_s)
        except InvalidRequest as error:
            tell(f"left out: {error}")
            continue
        models.append((name, model, timer() - began_s))
    return models


def _makers(
    seed: int, training: Training | None
) -> dict[str, Callable[[Sequence[Query], NDArray[np.float64]], CommunicationModel]]:
    return {
        BytesOverBandwidth.name: lambda queries, measured_s: BytesOverBandwidth(),
        AlphaBeta.name: AlphaBeta,
        PolluxForm.name: PolluxForm,
        TreeModel.name: lambda queries, measured_s: TreeModel(queries, measured_s, seed=seed),
        _BLIND: lambda queries, measured_s: train(
            queries, measured_s, seed=seed, sizes=Sizes(num_layers=0), training=training
        ),
        _OURS: lambda queries, measured_s: train(queries, measured_s, seed=seed, training=training),
    }


class _Tally:
    """What one predictor said of one set, over all rounds."""

    def __init__(self) -> None:
        self._parts: list[tuple[Drawn, NDArray[np.float64]]] = []
        self._predict_s = 0.0
        self._train_s = 0.0

    def add(self, one: Drawn, predicted_s: NDArray[np.float64], predict_s: float, train_s: float) -> None:
        self._parts.append((one, predicted_s))
        self._predict_s += predict_s
        self._train_s += train_s

    def errors(self, model: str, samples: str) -> PredictionErrors:
        """Relative errors over all that was added."""
        queries = [query for one, _ in self._parts for query in one.queries]
        predicted_s = np.concatenate([said for _, said in self._parts])
        error = np.abs(predicted_s / np.concatenate([one.measured_s for one, _ in self._parts]) - 1.0)
        true_s = [one.true_s for one, _ in self._parts if one.true_s is not None]
        num_bytes = np.array([query.num_bytes for query in queries])
        regions = np.array([region_of(query.subgraph) for query in queries])
        bands = {name: (num_bytes >= low) & (num_bytes < high) for name, low, high in BANDS}
        places = {name: regions == region for region, name in enumerate(REGIONS)}
        is_truth = model == _FLOOR
        return PredictionErrors(
            model=model,
            samples=samples,
            num_samples=len(error),
            num_placements=len(_subgraphs(queries)),
            mean=float(error.mean()),
            median=float(np.median(error)),
            p95=float(np.quantile(error, 0.95)),
            true_mean=float(np.abs(predicted_s / np.concatenate(true_s) - 1.0).mean()) if true_s else None,
            by_size={name: float(error[chosen].mean()) for name, chosen in bands.items() if chosen.any()},
            by_region={name: float(error[chosen].mean()) for name, chosen in places.items() if chosen.any()},
            us_each=None if is_truth else self._predict_s / len(error) * 1e6,
            train_s=None if is_truth else self._train_s,
        )


def _subgraphs(queries: Sequence[Query]) -> list[Subgraph]:
    return list({id(query.subgraph): query.subgraph for query in queries}.values())


def _list_times(model: GraphModel, learned: Drawn, timer: Callable[[], float]) -> dict[str, float]:
    """Microseconds for a list of candidates: of placements seen before, and of ones whose embedding is not known."""
    subgraphs = [graph for graph in _subgraphs(learned.queries) if graph.num_devices <= 64][-NUM_CANDIDATES:]
    queries = [Query(subgraph, 25_000_000) for subgraph in subgraphs]
    model.predict_s(queries)
    repeats, times = 50, {}
    began_s = timer()
    for _ in range(repeats):
        model.predict_s(queries)
    times["known_us"] = (timer() - began_s) / repeats * 1e6
    began_s = timer()
    for _ in range(5):
        GraphModel(model.members, model.vocabulary, model.sizes, model.spread).predict_s(queries)
    times["fresh_us"] = (timer() - began_s) / 5 * 1e6
    return {"num_candidates": float(len(queries)), **times}


def _rows(found: Sequence[PredictionErrors], judged: str, lists: Mapping[str, float]) -> list[dict[str, Any]]:
    """What is aimed at, on the set that was looked at last."""
    of_set = {one.model: one for one in found if one.samples == judged}
    baselines = [one for name, one in of_set.items() if name not in (_OURS, _BLIND, _FLOOR)]
    best = min(baselines, key=lambda one: one.mean)
    ours = of_set[_OURS]
    rows = [
        _row("mean error", ours.mean, _PAPER_ERROR, "the paper's network", AIM_ERROR, "fraction"),
        _row("mean error", ours.mean, best.mean, best.model, AIM_RATIO * best.mean, "fraction"),
    ]
    if ours.true_mean is not None and best.true_mean is not None:
        rows.append(
            _row("before noise", ours.true_mean, best.true_mean, best.model, AIM_RATIO * best.true_mean, "fraction")
        )
    rows.append(_row("candidates, known", lists["known_us"], None, "-", AIM_LIST_US, "us"))
    rows.append(_row("candidates, fresh", lists["fresh_us"], None, "-", None, "us"))
    return rows


def _row(
    case: str, ours: float, baseline: float | None, baseline_name: str, bound: float | None, unit: str
) -> dict[str, Any]:
    return {
        "case": case,
        "ours": ours,
        "baseline": baseline,
        "baseline_name": baseline_name,
        "ratio": ratio(ours, baseline),
        "bound": bound,
        "unit": unit,
    }


def _measured_rounds(path: Path, seed: int) -> list[dict[str, Drawn]]:
    """A file's samples in rounds: in each other placements are held out, so that every one is once."""
    queries, measured_s = read_samples(path).queries()
    subgraphs = [subgraph for subgraph in _subgraphs(queries) if subgraph.num_devices > 1]
    if len(subgraphs) < NUM_ROUNDS:
        raise InvalidRequest(
            f"{path} has samples of {len(subgraphs)} placements; measure at least {NUM_ROUNDS}, so that some can be "
            "held out"
        )
    order = np.random.default_rng(seed).permutation(len(subgraphs))
    round_of = {id(subgraphs[index]): place % NUM_ROUNDS for place, index in enumerate(order)}
    rounds = []
    for number in range(NUM_ROUNDS):
        sets = {}
        for name in ("train", "test"):
            chosen = [
                index
                for index, query in enumerate(queries)
                if id(query.subgraph) in round_of and (round_of[id(query.subgraph)] == number) == (name == "test")
            ]
            sets[name] = Drawn(
                queries=tuple(queries[index] for index in chosen), measured_s=measured_s[chosen], true_s=None
            )
        rounds.append(sets)
    return rounds


def markdown(report: Mapping[str, Any]) -> str:
    """The report as tables for a page of results."""
    found = [msgspec.convert(one, PredictionErrors) for one in report["models"]]
    bands = list(dict.fromkeys(band for one in found for band in one.by_size))
    regions = list(dict.fromkeys(region for one in found for region in one.by_region))
    header = ["set", "model", "mean %", "median %", "p95 %", "before noise %"]
    header += [*(f"{name} %" for name in (*bands, *regions)), "us each", "fit CPU s"]
    body = [
        [
            one.samples,
            one.model,
            *(_percent(value) for value in (one.mean, one.median, one.p95, one.true_mean)),
            *(_percent(one.by_size.get(band)) for band in bands),
            *(_percent(one.by_region.get(region)) for region in regions),
            "-" if one.us_each is None else f"{one.us_each:.1f}",
            "-" if one.train_s is None else f"{one.train_s:.1f}",
        ]
        for one in found
    ]
    lists = report["candidate_lists"]
    return "\n".join(
        [
            markdown_table(header, body),
            "",
            f"{lists['num_candidates']:.0f} candidates of up to 64 devices: {lists['known_us']:.0f} us where their "
            f"placements were asked for before, {lists['fresh_us']:.0f} us where not.",
        ]
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return run_bench(seed=options["seed"], timer=time.process_time, tell=tell, samples=folder_of(options, "samples"))


BENCH = Bench(
    run=_run,
    options=[
        click.Option(["--samples"], metavar="FILE", help="Measured samples instead of the analytic model's."),
        seed_option(),
    ],
    markdown=markdown,
)
