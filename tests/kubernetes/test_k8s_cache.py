"""The cache against a real API server behind a proxy: stale answers, lost notifications, broken connections, 410."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kits.kubernetes.api_proxy import ApiProxy
from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Cluster
from springtide.backends.kubernetes.client import cache as cache_module
from springtide.backends.kubernetes.client.errors import VersionConflict
from springtide.backends.kubernetes.client.kinds import CONFIG_MAP, POD
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.client.writes import ensure_created

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    with ApiProxy(cluster.kubeconfig) as proxy:
        yield proxy


@pytest.fixture
def thread(proxy: ApiProxy) -> Iterator[ApiThread]:
    with ApiThread(proxy.connect) as thread:
        yield thread


class Maps:
    """ConfigMaps of a namespace, changed behind the proxy's back."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.api = cluster.api
        self.path = f"api/v1/namespaces/{namespace}/configmaps"

    def make(self, name: str, value: str = "0") -> None:
        self.api.post(
            self.path,
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, "labels": {"t": "1"}},
                "data": {"v": value},
            },
        )

    def change(self, name: str, value: str) -> None:
        self.api.patch(f"{self.path}/{name}", {"data": {"v": value}})

    def delete(self, name: str) -> None:
        self.api.delete(f"{self.path}/{name}")


@pytest.fixture
def maps(cluster: Cluster, namespace: str) -> Maps:
    return Maps(cluster, namespace)


def values(cache) -> dict[str, str]:
    return {obj["metadata"]["name"]: obj["data"]["v"] for obj in cache.objects()}


def opened(thread: ApiThread, namespace: str, compare_every_s: float = 1000.0):
    cache = thread.cache(CONFIG_MAP, namespaces=[namespace], labels="t=1", compare_every_s=compare_every_s)
    thread.sync(10)
    return cache


def test_it_follows_what_happens(thread, namespace, maps):
    maps.make("a")
    cache = opened(thread, namespace)
    assert values(cache) == {"a": "0"}
    maps.change("a", "1")
    maps.make("b")
    wait_for("both changes", lambda: values(cache) == {"a": "1", "b": "0"}, 10)
    maps.delete("a")
    wait_for("the end of one", lambda: values(cache) == {"b": "0"}, 10)
    assert cache.num_lists == 1


def test_a_broken_watch_is_taken_up_where_it_was(thread, proxy, namespace, maps):
    cache = opened(thread, namespace)
    proxy.go_away()
    maps.make("a")
    maps.change("a", "1")
    wait_for("a sentence that says so", lambda: "does not answer" in cache.problem, 10)
    assert values(cache) == {}
    proxy.come_back()
    wait_for("what happened meanwhile", lambda: values(cache) == {"a": "1"}, 20)
    # From its version on, not listed anew.
    assert cache.num_lists == 1
    assert cache.problem == ""


def test_trouble_is_over_when_the_watch_stands_again_though_nothing_happens(thread, proxy, namespace):
    cache = opened(thread, namespace)
    proxy.go_away()
    wait_for("a sentence that says so", lambda: cache.problem, 10)
    proxy.come_back()
    wait_for("peace", lambda: not cache.problem, 20)


def test_a_version_that_is_too_old_is_listed_anew(thread, proxy, namespace, maps):
    maps.make("gone")
    cache = opened(thread, namespace)
    proxy.go_away()
    maps.delete("gone")
    maps.make("a", "2")
    proxy.answer(lambda request: request.is_watch, 410, reason="Expired")
    proxy.come_back()
    wait_for("the new listing", lambda: values(cache) == {"a": "2"}, 20)
    assert cache.num_lists == 2


def test_a_lost_notification_is_found_by_comparing(thread, proxy, namespace, maps):
    maps.make("changed")
    maps.make("deleted")
    cache = opened(thread, namespace, compare_every_s=0.5)
    proxy.rules.lost_events.append(lambda request, kind, obj: kind != "BOOKMARK")
    maps.change("changed", "1")
    maps.delete("deleted")
    maps.make("made", "2")
    wait_for("what nobody told of", lambda: values(cache) == {"changed": "1", "made": "2"}, 10)
    assert proxy.num_lost_events >= 3
    assert cache.num_healed >= 3
    assert cache.num_lists == 1


def test_a_listing_from_the_past_does_not_count(thread, proxy, namespace, maps):
    maps.make("a", "old")
    cache = opened(thread, namespace, compare_every_s=0.3)
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    proxy.freeze(path, "t=1")
    maps.change("a", "new")
    maps.make("b", "new")
    wait_for("the present", lambda: values(cache) == {"a": "new", "b": "new"}, 10)
    seen: list[tuple[str, object]] = []
    cache.listen(lambda change: seen.append((change.key.name, change.now and change.now["data"]["v"])))
    seen.clear()
    # The watch cannot go on from where it was, and all that is to be had is the past.
    proxy.answer(lambda request: request.is_watch, 410, times=1, reason="Expired")
    proxy.cut()
    wait_for("a sentence that says so", lambda: "held before" in cache.problem, 10)
    assert values(cache) == {"a": "new", "b": "new"}
    proxy.rules.frozen.clear()
    maps.change("a", "newer")
    wait_for("the present again", lambda: values(cache) == {"a": "newer", "b": "new"}, 20)
    assert seen == [("a", "newer")]


def test_a_past_that_lasts_is_believed_in_the_end(thread, proxy, namespace, maps, monkeypatch):
    monkeypatch.setattr(cache_module, "PAST_REFUSED_S", 0.5)
    maps.make("a", "old")
    cache = opened(thread, namespace)
    proxy.freeze(f"/api/v1/namespaces/{namespace}/configmaps", "t=1")
    maps.change("a", "new")
    wait_for("the change", lambda: values(cache) == {"a": "new"}, 10)
    proxy.rules.lost_events.append(lambda request, kind, obj: True)
    proxy.answer(lambda request: request.is_watch, 410, times=1, reason="Expired")
    proxy.cut()
    wait_for("the store as it was restored", lambda: values(cache) == {"a": "old"}, 20)


def test_absence_is_confirmed_by_the_server_itself(thread, proxy, namespace, maps):
    """A fresh control plane has seen nothing that it could know a stale listing by."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    proxy.freeze(path, "t=1")
    maps.make("a")
    cache = opened(thread, namespace)
    assert values(cache) == {}
    told = []
    thread.confirm(cache, "a", namespace, told.append)
    wait_for("its answer", lambda: told, 10)
    assert told[0]["data"] == {"v": "0"}
    assert values(cache) == {"a": "0"}
    maps.delete("a")
    told.clear()
    thread.confirm(cache, "a", namespace, told.append)
    wait_for("its answer", lambda: len(told), 10)
    assert told == [None]
    wait_for("that nothing is left", lambda: values(cache) == {}, 10)


def test_an_api_server_that_is_restarted(cluster, namespace, maps):
    if cluster.lab is None:
        pytest.skip("KUBECONFIG names a cluster that is not ours to break")
    from springtide.backends.kubernetes.client.api import KubeApi

    maps.make("a")
    with ApiThread(lambda: KubeApi.connect(cluster.kubeconfig)) as thread:
        cache = opened(thread, namespace)
        made = []
        cluster.lab.kill_api_server()
        thread.write(
            "b",
            lambda api: ensure_created(
                api,
                CONFIG_MAP,
                {"metadata": {"name": "b", "labels": {"t": "1"}}, "data": {"v": "9"}},
                namespace,
                is_ours=lambda _: True,
            ),
            done=made.append,
        )
        wait_for("trouble", lambda: thread.problem, 10)
        cluster.lab.start_api_server()
        wait_for("the write that waited", lambda: made, 30)
        wait_for("its notification", lambda: values(cache) == {"a": "0", "b": "9"}, 30)
        wait_for("peace", lambda: not thread.problem, 30)
        assert thread.num_pending == 0


def test_objects_of_one_name_are_told_apart(thread, namespace, cluster):
    cache = thread.cache(POD, namespaces=[namespace])
    thread.sync(10)
    pod = {
        "metadata": {"name": "p"},
        "spec": {
            "containers": [{"name": "m", "image": "x"}],
            "schedulerName": "springtide",
            "automountServiceAccountToken": False,
        },
    }
    first = thread.call(lambda api: api.create(POD, pod, namespace))
    thread.call(lambda api: api.delete(POD, "p", namespace, uid=first["metadata"]["uid"], grace_s=0))
    second = thread.call(lambda api: api.create(POD, pod, namespace))
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    # What was meant for the first does not touch the second.
    uid = first["metadata"]["uid"]
    with pytest.raises(VersionConflict):
        thread.call(lambda api: api.delete(POD, "p", namespace, uid=uid, grace_s=0))
    wait_for("the second", lambda: (found := cache.get("p", namespace)) and found["metadata"]["uid"] != uid, 10)
    cache.put(first)
    found = cache.get("p", namespace)
    assert found is not None
    assert found["metadata"]["uid"] == second["metadata"]["uid"]
