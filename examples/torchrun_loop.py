"""A plain PyTorch data-parallel loop. It knows nothing of Springtide and runs unchanged under both of

torchrun --nproc-per-node 2 examples/torchrun_loop.py
springtide run examples/torchrun_loop.py --workers 2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset(num_samples: int = 2048) -> TensorDataset:
    """Points (n, 8) and a noisy linear function of them (n, 1), the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(num_samples, 8, generator=generator)
    weights = torch.arange(1.0, 9.0).unsqueeze(1)
    return TensorDataset(points, points @ weights + 0.1 * torch.randn(num_samples, 1, generator=generator))


def train(num_epochs: int) -> float:
    """Train in the group that torchrun's variables describe and return the last epoch's mean loss."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(make_dataset())
    loader = DataLoader(make_dataset(), batch_size=64 // world_size, sampler=sampler)
    mean = torch.zeros(())
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        losses = []
        for points, targets in loader:
            loss = nn.functional.mse_loss(model(points), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        mean /= world_size
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {float(mean):.4f} on {world_size} ranks", flush=True)
    return float(mean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.epochs)
    # No rank takes the group down while another still waits in it.
    dist.barrier()
    dist.destroy_process_group()
