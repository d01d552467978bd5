"""The objects in examples/kubernetes: they hold the examples' own code, and a real server takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from springtide.backends.kubernetes.install.settings_file import read_settings
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions

EXAMPLES = Path(__file__).parents[2] / "examples"
OBJECTS = ["digits.yaml", "digit-reader.yaml"]


def read(name):
    return yaml.safe_load((EXAMPLES / "kubernetes" / name).read_text())


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_holds_the_text_of_the_example(name):
    files = read(name)["spec"]["source"]["files"]
    assert files
    for file, text in files.items():
        assert text == (EXAMPLES / file).read_text(), f"{name}: {file} is no longer what examples/{file} says"


def test_the_settings_can_be_read():
    settings = read_settings(EXAMPLES / "kubernetes" / "settings.yaml")
    assert settings.pools
    assert settings.namespaces == ("team",)


@pytest.mark.kubernetes
@pytest.mark.parametrize("name", OBJECTS)
def test_a_server_takes_the_object(cluster, namespace, name):
    cluster.api.apply(*custom_resource_definitions())
    item = read(name)
    item["metadata"]["namespace"] = namespace
    plural = item["kind"].lower() + "s"
    path = f"apis/{item['apiVersion']}/namespaces/{namespace}/{plural}"

    def taken():
        return cluster.api.post(f"{path}?dryRun=All", item)

    from kits.kubernetes.kube_http import wait_for

    # A definition is served a moment after it was made.
    assert wait_for("the definition to be served", taken, 20.0)["spec"]["source"] == item["spec"]["source"]
