"""The group of a measurement: only its members are connected."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from springtide.runtime.elastic import group as group_module
from springtide.runtime.elastic.own_sockets import tells_accounts
from springtide.runtime.profiling.exchange import MeasuredExchange


@pytest.mark.skipif(not tells_accounts(), reason="the kernel does not tell accounts, so accepts are not guarded")
def test_strangers_are_refused_while_the_members_connect_and_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: list[str] = []
    refused: list[int] = []
    is_from_member, refuse = group_module.is_from_member, group_module.refuse_connections

    def look(link: object, peers: frozenset[str]) -> bool:
        guarded.append(threading.current_thread().name)
        assert peers == {"127.0.0.1"}
        return is_from_member(link, peers)

    monkeypatch.setattr(group_module, "is_from_member", look)
    monkeypatch.setattr(group_module, "refuse_connections", lambda at: refused.append(refuse(at)))
    store = c10d.HashStore()
    with ThreadPoolExecutor(2) as threads:
        members = list(
            threads.map(lambda rank: MeasuredExchange(store, rank, 2, torch.device("cpu"), "127.0.0.1"), range(2))
        )
        assert guarded == ["springtide-accepts"], "one of the two has accepted the other's connection"
        assert refused == [1, 1], "the socket of each takes no more connections"
        assert list(threads.map(lambda member: member.maximum([member.num_members]), members)) == [[2.0]] * 2
