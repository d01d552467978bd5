"""Invariants of long traces, checked on every journaled step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

from springtide.core.actions import (
    Action,
    AdmitJob,
    DrainNode,
    EndJob,
    LabelNode,
    PreemptJob,
    ResizeJob,
    SetShare,
    StartReplica,
)
from springtide.core.decision import EMPTY, Plan, Snapshot
from springtide.core.errors import SpringtideError
from springtide.core.events import JobSubmitted, NodeJoined, NodeLost, ReplicaLost, ReplicaStopped
from springtide.core.ports import Step
from springtide.core.resources import DeviceId, Node, NodeId
from springtide.core.shares import Share
from springtide.core.workload import JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.simulator.fluid.claims import ClaimChecks
from springtide.simulator.fluid.pool_invariants import PoolInvariants
from springtide.simulator.fluid.rules import DEADLINE_TOLERANCE_S
from springtide.simulator.shared_devices import overfull

# This many turns without an event from outside, on average less than SPIN_S apart, count as spinning.
MAX_TURNS_OF_ITS_OWN = 10_000
SPIN_S = 0.01


class InvariantViolation(SpringtideError):
    """A run has broken an invariant, whose name is `name`."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"[{name}] {detail}")
        self.name = name


class FluidInvariants:
    """Checks one run: device-once, capacity, reason-for-change, promise-kept, one-end, nothing-left, no-spinning.

    `decided` is the last snapshot and its plan, whose claims about time are checked in `claims`. Invariants of labels
    and drains are in `pool_invariants`. Services may hold devices to the end. `reasons` are those of the plan that the
    step came from; `WatchedPolicy` sets them. `command` runs the same seed again, and every
    violation names it. With `keeps_promises` an admitted job that ends after its
    deadline is a violation; without (faults, errors, or a study of policies that may) it is only listed in `broken`.
    """

    def __init__(self, nodes: Iterable[Node], *, command: str = "", keeps_promises: bool = True) -> None:
        self.reasons: Mapping[WorkloadId, str] = EMPTY
        self.decided: tuple[Snapshot, Plan] | None = None
        self.broken: list[WorkloadId] = []
        self._command = command
        self._keeps_promises = keeps_promises
        nodes = tuple(nodes)
        self._home = {device.device_id: node.node_id for node in nodes for device in node.devices}
        self._num_run = self._num_turns = 0
        self._since_s = 0.0
        self._alive: set[NodeId] = set()
        self._pools = PoolInvariants(self._home, self._complain)
        self.claims = ClaimChecks(self._complain, keeps_promises=keeps_promises)
        self._memory_mb = {device.device_id: device.memory_mb for node in nodes for device in node.devices}
        self._holders: dict[DeviceId, dict[ReplicaId, Share | None]] = {}
        self._serving: set[ReplicaId] = set()
        self._devices: dict[ReplicaId, tuple[DeviceId, ...]] = {}
        self._jobs: dict[WorkloadId, TrainingJob] = {}
        self._ended: set[WorkloadId] = set()
        self._promised: set[WorkloadId] = set()
        self._reasoned: set[ReplicaId] = set()
        self._members: dict[WorkloadId, tuple[ReplicaId, ...]] = {}
        self._formed_s: dict[WorkloadId, float] = {}

    def note(self, step: Step) -> None:
        """Check one step. Raises InvariantViolation."""
        for event in step.events:
            self.claims.note(event)
            if isinstance(event, ReplicaStopped | ReplicaLost):
                self._free(event.replica_id)
            elif isinstance(event, JobSubmitted):
                self._jobs.setdefault(event.job.job_id, event.job)
            elif isinstance(event, NodeJoined | NodeLost):
                self._note_node(event, step.now_s)
        for action in step.actions:
            self._act(action, step.now_s)
        self._pools.check(step.now_s)
        if self.decided is not None:
            self.claims.check(*self.decided)
            self.decided = None

    def _act(self, action: Action, now_s: float) -> None:
        match action:
            case StartReplica():
                self._start(action, now_s)
            case ResizeJob():
                self._resize(action, now_s)
            case PreemptJob():
                self._preempt(action, now_s)
            case SetShare():
                self._set_share(action, now_s)
            case AdmitJob():
                self._admit(action, now_s)
            case EndJob():
                self._end(action, now_s)
            case DrainNode():
                self._pools.drain(action, now_s)
            case LabelNode():
                self._pools.label(action, self._holders, self._serving, now_s)

    def check_turn(self, now_s: float, num_run: int) -> None:
        """Between two turns: policy and platform must not keep changing plans while no event comes from outside."""
        if num_run != self._num_run:
            self._num_run, self._num_turns, self._since_s = num_run, 0, now_s
            return
        self._num_turns += 1
        if self._num_turns >= MAX_TURNS_OF_ITS_OWN:
            if now_s - self._since_s < MAX_TURNS_OF_ITS_OWN * SPIN_S:
                self._complain("no-spinning", f"{self._num_turns} turns in which nothing but decisions happened", now_s)
            self._num_turns, self._since_s = 0, now_s

    def check_end(self, now_s: float) -> None:
        """Once the run is over: every job ended, once, and nothing is held. Raises InvariantViolation."""
        waiting = [job_id for job_id in self._jobs if job_id not in self._ended]
        if waiting:
            names = ", ".join(waiting[:5])
            self._complain("all-end", f"{len(waiting)} jobs never end, such as {names}", now_s)
        held = [replica_id for replica_id in self._devices if replica_id not in self._serving]
        if held:
            self._complain("nothing-left", f"{len(held)} devices are still held", now_s)

    def _note_node(self, event: NodeJoined | NodeLost, now_s: float) -> None:
        if isinstance(event, NodeJoined):
            self._alive.add(event.node.node_id)
            self._pools.join(event.node, now_s)
            return
        self._alive.discard(event.node_id)
        self._pools.lose(event.node_id)
        for replica_id in [r for d, held in self._holders.items() if self._home[d] == event.node_id for r in held]:
            self._free(replica_id)

    def _preempt(self, action: PreemptJob, now_s: float) -> None:
        if not action.reason:
            self._complain("reason-for-change", f"{action.job_id} is preempted without a reason", now_s)

    def _admit(self, action: AdmitJob, now_s: float) -> None:
        if action.job_id in self._promised or action.job_id in self._ended:
            self._complain("one-promise", f"{action.job_id} is admitted again", now_s)
        self._promised.add(action.job_id)

    def _start(self, action: StartReplica, now_s: float) -> None:
        workload_id = action.workload_id
        if workload_id in self._ended:
            self._complain("end-is-final", f"{workload_id} starts a worker after its end", now_s)
        if len({self._home.get(device_id) for device_id in action.device_ids}) > 1:
            self._complain("capacity", f"{action.replica_id} is given devices of several nodes", now_s)
        for device_id in action.device_ids:
            self._take(action, device_id, now_s)
        self._devices[action.replica_id] = action.device_ids
        self._pools.start(action, now_s)
        if not isinstance(action.workload, TrainingJob):
            self._serving.add(action.replica_id)
        if self.reasons.get(workload_id):
            self._reasoned.add(action.replica_id)

    def _take(self, action: StartReplica, device_id: DeviceId, now_s: float) -> None:
        if self._home.get(device_id) not in self._alive:
            self._complain("capacity", f"{action.workload_id} is given {device_id}, which is no living device", now_s)
        others = self._holders.setdefault(device_id, {})
        if action.replica_id not in others:
            wrong = overfull([*others.values(), action.share], self._memory_mb.get(device_id, 0))
            if wrong:
                names = ", ".join(others)
                detail = f"{device_id} is held by {names} and given to {action.replica_id}: {wrong}"
                self._complain("device-once", detail, now_s)
            others[action.replica_id] = action.share

    def _set_share(self, action: SetShare, now_s: float) -> None:
        device_ids = self._devices.get(action.replica_id, ())
        if not device_ids:
            detail = f"{action.replica_id} is given another share, and holds no device"
            self._complain("capacity", detail, now_s)
        for device_id in device_ids:
            held = self._holders[device_id]
            held[action.replica_id] = action.share
            wrong = overfull(tuple(held.values()), self._memory_mb.get(device_id, 0))
            if wrong:
                detail = f"{device_id}, with another share for {action.replica_id}: {wrong}"
                self._complain("device-once", detail, now_s)

    def _resize(self, action: ResizeJob, now_s: float) -> None:
        job_id = action.job_id
        if job_id in self._ended:
            self._complain("end-is-final", f"{job_id} is resized after its end", now_s)
        for replica_id in action.replica_ids:
            if replica_id not in self._devices:
                self._complain("capacity", f"{job_id} is to train on {replica_id}, which holds no device", now_s)
        before = self._members.get(job_id, ())
        self._members[job_id] = action.replica_ids
        if action.cause != "plan":
            return
        # Workers started for this change earlier carried its reason; all changes of one instant are one change.
        joiners = [replica_id for replica_id in action.replica_ids if replica_id not in before]
        is_reasoned = bool(joiners) and self._reasoned.issuperset(joiners)
        if not self.reasons.get(job_id) and not is_reasoned and self._formed_s.get(job_id) != now_s:
            self._complain("reason-for-change", f"{job_id} is {action.reason} without a reason", now_s)
        self._formed_s[job_id] = now_s

    def _end(self, action: EndJob, now_s: float) -> None:
        job_id = action.job_id
        if job_id in self._ended or job_id not in self._jobs:
            self._complain("one-end", f"{job_id} ends as {action.state}, but it has ended or is unknown", now_s)
        self._ended.add(job_id)
        deadline_s = self._jobs[job_id].goal.deadline_s
        if job_id not in self._promised or deadline_s is None:
            return
        if action.state is JobState.SUCCEEDED and now_s <= deadline_s + DEADLINE_TOLERANCE_S:
            return
        self.broken.append(job_id)
        if self._keeps_promises:
            detail = f"{job_id} was promised {deadline_s:.6f} s and is {action.state} {now_s - deadline_s:.6f} s later"
            self._complain("promise-kept", detail, now_s)

    def _free(self, replica_id: ReplicaId) -> None:
        device_ids = self._devices.pop(replica_id, ())
        for device_id in device_ids:
            del self._holders[device_id][replica_id]
        if device_ids:
            self._reasoned.discard(replica_id)
            self._serving.discard(replica_id)

    def _complain(self, name: str, detail: str, now_s: float) -> NoReturn:
        again = f"; run it again: {self._command}" if self._command else ""
        raise InvariantViolation(name, f"at {now_s:.6f} s: {detail}{again}")
