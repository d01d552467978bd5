"""What users are told about a run."""

from __future__ import annotations

from springtide.backends.functions.coordinator.run import Run
from springtide.backends.functions.coordinator.saved_states import SavedStates
from springtide.backends.functions.coordinator.stream import JobStream
from springtide.backends.functions.coordinator.switch import PlanSwitch
from springtide.core.status.functions import FunctionRunStatus


def run_status(run: Run, saved: SavedStates, switch: PlanSwitch, stream: JobStream) -> FunctionRunStatus | None:
    """The status of a run and of the coordinator's parts; None before there is a plan."""
    pool = run.pool
    if run.plan is None:
        return None
    usage = run.ledger.usage(run.now_s)
    lifetime_s = run.facts.service.lifetime_s
    upcoming = switch.upcoming
    return FunctionRunStatus(
        service=run.facts.service.name,
        plan=run.plan,
        places=tuple(slot.status(run.now_s, lifetime_s) for slot in pool),
        step_s=run.pace.measured_step_s,
        predicted_step_s=run.pace.predicted_step_s,
        saved_step=saved.newest_step,
        num_invocations=pool.num_invocations,
        num_replaced=pool.num_replaced,
        num_handovers=pool.num_handovers,
        num_lost=pool.num_lost,
        num_throttled=pool.num_throttled,
        num_redone_steps=run.num_redone_steps,
        usage=usage,
        bill=run.ledger.bill(usage),
        budget_usd=run.ledger.budget_usd,
        upcoming=upcoming.plan if upcoming is not None else None,
        joining=tuple(slot.status(run.now_s, lifetime_s) for slot in pool.joining.values()),
        changes=run.changes,
        idle_reason=stream.idle_reason(run),
    )
