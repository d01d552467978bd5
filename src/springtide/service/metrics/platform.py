"""The platform's Prometheus metrics, read from the view and the history at each scrape.

No label names a job, a node or a pod, so that the number of series is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from springtide.control.records import JobRecord, ServiceRecord, ServiceState
from springtide.core.decision import Overheads
from springtide.core.status.pods import ClusterStatus, PodPhase
from springtide.core.workload import JobState
from springtide.service.histogram import Histogram
from springtide.service.history.history import PAUSE_BOUNDS_S, HistoryIndex, Totals
from springtide.service.history.pool_reports import PoolReports
from springtide.service.metrics.functions import function_families
from springtide.service.metrics.pools import pool_families
from springtide.service.metrics.shares import ShareMetrics, gpu_families
from springtide.service.ports import PlatformLike, ViewLike

DIRECTIONS = ("grow", "shrink", "replace", "recover")
REPLICA_STATES = ("STARTING", "READY", "STOPPING")


class PlatformCollector(Collector):
    """Computes the metrics at each scrape, in one pass over the records."""

    def __init__(self, platform: PlatformLike, history: HistoryIndex, pools: PoolReports) -> None:
        self._platform = platform
        self._history = history
        self._pools = pools
        self._shares = ShareMetrics()

    def register(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics in advance, else the registry would call `collect` before the platform has started."""
        return iter(())

    def _of_devices(self, view: ViewLike) -> Iterator[Metric]:
        sharing = self._platform.sharing()
        yield from self._shares.families(sharing, view.jobs.keys())
        gpu_ids = {device.device_id for node in view.nodes for device in node.devices if device.kind == "gpu"}
        yield from gpu_families(sharing, gpu_ids)
        yield from cluster_families(self._platform.cluster())

    def _of_decisions(self, view: ViewLike) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "springtide_decisions_made",
            "1 while decisions are made, 0 while they wait or fail; /readyz says why.",
            0.0 if self._platform.trouble else 1.0,
        )
        yield GaugeMetricFamily(
            "springtide_clock_trusted",
            "0 while the machine's wall clock cannot be believed; platform time goes on without it.",
            0.0 if self._platform.clock_notice else 1.0,
        )
        yield GaugeMetricFamily("springtide_journal_seq", "The number of the journal's newest step.", view.seq)

    def collect(self) -> Iterator[Metric]:
        view, totals, now_s = self._platform.view(), self._history.totals(), self._platform.now_s()
        records: list[JobRecord | ServiceRecord] = [*view.jobs.values(), *view.services.values()]
        yield _by_label(
            "jobs",
            "Jobs in each state.",
            [state.value for state in JobState],
            Counter(record.lifecycle.state.value for record in view.jobs.values()),
        )
        yield _by_label(
            "services",
            "Services in each state.",
            [state.value for state in ServiceState],
            Counter(record.state.value for record in view.services.values()),
        )
        yield _by_label(
            "replicas",
            "Replicas in each state.",
            REPLICA_STATES,
            Counter(replica.state.value for record in records for replica in record.replicas),
        )
        num_devices = sum(len(node.devices) for node in view.nodes)
        # A shared device counts once, however many replicas hold a part of it.
        num_held = len({device for record in records for replica in record.replicas for device in replica.device_ids})
        yield _by_label(
            "devices",
            "Devices that are held or free.",
            ("held", "free"),
            Counter(held=num_held, free=max(0, num_devices - num_held)),
        )
        yield _counter(
            "device_seconds", "Device-seconds held so far.", sum(record.attained_service_s(now_s) for record in records)
        )
        yield _counter(
            "job_restarts",
            "Restarts of whole jobs from a checkpoint.",
            sum(record.restarts.num_restarts for record in view.jobs.values()),
        )
        yield _counter(
            "job_preemptions", "Jobs that were told to checkpoint and give their devices back.", totals.num_preemptions
        )
        yield from _hangs(view, totals)
        yield _counter("replicas_lost", "Replicas that went without being asked.", totals.num_lost_replicas)
        resizes = CounterMetricFamily(
            "springtide_job_resizes", "Confirmed changes of membership.", labels=("direction",)
        )
        for direction in DIRECTIONS:
            resizes.add_metric((direction,), totals.num_resizes.get(direction, 0))
        yield resizes
        ended = CounterMetricFamily("springtide_jobs_ended", "Jobs that reached a terminal state.", labels=("state",))
        for state in JobState:
            if state.is_terminal:
                ended.add_metric((state.value,), totals.num_ended.get(state.value, 0))
        yield ended
        pauses = HistogramMetricFamily(
            "springtide_resize_pause_seconds",
            "From the end of the last step before a resize to the start of the first step after it.",
            labels=("direction",),
        )
        for direction in DIRECTIONS:
            pause = totals.pauses.get(direction, Histogram(PAUSE_BOUNDS_S))
            pauses.add_metric((direction,), pause.buckets(), pause.sum_s)
        yield pauses
        shown = self._platform.snapshot()
        coming = self._pools.coming(shown.tide.day_s / 24)
        yield from pool_families(view.nodes, len(shown.drains), shown.tide, coming, totals.pools)
        yield _change_cost(shown.overheads)
        yield from self._of_devices(view)
        yield from function_families(view.nodes, view.jobs.values(), self._platform.function_status)
        yield from self._of_decisions(view)


def _hangs(view: ViewLike, totals: Totals) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "springtide_jobs_stalled",
        "Jobs that run and have gone without a step for too long.",
        sum(record.progress.stalled_since_s is not None and not record.is_over for record in view.jobs.values()),
    )
    yield _counter("job_stalls", "How often a job has gone without a step for too long.", totals.num_stalls)
    yield _counter("start_timeouts", "Workers and replicas that did not start in time.", totals.num_start_timeouts)


def _change_cost(overheads: Overheads) -> GaugeMetricFamily:
    text = "What plans reckon with for a change of a job's workers, from the order to the first step."
    return GaugeMetricFamily("springtide_change_seconds", text, overheads.change_s)


def _by_label(name: str, text: str, values: list[str] | tuple[str, ...], counts: Counter[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"springtide_{name}", text, labels=("state",))
    for value in values:
        family.add_metric((value,), counts.get(value, 0))
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"springtide_{name}", text, value=value)


def cluster_families(cluster: ClusterStatus | None) -> Iterator[Metric]:
    """The metrics of this moment; none without a cluster."""
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
