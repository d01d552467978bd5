"""Bodies that come too slowly, never end or lose their client, on a real port: the API and the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry

from kits.service.api_fixtures import HEADERS, TOKEN
from kits.service.gateway_replicas import make_service
from springtide.service.api.application import build_api
from springtide.service.api.connections import BoundedConnection
from springtide.service.api.limits import LOWEST_BYTES_PER_S, RequestLimits
from springtide.service.gateway.application import Gateway
from springtide.service.server import lifespan_of
from springtide.service.submission.problems import add_problem_handlers
from springtide.serving.router import ServiceRoute

SHARD = f"/v1/data/x/shards/{'0' * 64}"


class QuickConnection(BoundedConnection):
    rest_timeout_s = 0.2


def head(method, path, num_bytes, *more):
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {num_bytes}", *more, "", ""]
    return "\r\n".join(lines).encode()


@contextlib.contextmanager
def serving(app):
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=QuickConnection, ws="none", lifespan="on", log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield server, listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def hasty_app(body_s):
    """The limits in front of a route of the API and of the gateway."""
    gateway = Gateway(lambda event: None)
    gateway.update([ServiceRoute(service=make_service(), replicas=())])
    app = FastAPI(lifespan=lifespan_of(gateway))

    @app.post("/v1/jobs")
    async def read(request: Request):
        return {"num_bytes": len(await request.body())}

    app.router.routes.extend(gateway.routes())
    add_problem_handlers(app)
    app.add_middleware(RequestLimits, body_s=body_s)
    return app


def dribble(connection, answer):
    """Send a byte now and then until the other side has closed; return what it said."""
    connection.settimeout(0.02)
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                data = connection.recv(65536)
            except ConnectionResetError:
                # What was still on its way to the other side when it closed.
                data = b""
            if not data:
                return answer
            answer += data
        with contextlib.suppress(ConnectionError):
            connection.sendall(b" ")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/jobs", "/f/double", "/v2/models/double/infer"])
def test_a_body_that_dribbles_in_ends_with_a_408_and_its_connection(path):
    with serving(hasty_app(body_s=0.3)) as (_, address), socket.create_connection(address, timeout=20.0) as loris:
        loris.sendall(head("POST", path, 100_000, "Content-Type: application/json"))
        answer = dribble(loris, b"")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body comes too slowly" in answer
    assert b"send at least 64 KiB a second" in answer


def test_a_large_body_may_take_as_long_as_the_lowest_rate_needs():
    pieces = iter([True] * 19 + [False])

    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x" * LOWEST_BYTES_PER_S, "more_body": next(pieces)}

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass

    scope = {"type": "http", "path": SHARD, "raw_path": SHARD.encode(), "query_string": b"", "headers": []}
    asyncio.run(RequestLimits(app, body_s=0.1)(scope, receive, None))


def test_the_rest_of_a_body_ends_an_answer_that_has_begun_without_an_error():
    async def send(message):
        pass

    seen = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.extend([await receive(), await receive()])

    gone = iter([asyncio.Event().wait, None])

    async def then_gone():
        if (wait := next(gone)) is not None:
            await wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "path": "/v1/stream", "raw_path": b"", "query_string": b"", "headers": []}
    asyncio.run(RequestLimits(app, body_s=0.01)(scope, then_gone, send))
    assert seen == [{"type": "http.disconnect"}] * 2


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/jobs", SHARD, "/f/double", "/login", "/v1/nothing"])
def test_nothing_of_a_body_is_read_before_the_token_has_been_seen(app, method, path):
    said = []

    async def receive():
        raise AssertionError("the body was asked for")

    async def send(message):
        said.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"9"), (b"authorization", b"Bearer wrong")]
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": headers, "http_version": "1.1", "scheme": "http", "client": None, "server": None,
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert said[0]["status"] == 401


def test_a_stranger_who_goes_on_sending_after_the_refusal_is_cut_off(app):
    with serving(app) as (_, address), socket.create_connection(address, timeout=20.0) as stranger:
        stranger.sendall(head("POST", "/v1/jobs", 10**6))
        assert dribble(stranger, b"").startswith(b"HTTP/1.1 401 ")


def test_a_connection_whose_answer_came_early_goes_on_after_the_rest_of_the_body(app):
    with serving(app) as (_, address), socket.create_connection(address, timeout=20.0) as client:
        client.sendall(head("POST", "/v1/jobs", 4))
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")
        client.sendall(b"late" + head("GET", "/healthz", 0))
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/jobs"),
        ("PATCH", "/v1/jobs/x"),
        ("PUT", SHARD),
        ("POST", "/v1/jobs/x/resume"),
        ("POST", "/f/double"),
    ],
)
def test_a_client_that_leaves_in_the_middle_leaves_no_error_in_the_log(platform, caplog, method, path):
    gateway = Gateway(lambda event: None)
    gateway.update([ServiceRoute(service=make_service(), replicas=())])
    app = build_api(
        platform,
        token=TOKEN,
        registry=CollectorRegistry(),
        extra_routes=gateway.routes(),
        lifespan=lifespan_of(gateway),
    )
    token = f"Authorization: {HEADERS['Authorization']}"
    with serving(app) as (server, address):
        with socket.create_connection(address, timeout=20.0) as leaver:
            leaver.sendall(head(method, path, 1000, token, "Content-Type: application/json") + b'{"na')
            while not server.server_state.tasks:
                time.sleep(0.001)
            # Asked for the body and not only begun.
            time.sleep(0.05)
        while server.server_state.tasks:
            time.sleep(0.001)
    assert [record.getMessage() for record in caplog.records if record.levelname not in ("DEBUG", "INFO")] == []
