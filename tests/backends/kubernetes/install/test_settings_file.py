"""The settings file: what is read, what follows from the rest, and what every mistake is told as."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import springtide
from springtide.backends.kubernetes.install import rbac
from springtide.backends.kubernetes.install.settings_file import (
    SettingsFile,
    complete,
    parse_settings,
    platform_settings,
    read_settings,
    read_settings_file,
    settings_from,
)
from springtide.backends.kubernetes.settings import KubernetesSettings
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


def test_a_share_directory_is_set_only_with_a_daemon_or_by_the_operator() -> None:
    def folder(text: str) -> str:
        return complete(parse_settings(text, "it")).share_directory

    assert folder("share_directory: ''") == ""
    assert folder("{share_directory: '', install: {share_daemon: true}}") == "/run/springtide"
    assert folder("{share_directory: /shares, install: {share_daemon: true}}") == "/shares"
    assert folder("share_directory: /shares") == "/shares"


def test_what_is_said_stays() -> None:
    given = parse_settings("{advertise: 10.0.0.1, pod: {image: 'a:1'}, controller: {image: 'b:2'}}", "it")
    filled = complete(given)
    assert (filled.advertise, filled.pod, filled.controller) == (given.advertise, given.pod, given.controller)


def test_a_file_that_is_not_there_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"settings .*none\.yaml cannot be read: No such file"):
        read_settings(tmp_path / "none.yaml")


_AWS = "{store_url: 's3://b', functions: {provider: aws, region: r, role: a, image: i, "


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
        ("{store_secret: a, worker_store_secret: a}", r"both 'a'.*name another Secret"),
        ("journal_url: 'postgresql://user:hunter2@db/x'", r"journal_url holds a password.*as PGPASSWORD"),
        ("port: 80", r"port must be from 1024 to 65535 \(the control plane is not root\)"),
        ("control_port: 8787", "port and control_port are both 8787"),
        ("lease_s: 0.1", "lease_s must be from 1 to 3600 seconds, got 0.1"),
        ("grace_s: .nan", "grace_s must be from 1 to 3600 seconds"),
        ("devices_per_node: -1", "devices_per_node must be from 0 to 256"),
        ("usd_per_device_hour: -1", "usd_per_device_hour must be"),
        ("finished_ttl_s: -1", "finished_ttl_s must be seconds after a job's end"),
        ("finished_ttl_s: .nan", "finished_ttl_s must be seconds after a job's end"),
        ("install: {replicas: 2}", r"set journal_url: postgresql://\.\.\. or install\.replicas: 1"),
        ("{journal_url: 'postgresql://db/x', install: {replicas: 9}}", "install.replicas must be from 1 to 5"),
        ("install: {storage_size: big}", "install.storage_size must be a quantity like 8Gi"),
        ("share_directory: run", "share_directory must be a directory of nodes like /run/springtide, got 'run'"),
        ("pod: {memory: lots}", r"pod\.memory must be a quantity like 1Gi, got 'lots'"),
        ("controller: {cpu: half}", r"controller\.cpu must be a quantity like 500m, got 'half'"),
        ("functions: {provider: azure}", "Invalid enum value 'azure'"),
        ("functions: {region: x}", "functions.region needs a service: add functions.provider: aws"),
        ("functions: {provider: aws}", "meet at the platform's object store; set store_url: s3://bucket/prefix"),
        ("{store_url: 'file:///x', functions: {provider: aws}}", "to an address that they reach"),
        ("{store_url: 's3://b', functions: {provider: aws, role: a, image: i}}", "need functions.region, like eu-cent"),
        ("{store_url: 's3://b', functions: {provider: alibaba, region: r}}", "need functions.role, like acs:ram::ACC"),
        ("{store_url: 's3://b', functions: {provider: emulator}}", "functions.endpoint must be the address of the emu"),
        (_AWS + "parameter_store: 'redis://:hunter2@h:1/0'}}", r"holds a password.*as REDIS_PASSWORD"),
        (_AWS + "parameter_store: redis}}", "must be a Redis that is always there, like redis://redis.data.svc"),
        (_AWS + "parameter_store: 'ecs://c/t?region=r&subnets=s'}}", "the control plane starts none"),
        (_AWS + "places: 0}}", "functions.places must be from 1 to 64, got 0"),
        (_AWS + "concurrency: 10001}}", "functions.concurrency must be from 0 to 10,000"),
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


def test_functions_are_taken_as_they_are_said() -> None:
    given = parse_settings(_AWS + "parameter_store: 'rediss://h:6379/0'}}", "it").functions
    assert (given.provider, given.parameter_store, given.places) == ("aws", "rediss://h:6379/0", 4)
    emulator = "{store_url: 'file:///x', functions: {provider: emulator, endpoint: 'http://127.0.0.1:9001'}}"
    assert parse_settings(emulator, "it").functions.endpoint == "http://127.0.0.1:9001"


DOCUMENT = Path(__file__).parents[4] / "docs" / "kubernetes.md"


def _rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the document."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = section[section.index("\n|") :].strip().split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def _defaults(settings: object, place: str = "") -> Iterator[tuple[str, object]]:
    for name, value in msgspec.to_builtins(settings).items():
        if name in ("pod", "controller", "functions", "install"):
            yield from ((f"{name}.{inner}", default) for inner, default in value.items())
        else:
            yield place + name, value


def test_every_setting_is_in_the_document_with_its_default() -> None:
    documented = {row[0].strip("`"): row[1].strip("`") for row in _rows("Settings")}
    defaults = {
        name: value if isinstance(value, str) and value else _written(value)
        for name, value in _defaults(SettingsFile())
    }
    assert documented == defaults


def _written(value: object) -> str:
    return json.dumps(int(value) if isinstance(value, float) else value)


def test_every_right_is_in_the_document_with_its_reason() -> None:
    settings = platform_settings(SettingsFile())
    told = {(row[0], row[1], row[3]) for row in _rows("Rights and ports")}
    expected = {
        (place, ", ".join(rule.resources), rule.reason)
        for place, rules in (
            ("cluster", rbac.NODE_RULES),
            ("each", rbac.WORKLOAD_RULES),
            ("default", rbac.NODE_EVENT_RULES),
            ("its own", rbac.platform_rules(settings)),
        )
        for rule in rules
    }
    # One row stands for what may be done to all of a kind and to those of certain names.
    assert {(place, what) for place, what, _ in told} == {(place, what) for place, what, _ in expected}
    assert told <= expected
    verbs = {(row[0], row[1]): row[2] for row in _rows("Rights and ports")}
    for rule in (*rbac.NODE_RULES, *rbac.WORKLOAD_RULES):
        place = "cluster" if rule in rbac.NODE_RULES else "each"
        assert verbs[place, ", ".join(rule.resources)] == ", ".join(rule.verbs)
