"""Running scripts written for torchrun: the file runs as `__main__` with torchrun's environment variables."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.core.wire.workers import MAX_FINITE, FormGroup, Progress, WorkerSpec
from springtide.core.workload import Entrypoint, ReplicaId, TrainingJob
from springtide.runtime.elastic.reporting import PROGRESS_INTERVAL_S, WINDOW_S
from springtide.runtime.libraries.import_hook import ModulePatch
from springtide.runtime.process.control_link import ControlLink
from springtide.runtime.process.entry import add_import_roots
from springtide.runtime.script_reports import REPORTS, ScriptReport

# What tells libraries that other processes train with them.
WORLD_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What gloo, NCCL and torch's stores say where the process at the other end of a connection is gone.
_GONE = re.compile(
    r"(reset|closed) by peer|broken pipe|failed to recv, got 0 bytes|connection was likely closed|"
    "remote process exited",
    re.IGNORECASE,
)


def is_peer_lost(error: BaseException | None) -> bool:
    """Whether what a script has raised comes of another of its ranks being gone, which then is what went wrong."""
    while error is not None:
        # Those of torch.distributed are of this type, and have no number, unlike errors of a script's own connections.
        if isinstance(error, RuntimeError) and _GONE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class ScriptReporter:
    """Turns what the script reports into reports of a worker. Every rank's steps count, only rank 0 sends progress.

    Speed is in global batches of the job's size: the platform does not know how many samples a script's step has.
    """

    def __init__(self, link: ControlLink, spec: WorkerSpec, order: FormGroup) -> None:
        assert isinstance(spec.workload, TrainingJob)
        self._link = link
        self._is_leader = order.members.index(spec.replica_id) == 0
        self._batch_size = order.global_batch_size or spec.workload.global_batch_size
        self._generation, self._world_size = order.generation, len(order.members)
        self._steps: deque[tuple[float, int]] = deque()
        self._sent_at_s = -math.inf
        self._progress: Progress | None = None
        self.diverged_at_step: int | None = None
        self.step = 0

    def take(self, report: ScriptReport) -> None:
        """Send the script's report, or hold it until the next one is due."""
        self._link.update(step=report.step)
        now_s, is_further = time.monotonic(), report.step > self.step
        self.step = report.step
        if not self._is_leader:
            return
        is_diverged = report.loss is not None and not _is_sendable(report.loss)
        is_news = is_diverged and self.diverged_at_step is None
        if is_news:
            self.diverged_at_step = report.step
        if is_further or not self._steps:
            self._steps.append((now_s, report.step))
        # At least two, so that steps longer than the window have a speed too.
        while len(self._steps) > 2 and now_s - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()
        (first_s, first), (last_s, last) = self._steps[0], self._steps[-1]
        self._progress = Progress(
            generation=self._generation,
            step=report.step,
            total_steps=report.total or 0,
            world_size=self._world_size,
            loss=None if is_diverged else report.loss,
            is_diverged=is_diverged,
            diverged_at_step=self.diverged_at_step,
            samples_per_s=(last - first) * self._batch_size / (last_s - first_s) if last_s > first_s else None,
            metrics={name: value for name, value in report.metrics.items() if _is_sendable(value)},
        )
        if is_news or now_s - self._sent_at_s >= PROGRESS_INTERVAL_S:
            self._sent_at_s = now_s
            self._link.send(self._progress)
        else:
            self._link.hold(self._progress)

    def flush(self) -> None:
        """Send the last report, at the script's end."""
        if self._progress is not None:
            self._link.send(self._progress)


def _is_sendable(value: float) -> bool:
    """Whether the control plane takes this number: see wire.Finite."""
    return abs(value) <= MAX_FINITE


def torchrun_environment(
    order: FormGroup, replica_id: ReplicaId, job: TrainingJob, *, is_alone: bool = False
) -> dict[str, str]:
    """The environment variables that torchrun would set for this member, and Springtide's own (SPRINGTIDE_*).

    `is_alone`: no other member runs on the same machine. Raises InvalidRequest without a tcp:// rendezvous.
    """
    if not order.rendezvous.startswith("tcp://"):
        raise InvalidRequest(f"a script needs a tcp:// rendezvous, got {order.rendezvous!r}")
    host, _, port = order.rendezvous.removeprefix("tcp://").rpartition(":")
    rank, world_size = order.members.index(replica_id), len(order.members)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if is_alone else str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "1" if is_alone else str(world_size),
        "GROUP_RANK": str(rank) if is_alone else "0",
        "GROUP_WORLD_SIZE": str(world_size) if is_alone else "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": job.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, order.generation - 1)),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "SPRINGTIDE_GLOBAL_BATCH_SIZE": str(order.global_batch_size or job.global_batch_size),
        "SPRINGTIDE_PARAMS": json.dumps(job.params, sort_keys=True),
    }


def run_script(entrypoint: Entrypoint, spec: WorkerSpec, order: FormGroup, reporter: ScriptReporter) -> int:
    """Run the script to its end and return its exit code. Raises what the script raises."""
    assert isinstance(spec.workload, TrainingJob)
    os.environ.update(torchrun_environment(order, spec.replica_id, spec.workload, is_alone=bool(spec.listen_host)))
    if len(order.members) == 1:
        leave_accelerate_alone()
    REPORTS.receive = reporter.take
    return run_file(entrypoint)


def leave_accelerate_alone() -> None:
    """Have Accelerate, and with it a Trainer of transformers, find no other processes once a script imports it.

    In a world of one it would wrap models, which a program that is written for one process does not expect.
    """

    def forget(module: Any) -> None:
        for name in WORLD_VARIABLES:
            os.environ.pop(name, None)

    sys.meta_path.insert(0, ModulePatch("accelerate.state", forget))


def run_file(entrypoint: Entrypoint) -> int:
    """Run the file as `__main__` and return its exit code. Raises what it raises."""
    path = Path(entrypoint.source_path)
    add_import_roots(entrypoint)
    sys.argv = [str(path), *entrypoint.args]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    return 0
