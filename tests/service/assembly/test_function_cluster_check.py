"""What `springtide k8s check` says of the function service: the Secret's keys, addresses, store, Redis, provider."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest

from kits.servers import running_s3
from springtide.backends.functions.provider import AccountFinding
from springtide.backends.kubernetes.install.cluster_check import ClusterFinding
from springtide.backends.kubernetes.settings import FunctionsSettings, KubernetesSettings
from springtide.service.assembly import function_cluster_check
from springtide.service.assembly.function_cluster_check import check_functions

AWS: dict[str, Any] = {
    "provider": "aws",
    "region": "eu-central-1",
    "role": "arn:aws:iam::123456789012:role/springtide",
    "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/springtide:1",
}
ALIBABA = {
    "provider": "alibaba",
    "region": "cn-hangzhou",
    "role": "acs:ram::1234:role/springtide",
    "image": "registry.cn-hangzhou.aliyuncs.com/a/springtide:1",
}
OWN_KEYS = {"FUNCTIONS_AWS_ACCESS_KEY_ID": "own", "FUNCTIONS_AWS_SECRET_ACCESS_KEY": "own"}
STORE_KEYS = {"AWS_ACCESS_KEY_ID": "store", "AWS_SECRET_ACCESS_KEY": "store"}
S3 = "s3://bucket/platform?region=eu-central-1"


def look(
    functions: Mapping[str, Any], secret: Mapping[str, str], store_url: str = S3, workers: str = ""
) -> list[ClusterFinding]:
    settings = KubernetesSettings(
        name="team", store_url=store_url, worker_store_secret=workers, functions=FunctionsSettings(**functions)
    )
    return check_functions(settings, secret)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nobody is asked anything: who would have been, and with which settings."""
    found: list[Any] = []

    def examine(provider: Any) -> list[AccountFinding]:
        found.append(provider._settings)
        return [AccountFinding(verdict="ok", text="the cloud")]

    monkeypatch.setattr("springtide.backends.functions.providers.aws.LambdaProvider.examine", examine)
    monkeypatch.setattr("springtide.backends.functions.providers.alibaba.AlibabaProvider.examine", examine)
    monkeypatch.setattr(function_cluster_check, "_store", lambda given, secret: [])
    return found


def wrong(findings: list[ClusterFinding]) -> list[ClusterFinding]:
    assert {each.name for each in findings} == {"functions"}
    return [each for each in findings if each.verdict != "ok"]


def test_a_platform_without_functions_is_told_nothing_of_them() -> None:
    assert look({}, {}) == []


def test_a_cloud_is_asked_with_the_keys_that_are_for_functions_alone(asked: list[Any]) -> None:
    assert wrong(look(AWS, {**OWN_KEYS, **STORE_KEYS})) == []
    (settings,) = asked
    assert (settings.access_key_id, settings.secret_access_key) == ("own", "own")
    assert settings.function_prefix.startswith("springtide-team-")


def test_the_stores_keys_will_do_and_are_warned_of(asked: list[Any]) -> None:
    (warned,) = wrong(look(AWS, STORE_KEYS))
    assert warned.verdict == "warn"
    assert "FUNCTIONS_AWS_ACCESS_KEY_ID" in warned.mend
    assert asked[0].access_key_id == "store"
    assert wrong(look(AWS, STORE_KEYS, workers="workers")) == []


def test_without_keys_nobody_is_asked_as_whoever_runs_the_command(asked: list[Any]) -> None:
    (warned,) = wrong(look(AWS, {}))
    assert (warned.verdict, asked) == ("warn", [])
    assert "an identity of its own" in warned.text
    (lacking,) = wrong(look(ALIBABA, {"ALIBABA_CLOUD_ACCESS_KEY_ID": "a"}))
    assert (lacking.verdict, lacking.text) == ("fail", "the Secret lacks ALIBABA_CLOUD_ACCESS_KEY_SECRET")
    both = {"ALIBABA_CLOUD_ACCESS_KEY_ID": "a", "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "b"}
    assert wrong(look(ALIBABA, both)) == []
    assert asked[0].access_key_secret == "b"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "store_url", "setting"),
    [
        ({"parameter_store": "redis://redis.data.svc:6379/0"}, S3, "functions.parameter_store is at redis.data.svc"),
        ({}, f"{S3}&endpoint=http://minio:9000&allow_http=true", "store_url is at minio"),
        ({}, f"{S3}&endpoint=http://127.0.0.1:9000", "store_url is at 127.0.0.1"),
        ({}, f"{S3}&endpoint=https://minio.data.svc.cluster.local", "store_url is at minio.data.svc.cluster.local"),
    ],
)
def test_what_functions_of_a_cloud_do_not_find_is_a_fault(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], store_url: str, setting: str
) -> None:
    monkeypatch.setattr(function_cluster_check, "examine_redis", lambda url: [])
    (found,) = wrong(look({**AWS, **changes}, OWN_KEYS, store_url))
    assert found.verdict == "fail"
    assert found.text.startswith(setting)
    reached = f"{S3}&endpoint=https://s3.example.com"
    assert wrong(look({**AWS, "parameter_store": "rediss://redis.example.com:6379/0"}, OWN_KEYS, reached)) == []


def test_a_store_is_tried_with_the_secrets_keys_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("springtide.backends.functions.providers.aws.LambdaProvider.examine", lambda provider: [])
    (untried,) = wrong(look(AWS, OWN_KEYS))
    assert untried.verdict == "warn"
    assert untried.text.startswith("s3://bucket/platform is not tried")
    # Nothing listens there: what the store says is told, without the keys.
    shut = look(AWS, {**OWN_KEYS, **STORE_KEYS}, "s3://bucket/p?endpoint=https://127.0.0.1:1")
    (told,) = [each for each in wrong(shut) if each.text.startswith("s3://bucket/p: ")]
    assert (told.verdict, OWN_KEYS["FUNCTIONS_AWS_ACCESS_KEY_ID"] in told.text.split()) == ("fail", False)


@pytest.mark.slow
def test_an_account_is_asked_through_its_api() -> None:
    """The clouds' own library against a double of the services: nothing is made, and each answer is understood."""
    trust = {"Statement": [{"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}}]}
    with running_s3(buckets=("bucket",)) as server:
        there: dict[str, Any] = {"endpoint_url": server.s3_endpoint, "region_name": "eu-central-1"}
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        iam = boto3.client("iam", **there, **keys)
        given = {**AWS, "endpoint": server.s3_endpoint}
        store_url = f"{server.s3_url('bucket', 'p')}&allow_http=true"
        secret = {**OWN_KEYS, **STORE_KEYS}
        lacking = {each.text: each for each in wrong(look(given, secret, store_url))}
        assert f"there is no role {AWS['role']}" in lacking
        iam.create_role(RoleName="springtide", AssumeRolePolicyDocument=json.dumps(trust))
        findings = look(given, secret, store_url)
        texts = [each.text for each in findings if each.verdict == "ok"]
        assert "role springtide: functions may take it on" in texts
        assert any(text.startswith("functions may be read, changed and invoked") for text in texts)
        assert any(text.endswith("-MEMORY; 0 are made") for text in texts)
        assert any(text.startswith("s3://bucket/p: put ") for text in texts)
        faults = [each.text for each in findings if each.verdict == "fail"]
        assert faults == [
            f"there is no image {AWS['image']}",
            "store_url is at 127.0.0.1, which functions at aws do not find",
        ]
        assert boto3.client("lambda", **there, **keys).list_functions()["Functions"] == []


def test_an_emulator_that_is_not_there_is_a_warning_and_a_folder_is_tried(tmp_path: Path) -> None:
    emulator = {"provider": "emulator", "endpoint": "http://127.0.0.1:1"}
    findings = look(emulator, {}, f"file://{tmp_path}/store")
    (warned,) = wrong(findings)
    assert warned.verdict == "warn"
    assert warned.text.startswith("the emulator at http://127.0.0.1:1")
    assert any(each.text.startswith(f"file://{tmp_path}/store: put ") for each in findings)


def test_a_setting_that_cannot_be_is_told_as_the_setting(asked: list[Any]) -> None:
    (found,) = wrong(look({**AWS, "role": "me"}, OWN_KEYS))
    assert found.verdict == "fail"
    assert "--functions" not in found.text
