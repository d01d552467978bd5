"""Turns a checkpoint of workers on machines into the state from which functions start, in a process of its own.

The state is one frame of one stage that has all layers, from which the stages of any plan take their part. The model is
built from the job's code, as functions build it, because only it says which tensor belongs to which layer. The chain of
sample ids is computed from the schedule, and compared with the log of the steps that were trained.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

from springtide.core.errors import CheckpointError, InvalidRequest, SpringtideError
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.wire.functions import ConversionOrder, ConversionResult, Keys, Place
from springtide.core.workload import TrainingJob
from springtide.runtime.data.samples import Samples, schedule_of
from springtide.runtime.data.shards import SampleSchedule
from springtide.runtime.elastic.checkpoint import StoredCheckpoint, list_checkpoints, read_checkpoint
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.functions.data_parallel.worker import ReplicaWorker
from springtide.runtime.functions.pipeline.state import StageTraining, take_stored
from springtide.runtime.functions.pipeline.worker import PipelineWorker
from springtide.runtime.functions.place_worker import PlaceWorker, build_place_worker
from springtide.runtime.functions.source import user_source
from springtide.runtime.functions.step import Position
from springtide.runtime.models.torch_model import TorchModel
from springtide.storage.files import write_durable
from springtide.storage.step_lines import is_gap, whole_lines
from springtide.storage.stores.open import open_store

# Of a process that is no function, nothing has to be kept in files.
_MEMORY_MB = 1 << 24


def run_conversion(order: ConversionOrder) -> int:
    """Convert as `order` says and write a ConversionResult to its `result_path`; returns the process's exit code."""
    try:
        result = convert_checkpoint(order)
    except Exception as error:
        # User code may raise anything while its model is built: the log has the traceback, the result the sentence.
        traceback.print_exc()
        words = str(error) if isinstance(error, SpringtideError) else f"{type(error).__name__}: {error}"
        result = ConversionResult(error=words or type(error).__name__)
    write_durable(Path(order.result_path), msgspec.json.encode(result))
    return 0 if not result.error else 1


def convert_checkpoint(order: ConversionOrder) -> ConversionResult:
    """Write the newest intact checkpoint in the job's directory as a state of functions, under the keys of the job.

    Raises CheckpointError if there is none, or if it does not fit the model, the optimizer or the samples that
    functions would use; InvalidRequest, StorageError, and whatever the user's code raises.
    """
    keys, work_dir = Keys(order.prefix), Path(order.work_dir)
    stored = _newest(work_dir)
    store = open_store(order.store_url)
    try:
        with user_source(store, keys) as source:
            stage = FunctionStage(first_layer=0, end_layer=order.num_layers, memory_mb=_MEMORY_MB)
            plan = FunctionPlan(stages=(stage,))
            worker = build_place_worker(source, plan, Place(0, 0), store=store, wire=store, check=lambda: None)
            try:
                position = position_of(source.job, worker.samples, stored.cursor, work_dir / "steps.jsonl")
                _take(worker, stored)
                worker.position = position
                worker.save_state(store, keys)
            finally:
                worker.close()
    finally:
        store.close()
    return ConversionResult(step=position.step, ids_digest=position.ids_digest)


def _newest(work_dir: Path) -> StoredCheckpoint:
    """The newest checkpoint that is intact, as workers that start again would take. Raises CheckpointError."""
    problems: list[str] = []
    for path in list_checkpoints(work_dir):
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(f"no checkpoint can be read: {problems[0] if problems else 'there is none'}")


def position_of(job: TrainingJob, samples: Samples, cursor: Cursor, log: Path) -> Position:
    """The position of functions after the steps of a cursor of machines, with the digest of the ids of their samples.

    Raises CheckpointError if the schedule of functions has other samples in these steps than were trained.
    """
    schedule = schedule_of(job, samples)
    if not isinstance(schedule, SampleSchedule):
        raise InvalidRequest(f"it trains on the stream {samples.stream!r}, which machines do not")
    step = cursor.step
    if step > schedule.total_steps:
        raise CheckpointError(f"the checkpoint is of step {step}, and there are {schedule.total_steps} steps")
    num_seen = schedule.num_seen(step)
    if cursor.num_seen not in (None, num_seen) or cursor.num_updates:
        raise CheckpointError(
            f"after {step} steps {cursor.num_seen} samples were used on machines, and on functions it would be "
            f"{num_seen}: the size of its batch, or its data, has changed"
        )
    trained = _trained_ids(log)
    digest = ""
    for index in range(step):
        own = schedule.batch(index).ids_digest
        if trained.get(index + 1, own) != own:
            raise CheckpointError(f"step {index + 1} was trained on other samples than functions would have used")
        digest = hashlib.sha256((digest + own).encode()).hexdigest()[:16]
    return Position(step, num_seen, digest)


def _trained_ids(log: Path) -> dict[int, str]:
    """By step, the digest of its sample ids, as far as the log of steps has it; of a replayed step the last one."""
    try:
        data = log.read_bytes()
    except FileNotFoundError:
        return {}
    found: dict[int, str] = {}
    for step, line in whole_lines(data):
        record = json.loads(line)
        if not is_gap(record):
            found[step] = str(record.get("ids_digest", ""))
    return found


def _take(worker: PlaceWorker, stored: StoredCheckpoint) -> None:
    """Restore a checkpoint of machines in a worker of the whole model. Raises CheckpointError, InvalidRequest."""
    if stored.values.get("objects"):
        raise CheckpointError("it has prepared objects, like a scheduler of its learning rate, which functions lack")
    model, training = _training_of(worker)
    take_stored(training, model, stored.values, stored.model, stored.optimizer)


def _training_of(worker: Any) -> tuple[torch.nn.Module, StageTraining]:
    if isinstance(worker, PipelineWorker):
        return worker.model, worker.training
    if isinstance(worker, ReplicaWorker) and isinstance(worker.model, TorchModel) and not worker.model.grows:
        return worker.model.module, worker.model.training
    raise InvalidRequest("its model grows with the epoch, or brings its own update: its state is not that of machines")
