"""One policy plays one trace: the Controller and the loop of the platform over the executor of long traces."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from springtide.control import loop
from springtide.control.controller import Controller
from springtide.core.actions import AdmitJob
from springtide.core.decision import Plan, Policy, Snapshot
from springtide.core.events import Event
from springtide.core.ports import Journal, Step
from springtide.core.resources import Node
from springtide.core.tide import Tide
from springtide.core.workload import JobState, TrainingJob, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.executor import FluidExecutor
from springtide.simulator.fluid.faults import NodeFaults
from springtide.simulator.fluid.invariants import FluidInvariants
from springtide.simulator.fluid.rules import OverheadRule, Speeds, Times
from springtide.simulator.fluid.runs import FluidRun, UtilisationTimeline

# Progress is reported about this many times in a run, and at its end.
_NUM_PROGRESS_REPORTS = 400


class NullJournal:
    """A journal that keeps nothing, for runs of which only the figures are wanted."""

    def __init__(self) -> None:
        self._num_steps = 0

    def append(self, step: Step) -> int:
        """Count the step."""
        self._num_steps += 1
        return self._num_steps

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """No steps: none is kept."""
        return iter(())


class WatchedPolicy:
    """Hands the reasons of each plan to the invariants, and measures decisions where the caller brought a timer."""

    def __init__(self, policy: Policy, invariants: FluidInvariants, timer: Callable[[], float] | None) -> None:
        self._decisions = DecisionCache(policy)
        self._invariants = invariants
        self._timer = timer
        self.decisions_s = array("d")
        self.num_decisions = 0

    def decide(self, snapshot: Snapshot) -> Plan:
        self.num_decisions += 1
        if self._timer is None:
            plan = self._decisions.decide(snapshot)
        else:
            began_s = self._timer()
            plan = self._decisions.decide(snapshot)
            self.decisions_s.append(self._timer() - began_s)
        self._invariants.reasons = plan.reasons
        self._invariants.decided = (snapshot, plan)
        return plan


class StepWatcher(Protocol):
    """Follows a run by its journaled steps, for figures that the run itself does not keep."""

    def begin(self, runs: Mapping[WorkloadId, FluidRun]) -> None:
        """The runs of all jobs, before the first step; they change while the steps are noted."""

    def note(self, step: Step) -> None:
        """Take in one step."""

    def finish(self, now_s: float) -> None:
        """The run is over."""


class FluidRunResult:
    """What became of every job, and what the run took. `admits` says whether the policy makes promises or refuses."""

    def __init__(
        self,
        executor: FluidExecutor,
        watched: WatchedPolicy,
        invariants: FluidInvariants,
        num_steps: int,
    ) -> None:
        self.runs: dict[WorkloadId, FluidRun] = executor.runs
        self.timeline: UtilisationTimeline = executor.timeline
        self.num_faults = executor.num_faults
        self.decisions_s = watched.decisions_s
        self.num_decisions = watched.num_decisions
        self.broken = invariants.broken
        self.num_steps = num_steps
        self.admits = any(
            run.admitted_s is not None or run.state is JobState.REJECTED for run in executor.runs.values()
        )
        self.cpu_s: float | None = None


def play(
    policy: Policy,
    arrivals: Sequence[tuple[float, TrainingJob]],
    nodes: Sequence[Node],
    *,
    rule: OverheadRule,
    speeds: Speeds,
    faults: NodeFaults | None = None,
    reports_progress: bool = False,
    keeps_promises: bool = True,
    command: str = "",
    journal: Journal | None = None,
    timer: Callable[[], float] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    timed_events: Sequence[tuple[float, Event]] = (),
    times: Times | None = None,
    until_s: float = 0.0,
    tide: Tide | None = None,
    watcher: StepWatcher | None = None,
) -> FluidRunResult:
    """Let the policy play the arrivals to their end. Raises InvariantViolation, whose text ends with `command`.

    `on_progress` is called with the number of jobs that have ended and of all jobs. `timed_events` are what owners of
    services and the gateway report, each at its moment. The run ends when the last job has ended, but not before
    `until_s`; services still deployed then keep their devices. `tide` is what is known of the demand of earlier days,
    `watcher` is given every journaled step.
    """
    clock = VirtualClock()
    invariants = FluidInvariants(nodes, command=command, keeps_promises=keeps_promises)
    watched = WatchedPolicy(policy, invariants, timer)
    controller = Controller(watched, overheads=rule.announced, tide=tide)
    executor = FluidExecutor(
        clock,
        nodes,
        arrivals,
        rule=rule,
        speeds=speeds,
        faults=faults,
        reports_progress=reports_progress,
        timed_events=timed_events,
        times=times,
    )
    if watcher is not None:
        watcher.begin(executor.runs)
    report_progress = _progress_reporter(executor, on_progress)
    num_steps = 0

    def on_step(seq: int, step: Step) -> None:
        nonlocal num_steps
        num_steps = seq
        invariants.note(step)
        if watcher is not None:
            watcher.note(step)
        for action in step.actions:
            if isinstance(action, AdmitJob):
                executor.runs[action.job_id].admitted_s = step.now_s

    def is_over() -> bool:
        invariants.check_turn(clock.now_s(), executor.agenda.num_run)
        report_progress()
        return executor.is_over or (executor.num_open == 0 and executor.is_empty and clock.now_s() >= until_s)

    loop.run(
        controller, executor, clock, journal if journal is not None else NullJournal(), until=is_over, on_step=on_step
    )
    invariants.check_end(clock.now_s())
    if watcher is not None:
        watcher.finish(clock.now_s())
    return FluidRunResult(executor, watched, invariants, num_steps)


def _progress_reporter(executor: FluidExecutor, on_progress: Callable[[int, int], None] | None) -> Callable[[], None]:
    next_report = num_jobs = executor.num_open

    def report() -> None:
        nonlocal next_report
        if on_progress is not None and executor.num_open <= next_report:
            next_report = executor.num_open - max(1, num_jobs // _NUM_PROGRESS_REPORTS)
            on_progress(num_jobs - executor.num_open, num_jobs)

    return report
