"""The Function Compute SDK against a double at the wire: what is asked, and what answers mean."""

import json

import msgspec
import pytest

from kits.functions.emulated_service import Caller
from kits.functions.function_compute_double import FunctionComputeDouble, tail_of
from springtide.backends.functions.providers.alibaba import AlibabaProvider, AlibabaSettings
from springtide.core.errors import BackendError, InvalidRequest
from springtide.perf.functions.services import alibaba_function_compute

SERVICE = msgspec.structs.replace(alibaba_function_compute(), lifetime_s=600.0)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def double():
    double = FunctionComputeDouble()
    yield double
    double.close()


def settings_of(double, **changes):
    given = {
        "region": "cn-hangzhou",
        "image_uri": "registry.cn-hangzhou.aliyuncs.com/me/springtide:1",
        "role_arn": "acs:ram::123456:role/functions",
        "endpoint": double.endpoint if double else "http://127.0.0.1:9",
        "access_key_id": "test-key",
        "access_key_secret": "test-secret",
        "environment": {"A": "1"},
    }
    return AlibabaSettings(**{**given, **changes})


@pytest.fixture
def provider(double):
    provider = AlibabaProvider(settings_of(double), SERVICE)
    yield provider
    provider.close()


@pytest.mark.slow
def test_deploying_creates_and_then_changes(double, provider):
    provider.deploy([1024, 2048])
    made = double.functions["springtide-2048"]
    assert made["memorySize"] == 2048
    assert made["cpu"] == 1.0
    assert made["timeout"] == 600
    assert made["instanceConcurrency"] == 1
    assert made["runtime"] == "custom-container"
    assert made["customContainerConfig"] == {"image": settings_of(double).image_uri, "port": 9000}
    assert made["environmentVariables"]["A"] == "1"
    assert made["environmentVariables"]["SPRINGTIDE_LIFETIME_S"] == "600"
    provider.deploy([1024], environment={"B": "2"})
    assert double.functions["springtide-1024"]["environmentVariables"]["B"] == "2"
    assert sorted(double.functions) == ["springtide-1024", "springtide-2048"]


def test_an_invocation_returns_with_what_it_is_charged_for(double, provider):
    provider.deploy([1024])
    headers = {
        "x-fc-invocation-duration": "1234",
        "x-fc-max-memory-usage": "345.6",
        "x-fc-log-result": tail_of("hello\n"),
    }
    double.answers.append((200, headers, b'{"outcome": "finished"}'))
    end = Caller(provider).call({"order": 1}, 1024)
    assert (end.outcome, end.payload) == ("returned", b'{"outcome": "finished"}')
    assert (end.duration_s, end.max_memory_mb, end.log) == (1.234, 346, "hello\n")
    name, sent, body = double.invocations[0]
    sent = {key.lower(): value for key, value in sent.items()}
    assert (name, json.loads(body)) == ("springtide-1024", {"order": 1})
    assert (sent["x-fc-invocation-type"], sent["x-fc-log-type"]) == ("Sync", "Tail")


@pytest.mark.parametrize(
    ("kind", "body", "used", "outcome"),
    [
        ("UnhandledInvocationError", {"errorType": "ValueError", "errorMessage": "timed out, he says"}, "10", "failed"),
        ("UnhandledInvocationError", {"errorMessage": "Function timed out after 600 seconds"}, "10", "timed_out"),
        ("FunctionOOMError", {"errorMessage": "the process was ended"}, "1024", "out_of_memory"),
        ("UnhandledInvocationError", {"errorMessage": "Process exited unexpectedly"}, "1024", "out_of_memory"),
        ("UnhandledInvocationError", {"errorMessage": "Process exited unexpectedly"}, "100", "failed"),
    ],
)
def test_errors_of_functions_are_told_apart(double, provider, kind, body, used, outcome):
    provider.deploy([1024])
    headers = {"x-fc-error-type": kind, "x-fc-max-memory-usage": used, "x-fc-invocation-duration": "10"}
    double.answers.append((200, headers, json.dumps(body).encode()))
    end = Caller(provider).call({}, 1024)
    assert end.outcome == outcome
    assert end.error
    assert end.payload == b""


def test_throttling_is_told_and_not_tried_again_here(double, provider):
    provider.deploy([1024])
    double.answers.append((429, {}, {"Code": "ResourceThrottled", "Message": "too many"}))
    end = Caller(provider).call({}, 1024)
    assert end.outcome == "throttled"
    assert end.retry_after_s > 0
    assert len(double.invocations) == 1


def test_a_connection_that_breaks_is_a_lost_invocation_and_never_a_second_one(double, provider):
    provider.deploy([1024])
    double.answers.append("hang up")
    end = Caller(provider).call({}, 1024)
    assert end.outcome == "lost"
    assert end.duration_s is None
    assert len(double.invocations) == 1


def test_a_function_that_is_not_there_and_an_ill_service_are_refusals(double, provider):
    assert Caller(provider).call({}, 1024).outcome == "refused"
    provider.deploy([1024])
    double.answers.append((503, {}, {"Code": "ServiceUnavailable", "Message": "later"}))
    end = Caller(provider).call({}, 1024)
    assert (end.outcome, end.retry_after_s) == ("refused", 1.0)


def test_nobody_there_is_a_refusal_because_nothing_ran(double):
    provider = AlibabaProvider(settings_of(None), SERVICE)
    assert Caller(provider).call({}, 1024).outcome == "refused"
    with pytest.raises(BackendError, match="cannot be reached"):
        provider.deploy([1024])


def test_removing_deletes_the_functions_of_the_prefix_only(double, provider):
    provider.deploy([1024])
    double.functions["springtide-other"] = {"functionName": "springtide-other"}
    provider.remove()
    assert list(double.functions) == ["springtide-other"]


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (403, {"Code": "AccessDenied", "Message": "no"}, "check the access key"),
        (400, {"Code": "InvalidArgument", "Message": "image not found"}, "image registry"),
        (400, {"Code": "InvalidArgument", "Message": "cannot assume role"}, "role acs:ram::123456:role/functions"),
    ],
)
def test_what_the_user_can_mend_is_said(double, provider, status, body, sentence):
    double.refusal = (status, body)
    with pytest.raises(InvalidRequest, match=sentence.replace("image registry", "image registry.cn")):
        provider.deploy([1024])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"region": ""}, "region"),
        ({"image_uri": ""}, "springtide package"),
        ({"role_arn": "arn:aws:iam::1:role/x"}, "acs:ram"),
        ({"function_prefix": "1/2"}, "prefix"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(changes, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        AlibabaProvider(settings_of(None, **changes), SERVICE)


def test_without_keys_it_says_which_are_missing(monkeypatch):
    for name in ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequest, match="ALIBABA_CLOUD_ACCESS_KEY_ID"):
        AlibabaProvider(settings_of(None, access_key_id="", access_key_secret=""), SERVICE)


def test_before_a_first_job_its_keys_are_tried_and_its_functions_are_counted(double, provider):
    (first,) = provider.examine()
    assert (first.verdict, first.text) == (
        "ok",
        "alibaba cn-hangzhou: functions are called springtide-MEMORY; 0 are made",
    )
    provider.deploy([1024])
    assert provider.examine()[0].text.endswith("; 1 are made")
    (unknown,) = AlibabaProvider(settings_of(double, access_key_id="wrong"), SERVICE).examine()
    assert unknown.verdict == "fail"
    assert "check the access key" in unknown.text
    assert unknown.mend
    (away,) = AlibabaProvider(settings_of(None), SERVICE).examine()
    assert away.verdict == "warn"
    assert "cannot be reached" in away.text
