"""How shared devices affect a workload: its neighbours there, what it is granted, what is left."""

from __future__ import annotations

from springtide.control.records import JobRecord, ReplicaRecord, ServiceRecord
from springtide.core.resources import DeviceId
from springtide.core.shares import Share, load_of
from springtide.core.status.shares import SharingStatus, TenantStatus
from springtide.service.ports import ViewLike
from springtide.service.status.status import name_of
from springtide.service.submission.shares import devices_of

MAX_NAMED = 3


def share_evidence(record: JobRecord | ServiceRecord, view: ViewLike, sharing: SharingStatus) -> list[str]:
    """For each device that the workload shares: with which others, what is granted now and why, and what enforces it.

    For a workload that asks for a share and has no device yet: what the emptiest device has left. Empty for one that
    asks for whole devices.
    """
    told = record.job if isinstance(record, JobRecord) else record.service
    asked = told.share
    held = [replica for replica in record.replicas if replica.share is not None]
    lines: list[str] = []
    for replica in held[:MAX_NAMED]:
        for device_id in replica.device_ids:
            lines.append(_held(replica, device_id, view))
            lines += _granted(replica, device_id, sharing)
    if len(held) > MAX_NAMED:
        lines.append(f"and {len(held) - MAX_NAMED} more replicas with a share; `springtide devices` shows them all")
    if held:
        lines.append(f"shares are enforced by {sharing.mechanism}: {sharing.enforced}")
    elif asked is not None and not record.replicas and not _has_ended(record):
        lines.append(_wanted(asked, told.devices_each, view))
    return lines


def _has_ended(record: JobRecord | ServiceRecord) -> bool:
    return record.lifecycle.state.is_terminal if isinstance(record, JobRecord) else record.is_removed


def _part(share: Share) -> str:
    return f"{share.request:.3g} of a device (up to {share.limit:.3g})"


def _held(replica: ReplicaRecord, device_id: DeviceId, view: ViewLike) -> str:
    assert replica.share is not None
    others = [
        f"{name_of(other)} ({each.share.request:.3g} to {each.share.limit:.3g})"
        for other in _workloads(view)
        for each in other.replicas
        if device_id in each.device_ids and each.replica_id != replica.replica_id and each.share is not None
    ]
    beside = f"beside {', '.join(others)}" if others else "and is alone there"
    return f"holds {_part(replica.share)} on {device_id}, {beside}"


def _granted(replica: ReplicaRecord, device_id: DeviceId, sharing: SharingStatus) -> list[str]:
    for tenant in sharing.tenants:
        if (tenant.replica_id, tenant.device_id) == (replica.replica_id, device_id):
            state = "" if tenant.state == "NONE" else f", {tenant.state}"
            reason = f": {tenant.reason}" if tenant.reason else ""
            lines = [f"is granted {tenant.granted:.2f} there now and uses {tenant.used:.2f}{state}{reason}"]
            return lines + _on_gpu(tenant)
    return []


def _on_gpu(tenant: TenantStatus) -> list[str]:
    """On a GPU: what it launched and allocated, and what was let through or refused; empty on a CPU device."""
    lines = []
    if tenant.num_launches or tenant.memory_used_mb:
        of = f" of its {tenant.memory_mb}" if tenant.memory_mb else ""
        held = f"holds {tenant.memory_used_mb}{of} MB of the GPU's memory"
        lines.append(f"has launched {tenant.num_launches} kernels and graphs since it started and {held}")
    if tenant.num_open:
        lines.append(f"launches let through because its limit was not known: {tenant.num_open}")
    if tenant.num_denied:
        lines.append(f"allocations refused because of its memory limit (--memory): {tenant.num_denied}")
    return lines


def _wanted(asked: Share, each: int, view: ViewLike) -> str:
    """What is asked for, and the most that any device has left."""
    on_each = f" on each of {each} devices of one node" if each > 1 else ""
    held: dict[str, list[Share | None]] = {device.device_id: [] for device in devices_of(view)}
    for record in _workloads(view):
        for replica in record.replicas:
            for device_id in replica.device_ids:
                held.setdefault(device_id, []).append(replica.share)
    loads = {device: load_of(shares) for device, shares in held.items()}
    rooms = [(1.0 - load.request, device) for device, load in loads.items() if not load.is_exclusive]
    if not rooms:
        return f"asks for {_part(asked)}{on_each}; every device is held as a whole"
    left, device = max(rooms, key=lambda room: room[0])
    return f"asks for {_part(asked)}{on_each}; the most that is left is {max(0.0, left):.3g} of {device}"


def _workloads(view: ViewLike) -> list[JobRecord | ServiceRecord]:
    return [*view.jobs.values(), *view.services.values()]
