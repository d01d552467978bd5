"""Who proves that it knows the key comes in, however many others knock."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kits.runtime.strangers import stranger
from springtide.runtime.elastic import handshake
from springtide.runtime.elastic.handshake import Entrance, prove, receive_exactly

KEY = "a key"


@contextlib.contextmanager
def entrance(**fields):
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    with contextlib.closing(Entrance(listener, **fields)) as made:
        yield made, listener.getsockname()


def admitted(made):
    """The connection that comes in next, on a thread of its own."""
    return ThreadPoolExecutor(1).submit(made.admit, 20.0)


def num_open(links):
    """How many of these connections the other end has not ended."""
    count = 0
    for link in links:
        link.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            try:
                while link.recv(4096):
                    pass
            except BlockingIOError:
                count += 1
    return count


def test_both_sides_prove_the_key_and_then_talk():
    with entrance(key=KEY) as (made, address):
        coming = admitted(made)
        with socket.create_connection(address) as link:
            prove(link, KEY)
            link.sendall(b"hello")
            with coming.result() as inside:
                assert receive_exactly(inside, 5) == b"hello"


def test_another_key_is_refused_on_both_sides():
    with entrance(key=KEY) as (made, address):
        coming = admitted(made)
        with socket.create_connection(address) as link, pytest.raises(OSError, match=r"ended the connection|reset"):
            prove(link, "another key")
        with socket.create_connection(address) as link:
            prove(link, KEY)
            coming.result().close()


def test_who_listens_must_know_the_key_too():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        other, _ = listener.accept()
        with other:
            other.sendall(b"c" * 16 + b"p" * 32)
            with pytest.raises(OSError, match="does not know the key"):
                prove(link, KEY)
            # What it got is of no use: it fits its own challenge alone.
            proof = receive_exactly(other, 48)
    with entrance(key=KEY) as (made, address), socket.create_connection(address) as link:
        link.sendall(proof)
        assert made.admit(0.1) is None
        assert num_open([link]) == 0


def test_who_listens_and_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(handshake, "PROVE_S", 0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as link, pytest.raises(TimeoutError):
        prove(link, KEY)


@pytest.mark.parametrize("said", [b"", b"half", b"GET / HTTP/1.1\r\nHost: a host that has a long name\r\n\r\n"])
def test_the_silent_the_slow_and_the_lost_are_sent_away_and_others_do_not_wait_for_them(said, monkeypatch):
    monkeypatch.setattr(handshake, "PROVE_S", 0.3)
    with entrance(key=KEY, max_waiting=4) as (made, address):
        strangers = [socket.create_connection(address) for _ in range(50)]
        for link in strangers:
            with contextlib.suppress(OSError):
                link.sendall(said)
        coming = admitted(made)
        with socket.create_connection(address) as link:
            prove(link, KEY)
            coming.result().close()
        assert num_open(strangers) <= 4
        assert made.admit(0.35) is None
        assert num_open(strangers) == 0
        for link in strangers:
            link.close()


def test_a_token_is_enough_where_there_is_no_key():
    with entrance(token=b"t" * 32) as (made, address):
        wrong, link = (socket.create_connection(address) for _ in range(2))
        wrong.sendall(b"u" * 32)
        link.sendall(b"t" * 16)
        assert made.admit(0.05) is None
        link.sendall(b"t" * 16 + b"more")
        inside = made.admit(20.0)
        assert receive_exactly(inside, 4) == b"more"
        assert num_open([wrong]) == 0
        for each in (wrong, link, inside):
            each.close()


def test_where_nothing_is_asked_for_whoever_comes_is_let_in():
    with entrance() as (made, address), socket.create_connection(address):
        made.admit(20.0).close()


def test_without_free_descriptors_the_oldest_stranger_makes_room():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with entrance(key=KEY) as (made, address):
        strangers = [socket.create_connection(address) for _ in range(3)]
        link = socket.create_connection(address)
        coming = threading.Event()

        def join():
            prove(link, KEY)
            coming.set()

        # As many as are open already, and two.
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        thread = threading.Thread(target=join)
        thread.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        try:
            inside = made.admit(20.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert inside is not None
        thread.join()
        assert coming.is_set()
        for each in (*strangers, link, inside):
            each.close()


def test_a_listening_socket_that_is_shut_down_ends_the_wait():
    with entrance(key=KEY) as (made, _):
        coming = admitted(made)
        made._listener.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OSError, match="Invalid argument"):
            coming.result()


def test_on_a_socket_of_this_machine_other_accounts_are_sent_away():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(512)
    name = listener.getsockname()
    with contextlib.closing(Entrance(listener, token=b"t" * 4)) as made:
        coming = admitted(made)
        # Also with the right token.
        with stranger(count=300, wait_s=0.1, greeting=b"tttt") as nobody:
            assert nobody.ask(f"unix:{name[1:].decode()}") == "0"
        assert not coming.done()
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(name)
            link.sendall(b"tttt")
            coming.result().close()
