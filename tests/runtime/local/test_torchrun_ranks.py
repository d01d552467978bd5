"""Ranks of torchrun that train together without the platform, as one process does alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from springtide.runtime.data.shards import GlobalBatch
from springtide.runtime.local import torchrun_ranks
from springtide.runtime.local.torchrun_ranks import TorchrunRanks

# Parts of unequal size and weight, in passes of few samples, with a parameter that only one rank's samples use, and one
# that none do. The ranks begin with other weights than the first one's.
PROGRAM = """
import json, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import springtide

rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.seldom, self.never = (torch.nn.Linear(4, 1) for _ in range(3))

    def forward(self, x, marks):
        y = self.always(x)
        return y + self.seldom(x) if 7 in marks else y

torch.manual_seed(rank)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.05, weight_decay=0.1)
x = torch.randn(34, 4, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, torch.arange(34))
loader = DataLoader(data, 18 // world_size, shuffle=True)
job = springtide.adopt(model, optimizer, micro_batch=4)
for epoch in job.epochs(3):
    for x, marks in job.batches(loader):
        used = marks % 5 > 0
        loss = ((model(x, marks)[:, 0] - 1) * used).square().sum() / used.sum()
        job.step(loss, weight=used.sum())
told = {"loss": job.loss, "steps": job.step_number, "leads": job.is_leader, "workers": job.num_workers,
        **{name: value.flatten().tolist() for name, value in model.state_dict().items()}}
with open(f"told-{rank}-of-{world_size}", "w") as file:
    json.dump(told, file)
"""


def told_by(tmp_path, num_ranks):
    (tmp_path / "train.py").write_text(PROGRAM)
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks > 1 else []
    )
    done = subprocess.run(
        [sys.executable, *launch, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"told-{rank}-of-{num_ranks}").read_text()) for rank in range(num_ranks)]


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path):
    (alone,) = told_by(tmp_path, 1)
    first, second = told_by(tmp_path, 2)
    assert (alone["leads"], first["leads"], second["leads"]) == (True, True, False)
    assert (alone["workers"], first["workers"], alone["steps"], first["steps"]) == (1, 2, 6, 6)
    for name in ("loss", "always.weight", "seldom.weight", "never.weight"):
        assert first[name] == second[name]
        assert first[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6)


@pytest.fixture
def as_rank(monkeypatch):
    def make(rank, world_size, *, is_initialized=True):
        begun = []
        double = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: is_initialized,
            init_process_group=lambda: begun.append(True),
            get_rank=lambda: rank,
            get_world_size=lambda: world_size,
        )
        monkeypatch.setattr(torchrun_ranks, "dist", double)
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        return TorchrunRanks.joined(), begun

    return make


def test_a_process_that_is_alone_has_no_ranks(as_rank):
    assert as_rank(0, 1) == (None, [])
    assert as_rank(0, 1, is_initialized=False) == (None, [])


def test_a_group_is_made_where_the_script_has_none(as_rank):
    ranks, begun = as_rank(1, 3, is_initialized=False)
    assert ((ranks.rank, ranks.world_size), begun) == ((1, 3), [True])
    assert as_rank(1, 3)[1] == []


@pytest.mark.parametrize("num_samples", [1, 5, 17, 18])
def test_the_ranks_parts_are_the_batch(as_rank, num_samples):
    batch = GlobalBatch(step=3, epoch=0, ids=np.arange(100, 100 + num_samples), global_batch_size=18)
    found = set()
    for rank in range(3):
        part = as_rank(rank, 3)[0].part_of(batch)
        # None is without samples, even if they then count for nothing.
        assert len(part.ids) > 0
        assert (part.step, part.epoch) == (3, 0)
        found |= set(part.ids.tolist())
    assert found == set(batch.ids.tolist())
