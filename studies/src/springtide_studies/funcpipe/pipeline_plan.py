"""`springtide bench pipeline-plan`: seconds for a plan of a pipeline of functions, and whether it is the best one.

Models in the shape of FuncPipe's four are drawn from a seed at each number of layers; the four themselves, as measured,
are planned with all their layers. Optima are set beside those of trying every plan, and of HiGHS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.functions import MIB, LayerProfile, ModelProfile
from springtide.perf.functions.pipeline.merge import merged
from springtide.perf.functions.pipeline.plan import DEGREES, WEIGHTS, PipelinePlanner, problem_of
from springtide.perf.functions.scale import scaled_profile
from springtide.perf.functions.services import aws_lambda
from springtide.solvers.pipeline.exhaustive import best_of, every_memory
from springtide.solvers.pipeline.problem import PipelineProblem
from springtide_studies.bounds import highs
from springtide_studies.bounds.pipeline_milp import solve_milp
from springtide_studies.funcpipe.model import MODELS, TABLE_1, lambda_profile
from springtide_studies.options import seed_option, sizes_of, sizes_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

SIZES = (8, 12, 20, 30, 40)
BATCHES = (64, 256)
# A plan is to take less than this.
AIM_S = 1.0
# FuncPipe, section 5.6: Gurobi on merged layers, for each configuration.
PAPER_S = 274.0
TRIED = "every plan tried"
SOLVED = "HiGHS, mixed-integer"
# Up to so many layers every plan is tried, and to HiGHS go up to so many.
MAX_TRIED_LAYERS = 8
MAX_SOLVED_LAYERS = 12
_MEASURED_LAYERS = 10
_AGREEMENT = MappingProxyType({TRIED: 1e-9, SOLVED: 1e-5})
_MICRO_BATCH = 4
# Gigaflop of one sample's forward pass, about.
_GFLOP = MappingProxyType({"resnet101": 2.5, "amoebanet-d18": 10.0, "amoebanet-d36": 20.0, "bert-large": 39.0})
_GFLOP_PER_S = 40.0


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model, number of layers and global batch: the longest plan of all weights, and the oracle's longest.

    `agrees` is None where no oracle ran, `num_oracle_proved` how many of its answers were proved.
    """

    model: str
    num_layers: int
    global_batch_size: int
    ours_s: float
    mean_s: float
    num_plans: int
    num_proved: int
    num_labels: int
    oracle: str = ""
    oracle_s: float | None = None
    num_oracle_proved: int = 0
    agrees: bool | None = None
    largest_gap_fraction: float | None = None


def drawn_model(shape: str, num_layers: int, seed: int = 0) -> ModelProfile:
    """A model of Table 1's totals with so many layers, on Lambda's sizes.

    Convolutions hold more parameters and fewer activations the deeper they are, with some chance; a transformer's
    layers are all the same, which is the hardest: their orders tie.
    """
    rng = np.random.default_rng([seed, num_layers, MODELS.index(shape)])
    megabytes, activation_mb = TABLE_1[shape]
    depth = np.linspace(0.0, 1.0, num_layers)
    if shape == "bert-large":
        work = held = kept = np.ones(num_layers)
        border = np.full(num_layers, 0.25)
    else:
        growth = 3.0 if shape == "resnet101" else 2.0
        work = rng.uniform(0.6, 1.4, num_layers)
        held = np.exp(growth * depth) * rng.uniform(0.7, 1.3, num_layers)
        kept = np.exp(-1.5 * depth) * rng.uniform(0.7, 1.3, num_layers)
        border = 2.0 * np.exp(-2.0 * depth)
    seconds = _MICRO_BATCH * _GFLOP[shape] / _GFLOP_PER_S * work / work.sum()
    parameter_bytes = (megabytes * MIB * held / held.sum()).astype(int)
    activation_bytes = (activation_mb * MIB * _MICRO_BATCH * kept / kept.sum()).astype(int)
    border_bytes = (border * MIB * _MICRO_BATCH).astype(int)
    one_core = ModelProfile(
        model=shape,
        micro_batch_size=_MICRO_BATCH,
        memory_mb=(aws_lambda().sizes[-1].memory_mb,),
        bytes_per_s=(aws_lambda().sizes[-1].bytes_per_s,),
        layers=tuple(
            LayerProfile(
                name=f"layer{i}",
                parameter_bytes=int(parameter_bytes[i]),
                activation_bytes=int(activation_bytes[i]),
                output_bytes=int(border_bytes[i]),
                gradient_bytes=int(border_bytes[i - 1]) if i else 0,
                forward_s=(float(seconds[i]),),
                backward_s=(2.0 * float(seconds[i]),),
            )
            for i in range(num_layers)
        ),
        slowdown=1.1,
        source="synthetic",
    )
    return scaled_profile(one_core, aws_lambda())


def measure(
    profile: ModelProfile, global_batch_size: int, *, timer: Callable[[], float], has_oracle: bool = True
) -> PlanRow:
    """Plan under each pair of weights, each on its own from the beginning, and solve it again with the oracle."""
    num_micro_batches = -(-global_batch_size // profile.micro_batch_size)
    planned, seconds = [], []
    for pair in WEIGHTS:
        began_s = timer()
        planned.append(PipelinePlanner(profile, num_micro_batches, weights=[pair], degrees=DEGREES).plan(pair))
        seconds.append(timer() - began_s)
    values = [one.value for one in planned]
    row = PlanRow(
        model=profile.model,
        num_layers=len(profile.layers),
        global_batch_size=global_batch_size,
        ours_s=max(seconds),
        mean_s=sum(seconds) / len(seconds),
        num_plans=len(planned),
        num_proved=sum(one.is_proved for one in planned),
        num_labels=sum(one.num_labels for one in planned),
    )
    oracle = ""
    if has_oracle and len(profile.layers) <= MAX_TRIED_LAYERS:
        oracle = TRIED
    elif has_oracle and len(profile.layers) <= MAX_SOLVED_LAYERS and highs.is_available():
        oracle = SOLVED
    if not oracle:
        return row
    problem = problem_of(profile, num_micro_batches, degrees=DEGREES)
    answers, oracle_s = _tried(problem, timer) if oracle == TRIED else _solved(problem, timer)
    gaps = [abs(best - value) / value for (best, _), value in zip(answers, values, strict=True)]
    # What the oracle has not proved must at least be no better than ours, and its bound no higher.
    tolerance = _AGREEMENT[oracle]
    agrees = all(
        best >= value * (1 - tolerance) and bound <= value * (1 + tolerance)
        for (best, bound), value in zip(answers, values, strict=True)
    )
    proved = [bound >= best * (1 - tolerance) for best, bound in answers]
    agrees = agrees and all(gap <= tolerance for gap, is_proved in zip(gaps, proved, strict=True) if is_proved)
    return msgspec.structs.replace(
        row,
        oracle=oracle,
        oracle_s=oracle_s,
        num_oracle_proved=sum(proved),
        agrees=agrees,
        largest_gap_fraction=max(gaps),
    )


def _tried(problem: PipelineProblem, timer: Callable[[], float]) -> tuple[list[tuple[float, float]], float]:
    """The best value and its bound for each pair of weights, and the seconds that all of them took together."""
    began_s = timer()
    points = every_memory(problem)
    best = [best_of(points, pair)[0] for pair in WEIGHTS]
    return [(value, value) for value in best], timer() - began_s


def _solved(problem: PipelineProblem, timer: Callable[[], float]) -> tuple[list[tuple[float, float]], float]:
    """The same, with the seconds of the pair that took longest."""
    answers, seconds = [], []
    for pair in WEIGHTS:
        began_s = timer()
        found = solve_milp(problem, pair)
        seconds.append(timer() - began_s)
        answers.append((found.value, found.bound))
    return answers, max(seconds)


def run_bench(
    *,
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
    timer: Callable[[], float],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure and return the report of `springtide bench`; `tell` is given a line after each measurement."""
    load_before = machine_load()
    table: list[PlanRow] = []

    def add(profile: ModelProfile, batch: int, name: str, has_oracle: bool = True) -> None:
        named = msgspec.structs.replace(profile, model=name)
        row = measure(named, batch, timer=timer, has_oracle=has_oracle)
        table.append(row)
        tell(_words(row))

    for num_layers in sizes:
        for shape in MODELS:
            for batch in BATCHES:
                add(drawn_model(shape, num_layers, seed), batch, f"{shape}, drawn", has_oracle=batch == BATCHES[0])
    for model in MODELS:
        profile = lambda_profile(model)
        add(merged(profile, _MEASURED_LAYERS)[0], BATCHES[0], f"{model}, measured, merged")
        for batch in BATCHES:
            add(profile, batch, f"{model}, measured")
    return {
        "bench": "pipeline-plan",
        "machine": machine_facts(load_before) | {"seed": seed},
        "rows": [_bench_row(row) for row in table],
        "criterion": _criterion(table),
        "passed": bool(table)
        and any(row.agrees is not None for row in table)
        and all(row.agrees is not False and row.num_proved == row.num_plans for row in table),
        "table": [msgspec.to_builtins(row) for row in table],
    }


def _bench_row(row: PlanRow) -> dict[str, Any]:
    """For every plan tried, all pairs of weights share one pass, so the baseline is that of all of them."""
    return {
        "case": f"{row.model}, {row.num_layers} layers, batch {row.global_batch_size}",
        "ours": row.ours_s,
        "baseline": row.oracle_s,
        "baseline_name": row.oracle or "none",
        "ratio": ratio(row.ours_s, row.oracle_s),
        "bound": AIM_S,
        "unit": "s CPU",
    }


def _criterion(table: Sequence[PlanRow]) -> str:
    checked = [row for row in table if row.agrees is not None]
    wrong = sum(row.agrees is False for row in table)
    num_checked, num_all = sum(row.num_plans for row in checked), sum(row.num_plans for row in table)
    return (
        f"every optimum is the oracle's: {num_checked} of {num_all} plans were solved again, and the oracle proved "
        f"{sum(row.num_oracle_proved for row in checked)} of them; {wrong} models differ. The method itself proves "
        f"{sum(row.num_proved for row in table)} of {num_all} plans best. The longest plan took "
        f"{max((row.ours_s for row in table), default=0.0):.2f} s of CPU (aim {AIM_S:g} s; FuncPipe reports "
        f"{PAPER_S:.0f} s a configuration with Gurobi on its own machine)"
    )


def _words(row: PlanRow) -> str:
    checked = "not checked"
    if row.agrees is not None:
        checked = f"{'equal to' if row.agrees else 'DIFFERS from'} {row.oracle} ({row.oracle_s:.1f} s)"
    return f"{_bench_row(row)['case']}: {row.ours_s:.2f} s at most, {checked}"


def markdown(report: Mapping[str, Any]) -> str:
    """The table of a report, for a page of results."""
    header = (
        "model",
        "layers",
        "batch",
        "longest s",
        "mean s",
        "labels",
        "proved",
        "oracle",
        "its s",
        "it proved",
        "equal",
    )
    return markdown_table(
        header,
        [
            (
                row["model"],
                str(row["num_layers"]),
                str(row["global_batch_size"]),
                f"{row['ours_s']:.2f}",
                f"{row['mean_s']:.2f}",
                f"{row['num_labels']:,}",
                f"{row['num_proved']} of {row['num_plans']}",
                row["oracle"] or "none",
                "-" if row["oracle_s"] is None else f"{row['oracle_s']:.1f}",
                "-" if not row["oracle"] else f"{row['num_oracle_proved']} of {row['num_plans']}",
                {True: "yes", False: "NO", None: "-"}[row["agrees"]],
            )
            for row in report["table"]
        ],
    )


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    sizes = sizes_of(options["sizes"], 1, 64, "layers from 1 to 64", "them as 8,12,40")
    return run_bench(sizes=sizes or SIZES, seed=options["seed"], timer=time.process_time, tell=tell)


BENCH = Bench(run=_run, options=[sizes_option("layers"), seed_option()], markdown=markdown)
