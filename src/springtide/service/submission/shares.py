"""Shares in requests: a share that no device can hold is refused."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.core.errors import Conflict
from springtide.core.resources import Device
from springtide.core.shares import Share, make_share
from springtide.service.ports import ViewLike
from springtide.service.submission.option_models import ShareIn


def share_of(given: ShareIn | None) -> Share | None:
    """The share that a request names. Raises InvalidRequest."""
    return None if given is None else make_share(given.request, given.limit, given.memory_mb)


def check_share(view: ViewLike, share: Share | None, num_devices: int, name: str) -> None:
    """Raise Conflict for a share that no device here can hold, or that needs more devices than there are.

    `num_devices` is the fewest workers or replicas; each is on a device of its own.
    """
    if share is None:
        return
    devices = devices_of(view)
    if not devices:
        return
    largest_mb = max(device.memory_mb for device in devices)
    is_counted = all(device.memory_mb for device in devices)
    if is_counted and share.memory_mb > largest_mb:
        raise Conflict(
            f"{name} asks for {share.memory_mb} MB of a device's memory, and the largest device here has {largest_mb} "
            f"MB; ask for at most --memory {largest_mb}MB"
        )
    if num_devices > len(devices):
        has = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
        raise Conflict(
            f"{name} needs {num_devices} workers at once, each with its share of a device of its own, and the platform "
            f"has {has}; ask for at most --workers {len(devices)}, or start it with more slots"
        )


def devices_of(view: ViewLike) -> Sequence[Device]:
    """The devices of machines; places at a function service are left out."""
    return [device for node in view.nodes if node.functions is None for device in node.devices]


def num_devices_of(view: ViewLike) -> int:
    """How many devices machines have: counted without a list, because this is called for each of thousands of jobs."""
    return sum(len(node.devices) for node in view.nodes if node.functions is None)
