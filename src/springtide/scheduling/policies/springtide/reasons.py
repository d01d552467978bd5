"""One dominant reason for every change, refusal and waiting job of the policy `springtide`; and the planned future."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from springtide.core.decision import DeviceTrade, PlannedRun, PoolAllocation, Schedule, Snapshot, TimeClaim
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.memory import State
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.scheduling.replicas import wanted_replicas
from springtide.solvers.reservations.fit import PlannedStretch
from springtide.solvers.reservations.reservation_table import TOLERANCE_S, Entry, ReservationTable

NUM_NAMED = 3
BATCH_CHANGES = "this batch suits it better now"
IN_TIME_AGAIN = "its deadline, which was in danger, is kept as planned now"


def why_impossible(entry: Entry, row: PromiseRow, reservations: ReservationTable) -> str:
    """Why a job cannot make its deadline even alone."""
    sizes = [n for n in entry.sizes if n <= reservations.capacity]
    left_s = entry.deadline_s - reservations.now_s
    if not sizes:
        return f"needs at least {entry.sizes[0]} devices, the platform has {reservations.capacity} for jobs"
    best = min(sizes, key=lambda n: (reservations.costs.later[n] + entry.left / entry.rates[n], n))
    needs_s = reservations.costs.later[best] + entry.left / entry.rates[best]
    return (
        f"impossible even alone: on {devices_text(best)} it takes {_span(needs_s)}, start included, "
        f"and its deadline is in {_span(max(0.0, left_s))}"
    )


def why_no_room(entry: Entry, reservations: ReservationTable, rows: Mapping[WorkloadId, PromiseRow]) -> str:
    """Why a job that could make its deadline alone does not fit beside the promises given before."""
    left_s = entry.deadline_s - reservations.now_s
    later, rates, left = reservations.costs.later, entry.rates, entry.left
    fitting = [n for n in entry.sizes if n <= reservations.capacity and later[n] + left / rates[n] <= left_s]
    need = fitting[0] if fitting else entry.sizes[-1]
    free = max(0, reservations.profile.least(reservations.now_s, entry.deadline_s))
    named = _holders(reservations, rows)
    # Enough are free, but no schedule on the places that it could have was in time.
    apart = ", but not together: on more nodes, or once others have moved away, it would be late"
    return (
        f"no room beside the deadlines already promised: it needs at least {devices_text(need)} for "
        f"{_span(later[need] + left / rates[need])} before its deadline in {_span(max(0.0, left_s))}, "
        f"of which {free} are free all that time{apart if free >= need else ''}" + (f" ({named})" if named else "")
    )


def _holders(
    reservations: ReservationTable, rows: Mapping[WorkloadId, PromiseRow], *, is_promised: bool = False
) -> str:
    """The jobs of the table that hold most devices now, and how many each, or only the promised ones; empty if none
    holds any."""
    holders = sorted(
        (
            (other.size_at(reservations.now_s), WorkloadId(key))
            for key, other in reservations.entries.items()
            if other.size_at(reservations.now_s) and (other.is_promised or not is_promised)
        ),
        key=lambda holder: (-holder[0], holder[1]),
    )
    return _listed([f"'{rows[key].view.job.name}' has {count}" for count, key in holders if key in rows])


def _listed(parts: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = len(parts) - NUM_NAMED
    return ", ".join(parts[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def why_service_waits(reservations: ReservationTable, rows: Mapping[WorkloadId, PromiseRow], num_devices: int) -> str:
    """What a service that is asked and has no replica waits for. When it gets one is in the plan's claims."""
    if not num_devices:
        return "waits for a device: there is none that it may have whole"
    named = _holders(reservations, rows, is_promised=True)
    if named:
        return f"waits for a device: promised deadlines need them ({named})"
    soon = [
        key for key, entry in reservations.entries.items() if entry.is_promised and entry.end_s > reservations.now_s
    ]
    names = [f"'{rows[WorkloadId(key)].view.job.name}'" for key in soon if WorkloadId(key) in rows]
    if names:
        return f"waits for a device: promised deadlines need them soon ({_listed(names)})"
    return f"waits for a device: other services hold all {num_devices}"


def trade_notes(
    trades: Mapping[WorkloadId, DeviceTrade], snapshot: Snapshot, reservations: ReservationTable
) -> dict[WorkloadId, str]:
    """Why the number of a workload's devices changes, in words, where these trades say more than `_why` does."""
    notes: dict[WorkloadId, str] = {}
    names = _names(snapshot) if trades else {}
    for who, trade in trades.items():
        entry, held = reservations.entries.get(who), snapshot.allocations.get(who)
        before = held.num_devices if held is not None else 0
        after = before + trade.num_devices
        if trade.num_devices > 0:
            if trade.here_s is not None:
                why = _why(before, after, entry, reservations)
                notes[who] = f"{why}; a device-second here saves all jobs {trade.here_s:.2g} s"
        elif entry is None or not entry.is_late:
            kept = "" if entry is None else "it keeps its deadline with fewer" if after else "it goes on in time later"
            gone = _taken(trade, names, reservations) or ("it needs fewer devices" if kept else "")
            if gone:
                notes[who] = f"{gone}; {kept}" if kept else gone
    return notes


def _taken(trade: DeviceTrade, names: Mapping[WorkloadId, str], reservations: ReservationTable) -> str:
    """Who has the devices instead, and why; empty if no workload has."""
    who = _listed([repr(names[taker]) for taker in trade.to if taker in names])
    if not who:
        return ""
    is_one, num_given = len(trade.to) == 1, devices_text(min(-trade.num_devices, trade.num_to))
    if trade.there_s is None:
        entries = [reservations.entries.get(taker) for taker in trade.to]
        is_promised = all(entry is not None and entry.is_promised for entry in entries)
        return f"{who} {'needs' if is_one else 'need'} {num_given}" + (
            " for a promised deadline" if is_promised else ""
        )
    text = f"{who} {'gains' if is_one else 'gain'} more by {num_given}"
    if trade.here_s is None or trade.here_s > trade.there_s:
        return text
    return f"{text}: a device-second saves all jobs {trade.there_s:.2g} s there, {max(0.0, trade.here_s):.2g} s here"


def _names(snapshot: Snapshot) -> dict[WorkloadId, str]:
    """Services first: what they ask for is most often why a job of the table gives a device up."""
    return {view.service.service_id: view.service.name for view in snapshot.services} | {
        view.job.job_id: view.job.name for view in snapshot.jobs
    }


def reasons_of(
    snapshot: Snapshot,
    allocations: Mapping[WorkloadId, PoolAllocation],
    rows: list[PromiseRow],
    state: State,
) -> dict[WorkloadId, str]:
    """One reason for each job whose devices change, that holds none, or whose promise is given up or kept again."""
    reasons: dict[WorkloadId, str] = {}
    held_by = snapshot.allocations
    for row in rows:
        workload_id = row.job_id
        allocation, held = allocations.get(workload_id), held_by.get(workload_id)
        is_told = workload_id in state.given_up or workload_id in state.recovered
        if allocation is None or allocation is not held or is_told:
            reason = _reason_of(workload_id, allocation, held, state)
            if reason:
                reasons[workload_id] = reason
    for view in snapshot.services:
        workload_id = view.service.service_id
        is_waiting = workload_id not in allocations and wanted_replicas(view) > 0
        if is_waiting or allocations.get(workload_id) != held_by.get(workload_id):
            reasons[workload_id] = state.notes.get(workload_id, "its load")
    return reasons


def same_reasons(
    before: Mapping[WorkloadId, str],
    changed: Iterable[PromiseRow],
    snapshot: Snapshot,
    allocations: Mapping[WorkloadId, PoolAllocation],
    rows: list[PromiseRow],
    state: State,
) -> Mapping[WorkloadId, str]:
    """What `reasons_of` returns for a plan that is still valid, where `before` was returned the last time and only the
    jobs of `changed`, or what they hold, have changed since. Returns `before` itself if no reason changes."""
    if snapshot.services:
        return reasons_of(snapshot, allocations, rows, state)
    updated: dict[WorkloadId, str] = {}
    for row in changed:
        job_id = row.job_id
        updated[job_id] = _reason_of(job_id, allocations.get(job_id), snapshot.allocations.get(job_id), state)
    if all(before.get(job_id, "") == reason for job_id, reason in updated.items()):
        return before
    # In the order of the rows, as `reasons_of` returns them.
    merged = {**before, **updated}
    return {row.job_id: reason for row in rows if (reason := merged.get(row.job_id, ""))}


def _reason_of(
    workload_id: WorkloadId, allocation: PoolAllocation | None, held: PoolAllocation | None, state: State
) -> str:
    """The reason of one workload; empty if its devices do not change and its promise, if it has one, is kept."""
    if workload_id in state.given_up:
        return state.given_up[workload_id]
    again = IN_TIME_AGAIN if workload_id in state.recovered else ""
    if allocation is not None and allocation is held:
        return again
    before = held.num_devices if held is not None else 0
    after = allocation.num_devices if allocation is not None else 0
    if after and after == before and allocation is not None and held is not None:
        if set(allocation.device_ids) != set(held.device_ids):
            return "moved, so that another job's workers lie close together; it has the time for it"
        # What it holds may be the same and another object: a part of each device, where nodes are in pools.
        return BATCH_CHANGES if allocation.global_batch_size != held.global_batch_size else again
    reservations = state.reservations
    return state.notes.get(workload_id) or _why(before, after, reservations.entries.get(workload_id), reservations)


def _why(before: int, after: int, entry: Entry | None, reservations: ReservationTable) -> str:
    now_s = reservations.now_s
    if entry is None:
        if after > before:
            return f"starting on {devices_text(after)}" if not before else "devices that no promise needs now"
        # With an empty reservation table, other jobs without a deadline have the devices.
        why = "others need devices, too" if after else "others have the devices"
        if reservations.entries:
            is_promise = any(other.is_promised for other in reservations.entries.values())
            why = f"{'promised' if is_promise else 'pursued'} deadlines need the devices"
        return why if before else f"waiting: {why}"
    if after > before:
        if not before:
            return f"starting on {devices_text(after)}"
        rate = entry.rates[before] if before < len(entry.rates) else 0.0
        is_in_time = rate > 0.0 and entry.since_s + entry.work / rate <= entry.deadline_s
        return (
            "idle devices: it ends earlier"
            if is_in_time and len(entry.runs) == 1
            else "its deadline needs more devices now"
        )
    if entry.is_late:
        return "others need the devices; its deadline cannot be met any more, it ends as soon as it can"
    if after:
        return "others gain more by the devices; it is in time with fewer"
    if before and any(
        other.size_at(now_s) and other.deadline_s < entry.deadline_s for other in reservations.entries.values()
    ):
        return "makes room for more urgent deadlines; it goes on in time for its own"
    if before:
        return "makes room for other deadlines; it goes on in time for its own"
    if any(run.start_s > now_s for run in entry.runs):
        # Without the time, which changes with every plan: it is shown in the plan itself.
        return "planned to start later, in time for its deadline"
    return "no device for it yet; it starts as soon as there is one"


def claims_of(
    reasons: Mapping[WorkloadId, str],
    snapshot: Snapshot,
    allocations: Mapping[WorkloadId, PoolAllocation],
    state: State,
) -> dict[WorkloadId, TimeClaim]:
    """What these reasons claim about time, and which promises are given up."""
    entries, now_s = state.reservations.entries, snapshot.now_s
    claims: dict[WorkloadId, TimeClaim] = {}
    for workload_id in reasons:
        entry = entries.get(workload_id)
        if entry is None or entry.is_late or entry.end_s <= now_s or not entry.runs:
            continue
        before, after = snapshot.allocations.get(workload_id), allocations.get(workload_id)
        gives = before is not None and (after is None or after.num_devices < before.num_devices)
        starts_later = before is None and after is None and entry.runs[-1].start_s > now_s
        if gives or starts_later or workload_id in state.recovered:
            claims[workload_id] = TimeClaim(code="kept_in_time", at_s=entry.end_s)
    for key in state.given_up:
        if key in entries:
            entry = entries[key]
            # On its largest size all the time, on as few nodes as possible. By its committed schedule alone, which is
            # the same at every snapshot until it is planned anew.
            rates = state.full_rates[key] if key in state.slowed else entry.rates
            soonest_s = entry.since_s + entry.work / rates[entry.sizes[-1]]
            claims[WorkloadId(key)] = TimeClaim(
                code="given_up",
                at_s=entry.end_s if entry.end_s < math.inf else None,
                is_certain=soonest_s > entry.deadline_s + TOLERANCE_S,
            )
    for service_id, wait_s in state.waits.items():
        claims[service_id] = TimeClaim(code="waits_for", at_s=wait_s)
    return claims


class ReservedFuture(Mapping[WorkloadId, Schedule]):
    """The schedules of the reservation table from `now_s` on, converted to planned runs only when they are read."""

    def __init__(self, runs: Mapping[WorkloadId, Sequence[PlannedStretch]], now_s: float) -> None:
        self._runs = runs
        self._now_s = now_s

    def at(self, now_s: float) -> ReservedFuture:
        """The same schedules from another moment on."""
        return ReservedFuture(self._runs, now_s)

    def __iter__(self) -> Iterator[WorkloadId]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, job_id: WorkloadId) -> Schedule:
        return tuple(
            PlannedRun(start_s=max(run.start_s, self._now_s), end_s=run.end_s, num_devices=run.num_devices)
            for run in self._runs[job_id]
            if run.end_s > self._now_s
        )


def devices_text(count: int) -> str:
    """A number of devices as text."""
    return "1 device" if count == 1 else f"{count} devices"


def _span(seconds: float) -> str:
    """A length of time in seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
