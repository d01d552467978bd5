"""A control plane that drives an executor through every kind of effect and ends without clean-up at a crash point."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kits.local.local_platform import Platform, start
from springtide.core.actions import ResizeJob, StopReplica
from springtide.core.events import JobResized, ReplicaReady, ReplicaStopped
from springtide.core.ports import Standing
from springtide.core.workload import ReplicaId, WorkloadId

CRASHED = 41


def main() -> None:
    state_dir, point, nth = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    num_passed = 0

    def crash_point(name: str) -> None:
        nonlocal num_passed
        num_passed += name == point
        if name == point and num_passed == nth:
            os._exit(CRASHED)

    platform = Platform(state_dir, crash_point=crash_point)
    platform.executor.recover(Standing())
    members = (ReplicaId("r0"), ReplicaId("r1"))
    for name in members:
        platform.executor.start(start(name))
    for name in members:
        platform.until(ReplicaReady, lambda event, name=name: event.replica_id == name)
    platform.executor.start(
        ResizeJob(job_id=WorkloadId("job"), generation=1, replica_ids=members, global_batch_size=8, forced=True)
    )
    platform.until(JobResized)
    platform.executor.start(StopReplica(workload_id=WorkloadId("job"), replica_id=ReplicaId("r1"), grace_s=0.2))
    platform.until(ReplicaStopped)
    platform.executor.close(stop_workers=True)


if __name__ == "__main__":
    main()
