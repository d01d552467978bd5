"""The worker of one place of a job on functions, for models of any framework: its protocol and its builder.

This module imports no framework, so that a job without torch never loads it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from springtide.collectives.communicator import Communicator
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.model import Model
from springtide.core.ports import Store
from springtide.core.wire.functions import Keys, Place
from springtide.core.workload import TrainingJob
from springtide.runtime.data.samples import Samples, array_samples, dataset_of
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.functions.source import UserSource
from springtide.runtime.functions.step import Position, StepOutcome
from springtide.runtime.models.user_models import check_task, explain_missing_framework, model_of

# The micro-batch size of a worker that runs without a plan.
_LARGEST_PASS = 256
_IMPORTS_TORCH = re.compile(rb"^\s*(?:import|from)\s+torch", re.MULTILINE)


class PlaceWorker(Protocol):
    """Trains one place under one plan; holds the training state of its part of the model, and its position.

    A step that is interrupted leaves the state as before or as after the step; `position` says which. The caller sets
    `exchange` for the plan in use; it is None with one replica.
    """

    position: Position
    exchange: Communicator | None

    @property
    def samples(self) -> Samples:
        """The samples to train on."""
        ...

    @property
    def plan(self) -> FunctionPlan:
        """The plan in force."""
        ...

    @property
    def total_steps(self) -> int | None:
        """The job's number of steps; None while its stream is open."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch of the next step (of the last one, at the end)."""
        ...

    @property
    def global_batch_size(self) -> int:
        """The size of a full global batch, over all replicas, of the next step (of the last one, at the end)."""
        ...

    @property
    def gradient_bytes(self) -> int:
        """The bytes that this place exchanges in a step."""
        ...

    @property
    def num_exchanged(self) -> int:
        """How many numbers the replicas exchanged in the last step (before the first: will exchange)."""
        ...

    @property
    def samples_needed(self) -> int | None:
        """How many samples the stream must have for the next step; None without a stream."""
        ...

    def set_available(self, num_samples: int, *, is_closed: bool) -> None:
        """Set how many samples of the stream may be used, and whether it is closed; no effect without a stream.

        All replicas must get the same values before the same step, because the size of the last batch depends on them.
        """
        ...

    def sync_prefix(self, prefix: str) -> str:
        """The prefix of the keys of this stage's exchange, in the step whose messages are under `prefix`."""
        ...

    def run_step(self, prefix: str, *, ends_here: bool = False) -> StepOutcome:
        """Train the next step, with its messages under `prefix`; `ends_here` asks all places to stop after it.

        Raises what `check` and the user's code raise, and StorageError.
        """
        ...

    def save_state(self, store: Store, keys: Keys) -> None:
        """Write the state at the current position, and then the record that makes it valid. Raises StorageError."""
        ...

    def has_state(self, store: Store, keys: Keys, step: int) -> bool:
        """Whether this place's state after `step` steps is saved. Raises StorageError, CheckpointError."""
        ...

    def load_state(self, store: Store, keys: Keys, step: int) -> None:
        """Restore the state and position after `step` >= 1 steps. Raises CheckpointError, StorageError."""
        ...

    def set_plan(self, plan: FunctionPlan, place: Place | None = None) -> None:
        """Use another plan from the next step on, in which this stage has the same layers, perhaps as another replica.

        `exchange` is None afterwards. Raises InvalidRequest if the plan has other stages.
        """
        ...

    def close(self) -> None:
        """Wait for all threads and close files."""
        ...


def build_place_worker(
    source: UserSource,
    plan: FunctionPlan,
    place: Place,
    *,
    store: Store,
    wire: Store,
    check: Callable[[], None],
    now_s: Callable[[], float] = time.monotonic,
) -> PlaceWorker:
    """Import the user's code anew and build the worker in its state before the first step.

    `store` holds datasets, `wire` carries messages and gradients. `check` is called about twice a second while the
    worker waits; an exception that it raises ends the step. Raises InvalidRequest, and whatever the user's code raises.
    """
    job = source.job
    is_torch = imports_torch(source.root)
    with explain_missing_framework(), ExitStack() as spill:
        if is_torch:
            # Before the import, because the file may build its model at import.
            spill.enter_context(_spilled(source, plan, place))
        # All places, and workers on machines, must build the same initial model.
        seed_everything(job.seed)
        task = source.load()
        if needs_torch(task) and not is_torch:
            spill.enter_context(_spilled(source, plan, place))
        return task_worker(task, job, plan, place, store=store, wire=wire, check=check, now_s=now_s)


def needs_torch(task: Any) -> bool:
    """Whether the task's model is a torch module: only such tasks have a loss or an optimizer."""
    return getattr(task, "loss", None) is not None or getattr(task, "optimizer", None) is not None


def task_worker(
    task: Any,
    job: TrainingJob,
    plan: FunctionPlan | None,
    place: Place,
    *,
    store: Store | None,
    wire: Store,
    check: Callable[[], None],
    now_s: Callable[[], float] = time.monotonic,
) -> PlaceWorker:
    """As `build_place_worker`, for a loaded task. Without a plan the worker holds the whole model and is alone.

    Without `store`, datasets are those of the platform on this machine. Raises InvalidRequest, StorageError, and
    whatever the user's code raises.
    """
    from springtide.runtime.functions.data_parallel.worker import ReplicaWorker

    check_task(task)
    make_model: Callable[[], Model]
    if needs_torch(task):
        from springtide.runtime.functions.pipeline.task_parts import task_parts
        from springtide.runtime.functions.pipeline.worker import PipelineWorker
        from springtide.runtime.models.torch_model import torch_models

        parts = task_parts(task, job.seed, params=job.params, store=store)
        if parts.layers:
            plan = plan or _alone(len(parts.layers))
            return PipelineWorker(parts=parts, job=job, plan=plan, place=place, wire=wire, check=check, now_s=now_s)
        make_model, samples = torch_models(task, parts, job.params), parts.samples
    else:
        make_model = partial(model_of, task, job.params)
        samples = array_samples(dataset_of(task, job.params), store)
    return ReplicaWorker(
        make_model=make_model,
        samples=samples,
        job=job,
        plan=plan or _alone(1),
        place=place,
        check=check,
        now_s=now_s,
    )


def _alone(num_layers: int) -> FunctionPlan:
    stage = FunctionStage(first_layer=0, end_layer=num_layers, memory_mb=1024)
    return FunctionPlan(stages=(stage,), micro_batch_size=_LARGEST_PASS)


@contextmanager
def _spilled(source: UserSource, plan: FunctionPlan, place: Place) -> Iterator[None]:
    """While a model is built, keep what exceeds the function's memory in files: only this stage's part must fit."""
    from springtide.runtime.functions.spilling import kept_bytes, spilled

    memory_mb = plan.stages[place.stage].memory_mb
    with spilled(source.root.parent / "spilled", kept_bytes(memory_mb)):
        yield


def imports_torch(root: Path) -> bool:
    """Whether the user's files import torch, so that importing them may already build a model."""
    return any(_IMPORTS_TORCH.search(path.read_bytes()) is not None for path in sorted(root.rglob("*.py")))
