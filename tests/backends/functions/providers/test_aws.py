"""Lambda through boto3: settings that cannot work, what answers mean, deploying against the emulator's endpoint."""

import json
import socket
import zipfile

import msgspec
import pytest

from kits.functions.emulated_service import Caller, running_emulator, small_service
from springtide.backends.functions.emulator.launch import emulator_status
from springtide.backends.functions.providers.aws import LambdaProvider, LambdaSettings, check_settings, end_of_answer
from springtide.core.errors import BackendError, InvalidRequest
from springtide.perf.functions.services import aws_lambda

ROLE = "arn:aws:iam::123456789012:role/functions"
IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/springtide:1"
GOOD = {"region": "eu-central-1", "role_arn": ROLE, "image_uri": IMAGE}


def report(used_mb=100, extra="", size_mb=1769):
    return (
        "START RequestId: r Version: $LATEST\nEND RequestId: r\n"
        f"REPORT RequestId: r\tDuration: 12.34 ms\tBilled Duration: 13 ms\tMemory Size: {size_mb} MB\t"
        f"Max Memory Used: {used_mb} MB\t{extra}\n"
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    with running_emulator(tmp_path_factory.mktemp("emulator")) as running:
        yield running


def settings_for(address, **changes):
    given = {
        **GOOD,
        "endpoint_url": address.endpoint,
        "access_key_id": address.token,
        "secret_access_key": address.token,
        "handler": "echo_function.handler",
    }
    return LambdaSettings(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"region": ""}, "need a region"),
        ({"role_arn": ""}, "need a role"),
        ({"role_arn": "acs:ram::1:role/x"}, "need a role"),
        ({"image_uri": ""}, "springtide package"),
        ({"zip_path": "/no/such.zip"}, "need an image"),
        ({"image_uri": "", "zip_path": "/no/such.zip"}, "there is no zip file"),
        ({"function_prefix": "a b"}, "prefix"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(changes, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        LambdaProvider(LambdaSettings(**{**GOOD, **changes}), aws_lambda())


def test_a_lifetime_that_lambda_does_not_have_is_refused():
    with pytest.raises(InvalidRequest, match="900 s"):
        check_settings(LambdaSettings(**GOOD), msgspec.structs.replace(aws_lambda(), lifetime_s=1000.0))


def test_the_report_line_says_what_is_charged():
    end = end_of_answer("i", "", b'{"step": 3}', report(extra="Init Duration: 250.50 ms\t"))
    assert (end.outcome, end.payload) == ("returned", b'{"step": 3}')
    assert (end.duration_s, end.max_memory_mb, end.init_s) == (0.013, 100, 0.2505)


def test_without_a_report_line_what_is_charged_is_in_doubt():
    assert end_of_answer("i", "", b"{}", "").duration_s is None


@pytest.mark.parametrize(
    ("payload", "log", "outcome", "sentence"),
    [
        ({"errorType": "ValueError", "errorMessage": "bad"}, report(), "failed", "ValueError: bad"),
        ({"errorMessage": "2026 r Task timed out after 3.00 seconds"}, report(), "timed_out", "3.00 seconds"),
        (
            {"errorType": "Sandbox.Timedout", "errorMessage": "Task timed out after 900.00 seconds"},
            "",
            "timed_out",
            "900",
        ),
        (
            {"errorType": "Runtime.ExitError", "errorMessage": "Runtime exited with error: signal: killed"},
            report(used_mb=1769),
            "out_of_memory",
            "1769 MB",
        ),
        (
            {"errorType": "Runtime.ExitError", "errorMessage": "Runtime exited with error: signal: killed"},
            report(extra="Status: error\tError Type: Runtime.OutOfMemory"),
            "out_of_memory",
            "memory",
        ),
        (
            {"errorType": "Runtime.ExitError", "errorMessage": "Runtime exited with error: signal: killed"},
            report(),
            "killed",
            "killed",
        ),
        ("no json object", report(), "failed", "failed"),
    ],
)
def test_errors_of_functions_are_told_apart(payload, log, outcome, sentence):
    end = end_of_answer("i", "Unhandled", json.dumps(payload).encode(), log)
    assert end.outcome == outcome
    assert sentence in end.error
    assert end.payload == b""


@pytest.mark.slow
def test_deploying_twice_changes_nothing_and_another_environment_does(emulated):
    address, _ = emulated
    provider = LambdaProvider(settings_for(address, function_prefix="twice"), small_service())
    provider.deploy([1769])
    caller = Caller(provider)
    first = caller.result({})
    provider.deploy([1769])
    assert caller.result({})["pid"] == first["pid"]
    provider.deploy([1769], environment={"COLOUR": "green"})
    changed = caller.result({})
    assert changed["environment"]["COLOUR"] == "green"
    assert changed["pid"] != first["pid"]
    provider.close()


@pytest.mark.slow
def test_a_zip_file_is_code_as_well_and_new_code_replaces_it(emulated, tmp_path):
    address, _ = emulated
    path = tmp_path / "code.zip"

    def write(text):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("own_code.py", f"def handler(event, context):\n    return {text!r}\n")

    write("first")
    changes = {"image_uri": "", "zip_path": str(path), "handler": "own_code.handler", "function_prefix": "zipped"}
    provider = LambdaProvider(settings_for(address, **changes), small_service())
    provider.deploy([128])
    assert Caller(provider).result({}, 128) == "first"
    write("second")
    provider.deploy([128])
    assert Caller(provider).result({}, 128) == "second"
    provider.close()


def test_a_zip_file_with_a_path_outside_its_root_is_refused(emulated, tmp_path):
    address, _ = emulated
    path = tmp_path / "code.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../outside.py", "x = 1\n")
    changes = {"image_uri": "", "zip_path": str(path), "function_prefix": "outside"}
    provider = LambdaProvider(settings_for(address, **changes), small_service())
    with pytest.raises(BackendError, match="lies outside"):
        provider.deploy([128])
    assert not list(tmp_path.rglob("outside.py"))
    provider.close()


def test_code_that_cannot_be_imported_fails_and_says_why(emulated):
    address, _ = emulated
    provider = LambdaProvider(
        settings_for(address, handler="no_such_module.handler", function_prefix="missing"), small_service()
    )
    provider.deploy([128])
    end = Caller(provider).call({}, 128)
    assert end.outcome == "failed"
    assert "no_such_module" in end.error
    provider.close()


def test_removing_deletes_the_functions_of_the_prefix_only(emulated):
    address, other = emulated
    provider = LambdaProvider(settings_for(address, function_prefix="gone"), small_service())
    provider.deploy([128])
    provider.remove()
    assert Caller(provider).call({}, 128).outcome == "refused"
    assert Caller(other).call({}, 128).outcome == "returned"
    provider.close()


def test_a_wrong_key_is_said_with_its_mend(emulated):
    provider = LambdaProvider(settings_for(emulated[0], access_key_id="somebody"), small_service())
    with pytest.raises(InvalidRequest, match="access key is not known"):
        provider.deploy([128])
    assert Caller(provider).call({}, 128).outcome == "refused"
    provider.close()


def test_no_credentials_are_said_with_their_mend(emulated, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    settings = settings_for(emulated[0], access_key_id="", secret_access_key="")
    provider = LambdaProvider(settings, small_service())
    with pytest.raises(InvalidRequest, match="AWS_ACCESS_KEY_ID"):
        provider.deploy([128])
    end = Caller(provider).call({}, 128)
    assert end.outcome == "refused"
    assert "credentials" in end.error
    provider.close()


def test_a_profile_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(InvalidRequest, match="no-such-profile"):
        LambdaProvider(LambdaSettings(**GOOD), aws_lambda())


@pytest.mark.slow
def test_the_emulator_is_not_looked_for_behind_a_proxy(emulated, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    provider = LambdaProvider(settings_for(emulated[0], function_prefix="springtide"), small_service())
    assert Caller(provider).call({}, 128).outcome == "returned"
    provider.close()


def test_silent_connections_are_asked_after_every_minute(emulated):
    _, provider = emulated
    Caller(provider).call({}, 128)
    manager = provider._data._endpoint.http_session._manager
    (key,) = manager.pools.keys()
    connection = manager.pools.get(key).pool.get_nowait() or manager.pools.get(key)._new_conn()
    try:
        if connection.sock is None:
            connection.connect()
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    finally:
        connection.close()


def test_nobody_there_is_a_refusal_because_nothing_ran():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = LambdaSettings(**GOOD, endpoint_url=f"http://127.0.0.1:{port}", access_key_id="a", secret_access_key="b")
    provider = LambdaProvider(settings, small_service())
    end = Caller(provider).call({}, 128)
    assert (end.outcome, end.duration_s, end.retry_after_s) == ("refused", 0.0, 1.0)
    provider.close()


def test_a_broken_answer_is_never_tried_again(emulated):
    from springtide.backends.functions.emulator.launch import inject

    address, provider = emulated
    before = emulator_status(address)["counts"]["num_invocations"]
    inject(address, "answer-lost")
    assert Caller(provider).call({}).outcome == "lost"
    assert emulator_status(address)["counts"]["num_invocations"] == before + 1


def test_an_order_that_is_too_large_is_refused_before_it_is_sent(emulated):
    with pytest.raises(InvalidRequest, match="go by store"):
        emulated[1].invoke(128, b" " * (1 << 17), lambda end: None)
