"""The server inside a custom container: requests as Function Compute sends them, answers as it expects them."""

import http.client
import json
import threading

import pytest

from springtide.backends.functions.container_server import ContainerServer, load_handler


def handler(event, context):
    if event == "raise":
        raise ValueError("no such layer")
    return {"event": event, "id": context.aws_request_id, "left_ms": context.get_remaining_time_in_millis()}


@pytest.fixture
def server():
    server = ContainerServer(("127.0.0.1", 0), handler, lifetime_s=60.0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def post(server, path, body, headers=None):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    answer = response.status, response.headers["x-fc-status"], response.read()
    connection.close()
    return answer


def test_an_invocation_runs_the_handler(server, capfd):
    status, fc_status, body = post(server, "/invoke", b'{"a": 1}', {"x-fc-request-id": "r-7"})
    answer = json.loads(body)
    assert (status, fc_status) == (200, "200")
    assert (answer["event"], answer["id"]) == ({"a": 1}, "r-7")
    assert 0 < answer["left_ms"] <= 60_000
    assert "FC Invoke Start RequestId: r-7" in capfd.readouterr().out


def test_what_it_raises_is_an_error_of_the_function(server, capfd):
    status, fc_status, body = post(server, "/invoke", b'"raise"')
    assert (status, fc_status) == (404, "404")
    assert json.loads(body) == {"errorType": "ValueError", "errorMessage": "no such layer"}
    assert "Traceback" in capfd.readouterr().err


def test_the_roles_credentials_are_where_object_stores_look(server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "old")
    import os

    post(
        server, "/invoke", b"1", {"x-fc-access-key-id": "k", "x-fc-access-key-secret": "s", "x-fc-security-token": "t"}
    )
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    assert [os.environ[name] for name in names] == ["k", "s", "t"]


def test_other_paths_and_bodies_above_the_limit_are_refused(server):
    assert post(server, "/other", b"1")[0] == 404
    assert post(server, "/initialize", b"")[0] == 200
    assert post(server, "/invoke", b"", {"Content-Length": str(10**9)})[0] == 413


def test_the_handler_is_found_by_its_name():
    assert load_handler("json.loads") is json.loads
    with pytest.raises(ModuleNotFoundError):
        load_handler("no_such_module.handler")
