"""The parts of a sharer's pod that a pod with a whole device does not have, and the annotation with its share.

The annotation can be changed while the pod runs: the control plane writes it, and the share agent of the pod's node
reads it (../share_agent/agent.py). Pure: dicts in and out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.backends.sharing.gpu.library import LIBRARY_NAME, PRELOAD_VARIABLE
from springtide.backends.sharing.gpu.segments import SOCKET_VARIABLE
from springtide.backends.sharing.gpu.table import TENANT_SOCKET_NAME
from springtide.core.decoding import decode_json
from springtide.core.resources import Device, DeviceId
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus, TenantStatus
from springtide.core.workload import ReplicaId, WorkloadId

SHARE_ANNOTATION = f"{names.GROUP}/share"
# Directories below settings.share_directory: visible to sharers, and only to the daemon.
PUBLIC_NAME = "public"
PRIVATE_NAME = "private"
VOLUME_NAME = "springtide-shares"
# Descriptions of the mechanisms for users, and the number of Kubernetes' processors of a CPU device.
_ON_GPU = (
    "the share daemon of each node holds sharers of GPUs by a library before CUDA's driver: device time by tokens "
    "every 5 ms, memory on every way to allocate; what gets around it (static programs, an environment without the "
    "preload) is not held; what each uses is told by its node's share agent (/sharing, /metrics)"
)
_ON_CPU = (
    "the kubelet holds a pod to the limit of its share by its cpu limit and gives it the request where processors are "
    "short; a share that changes while the pod runs is in force from its next start on"
)
_NOT_HELD = (
    "shares of a GPU are planned and counted, not enforced: no share daemon is set up (share_directory in the settings)"
)
_CPUS_OF_DEVICE = 1.0
_ENCODER = msgspec.json.Encoder(order="sorted")


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: float
    limit: float
    memory_mb: int = 0


class ShareParts(msgspec.Struct, frozen=True, kw_only=True):
    """Additions to a sharer's pod: annotations, the container's environment and mounts, and volumes."""

    annotations: dict[str, str] = {}
    environment: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    volumes: tuple[dict[str, Any], ...] = ()


def public_directory(settings: KubernetesSettings) -> PurePosixPath:
    """The directory of the daemon's socket and the library, on the node and in sharers' containers."""
    return PurePosixPath(settings.share_directory) / PUBLIC_NAME


def is_enforced(settings: KubernetesSettings) -> bool:
    """Whether nodes have a daemon that enforces shares of GPUs."""
    return settings.device_kind == "gpu" and bool(settings.share_directory)


def share_parts(share: Share | None, device: Device, settings: KubernetesSettings) -> ShareParts:
    """Return the additions to the pod of a replica with this share of this device; none for a whole device.

    Programs on a shared GPU load the library before CUDA's driver. The directory must exist: a pod on a node without
    a daemon waits for it (the kubelet reports FailedMount), instead of running as if the device were its own.
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
        # Mount the directory, not the socket: a restarted daemon creates a new one.
        mounts=({"name": VOLUME_NAME, "mountPath": str(public), "readOnly": True},),
        volumes=({"name": VOLUME_NAME, "hostPath": {"path": str(public), "type": "Directory"}},),
    )


def share_text(share: Share) -> str:
    """The annotation's value."""
    return _ENCODER.encode(share).decode()


def share_of(pod: Mapping[str, Any]) -> Share | None:
    """The share in a pod's annotation; None if there is none or it is invalid."""
    text = (pod.get("metadata", {}).get("annotations") or {}).get(SHARE_ANNOTATION, "")
    try:
        told = decode_json(text, _Told)
    except ValueError:
        return None
    if not (0.0 < told.request <= told.limit <= 1.0 and 0 <= told.memory_mb <= 1 << 40):
        return None
    return Share(request=told.request, limit=told.limit, memory_mb=told.memory_mb)


def pod_sharing(
    holders: Iterable[tuple[WorkloadId, ReplicaId, DeviceId, Share]], settings: KubernetesSettings
) -> SharingStatus:
    """Return the replicas that share each device and how that is enforced, as far as the control plane knows."""
    is_cpu = settings.device_kind == "cpu"
    mechanism, enforced = ("pod-limits", _ON_CPU) if is_cpu else ("none", _NOT_HELD)
    if is_enforced(settings):
        mechanism, enforced = "cuda-preload", _ON_GPU
    tenants = tuple(
        TenantStatus(
            workload_id=workload_id,
            replica_id=replica_id,
            device_id=device_id,
            request=share.request,
            limit=share.limit,
            memory_mb=share.memory_mb,
            reason=f"it holds {share.request:g} of its device and may use {share.limit:g}",
        )
        for workload_id, replica_id, device_id, share in sorted(holders, key=lambda holder: (holder[2], holder[1]))
    )
    return SharingStatus(
        mechanism=mechanism,
        enforced=enforced if tenants else f"no device is shared yet; once one is: {enforced}",
        device_cpus=_CPUS_OF_DEVICE if is_cpu else 0.0,
        tenants=tenants,
    )
