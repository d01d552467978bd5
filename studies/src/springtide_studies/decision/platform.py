"""The real Controller over an executor without processes, timed decision by decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from springtide.control.controller import Controller
from springtide.core.actions import EndJob
from springtide.core.decision import Plan, Policy, Snapshot
from springtide.core.events import Event, JobSubmitted, ProgressReported
from springtide.core.resources import Node
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.executor import FluidExecutor
from springtide.simulator.fluid.rules import Speeds, overhead_rule

DEVICES_PER_NODE = 8
# The warm state comes about in this many batches, a second apart.
NUM_BATCHES = 40
PAUSE_S = 1.0
# It is warm once this share of the crowd lives (some of the first are turned away), at the latest after so many
# arrivals and endings for each job.
_FULL_FRACTION = 0.98
_MOST_WARM_UPS = 1.5


class Crowd(Protocol):
    """The jobs of a bench, of which `num_jobs` are kept alive, and where they run. `speeds` is None for jobs that are
    as fast as they say and report nothing; `timed_events` are what else happens."""

    num_jobs: int
    due_s: float | None
    nodes: Sequence[Node]
    speeds: Speeds | None
    timed_events: Sequence[tuple[float, Event]]

    def warm(self) -> list[tuple[float, TrainingJob]]:
        """The first jobs, each with a random part of its work behind it, in batches a second apart."""

    def next(self, now_s: float) -> TrainingJob:
        """One that arrives now."""

    def ended(self, job_id: WorkloadId) -> None:
        """A job has ended or was turned away."""


class Spent(NamedTuple):
    """Seconds of one turn: of deciding, and of the whole turn; and whether anything changed."""

    decide_s: float
    turn_s: float
    is_news: bool


class _Timed:
    """Sums the time that the policy takes to decide."""

    def __init__(self, policy: Policy, timer: Callable[[], float]) -> None:
        self._decisions = DecisionCache(policy)
        self._timer = timer
        self.spent_s = 0.0

    def decide(self, snapshot: Snapshot) -> Plan:
        began_s = self._timer()
        plan = self._decisions.decide(snapshot)
        self.spent_s += self._timer() - began_s
        return plan


class BenchPlatform:
    """A control loop whose jobs are those of a crowd. A second after one ends, another arrives."""

    def __init__(self, policy: Policy, crowd: Crowd, timer: Callable[[], float]) -> None:
        rule = overhead_rule("elasticflow", sum(len(node.devices) for node in crowd.nodes))
        self._timer, self._crowd = timer, crowd
        self._timed = _Timed(policy, timer)
        self._clock = VirtualClock()
        self._controller = Controller(self._timed, overheads=rule.announced)
        self._executor = FluidExecutor(
            self._clock,
            crowd.nodes,
            crowd.warm(),
            rule=rule,
            speeds=crowd.speeds,
            reports_progress=crowd.speeds is not None,
            timed_events=crowd.timed_events,
        )
        self.num_live = 0
        self.num_events = 0
        self.now_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing will happen any more."""
        return self._executor.is_over

    def warm_up(self) -> None:
        """Let the crowd arrive."""
        while not self.is_over and self.num_events < _MOST_WARM_UPS * self._crowd.num_jobs:
            if self.now_s > NUM_BATCHES + PAUSE_S and self.num_live >= _FULL_FRACTION * self._crowd.num_jobs:
                break
            self.step(self.wait())

    def wait(self) -> list[Event]:
        """What happens next, the arrival of another job included."""
        crowd, executor = self._crowd, self._executor
        moments_s = [at_s for at_s in (self._controller.wakeup_at_s, crowd.due_s) if at_s is not None]
        events = list(executor.wait(min(moments_s, default=None)))
        self.now_s = self._clock.now_s()
        if crowd.due_s is not None and self.now_s >= crowd.due_s:
            crowd.due_s = None
            job = crowd.next(self.now_s)
            executor.add_job(job)
            events.append(JobSubmitted(job=job))
        return events

    def step(self, events: Sequence[Event]) -> Spent:
        """One turn of the loop with these of the events that `wait` has returned."""
        crowd, executor = self._crowd, self._executor
        before_s, began_s = self._timed.spent_s, self._timer()
        step = self._controller.step(self.now_s, events)
        turn_s, decide_s = self._timer() - began_s, self._timed.spent_s - before_s
        executor.acknowledge(events)
        for action in step.actions:
            executor.start(action)
        num_arrived = sum(1 for event in events if isinstance(event, JobSubmitted))
        ended = [action.job_id for action in step.actions if isinstance(action, EndJob)]
        for job_id in ended:
            crowd.ended(job_id)
        self.num_live += num_arrived - len(ended)
        self.num_events += num_arrived + len(ended)
        if self.now_s >= NUM_BATCHES and self.num_live < crowd.num_jobs and crowd.due_s is None:
            crowd.due_s = self.now_s + PAUSE_S
        # Turns that only take in progress reports are not counted.
        is_news = bool(step.actions) or any(not isinstance(event, ProgressReported) for event in events)
        return Spent(decide_s, turn_s, is_news)
