"""Jobs on emulated functions without the platform around them: an executor, an emulator, and what they did."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults
from springtide.backends.functions.emulator.launch import ensure_emulator, stop_emulator
from springtide.backends.functions.executor import FunctionsExecutor
from springtide.backends.functions.providers.aws import emulator_provider
from springtide.core import events
from springtide.core.actions import Action, EndJob, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan, FunctionService, FunctionStage
from springtide.core.resources import DeviceId
from springtide.core.workload import Entrypoint, Goal, JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.perf.functions import services as function_services
from springtide.perf.functions.pipeline.tasks import micro_batch_bounds
from springtide.runtime.data.shards import SampleSchedule, seed_everything

EXAMPLES = Path(__file__).parents[3] / "examples"


class RealClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._began_s


def load_example(name: str) -> Any:
    """An example's module, imported as its file stands."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def service_of(lifetime_s: float = 60.0, **fields: Any) -> FunctionService:
    given = {"memory_mb": (1024, 2048), "cold_start_s": 0.5, "concurrency": 16, "latency_s": 0.0, **fields}
    return function_services.emulator(lifetime_s=lifetime_s, **given)


def plan_of(ends: tuple[int, ...], num_replicas: int = 1, **fields: Any) -> FunctionPlan:
    """Stages that end after these layers."""
    firsts = (0, *ends[:-1])
    stages = tuple(
        FunctionStage(first_layer=first, end_layer=end, memory_mb=1024) for first, end in zip(firsts, ends, strict=True)
    )
    return FunctionPlan(stages=stages, num_replicas=num_replicas, **fields)


def job_of(example: str, plan: FunctionPlan, *, job_id: str = "job", **fields: Any) -> TrainingJob:
    menu = FunctionMenu(service="emulator", options=(FunctionOption(plan=plan, step_s=0.3, step_usd=0.0),))
    budget_usd = fields.pop("budget_usd", None)
    return TrainingJob(
        job_id=WorkloadId(job_id),
        name=job_id,
        entrypoint=Entrypoint(source_path=str(EXAMPLES / f"{example}.py"), object_name=example),
        menu=menu,
        goal=Goal(budget_usd=budget_usd),
        **fields,
    )


class Run:
    """One job on one emulator. `follow` plays the control plane: it answers events as the real one would."""

    def __init__(
        self,
        folder: Path,
        job: TrainingJob,
        *,
        service: FunctionService,
        faults: EmulatorFaults | None = None,
        store_url: str = "",
        parameter_url: str = "",
        cpu_fraction: float = 4.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.job = job
        self.service = service
        self.store_url = store_url or f"file://{folder}/store"
        self.parameter_url = parameter_url
        self.clock = RealClock()
        config = EmulatorConfig(
            service=service,
            cpu_fraction=cpu_fraction,
            warm_template=True,
            preload=("torch", "springtide.runtime.functions.worker"),
            faults=faults or EmulatorFaults(),
            role_environment=environment or {},
        )
        self.address = ensure_emulator(folder / "emulator", config)
        self.provider = emulator_provider(self.address, service)
        self.events: list[events.Event] = []
        self.times: list[float] = []
        self.generation = 0
        self.num_replicas = 0
        self.executor = self.new_executor()

    def new_executor(self) -> FunctionsExecutor:
        self.executor = FunctionsExecutor(
            self.folder,
            self.clock,
            provider=self.provider,
            store_url=self.store_url,
            parameter_url=self.parameter_url,
        )
        return self.executor

    def close(self) -> None:
        self.executor.close(stop_workers=True)
        self.provider.close()
        stop_emulator(self.folder / "emulator")

    def do(self, action: Action) -> None:
        self.executor.start(action)

    @property
    def replica_id(self) -> ReplicaId:
        return ReplicaId(f"{self.job.job_id}.{self.num_replicas}")

    @property
    def start_action(self) -> StartReplica:
        return StartReplica(
            workload=self.job,
            replica_id=self.replica_id,
            device_id=DeviceId("functions.0"),
            generation=self.generation,
        )

    def start(self) -> None:
        self.generation += 1
        self.num_replicas += 1
        self.do(self.start_action)

    def resize(self, plan: FunctionPlan | None = None) -> None:
        assert self.job.menu is not None
        self.do(
            ResizeJob(
                job_id=self.job.job_id,
                generation=self.generation,
                replica_ids=(self.replica_id,),
                global_batch_size=self.job.global_batch_size,
                functions=plan or self.job.menu.options[0].plan,
            )
        )

    def preempt(self, grace_s: float = 15.0) -> None:
        self.generation += 1
        self.do(
            PreemptJob(
                job_id=self.job.job_id, generation=self.generation, replica_ids=(self.replica_id,), grace_s=grace_s
            )
        )

    def follow(
        self, until: Callable[[], bool] | None = None, limit_s: float = 240.0, *, restarts: int = 0
    ) -> list[events.Event]:
        """Take events until the job has ended (or `until`), and answer those that call for an answer."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if until is not None and until():
                return self.events
            for event in self.executor.wait(self.clock.now_s() + 0.2):
                self.events.append(event)
                self.times.append(self.clock.now_s())
                if isinstance(event, events.ReplicaReady):
                    self.resize()
                elif isinstance(event, events.JobFinished | events.JobFailed):
                    is_good = isinstance(event, events.JobFinished)
                    state = JobState.SUCCEEDED if is_good else JobState.FAILED
                    self.do(EndJob(job_id=self.job.job_id, state=state))
                    self.do(StopReplica(workload_id=self.job.job_id, replica_id=self.replica_id, grace_s=2.0))
                elif isinstance(event, events.PauseRequested):
                    self.preempt()
                elif isinstance(event, events.ReplicaLost):
                    if restarts == 0:
                        return self.events
                    restarts -= 1
                    time.sleep(1.0)
                    self.start()
                elif isinstance(event, events.ReplicaStopped):
                    return self.events
        names = [type(event).__name__ for event in self.events[-5:]]
        raise AssertionError(f"the job did not end in {limit_s} s: {names}, {self.executor.status(self.job.job_id)}")

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def work_dir(self) -> Path:
        return self.folder / "workloads" / self.job.job_id

    def losses(self) -> list[tuple[int, float, int]]:
        lines = (self.work_dir / "losses.jsonl").read_text().splitlines()
        return [tuple(json.loads(line)) for line in lines]

    def status(self) -> Any:
        return self.executor.status(self.job.job_id)


def bounds_of(job: TrainingJob, num_samples: int) -> list[tuple[int, int]]:
    """The micro-batches of a job's first plan, replica by replica."""
    assert job.menu is not None
    plan = job.menu.options[0].plan
    replicas = range(plan.num_replicas)
    parts = [micro_batch_bounds(num_samples, one, plan.num_replicas, plan.micro_batch_size) for one in replicas]
    return [bound for part in parts for bound in part]


def reference(job: TrainingJob, example: str, *, is_whole: bool) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """One process: each step's mean loss, the model at the end, the chain of the samples' ids.

    It works on whole batches, or on the same micro-batches as the plan's functions do, in their order: rounding is
    then the same, which over a hundred steps of a network with kinks grows to where losses can no longer be compared.
    """
    module = load_example(example)
    task = getattr(module, example)
    seed_everything(job.seed)
    model = task.model()
    data = task.dataset()
    optimizer = task.optimizer(model.parameters())
    schedule = SampleSchedule(
        num_samples=len(data[0]),
        global_batch_size=job.global_batch_size,
        num_epochs=job.num_epochs,
        seed=job.seed,
    )
    losses, digest = [], ""
    for step in range(schedule.total_steps):
        batch = schedule.batch(step)
        optimizer.zero_grad()
        num_samples, total = len(batch.ids), 0.0
        for low, high in [(0, num_samples)] if is_whole else bounds_of(job, num_samples):
            ids = batch.ids[low:high]
            loss = task.loss(model(data[0][ids]), data[1][ids]) * ((high - low) / num_samples)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
        digest = hashlib.sha256((digest + batch.ids_digest).encode()).hexdigest()[:16]
    return losses, model.state_dict(), digest
