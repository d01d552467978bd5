"""The executor over a real store, with functions that are threads: events, idempotence, restarts, what is left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kits.functions.scripted_functions import ScriptedFunctions
from springtide.backends.functions.executor import FunctionsExecutor
from springtide.backends.functions.parameter_store.host import FixedHost
from springtide.backends.functions.shell import conversion
from springtide.backends.functions.shell.objects import JobObjects
from springtide.core import events
from springtide.core.actions import AdmitJob, EndJob, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan, FunctionStage
from springtide.core.ports import Standing
from springtide.core.resources import DeviceId
from springtide.core.wire.functions import Keys
from springtide.core.workload import Entrypoint, Goal, JobState, MachineRun, ReplicaId, TrainingJob, WorkloadId
from springtide.storage.frames import decode
from springtide.storage.stores.open import open_store

STAGES = tuple(FunctionStage(first_layer=i, end_layer=i + 1, memory_mb=512) for i in range(2))
PLAN = FunctionPlan(stages=STAGES, num_replicas=2)


class RealClock:
    def __init__(self) -> None:
        self.began_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self.began_s


class Bench:
    """An executor and its provider on one directory, and the control plane's part in a few words."""

    def __init__(self, folder: Path, provider: ScriptedFunctions) -> None:
        self.folder = folder
        self.provider = provider
        self.store_url = f"file://{folder}/store"
        source = folder / "task.py"
        source.write_text("x = 1\n")
        menu = FunctionMenu(service="scripted", options=(FunctionOption(plan=PLAN, step_s=0.03, step_usd=1e-6),))
        self.job = TrainingJob(
            job_id=WorkloadId("j"),
            name="j",
            entrypoint=Entrypoint(source_path=str(source), object_name="x"),
            menu=menu,
        )
        self.clock = RealClock()
        self.events: list[events.Event] = []
        self.executor = self.new_executor()

    def new_executor(self) -> FunctionsExecutor:
        self.executor = FunctionsExecutor(
            self.folder / "state", self.clock, provider=self.provider, store_url=self.store_url
        )
        self.executor.open()
        return self.executor

    def start_of(self, number: int = 0, generation: int = 1) -> StartReplica:
        return StartReplica(
            workload=self.job, replica_id=ReplicaId(f"j.{number}"), device_id=DeviceId("f"), generation=generation
        )

    def resize_of(self, number: int = 0, generation: int = 1) -> ResizeJob:
        return ResizeJob(
            job_id=self.job.job_id,
            generation=generation,
            replica_ids=(ReplicaId(f"j.{number}"),),
            global_batch_size=8,
            functions=PLAN,
        )

    def take(self, kind: type, limit_s: float = 20.0) -> events.Event:
        """Wait for an event of a kind."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            for event in self.executor.wait(self.clock.now_s() + 0.1):
                self.executor.acknowledge([event])
                self.events.append(event)
            found = self.of(kind)
            if found:
                return found[-1]
        raise AssertionError(f"no {kind.__name__} among {self.events}")

    def of(self, kind: type) -> list[events.Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def train(self) -> None:
        self.executor.start(self.start_of())
        self.take(events.ReplicaReady)
        self.executor.start(self.resize_of())

    def end(self, state: JobState = JobState.SUCCEEDED) -> None:
        self.executor.start(EndJob(job_id=self.job.job_id, state=state))
        self.executor.start(StopReplica(workload_id=self.job.job_id, replica_id=ReplicaId("j.0"), grace_s=2.0))
        self.take(events.ReplicaStopped)

    def stored(self) -> list[str]:
        store = open_store(self.store_url)
        return store.keys("jobs/j/")


@pytest.fixture
def bench_of(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def build(**fields: object) -> Bench:
        bench = Bench(tmp_path, ScriptedFunctions(**fields))  # type: ignore[arg-type]
        benches.append(bench)
        return bench

    yield build
    for bench in benches:
        bench.executor.close(stop_workers=True)
        bench.provider.close()


def test_a_job_from_start_to_end(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.train()
    finished = bench.take(events.JobFinished)
    assert isinstance(finished, events.JobFinished)
    assert (finished.generation, finished.step) == (1, 10)
    model = decode(Path(finished.artifact_path).read_bytes()).tensors
    assert sorted(model) == ["layer0.weight", "layer1.weight"]
    kinds = [type(event) for event in bench.events]
    assert kinds[0] is events.ReplicaReady
    assert kinds.index(events.JobResized) < kinds.index(events.ProgressReported)
    assert bench.of(events.UsageReported)
    assert bench.of(events.CheckpointCommitted)[-1].step == 10
    progress = bench.of(events.ProgressReported)[-1]
    assert (progress.step, progress.total_steps, progress.world_size) == (10, 10, 4)
    bench.end()
    work = bench.folder / "state" / "workloads" / "j"
    losses = [json.loads(line) for line in (work / "losses.jsonl").read_text().splitlines()]
    assert losses == [[step, pytest.approx(1 / step), 8] for step in range(1, 11)]
    assert "a line of its own" in (work / "logs" / "j.0.1.log").read_text()
    status = bench.executor.status(bench.job.job_id)
    assert status is not None
    assert status.num_invocations == 4
    assert status.bill.total_usd > 0
    assert bench.provider.deployed == [512]


def test_nothing_is_left_in_the_store_of_a_job_that_succeeded(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.train()
    bench.take(events.JobFinished)
    bench.end()
    end_s = time.monotonic() + 10
    while bench.stored() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert bench.stored() == []


def test_nothing_is_left_of_a_job_in_a_parameter_store_that_stays(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    url = f"file://{bench.folder}/parameters"
    parameters = open_store(url)
    for key in ("jobs/j/wire/1.1/000000001/x", "jobs/other/wire/1.1/000000001/x"):
        parameters.put(key, b"1")
    bench.executor.close()
    bench.executor = FunctionsExecutor(
        bench.folder / "state",
        bench.clock,
        provider=bench.provider,
        store_url=bench.store_url,
        parameter_host=FixedHost(url, ping=lambda url, limit_s: True),
    )
    bench.train()
    bench.take(events.JobFinished)
    bench.end()
    end_s = time.monotonic() + 10
    while parameters.keys("jobs/j/") and time.monotonic() < end_s:
        time.sleep(0.05)
    assert parameters.keys("") == ["jobs/other/wire/1.1/000000001/x"]


@pytest.mark.slow
def test_a_cancelled_job_keeps_its_states(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(total_steps=1000)
    bench.train()
    bench.take(events.CheckpointCommitted)
    bench.end(JobState.CANCELLED)
    end_s = time.monotonic() + 10
    while any("/wire/" in key or "/reports/" in key for key in bench.stored()) and time.monotonic() < end_s:
        time.sleep(0.05)
    parts = {key.split("/")[2] for key in bench.stored()}
    assert parts == {"bundle", "control", "job", "state"}


@pytest.mark.slow
def test_actions_may_be_repeated(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.executor.start(bench.start_of())
    bench.executor.start(bench.start_of())
    bench.take(events.ReplicaReady)
    for _ in range(3):
        bench.executor.start(bench.resize_of())
    bench.executor.start(AdmitJob(job_id=bench.job.job_id, finish_s=1.0))
    bench.take(events.JobFinished)
    assert bench.provider.num_invocations == 4
    assert len(bench.of(events.ReplicaReady)) == 1
    bench.end()
    # A start of the past is no new life.
    bench.executor.start(bench.start_of())
    bench.executor.start(StopReplica(workload_id=bench.job.job_id, replica_id=ReplicaId("j.0"), grace_s=0.0))
    time.sleep(0.1)
    assert len(bench.of(events.ReplicaReady)) == 1


@pytest.mark.slow
def test_a_killed_function_is_replaced(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(total_steps=20)
    bench.provider.kills[2] = 5
    bench.train()
    bench.take(events.JobFinished)
    status = bench.executor.status(bench.job.job_id)
    assert status is not None
    assert (status.num_replaced, status.num_invocations) == (1, 5)
    work = bench.folder / "state" / "workloads" / "j"
    assert "killed" in (work / "logs" / "j.coordinator.log").read_text()
    steps = [json.loads(line)[0] for line in (work / "losses.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 21))


@pytest.mark.slow
def test_preempted_and_started_again_it_goes_on(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(total_steps=100)
    bench.train()
    bench.take(events.CheckpointCommitted)
    bench.executor.start(PreemptJob(job_id=bench.job.job_id, generation=2, replica_ids=(ReplicaId("j.0"),)))
    bench.take(events.ReplicaStopped)
    kept = bench.of(events.CheckpointCommitted)[-1].step
    used = bench.of(events.UsageReported)[-1].bill.total_usd
    bench.events.clear()
    bench.executor.start(bench.start_of(1, 3))
    bench.take(events.ReplicaReady)
    bench.executor.start(bench.resize_of(1, 3))
    resized = bench.take(events.JobResized)
    assert isinstance(resized, events.JobResized)
    assert (resized.direction, resized.step) == ("resume", kept)
    bench.take(events.JobFinished, 60.0)
    # What was used before is part of the bill.
    assert bench.of(events.UsageReported)[-1].bill.total_usd > used


def test_an_error_of_the_user_s_code_is_told_once(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.provider.errors[1] = "ValueError: the loss is not finite"
    bench.train()
    failed = bench.take(events.JobFailed)
    assert isinstance(failed, events.JobFailed)
    assert failed.error == "ValueError: the loss is not finite"
    bench.end(JobState.FAILED)
    assert len(bench.of(events.JobFailed)) == 1
    assert bench.provider.num_invocations == 4


@pytest.mark.slow
def test_a_provider_that_takes_nothing_is_named(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    bench.provider.refusal = "access denied: the role may not be used; attach lambda:InvokeFunction"
    bench.train()
    lost = bench.take(events.ReplicaLost, 60.0)
    assert isinstance(lost, events.ReplicaLost)
    assert "attach lambda:InvokeFunction" in lost.reason


def test_a_store_that_is_not_there_is_named(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    (bench.folder / "store").write_text("a file")
    bench.executor.start(bench.start_of())
    lost = bench.take((events.ReplicaLost, events.JobFailed))  # type: ignore[arg-type]
    text = lost.reason if isinstance(lost, events.ReplicaLost) else lost.error  # type: ignore[union-attr]
    assert "store" in text


def test_code_that_is_gone_fails_the_job(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    Path(bench.job.entrypoint.source_path).unlink()
    bench.executor.start(bench.start_of())
    failed = bench.take(events.JobFailed)
    assert isinstance(failed, events.JobFailed)
    assert "cannot be read" in failed.error
    bench.end(JobState.FAILED)


@pytest.mark.slow
def test_functions_go_on_while_the_control_plane_is_away(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(total_steps=60)
    bench.train()
    bench.take(events.CheckpointCommitted)
    # The old one is gone from one moment to the next: nobody hears of its functions any more.
    old = bench.executor
    old.close()
    bench.new_executor()
    bench.executor.recover(Standing(replicas=(bench.start_of(),), generations={bench.job.job_id: 1}))
    bench.events.clear()
    bench.take(events.JobFinished, 60.0)
    assert bench.provider.num_invocations == 4
    status = bench.executor.status(bench.job.job_id)
    assert status is not None
    assert status.num_redone_steps == 0
    # Four functions once, whichever coordinator counted them.
    assert status.usage.num_invocations == 4
    steps = [
        json.loads(line)[0]
        for line in (bench.folder / "state" / "workloads" / "j" / "losses.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 61))


def test_what_was_cut_off_is_begun_anew(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of()
    standing = Standing(
        replicas=(bench.start_of(),),
        generations={bench.job.job_id: 1},
        actions=(bench.start_of(), bench.resize_of()),
    )
    bench.executor.recover(standing)
    bench.take(events.JobFinished)


@pytest.mark.slow
def test_an_older_coordinator_finds_itself_fenced(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(total_steps=1000)
    bench.train()
    bench.take(events.CheckpointCommitted)
    objects = JobObjects(open_store(bench.store_url), Keys("jobs/j"))
    record = objects.read_control()
    assert record is not None
    newer = type(record)(**{**{name: getattr(record, name) for name in record.__struct_fields__}, "generation": 9})
    objects.write_control(newer)
    time.sleep(0.5)
    # It may have looked the instant before.
    objects.write_control(newer)
    bench.executor.start(StopReplica(workload_id=bench.job.job_id, replica_id=ReplicaId("j.0"), grace_s=0.5))
    time.sleep(1.0)
    after = objects.read_control()
    assert after is not None
    assert (after.generation, after.verb) == (9, "run")


@pytest.mark.slow
def test_a_budget_stops_it_with_a_checkpoint(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(total_steps=2000)
    bench.job = type(bench.job)(
        **{
            **{name: getattr(bench.job, name) for name in bench.job.__struct_fields__},
            "goal": Goal(budget_usd=0.0006),
        }
    )
    bench.train()
    paused = bench.take(events.PauseRequested, 60.0)
    assert isinstance(paused, events.PauseRequested)
    assert "springtide resume j --budget" in paused.reason
    assert bench.of(events.UsageReported)[-1].bill.total_usd <= 0.0006
    bench.executor.start(PreemptJob(job_id=bench.job.job_id, generation=2, replica_ids=(ReplicaId("j.0"),)))
    bench.take(events.ReplicaStopped)


@pytest.mark.slow
def test_a_job_that_moved_counts_what_machines_have_cost_in_its_budget(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(total_steps=2000)
    run = MachineRun(step=0, cost_usd=0.25)
    # As much as in the test above is left for functions.
    bench.job = msgspec.structs.replace(bench.job, machine_run=run, goal=Goal(budget_usd=0.2506))
    bench.train()
    paused = bench.take(events.PauseRequested, 60.0)
    assert isinstance(paused, events.PauseRequested)
    assert "its budget of $0.25" in paused.reason
    bill = bench.of(events.UsageReported)[-1].bill
    assert bill.machines_usd == 0.25
    assert 0.25 < bill.total_usd <= 0.2506


def test_a_checkpoint_that_functions_cannot_start_from_is_told_and_the_place_given_up(
    bench_of: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_run", lambda *_: -9)
    bench = bench_of()
    bench.job = msgspec.structs.replace(bench.job, machine_run=MachineRun(step=4, cost_usd=0.0))
    bench.executor.start(bench.start_of())
    failed = bench.take(events.MoveFailed)
    assert isinstance(failed, events.MoveFailed)
    assert (failed.generation, "was killed by SIGKILL" in failed.error) == (1, True)
    bench.executor.start(StopReplica(workload_id=bench.job.job_id, replica_id=ReplicaId("j.0"), grace_s=2.0))
    bench.take(events.ReplicaStopped)
    assert not bench.of(events.ReplicaReady)
    assert not bench.of(events.ReplicaLost)


def test_a_goal_that_is_durable_holds_for_who_runs(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(total_steps=100_000)
    bench.train()
    bench.take(events.CheckpointCommitted)
    edited = events.JobEdited(job_id=bench.job.job_id, goal=Goal(budget_usd=0.0006))
    others = events.JobEdited(job_id=WorkloadId("other"), goal=Goal(budget_usd=0.0001))
    bench.executor.acknowledge([edited, others, events.JobEdited(job_id=bench.job.job_id, max_restarts=3)])
    paused = bench.take(events.PauseRequested, 60.0)
    assert isinstance(paused, events.PauseRequested)
    assert "its budget of $0.0006 is nearly spent" in paused.reason
