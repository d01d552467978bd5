"""One workload of instances that share devices, played under one way to choose devices, and checked all the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from springtide.core.resources import DeviceId, NodeId, Topology, make_node
from springtide.core.shares import MAX_LIMIT, Share
from springtide.core.workload import WorkloadId
from springtide.scheduling.sharing.ledger import LedgerBounds, Part, ShareLedger
from springtide.scheduling.sharing.packing import DiluPacker, Packer, PlacementRequest
from springtide_studies.dilu.share_splits import SplitPrice, place
from springtide_studies.rivals.policies.share_rivals import ExclusivePacker, FastGsPacker, InflessLimit, InflessRequest
from springtide_studies.workloads.dilu import DEVICE_MEMORY_MB, SharingEvent, SharingInstance, SharingWorkload

# The cluster of the paper's section 5.5.
NUM_NODES, DEVICES_PER_NODE = 1000, 4
# The check counts in these parts of a device, apart from the ledger's own.
_CHECK_UNITS = 10**6


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """A way to choose devices, within its bounds; with a `price` large models may be split."""

    name: str
    packer: Packer
    bounds: LedgerBounds = LedgerBounds()
    price: SplitPrice | None = None


CONTENDERS: tuple[Contender, ...] = (
    Contender(name="exclusive", packer=ExclusivePacker()),
    Contender(name="infless-l", packer=InflessLimit()),
    Contender(name="infless-r", packer=InflessRequest()),
    # Rectangles of rate and time bound each other: the sum of limits plays no part.
    Contender(name="fast-gs", packer=FastGsPacker(), bounds=LedgerBounds(max_limit=1e3)),
    Contender(name="dilu-printed", packer=DiluPacker(foresight=False)),
    Contender(name="dilu", packer=DiluPacker()),
    Contender(name="dilu-splits", packer=DiluPacker(), price=SplitPrice()),
)


class PackingRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has shown. `open_after` is the number of devices in use after each event.

    Fragmentation is what is not asked for of the devices in use at the peak: computing rate by request, and memory.
    `num_splits` large models were split, `peak_splits` of them live at the peak; `extra_device_hours` is what their
    repeated requests held, `extra_stages` how many stages more than one their pipelines had, all together.
    `violations` are sentences of the check, the first ten. `decision_s` is CPU time for each event, if it was timed.
    """

    peak_devices: int
    peak_at_s: float
    device_hours: float
    sm_fragmentation: float
    memory_fragmentation: float
    num_splits: int
    peak_splits: int
    extra_device_hours: float
    extra_stages: int
    num_refused: int
    num_violations: int
    violations: tuple[str, ...]
    open_after: tuple[int, ...]
    decision_s: tuple[float, ...] = ()

    def figures(self) -> dict[str, Any]:
        """As plain values for an answer, without the two long series."""
        plain = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in _SERIES}
        if self.decision_s:
            plain["decision_total_s"] = math.fsum(self.decision_s)
            plain["decision_p99_ms"] = 1e3 * float(np.percentile(self.decision_s, 99))
            plain["decision_max_ms"] = 1e3 * max(self.decision_s)
        return plain


_SERIES = frozenset(("open_after", "decision_s"))


def paper_cluster() -> Topology:
    """1,000 nodes of four devices with 40 GB each."""
    return Topology(
        nodes=tuple(
            make_node(f"n{at:04d}", DEVICES_PER_NODE, kind="gpu", memory_mb=DEVICE_MEMORY_MB) for at in range(NUM_NODES)
        )
    )


def play_packing(
    workload: SharingWorkload,
    contender: Contender,
    cluster: Topology,
    *,
    timer: Callable[[], float] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> PackingRun:
    """Play every event; with a `timer` of CPU time each decision is timed, its entry in the ledger included."""
    ledger = ShareLedger(cluster, contender.bounds)
    check = LedgerCheck(cluster, contender.bounds)
    account = _Account()
    times_s: list[float] = []
    for number, event in enumerate(workload.events):
        account.pass_time(event.at_s)
        request = _request(event.instance)
        began_s = timer() if timer is not None else 0.0
        parts: tuple[Part, ...] | None = ()
        if not event.is_start:
            if ledger.devices_of(request.workload_id):
                ledger.release(request.workload_id)
        else:
            parts = place(contender.packer, ledger, request, contender.price)
            if parts is not None:
                ledger.hold(request.workload_id, request.family, parts)
        if timer is not None:
            times_s.append(timer() - began_s)
        check.follow(event, contender.packer.booked(event.instance.share), parts)
        account.follow(event, parts, ledger.num_open)
        if on_progress is not None and number % 500 == 0:
            on_progress(number, len(workload.events))
    return account.run(check, tuple(times_s))


def _request(instance: SharingInstance) -> PlacementRequest:
    return PlacementRequest(
        workload_id=WorkloadId(instance.name),
        family=instance.family,
        share=instance.share,
        num_devices=instance.num_devices,
        is_large=instance.kind == "llm-inference",
    )


class LedgerCheck:
    """Adds up anew, from what was told alone, whether what is on a device stays within its bounds.

    It shares no sum with the ledger. It says so where a group is not on different devices of one node, a piece does
    not hold what was booked, the pieces of a model do not hold all of its memory, or an instance is left behind.
    """

    def __init__(self, cluster: Topology, bounds: LedgerBounds) -> None:
        self._node_of: Mapping[DeviceId, NodeId] = cluster.node_of
        self._memory_mb = {device.device_id: device.memory_mb for device in cluster.devices()}
        self._most = (_whole(bounds.max_request), _whole(bounds.max_limit))
        self._on: dict[DeviceId, dict[str, Share]] = {}
        self._of: dict[str, tuple[DeviceId, ...]] = {}
        self.violations: list[str] = []

    def follow(self, event: SharingEvent, booked: Share, parts: Sequence[Part] | None) -> None:
        """An instance has started on these parts, or gone from where it was."""
        name = event.instance.name
        if not event.is_start:
            for device_id in self._of.pop(name, ()):
                del self._on[device_id][name]
            return
        if parts is None:
            return
        devices = tuple(part.device_id for part in parts)
        self._of[name] = devices
        self._check_shape(event, booked, parts)
        for part in parts:
            held = self._on.setdefault(part.device_id, {})
            held[name] = part.share
            sums = (
                sum(_whole(share.request) for share in held.values()),
                sum(_whole(share.limit) for share in held.values()),
                sum(share.memory_mb for share in held.values()),
            )
            if any(
                total > most for total, most in zip(sums, (*self._most, self._memory_mb[part.device_id]), strict=True)
            ):
                self._say(event, f"{part.device_id} is beyond its bounds with {name}: {sums}")

    def _check_shape(self, event: SharingEvent, booked: Share, parts: Sequence[Part]) -> None:
        name, asked = event.instance.name, event.instance.num_devices
        if len({part.device_id for part in parts}) < len(parts):
            self._say(event, f"{name} has one device twice")
        if len({self._node_of[part.device_id] for part in parts}) > 1:
            self._say(event, f"{name} lies on several nodes")
        if any(part.share.request < booked.request or part.share.limit < booked.limit for part in parts):
            self._say(event, f"{name} has a piece with less than it asked for")
        if len(parts) < asked or (len(parts) > asked and asked > 1):
            self._say(event, f"{name} has {len(parts)} devices instead of {asked}")
        if sum(part.share.memory_mb for part in parts) != booked.memory_mb * asked:
            self._say(event, f"{name} has not as much memory as it asked for")

    def _say(self, event: SharingEvent, sentence: str) -> None:
        self.violations.append(f"at {event.at_s:.0f} s: {sentence}")


def _whole(fraction: float) -> int:
    return round(fraction * _CHECK_UNITS)


class _Account:
    """What a run is told by: devices in use over time, what is asked for, and splits."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, int]] = {}
        self._extra: dict[str, tuple[float, int]] = {}
        self._at_s = 0.0
        self._device_s = 0.0
        self._extra_s = 0.0
        self._num_open = 0
        self._num_splits = 0
        self._num_stages = 0
        self._num_refused = 0
        self._open_after: list[int] = []
        self._peak: tuple[int, float, float, float, int] = (0, 0.0, 0.0, 0.0, 0)

    def pass_time(self, at_s: float) -> None:
        """Nothing changed until then."""
        self._device_s += self._num_open * (at_s - self._at_s)
        self._extra_s += math.fsum(extra for extra, _ in self._extra.values()) * (at_s - self._at_s)
        self._at_s = at_s

    def follow(self, event: SharingEvent, parts: Sequence[Part] | None, num_open: int) -> None:
        """An event was decided, and so many devices are in use now."""
        instance = event.instance
        if not event.is_start:
            self._asked.pop(instance.name, None)
            self._extra.pop(instance.name, None)
        elif parts is None:
            self._num_refused += 1
        else:
            count, share = instance.num_devices, instance.share
            self._asked[instance.name] = (share.request * count, share.memory_mb * count)
            if len(parts) > count:
                self._extra[instance.name] = (share.request * (len(parts) - count), len(parts) - count)
                self._num_splits += 1
                self._num_stages += len(parts) - count
        self._num_open = num_open
        self._open_after.append(num_open)
        if num_open > self._peak[0]:
            request = math.fsum(each[0] for each in self._asked.values()) / num_open
            memory = sum(each[1] for each in self._asked.values()) / (num_open * DEVICE_MEMORY_MB)
            self._peak = (num_open, event.at_s, 1.0 - request, 1.0 - memory, len(self._extra))

    def run(self, check: LedgerCheck, decision_s: tuple[float, ...]) -> PackingRun:
        """All of it."""
        peak, at_s, sm_fragmentation, memory_fragmentation, peak_splits = self._peak
        return PackingRun(
            peak_devices=peak,
            peak_at_s=at_s,
            device_hours=self._device_s / 3600.0,
            sm_fragmentation=sm_fragmentation,
            memory_fragmentation=memory_fragmentation,
            num_splits=self._num_splits,
            peak_splits=peak_splits,
            extra_device_hours=self._extra_s / 3600.0,
            extra_stages=self._num_stages,
            num_refused=self._num_refused,
            num_violations=len(check.violations),
            violations=tuple(check.violations[:10]),
            open_after=tuple(self._open_after),
            decision_s=decision_s,
        )


def sizes_after(workload: SharingWorkload, number: int) -> list[tuple[int, int, int]]:
    """What is held by the instances after event `number`, device by device: request, limit (millionths) and MB."""
    live: dict[str, SharingInstance] = {}
    for event in workload.events[: number + 1]:
        if event.is_start:
            live[event.instance.name] = event.instance
        else:
            live.pop(event.instance.name, None)
    return [
        (_whole(each.share.request), _whole(each.share.limit), each.share.memory_mb)
        for each in live.values()
        for _ in range(each.num_devices)
    ]


def capacity() -> tuple[int, int, int]:
    """What a device of the paper's cluster holds, as `sizes_after` counts, within Omega = 1 and gamma."""
    return _CHECK_UNITS, _whole(MAX_LIMIT), DEVICE_MEMORY_MB
