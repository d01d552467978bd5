"""Where exactly: from a number of devices for each workload to devices, moving as little as possible."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.core.decision import EMPTY, PoolAllocation, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId


def place(counts: Mapping[WorkloadId, int], snapshot: Snapshot) -> dict[WorkloadId, PoolAllocation]:
    """Give every workload its count of devices. Who holds some keeps its first ones, in rank order.

    New devices come from a node where the workload already is, if one has room; devices that nobody holds now come
    before devices that somebody still has to give back. The counts must fit into the cluster.
    """
    alive = snapshot.cluster.device_ids()
    node_of = {device.device_id: device.node_id for device in snapshot.cluster.devices()}
    batch_of = {view.job.job_id: view.job.global_batch_size for view in snapshot.jobs}
    placed: dict[WorkloadId, list[DeviceId]] = {}
    taken: set[DeviceId] = set()
    held_now = {device for held in snapshot.allocations.values() for device in held.device_ids}
    for workload_id, count in counts.items():
        held = snapshot.allocations.get(workload_id)
        kept = [device for device in held.device_ids if device in node_of][:count] if held is not None else []
        placed[workload_id] = kept
        taken.update(kept)
    for workload_id, count in counts.items():
        mine = placed[workload_id]
        missing = count - len(mine)
        if missing <= 0:
            continue
        nodes = {node_of[device] for device in mine}
        room = [device for device in alive if device not in taken]
        assert len(room) >= missing, "the counts do not fit into the cluster"
        order = {device: index for index, device in enumerate(alive)}
        room.sort(key=lambda device: (device in held_now, node_of[device] not in nodes, order[device]))
        mine += room[:missing]
        taken.update(room[:missing])
    return {
        workload_id: PoolAllocation(device_ids=tuple(devices), global_batch_size=batch_of.get(workload_id))
        for workload_id, devices in placed.items()
        if devices
    }


def held_counts(snapshot: Snapshot) -> Mapping[WorkloadId, int]:
    """How many devices each workload holds now."""
    if not snapshot.allocations:
        return EMPTY
    return {workload_id: held.num_devices for workload_id, held in snapshot.allocations.items()}
