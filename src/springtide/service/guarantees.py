"""What may be guaranteed to a service: a minimum of replicas, while the platform has devices for all minimums."""

from __future__ import annotations

from springtide.core.errors import InvalidRequest
from springtide.core.workload import WorkloadId
from springtide.service.contract import ViewLike


def check_guarantee(view: ViewLike, service_id: WorkloadId, minimum: int) -> None:
    """Raise InvalidRequest if `minimum` replicas of the service can never all be there beside what others are due.

    A minimum is a promise to those who call the service, so it is refused at once rather than broken for good, as a
    deadline that cannot be kept is. What was promised before stands, also after some devices are gone.
    """
    num_devices = sum(len(node.devices) for node in view.nodes)
    known = view.services.get(service_id)
    promised = known.min_replicas if known is not None and not known.is_removed else 0
    if minimum <= promised or num_devices == 0:
        return
    others = {
        record.service.name: record.min_replicas
        for record in view.services.values()
        if record.workload_id != service_id and not record.is_removed and record.min_replicas > 0
    }
    num_left = max(0, num_devices - sum(others.values()))
    if minimum <= num_left:
        return
    has = "1 device" if num_devices == 1 else f"{num_devices} devices"
    taken = ", ".join(f"{name} {count}" for name, count in others.items())
    besides = f", of which others are guaranteed {sum(others.values())} ({taken})" if others else ""
    raise InvalidRequest(
        f"{service_id} cannot be guaranteed {minimum} replicas: the platform has {has}{besides}; ask for a minimum of "
        f"at most {num_left}, like --scale {num_left}..{max(1, minimum)}, or start it with more slots"
    )
