"""A platform made of values: the double that the commands talk to, and statuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner, Result

from kits.client.sent_contents import SentContents
from springtide.cli.main import cli
from springtide.cli.session import Session
from springtide.core.errors import NotFound
from springtide.core.status.export import LiveState
from springtide.core.status.platform import (
    DeviceStatus,
    Explanation,
    HistoryEntry,
    JobStatus,
    PlatformStatus,
    ServiceStatus,
)
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.pools import PoolsReport
from springtide.core.status.quote import Quote
from springtide.core.status.shares import SharingStatus

JOB = JobStatus(
    job_id="fit-3f2a",
    name="fit",
    kind="function",
    state="RUNNING",
    reason="it has the devices that it asked for",
    submitted_at_s=0.0,
    started_at_s=1.0,
    ended_at_s=None,
    deadline_at_s=600.0,
    budget_usd=None,
    min_workers=1,
    max_workers=4,
    num_workers=2,
    global_batch_size=512,
    generation=3,
    step=570,
    total_steps=1000,
    progress_fraction=0.57,
    epoch=5,
    num_epochs=10,
    loss=0.412,
    metrics={},
    samples_per_s=812.0,
    eta_s=192.0,
    slack_s=125.0,
    num_resizes=1,
    num_restarts=0,
    num_preemptions=0,
    last_pause_s=0.041,
    resize_pause_s={"grow": 0.041},
    checkpoint_step=500,
    artifact_path="",
    device_seconds=240.0,
    alternatives=(),
    replicas=(),
)
SERVICE = ServiceStatus(
    service_id="sentiment",
    name="sentiment",
    state="READY",
    reason="1 replica answers",
    deployed_at_s=0.0,
    revision=2,
    min_replicas=0,
    max_replicas=4,
    num_ready=1,
    num_starting=0,
    slo_s=0.2,
    arrivals_per_s=12.5,
    in_flight=3,
    queued=0,
    latency_p50_s=0.012,
    latency_p99_s=0.088,
    device_seconds=30.0,
    url="http://127.0.0.1:8787/f/sentiment",
    replicas=(),
)


class FakeClient:
    """Answers from lists of statuses; remembers every call that changes something."""

    def __init__(self) -> None:
        self.request = SentContents().request
        self.jobs_now: dict[str, list[JobStatus]] = {}
        self.services_now: dict[str, ServiceStatus] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.lines = ["[fit-3f2a-0] step 1\n"]
        self.quoted = Quote(verdict="accepted", reason="it is expected to finish in 7m40 .. 8m30")
        self.live: LiveState
        self.pooled: PoolsReport | None = None
        self.num_places = 0
        self.shared = SharingStatus()
        self.devices_now: tuple[DeviceStatus, ...] = ()
        self.cluster_now: ClusterStatus | None = None

    def add(self, *statuses: JobStatus | ServiceStatus) -> None:
        """Several statuses of one job are answered one after the other; the last one stays."""
        for status in statuses:
            if isinstance(status, JobStatus):
                self.jobs_now.setdefault(status.job_id, []).append(status)
            else:
                self.services_now[status.name] = status

    def close(self) -> None:
        self.is_closed = True

    def status(self) -> PlatformStatus:
        devices = tuple(
            DeviceStatus(
                device_id=f"local/{index}",
                node_id="local",
                kind="cpu",
                workload_id=None if index else "fit-3f2a",
                workload_name=None if index else "fit",
                replica_id=None if index else "fit-3f2a-0",
            )
            for index in range(2)
        )
        devices += tuple(
            DeviceStatus(
                device_id=f"functions/{index}",
                node_id="functions",
                kind="function",
                workload_id=None,
                workload_name=None,
                replica_id=None,
            )
            for index in range(self.num_places)
        )
        return PlatformStatus(
            version="0.1.0",
            policy="elastic",
            seq=7,
            now_s=100.0,
            wall_clock_offset_s=0.0,
            devices=self.devices_now or devices,
            jobs=tuple(statuses[0] for statuses in self.jobs_now.values()),
            services=tuple(self.services_now.values()),
            pools=self.pooled.pools if self.pooled else (),
            nodes=self.pooled.nodes if self.pooled else (),
            cluster=self.cluster_now,
        )

    def sharing(self) -> SharingStatus:
        return self.shared

    def pools(self, past_days: int) -> PoolsReport:
        self.calls.append(("pools", past_days))
        assert self.pooled is not None
        return self.pooled

    def job(self, job_id: str) -> JobStatus:
        if job_id not in self.jobs_now:
            raise NotFound(f"there is no job {job_id!r}")
        statuses = self.jobs_now[job_id]
        return statuses.pop(0) if len(statuses) > 1 else statuses[0]

    def service(self, name: str) -> ServiceStatus:
        return self.services_now[name]

    def submit_job(self, **asked: Any) -> JobStatus:
        self.calls.append(("submit_job", asked))
        return next(iter(self.jobs_now.values()))[0]

    def quote(self, **asked: Any) -> Quote:
        self.calls.append(("quote", asked))
        return self.quoted

    def export(self) -> LiveState:
        return self.live

    def deploy_service(self, **asked: Any) -> ServiceStatus:
        self.calls.append(("deploy_service", asked))
        return self.services_now[asked["name"]]

    def scale(self, identifier: str, minimum: int, maximum: int) -> None:
        self.calls.append(("scale", identifier, minimum, maximum))

    def change(self, job_id: str, wish: dict[str, Any]) -> JobStatus:
        self.calls.append(("change", job_id, wish))
        return self.job(job_id)

    def quote_move(self, job_id: str, layer_profile: Any = None) -> Quote:
        self.calls.append(("quote_move", job_id, layer_profile))
        return self.quoted

    def move(self, job_id: str, layer_profile: Any = None) -> JobStatus:
        self.calls.append(("move", job_id, layer_profile))
        return self.job(job_id)

    def pause(self, job_id: str) -> JobStatus:
        self.calls.append(("pause", job_id))
        return self.job(job_id)

    def resume(self, job_id: str, budget_usd: float | None = None) -> JobStatus:
        self.calls.append(("resume", job_id) if budget_usd is None else ("resume", job_id, budget_usd))
        return self.job(job_id)

    def cancel(self, job_id: str) -> JobStatus:
        self.calls.append(("cancel", job_id))
        return msgspec.structs.replace(self.job(job_id), state="CANCELLED")

    def remove_service(self, name: str) -> None:
        self.calls.append(("remove_service", name))

    def why(self, identifier: str) -> Explanation:
        return Explanation(
            workload_id=identifier,
            name="fit",
            state="PENDING",
            reason="all 2 devices are held",
            evidence=("sentiment holds local/1",),
            next_steps=("springtide scale sentiment 0..1",),
            history=(HistoryEntry(seq=1, at_s=0.5, kind="submitted", text="submitted"),),
        )

    def history(self, identifier: str) -> list[HistoryEntry]:
        lines = [
            ("start", 1, "started on 1 worker at step 1"),
            ("grow", 2, "resized 1 -> 2 workers, pause 41 ms, step 9 continued"),
        ]
        return [HistoryEntry(seq=1, at_s=0.5, kind=kind, text=text, num_workers=num) for kind, num, text in lines]

    def logs(self, identifier: str, **options: Any) -> Iterator[str]:
        self.calls.append(("logs", identifier, options))
        return iter(self.lines)


def command_line(client: FakeClient, state_dir: Path) -> Callable[..., Result]:
    """A function that runs the command line against the double."""

    def run(*arguments: str) -> Result:
        session = Session(given_state_dir=state_dir, connect=lambda state_dir: client)  # type: ignore[arg-type, return-value]
        return CliRunner().invoke(cli, list(arguments), obj=session)

    return run
