"""The control plane dies at every named point around an effect; the next one ends up where it should."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.local.local_platform import Platform, living_workers, start
from springtide.backends.local import CRASH_POINTS
from springtide.core.actions import ResizeJob
from springtide.core.events import JobResized, ReplicaLost, ReplicaReady
from springtide.core.ports import Standing
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.storage.fence import Fence

pytestmark = pytest.mark.slow
JOB = WorkloadId("job")
MEMBERS = (ReplicaId("r0"), ReplicaId("r1"))
TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("point", "nth"), [(point, nth) for point in CRASH_POINTS for nth in (1, 2) if nth == 1 or "kill" not in point]
)
def test_after_a_crash_everything_is_done_exactly_once(
    platform_of: Callable[..., Platform], tmp_path: Path, point: str, nth: int
) -> None:
    state_dir = tmp_path / "state"
    driver = subprocess.run(
        [sys.executable, "-m", "kits.local.crash_driver", state_dir, point, str(nth)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        timeout=60,
        check=False,
    )
    assert driver.returncode == 41, "the crash point was never passed"

    platform = platform_of()
    starts = tuple(start(name) for name in MEMBERS)
    form = ResizeJob(job_id=JOB, generation=2, replica_ids=MEMBERS, global_batch_size=8, forced=True)
    platform.executor.recover(Standing(replicas=starts, generations={JOB: 2}, actions=(*starts, form)))
    if point.startswith("executor.kill"):
        # r1 had been asked to stop, which this control plane does not remember: it is told of the end as of a loss.
        assert platform.until(ReplicaLost).replica_id == "r1"
        form = ResizeJob(job_id=JOB, generation=3, replica_ids=MEMBERS[:1], global_batch_size=8, forced=True)
        platform.executor.start(form)
    else:
        for name in MEMBERS:
            platform.until(ReplicaReady, lambda event, name=name: event.replica_id == name)
            # What was decided before all were there is told to each as it comes.
            platform.executor.start(form)
    platform.until(JobResized, lambda event: event.generation == form.generation)
    assert len(platform.of(JobResized)) == 1
    assert Fence(state_dir / "workloads" / "job").generation() == form.generation
    end_s = time.monotonic() + 10
    while len(living_workers(state_dir)) > len(form.replica_ids) and time.monotonic() < end_s:
        platform.take(0.05)
    assert living_workers(state_dir) == {platform.pid(name) for name in form.replica_ids}
