"""The ranks that torchrun has started for an adopted script: they divide its batches as the platform's workers do.

There is no platform then: a rank that is lost ends the run, as it would with DistributedDataParallel.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.elastic.steps.method import Reduced
from springtide.runtime.models.named_tensors import TrainingState


class TorchrunRanks:
    """This process's place among the ranks, and the sums over them, by the process group of the script."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    @classmethod
    def joined(cls) -> TorchrunRanks | None:
        """The ranks of this run, in the script's group or in one that is made here; None for a process alone."""
        if not dist.is_available():
            return None
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) < 2:
                return None
            dist.init_process_group()
        return cls() if dist.get_world_size() > 1 else None

    def copy_first(self, state: TrainingState) -> None:
        """Give all ranks the model of the first one, as DistributedDataParallel does."""
        with torch.no_grad():
            for tensor in state.model_tensors().values():
                dist.broadcast(tensor, 0)

    def part_of(self, batch: GlobalBatch) -> GlobalBatch:
        """This rank's part of a batch. A rank that has none computes on that of the first one, for nothing."""
        low, high = batch.shard_bounds(self.rank, self.world_size)
        if low == high:
            low, high = batch.shard_bounds(0, self.world_size)
        return replace(batch, ids=batch.ids[low:high], global_batch_size=0)

    def summed(self, reduced: Reduced, state: TrainingState, batch: GlobalBatch) -> Reduced:
        """The outcome of a step over all ranks, of this rank's own; gradients and buffers of `state` are, too.

        Gradients are means over a rank's part of the batch, and become means over the batch.
        """
        low, high = batch.shard_bounds(self.rank, self.world_size)
        part = (high - low) / len(batch.ids)
        parameters = list(state.parameters.values())
        own = [reduced.loss * part, reduced.flags.weight] if part else [0.0, 0.0]
        has = [float(part > 0.0 and parameter.grad is not None) for parameter in parameters]
        totals = torch.tensor([*own, *has], dtype=torch.float64, device=state.device)
        dist.all_reduce(totals)
        loss, weight, *counts = totals.tolist()
        works = []
        with torch.no_grad():
            for parameter, count in zip(parameters, counts, strict=True):
                if not count:
                    parameter.grad = None
                    continue
                if parameter.grad is None or not part:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(dist.all_reduce(parameter.grad.mul_(part), async_op=True))
            # As DistributedDataParallel has it, statistics of batches are those of the first rank.
            works += [dist.broadcast(buffer, 0, async_op=True) for buffer in state.buffers().values()]
        for work in works:
            work.wait()
        return replace(reduced, loss=loss, flags=replace(reduced.flags, weight=weight))
