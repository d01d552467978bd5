"""Shares of devices in the answers of `run`, `deploy`, `quote` and `status`, as text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.cli.tables.columns import duration
from springtide.core.shares import Share
from springtide.core.status.platform import JobStatus, ServiceStatus


def share_words(share: Share) -> str:
    """0.3 of a device each, up to 0.6, with 4000 MB of its memory."""
    words = f"{share.request:g} of a device each"
    if share.limit > share.request:
        words += f", up to {share.limit:g} where it is free"
    return words + (f", with {share.memory_mb} MB of its memory" if share.memory_mb else "")


def share_range(share: Share | None) -> str:
    """0.3..0.6; the whole of a device for one who has it all."""
    return "whole" if share is None else f"{share.request:g}..{share.limit:g}"


def held_line(share: Share | None, enforced: str) -> str:
    """An indented line on what is held and what enforces that; nothing for whole devices."""
    if share is None:
        return ""
    return f"  holds {share_words(share)}\n" + (f"  enforced: {enforced}\n" if enforced else "")


def share_pairs(status: JobStatus | ServiceStatus) -> list[tuple[str, str]]:
    """The rows on its share among the details of a job or service; none for whole devices."""
    if status.share is None:
        return []
    return [("share", share_words(status.share)), ("enforced", status.enforced)]


def scaling_pairs(service: ServiceStatus) -> list[tuple[str, str]]:
    """What one replica is good for and how many the load needs by that; nothing where nobody knows."""
    if service.capacity_per_s is None:
        return []
    wanted = "" if service.wanted_replicas is None else f"; the load asks for {service.wanted_replicas}"
    return [("capacity", f"{service.capacity_per_s:.4g} requests/s of one replica{wanted}")]


def start_pairs(phases_s: Mapping[str, float]) -> list[tuple[str, str]]:
    """What the last start was made of; nothing where that was not measured."""
    if not phases_s:
        return []
    parts = ", ".join(f"{phase.replace('_', ' ')} {duration(seconds)}" for phase, seconds in phases_s.items())
    return [("last start", f"{duration(sum(phases_s.values()))}: {parts}")]
