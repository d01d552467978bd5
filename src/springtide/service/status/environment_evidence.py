"""The part of `why` that is about the environment in which a workload's code runs."""

from __future__ import annotations

from springtide.control.records import JobRecord, ServiceRecord


def environment_evidence(record: JobRecord | ServiceRecord) -> list[str]:
    """The names of the variables and secrets that its owner has set, without their values."""
    asked = record.job if isinstance(record, JobRecord) else record.service
    evidence = [f"its workers' environment has {', '.join(sorted(asked.env))}"] if asked.env else []
    if asked.secrets is not None:
        evidence.append(f"its secrets are {', '.join(asked.secrets.names)}")
    return evidence
