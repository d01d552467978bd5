"""The rendered Deployment with two replicas in real pods: whatever ends the one that leads, the other goes on.

The leader's container is killed, its pod deleted by force, both are replaced by a rolling update, and the leader's node
is drained. The Service leads to whoever leads, workers are adopted, and nothing is decided or run twice.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.deployed_platform import LONG_S, DeployedPlatform, deployed_on
from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.nodes import NodeLab
from kits.kubernetes.live_cluster import CREDENTIALS, Witness
from kits.kubernetes.paced_job import Pace, apply, each_step_once, paced_function
from kits.servers import missing_postgres
from springtide.control.journal.journal import read_journal

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing_postgres()), reason=missing_postgres() or "none"),
]
NUM_EPOCHS = 120
# Steps so long that the job lasts for all of the story; what is left of them is made at once in the end.
SHARD_S = 0.25


class Caller:
    """Asks the Service all the time, and remembers for how long nobody answered."""

    def __init__(self, platform: DeployedPlatform) -> None:
        self._platform = platform
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caller")
        self._answered_s = time.monotonic()
        self.longest_s = 0.0
        self.odd: set[int] = set()

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join(90.0)

    def silence_s(self) -> float:
        """The longest silence since this was asked last, in seconds."""
        longest, self.longest_s = self.longest_s, 0.0
        return longest

    def _run(self) -> None:
        while not self._has_ended.wait(0.05):
            try:
                status = self._platform.call("/v1/status")[0]
            except OSError:
                continue
            now_s = time.monotonic()
            if status == 200:
                self.longest_s = max(self.longest_s, now_s - self._answered_s)
                self._answered_s = now_s
            elif status != 503:
                self.odd.add(status)


class Job:
    """The job of the story, and who works for it."""

    def __init__(self, platform: DeployedPlatform) -> None:
        self.platform = platform
        self.workload_id = platform.workload_id("job")

    def workers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Uid and processes of every pod that trains, by replica id."""
        running = self.platform.running(self.workload_id)
        return {replica: (pod["metadata"]["uid"], self.platform.pids_of(pod)) for replica, pod in running.items()}

    def node_of(self, replica: str) -> str:
        return str(self.platform.running(self.workload_id)[replica]["spec"]["nodeName"])

    def view(self) -> dict[str, Any]:
        return dict(self.platform.view(f"/v1/jobs/{self.workload_id}"))

    def wait_busy(self, count: int) -> None:
        """Until so many workers train and each has found its group."""
        wait_for(f"{count} workers", lambda: self.view()["num_workers"] == count == len(self.workers()), LONG_S)

    def wait_progress(self, steps: int = 3) -> None:
        before = self.view()["step"]
        wait_for("it to go on", lambda: self.view()["step"] >= before + steps, LONG_S)


@pytest.fixture
def platform(node_lab: NodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeployedPlatform]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with deployed_on(node_lab, tmp_path / "deployed") as deployed:
        try:
            deployed.wait_led()
            yield deployed
        except BaseException:
            print(deployed.told())
            raise


@pytest.fixture
def pace(node_lab: NodeLab) -> Iterator[Pace]:
    pace = Pace(node_lab.host, SHARD_S)
    yield pace
    pace.close()


def test_whatever_ends_the_leader_the_other_goes_on_and_nothing_runs_twice(
    platform: DeployedPlatform, pace: Pace
) -> None:
    with Witness(platform.lab, platform.namespace) as witness, Caller(platform) as caller:
        apply(platform.lab.kubeconfig, paced_function("job", platform.namespace, pace.url, NUM_EPOCHS))
        job = Job(platform)
        job.wait_busy(2)
        before = job.workers()
        for act in (the_container_is_killed, the_pod_is_deleted, a_new_version_is_rolled_out):
            caller.silence_s()
            began_s = time.monotonic()
            act(platform)
            job.wait_progress()
            assert job.workers() == before, f"{act.__name__}: a worker was started again though it had never gone"
            print(f"{act.__name__}: {time.monotonic() - began_s:.1f} s, silent for {caller.silence_s():.1f} s")
        began_s = time.monotonic()
        its_node_is_drained(platform, job)
        print(f"its_node_is_drained: {time.monotonic() - began_s:.1f} s, silent for {caller.silence_s():.1f} s")
        pace.pause_s = 0.0
        wait_for("its end", lambda: job.view()["state"] == "SUCCEEDED", LONG_S)
    assert not caller.odd, "the Service answered with something that no control plane should say"
    assert {replica: len(uids) for replica, uids in witness.uids.items()} == dict.fromkeys(witness.uids, 1)
    assert all(len(started) <= 1 for started in witness.starts.values()), "a container was started again"
    assert job.view()["num_restarts"] == 0
    each_step_once(platform.store_url, job.workload_id, NUM_EPOCHS)
    terms = terms_of(platform)
    assert terms == sorted(terms), "somebody whose term was over has decided something"
    # Each of the four ended who led; an update may end the second leader as well.
    assert len(set(terms)) >= 5


def terms_of(platform: DeployedPlatform) -> list[int]:
    """The term of every step of the journal, in the order of the steps, of which none is missing."""
    with closing(read_journal(platform.database.postgres_url(), Path())) as journal:
        rows = list(journal.rows())
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    return [row.term for row in rows]


def another_term(platform: DeployedPlatform, before: int) -> str:
    """Wait until somebody leads in a later term. Returns its pod."""
    wait_for("another term", lambda: platform.call("/v1/status")[0] == 200 and platform.term() > before, LONG_S)
    return platform.wait_led()


def the_container_is_killed(platform: DeployedPlatform) -> None:
    """As by the kernel: the pod stays, and with it its label; a new process of it or the other one leads."""
    leader, term = platform.wait_led(), platform.term()
    before = platform.control_planes()
    for pid in platform.pids_of(before[leader]):
        os.kill(pid, signal.SIGKILL)
    another_term(platform, term)
    after = platform.control_planes()
    assert {name: pod["metadata"]["uid"] for name, pod in after.items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    (container,) = after[leader]["status"]["containerStatuses"]
    assert container["restartCount"] == 1


def the_pod_is_deleted(platform: DeployedPlatform) -> None:
    """Killed, and gone from the API server at once: the one that stood by leads, and a new one stands by."""
    leader, term = platform.wait_led(), platform.term()
    before = platform.control_planes()
    pids = platform.pids_of(before[leader])
    platform.api.delete(f"api/v1/namespaces/{platform.home}/pods/{leader}", gracePeriodSeconds=0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert another_term(platform, term) in before.keys() - {leader}
    assert len(platform.control_planes().keys() - before.keys()) == 1


def a_new_version_is_rolled_out(platform: DeployedPlatform) -> None:
    """Other settings, as `kubectl apply` has them: both pods are replaced, one after the other."""
    term = platform.term()
    before = platform.control_planes()
    platform.settings["worker_lost_after_s"] = 11
    platform.apply()

    def is_out() -> bool:
        found = platform.deployment()
        status = found["status"]
        numbers = {status.get(name) for name in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")}
        return status["observedGeneration"] == found["metadata"]["generation"] and numbers == {2}

    wait_for("the update", is_out, LONG_S)
    another_term(platform, term)
    assert not platform.control_planes().keys() & before.keys()


def its_node_is_drained(platform: DeployedPlatform, job: Job) -> None:
    """Cordoned, then every pod of it evicted: one control plane may go, the other may not until there are two again."""
    leader, term = platform.wait_led(), platform.term()
    pods = platform.control_planes()
    node = pods[leader]["spec"]["nodeName"]
    (other,) = pods.keys() - {leader}
    before = job.workers()
    (staying,) = [replica for replica in before if job.node_of(replica) != node]
    platform.api.patch(f"api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
    assert platform.evict(platform.home, leader) == 201
    assert platform.evict(platform.home, other) == 429, "both control planes may be evicted at once"
    platform.drain(node)
    assert another_term(platform, term) != leader
    assert not platform.on_node(node)
    job.wait_busy(1)
    job.wait_progress()
    assert job.workers() == {staying: before[staying]}
    wait_for("the budget to allow it again", lambda: platform.disruptions_allowed() == 1, LONG_S)
    platform.api.patch(f"api/v1/nodes/{node}", {"spec": {"unschedulable": None}})
    job.wait_busy(2)
    assert job.workers()[staying] == before[staying]
