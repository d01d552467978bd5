"""Jobs with their search taken as over, at its present estimates: for callers that project the future."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.core.decision import EMPTY, FunctionAllocation, JobView, Snapshot
from springtide.core.functions import FunctionService
from springtide.scheduling.functions.goal_search import search_step


def settled(snapshot: Snapshot) -> Snapshot:
    """The same snapshot, each searched job without its search and with the menu of its present estimates.

    A projection yields no measurements, so a search would wait for them in the middle of a probe.
    """
    if not any(view.job.search is not None for view in snapshot.jobs):
        return snapshot
    services = {node.functions.name: node.functions for node in snapshot.cluster.function_services if node.functions}
    return replace(snapshot, jobs=tuple(_settled_view(view, snapshot, services) for view in snapshot.jobs))


def _settled_view(view: JobView, snapshot: Snapshot, services: dict[str, FunctionService]) -> JobView:
    menu = view.job.menu
    service = services.get(menu.service) if menu is not None and view.job.search is not None else None
    if service is None:
        return view
    held = snapshot.allocations.get(view.job.job_id)
    running = held.plan if isinstance(held, FunctionAllocation) else None
    found = search_step(view, service, snapshot.now_s, running)
    # The menu is corrected by measurements already and must not be corrected again.
    return replace(
        view,
        job=replace(view.job, menu=found.menu, search=None),
        learnt=replace(view.learnt, throughput_samples_per_s=EMPTY, measurements=()),
    )
