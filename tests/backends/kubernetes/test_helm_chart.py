"""The Helm chart and `springtide k8s render` make the same objects of the same settings."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chart_cases import CASES, CHART, in_order, rendered
from chart_schema import values_schema
from go_templates import TemplateError, Templates

import springtide
from springtide.backends.kubernetes.custom_resources import custom_resource_definitions
from springtide.backends.kubernetes.settings_file import SettingsFile, settings_from
from springtide.backends.kubernetes.yaml_text import read_yaml

OLD, NEW = ("policy/v1beta1",), ("policy/v1beta1", "policy/v1")


class Versions(tuple[str, ...]):
    def Has(self, version: str) -> bool:
        return version in self


def charted(values: dict[str, Any], versions: tuple[str, ...] = NEW, folder: Path = CHART) -> dict[str, Any]:
    """What Helm makes of the chart with these values, in the namespace that they name."""
    (defaults,) = read_yaml((folder / "values.yaml").read_text(), "values.yaml")
    (chart,) = read_yaml((folder / "Chart.yaml").read_text(), "Chart.yaml")
    data = {
        "Values": coalesced(defaults, values),
        "Chart": {"Name": chart["name"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": "tide", "Namespace": values.get("namespace", "springtide")},
        "Capabilities": {"APIVersions": Versions(versions)},
    }
    templates = Templates(folder / "templates")
    texts = [templates.run(name, copy.deepcopy(data)) for name in templates.names() if name.endswith(".yaml")]
    return in_order(document for text in texts for document in read_yaml(text, "the chart"))


def coalesced(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Values as Helm lays them over a chart's own: tables merge, all else replaces."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = coalesced(merged[key], value) if both else value
    return merged


@pytest.mark.parametrize("versions", [OLD, NEW], ids=["1.20", "1.30"])
@pytest.mark.parametrize("name", CASES)
def test_the_chart_is_what_render_prints(name: str, versions: tuple[str, ...]) -> None:
    chart, render = charted(CASES[name], versions), rendered(CASES[name], (1, 20) if versions == OLD else (1, 30))
    assert sorted(chart) == sorted(render)
    for key, wanted in render.items():
        assert chart[key] == wanted, key


def test_a_chart_that_differs_is_found_out(tmp_path: Path) -> None:
    for path in CHART.rglob("*"):
        if path.is_file():
            copied = tmp_path / path.relative_to(CHART)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_text(path.read_text())
    access = tmp_path / "templates" / "access.yaml"
    access.write_text(
        access.read_text().replace("resources: [nodes], verbs: [get,", "resources: [nodes], verbs: [delete, get,")
    )
    differ = [key for key, wanted in rendered({}, (1, 30)).items() if charted({}, folder=tmp_path)[key] != wanted]
    assert differ == ["ClusterRole//springtide:springtide:nodes"]


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
    assert schema == values_schema(), "python tests/backends/kubernetes/chart_schema.py writes it"
    assert schema["additionalProperties"] is False
    assert schema["properties"]["install"]["additionalProperties"] is False


def test_the_chart_is_of_this_version() -> None:
    (chart,) = read_yaml((CHART / "Chart.yaml").read_text(), "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == springtide.__version__


def test_a_chart_with_two_writers_of_one_file_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"set journal_url: postgresql://\.\.\. or install\.replicas: 1"):
        charted({"install": {"replicas": 2}})


def test_the_notes_name_what_is_there() -> None:
    templates = Templates(CHART / "templates")
    values = coalesced(read_yaml((CHART / "values.yaml").read_text(), "values.yaml")[0], {"name": "tide"})
    text = templates.run("NOTES.txt", {"Values": values, "Release": {"Namespace": "ml"}})
    assert "deployment/tide" in text
    assert "secret tide-token" in text
    assert not re.search(r"\{\{|None", text)
