"""Reads from the pods of a node which of them share which GPU, for the node's share daemon. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.pods.shares import SHARE_ANNOTATION, share_of
from springtide.backends.sharing.gpu.discovery import Gpu
from springtide.backends.sharing.gpu.table import GpuTenantEntry
from springtide.core.resources import DeviceId
from springtide.core.workload import ReplicaId, WorkloadId

_OVER_PHASES = ("Succeeded", "Failed")


class Tenants(NamedTuple):
    """The GPU tenants of a node, one entry per replica, and the problems of pods that could not be read as tenants."""

    entries: tuple[GpuTenantEntry, ...]
    problems: tuple[str, ...]


def tenants_of(
    pods: Iterable[Mapping[str, Any]], node_name: str, gpus: Iterable[Gpu], before: Iterable[GpuTenantEntry] = ()
) -> Tenants:
    """Read the pods of a node. A pod that is being deleted keeps its share until its containers have ended.

    A pod that held a share `before` and whose annotation can no longer be read keeps that share.
    """
    held = {entry.pod_uid: entry.share for entry in before}
    by_number = {gpu.number: gpu for gpu in gpus}
    entries: dict[tuple[str, str], GpuTenantEntry] = {}
    problems = []
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("uid", ""))):
        metadata = pod["metadata"]
        annotations = metadata.get("annotations") or {}
        is_over = (pod.get("status") or {}).get("phase") in _OVER_PHASES
        is_elsewhere = (pod.get("spec") or {}).get("nodeName", "") != node_name
        is_sharer = SHARE_ANNOTATION in annotations or metadata.get("uid") in held
        if not is_sharer or is_over or is_elsewhere:
            continue
        where = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
        share = share_of(pod)
        index = annotations.get(names.DEVICE_INDEX_ANNOTATION, "")
        gpu = by_number.get(int(index)) if index.isdecimal() else None
        if share is None:
            share = held.get(str(metadata["uid"]))
            kept = "" if share is None else f"; held to {share.request:g}..{share.limit:g} as before"
            problems.append(f"{where}: its annotation {SHARE_ANNOTATION} is no share{kept}")
        if share is None:
            continue
        if gpu is None or not gpu.uuid:
            told = ", ".join(str(number) for number in sorted(by_number)) or "none"
            problems.append(f"{where}: it is on GPU {index or '?'}, and the driver of this node tells of {told}")
            continue
        replica_id = ReplicaId(annotations.get(names.REPLICA_ANNOTATION) or metadata["name"])
        # Two platforms on one node may both have a replica of this id.
        tenant_id = ReplicaId(f"{replica_id}@{metadata.get('namespace', '')}")
        entries[tenant_id, gpu.uuid] = GpuTenantEntry(
            workload_id=WorkloadId(annotations.get(names.WORKLOAD_ANNOTATION, "")),
            replica_id=tenant_id,
            device_id=DeviceId(annotations.get(names.DEVICE_ANNOTATION) or f"{node_name}/{index}"),
            device_uuid=gpu.uuid,
            share=share,
            pod_uid=str(metadata["uid"]),
            is_slo=(metadata.get("labels") or {}).get(names.ROLE_LABEL) == "inference",
        )
    return Tenants(tuple(entries[key] for key in sorted(entries)), tuple(problems))
