"""Variations of a scenario, each drawn from a stream of its own: what the seed draws besides is what it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from springtide.core.decision import Policy
from springtide.core.events import JobSubmitted, ServiceDeployed
from springtide.core.resources import Node
from springtide.core.shares import Share, make_share
from springtide.core.workload import WorkloadId
from springtide.scheduling.sharing.policy import Sharing
from springtide_studies.fault_seeds.promises import with_promises
from springtide_studies.fault_seeds.workload import OwnerRequest, Workload, with_devices

_PROMISES_STREAM, _DEVICES_STREAM, _PARTS_STREAM = 1, 2, 3


def varied(
    workload: Workload,
    seed: int,
    nodes: Sequence[Node],
    make: Callable[[], Policy],
    has_promises: bool,
    has_devices: bool,
    has_shares: bool,
) -> Workload:
    """The scenario with promises, with several devices for workers, and with a packer parts of these for replicas."""
    if has_promises:
        num_all = sum(len(node.devices) for node in nodes)
        workload = with_promises(workload, np.random.default_rng([seed, _PROMISES_STREAM]), num_all)
    if has_devices:
        workload = with_devices(workload, np.random.default_rng([seed, _DEVICES_STREAM]), nodes)
    if has_devices and has_shares and isinstance(make(), Sharing):
        workload = with_parts(workload, np.random.default_rng([seed, _PARTS_STREAM]), nodes)
    return workload


def with_parts(workload: Workload, rng: np.random.Generator, nodes: Sequence[Node]) -> Workload:
    """The scenario in which workers and replicas hold parts of several devices.

    Each replica of about half of the services with a share holds it of two devices, or four; about half of the jobs
    whose workers hold several devices get a share of each.
    """
    widest = max(len(node.devices) for node in nodes)
    first: dict[WorkloadId, tuple[int, Share | None]] = {}
    requests = []
    for request in workload.requests:
        event, each = request.event, int(rng.choice([1, 2, 2, 4]))
        share = make_share(round(float(rng.uniform(0.2, 0.7)), 2), memory_mb=int(rng.choice([0, 200, 500])))
        if isinstance(event, ServiceDeployed):
            service = event.service
            is_wide = service.share is not None and each <= widest
            # The width stays while a service is deployed, and so it keeps a share.
            each, known = first.setdefault(service.service_id, (each if is_wide else 1, service.share))
            kept = service.share if each == 1 else service.share or known
            event = ServiceDeployed(service=msgspec.structs.replace(service, devices_each=each, share=kept))
        elif isinstance(event, JobSubmitted) and event.job.devices_each > 1 and each == 2:
            event = JobSubmitted(job=msgspec.structs.replace(event.job, share=share))
        requests.append(OwnerRequest(at_s=request.at_s, event=event))
    return msgspec.structs.replace(workload, requests=tuple(requests))
