"""Running scripts written for torchrun: the file runs as `__main__` with torchrun's environment variables."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.core.wire.workers import FormGroup, WorkerSpec
from springtide.core.workload import Entrypoint, ReplicaId, TrainingJob


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


def run_script(entrypoint: Entrypoint, spec: WorkerSpec, order: FormGroup) -> int:
    """Run the script to its end and return its exit code. Raises what the script raises."""
    assert isinstance(spec.workload, TrainingJob)
    os.environ.update(torchrun_environment(order, spec.replica_id, spec.workload, is_alone=bool(spec.listen_host)))
    path = Path(entrypoint.source_path)
    for root in (str(path.parent), entrypoint.import_root):
        if root and root not in sys.path:
            sys.path.insert(0, root)
    sys.argv = [str(path), *entrypoint.args]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    return 0
