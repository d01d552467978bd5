"""Browsers sign in with a code that works once, and out again; the master token never leaves the state directory."""

from __future__ import annotations

import json

import pytest
from starlette.datastructures import Headers

from springtide.service.api.auth import cookie_name
from springtide.service.api.sessions import CODE_S, IDLE_S, MAX_CODES, MAX_SESSIONS, BrowserSessions


class Clock:
    """The time of day, as the test sets it."""

    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(tmp_path, clock) -> BrowserSessions:
    return BrowserSessions(tmp_path / "browser_sessions.json", clock)


def test_a_code_works_once_and_not_for_long(sessions, clock):
    code, late = sessions.new_code(), sessions.new_code()
    secret = sessions.sign_in(code)
    assert secret is not None
    assert sessions.is_open(secret)
    assert sessions.sign_in(code) is None
    clock.now_s += CODE_S + 1.0
    assert sessions.sign_in(late) is None
    assert sessions.sign_in("") is None
    assert not sessions.is_open("")
    assert not sessions.is_open(code)


def test_a_session_ends_when_it_is_not_used(sessions, clock):
    used, unused = sessions.open(), sessions.open()
    for _ in range(3):
        clock.now_s += IDLE_S * 0.6
        assert sessions.is_open(used)
    assert not sessions.is_open(unused)


def test_sessions_survive_a_restart_and_their_file_opens_nothing(sessions, clock, tmp_path):
    secret = sessions.open()
    path = tmp_path / "browser_sessions.json"
    assert path.stat().st_mode & 0o077 == 0
    assert secret not in path.read_text()
    again = BrowserSessions(path, clock)
    assert again.is_open(secret)
    assert not again.is_open(next(iter(json.loads(path.read_text()))))
    path.write_text("{half")
    assert not BrowserSessions(path, clock).is_open(secret), "a broken file is no session"


def test_signing_out_ends_sessions_and_codes(sessions, clock, tmp_path):
    secret, code = sessions.open(), sessions.new_code()
    assert sessions.close_all() == 1
    assert not sessions.is_open(secret)
    assert sessions.sign_in(code) is None
    assert not BrowserSessions(tmp_path / "browser_sessions.json", clock).is_open(secret)


def test_there_are_only_so_many(sessions):
    codes = [sessions.new_code() for _ in range(MAX_CODES + 5)]
    assert sessions.sign_in(codes[0]) is None
    assert sessions.sign_in(codes[-1]) is not None
    secrets = [sessions.open() for _ in range(MAX_SESSIONS + 5)]
    assert sum(map(sessions.is_open, secrets)) == MAX_SESSIONS
    assert sessions.is_open(secrets[-1])


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1:8787", "springtide_8787"),
        ("localhost:9000", "springtide_9000"),
        ("localhost", "springtide_default"),
        ("[::1]:8787", "springtide_8787"),
        ("x:99;a=b", "springtide_default"),
    ],
)
def test_platforms_on_two_ports_do_not_share_a_cookie(host, name):
    assert cookie_name(Headers({"host": host})) == name


def test_the_way_of_a_browser(http, stranger):
    made = http.post("/v1/logins")
    assert made.status_code == 201
    code = made.json()["code"]
    assert stranger.head(f"/login?code={code}", follow_redirects=False).status_code == 401, "a preview uses up nothing"
    answer = stranger.get(f"/login?code={code}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert code not in answer.headers["set-cookie"]
    assert stranger.get("/v1/status").status_code == 200
    assert stranger.get(f"/login?code={code}", follow_redirects=False).status_code == 401
    assert http.delete("/v1/logins").json() == {"num_sessions": 1}
    assert stranger.get("/v1/status").status_code == 401


def test_a_stranger_makes_no_code(stranger):
    assert stranger.post("/v1/logins").status_code == 401
    assert stranger.delete("/v1/logins").status_code == 401
