"""Settings of a function service: what goes together, how they are kept, and the node that they become."""

from __future__ import annotations

import pytest

from springtide.core.errors import InvalidRequest
from springtide.service.assembly.function_settings import (
    FunctionSettings,
    check_settings,
    parse_faults,
    read_settings,
    shown_address,
    write_settings,
)
from springtide.service.assembly.functions import AWS_KEYS, connect, node_of, service_of

AWS = {"provider": "aws", "store": "s3://bucket/jobs", "role": "arn:aws:iam::1:role/x", "region": "eu-central-1"}


def test_the_emulator_is_as_it_is_asked_for():
    settings = FunctionSettings(provider="emulator", lifetime_s=60.0, bytes_per_s=1e7, concurrency=6, places=3)
    service = service_of(settings, num_cores=2)
    assert (service.lifetime_s, service.concurrency) == (60.0, 6)
    assert {size.bytes_per_s for size in service.sizes} == {1e7}
    assert max(size.vcpus for size in service.sizes) == 1.0, "two cores give no function more than one"
    node = node_of(settings)
    clouds = service_of(FunctionSettings(**AWS), num_cores=2)
    assert clouds.concurrency == 500, "as many again are for successors that warm up"
    assert [device.kind for device in node.devices] == ["function"] * 3
    assert node.functions.name == "emulator"


def test_a_clouds_limits_are_its_own():
    service = service_of(FunctionSettings(**AWS, concurrency=50), num_cores=2)
    assert (service.name, service.lifetime_s, service.concurrency) == ("aws", 900.0, 50)
    check_settings(FunctionSettings(**AWS))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"store": ""}, "--functions-store"),
        ({"store": "file:///tmp/x"}, "object store only"),
        ({"role": ""}, "--functions-role"),
        ({"region": ""}, "--functions-region"),
        ({"parameter_store": "shm://x"}, "share no memory"),
        ({"parameter_store": "redis"}, "do not reach a Redis of this machine"),
        ({"parameter_store": "ecs://c/redis:1?region=us-east-1"}, "needs subnets"),
        ({"parameter_store": "http://:pw@h"}, "'http://:...@h' is no parameter store; write redis://host:6379/0, or"),
        ({"provider": "emulator", "store": "", "parameter_store": "redis?linger=now"}, "linger"),
        (
            {"provider": "alibaba", "parameter_store": "ecs://c/redis:1?region=us-east-1&subnets=a"},
            "alibaba do not reach AWS",
        ),
        ({"lifetime_s": 60.0}, "--functions-lifetime is for the emulator"),
        ({"faults": {"kill": 0.1}}, "--functions-faults is for the emulator"),
        ({"concurrency": 0}, "--functions-concurrency"),
        ({"places": 65}, "--functions-places"),
        ({"provider": "emulator", "store": "redis://h:1/0"}, "--functions-store"),
        ({"provider": "emulator", "store": "", "faults": {"fire": 0.1}}, "no fault 'fire'"),
        ({"provider": "emulator", "store": "", "faults": {"kill": 1.5}}, "from 0 to 1"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_flag(changes, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        check_settings(FunctionSettings(**{**AWS, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"provider": "emulator", "store": "", "parameter_store": "redis"},
        {"provider": "emulator", "store": "", "parameter_store": "redis?memory=512MB&linger=10s"},
        {"parameter_store": "ecs://cluster/redis:1?region=eu-central-1&subnets=subnet-1,subnet-2"},
        {"parameter_store": "rediss://:pw@host:6379/0"},
    ],
)
def test_parameter_stores_that_are_there_or_are_started(changes):
    check_settings(FunctionSettings(**{**AWS, **changes}))


def test_settings_are_kept_for_their_owner_alone(tmp_path):
    settings = FunctionSettings(provider="emulator", faults={"kill": 0.05}, parameter_store="redis://:pw@h:6379/0")
    path = write_settings(tmp_path / "state", settings)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_settings(path) == settings
    assert write_settings(tmp_path / "state", None) is None
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"provider": "azure"}', b'{"provider": "aws", "secret": 1}'])
def test_settings_that_cannot_be_read_say_how_to_start(content, tmp_path):
    path = tmp_path / "functions.json"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="springtide up --functions"):
        read_settings(path)


def test_functions_may_be_made_with_keys_that_are_not_the_stores(tmp_path, monkeypatch):
    for name, value in (("AWS_ACCESS_KEY_ID", "store"), ("AWS_SECRET_ACCESS_KEY", "store-secret")):
        monkeypatch.setenv(name, value)
    image = "1.dkr.ecr.eu-central-1.amazonaws.com/springtide:1"
    settings = FunctionSettings(**{**AWS, "role": "arn:aws:iam::123456789012:role/x", "image": image})

    def key_used():
        connection = connect(settings, tmp_path, probes=False)
        try:
            return connection.provider._control._request_signer._credentials.access_key
        finally:
            connection.end(False)

    assert key_used() == "store"
    for name, value in zip(AWS_KEYS, ("own", "own-secret"), strict=True):
        monkeypatch.setenv(name, value)
    assert key_used() == "own"


def test_faults_are_read_from_one_line():
    assert parse_faults("kill=0.05, throttled=0.1") == {"kill": 0.05, "throttled": 0.1}
    assert parse_faults("") == {}
    for text in ("kill", "kill=x", "kill=2", "flood=0.1", "kill=nan"):
        with pytest.raises(InvalidRequest, match="is not a fault"):
            parse_faults(text)


def test_an_address_is_shown_without_its_password():
    assert shown_address("redis://user:pw@h:6379/0") == "redis://user:...@h:6379/0"
    assert shown_address("s3://bucket/x") == "s3://bucket/x"
