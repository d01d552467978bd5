"""A real platform with emulated functions for jobs with goals: what befalls them, and what should come out."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from kits.end_to_end.live_platform import LivePlatform, wait_for
from springtide.backends.functions.emulator.config import EmulatorFaults, fate_of
from springtide.backends.functions.emulator.launch import (
    EmulatorAddress,
    emulator_status,
    find_emulator,
    kill_instance,
    set_faults,
)
from springtide.backends.functions.shell.notes import NOTES_FILE, Notes
from springtide.backends.processes import ProcessIdentity, live_stat
from springtide.client.api import Client, connect
from springtide.core.function_search import BatchPhase
from springtide.core.functions import Bill, LayerProfile, ModelProfile
from springtide.core.status.platform import JobStatus
from springtide.core.workload import JobState
from springtide.runtime.data.shards import SampleSchedule, seed_everything
from springtide.runtime.profiling.layer_profiling import LayerProfileFile, write_layer_profile
from springtide.service.assembly.function_settings import FunctionSettings, write_settings

LIMIT_S = 400.0
# A linear classifier in double precision: its losses can be compared however many workers add up its gradients. In a
# function a sample takes its time whatever else the machine does, so that twice the workers take half of it.
SOFTMAX = '''
import os
import time

import numpy as np

import springtide as st

SAMPLE_S = {sample_s}
IN_FUNCTION = "AWS_LAMBDA_FUNCTION_NAME" in os.environ


class Softmax:
    """Looks at the samples through `width` fixed, drawn features."""

    def __init__(self, width=8):
        self.features = np.random.default_rng(width).normal(size=(8, width)) / 3
        self.weights = np.zeros((width, 3))

    def gradients(self, x, y):
        if IN_FUNCTION:
            time.sleep(SAMPLE_S * len(x))
        x, y = np.tanh(np.asarray(x, dtype=np.float64) @ self.features), np.asarray(y)
        scores = x @ self.weights
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(x))
        loss = float(-np.log(chances[rows, y]).mean())
        chances[rows, y] -= 1.0
        return loss, {{"weights": x.T @ chances / len(x)}}

    def apply(self, gradients):
        self.weights = self.weights - 0.2 * gradients["weights"]

    def state(self):
        return {{"weights": self.weights}}

    def load(self, state):
        self.weights = np.array(state["weights"])


def samples(num_samples={num_samples}, seed=5):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_samples, 8))
    return x, (x @ generator.normal(size=(8, 3)) + 0.5 * generator.normal(size=(num_samples, 3))).argmax(axis=1)


def model(params):
    return Softmax(int(params.get("width", "8")))


def search_space(trial):
    return {{"width": trial.suggest_int("width", 4, 64, log=True)}}


{dataset}
softmax = st.Task(model=model, dataset=DATASET, name="softmax")
'''


def write_softmax(folder: Path, *, num_samples: int = 1200, sample_s: float = 0.004, stream: str = "") -> Path:
    """The classifier as a user's file, on samples of its own or on a stream."""
    dataset = f"DATASET = st.stream({stream!r})" if stream else "DATASET = samples"
    path = folder / "softmax_task.py"
    path.write_text(SOFTMAX.format(num_samples=num_samples, sample_s=sample_s, dataset=dataset))
    return path


def write_profile(folder: Path, source: Path, *, num_samples: int, sample_s: float) -> Path:
    """A profile of the classifier that says this of a sample."""
    layer = LayerProfile(
        name="softmax",
        parameter_bytes=192,
        activation_bytes=1024,
        output_bytes=8,
        gradient_bytes=8,
        forward_s=(2 * sample_s,),
        backward_s=(2 * sample_s,),
    )
    profile = ModelProfile(
        model="softmax",
        micro_batch_size=4,
        memory_mb=(2048,),
        bytes_per_s=(70e6,),
        layers=(layer,),
        base_bytes=320 << 20,
        source="declared",
    )
    path = folder / "layers.json"
    write_layer_profile(
        path,
        LayerProfileFile(
            profile=profile,
            num_samples=num_samples,
            num_layers=1,
            source_sha256=hashlib.sha256(source.read_bytes()).hexdigest(),
            object_name="softmax",
        ),
    )
    return path


def load_file(path: Path) -> ModuleType:
    """A user's file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(
    module: ModuleType,
    *,
    global_batch: int,
    epochs: int,
    schedule: Sequence[tuple[int, int]] = (),
    seed: int = 0,
    params: dict[str, str] | None = None,
) -> tuple[list[float], str]:
    """One process on whole batches, undisturbed: each step's mean loss, and the chain of the samples' ids."""
    seed_everything(seed)
    model = module.model(params or {})
    x, y = module.samples()
    phases = tuple(BatchPhase(from_epoch=epoch, global_batch_size=size) for epoch, size in schedule)
    plan = SampleSchedule(
        num_samples=len(x), global_batch_size=global_batch, num_epochs=epochs, seed=seed, phases=phases
    )
    losses, digest = [], ""
    for step in range(plan.total_steps):
        batch = plan.batch(step)
        loss, gradients = model.gradients(x[batch.ids], y[batch.ids])
        model.apply(gradients)
        losses.append(loss)
        digest = hashlib.sha256((digest + batch.ids_digest).encode()).hexdigest()[:16]
    return losses, digest


def stream_reference(module: ModuleType, x: Any, y: Any, *, global_batch: int) -> list[float]:
    """The same on samples in the order in which they arrived, each once."""
    model = module.model({})
    losses = []
    for low in range(0, len(x), global_batch):
        loss, gradients = model.gradients(x[low : low + global_batch], y[low : low + global_batch])
        model.apply(gradients)
        losses.append(loss)
    return losses


def seed_that_kills(fraction: float = 0.05, among: int = 4, within: int = 40) -> int:
    """The first seed that kills one of the first invocations, and no more than its share of the later ones."""
    for seed in count():
        faults = EmulatorFaults(seed=seed, kill_fraction=fraction)
        killed = [number for number in range(within) if fate_of(faults, number).kill_after_s is not None]
        if killed and killed[0] < among and len(killed) <= fraction * within:
            return seed
    raise AssertionError


class GoalsPlatform:
    """A platform with emulated functions on a directory of its own, and hands to disturb them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.live = LivePlatform(folder / "state", slots=1)
        given = {"provider": "emulator", "lifetime_s": 120.0, "concurrency": 8, "bytes_per_s": 70e6, **settings}
        write_settings(self.live.state_dir, FunctionSettings(**given))  # type: ignore[arg-type]
        self.client: Client

    def start(self) -> GoalsPlatform:
        self.live.start(options=("--functions", str(self.live.state_dir / "functions.json")))
        assert self.live.is_alive, self.live.log()
        self.client = connect(state_dir=self.live.state_dir)
        return self

    def stop(self) -> None:
        self.client.close()
        self.live.stop()

    @property
    def emulator(self) -> EmulatorAddress:
        found = find_emulator(self.live.state_dir / "functions")
        assert found is not None, "the emulator is gone"
        return found

    def set_faults(self, faults: EmulatorFaults) -> None:
        set_faults(self.emulator, faults)

    def job(self, job_id: str) -> JobStatus:
        return self.client.job(job_id)

    def wait(self, job_id: str, until: Callable[[JobStatus], bool], what: str, limit_s: float = LIMIT_S) -> JobStatus:
        """Wait for a condition, which never comes too late for the machine being slow."""
        found: list[JobStatus] = []

        def arrived() -> bool:
            found[:] = [self.job(job_id)]
            return until(found[0]) or JobState(found[0].state).is_terminal

        wait_for(arrived, limit_s, lambda: f"{what}; now {found}\n{self.logs(job_id)}")
        assert until(found[0]), f"{job_id} ended before {what}: {found[0].state} {found[0].reason}\n{self.logs(job_id)}"
        return found[0]

    def live_until(self, condition: Callable[[], bool], thread: threading.Thread) -> None:
        """Wait for what another thread brings about; it ending before is a failure."""
        wait_for(lambda: condition() or not thread.is_alive(), LIMIT_S, lambda: self.live.log()[-4000:])
        assert thread.is_alive(), self.live.log()[-4000:]

    def wait_over(self, job_id: str, limit_s: float = LIMIT_S) -> JobStatus:
        return self.wait(job_id, lambda job: job.state == JobState.SUCCEEDED, "its end", limit_s)

    def kill_one(self) -> str:
        """Kill a function that works now, as its provider might."""
        busy = [one["id"] for one in emulator_status(self.emulator)["instances"] if one["invocation"]]
        assert busy, "no function runs"
        kill_instance(self.emulator, busy[0])
        return str(busy[0])

    def num_running(self) -> int:
        """How many functions work on something now."""
        return int(emulator_status(self.emulator)["num_running"])

    def bill(self, job_id: str) -> Bill:
        """What a job has cost so far, item by item."""
        functions = self.job(job_id).functions
        assert functions is not None
        return functions.bill

    def workload(self, job_id: str) -> Path:
        return self.live.workload(job_id)

    def losses(self, job_id: str) -> list[tuple[int, float, int]]:
        """Step, mean loss and number of samples of every committed step."""
        lines = (self.workload(job_id) / "losses.jsonl").read_text().splitlines()
        return [tuple(json.loads(line)) for line in lines]

    def notes(self, job_id: str) -> Notes:
        return msgspec.json.decode((self.workload(job_id) / NOTES_FILE).read_bytes(), type=Notes)

    def logs(self, job_id: str, last: int = 40) -> str:
        folder = self.workload(job_id) / "logs"
        lines = [line for path in sorted(folder.glob("*.log")) for line in path.read_text().splitlines()]
        return "\n".join(lines[-last:])

    def kill_redis(self) -> int:
        """Kill the parameter store's own process, found by its records, never by name."""
        pids: list[int] = []

        def is_running() -> bool:
            pids[:] = redis_pids(self.live.state_dir)
            return bool(pids)

        wait_for(is_running, LIMIT_S, "a parameter store to run")
        os.kill(pids[0], signal.SIGKILL)
        return pids[0]


def redis_pids(state_dir: Path) -> list[int]:
    """The processes that records of parameter stores under this directory name, as far as they live."""
    found = []
    for path in sorted((state_dir / "functions" / "parameter-stores").glob("*.json")):
        named = json.loads(json.loads(path.read_text())["server"]["identity"])
        identity = msgspec.convert(named, ProcessIdentity)
        if live_stat(identity) is not None:
            found.append(identity.pid)
    return found


def check_losses(told: list[tuple[int, float, int]], expected: Sequence[float], num_samples: int) -> None:
    """Every step once, in order, with the loss of an undisturbed run; every sample counted once."""
    assert [step for step, _, _ in told] == list(range(1, len(expected) + 1))
    worst = max(abs(loss - wanted) for (_, loss, _), wanted in zip(told, expected, strict=True))
    assert worst < 1e-8, f"a step's loss differs by {worst}"
    assert sum(samples for _, _, samples in told) == num_samples


def settle(seconds: float) -> None:
    """Let real time pass where what is claimed is that nothing happens in it."""
    time.sleep(seconds)
