from __future__ import annotations

import pytest

from local_platform import Platform, start
from springtide.core.actions import EndJob, PreemptJob, ResizeJob, StopReplica
from springtide.core.events import (
    CancelRequested,
    CheckpointCommitted,
    JobResized,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
)
from springtide.core.workload import JobState, ReplicaId, WorkloadId


def test_first(platform: Platform) -> None:
    platform.executor.start(start("r0"))
    ready = platform.until(ReplicaReady)
    assert ready.replica_id == "r0"
    platform.executor.start(StopReplica(workload_id=WorkloadId("job"), replica_id=ReplicaId("r0"), grace_s=3.0))
    platform.until(ReplicaStopped)
