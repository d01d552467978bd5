"""The part of `why` that is about the environment in which a workload's code runs."""

from __future__ import annotations

from springtide.control.records import JobRecord, ServiceRecord


def environment_evidence(record: JobRecord | ServiceRecord) -> list[str]:
    """The names of the variables that its owner has set; their values may be private."""
    asked = record.job if isinstance(record, JobRecord) else record.service
    return [f"its workers' environment has {', '.join(sorted(asked.env))}"] if asked.env else []
