"""What a pod that holds a part of a device is made of beside a pod that holds the whole, and how its share is told.

The share stands in an annotation, which can be changed while the pod runs: the control plane writes it, the share agent
of the pod's node reads it (share_agent.py). Pure: dicts in and out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from springtide.backends.gpu.gpu_table import TENANT_SOCKET_NAME
from springtide.backends.gpu.library import LIBRARY_NAME, PRELOAD_VARIABLE
from springtide.backends.gpu.segments import SOCKET_VARIABLE
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.resources import Device
from springtide.core.shares import Share

SHARE_ANNOTATION = f"{names.GROUP}/share"
# Below settings.share_directory: what sharers see, and what only the daemon sees.
PUBLIC_NAME = "public"
PRIVATE_NAME = "private"
VOLUME_NAME = "springtide-shares"
_ENCODER = msgspec.json.Encoder(order="sorted")


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: float
    limit: float
    memory_mb: int = 0


class ShareParts(msgspec.Struct, frozen=True, kw_only=True):
    """What is added to the pod of a sharer: annotations, its container's environment and mounts, and its volumes."""

    annotations: dict[str, str] = {}
    environment: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    volumes: tuple[dict[str, Any], ...] = ()


def public_directory(settings: KubernetesSettings) -> PurePosixPath:
    """Where sharers find their daemon's socket and the library, on the node and in their containers."""
    return PurePosixPath(settings.share_directory) / PUBLIC_NAME


def is_enforced(settings: KubernetesSettings) -> bool:
    """Whether nodes have a daemon that holds sharers of GPUs."""
    return settings.device_kind == "gpu" and bool(settings.share_directory)


def share_parts(share: Share | None, device: Device, settings: KubernetesSettings) -> ShareParts:
    """Return what the pod of a replica with this share of this device gets; nothing for who holds the whole.

    Programs on a shared GPU get the library before CUDA's driver. The directory has to be there: a pod on a node
    without a daemon waits for it (the kubelet says FailedMount), instead of running as if the device were its own.
    """
    if share is None:
        return ShareParts()
    annotations = {SHARE_ANNOTATION: share_text(share)}
    if not is_enforced(settings):
        return ShareParts(annotations=annotations)
    public = public_directory(settings)
    return ShareParts(
        annotations=annotations,
        environment=(
            {"name": PRELOAD_VARIABLE, "value": str(public / LIBRARY_NAME)},
            {"name": SOCKET_VARIABLE, "value": str(public / TENANT_SOCKET_NAME)},
        ),
        # The directory and not the socket: a daemon that is started anew makes a new one.
        mounts=({"name": VOLUME_NAME, "mountPath": str(public), "readOnly": True},),
        volumes=({"name": VOLUME_NAME, "hostPath": {"path": str(public), "type": "Directory"}},),
    )


def share_text(share: Share) -> str:
    """The annotation's value."""
    return _ENCODER.encode(share).decode()


def share_patch(share: Share | None) -> dict[str, Any]:
    """The merge patch that puts another share of a living pod in force."""
    return {"metadata": {"annotations": {SHARE_ANNOTATION: None if share is None else share_text(share)}}}


def share_of(pod: Mapping[str, Any]) -> Share | None:
    """The share that a pod says it holds; None if it says none, or one that cannot be."""
    text = (pod.get("metadata", {}).get("annotations") or {}).get(SHARE_ANNOTATION, "")
    try:
        told = msgspec.json.decode(text, type=_Told)
    except ValueError:
        return None
    if not (0.0 < told.request <= told.limit <= 1.0 and 0 <= told.memory_mb <= 1 << 40):
        return None
    return Share(request=told.request, limit=told.limit, memory_mb=told.memory_mb)
