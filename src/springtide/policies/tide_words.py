"""What people read about loans and reclaims by the tide."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.core.tide import Tide
from springtide.core.workload import WorkloadId
from springtide.policies.pools import NodeView, PoolState
from springtide.policies.reclaim import told_needy
from springtide.policies.tide_losses import Losses
from springtide.policies.tide_outlook import Coming, Outlook, needed_now

# A reason names at most so many jobs.
_NUM_NAMED = 3


def reclaimed_text(
    pools: PoolState, nodes: Sequence[NodeView], missing: int, losses: Losses, *, is_minimum: bool
) -> str:
    """Why servers are taken at once, and what becomes of the jobs on them."""
    for_whom = told_needy(pools) if is_minimum else f"the load of services, which asks for {missing} more devices"
    lost: dict[WorkloadId, int] = {}
    for node in nodes:
        for job_id, count in node.jobs.items():
            lost[job_id] = lost.get(job_id, 0) + count
    shrinks, stops = [], []
    for job_id, count in lost.items():
        view = pools.job_of.get(job_id)
        if view is None:
            continue
        held = losses.held.get(job_id, 0)
        if count <= losses.spare(view):
            shrinks.append(f"'{view.job.name}' from {held} to {held - count}")
        else:
            stops.append(f"'{view.job.name}'")
    told = []
    if shrinks:
        told.append(f"shrinks {_some(shrinks)}")
    told.append(f"stops {_some(stops)}" if stops else "stops nobody")
    return f"taken back for {for_whom}: " + ", ".join(told)


def soon_text(pools: PoolState, step: Coming, tide: Tide) -> str:
    """Why a server is kept for services that do not need it yet."""
    more = step.num_devices - needed_now(pools)
    if step.in_s <= 0 or more <= 0:
        return f"services need {step.num_devices} devices"
    return f"forecast for {told_clock(pools.now_s + step.in_s, tide)} needs {more} more devices"


def loaned_text(pools: PoolState, outlook: Outlook) -> str:
    """Why a server is lent to training."""
    total = sum(node.num_devices for node in pools.nodes)
    if not outlook.is_known:
        return f"services need {needed_now(pools)} of {total} devices now, nothing is forecast yet"
    last = outlook.steps[-1]
    until = told_clock(last.until_s, pools.snapshot.tide)
    return f"forecast needs {last.num_devices} of {total} devices until {until}"


def told_clock(at_s: float, tide: Tide) -> str:
    """A moment on the platform's clock, counted from its start: hours and minutes of a day, seconds of a short one."""
    within_s = at_s % tide.day_s
    if tide.day_s < 3600.0:
        return f"second {within_s:.0f} of the day"
    minutes = int(within_s // 60.0)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"
