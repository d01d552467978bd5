"""The two scenarios of SMLT (figures 10 and 11) on real emulated functions, against every configuration of a grid.

python benchmarks/goals_on_emulator.py [--json] [--seeds 3] [--out FILE]

Cheapest within a deadline and fastest within a budget, scaled from an hour and $50 to minutes and cents. First every
configuration of the grid runs one epoch by itself: the exhaustive best is what its start and so many of its steps come
to. Then the platform is given the goal and looks for itself, profiling included. Also: how far predictions were off
before and after correction.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import goals_task
import msgspec
from msgspec.structs import replace

from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults
from springtide.backends.functions.emulator.launch import ensure_emulator, stop_emulator
from springtide.backends.functions.executor import FunctionsExecutor
from springtide.backends.functions.providers.aws import emulator_provider
from springtide.client.api import Client, connect
from springtide.client.functions import job_request
from springtide.client.goals import TrainOptions
from springtide.client.sources.source import read_source
from springtide.core import events
from springtide.core.actions import EndJob, ResizeJob, StartReplica, StopReplica
from springtide.core.errors import SpringtideError
from springtide.core.function_search import SearchSpace, WorkerModel
from springtide.core.functions import (
    FunctionMenu,
    FunctionOption,
    FunctionPlan,
    FunctionService,
    LayerProfile,
    MemorySize,
    ModelProfile,
)
from springtide.core.resources import DeviceId
from springtide.core.status.platform import JobStatus
from springtide.core.workload import Entrypoint, JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.perf.functions.services import emulator as emulator_service
from springtide.perf.functions.workers.surface import Surface, WorkSettings
from springtide.runtime.profiling.layer_profiling import LayerProfileFile, write_layer_profile
from springtide.service.assembly.function_settings import FunctionSettings, write_settings
from springtide.service.assembly.functions import service_of

TASK = Path(__file__).with_name("goals_task.py")
BATCH, NUM_SAMPLES, EPOCHS, GRID_EPOCHS = 24, 360, 12, 1
GRID_WORKERS, GRID_MB = (1, 2, 4), (512, 1024, 1792)
# Goals between what is possible and what is easy, from the grid: so many times the shortest time and the lowest cost.
DEADLINE_FACTOR, BUDGET_FACTOR = 2.0, 1.3
RUN_LIMIT_S = 600.0


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration: seconds and dollars of the whole job, from its start and the mean of its steps."""

    num_workers: int
    memory_mb: int
    seconds: float
    usd: float
    step_s: float


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """How the platform met a goal: `ratio` is its result over the best one of the grid that meets the goal."""

    goal: str
    seed: int
    limit: float
    seconds: float
    usd: float
    is_met: bool
    ratio: float
    num_tried: int
    num_changes: int
    error_before: float | None
    error_after: float | None
    ends_as: str


@contextmanager
def platform(folder: Path, seed: int) -> Iterator[Client]:
    """A platform of its own with an emulator, at 70 MB/s a function."""
    settings = FunctionSettings(provider="emulator", concurrency=max(GRID_WORKERS), places=1, seed=seed)
    path = write_settings(folder, settings)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "springtide.service", "--state", str(folder), "--port", "0", "--slots", "1"]
    process = subprocess.Popen([*command, "--functions", str(path)], env=environment, stderr=subprocess.DEVNULL)
    try:
        while not (folder / "platform.json").exists():
            assert process.poll() is None, "the platform did not start"
            time.sleep(0.1)
        with connect(state_dir=folder) as client:
            yield client
    finally:
        process.terminate()
        process.wait(60.0)
        with suppress(SpringtideError):
            stop_emulator(folder / "functions")


def run(client: Client, name: str, **goal: Any) -> JobStatus:
    """Submit the job with its goal and wait for its end."""
    source = read_source(TASK, "waiting")
    options = TrainOptions(on="functions", global_batch=BATCH, epochs=EPOCHS, **goal)
    with tempfile.TemporaryDirectory() as folder:
        profile = write_profile(Path(folder) / "layers.json")
        job = client.submit_job(**job_request(source, options, name, client, profile=profile))
    end_s = time.monotonic() + RUN_LIMIT_S
    while not JobState(job.state).is_terminal:
        assert time.monotonic() < end_s, f"{job.job_id} has not ended: {job.state} {job.reason}"
        if job.state == JobState.PAUSED:
            client.cancel(job.job_id)
        time.sleep(0.2)
        job = client.job(job.job_id)
    return job


def write_profile(path: Path) -> Path:
    """What a profile on one core would say: waiting takes no CPU time, so it cannot be taken."""
    half_s = goals_task.sample_s(0) * 4 / 2
    layer = LayerProfile(
        name="waiting",
        parameter_bytes=4 * goals_task.NUM_FEATURES,
        activation_bytes=1024,
        output_bytes=8,
        gradient_bytes=8,
        forward_s=(half_s,),
        backward_s=(half_s,),
    )
    profile = ModelProfile(
        model="waiting",
        micro_batch_size=4,
        memory_mb=(2048,),
        bytes_per_s=(70e6,),
        layers=(layer,),
        base_bytes=320 << 20,
        source="declared",
    )
    digest = hashlib.sha256(TASK.read_bytes()).hexdigest()
    write_layer_profile(
        path,
        LayerProfileFile(
            profile=profile, num_samples=NUM_SAMPLES, num_layers=1, source_sha256=digest, object_name="waiting"
        ),
    )
    return path


class Clock:
    """A clock that starts at 0 when it is created."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        """Seconds since creation."""
        return time.monotonic() - self._began_s


class Fixed:
    """Runs jobs with one fixed configuration without a platform, and reports them as the platform would."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        service = service_of(FunctionSettings(provider="emulator", concurrency=max(GRID_WORKERS)), num_cores=2)
        service = replace(service, sizes=tuple(size_of(service, memory_mb) for memory_mb in GRID_MB))
        self.service = replace(service, concurrency=2 * max(GRID_WORKERS))
        config = EmulatorConfig(service=self.service, warm_template=True, preload=("torch",), faults=EmulatorFaults())
        self._emulator = folder / "emulator"
        self.provider = emulator_provider(ensure_emulator(self._emulator, config), self.service)
        self.folder = folder
        store_url = f"file://{folder}/store"
        self.executor = FunctionsExecutor(folder, self.clock, provider=self.provider, store_url=store_url)

    def close(self) -> None:
        """Stop the executor, the provider and the emulator."""
        self.executor.close(stop_workers=True)
        self.provider.close()
        stop_emulator(self._emulator)

    def run(self, plan: FunctionPlan) -> Ran:
        """The whole job under this plan, extrapolated from the time and cost of one epoch."""
        memory_mb, workers = plan.stages[0].memory_mb, plan.num_replicas
        job = TrainingJob(
            job_id=WorkloadId(f"fixed-{workers}-{memory_mb}"),
            name="fixed",
            entrypoint=Entrypoint(source_path=str(TASK), object_name="waiting"),
            global_batch_size=BATCH,
            num_epochs=GRID_EPOCHS,
            menu=FunctionMenu(service="emulator", options=(FunctionOption(plan=plan, step_s=1.0, step_usd=0.0),)),
        )
        replica, began_s = ReplicaId(f"{job.job_id}.0"), self.clock.now_s()
        device = DeviceId("functions.0")
        self.executor.start(StartReplica(workload=job, replica_id=replica, device_id=device, generation=1))
        seconds, measured, status = 0.0, None, None
        while self.clock.now_s() - began_s < RUN_LIMIT_S:
            for event in self.executor.wait(self.clock.now_s() + 0.1):
                if getattr(event, "replica_id", replica) != replica:
                    # Late events of the job before this one.
                    continue
                if isinstance(event, events.ReplicaReady):
                    size = job.global_batch_size
                    self.executor.start(
                        ResizeJob(
                            job_id=job.job_id,
                            generation=1,
                            replica_ids=(replica,),
                            global_batch_size=size,
                            functions=plan,
                        )
                    )
                elif isinstance(event, events.FunctionsMeasured):
                    measured = event.measurement
                elif isinstance(event, events.JobFinished):
                    seconds = self.clock.now_s() - began_s
                    status = self.executor.status(job.job_id)
                    self.executor.start(EndJob(job_id=job.job_id, state=JobState.SUCCEEDED))
                    self.executor.start(StopReplica(workload_id=job.job_id, replica_id=replica, grace_s=2.0))
                elif isinstance(event, events.ReplicaStopped):
                    assert status is not None
                    assert measured is not None
                    num_more = (EPOCHS - GRID_EPOCHS) * -(-NUM_SAMPLES // BATCH)
                    return Ran(
                        num_workers=workers,
                        memory_mb=memory_mb,
                        seconds=seconds + num_more * measured.step_s,
                        usd=status.bill.total_usd + num_more * measured.usd,
                        step_s=measured.step_s,
                    )
                elif isinstance(event, events.JobFailed | events.ReplicaLost):
                    raise AssertionError(event)
        raise AssertionError(f"{job.job_id} has not ended")


def size_of(service: FunctionService, memory_mb: int) -> MemorySize:
    """A memory size of the grid, with the resources that the emulator gives it."""
    return emulator_service(memory_mb=(memory_mb,), max_vcpus=service.sizes[-1].vcpus).sizes[0]


def grid(fixed: Fixed, say: Callable[[str], None]) -> list[Ran]:
    """Every configuration, one after the other."""
    space = SearchSpace(max_workers=max(GRID_WORKERS), sizes=fixed.service.sizes)
    model = WorkerModel(parameter_bytes=1_000_000, sample_s=0.021)
    surface = Surface(fixed.service, space, model, WorkSettings(global_batch_size=BATCH))
    found = []
    for row in (place for place, workers in enumerate(surface.workers) if workers in GRID_WORKERS):
        for column in range(len(surface.sizes)):
            ran = fixed.run(surface.plan(row, column))
            say(f"{ran.num_workers} x {ran.memory_mb} MB: {ran.seconds:.1f} s, ${ran.usd:.6f}")
            found.append(ran)
    return found


def search(folder: Path, goal: str, limit: float, best: Ran, ran: Sequence[Ran], seed: int) -> Found:
    """One run in which the platform chooses the configuration from the goal alone."""
    wish = {"deadline": limit} if goal == "cheapest" else {"budget": limit, "fastest": True}
    with platform(folder, seed) as client:
        job = run(client, goal, seed=seed, workers=(1, max(GRID_WORKERS)), **wish)
        job = client.job(job.job_id)
    seconds = (job.ended_at_s or float("inf")) - job.submitted_at_s
    usd = job.cost_usd or 0.0
    is_met = job.state == JobState.SUCCEEDED and (seconds if goal == "cheapest" else usd) <= limit
    before, after = errors(job, ran)
    assert job.search is not None
    assert job.functions is not None
    return Found(
        goal=goal,
        seed=seed,
        limit=limit,
        seconds=seconds,
        usd=usd,
        is_met=is_met,
        ratio=usd / best.usd if goal == "cheapest" else seconds / best.seconds,
        num_tried=len(job.search.tried),
        num_changes=len(job.functions.changes),
        error_before=before,
        error_after=after,
        ends_as=f"{job.search.num_workers} x {job.search.memory_mb} MB",
    )


def errors(job: JobStatus, ran: Sequence[Ran]) -> tuple[float | None, float | None]:
    """The mean of |predicted - measured| / measured over the grid: by the model alone, and after correction."""
    measured = {(one.num_workers, one.memory_mb): one.step_s for one in ran}
    before, after = [], []
    for expected in job.search.expected if job.search is not None else ():
        step_s = measured.get((expected.num_workers, expected.memory_mb))
        if step_s:
            after.append(abs(expected.step_s / step_s - 1.0))
            if expected.model_step_s is not None:
                before.append(abs(expected.model_step_s / step_s - 1.0))
    return (statistics.mean(before) if before else None, statistics.mean(after) if after else None)


def main() -> None:
    """Measure the grid, then search with both goals, once for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="springtide-goals-") as folder:
        fixed = Fixed(Path(folder) / "fixed")
        try:
            ran = grid(fixed, say)
        finally:
            fixed.close()
        deadline_s = DEADLINE_FACTOR * min(one.seconds for one in ran)
        budget_usd = BUDGET_FACTOR * min(one.usd for one in ran)
        cheapest = min((one for one in ran if one.seconds <= deadline_s), key=lambda one: one.usd)
        fastest = min((one for one in ran if one.usd <= budget_usd), key=lambda one: one.seconds)
        found = []
        for seed in range(options.seeds):
            for goal, limit, best in (("cheapest", deadline_s, cheapest), ("fastest", budget_usd, fastest)):
                found.append(search(Path(folder) / f"{goal}-{seed}", goal, limit, best, ran, seed))
                say(str(found[-1]))
    report = {
        "load": [load, os.getloadavg()[0]],
        "grid": ran,
        "deadline_s": deadline_s,
        "budget_usd": budget_usd,
        "cheapest": cheapest,
        "fastest": fastest,
        "found": found,
        "passed": all(one.is_met for one in found),
    }
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())


if __name__ == "__main__":
    main()
