"""Measured steps of a training function: the object that replaces the trainer behind the function's TrainContext.

It wraps the model in DistributedDataParallel without changing the user's code, so any training function works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.shards import GlobalBatch, SampleOrder, permutation, seed_everything
from springtide.runtime.elastic.evaluation import Compute, PartScores
from springtide.runtime.elastic.steps.gradients import clip_gradients
from springtide.runtime.process.exits import WorkerExit
from springtide.runtime.profiling.exchange import DeviceTimer, MeasuredExchange
from springtide.runtime.profiling.step_profiling import MARK, ProfiledIteration

# plain: without data parallelism, to find the parameters that get a gradient. apart: buckets are exchanged one by one
# after the backward pass, so that exchange and computation do not affect each other. overlapped: as in real training.
# operators: under torch's profiler.
Mode = Literal["plain", "apart", "overlapped", "operators"]


class MeasuredTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: its mode, its name in the results ("" for a warm-up), and a progress line ("": none)."""

    mode: Mode
    local_batch_size: int
    name: str = ""
    progress: str = ""


class _Whole(nn.Module):
    """The module that DistributedDataParallel wraps: the model with its original forward method."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward: Callable[..., Any] = model.forward

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._forward(*arguments, **keywords)


class ProfiledSteps:
    """A ShardTrainer that yields one batch for each turn and times what the function does with it."""

    def __init__(
        self,
        turns: list[MeasuredTurn],
        exchange: MeasuredExchange,
        rank: int,
        device: torch.device,
        seed: int,
        on_progress: Callable[[str], None],
    ) -> None:
        self.step = 0
        self.epoch = 0
        self.rank = rank
        self.metrics: dict[str, float] = {}
        self.loss: float | None = None
        self.num_unused = 0
        self.num_samples = 0
        self.iterations: dict[str, list[ProfiledIteration]] = {turn.name: [] for turn in turns if turn.name}
        self.profiles: list[torch.profiler.profile] = []
        self._turns = turns
        self._exchange = exchange
        self._device = device
        self.seed = seed
        # A profile has batches of its own sizes.
        self.global_batch_size = 0
        self._on_progress = on_progress
        self._watch = DeviceTimer(device)
        self._is_parallel = False
        self._buckets: list[torch.Tensor] = []
        self._ready: list[Any] = []
        self._begun: list[Any] = []
        self._ended: dict[int, Any] = {}
        self._mark: record_function | None = None
        self._profile: torch.profiler.profile | None = None
        self._pending: tuple[Any, Any, list[float]] | None = None

    @property
    def world_size(self) -> int:
        return self._exchange.num_members

    @property
    def num_iterations(self) -> int:
        """The number of iterations of the whole profile."""
        return len(self._turns)

    @property
    def progress(self) -> float:
        """Completed steps."""
        return float(self.step)

    def attach(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Sequence[Any] = (),
        micro_batch: int = 0,
    ) -> None:
        """Take over the model. Raises InvalidRequest for several optimizers."""
        if len(optimizers) > 1:
            raise InvalidRequest("a profile is of a function with one optimizer; leave it out for this one")
        # Schedulers and the like are the function's own here: nothing is moved or stored, and no pass is cut.
        self._model = model
        (self._optimizer,) = optimizers

    def start(self, num_samples: int, order: SampleOrder | None = None) -> None:
        """Set the dataset's length. Raises InvalidRequest if it has no batch for every worker."""
        needed = self._exchange.num_members * max(turn.local_batch_size for turn in self._turns)
        if num_samples < needed:
            raise InvalidRequest(
                f"the dataset has {num_samples} samples and the batch takes {needed}; ask for a smaller --batch"
            )
        self.num_samples = num_samples
        self._order = permutation(num_samples, self.seed, 0)

    # A profile ends within its first pass.
    num_passes = 0

    def set_epochs(self, num_epochs: int | None) -> int:
        """How many epochs there are."""
        return num_epochs or 1

    def take_batch_size(self, size: int) -> bool:
        """False: a profile is of a training function."""
        return False

    def end_step(self) -> None:
        """Nothing is to be done."""

    def next_shard(self) -> tuple[GlobalBatch, int, tuple[int, int]]:
        """The samples of the next iteration, equally many on every worker. Raises WorkerExit after the last one."""
        self._close_iteration()
        if self.step == len(self._turns):
            self._exchange.barrier()
            raise WorkerExit(0)
        turn = self._turns[self.step]
        if turn.progress:
            self._on_progress(turn.progress)
        seed_everything(self.seed, self.step, self.rank)
        self._exchange.barrier()
        self._buckets, self._ready, self._begun, self._ended = [], [], [], {}
        if turn.mode == "operators":
            self._start_profiler()
        self._begin = self._watch.now()
        return self._part(self.step)

    def parts_ahead(self, part: int) -> Iterator[tuple[GlobalBatch, int, tuple[int, int]]]:
        """What `next_shard` will return, from the current iteration on."""
        return (self._part(step) for step in range(self.step, len(self._turns)))

    def _part(self, step: int) -> tuple[GlobalBatch, int, tuple[int, int]]:
        size, num_members = self._turns[step].local_batch_size, self._exchange.num_members
        first = step * size * num_members
        ids = np.take(self._order, range(first, first + size * num_members), mode="wrap")
        return GlobalBatch(step=step, epoch=0, ids=ids), self.rank, (self.rank * size, (self.rank + 1) * size)

    def evaluate(self, name: str, num_parts: int, compute: Compute) -> list[PartScores]:
        """The scores of the first part alone: an evaluation is no part of what is measured."""
        return [scores for _, scores in compute(iter((0,)))]

    def backward(self, loss: torch.Tensor, place: int = 0, weight: float | None = None) -> None:
        """Run and time the backward pass and the exchange in the turn's mode, whatever the loss counts for."""
        mode = self._turns[self.step].mode
        self.loss = float(loss.detach())
        forwarded = self._watch.now()
        self._enter("backward")
        torch.autograd.backward(loss)
        backwarded = self._watch.now()
        self._enter(None)
        exchange_s = self._exchange_buckets() if self._buckets and mode != "overlapped" else []
        self._updating = self._watch.now()
        self._enter("update")
        # The iteration ends when the function asks for the next batch, because its loop may do more after ctx.step().
        self._pending = (forwarded, backwarded, exchange_s)

    def leave_loop(self) -> None:
        """Nothing is to be done."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the gradients; returns the norm that they had."""
        return clip_gradients(list(self._model.parameters()), max_norm, None)

    def update(self) -> bool:
        """Take the optimizer's step."""
        self._optimizer.step()
        if self._turns[self.step].mode == "plain":
            self._parallelise()
        self._optimizer.zero_grad()
        return True

    def _close_iteration(self) -> None:
        if self._pending is None:
            return
        ended = self._watch.now()
        self._enter(None)
        self._stop_profiler()
        turn = self._turns[self.step]
        forwarded, backwarded, exchange_s = self._pending
        self._pending = None
        self.step += 1
        if turn.mode != "plain" and not self._ready:
            raise InvalidRequest(
                "no gradient passed through the model: call the model that ctx.prepare() returns (model(batch.x), not "
                "one of its parts) and hand the loss to ctx.step()"
            )
        if not turn.name:
            return
        since = self._watch.seconds
        if turn.mode == "overlapped":
            exchange_s = [since(begun, self._ended[place]) for place, begun in enumerate(self._begun)]
        self.iterations[turn.name].append(
            ProfiledIteration(
                forward_s=since(self._begin, forwarded),
                backward_s=since(forwarded, backwarded),
                update_s=since(self._updating, ended),
                total_s=since(self._begin, ended),
                ready_s=[since(self._begin, moment) for moment in self._ready],
                exchange_s=exchange_s,
                bucket_bytes=[bucket.numel() * bucket.element_size() for bucket in self._buckets],
            )
        )

    def _parallelise(self) -> None:
        """Route the forward method of the user's model through DistributedDataParallel; the object stays the same."""
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self.num_unused = sum(parameter.grad is None for parameter in parameters)
        if self.num_unused == len(parameters):
            raise InvalidRequest("no parameter of the model got a gradient; does the loss come from the model?")
        self._optimizer.zero_grad()
        wrapped = DistributedDataParallel(
            _Whole(self._model),
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.num_unused > 0,
        )
        # A lambda, because the wrapper rejects hooks with string annotations.
        wrapped.register_comm_hook(None, lambda _, bucket: self._take_bucket(bucket))
        self._model.forward = lambda *arguments, **keywords: wrapped(*arguments, **keywords)

    def _take_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The communication hook, which is called when all gradients of a bucket are ready."""
        place, buffer = len(self._buckets), bucket.buffer()
        self._ready.append(self._watch.now())
        self._buckets.append(buffer)
        with record_function(f"{MARK}bucket"):
            buffer.div_(self._exchange.num_members)
        if self._turns[self.step].mode != "overlapped":
            # A future that holds GPU tensors must be made with their device.
            devices: list[Any] | None = [self._device] if self._device.type == "cuda" else None
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
            done.set_result(buffer)
            return done
        self._begun.append(self._watch.now())

        def ended(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._ended[place] = self._watch.now()
            return future.value()[0]

        return self._exchange.start(buffer).get_future().then(ended)  # type: ignore[no-any-return]

    def _exchange_buckets(self) -> list[float]:
        """Exchange the buckets one by one, each after a barrier, and return the seconds of each.

        The buckets are views of the gradients.
        """
        took_s = []
        for buffer in self._buckets:
            self._exchange.barrier()
            began = self._watch.now()
            self._exchange.all_reduce(buffer)
            took_s.append(self._watch.seconds(began, self._watch.now()))
        return took_s

    def _start_profiler(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self._enter("forward")

    def _stop_profiler(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self.profiles.append(self._profile)
            self._profile = None

    def _enter(self, part: str | None) -> None:
        """In a profiled iteration, mark the end of one part of the step and the start of the next."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if self._profile is not None and part is not None:
            self._mark = record_function(MARK + part)
            self._mark.__enter__()  # type: ignore[no-untyped-call]
