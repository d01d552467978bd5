"""What the policy `springtide` remembers between decisions, as plain values for the journal, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import astuple

from springtide.core.decision import Allocation, Overheads, PoolAllocation, PromiseCondition, Snapshot
from springtide.core.resources import DeviceId
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.topology import Layout
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.solvers.reservations.fit import Costs, PlannedStretch, work_done
from springtide.solvers.reservations.profile import Steps, constant
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# Plans add this much to the cost of a change. The real change is then never later than planned, in spite of the control
# loop's timing and of rounding, and a job that ends has left before another one starts in its place.
PAD_S = 0.01

# A job deviates from its plan if its reported step differs from the planned one by more than both together: this part
# of the steps planned since the last decision about it,
DEVIATION_FRACTION = 0.02
# and this many steps, since only whole steps are reported.
DEVIATION_STEPS = 2.0
# A first run that is promised is expected to be ahead: it deviates by that only beyond this part of the steps left.
AHEAD_FRACTION = 0.05

Devices = Sequence[DeviceId]


class State:
    """What was decided so far, for jobs in the reservation table and outside of it.

    `devices` are those decided for each workload, `formed_s` is when it got them. `held` counts them, also after a
    change of the cluster, when it is not known any more which devices they were. `used[k]` is a bitmap of the aligned
    blocks of 2**k devices that a job has been on.

    `promisable` is the capacity for promises at the last decision; the reservation table has more (`steps`) where
    promises did not fit into it. `num_surplus` devices are present now, but no promise may use them.

    `scales` and `slowed` are factors on the profiled speed of a job: by measurement, and for its scattered devices.
    `stop_first` are the jobs that have to be stopped before they get their new devices (moves.py), `hurried` those that
    a promise or a guaranteed minimum cannot wait for, in this decision. `trials` holds, for each job that is or was
    tried on more devices, their number (0: no trial now) and the number of trials so far.

    `lone` are the jobs that have no more than one worker: one that moves is stopped and starts anew, two changes.
    `lent` are the services with a first replica on a device that a promise needs later, and when each has to leave.
    `waits` are those that are asked and have no device, and when they can have one. `given_up` says why promised jobs
    are late. `price_s` is what a device-second was worth at the last decision, `conditions` what deadlines wait for
    that may be promised once their jobs are measured. `families` is what is known of jobs that may change their batch
    (families/learning.py), `batches` are those decided for them. `sure` are the speeds by number of devices that those
    in the table and promised first runs are planned on.
    """

    def __init__(self, reservations: ReservationTable) -> None:
        self.reservations = reservations
        self.devices: dict[WorkloadId, Devices] = {}
        self.held: dict[str, int] = {}
        self.promisable = reservations.steps
        self.num_surplus = 0
        self.formed_s: dict[WorkloadId, float] = {}
        self.used: list[int] = []
        # The fingerprints of the nodes, and of all that the last decision read.
        self.cluster = ""
        self.fingerprint = ""
        self.until_s: float | None = None
        self.scales: dict[str, float] = {}
        self.change_s = 0.0
        self.slowed: dict[str, float] = {}
        # The speeds of these without that factor: dividing by it would not give the same bits.
        self.full_rates: dict[str, Sequence[float]] = {}
        self.newcomers: set[str] = set()
        self.lone: set[WorkloadId] = set()
        self.num_gone = 0
        self.notes: dict[WorkloadId, str] = {}
        self.pinned: dict[WorkloadId, Devices] = {}
        self.encoded: dict[WorkloadId, tuple[Devices, list[int]]] = {}
        self.waiting: set[str] = set()
        self.stop_first: list[WorkloadId] = []
        self.hurried: set[WorkloadId] = set()
        self.trials: dict[WorkloadId, tuple[int, int]] = {}
        self.lent: dict[WorkloadId, float] = {}
        self.waits: dict[WorkloadId, float | None] = {}
        self.given_up: dict[str, str] = {}
        self.recovered: set[WorkloadId] = set()
        self.conditions: dict[WorkloadId, PromiseCondition] = {}
        self.price_s = 0.0
        self.families: dict[str, Any] | None = None
        self.batches: dict[WorkloadId, int] = {}
        self.sure: dict[WorkloadId, dict[int, float]] = {}

    def encode(self, index_of: Mapping[DeviceId, int], held: Mapping[WorkloadId, Allocation]) -> dict[str, Any]:
        """As plain values; a device is its number in the cluster. What a workload is to hold and does not yet is also
        kept by name, for when the nodes change on its way there."""
        before, self.encoded = self.encoded, {}
        for workload_id, devices in self.devices.items():
            known = before.get(workload_id)
            if known is None or known[0] is not devices:
                known = (devices, [index_of[device] for device in devices])
            self.encoded[workload_id] = known
        return {
            "rule": RULE,
            "fingerprint": self.fingerprint,
            "cluster": self.cluster,
            "capacity": _encoded(self.reservations.steps),
            **({"told": _encoded(self.promisable)} if self.promisable != self.reservations.steps else {}),
            "until_s": self.until_s,
            "used": [format(bits, "x") for bits in self.used],
            "devices": {str(workload_id): numbers for workload_id, (_, numbers) in self.encoded.items()},
            **({"moving": moving} if (moving := self._moving(held)) else {}),
            "notes": {str(workload_id): text for workload_id, text in self.notes.items()},
            "waiting": sorted(self.waiting),
            "detours": [str(workload_id) for workload_id in self.stop_first],
            "slowed": dict(self.slowed),
            **({"trials": {str(job_id): list(trial) for job_id, trial in self.trials.items()}} if self.trials else {}),
            **({"lent": sorted(self.lent)} if self.lent else {}),
            **({"waits": {str(who): at_s for who, at_s in self.waits.items()}} if self.waits else {}),
            **({"given_up": dict(self.given_up)} if self.given_up else {}),
            **({"recovered": sorted(self.recovered)} if self.recovered else {}),
            **(
                {"conditions": {str(who): list(astuple(known)) for who, known in self.conditions.items()}}
                if self.conditions
                else {}
            ),
            **({"price_s": self.price_s} if self.price_s else {}),
            **({"families": self.families} if self.families is not None else {}),
            **({"sure": {str(who): _pairs(rates) for who, rates in self.sure.items()}} if self.sure else {}),
            **({"batches": {str(job_id): size for job_id, size in self.batches.items()}} if self.batches else {}),
            "formed_s": {str(workload_id): at_s for workload_id, at_s in self.formed_s.items()},
            "jobs": {
                entry.key: [
                    entry.work,
                    entry.since_s,
                    entry.ready_s,
                    self.scales.get(entry.key, 1.0),
                    int(entry.is_late) + 2 * int(entry.is_promised),
                    [value for run in entry.committed for value in run],
                ]
                for entry in self.reservations.entries.values()
            },
        }

    def _moving(self, held: Mapping[WorkloadId, Allocation]) -> dict[str, list[str]]:
        return {
            str(workload_id): [str(device_id) for device_id in devices]
            for workload_id, devices in self.devices.items()
            if (has := held.get(workload_id)) is None or has.device_ids != tuple(devices)
        }

    def record_devices(self, now_s: float, placed: Mapping[WorkloadId, PoolAllocation]) -> None:
        """Record the devices of every workload, and since when it has them."""
        decided: dict[WorkloadId, Devices] = {
            workload_id: allocation.device_ids for workload_id, allocation in placed.items()
        }
        formed_s: dict[WorkloadId, float] = {}
        for workload_id, devices in decided.items():
            before = self.devices.get(workload_id)
            formed_s[workload_id] = self.formed_s.get(workload_id, now_s) if same_devices(before, devices) else now_s
        self.devices, self.formed_s = decided, formed_s
        self.held = {str(workload_id): len(devices) for workload_id, devices in decided.items()}

    def mark_used(self, layout: Layout, now_s: float, stays: Mapping[WorkloadId, Devices]) -> None:
        """Mark the blocks that jobs have been on and do not have in `stays`."""
        for workload_id, devices in self.devices.items():
            if not same_devices(stays.get(workload_id), devices) and self.formed_s.get(workload_id, now_s) < now_s:
                block = block_of(layout, devices)
                if block is None:
                    continue
                level, number = block
                self.used += [0] * (level + 1 - len(self.used))
                self.used[level] |= 1 << number

    def is_used(self, layout: Layout, devices: Devices) -> bool:
        """Whether a job is known to have been on exactly these devices."""
        block = block_of(layout, devices)
        return block is not None and block[0] < len(self.used) and bool(self.used[block[0]] >> block[1] & 1)


RULE = "springtide-2"
# The memory of a plan for devices of several models (accelerators/).
RULE_OF_MODELS = "models-1"


def decode(
    memory: Any, rows: Mapping[WorkloadId, PromiseRow], snapshot: Snapshot, cluster: str, device_ids: Devices
) -> State:
    """The encoded state without the jobs that are gone; a fresh state if the memory is of another policy."""
    is_ours = isinstance(memory, dict) and memory.get("rule") == RULE
    now_s = snapshot.now_s
    capacity = _decoded(memory["capacity"] if is_ours else len(device_ids))
    state = State(ReservationTable(capacity, now_s, costs_of(snapshot.overheads, 1)))
    state.cluster = cluster
    if not is_ours:
        return state
    state.promisable = _decoded(memory.get("told", memory["capacity"]))
    state.fingerprint, state.until_s = memory["fingerprint"], memory["until_s"]
    state.waiting = set(memory["waiting"])
    state.notes = {WorkloadId(workload_id): text for workload_id, text in memory["notes"].items()}
    # What a loan lasts is in `until_s`; it is reckoned anew at the next decision.
    state.lent = {WorkloadId(who): math.inf for who in memory.get("lent", ())}
    state.waits = {WorkloadId(who): at_s for who, at_s in memory.get("waits", {}).items()}
    state.given_up = dict(memory.get("given_up", {}))
    state.recovered = {WorkloadId(who) for who in memory.get("recovered", ())}
    for who, (step_s, size, measured_s) in memory.get("conditions", {}).items():
        state.conditions[WorkloadId(who)] = PromiseCondition(step_s=step_s, num_workers=size, measured_s=measured_s)
    state.price_s = memory.get("price_s", 0.0)
    state.families = memory.get("families")
    state.sure = {WorkloadId(job_id): dict(found) for job_id, found in memory.get("sure", {}).items()}
    for job_id in state.sure.keys() & rows.keys():
        rows[job_id].plan_on(state.sure[job_id])
    state.batches = {WorkloadId(job_id): size for job_id, size in memory.get("batches", {}).items()}
    state.trials = {WorkloadId(job_id): (size, number) for job_id, (size, number) in memory.get("trials", {}).items()}
    if memory["cluster"] == cluster:
        state.used = [int(bits, 16) for bits in memory["used"]]
        state.devices = {
            WorkloadId(workload_id): tuple([device_ids[number] for number in numbers])
            for workload_id, numbers in memory["devices"].items()
        }
        state.stop_first = [WorkloadId(workload_id) for workload_id in memory["detours"]]
        state.formed_s = {WorkloadId(workload_id): at_s for workload_id, at_s in memory["formed_s"].items()}
    else:
        _recover_devices(state, memory, snapshot, device_ids)
    state.held = {workload_id: len(numbers) for workload_id, numbers in memory["devices"].items()}
    state.cluster = memory["cluster"]
    entries: list[Entry] = []
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
        entries.append(
            _committed_entry(state, row, work, since_s, ready_s, runs, is_late=is_late, is_promised=is_promised)
        )
    state.reservations.load_all(entries)
    return state


def _pairs(rates: Mapping[int, float]) -> list[list[float]]:
    return [[n, rate] for n, rate in rates.items()]


def _encoded(steps: Steps) -> int | list[list[float]]:
    return steps[0][1] if len(steps) == 1 else [list(step) for step in steps]


def _decoded(known: Any) -> Steps:
    return constant(known) if isinstance(known, int) else tuple([(from_s, count) for from_s, count in known])


def _recover_devices(state: State, memory: Mapping[str, Any], snapshot: Snapshot, device_ids: Devices) -> None:
    """Recover the decided devices after a change of the nodes, when the remembered numbers mean other devices: a job
    that is on its way to others goes on to them, and one that holds as many as were decided for it keeps those."""
    alive, moving = set(device_ids), memory.get("moving", {})
    for name, numbers in memory["devices"].items():
        workload_id = WorkloadId(name)
        allocation = snapshot.allocations.get(workload_id)
        decided = tuple([DeviceId(device_id) for device_id in moving.get(name, ())])
        if not (decided and alive.issuperset(decided)) and allocation is not None:
            decided = allocation.device_ids
        if len(decided) == len(numbers) and alive.issuperset(decided):
            state.devices[workload_id] = decided
            state.formed_s[workload_id] = memory["formed_s"].get(name, snapshot.now_s)


def refresh_entry(state: State, row: PromiseRow) -> None:
    """Make the entry of a job anew from its changed view: the same entry that `decode` would make."""
    if row.job_id in state.sure:
        row.plan_on(state.sure[row.job_id])
    old = state.reservations.entries.get(row.job_id)
    if old is not None:
        state.reservations.entries[old.key] = _committed_entry(
            state,
            row,
            old.work,
            old.since_s,
            old.ready_s,
            old.committed,
            is_late=old.is_late,
            is_promised=old.is_promised,
        )


def _committed_entry(
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
    """The entry of a job whose schedule is `runs`."""
    entry = entry_of(row, work, since_s=since_s, ready_s=ready_s, scale=state.scales.get(row.job_id, 1.0))
    slow_down(state, entry, state.slowed.get(row.job_id, 1.0))
    entry.is_late, entry.is_promised = is_late, is_promised
    entry.committed = entry.runs = runs
    return entry


def slow_down(state: State, entry: Entry, factor: float) -> None:
    """Plan a job on scattered devices at this part of its speed."""
    if factor == 1.0:
        return
    state.slowed[entry.key], state.full_rates[entry.key] = factor, entry.rates
    entry.rates = tuple([rate * factor for rate in entry.rates])


def restore_speed(state: State, entry: Entry) -> None:
    """Undo the slowdown of scattered devices: the job gets other ones."""
    if state.slowed.pop(entry.key, 1.0) != 1.0:
        entry.rates = state.full_rates.pop(entry.key)


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
    """What changes cost in plans: as on devices that no job has used, and PAD_S more."""
    later = (0.0, *(overheads.cost_s(n) + PAD_S for n in range(1, largest + 1)))
    return Costs(later.__getitem__, later, later, falls)


def deviates(row: PromiseRow, state: State) -> bool:
    """Whether a job has reported more or less progress than was planned."""
    entry, total = state.reservations.entries.get(row.job_id), row.total
    reported_at_s = row.view.progress.progress_at_s
    if entry is None or total is None or not entry.committed or reported_at_s <= entry.since_s:
        return False
    done = work_done(entry.committed, entry.rates, reported_at_s)
    expected = total - entry.work + done
    most = DEVIATION_STEPS + DEVIATION_FRACTION * done
    is_sure = row.job_id in state.sure and row.view.job.batch is None
    more = AHEAD_FRACTION * max(0.0, total - expected) if is_sure else 0.0
    return not -most - more <= expected - row.done <= most


def same_devices(one: Devices | None, other: Devices | None) -> bool:
    """Whether both are the same devices, in whatever order."""
    return one == other or (one is not None and other is not None and len(one) == len(other) and set(one) == set(other))


def block_of(layout: Layout, devices: Devices) -> tuple[int, int] | None:
    """Level and number of the aligned block that consists of these devices; None if there is none."""
    count = len(devices)
    if not count or count & (count - 1):
        return None
    level = count.bit_length() - 1
    found = [layout.address_of.get(device, -1) for device in devices]
    first = min(found)
    if first < 0 or first >> level << level != first or max(found) != first + count - 1:
        return None
    return level, first >> level


def is_mixed(snapshot: Snapshot) -> bool:
    """Whether there are devices of several models, or were at the last decision."""
    return len(snapshot.cluster.accelerators) > 1 or is_of_models(snapshot.memory)


def is_of_models(memory: Any) -> bool:
    """Whether a plan for devices of several models left this memory."""
    return isinstance(memory, dict) and memory.get("rule") == RULE_OF_MODELS
