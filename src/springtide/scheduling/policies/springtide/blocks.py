"""Which blocks of devices jobs have been on before: changes to them cost less, and a hurried job may count on that."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.topology import Layout, addresses, block_at
from springtide.scheduling.policies.springtide.memory import PAD_S, Devices, State, block_of
from springtide.solvers.reservations.fit import PlannedStretch
from springtide.solvers.reservations.reservation_table import Entry

# Of the blocks of a size so many have to have been used for a job to count on getting one of them.
NEARLY_ALL = 0.75


def same(one: Devices | None, other: Devices | None) -> bool:
    """Whether both are the same devices, in whatever order."""
    return one is other or (one is not None and other is not None and len(one) == len(other) and set(one) == set(other))


def remember(state: State, now_s: float, placed: Mapping[WorkloadId, PoolAllocation]) -> None:
    """Record the devices, and which blocks have been used: those that a job leaves after being on them."""
    devices: dict[WorkloadId, Devices] = {who: given.device_ids for who, given in placed.items()}
    formed_s: dict[WorkloadId, float] = {}
    for who, given in devices.items():
        before = state.devices.get(who)
        formed_s[who] = state.formed_s.get(who, now_s) if same(before, given) else now_s
    state.devices, state.formed_s = devices, formed_s
    state.held = {str(who): len(given) for who, given in devices.items()}


def mark_used(state: State, layout: Layout, now_s: float, stays: Mapping[WorkloadId, Devices]) -> None:
    """Note the blocks that jobs have left since the last decision, or leave now."""
    for who, devices in state.devices.items():
        if not same(stays.get(who), devices) and state.formed_s.get(who, now_s) < now_s:
            block = block_of(layout, devices)
            if block is None:
                continue
            level, number = block
            state.used += [0] * (level + 1 - len(state.used))
            state.used[level] |= 1 << number


def is_used(state: State, layout: Layout, devices: Devices) -> bool:
    """Whether some job has been on exactly these devices, as far as is remembered."""
    block = block_of(layout, devices)
    return block is not None and block[0] < len(state.used) and bool(state.used[block[0]] >> block[1] & 1)


def pin(state: State, layout: Layout, snapshot: Snapshot, entry: Entry) -> bool:
    """Let a job that has no time for fresh devices in on an idle block that a job was on before, if there is one.

    The reservation table promises it the run there; `settle` places it there. Returns whether it is in.
    """
    book, now_s = state.book, state.book.now_s
    if entry.ready_s > now_s:
        return False
    taken = 0
    for held in snapshot.allocations.values():
        taken |= layout.bitmap(held.device_ids)
    for devices in (*state.devices.values(), *state.pinned.values()):
        taken |= layout.bitmap(devices)
    idle = layout.present & ~taken
    cost_s = state.change_s + PAD_S
    bare = book.costs.without_reserve()
    for n in entry.sizes:
        level = n.bit_length() - 1
        run = PlannedStretch(now_s, bare.end_s(n, now_s, now_s + cost_s + entry.left / entry.rates[n]), n, cost_s)
        if n & (n - 1) or level >= len(state.used) or run.end_s > entry.deadline_s:
            continue
        if book.profile.least(now_s, run.end_s) < n:
            continue
        for number in addresses(state.used[level]):
            block = block_at(number << level, level)
            if not block & ~idle:
                entry.runs = (run,)
                book.load(entry)
                state.pinned[WorkloadId(entry.key)] = layout.devices_of(block)
                return True
    return _squeeze_in(state, layout, entry)


def _squeeze_in(state: State, layout: Layout, entry: Entry) -> bool:
    """The same, for a block that other jobs have to leave first: at sizes of which nearly every block has been used, so
    that the one that comes free most likely is. If it is not after all, the job is out again."""
    book = state.book
    cost_s = state.change_s + PAD_S
    for n in entry.sizes:
        level = n.bit_length() - 1
        if n & (n - 1) or level >= len(state.used) or n > layout.largest_block:
            continue
        is_usual = state.used[level].bit_count() >= NEARLY_ALL * (layout.present.bit_count() >> level)
        if not is_usual or book.now_s + cost_s + entry.left / entry.rates[n] > entry.deadline_s:
            continue
        # As if it held them already and had this much of a change still to pay for.
        entry.held, entry.residual_s = n, cost_s
        is_in = book.admit(entry, is_certain=True)
        entry.held, entry.residual_s = 0, 0.0
        if is_in:
            return True
    return False
