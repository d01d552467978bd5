"""Who stands by answers that it lives and who leads, and hands its socket over without losing a caller."""

from __future__ import annotations

import socket
import threading

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from springtide.service.server import bind, server_of
from springtide.service.standby import Standby


@pytest.fixture
def listener():
    found = bind(0)
    yield found
    found.close()


def test_what_is_answered_while_another_one_leads(listener):
    role = ["standby"]
    standby = Standby(listener, lambda: role[0], lambda: "pod-b_1_x")
    standby.start()
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", trust_env=False) as client:
            assert client.get("/healthz").json()["role"] == "standby"
            ready = client.get("/readyz")
            assert (ready.status_code, ready.json()["leader"]) == (200, "pod-b_1_x")
            for ask in (client.get, client.post, client.delete):
                refused = ask("/v1/jobs")
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "2"
                assert "stands by; pod-b_1_x leads" in refused.json()["error"]["message"]
            role[0] = "starting"
            assert client.get("/readyz").status_code == 503
            assert client.get("/healthz").status_code == 200
            assert "is starting" in client.get("/f/digits").json()["error"]["message"]
            assert "is starting" in client.get("/v2/models/digits").json()["error"], "the protocol's errors are texts"
    finally:
        standby.stop()


def test_the_socket_goes_on_to_whatever_is_served_there_next(listener):
    standby = Standby(listener, lambda: "standby", lambda: "")
    standby.start()
    port = listener.getsockname()[1]
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        assert client.get("/healthz").status_code == 200
    standby.stop()
    # Between the two servers nobody answers, and nobody is turned away.
    caller = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    caller.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    server = server_of(Starlette(routes=[Route("/x", lambda request: PlainTextResponse("leading"))]))
    thread = threading.Thread(target=server.run, args=([listener.dup()],))
    thread.start()
    try:
        answer = b""
        while part := caller.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"leading")
    finally:
        caller.close()
        server.should_exit = True
        thread.join()
