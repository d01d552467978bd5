"""A double of service.platform.Platform: the real Controller, stepped by its caller, with its journal in memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from springtide.control.controller import Controller
from springtide.control.journal.ended import NoEndedJobs
from springtide.control.journal.memory import MemoryJournal
from springtide.core.decision import Plan, PoolAllocation
from springtide.core.errors import BackendError
from springtide.core.events import JobResized, NodeJoined, ReplicaReady, ReplicaStopped
from springtide.core.resources import make_node
from springtide.core.status.shares import SharingStatus
from springtide.service.submission.quarantine import Quarantine
from springtide.service.submission.source_stores import DirectorySources
from springtide.storage.datasets.place import data_store_url


class ArrivalOrder:
    """A tiny policy: services get their minimum, then each job in turn as many devices as are left for it."""

    def decide(self, snapshot):
        free = list(snapshot.cluster.device_ids())
        allocations, reasons = {}, {}
        wishes = [(view.service.service_id, view.min_replicas, view.min_replicas) for view in snapshot.services]
        wishes += [
            (view.job.job_id, view.bounds.min_workers, min(view.bounds.max_workers, view.job.num_virtual_shards))
            for view in snapshot.jobs
        ]
        for workload_id, _, _ in wishes:
            held = snapshot.allocations.get(workload_id)
            for device in held.device_ids if held else ():
                free.remove(device)
                free.insert(0, device)
        for workload_id, least, most in wishes:
            held = snapshot.allocations.get(workload_id)
            own = [device for device in (held.device_ids if held else ()) if device in free]
            order = own + [device for device in free if device not in own]
            if most and len(free) >= least:
                allocations[workload_id] = PoolAllocation(device_ids=tuple(order[:most]))
                free = [device for device in free if device not in order[:most]]
            elif most:
                reasons[workload_id] = f"needs {least} devices, {len(free)} are free"
        return Plan(allocations=allocations, reasons=reasons)


@dataclass(frozen=True)
class View:
    seq: int
    now_s: float
    jobs: dict
    services: dict
    nodes: tuple
    policy: str
    future: dict = field(default_factory=dict)
    ended: object = field(default_factory=NoEndedJobs)
    claims: dict = field(default_factory=dict)
    conditions: dict = field(default_factory=dict)
    price_s: float | None = None
    prices_s: dict = field(default_factory=dict)
    outcomes: tuple = ()


class Kept:
    """A journal's metadata, in memory."""

    def __init__(self):
        self.values = {}

    def meta(self, key):
        return self.values.get(key)

    def set_meta(self, key, value):
        self.values[key] = value


class PlatformDouble:
    policy_name = "arrival-order"
    wall_clock_offset_s = 1_000_000.0
    usd_per_device_hour = 0.36
    max_unfinished = 0
    trouble = ""
    restarted = ""
    clock_notice = ""
    has_parameter_store = False

    def __init__(self, state_dir: Path, num_devices: int = 2, policy=ArrivalOrder) -> None:
        self.state_dir = state_dir
        self.source_store = DirectorySources(state_dir)
        self.cluster_status = None
        self.quarantine = Quarantine(Kept())
        self.clock_s = 100.0
        self.make_policy = policy
        self.controller = Controller(policy())
        self.journal = MemoryJournal()
        self.listeners = []
        self.shutdowns = []
        self.runs = {}
        self.is_broken = False
        self.shares = SharingStatus()
        self.changed = threading.Condition()
        self.current = View(0, 0.0, {}, {}, (), self.policy_name)
        self.submit(NodeJoined(node=make_node("local", num_devices)))

    def now_s(self):
        return self.clock_s

    def view(self):
        return self.current

    def snapshot(self):
        return self.controller.snapshot(self.clock_s)

    def sharing(self):
        return self.shares

    def cluster(self):
        return self.cluster_status

    def data_store_url(self):
        return data_store_url(self.state_dir)

    def subscribe(self, listener):
        for seq, step in self.journal.read():
            listener(seq, step, self.current)
        self.listeners.append(listener)

    def keep(self, name, keeper):
        pass

    def follow(self, name, take):
        pass

    def submit(self, event, timeout_s=10.0):
        if self.is_broken:
            raise BackendError(f"the platform did not record the request within {timeout_s:.0f} s")
        return self.play(event)

    def play(self, *events):
        """Take a turn of the loop with these events."""
        with self.changed:
            step = self.controller.step(self.clock_s, events)
            seq = self.journal.append(step)
            state = self.controller.state
            self.current = View(
                seq,
                self.clock_s,
                dict(state.jobs),
                dict(state.services),
                tuple(state.nodes.values()),
                self.policy_name,
                self.controller.future,
                claims=self.controller.claims,
                conditions=self.controller.conditions,
                price_s=self.controller.price_s,
                prices_s=self.controller.prices_s,
                outcomes=state.outcomes,
            )
            for listener in self.listeners:
                listener(seq, step, self.current)
            self.changed.notify_all()
        return seq

    def run_job(self, job_id, direction="start", pause_s=0.0):
        """Play what workers would report until the job's group trains."""
        record = self.current.jobs[job_id]
        self.play(*(ReplicaReady(workload_id=job_id, replica_id=r.replica_id) for r in record.replicas))
        record = self.current.jobs[job_id]
        self.play(
            JobResized(
                job_id=job_id,
                generation=record.group.generation,
                world_size=len(record.group.members),
                step=record.progress.step,
                pause_s=pause_s,
                direction=direction,
            )
        )

    def stop_replicas(self, workload_id):
        """Play the end of every replica that was asked to stop."""
        record = self.current.jobs.get(workload_id) or self.current.services[workload_id]
        stopping = [replica for replica in record.replicas if replica.state == "STOPPING"]
        self.play(*(ReplicaStopped(workload_id=workload_id, replica_id=r.replica_id) for r in stopping))

    def function_status(self, workload_id):
        return self.runs.get(workload_id)

    def wait_change(self, after_seq, timeout_s):
        with self.changed:
            self.changed.wait_for(lambda: self.current.seq > after_seq, timeout_s)
            return self.current.seq

    def workload_dir(self, workload_id):
        return self.state_dir / "workloads" / workload_id

    def request_shutdown(self, *, stop_workers):
        self.shutdowns.append(stop_workers)
