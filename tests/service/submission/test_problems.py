"""The form of errors belongs to the path, wherever the error is made."""

from __future__ import annotations

import asyncio
import json

import pytest

from springtide.service.submission.problems import problem

LONG = {"content-length": str(1 << 40)}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v2", {"accept": "text/html"}, 401),
        ("GET", "/v2/models/m", {"authorization": "Bearer wrong"}, 401),
        ("GET", "/v2/models/m", {"host": "elsewhere.example"}, 403),
        ("POST", "/v2/models/m/infer", {"origin": "http://elsewhere.example"}, 403),
    ],
)
def test_below_v2_the_refusals_at_the_door_are_sentences(stranger, method, path, headers, status):
    answer = stranger.request(method, path, headers=headers)
    assert answer.status_code == status
    assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v2/nothing/here", {}, 404),
        ("POST", "/v2/models/m/infer", LONG, 413),
        ("POST", "/v2/models/m/infer", {"content-length": "many"}, 400),
        ("GET", "/v2/" + "x" * 9000, {}, 431),
    ],
)
def test_below_v2_the_refusals_of_limits_and_routes_are_sentences(http, method, path, headers, status):
    answer = http.request(method, path, headers=headers)
    assert answer.status_code == status
    assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize("path", ["/v1/jobs/none-1", "/f/m", "/v20", "/v3/x"])
def test_all_other_paths_have_a_code_and_a_message(http, path):
    assert set(http.get(path).json()["error"]) == {"code", "message"}


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"accept": "text/html"}])
def test_readiness_is_told_without_a_token(stranger, headers):
    # None of these routes is in this application: it is the door that lets them pass.
    for path in ("health/live", "health/ready", "models/m/ready", "models/m/versions/3/ready"):
        assert stranger.get(f"/v2/{path}", headers=headers).status_code == 404
    for path in ("models/m", "models/m/infer", "models/stats", "models/a/b/ready", "models/m/ready/x", "health/x"):
        assert stranger.get(f"/v2/{path}", headers=headers).status_code == 401


def test_the_length_is_that_of_what_is_sent():
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/v2/models/m", "method": "GET", "headers": []}
    asyncio.run(problem(429, "overloaded", "too many", {"Retry-After": "3"})(scope, None, send))
    headers = dict(sent[0]["headers"])
    assert json.loads(sent[1]["body"]) == {"error": "too many"}
    assert headers[b"content-length"] == str(len(sent[1]["body"])).encode()
    assert headers[b"retry-after"] == b"3"
