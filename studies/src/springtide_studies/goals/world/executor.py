"""The executor of the world of goals: search jobs on functions, played step by step on a truth that no policy sees.

It answers the controller's actions as the coordinators of jobs do, in event time. Steps are drawn around the truth's
means; functions die, live only so long, and change while others train on; money is counted by the bill of usage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from springtide.core.actions import Action, EndJob, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.events import Event, JobSubmitted, NodeJoined, ReplicaReady, ReplicaStopped
from springtide.core.function_search import WorkerModel
from springtide.core.ports import Standing
from springtide.core.resources import Node
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.simulator.clock import VirtualClock
from springtide_studies.agenda import Agenda
from springtide_studies.goals.world.function_pool import SimulatedFunctionPool
from springtide_studies.goals.world.runs import CostMeter, GoalRun
from springtide_studies.goals.world.streams import Arrivals
from springtide_studies.goals.world.truth import Truth

# A coordinator starts at once.
_COORDINATOR_S = 0.2
_TURN_S = 0.001


class JobArrival(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is handed over at a moment, and what its workers compute in truth but for what the world adds."""

    job: TrainingJob
    model: WorkerModel
    at_s: float = 0.0


class GoalWorld:
    """An Executor. `arrivals` come at their moments with what is to be trained, which the platform knows from `search`
    alone; `streams` are the datasets that grow, by name.
    """

    def __init__(
        self,
        clock: VirtualClock,
        node: Node,
        truth: Truth,
        arrivals: Sequence[JobArrival],
        *,
        seed: int = 0,
        streams: Mapping[str, Arrivals] | None = None,
    ) -> None:
        assert node.functions is not None
        self.crews: dict[WorkloadId, SimulatedFunctionPool] = {}
        self.is_over = False
        self._truth = truth
        self._clock = clock
        self._agenda = Agenda(clock)
        self._service = node.functions
        self._streams = streams or {}
        self._seed = seed
        self._num_to_come = len(arrivals)
        self._inbox: list[Event] = [NodeJoined(node=node)]
        for arrival in arrivals:
            self._agenda.at(arrival.at_s, lambda arrival=arrival: self._submit(arrival))  # type: ignore[misc]

    def recover(self, standing: Standing) -> None:
        """Nothing is lost here: the control plane of this world does not crash."""

    def acknowledge(self, events: Sequence[Event]) -> None:
        """Nothing waits for it."""

    def start(self, action: Action) -> None:
        """Begin an action; those that concern no functions change nothing."""
        match action:
            case StartReplica():
                self._start_replica(action)
            case ResizeJob():
                assert action.functions is not None
                self.crews[action.job_id].run_as(action.functions, action.generation)
            case PreemptJob():
                self.crews[action.job_id].preempt(action.generation)
            case StopReplica():
                self._stop_replica(action)
            case EndJob():
                self._end(action)
            case _:
                pass

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Let time pass until something is reported, or to the deadline."""
        while not self._inbox and not self.is_over:
            next_s = self._agenda.next_s
            if next_s is None:
                # Nothing runs and nothing arrives: a policy's later moments would change nothing.
                self.is_over = True
            elif deadline_s is not None and deadline_s < next_s:
                self._clock.advance_to(max(deadline_s, self._clock.now_s() + _TURN_S))
                break
            else:
                self._agenda.run_next()
        events, self._inbox = self._inbox, []
        return events

    def _submit(self, arrival: JobArrival) -> None:
        job = arrival.job
        self._num_to_come -= 1
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, len(self.crews), 97]))
        meter = CostMeter(self._service.prices, self._truth.has_parameter_store)
        run = GoalRun(job, arrival.model, meter, rng, self._clock.now_s())
        stream = self._streams[job.stream] if job.stream else None
        self.crews[job.job_id] = SimulatedFunctionPool(
            run, self._truth, self._service, self._agenda, self._inbox_post, stream
        )
        self._inbox.append(JobSubmitted(job=job))

    def _inbox_post(self, event: Event) -> None:
        self._inbox.append(event)

    def _start_replica(self, action: StartReplica) -> None:
        run = self.crews[action.workload_id].run
        run.replica_id, run.generation = action.replica_id, action.generation
        run.step = run.saved_step = action.restore.step if action.restore is not None else 0
        run.is_leaving = False
        ready = ReplicaReady(workload_id=action.workload_id, replica_id=action.replica_id)
        self._agenda.after(_COORDINATOR_S, lambda: self._inbox_post(ready))

    def _stop_replica(self, action: StopReplica) -> None:
        crew = self.crews[action.workload_id]
        if crew.run.replica_id == action.replica_id and crew.run.ended_s is None:
            crew.stop()
        else:
            self._inbox.append(ReplicaStopped(workload_id=action.workload_id, replica_id=action.replica_id))

    def _end(self, action: EndJob) -> None:
        crew = self.crews[action.job_id]
        crew.release()
        crew.run.state, crew.run.reason, crew.run.alternatives = action.state, action.reason, action.alternatives
        crew.run.ended_s = self._clock.now_s()
        self.is_over = not self._num_to_come and all(each.run.ended_s is not None for each in self.crews.values())
