"""Exports the live state: the snapshot that the policy gets, without the parts that only workers need."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.core.decision import JobView, ServiceView
from springtide.core.status.export import LiveState
from springtide.core.workload import Entrypoint
from springtide.service.ports import PlatformLike

_NOWHERE = Entrypoint(source_path="")


def live_state(platform: PlatformLike) -> LiveState:
    """Return the platform's present state, without sources, parameters and keys, which no policy reads."""
    snapshot = platform.snapshot()
    return LiveState(
        policy=platform.view().policy,
        snapshot=replace(
            snapshot,
            jobs=tuple(_bare_job(view) for view in snapshot.jobs),
            allocations=dict(snapshot.allocations),
            services=tuple(_bare_service(view) for view in snapshot.services),
        ),
        wall_clock_offset_s=platform.wall_clock_offset_s,
        usd_per_device_hour=platform.usd_per_device_hour,
    )


def _bare_job(view: JobView) -> JobView:
    return replace(
        view,
        job=replace(view.job, entrypoint=_NOWHERE, params={}, submit_key=""),
        checkpoint=None if view.checkpoint is None else replace(view.checkpoint, path=""),
        learnt=replace(view.learnt, throughput_samples_per_s=dict(view.learnt.throughput_samples_per_s)),
    )


def _bare_service(view: ServiceView) -> ServiceView:
    return replace(view, service=replace(view.service, entrypoint=_NOWHERE, params={}))
