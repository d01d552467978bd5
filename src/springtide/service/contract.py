"""What the API needs of the running platform, as protocols: service.platform satisfies them, tests bring a double."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.decision import Policy, Schedule, Snapshot
from springtide.core.events import Event
from springtide.core.ports import Step
from springtide.core.resources import Node
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import WorkloadId
from springtide.service.submission.source_stores import SourceStore


class ViewLike(Protocol):
    """The platform's truth after journal step `seq`, never changed."""

    @property
    def seq(self) -> int:
        """The number of the journal's newest step."""
        ...

    @property
    def now_s(self) -> float:
        """When that step was taken."""
        ...

    @property
    def jobs(self) -> Mapping[WorkloadId, JobRecord]:
        """Every job ever submitted, in that order."""
        ...

    @property
    def services(self) -> Mapping[WorkloadId, ServiceRecord]:
        """Every service ever deployed, in that order."""
        ...

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are alive."""
        ...

    @property
    def policy(self) -> str:
        """The name of the policy that decides."""
        ...

    @property
    def future(self) -> Mapping[WorkloadId, Schedule]:
        """What the policy plans for the time to come, as far as it does."""
        ...


class PlatformLike(Protocol):
    """The running platform. Every method may be called from any thread."""

    @property
    def wall_clock_offset_s(self) -> float:
        """Unix time minus the platform's clock."""
        ...

    def now_s(self) -> float:
        """The present instant on the platform's clock."""
        ...

    def view(self) -> ViewLike:
        """The platform after its newest journaled step."""
        ...

    @property
    def usd_per_device_hour(self) -> float:
        """What a device costs."""
        ...

    @property
    def has_parameter_store(self) -> bool:
        """Whether what functions tell each other goes through a parameter store."""
        ...

    def snapshot(self) -> Snapshot:
        """What the policy would be shown at this instant."""
        ...

    def make_policy(self) -> Policy:
        """The policy that decides here, in an instance of its own."""
        ...

    def submit(self, event: Event, timeout_s: float = 10.0) -> int:
        """Hand over an event; return its journal number once it is durable. Raises BackendError after `timeout_s`."""
        ...

    def wait_change(self, after_seq: int, timeout_s: float) -> int:
        """Block until a step later than `after_seq` is journaled, or the timeout. Returns the newest number."""
        ...

    def function_status(self, workload_id: WorkloadId) -> FunctionRunStatus | None:
        """Who fills the places of a job on functions now; None for any other, and while its coordinator is away."""
        ...

    def sharing(self) -> SharingStatus:
        """Who shares which device now, what is granted to each, and what enforces it."""
        ...

    @property
    def shelf(self) -> SourceStore:
        """Where sources are kept, and logs of those who are gone."""
        ...

    def data_store_url(self) -> str:
        """The URL of the store for datasets. Raises InvalidRequest."""
        ...

    def cluster(self) -> ClusterStatus | None:
        """How the platform stands with its cluster; None where it is one machine's."""
        ...

    def workload_dir(self, workload_id: WorkloadId) -> Path:
        """Where everything of one workload lives."""
        ...

    def subscribe(self, listener: Callable[[int, Step, Any], None]) -> None:
        """Have `listener(seq, step, view)` called for every journaled step, the old ones first."""
        ...

    def request_shutdown(self, *, stop_workers: bool) -> None:
        """Ask the platform to end."""
        ...
