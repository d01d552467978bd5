"""What the policy `springtide` remembers between decisions, as plain values for the journal, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from springtide.core.decision import Overheads, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.topology import Layout
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.solvers.reservations.capacity import Steps, constant
from springtide.solvers.reservations.fit import Costs, PlannedStretch
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# Plans add this much to the cost of a change: reality is then never later than the plan, whatever the control
# loop's timing and floating point do, and a job that ends leaves before another one starts in its place.
PAD_S = 0.01

Devices = Sequence[DeviceId]


class State:
    """What was decided: the reservation table, the jobs outside of it, the devices, and which blocks were used.

    `devices` are those decided for each job, `formed_s` since when a job is on them. `used[k]` is a bitmap of the
    aligned blocks of 2**k devices that some job has been on. `held` counts the devices decided for each job, also
    where it is not known any more which they were. `told` is what promises were to count on at the last decision; the
    reservation table counts on more where they did not fit. `num_surplus` devices are there now and no promise counts
    on them. `trials` says of jobs on which number of devices they are being tried (0: on none now), and how often they
    have been tried.
    """

    def __init__(self, book: ReservationTable) -> None:
        self.book = book
        self.devices: dict[WorkloadId, Devices] = {}
        self.held: dict[str, int] = {}
        self.told = book.steps
        self.num_surplus = 0
        self.formed_s: dict[WorkloadId, float] = {}
        self.used: list[int] = []
        # The fingerprints of the nodes, and of all that the last decision was made from.
        self.cluster = ""
        self.fingerprint = ""
        self.until_s: float | None = None
        self.scales: dict[str, float] = {}
        self.change_s = 0.0
        self.slowed: dict[str, float] = {}
        self.newcomers: set[str] = set()
        self.num_gone = 0
        self.notes: dict[WorkloadId, str] = {}
        self.pinned: dict[WorkloadId, Devices] = {}
        self.coded: dict[WorkloadId, tuple[Devices, list[int]]] = {}
        self.waiting: set[str] = set()
        self.detours: list[WorkloadId] = []
        self.trials: dict[WorkloadId, tuple[int, int]] = {}

    def encode(self, index_of: Mapping[DeviceId, int]) -> dict[str, Any]:
        """As plain values. Devices are their numbers in the cluster."""
        before, self.coded = self.coded, {}
        for who, devices in self.devices.items():
            known = before.get(who)
            if known is None or known[0] is not devices:
                known = (devices, [index_of[device] for device in devices])
            self.coded[who] = known
        return {
            "rule": RULE,
            "fingerprint": self.fingerprint,
            "cluster": self.cluster,
            "capacity": _encoded(self.book.steps),
            **({"told": _encoded(self.told)} if self.told != self.book.steps else {}),
            "until_s": self.until_s,
            "used": [format(bits, "x") for bits in self.used],
            "devices": {str(who): numbers for who, (_, numbers) in self.coded.items()},
            "notes": {str(who): text for who, text in self.notes.items()},
            "waiting": sorted(self.waiting),
            "detours": [str(who) for who in self.detours],
            "slowed": dict(self.slowed),
            **({"trials": {str(who): list(trial) for who, trial in self.trials.items()}} if self.trials else {}),
            "formed_s": {str(who): at_s for who, at_s in self.formed_s.items()},
            "jobs": {
                entry.key: [
                    entry.work,
                    entry.since_s,
                    entry.ready_s,
                    self.scales.get(entry.key, 1.0),
                    int(entry.is_late) + 2 * int(entry.is_promised),
                    [value for run in entry.was for value in run],
                ]
                for entry in self.book.entries.values()
            },
        }


RULE = "springtide-2"


def decode(
    memory: Any, rows: Mapping[WorkloadId, PromiseRow], snapshot: Snapshot, cluster: str, device_ids: Devices
) -> State:
    """The state that was encoded; a fresh one if the memory is another policy's. Jobs that are gone are left out."""
    is_ours = isinstance(memory, dict) and memory.get("rule") == RULE
    now_s = snapshot.now_s
    capacity = _decoded(memory["capacity"] if is_ours else len(device_ids))
    state = State(ReservationTable(capacity, now_s, costs_of(snapshot.overheads, 1)))
    state.cluster = cluster
    if not is_ours:
        return state
    state.told = _decoded(memory.get("told", memory["capacity"]))
    state.fingerprint, state.until_s = memory["fingerprint"], memory["until_s"]
    state.waiting = set(memory["waiting"])
    state.notes = {WorkloadId(who): text for who, text in memory["notes"].items()}
    state.trials = {WorkloadId(who): (size, number) for who, (size, number) in memory.get("trials", {}).items()}
    if memory["cluster"] == cluster:
        state.used = [int(bits, 16) for bits in memory["used"]]
        state.devices = {
            WorkloadId(who): tuple([device_ids[number] for number in numbers])
            for who, numbers in memory["devices"].items()
        }
        state.detours = [WorkloadId(who) for who in memory["detours"]]
        state.formed_s = {WorkloadId(who): at_s for who, at_s in memory["formed_s"].items()}
    else:
        _find_again(state, memory, snapshot, device_ids)
    state.held = {who: len(numbers) for who, numbers in memory["devices"].items()}
    state.cluster = memory["cluster"]
    for key, (work, since_s, ready_s, scale, flags, flat) in memory["jobs"].items():
        row = rows.get(WorkloadId(key))
        if row is None:
            state.num_gone += 1
            continue
        if scale != 1.0:
            state.scales[key] = scale
        factor = memory["slowed"].get(key, 1.0)
        if factor != 1.0:
            state.slowed[key] = factor
        runs = tuple(
            PlannedStretch(flat[at], flat[at + 1], flat[at + 2], flat[at + 3]) for at in range(0, len(flat), 4)
        )
        is_late, is_promised = bool(flags & 1), bool(flags & 2)
        state.book.load(_planned(state, row, work, since_s, ready_s, runs, is_late=is_late, is_promised=is_promised))
    return state


def _encoded(steps: Steps) -> int | list[list[float]]:
    return steps[0][1] if len(steps) == 1 else [list(step) for step in steps]


def _decoded(known: Any) -> Steps:
    return constant(known) if isinstance(known, int) else tuple([(from_s, count) for from_s, count in known])


def _find_again(state: State, memory: Mapping[str, Any], snapshot: Snapshot, device_ids: Devices) -> None:
    """On other nodes the addresses mean other devices: a job that holds as many as it was given keeps those."""
    alive = set(device_ids)
    for name, numbers in memory["devices"].items():
        who = WorkloadId(name)
        given = snapshot.allocations.get(who)
        if given is not None and given.num_devices == len(numbers) and alive >= set(given.device_ids):
            state.devices[who] = given.device_ids
            state.formed_s[who] = memory["formed_s"].get(name, snapshot.now_s)


def renew(state: State, row: PromiseRow) -> None:
    """A job's view has changed: its entry becomes what the memory would make of it, and nothing else."""
    old = state.book.entries.get(row.job_id)
    if old is not None:
        state.book.entries[old.key] = _planned(
            state,
            row,
            old.work,
            old.since_s,
            old.ready_s,
            old.was,
            is_late=old.is_late,
            is_promised=old.is_promised,
        )


def _planned(
    state: State,
    row: PromiseRow,
    work: float,
    since_s: float,
    ready_s: float,
    runs: tuple[PlannedStretch, ...],
    *,
    is_late: bool,
    is_promised: bool,
) -> Entry:
    """The entry of a job that has its place in the plan."""
    entry = entry_of(row, work, since_s=since_s, ready_s=ready_s, scale=state.scales.get(row.job_id, 1.0))
    factor = state.slowed.get(row.job_id, 1.0)
    if factor != 1.0:
        entry.rates = tuple([rate * factor for rate in entry.rates])
    entry.is_late, entry.is_promised = is_late, is_promised
    entry.was = entry.runs = runs
    return entry


def entry_of(
    row: PromiseRow, work: float, *, since_s: float, ready_s: float = 0.0, scale: float = 1.0, held: int = 0
) -> Entry:
    """The entry in the reservation table for a job, with `work` steps left at `since_s`."""
    rates = row.rates if scale == 1.0 else tuple([rate * scale for rate in row.rates])
    return Entry(
        row.job_id,
        work,
        row.deadline_s,
        rates,
        row.sizes,
        ready_s=ready_s,
        since_s=since_s,
        held=held,
        is_promised=row.can_promise,
    )


def costs_of(overheads: Overheads, largest: int, falls: Sequence[float] = ()) -> Costs:
    """What changes cost in plans: always as on a set of devices that no job has used, and a little more."""
    later = (0.0, *(overheads.cost_s(n) + PAD_S for n in range(1, largest + 1)))
    return Costs(later.__getitem__, later, later, falls)


def block_of(layout: Layout, devices: Devices) -> tuple[int, int] | None:
    """Level and number of the aligned block that the devices fill; None if they are no block."""
    count = len(devices)
    if not count or count & (count - 1):
        return None
    level = count.bit_length() - 1
    found = [layout.address_of.get(device, -1) for device in devices]
    first = min(found)
    if first < 0 or first >> level << level != first or max(found) != first + count - 1:
        return None
    return level, first >> level
