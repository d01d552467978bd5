"""The settings file: what is read, what follows from the rest, and what every mistake is told as."""

from __future__ import annotations

from pathlib import Path

import pytest

import springtide
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.backends.kubernetes.settings_file import (
    SettingsFile,
    complete,
    parse_settings,
    platform_settings,
    read_settings,
    read_settings_file,
    settings_from,
)
from springtide.core.errors import InvalidRequest


def test_an_empty_file_is_every_default() -> None:
    assert parse_settings("# nothing yet\n", "it") == SettingsFile()


def test_the_platform_is_not_told_what_manifests_are_told(tmp_path: Path) -> None:
    place = tmp_path / "settings.yaml"
    place.write_text("policy: edf\nnamespaces: [ml]\ninstall: {replicas: 1, monitoring: true}\n")
    settings = read_settings(place)
    assert type(settings) is KubernetesSettings
    assert (settings.policy, settings.namespaces) == ("edf", ("ml",))
    assert read_settings_file(place).install.monitoring


def test_json_is_read_too() -> None:
    assert parse_settings('{"name": "tide", "pod": {"memory": "4Gi"}}', "it").pod.memory == "4Gi"


def test_what_helm_puts_beside_its_values_is_left_out() -> None:
    assert settings_from({"name": "tide", "global": {"x": 1}}, "values").name == "tide"


def test_what_is_not_said_follows_from_the_rest() -> None:
    settings = complete(parse_settings("{name: tide, namespace: ml, install: {registry: example.com/a/}}", "it"))
    assert settings.advertise == "tide.ml.svc"
    assert settings.controller.image == f"example.com/a/springtide-control-plane:{springtide.__version__}"
    assert settings.pod.image == f"example.com/a/springtide-worker:{springtide.__version__}"
    assert complete(settings) == settings


def test_what_is_said_stays() -> None:
    given = parse_settings("{advertise: 10.0.0.1, pod: {image: 'a:1'}, controller: {image: 'b:2'}}", "it")
    filled = complete(given)
    assert (filled.advertise, filled.pod, filled.controller) == (given.advertise, given.pod, given.controller)


def test_a_file_that_is_not_there_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"settings .*none\.yaml cannot be read: No such file"):
        read_settings(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("polcy: edf", r"unknown field `polcy`; docs/kubernetes\.md lists the settings"),
        ("policy: 3", r"Expected `str`, got `int` - at `\$\.policy`"),
        ("install: {replica: 2}", "unknown field `replica`"),
        ("- a", "must be a table of settings"),
        ("a: 1\n---\nb: 2", "holds 2 documents"),
        ("name: Spring_Tide", "name must be at most 40 of a-z, 0-9 and -"),
        ("namespaces: [ml, ML]", "'ML' is no name of a namespace"),
        ("namespaces: [ml, ml]", "namespaces names one twice"),
        ("node_selector: {'a b': c}", r"node_selector 'a b': 'c' is no label"),
        ("device_resource: gpu", "must be an extended resource like nvidia.com/gpu"),
        ("store_url: bucket", "store_url must be an address like s3://bucket/springtide"),
        ("journal_url: 'mysql://user:hunter2@db/x'", r"journal_url must be an address like postgresql://.*, got .db/x"),
        ("journal_url: 'postgresql://user:hunter2@db/x'", r"journal_url holds a password.*as PGPASSWORD"),
        ("parameter_store_url: memcached://x", "parameter_store_url must be an address like redis://"),
        ("port: 80", r"port must be from 1024 to 65535 \(the control plane is not root\)"),
        ("control_port: 8787", "port and control_port are both 8787"),
        ("lease_s: 0.1", "lease_s must be from 1 to 3600 seconds, got 0.1"),
        ("grace_s: .nan", "grace_s must be from 1 to 3600 seconds"),
        ("devices_per_node: -1", "devices_per_node must be from 0 to 256"),
        ("usd_per_device_hour: -1", "usd_per_device_hour must be"),
        ("install: {replicas: 2}", r"set journal_url: postgresql://\.\.\. or install\.replicas: 1"),
        ("{journal_url: 'postgresql://db/x', install: {replicas: 9}}", "install.replicas must be from 1 to 5"),
        ("install: {storage_size: big}", "install.storage_size must be a quantity like 8Gi"),
        ("{share_directory: '', install: {share_daemon: true}}", "install.share_daemon needs share_directory"),
        ("pod: {memory: lots}", r"pod\.memory must be a quantity like 1Gi, got 'lots'"),
        ("controller: {cpu: half}", r"controller\.cpu must be a quantity like 500m, got 'half'"),
    ],
)
def test_a_mistake_is_told_with_its_mend(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        parse_settings(text, "settings.yaml")
    assert str(caught.value).startswith("settings.yaml")
    assert "hunter2" not in str(caught.value)


def test_passwords_stay_out_of_the_settings_but_users_may_be_named() -> None:
    settings = parse_settings("journal_url: postgresql://springtide@db/x", "it")
    assert platform_settings(settings).journal_url == "postgresql://springtide@db/x"
