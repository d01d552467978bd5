"""The door over TCP: who comes in, from where, how many unidentified at once, and that it can be shut."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from springtide.backends.control_channel import reports
from springtide.backends.control_channel.listener import WorkerListener
from springtide.backends.control_channel.reactor import FramedConnection, Reactor
from springtide.backends.control_channel.reports import Reports
from springtide.backends.sockets import listen_tcp
from springtide.core.errors import BackendError
from springtide.core.wire.workers import FenceOrder, FrameDecoder, Hello, Order, Report, encode_frame


class Place:
    def __init__(self) -> None:
        self.reactor = Reactor()
        self.counts: Counter[str] = Counter()
        self.hosts: list[str] = []
        crew = SimpleNamespace(reactor=self.reactor, counts=self.counts, replicas={})
        self.reports: Reports = Reports(crew, lambda replica: None, lambda: None)  # type: ignore[arg-type]
        self.door = WorkerListener(self.reactor, listen_tcp("127.0.0.1", 0), self.welcome)
        self.thread = threading.Thread(target=self.reactor.run)
        self.reactor.call(self.door.open)
        self.thread.start()

    def welcome(self, stream: socket.socket) -> None:
        connection: FramedConnection[Report] = FramedConnection(
            self.reactor, stream, Report, self.reports.on_message, self.reports.on_close
        )
        self.hosts.append(connection.peer_host)
        self.reports.register(connection)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.door.port), 5.0)

    def close(self) -> None:
        self.reactor.call(self.door.shut)
        self.reactor.call(self.reports.close)
        self.reactor.stop()
        self.thread.join()
        self.reactor.close()
        self.door.close()


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    try:
        yield place
    finally:
        place.close()


def test_a_stranger_with_a_token_that_nobody_gave_is_fenced(place: Place) -> None:
    with place.connect() as stream:
        stream.sendall(encode_frame(Hello(workload_id="job", replica_id="job.0", token="guess", pid=1)))
        stream.settimeout(5.0)
        (order,) = FrameDecoder[Order](Order).feed(stream.recv(1 << 16))
        assert isinstance(order, FenceOrder)
        assert stream.recv(1) == b""
    assert place.hosts == ["127.0.0.1"]
    assert place.counts["refused_hellos"] == 1


def test_strangers_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_UNIDENTIFIED", 2)
    with place.connect() as first, place.connect() as second, place.connect() as third:
        third.settimeout(5.0)
        assert third.recv(1) == b""
        assert place.counts["rejected_connections"] == 1
        for stream in (first, second):
            stream.setblocking(False)
            with pytest.raises(BlockingIOError):
                stream.recv(1)


def test_a_port_that_is_taken_is_said_so(place: Place) -> None:
    with pytest.raises(BackendError, match=str(place.door.port)):
        listen_tcp("127.0.0.1", place.door.port)
