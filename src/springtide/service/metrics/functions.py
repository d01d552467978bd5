"""Prometheus metrics of jobs on functions, summed over all jobs: no label names a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from springtide.control.records import JobRecord
from springtide.core.functions import Bill, Usage
from springtide.core.resources import Node
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.workload import WorkloadId
from springtide.service.status.search_reports import excess_of, stream_status
from springtide.service.status.status import function_run

# The phases of a place; any other phase is counted as OTHER.
PHASES = (
    "starting",
    "warm",
    "training",
    "leaving",
    "left",
    "finished",
    "stopped",
    "superseded",
    "failed",
    "lost",
    "throttled",
)
OTHER = "other"
_EVENTS = (
    ("replaced", "num_replaced"),
    ("handed_over", "num_handovers"),
    ("never_began", "num_lost"),
    ("throttled", "num_throttled"),
)
_REQUESTS = (("put", "num_puts"), ("get", "num_gets"), ("list", "num_lists"), ("delete", "num_deletes"))
_ITEMS = (
    ("functions", "function_usd"),
    ("invocations", "invocation_usd"),
    ("requests", "request_usd"),
    ("storage", "storage_usd"),
    ("parameter_store", "parameter_store_usd"),
    ("profiling", "profiling_usd"),
)


def function_families(
    nodes: Iterable[Node],
    records: Iterable[JobRecord],
    live_of: Callable[[WorkloadId], FunctionRunStatus | None],
) -> Iterator[Metric]:
    """Yield the metrics; none on a platform that was never connected to a function service.

    Usage and cost come from the journal and survive a restart. Incidents are those of the jobs that have not ended.
    """
    jobs = [record for record in records if record.job.is_on_functions]
    services = [node.functions for node in nodes if node.functions is not None]
    if not jobs and not services:
        return
    usage, bill = Usage(), [0.0] * len(_ITEMS)
    for record in jobs:
        usage = usage.plus(record.spent.usage)
        bill = [spent + getattr(record.spent.bill, key) for spent, (_, key) in zip(bill, _ITEMS, strict=True)]
    runs = [
        run
        for record in jobs
        if record.replicas and (run := function_run(record, live_of(record.workload_id))) is not None
    ]
    yield from _now(runs, sum(service.concurrency for service in services))
    yield from _searched(jobs, live_of)
    yield from _used(usage, Bill(**{key: spent for (_, key), spent in zip(_ITEMS, bill, strict=True)}))


def _now(runs: list[FunctionRunStatus], concurrency: int) -> Iterator[Metric]:
    counts = dict.fromkeys((*PHASES, OTHER), 0)
    for run in runs:
        for place in run.places:
            counts[place.phase if place.phase in counts else OTHER] += 1
    places = GaugeMetricFamily("springtide_function_places", "Places of pipelines by phase.", labels=("phase",))
    for phase, count in counts.items():
        places.add_metric((phase,), count)
    yield places
    yield GaugeMetricFamily("springtide_function_concurrency", "Functions that may run at a time.", concurrency)
    events = GaugeMetricFamily(
        "springtide_function_incidents", "What befell the functions of unfinished jobs.", labels=("kind",)
    )
    for kind, key in _EVENTS:
        events.add_metric((kind,), sum(getattr(run, key) for run in runs))
    yield events
    ratios = [run.step_s / run.predicted_step_s for run in runs if run.step_s and run.predicted_step_s]
    step = GaugeMetricFamily(
        "springtide_function_step_ratio", "Newest steps of running jobs over predicted ones, their mean."
    )
    if ratios:
        step.add_metric((), sum(ratios) / len(ratios))
    yield step


def _searched(records: list[JobRecord], live_of: Callable[[WorkloadId], FunctionRunStatus | None]) -> Iterator[Metric]:
    """Metrics of the searches and streams of unfinished jobs."""
    open_jobs = [record for record in records if not record.lifecycle.state.is_terminal]
    searched = [record for record in open_jobs if record.job.search is not None]
    if searched:
        beyond = [excess_of(record.learnt.measurements, record.job.goal) for record in searched]
        yield GaugeMetricFamily("springtide_search_jobs", "Jobs whose configuration is searched for.", len(searched))
        yield GaugeMetricFamily(
            "springtide_search_configurations",
            "Configurations that unfinished jobs have measured.",
            sum(len(record.learnt.measurements) for record in searched),
        )
        yield GaugeMetricFamily(
            "springtide_search_seconds",
            "What measured steps of unfinished jobs took beyond those of the best configuration known.",
            sum(seconds for seconds, _ in beyond),
        )
        yield GaugeMetricFamily(
            "springtide_search_dollars",
            "What measured steps of unfinished jobs cost beyond those of the best configuration known.",
            sum(usd for _, usd in beyond),
        )
    found = [stream_status(record, live_of(record.workload_id)) for record in open_jobs]
    streams = [stream for stream in found if stream is not None]
    if streams:
        yield GaugeMetricFamily(
            "springtide_stream_waiting_samples",
            "Samples of streams that have come and were not used yet.",
            sum(stream.num_waiting for stream in streams),
        )
        yield GaugeMetricFamily(
            "springtide_stream_arrivals_per_second",
            "Samples of streams that jobs train on, a second.",
            sum(stream.arrivals_per_s for stream in streams),
        )
        yield GaugeMetricFamily(
            "springtide_stream_idle_jobs",
            "Jobs that wait for data without a function.",
            sum(stream.is_idle for stream in streams),
        )


def _used(usage: Usage, bill: Bill) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "springtide_function_gigabyte_seconds", "Function time as it is charged.", value=usage.function_gb_s
    )
    yield CounterMetricFamily(
        "springtide_function_invocations", "Functions that were invoked.", value=usage.num_invocations
    )
    requests = CounterMetricFamily(
        "springtide_function_store_requests", "Requests to the object store.", labels=("kind",)
    )
    for kind, key in _REQUESTS:
        requests.add_metric((kind,), getattr(usage, key))
    yield requests
    dollars = CounterMetricFamily(
        "springtide_function_cost_dollars", "What jobs on functions have cost.", labels=("item",)
    )
    for item, key in _ITEMS:
        dollars.add_metric((item,), getattr(bill, key))
    yield dollars
