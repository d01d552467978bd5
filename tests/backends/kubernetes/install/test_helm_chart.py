"""The Helm chart and `springtide k8s render` make the same objects of the same settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import springtide
from kits.kubernetes.chart_cases import CASES, CHART, rendered
from kits.kubernetes.chart_schema import values_schema
from kits.kubernetes.real_helm import Helm, HelmError, charted, found_helm
from springtide.backends.kubernetes.client.yaml_text import read_yaml
from springtide.backends.kubernetes.install.settings_file import SettingsFile, settings_from
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions

OLD, NEW = (1, 20), (1, 30)


@pytest.fixture(scope="module")
def helm() -> Helm:
    return found_helm()


@pytest.mark.parametrize("version", [OLD, NEW], ids=["1.20", "1.30"])
@pytest.mark.parametrize("name", CASES)
def test_the_chart_is_what_render_prints(helm: Helm, name: str, version: tuple[int, int]) -> None:
    chart, render = charted(helm, CASES[name], version), rendered(CASES[name], version)
    assert sorted(chart) == sorted(render)
    for key, wanted in render.items():
        assert chart[key] == wanted, key


def test_a_chart_that_differs_is_found_out(helm: Helm, tmp_path: Path) -> None:
    copied = tmp_path / "springtide"
    shutil.copytree(CHART, copied)
    access = copied / "templates" / "access.yaml"
    access.write_text(
        access.read_text().replace("resources: [nodes], verbs: [get,", "resources: [nodes], verbs: [delete, get,")
    )
    found = charted(helm, {}, NEW, copied)
    assert [key for key, wanted in rendered({}, NEW).items() if found[key] != wanted] == [
        "ClusterRole//springtide:springtide:nodes"
    ]


def test_helm_has_nothing_to_find_fault_with(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_the_charts_values_are_the_defaults() -> None:
    (values,) = read_yaml((CHART / "values.yaml").read_text(), "values.yaml")
    assert settings_from(values, "values.yaml") == SettingsFile()
    written = json.loads(msgspec.json.encode(SettingsFile()))
    assert _names(values) == _names(written), "every setting stands in values.yaml, with its default"


def _names(table: dict[str, Any], place: str = "") -> set[str]:
    names = set()
    for key, value in table.items():
        names |= {place + key} | (_names(value, f"{place}{key}.") if isinstance(value, dict) else set())
    return names


def test_the_chart_knows_the_objects() -> None:
    documents = read_yaml((CHART / "crds" / "springtide.yaml").read_text(), "the chart's definitions")
    assert documents == [json.loads(json.dumps(each)) for each in custom_resource_definitions()], (
        "springtide k8s crds > deploy/helm/springtide/crds/springtide.yaml"
    )


def test_the_chart_refuses_unknown_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema == values_schema(), "python tests/kits/kubernetes/chart_schema.py writes it"
    assert schema["additionalProperties"] is False
    assert schema["properties"]["install"]["additionalProperties"] is False


def test_the_chart_is_of_this_version() -> None:
    (chart,) = read_yaml((CHART / "Chart.yaml").read_text(), "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == springtide.__version__


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"install": {"replicas": 2}}, r"set journal_url: postgresql://\.\.\. or install\.replicas: 1"),
        ({"jornal_url": "x"}, "jornal_url"),
        ({"port": "many"}, "port"),
    ],
)
def test_values_that_cannot_be_are_refused(helm: Helm, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HelmError, match=sentence):
        charted(helm, values, NEW)
