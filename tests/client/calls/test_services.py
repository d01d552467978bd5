"""Services called by name: over real HTTP, against a server that shows what it is sent."""

from __future__ import annotations

import asyncio
import contextvars
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

import springtide as st
from springtide.core.errors import BackendError, CapacityError, InvalidRequest, NotFound
from springtide.runtime.serving.identity import CALL, IDENTITY, CallScope
from springtide.serving.frames import CallOrigin, Identify


class Shown(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        more, status, kind = {}, 200, "application/json"
        answer = json.dumps({"outputs": {"path": self.path, "body": body, "headers": headers}})
        if self.path == "/f/busy":
            status, more = 429, {"Retry-After": "7"}
            answer = json.dumps({"error": {"code": "overloaded", "message": "too much"}})
        elif self.path == "/f/gone":
            status, answer = 404, json.dumps({"error": {"code": "not_found", "message": "there is none"}})
        elif headers.get("accept") == "text/event-stream" and "whole" not in body:
            kind = "text/event-stream"
            answer = "data: 1\n\ndata: 2\n\n"
            if "breaks" in body:
                answer += 'event: error\ndata: {"error": {"message": "it broke"}}\n\n'
        self.send_response(status)
        for name, value in {**more, "Content-Type": kind, "Content-Length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shown)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def replica(url):
    with IDENTITY.of_replica("shop", ("embed", "busy", "gone")):
        IDENTITY.tell(Identify(url=url, secret="st_service.s"))
        yield url


def within(scope: CallScope, call):
    """Call it as the code of a replica that works on a request."""

    def called():
        CALL.set(scope)
        return call()

    return contextvars.copy_context().run(called)


def both(inputs: dict, name: str = "embed", scope: CallScope | None = None) -> list:
    """The answers to the call in the two ways."""
    called = st.deployed(name)

    def call() -> list:
        return [called.predict(**inputs), asyncio.run(called.predict_async(**inputs))]

    return within(scope, call) if scope else call()


def test_a_call_is_in_the_name_of_the_service_and_passes_on_what_is_known(replica):
    scope = CallScope(CallOrigin("low", b"r-1", b"00-t-s-01"), 5.0)
    for answer in both({"text": "x", "headers": 1}, scope=scope):
        headers = answer["headers"]
        assert (answer["path"], answer["body"]) == ("/f/embed", {"text": "x", "headers": 1})
        assert headers["authorization"] == "Bearer st_service.s"
        assert (headers["x-request-id"], headers["traceparent"]) == ("r-1", "00-t-s-01")
        assert headers["x-springtide-priority"] == "low"
        assert 0 < float(headers["x-springtide-timeout"].rstrip("s")) <= 5.0
    for answer in both({}):
        assert not answer["headers"].keys() & {"x-request-id", "x-springtide-timeout", "x-springtide-priority"}


def test_the_shorter_time_holds_and_one_that_is_over_calls_nothing(replica):
    answer = within(CallScope(None, 9.0), lambda: st.deployed("embed", timeout="2s").predict())
    assert answer["headers"]["x-springtide-timeout"] == "2.000s"
    with pytest.raises(BackendError, match="time that the request allows is over, so 'embed' was not called"):
        within(CallScope(None, 1e-9), lambda: st.deployed("embed").predict())


def test_streams(replica):
    called = st.deployed("embed")

    async def items(**inputs) -> list:
        return [item async for item in called.stream_async(**inputs)]

    assert list(called.stream()) == asyncio.run(items()) == [1, 2]
    assert [each["body"] for each in (*called.stream(whole=1), *asyncio.run(items(whole=1)))] == [{"whole": 1}] * 2
    for call in (lambda: list(called.stream(breaks=1)), lambda: asyncio.run(items(breaks=1))):
        with pytest.raises(BackendError, match="it broke"):
            call()


@pytest.mark.parametrize(("name", "error"), [("busy", CapacityError), ("gone", NotFound)])
def test_errors_are_those_of_the_platform(replica, name, error):
    called = st.deployed(name)
    with pytest.raises(error):
        called.predict()
    with pytest.raises(error):
        asyncio.run(called.predict_async())


def test_what_may_not_be_called_is_said_before_a_request(replica):
    with pytest.raises(InvalidRequest, match=r"'shop' was deployed to call embed, busy, gone; .* calls=\['other'"):
        st.deployed("other")
    with pytest.raises(InvalidRequest, match="is not allowed"):
        st.deployed("../v1")
    IDENTITY.told = IDENTITY._kept = None
    with pytest.raises(BackendError, match="while this replica loads"):
        st.deployed("embed").predict()


def test_elsewhere_it_is_called_with_what_connect_finds(url, monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_URL", url)
    monkeypatch.setenv("SPRINGTIDE_TOKEN", "st_key")
    assert {answer["headers"]["authorization"] for answer in both({}, "any")} == {"Bearer st_key"}
    called = st.deployed("any")
    assert called.url == f"{url}/f/any"
    assert called.headers() == {"Authorization": "Bearer st_key"}
    assert "st_key" not in repr(called)
