"""Services whose replicas hold a part of each of several devices, drawn from a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from springtide.core.events import ServiceDeployed
from springtide.core.resources import Node
from springtide.core.shares import Share
from springtide.core.workload import WorkloadId
from springtide_studies.fault_seeds.workload import OwnerRequest, Workload


def with_parts(workload: Workload, rng: np.random.Generator, nodes: Sequence[Node]) -> Workload:
    """The scenario in which each replica of about half of the services with a share holds it of two devices, or four.

    Where nodes belong to pools nothing changes: parts of several devices are not given there.
    """
    if any(node.owner != "shared" for node in nodes):
        return workload
    widest = max(len(node.devices) for node in nodes)
    first: dict[WorkloadId, tuple[int, Share | None]] = {}
    requests = []
    for request in workload.requests:
        event = request.event
        if isinstance(event, ServiceDeployed):
            service, each = event.service, int(rng.choice([1, 2, 2, 4]))
            is_wide = service.share is not None and each <= widest
            # The width stays while a service is deployed, and so it keeps a share.
            each, share = first.setdefault(service.service_id, (each if is_wide else 1, service.share))
            share = service.share if each == 1 else service.share or share
            event = ServiceDeployed(service=msgspec.structs.replace(service, devices_each=each, share=share))
        requests.append(OwnerRequest(at_s=request.at_s, event=event))
    return msgspec.structs.replace(workload, requests=tuple(requests))
