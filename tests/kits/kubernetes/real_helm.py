"""Helm itself, as the dev extra installs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.chart_cases import CHART, in_order
from springtide.backends.kubernetes.client.yaml_text import read_yaml


class HelmError(Exception):
    """Helm refused; its own words."""


class Helm:
    """One Helm, called with arguments."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *arguments: str, values: dict[str, Any] | None = None) -> str:
        """What it prints. Raises HelmError."""
        given = ["--values", "-"] if values is not None else []
        text = json.dumps(values) if values is not None else ""
        done = subprocess.run([self._path, *arguments, *given], input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HelmError(done.stderr)
        return done.stdout


def found_helm() -> Helm:
    """The one beside this interpreter, else the machine's. Skips the test where there is none."""
    path = shutil.which("helm", path=sysconfig.get_path("scripts")) or shutil.which("helm")
    if path is None:
        pytest.skip("there is no helm for this machine: the dev extra has it for Linux on x86-64")
    return Helm(path)


def charted(
    helm: Helm, values: dict[str, Any], kubernetes: tuple[int, int], folder: Path = CHART
) -> dict[str, dict[str, Any]]:
    """What Helm makes of the chart with these values, in the namespace that they name, as `in_order` has it."""
    namespace = values.get("namespace", "springtide")
    version = ".".join(map(str, kubernetes))
    text = helm("template", "tide", str(folder), f"--namespace={namespace}", f"--kube-version={version}", values=values)
    return in_order(read_yaml(text, "the chart"))
