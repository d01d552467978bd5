"""Groups whose members share no machine: they meet at the first one's, and reach each other where they say."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest
import torch

from springtide.core.errors import PeerLost
from springtide.core.wire.workers import FormGroup
from springtide.core.workload import ReplicaId
from springtide.runtime.elastic import handshake, tcp_meeting
from springtide.runtime.elastic.catchup import connect_stream, listen_for_stream
from springtide.runtime.elastic.group import form_group
from springtide.runtime.elastic.membership import Formation, Membership
from springtide.runtime.elastic.tcp_meeting import MeetingHost, TcpMeeting

CPU = torch.device("cpu")
KEY = "a key"


@pytest.fixture
def rendezvous():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def form_all(rendezvous, hosts):
    def form(rank):
        return form_group(rendezvous, 3, rank, len(hosts), CPU, is_wanted=lambda: True, listen_host=hosts[rank])

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(form, range(len(hosts))))


def test_members_at_addresses_of_their_own_exchange_tensors(rendezvous):
    groups = form_all(rendezvous, ("127.0.0.1", "127.0.0.2", "127.0.0.3"))

    def gather(group):
        output = torch.zeros(3)
        group.all_gather(output, torch.tensor([float(group.rank)]))
        return output.tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(gather, groups)) == [[0.0, 1.0, 2.0]] * 3
    assert not groups[1].has_flag("switched")
    groups[0].set_flag("switched")
    assert groups[1].has_flag("switched")
    for group in groups:
        group.close()


def test_a_connection_to_somebody_else_is_not_the_groups(rendezvous):
    with socket.create_server(("127.0.0.9", 0)) as store, socket.create_server(("127.0.0.9", 0)) as control:
        before = socket.create_connection(store.getsockname())
        made = []

        def form(rank):
            if rank == 0:
                # As if the worker's other connections broke and came back while its group was being formed.
                made.append(socket.create_connection(control.getsockname()))
            hosts = ("127.0.0.1", "127.0.0.2")
            return form_group(rendezvous, 3, rank, 2, CPU, is_wanted=lambda: True, listen_host=hosts[rank])

        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(form, range(2)))
        others = {os.fstat(link.fileno()).st_ino for link in (before, *made)}
        assert all(others.isdisjoint(group._sockets.values()) for group in groups)
        assert all(group._sockets for group in groups)
        for group in groups:
            group.abort()
        accepted = store.accept()[0]
        before.sendall(b"still there")
        assert accepted.recv(64) == b"still there"
        for link in (before, accepted, *made):
            link.close()


def test_a_member_that_hangs_at_the_meeting_place_is_freed_by_an_abort(rendezvous):
    groups = form_all(rendezvous, ("127.0.0.1", "127.0.0.2"))
    waiting = threading.Event()

    def wait():
        waiting.set()
        with pytest.raises(PeerLost, match="meeting place is gone"):
            groups[1].use_store(lambda: groups[1].store.get("never"))
        return True

    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(wait)
        assert waiting.wait(30)
        groups[1].abort()
        assert waited.result(20)
    groups[0].close()
    groups[1].close()


def test_the_meeting_place_ends_with_its_host(rendezvous):
    first, second = form_all(rendezvous, ("127.0.0.1", "127.0.0.2"))
    first.close()
    # The server goes when its threads have been taken down, which nobody waits for.
    pause = threading.Event()

    def ask_until_gone():
        while not second.has_flag("gone"):
            pause.wait(0.01)

    with pytest.raises(PeerLost, match="meeting place is gone"):
        ask_until_gone()
    second.close()


def place_of(rendezvous):
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("key", ["", KEY])
def test_values_are_there_for_all_members(rendezvous, key):
    host = MeetingHost(*place_of(rendezvous), 3, 2, key)
    first, second = (TcpMeeting(*place_of(rendezvous), 3, 5.0, key=key) for _ in range(2))
    assert not first.check(["a", "b"])
    first.set("a", "1")
    second.set("b", b"\0" * 3)
    assert first.check(["a", "b"])
    assert (second.get("a"), first.get("b")) == (b"1", b"\0" * 3)
    first.set("a", "2")
    assert second.get("a") == b"2"
    assert first.delete_key("a")
    assert not second.delete_key("a")
    assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    waits = threading.Timer(0.05, second.set, ("late", "x"))
    waits.start()
    first.wait(["late"])
    waits.join()
    first.set_timeout(timedelta(seconds=0.02))
    with pytest.raises(RuntimeError, match="no member has set never in time"):
        first.get("never")
    with pytest.raises(RuntimeError, match="no member has set b, never in time"):
        second.wait(["b", "never"], timedelta(seconds=0.02))
    host.close()
    host.close()
    with pytest.raises(RuntimeError, match="does not answer"):
        second.check(["b"])


def test_a_meeting_is_of_one_group_and_nobody_waits_for_it_in_vain(rendezvous):
    host = MeetingHost(*place_of(rendezvous), 3, 2)
    with pytest.raises(RuntimeError, match="another group meets"):
        TcpMeeting(*place_of(rendezvous), 4, 5.0)
    with pytest.raises(PeerLost, match="cannot host the meeting"):
        form_group(rendezvous, 3, 0, 2, CPU, is_wanted=lambda: True, listen_host="127.0.0.1")
    host.close()
    asked = []
    with pytest.raises(PeerLost, match="no member hosts the meeting"):
        # Given up at the second look, long before the time is over.
        form_group(rendezvous, 3, 1, 2, CPU, is_wanted=lambda: asked.append(0) or len(asked) < 2)
    assert len(asked) == 2


def test_a_group_of_one_meets_nowhere():
    group = form_group("tcp://192.0.2.1:9", 3, 0, 1, CPU, is_wanted=lambda: True, listen_host="127.0.0.1")
    assert group.world_size == 1
    group.close()


def test_nonsense_ends_one_connection_and_not_the_meeting(rendezvous):
    host = MeetingHost(*place_of(rendezvous), 3, 2)
    member = TcpMeeting(*place_of(rendezvous), 3, 5.0)
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xff"):
        with socket.create_connection(place_of(rendezvous)) as stranger:
            stranger.sendall(nonsense)
            # Either way of being hung up on will do.
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(64) == b""
    member.set("a", "1")
    assert member.get("a") == b"1"
    host.close()


def test_without_the_key_nothing_is_read_or_replaced(rendezvous):
    host = MeetingHost(*place_of(rendezvous), 3, 2, KEY)
    member = TcpMeeting(*place_of(rendezvous), 3, 5.0, key=KEY)
    member.set("a", "1")
    for wrong in ("", "another key"):
        with pytest.raises(RuntimeError, match="no member hosts the meeting"):
            TcpMeeting(*place_of(rendezvous), 3, 0.0, key=wrong)
    with socket.create_connection(place_of(rendezvous)) as stranger:
        body = msgspec.msgpack.encode(("delete", ["a"], b""))
        with contextlib.suppress(OSError):
            stranger.sendall(len(body).to_bytes(4, "big") + body + bytes(64))
            while stranger.recv(64):
                pass
    assert member.get("a") == b"1"
    host.close()


def test_a_group_forms_only_among_those_who_have_its_key(rendezvous):
    hosts = ("127.0.0.1", "127.0.0.2")

    def form(rank, key="the group's", is_wanted=lambda: True):
        return form_group(rendezvous, 3, rank, 2, CPU, is_wanted=is_wanted, listen_host=hosts[rank], key=key)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(form, 0)
        tries = iter([True] * 3)
        with pytest.raises(PeerLost, match="no member hosts the meeting"):
            form(1, "that of the group before", lambda: next(tries, False))
        groups = [form(1), first.result()]
    for group in groups:
        group.close()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", KEY])
def test_connections_that_say_nothing_hold_neither_threads_nor_descriptors(rendezvous, key, monkeypatch):
    monkeypatch.setattr(handshake, "PROVE_S", 0.3)
    monkeypatch.setattr(tcp_meeting, "_REQUEST_S", 0.3)
    host = MeetingHost(*place_of(rendezvous), 3, 2, key)
    member = TcpMeeting(*place_of(rendezvous), 3, 30.0, key=key)
    held = num_held()
    strangers = [socket.create_connection(place_of(rendezvous)) for _ in range(300)]
    late = TcpMeeting(*place_of(rendezvous), 3, 30.0, key=key)
    late.set("late", "1")
    assert member.get("late") == b"1"
    del late
    for link in strangers:
        # All are hung up on.
        with contextlib.suppress(ConnectionResetError):
            while link.recv(64):
                pass
        link.close()
    pause = threading.Event()
    # Threads of tests before this one may end meanwhile.
    while any(now > before for now, before in zip(num_held(), held, strict=True)):
        pause.wait(0.01)
    host.close()


def num_held():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize("host", ["", "127.0.0.4", "::1"])
def test_a_stream_between_two_workers(host):
    try:
        listener, address = listen_for_stream(host)
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    with listener, connect_stream(address, 5.0) as link:
        accepted, _ = listener.accept()
        link.sendall(b"hello")
        assert accepted.recv(64) == b"hello"
        accepted.close()
    assert address.startswith("tcp:" if host else "unix:")


def test_what_is_no_address_of_a_stream_is_refused():
    with pytest.raises(ValueError, match="no address"):
        connect_stream("springtide-0123", 1.0)


def order(generation, *members, forced=False):
    return FormGroup(
        generation=generation,
        members=tuple(ReplicaId(name) for name in members),
        rendezvous="tcp://127.0.0.1:1",
        forced=forced,
    )


def test_who_departs_commits_as_the_newest_generation_that_counts_it_in(monkeypatch):
    monkeypatch.setattr("springtide.runtime.elastic.membership._NEWER_ORDER_WAIT_S", 0.05)
    monkeypatch.setattr(Formation, "_form", lambda self: None)
    membership = Membership(ReplicaId("a"), CPU, "127.0.0.1")
    assert not membership.is_leaving
    membership.adopt(membership.take_formation(order(2, "a", "b")))
    membership.take_departure()
    assert membership.is_leaving
    assert membership.leaving_generation == 2
    # Nobody counts it in: others go on.
    assert membership.await_newer_order(2) is None
    # A planned change leaves those in the old group where they are.
    membership.take_formation(order(3, "a", "b", "c"))
    assert membership.leaving_generation == 2
    membership.take_formation(order(4, "a", forced=True))
    assert membership.leaving_generation == 4
    assert membership.await_newer_order(2) == 4
    membership.take_formation(order(5, "b", forced=True))
    assert membership.await_newer_order(4) is None
    membership.take_preempt(9)
    assert membership.leaving_generation == 9
    assert membership.await_newer_order(8) is None
