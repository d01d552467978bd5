"""Two training functions and an inference function on real nodes, and everything that may go wrong on the way.

Submitted with kubectl; a node is lent and taken back as load goes and comes; jobs grow and shrink while their other
workers run on; a pod is killed, another deleted, a kubelet stopped, the API server restarted, the control plane killed.
Everything ends done, and nothing ran twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from typing import Any

import pytest
import yaml
from kube_http import Refused, wait_for
from lab_nodes import NODES
from live_cluster import BUCKET, CREDENTIALS, LivePlatform, Witness, platform_on

from springtide.storage.open import open_store

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1200)]
JOBS = ("first", "second")
BATCH, NUM_SAMPLES, NUM_EPOCHS = 16, 96, 400
# A step takes four of these on one worker: what is slept away, two processors can do beside everything else.
SHARD_S = 0.06
TINY = '''
"""A linear model on 96 seeded samples; every part of a step is stretched, to leave time for trouble."""
import time
import torch

def fit(ctx):
    torch.manual_seed(7)
    x = torch.randn(96, 6)
    y = x @ torch.randn(6, 1) + 0.1 * torch.randn(96, 1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model, optimizer = ctx.prepare(model, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    for batch in ctx.batches((x, y)):
        time.sleep(float(ctx.params["shard_s"]))
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
    ctx.save()
'''
DOUBLE = """
import time

class Double:
    def predict(self, numbers: list[float]) -> list[float]:
        time.sleep(0.2)
        return [2 * number for number in numbers]
"""


def training_function(name: str, namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingFunction",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "source": {"function": "fit", "files": {"job.py": TINY}},
            "workers": "1..3",
            "epochs": NUM_EPOCHS,
            "globalBatch": BATCH,
            "grace": "5s",
            "retries": 20,
            "params": {"shard_s": str(SHARD_S)},
        },
    }


def inference_function(name: str, namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "InferenceFunction",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "source": {"class": "Double", "files": {"double.py": DOUBLE}},
            "scale": "0..2",
            "inFlight": 1,
            "maxBatch": 1,
            "idle": "3s",
            "grace": "5s",
        },
    }


def apply(platform: LivePlatform, *objects: dict[str, Any]) -> None:
    """`kubectl apply -f -`, as people type it; where there is no kubectl, what it does."""
    if shutil.which("kubectl") is None:
        platform.api.apply(*objects)
        return
    command = ["kubectl", "--kubeconfig", str(platform.lab.kubeconfig), "apply", "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump_all(objects), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Load:
    """So many callers, each asking again as soon as it is answered."""

    def __init__(self, platform: LivePlatform, callers: int) -> None:
        self._platform = platform
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(callers)]
        self.num_answers = 0
        self.wrong: list[Any] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join(90.0)

    def _ask(self, caller: int) -> None:
        number = float(caller)
        while not self._has_ended.is_set():
            number += 10.0
            status, answer = self._platform.call("/f/double", {"numbers": [number]})
            if status == 200 and answer["outputs"] == [2 * number]:
                self.num_answers += 1
            elif status not in (429, 503):
                # Who is told to come again later comes again; everything else is an answer that should not have been.
                self.wrong.append((status, answer))
            else:
                self._has_ended.wait(0.5)


class Cast:
    """The jobs of the story, and who works for them."""

    def __init__(self, platform: LivePlatform) -> None:
        self.platform = platform
        self.ids = {name: platform.workload_id(name) for name in JOBS}

    def workers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Uid and processes of every pod that trains, by replica id."""
        found = {}
        for workload_id in self.ids.values():
            for replica, pod in self.platform.running(workload_id).items():
                found[replica] = (pod["metadata"]["uid"], self.platform.pids_of(pod))
        return found

    def members(self, name: str) -> dict[str, dict[str, Any]]:
        return self.platform.running(self.ids[name])

    def on_node(self, node: str) -> list[str]:
        return [
            replica for name in JOBS for replica, pod in self.members(name).items() if pod["spec"]["nodeName"] == node
        ]

    def step(self, name: str) -> int:
        return int(self.platform.view(f"/v1/jobs/{self.ids[name]}")["step"])

    def largest(self) -> str:
        """The job with the most workers."""
        return max(JOBS, key=lambda name: len(self.members(name)))

    def wait_busy(self, count: int) -> None:
        """Until so many workers train and each has found its group."""

        def are_busy() -> bool:
            told = [self.platform.view(f"/v1/jobs/{workload_id}")["num_workers"] for workload_id in self.ids.values()]
            return sum(told) == count == len(self.workers())

        wait_for(f"{count} workers", are_busy, 120.0)

    def wait_progress(self, steps: int = 5) -> None:
        """Until every job is so many steps further than now."""
        before = {name: self.step(name) for name in JOBS}
        for name in JOBS:
            wait_for(f"{name} to go on", lambda name=name: self.step(name) >= before[name] + steps, 90.0)


@pytest.fixture
def platform(node_lab, tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with platform_on(node_lab, tmp_path / "platform", "story", pools=True, policy="springtide", day_s=600.0) as live:
        live.start()
        try:
            yield live
        except BaseException:
            print(live.told())
            raise


def test_everything_ends_done_and_nothing_runs_twice(platform):
    with Witness(platform.lab, platform.namespace) as witness:
        objects = [training_function(name, platform.namespace) for name in JOBS]
        apply(platform, *objects, inference_function("double", platform.namespace))
        cast = Cast(platform)
        try:
            a_loan_and_a_reclaim(platform, cast)
            a_pod_is_killed(platform, cast)
            a_pod_is_deleted(platform, cast)
            a_kubelet_is_stopped(platform, cast)
            the_api_server_is_restarted(platform, cast)
            the_control_plane_is_killed(platform, cast)
            for name in JOBS:
                wait_for(f"{name} to be done", lambda name=name: is_done(platform, name), 600.0)
        except BaseException:
            print(platform.told())
            raise
        platform.api.delete(f"apis/springtide.dev/v1alpha1/namespaces/{platform.namespace}/inferencefunctions/double")
        wait_for("no pod to be left", lambda: not living(platform), 60.0)
    nothing_ran_twice(platform, cast, witness)


def a_loan_and_a_reclaim(platform: LivePlatform, cast: Cast) -> None:
    """Nobody asks: the serving node is lent. Somebody asks: it is taken back, and lent again when that is over."""
    wait_for("the loan", lambda: platform.pool(NODES[1]) == "training", 90.0)
    cast.wait_busy(4)
    before = cast.workers()
    with Load(platform, callers=3) as load:
        wait_for("the reclaim", lambda: platform.pool(NODES[1]) == "inference", 90.0)
        wait_for("answers", lambda: load.num_answers >= 20, 120.0)
        cast.wait_busy(2)
        during = cast.workers()
        assert set(cast.on_node(NODES[0])) == set(during)
    assert not load.wrong
    # Those that stayed are the same processes in the same pods.
    assert during.items() <= before.items()
    wait_for("the second loan", lambda: platform.pool(NODES[1]) == "training", 120.0)
    cast.wait_busy(4)
    assert during.items() <= cast.workers().items()


def a_pod_is_killed(platform: LivePlatform, cast: Cast) -> None:
    name = cast.largest()
    before = cast.workers()
    replica, pod = max(cast.members(name).items())
    for pid in platform.pids_of(pod):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    someone_else_comes(cast, before, replica)


def a_pod_is_deleted(platform: LivePlatform, cast: Cast) -> None:
    name = cast.largest()
    before = cast.workers()
    replica, pod = min(cast.members(name).items())
    platform.api.delete(f"api/v1/namespaces/{platform.namespace}/pods/{pod['metadata']['name']}")
    someone_else_comes(cast, before, replica)


def someone_else_comes(cast: Cast, before: dict[str, Any], gone: str) -> None:
    wait_for(f"{gone} to be gone", lambda: gone not in cast.workers(), 60.0)
    cast.wait_busy(4)
    after = cast.workers()
    rest = {replica: seen for replica, seen in before.items() if replica != gone}
    assert rest.items() <= after.items(), "somebody who had nothing to do with it was started again"
    cast.wait_progress()


def a_kubelet_is_stopped(platform: LivePlatform, cast: Cast) -> None:
    """A silent kubelet is not a dead machine: whoever works there goes on."""
    before = cast.workers()
    platform.lab.kill_kubelet(NODES[1])
    wait_for("the node to be silent", lambda: not platform.lab.is_ready(NODES[1]), 90.0)
    cast.wait_progress()
    platform.lab.start_kubelet(NODES[1])
    wait_for("the node to be back", lambda: platform.lab.is_ready(NODES[1]), 90.0)
    cast.wait_progress()
    assert cast.workers() == before


def the_api_server_is_restarted(platform: LivePlatform, cast: Cast) -> None:
    before = cast.workers()
    steps = {name: platform.view(f"/v1/jobs/{cast.ids[name]}")["step"] for name in JOBS}
    token = platform.token()
    platform.lab.kill_api_server()
    platform.token = lambda: token  # type: ignore[method-assign]
    for name in JOBS:
        wait_for(f"{name} without an API server", lambda name=name: cast.step(name) >= steps[name] + 10, 60.0)
    del platform.token
    platform.lab.start_api_server()
    cast.wait_progress()
    assert cast.workers() == before


def the_control_plane_is_killed(platform: LivePlatform, cast: Cast) -> None:
    before = cast.workers()
    platform.kill()
    platform.start()
    cast.wait_progress()
    cast.wait_busy(4)
    assert cast.workers() == before, "a worker was started again though it had never gone"


def is_done(platform: LivePlatform, name: str) -> bool:
    state = platform.state("trainingfunctions", name)
    assert state not in ("FAILED", "CANCELLED", "REJECTED"), platform.find("trainingfunctions", name)["status"]
    return state == "SUCCEEDED"


def living(platform: LivePlatform) -> list[str]:
    with contextlib.suppress(OSError, Refused):
        pods = platform.api.pods(platform.namespace)
        return [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
    return ["?"]


def nothing_ran_twice(platform: LivePlatform, cast: Cast, witness: Witness) -> None:
    several = {replica: uids for replica, uids in witness.uids.items() if len(uids) != 1}
    assert not several, "a replica id had more than one pod"
    assert all(len(started) <= 1 for started in witness.starts.values()), "a container was started again"
    for name in JOBS:
        status = platform.view(f"/v1/jobs/{cast.ids[name]}")
        assert (status["state"], status["num_restarts"]) == ("SUCCEEDED", 0), status["reason"]
        each_step_once(platform, cast.ids[name])


def each_step_once(platform: LivePlatform, workload_id: str) -> None:
    """Every step is in the log once, whoever wrote it; every sample of every epoch was used once."""
    store = open_store(platform.store_url)
    keys = sorted(store.keys(f"workloads/{workload_id}/steps/"))
    records = [json.loads(line) for key in keys for line in store.get(key).decode().splitlines()]
    per_epoch = NUM_SAMPLES // BATCH
    records.sort(key=lambda record: (record["step"], record["generation"]))
    assert [record["step"] for record in records] == list(range(1, per_epoch * NUM_EPOCHS + 1))
    generations = [record["generation"] for record in records]
    assert generations == sorted(generations)
    for epoch in range(NUM_EPOCHS):
        assert sum(record["num_samples"] for record in records if record["epoch"] == epoch) == NUM_SAMPLES
    assert store.keys(f"workloads/{workload_id}/artifacts/"), f"no model in {BUCKET}"
