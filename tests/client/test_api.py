"""How the client finds a platform and what it makes of answers; the other side here is a scripted transport."""

from __future__ import annotations

from types import SimpleNamespace

import httpx2
import msgspec
import pytest

from springtide.client.api import Client, connect
from springtide.core.errors import BackendError, CapacityError, InvalidRequest, NotFound, Unauthorized

SOURCE = SimpleNamespace(
    filename="a.py", text="x", object_name="f", kind="function", args=(), import_root="", files={}, library=""
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch, tmp_path):
    for variable in ("SPRINGTIDE_URL", "SPRINGTIDE_TOKEN", "SPRINGTIDE_STATE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def scripted(*answers):
    """A client whose requests get these answers in turn (an exception is raised), and the requests it made."""
    waiting, asked = iter(answers), []

    def handle(request):
        asked.append(request)
        answer = next(waiting)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Client("http://127.0.0.1:1/", "token", transport=httpx2.MockTransport(handle)), asked


def test_no_platform_is_said_with_the_mend(tmp_path):
    with pytest.raises(BackendError, match="springtide up"):
        connect(state_dir=tmp_path)
    with pytest.raises(BackendError, match="springtide up"):
        connect()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_torn_address_file_is_said(tmp_path, content):
    (tmp_path / "platform.json").write_bytes(content)
    with pytest.raises(BackendError, match=r"platform\.json"):
        connect(state_dir=tmp_path)


def test_a_platform_that_is_gone_is_said(tmp_path):
    (tmp_path / "platform.json").write_bytes(msgspec.json.encode({"pid": 1, "url": "http://127.0.0.1:1"}))
    (tmp_path / "token").write_text("t" * 40)
    with connect(state_dir=tmp_path) as client, pytest.raises(BackendError, match="springtide up"):
        client.status()


def test_the_token_file_is_for_this_machine_only(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("t" * 40)
    with pytest.raises(Unauthorized, match="SPRINGTIDE_TOKEN"):
        connect("http://platform.example:8787", state_dir=tmp_path)
    connect("http://localhost:8787", state_dir=tmp_path).close()
    monkeypatch.setenv("SPRINGTIDE_URL", "http://platform.example:8787")
    monkeypatch.setenv("SPRINGTIDE_TOKEN", "u" * 40)
    client = connect()
    assert client.url == "http://platform.example:8787"
    client.close()


@pytest.mark.parametrize("url", ["127.0.0.1:8787", "ftp://127.0.0.1", "http://", "file:///etc/passwd"])
def test_what_is_no_address_is_said(url):
    with pytest.raises(InvalidRequest, match="127"):
        connect(url, token="t" * 40)


def test_a_lost_submission_is_repeated_under_its_key():
    client, asked = scripted(httpx2.ReadError("reset"), httpx2.Response(422, json={"error": {"message": "no"}}))
    with client, pytest.raises(InvalidRequest, match="no"):
        client.submit_job("digits", SOURCE)
    first, second = asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.content == second.content


def test_nothing_else_is_repeated():
    client, asked = scripted(httpx2.ReadError("reset"))
    with client, pytest.raises(BackendError, match="lost"):
        client.cancel("digits-1")
    assert len(asked) == 1


def test_inputs_go_as_one_object_and_outputs_come_back():
    client, asked = scripted(
        httpx2.Response(200, json={"outputs": [1.0]}), httpx2.Response(200, json={"outputs": [2.0], "more": 1})
    )
    with client:
        assert client.infer("digits", texts=["a"]) == [1.0]
        assert client.infer("digits", {"texts": ["b"]}) == {"outputs": [2.0], "more": 1}
        with pytest.raises(InvalidRequest, match="not both"):
            client.infer("digits", {"texts": []}, texts=[])
        with pytest.raises(InvalidRequest, match="JSON"):
            client.infer("digits", numbers=[float("nan")])
    assert [msgspec.json.decode(request.content) for request in asked] == [{"texts": ["a"]}, {"texts": ["b"]}]
    assert asked[0].url.path == "/f/digits"


@pytest.mark.parametrize(("given", "expected_s"), [("7", 7.0), ("nan", 1.0), ("-3", 1.0), ("soon", 1.0)])
def test_too_busy_says_when_to_come_back(given, expected_s):
    error = {"error": {"code": "overloaded", "message": "too busy"}}
    client, _ = scripted(httpx2.Response(429, json=error, headers={"Retry-After": given}))
    with client, pytest.raises(CapacityError, match="too busy") as caught:
        client.infer("digits", texts=[])
    assert caught.value.retry_after_s == expected_s


def test_a_move_sends_the_layers_that_are_given():
    unknown = httpx2.Response(404, json={"error": {"code": "not_found", "message": "no"}})
    client, asked = scripted(unknown, unknown)
    with client:
        with pytest.raises(NotFound):
            client.move("digits-1", {"model": "m"})
        with pytest.raises(NotFound):
            client.quote_move("digits-1")
    assert [request.url.path for request in asked] == ["/v1/jobs/digits-1/move", "/v1/jobs/digits-1/move/quote"]
    assert msgspec.json.decode(asked[0].content) == {"to": "functions", "layer_profile": {"model": "m"}}
    assert msgspec.json.decode(asked[1].content) == {"to": "functions"}


def test_a_platform_that_failed_is_no_lack_of_capacity():
    error = {"error": {"code": "unavailable", "message": "not recorded"}}
    client, _ = scripted(httpx2.Response(503, json=error, headers={"Retry-After": "1"}))
    with client, pytest.raises(BackendError, match="not recorded"):
        client.pause("digits-1")


@pytest.mark.parametrize("content", [b"", b"<html>", b"{}", b"\xff", b"[" * 100_000])
def test_answers_that_are_none_are_backend_errors(content):
    client, _ = scripted(httpx2.Response(200, content=content), httpx2.Response(500, content=content))
    with client:
        for _ in range(2):
            with pytest.raises(BackendError):
                client.status()


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_names_that_are_no_part_of_a_path_are_refused(name):
    client, asked = scripted()
    with client, pytest.raises(InvalidRequest):
        client.job(name)
    assert asked == []


def test_a_name_cannot_leave_its_part_of_the_path():
    client, asked = scripted(httpx2.Response(404, json={"error": {"code": "not_found", "message": "no"}}))
    with client, pytest.raises(InvalidRequest):
        client.job("../shutdown?x#y")
    assert asked[0].url.raw_path == b"/v1/jobs/..%2Fshutdown%3Fx%23y"
