"""The function service of a platform on Kubernetes: from its settings to an executor beside that of the pods."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.backends.functions.emulator.config import EmulatorConfig
from springtide.backends.functions.emulator.launch import EmulatorAddress, ensure_emulator, stop_emulator
from springtide.backends.functions.providers.aws import LambdaProvider
from springtide.backends.inbox import Inbox
from springtide.backends.kubernetes.settings import FunctionsSettings, KubernetesSettings
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.events import Event
from springtide.core.workload import WorkloadId
from springtide.perf.functions import services as function_services
from springtide.service.assembly.functions import EMULATOR_TOKEN
from springtide.service.assembly.kubernetes_functions import ClusterFunctions, function_settings
from springtide.service.executors import RoutedExecutor
from springtide.service.platform import PlatformClock

AWS = FunctionsSettings(
    provider="aws",
    region="eu-central-1",
    role="arn:aws:iam::123456789012:role/springtide",
    image="123456789012.dkr.ecr.eu-central-1.amazonaws.com/springtide:1",
    parameter_store="rediss://user@redis.example.com:6379/0",
)
SERVICE = function_services.emulator(lifetime_s=77.0, concurrency=12, memory_mb=(512,))


def settings_of(
    functions: FunctionsSettings, store_url: str = "s3://bucket/p?region=eu-central-1"
) -> KubernetesSettings:
    return KubernetesSettings(store_url=store_url, functions=functions)


class Machines(Inbox[None]):
    """The executor of the pods, as far as one beside it needs it."""

    def __init__(self) -> None:
        super().__init__(PlatformClock(time.time(), 0.0))
        self.posted: list[Event] = []

    def sharing(self) -> object:
        raise AssertionError("nobody asks")


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatorAddress]:
    address = ensure_emulator(tmp_path / "emulator", EmulatorConfig(service=SERVICE))
    monkeypatch.setenv(EMULATOR_TOKEN, address.token)
    yield address
    stop_emulator(tmp_path / "emulator")


def test_a_platform_without_a_service_has_its_pods_alone(tmp_path: Path) -> None:
    functions = ClusterFunctions.connect(KubernetesSettings(store_url="s3://b"), tmp_path, {})
    machines = Machines()
    assert functions.nodes == ()
    assert not functions.has_parameter_store
    assert functions.combined_with(machines, tmp_path, PlatformClock(time.time(), 0.0), 1) is machines  # type: ignore[arg-type, comparison-overlap]
    assert functions.status(WorkloadId("j")) is None
    functions.close(stop_workers=False)


def test_settings_become_those_of_every_platform_and_the_password_comes_from_the_environment() -> None:
    found = function_settings(settings_of(AWS), {"REDIS_PASSWORD": "p@ss/1"})
    assert found is not None
    assert (found.provider, found.store, found.region) == ("aws", "s3://bucket/p?region=eu-central-1", "eu-central-1")
    assert found.parameter_store == "rediss://user:p%40ss%2F1@redis.example.com:6379/0"
    assert (found.concurrency, found.places) == (None, 4)
    plain = function_settings(settings_of(AWS), {})
    assert plain is not None
    assert plain.parameter_store == AWS.parameter_store


def test_a_cloud_is_a_node_of_places_although_nothing_answers_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    shut = "redis://127.0.0.1:1/0"
    (tmp_path / "store").write_text("a file")
    asked = settings_of(
        FunctionsSettings(**{**_fields(AWS), "parameter_store": shut, "places": 2}), f"file://{tmp_path}/store"
    )
    functions = ClusterFunctions.connect(asked, tmp_path, {"REDIS_PASSWORD": "secret"})
    (node,) = functions.nodes
    assert [device.kind for device in node.devices] == ["function"] * 2
    assert node.functions is not None
    assert node.functions.name == "aws"
    assert functions.has_parameter_store
    # Two platforms of one account share no function.
    assert functions._connection is not None
    provider = functions._connection.provider
    assert isinstance(provider, LambdaProvider)
    assert re.fullmatch(r"springtide-[0-9a-f]{6}-2048", provider.function_name(2048))
    end_s = time.monotonic() + 20.0
    while "will wait for" not in caplog.text and time.monotonic() < end_s:
        time.sleep(0.05)
    assert "jobs on functions will wait for file://" in caplog.text
    assert "secret" not in caplog.text
    functions.close(stop_workers=False)


def test_a_role_that_is_none_is_told_as_the_setting(tmp_path: Path) -> None:
    asked = settings_of(FunctionsSettings(**{**_fields(AWS), "role": "me"}))
    with pytest.raises(InvalidRequest, match=r"functions\.role") as caught:
        ClusterFunctions.connect(asked, tmp_path, {})
    assert "--functions" not in str(caught.value)


@pytest.mark.slow
def test_an_emulator_elsewhere_says_itself_what_it_is(tmp_path: Path, emulator: EmulatorAddress) -> None:
    given = FunctionsSettings(provider="emulator", endpoint=emulator.endpoint, places=3)
    functions = ClusterFunctions.connect(settings_of(given, f"file://{tmp_path}/store"), tmp_path, {})
    (node,) = functions.nodes
    assert node.functions is not None
    assert (node.functions.lifetime_s, len(node.devices)) == (77.0, 3)
    # As many as are planned with may warm up beside them.
    assert node.functions.concurrency == 6
    routed = functions.combined_with(Machines(), tmp_path, PlatformClock(time.time(), 0.0), 1)  # type: ignore[arg-type]
    assert isinstance(routed, RoutedExecutor)
    functions.close(stop_workers=True)
    # It goes on: it is nobody's here.
    assert ClusterFunctions.connect(settings_of(given, f"file://{tmp_path}/store"), tmp_path, {}).nodes


def test_an_emulator_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    given = FunctionsSettings(provider="emulator", endpoint="http://127.0.0.1:1")
    with pytest.raises(BackendError, match="does not answer"):
        ClusterFunctions.connect(settings_of(given), tmp_path, {})


def _fields(settings: FunctionsSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}
