"""A group of real connections: operations end, well or not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from kits.runtime.strangers import GroupMember, stranger, tell_all, wait_held
from springtide.core.errors import PeerLost
from springtide.runtime.elastic import group as group_module
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.meeting import MeetingPlace

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


@pytest.mark.slow
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


def gather_all(groups, outputs, num_elements):
    def gather(rank):
        groups[rank].all_gather(outputs[rank], torch.full((num_elements,), float(rank + 1)))

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("num_elements", [3, 1 << 19])
def test_a_gather_holds_every_members_part_in_order(num_elements):
    groups = form_pair()
    outputs = [torch.zeros(2 * num_elements) for _ in groups]
    gather_all(groups, outputs, num_elements)
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


# What rank 1 sends to rank 0 when it connects; the first to send it has its place.
SEQUENCE = (1).to_bytes(8, "little")
HOSTS = ["127.91.1.8", "127.91.2.8"]


def port_of_first(store, host=HOSTS[0]):
    """The port that gloo has published for rank 0: in a C structure, before the host."""
    published = store.get("0/0")
    at = published.index(socket.inet_aton(host))
    return int.from_bytes(published[at - 2 : at], "big")


@contextlib.contextmanager
def expecting(store):
    """A thread in which rank 0 forms a group with a member that has published its address and does not connect.

    Gives the address at which rank 0 listens, and a list for its group or the error.
    """
    ended = []

    def form():
        try:
            ended.append(Group(store, 0, 2, CPU, timeout_s=0.5, listen_host=HOSTS[0]))
        except PeerLost as error:
            ended.append(error)

    thread = threading.Thread(target=form)
    thread.start()
    address = HOSTS[0], port_of_first(store)
    store.set("0/1", store.get("0/0").replace(*map(socket.inet_aton, HOSTS)))
    yield address, ended
    thread.join()


@contextlib.contextmanager
def everything_given_back():
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    yield
    deadline = time.monotonic() + 30
    while (now := held()) > before:
        assert time.monotonic() < deadline, (now, before)
        time.sleep(0.01)


@pytest.mark.slow
def test_a_group_fails_in_which_a_process_of_the_account_took_a_members_place_and_the_next_one_forms():
    with everything_given_back(), socket.socket() as intruder:
        with expecting(c10d.HashStore()) as (address, ended):
            intruder.connect(address)
            intruder.sendall(SEQUENCE)
        (disturbed,) = ended
        with pytest.raises(PeerLost):
            disturbed.all_gather(torch.zeros(2), torch.ones(1))
        disturbed.close()
        groups = form_pair()
        outputs = [torch.zeros(2) for _ in groups]
        gather_all(groups, outputs, 1)
        for group in groups:
            group.close()
        assert [output.tolist() for output in outputs] == [[1.0, 2.0]] * 2


@pytest.mark.slow
def test_an_attempt_that_fails_while_strangers_are_refused_gives_everything_back(monkeypatch):
    monkeypatch.setattr(group_module, "FORM_TIMEOUT_S", 0.3)
    # So that gloo's thread always waits for an answer.
    monkeypatch.setattr(group_module, "is_from_member", lambda link, peers: bool(time.sleep(0.02)))
    with everything_given_back():
        with expecting(c10d.HashStore()) as (address, ended):
            while not ended:
                with socket.socket() as link:
                    link.setblocking(False)
                    link.connect_ex(address)
                time.sleep(0.01)
        assert "could not connect" in str(ended.pop())


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
def test_strangers_who_flood_members_before_while_and_after_a_group_forms_neither_end_nor_hinder_them(tmp_path):
    # They send what takes a member's place, where gloo gets to read it. A thousand are refused one after another, which
    # takes its time where other tests run beside this one.
    with (
        stranger(greeting=SEQUENCE, patience_s=30.0) as outsider,
        members(f"file://{tmp_path}", size=2) as (first, second),
    ):
        group = (first, second)
        outsider.ask(f"{first.host}:1")
        assert tell_all(group, "form 0") == ["formed"] * 2
        held = wait_held(group)
        for generation in (1, 2, 3):
            place = MeetingPlace(tmp_path / f"g{generation}", 60.0)
            # The first one listens, and waits for the second, which has arrived and does not connect yet.
            place.set("here/1", second.host)
            first.tell(f"form {generation}")
            address = f"{first.host}:{port_of_first(place, first.host)}"
            assert outsider.ask(address) == "0"
            # From here on, they connect to all that listens there, again and again.
            outsider.tell(f"{first.host}:*")
            assert second.ask(f"form {generation}") == first.answer() == "formed"
            assert tell_all(group, "gather") == ["True"] * 2
            outsider.ask("")
            assert outsider.ask(address) == "0"
            assert tell_all(group, "gather") == ["True"] * 2
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
