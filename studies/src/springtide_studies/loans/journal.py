"""A journal that keeps figures of the two pools: labels, devices held and waiting times, integrated over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from springtide.core.actions import Action, LabelNode, StartReplica
from springtide.core.events import (
    CancelRequested,
    CheckpointCommitted,
    Event,
    JobFinished,
    JobResized,
    JobSubmitted,
    LoadObserved,
    NodeJoined,
    NodeLost,
    ProgressReported,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
    ScaleRequested,
    ServiceDeployed,
)
from springtide.core.ports import Step
from springtide.core.resources import DeviceId, Node, NodeId, Pool
from springtide.core.workload import InferenceService, ReplicaId, TrainingJob, WorkloadId, replicas_for

# These events change neither nodes nor services; replicas are accounted for by their own events.
_OF_JOBS = (JobSubmitted, JobResized, JobFinished, ProgressReported, CheckpointCommitted, ReplicaReady, ReplicaStopped)


@dataclass(slots=True)
class _Held:
    device_id: DeviceId
    workload_id: WorkloadId
    is_job: bool


@dataclass(slots=True)
class _Job:
    """How long a job has held no device since its submission; `idle_s` is since when it holds none now."""

    idle_s: float | None
    queued_s: float = 0.0
    num_held: int = 0


@dataclass(slots=True)
class _Service:
    service: InferenceService
    minimum: int
    maximum: int
    demand: int = 0
    ready: set[ReplicaId] = field(default_factory=set)

    @property
    def needed(self) -> int:
        return replicas_for(self.service, self.demand, self.minimum, self.maximum)


@dataclass(slots=True)
class _Areas:
    """Integrals over time, in device-seconds (servers: server-seconds)."""

    devices: float = 0.0
    by_jobs: float = 0.0
    by_services: float = 0.0
    of_training: float = 0.0
    loaned_servers: float = 0.0
    needed: float = 0.0
    missing: float = 0.0


class LoanJournal:
    """A journal that keeps figures instead of steps. Integrals run to `until_s`, all else to the end.

    `num_loaned` servers left the inference pool, wholly or in part, and `num_returned` came (back) into it.
    """

    def __init__(self, until_s: float) -> None:
        self.areas = _Areas()
        self.num_loaned = 0
        self.num_returned = 0
        self.until_s = until_s
        self._at_s = 0.0
        self._num_steps = 0
        self._nodes: dict[NodeId, Node] = {}
        self._labels: dict[NodeId, Pool] = {}
        self._node_of: dict[DeviceId, NodeId] = {}
        self._held: dict[ReplicaId, _Held] = {}
        self._num_held = {True: 0, False: 0}
        self._num_serving: dict[NodeId, int] = {}
        self._services: dict[WorkloadId, _Service] = {}
        self._jobs: dict[WorkloadId, _Job] = {}
        # What is summed over all nodes and services, until one of them changes.
        self._levels: _Areas | None = None

    def queued_s(self, job_id: WorkloadId) -> float:
        """For how long the job held nothing between its submission and its end, waiting after a stop included."""
        return self._jobs[job_id].queued_s

    def append(self, step: Step) -> int:
        """Take in a step."""
        self._pass(step.now_s)
        for event in step.events:
            if not isinstance(event, _OF_JOBS):
                self._levels = None
            self._note_event(event, step.now_s)
        for action in step.actions:
            self._note_action(action, step.now_s)
        self._num_steps += 1
        return self._num_steps

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        """Nothing: steps are not kept."""
        return iter(())

    def close(self) -> None:
        """End of the run: account for the time up to `until_s`."""
        self._pass(self.until_s)

    def _pass(self, now_s: float) -> None:
        passed_s = min(now_s, self.until_s) - self._at_s
        if passed_s <= 0.0:
            return
        self._at_s += passed_s
        areas, levels = self.areas, self._levels
        if levels is None:
            levels = self._levels = self._look()
        areas.by_jobs += passed_s * self._num_held[True]
        areas.by_services += passed_s * self._num_held[False]
        areas.devices += passed_s * levels.devices
        areas.of_training += passed_s * levels.of_training
        areas.loaned_servers += passed_s * levels.loaned_servers
        areas.needed += passed_s * levels.needed
        areas.missing += passed_s * levels.missing

    def _look(self) -> _Areas:
        """What changes only with nodes, labels and services: devices, servers on loan, and needs, as they are now."""
        levels = _Areas()
        for node_id, node in self._nodes.items():
            num_devices = len(node.devices)
            training = self._for_training(node_id, num_devices)
            levels.devices += num_devices
            levels.of_training += training
            # What services have of training's own servers counts against what training has of theirs.
            levels.loaned_servers += (training - (num_devices if node.owner == "training" else 0)) / num_devices
        for service in self._services.values():
            levels.needed += service.needed
            levels.missing += max(0, service.needed - len(service.ready))
        return levels

    def _for_training(self, node_id: NodeId, num_devices: int) -> int:
        """How many devices of a node jobs may use: on a shared one, those that no service holds."""
        label = self._labels[node_id]
        if label == "shared":
            return num_devices - self._num_serving.get(node_id, 0)
        return num_devices if label == "training" else 0

    # --- events ------------------------------------------------------------------------------------------------------

    def _note_event(self, event: Event, now_s: float) -> None:
        match event:
            case NodeJoined(node=node):
                self._nodes[node.node_id] = node
                self._labels[node.node_id] = node.pool
                self._node_of.update({device.device_id: node.node_id for device in node.devices})
            case NodeLost(node_id=node_id):
                self._lose(node_id, now_s)
            case ReplicaStopped() | ReplicaLost():
                self._free(event.replica_id, now_s)
            case JobSubmitted(job=job):
                self._jobs.setdefault(job.job_id, _Job(now_s))
            case ReplicaReady(workload_id=service_id) if service_id in self._services:
                if event.replica_id in self._held:
                    self._levels = None
                    self._services[service_id].ready.add(event.replica_id)
            case ServiceDeployed(service=service):
                known = self._services.get(service.service_id)
                demand, ready = (known.demand, known.ready) if known else (0, set[ReplicaId]())
                self._services[service.service_id] = _Service(
                    service, service.min_replicas, service.max_replicas, demand, ready
                )
            case ScaleRequested(workload_id=workload_id) if workload_id in self._services:
                self._services[workload_id].minimum = event.minimum
                self._services[workload_id].maximum = event.maximum
            case LoadObserved(service_id=service_id) if service_id in self._services:
                self._services[service_id].demand = event.in_flight + event.queued
            case CancelRequested(workload_id=workload_id):
                self._services.pop(workload_id, None)
            case _:
                pass

    def _hold(self, replica_id: ReplicaId, held: _Held, now_s: float) -> None:
        self._held[replica_id] = held
        self._num_held[held.is_job] += 1
        job = self._jobs.get(held.workload_id)
        if job is not None:
            if job.idle_s is not None:
                job.queued_s += now_s - job.idle_s
                job.idle_s = None
            job.num_held += 1
        elif not held.is_job:
            self._levels = None
            node_id = self._node_of[held.device_id]
            self._num_serving[node_id] = self._num_serving.get(node_id, 0) + 1

    def _free(self, replica_id: ReplicaId, now_s: float) -> None:
        held = self._held.pop(replica_id, None)
        if held is None:
            return
        self._num_held[held.is_job] -= 1
        job, service = self._jobs.get(held.workload_id), self._services.get(held.workload_id)
        if job is not None:
            job.num_held -= 1
            if not job.num_held:
                job.idle_s = now_s
        if not held.is_job:
            self._levels = None
            self._num_serving[self._node_of[held.device_id]] -= 1
        if service is not None:
            service.ready.discard(replica_id)

    def _lose(self, node_id: NodeId, now_s: float) -> None:
        node = self._nodes.get(node_id)
        if node is None:
            return
        gone = {device.device_id for device in node.devices}
        for replica_id in [replica_id for replica_id, held in self._held.items() if held.device_id in gone]:
            self._free(replica_id, now_s)
        del self._nodes[node_id]

    # --- actions -----------------------------------------------------------------------------------------------------

    def _note_action(self, action: Action, now_s: float) -> None:
        match action:
            case StartReplica():
                if action.replica_id not in self._held:
                    is_job = isinstance(action.workload, TrainingJob)
                    self._hold(action.replica_id, _Held(action.device_id, action.workload_id, is_job), now_s)
            case LabelNode():
                self._levels = None
                self._label(action)
            case _:
                pass

    def _label(self, action: LabelNode) -> None:
        before = self._labels.get(action.node_id)
        if before is None or before == action.pool:
            return
        self._labels[action.node_id] = action.pool
        self.num_loaned += before == "inference"
        self.num_returned += before == "training" or action.pool == "inference"
