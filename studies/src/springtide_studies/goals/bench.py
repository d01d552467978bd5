"""`springtide bench goals`: goals met by search in a world that is not the model, beside the best of all and others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import InvalidRequest
from springtide.core.workload import Goal, JobState
from springtide_studies.goals.errors import GoalErrors, errors_of, mean_errors
from springtide_studies.goals.rivals import (
    COLLECTIVES,
    RivalPlace,
    RivalResult,
    fixed_allocation,
    machines,
    model_alone,
)
from springtide_studies.goals.searches import SEARCHES, accuracy_rows, searched
from springtide_studies.goals.world.best import Expected, all_plans, all_runs, best_of
from springtide_studies.goals.world.cases import (
    CASES,
    SCENARIOS,
    GoalCase,
    Scenario,
    case_of,
    lambda_of_all_sizes,
    search_job,
    surface_of,
)
from springtide_studies.goals.world.executor import JobArrival
from springtide_studies.goals.world.play import GoalPlayed, outcome_of, play_world
from springtide_studies.goals.world.truth import draw_truth
from springtide_studies.options import names_of, only_option, seed_option, seeds_option
from springtide_studies.rows import machine_facts, machine_load, markdown_table, ratio

NUM_SEEDS = 20
BOUND = 1.10
OURS = "Springtide"
BEST = "exhaustive search"
# The case of which accuracy is followed run by run, as in SMLT's figure 4.
ACCURACY_OF = "bert-medium"
# Methods that need no profiling, by what they are called.
PLAIN = ("model alone", "fixed allocation", *COLLECTIVES, "machines (EC2 C5)")

Row = dict[str, Any]


class GoalsPlayed:
    """One seed of one case and scenario: ours, the best of all configurations, and what others would have made."""

    def __init__(
        self, ours: GoalPlayed, goal: Goal, best: Expected | None, lucky: Expected | None, errors: GoalErrors
    ) -> None:
        self.ours = ours
        self.best = best
        self.lucky = lucky
        self.errors = errors
        self.rivals: dict[str, RivalResult | None] = {}
        self.value = ours.took_s if goal.is_fastest else ours.usd
        in_time = goal.deadline_s is None or ours.took_s <= goal.deadline_s
        within = goal.budget_usd is None or ours.usd <= goal.budget_usd
        self.is_met = ours.state is JobState.SUCCEEDED and in_time and within


def run_bench(
    *,
    num_seeds: int = NUM_SEEDS,
    first_seed: int = 0,
    scenarios: Sequence[str] = (),
    cases: Sequence[str] = (),
    has_rivals: bool = True,
    timer: Callable[[], float],
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Every case under every scenario, over seeds `first_seed` and on. Raises InvalidRequest for what there is not.

    `ratio` of a row is ours over the baseline, both as means over the seeds, profiling and everything else included;
    `worst_ratio` is the largest of one seed. The baseline of the rows with a bound is the best of the whole grid in the
    same world: in expectation, without profiling, with as much room in its goal as 19 of 20 runs need. `passed` only
    if every goal was met and every such ratio is within the bound.
    """
    for scenario in scenarios:
        if scenario not in SCENARIOS:
            raise InvalidRequest(f"there is no scenario {scenario!r}; choose of {', '.join(SCENARIOS)}")
    load_before, began_s = machine_load(), timer()
    seeds = range(first_seed, first_seed + num_seeds)
    rows: list[Row] = []
    errors: list[Row] = []
    accuracy: list[Row] = []
    for name in cases or CASES:
        case = case_of(name)
        tell(f"{name}, seeds {seeds[0]} to {seeds[-1]} ...")
        played = case_played(case, [one for one in SCENARIOS if not scenarios or one in scenarios], seeds, has_rivals)
        for scenario, runs in played.items():
            rows += _rows(case, scenario, runs)
            errors.append({"case": _title(case, scenario), **mean_errors([run.errors for run in runs])})
        if has_rivals and name == ACCURACY_OF:
            accuracy += accuracy_rows(case, seeds)
    bounded = [row for row in rows if row["bound"] is not None]
    return {
        "bench": "goals",
        "rows": rows,
        "ratio": max((row["ratio"] for row in bounded if row["ratio"] is not None), default=None),
        "prediction_errors": errors,
        "accuracy": accuracy,
        "seeds": [seeds[0], seeds[-1]],
        "criterion": f"every goal is met in every seed in which any configuration can, and ours over {BEST} is at most "
        f"{BOUND:g} in the mean of each case",
        "passed": bool(bounded)
        and all(row["num_met"] == row["num_runs"] and (row["ratio"] or math.inf) <= BOUND for row in bounded),
        "machine": {**machine_facts(load_before), "cpu_s": round(timer() - began_s, 1)},
    }


def case_played(
    case: GoalCase, scenarios: Sequence[Scenario], seeds: Sequence[int], has_rivals: bool
) -> dict[Scenario, list[GoalsPlayed]]:
    """One case under each scenario in each seed's world; what others make of it where `has_rivals`."""
    service = lambda_of_all_sizes()
    surface = surface_of(case, service)
    plans = list(all_plans(surface, case.max_workers))
    played: dict[Scenario, list[GoalsPlayed]] = {scenario: [] for scenario in scenarios}
    for seed in seeds:
        truth = draw_truth(seed, service)
        runs = all_runs(truth, service, case.model, plans, [(case.global_batch_size, case.num_steps)])
        for scenario in scenarios:
            goal = case.goal(scenario)
            job = search_job(case, service, goal)
            crew = play_world(truth, service, [JobArrival(job=job, model=case.model)], seed=seed).crews[job.job_id]
            best, lucky = best_of(runs, goal), best_of(runs, goal, 0.0)
            ours = outcome_of(crew)
            one = GoalsPlayed(ours, goal, best, lucky, errors_of(case, truth, service, crew, runs, goal))
            if has_rivals:
                place = RivalPlace(case=case, truth=truth, service=service, surface=surface, goal=goal, seed=seed)
                one.rivals = _rivals(place)
            played[scenario].append(one)
    return played


def _rivals(place: RivalPlace) -> dict[str, RivalResult | None]:
    found: dict[str, RivalResult | None] = {
        "model alone": model_alone(place),
        "fixed allocation": fixed_allocation(place, "fixed allocation"),
        **{name: fixed_allocation(place, name) for name in COLLECTIVES},
        "machines (EC2 C5)": machines(place),
    }
    for name in SEARCHES:
        found[name] = searched(place, name)
    return found


def _title(case: GoalCase, scenario: Scenario) -> str:
    if scenario == "cheapest":
        return f"{case.name}, cheapest within {case.deadline_s:.0f} s"
    return f"{case.name}, fastest within ${case.budget_usd:g}"


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _rows(case: GoalCase, scenario: Scenario, runs: Sequence[GoalsPlayed]) -> list[Row]:
    """Ours beside the best of all, then beside each other method."""
    title, goal = _title(case, scenario), case.goal(scenario)
    unit = "s" if goal.is_fastest else "usd"
    possible = [run for run in runs if run.best is not None]
    ours = _mean([run.value for run in possible])
    best = _mean([run.best.value(goal) for run in possible if run.best is not None])
    lucky = _mean([run.lucky.value(goal) for run in runs if run.lucky is not None])
    each = [run.value / run.best.value(goal) for run in possible if run.best is not None]
    rows: list[Row] = [
        {
            "case": title,
            "ours": ours,
            "baseline": best,
            "baseline_name": BEST,
            "ratio": ratio(ours, best),
            "worst_ratio": max(each, default=None),
            "num_within": sum(one <= BOUND for one in each),
            "ratio_without_room": ratio(_mean([run.value for run in runs if run.lucky is not None]), lucky),
            "bound": BOUND,
            "unit": unit,
            "num_met": sum(run.is_met for run in possible),
            "num_runs": len(possible),
            "num_impossible": len(runs) - len(possible),
            "num_changes": _mean([float(run.ours.num_changes) for run in runs]),
            "num_measured": _mean([float(run.ours.num_measured) for run in runs]),
            "num_deaths": sum(run.ours.num_deaths for run in runs),
            "off_s_fraction": _mean([run.ours.off_s / run.ours.took_s for run in runs if run.ours.took_s > 0]),
            "ratios": [round(one, 4) for one in each],
        }
    ]
    for name in runs[0].rivals if runs else ():
        results = [result for run in possible if (result := run.rivals[name]) is not None]
        theirs = _mean([result.value(goal) for result in results])
        rows.append(
            {
                "case": title,
                "ours": ours,
                "baseline": theirs,
                "baseline_name": name,
                "ratio": ratio(ours, theirs),
                "over_best": ratio(theirs, best),
                "bound": None,
                "unit": unit,
                "num_met": sum(result.meets(goal) for result in results),
                "num_runs": len(possible),
                "profiled_s": _mean([result.profiled_s for result in results]),
                "profiled_usd": _mean([result.profiled_usd for result in results]),
            }
        )
    return rows


def markdown(report: Mapping[str, Any]) -> str:
    """Goals and ratios, methods by case, errors before and after, accuracy by profiling runs."""
    ours = [row for row in report["rows"] if row["bound"] is not None]
    texts = [
        markdown_table(
            ("goal", "unit", "met", "ours", "best", "ratio", "worst", f"<= {BOUND:g}", "no room", "moves", "tried"),
            [
                (
                    row["case"],
                    row["unit"],
                    f"{row['num_met']} of {row['num_runs']}",
                    _text(row["ours"]),
                    _text(row["baseline"]),
                    _text(row["ratio"]),
                    _text(row["worst_ratio"]),
                    f"{row['num_within']}",
                    _text(row["ratio_without_room"]),
                    _text(row["num_changes"]),
                    _text(row["num_measured"]),
                )
                for row in ours
            ],
        )
    ]
    others = [row for row in report["rows"] if row["bound"] is None]
    if others:
        texts.append(
            markdown_table(
                ("goal", "method", "met", "theirs", "over the best", "ours over theirs", "profiling s", "profiling $"),
                [
                    (
                        row["case"],
                        row["baseline_name"],
                        f"{row['num_met']} of {row['num_runs']}",
                        _text(row["baseline"]),
                        _text(row["over_best"]),
                        _text(row["ratio"]),
                        _text(row["profiled_s"]),
                        _text(row["profiled_usd"]),
                    )
                    for row in others
                ],
            )
        )
    for key in ("prediction_errors", "accuracy"):
        if report[key]:
            columns = list(report[key][0])
            body = [[_text(row[column]) for column in columns] for row in report[key]]
            texts.append(markdown_table([column.replace("_", " ") for column in columns], body))
    return "\n\n".join(texts)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return run_bench(
        num_seeds=options["seeds"],
        first_seed=options["seed"],
        scenarios=names_of(options["scenario"]),
        cases=names_of(options["only"]),
        timer=time.process_time,
        tell=tell,
    )


BENCH = Bench(
    run=_run,
    options=[
        only_option(", ".join(CASES)),
        click.Option(["--scenario"], metavar="NAME", help="cheapest (within a deadline) or fastest (within a budget)."),
        seeds_option(NUM_SEEDS),
        seed_option(),
    ],
    markdown=markdown,
)
