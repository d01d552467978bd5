"""`springtide.adopt`: a script with a loop of its own, for torchrun or for one process, becomes elastic in place.

The script believes that it is alone, as rank 0 of a world of one. `adopt` returns the context of training functions,
which divides the batches of its DataLoader among the workers. Without the platform the same context trains alone, or
with the ranks of torchrun.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from springtide.core.context import TrainContext
from springtide.core.errors import InvalidRequest
from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId
from springtide.runtime.elastic.context import ElasticContext
from springtide.runtime.elastic.trainer import Trainer
from springtide.runtime.local.inprocess import script_context
from springtide.runtime.script import run_file
from springtide.runtime.script_reports import REPORTS, report


class Adoption:
    """Where `adopt` finds the context of this process; None before it, where the platform runs no elastic one."""

    def __init__(self) -> None:
        self.context: ElasticContext | None = None


ADOPTION = Adoption()


def adopt(model: Any, optimizer: Any, *objects: Any, micro_batch: int | None = None) -> TrainContext:
    """Make the training of this script elastic; returns the TrainContext that gives it its batches and takes its steps.

    `objects` are what else has a state: schedulers, a GradScaler, an average of the weights, a dict. Several models may
    come first, and then their optimizers. A model may be wrapped with DistributedDataParallel. With `micro_batch` a
    worker takes its part of a batch in passes of at most so many samples. Returns once this worker is a member of a
    running group and has that group's training state. Then:

        for epoch in job.epochs(3):
            for images, labels in job.batches(loader):
                job.step(loss_fn(model(images), labels))

    The `batch_size` of the loader is that of one process: on the platform the whole batch, under torchrun each rank's.
    Call it once, before the loop. Raises InvalidRequest.
    """
    given = [_unwrapped(item) for item in (model, optimizer, *objects)]
    _check(given)
    context = ADOPTION.context
    if context is None:
        if REPORTS.receive is not None:
            sys.stderr.write(
                "springtide: this job is a plain script with a fixed number of workers, because the file that was run "
                "has no call of springtide.adopt() in its text; call it there to have the job resized in place\n"
            )
        context = ADOPTION.context = _own_context()
    if context.is_prepared:
        raise InvalidRequest(
            "springtide.adopt() was called a second time; a script has one training that is elastic: hand over all "
            "models and optimizers in one call, or make each training a script of its own"
        )
    context.prepare(*given, micro_batch=micro_batch)
    return context


def run_adopted(context: ElasticContext, trainer: Trainer, entrypoint: Entrypoint) -> None:
    """Run a script that calls `adopt` to its end, as a worker of an elastic job.

    Raises WorkerExit, what the script raises, and RuntimeError if it has trained nothing.
    """
    ADOPTION.context = context
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK=str(context.device.index or 0),
        LOCAL_WORLD_SIZE="1",
        # A group of one needs a port of its own on each worker of a machine: any that is free.
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    try:
        code = run_file(entrypoint)
    except InvalidRequest as error:
        _say_as_written(error)
        raise
    if code:
        raise RuntimeError(f"the script ended with exit code {code}")
    if not context.is_prepared:
        raise RuntimeError("the script ended without springtide.adopt(), so that nothing was trained; call it")
    if trainer.step == 0:
        raise RuntimeError(
            "the script ended before its first step was complete; loop over job.epochs(N), and in each epoch over all "
            "of job.batches(loader)"
        )


def _say_as_written(error: BaseException) -> None:
    """Have an error of the context name the calls as they are in a script: there is no `ctx` in it."""
    if isinstance(error, InvalidRequest):
        text = re.sub(r"\bctx\.prepare\b(?!\()", "springtide.adopt()", str(error))
        text = text.replace("ctx.prepare(", "springtide.adopt(")
        error.args = (re.sub(r"\bctx\.", "job.", text),)


def _own_context() -> ElasticContext:
    """The context of a script that the platform does not resize."""
    show = sys.excepthook

    def show_as_written(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _say_as_written(error)
        show(kind, error, trace)

    sys.excepthook = show_as_written
    name = Path(sys.argv[0]).stem or "script"
    entrypoint = Entrypoint(source_path=sys.argv[0], kind="script", library="springtide")
    job = TrainingJob(job_id=WorkloadId(name), name=name, entrypoint=entrypoint, exact=False)

    def step_ended(step: int, total: int, loss: float | None, metrics: dict[str, float]) -> None:
        report(step, total, loss=loss, **metrics)

    return script_context(job, (Path("springtide-out") / name).absolute(), step_ended)


def _unwrapped(item: Any) -> Any:
    """The model within a DistributedDataParallel, which from now on leaves gradients and buffers alone."""
    for part in item.modules() if isinstance(item, torch.nn.Module) else ():
        if isinstance(part, DistributedDataParallel):
            # As within its no_sync(): the platform sums the gradients.
            part.require_backward_grad_sync = part.require_forward_param_sync = False
    return item.module if isinstance(item, DistributedDataParallel) else item


def _check(given: list[Any]) -> None:
    if not isinstance(given[0], torch.nn.Module):
        raise InvalidRequest(
            f"springtide.adopt() takes the model first, a torch.nn.Module; it got a {type(given[0]).__name__}"
        )
    models = [item for item in given if isinstance(item, torch.nn.Module)]
    if any(type(part).__name__ == "FullyShardedDataParallel" for model in models for part in model.modules()) or any(
        hasattr(parameter, "device_mesh") for model in models for parameter in model.parameters()
    ):
        raise InvalidRequest(
            "springtide.adopt() got a model that is sharded over devices; hand over a whole one, plain or wrapped with "
            "DistributedDataParallel"
        )
    if not any(isinstance(item, torch.optim.Optimizer) for item in given):
        raise InvalidRequest("springtide.adopt() got no optimizer; make it before, and hand it over after the model")
    for item in given:
        if isinstance(item, type) or not (hasattr(item, "state_dict") or type(item) is dict):
            raise InvalidRequest(
                f"springtide.adopt() takes dicts and objects that have a state_dict(), and no functions that make "
                f"them; it got {item!r:.80}"
            )
