"""Connections that say nothing, never end a head, or are too many, on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import httpx2
import pytest
import uvicorn

from springtide.service.api.connections import BoundedConnection, connection_class


async def answer(scope, receive, send):
    if scope["path"] == "/slow":
        await asyncio.sleep(0.6)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def serving(protocol):
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(answer, http=protocol, ws="none", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET / HTTP/1.1\r\nX-Slow: ", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nX-Slow: "],
    ids=["silent", "half a head", "half a second head"],
)
def test_a_head_that_does_not_come_ends_the_connection_and_a_slow_answer_does_not(beginning):
    class Hasty(BoundedConnection):
        head_timeout_s = 0.3

    with serving(Hasty) as address, socket.create_connection(address, timeout=20.0) as held:
        held.sendall(beginning)
        assert httpx2.get(f"http://127.0.0.1:{address[1]}/slow").text == "ok"
        while held.recv(4096):
            pass


def test_a_head_without_end_is_cut_off():
    with serving(BoundedConnection) as address, socket.create_connection(address, timeout=20.0) as endless:
        endless.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            endless.sendall(b"x" * (1 << 28))


def test_connections_over_the_bound_are_refused_and_room_comes_back():
    protocol = connection_class(num_descriptors=300)
    assert protocol.max_connections == 64
    with serving(protocol) as address:
        url = f"http://127.0.0.1:{address[1]}/"
        held = [socket.create_connection(address, timeout=20.0) for _ in range(64)]
        with socket.create_connection(address, timeout=20.0) as refused, contextlib.suppress(ConnectionResetError):
            assert refused.recv(1) == b""
        held.pop().close()
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                assert httpx2.get(url).text == "ok"
                break
        for connection in held:
            connection.close()
