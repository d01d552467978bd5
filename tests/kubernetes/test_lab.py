"""The lab itself: what the other tests take for granted of it, and that nothing of it stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import missing_lab
from kits.kubernetes.lab.nodes import NODES
from kits.kubernetes.lab.pods import plain_pod
from kits.kubernetes.lab.remains import CGROUPS, REGISTRY, mounts_below, processes_of
from kits.servers import running_s3

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]
TESTS = Path(__file__).parents[1]
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group(
    "gloo", init_method=f"tcp://{os.environ.get('MASTER') or os.environ['POD_IP']}:29400",
    rank=int(os.environ["RANK"]), world_size=2,
)
values = torch.full((4,), float(os.environ["RANK"]) + 1.0)
dist.all_reduce(values)
print("sum", values.tolist())
dist.destroy_process_group()
"""
STORE = """
import os
from springtide.storage.stores.open import open_store
store = open_store(os.environ["STORE"])
store.put("from-a-pod", b"hello")
print("store", store.get("from-a-pod"))
"""
VICTIM = """
import sys, time
sys.path.insert(0, "{tests}")
from kits.kubernetes.lab.lab import Lab
lab = Lab()
lab.start()
print(lab.folder, flush=True)
time.sleep(1000)
"""


def pod_of(lab, namespace, name):
    return lab.api.get(f"api/v1/namespaces/{namespace}/pods/{name}")


def phase(lab, namespace, name):
    return pod_of(lab, namespace, name)["status"]["phase"]


def ended(lab, namespace, name):
    return phase(lab, namespace, name) in ("Succeeded", "Failed")


@pytest.fixture
def place(node_lab):
    from kits.kubernetes.lab.lab import Cluster

    with Cluster(node_lab.kubeconfig, node_lab).namespace("lab") as name:
        yield name


def test_a_killed_test_leaves_nothing_behind():
    if why := missing_lab():
        pytest.skip(why)
    child = subprocess.Popen(
        [sys.executable, "-c", VICTIM.format(tests=TESTS)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    folder = Path(child.stdout.readline().strip())
    assert len(list(processes_of(folder))) >= 3
    child.kill()
    child.wait()
    child.stdout.close()
    wait_for("the lab's end", lambda: not list(processes_of(folder)) and not folder.exists(), 60.0)
    assert not mounts_below(folder)
    assert not (REGISTRY / f"lab-{folder.name}").exists()
    assert not list(CGROUPS.glob(f"*/springtide-{folder.name}-*"))


def test_pods_of_two_nodes_form_a_group(node_lab, place):
    api = node_lab.api
    path = f"api/v1/namespaces/{place}/pods"
    api.post(path, plain_pod("first", place, NODES[0], ALL_REDUCE, RANK="0"))
    address = wait_for("its address", lambda: pod_of(node_lab, place, "first")["status"].get("podIP"))
    api.post(path, plain_pod("second", place, NODES[1], ALL_REDUCE, RANK="1", MASTER=address))
    for name in ("first", "second"):
        wait_for("its end", lambda name=name: ended(node_lab, place, name))
        assert phase(node_lab, place, name) == "Succeeded", pod_of(node_lab, place, name)["status"]
        wait_for("the sum", lambda name=name: "sum [3.0, 3.0, 3.0, 3.0]" in api.logs(place, name), 10.0)


def test_a_pod_reaches_the_object_store(node_lab, place):
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with running_s3(buckets=("springtide",), host=node_lab.host) as server:
        url = f"{server.s3_url('springtide', 'lab')}&allow_http=true"
        pod = plain_pod("store", place, NODES[1], STORE, STORE=url, **keys)
        node_lab.api.post(f"api/v1/namespaces/{place}/pods", pod)
        wait_for("its end", lambda: ended(node_lab, place, "store"))
    wait_for("its words", lambda: "store b'hello'" in node_lab.api.logs(place, "store"), 10.0)
