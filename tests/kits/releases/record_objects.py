"""`python -m kits.releases.record_objects OUT.json`, in tests/: objects of a cluster as this version leaves them.

With the spec that an API server keeps, the status, and the journal of the platform that took them in. A set is recorded
for each release, and every later version must read it and lose nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from kits.service.cluster_double import House
from kits.service.platform_double import PlatformDouble
from springtide.backends.kubernetes.client.kinds import uid_of
from springtide.backends.kubernetes.resources.definitions import spec_schema
from springtide.control.journal.codec import SCHEMA_VERSION
from springtide.core.events import JobFinished, ProgressReported, ReplicaReady
from springtide.core.status.pods import ClusterStatus
from springtide.service.reconciler.status import StatusWriter

NUM_DEVICES = 16
# Stands for the place of the state directory, by which sources are named.
STATE_DIR = "STATE_DIR"
JOBS: dict[str, dict[str, Any]] = {
    "running": {
        "workers": "1..2",
        "epochs": 3,
        "samples": 32_000,
        "globalBatch": "64..512",
        "maxLocalBatch": 64,
        "learningRate": "adascale",
        "length": "progress",
        "virtualShards": 16,
        "speeds": {"1": 10.0, "2": 18.0},
        "deadline": "2030-01-31T18:00:00Z",
        "budget": "$400",
        "soft": True,
        "params": {"lr": 0.1, "hidden": 64, "warm": True},
        "retries": 5,
        "grace": "20s",
        "checkpointEvery": "1m",
        "study": "s1",
        "container": {
            "image": "registry.example/train:1",
            "resources": {"cpu": "1500m", "memory": "2Gi"},
            "env": [{"name": "MODE", "value": "fast"}],
            "secrets": ["token"],
            "serviceAccountName": "trainer",
        },
    },
    "held": {"workers": 1, "globalBatch": 32, "seed": 7},
    "done": {"workers": 1, "ttlSecondsAfterFinished": 3600, "ttlKeeps": "nothing"},
    "script": {"source": {"args": ["--lr", "1"], "files": {"main.py": "print(1)\n"}}, "workers": 2},
    "refused": {"learningRate": "sqrt", "globalBatch": 32},
}
SERVICE = {
    "slo": "p99 < 200ms",
    "scale": "1..4",
    "batchWait": "5ms",
    "idle": "45s",
    "grace": "5s",
    "capacity": 120.0,
    "params": {"model": "digits"},
}


def spec_defaults(kind: str) -> dict[str, Any]:
    """What an API server adds to a spec, also to one that was written before, whenever it is read."""
    fields = spec_schema(kind)["properties"]
    return {name: field["default"] for name, field in fields.items() if "default" in field}


def house_of(platform: PlatformDouble) -> tuple[House, StatusWriter]:
    """The reconciler of a platform, and what writes its statuses."""
    house = House(platform)
    return house, StatusWriter(platform, house.cluster, "ml-platform", "http://127.0.0.1:8787", ClusterStatus)


def play() -> tuple[PlatformDouble, House, StatusWriter]:
    """Take the objects in: a job trains, one is paused, one has ended, a script trains, one is refused; a service."""
    platform = PlatformDouble(Path(tempfile.mkdtemp()), num_devices=NUM_DEVICES)
    house, writer = house_of(platform)
    house.services.compare(
        house.cluster.put("InferenceFunction", "echo", **spec_defaults("InferenceFunction") | SERVICE)
    )
    (service,) = platform.view().services.values()
    ready = [ReplicaReady(workload_id=service.workload_id, replica_id=each.replica_id) for each in service.replicas]
    platform.play(*ready)
    for name, spec in JOBS.items():
        obj = house.cluster.put(name=name, **spec_defaults("TrainingFunction") | spec)
        record, refusal = house.jobs.submit(obj)
        if record is None:
            writer.write_refused(obj, [refusal])
            continue
        platform.run_job(record.workload_id)
        generation = house.job(obj).group.generation
        report = ProgressReported(
            job_id=record.workload_id, generation=generation, step=20, total_steps=100, world_size=1
        )
        platform.play(report)
        if name == "held":
            house.cluster.change(obj, suspend=True)
            house.compare(obj)
            platform.stop_replicas(record.workload_id)
        elif name == "done":
            platform.play(JobFinished(job_id=record.workload_id, generation=generation, step=100))
            platform.stop_replicas(record.workload_id)
    return platform, house, writer


def write_statuses(house: House, writer: StatusWriter) -> None:
    """Compare every object with its workload and write its status, as a control plane does in each round."""
    for (kind, _), obj in list(house.cluster.cached.items()):
        if kind == "InferenceFunction":
            service, conditions = house.services.compare(obj)
            writer.write_service(obj, service, conditions)
        elif house.job(obj) is not None:
            writer.write_job(obj, house.job(obj), [house.jobs.compare(obj, house.job(obj))])


def record(out: Path) -> None:
    """Play the story and write it down."""
    platform, house, writer = play()
    write_statuses(house, writer)
    statuses = dict(house.cluster.told)
    objects = [{**found, "status": statuses[uid_of(found)]} for found in house.cluster.server.values()]
    steps = [json.loads(msgspec.json.encode(step)) for _, step in platform.journal.read()]
    content = {"schema": SCHEMA_VERSION, "objects": objects, "steps": steps}
    text = json.dumps(content, indent=1).replace(str(platform.state_dir), STATE_DIR)
    out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
