"""`springtide bench one-plan`: what the default policy costs with everything at once, beside stacks of others."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.cli.settings import PAY_PER_USE_POLICY
from springtide.core.errors import InvalidRequest
from springtide.scheduling.registry import check_policy_name
from springtide_studies.adaptive.jobs import BatchRule
from springtide_studies.adaptive.truth import AppTruth, make_truths
from springtide_studies.deadlines.runs import source_digest
from springtide_studies.one_plan.play import DEFAULT, all_stacks, batch_rule, play_stack
from springtide_studies.one_plan.truth import stand_ins
from springtide_studies.one_plan.world import DrawnWorld, WorldSetting, draw_world
from springtide_studies.options import folder_of, names_of, policies_option, seed_option
from springtide_studies.rows import machine_facts, machine_load, ratio
from springtide_studies.workloads.pollux_tables import read_applications

# The aim: what the default costs, at most, relative to the cheapest stack that serves and keeps as much.
MOST_OF_BEST = 0.90
# A stack serves no less if it attains so much less at most of what is needed.
_SLO_TOLERANCE = 0.001
SCREEN = WorldSetting(num_nodes=2, days=1, day_s=1200.0)
_BEST = 5
# The default policy where devices are paid by the time that they are used, as the cost here is.
OURS = PAY_PER_USE_POLICY
# The stacks of one slice: one of each kind beside the default.
USUAL = (OURS, DEFAULT, "elasticflow", "tide/goodput", "exclusive/two-way/springtide")


def why_not_comparable(figures: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    """Why a stack's cost says nothing about the default's: it did not play to the end, did less, or broke the minimum
    of a service; "" if it says something."""
    if "error" in figures:
        return str(figures["error"])
    less = []
    if figures["met"] < default["met"]:
        less.append(f"{default['met'] - figures['met']} fewer deadlines met")
    if figures["slo_attainment"] < default["slo_attainment"] - _SLO_TOLERANCE:
        less.append(f"SLO attainment {figures['slo_attainment']:.4f}")
    if figures["minimums_broken"]:
        less.append(f"minimums broken {figures['minimums_broken']}")
    return ", ".join(less)


def row_of(figures: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """A stack beside the default: what each costs, and in words what the stack did for it."""
    said = why_not_comparable(figures, default)
    if "error" not in figures:
        jct_s = figures["best_effort_jct_s"]
        done = (
            f"met {figures['met']} of {figures['deadlines']}, broken {figures['broken']} promises "
            f"{figures['minimums_broken']} minimums, SLO {figures['slo_attainment']:.4f}, "
            f"best effort {math.nan if jct_s is None else jct_s:,.0f} s"
        )
        said = f"{done}; not comparable: {said}" if said else done
    ours, theirs = default.get("cost_usd"), figures.get("cost_usd")
    return {
        "case": figures["stack"],
        "ours": ours,
        "baseline": theirs,
        "baseline_name": said,
        "ratio": ratio(ours, theirs),
        "unit": "USD",
        "is_comparable": not why_not_comparable(figures, default),
        "figures": dict(figures),
    }


def best_first(played: Sequence[Mapping[str, Any]], default: Mapping[str, Any]) -> list[str]:
    """The rivals in the order in which they are worth playing for longer: comparable ones by cost, then all others."""
    rivals = [figures for figures in played if figures["stack"] != OURS and "error" not in figures]
    ordered = sorted(rivals, key=lambda f: (bool(why_not_comparable(f, default)), -f["met"], f["cost_usd"]))
    comparable = [f for f in ordered if not why_not_comparable(f, default)]
    comparable.sort(key=lambda f: f["cost_usd"])
    return [f["stack"] for f in [*comparable, *ordered[len(comparable) :]]]


def report_of(played: Sequence[Mapping[str, Any]], setting: WorldSetting) -> Report:
    """The rows, and whether the default keeps everything at the cost that it aims at."""
    default = next(figures for figures in played if figures["stack"] == OURS)
    rows = [row_of(figures, default) for figures in played]
    rivals = [row for row in rows if row["is_comparable"] and row["case"] != OURS]
    best = min(rivals, key=lambda row: row["baseline"], default=None)
    is_kept = "error" not in default and not default["broken"] and not default["minimums_broken"]
    of_best = None if best is None else best["ratio"]
    return {
        "bench": "one-plan",
        "rows": rows,
        "best": None if best is None else best["case"],
        "ratio": of_best,
        "passed": is_kept and of_best is not None and of_best <= MOST_OF_BEST,
        "criterion": f"{OURS} breaks no promise and no minimum, and costs at most {MOST_OF_BEST:g} of the cheapest "
        f"stack that breaks no minimum and meets no fewer deadlines at an SLO attainment no lower than "
        f"{_SLO_TOLERANCE:g} below its own "
        f"({'there is none' if best is None else f'''{best['case']}: {of_best:.3f}'''})",
        "settings": msgspec.to_builtins(setting),
    }


class StackRuns:
    """Plays stacks in one world, and keeps each result in a folder, if there is one, so that a cut-off run goes on."""

    def __init__(
        self,
        setting: WorldSetting,
        truths: Mapping[str, AppTruth],
        timer: Callable[[], float],
        tell: Tell,
        cache: Path | None = None,
        cpu_limit_s: float = math.inf,
    ) -> None:
        self.setting, self._truths, self._timer, self._tell = setting, truths, timer, tell
        self._cache, self._cpu_limit_s = cache, cpu_limit_s
        self._worlds: dict[BatchRule, DrawnWorld] = {}

    def play(self, stacks: Sequence[str]) -> list[dict[str, Any]]:
        """The figures of each stack, in order."""
        return [self._one(stack, f"{number} of {len(stacks)}") for number, stack in enumerate(stacks, start=1)]

    def _one(self, stack: str, which: str) -> dict[str, Any]:
        kept = self._kept_in(stack)
        if kept is not None and kept.is_file():
            found: dict[str, Any] = msgspec.json.decode(kept.read_bytes(), type=dict[str, Any])
            return found
        rule = batch_rule(stack)
        if rule not in self._worlds:
            self._worlds[rule] = draw_world(self.setting, self._truths, rule)
        figures = play_stack(
            stack,
            self.setting,
            self._worlds[rule],
            self._timer,
            cpu_limit_s=self._cpu_limit_s,
            tell=lambda line: self._tell(f"{stack}: {line}"),
        )
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(msgspec.json.encode(figures))
        cost = figures.get("error") or f"${figures['cost_usd']:,.0f}, {figures['met']} deadlines met"
        self._tell(f"{self.setting.num_nodes} nodes, {self.setting.days} days, {which}: {stack} {cost}")
        return figures

    def _kept_in(self, stack: str) -> Path | None:
        if self._cache is None:
            return None
        key = msgspec.json.encode([stack, self.setting, sorted(self._truths), self._cpu_limit_s, source_digest()])
        return self._cache / f"{hashlib.sha256(key).hexdigest()[:24]}.json"


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    load_before = machine_load()
    setting = WorldSetting(
        num_nodes=options["nodes"],
        days=options["days"],
        seed=options["seed"],
        day_s=3600.0 * options["day_hours"],
        is_mixed=options["mixed"],
    )
    data = folder_of(options, "data")
    if data is not None and not (data / "profiles").is_dir():
        raise InvalidRequest(
            f"{data} has no folder profiles; name the one that holds Pollux's measurements with --data"
        )
    measured = None if data is None else make_truths(read_applications(data / "profiles"))
    stacks = names_of(options["policies"]) or list(all_stacks() if options["screen"] else USUAL)
    for stack in stacks:
        check_policy_name(stack)
    stacks = [OURS, *(stack for stack in stacks if stack != OURS)]
    limit_s = options["cpu_limit"] or math.inf

    def stage(world: WorldSetting) -> StackRuns:
        return StackRuns(
            world, measured or stand_ins(world.hour_s), time.process_time, tell, folder_of(options, "cache"), limit_s
        )

    screened: list[dict[str, Any]] = []
    if options["screen"]:
        screened = stage(msgspec.structs.replace(SCREEN, seed=setting.seed)).play(stacks)
        stacks = [OURS, *best_first(screened, screened[0])[: options["best"]]]
        tell(f"the best of {len(screened)} stacks in the screen: {', '.join(stacks)}")
    report = report_of(stage(setting).play(stacks), setting)
    screen_rows = [row_of(figures, screened[0]) for figures in screened]
    return {**report, "screen": screen_rows, "machine": machine_facts(load_before)}


BENCH = Bench(
    run=_run,
    options=[
        click.Option(["--days"], type=click.IntRange(1, 60), default=7, help="Days in which work comes. [default: 7]"),
        click.Option(
            ["--day-hours"],
            type=click.FloatRange(0.1, 24.0),
            default=24.0,
            help="Shorter days, in which everything takes as much less time. [default: 24]",
        ),
        click.Option(["--nodes"], type=click.IntRange(2), default=32, help="Servers of 8 devices. [default: 32]"),
        click.Option(["--mixed"], is_flag=True, help="Every second server has devices that are 0.45 times as fast."),
        policies_option("These stacks beside the default that pays by use."),
        click.Option(
            ["--screen"],
            is_flag=True,
            help="All stacks for a day of 20 minutes on 2 servers first; the best few go on.",
        ),
        click.Option(["--best"], type=click.IntRange(1), default=_BEST, help=f"So many go on. [default: {_BEST}]"),
        click.Option(
            ["--cpu-limit"], type=click.IntRange(1), metavar="S", help="A stack that takes longer is left out."
        ),
        click.Option(["--cache"], metavar="DIR", help="Keep each result here, so that a cut-off run goes on."),
        click.Option(["--data"], metavar="DIR", help="The folder with profiles/ of Pollux; without it stand-ins."),
        seed_option(),
    ],
)
