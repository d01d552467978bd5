"""Blocks of devices that jobs have been on before: a change to one costs less, so that an urgent job may still fit."""

from __future__ import annotations

from springtide.core.decision import Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.topology import Layout, addresses, block_at
from springtide.scheduling.policies.springtide.memory import PAD_S, State
from springtide.solvers.reservations.fit import PlannedStretch
from springtide.solvers.reservations.reservation_table import Entry

# From this fraction of used blocks of its size on, a job is admitted on a block that is not free yet.
NEARLY_ALL = 0.75


def admit_on_used_block(state: State, layout: Layout, snapshot: Snapshot, entry: Entry) -> bool:
    """Admit a job that has no time for a change to fresh devices on an idle block that a job has been on before.

    The reservation table promises it the run there; `assign_devices` places it there. Returns whether it is in.
    """
    reservations, now_s = state.reservations, state.reservations.now_s
    if entry.ready_s > now_s:
        return False
    taken = 0
    for held in snapshot.allocations.values():
        taken |= layout.bitmap(held.device_ids)
    for devices in (*state.devices.values(), *state.pinned.values()):
        taken |= layout.bitmap(devices)
    idle = layout.present & ~taken
    cost_s = state.change_s + PAD_S
    bare = reservations.costs.without_reserve()
    for n in entry.sizes:
        level = n.bit_length() - 1
        run = PlannedStretch(now_s, bare.end_s(n, now_s, now_s + cost_s + entry.left / entry.rates[n]), n, cost_s)
        if n & (n - 1) or level >= len(state.used) or run.end_s > entry.deadline_s:
            continue
        if reservations.profile.least(now_s, run.end_s) < n:
            continue
        for number in addresses(state.used[level]):
            block = block_at(number << level, level)
            if not block & ~idle:
                entry.runs = (run,)
                reservations.load(entry)
                state.pinned[WorkloadId(entry.key)] = layout.devices_of(block)
                return True
    return _admit_on_freed_block(state, layout, entry)


def _admit_on_freed_block(state: State, layout: Layout, entry: Entry) -> bool:
    """Admit the job on a block that other jobs have to leave first, at a size of which nearly all blocks have been
    used: the block that becomes free most likely is one of them. If it is not, `assign_devices` drops the job again."""
    reservations = state.reservations
    cost_s = state.change_s + PAD_S
    for n in entry.sizes:
        level = n.bit_length() - 1
        if n & (n - 1) or level >= len(state.used) or n > layout.largest_block:
            continue
        is_usual = state.used[level].bit_count() >= NEARLY_ALL * (layout.present.bit_count() >> level)
        if not is_usual or reservations.now_s + cost_s + entry.left / entry.rates[n] > entry.deadline_s:
            continue
        # Fitted as if it held the devices already, with the cheaper change still to pay for.
        entry.held, entry.residual_s = n, cost_s
        is_in = reservations.admit(entry, is_certain=True)
        entry.held, entry.residual_s = 0, 0.0
        if is_in:
            return True
    return False
