"""The worker of a profile: its groups take no connections from other accounts."""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from springtide.runtime.profiling.exchange import MeasuredExchange
from springtide.runtime.profiling.step_worker import make_default_group


def own_sockets() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in found if name.startswith("socket:")}


def test_the_default_group_opens_no_socket_beside_those_of_the_guarded_exchange() -> None:
    store, device = c10d.HashStore(), torch.device("cpu")
    exchange = MeasuredExchange(store, 0, 1, device, "127.0.0.1")
    before = own_sockets()
    make_default_group(exchange, c10d.PrefixStore("ddp", store), 0, device)
    try:
        assert own_sockets() == before
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()
