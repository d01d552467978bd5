"""A group of real connections: operations end, well or not."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from kits.runtime.strangers import GroupMember, stranger, tell_all, wait_held
from springtide.core.errors import PeerLost
from springtide.runtime.elastic.group import Group

CPU = torch.device("cpu")


class HungWork:
    """Named double of an operation that missed the end of its peer: it never completes."""

    def __init__(self):
        self.waits = threading.Semaphore(0)

    def is_completed(self):
        return False

    def wait(self, timeout):
        self.waits.release()
        threading.Event().wait(min(timeout.total_seconds(), 0.01))
        raise RuntimeError("Operation timed out!")


class HungGroup:
    """Named double of a process group whose broadcast hangs."""

    def __init__(self):
        self.work = HungWork()

    def broadcast(self, tensors, options):
        return self.work


def test_an_abort_ends_an_operation_that_misses_the_shutdown_of_its_sockets():
    group = Group(c10d.HashStore(), 0, 1, CPU, timeout_s=3600.0)
    group.world_size, group._process_group = 2, HungGroup()

    def abort():
        group._process_group.work.waits.acquire()
        group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(PeerLost):
        group.broadcast(torch.zeros(1), 0)
    thread.join()


def form_pair():
    store = c10d.HashStore()
    groups = [None, None]

    def connect(rank):
        groups[rank] = Group(store, rank, 2, CPU, timeout_s=60.0)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


@pytest.mark.parametrize("num_elements", [3, 1 << 19])
def test_a_gather_holds_every_members_part_in_order(num_elements):
    groups = form_pair()
    outputs = [torch.zeros(2 * num_elements) for _ in groups]

    def gather(rank):
        groups[rank].all_gather(outputs[rank], torch.full((num_elements,), float(rank + 1)))

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    expected = torch.tensor([1.0, 2.0]).repeat_interleave(num_elements)
    assert all(torch.equal(output, expected) for output in outputs)


def test_a_broadcast_arrives_and_a_leaving_peer_ends_the_next_one():
    first, second = form_pair()
    told = []

    def receive():
        tensor = torch.zeros(3)
        second.broadcast(tensor, 0)
        told.append(tensor.tolist())
        second.close()

    thread = threading.Thread(target=receive)
    thread.start()
    first.broadcast(torch.ones(3), 0)
    with pytest.raises(PeerLost):
        first.receive(torch.zeros(3), 1)
    thread.join()
    assert told == [[1.0, 1.0, 1.0]]
    first.close()
    with pytest.raises(PeerLost, match="left"):
        first.broadcast(torch.ones(3), 0)


@contextlib.contextmanager
def members(rendezvous, *, size=3, key=""):
    """Processes with few descriptors, each at an address of its own, where no other process listens."""
    hosts = [f"127.91.{rank}.7" for rank in range(1, size + 1)]
    made = [GroupMember(rendezvous, rank, size, host, key=key) for rank, host in enumerate(hosts)]
    try:
        for member in made:
            member.wait_ready()
        yield made
    finally:
        for member in made:
            member.close()


# One at a time: they use the same addresses, and strangers connect to all that listens there.
@pytest.mark.xdist_group("strangers")
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_strangers_reach_no_member_of_a_group_that_has_formed(tmp_path):
    with stranger() as outsider, members(f"file://{tmp_path}") as group:
        for generation in (1, 2):
            assert tell_all(group, f"form {generation}") == ["formed"] * 3
            assert tell_all(group, "gather") == ["True"] * 3
            # The sockets of the group before it are closed in the background.
            ports = [member.wait_listening_port() for member in group]
            held = wait_held(group)
            for member, port in zip(group, ports, strict=True):
                assert outsider.ask(f"{member.host}:{port}") == "0"
            assert tell_all(group, "gather") == ["True"] * 3
            wait_held(group, held)
        # What else listens in the process answers every connection.
        assert group[0].ask("serve") == "serves"
        with socket.create_connection((group[0].host, group[0].own_port), timeout=60.0) as link:
            assert link.recv(64) == b"hello"


@pytest.mark.xdist_group("strangers")
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_strangers_who_connect_while_a_group_forms_do_not_end_its_members(tmp_path):
    with stranger(count=200) as outsider, members(f"file://{tmp_path}", size=2) as group:
        for member in group:
            outsider.ask(f"{member.host}:1")
        assert tell_all(group, "form 0") == ["formed"] * 2
        held, reached = wait_held(group), []
        for generation in range(1, 6):
            # It connects to all that comes to listen there, as soon as it does.
            outsider.tell(f"{group[generation % 2].host}:*")
            assert tell_all(group, f"form {generation}") == ["formed"] * 2
            assert tell_all(group, "gather") == ["True"] * 2
            outsider.tell("")
            reached.append(int(outsider.answer()))
        assert any(reached)
        # Descriptors that it got are closed with the group that it got them from.
        assert tell_all(group, "form 6") == ["formed"] * 2
        wait_held(group, held)


@pytest.mark.xdist_group("strangers")
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_strangers_at_the_meeting_place_hinder_no_group(tmp_path):
    # At a host of its own that no member is reached at, so that its port is the one port there.
    place = "127.91.9.7:29477"
    with stranger(greeting=b"\0" * 48) as outsider, stranger() as silent, members(f"tcp://{place}", key="k") as group:
        # Before there is a place, while its members come, and after.
        assert silent.ask(place) == "0"
        silent.tell(f"{place.partition(':')[0]}:*")
        assert tell_all(group, "form 1") == ["formed"] * 3
        silent.tell("")
        assert silent.answer() in "01"
        held = wait_held(group)
        for process in (outsider, silent):
            process.tell(place)
        assert tell_all(group, "gather") == ["True"] * 3
        for process in (outsider, silent):
            process.answer()
            process.tell("")
        wait_held(group, held)
        assert tell_all(group, "form 2") == ["formed"] * 3
        assert tell_all(group, "gather") == ["True"] * 3
