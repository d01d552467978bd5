"""The protocols between the parts of the service. `service.platform` implements the platform's, tests use a double."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.containers import ContainerSettings
from springtide.core.decision import Policy, Schedule, Snapshot
from springtide.core.events import Event
from springtide.core.ports import Step
from springtide.core.resources import Node
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import WorkloadId
from springtide.service.submission.option_models import RequestModel
from springtide.service.submission.schemas import JobIn, JobSourceIn, ScaleIn, ServiceIn, ServiceSourceIn

Source = JobSourceIn | ServiceSourceIn


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


class SourceStore(Protocol):
    """Keeps sources, and fetches the logs of replicas that have ended.

    Thread-safe; all methods except `fetch_logs` raise StorageError.
    """

    def address(self, place: PurePosixPath) -> str:
        """What workers are told of where the file is."""
        ...

    def holds(self, address: str, text: str) -> bool:
        """Whether the file at an address is this text; False if it is not there any more."""
        ...

    def may_write(self, place: PurePosixPath, source: Source) -> bool:
        """Whether there is no source at that place yet, or this very one."""
        ...

    def write(self, place: PurePosixPath, source: Source) -> None:
        """Keep the main file at that place and the others beside it. They are durable when this returns."""
        ...

    def has(self, workload_id: WorkloadId) -> bool:
        """Whether anything is kept of a workload of that id."""
        ...

    def import_root(self, asked: str) -> str:
        """The directory that workers import neighbours from, asked for one. Raises InvalidRequest."""
        ...

    def fetch_logs(self, workload_id: WorkloadId) -> None:
        """Bring the logs that are kept elsewhere to where they are read, as far as they are not there."""
        ...

    def retire(self, workload_id: WorkloadId, *, keeps_artifacts: bool) -> int:
        """Take away what is kept of a workload that has ended; returns of how many files. May be done again.

        What it made stays where `keeps_artifacts` says so.
        """
        ...


class Submissions(Protocol):
    """Takes users' requests and answers once they are durable. Thread-safe.

    All methods raise InvalidRequest, NotFound, Conflict, BackendError or StorageError where they apply.
    """

    def submit_job(
        self, request: JobIn, key: str | None, container: ContainerSettings | None = None
    ) -> tuple[JobRecord, bool]:
        """Submit a job. Returns its record and whether it is new; False: the key was used for it before.

        `container` is what its pods are made of, where workloads are pods and have no object yet.
        """
        ...

    def deploy_service(
        self, name: str, request: ServiceIn, container: ContainerSettings | None = None
    ) -> ServiceRecord:
        """Deploy a service, or a new revision of it. The same request again changes nothing."""
        ...

    def remove_service(self, name: str) -> ServiceRecord:
        """Drain a service and remove it."""
        ...

    def cancel_job(self, called: str) -> JobRecord:
        """End a job; cancelling a cancelled one changes nothing."""
        ...

    def pause_job(self, called: str) -> JobRecord:
        """Have a job checkpoint and release its devices; pausing a paused one changes nothing."""
        ...

    def resume_job(self, called: str, budget_usd: float | None = None) -> JobRecord:
        """Let a paused job continue, with a new budget where one is given."""
        ...

    def change_job(self, called: str, wish: RequestModel) -> JobRecord:
        """Give a job that has not ended what `wish`, a JobChangeIn, names."""
        ...

    def scale(self, called: str, bounds: ScaleIn) -> JobRecord | ServiceRecord:
        """Set new bounds on workers or replicas."""
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
        """Which functions run a job now; None for any other job, and while its coordinator is away."""
        ...

    def sharing(self) -> SharingStatus:
        """Which workloads share which device now, what is granted to each, and what enforces it."""
        ...

    @property
    def source_store(self) -> SourceStore:
        """Where sources are kept, and logs of replicas that have ended."""
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
