"""The same workload on models and on machines leads to the same decisions.

The workload leaves no race: each thing happens well after the one before it, and every size follows from the bounds.
StopReplica is left out of the comparison: it is the backstop for a worker that leaves by itself, and whether it is
needed depends on who is faster.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.control.controller import Controller
from springtide.control.journal import SqliteJournal
from springtide.control.loop import verify
from springtide.core.actions import Action, EndJob, PreemptJob, ResizeJob, StartReplica
from springtide.core.events import CancelRequested, PauseRequested, ResumeRequested
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.policies.registry import make_policy
from springtide.sim.experiment import FaultRun
from springtide.sim.workload import Request, Workload, make_job, make_submission

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def load_live() -> type:
    """The live platform of the end-to-end tests."""
    path = Path(__file__).parents[1] / "end_to_end" / "conftest.py"
    spec = importlib.util.spec_from_file_location("end_to_end_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["end_to_end_conftest"] = module
    spec.loader.exec_module(module)
    return module


def decisions(steps: Iterator[tuple[int, Step]], name_of: dict[str, str]) -> dict[str, list[str]]:
    """What was decided for each job, in order, in words without ids, times or device numbers.

    Which of several devices that come free together is named first depends on which process is gone first.
    """
    told: dict[str, list[str]] = {}
    for _, step in steps:
        for action in step.actions:
            job_id = (
                action.workload_id if isinstance(action, StartReplica) else action.job_id if _counts(action) else ""
            )
            if job_id:
                told.setdefault(name_of[job_id], []).append(_word(action))
    return told


def _counts(action: Action) -> bool:
    return isinstance(action, ResizeJob | PreemptJob | EndJob)


def _word(action: Action) -> str:
    if isinstance(action, StartReplica):
        restored = f" from step {action.restore.step > 0}" if action.restore else ""
        return f"start {action.replica_id.rpartition('.')[2]} g{action.generation}{restored}"
    if isinstance(action, ResizeJob):
        return f"resize g{action.generation} to {[r.rpartition('.')[2] for r in action.replica_ids]} {action.reason}"
    if isinstance(action, PreemptJob):
        return f"preempt g{action.generation}"
    assert isinstance(action, EndJob)
    return f"end {action.state}"


def play_live(tmp_path: Path, policy: str) -> dict[str, list[str]]:
    live_module = load_live()
    live = live_module.LivePlatform(tmp_path / "state")
    wait_for = live_module.wait_for
    live.start(policy=policy)
    try:
        a = live.submit("a", num_epochs=60, shard_s=0.02, max_workers=4)
        wait_for(lambda: live.job(a)["state"] == "RUNNING", 60.0, "a to run")
        b = live.submit("b", num_epochs=12, shard_s=0.02, min_workers=2, max_workers=2)
        if policy == "elastic":
            wait_for(lambda: live.job(b)["state"] == "RUNNING", 60.0, "b to run")
        c = live.submit("c", num_epochs=500, shard_s=0.02, min_workers=4, max_workers=4)
        live.request("POST", f"/v1/jobs/{c}/cancel")
        live.wait_job(b)
        if policy == "elastic":
            wait_for(lambda: live.job(a)["num_workers"] == 4, 60.0, "a to grow again")
            live.request("POST", f"/v1/jobs/{a}/pause")
            live.wait_job(a, states=("PAUSED",))
            live.request("POST", f"/v1/jobs/{a}/resume")
        live.wait_job(a)
        live.stop()
    finally:
        if live.http is not None:
            live.http.close()
        if live.is_alive:
            live.kill()
    journal = SqliteJournal(tmp_path / "state" / "journal.db", read_only=True)
    told = decisions(journal.read(), {a: "a", b: "b", c: "c"})
    verify(Controller(make_policy(policy)), journal)
    journal.close()
    return told


def play_models(policy: str) -> dict[str, list[str]]:
    """The same story told to the executor made of models: a is long, b ends first, c is cancelled while it waits."""
    a = make_job("a", num_samples=9600, samples_per_s=40.0, batch_size=16, workers=(1, 4))
    b = make_job("b", num_samples=960, samples_per_s=40.0, batch_size=16, workers=(2, 2))
    c = make_job("c", num_samples=9600, samples_per_s=40.0, batch_size=16, workers=(4, 4))
    asked = [(0.0, make_submission(a)), (20.0, make_submission(b)), (30.0, make_submission(c))]
    asked.append((31.0, CancelRequested(workload_id="c")))
    if policy == "elastic":
        asked += [(80.0, PauseRequested(job_id="a")), (110.0, ResumeRequested(job_id="a"))]
    requests = tuple(Request(at_s=at_s, event=event) for at_s, event in asked)
    run = FaultRun(
        1,
        lambda: make_policy(policy),
        num_faults=0.0,
        workload=Workload(requests=requests),
        nodes=[make_node("local", 4)],
    )
    run.run()
    return decisions(run.journal.read(), {"a": "a", "b": "b", "c": "c"})


@pytest.mark.parametrize("policy", ["elastic", "fifo"])
def test_the_same_workload_gives_the_same_decisions(tmp_path, policy):
    modelled, live = play_models(policy), play_live(tmp_path, policy)
    assert live == modelled
    assert len(live["a"]) >= (10 if policy == "elastic" else 6), "the story is not an empty one"
