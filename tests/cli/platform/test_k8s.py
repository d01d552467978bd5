"""`springtide k8s` as an operator meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from springtide.backends.kubernetes.client.yaml_text import read_yaml
from springtide.cli.main import cli


def k8s(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["k8s", *arguments])


def documents(told: Result) -> list[dict[str, object]]:
    assert told.exit_code == 0, told.output
    return read_yaml(told.output, "the output")


def test_render_prints_what_kubectl_applies(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("namespace: tide\npolicy: edf\nnamespaces: [ml]\n")
    found = documents(k8s("render", "--settings", str(tmp_path / "settings.yaml")))
    kinds = [each["kind"] for each in found]
    assert kinds[:3] == ["CustomResourceDefinition", "CustomResourceDefinition", "Namespace"]
    assert kinds.index("ServiceAccount") < kinds.index("Deployment")
    (config,) = [each for each in found if each["kind"] == "ConfigMap"]
    assert config["metadata"]["namespace"] == "tide"
    (settings,) = read_yaml(config["data"]["settings.yaml"], "settings")
    assert settings["policy"] == "edf"


def test_every_file_of_the_examples_can_be_rendered() -> None:
    place = Path(__file__).parents[3] / "examples" / "kubernetes" / "settings.yaml"
    assert len(documents(k8s("render", "--settings", str(place)))) > 15


def test_a_flag_goes_before_the_file_and_set_before_both(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("namespace: tide\npolicy: edf\ninstall: {registry: old.example.com}\n")
    found = documents(
        k8s(
            "render", "--settings", str(tmp_path / "settings.yaml"), "--no-crds", "--namespace", "ml",
            "--registry", "example.com/x", "--set", "policy=fifo", "--set", "pod.cpu='4'", "--set", "namespaces=[a, b]",
        )
    )  # fmt: skip
    (deployment,) = [each for each in found if each["kind"] == "Deployment"]
    assert deployment["metadata"]["namespace"] == "ml"
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["image"].startswith("example.com/x/springtide-control-plane:")
    (config,) = [each for each in found if each["kind"] == "ConfigMap"]
    (settings,) = read_yaml(config["data"]["settings.yaml"], "settings")
    assert (settings["policy"], settings["pod"]["cpu"], settings["namespaces"]) == ("fifo", "4", ["a", "b"])


def test_crds_are_the_definitions_alone() -> None:
    found = documents(k8s("crds"))
    assert [each["spec"]["names"]["kind"] for each in found] == ["TrainingFunction", "InferenceFunction"]


def test_json_is_one_document() -> None:
    assert {each["kind"] for each in json.loads(k8s("crds", "--json").output)} == {"CustomResourceDefinition"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["render", "--set", "polcy=edf"], "unknown field `polcy`"),
        (["render", "--set", "policy"], "--set takes KEY=VALUE"),
        (["render", "--set", "policy.x=1", "--policy", "edf"], "policy"),
        (["render", "--set", "name=a", "--set", "name.b=1"], "name is no table of settings"),
        (["render", "--kubernetes", "new"], "takes a version like 1.30"),
        (["render", "--settings", "/nowhere.yaml"], "cannot be read: No such file"),
        (["render", "--set", "install.replicas=2"], "set journal_url: postgresql://"),
        (["render", "--set", "name=[a"], "--set name is not valid YAML"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    told = k8s(*arguments)
    assert told.exit_code == 2
    assert sentence in told.output
    assert "Traceback" not in told.output
    assert len(told.output.strip().splitlines()) == 1


def test_a_cluster_that_is_not_there_is_told_and_nothing_else(tmp_path: Path) -> None:
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "x"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    told = k8s("check", "--kubeconfig", str(tmp_path / "kubeconfig"), "--json")
    assert told.exit_code == 1
    answer = json.loads(told.output)
    assert answer["passed"] is False
    assert [each["name"] for each in answer["checks"]] == ["server"]
    assert "does not answer" in answer["checks"][0]["text"]


def test_help_names_the_commands() -> None:
    told = k8s("--help")
    assert told.exit_code == 0
    for name in ("render", "check", "crds", "serve"):
        assert name in told.output
