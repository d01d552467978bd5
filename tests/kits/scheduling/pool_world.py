"""A platform of labelled nodes under a control plane, driven event by event: machines that do what they are told.

After every turn the plan must stand: nothing is left to do at the same instant, and a policy that was built anew from
what the journal keeps decides the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from springtide.control.controller import Controller
from springtide.core.actions import Action, DrainNode, LabelNode, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.decision import Plan, Policy
from springtide.core.events import (
    CancelRequested,
    Event,
    JobFinished,
    JobResized,
    JobSubmitted,
    LoadObserved,
    NodeJoined,
    NodeLost,
    ReplicaReady,
    ReplicaStopped,
    ScaleRequested,
    ServiceDeployed,
)
from springtide.core.ports import Step
from springtide.core.resources import Node, make_node
from springtide.core.workload import Entrypoint, InferenceService, TrainingJob, WorkloadId
from springtide.scheduling.registry import make_policy

SOURCE = Entrypoint(source_path="a.py")
GRACE_S = 5.0


def node(name: str, pool: str, num_devices: int = 4, *, home: str = "", isolates_devices: bool = False) -> Node:
    """A node with its label, the pool that owns it (by default that of the label) and its devices."""
    made = make_node(name, num_devices, pool=pool, isolates_devices=isolates_devices)
    return msgspec.structs.replace(made, home=home or pool)


class World:
    """A control plane with one policy over some nodes. What machines are told comes back when it is delivered."""

    def __init__(self, policy: str | Callable[[], Policy], nodes: Sequence[Node]) -> None:
        self.make: Callable[[], Policy] = (lambda: make_policy(policy)) if isinstance(policy, str) else policy
        self.controller = Controller(self.make())
        self.now_s = 0.0
        self.pending: list[Event] = []
        self.steps: list[bytes] = []
        self.nodes = {str(each.node_id): each for each in nodes}
        self.actions: list[Action] = []
        self._number = itertools.count()
        self.say(*[NodeJoined(node=each) for each in nodes])

    # --- what people and machines do --------------------------------------------------------------------------------

    def submit(self, name: str = "", *, low: int = 1, high: int = 1, elastic: bool = True, steps: int = 1000) -> str:
        """Hand over a job."""
        name = name or f"job-{next(self._number)}"
        job = TrainingJob(
            job_id=WorkloadId(name),
            name=name,
            entrypoint=SOURCE,
            min_workers=low,
            max_workers=high,
            num_virtual_shards=64,
            elastic=elastic,
            total_steps=steps,
            profile_steps_per_s={count: count**0.8 for count in (1, 2, 4, 8, 16)},
            requested_workers=high,
            grace_s=GRACE_S,
        )
        self.say(JobSubmitted(job=job))
        return name

    def deploy(self, name: str = "", *, low: int = 0, high: int = 1) -> str:
        """Hand over a service."""
        name = name or f"service-{next(self._number)}"
        service = InferenceService(
            service_id=WorkloadId(name),
            name=name,
            entrypoint=SOURCE,
            min_replicas=low,
            max_replicas=high,
            grace_s=GRACE_S,
        )
        self.say(ServiceDeployed(service=service))
        return name

    def scale(self, name: str, low: int, high: int) -> Step:
        """Set a workload's bounds."""
        return self.say(ScaleRequested(workload_id=WorkloadId(name), minimum=low, maximum=high))

    def load(self, name: str, in_flight: int) -> Step:
        """So many requests are in flight."""
        observed = LoadObserved(
            service_id=WorkloadId(name),
            arrivals_per_s=float(in_flight),
            in_flight=in_flight,
            queued=0,
            idle_s=0.0 if in_flight else 60.0,
        )
        return self.say(observed)

    def cancel(self, name: str) -> Step:
        """End a job or remove a service."""
        return self.say(CancelRequested(workload_id=WorkloadId(name)))

    def finish(self, name: str) -> None:
        """A job that trains comes to its end."""
        record = self.controller.state.jobs[WorkloadId(name)]
        if record.group.members and record.group.is_confirmed and not record.is_over:
            self.say(JobFinished(job_id=record.workload_id, generation=record.group.generation, step=1000))

    def lose(self, name: str) -> Step:
        """A node is gone with all that runs on it."""
        mine = {device.device_id for device in self.nodes[name].devices}
        gone = {
            replica.replica_id
            for record in self.controller.state.live_records()
            for replica in record.replicas
            if replica.device_id in mine
        }
        self.pending = [event for event in self.pending if getattr(event, "replica_id", None) not in gone]
        return self.say(NodeLost(node_id=self.nodes[name].node_id))

    def join(self, name: str) -> Step:
        """A node comes (back)."""
        return self.say(NodeJoined(node=self.nodes[name]))

    def deliver(self, count: int | None = None) -> None:
        """Let machines report the next so many things, one after the other; by default all, to the last."""
        for _ in range(10_000 if count is None else count):
            if not self.pending:
                return
            self.say(self.pending.pop(0))
        assert count is not None, "the platform does not come to rest"

    def rest(self) -> None:
        """Let everything be reported, and every back-off and grace pass."""
        self.deliver()
        for _ in range(3):
            self.now_s += 120.0
            self.say()
            self.deliver()

    # --- what is to be seen -----------------------------------------------------------------------------------------

    def label(self, name: str) -> str:
        """What a node is labelled for."""
        return self.controller.state.nodes[self.nodes[name].node_id].pool

    def labels(self) -> dict[str, str]:
        """What every node is labelled for."""
        return {str(node_id): found.pool for node_id, found in self.controller.state.nodes.items()}

    def held(self, name: str) -> list[str]:
        """The devices that a workload holds, without those that are being given back."""
        state = self.controller.state
        record = state.jobs.get(WorkloadId(name)) or state.services[WorkloadId(name)]
        return [str(replica.device_id) for replica in record.replicas if replica.state != "STOPPING"]

    def num_ready(self, name: str) -> int:
        """How many replicas of a service answer."""
        return sum(replica.state == "READY" for replica in self.controller.state.services[WorkloadId(name)].replicas)

    def plan(self) -> Plan:
        """What the policy wants now."""
        return self.make().decide(self.controller.snapshot(self.now_s))

    def drained(self) -> list[DrainNode]:
        """All drains that were begun."""
        return [action for action in self.actions if isinstance(action, DrainNode)]

    def labelled(self) -> list[tuple[str, str]]:
        """All changes of labels, in order."""
        return [(str(action.node_id), action.pool) for action in self.actions if isinstance(action, LabelNode)]

    # --- turns ------------------------------------------------------------------------------------------------------

    def say(self, *events: Event) -> Step:
        """Take one step a second later, and make sure that what was decided stands."""
        self.now_s += 1.0
        step = self.controller.step(self.now_s, events)
        for action in step.actions:
            self._do(action)
        self.actions += step.actions
        self.steps.append(msgspec.json.encode(step))
        again = self.controller.step(self.now_s, ())
        assert not again.actions, f"the plan does not stand: {again.actions}"
        self.steps.append(msgspec.json.encode(again))
        return step

    def replay(self) -> None:
        """A control plane that learns everything from the journal has nothing to do and sees the same."""
        other = Controller(self.make())
        for line in self.steps:
            other.restore(msgspec.json.decode(line, type=Step))
        mine, theirs = self.controller.snapshot(self.now_s), other.snapshot(self.now_s)
        assert dict(theirs.drains) == dict(mine.drains)
        assert theirs.tide == mine.tide
        assert theirs.cluster == mine.cluster
        one, two = self.make().decide(mine), self.make().decide(theirs)
        assert dict(one.pools) == dict(two.pools)
        assert {who: a.device_ids for who, a in one.allocations.items()} == {
            who: a.device_ids for who, a in two.allocations.items()
        }
        assert not other.step(self.now_s, ()).actions

    def _do(self, action: Action) -> None:
        if isinstance(action, StartReplica):
            self.pending.append(ReplicaReady(workload_id=action.workload_id, replica_id=action.replica_id))
        elif isinstance(action, StopReplica):
            self._stop(action.workload_id, action.replica_id)
        elif isinstance(action, PreemptJob):
            for replica_id in action.replica_ids:
                self._stop(action.job_id, replica_id)
        elif isinstance(action, ResizeJob):
            resized = JobResized(
                job_id=action.job_id,
                generation=action.generation,
                world_size=len(action.replica_ids),
                step=1,
                pause_s=0.1,
                direction="start",
            )
            self.pending.append(resized)

    def _stop(self, workload_id: WorkloadId, replica_id: str) -> None:
        stopped = ReplicaStopped(workload_id=workload_id, replica_id=replica_id)  # type: ignore[arg-type]
        self.pending = [event for event in self.pending if getattr(event, "replica_id", None) != replica_id]
        self.pending.append(stopped)
