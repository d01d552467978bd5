"""Groups of gloo whose members are threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from springtide.runtime.elastic.group import Group


@pytest.fixture
def together():
    """A function that runs `act(group)` on so many ranks at once, and returns what each returned or raised."""
    groups = []

    def run(world_size, act):
        store, barrier = c10d.HashStore(), threading.Barrier(world_size)

        def on_rank(rank):
            group = Group(store, rank, world_size, torch.device("cpu"), timeout_s=60.0)
            groups.append(group)
            barrier.wait(60.0)
            try:
                return act(group)
            except Exception as error:
                return error

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(on_rank, range(world_size)))

    yield run
    for group in groups:
        group.close()
