"""Shares of devices and several devices in requests: what no device or node can hold is refused."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.control.records import ServiceRecord
from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.options.rules import NO_PARTS_IN_PODS
from springtide.core.resources import Device
from springtide.core.shares import Share, make_share
from springtide.core.workload import DEVICES_EACH
from springtide.service.ports import ViewLike
from springtide.service.submission.option_models import ShareIn
from springtide.service.submission.schemas import JobIn


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


def check_parts(view: ViewLike, name: str, each: int, old: ServiceRecord | None, *, has_pods: bool) -> None:
    """Refuse a service whose replicas' shares of `each` devices cannot be had here. Raises InvalidRequest, Conflict.

    `old` is the record of the service of that name, if there is one.
    """
    if old is not None and not old.is_removed and old.service.devices_each != each:
        held = "1 device" if old.service.devices_each == 1 else f"shares of {old.service.devices_each} devices"
        raise Conflict(
            f"each replica of {name} holds {held}, and that cannot change while it is deployed; remove it first "
            f"(springtide cancel {name}), or deploy it under another name"
        )
    if each > 1 and has_pods:
        raise InvalidRequest(NO_PARTS_IN_PODS)
    nodes = [node for node in view.nodes if node.functions is None]
    if each == 1 or not nodes:
        return
    largest = max(len(node.devices) for node in nodes)
    if each > largest:
        raise Conflict(
            f"{name} asks for shares of {each} devices of one node for each replica, and the largest node here has "
            f"{largest}; ask for at most {max(count for count in DEVICES_EACH if count <= largest)}, or start the "
            "platform with more slots"
        )


def speed_text(request: JobIn) -> str:
    """What of a worker's devices its speed depends on, as a part of what runs of one kind have in common."""
    share, each = share_of(request.options.share), request.options.devices_each
    part = "" if share is None else f" {share.request:g} {share.limit:g}"
    return f"{part} {each} each" if each > 1 else part


def check_devices(view: ViewLike, request: JobIn, *, has_pods: bool) -> None:
    """Refuse a job whose workers' shares, or several devices each, do not fit the devices that there are.

    In pods, workers with several devices wait, and the job says for what: nodes come and go there. Raises Conflict.
    """
    each, name, least = request.options.devices_each, request.name, request.options.min_workers
    share = share_of(request.options.share)
    check_share(view, share, least if each == 1 else 1, name)
    if share is not None and each > 1 and has_pods:
        raise InvalidRequest(NO_PARTS_IN_PODS)
    sizes = [len(node.devices) for node in view.nodes if node.functions is None]
    if each == 1 or not sizes or has_pods:
        return
    largest = max(sizes)
    if each > largest:
        fitting = [count for count in DEVICES_EACH if count <= largest]
        raise Conflict(
            f"{name} asks for {each} devices for each worker, all of one node, and the largest node here has "
            f"{largest}; ask for at most --gpu {max(fitting, default=1)}, or start the platform with more slots"
        )
    most = sum(size // each for size in sizes)
    if least > most:
        raise Conflict(
            f"{name} needs {least} workers of {each} devices at once, and the platform has room for {most}; ask for at "
            f"most --workers {most}, or start it with more slots"
        )


def devices_of(view: ViewLike) -> Sequence[Device]:
    """The devices of machines; places at a function service are left out."""
    return [device for node in view.nodes if node.functions is None for device in node.devices]


def num_devices_of(view: ViewLike) -> int:
    """How many devices machines have: counted without a list, because this is called for each of thousands of jobs."""
    return sum(len(node.devices) for node in view.nodes if node.functions is None)
