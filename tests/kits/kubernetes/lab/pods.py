"""What a pod of the lab is made of: an image with nothing but busybox, and this machine's Python, mounted read-only."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import springtide

IMAGE = "localhost/busybox:1"
PYTHON = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def pod_settings() -> dict[str, Any]:
    """The part `pod` of a platform's settings."""
    mounts = {
        "usr": ("/usr", "/usr"),
        "lib": ("/lib", "/lib"),
        "lib64": ("/lib64", "/lib64"),
        # Clients of object stores want certificates even where they will meet none.
        "ssl": ("/etc/ssl", "/etc/ssl"),
        "python": (sys.base_prefix, "/opt/python"),
        "site": (sysconfig.get_path("purelib"), "/opt/site"),
        "src": (str(Path(springtide.__file__).parents[1]), "/opt/src"),
    }
    present = {name: (here, there) for name, (here, there) in mounts.items() if Path(here).exists()}
    environment = {
        # Else the loader finds the distribution's own libpython first.
        "LD_LIBRARY_PATH": "/opt/python/lib",
        "PYTHONPATH": "/opt/src:/opt/site",
        "PYTHONDONTWRITEBYTECODE": "1",
        "USER": "springtide",
    }
    container = {
        "name": "worker",
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "volumeMounts": [
            {"name": f"host-{name}", "mountPath": there, "readOnly": True} for name, (_, there) in present.items()
        ],
    }
    volumes = [{"name": f"host-{name}", "hostPath": {"path": here}} for name, (here, _) in present.items()]
    return {
        "image": IMAGE,
        "image_pull_policy": "Never",
        "command": [PYTHON],
        "overlay": {"volumes": volumes, "containers": [container]},
    }


def plain_pod(name: str, namespace: str, node: str, script: str, **environment: str) -> dict[str, Any]:
    """A pod beside the platform: a script for this machine's Python, as nobody in particular, on a read-only root."""
    settings = pod_settings()
    overlay = settings["overlay"]
    (worker,) = overlay["containers"]
    variables = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": key, "value": value} for key, value in {"HOME": "/tmp", **environment}.items()),
    ]
    container = {
        **worker,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [PYTHON, "-c", script],
        "env": [*worker["env"], *variables],
        "volumeMounts": [*worker["volumeMounts"], {"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            "automountServiceAccountToken": False,
            "volumes": [*overlay["volumes"], {"name": "tmp", "emptyDir": {}}],
            "containers": [container],
        },
    }
