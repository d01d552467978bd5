"""What the chart is compared with `springtide k8s render` by: settings of every kind, and objects in one order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from springtide.backends.kubernetes.client.yaml_text import read_yaml
from springtide.backends.kubernetes.install.manifests import render
from springtide.backends.kubernetes.install.objects import SETTINGS_FILE
from springtide.backends.kubernetes.install.settings_file import settings_from

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "springtide"
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "own names": {"name": "tide", "namespace": "ml-platform", "port": 9000, "control_port": 1_000_0},
    "namespaces": {"namespaces": ["ml", "web"], "install": {"user_roles": False}},
    "postgres and three replicas": {
        "journal_url": "postgresql://springtide@db.data.svc/springtide?sslmode=require&a=<b>",
        "store_url": "s3://bucket/springtide?region=eu-west-1",
        "store_secret": "springtide-store",
        "install": {"replicas": 3, "monitoring": True, "service_type": "LoadBalancer"},
    },
    "a registry and a class": {
        "usd_per_device_hour": 2.5,
        "grace_s": 22.5,
        "finished_ttl_s": 604800,
        "install": {"registry": "registry.example.com/ml/", "storage_class": "fast", "storage_size": "1Ti"},
    },
    "functions": {
        "store_url": "s3://bucket/springtide?region=eu-central-1",
        "store_secret": "springtide-store",
        "functions": {
            "provider": "aws",
            "region": "eu-central-1",
            "role": "arn:aws:iam::123456789012:role/springtide",
            "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/springtide:1",
            "parameter_store": "rediss://redis.example.com:6379/0",
            "concurrency": 100,
        },
    },
    "keys of their own for workers": {
        "store_url": "s3://bucket/springtide?region=eu-central-1",
        "store_secret": "springtide-store",
        "worker_store_secret": "springtide-workers",
    },
    "keys for workers alone": {"store_url": "s3://bucket/springtide", "worker_store_secret": "springtide-workers"},
    "no network policy": {"install": {"network_policy": False}, "advertise": "tide.example.com", "pools": True},
    "share daemon": {
        "namespaces": ["ml"],
        "node_selector": {"springtide.dev/node": "true"},
        "pod": {"image": "worker:1", "image_pull_policy": "Never", "command": ["/opt/python"]},
        "install": {"share_daemon": True},
    },
    "share daemon where it is usual": {"share_directory": "", "install": {"share_daemon": True}},
    "nobody shares": {"share_directory": ""},
    "share daemon everywhere": {"share_directory": "/var/lib/shares", "install": {"share_daemon": True}},
    "overlays": {
        "pod": {"cpu": "2", "memory": "4Gi", "overlay": {"nodeSelector": {"a": "b"}}},
        "controller": {
            "image": "control:2",
            "image_pull_policy": "IfNotPresent",
            "command": ["/usr/bin/python", "-m", "springtide"],
            "cpu": "2",
            "memory": "3Gi",
            "service_account": "own",
            "overlay": {
                "securityContext": {"runAsUser": 1000},
                "tolerations": [{"key": "control", "operator": "Exists"}],
                "volumes": [
                    {"name": "tmp", "emptyDir": {"medium": "Memory"}},
                    {"name": "ca", "secret": {"secretName": "ca"}},
                ],
                "containers": [
                    {
                        "name": "control-plane",
                        "args": ["other"],
                        "env": [{"name": "HOME", "value": "/home"}, {"name": "TZ", "value": "UTC"}],
                        "ports": [{"containerPort": 8787, "name": "web"}, {"containerPort": 1234}],
                        "volumeMounts": [
                            {"mountPath": "/tmp", "name": "tmp", "readOnly": False},
                            {"mountPath": "/ca", "name": "ca"},
                        ],
                    },
                    {"name": "sidecar", "image": "proxy:1", "command": ["a", "b"]},
                ],
            },
        },
    },
}


def rendered(values: dict[str, Any], kubernetes: tuple[int, int]) -> dict[str, Any]:
    """What render makes of the values, as `in_order` has it, without the namespace, which a release does not hold."""
    settings = settings_from(values, "the case")
    objects = [each for each in render(settings, kubernetes) if not _is_own_namespace(each, settings.namespace)]
    return in_order(objects)


def _is_own_namespace(manifest: dict[str, Any], namespace: str) -> bool:
    return manifest["kind"] == "Namespace" and manifest["metadata"]["name"] == namespace


def in_order(objects: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Objects by what they are called. Settings within are values, not text: two writers of YAML quote differently."""
    found: dict[str, Any] = {}
    for each in objects:
        plain = json.loads(json.dumps(each))
        if plain["kind"] == "ConfigMap":
            plain["data"][SETTINGS_FILE] = read_yaml(plain["data"][SETTINGS_FILE], "settings")
        key = "/".join((plain["kind"], plain["metadata"].get("namespace", ""), plain["metadata"]["name"]))
        assert key not in found, f"{key} is there twice"
        found[key] = plain
    return found
