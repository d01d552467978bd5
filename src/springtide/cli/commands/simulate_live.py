"""`springtide simulate --from-live`: simulates the running platform's future under other policies, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from springtide.cli import terminal
from springtide.cli.session import Session
from springtide.cli.tables.columns import align, duration, percent
from springtide.control.quotes.budget import cost_usd
from springtide.control.quotes.forecast import PlanForecast, roll_forward
from springtide.core.decision import FunctionAllocation, JobView, Policy, Schedule
from springtide.core.status.export import LiveState
from springtide.scheduling.functions.ask import entry_of
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_live_policy

# The most decisions of the policy in a forecast; after that the plan stays as it is.
MAX_TURNS = 5000


def read_live(session: Session) -> LiveState:
    """The running platform's present state. Raises SpringtideError if no platform is running."""
    return session.client.export()


def play_live(session: Session, names: Sequence[str], output: str | None) -> None:
    """Simulate from the live state under each policy; prints a comparison and a forecast for every job."""
    live = read_live(session)
    answer = forecast_answer(live, {name: WithFunctions(make_live_policy(name)) for name in names})
    told = "no new job arrives in this forecast, and services keep their load; one job: springtide why ID"
    terminal.write_answer(answer, forecast_text(answer), output, session.hint, told)


def forecast_answer(live: LiveState, policies: Mapping[str, Policy]) -> dict[str, Any]:
    """The figures of each policy (with the keys of `simulate`, times counted from now) and a forecast for each job."""
    snapshot = live.snapshot
    sizes = [str(len(node.devices)) for node in snapshot.cluster.machines.nodes]
    answer: dict[str, Any] = {
        "trace": "live",
        "cluster": f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(sizes),
        "seed": None,
        "live_policy": live.policy,
        "now_s": snapshot.now_s,
        "policies": {},
    }
    for name, policy in policies.items():
        # A policy cannot use another one's memory.
        start = snapshot if name == live.policy else replace(snapshot, memory=None)
        forecast = roll_forward(start, policy, max_turns=MAX_TURNS)
        rows = [_job_row(view, forecast, live) for view in snapshot.jobs]
        answer["policies"][name] = _figures(live, forecast, rows)
    return answer


def _job_row(view: JobView, forecast: PlanForecast, live: LiveState) -> dict[str, Any]:
    job_id, now_s = view.job.job_id, live.snapshot.now_s
    schedule = forecast.schedules.get(job_id, ())
    finish_s = forecast.finishes_s.get(job_id)
    runs = [run for run in schedule if run.num_devices]
    deadline_s = view.job.goal.deadline_s
    return {
        "job_id": job_id,
        "start_s": max(0.0, runs[0].start_s - now_s) if runs else None,
        "finish_s": None if finish_s is None else finish_s - now_s,
        "deadline_s": None if deadline_s is None else deadline_s - now_s,
        "is_met": None if deadline_s is None or finish_s is None else finish_s <= deadline_s,
        "refused": forecast.refusals.get(job_id),
        "workers": [run.num_devices for run in runs],
        "cost_usd": _cost_usd(view, schedule, live),
    }


def _cost_usd(view: JobView, schedule: Schedule, live: LiveState) -> float:
    """The cost of the rest of a job: of its devices' time or, on functions, of its steps with the recommended plan."""
    menu = view.job.menu
    if menu is None:
        return cost_usd(schedule, live.usd_per_device_hour)
    entry = menu.options[menu.recommended]
    held = live.snapshot.allocations.get(view.job.job_id)
    if isinstance(held, FunctionAllocation):
        entry = entry_of(menu, held.plan) or entry
    return max(0, (view.total_steps or 0) - view.progress.step) * entry.step_usd


def _figures(live: LiveState, forecast: PlanForecast, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    snapshot = live.snapshot
    views = {view.job.job_id: view for view in snapshot.jobs}
    times_s = sorted(at_s - views[job_id].submitted_at_s for job_id, at_s in forecast.finishes_s.items())
    aimed = [row for row in rows if row["deadline_s"] is not None]
    met = [row for row in aimed if row["is_met"]]
    promised = [row for row in aimed if views[row["job_id"]].promise.admitted_at_s is not None]
    waits_s = [row["start_s"] for row in rows if row["start_s"] is not None]
    makespan_s = max(forecast.finishes_s.values(), default=snapshot.now_s) - snapshot.now_s
    on_machines = [runs for who, runs in forecast.schedules.items() if not views[who].job.is_on_functions]
    device_s = sum((r.end_s - r.start_s) * r.num_devices for runs in on_machines for r in runs)
    capacity_s = makespan_s * len(snapshot.cluster.machines.device_ids())
    changes = sum(max(0, len(row["workers"]) - 1) for row in rows)
    return {
        "jobs": len(rows),
        "deadline_jobs": len(aimed),
        "deadlines_met": len(met),
        "deadline_satisfactory_ratio": len(met) / len(aimed) if aimed else None,
        "admitted": len(rows) - len(forecast.refusals),
        "admitted_and_broken": sum(1 for row in promised if row["is_met"] is False),
        "jct_mean_s": sum(times_s) / len(times_s) if times_s else None,
        "jct_p95_s": times_s[min(len(times_s) - 1, int(0.95 * len(times_s)))] if times_s else None,
        "queueing_mean_s": sum(waits_s) / len(waits_s) if waits_s else None,
        "makespan_s": makespan_s,
        "utilisation": min(1.0, device_s / capacity_s) if capacity_s else None,
        "resizes": changes,
        "gpu_hours": device_s / 3600.0,
        "rows": list(rows),
    }


def forecast_text(answer: Mapping[str, Any]) -> str:
    """A table of the policies, and for each policy a table of jobs."""
    header = ("POLICY", "JOBS", "DEADLINES MET", "REFUSED", "MEAN TIME", "MEAN WAIT", "ALL DONE", "USE")
    table = [
        (
            name,
            str(found["jobs"]),
            f"{found['deadlines_met']} of {found['deadline_jobs']}",
            str(found["jobs"] - found["admitted"]),
            duration(found["jct_mean_s"]),
            duration(found["queueing_mean_s"]),
            duration(found["makespan_s"]),
            percent(found["utilisation"]),
        )
        for name, found in answer["policies"].items()
    ]
    parts = [f"live state of {answer['cluster']} devices, policy {answer['live_policy']}", align(header, table)]
    for name, found in answer["policies"].items():
        rows = [
            (
                row["job_id"],
                duration(row["start_s"]),
                duration(row["finish_s"]),
                _deadline(row),
                " -> ".join(map(str, row["workers"][:6])) or "-",
                f"${row['cost_usd']:.2f}",
            )
            for row in found["rows"]
        ]
        if rows:
            titles = (f"JOB ({name})", "STARTS IN", "DONE IN", "DEADLINE", "WORKERS", "COST FROM NOW")
            parts.append(align(titles, rows))
    return "\n\n".join(parts)


def _deadline(row: Mapping[str, Any]) -> str:
    if row["refused"]:
        return f"refused: {row['refused']}"
    if row["deadline_s"] is None:
        return "-"
    if row["finish_s"] is None:
        return "unknown"
    spare_s = row["deadline_s"] - row["finish_s"]
    return f"met, {duration(spare_s)} to spare" if spare_s >= 0 else f"missed by {duration(-spare_s)}"
