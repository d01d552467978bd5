"""How many replicas a service wants: from its load, its objective and how long it has had no requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from springtide.core.decision import ServiceView

# Replicas are taken away only when the rest would be loaded less than this, so that a wavering load does not flap.
SHRINK_BELOW_FRACTION = 0.6


def wanted_replicas(view: ServiceView) -> int:
    """Return how many replicas the load asks for, within the bounds in force.

    A service that loads, queues or answers is never idle, however long ago its last request ended. Where the co-scaler
    (serving/co_scaler.py) gives advice, that is followed instead.
    """
    if view.wanted_replicas is not None:
        return view.needed_replicas
    service = view.service
    demand = view.in_flight + view.queued
    running = view.num_ready + view.num_starting
    needed = math.ceil(demand / service.target_in_flight)
    if demand == 0 and view.num_starting == 0 and view.idle_s >= service.idle_s:
        wanted = 0
    elif demand > 0:
        wanted = max(1, needed)
        breaks_objective = service.slo_s is not None and (view.latency_p99_s or 0.0) > service.slo_s
        if breaks_objective and view.num_starting == 0 and demand > view.num_ready:
            wanted = max(wanted, view.num_ready + 1)
        if wanted < running and demand > (running - 1) * service.target_in_flight * SHRINK_BELOW_FRACTION:
            wanted = running
    else:
        wanted = min(running, 1)
    return max(view.min_replicas, min(view.max_replicas, wanted))


def next_idle_at_s(services: Sequence[ServiceView], now_s: float) -> float | None:
    """When the first service that is quiet now will have been idle long enough to shrink; None if none will."""
    # A thousandth of a second later, since after a rounding error to the early side the policy would be called again.
    moments = [
        now_s + view.service.idle_s - view.idle_s + 0.001
        for view in services
        if view.num_ready > view.min_replicas
        and view.in_flight + view.queued == 0
        and view.idle_s < view.service.idle_s
    ]
    return min(moments, default=None)
