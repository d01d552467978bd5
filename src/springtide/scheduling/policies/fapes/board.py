"""FaPES's Board: how many devices of every server each job is planned to hold in the rounds to come, and which ones.

A plan is a list of [first round, last round, [[server, devices], ...], batch], rounds counted on the platform's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from springtide.core.resources import Device, DeviceId, Topology
from springtide.core.workload import WorkloadId
from springtide.solvers.schedule_planning import Board, DevicePlan, Floats, Ints, Placed, Servers, round_lengths

# Plans reach a day ahead; what is later is one last block.
HORIZON_S = 86_400.0

Plan = list[list[Any]]


def servers_of(cluster: Topology, devices: Iterable[DeviceId]) -> Servers:
    """The servers with the devices that jobs may have. Nodes without switches count as below one common switch."""
    open_to_jobs = frozenset(devices)
    capacity = [sum(device.device_id in open_to_jobs for device in node.devices) for node in cluster.nodes]
    depth = max((len(node.switches) for node in cluster.nodes), default=0)
    levels: list[list[int]] = []
    for level in range(depth):
        # A switch is identified by its whole path to the root, so that equal names below different ones are different.
        ways = [node.switches[level:] if level < len(node.switches) else () for node in cluster.nodes]
        known: dict[tuple[str, ...], int] = {}
        levels.append([known.setdefault(way, len(known)) for way in ways])
    while len(levels) > 1 and len(set(levels[-2])) == 1:
        levels.pop()
    if not levels or len(set(levels[-1])) > 1:
        levels.append([0] * len(capacity))
    switches = np.array(levels, dtype=np.int64).T.reshape(len(capacity), len(levels))
    return Servers(capacity=np.array(capacity, dtype=np.int64), switches=np.ascontiguousarray(switches))


class Rounds:
    """The grid of the rounds to come: the present one, then single ones, far ahead blocks of several."""

    def __init__(self, number: int, now_s: float, round_s: float) -> None:
        self.number, self.now_s, self.round_s = number, now_s, round_s
        first_s = max(1e-3, (number + 1) * round_s - now_s)
        self.lengths_s: Floats = round_lengths(first_s, round_s, max(4, int(HORIZON_S / round_s)))
        widths = np.maximum(1, np.rint(self.lengths_s / round_s)).astype(np.int64)
        widths[0] = 1
        self.offsets: Ints = np.concatenate(([0], np.cumsum(widths)))

    @property
    def num_rounds(self) -> int:
        """How many single rounds the grid covers."""
        return int(self.offsets[-1])

    def first_of(self, entry: int) -> int:
        """The number of the first round of an entry of the grid."""
        return self.number + int(self.offsets[entry])

    def last_of(self, entry: int) -> int:
        """The number of the last round of an entry of the grid."""
        return self.number + int(self.offsets[entry + 1]) - 1

    def plan_of(self, schedule: DevicePlan, batches: Sequence[int]) -> Plan:
        """A schedule on this grid as a plan in numbers of rounds."""
        return [
            [self.first_of(stretch.first), self.last_of(stretch.last), [list(pair) for pair in stretch.placed], batch]
            for stretch, batch in zip(schedule.stretches, batches, strict=True)
        ]


def loads_of(plans: Iterable[Plan], rounds: Rounds, num_servers: int) -> Ints:
    """How many devices of every server are planned in every entry of the grid: the most in any of its rounds."""
    starts: list[int] = []
    ends: list[int] = []
    servers: list[int] = []
    counts: list[int] = []
    for plan in plans:
        for first, last, placed, _ in plan:
            begin, end = max(first - rounds.number, 0), min(last + 1 - rounds.number, rounds.num_rounds)
            if begin >= end:
                continue
            for server, count in placed:
                starts.append(begin)
                ends.append(end)
                servers.append(server)
                counts.append(count)
    change = np.zeros((rounds.num_rounds + 1, num_servers), dtype=np.int64)
    columns = np.array(servers, dtype=np.int64)
    np.add.at(change, (np.array(starts, dtype=np.int64), columns), counts)
    np.subtract.at(change, (np.array(ends, dtype=np.int64), columns), counts)
    loads = np.cumsum(change[:-1], axis=0)
    found: Ints = np.maximum.reduceat(loads, rounds.offsets[:-1], axis=0)
    return found


def load_of(plan: Plan, rounds: Rounds) -> tuple[list[int], Ints]:
    """The servers that a plan uses, and how many devices of each in every entry of the grid."""
    used = sorted({server for _, _, placed, _ in plan for server, _ in placed})
    column = {server: number for number, server in enumerate(used)}
    narrow: Plan = [
        [first, last, [[column[server], count] for server, count in placed], batch]
        for first, last, placed, batch in plan
    ]
    return used, loads_of([narrow], rounds, len(used))


def make_board(servers: Servers, rounds: Rounds, plans: Iterable[Plan], low: float, high: float) -> Board:
    """The Board with these plans on it."""
    loads = loads_of(plans, rounds, len(servers.capacity))
    return Board(servers, rounds.lengths_s, rounds.round_s, low=low, high=high, loads=loads)


def now_of(plan: Plan, number: int) -> tuple[Placed, int | None]:
    """The devices and the batch of a plan in one round; none if the job holds nothing then."""
    for first, last, placed, batch in plan:
        if first <= number <= last:
            return tuple((server, count) for server, count in placed), batch
    return (), None


def set_batch(plan: Plan, number: int, batch: int | None) -> None:
    """Set the batch of the stretch that contains a round."""
    for stretch in plan:
        if stretch[0] <= number <= stretch[1]:
            stretch[3] = batch


class Seats:
    """Chooses devices: first those that a job holds, then idle ones, pairs under one PCIe switch together."""

    def __init__(self, cluster: Topology, devices: Iterable[DeviceId], taken: Iterable[DeviceId], unit: int) -> None:
        open_to_jobs = frozenset(devices)
        self._taken = frozenset(taken)
        self._unit = unit
        self._nodes = cluster.nodes
        self._free: list[dict[DeviceId, Device]] = [
            {device.device_id: device for device in node.devices if device.device_id in open_to_jobs}
            for node in cluster.nodes
        ]
        self._at = {device_id: server for server, free in enumerate(self._free) for device_id in free}

    def counts(self, devices: Iterable[DeviceId]) -> Placed:
        """How many of the devices are on which server."""
        found: dict[int, int] = {}
        for device_id in devices:
            server = self._at.get(device_id)
            if server is not None:
                found[server] = found.get(server, 0) + 1
        return tuple(sorted(found.items()))

    def assign(
        self, wanted: Mapping[WorkloadId, Placed], held: Mapping[WorkloadId, Sequence[DeviceId]]
    ) -> dict[WorkloadId, tuple[DeviceId, ...]]:
        """Devices in rank order for each job; one that keeps a server keeps its devices there. The counts must fit."""
        chosen: dict[WorkloadId, tuple[DeviceId, ...]] = {}
        missing: list[tuple[WorkloadId, int, int]] = []
        for job_id, placed in wanted.items():
            left = dict(placed)
            mine = [device_id for device_id in held.get(job_id, ()) if device_id in self._at]
            keeps: list[DeviceId] = []
            for device_id in self._whole_first(mine, left):
                server = self._at[device_id]
                if left.get(server, 0) > 0:
                    left[server] -= 1
                    keeps.append(device_id)
                    del self._free[server][device_id]
            kept = frozenset(keeps)
            chosen[job_id] = tuple(device_id for device_id in mine if device_id in kept)
            missing += [(job_id, server, count) for server, count in left.items() if count]
        for job_id, server, count in missing:
            chosen[job_id] += tuple(self._take(server, count))
        return chosen

    def _whole_first(self, mine: Sequence[DeviceId], left: Mapping[int, int]) -> Sequence[DeviceId]:
        """If some devices have to be given up, whole pairs are kept before halves."""
        if len(mine) <= sum(left.values()):
            return mine
        pairs: dict[tuple[int, int], int] = {}
        keys = {device_id: self._pair(device_id) for device_id in mine}
        for key in keys.values():
            pairs[key] = pairs.get(key, 0) + 1
        return sorted(mine, key=lambda device_id: -pairs[keys[device_id]])

    def _pair(self, device_id: DeviceId) -> tuple[int, int]:
        server = self._at[device_id]
        device = self._free[server][device_id]
        return server, device.index // self._unit

    def _take(self, server: int, count: int) -> list[DeviceId]:
        free = self._free[server]
        pairs: dict[int, list[DeviceId]] = {}
        for device_id, device in free.items():
            pairs.setdefault(device.index // self._unit, []).append(device_id)

        def order(devices: Sequence[DeviceId]) -> tuple[bool, bool]:
            """Pairs that are idle now, then idle halves, then devices that others are still giving back."""
            return any(device_id in self._taken for device_id in devices), len(devices) < self._unit

        found = [device_id for devices in sorted(pairs.values(), key=order) for device_id in devices][:count]
        assert len(found) == count, "the plans do not fit into the cluster"
        for device_id in found:
            del free[device_id]
        return found
