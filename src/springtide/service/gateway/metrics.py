"""The Prometheus metrics of the gateway."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Observations(NamedTuple):
    """How often something happened since the platform started, and the sum of its values."""

    num: int = 0
    total: float = 0.0


class GatewayMetrics:
    """The gateway's Prometheus metrics, labelled by service name only (and the status code)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_service = ["service"]
        self._requests: dict[tuple[str, int], Histogram] = {}
        self.request = Histogram(
            "springtide_request_seconds",
            "From the arrival of a request to its answer.",
            ["service", "code"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.queue = Histogram(
            "springtide_queue_seconds",
            "How long a request waited for a batch, cold start excluded.",
            by_service,
            registry=registry,
            buckets=_SECONDS,
        )
        self.batch = Histogram(
            "springtide_batch_items", "Items per batch.", by_service, registry=registry, buckets=_ITEMS
        )
        self.cold_start = Histogram(
            "springtide_cold_start_seconds",
            "From the first held request to the first ready replica.",
            by_service,
            registry=registry,
            buckets=_SECONDS,
        )
        self.predict = Histogram(
            "springtide_predict_seconds",
            "How long predict worked on a batch.",
            by_service,
            registry=registry,
            buckets=_SECONDS,
        )
        self.in_flight = Gauge(
            "springtide_in_flight", "Requests sent to replicas and not answered.", by_service, registry=registry
        )

        self._refused = Counter(
            "springtide_refused_requests",
            "Requests refused at once: the queue is full, or an answer in time is not sure.",
            ["service", "reason"],
            registry=registry,
        )

    def refused(self, service: str, reason: str) -> None:
        """Count one request that was refused at once."""
        self._refused.labels(service, reason).inc()

    def answered(self, service: str, status: int, seconds: float) -> None:
        """Count one request; only deployed services may be named here."""
        key = (service, status)
        counted = self._requests.get(key)
        if counted is None:
            counted = self._requests[key] = self.request.labels(service, str(status))
        counted.observe(seconds)

    def answers(self, service: str) -> tuple[Observations, Observations]:
        """The requests of a service that succeeded and those that did not, with their seconds."""
        succeeded, failed = Observations(), Observations()
        for (name, status), counted in self._requests.items():
            if name == service:
                found = totals_of(counted)
                if status == 200:
                    succeeded = found
                else:
                    failed = Observations(failed.num + found.num, failed.total + found.total)
        return succeeded, failed


def totals_of(histogram: Histogram) -> Observations:
    """The number and the sum of what a histogram of one service has observed."""
    values = {sample.name: sample.value for metric in histogram.collect() for sample in metric.samples}
    num = next(value for name, value in values.items() if name.endswith("_count"))
    return Observations(int(num), next(value for name, value in values.items() if name.endswith("_sum")))
