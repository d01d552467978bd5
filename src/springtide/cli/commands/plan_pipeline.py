"""`springtide plan-pipeline`: optimal plans for a profiled model on functions, for several weights of cost and time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from springtide.cli.session import Session, common_options, refuse
from springtide.cli.tables.columns import UNKNOWN, align, count, number
from springtide.core.functions import Collective, ModelProfile
from springtide.core.plugins import load_from_studies

if TYPE_CHECKING:
    from springtide.perf.functions.pipeline.plan import PipelinePlanner, PlannedPipeline

_USUAL_BATCH = 64
_SERVICES = ("aws", "alibaba", "emulator")


@click.command("plan-pipeline")
@click.option("--profile", "profile_path", required=True, metavar="FILE", help="The layers' profile (JSON).")
@click.option(
    "--weights",
    multiple=True,
    metavar="A1,A2",
    help="Minimise A1 x cost (MB s) + A2 x time (s). Repeatable. [default: 1,0 1,65536 1,524288 1,4194304]",
)
@click.option("--global-batch", type=click.IntRange(min=1), metavar="N", help="Samples a step. [default: 64]")
@click.option("--micro-batches", type=click.IntRange(min=1), metavar="M", help="Instead: micro-batches a step.")
@click.option("--degrees", metavar="D,D", help="Degrees of data parallelism to choose from. [default: 1,2,4,8,16]")
@click.option("--collective", type=click.Choice(get_args(Collective)), default="duplex", show_default=True)
@click.option("--chunks", type=click.IntRange(1, 64), default=4, show_default=True, help="Of each rank's split.")
@click.option("--functions", type=click.IntRange(min=1), metavar="N", help="At most so many run at a time.")
@click.option(
    "--merge", type=click.IntRange(min=1), metavar="N", help="Plan with N layers, merged by computation time."
)
@click.option(
    "--service", type=click.Choice(_SERVICES), help="Scale a profile of one core to this service's memory sizes first."
)
@click.option("--front", is_flag=True, help="The front of time and cost: complete for small models, else by a sweep.")
@click.option("--check", is_flag=True, help="Solve each again in another way: all plans tried, or HiGHS.")
@common_options
@click.pass_obj
def plan_pipeline(session: Session, /, profile_path: str, **options: Any) -> None:
    """Cut a profiled model into stages on functions: partition, memory of each stage and replicas, chosen together.

    Each plan is proved best under its weights (FuncPipe, equations 3 to 11). `*` marks the recommended one: the fastest
    whose speed-up over the cheapest is at least 0.8 of its rise in cost.
    """
    from springtide.perf.functions.pipeline.merge import merged
    from springtide.perf.functions.pipeline.plan import CHEAPEST, WEIGHTS, PipelinePlanner, check_profile

    profile = _profile(Path(profile_path), options["service"])
    check_profile(profile)
    weights = [_weights(text) for text in options["weights"]] or list(WEIGHTS)
    if options["global_batch"] and options["micro_batches"]:
        refuse("give --global-batch or --micro-batches, not both: one follows from the other")
    batch = options["global_batch"] or _USUAL_BATCH
    num_micro_batches = options["micro_batches"] or -(-batch // profile.micro_batch_size)
    planned_with, ends = merged(profile, options["merge"] or len(profile.layers))
    began_s = time.process_time()
    planner = PipelinePlanner(
        planned_with,
        num_micro_batches,
        weights=[*weights, CHEAPEST],
        degrees=_degrees(options["degrees"]),
        collective=options["collective"],
        num_chunks=options["chunks"],
        max_functions=options["functions"],
    )
    prepare_s = time.process_time() - began_s
    answer = _answer(session, planner, weights, options)
    answer["plans"] = [_in_own_layers(row, ends) for row in answer["plans"]]
    answer |= {
        "model": profile.model,
        "num_layers": len(profile.layers),
        "num_layers_planned": len(planned_with.layers),
        "memory_mb": list(profile.memory_mb),
        "micro_batch_size": profile.micro_batch_size,
        "num_micro_batches": num_micro_batches,
        "degrees": [degree.num_replicas for degree in planner.problem.degrees],
        "collective": options["collective"],
        "prepare_s": prepare_s,
    }
    session.answer(answer, _text(answer), "")
    if options["check"] and not all(row["check"]["agrees"] is not False for row in answer["plans"]):
        raise click.exceptions.Exit(1)


def _profile(path: Path, service: str | None) -> ModelProfile:
    from springtide.perf.functions.pipeline.profile import MAX_PROFILE_BYTES, decode_profile
    from springtide.perf.functions.scale import scaled_profile
    from springtide.perf.functions.services import function_service

    try:
        too_large = path.stat().st_size > MAX_PROFILE_BYTES
        data = b"" if too_large else path.read_bytes()
    except OSError as error:
        refuse(f"{path} cannot be read: {error.strerror}; make one with `springtide profile FILE --layers`")
    if too_large:
        refuse(f"{path} is larger than {MAX_PROFILE_BYTES >> 20} MiB, which no profile of layers is")
    profile = decode_profile(data, str(path))
    if service is None:
        return profile
    if len(profile.memory_mb) != 1:
        refuse(f"{path} has times for {len(profile.memory_mb)} memory sizes already; leave --service out")
    return scaled_profile(profile, function_service(service))


def _weights(text: str) -> tuple[float, float]:
    try:
        cost, seconds = (float(part) for part in text.split(","))
    except ValueError:
        refuse(f"--weights {text!r} is no pair of numbers; give it as 1,65536")
    return cost, seconds


def _degrees(text: str | None) -> tuple[int, ...]:
    from springtide.perf.functions.pipeline.plan import DEGREES

    if text is None:
        return DEGREES
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        refuse(f"--degrees {text!r} is no list of whole numbers from 1 on; give it as 1,2,4,8")
    return tuple(int(part) for part in parts)


def _answer(
    session: Session, planner: PipelinePlanner, weights: Sequence[tuple[float, float]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The plans as plain values, with solver times and checks, and the Pareto front."""
    from springtide.perf.functions.pipeline.plan import CHEAPEST, recommended, with_deltas

    planned, seconds = [], []
    for pair in weights:
        began_s = time.process_time()
        planned.append(planner.plan(pair))
        seconds.append(time.process_time() - began_s)
    cheapest = planner.plan(CHEAPEST).estimate
    planned = with_deltas(planned, cheapest)
    chosen = recommended(planned)
    rows = [_row(one, solve_s, n == chosen) for n, (one, solve_s) in enumerate(zip(planned, seconds, strict=True))]
    answer: dict[str, Any] = {"recommended": chosen, "plans": rows}
    if options["check"]:
        checks_of = load_from_studies("springtide.checks", "pipeline-plan", "plan-pipeline --check")
        session.note("solving each plan again in another way, which takes longer ...")
        for row, check in zip(
            rows, checks_of(planner.problem, weights, [row["objective"] for row in rows]), strict=True
        ):
            row["check"] = check
    if options["front"]:
        answer["front"] = _front(planner, planned)
    return answer


def _front(planner: PipelinePlanner, planned: Sequence[PlannedPipeline]) -> dict[str, Any]:
    """The Pareto front of time and cost: exact if all plans can be enumerated, else from a sweep of weights."""
    from springtide.solvers.pipeline.exhaustive import every_memory, num_plans, pareto_front

    if num_plans(planner.problem) <= 1_000_000:
        points = pareto_front(every_memory(planner.problem))
        return {"is_complete": True, "points": [{"step_s": s, "cost_mb_s": c} for s, c in points]}
    found = {(one.estimate.cost_mb_s, one.estimate.step_s) for one in planned}
    for power in range(10, 24):
        one = planner.plan((1.0, 2.0**power)).estimate
        found.add((one.cost_mb_s, one.step_s))
    kept: list[dict[str, float]] = []
    for cost, seconds in sorted(found):
        if not kept or seconds < kept[-1]["step_s"]:
            kept.append({"step_s": seconds, "cost_mb_s": cost})
    return {"is_complete": False, "points": kept}


def _row(one: PlannedPipeline, solve_s: float, is_recommended: bool) -> dict[str, Any]:
    import msgspec

    estimate = one.estimate
    return {
        "weights": list(one.weights),
        "objective": one.value,
        "bound": one.bound,
        "proved": one.is_proved,
        "recommended": is_recommended,
        "delta": one.delta,
        "step_s": estimate.step_s,
        "cost_mb_s": estimate.cost_mb_s,
        "memory_mb": estimate.memory_mb,
        "computation_s": estimate.computation_s,
        "flush_s": estimate.flush_s,
        "sync_s": estimate.sync_s,
        "plan": msgspec.to_builtins(one.plan),
        "stages": msgspec.to_builtins(estimate.stages),
        "solve_s": solve_s,
        "num_labels": one.num_labels,
    }


def _in_own_layers(row: dict[str, Any], ends: tuple[int, ...]) -> dict[str, Any]:
    """A row of a plan over merged layers, converted to the profile's own layers."""
    begins = (0, *ends)
    stages = [
        {**stage, "first_layer": begins[stage["first_layer"]], "end_layer": begins[stage["end_layer"]]}
        for stage in row["plan"]["stages"]
    ]
    return {**row, "plan": {**row["plan"], "stages": stages}}


def _text(answer: Mapping[str, Any]) -> str:
    """The plans as a table and as drawn pipelines, and the Pareto front."""
    rows = [_cells(row) for row in answer["plans"]]
    header = ("", "WEIGHTS", "FUNCTIONS", "STEP", "COST", "COMPUTE", "FLUSH", "SYNC", "DELTA", "PROVED", "SOLVED IN")
    layers = count(answer["num_layers"], "layer")
    if answer["num_layers_planned"] != answer["num_layers"]:
        layers += f" merged to {answer['num_layers_planned']}"
    head = (
        f"{answer['model']}: {layers}, {len(answer['memory_mb'])} memory sizes, "
        f"{answer['num_micro_batches']} micro-batches of {answer['micro_batch_size']} a step, "
        f"replicas {', '.join(map(str, answer['degrees']))}; prepared in {answer['prepare_s']:.2f} s"
    )
    lines = [head, "", align(header, rows), ""]
    lines += [f"{'*' if row['recommended'] else ' '} {_weights_text(row)}  {_drawn(row)}" for row in answer["plans"]]
    if "front" in answer:
        points = [(f"{p['step_s']:.3f} s", f"{p['cost_mb_s'] / 1024:.1f} GB s") for p in answer["front"]["points"]]
        which = "every plan on the front" if answer["front"]["is_complete"] else "the front along a sweep of weights"
        lines += ["", which, align(("STEP", "COST"), points)]
    for row in answer["plans"]:
        if "check" in row:
            lines.append(f"  {_weights_text(row)}  checked: {row['check']['words']}")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    plan = row["plan"]
    return [
        "*" if row["recommended"] else "",
        _weights_text(row),
        f"{len(plan['stages'])} x {plan['num_replicas']}",
        f"{row['step_s']:.3f} s",
        f"{row['cost_mb_s'] / 1024:.1f} GB s",
        f"{row['computation_s']:.2f} s",
        f"{row['flush_s']:.2f} s",
        f"{row['sync_s']:.2f} s",
        UNKNOWN if row["delta"] is None else number(row["delta"], 3),
        "yes" if row["proved"] else f"within {1 - row['bound'] / row['objective']:.1%}",
        f"{row['solve_s']:.2f} s",
    ]


def _weights_text(row: Mapping[str, Any]) -> str:
    return ",".join(f"{weight:.7g}" for weight in row["weights"])


def _drawn(row: Mapping[str, Any]) -> str:
    """[0-9 2048 MB] > [10-39 4096 MB]   x 4 replicas of 16 micro-batches."""
    boxes = []
    for stage in row["plan"]["stages"]:
        first, last = stage["first_layer"], stage["end_layer"] - 1
        span = f"{first}" if first == last else f"{first}-{last}"
        boxes.append(f"[{span} {stage['memory_mb']} MB]")
    replicas = count(row["plan"]["num_replicas"], "replica")
    return f"{' > '.join(boxes)}   x {replicas}, {row['plan']['num_micro_batches']} micro-batches each"
