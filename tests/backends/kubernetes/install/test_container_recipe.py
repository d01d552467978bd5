"""The container recipe: a target for each role, what it installs, and as whom it runs."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from springtide.backends.kubernetes.install.manifests import USER_ID, render
from springtide.backends.kubernetes.install.settings_file import (
    CONTROL_PLANE_IMAGE,
    SHARE_AGENT_IMAGE,
    WORKER_IMAGE,
    settings_from,
)
from springtide.backends.kubernetes.pods.spec import CONTAINER_NAME

ROOT = Path(__file__).parents[4]
RECIPE = (ROOT / "deploy" / "containers" / "Containerfile").read_text(encoding="utf-8")
ROLES = {"control-plane": CONTROL_PLANE_IMAGE, "worker": WORKER_IMAGE, "share-agent": SHARE_AGENT_IMAGE}
HEAVY = {"torch", "jax", "optuna", "awslambdaric"}
CLOUDS = {"boto3", "alibabacloud-fc20230330"}


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, continued lines joined, comments left out."""
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", RECIPE, flags=re.MULTILINE)).splitlines()
    found: dict[str, list[str]] = {}
    name = ""
    for line in filter(None, lines):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = [f"FROM {match[1]}"]
        elif name:
            found[name].append(line)
    return found


def instruction(stage: str, word: str) -> str:
    """What a stage says last for an instruction; what it is made from says it otherwise."""
    own = [line.removeprefix(f"{word} ") for line in stages()[stage] if line.startswith(f"{word} ")]
    if own:
        return own[-1]
    before = stages()[stage][0].removeprefix("FROM ")
    return instruction(before, word) if before in stages() else ""


def extras(role: str) -> set[str]:
    (found,) = re.findall(r"springtide-\*\.whl\)\[([a-z,-]+)\]", " ".join(stages()[f"{role}-parts"]))
    return set(found.split(","))


def packages(role: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in extras(role) for each in project["optional-dependencies"][extra]),
    ]
    return {re.split(r"[\[<>=; ]", each)[0] for each in wanted}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_its_target_and_its_parts_from_the_wheel(role: str) -> None:
    assert f"COPY --from={role}-parts /opt/springtide /opt/springtide" in stages()[role]
    assert stages()[role][0] == "FROM bare"
    # A name would be asked for at an index, where anybody may have taken it.
    assert not re.search(r"install [^&]*(?<!/)\bspringtide(\[|==|\s)", " ".join(stages()[f"{role}-parts"]))
    assert f"--target {role} " in RECIPE
    assert ROLES[role] in RECIPE


def test_only_workers_have_torch() -> None:
    assert "torch" in packages("worker")
    assert not HEAVY & (packages("control-plane") | packages("share-agent"))
    assert {"lightkube", "psycopg", "obstore", "redis", "pyyaml"} <= packages("control-plane")
    # It begins functions; nobody else does.
    assert packages("control-plane") >= CLOUDS
    assert not CLOUDS & (packages("worker") | packages("share-agent"))


def test_workers_can_run_the_first_job_of_the_documentation() -> None:
    example = (ROOT / "examples" / "kubernetes" / "digits.yaml").read_text()
    modules = set(re.findall(r"^\s+(?:from|import) (\w+)", example, re.MULTILINE)) - sys.stdlib_module_names
    assert "sklearn" in modules
    named = {"sklearn": "scikit-learn"}
    assert {named.get(module, module) for module in modules} <= packages("worker") | {"springtide"}


def test_nobody_is_root_but_who_has_to_be() -> None:
    assert instruction("control-plane", "USER") == instruction("worker", "USER") == f"{USER_ID}:{USER_ID}"
    assert instruction("share-agent", "USER") == "0:0"


def test_no_image_keeps_a_compiler_or_the_sources() -> None:
    kept = [line for role in (*ROLES, "bare") for line in stages()[role]]
    assert not [line for line in kept if re.search(r"gcc|COPY (?!--from)|/wheels|/source", line)]


def test_images_and_manifests_start_the_same_thing() -> None:
    settings = settings_from({"install": {"share_daemon": True}}, "it")
    containers = {
        container["name"]: container
        for each in render(settings)
        if each["kind"] in ("Deployment", "DaemonSet")
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    control, share = containers["control-plane"], containers["share-agent"]
    assert json.loads(instruction("control-plane", "ENTRYPOINT")) == control["command"]
    assert json.loads(instruction("control-plane", "CMD")) == control["args"]
    assert json.loads(instruction("share-agent", "CMD")) == [*share["command"], *share["args"]]
    assert json.loads(instruction("worker", "CMD")) == ["python", "-m", "springtide.runtime", "pod"]
    assert CONTAINER_NAME == "worker"


def test_what_is_sent_to_the_builder_is_what_the_recipe_copies() -> None:
    ignored = (ROOT / "deploy" / "containers" / "Containerfile.dockerignore").read_text().split()
    copied = {name for line in stages()["wheel"] if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
