"""Replicas that are pods: what is theirs, who is silent, and whose end means what. Without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kits.kubernetes.pod_stage import StillReactor, stand_still
from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.inbox import Inbox
from springtide.backends.kubernetes.client.kinds import Key
from springtide.backends.kubernetes.pods import driver as pod_driver
from springtide.backends.kubernetes.pods import holds as pod_holds
from springtide.backends.kubernetes.pods import watch as pod_watch
from springtide.backends.kubernetes.pods.driver import PodDriver, PodReplica
from springtide.backends.kubernetes.pods.holds import HELD_AFTER_S, RETELL_S, StartHolds
from springtide.backends.kubernetes.pods.reading import Making, Reading
from springtide.backends.kubernetes.pods.state import PodLifecycle, PodState
from springtide.backends.kubernetes.pods.watch import (
    ADOPT_WINDOW_S,
    CONNECT_AFTER_S,
    STARTING_AFTER_S,
    PodWatch,
)
from springtide.backends.local.driver import ProcessDriver
from springtide.core.actions import ResizeJob, StartReplica
from springtide.core.errors import BackendError, StorageError
from springtide.core.events import ReplicaLost, ReplicaStopped, StartHeldUp
from springtide.core.tokens import group_key, workload_key
from springtide.core.wire.workers import Hello
from springtide.core.workload import Entrypoint, TrainingJob

LOST_AFTER_S = 10.0
JOB = TrainingJob(job_id="job", name="job", entrypoint=Entrypoint(source_path="a"), max_workers=4)


class ScriptedPods:
    """Stands for the pods: remembers who was asked to go."""

    def __init__(self) -> None:
        self.deleted: list[tuple[str, float]] = []
        self.on_change: Callable[[PodState, Reading], None]
        self.on_over: Callable[[PodState], None]

    def delete(self, pod: PodState, grace_s: float) -> None:
        self.deleted.append((pod.replica_id, grace_s))
        pod.requested_grace_s = round(grace_s)


def reading_of(**seen: Any) -> Reading:
    nothing = {"replica_id": "", "workload_id": "", "device_ids": (), "node": "n", "uid": "", "term": 0, "address": ""}
    flags = dict.fromkeys(("is_running", "is_ready", "is_ending", "is_over"), False)
    return Reading(**{**nothing, **flags, **seen})


class HereAndNow:
    def submit(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)


class Stage:
    def __init__(self, reactor: StillReactor, folder: Path) -> None:
        self.reactor = reactor
        self.pods = ScriptedPods()
        self.inbox: Inbox = Inbox(SimpleNamespace(now_s=lambda: 0.0))
        self.fences: list[int] = []
        self.store_fails = 0
        self.driver = PodDriver(
            folder,
            reactor,  # type: ignore[arg-type]
            self.inbox,
            lambda name: None,
            pods=self.pods,  # type: ignore[arg-type]
            master_key=b"m",
            raise_fence=self._raise_fence,
            pool=HereAndNow(),  # type: ignore[arg-type]
        )
        self.table = self.driver.table
        self.watch = PodWatch(self.table, LOST_AFTER_S)
        self.watch.start()
        self.reasons: dict[str, str] = {}
        StartHolds(self.table, lambda replica: self.reasons.get(replica.replica_id, "")).start()

    def replica(
        self, number: int, phase: MemberPhase = MemberPhase.RUNNING, *, generation: int = 1, job: TrainingJob = JOB
    ) -> PodReplica:
        action = StartReplica(workload=job, replica_id=f"job.{number}", device_id=f"n/{number}", generation=1)
        replica = self.driver.make_replica(action)
        replica.phase = phase
        replica.heard_at_s = self.reactor.now_s
        replica.group_generation = generation
        replica.handle.pod = PodState(
            replica_id=action.replica_id,
            workload_id="job",
            key=Key("ml", f"job-{number}"),
            device_ids=action.device_ids,
            node_id="n",
            uid=f"u{number}",
            state=PodLifecycle.RUNNING,
            since_s=self.reactor.now_s,
        )
        return replica

    def end(self, replica: PodReplica, exit_code: int, end: str = "it ended") -> None:
        assert replica.handle.pod is not None
        pod = replica.handle.pod
        pod.state, pod.exit_code, pod.end = PodLifecycle.OVER, exit_code, end
        self.pods.on_over(replica.handle.pod)

    def take(self, replica: PodReplica) -> None:
        reading = reading_of(is_running=True, is_ready=True, is_ending=True, external_end="kubectl delete")
        self.pods.on_change(replica.handle.pod, reading)

    def events(self) -> list:
        return self.inbox.wait(0.0)

    def losses(self) -> list[ReplicaLost]:
        return [event for event in self.events() if isinstance(event, ReplicaLost)]

    def _raise_fence(self, workload_id: str, generation: int) -> None:
        if self.store_fails:
            self.store_fails -= 1
            raise StorageError("the store is away")
        self.fences.append(generation)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(stand_still(monkeypatch, pod_driver, pod_holds, pod_watch), tmp_path)


def test_only_silence_of_its_own_makes_a_worker_lost(stage: Stage) -> None:
    replica = stage.replica(0)
    stage.reactor.pass_time(LOST_AFTER_S - 1)
    assert stage.events() == []
    replica.heard_at_s = stage.reactor.now_s
    stage.reactor.pass_time(LOST_AFTER_S - 1)
    stage.watch.reset_silence()
    stage.reactor.pass_time(LOST_AFTER_S - 1)
    assert stage.events() == []
    stage.reactor.pass_time(3)
    (lost,) = stage.events()
    assert isinstance(lost, ReplicaLost)
    assert "went silent" in lost.reason
    assert stage.pods.deleted[0] == ("job.0", 1.0), "never 0: what is forgotten at once may run on"
    # The news of its pod's end, later, is none.
    stage.end(replica, 137)
    stage.reactor.pass_time(5)
    assert stage.events() == []


def test_who_was_adopted_has_longer_to_come_back(stage: Stage) -> None:
    stage.replica(0, MemberPhase.ADOPTING)
    stage.reactor.pass_time(ADOPT_WINDOW_S - 1)
    assert stage.events() == []
    stage.reactor.pass_time(2)
    assert "did not come back" in stage.events()[0].reason


def test_a_worker_that_said_goodbye_is_not_lost_when_the_api_server_is_silent(stage: Stage) -> None:
    replica = stage.replica(0)
    replica.has_left = True
    stage.reactor.pass_time(LOST_AFTER_S + 2)
    (stopped,) = stage.events()
    assert isinstance(stopped, ReplicaStopped)


def test_a_start_may_take_long_but_not_for_ever(stage: Stage) -> None:
    replica = stage.replica(0, MemberPhase.SPAWNING)
    pod = replica.handle.pod
    assert pod is not None
    pod.state = PodLifecycle.CREATING
    stage.reactor.pass_time(2 * STARTING_AFTER_S)
    assert stage.losses() == [], "an API server that is away is no fault of a pod"
    pod.state, pod.since_s, pod.reason = PodLifecycle.STARTING, stage.reactor.now_s, "CrashLoopBackOff"
    pod.seen = reading_of()
    stage.reactor.pass_time(STARTING_AFTER_S - 2)
    assert stage.losses() == []
    stage.reactor.pass_time(4)
    assert "CrashLoopBackOff" in stage.losses()[0].reason


def test_an_image_that_cannot_be_had_is_told_and_its_workload_s_own_limit_counts(stage: Stage) -> None:
    pod = starting(stage).handle.pod
    assert pod is not None
    pod.reason, pod.seen = "ErrImagePull: no such host", reading_of(is_stuck=True)
    stage.reactor.pass_time(2 * STARTING_AFTER_S)
    (told,) = stage.events()
    assert isinstance(told, StartHeldUp), "no loss, and so no crash"
    assert (told.reason, told.is_stuck) == (pod.reason, True)


def starting(stage: Stage, number: int = 0, **fields: Any) -> PodReplica:
    """A replica whose pod waits for its container."""
    replica = stage.replica(number, MemberPhase.SPAWNING, job=replace(JOB, **fields))
    pod = replica.handle.pod
    assert pod is not None
    pod.state, pod.reason, pod.seen = PodLifecycle.STARTING, "its container is being made", reading_of(is_making=True)
    return replica


def test_an_image_may_take_longer_than_any_other_start(stage: Stage) -> None:
    pod = starting(stage).handle.pod
    assert pod is not None
    pod.making = Making("pulls its image x since 16:52:05 UTC", True)
    pod.reason = pod.making.sentence
    stage.reactor.pass_time(5 * STARTING_AFTER_S)
    assert [event.reason for event in stage.events()] == [pod.reason], "told once, and not lost"
    pod.making, pod.reason = Making("its container is being made"), "its container is being made"
    stage.reactor.pass_time(4.0)
    assert "was not started within" in stage.losses()[0].reason


def test_a_start_that_the_cluster_holds_up_is_told_with_its_reason_and_so_is_its_beginning(stage: Stage) -> None:
    replica = starting(stage)
    pod = replica.handle.pod
    assert pod is not None
    stage.reactor.pass_time(HELD_AFTER_S - 1.0)
    assert stage.events() == [], "most starts are over by then"
    stage.reactor.pass_time(1.0)
    held = {"workload_id": "job", "replica_id": "job.0"}
    assert stage.events() == [StartHeldUp(**held, reason="its container is being made")]
    pod.reason = "ErrImagePull: no such host"
    stage.reactor.pass_time(RETELL_S - 1.0)
    assert stage.events() == []
    stage.reactor.pass_time(2.0)
    assert [event.reason for event in stage.events()] == ["ErrImagePull: no such host"]
    pod.state, pod.reason, pod.seen = PodLifecycle.RUNNING, "", reading_of(is_running=True)
    stage.reactor.pass_time(1.0)
    assert stage.events() == [StartHeldUp(**held)]
    stage.reactor.pass_time(20.0)
    assert stage.events() == []


def test_a_replica_without_a_pod_is_held_up_as_well_and_a_quick_start_is_nothing_to_tell(stage: Stage) -> None:
    queued, quick = stage.replica(0, MemberPhase.QUEUED), starting(stage, 1)
    queued.handle.pod = None
    stage.reasons["job.0"] = "exceeded quota: few"
    stage.reactor.pass_time(3.0)
    assert quick.handle.pod is not None
    quick.handle.pod.state = PodLifecycle.RUNNING
    stage.reactor.pass_time(4.0)
    assert [(event.replica_id, event.reason) for event in stage.events()] == [("job.0", "exceeded quota: few")]


def test_a_short_start_timeout_is_not_over_before_the_hold_is_told(stage: Stage) -> None:
    starting(stage, start_timeout_s=4.0)
    stage.reactor.pass_time(2.0)
    assert [type(event) for event in stage.events()] == [StartHeldUp]


def test_a_new_control_plane_tells_a_beginning_that_was_not_seen(stage: Stage) -> None:
    replica = starting(stage)
    assert replica.handle.pod is not None
    replica.handle.told_hold, replica.handle.pod.state = None, PodLifecycle.RUNNING
    stage.reactor.pass_time(1.0)
    assert stage.events() == [StartHeldUp(workload_id="job", replica_id="job.0")]


def test_a_container_that_runs_and_never_connects_is_given_up(stage: Stage) -> None:
    stage.replica(0, MemberPhase.SPAWNING)
    stage.reactor.pass_time(CONNECT_AFTER_S + 2)
    assert "did not connect" in stage.events()[0].reason


def test_a_deleted_member_of_a_group_is_lost_at_once_and_the_last_one_saves_first(stage: Stage) -> None:
    first, second = stage.replica(0), stage.replica(1)
    stage.take(first)
    stage.reactor.pass_time(0.1)
    (lost,) = stage.events()
    assert (lost.replica_id, lost.reason) == ("job.0", "kubectl delete")
    stage.take(second)
    stage.reactor.pass_time(1.0)
    assert stage.events() == []
    second.has_left = True
    stage.end(second, 0)
    (lost,) = stage.events()
    assert isinstance(lost, ReplicaLost)
    assert (lost.replica_id, lost.reason) == ("job.1", "kubectl delete")


def test_a_pod_that_the_platform_itself_deletes_is_taken_by_nobody(stage: Stage) -> None:
    replica = stage.replica(0)
    replica.asked_to_stop = True
    stage.table.kill(replica)
    stage.take(replica)
    stage.end(replica, 143)
    (stopped,) = stage.events()
    assert isinstance(stopped, ReplicaStopped)


def test_a_pod_that_its_node_refused_is_no_crash(stage: Stage) -> None:
    replica = stage.replica(0, MemberPhase.SPAWNING)
    assert replica.handle.pod is not None
    replica.handle.pod.was_refused = True
    stage.end(replica, None, "node n refused the pod: OutOfcpu")
    stage.reactor.pass_time(1.0)
    (lost,) = stage.events()
    assert (lost.reason, lost.is_fault, lost.is_refused) == ("node n refused the pod: OutOfcpu", False, True)
    other = stage.replica(1)
    assert other.handle.pod is not None
    other.handle.pod.seen = reading_of(is_over=True, external_end="node n refused the pod: NodeAffinity")
    stage.end(other, 137)
    stage.reactor.pass_time(1.0)
    (lost,) = stage.events()
    assert (lost.is_fault, lost.is_refused) == (False, False), "it has run"


def test_keys_and_addresses_of_others_are_not_a_replica_s_own(stage: Stage) -> None:
    replica = stage.replica(0)
    assert stage.driver.owns_path(replica, "workloads/job/checkpoints/00000001-0000000010")
    for path in ("workloads/other/checkpoints/1", "workloads/job/../other/x", "/workloads/job/x", "workloads/job2/x"):
        assert not stage.driver.owns_path(replica, path)
    replica.handle.pod.seen = reading_of(address="10.0.0.9")
    assert stage.driver.own_address(replica, "tcp://10.0.0.9:8789") == "tcp://10.0.0.9:8789"
    for address in ("tcp://10.0.0.8:8789", "unix:///run/x", "http://169.254.169.254", ""):
        assert stage.driver.own_address(replica, address) == ""


def test_groups_meet_at_rank_0_on_a_port_of_their_generation(stage: Stage) -> None:
    stage.replica(0)
    second = stage.replica(1)
    job = stage.table.jobs["job"]

    def meet(generation: int, *members: str) -> str:
        order = ResizeJob(job_id="job", generation=generation, replica_ids=members, global_batch_size=1)
        return stage.driver.rendezvous(job, order, is_script=False)

    with pytest.raises(BackendError, match="not known yet"):
        meet(1, "job.0", "job.1")
    second.host = "10.0.0.7"
    assert meet(1, "job.1", "job.0") == "tcp://10.0.0.7:29401"
    second.handle.pod.seen = reading_of(address="fd00::7")
    assert meet(129, "job.1") == "tcp://[fd00::7]:29401"


def test_the_members_of_a_group_get_a_key_of_its_own_once_all_are_known_to_prove_it(stage: Stage) -> None:
    replicas = [stage.replica(0), stage.replica(1)]
    job = stage.table.jobs["job"]
    connection = SimpleNamespace(peer_host="10.0.0.7")

    def key(generation: int) -> str:
        order = ResizeJob(job_id="job", generation=generation, replica_ids=("job.0", "job.1"), global_batch_size=1)
        return stage.driver.group_key(job, order)

    def say_hello(replica: PodReplica, **fields: bool) -> None:
        hello = Hello(workload_id="job", replica_id=replica.replica_id, token="", pid=1, **fields)
        stage.driver.take_hello(replica, hello, connection)  # type: ignore[arg-type]

    say_hello(replicas[0], proves_keys=True)
    with pytest.raises(BackendError, match=r"job\.1 has not connected yet"):
        key(1)
    # A worker of an earlier version.
    say_hello(replicas[1])
    assert key(1) == ""
    say_hello(replicas[1], proves_keys=True)
    assert key(1) == key(1) == group_key(workload_key(b"m", "job"), 1)
    assert key(2) != key(1)


def test_a_fence_that_cannot_be_raised_is_raised_later_and_only_once(stage: Stage) -> None:
    stage.replica(0)
    job = stage.table.jobs["job"]
    done: list[int] = []
    stage.store_fails = 2
    assert not stage.driver.fence_storage(job, 5, lambda: done.append(5))
    assert not stage.driver.fence_storage(job, 5, lambda: done.append(-1))
    assert stage.driver.is_fencing("job")
    assert done == []
    stage.reactor.pass_time(5)
    assert (done, stage.fences, job.fenced) == ([5], [5], 5)
    assert not stage.driver.is_fencing("job")
    assert stage.driver.fence_storage(job, 5, lambda: done.append(-1))
    assert done == [5]


def test_an_older_fence_that_is_late_does_not_stand_for_a_newer_one(stage: Stage) -> None:
    stage.replica(0)
    job = stage.table.jobs["job"]
    stage.store_fails = 1
    stage.driver.fence_storage(job, 5, lambda: None)
    stage.driver.fence_storage(job, 6, lambda: None)
    stage.reactor.pass_time(5)
    assert stage.fences == [6]
    assert job.fenced == 6


def test_the_crew_of_pods_reports_losses_at_once() -> None:
    assert PodDriver.death_s == 0.0
    assert ProcessDriver.death_s > 0.0
