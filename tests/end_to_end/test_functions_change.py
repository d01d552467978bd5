"""Plans that change while real functions train on an emulator: who stays is the same process, and nothing shows."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kits.end_to_end.functions_run import Run, job_of, plan_of, reference, service_of
from springtide.backends.functions.emulator.launch import inject
from springtide.backends.functions.shell.notes import NOTES_FILE, Notes
from springtide.core import events
from springtide.core.functions import FunctionPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_LAYERS = 10


def whole(num_replicas: int, memory_mb: int = 1024) -> FunctionPlan:
    plan = plan_of((NUM_LAYERS,), num_replicas, num_micro_batches=6, micro_batch_size=10)
    stage = msgspec.structs.replace(plan.stages[0], memory_mb=memory_mb)
    return msgspec.structs.replace(plan, stages=(stage,))


def step_of(run: Run) -> int:
    told = run.of(events.ProgressReported)
    return told[-1].step if told else 0


def processes(run: Run) -> dict[str, int]:
    """The process of each instance that works on an invocation."""
    request = urllib.request.Request(
        f"{run.address.endpoint}/admin/status", headers={"Authorization": f"Bearer {run.address.token}"}
    )
    with urllib.request.urlopen(request) as answer:
        instances: list[dict[str, Any]] = json.load(answer)["instances"]
    return {one["invocation"]: one["pid"] for one in instances if one["invocation"]}


def ask(run: Run, plan: FunctionPlan) -> Any:
    """Another plan; follow until it is confirmed and shown, and return what is shown."""
    run.generation += 1
    run.resize(plan)
    number = len(run.status().changes)

    def is_shown() -> bool:
        is_confirmed = run.of(events.JobResized)[-1].generation == run.generation
        return is_confirmed and len(run.status().changes) > number

    run.follow(until=is_shown)
    return run.status()


def invoked(status: Any) -> int:
    """How many functions were called of which anything came: on a busy machine some begin too late."""
    return int(status.num_invocations - status.num_lost)


def test_replicas_join_stay_and_leave_while_it_trains(tmp_path: Path) -> None:
    job = job_of("functions_digits", whole(2), global_batch_size=60, num_epochs=16)
    run = Run(tmp_path, job, service=service_of(300.0), cpu_fraction=0.5)
    try:
        run.start()
        run.follow(until=lambda: step_of(run) >= 5)
        run.follow(until=lambda: bool(run.status().changes))
        before, start = processes(run), run.status()
        assert len(before) == 2
        # One of the two who are to join is killed while it warms up, and called again.
        inject(run.address, "kill", num_times=1, seconds=0.5)
        grown = ask(run, whole(4))
        during = processes(run)
        assert before.items() <= during.items()
        assert len(during) == 4
        assert invoked(grown) == invoked(start) + 3
        stayed = [place.incarnation for place in start.places]
        assert [place.incarnation for place in grown.places[:2]] == stayed
        alone = ask(run, whole(1))
        assert invoked(alone) == invoked(grown)
        assert [place.incarnation for place in alone.places] == stayed[:1]
        # Another size of memory: everybody is new, and warm before the others end.
        other = ask(run, whole(2, 2048))
        assert invoked(other) == invoked(alone) + 2
        run.follow(limit_s=400.0)
    finally:
        run.close()
    status = run.status()
    assert [entry.num_stayed for entry in status.changes] == [0, 2, 1, 0]
    assert status.num_redone_steps == 0
    pauses = {event.generation: event.pause_s for event in run.of(events.JobResized)}
    measured = [event.measurement for event in run.of(events.FunctionsMeasured)]
    print(
        f"pauses {pauses}; {[(m.plan.num_replicas, m.plan.memory_mb, m.num_steps, m.step_s, m.usd) for m in measured]}"
    )
    assert {measurement.plan for measurement in measured} >= {whole(2, 2048)}
    check_losses(run)


def check_losses(run: Run) -> None:
    """Every sample once in its place, and the losses of one process as far as rounding lets them be compared."""
    losses, _, digest = reference(run.job, "functions_digits", is_whole=True)
    told = run.losses()
    assert [step for step, _, _ in told] == list(range(1, len(losses) + 1))
    notes = msgspec.json.decode((run.work_dir / NOTES_FILE).read_bytes(), type=Notes)
    assert notes.ids_digest == digest
    worst = max(abs(loss - expected) for (_, loss, _), expected in zip(told[:20], losses, strict=False))
    assert worst < 1e-6, f"a step's loss differs by {worst}"
