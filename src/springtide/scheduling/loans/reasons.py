"""What people read about loans and reclaims by the tide."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.core.quantities import format_duration
from springtide.core.workload import WorkloadId
from springtide.scheduling.loans.losses import Losses
from springtide.scheduling.loans.outlook import Coming, DemandOutlook, needed_now
from springtide.scheduling.loans.pools import NodeView, PoolState
from springtide.scheduling.loans.reclaim import needy_services_text
from springtide.scheduling.placement.gangs import devices_text

# A reason names at most so many jobs.
_NUM_NAMED = 3


def _more(count: int) -> str:
    return "1 device more" if count == 1 else f"{count} devices more"


def reclaimed_text(
    pools: PoolState, nodes: Sequence[NodeView], missing: int, losses: Losses, *, is_minimum: bool
) -> str:
    """Why servers are taken at once, and what becomes of the jobs on them."""
    for_whom = needy_services_text(pools) if is_minimum else f"the load of services, which asks for {_more(missing)}"
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
    parts = []
    if shrinks:
        parts.append(f"shrinks {_some(shrinks)}")
    parts.append(f"stops {_some(stops)}" if stops else "stops nobody")
    return f"taken back for {for_whom}: " + ", ".join(parts)


def soon_text(pools: PoolState, step: Coming) -> str:
    """Why a server is kept for services that do not need it yet."""
    more = step.num_devices - needed_now(pools)
    if more <= 0:
        return f"services need {devices_text(step.num_devices)}"
    when = f"in {format_duration(step.in_s)}" if step.in_s > 0 else "from now on"
    return f"forecast needs {more} more {'device' if more == 1 else 'devices'} {when}"


def loaned_text(pools: PoolState, outlook: DemandOutlook) -> str:
    """Why a server is lent to training."""
    # Devices that are given in parts are not among them.
    total = sum(node.num_devices for node in pools.nodes)
    whole = "1 whole device" if total == 1 else f"{total} whole devices"
    if not outlook.is_known:
        return f"services need {needed_now(pools)} of {whole} now, nothing is forecast yet"
    last = outlook.steps[-1]
    span_s = max(0.0, last.until_s - pools.now_s)
    return f"forecast needs {last.num_devices} of {whole} for the next {format_duration(span_s)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"
