"""Jobs on functions of a platform on a real API server: S3, PostgreSQL, Redis and an emulator are real servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kits.kubernetes.functions_platform import (
    EXAMPLES,
    STORE_KEYS,
    FunctionsPlatform,
    Surroundings,
    functions_platform,
    surroundings,
    wait_until,
)
from kits.kubernetes.kube_http import GROUP, wait_for
from kits.kubernetes.lab.lab import Cluster
from kits.servers import missing_postgres, missing_redis
from kits.simulation.sweeps import only_in_full
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.install.cluster_check import ClusterFinding, check_cluster
from springtide.service.assembly.function_cluster_check import check_functions
from springtide.service.assembly.functions import EMULATOR_TOKEN
from springtide.service.assembly.kubernetes import SUPERSEDED
from springtide.service.assembly.kubernetes_functions import REDIS_PASSWORD
from springtide.storage.frames import decode

WHY_NOT = missing_postgres() or missing_redis()
pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "none"),
]


# Of a step's 24 samples four come at a time.
SLOW_LOSS = """
def slow_loss(scores: Tensor, labels: Tensor) -> Tensor:
    import time

    time.sleep(0.02)
    return cross_entropy(scores, labels)
"""


def job_body() -> dict[str, Any]:
    """The digits on functions that have something to tell each other, with steps of at least 0.12 s."""
    layers = [
        {
            "name": f"layers.{index}",
            "parameter_bytes": 1 << 20,
            "activation_bytes": 1 << 20,
            "output_bytes": 1 << 18,
            "gradient_bytes": 1 << 18,
            "forward_s": [0.002],
            "backward_s": [0.004],
        }
        for index in range(10)
    ]
    profile = {
        "model": "digits",
        "micro_batch_size": 4,
        "memory_mb": [2048],
        "bytes_per_s": [70e6],
        "layers": layers,
        "source": "made up",
    }
    # However fast the machine, it is not done before another control plane leads.
    text = (EXAMPLES / "functions_digits.py").read_text().replace("loss=cross_entropy", "loss=slow_loss")
    text = text.replace("functions_digits = st.Task(", f"{SLOW_LOSS}\n\nfunctions_digits = st.Task(", 1)
    source = {"filename": "digits.py", "text": text, "object_name": "functions_digits", "kind": "function"}
    options = {
        "on": "functions",
        "layer_profile": profile,
        "num_samples": 1500,
        "num_epochs": 2,
        "global_batch_size": 24,
    }
    return {"name": "digits", "source": source, "options": options}


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    with pytest.MonkeyPatch.context() as patch, surroundings(tmp_path_factory.mktemp("a")) as found:
        for name, value in STORE_KEYS.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture
def platform(cluster: Cluster, namespace: str, around: Surroundings, tmp_path: Path) -> Iterator[FunctionsPlatform]:
    with functions_platform(cluster, namespace, around, tmp_path) as found:
        yield found


def test_a_file_is_trained_on_functions_and_its_model_is_where_pods_find_it(platform: FunctionsPlatform) -> None:
    platform.begin()
    example = str(EXAMPLES / "functions_digits.py")
    ran = platform.command("run", example, "--on", "functions", "--workers", "2", "--epochs", "1", "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr + platform.said()
    job = json.loads(ran.stdout)
    job_id = job["job_id"]
    assert job["state"] == "SUCCEEDED"
    store = platform.around.store(platform.name)
    wait_until("the job's objects to go", lambda: not store.keys(f"jobs/{job_id}/"), 20.0)
    model = decode(platform.workload(job_id).read_artifact("model.safetensors")).tensors
    assert len(model) == 8
    assert job["artifact_path"] == platform.workload(job_id).artifacts()["model.safetensors"]
    # It is an object like any other job, and had no pod.
    path = f"{GROUP}/namespaces/{platform.name}/trainingfunctions"

    def states() -> list[str]:
        return [each["status"]["state"] for each in platform.cluster.api.items(path)]

    wait_for("its object to say so", lambda: states() == ["SUCCEEDED"], 20.0)
    assert not platform.cluster.api.pods(platform.name)
    logs = platform.command("logs", job_id)
    assert f"[{job_id}.0.0]" in logs.stdout, logs.stdout + logs.stderr


@only_in_full
def test_another_control_plane_on_an_empty_disk_goes_on_with_the_same_functions(platform: FunctionsPlatform) -> None:
    """The first is put to sleep, not killed: it wakes up when the other has taken over, and still has its plans."""
    first = platform.begin()
    before = platform.around.num_invoked()
    job_id = platform.ask("POST", "/v1/jobs", job_body())["job_id"]
    platform.wait_job(job_id, "under way", lambda job: job["step"] >= 10, 90.0)
    began_s = time.monotonic()
    os.kill(first.pid, signal.SIGSTOP)
    platform.begin()
    taken = platform.wait_job(job_id, "known", lambda job: job["functions"] is not None, 30.0)
    assert taken["step"] < taken["total_steps"], "it has to be taken over while it trains"
    ended_s = time.monotonic()
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(30.0) == SUPERSEDED
    done = platform.wait_job(job_id, "done", lambda job: job["state"] == "SUCCEEDED", 120.0)
    functions = done["functions"]
    assert (functions["num_replaced"], functions["num_redone_steps"]) == (0, 0)
    num_functions = len(functions["places"])
    assert num_functions >= 2
    assert functions["usage"]["num_invocations"] == num_functions
    assert platform.around.num_invoked() == before + num_functions
    # The Redis was used, before, meanwhile and after, and is on the bill; nothing that travelled is left there.
    assert functions["usage"]["parameter_store_s"] >= ended_s - began_s
    wait_until("what travelled to go", lambda: not platform.around.redis_keys(), 20.0)
    store = platform.around.store(platform.name)
    wait_until("the last copies", lambda: platform.losses(job_id)[-1][0] == done["total_steps"], 20.0)
    assert [step for step, _, _ in platform.losses(job_id)] == list(range(1, done["total_steps"] + 1))
    assert len(decode(platform.workload(job_id).read_artifact("model.safetensors")).tensors) == 8
    wait_until("the job's objects to go", lambda: not store.keys(f"jobs/{job_id}/"), 20.0)
    assert "took over after a restart of the platform" in platform.command("logs", job_id).stdout


def test_a_new_budget_of_the_object_holds_while_it_runs_and_after_a_crash(platform: FunctionsPlatform) -> None:
    first = platform.begin()
    body = job_body()
    # Long enough for an edit of its object to arrive while it trains, however busy the machine.
    body["options"] |= {"budget_usd": 1.0, "num_epochs": 3}
    job_id = platform.ask("POST", "/v1/jobs", body)["job_id"]
    platform.wait_job(job_id, "under way", lambda job: job["step"] >= 5, 90.0)
    path = f"{GROUP}/namespaces/{platform.name}/trainingfunctions"
    (obj,) = platform.cluster.api.items(path)
    platform.cluster.api.patch(f"{path}/{obj['metadata']['name']}", {"spec": {"budget": "$0.75"}})

    def budget(job: dict[str, Any]) -> bool:
        return bool(job["functions"] and job["functions"]["budget_usd"] == 0.75)

    told = platform.wait_job(job_id, "held to it", budget, 60.0)
    assert told["step"] < told["total_steps"], "it has to be changed while it trains"
    assert (told["state"], told["functions"]["num_redone_steps"]) == ("RUNNING", 0)
    wait_for("its object to say so", lambda: _is_applied(platform.cluster.api.items(path)[0]), 30.0)
    first.kill()
    first.wait(30.0)
    platform.begin()
    done = platform.wait_job(job_id, "done", lambda job: job["state"] == "SUCCEEDED", 120.0)
    assert budget(done)
    assert done["functions"]["num_redone_steps"] == 0
    # What the first wrote of its functions is not lost with its disk, nor is a loss.
    wait_until("the last copies", lambda: platform.losses(job_id)[-1][0] == done["total_steps"], 20.0)
    assert [step for step, _, _ in platform.losses(job_id)] == list(range(1, done["total_steps"] + 1))


def _is_applied(obj: dict[str, Any]) -> bool:
    conditions = obj.get("status", {}).get("conditions", [])
    return any(each["type"] == "Applied" and each["status"] == "True" for each in conditions)


def test_the_check_tries_what_jobs_on_functions_rest_on(platform: FunctionsPlatform) -> None:
    around, namespace = platform.around, platform.name
    values = {**STORE_KEYS, REDIS_PASSWORD: around.redis.password, EMULATOR_TOKEN: around.emulator.token}
    secrets = f"api/v1/namespaces/{namespace}/secrets"
    platform.cluster.api.post(secrets, {"metadata": {"name": "keys"}, "stringData": values})
    given = msgspec.structs.replace(platform.settings, store_secret="keys")

    def look() -> list[tuple[str, str]]:
        async def ask() -> list[ClusterFinding]:
            api = KubeApi.connect(platform.cluster.kubeconfig)
            try:
                return await check_cluster(api, given, check_functions)
            finally:
                await api.close()

        return [(each.verdict, each.text) for each in asyncio.run(ask()) if each.name == "functions"]

    emulator, store, redis = look()
    assert emulator == ("ok", f"emulator at {around.emulator.endpoint}: 8 functions at a time, of 1024, 2048 MB")
    assert store[0] == "ok"
    assert store[1].startswith(f"s3://springtide/{namespace}: put ")
    assert redis[0] == "ok"
    assert redis[1].startswith(f"the Redis at {around.redis.host}:{around.redis.port}: version ")
    changed = {"stringData": {"AWS_ACCESS_KEY_ID": "test", REDIS_PASSWORD: "another"}}
    platform.cluster.api.patch(f"{secrets}/keys", changed)
    assert [verdict for verdict, _ in look()] == ["ok", "ok", "fail"]
    assert look()[2][1].endswith("does not take the password (WRONGPASS)")


def test_what_no_job_on_functions_can_have_is_refused_with_the_mend(platform: FunctionsPlatform) -> None:
    platform.begin()
    asked = {**job_body(), "container": {"image": "own:1"}}
    with pytest.raises(urllib.error.HTTPError) as refused:
        platform.ask("POST", "/v1/jobs", asked)
    assert refused.value.code == 422
    assert "container.image is for pods, and a job on functions has none" in refused.value.read().decode()
    # The object that was made for it is gone: nobody asked for one that is only there to say no.
    assert platform.cluster.api.items(f"{GROUP}/namespaces/{platform.name}/trainingfunctions") == []
