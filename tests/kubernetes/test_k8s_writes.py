"""Writes against a real API server: a crash between any two effects, lost answers, conflicts, refusals, patience."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from kits.kubernetes.api_proxy import ApiProxy, Request
from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Cluster
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import (
    AlreadyExists,
    Invalid,
    KubeForbidden,
    NoSuchObject,
    QuotaExceeded,
)
from springtide.backends.kubernetes.client.kinds import CONFIG_MAP, POD, RESOURCE_QUOTA, Key, Object, key_of, uid_of
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.client.writes import ensure_bound, ensure_created

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]
MARK = "springtide.test/replica"


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    with ApiProxy(cluster.kubeconfig) as proxy:
        yield proxy


@pytest.fixture
def thread(proxy: ApiProxy) -> Iterator[ApiThread]:
    with ApiThread(proxy.connect) as thread:
        yield thread


def pod(name: str, replica: str = "r1") -> Object:
    return {
        "metadata": {"name": name, "annotations": {MARK: replica}},
        "spec": {
            "containers": [{"name": "m", "image": "x"}],
            "schedulerName": "springtide",
            "automountServiceAccountToken": False,
        },
    }


def is_write(request: Request) -> bool:
    return request.method != "GET"


async def start(api: KubeApi, namespace: str, name: str, node: str) -> Object:
    """What an executor does to start a replica: two effects."""
    made = await ensure_created(
        api, POD, pod(name), namespace, is_ours=lambda found: found["metadata"]["annotations"].get(MARK) == "r1"
    )
    await ensure_bound(api, key_of(made), node, uid=uid_of(made))
    return made


class Outcome:
    def __init__(self) -> None:
        self.done: list[object] = []
        self.failed: list[Exception] = []
        self.waiting: list[str] = []

    def callbacks(self):
        return {"done": self.done.append, "failed": self.failed.append, "waiting": self.waiting.append}

    def wait(self) -> None:
        wait_for("an outcome", lambda: self.done or self.failed, 30)


@pytest.mark.parametrize("is_answer_lost", [False, True], ids=["before the effect", "after it, unanswered"])
@pytest.mark.parametrize("effect", [0, 1, 2, 3])
def test_a_crash_between_any_two_effects(cluster, namespace, effect, is_answer_lost):
    """Two replicas are started and one ended; the control plane dies at every effect in turn, and a new one goes on."""
    with ApiProxy(cluster.kubeconfig) as proxy:
        proxy.rules.delays.append((is_write, 0.02))
        died = threading.Event()

        def dies(request: Request) -> bool:
            if not is_write(request):
                return False
            if proxy.count(is_write) <= effect:
                return False
            died.set()
            return True

        if is_answer_lost:
            proxy.lose_answer(dies, times=1000)
        else:
            proxy.answer(dies, 503, times=1000, reason="ServiceUnavailable")
        with ApiThread(proxy.connect) as thread:
            thread.write("r1", lambda api: start(api, namespace, "r1", "n1"))
            thread.write("r1", lambda api: api.delete(POD, "r1", namespace))
            thread.write("r2", lambda api: start(api, namespace, "r2", "n2"))
            assert died.wait(10)
            thread.close()
        # Leave what is under way at the server the time to happen.
        time.sleep(0.1)
        before = {each["metadata"]["name"]: each["metadata"]["uid"] for each in cluster.api.pods(namespace)}
        proxy.rules.answers.clear()
        proxy.rules.lost_answers.clear()
        outcome = Outcome()
        with ApiThread(proxy.connect) as thread:
            # What the journal still wants: r2 runs, r1 does not.
            thread.write("r2", lambda api: start(api, namespace, "r2", "n2"), **outcome.callbacks())
            outcome.wait()
            thread.write("r1", lambda api: api.delete(POD, "r1", namespace, grace_s=0))
            wait_for("the end of the writes", lambda: thread.num_pending == 0, 10)
    assert outcome.failed == []
    wait_for("r1's end", lambda: len(cluster.api.pods(namespace)) == 1, 10)
    (left,) = cluster.api.pods(namespace)
    assert left["metadata"]["name"] == "r2"
    assert left["spec"]["nodeName"] == "n2"
    # The pod that the dead one made is the pod that is there.
    assert left["metadata"]["uid"] == before.get("r2", left["metadata"]["uid"])


def test_an_answer_that_is_lost_makes_no_second_pod(thread, proxy, namespace, cluster):
    proxy.lose_answer(lambda request: request.method == "POST" and request.is_of("pods"), times=2)
    outcome = Outcome()
    thread.write("r1", lambda api: start(api, namespace, "r1", "n1"), **outcome.callbacks())
    outcome.wait()
    assert len(outcome.waiting) == 2
    (made,) = cluster.api.pods(namespace)
    assert made["spec"]["nodeName"] == "n1"
    # Made, found twice (the first time unheard), bound.
    assert proxy.count(lambda request: request.method == "POST") == 4


def test_a_namesake_is_not_taken_for_ours(thread, namespace, cluster):
    cluster.api.post(f"api/v1/namespaces/{namespace}/pods", {"apiVersion": "v1", "kind": "Pod", **pod("r1", "another")})
    outcome = Outcome()
    thread.write("r1", lambda api: start(api, namespace, "r1", "n1"), **outcome.callbacks())
    outcome.wait()
    assert isinstance(outcome.failed[0], AlreadyExists)


def test_a_pod_on_another_node_is_no_success(thread, namespace):
    first, second = Outcome(), Outcome()
    thread.write("r1", lambda api: start(api, namespace, "r1", "n1"), **first.callbacks())
    thread.write("r1", lambda api: start(api, namespace, "r1", "n2"), **second.callbacks())
    second.wait()
    assert first.done
    assert "on node n1, not on n2" in str(second.failed[0])


def test_conflicts_are_tried_again_with_what_is_there(thread, namespace, cluster):
    """Ten writers add one each to a number that all read first."""
    thread.call(
        lambda api: api.create(CONFIG_MAP, {"metadata": {"name": "sum"}, "data": {"n": "0"}}, namespace),
    )

    async def add_one(api: KubeApi) -> Object:
        found = await api.get(CONFIG_MAP, "sum", namespace)
        return await api.replace(CONFIG_MAP, {**found, "data": {"n": str(int(found["data"]["n"]) + 1)}})

    for writer in range(10):
        thread.write(("writer", writer), add_one)
    wait_for("all of them", lambda: thread.num_pending == 0 and thread.writes.num_done == 10, 30)
    assert cluster.api.get(f"api/v1/namespaces/{namespace}/configmaps/sum")["data"] == {"n": "10"}


def test_a_server_with_too_much_to_do_is_left_alone_for_as_long_as_it_says(thread, proxy, namespace, monkeypatch):
    proxy.answer(is_write, 429, times=1, reason="TooManyRequests", message="later", Retry_After="1")
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay_s: float, *rest: object) -> None:
        slept.append(delay_s)
        await sleep(delay_s, *rest)

    monkeypatch.setattr(asyncio, "sleep", noted)
    outcome = Outcome()
    thread.write("r1", lambda api: start(api, namespace, "r1", "n1"), **outcome.callbacks())
    outcome.wait()
    assert outcome.waiting == ["later"]
    assert outcome.done
    # Its own back-off would have been a tenth of that.
    assert 1.0 in slept


def test_refusals_are_final_and_say_why(thread, proxy, namespace, cluster):
    invalid, forbidden, full, missing = Outcome(), Outcome(), Outcome(), Outcome()
    bad = pod("bad")
    bad["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "many"}}
    thread.write("a", lambda api: api.create(POD, bad, namespace), **invalid.callbacks())
    thread.call(
        lambda api: api.create(RESOURCE_QUOTA, {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}, namespace)
    )
    wait_for("the quota", lambda: cluster.api.get(f"api/v1/namespaces/{namespace}/resourcequotas/q").get("status"), 20)
    thread.write("b", lambda api: api.create(POD, pod("full"), namespace), **full.callbacks())
    thread.write("c", lambda api: api.bind(Key(namespace, "nobody"), "n1"), **missing.callbacks())
    proxy.answer(lambda request: request.is_of("secrets"), 403, reason="Forbidden", message="you may not")
    thread.write(
        "d", lambda api: api.get(CONFIG_MAP._replace(plural="secrets"), "s", namespace), **forbidden.callbacks()
    )
    for outcome in (invalid, forbidden, full, missing):
        outcome.wait()
        assert outcome.waiting == []
    assert isinstance(invalid.failed[0], Invalid)
    assert isinstance(full.failed[0], QuotaExceeded)
    assert isinstance(forbidden.failed[0], KubeForbidden)
    assert isinstance(missing.failed[0], NoSuchObject)


def test_writes_to_one_object_keep_their_order_and_others_do_not_wait_for_it(thread, proxy, namespace):
    slow = f"/api/v1/namespaces/{namespace}/pods"
    proxy.rules.delays.append((lambda request: request.path == slow and b'"slow"' in request.body, 1.0))
    order: list[str] = []
    thread.write("slow", lambda api: start(api, namespace, "slow", "n1"), done=lambda _: order.append("slow made"))
    thread.write("slow", lambda api: api.delete(POD, "slow", namespace), done=lambda _: order.append("slow ended"))
    thread.write("quick", lambda api: start(api, namespace, "quick", "n1"), done=lambda _: order.append("quick made"))
    wait_for("all of them", lambda: len(order) == 3, 20)
    assert order == ["quick made", "slow made", "slow ended"]


def test_a_write_that_stands_no_more_is_not_made(thread, proxy, namespace, cluster):
    proxy.answer(is_write, 503, times=1000, reason="ServiceUnavailable", message="away")
    stands = True
    outcome = Outcome()
    thread.write(
        "r1", lambda api: start(api, namespace, "r1", "n1"), is_still_wanted=lambda: stands, **outcome.callbacks()
    )
    wait_for("a first attempt", lambda: outcome.waiting, 10)
    stands = False
    proxy.rules.answers.clear()
    wait_for("the end of it", lambda: thread.num_pending == 0, 20)
    assert outcome.done == outcome.failed == []
    assert cluster.api.pods(namespace) == []


def test_who_may_not_act_sends_nothing(proxy, namespace, cluster):
    may = False
    outcome = Outcome()
    with ApiThread(proxy.connect, may_write=lambda: may) as thread:
        thread.write("r1", lambda api: start(api, namespace, "r1", "n1"), **outcome.callbacks())
        wait_for("a sentence that says so", lambda: outcome.waiting, 10)
        assert "lease" in outcome.waiting[0]
        assert proxy.count(is_write) == 0
        may = True
        outcome.wait()
    assert outcome.done
