"""What this machine offers: its GPUs, or CPU slots where there is none, as one node or as nodes that pools own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from springtide.core.errors import InvalidRequest
from springtide.core.resources import Device, DeviceId, Node, NodeId, Pool, make_node

_QUERY_TIMEOUT_S = 10.0


def discover_node(num_slots: int | None = None, *, name: str = "local") -> Node:
    """Return this machine as a node: one device for each GPU, else `num_slots` CPU slots (default: one a core).

    Raises InvalidRequest for fewer than one slot. With GPUs, `num_slots` limits how many of them are offered.
    """
    if num_slots is not None and num_slots < 1:
        raise InvalidRequest(f"a machine needs at least one slot, got {num_slots}; for example 2")
    num_gpus = count_gpus()
    if num_gpus:
        return make_node(name, min(num_gpus, num_slots or num_gpus), kind="gpu")
    return make_node(name, num_slots or os.cpu_count() or 1, kind="cpu")


def split_node(node: Node, pools: Mapping[Pool, int]) -> tuple[Node, ...]:
    """Cut a machine into nodes of one device each, `<name>-0` and so on: the unit that is loaned.

    The last of them are owned by inference, the others by training; a pool that `pools` leaves out owns the rest.
    Raises InvalidRequest if the numbers do not fit the machine.
    """
    total = len(node.devices)
    asked = sum(pools.values())
    if asked > total or (len(pools) == 2 and asked != total):
        had = f"there {'is' if total == 1 else 'are'} {total}"
        raise InvalidRequest(
            f"the pools take {asked} slots and {had}: ask for {total} together, or name one pool and leave the other "
            "the rest, like inference=1; --slots N changes how many there are"
        )
    num_inference = pools.get("inference", total - pools.get("training", total))
    return tuple(
        _part_of(node, device, "inference" if place >= total - num_inference else "training")
        for place, device in enumerate(node.devices)
    )


def _part_of(node: Node, device: Device, pool: Pool) -> Node:
    name = NodeId(f"{node.node_id}-{device.index}")
    part = Device(device_id=DeviceId(f"{name}/0"), node_id=name, index=0, kind=device.kind)
    return Node(node_id=name, devices=(part,), pool=pool, home=pool, switches=node.switches)


def count_gpus() -> int:
    """Return how many GPUs the driver lists; 0 where there is no driver or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if listing.returncode != 0:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
