"""What a worker is told of its devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.backends.local import launcher as module
from springtide.backends.local.launcher import WorkerLauncher
from springtide.core.actions import StartReplica
from springtide.core.resources import DeviceKind, make_node
from springtide.core.workload import Entrypoint, TrainingJob

JOB = TrainingJob(job_id="fit-1", name="fit", entrypoint=Entrypoint(source_path="/fit.py", object_name="fit"))


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_worker_sees_all_its_devices_and_no_other(monkeypatch: pytest.MonkeyPatch, kind: DeviceKind) -> None:
    monkeypatch.setattr(module.os, "cpu_count", lambda: 8)
    shares: Any = SimpleNamespace(gpu_of=lambda device_id: None, gpu=SimpleNamespace(additions={}))
    driver: Any = SimpleNamespace(table=None)
    nodes = [make_node("a", 2, kind=kind), make_node("b", 2, kind=kind)]
    starter = WorkerLauncher(driver, nodes, "addr", 9.0, command=None, in_environment=(), shares=shares)
    action = StartReplica(workload=JOB, replica_id="fit-1.0", device_id="b/0", generation=1, more_devices=("b/1",))
    replica: Any = SimpleNamespace(action=action, work_dir=Path("/w"), log_path=Path("/l"), ordered_at_s=0.0)
    spec = starter._make_spec(replica, "token", ("", 0))
    assert (spec.num_devices, spec.num_threads, spec.environment["OMP_NUM_THREADS"]) == (2, 4, "4")
    assert spec.environment.get("CUDA_VISIBLE_DEVICES") == ("2,3" if kind == "gpu" else None)
    assert spec.device_index == (0 if kind == "gpu" else 2)
