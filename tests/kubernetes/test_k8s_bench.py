"""The Kubernetes bench itself, small: a real API server, a real control plane, objects for nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kits.kubernetes.lab.lab import Cluster, lab_folder, missing_lab
from kits.simulation.sweeps import only_in_full
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.kinds import NODE
from springtide.core.errors import BackendError
from springtide_studies.kubernetes import bench as kubernetes_bench
from springtide_studies.kubernetes import plane as kubernetes_bench_plane
from springtide_studies.kubernetes.cluster import LAB_VARIABLE, api_server

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def _own_server(monkeypatch) -> None:
    if why := missing_lab():
        pytest.skip(why)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv(LAB_VARIABLE, str(lab_folder()))


@only_in_full
def test_it_measures(monkeypatch) -> None:
    monkeypatch.setattr(kubernetes_bench, "IDLE_S", 1.0)
    monkeypatch.setattr(kubernetes_bench, "NUM_ROUNDS", 1)
    monkeypatch.setattr(kubernetes_bench, "NUM_ONE_BY_ONE", 5)
    monkeypatch.setattr(kubernetes_bench, "NUM_TOGETHER", 15)
    report = kubernetes_bench.run_bench(num_nodes=5, num_jobs=10)
    rows = {row["case"]: row for row in report["rows"]}
    # Ten jobs want four workers each; five nodes of eight devices have room for exactly these.
    assert rows["pods bound, 5 nodes x 8, 10 jobs"]["ours"] == 40
    assert rows["CPU of the control plane a pod bound"]["ours"] > 0
    assert rows["one turn of the loop, p99"]["ours"] > 0
    # News came to whoever looks on and to the control plane itself.
    assert rows["news of a pod by the watch meanwhile, p99"]["ours"] > 0
    assert rows["the same within the control plane, p99"]["ours"] > 0
    # Every call takes half a second there; no action that is handed over waits for one.
    assert rows["longest hand-over of an action, 500 ms a call"]["ours"] < 400
    assert kubernetes_bench_plane.TimedExecutor.wait is not None


def test_it_does_not_stand_among_the_nodes_of_others(monkeypatch, cluster: Cluster) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    asyncio.run(_with_api(cluster.kubeconfig, lambda api: api.create(NODE, {"metadata": {"name": "somebodys"}})))
    try:
        with pytest.raises(BackendError, match=r"has \d+ nodes"), api_server():
            raise AssertionError("somebody's cluster")
    finally:
        asyncio.run(_with_api(cluster.kubeconfig, lambda api: api.delete(NODE, "somebodys")))


async def _with_api(kubeconfig: Path, task: Callable[[KubeApi], Awaitable[object]]) -> None:
    api = KubeApi.connect(kubeconfig)
    try:
        await task(api)
    finally:
        await api.close()
