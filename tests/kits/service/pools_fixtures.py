"""What the tests of pools share: a platform of two pools whose labels the test wishes, and its job and service."""

from __future__ import annotations

from kits.service.platform_double import PlatformDouble
from springtide.core.decision import Plan, PoolAllocation, Relabel
from springtide.core.events import JobSubmitted, NodeJoined, ServiceDeployed
from springtide.core.resources import admits, make_node
from springtide.core.workload import Entrypoint, InferenceService, TrainingJob

CODE = Entrypoint(source_path="/fit.py", object_name="fit")


class Wishes:
    """A policy for one job and one service: the labels that a test wishes, and devices wherever those admit."""

    def __init__(self):
        self.pools = {}
        self.num_workers = 8

    def decide(self, snapshot):
        allocations = {}
        for views, is_job in ((snapshot.services, False), (snapshot.jobs, True)):
            for view in views:
                most = min(self.num_workers, view.bounds.max_workers) if is_job else view.min_replicas
                mine = view.job.job_id if is_job else view.service.service_id
                given = [
                    device.device_id
                    for node in (snapshot.cluster.nodes if is_job else snapshot.cluster.nodes[::-1])
                    if admits(self.label(node), is_job=is_job)
                    for device in node.devices
                ]
                if given[:most]:
                    allocations[mine] = PoolAllocation(device_ids=tuple(given[:most]))
        pools = {
            node.node_id: self.pools[node.node_id]
            for node in snapshot.cluster.nodes
            if node.node_id in self.pools and self.pools[node.node_id].pool != node.pool
        }
        return Plan(allocations=allocations, pools=pools)

    def label(self, node):
        return self.pools[node.node_id].pool if node.node_id in self.pools else node.pool


class Tidal:
    """A platform of two training nodes and one for inference, two devices each, with a job and a service."""

    def __init__(self, tmp_path):
        self.policy = Wishes()
        self.platform = PlatformDouble(tmp_path, policy=lambda: self.policy, num_devices=0)
        self.play(
            NodeJoined(node=make_node("t0", 2, pool="training")),
            NodeJoined(node=make_node("t1", 2, pool="training")),
            NodeJoined(node=make_node("s0", 2, pool="inference")),
        )

    def play(self, *events, at_s=None):
        self.platform.clock_s = self.platform.clock_s + 1.0 if at_s is None else at_s
        self.platform.play(*events)

    def wish(self, node_id, pool, reason="", cost_s=0.0, at_s=None):
        self.policy.pools[node_id] = Relabel(pool=pool, reason=reason, cost_s=cost_s)
        self.play(at_s=at_s)

    def submit(self, job_id="fit-1", most=6):
        job = TrainingJob(
            job_id=job_id, name="fit", entrypoint=CODE, min_workers=1, max_workers=most, num_virtual_shards=8
        )
        self.play(JobSubmitted(job=job))
        self.platform.run_job(job_id)

    def deploy(self, least=1):
        service = InferenceService(service_id="ask", name="ask", entrypoint=CODE, min_replicas=least, max_replicas=6)
        self.play(ServiceDeployed(service=service))
