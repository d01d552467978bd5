"""A pod that holds a share of a device."""

from __future__ import annotations

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.pods.shares import (
    SHARE_ANNOTATION,
    share_text,
)
from springtide.core.shares import Share

SHARE = Share(request=0.25, limit=0.5, memory_mb=4000)


def pod(name: str = "r-0", share: str | None = share_text(SHARE), **changes: object) -> dict:
    annotations = {
        names.WORKLOAD_ANNOTATION: "r",
        names.REPLICA_ANNOTATION: "r.0",
        names.DEVICE_ANNOTATION: "n/1",
        names.DEVICE_INDEX_ANNOTATION: str(changes.pop("index", 1)),
    }
    if share is not None:
        annotations[SHARE_ANNOTATION] = share
    return {
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-{name}",
            "labels": {names.ROLE_LABEL: changes.pop("role", "inference")},
            "annotations": annotations,
        },
        "spec": {"nodeName": changes.pop("node", "n")},
        "status": {"phase": changes.pop("phase", "Running")},
    }
