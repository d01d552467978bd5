"""New connections to a socket are refused, those it has and other sockets go on."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys

import pytest

from kits.runtime.strangers import stranger
from springtide.runtime.elastic import own_sockets
from springtide.runtime.elastic.own_sockets import (
    connected_sockets,
    is_from_member,
    refuse_connections,
    tells_accounts,
)

SO_LOCK_FILTER = 44


@pytest.fixture(autouse=True)
def nothing_said():
    own_sockets.say_once.cache_clear()


def c_address(listener):
    """What gloo publishes: a `sockaddr`, somewhere between other bytes."""
    host, port = listener.getsockname()[:2]
    family = listener.family.to_bytes(2, sys.byteorder)
    flow = b"\0" * 4 if listener.family is socket.AF_INET6 else b""
    return b"before" + family + port.to_bytes(2, "big") + flow + socket.inet_pton(listener.family, host) + b"after"


def connects_to(listener):
    with socket.socket(listener.family) as link:
        link.settimeout(0.05)
        return link.connect_ex(listener.getsockname()) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_one_listening_socket_is_closed_to_new_connections_and_no_other(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        closed = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    with closed, socket.create_server((host, 0), family=family) as other:
        before = socket.create_connection(closed.getsockname()[:2])
        accepted, _ = closed.accept()
        assert refuse_connections(c_address(closed)) == 1
        assert connects_to(other)
        assert not connects_to(closed)
        before.sendall(b"still there")
        assert accepted.recv(64) == b"still there"
        before.close()
        accepted.close()


def test_where_the_kernel_refuses_filters_that_is_said_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
        for _ in range(2):
            assert refuse_connections(c_address(listener)) == 1
        assert connects_to(listener)
    assert capsys.readouterr().err.count("no socket filter, Operation not permitted") == 1


def test_a_socket_that_is_not_found_is_said(capsys):
    assert refuse_connections(b"") == 0
    assert "gloo's listening socket was not found" in capsys.readouterr().err


def test_connected_sockets_are_told_apart_by_host_and_port():
    with socket.create_server(("127.0.0.6", 0)) as listener:
        address, port = listener.getsockname()
        with socket.create_connection((address, port)) as link:
            assert link.fileno() in connected_sockets()
            assert link.fileno() in connected_sockets(frozenset({address}), port)
            assert link.fileno() not in connected_sockets(frozenset({"127.0.0.7"}), port)
            assert link.fileno() not in connected_sockets(frozenset({address}), port + 1)
            assert listener.fileno() not in connected_sockets()


def accepted_from(listener, link):
    link.connect(listener.getsockname())
    return listener.accept()[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_of_this_account_may_come_from_a_member_while_it_is_open(host):
    assert tells_accounts()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    with listener, socket.socket(family) as link, accepted_from(listener, link) as accepted:
        assert is_from_member(accepted)
        # Hosts of members are asked for on other machines only.
        assert is_from_member(accepted, frozenset({"192.0.2.1"}))
        link.close()
        # Sockets that no process holds count as root's.
        assert not is_from_member(accepted)


def test_a_connection_of_another_account_comes_from_no_member():
    with stranger(1, wait_s=0) as outsider, socket.create_server(("127.0.0.1", 0)) as listener:
        outsider.ask(f"127.0.0.1:{listener.getsockname()[1]}")
        with listener.accept()[0] as accepted:
            assert not is_from_member(accepted)


class LinkFromAfar:
    """Named double of a connection from another machine: no socket of this one is at its other end."""

    def getpeername(self):
        return "::ffff:192.0.2.1", 40000, 0, 0

    def getsockname(self):
        return "::ffff:192.0.2.9", 50000, 0, 0


def test_a_connection_from_another_machine_comes_from_the_host_of_a_member():
    assert is_from_member(LinkFromAfar())
    assert is_from_member(LinkFromAfar(), frozenset({"192.0.2.1", "192.0.2.9"}))
    assert not is_from_member(LinkFromAfar(), frozenset({"192.0.2.2", "192.0.2.9"}))


def test_the_limit_of_descriptors_is_raised_as_far_as_it_may_be():
    lines = "import resource\nfrom springtide.runtime.elastic import own_sockets\n"
    lines += "own_sockets.raise_descriptor_limit()\nprint(resource.getrlimit(resource.RLIMIT_NOFILE))"
    ran = subprocess.run(
        [sys.executable, "-c", lines],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512)),
    )
    assert ran.stdout.strip() == "(512, 512)"
