"""Steps whose result does not depend on the number of workers: virtual shards, added in one order.

Each shard has a pass of its own, or all of an aligned block of them have one together, if that computes the same bits
(`one_pass.py`). Whether it does is checked: the first passes of each shape are made in both ways, and some later. So
members need not agree on the way, and one that starts anew checks for itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch

from springtide.core.reasons import EXACT_OBSTACLES
from springtide.runtime.data.shards import GlobalBatch, shards_of_rank
from springtide.runtime.elastic.catchup import Lease
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.reduce import Accumulator, Block, aligned_blocks, exchange
from springtide.runtime.elastic.step_vector import StepVector
from springtide.runtime.elastic.steps.method import Feed, Flags, Reduced
from springtide.runtime.elastic.steps.one_pass import OnePass, Pass
from springtide.runtime.elastic.steps.price import PriceMeter
from springtide.runtime.models.named_tensors import TrainingState

# How often passes of one shape are checked at first, since a layer that begins with zeros hides what comes before it;
# and every how many steps they are again.
_NUM_CHECKS = 3
_CHECK_STEPS = 1000
# Of more shapes than these none is checked, nor computed in one pass.
_MAX_SHAPES = 16

# A block's shards one after another, all in one pass, or as a plain loop would have them, to see what that costs.
Way = Literal["shard", "block", "plain"]


@dataclass(frozen=True, slots=True)
class _Task:
    """A pass over these shards; one of a single shard if it is done shard by shard."""

    block: Block
    way: Way


class ShardedSteps:
    """A StepMethod that runs its member's virtual shards, one after another or in blocks."""

    def __init__(
        self,
        state: TrainingState,
        num_shards: int,
        *,
        measures_noise: bool,
        seed: int = 0,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """`num_shards` is a power of two, and at least the number of members. `seed` is the job's.

        What these steps cost beside plain ones is written into `metrics`. Noise is measured from shards' own passes.
        """
        assert num_shards.bit_count() == 1, "the number of virtual shards must be a power of two"
        self._state = state
        self._num_shards = num_shards
        self.payload = StepVector(state, num_shards, measures_noise=measures_noise)
        self._accumulator = Accumulator(self.payload.pool, self.payload.num_summed)
        self._batch: GlobalBatch | None = None
        self._group: Group | None = None
        self._is_measured = False
        self._tasks: list[_Task] = []
        # Whether none of the shards has samples: user code then runs on those of the first one, for nothing.
        self._is_spare = False
        self._has_gradient: list[bool] = []
        self._lease: Lease | None = None
        self._one_pass = OnePass(self.payload.names, self.payload.parameters, seed)
        # Why there is no pass over a block, where one would be possible.
        self.exact_obstacle = "noise" if measures_noise else "device" if state.device.type != "cpu" else ""
        self._obstacle = EXACT_OBSTACLES.get(self.exact_obstacle, "")
        # How often a pass over these shapes had the bits of the shards' own passes.
        self._num_checks: dict[int, int] = {}
        # The vector of a pass over a block that is to be compared with those of its shards.
        self._candidate: tuple[Block, torch.Tensor, int] | None = None
        self._price = PriceMeter(metrics if metrics is not None else {})

    @property
    def obstacle(self) -> str:
        """Why the shards have a pass each; empty if they have one together."""
        return self._obstacle

    @property
    def can_discard(self) -> bool:
        return True

    def warm(self, rank: int, world_size: int, feeds_joiners: bool) -> None:
        self.payload.warm(rank, world_size, feeds_joiners)

    def begin(self, batch: GlobalBatch, group: Group | None, *, is_measured: bool) -> None:
        self._batch, self._group, self._is_measured = batch, group, is_measured
        self._tasks = self._tasks_of(batch, group)
        self._is_spare = not any(high > low for low, high in map(self._bounds, self._tasks))
        self._price.begin_step()
        if self._price.wants_plain and self._is_whole(batch):
            self._tasks.insert(0, _Task(self._blocks(group)[0], "plain"))
        self._accumulator.clear()
        self.payload.begin_step()

    def _blocks(self, group: Group | None) -> list[Block]:
        run = self._run(group)
        return aligned_blocks(run.start, run.stop)

    def _run(self, group: Group | None) -> range:
        rank, world_size = (0, 1) if group is None else (group.rank, group.world_size)
        return shards_of_rank(self._num_shards, rank, world_size)

    def _tasks_of(self, batch: GlobalBatch, group: Group | None) -> list[_Task]:
        if not self._obstacle and self._is_whole(batch):
            return [_Task(block, "block" if block.size > 1 else "shard") for block in self._blocks(group)]
        return [_Task(Block(shard, 1), "shard") for shard in self._run(group)]

    def _is_whole(self, batch: GlobalBatch) -> bool:
        """Whether all shards have samples, and equally many."""
        return len(batch.ids) % self._num_shards == 0 and batch.num_filled(self._num_shards) == self._num_shards

    def parts(self, batch: GlobalBatch, group: Group | None) -> list[tuple[int, tuple[int, int]]]:
        is_present = self._batch is not None and batch.step == self._batch.step and group is self._group
        tasks = self._tasks if is_present else self._tasks_of(batch, group)
        bounds = [(task.block.start, self._bounds(task, batch)) for task in tasks]
        filled = [(number, (low, high)) for number, (low, high) in bounds if high > low]
        return filled or [(self._run(group).start, batch.shard_bounds(0, self._num_shards))]

    def has_part(self) -> bool:
        """Whether a shard with samples is left; shards without samples before it contribute zeros."""
        if self._is_spare:
            return True
        while self._tasks:
            low, high = self._bounds(self._tasks[0])
            if high > low:
                return True
            self._accumulator.add(self._tasks.pop(0).block.start, self.payload.zeros())
        return False

    def begin_part(self) -> tuple[int, tuple[int, int]]:
        # Empty shards before the next filled one keep their place in the order of additions.
        self.has_part()
        self.payload.begin_shard()
        assert self._batch is not None
        task = self._tasks[0]
        if self._is_spare:
            return task.block.start, self._batch.shard_bounds(0, self._num_shards)
        low, high = self._bounds(task)
        if task.way == "block":
            self._one_pass.begin(self._batch.step, task.block, high - low)
        self._price.begin_part()
        return task.block.start, (low, high)

    def backward(
        self, loss: torch.Tensor, root: torch.Tensor | None = None, place: int = 0, weight: float | None = None
    ) -> None:
        root = loss if root is None else root
        now = self._one_pass.end()
        assert self._batch is not None
        if self._is_spare:
            self._is_spare = False
            self.payload.begin_shard()
            return
        task = self._tasks.pop(0)
        low, high = self._bounds(task)
        part = (high - low) / len(self._batch.ids)
        if now is not None:
            if weight is not None:
                now.void("weight", EXACT_OBSTACLES["weight"])
            self._pass_over_block(now, loss, root, part)
            return
        torch.autograd.backward(root * part)
        if task.way == "plain":
            self._price.end_part("plain")
            self.payload.begin_shard()
            return
        given_weight = high - low if weight is None else weight
        vector = self.payload.capture(float(loss.detach()), part, given_weight, is_measured=self._is_measured)
        self._accumulator.add(task.block.start, vector)
        self._price.end_part(task.way)
        self._compare()

    def _pass_over_block(self, now: Pass, loss: torch.Tensor, root: torch.Tensor, part: float) -> None:
        """Run backward for a block: its vector counts, or its shards come anew, each with a pass of its own."""
        assert self._batch is not None
        block, shapes = now.block, hash(tuple(now.shapes))
        vector = self._vector_of_block(now, loss, root, part / block.size)
        num_checks = self._num_checks.get(shapes, 0)
        is_known = num_checks >= _NUM_CHECKS and self._batch.step % _CHECK_STEPS
        if vector is not None and is_known:
            # A block of a member's run is never the right half of a larger one.
            self._accumulator.blocks.append((block, vector))
            self._price.end_part("block")
            return
        self._price.drop_step()
        self.payload.begin_shard()
        self._tasks[:0] = [_Task(Block(shard, 1), "shard") for shard in range(block.start, block.start + block.size)]
        if vector is None:
            self._tell_obstacle(now.code, now.reason)
        elif num_checks == 0 and len(self._num_checks) >= _MAX_SHAPES:
            self.payload.pool.give(vector)
            self._tell_obstacle("shapes", f"its inputs have more than {_MAX_SHAPES} shapes")
        else:
            self._candidate = block, vector, shapes

    def _vector_of_block(self, now: Pass, loss: torch.Tensor, root: torch.Tensor, part: float) -> torch.Tensor | None:
        """The sum over a block's shards, each of which is `part` of the batch; None if the pass is void."""
        payload, losses, roots = self.payload, now.of_loss(loss), now.of_loss(root)
        if losses is None or roots is None:
            now.void("loss", "the loss is no sum of mean losses of torch")
        if now.reason:
            return None
        assert losses is not None
        assert roots is not None
        vector = payload.pool.take()
        views = {id(own): view for own, view in zip(payload.parameters, payload.gradient_views(vector), strict=True)}
        for name, layer in now.layers:
            if now.uses[name] == 1 and views[name].dtype == layer.dtype:
                layer.out = views[name]
        try:
            torch.autograd.backward([root * part for root in roots])
        except RuntimeError as error:
            now.void("rule", f"the backward pass cannot be computed shard by shard: {error!s:.200}")
        stray = [name for name, own in zip(payload.names, payload.parameters, strict=True) if own.grad is not None]
        if stray:
            now.void("rule", f"{stray[0]} is used in a way for which there is no rule")
        if payload.has_changed_buffers():
            now.void("buffers", "the pass changes buffers of the model")
        if now.reason:
            payload.pool.give(vector)
            return None
        gradients = [now.leaves(parameter) for parameter in payload.parameters]
        return payload.capture_block(vector, gradients, losses, part, now.num_samples / now.block.size)

    def _compare(self) -> None:
        """Once all shards of a block have had their pass: whether the pass over the block had the same bits."""
        if self._candidate is None or self._accumulator.blocks[-1][0] != self._candidate[0]:
            return
        (_, vector, shapes), self._candidate = self._candidate, None
        different = self.payload.first_difference(self._accumulator.blocks[-1][1], vector)
        self.payload.pool.give(vector)
        if different:
            self._tell_obstacle(
                "mixed", f"samples are mixed: {different} depends on which samples are computed together"
            )
        else:
            self._num_checks[shapes] = self._num_checks.get(shapes, 0) + 1

    def _tell_obstacle(self, code: str, reason: str) -> None:
        """Compute shard by shard from here on."""
        self.exact_obstacle, self._obstacle = code, reason
        blocks = [task.block for task in self._tasks]
        shards = [shard for block in blocks for shard in range(block.start, block.start + block.size)]
        self._tasks = [_Task(Block(shard, 1), "shard") for shard in shards]
        sys.stderr.write(f"springtide: exact={self._num_shards} computes shard by shard, since {reason}\n")

    def exchange(self, step: float, flags: Flags, last_square: float) -> Reduced:
        payload, group = self.payload, self._group
        self._price.begin_rest()
        first = self._accumulator.blocks[0][1]
        if group is None or group.rank == 0:
            payload.set_numbers(first, last_square)
        payload.set_flags(first, ready=flags.ready, needs_sync=flags.needs_sync, preempt=flags.preempt)
        vector = self._reduce()
        self._lease = Lease(vector, payload.pool)
        self._has_gradient = payload.has_gradient(vector)
        payload.apply_buffers(vector)
        payload.attach(vector, self._has_gradient)
        return Reduced(
            loss=payload.loss(vector),
            flags=Flags(*payload.flags(vector), payload.given_weight(vector)),
            has_gradient=self._has_gradient,
            squares=payload.squares(vector) if self._is_measured else None,
            rank0_square=payload.apply_numbers(vector),
        )

    def update(self, factor: float, feed: Feed | None, *, is_skipped: bool = False) -> None:
        lease = self._lease
        assert lease is not None
        if feed is not None:
            self.payload.write_back(lease.vector)
            # Without gradients the optimizers of joiners change nothing.
            feed(lease, [has and not is_skipped for has in self._has_gradient])
        if not is_skipped:
            self._state.update(factor)
        self.payload.detach()
        lease.release()
        self._batch = self._lease = None
        self._price.end_step()

    def rewind(self) -> None:
        raise AssertionError("a step in fixed parts has one update")

    def discard(self) -> None:
        self._one_pass.end()
        self._price.drop_step()
        self._candidate = None
        self._accumulator.clear()
        self.payload.forget_views()
        # Between two steps the buffers are as the last one left them.
        if self._batch is not None:
            self.payload.begin_shard()
        if self._lease is not None:
            self._lease.release()
        self._batch = self._lease = None

    def leave_loop(self) -> None:
        self._one_pass.end()

    def _bounds(self, task: _Task, batch: GlobalBatch | None = None) -> tuple[int, int]:
        batch = batch or self._batch
        assert batch is not None
        low, high = batch.shard_bounds(task.block.start, self._num_shards)
        return low, low + (high - low) * task.block.size

    def _reduce(self) -> torch.Tensor:
        group, blocks, payload = self._group, self._accumulator.blocks, self.payload
        own = [vector for _, vector in blocks]
        # The exchange owns the vectors from here on: after a failure it may still be writing to them.
        blocks.clear()
        if group is None or group.world_size == 1:
            (vector,) = own
            return vector
        runs = [shards_of_rank(self._num_shards, rank, group.world_size) for rank in range(group.world_size)]
        parts = [aligned_blocks(run.start, run.stop) for run in runs]
        return exchange(group, parts, own, payload.num_elements, payload.num_summed, payload.pool)
