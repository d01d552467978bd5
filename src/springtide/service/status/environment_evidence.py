"""The part of `why` that is about the environment in which a workload's code runs."""

from __future__ import annotations

from typing import Any

from springtide.control.records import JobRecord, ReplicaState, ServiceRecord
from springtide.core.workload import InferenceService, TrainingJob


def environment_fields(asked: TrainingJob | InferenceService) -> dict[str, Any]:
    """The fields of a status: names of variables and secrets, and packages."""
    packages = asked.packages
    return {
        "env": tuple(sorted(asked.env)),
        "secrets": () if asked.secrets is None else asked.secrets.names,
        "packages": () if packages is None else packages.requirements,
        "python": "" if packages is None else packages.python,
    }


def making_reason(record: JobRecord | ServiceRecord) -> str:
    """What the start of its workers waits for while their environment is made; empty if it is not being made."""
    asked = record.job if isinstance(record, JobRecord) else record.service
    starting = [each for each in record.replicas if each.state is ReplicaState.STARTING and each.held_up_by]
    is_running = any(each.state is ReplicaState.READY for each in record.replicas)
    return "" if asked.packages is None or is_running or not starting else starting[0].held_up_by


def environment_evidence(record: JobRecord | ServiceRecord) -> list[str]:
    """The names of the variables and secrets that its owner has set, without their values."""
    asked = record.job if isinstance(record, JobRecord) else record.service
    evidence = [f"its workers' environment has {', '.join(sorted(asked.env))}"] if asked.env else []
    if asked.secrets is not None:
        evidence.append(f"its secrets are {', '.join(asked.secrets.names)}")
    if asked.packages is not None:
        told = ", ".join(asked.packages.requirements) or "no packages but the platform's"
        by = f" by {asked.packages.python}" if asked.packages.python else ""
        evidence.append(f"its workers run in an environment of its own{by}, with {told}")
    return evidence
