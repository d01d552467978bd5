"""Pods and the cluster as users see them: in the status of workloads, and as evidence of why a workload waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec.structs import replace

from springtide.core.quantities import format_duration
from springtide.core.status.platform import JobStatus, PlatformStatus, ServiceStatus
from springtide.core.status.pods import ClusterStatus, PodStatus
from springtide.core.workload import WorkloadId
from springtide.service.ports import PlatformLike

MAX_PODS_TOLD = 8
# Watches report about once a minute: after so long without a report the platform is cut off from the API server.
SILENT_AFTER_S = 150.0
_NOT_YET = ("waiting", "creating", "binding", "starting")

PodsByWorkload = Mapping[WorkloadId, tuple[PodStatus, ...]]
StatusT = TypeVar("StatusT", JobStatus, ServiceStatus)


def pods_by_workload(cluster: ClusterStatus | None) -> PodsByWorkload:
    """The pods of each workload, in the order in which the cluster's status has them."""
    found: dict[WorkloadId, list[PodStatus]] = {}
    for pod in () if cluster is None else cluster.pods:
        found.setdefault(pod.workload_id, []).append(pod)
    return {workload_id: tuple(pods) for workload_id, pods in found.items()}


def with_pods(status: StatusT, pods: PodsByWorkload) -> StatusT:
    workload_id = status.job_id if isinstance(status, JobStatus) else status.service_id
    own = pods.get(WorkloadId(workload_id))
    return replace(status, pods=own) if own else status


def with_condition(status: PlatformStatus, platform: PlatformLike) -> PlatformStatus:
    """The status with what troubles the platform, its cluster, and the pods of each workload, which that leaves out."""
    cluster = platform.cluster()
    status = replace(status, trouble=platform.trouble, restarted=platform.restarted, clock=platform.clock_notice)
    if cluster is None:
        return status
    pods = pods_by_workload(cluster)
    return replace(
        status,
        cluster=replace(cluster, pods=()),
        jobs=tuple(with_pods(job, pods) for job in status.jobs),
        services=tuple(with_pods(service, pods) for service in status.services),
    )


def cluster_evidence(workload_id: WorkloadId, cluster: ClusterStatus) -> list[str]:
    """How the cluster and its pods affect a workload, as sentences: problems of the cluster first."""
    sentences = []
    if cluster.problem:
        sentences.append(f"the cluster: {cluster.problem}")
    elif cluster.watch_age_s > SILENT_AFTER_S:
        sentences.append(f"nothing has been heard of the API server for {format_duration(cluster.watch_age_s)}")
    own = [pod for pod in cluster.pods if pod.workload_id == workload_id]
    # Pods that do not run come before those that do.
    own.sort(key=lambda pod: (pod.phase not in _NOT_YET, pod.phase == "running", pod.replica_id))
    sentences += [pod_sentence(pod) for pod in own[:MAX_PODS_TOLD]]
    if len(own) > MAX_PODS_TOLD:
        sentences.append(f"and {len(own) - MAX_PODS_TOLD} pods more")
    return sentences


def pod_sentence(pod: PodStatus) -> str:
    """One pod, its place, its phase and what keeps it there."""
    place = f" on {pod.node_id}" if pod.node_id else ""
    since = f" for {format_duration(pod.since_s)}" if pod.since_s >= 1.0 else ""
    why = f": {pod.reason}" if pod.reason else ""
    return f"pod {pod.namespace}/{pod.pod}{place} is {pod.phase}{since}{why}"
