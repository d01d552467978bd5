"""What services ask the policy `springtide` for, by how strong their claim is; and which of them wait, until when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from springtide.core.decision import EMPTY, ServiceView, Snapshot
from springtide.core.workload import WorkloadId
from springtide.scheduling.placement.allocation_ledger import AllocationLedger, serve_demand, serve_minimum
from springtide.scheduling.replicas import wanted_replicas
from springtide.solvers.reservations.reservation_table import ReservationTable

Counts = dict[WorkloadId, int]


class ServiceNeeds(NamedTuple):
    """Devices by service, as far as there are devices at all: the guaranteed minimums; these and a first replica for
    each service that is asked; all that their load asks for. `notes` are the reasons for the last."""

    least: Counts
    first: Counts
    wanted: Counts
    notes: Mapping[WorkloadId, str]


NO_NEEDS = ServiceNeeds({}, {}, {}, EMPTY)


def service_needs(snapshot: Snapshot) -> ServiceNeeds:
    """What the services of the snapshot need: every minimum comes before any first replica, these before growth."""
    ledger = AllocationLedger(snapshot)
    for view in snapshot.services:
        ledger.raise_towards(view.service.service_id, view.min_replicas)
    least = dict(ledger.counts)
    serve_minimum(ledger)
    first = dict(ledger.counts)
    serve_demand(ledger)
    order = [view.service.service_id for view in snapshot.services]
    return ServiceNeeds(
        least,
        {service_id: first[service_id] for service_id in order if service_id in first},
        {service_id: ledger.counts[service_id] for service_id in order if service_id in ledger.counts},
        ledger.notes,
    )


def lend_devices(
    reservations: ReservationTable, snapshot: Snapshot, first: Counts, given: Counts, num_present: int
) -> dict[WorkloadId, float]:
    """Give services without a replica devices that no schedule uses for some time. Returns until when each may stay.

    A replica gets a device for twice the time in which it drains, or more; the table has less until then. It leaves as
    long before that as it drains. `num_present` devices are there beside those in `given`, which is added to.
    """
    lent: dict[WorkloadId, float] = {}
    for view in snapshot.services:
        service_id = view.service.service_id
        if not first.get(service_id) or given.get(service_id) or num_present < 1:
            continue
        until_s = reservations.exceeded_at_s(num_present - 1)
        is_held = service_id in snapshot.allocations
        if until_s - snapshot.now_s <= least_loan_s(view, is_held=is_held):
            continue
        given[service_id] = 1
        num_present -= 1
        lent[service_id] = until_s - view.service.grace_s
        reservations.limit_until(num_present, until_s)
    return lent


def least_loan_s(view: ServiceView, *, is_held: bool) -> float:
    """For how long a device must be free so that a first replica may start, or stay, on it."""
    return view.service.grace_s if is_held else 2.0 * view.service.grace_s


def waiting_services(
    reservations: ReservationTable,
    snapshot: Snapshot,
    given: Mapping[WorkloadId, object],
    lent: Mapping[WorkloadId, float],
) -> dict[WorkloadId, float | None]:
    """The services that are asked and get no device, and when each can have one by the schedules of the table.

    A service with a lent device comes before them when its loan ends.
    """
    waits: dict[WorkloadId, float | None] = {}
    profile = reservations.profile.copy() if lent else reservations.profile
    for view in snapshot.services:
        if view.service.service_id in lent:
            profile.take(lent[view.service.service_id] + view.service.grace_s, math.inf, 1)
    for view in snapshot.services:
        if view.service.service_id in given or not wanted_replicas(view):
            continue
        span_s = least_loan_s(view, is_held=False) + 1e-3
        waits[view.service.service_id] = profile.earliest(len(waits) + 1, span_s, reservations.now_s, math.inf)
    return waits
