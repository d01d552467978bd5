"""The figures of a platform's cluster for Prometheus. No label is a workload's, a node's or a pod's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from springtide.core.status.pods import ClusterStatus, PodPhase


def cluster_families(cluster: ClusterStatus | None) -> Iterator[Metric]:
    """Every figure of this moment; none where there is no cluster."""
    if cluster is None:
        return
    for name, text, value in (
        ("nodes", "Nodes whose devices the platform may use.", cluster.num_nodes),
        ("pending_writes", "Writes to the API server that wait or run.", cluster.pending_writes),
        ("term", "How often a control plane has taken the journal over.", cluster.term),
        ("watch_age_seconds", "How long ago the API server last said anything.", cluster.watch_age_s),
        ("problem", "Whether something keeps the platform from its cluster.", 1.0 if cluster.problem else 0.0),
    ):
        yield GaugeMetricFamily(f"springtide_kubernetes_{name}", text, value=value)
    pods = GaugeMetricFamily("springtide_kubernetes_pods", "Pods of replicas in each phase.", labels=("phase",))
    counts = Counter(pod.phase for pod in cluster.pods)
    for phase in get_args(PodPhase):
        pods.add_metric((phase,), counts[phase])
    yield pods
    hindered = sum(bool(pod.reason) for pod in cluster.pods)
    yield GaugeMetricFamily(
        "springtide_kubernetes_hindered_pods", "Pods that something keeps from running.", value=hindered
    )
