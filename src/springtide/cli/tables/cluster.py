"""The cluster that a platform stands on, and the pods of its replicas, as lines and tables."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.cli.tables.columns import align, count
from springtide.core.quantities import format_duration
from springtide.core.status.pods import ClusterStatus, PodStatus

# The API server says something about once a minute, if only that nothing has happened.
_SILENT_S = 150.0


def cluster_line(cluster: ClusterStatus) -> str:
    """Who decides, and how the platform stands with its cluster."""
    parts = [
        f"kubernetes {cluster.server}",
        f"{count(cluster.num_nodes, 'node')}, {count(cluster.num_pods, 'pod')}",
        f"led by {cluster.leader} in term {cluster.term}",
    ]
    if cluster.pending_writes:
        parts.append(f"{count(cluster.pending_writes, 'write')} under way")
    problem = cluster.problem or silence(cluster)
    return "   ".join(parts) + (f"\nkubernetes: {problem}" if problem else "")


def pods_table(pods: Sequence[PodStatus]) -> str:
    """One line for each pod, and why those wait that do."""
    rows = [
        (pod.replica_id, f"{pod.namespace}/{pod.pod}", pod.node_id, pod.phase, format_duration(pod.since_s), pod.reason)
        for pod in pods
    ]
    return align(("REPLICA", "POD", "NODE", "PHASE", "SINCE", "REASON"), rows)


def silence(cluster: ClusterStatus) -> str:
    """For how long nothing was heard of the API server, as a sentence; empty where that is usual."""
    if cluster.watch_age_s <= _SILENT_S:
        return ""
    return f"nothing has been heard of the API server for {format_duration(cluster.watch_age_s)}"
