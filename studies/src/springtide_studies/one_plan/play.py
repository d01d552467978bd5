"""One stack of policies plays the world of `bench one-plan`: what it costs, what it keeps, and how well it serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from springtide.cli.commands.bench import Tell
from springtide.core.errors import SpringtideError
from springtide.core.functions import FunctionMenu
from springtide.core.ports import Step
from springtide.core.workload import JobState, TrainingJob, WorkloadId
from springtide.perf.functions.menu import menu_of
from springtide.perf.functions.services import aws_lambda
from springtide.scheduling.registry import PACKER_NAMES, POLICY_NAMES, STRATEGY_NAMES, make_live_policy
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import DEADLINE_TOLERANCE_S, overhead_rule
from springtide.simulator.fluid.runs import FluidRun
from springtide_studies.adaptive.jobs import BatchRule
from springtide_studies.funcpipe.model import lambda_profile
from springtide_studies.jct.play import ADAPTIVE_POLICIES
from springtide_studies.loans.journal import LoanJournal
from springtide_studies.loans.minimums import Minimums, minimums_for
from springtide_studies.loans.play import TIMES, label_nodes
from springtide_studies.one_plan.device_seconds import DeviceSeconds
from springtide_studies.one_plan.truth import MixedSpeeds
from springtide_studies.one_plan.world import DEADLINE_MODELS, DEVICES_PER_NODE, MODEL_SPEEDS, DrawnWorld, WorldSetting

# The list price of a V100 (p3.2xlarge, us-east-1, on demand).
USD_PER_DEVICE_HOUR = 3.06
# A deadline is worth so many times what its job's thriftiest device-hours cost; a job that misses it costs that.
VALUE_FACTOR = 5.0
DEFAULT = "springtide"


def all_stacks() -> tuple[str, ...]:
    """Every policy, pair and triple of the registry. A platform puts `dilu/` before what names no packer."""
    packers = [packer for packer in PACKER_NAMES if packer != "dilu"]
    pools = [f"{strategy}/{name}" for strategy in STRATEGY_NAMES for name in POLICY_NAMES]
    parts = [f"{packer}/{name}" for packer in packers for name in POLICY_NAMES]
    return (*POLICY_NAMES, *pools, *parts, *(f"{packer}/{name}" for packer in packers for name in pools))


def batch_rule(stack: str) -> BatchRule:
    """Whether a stack chooses batches; all others get the batches that are best for what owners ask for."""
    return "adaptive" if stack.rpartition("/")[2].partition(":")[0] in ADAPTIVE_POLICIES else "tuned"


class OutOfTime(SpringtideError):
    """A stack has used up the CPU time that it may take."""


class _Watch:
    """Counts minimums and device-seconds, tells of each day that is over, and ends a run that takes too long."""

    def __init__(
        self,
        minimums: Minimums,
        held: DeviceSeconds,
        timer: Callable[[], float],
        cpu_limit_s: float,
        day_s: float,
        tell: Tell | None,
    ) -> None:
        self._minimums, self._held = minimums, held
        self._timer, self._began_s, self._limit_s = timer, timer(), cpu_limit_s
        self._day_s, self._days, self._tell = day_s, 0, tell

    def begin(self, runs: Mapping[WorkloadId, FluidRun]) -> None:
        self._minimums.begin(runs)

    def note(self, step: Step) -> None:
        """Take in one step. Raises OutOfTime."""
        cpu_s = self._timer() - self._began_s
        if self._tell is not None and step.now_s >= (self._days + 1) * self._day_s:
            self._days = int(step.now_s // self._day_s)
            self._tell(f"day {self._days} is over after {cpu_s:,.0f} s of CPU")
        if cpu_s > self._limit_s:
            raise OutOfTime(f"stopped after {self._limit_s:g} s of CPU, at {step.now_s / 3600.0:.1f} h of its time")
        self._minimums.note(step)
        self._held.note(step)

    def finish(self, now_s: float) -> None:
        self._minimums.finish(now_s)


def play_stack(
    stack: str,
    setting: WorldSetting,
    world: DrawnWorld,
    timer: Callable[[], float],
    *,
    cpu_limit_s: float = math.inf,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """The figures of one stack (see `figures_of`); `error` in them says why it could not play to the end.

    `tell` takes a line for each day that is over.
    """
    names = stack.split("/")
    has_pools = any(name.partition(":")[0] in STRATEGY_NAMES for name in names)
    began_s = timer()
    try:
        nodes = setting.nodes
        held = DeviceSeconds(
            {device.device_id: device.accelerator for node in nodes for device in node.devices}, setting.until_s
        )
        journal, minimums = LoanJournal(setting.until_s), minimums_for(world.arrivals, TIMES)
        played = play(
            make_live_policy(stack),
            world.arrivals,
            label_nodes(nodes, setting.num_serving) if has_pools else nodes,
            rule=overhead_rule("measured", setting.num_devices),
            speeds=MixedSpeeds(world.truths, DEVICES_PER_NODE, model_speeds=MODEL_SPEEDS),
            reports_progress=True,
            keeps_promises=False,
            journal=journal,
            timed_events=world.timed_events,
            times=TIMES,
            until_s=setting.until_s,
            watcher=_Watch(minimums, held, timer, cpu_limit_s, setting.day_s, tell),
        )
        journal.close()
    except Exception as error:  # Whatever a stack fails by is a row that says so, and the others are played.
        return {"stack": stack, "error": f"{type(error).__name__}: {error}", "cpu_s": timer() - began_s}
    ended_s = max((run.ended_s or 0.0 for run in played.runs.values()), default=0.0)
    figures = figures_of(played, journal, minimums, held.device_s(max(ended_s, setting.until_s)))
    return {"stack": stack, **figures, "cpu_s": timer() - began_s}


def figures_of(
    played: FluidRunResult, journal: LoanJournal, minimums: Minimums, device_s: Mapping[str, float]
) -> dict[str, Any]:
    """What the run cost in dollars, and what was done for that.

    `cost_usd` is the sum of `machines_usd` (of `device_s`, each model's by its speed), `functions_usd` (what refused
    jobs pay there) and `unmet_usd` (the value of deadlines that were not met). `slo_attainment` is the part of the
    replicas that load and minimums need, over time, that was ready. `missed` says of each deadline that machines did
    not meet when its job came and what became of it.
    """
    runs = list(played.runs.values())
    due = [run for run in runs if run.job.goal.deadline_s is not None]
    met = [run for run in due if run.met_deadline(DEADLINE_TOLERANCE_S)]
    prices = {run.job.job_id: price_on_functions(run.job, run.ended_s or 0.0) for run in due if _is_refused(run)}
    bought = {job_id: usd for job_id, usd in prices.items() if usd is not None}
    unmet = [run for run in due if run not in met and run.job.job_id not in bought]
    machines_usd = (
        sum(MODEL_SPEEDS.get(model, 1.0) * held_s for model, held_s in device_s.items()) / 3600.0 * USD_PER_DEVICE_HOUR
    )
    unmet_usd = sum(value_usd(run.job) for run in unmet)
    promised = [run for run in due if run.admitted_s is not None]
    areas = journal.areas
    return {
        "cost_usd": machines_usd + sum(bought.values()) + unmet_usd,
        "machines_usd": machines_usd,
        "functions_usd": sum(bought.values()),
        "unmet_usd": unmet_usd,
        "deadlines": len(due),
        "met": len(met) + len(bought),
        "met_on_functions": len(bought),
        "refused": len(prices),
        "promised": len(promised),
        "broken": sum(run not in met for run in promised),
        "minimums": minimums.num_demanded,
        "minimums_broken": minimums.num_broken,
        "slo_attainment": 1.0 - areas.missing / areas.needed if areas.needed else 1.0,
        "best_effort_jobs": len(runs) - len(due),
        "best_effort_jct_s": _mean_time_s([run for run in runs if run.job.goal.deadline_s is None]),
        "decisions": played.num_decisions,
        "missed": [[run.job.job_id, run.submitted_s, str(run.state), run.reason] for run in due if run not in met],
    }


def _is_refused(run: FluidRun) -> bool:
    return run.state is JobState.REJECTED and run.admitted_s is None


def _mean_time_s(runs: Sequence[FluidRun]) -> float | None:
    times_s = [run.ended_s - run.submitted_s for run in runs if run.state is JobState.SUCCEEDED and run.ended_s]
    return float(np.mean(times_s)) if times_s else None


def value_usd(job: TrainingJob) -> float:
    """What its deadline is worth."""
    thrifty = max(rate / count for count, rate in job.profile_steps_per_s.items())
    return VALUE_FACTOR * (job.total_steps or 0) / thrifty / 3600.0 * USD_PER_DEVICE_HOUR


def price_on_functions(job: TrainingJob, now_s: float) -> float | None:
    """What a job that machines refused pays on functions, for the cheapest way that makes its deadline from now on.

    It is the rule of `--on auto` where machines refuse, and a quote's word: predictions may be off by the menu's error.
    None for a model without a profile of its layers, and where no way is fast enough.
    """
    model, deadline_s = job.params.get("model", ""), job.goal.deadline_s
    if model not in DEADLINE_MODELS or deadline_s is None:
        return None
    menu, steps = _menu(model, job.global_batch_size), job.total_steps or 0
    fitting = [
        option.start_usd + steps * option.step_usd
        for option in menu.options
        if now_s + option.start_s + steps * option.step_s * (1.0 + menu.error_fraction) <= deadline_s
    ]
    return min(fitting, default=None)


@cache
def _menu(model: str, batch: int) -> FunctionMenu:
    service = aws_lambda()
    return menu_of(lambda_profile(model, service=service), service, batch)
