"""The part of a worker's environment that its workload's owner has chosen."""

from __future__ import annotations

import os

from springtide.core.wire.workers import WorkerSpec


def set_user_environment(spec: WorkerSpec) -> None:
    """Set the workload's variables in this process; call it before the user's code is imported."""
    os.environ.update(spec.workload.env)
