"""The emulator's three faces over HTTP: who gets in, what is bounded, what a wrong request is told."""

import asyncio
import base64
import io
import json
import os
import socket
import zipfile

import pytest
from starlette.applications import Starlette

from springtide.backends.functions.emulator import runtime_api
from springtide.backends.functions.emulator.admin_api import AdminApi
from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults
from springtide.backends.functions.emulator.fleet import Counts, Lost, Throttled
from springtide.backends.functions.emulator.instances import InvocationResult
from springtide.backends.functions.emulator.lambda_api import LambdaApi
from springtide.backends.functions.emulator.logs import LogIndex
from springtide.backends.functions.emulator.runtime_api import RuntimeApi, peer_uid
from springtide.perf.functions.services import emulator

TOKEN = "the-token"
SIGNED = {"authorization": f"AWS4-HMAC-SHA256 Credential={TOKEN}/20261122/us-east-1/lambda/aws4_request, Signature=0"}
BEARER = {"authorization": f"Bearer {TOKEN}"}
FUNCTIONS = "/2015-03-31/functions"
ROLE = "arn:aws:iam::000000000000:role/r"


class PlayedFleet:
    """Answers as told."""

    class boxes:
        cpu_method = "none"

    def __init__(self):
        self.config = EmulatorConfig(service=emulator())
        self.functions, self.instances = {}, {}
        self.counts, self.faults, self.num_running = Counts(), EmulatorFaults(), 0
        self.answer = InvocationResult(payload=b'"done"', log=b"REPORT\n")
        self.injected, self.later, self.init_errors = [], [], []

    async def invoke(self, function, payload, invocation_id):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def invoke_later(self, function, payload, invocation_id):
        self.later.append(payload)

    def inject(self, injection):
        self.injected.append(injection)

    def set_faults(self, faults):
        self.faults = faults

    def kill(self, identity):
        return identity == "there"

    def retire(self, name):
        pass

    def fail_init(self, port, payload):
        self.init_errors.append((port, payload))


@pytest.fixture
def fleet():
    return PlayedFleet()


@pytest.fixture
def ask(fleet, tmp_path):
    """`ask(method, path, body, headers)` -> (status, headers, body); a status None: the connection would break."""
    logs = LogIndex(lambda: 5)
    stopped = []
    admin = AdminApi(fleet, TOKEN, lambda: stopped.append(True))
    outside = Starlette(routes=[*LambdaApi(fleet, logs, TOKEN, tmp_path).routes, *admin.routes])
    inside = Starlette(routes=RuntimeApi(fleet).routes)

    def call(method, path, body=b"", headers=SIGNED, app=outside):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = []

        async def receive():
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "server": ("127.0.0.1", 7),
            "client": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        asyncio.run(app(scope, receive, send))
        bodies = [message for message in sent if message["type"] == "http.response.body"]
        given = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return (sent[0]["status"] if bodies else None), given, b"".join(one["body"] for one in bodies)

    call.logs, call.stopped, call.inside = logs, stopped, inside
    return call


def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "."), text)
    return base64.b64encode(buffer.getvalue()).decode()


def create(ask, **changes):
    given = {"FunctionName": "f", "Role": ROLE, "Code": {"ImageUri": "i:1"}, "MemorySize": 512, "Timeout": 60}
    return ask("POST", FUNCTIONS, {**given, **changes})


def kind_of(answer):
    return answer[0], answer[1].get("x-amzn-errortype")


def test_only_who_knows_the_token_gets_in(ask):
    assert kind_of(ask("GET", FUNCTIONS, headers={})) == (403, "MissingAuthenticationTokenException")
    wrong = {"authorization": SIGNED["authorization"].replace(TOKEN, "guess")}
    assert kind_of(ask("GET", FUNCTIONS, headers=wrong)) == (403, "UnrecognizedClientException")
    assert ask("GET", FUNCTIONS)[0] == 200
    assert ask("GET", "/admin/status", headers=SIGNED)[0] == 401
    assert ask("GET", "/admin/status", headers=BEARER)[0] == 200


def test_a_function_is_made_once_read_changed_and_deleted(ask, fleet):
    assert create(ask)[0] == 201
    assert kind_of(create(ask)) == (409, "ResourceConflictException")
    told = json.loads(ask("GET", f"{FUNCTIONS}/f")[2])["Configuration"]
    assert (told["MemorySize"], told["Timeout"], told["State"]) == (512, 60, "Active")
    changed = {"MemorySize": 1024, "Environment": {"Variables": {"A": "1"}}}
    assert ask("PUT", f"{FUNCTIONS}/f/configuration", changed)[0] == 200
    assert fleet.functions["f"].memory_mb == 1024
    assert fleet.functions["f"].environment == {"A": "1"}
    assert len(json.loads(ask("GET", FUNCTIONS)[2])["Functions"]) == 1
    assert ask("DELETE", f"{FUNCTIONS}/f")[0] == 204
    assert kind_of(ask("GET", f"{FUNCTIONS}/f")) == (404, "ResourceNotFoundException")


@pytest.mark.parametrize(
    "changes",
    [
        {"FunctionName": "../f"},
        {"Role": "nobody"},
        {"MemorySize": 64},
        {"MemorySize": "512"},
        {"Timeout": 901},
        {"Code": {}},
        {"Code": {"ZipFile": "no base64!"}},
        {"Code": {"ZipFile": base64.b64encode(b"no zip").decode()}},
        {"Environment": {"Variables": {"A": "x" * 5000}}},
        {"Environment": {"Variables": {"A": 1}}},
    ],
)
def test_functions_that_cannot_be_are_refused(ask, fleet, changes):
    assert create(ask, **changes)[0] == 400
    assert not fleet.functions


def test_a_zip_file_stays_inside_its_directory(ask, fleet, tmp_path):
    assert create(ask, Code={"ZipFile": zipped(code__py="x = 1\n")})[0] == 201
    assert list(tmp_path.rglob("code.py"))
    outside = io.BytesIO()
    with zipfile.ZipFile(outside, "w") as archive:
        archive.writestr("../../escaped_from_zip.py", "x = 1\n")
    refused = create(ask, FunctionName="g", Code={"ZipFile": base64.b64encode(outside.getvalue()).decode()})
    assert refused[0] == 400
    assert b"lies outside" in refused[2]
    assert not list(tmp_path.parent.rglob("escaped_from_zip.py"))


def test_invocations_by_type(ask, fleet):
    create(ask)
    path = f"{FUNCTIONS}/f/invocations"
    status, headers, body = ask("POST", path, {"a": 1}, {**SIGNED, "x-amz-log-type": "Tail"})
    assert (status, body) == (200, b'"done"')
    assert base64.b64decode(headers["x-amz-log-result"]) == b"REPORT\n"
    assert ask("POST", path, {"a": 1}, {**SIGNED, "x-amz-invocation-type": "DryRun"})[0] == 204
    assert ask("POST", path, {"a": 2}, {**SIGNED, "x-amz-invocation-type": "Event"})[0] == 202
    assert fleet.later == [b'{"a": 2}']
    fleet.answer = InvocationResult(payload=b"{}", function_error="Unhandled")
    assert ask("POST", path, {})[1]["x-amz-function-error"] == "Unhandled"
    fleet.answer = Throttled()
    assert kind_of(ask("POST", path, {})) == (429, "TooManyRequestsException")
    fleet.answer = Lost()
    assert ask("POST", path, {})[0] is None


def test_what_is_no_json_and_what_is_too_large_is_refused(ask):
    create(ask)
    path = f"{FUNCTIONS}/f/invocations"
    assert kind_of(ask("POST", path, b"{")) == (400, "InvalidRequestContentException")
    assert kind_of(ask("POST", path, b"1" * (7 << 20))) == (413, "RequestEntityTooLargeException")
    event = {**SIGNED, "x-amz-invocation-type": "Event"}
    assert kind_of(ask("POST", path, b"1" * (2 << 20), event)) == (413, "RequestEntityTooLargeException")
    assert kind_of(ask("POST", FUNCTIONS, b"[]")) == (400, "InvalidRequestContentException")


def test_the_log_is_read_page_by_page(ask):
    create(ask)
    for number in range(3):
        ask.logs.add("/aws/lambda/f", "i", f"line {number}")
    target = {**SIGNED, "x-amz-target": "Logs_20140328.FilterLogEvents"}
    first = json.loads(ask("POST", "/", {"logGroupName": "/aws/lambda/f", "limit": 2}, target)[2])
    assert [event["message"] for event in first["events"]] == ["line 0", "line 1"]
    asked = {"logGroupName": "/aws/lambda/f", "limit": 2, "nextToken": first["nextToken"]}
    assert [event["message"] for event in json.loads(ask("POST", "/", asked, target)[2])["events"]] == ["line 2"]
    assert kind_of(ask("POST", "/", {"logGroupName": "/aws/lambda/no"}, target)) == (400, "ResourceNotFoundException")
    assert kind_of(ask("POST", "/", {})) == (400, "InvalidAction")


def test_the_admin_sets_faults_injects_kills_and_stops(ask, fleet):
    assert ask("PUT", "/admin/faults", {"kill_fraction": 0.5, "seed": 3}, BEARER)[0] == 200
    assert (fleet.faults.kill_fraction, fleet.faults.seed) == (0.5, 3)
    assert ask("PUT", "/admin/faults", {"kill_fraction": 5}, BEARER)[0] == 422
    assert ask("PUT", "/admin/faults", {"kil": 0.5}, BEARER)[0] == 422
    assert ask("PUT", "/admin/faults", b"{", BEARER)[0] == 400
    assert ask("POST", "/admin/inject", {"fault": "late", "seconds": 2.0}, BEARER)[0] == 200
    assert fleet.injected[0].seconds == 2.0
    assert ask("POST", "/admin/inject", {"fault": "rust"}, BEARER)[0] == 422
    assert ask("POST", "/admin/kill/there", b"", BEARER)[0] == 200
    assert ask("POST", "/admin/kill/nowhere", b"", BEARER)[0] == 404
    assert ask("POST", "/admin/inject", b"x" * (1 << 17), BEARER)[0] == 413
    assert not ask.stopped
    assert ask("POST", "/admin/stop", b"", BEARER)[0] == 200
    assert ask.stopped


def test_the_owner_of_a_connection_is_found():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert peer_uid(*client.getsockname()) == os.getuid()
    assert peer_uid("127.0.0.1", 1) is None


def test_other_users_are_kept_out_of_the_runtime_api(ask, monkeypatch):
    monkeypatch.setattr(runtime_api, "peer_uid", lambda host, port: os.getuid() + 1)
    status, _, body = ask("GET", "/2018-06-01/runtime/invocation/next", app=ask.inside)
    assert status == 403
    assert b"another user" in body


def test_the_runtime_api_knows_nobody_who_is_not_an_instance(ask, fleet):
    v1 = "/2018-06-01/runtime"
    assert ask("GET", f"{v1}/invocation/next", app=ask.inside)[0] == 410
    assert ask("POST", f"{v1}/invocation/x/response", b"1", app=ask.inside)[0] == 400
    assert ask("POST", f"{v1}/invocation/x/error", b"{}", app=ask.inside)[0] == 400
    assert ask("POST", f"{v1}/init/error", b'{"errorType": "X"}', app=ask.inside)[0] == 202
    assert fleet.init_errors == [(7, b'{"errorType": "X"}')]
