"""Two training functions and an inference function on real nodes, and everything that may go wrong on the way.

Submitted with kubectl; a node is lent and taken back as load goes and comes; jobs grow and shrink while their other
workers run on; a pod is killed, another deleted, a kubelet stopped, the API server restarted, the control plane killed.
Everything ends done, and nothing ran twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kits.kubernetes.kube_http import Refused, wait_for
from kits.kubernetes.lab.nodes import DEVICE_RESOURCE, NODES
from kits.kubernetes.live_cluster import CREDENTIALS, LivePlatform, Witness, platform_on
from kits.kubernetes.paced_job import Pace, apply, each_step_once, paced_function
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.events import JobResized, ReplicaLost

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(2400)]
JOBS = ("first", "second")
NUM_EPOCHS = 200
# Steps so long that the jobs last for all of the story; what is left of them is made at once in the end.
SHARD_S = 0.2
# A busy machine is no reason to fail: what is waited for here comes, or it never does. A job that was slow on two
# workers, because somebody else needed the processors, is tried on two again after five minutes.
LONG_S = 400.0
DOUBLE = """
import time

class Double:
    def predict(self, numbers: list[float]) -> list[float]:
        time.sleep(0.2)
        return [2 * number for number in numbers]
"""


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
        },
    }


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

        wait_for(f"{count} workers", are_busy, LONG_S)

    def wait_progress(self, steps: int = 5) -> None:
        """Until every job is so many steps further than now."""
        before = {name: self.step(name) for name in JOBS}
        for name in JOBS:
            wait_for(f"{name} to go on", lambda name=name: self.step(name) >= before[name] + steps, LONG_S)


@pytest.fixture
def pace(node_lab):
    pace = Pace(node_lab.host, SHARD_S)
    yield pace
    pace.close()


@pytest.fixture
def platform(node_lab, tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "platform"
    # A day so long that nothing is forecast: what is lent and taken back follows the load of the moment.
    with platform_on(node_lab, folder, "story", pools=True, policy="tide/elastic", day_s=600.0) as live:
        live.start()
        yield live


def test_everything_ends_done_and_nothing_runs_twice(platform, pace):
    namespace = platform.namespace
    with Witness(platform.lab, namespace) as witness:
        objects = [paced_function(name, namespace, pace.url, NUM_EPOCHS) for name in JOBS]
        apply(platform.lab.kubeconfig, *objects, inference_function("double", namespace))
        cast = Cast(platform)
        try:
            timed("a loan and a reclaim", a_loan_and_a_reclaim, platform, cast)
            killed = timed("a pod is killed", a_pod_is_killed, platform, cast)
            deleted = timed("a pod is deleted", a_pod_is_deleted, platform, cast)
            timed("a kubelet is stopped", a_kubelet_is_stopped, platform, cast)
            timed("the API server is restarted", the_api_server_is_restarted, platform, cast)
            timed("the control plane is killed", the_control_plane_is_killed, platform, cast)
            pace.pause_s = 0.0
            for name in JOBS:
                wait_for(f"{name} to be done", lambda name=name: is_done(platform, name), 2 * LONG_S)
            path = f"apis/springtide.dev/v1alpha1/namespaces/{namespace}/inferencefunctions/double"
            platform.api.delete(path)
            wait_for("no pod to be left", lambda: not living(platform), LONG_S)
        except BaseException:
            print(platform.told())
            raise
    nothing_ran_twice(platform, cast, witness)
    platform.stop()
    who_was_lost_is_who_was_taken(platform, {killed, deleted})


def timed(what: str, act: Callable[..., Any], *given: Any) -> Any:
    began_s = time.monotonic()
    result = act(*given)
    print(f"{what}: {time.monotonic() - began_s:.1f} s", flush=True)
    return result


def a_loan_and_a_reclaim(platform: LivePlatform, cast: Cast) -> None:
    """Nobody asks: the serving node is lent. Somebody asks: it is taken back, and lent again when that is over."""
    wait_for("the loan", lambda: platform.pool(NODES[1]) == "training", LONG_S)
    cast.wait_busy(4)
    before = cast.workers()
    with Load(platform, callers=3) as load:
        wait_for("the reclaim", lambda: platform.pool(NODES[1]) == "inference", LONG_S)
        wait_for("answers", lambda: load.num_answers >= 20, LONG_S)
        cast.wait_busy(2)
        during = cast.workers()
        assert set(cast.on_node(NODES[0])) == set(during)
    assert not load.wrong
    who_stays_is_the_same(before, during)
    wait_for("the second loan", lambda: platform.pool(NODES[1]) == "training", LONG_S)
    cast.wait_busy(4)
    who_stays_is_the_same(during, cast.workers())


def who_stays_is_the_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Whoever was there before and is there now is the same process in the same pod, and somebody is."""
    staying = before.keys() & after.keys()
    assert staying
    assert all(before[replica] == after[replica] for replica in staying)


def a_pod_is_killed(platform: LivePlatform, cast: Cast) -> str:
    name = cast.largest()
    before = cast.workers()
    replica, pod = max(cast.members(name).items())
    for pid in platform.pids_of(pod):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    someone_else_comes(cast, before, replica)
    return replica


def a_pod_is_deleted(platform: LivePlatform, cast: Cast) -> str:
    name = cast.largest()
    before = cast.workers()
    replica, pod = min(cast.members(name).items())
    platform.api.delete(f"api/v1/namespaces/{platform.namespace}/pods/{pod['metadata']['name']}")
    someone_else_comes(cast, before, replica)
    return replica


def someone_else_comes(cast: Cast, before: dict[str, Any], gone: str) -> None:
    wait_for(f"{gone} to be gone", lambda: gone not in cast.workers(), LONG_S)
    cast.wait_busy(4)
    after = cast.workers()
    rest = {replica: seen for replica, seen in before.items() if replica != gone}
    assert rest.items() <= after.items(), "somebody who had nothing to do with it was started again"
    cast.wait_progress()


def a_kubelet_is_stopped(platform: LivePlatform, cast: Cast) -> None:
    """A silent kubelet is not a dead machine: whoever works there goes on."""
    before = cast.workers()
    platform.lab.kill_kubelet(NODES[1])
    wait_for("the node to be silent", lambda: not platform.lab.is_ready(NODES[1]), LONG_S)
    cast.wait_progress()
    platform.lab.start_kubelet(NODES[1])
    wait_for("the node to be back", lambda: platform.lab.is_ready(NODES[1]), LONG_S)
    status = platform.api.get(f"api/v1/nodes/{NODES[1]}")["status"]
    assert status["allocatable"][DEVICE_RESOURCE] == "2", "what a node has to give outlives its kubelet"
    cast.wait_progress()
    assert cast.workers() == before


def the_api_server_is_restarted(platform: LivePlatform, cast: Cast) -> None:
    before = cast.workers()
    steps = {name: platform.view(f"/v1/jobs/{cast.ids[name]}")["step"] for name in JOBS}
    platform.lab.kill_api_server()
    for name in JOBS:
        wait_for(f"{name} without an API server", lambda name=name: cast.step(name) >= steps[name] + 10, LONG_S)
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
        each_step_once(platform.store_url, cast.ids[name], NUM_EPOCHS)


def who_was_lost_is_who_was_taken(platform: LivePlatform, taken: set[str]) -> None:
    """The journal knows of two losses, those that the test made; and it says how long the changes took."""
    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    events = [event for _, step in journal.read() for event in step.events]
    journal.close()
    lost = {event.replica_id: event.reason for event in events if isinstance(event, ReplicaLost)}
    for event in events:
        if isinstance(event, JobResized):
            print(f"{event.job_id} {event.direction} to {event.world_size}: paused for {event.pause_s * 1000:.1f} ms")
    print(*(f"{replica}: {reason}" for replica, reason in lost.items()), sep="\n")
    assert lost.keys() == taken
