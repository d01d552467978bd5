"""What a restarted control plane hands to its executor, where the machine has other devices than before."""

from __future__ import annotations

from types import SimpleNamespace

from springtide.core.actions import StartReplica
from springtide.core.events import ReplicaLost
from springtide.core.ports import Standing
from springtide.core.workload import Entrypoint, TrainingJob
from springtide.service.crash_points import CrashPoints

JOB = TrainingJob(job_id="fit-1", name="fit", entrypoint=Entrypoint(source_path="a.py", object_name="fit"))


def start(number):
    return StartReplica(
        workload=JOB, replica_id=f"fit-1.{number}", device_id=f"local/{number}", generation=1, cause="recovery"
    )


def recovered(devices):
    told, posted = [], []
    executor = SimpleNamespace(recover=told.append, post=posted.append)
    points = CrashPoints(executor, lambda name: None, lambda: None, devices, None, lambda: None)
    points.recover(Standing(replicas=(start(0), start(1)), actions=(start(1),)))
    return told[0], posted


def test_workers_on_devices_that_are_gone_are_lost_and_not_adopted():
    standing, posted = recovered({"local/0"})
    assert (standing.replicas, standing.actions) == ((start(0),), ())
    lost = ReplicaLost(
        workload_id="fit-1",
        replica_id="fit-1.1",
        reason="local/1 is no device of this platform any more",
        is_fault=False,
    )
    assert posted == [lost]


def test_an_executor_that_knows_its_devices_is_told_all():
    standing, posted = recovered(None)
    assert (standing.replicas, standing.actions, posted) == ((start(0), start(1)), (start(1),), [])
