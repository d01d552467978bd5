"""The same workload on models and on machines leads to the same decisions.

The workload leaves no race: each thing happens well after the one before it, and every size follows from the bounds.
StopReplica is left out of the comparison: it is the backstop for a worker that leaves by itself, and whether it is
needed depends on who is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kits.end_to_end import live_platform
from kits.simulation.sweeps import only_in_full
from springtide.control.controller import Controller
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import verify
from springtide.core.actions import Action, EndJob, PreemptJob, ResizeJob, SetShare, StartReplica
from springtide.core.events import CancelRequested, Event, PauseRequested, ResumeRequested, ServiceDeployed
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.shares import Share
from springtide.scheduling.registry import make_live_policy, make_policy
from springtide_studies.fault_seeds.seeds import FaultRun
from springtide_studies.fault_seeds.workload import OwnerRequest, Workload, make_job, make_service, make_submission

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def decisions(steps: Iterator[tuple[int, Step]], name_of: dict[str, str]) -> dict[str, list[str]]:
    """What was decided for each job, in order, in words without ids, times or device numbers.

    Which of several devices that come free together is named first depends on which process is gone first.
    """
    told: dict[str, list[str]] = {}
    for _, step in steps:
        for action in step.actions:
            if isinstance(action, StartReplica | SetShare):
                workload_id: str = action.workload_id
            else:
                workload_id = action.job_id if _counts(action) else ""
            if workload_id:
                told.setdefault(name_of[workload_id], []).append(_word(action))
    return told


def _counts(action: Action) -> bool:
    return isinstance(action, ResizeJob | PreemptJob | EndJob)


def _word(action: Action) -> str:
    if isinstance(action, StartReplica):
        restored = f" from step {action.restore.step > 0}" if action.restore else ""
        part = "" if action.share is None else f" with {action.share.request:g}..{action.share.limit:g}"
        return f"start {action.replica_id.rpartition('.')[2]} g{action.generation}{restored}{part}"
    if isinstance(action, SetShare):
        return f"{action.replica_id.rpartition('.')[2]} is given {action.share.request:g}..{action.share.limit:g}"
    if isinstance(action, ResizeJob):
        return f"resize g{action.generation} to {[r.rpartition('.')[2] for r in action.replica_ids]} {action.reason}"
    if isinstance(action, PreemptJob):
        return f"preempt g{action.generation}"
    assert isinstance(action, EndJob)
    return f"end {action.state}"


def num_free(live: Any) -> int:
    """How many devices nobody holds."""
    return sum(device["workload_id"] is None for device in live.request("GET", "/v1/status")["devices"])


def play_live(tmp_path: Path, policy: str) -> dict[str, list[str]]:
    live = live_platform.LivePlatform(tmp_path / "state")
    wait_for = live_platform.wait_for
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
            # It is paused once it has let go of its work; each of its processes gives its device back when it is gone.
            wait_for(lambda: num_free(live) == 4, 60.0, "the devices of a to be free")
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
    requests = tuple(OwnerRequest(at_s=at_s, event=event) for at_s, event in asked)
    run = FaultRun(
        1,
        lambda: make_policy(policy),
        num_faults=0.0,
        workload=Workload(requests=requests),
        nodes=[make_node("local", 4)],
    )
    run.run()
    return decisions(run.journal.read(), {"a": "a", "b": "b", "c": "c"})


@pytest.mark.parametrize("policy", ["elastic", pytest.param("fifo", marks=only_in_full)])
def test_the_same_workload_gives_the_same_decisions(tmp_path, policy):
    modelled, live = play_models(policy), play_live(tmp_path, policy)
    assert live == modelled
    assert len(live["a"]) >= (10 if policy == "elastic" else 6), "the story is not an empty one"


# --- parts of a device ----------------------------------------------------------------------------------------------

SERVED, SERVED_LATER = Share(request=0.3, limit=0.6), Share(request=0.2, limit=0.4)
FIRST, SECOND = Share(request=0.4, limit=0.6), Share(request=0.4, limit=0.5)


def _asked(share: Share) -> dict[str, float]:
    return {"request": share.request, "limit": share.limit}


def play_shares_live(tmp_path: Path) -> dict[str, list[str]]:
    """One device: a service and a job on parts of it, a second job that has room once the service has less."""
    live = live_platform.LivePlatform(tmp_path / "state", slots=1)
    wait_for = live_platform.wait_for

    def deploy(share: Share) -> None:
        source = {"filename": "echo.py", "text": live_platform.ECHO, "object_name": "Echo", "kind": "class"}
        options = {"min_replicas": 1, "max_replicas": 1, "share": _asked(share)}
        live.request("PUT", "/v1/services/s", {"source": source, "options": options})

    live.start(policy="fifo")
    try:
        deploy(SERVED)
        wait_for(lambda: live.request("GET", "/v1/services/s")["state"] == "READY", 120.0, "s to be ready")
        a = live.submit("a", num_epochs=100_000, shard_s=0.02, max_workers=1, share=_asked(FIRST))
        wait_for(lambda: live.job(a)["state"] == "RUNNING", 120.0, "a to run")
        b = live.submit("b", num_epochs=4, shard_s=0.02, max_workers=1, share=_asked(SECOND))
        c = live.submit("c", num_epochs=4, max_workers=1)
        wait_for(lambda: "waits for room" in live.job(b)["reason"], 60.0, "b to wait")
        deploy(SERVED_LATER)
        live.wait_job(b)
        live.request("POST", f"/v1/jobs/{c}/cancel")
        live.wait_job(c)
        live.request("POST", f"/v1/jobs/{a}/cancel")
        live.wait_job(a)
        wait_for(lambda: not live.job(a)["replicas"], 60.0, "the workers of a to be gone")
        live.stop()
    finally:
        if live.http is not None:
            live.http.close()
        if live.is_alive:
            live.kill()
    journal = SqliteJournal(tmp_path / "state" / "journal.db", read_only=True)
    told = decisions(journal.read(), {"s": "s", a: "a", b: "b", c: "c"})
    verify(Controller(make_live_policy("fifo")), journal)
    journal.close()
    return told


def play_shares_models() -> dict[str, list[str]]:
    """The same story told to the executor made of models."""
    service = make_service("s", min_replicas=1, max_replicas=1, share=SERVED)
    a = make_job("a", num_samples=96_000, samples_per_s=40.0, batch_size=16, share=FIRST)
    b = make_job("b", num_samples=384, samples_per_s=40.0, batch_size=16, share=SECOND)
    c = make_job("c", num_samples=384, samples_per_s=40.0, batch_size=16)
    asked: list[tuple[float, Event]] = [
        (0.0, ServiceDeployed(service=service)),
        (10.0, make_submission(a)),
        (20.0, make_submission(b)),
        (21.0, make_submission(c)),
        (30.0, ServiceDeployed(service=replace(service, share=SERVED_LATER))),
        (200.0, CancelRequested(workload_id="c")),
        (210.0, CancelRequested(workload_id="a")),
        (230.0, CancelRequested(workload_id="s")),
    ]
    run = FaultRun(
        1,
        lambda: make_live_policy("fifo"),
        num_faults=0.0,
        workload=Workload(requests=tuple(OwnerRequest(at_s=at_s, event=event) for at_s, event in asked)),
        nodes=[make_node("local", 1)],
    )
    run.run()
    return decisions(run.journal.read(), {"s": "s", "a": "a", "b": "b", "c": "c"})


def test_the_same_workload_on_parts_of_a_device_gives_the_same_decisions(tmp_path):
    modelled = play_shares_models()
    assert modelled["s"] == ["start 0 g1 with 0.3..0.6", "0 is given 0.2..0.4"]
    assert modelled["b"][0] == "start 0 g1 with 0.4..0.5"
    assert [modelled[name][-1] for name in "abc"] == ["end CANCELLED", "end SUCCEEDED", "end CANCELLED"]
    assert play_shares_live(tmp_path) == modelled
