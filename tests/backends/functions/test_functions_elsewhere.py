"""Executors that follow each other on disks of their own: what they share is the store, and nothing is done twice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kits.functions.scripted_functions import ScriptedFunctions
from springtide.backends.functions.executor import FunctionsExecutor
from springtide.backends.functions.shell.notes import Notes
from springtide.core import events
from springtide.core.actions import EndJob, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.errors import StorageError
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan, FunctionStage
from springtide.core.ports import Standing
from springtide.core.resources import DeviceId
from springtide.core.wire.functions import ControlRecord, Keys
from springtide.core.workload import Entrypoint, JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.storage.frames import decode
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore
from springtide.storage.workloads.artifacts import fetch_code
from springtide.storage.workloads.store import WorkloadStore

JOB = WorkloadId("j")
KEYS = Keys("jobs/j")
STAGES = tuple(FunctionStage(first_layer=i, end_layer=i + 1, memory_mb=512) for i in range(2))
PLAN = FunctionPlan(stages=STAGES, num_replicas=2)


class Clock:
    """Seconds of the platform, the same wherever its control plane is."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._began_s


class Site:
    """One store, one provider, and executors with a disk and a term of their own each; `plane` is the newest."""

    def __init__(self, folder: Path, provider: ScriptedFunctions) -> None:
        self.folder, self.provider, self.clock = folder, provider, Clock()
        self.store = CheckedStore(FileStore(folder / "store"))
        self.store.put("workloads/j/source/task.py", b"import helper\nx = 1\n")
        self.store.put("workloads/j/source/helper.py", b"y = 2\n")
        menu = FunctionMenu(service="scripted", options=(FunctionOption(plan=PLAN, step_s=0.03, step_usd=1e-6),))
        entrypoint = Entrypoint(source_path="workloads/j/source/task.py", object_name="x")
        self.job = TrainingJob(job_id=JOB, name="j", entrypoint=entrypoint, menu=menu)
        self.planes: list[FunctionsExecutor] = []
        self.events: list[events.Event] = []
        self.lead()

    @property
    def plane(self) -> FunctionsExecutor:
        return self.planes[-1]

    def lead(self) -> FunctionsExecutor:
        """The next control plane, on an empty disk."""
        term = len(self.planes) + 1
        plane = FunctionsExecutor(
            self.folder / f"disk{term}",
            self.clock,
            provider=self.provider,
            store_url=f"file://{self.folder}/store",
            term=term,
        )
        plane.open()
        self.planes.append(plane)
        self.events = []
        return plane

    def start_of(self, number: int = 0, generation: int = 1) -> StartReplica:
        return StartReplica(
            workload=self.job, replica_id=ReplicaId(f"j.{number}"), device_id=DeviceId("f"), generation=generation
        )

    def train(self, number: int = 0, generation: int = 1) -> None:
        self.plane.start(self.start_of(number, generation))
        self.take(events.ReplicaReady)
        self.plane.start(
            ResizeJob(
                job_id=JOB,
                generation=generation,
                replica_ids=(ReplicaId(f"j.{number}"),),
                global_batch_size=8,
                functions=PLAN,
            )
        )

    def adopt(self) -> None:
        self.plane.recover(Standing(replicas=(self.start_of(),), generations={JOB: 1}))

    def take(self, kind: type, limit_s: float = 60.0) -> events.Event:
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            self.events += self.plane.wait(self.clock.now_s() + 0.1)
            found = [event for event in self.events if isinstance(event, kind)]
            if found:
                return found[-1]
        raise AssertionError(f"no {kind.__name__} among {self.events}")

    def end(self, state: JobState = JobState.SUCCEEDED, number: int = 0) -> None:
        self.plane.start(EndJob(job_id=JOB, state=state))
        self.plane.start(StopReplica(workload_id=JOB, replica_id=ReplicaId(f"j.{number}"), grace_s=2.0))
        self.take(events.ReplicaStopped)

    def control(self) -> ControlRecord:
        return msgspec.json.decode(self.store.get(KEYS.control), type=ControlRecord)

    def copy(self, name: str) -> bytes:
        return self.store.get(f"workloads/j/functions/{name}")


@pytest.fixture
def site_of(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def build(**fields: object) -> Site:
        site = Site(tmp_path, ScriptedFunctions(**fields))  # type: ignore[arg-type]
        sites.append(site)
        return site

    yield build
    for site in sites:
        site.plane.close(stop_workers=True)
        for plane in site.planes[:-1]:
            plane.close()
        site.provider.close()


def log_on(disk: Path) -> bytes:
    path = disk / "workloads" / "j" / "logs" / "j.1.0.log"
    return path.read_bytes() if path.exists() else b""


def wait_until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_the_code_comes_from_the_store_and_the_model_goes_there(site_of: Callable[..., Site], tmp_path: Path) -> None:
    site = site_of()
    site.train()
    site.take(events.CheckpointCommitted)
    fetch_code(site.store, site.store.get(KEYS.bundle), tmp_path / "code")
    assert {path.name for path in (tmp_path / "code").iterdir()} == {"task.py", "helper.py"}
    finished = site.take(events.JobFinished)
    assert isinstance(finished, events.JobFinished)
    workload = WorkloadStore(site.store, JOB)
    assert finished.artifact_path == workload.artifacts()["model.safetensors"]
    assert sorted(decode(workload.read_artifact("model.safetensors")).tensors) == ["layer0.weight", "layer1.weight"]
    site.end()
    wait_until(lambda: site.store.keys("jobs/j/") == [])
    assert b"a line of its own" in site.copy("logs/j.0.1.log")
    assert not (site.folder / "disk1" / "workloads" / "j" / "artifacts").exists()


def test_code_that_is_not_in_the_store_fails_the_job(site_of: Callable[..., Site]) -> None:
    site = site_of()
    site.store.delete(["workloads/j/source/task.py"])
    site.plane.start(site.start_of())
    failed = site.take(events.JobFailed)
    assert isinstance(failed, events.JobFailed)
    assert "holds no code workloads/j/source/task.py" in failed.error


@pytest.mark.slow
def test_one_on_an_empty_disk_goes_on_with_the_functions_of_the_one_before(site_of: Callable[..., Site]) -> None:
    site = site_of(total_steps=80)
    site.provider.waits_at = 40
    site.train()
    site.take(events.CheckpointCommitted)
    spent = site.take(events.UsageReported)
    site.plane.close()
    written = (site.folder / "disk1" / "workloads" / "j" / "logs" / "j.1.0.log").read_bytes()
    site.provider.waits_at = 60
    site.lead()
    site.adopt()
    # What was written elsewhere is written on: a line of the step at which they wait, whoever reads it.
    wait_until(lambda: b"step 60/80" in log_on(site.folder / "disk2"))
    site.provider.may_go.set()
    site.take(events.JobFinished)
    assert site.provider.num_invocations == 4
    status = site.plane.status(JOB)
    assert status is not None
    assert (status.num_redone_steps, status.usage.num_invocations) == (0, 4)
    assert isinstance(spent, events.UsageReported)
    assert status.bill.total_usd > spent.bill.total_usd
    site.end()
    wait_until(lambda: len(site.copy("losses.jsonl").splitlines()) == 80)
    assert [json.loads(line)[0] for line in site.copy("losses.jsonl").splitlines()] == list(range(1, 81))
    assert written
    assert site.copy("logs/j.1.0.log").startswith(written)
    wait_until(lambda: b"step 60/80" in site.copy("logs/j.1.0.log"))


@pytest.mark.slow
def test_one_that_was_asleep_neither_directs_nor_invokes_nor_tells(site_of: Callable[..., Site]) -> None:
    """The first goes on by itself all the while, as a process does that does not know that it was replaced."""
    site = site_of(total_steps=150)
    site.train()
    site.take(events.CheckpointCommitted)
    asleep = site.plane
    site.lead()
    site.adopt()
    site.take(events.ReplicaReady)
    assert site.control().term == 2
    # It is told to have somebody killed and replaced: whatever it does about it, it may not.
    asleep.start(PreemptJob(job_id=JOB, generation=2, replica_ids=(ReplicaId("j.0"),), grace_s=0.2))
    site.take(events.JobFinished)
    assert site.control().term == 2
    assert site.control().generation == 1
    assert site.provider.num_invocations == 4
    status = site.plane.status(JOB)
    assert status is not None
    assert status.num_redone_steps == 0


@pytest.mark.slow
def test_a_job_that_rested_when_the_disk_was_lost_is_cleared_and_known(site_of: Callable[..., Site]) -> None:
    site = site_of(total_steps=1000)
    site.train()
    site.take(events.CheckpointCommitted)
    site.plane.start(PreemptJob(job_id=JOB, generation=2, replica_ids=(ReplicaId("j.0"),)))
    site.take(events.ReplicaStopped)
    site.plane.close()
    plane = site.lead()
    assert plane.knows(JOB)
    assert not plane.knows(WorkloadId("other"))
    status = plane.status(JOB)
    assert status is not None
    assert status.usage.num_invocations == 4
    plane.start(EndJob(job_id=JOB, state=JobState.CANCELLED))
    wait_until(lambda: not any("/reports/" in key for key in site.store.keys("jobs/j/")))
    assert site.store.keys("jobs/j/state/")


@pytest.mark.slow
def test_a_job_that_rested_goes_on_elsewhere_from_its_state_with_its_bill(site_of: Callable[..., Site]) -> None:
    site = site_of(total_steps=100)
    site.train()
    site.take(events.CheckpointCommitted)
    site.plane.start(PreemptJob(job_id=JOB, generation=2, replica_ids=(ReplicaId("j.0"),)))
    site.take(events.ReplicaStopped)
    site.plane.close()
    before = site.plane.status(JOB)
    site.lead()
    site.train(1, 3)
    resized = site.take(events.JobResized)
    assert isinstance(resized, events.JobResized)
    assert resized.direction == "resume"
    site.take(events.JobFinished)
    status = site.plane.status(JOB)
    assert status is not None
    assert before is not None
    assert status.usage.num_invocations == 8
    assert status.bill.total_usd > before.bill.total_usd
    # No number of a function was given twice.
    numbers = sorted(int(key.rpartition(".")[2]) for key in site.store.keys("jobs/j/reports/"))
    assert numbers == list(range(1, 9))
    notes = msgspec.json.decode(site.store.get(KEYS.notes), type=Notes)
    assert (notes.term, notes.used_incarnations) == (2, 8)


@pytest.mark.slow
def test_nobody_is_invoked_whose_number_cannot_be_noted(
    site_of: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide.backends.functions.shell.shell.STORE_PATIENCE_S", 0.5)
    monkeypatch.setattr("springtide.backends.functions.shell.shell.RETRY_S", 0.1)
    site = site_of()
    is_shut = threading.Event()
    whole = FileStore.replace

    def replace(self: FileStore, key: str, data: memoryview, version: str) -> str | None:
        if is_shut.is_set() and key == KEYS.notes:
            raise StorageError("the store is shut")
        return whole(self, key, data, version)

    monkeypatch.setattr(FileStore, "replace", replace)
    site.plane.start(site.start_of())
    site.take(events.ReplicaReady)
    is_shut.set()
    resize = ResizeJob(job_id=JOB, generation=1, replica_ids=(ReplicaId("j.0"),), global_batch_size=8, functions=PLAN)
    site.plane.start(resize)
    lost = site.take(events.ReplicaLost)
    assert isinstance(lost, events.ReplicaLost)
    assert "the store is shut" in lost.reason
    assert site.provider.num_invocations == 0


@pytest.mark.slow
def test_a_store_that_is_away_for_a_moment_costs_no_retry_when_another_takes_over(
    site_of: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide.backends.functions.shell.shell.RETRY_S", 0.05)
    site = site_of(total_steps=60)
    site.train()
    site.take(events.CheckpointCommitted)
    site.plane.close()
    whole, asked = FileStore.read_version, threading.Event()

    def read_version(self: FileStore, key: str) -> tuple[bytes, str] | None:
        if not asked.is_set():
            asked.set()
            raise StorageError("the store is shut")
        return whole(self, key)

    monkeypatch.setattr(FileStore, "read_version", read_version)
    site.lead()
    site.adopt()
    site.take(events.JobFinished)
    assert asked.is_set()
    assert not [event for event in site.events if isinstance(event, events.ReplicaLost)]
    assert site.provider.num_invocations == 4
