"""What kubelets are at, from the events that an API server answers with."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from kits.kubernetes.pod_stage import StillReactor, stand_still
from kits.kubernetes.scripted_server import Answer, Asked, ScriptedServer, scripted
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.cache import Cache
from springtide.backends.kubernetes.client.kinds import POD, Key
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.pods import making as pod_making
from springtide.backends.kubernetes.pods import state as pod_state
from springtide.backends.kubernetes.pods import table as pod_table
from springtide.backends.kubernetes.pods.making import ASK_EVERY_S, MAX_ASKED, MakingWatch
from springtide.backends.kubernetes.pods.reading import MAKING
from springtide.backends.kubernetes.pods.state import PodState
from springtide.backends.kubernetes.pods.table import PodTable

PULLING = {
    "metadata": {"name": "job-0.17a1"},
    "reason": "Pulling",
    "type": "Normal",
    "message": 'Pulling image "example.com/large:1"',
    "lastTimestamp": "2030-01-31T16:52:05Z",
}


class Stage:
    """Pods whose containers are being made, and an API server with events; time is moved by the test."""

    def __init__(self, reactor: StillReactor, server: ScriptedServer) -> None:
        self.reactor, self.server = reactor, server
        self.thread = ApiThread(lambda: KubeApi(server.url))
        self.thread.open()
        self.cache = Cache(POD)
        self.pods = PodTable(self.thread, self.cache, reactor, "mine", 1)  # type: ignore[arg-type]
        self.calls: list[Future[None]] = []
        MakingWatch(self.pods, self, reactor).start()  # type: ignore[arg-type]

    def run(self, task: Callable[[KubeApi], Coroutine[Any, Any, None]]) -> None:
        """In the place of the API thread: what it is asked for is waited for."""
        self.calls.append(self.thread.run(task))

    def pod(self, number: int = 0) -> PodState:
        """A pod that waits for its container."""
        fields = {"replica_id": f"job.{number}", "key": Key("ml", f"job-{number}"), "device_ids": (f"n/{number}",)}
        pod = self.pods.enter(PodState(workload_id="job", node_id="n", uid=f"u{number}", **fields))  # type: ignore[arg-type]
        return self.show(pod, {"waiting": {"reason": "ContainerCreating"}})

    def show(self, pod: PodState, state: dict[str, Any]) -> PodState:
        metadata = {
            "name": pod.key.name,
            "namespace": "ml",
            "uid": pod.uid,
            "labels": {names.PLATFORM_LABEL: "mine"},
            "annotations": {names.REPLICA_ANNOTATION: pod.replica_id},
        }
        status = {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": state}]}
        self.cache.put({"metadata": metadata, "spec": {"nodeName": "n"}, "status": status})
        self.pods.refresh(pod)
        return pod

    def pass_time(self, duration_s: float) -> None:
        """Move time on, and let the API thread answer what was asked."""
        self.reactor.pass_time(duration_s)
        for call in self.calls:
            call.result(10.0)


@pytest.fixture
def events() -> dict[str, Any]:
    """The events by the uid of their pod; `refused`: they may not be listed."""
    return {}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, events: dict[str, Any]) -> Iterator[Stage]:
    def answer(asked: Asked) -> Answer:
        if events.get("refused"):
            return Answer(403, json.dumps({"kind": "Status", "code": 403, "message": "events is forbidden"}).encode())
        target = urlsplit(asked.target)
        assert target.path == "/api/v1/namespaces/ml/events"
        uid = parse_qs(target.query)["fieldSelector"][0].removeprefix("involvedObject.uid=")
        return Answer(200, json.dumps({"metadata": {}, "items": events.get(uid, [])}).encode())

    with scripted(answer) as server:
        made = Stage(stand_still(monkeypatch, pod_making, pod_state, pod_table), server)
        yield made
        made.thread.close()


def test_a_pod_says_that_its_image_is_being_pulled_as_long_as_its_events_do(
    stage: Stage, events: dict[str, Any]
) -> None:
    pod, other = stage.pod(0), stage.pod(1)
    events["u0"] = [PULLING]
    stage.pass_time(1.0)
    assert stage.server.asked == [], "most containers are made at once"
    stage.pass_time(2.0)
    pulls = 'pulls its image since 16:52:05 UTC: Pulling image "example.com/large:1"'
    assert (pod.making.is_pulling, pod.reason) == (True, pulls)
    assert (other.making.is_pulling, other.reason) == (False, MAKING)
    stage.pods.refresh(pod)
    assert pod.reason == pulls, "a look at the cache does not forget it"
    stage.pass_time(ASK_EVERY_S - 2.0)
    assert len(stage.server.asked) == 2
    pulled = {"reason": "Pulled", "message": "", "lastTimestamp": "2030-01-31T16:58:05Z"}
    events["u0"].append({**PULLING, **pulled, "metadata": {"name": "job-0.17a2"}})
    stage.pass_time(3.0)
    assert (pod.making.is_pulling, pod.reason) == (False, MAKING)


def test_what_the_kubelet_says_of_the_container_itself_counts_more(stage: Stage, events: dict[str, Any]) -> None:
    pod = stage.pod()
    events["u0"] = [PULLING]
    stage.pass_time(3.0)
    assert pod.making.is_pulling
    stage.show(pod, {"waiting": {"reason": "ErrImagePull", "message": "no such host"}})
    assert (pod.making.is_pulling, pod.is_stuck, pod.reason) == (False, True, "ErrImagePull: no such host")


def test_of_many_pods_a_few_are_asked_about_at_a_time(stage: Stage) -> None:
    for number in range(MAX_ASKED + 2):
        stage.pod(number)
    stage.pass_time(2.0)
    assert len(stage.server.asked) == MAX_ASKED
    stage.pass_time(1.0)
    assert len({asked.target for asked in stage.server.asked}) == len(stage.server.asked) == MAX_ASKED + 2


def test_without_the_right_to_read_events_they_are_not_asked_for_again(stage: Stage, events: dict[str, Any]) -> None:
    pod = stage.pod()
    events["refused"] = True
    stage.pass_time(3.0)
    stage.pass_time(100.0)
    assert len(stage.server.asked) == 1
    assert pod.reason == MAKING
