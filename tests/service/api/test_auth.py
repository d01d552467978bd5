"""The door: the token file, the ways in, and what every answer carries."""

from __future__ import annotations

import asyncio
import stat

import pytest
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from kits.service.api_fixtures import HEADERS, TOKEN
from springtide.core.errors import InvalidRequest, StorageError
from springtide.service.api.auth import load_or_create_token
from springtide.service.api.limits import RequestLimits
from springtide.service.submission.problems import TooLarge, TooSlow


def test_the_token_is_made_once_and_is_private(tmp_path):
    folder = tmp_path / "state"
    token = load_or_create_token(folder)
    assert len(token) >= 43
    assert load_or_create_token(folder) == token
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert load_or_create_token(tmp_path / "other") != token


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o660, 0o666])
def test_a_token_that_others_can_read_is_refused_with_the_mend(tmp_path, mode):
    load_or_create_token(tmp_path)
    (tmp_path / "token").chmod(mode)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        load_or_create_token(tmp_path)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"a" * 20 + b"\x00" + b"b" * 20])
def test_a_file_without_a_token_is_refused(tmp_path, content):
    (tmp_path / "token").write_bytes(content)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(InvalidRequest, match="holds no token"):
        load_or_create_token(tmp_path)


def test_a_linked_token_is_refused(tmp_path):
    (tmp_path / "real").write_text("x" * 40)
    (tmp_path / "token").symlink_to(tmp_path / "real")
    with pytest.raises(StorageError):
        load_or_create_token(tmp_path)


def test_logging_in_sets_a_cookie_that_opens_the_api(stranger):
    answer = stranger.get(f"/login?token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in cookie, "a session has a secret of its own"
    assert stranger.get("/v1/status").status_code == 200
    assert stranger.post("/v1/shutdown", json={}, headers={"Origin": "http://127.0.0.1:8787"}).status_code == 202


@pytest.mark.parametrize("query", ["", "token=", "token=wrong", f"token={TOKEN}&token={TOKEN}", "&".join("abcdefghij")])
def test_a_wrong_login_sets_nothing(stranger, query):
    answer = stranger.get(f"/login?{query}", follow_redirects=False)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "springtide dashboard" in answer.text


def test_a_browser_without_the_cookie_is_told_how_to_get_in(stranger):
    answer = stranger.get("/", headers={"Accept": "text/html"})
    assert answer.status_code == 401
    assert "springtide dashboard" in answer.text


def test_health_and_figures_are_open(stranger):
    assert stranger.get("/healthz").json()["status"] == "ok"
    assert stranger.get("/metrics").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "localhost:8787", "LOCALHOST", "[::1]", "[::1]:8787"])
def test_this_machine_has_several_names(http, host):
    assert http.get("/v1/status", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/v1/status", "/v1/nothing", "/docs", "/login"])
def test_every_answer_carries_the_security_headers(stranger, path):
    for headers in (HEADERS, {}, {"Host": "evil.example"}):
        answer = stranger.get(path, headers=headers)
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def read_through_limits(messages, pause_s=10.0):
    """Read a body of these messages behind the limits; a None never comes."""
    waiting = iter(messages)

    async def receive():
        message = next(waiting)
        if message is None:
            await asyncio.Event().wait()
        return message

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass

    scope = {"type": "http", "path": "/v1/jobs", "raw_path": b"/v1/jobs", "query_string": b"", "headers": []}
    asyncio.run(RequestLimits(app, max_body_pause_s=pause_s)(scope, receive, None))
    return waiting


def test_a_streamed_body_is_not_read_beyond_its_limit():
    chunk = {"type": "http.request", "body": b"x" * 1024 * 1024, "more_body": True}
    messages = [chunk] * 10
    waiting = iter(messages)
    with pytest.raises(TooLarge):
        read_through_limits(waiting)
    assert len(list(waiting)) == 7


def test_a_body_that_stops_is_given_up():
    with pytest.raises(TooSlow):
        read_through_limits([{"type": "http.request", "body": b"x", "more_body": True}, None], pause_s=0.01)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        (HEADERS | {"Origin": "http://elsewhere.example"}, 403),
        (HEADERS | {"Host": "elsewhere.example"}, 403),
        (HEADERS | {"X-Long": "x" * (17 << 10)}, 431),
    ],
)
def test_a_websocket_comes_through_the_same_door(stranger, headers, status):
    with (
        pytest.raises(WebSocketDenialResponse) as refused,
        stranger.websocket_connect("ws://127.0.0.1:8787/f/none/talk", headers=headers),
    ):
        pass
    assert refused.value.status_code == status, refused.value.text
    assert refused.value.json()["error"]["message"]


@pytest.mark.parametrize("headers", [HEADERS, HEADERS | {"Origin": "http://127.0.0.1:8787"}])
def test_a_websocket_with_the_token_goes_on_to_where_there_is_none(stranger, headers):
    with (
        pytest.raises(WebSocketDisconnect) as closed,
        stranger.websocket_connect("ws://127.0.0.1:8787/f/none/talk", headers=headers),
    ):
        pass
    assert not isinstance(closed.value, WebSocketDenialResponse)
