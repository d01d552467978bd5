"""Devices and the workloads that share them, as text. Pure functions of statuses."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from springtide.cli.tables.columns import UNKNOWN, align, count, duration, number
from springtide.core.quantities import format_duration
from springtide.core.shares import Share
from springtide.core.status.platform import DeviceHolder, DeviceStatus, JobStatus, ServiceStatus
from springtide.core.status.shares import SharingStatus, TenantStatus

BAR_WIDTH = 24
LEGEND = "one bar is one device: █ used  ▒ granted, not used  · up to the limit  │ request"


def share_words(share: Share, devices_each: int = 1) -> str:
    """Like 0.3 of a device each, up to 0.6, with 4000 MB of its memory."""
    of = "a device each" if devices_each == 1 else f"each of {devices_each} devices of one node"
    words = f"{share.request:g} of {of}"
    if share.limit > share.request:
        words += f", up to {share.limit:g} where it is free"
    return words + (f", with {share.memory_mb} MB of its memory" if share.memory_mb else "")


def share_range(share: Share | None) -> str:
    """Like 0.3..0.6, or a text for a whole device."""
    return "whole" if share is None else f"{share.request:g}..{share.limit:g}"


def held_line(share: Share | None, enforced: str, devices_each: int = 1) -> str:
    """An indented line with the share and what enforces it; empty for whole devices."""
    if share is None:
        return ""
    return f"  holds {share_words(share, devices_each)}\n" + (f"  enforced: {enforced}\n" if enforced else "")


def share_pairs(status: JobStatus | ServiceStatus) -> list[tuple[str, str]]:
    """The rows about the share in the details of a job or service; none for whole devices."""
    if status.share is None:
        return []
    return [("share", share_words(status.share, status.devices_each)), ("enforced", status.enforced)]


def scaling_pairs(service: ServiceStatus) -> list[tuple[str, str]]:
    """Rows with the capacity of one replica and the number that the load needs; none if unknown."""
    if service.capacity_per_s is None:
        return []
    wanted = "" if service.wanted_replicas is None else f"; the load asks for {service.wanted_replicas}"
    return [("capacity", f"{service.capacity_per_s:.4g} requests/s of one replica{wanted}")]


def start_pairs(phases_s: Mapping[str, float]) -> list[tuple[str, str]]:
    """A row with the phases of the last start; none if they were not measured."""
    if not phases_s:
        return []
    parts = ", ".join(f"{phase.replace('_', ' ')} {duration(seconds)}" for phase, seconds in phases_s.items())
    return [("last start", f"{duration(sum(phases_s.values()))}: {parts}")]


def share_bar(tenant: TenantStatus, width: int = BAR_WIDTH) -> str:
    """A bar for the whole device: what the tenant uses, what it is granted beyond, and the rest up to its limit."""
    used, granted, limit = (_cells(value, width) for value in (tenant.used, tenant.granted, tenant.limit))
    cells = ["█" if cell < used else "▒" if cell < granted else "·" if cell < limit else " " for cell in range(width)]
    request = _cells(tenant.request, width)
    if 0 < request < width and request >= used:
        cells[request] = "│"
    return "[" + "".join(cells) + "]"


def _cells(fraction: float, width: int) -> int:
    return max(0, min(width, round(fraction * width))) if math.isfinite(fraction) else 0


def devices_text(devices: Sequence[DeviceStatus], sharing: SharingStatus, width: int | None = None) -> str:
    """Every device with its holders, and then what enforces their shares."""
    machines = [device for device in devices if device.kind != "function"]
    tenants: dict[str, list[TenantStatus]] = {device.device_id: [] for device in machines}
    for tenant in sharing.tenants:
        tenants.setdefault(tenant.device_id, []).append(tenant)
    names = {holder.replica_id: holder.workload_name for device in machines for holder in device.holders}
    parts = [_device(device, tenants[device.device_id], names, width) for device in machines]
    has_tenants = any(tenants.values())
    return "\n".join([*parts, "", *([LEGEND] if has_tenants else []), *enforced_lines(sharing, width)])


def _device(device: DeviceStatus, tenants: Sequence[TenantStatus], names: dict[str, str], width: int | None) -> str:
    head = f"{device.device_id} ({device.kind})"
    # The share daemon reports a new replica a moment later; until then only its share is known.
    known = {tenant.replica_id for tenant in tenants}
    coming = [holder for holder in device.holders if holder.replica_id not in known]
    if not tenants and not coming:
        return f"{head}  {'free' if device.workload_id is None else f'{device.workload_name}, the whole of it'}"
    requests = math.fsum([*(tenant.request for tenant in tenants), *(holder.share.request for holder in coming)])
    limits = math.fsum([*(tenant.limit for tenant in tenants), *(holder.share.limit for holder in coming)])
    used = math.fsum(tenant.used for tenant in tenants)
    sums = f"requests {number(requests, 3)} of 1, limits {number(limits, 3)}, used {used:.2f}"
    rows = [_tenant_row(tenant, names) for tenant in tenants] + [_coming_row(holder) for holder in coming]
    header: tuple[str, ...] = ("  WHO", "REQUEST", "LIMIT", "GRANTED", "USED", "", "STATE", "HELD BACK", "REASON")
    if device.kind == "gpu":
        counted = [_gpu_cells(tenant) for tenant in tenants] + [(UNKNOWN, UNKNOWN)] * len(coming)
        rows = [(*row[:-1], *cells, row[-1]) for row, cells in zip(rows, counted, strict=True)]
        header = (*header[:-1], "LAUNCHES", "MEMORY", header[-1])
    table = align(header, rows, width)
    return f"{head}  {count(len(rows), 'sharer')}, {sums}\n{table}"


def _tenant_row(tenant: TenantStatus, names: dict[str, str]) -> tuple[str, ...]:
    return (
        f"  {names.get(tenant.replica_id, tenant.workload_id)}",
        f"{tenant.request:.2f}",
        f"{tenant.limit:.2f}",
        f"{tenant.granted:.2f}",
        f"{tenant.used:.2f}",
        share_bar(tenant),
        UNKNOWN if tenant.state == "NONE" else tenant.state,
        format_duration(tenant.throttled_s),
        _reason(tenant) or UNKNOWN,
    )


def _gpu_cells(tenant: TenantStatus) -> tuple[str, str]:
    """The number of launches, and the tenant's device memory."""
    of = f" of {tenant.memory_mb}" if tenant.memory_mb else ""
    return str(tenant.num_launches), f"{tenant.memory_used_mb}{of} MB"


def _reason(tenant: TenantStatus) -> str:
    """The reason for the tenant's grant, and uses beyond its share or refusals."""
    parts = [tenant.reason] if tenant.reason else []
    if tenant.num_open:
        parts.append(f"{tenant.num_open} {'launch' if tenant.num_open == 1 else 'launches'} let through unheld")
    if tenant.num_denied:
        parts.append(f"{count(tenant.num_denied, 'allocation')} refused for its memory")
    return "; ".join(parts)


def _coming_row(holder: DeviceHolder) -> tuple[str, ...]:
    share = holder.share
    return (
        f"  {holder.workload_name}", f"{share.request:.2f}", f"{share.limit:.2f}", UNKNOWN, UNKNOWN, "", "starting",
        UNKNOWN, UNKNOWN,
    )  # fmt: skip


def enforced_lines(sharing: SharingStatus, width: int | None = None) -> list[str]:
    """What enforces shares on this platform, and how fast."""
    lines = _wrap(f"enforced: {sharing.enforced}", width)
    if sharing.mechanism == "none":
        return lines
    how = f"by {sharing.mechanism}"
    if sharing.device_cpus:
        part = "a core" if sharing.device_cpus == 1.0 else f"{number(sharing.device_cpus, 3)} of a core"
        how += f"; a device is {part}"
    if sharing.tick_s:
        how += f"; control every {format_duration(sharing.tick_s)}"
    if sharing.late_p99_s:
        how += f", late by at most {_milliseconds(sharing.late_p99_s)} in 99 of 100 turns"
    if sharing.reaction_p99_s:
        how += f"; a grant is in force {_milliseconds(sharing.reaction_p99_s)} after its decision (p99)"
    return [*lines, *_wrap(how, width)]


def _wrap(text: str, width: int | None) -> list[str]:
    return [text] if width is None else textwrap.wrap(text, max(40, width), subsequent_indent="  ")


def _milliseconds(seconds: float) -> str:
    return f"{number(seconds * 1000, 2)} ms"
