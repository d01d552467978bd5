"""What a workload's owner has set for its workers' environment, as rows of its details."""

from __future__ import annotations

from springtide.core.status.platform import JobStatus, ServiceStatus


def environment_pairs(status: JobStatus | ServiceStatus) -> list[tuple[str, str]]:
    """The names of its variables and secrets, without their values, and its packages."""
    return [
        ("variables", ", ".join(status.env)),
        ("secrets", ", ".join(status.secrets)),
        ("packages", ", ".join(status.packages)),
        ("python", status.python),
    ]
