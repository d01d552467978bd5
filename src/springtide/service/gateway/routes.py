"""Builds the gateway's routes from the platform's view: the services and the addresses of their replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from springtide.control.records import ReplicaRecord, ReplicaState, ServiceRecord, ServiceState
from springtide.control.releases.steps import is_left, version_of
from springtide.core.workload import InferenceService, WorkloadId
from springtide.service.platform import PlatformView
from springtide.serving.frames import Identify
from springtide.serving.router import ReplicaRoute, ServiceRoute


def service_routes(
    view: PlatformView,
    *,
    token_of: Callable[[WorkloadId], str] = lambda service_id: "",
    waits_of: Callable[[WorkloadId], str] = lambda service_id: "",
    identity_of: Callable[[InferenceService], Identify | None] = lambda service: None,
) -> list[ServiceRoute]:
    """Return the routes of all deployed services. Replicas that were asked to stop are left out at once.

    `token_of` returns the secret that a service's replicas share with the gateway (empty where their addresses are
    private), `waits_of` the backend's reason why requested replicas do not start, if it knows one, `identity_of` what a
    service's replicas call others with.
    """
    routes: list[ServiceRoute] = []
    for record in view.services.values():
        if record.is_removed:
            continue
        token, by_revision = token_of(record.workload_id), _by_revision(record)
        present = by_revision.pop(record.service.revision, [])
        routes.append(
            ServiceRoute(
                service=record.service,
                replicas=_replica_routes(present, token),
                failure=record.reason if record.state is ServiceState.FAILED else "",
                waits=_waits(record, view) or waits_of(record.workload_id),
                waits_s=_waits_s(record, view),
                identity=identity_of(record.service),
            )
        )
        release = record.release
        for revision, replicas in by_revision.items():
            if any(replica.is_ready for replica in replicas):
                terms = release.terms if release is not None and release.revision == revision else None
                service = version_of(record, revision)
                routes.append(
                    ServiceRoute(
                        service=service,
                        replicas=_replica_routes(replicas, token),
                        terms=terms,
                        identity=identity_of(service),
                    )
                )
    return routes


def _by_revision(record: ServiceRecord) -> dict[int, list[ReplicaRecord]]:
    """The replicas that may get requests, by revision: those of one that is not known any more count as present."""
    found: dict[int, list[ReplicaRecord]] = {}
    for replica in record.replicas:
        if replica.state is not ReplicaState.STOPPING and not is_left(record, replica):
            found.setdefault(version_of(record, replica.revision).revision, []).append(replica)
    return found


def _replica_routes(replicas: Iterable[ReplicaRecord], token: str) -> tuple[ReplicaRoute, ...]:
    return tuple(
        ReplicaRoute(replica_id=replica.replica_id, address=replica.address, is_ready=replica.is_ready, token=token)
        for replica in replicas
    )


def _waits(record: ServiceRecord, view: PlatformView) -> str:
    """Why a service with queued requests has no replica, where the policy knows; empty for any other service."""
    is_told = record.service.share is not None or record.workload_id in view.claims
    return record.reason if record.queued and is_told and not record.replicas else ""


def _waits_s(record: ServiceRecord, view: PlatformView) -> float | None:
    """In how many seconds a waiting service can have a replica's device; None if that is not known."""
    claim = view.claims.get(record.workload_id)
    if claim is None or claim.code != "waits_for" or claim.at_s is None:
        return None
    return float(max(0, math.ceil(claim.at_s - view.now_s)))
