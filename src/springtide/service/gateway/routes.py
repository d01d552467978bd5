"""What the gateway is told of the platform's services after each step: which replicas there are, and where."""

from __future__ import annotations

from collections.abc import Callable

from springtide.control.records import ReplicaState, ServiceRecord, ServiceState
from springtide.core.workload import WorkloadId
from springtide.service.platform import PlatformView
from springtide.serving.router import ReplicaRoute, ServiceRoute


def service_routes(
    view: PlatformView,
    *,
    token_of: Callable[[WorkloadId], str] = lambda service_id: "",
    waits_of: Callable[[WorkloadId], str] = lambda service_id: "",
) -> list[ServiceRoute]:
    """Return the routes of all deployed services. A replica that is asked to stop is out of them at once.

    `token_of` is the secret that a service's replicas share with the gateway (empty: their addresses are private),
    `waits_of` says why requested replicas do not come up, where the backend knows.
    """
    return [
        ServiceRoute(
            service=record.service,
            replicas=tuple(
                ReplicaRoute(
                    replica_id=replica.replica_id,
                    address=replica.address,
                    is_ready=replica.state is ReplicaState.READY,
                    token=token_of(record.service.service_id),
                )
                for replica in record.replicas
                if replica.state is not ReplicaState.STOPPING
            ),
            failure=record.reason if record.state is ServiceState.FAILED else "",
            waits=_waits(record) or waits_of(record.service.service_id),
        )
        for record in view.services.values()
        if not record.is_removed
    ]


def _waits(record: ServiceRecord) -> str:
    """Why a service with a share, queued requests and no replica waits; empty for any other service."""
    return record.reason if record.queued and record.service.share and not record.replicas else ""
