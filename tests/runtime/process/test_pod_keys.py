"""Workers with keys that may do what docs/kubernetes.md says and nothing else, at a server that asks for them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import boto3
import numpy as np
import pytest
from msgspec.structs import replace

from kits.runtime.pod_plane import PodPlane
from kits.runtime.runtime_plane import make_job
from kits.servers import running_s3
from springtide.core.errors import StorageError
from springtide.core.wire.workers import CheckpointWritten
from springtide.core.workload import ReplicaId
from springtide.storage.datasets.store import put_dataset
from springtide.storage.stores.open import open_store

pytestmark = pytest.mark.slow
DOCUMENT = Path(__file__).parents[3] / "docs" / "kubernetes.md"
BUCKET = "team-springtide"
ADMINISTRATOR = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
# moto asks about many removals at once as about one of the bucket; AWS asks about each object.
MANY_REMOVALS = {"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": f"arn:aws:s3:::{BUCKET}"}
# A bucket, and a user, a policy and a key for each of two: whoever comes later is asked who they are.
NUM_CALLS_OF_ANYBODY = 7
TRAIN = """
import torch
import springtide as st

def fit(ctx):
    model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for batch in ctx.batches(st.dataset("points")):
        ctx.step(((model(batch.x) - batch.y) ** 2).mean())
    print("it is done", flush=True)
"""


def documented_policy():
    found = re.search(r'\{"Version".*?\]\}$', DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return json.loads(found[0])


def keys_of(iam, user, policy):
    iam.create_user(UserName=user)
    iam.put_user_policy(UserName=user, PolicyName="policy", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName=user)["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


@pytest.fixture
def server(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", str(NUM_CALLS_OF_ANYBODY))
    with running_s3() as server:
        yield server


def test_a_worker_trains_with_the_keys_that_are_documented_and_reaches_nothing_else(server, tmp_path, monkeypatch):
    def use(keys):
        for name, value in keys.items():
            monkeypatch.setenv(name, value)

    place = {"endpoint_url": server.s3_endpoint, "region_name": "us-east-1"}
    anybody = {"aws_access_key_id": "any", "aws_secret_access_key": "body"}
    boto3.client("s3", **place, **anybody).create_bucket(Bucket=BUCKET)
    iam = boto3.client("iam", **place, **anybody)
    policy = documented_policy()
    policy["Statement"].append(MANY_REMOVALS)
    platforms, workers = keys_of(iam, "platform", ADMINISTRATOR), keys_of(iam, "worker", policy)
    url = server.s3_url(BUCKET, "platform")

    use(platforms)
    job = make_job(tmp_path, TRAIN, num_epochs=6, global_batch_size=8, checkpoint_interval_s=0.0)
    plane = PodPlane(tmp_path, url, job)
    try:
        source = plane.store.put_source("main.py", TRAIN.encode())
        plane.job = replace(job, entrypoint=replace(job.entrypoint, source_path=source))
        points = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
        arrays = {"x": points, "y": points.sum(1, keepdims=True)}
        put_dataset(plane.store.store, "points", arrays, at_unix_s=0.0, part_id="p")
        use(workers)
        plane.start_group("job.0")
        plane.wait_finished()
        plane.wait_exit("job.0")
        assert [record["step"] for record in plane.steps()] == list(range(1, 13)), plane.logs()
        assert plane.of(CheckpointWritten)
        assert plane.result_hash()
        assert "it is done" in plane.store.read_log(ReplicaId("job.0")).decode()
        store = open_store(url)
        for forbidden in ("jobs/job/control", "datasets/points/manifest"):
            with pytest.raises(StorageError, match="the credentials may not do this"):
                store.put(forbidden, b"mine")
        plane.store.store.put("jobs/job/control", b"the platform's")
        with pytest.raises(StorageError, match="the credentials may not do this"):
            store.get("jobs/job/control")
        with pytest.raises(StorageError, match="the credentials may not do this"):
            open_store(server.s3_url(BUCKET, "elsewhere")).put("workloads/job/source/main.py", b"mine")
    finally:
        plane.close()
