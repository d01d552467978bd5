"""What must hold of a platform that faults were injected into, read from its statuses, its files and its journal."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from springtide.control.controller import Controller
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import verify
from springtide.control.quotes.budget import WithinBudget
from springtide.core.actions import EndJob
from springtide.core.errors import SpringtideError
from springtide.core.status.platform import JobStatus
from springtide.core.workload import JobState
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_live_policy
from springtide.service.platform import LOCAL_OVERHEADS

# The beginnings of sentences that say that a job waits, or that it works.
_WAITS = ("waiting", "waits")
_WORKS = ("started on", "resized", "re-formed", "moving")


def contradiction(job: JobStatus) -> str:
    """What in a job's status contradicts its state; "" if nothing does."""
    state, reason = JobState(job.state), job.reason
    said = f"{job.job_id} is {state} on {job.num_workers} workers and says {reason!r}"
    if not reason:
        return f"{said}: a state without a reason"
    if state is JobState.RUNNING and (reason.startswith(_WAITS) or not job.replicas):
        return f"{said}: it cannot wait and run"
    if state in (JobState.PENDING, JobState.PAUSED) and reason.startswith(_WORKS):
        return f"{said}: it cannot work without devices"
    if state is JobState.SUCCEEDED and job.total_steps is not None and job.step != job.total_steps:
        return f"{said}: it has made {job.step} of {job.total_steps} steps"
    if len({replica.device_id for replica in job.replicas}) != len(job.replicas):
        return f"{said}: two of its workers are on one device"
    return ""


def committed_steps(workload: Path) -> list[dict[str, Any]]:
    """The lineage of committed steps. Raises AssertionError where a step was committed twice or of other samples.

    A job whose every worker died goes back to its checkpoint: what it commits again, under a higher generation,
    replaces the steps that died with it, and must be made of the same samples.
    """
    lineage: list[dict[str, Any]] = []
    digests: dict[int, str] = {}
    for line in (workload / "steps.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert digests.setdefault(record["step"], record["ids_digest"]) == record["ids_digest"], (
            f"step {record['step']} was made of other samples when it was done again"
        )
        if lineage and record["step"] <= lineage[-1]["step"]:
            assert record["generation"] > lineage[-1]["generation"], "a step was committed twice by one generation"
            del lineage[record["step"] - 1 :]
        lineage.append(record)
    return lineage


def artifact_digest(workload: Path) -> str:
    """The hash of a finished job's model."""
    return hashlib.sha256((workload / "artifacts" / "model.safetensors").read_bytes()).hexdigest()


def assert_exactly_once(workload: Path, *, num_samples: int, batch: int, num_epochs: int) -> None:
    """Every step committed once, in order, generations never falling, and every sample of every epoch used once."""
    steps = committed_steps(workload)
    per_epoch = -(-num_samples // batch)
    numbers = [record["step"] for record in steps]
    assert numbers == list(range(1, per_epoch * num_epochs + 1)), f"the committed steps are {numbers}"
    generations = [record["generation"] for record in steps]
    assert generations == sorted(generations), f"the generations of its steps are {generations}"
    for epoch in range(num_epochs):
        seen = sum(record["num_samples"] for record in steps if record["epoch"] == epoch)
        assert seen == num_samples, f"{seen} of {num_samples} samples were used in epoch {epoch}"


def wrong_with_ends(journal: Path, job_ids: Sequence[str]) -> list[str]:
    """Acknowledged jobs that the journal ended not once, and jobs that were never asked for."""
    opened = SqliteJournal(journal, read_only=True)
    try:
        ends = Counter(
            str(action.job_id) for _, step in opened.read() for action in step.actions if isinstance(action, EndJob)
        )
    finally:
        opened.close()
    asked = set(job_ids)
    wrong = [f"{job_id} was acknowledged and ended {ends[job_id]} times" for job_id in job_ids if ends[job_id] != 1]
    return wrong + [f"{job_id} ran and was never acknowledged" for job_id in ends if job_id not in asked]


def wrong_with_replay(journal: Path, policy: str, usd_per_device_hour: float) -> list[str]:
    """Where the journal, decided anew, leads to something else."""
    opened = SqliteJournal(journal, read_only=True)
    try:
        for is_cold in (False, True):
            decides = WithFunctions(WithinBudget(make_live_policy(policy), usd_per_device_hour))
            # From the first step on, or where retention has dropped it, from the oldest snapshot.
            is_whole = opened.archive.first_mark().seq == 0
            snapshots = () if is_whole else tuple(opened.archive.snapshots())[-1:]
            verify(Controller(decides, overheads=LOCAL_OVERHEADS), opened, is_cold=is_cold, snapshots=snapshots)
    except SpringtideError as error:
        return [f"the journal replays to other decisions: {error}"]
    finally:
        opened.close()
    return []


def wrong_with_results(workload: Path, num_samples: int, batch: int, num_epochs: int, digest: str) -> list[str]:
    """What is wrong with the steps and the model of a job that succeeded."""
    try:
        assert_exactly_once(workload, num_samples=num_samples, batch=batch, num_epochs=num_epochs)
        found = artifact_digest(workload)
    except (AssertionError, OSError, ValueError, KeyError) as error:
        return [f"{workload.name}: {error}"]
    return [] if found == digest else [f"{workload.name}: its model has other bits than that of an undisturbed run"]


def wrong_with_figures(first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """Figures of the control plane that have grown over the run."""
    room = {"descriptors": 24.0, "threads": 16.0, "resident_mib": 48.0}
    return [
        f"the control plane's {name} grew from {first[name]:.0f} to {last[name]:.0f}"
        for name, most in room.items()
        if name in first and name in last and last[name] > first[name] + most
    ]
