"""The control plane as its image has it: the wheel with exactly the recipe's extras, under the manifests' rights."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.served_platform import (
    bound,
    environment,
    events_of,
    functions_in,
    served,
    still_node,
    training_function,
)
from kits.simulation.sweeps import only_in_full

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "containers" / "Containerfile"


def extras_of(role: str) -> str:
    """What the recipe installs for a role, as in `kubernetes,stores`."""
    stage = re.search(rf"^FROM \S+ AS {role}-parts\n(.*?)^FROM ", RECIPE.read_text(), re.MULTILINE | re.DOTALL)
    assert stage is not None
    (extras,) = re.findall(r"springtide-\*\.whl\)\[([a-z,-]+)\]", stage[1])
    return str(extras)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (built,) = folder.glob("springtide-*.whl")
    return built


@pytest.fixture(scope="module")
def control_plane(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a Python that has what the control plane's image has."""
    folder = tmp_path_factory.mktemp("image") / "springtide"
    venv.create(folder, with_pip=True)
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, f"{wheel}[{extras_of('control-plane')}]"], check=True, timeout=500)
    return folder / "bin"


@only_in_full
def test_the_control_planes_image_has_no_torch(control_plane: Path) -> None:
    listed = subprocess.run(
        [control_plane / "python", "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    found = {each["name"].lower() for each in json.loads(listed.stdout)}
    # Jobs on functions are the control plane's as well: it makes the clouds' control calls.
    assert {"springtide", "lightkube", "psycopg", "obstore", "redis", "boto3", "fastapi"} <= found
    assert not found & {"torch", "jax", "safetensors", "awslambdaric", "optuna", "scikit-learn", "pytest", "moto"}


def test_it_prints_the_manifests(control_plane: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [control_plane / "springtide", "k8s", "render", "--set", "namespaces=[ml]"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.stdout.count("\nkind: ") > 15


def test_it_runs_without_torch_under_exactly_its_rights(
    cluster: Cluster, control_plane: Path, namespace: str, tmp_path: Path
) -> None:
    program = [str(control_plane / "springtide")]
    with (
        still_node(cluster.api, namespace, 2) as node,
        served(cluster, namespace, tmp_path, program=program) as platform,
    ):
        wait_for("the control plane", lambda: platform.ask("/readyz")[0] == 200)
        cluster.api.post(functions_in(namespace), training_function("digits"))
        pods = wait_for("bound pods", lambda: bound(cluster.api, namespace))
        assert {pod["spec"]["nodeName"] for pod in pods} == {node}
        digits = f"{functions_in(namespace)}/digits"
        wait_for("its state", lambda: cluster.api.get(digits).get("status", {}).get("state"))
        events = wait_for("an event about it", lambda: events_of(cluster.api, namespace, "digits"))
        assert all(event["message"] for event in events)
        assert len(platform.jobs()) == 1
        assert "springtide_" in platform.ask("/metrics")[1]
        loaded = Path(f"/proc/{platform.process.pid}/maps").read_text()
        assert "obstore" in loaded
        assert not re.search(r"libtorch|/torch/", loaded)
        cluster.api.delete(digits)
        # No kubelet ends its pods here: they were asked to go.
        wait_for(
            "their end", lambda: all("deletionTimestamp" in pod["metadata"] for pod in cluster.api.pods(namespace))
        )
        platform.process.send_signal(signal.SIGTERM)
        assert platform.process.wait(60.0) == 0
        told = platform.log.read_text()
        assert not re.search(r"forbidden|Traceback|cannot (get|list|watch|create|patch|delete)", told), told[-3000:]
