"""The protocols between the parts of the service. `service.platform` implements the platform's, tests use a double."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from springtide.control.journal.ended import EndedJobsLike
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.containers import ContainerSettings
from springtide.core.decision import Policy, PromiseCondition, Schedule, Snapshot, TimeClaim
from springtide.core.events import Event
from springtide.core.job_parts import JobOutcome
from springtide.core.ports import Step
from springtide.core.resources import Node
from springtide.core.status.artifacts import ArtifactStatus
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import JobFolder, WorkloadId
from springtide.service.history.keeping import Keeper
from springtide.service.submission.option_models import RequestModel
from springtide.service.submission.quarantine import Quarantine
from springtide.service.submission.schemas import JobIn, JobSourceIn, RollbackIn, ScaleIn, ServiceIn, ServiceSourceIn
from springtide.storage.folders.contents import ContentDirectory
from springtide.storage.folders.tree import FolderTree

Source = JobSourceIn | ServiceSourceIn


class ViewLike(Protocol):
    """The state of the platform after journal step `seq`. Immutable."""

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
        """Every job that has not ended, or not long ago, in order of submission."""
        ...

    @property
    def ended(self) -> EndedJobsLike:
        """The workloads that ended longer ago."""
        ...

    @property
    def services(self) -> Mapping[WorkloadId, ServiceRecord]:
        """Every service that was not removed, or not long ago, in order of deployment."""
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
        """What the policy plans ahead for each workload; empty for a policy that does not plan ahead."""
        ...

    @property
    def claims(self) -> Mapping[WorkloadId, TimeClaim]:
        """What the policy's reasons claim about time; empty for a policy that says nothing of it."""
        ...

    @property
    def conditions(self) -> Mapping[WorkloadId, PromiseCondition]:
        """What the deadlines of jobs that were never measured wait for, to be promised."""
        ...

    @property
    def price_s(self) -> float | None:
        """What a device-second is worth now, in seconds that all jobs save by it; None if the policy has no prices."""
        ...

    @property
    def prices_s(self) -> Mapping[str, float]:
        """The same by model of device, where there are several."""
        ...

    @property
    def outcomes(self) -> tuple[JobOutcome, ...]:
        """How the last jobs came out against what was expected of them."""
        ...


class SourceStore(Protocol):
    """Keeps sources, and fetches the logs of replicas that have ended.

    Thread-safe; all methods except `fetch_logs` raise StorageError.
    """

    def address(self, place: PurePosixPath) -> str:
        """The address under which workers find the file."""
        ...

    def holds(self, address: str, text: str) -> bool:
        """Whether the file at an address has this text; False if the file is gone."""
        ...

    def may_write(self, place: PurePosixPath, source: Source) -> bool:
        """Whether the place is free or already holds this same source."""
        ...

    def write(self, place: PurePosixPath, source: Source) -> None:
        """Store the main file at that place and the others beside it. They are durable when this returns."""
        ...

    @property
    def contents(self) -> ContentDirectory:
        """The contents of files that clients have sent for folders of jobs."""
        ...

    def write_folder(self, job_id: WorkloadId, folder: JobFolder, tree: FolderTree, address: str) -> str:
        """Make the folder durable for the job, whose source is at `address`; returns where its file is then.

        Raises Conflict for a content that is not there.
        """
        ...

    def share_folder(self, service_id: WorkloadId, folder: JobFolder, tree: FolderTree) -> None:
        """Make the folder durable for the service, each replica of which makes a copy of its own.

        Raises Conflict for a content that is not there.
        """
        ...

    def shares_folder(self, service_id: WorkloadId, folder: JobFolder) -> bool:
        """Whether that was done before, so that the contents are not needed again."""
        ...

    def drop_folders(self, service_id: WorkloadId, kept: Collection[JobFolder]) -> None:
        """Remove what is stored for folders of the service except these."""
        ...

    def prune_folders(self, is_over: Callable[[WorkloadId], bool], oldest_unix_s: float) -> None:
        """Remove what ended jobs do not need any more of the copies that were made before that time."""
        ...

    def has(self, workload_id: WorkloadId) -> bool:
        """Whether anything is stored for a workload of that id."""
        ...

    def import_root(self, requested: str) -> str:
        """The directory from which workers import neighbouring files, for a requested one. Raises InvalidRequest."""
        ...

    def fetch_logs(self, workload_id: WorkloadId) -> None:
        """Download logs that are stored elsewhere into the folder from which they are read, unless they are there."""
        ...

    def artifacts(self, workload_id: WorkloadId, *, with_digests: bool = False) -> list[ArtifactStatus]:
        """The files that a job left, by name; with their digests if asked, for which each is read once."""
        ...

    def open_artifact(self, workload_id: WorkloadId, name: str) -> tuple[IO[bytes], int]:
        """A file that a job left, to be read and closed, and the number of its bytes. Raises NotFound."""
        ...

    def retire(self, workload_id: WorkloadId, *, keeps_artifacts: bool) -> int:
        """Delete what is stored for a workload that has ended. Returns the number of files. Idempotent.

        With `keeps_artifacts` the workload's artifacts stay.
        """
        ...


class Submissions(Protocol):
    """Takes users' requests and answers once they are durable. Thread-safe.

    All methods raise InvalidRequest, NotFound, Conflict, BackendError or StorageError where they apply.
    """

    def submit_job(
        self, request: JobIn, key: str | None, container: ContainerSettings | None = None
    ) -> tuple[JobRecord, bool]:
        """Submit a job. Returns its record and whether it is new; False if the key was used for it before.

        `container` describes the job's pods, where workloads are pods and the job comes from an object.
        """
        ...

    def deploy_service(
        self, name: str, request: ServiceIn, container: ContainerSettings | None = None
    ) -> ServiceRecord:
        """Deploy a service or a new revision of it. Repeating a request changes nothing."""
        ...

    def roll_back(self, name: str, request: RollbackIn) -> ServiceRecord:
        """Release an earlier revision of a service again."""
        ...

    def remove_service(self, name: str) -> ServiceRecord:
        """Drain a service and remove it."""
        ...

    def cancel_job(self, id_or_name: str) -> JobRecord:
        """End a job; cancelling a cancelled one changes nothing."""
        ...

    def pause_job(self, id_or_name: str) -> JobRecord:
        """Have a job checkpoint and release its devices; pausing a paused one changes nothing."""
        ...

    def resume_job(self, id_or_name: str, budget_usd: float | None = None) -> JobRecord:
        """Let a paused job continue, with a new budget where one is given."""
        ...

    def change_job(self, id_or_name: str, changes: RequestModel) -> JobRecord:
        """Change what `changes`, a JobChangeIn, names of a job that has not ended."""
        ...

    def scale(self, id_or_name: str, bounds: ScaleIn) -> JobRecord | ServiceRecord:
        """Set new bounds on workers or replicas."""
        ...


class PlatformLike(Protocol):
    """The running platform. Every method may be id_or_name from any thread."""

    @property
    def quarantine(self) -> Quarantine:
        """What is being taken in, and what is set aside."""
        ...

    @property
    def wall_clock_offset_s(self) -> float:
        """Unix time minus the platform's clock."""
        ...

    @property
    def restarted(self) -> str:
        """How the control plane before this one ended, if not in order and not long ago; else empty."""
        ...

    @property
    def clock_notice(self) -> str:
        """What is wrong with the machine's wall clock, and what follows; empty if nothing is."""
        ...

    @property
    def trouble(self) -> str:
        """Why no decisions are made now; empty while they are."""
        ...

    def now_s(self) -> float:
        """The present instant on the platform's clock."""
        ...

    def view(self) -> ViewLike:
        """The platform after its newest journaled step."""
        ...

    @property
    def usd_per_device_hour(self) -> float:
        """The price of one device, in US dollars per hour."""
        ...

    @property
    def max_unfinished(self) -> int:
        """How many workloads of one owner may be unfinished; 0: any number."""
        ...

    @property
    def has_parameter_store(self) -> bool:
        """Whether functions exchange data through a parameter store."""
        ...

    def snapshot(self) -> Snapshot:
        """The snapshot that the policy would get at this instant."""
        ...

    def make_policy(self) -> Policy:
        """A new instance of the policy that decides on this platform."""
        ...

    def submit(self, event: Event, timeout_s: float = 10.0) -> int:
        """Post an event and wait until it is durable. Returns its journal number. Raises BackendError on timeout."""
        ...

    def wait_change(self, after_seq: int, timeout_s: float) -> int:
        """Block until a step later than `after_seq` is journaled or the timeout passes. Returns the newest number."""
        ...

    def function_status(self, workload_id: WorkloadId) -> FunctionRunStatus | None:
        """Which functions run a job now; None for a job on machines and while no coordinator runs for the job."""
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
        """The status of the Kubernetes cluster; None for a platform on one machine."""
        ...

    def workload_dir(self, workload_id: WorkloadId) -> Path:
        """The directory that holds everything about one workload."""
        ...

    def subscribe(self, listener: Callable[[int, Step, Any], None]) -> None:
        """Have `listener(seq, step, view)` id_or_name for every journaled step, oldest first."""
        ...

    def keep(self, name: str, keeper: Keeper) -> None:
        """Have what a listener knows of earlier steps kept for the time when they are not read any more."""
        ...

    def follow(self, name: str, take: Callable[[bytes], None]) -> None:
        """Have `take` called with what is kept under a name if the platform begins at a snapshot of its state."""
        ...

    def request_shutdown(self, *, stop_workers: bool) -> None:
        """Ask the platform to end; with `stop_workers` after all workers have checkpointed and ended."""
        ...
