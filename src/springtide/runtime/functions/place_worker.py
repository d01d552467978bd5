"""What fills one place of a job on functions, whatever the model is written with: the protocol, and its builder.

No framework is imported here: a job without torch never loads it.
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

# Samples that a worker which is alone takes through the model at a time.
_LARGEST_PASS = 256
_IMPORTS_TORCH = re.compile(rb"^\s*(?:import|from)\s+torch", re.MULTILINE)


class PlaceWorker(Protocol):
    """The work of one place under one plan: it holds the training state of its part of the model, and its position.

    What interrupts a step leaves the state as it was before it, or as it is after it: `position` says which. `exchange`
    is set by the function that runs it, for the plan in force, and None with one replica.
    """

    position: Position
    exchange: Communicator | None

    @property
    def samples(self) -> Samples:
        """What it trains on."""
        ...

    @property
    def plan(self) -> FunctionPlan:
        """The plan in force."""
        ...

    @property
    def total_steps(self) -> int | None:
        """How many steps the job has; None while that is not known (a stream that is still open)."""
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
        """The samples of a full batch of the next step (of the last one, at the end), over all replicas."""
        ...

    @property
    def gradient_bytes(self) -> int:
        """What this place exchanges in a step."""
        ...

    @property
    def num_exchanged(self) -> int:
        """How many numbers the replicas exchanged in the step before (will exchange, before the first)."""
        ...

    @property
    def samples_needed(self) -> int | None:
        """How many samples of the stream must be there for the next step; None where the job trains on no stream."""
        ...

    def set_available(self, num_samples: int, *, is_closed: bool) -> None:
        """So much of the stream may be used; once it is closed, the rest makes a last, smaller batch. Else no effect.

        All replicas must be told the same before the same step: the size of a last batch follows from it.
        """
        ...

    def sync_prefix(self, prefix: str) -> str:
        """Where the replicas of this stage exchange, in the step whose messages are under `prefix`."""
        ...

    def run_step(self, prefix: str, *, ends_here: bool = False) -> StepOutcome:
        """The next step, its messages under `prefix`. Raises what `check` and the user's code raise; StorageError."""
        ...

    def save_state(self, store: Store, keys: Keys) -> None:
        """Write the state at the present position, the record that makes it count last. Raises StorageError."""
        ...

    def has_state(self, store: Store, keys: Keys, step: int) -> bool:
        """Whether this place's state after `step` steps is saved. Raises StorageError, CheckpointError."""
        ...

    def load_state(self, store: Store, keys: Keys, step: int) -> None:
        """Take the state after `step` (at least 1) steps, and its position. Raises CheckpointError, StorageError."""
        ...

    def set_plan(self, plan: FunctionPlan, place: Place | None = None) -> None:
        """From the next step on work under another plan with the same layers here (and as another replica).

        `exchange` is None afterwards. Raises InvalidRequest where the plan cuts the model in another way.
        """
        ...

    def close(self) -> None:
        """Wait for all threads and let go of open files."""
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
    """Import the user's code anew and build the place as it is before the first step.

    `store` holds datasets, `wire` what travels. `check` is asked about twice a second while the place waits; what it
    raises ends the step. Raises InvalidRequest, and whatever the user's code raises.
    """
    job = source.job
    is_torch = imports_torch(source.root)
    with explain_missing_framework(), ExitStack() as spill:
        if is_torch:
            # The file may build its model while it is imported.
            spill.enter_context(_spilled(source, plan, place))
        # The model must come out the same in every place, and as on a worker of the platform.
        seed_everything(job.seed)
        task = source.load()
        if needs_torch(task) and not is_torch:
            spill.enter_context(_spilled(source, plan, place))
        return task_worker(task, job, plan, place, store=store, wire=wire, check=check, now_s=now_s)


def needs_torch(task: Any) -> bool:
    """Whether what the user declared is torch's: a task with a loss or an optimizer has a torch module."""
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
    """The same for a task that is loaded. Without a plan the worker is alone and has the whole model.

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
    """Of a whole model only this stage's part has to fit: the rest waits in files while it is built."""
    from springtide.runtime.functions.spilling import kept_bytes, spilled

    memory_mb = plan.stages[place.stage].memory_mb
    with spilled(source.root.parent / "spilled", kept_bytes(memory_mb)):
        yield


def imports_torch(root: Path) -> bool:
    """Whether the user's own files import torch: then it may be at work before anything is called."""
    return any(_IMPORTS_TORCH.search(path.read_bytes()) is not None for path in sorted(root.rglob("*.py")))
