"""What `springtide doctor` says of the cluster that the platform stands on."""

from __future__ import annotations

from collections.abc import Iterator

from springtide.cli.doctor.functions import Check
from springtide.cli.tables.cluster import silence
from springtide.cli.tables.columns import count
from springtide.core.status.platform import PlatformStatus


def check_cluster(status: PlatformStatus) -> Iterator[Check]:
    """What `springtide doctor` says of a platform on a cluster: leader, API server, pods that something holds."""
    cluster = status.cluster
    if cluster is None:
        return
    told = f"{cluster.server}: {count(cluster.num_nodes, 'node')}, led by {cluster.leader} in term {cluster.term}"
    problem = cluster.problem or silence(cluster)
    mend = "springtide k8s check says which rights, objects or servers are missing"
    if problem:
        yield Check("cluster", "fail", f"{cluster.server}: {problem}", mend)
    elif not cluster.num_nodes:
        yield Check("cluster", "warn", f"{told}: no devices", mend)
    else:
        yield Check("cluster", "ok", told)
    pods = [pod for job in status.jobs for pod in job.pods if pod.reason]
    pods += [pod for service in status.services for pod in service.pods if pod.reason]
    if not pods:
        yield Check("pods", "ok", f"{cluster.num_pods} of replicas, none of them held up")
        return
    first = pods[0]
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    told = f"{first.namespace}/{first.pod}: {first.reason}{more}"
    yield Check("pods", "warn", told, f"springtide why {first.workload_id} | kubectl describe pod -n {first.namespace}")
