"""Workers and replicas that do not start in time: pauses, restarts, ends, and versions that are rolled back."""

from __future__ import annotations

import pytest

from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.control.loop import verify
from springtide.control.records import ReplicaState, ServiceState
from springtide.core import events
from springtide.core.containers import ContainerSettings
from springtide.core.resources import make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, JobState
from springtide.scheduling.policies.fifo import Fifo

OLD, NEW = Entrypoint(source_path="old.py"), Entrypoint(source_path="new.py")


def served(stage, name: str = "s"):
    return stage.controller.state.services[name]


def stopped(stage, name: str, number: int) -> list[str]:
    return stage.tell(events.ReplicaStopped(workload_id=name, replica_id=f"{name}.{number}"))


def cannot_be_resized(stage, generation: int, job_id: str = "a") -> list[str]:
    told = "lightning 2.7.0 is not tested for resizing in place; tested: 2.6.*"
    return stage.tell(events.JobFailed(job_id=job_id, generation=generation, error=told, is_fixed_size=True))


PROGRAM = Entrypoint(source_path="train.py", kind="script", library="lightning")


def test_a_library_that_cannot_be_resized_there_runs_as_a_plain_script_with_one_worker(stage, job):
    stage.want(a="01")
    stage.tell(events.JobSubmitted(job=job("a", entrypoint=PROGRAM, min_workers=2)), at_s=1.0)
    stage.want(a="0")
    assert sorted(cannot_be_resized(stage, 1)) == ["stop a.0", "stop a.1"]
    # The other worker says the same; one of an older generation would not count.
    assert cannot_be_resized(stage, 1) == []
    stopped(stage, "a", 1)
    assert stopped(stage, "a", 0) == ["start a.2 on n/0 g2"]
    record = stage.job("a")
    assert (record.bounds.min_workers, record.bounds.max_workers, record.job.elastic) == (1, 1, False)
    assert record.job.entrypoint.is_plain_script
    assert record.bounds.fixed_reason.startswith("lightning 2.7.0")
    assert (record.restarts.num_restarts, record.restarts.crashes_at_s) == (0, ())
    assert stage.ready("a", 2) == ["resize a g2 to a.2"]


def test_a_job_that_is_held_to_one_worker_is_replayed(job):
    controller, journal = Controller(Fifo()), MemoryJournal()
    happened = (
        [events.NodeJoined(node=make_node("n", 4)), events.JobSubmitted(job=job("a", entrypoint=PROGRAM))],
        [events.JobFailed(job_id="a", generation=1, error="not tested", is_fixed_size=True)],
        [events.ReplicaStopped(workload_id="a", replica_id=f"a.{number}") for number in range(4)],
        [],
    )
    for at_s, each in enumerate(happened, start=1):
        journal.append(controller.step(float(at_s), each))
    assert [replica.replica_id for replica in controller.state.jobs["a"].replicas] == ["a.4"]
    assert all(verify(Controller(Fifo()), journal, is_cold=is_cold) == 4 for is_cold in (False, True))
    restored = Controller(Fifo())
    for _, step in journal.read():
        restored.restore(step)
    assert restored.state.jobs == controller.state.jobs


def test_a_program_that_has_trained_for_long_is_not_begun_anew_where_its_library_cannot_be_resized(stage):
    stage.running("a", "0", entrypoint=PROGRAM)
    stage.running("b", "1", entrypoint=PROGRAM)
    stage.tell(events.CheckpointCommitted(job_id="a", generation=1, step=50, path="c"))
    assert cannot_be_resized(stage, 1) == ["end a FAILED", "stop a.0"]
    assert stage.job("a").bounds.fixed_reason == ""
    assert "it has trained for long" in stage.job("a").lifecycle.reason.text
    # Where no more than the first steps would be lost it is begun anew.
    stage.tell(events.CheckpointCommitted(job_id="b", generation=1, step=2, path="c"))
    stage.tell(events.ProgressReported(job_id="b", generation=1, step=2, total_steps=9, world_size=1))
    assert cannot_be_resized(stage, 1, "b") == ["stop b.0"]
    assert stage.job("b").bounds.fixed_reason.startswith("lightning 2.7.0")
    assert stage.job("b").job.entrypoint.is_plain_script
    assert stage.job("b").saved.checkpoint is None
    assert (stage.job("b").progress.step, stage.job("b").progress.total_steps) == (0, None)


def at_wakeup(stage) -> list[str]:
    return stage.tell(at_s=stage.controller.wakeup_at_s)


@pytest.mark.parametrize("hangs_at", ["import", "first step"])
def test_a_job_that_never_starts_is_started_again_and_fails_in_the_end(stage, job, hangs_at):
    stage.want(a="0")
    stage.tell(events.JobSubmitted(job=job("a", start_timeout_s=60.0, max_restarts=1)), at_s=1.0)
    if hangs_at == "first step":
        assert stage.ready("a", 0) == ["resize a g1 to a.0"]
    assert stage.controller.wakeup_at_s == 61.0
    assert stage.tell(at_s=60.0) == []
    assert stage.tell(at_s=61.0) == ["stop a.0"]
    assert stage.job("a").reason == (
        "restarting in 1 s after a crash (1 of 1): its first step has not come within 1m00 of its start"
    )
    stopped(stage, "a", 0)
    assert at_wakeup(stage) == ["start a.1 on n/0 g2"]
    assert at_wakeup(stage) == ["end a FAILED", "stop a.1"]
    assert "crashed 2 times" in stage.job("a").reason


def test_hangs_at_the_start_that_lie_hours_apart_add_up(stage, job):
    stage.want(a="0")
    stage.tell(events.JobSubmitted(job=job("a", start_timeout_s=7200.0, max_restarts=2)))
    for number in range(2):
        assert at_wakeup(stage) == [f"stop a.{number}"]
        stopped(stage, "a", number)
        at_wakeup(stage)
    assert at_wakeup(stage) == ["end a FAILED", "stop a.2"]
    assert stage.job("a").reason.startswith("crashed 3 times without a further step: its first step")


def test_a_joiner_that_hangs_is_ended_and_the_others_train_on(stage):
    stage.running("a", "0", start_timeout_s=60.0, stall_timeout_s=0.0)
    stage.want(a="01")
    assert stage.tell() == ["start a.1 on n/1 g1"]
    assert at_wakeup(stage) == ["stop a.1"]
    assert stage.state("a") is JobState.RUNNING
    assert stage.job("a").group.members == ("a.0",)
    assert stopped(stage, "a", 1) == [], "another is started after a pause"
    assert at_wakeup(stage) == ["start a.2 on n/1 g1"]


def held_up(stage, name: str, number: int, reason: str = "", at_s: float | None = None, **told: bool) -> list[str]:
    return stage.tell(
        events.StartHeldUp(workload_id=name, replica_id=f"{name}.{number}", reason=reason, **told),
        at_s=stage.now_s if at_s is None else at_s,
    )


def test_the_time_in_which_a_platform_holds_a_start_up_is_not_the_jobs(stage, job):
    stage.want(a="01")
    stage.tell(events.JobSubmitted(job=job("a", start_timeout_s=60.0)), at_s=1.0)
    held_up(stage, "a", 1, "pulls its image x", at_s=6.0)
    assert stage.controller.wakeup_at_s is None, "no worker is waited for in vain"
    assert stage.tell(at_s=5000.0) == []
    held_up(stage, "a", 1, at_s=5010.0)
    assert stage.controller.wakeup_at_s == 5070.0, "its time begins with its worker"
    assert stage.tell(at_s=5070.0) == ["stop a.0", "stop a.1"]
    assert "its first step has not come within 1m00 of its start" in stage.job("a").reason


def test_a_job_whose_image_cannot_be_had_waits_for_its_start_timeout_and_is_not_started_again(stage, job):
    stage.want(a="01")
    stage.tell(events.JobSubmitted(job=job("a", start_timeout_s=60.0)), at_s=1.0)
    held_up(stage, "a", 1, "pulls its image x", at_s=6.0)
    held_up(stage, "a", 1, "ErrImagePull: x: no such host", at_s=100.0, is_stuck=True)
    held_up(stage, "a", 1, "ErrImagePull: x: denied", at_s=130.0, is_stuck=True)
    assert stage.controller.wakeup_at_s == 160.0, "it counts from when only a person could help"
    assert stage.tell(at_s=160.0) == ["end a FAILED", "stop a.0", "stop a.1"]
    assert stage.job("a").reason == "could not start within 1m00: ErrImagePull: x: denied"
    assert stage.job("a").restarts.crashes_at_s == ()


def test_a_pull_that_goes_on_after_all_is_waited_for(stage, job):
    stage.want(a="0")
    stage.tell(events.JobSubmitted(job=job("a", start_timeout_s=60.0)), at_s=1.0)
    held_up(stage, "a", 0, "ErrImagePull: x: no such host", at_s=6.0, is_stuck=True)
    held_up(stage, "a", 0, "pulls its image x", at_s=60.0)
    assert stage.controller.wakeup_at_s is None
    held_up(stage, "a", 0, at_s=500.0)
    assert stage.controller.wakeup_at_s == 560.0


def test_the_end_of_a_hold_may_only_be_seen_by_the_worker(stage, job):
    """A control plane was killed meanwhile: no event says that the container runs, but the worker does."""
    stage.want(a="0")
    stage.tell(events.JobSubmitted(job=job("a", start_timeout_s=60.0)), at_s=1.0)
    held_up(stage, "a", 0, "pulls its image x", at_s=6.0)
    stage.tell(at_s=5000.0)
    stage.ready("a", 0)
    assert stage.job("a").replicas[0].held_up_by == ""
    assert stage.controller.wakeup_at_s == stage.now_s + 60.0
    stale = stage.controller.state.num_stale_events
    held_up(stage, "a", 0, "pulls its image x")
    assert stage.job("a").replicas[0].held_up_by == "", "what is told late is not believed"
    assert stage.controller.state.num_stale_events == stale + 1


def test_a_joiner_and_a_replica_that_are_held_up_do_not_hang_and_the_ones_beside_them_may(stage, service):
    stage.running("a", "0", start_timeout_s=60.0, stall_timeout_s=0.0)
    stage.want(a="012")
    assert stage.tell() == ["start a.1 on n/1 g1", "start a.2 on n/2 g1"]
    held_up(stage, "a", 1, "pulls its image x")
    assert at_wakeup(stage) == ["stop a.2"], "only the one whose worker runs"
    stage.want(a="01", s="3")
    assert deployed(stage, service, OLD) == ["start s.0 on n/3 g1"]
    held_up(stage, "s", 0, "pulls its image x")
    stage.tell(at_s=stage.now_s + 5000.0)
    assert served(stage).num_hangs == 0
    held_up(stage, "s", 0)
    assert "stop s.0" in stage.tell(at_s=stage.now_s + 60.0)


def test_a_job_that_is_paused_or_waits_does_not_hang(stage, job):
    stage.tell(events.JobSubmitted(job=job("a", start_timeout_s=60.0)))
    stage.tell(at_s=1000.0)
    assert stage.state("a") is JobState.PENDING
    stage.want(a="0")
    assert stage.tell(at_s=1001.0) == ["start a.0 on n/0 g1"]
    assert stage.tell(events.PauseRequested(job_id="a"), at_s=1002.0) == ["stop a.0"]
    assert stage.tell(at_s=2000.0) == []
    assert stage.job("a").restarts.num_restarts == 0


def deployed(stage, service, entrypoint: Entrypoint, **options) -> list[str]:
    return stage.tell(
        events.ServiceDeployed(service=service("s", entrypoint=entrypoint, start_timeout_s=60.0, **options))
    )


def test_an_object_that_still_asks_for_what_was_rolled_back_changes_nothing(stage, service):
    stage.want(s="0")
    pods = ContainerSettings(owner_uid="u")
    deployed(stage, service, OLD, container=pods)
    stage.ready("s", 0)
    stage.want(s="01")
    deployed(stage, service, NEW, container=pods)
    at_wakeup(stage)
    assert deployed(stage, service, NEW, container=pods, revision=1) == []
    assert (served(stage).service.entrypoint, served(stage).release) == (OLD, None)
    deployed(stage, service, NEW, container=pods, params={"fixed": "1"})
    assert served(stage).release.service.entrypoint == NEW


def test_a_version_of_another_kind_replaces_the_old_one_at_once_and_is_rolled_back(stage, service):
    """Replicas of parts and of whole devices are not planned together."""
    stage.want(s="0")
    deployed(stage, service, OLD)
    stage.ready("s", 0)
    assert deployed(stage, service, NEW, share=Share(request=0.5, limit=0.5)) == ["stop s.0"]
    stopped(stage, "s", 0)
    for number in range(1, 5):
        stage.tell(events.ReplicaLost(workload_id="s", replica_id=f"s.{number}", reason="exit code 1"))
        if number < 4:
            at_wakeup(stage)
    record = served(stage)
    assert (record.service.entrypoint, record.service.revision) == (OLD, 1)
    assert "revision 2 was rolled back: exit code 1" in record.reason


def test_a_first_version_that_hangs_again_and_again_fails(stage, service):
    stage.want(s="0")
    deployed(stage, service, NEW, min_replicas=1)
    for number in range(4):
        assert stage.controller.wakeup_at_s is not None
        assert at_wakeup(stage) == [f"stop s.{number}"]
        stopped(stage, "s", number)
        if number < 3:
            assert at_wakeup(stage) == [f"start s.{number + 1} on n/0 g1"]
    assert served(stage).state is ServiceState.FAILED
    assert served(stage).reason == "crashed 4 times: s.3 was not ready within 1m00"


def test_a_replica_that_hangs_beside_others_is_replaced(stage, service):
    stage.want(s="01")
    deployed(stage, service, OLD)
    stage.ready("s", 0)
    assert at_wakeup(stage) == ["stop s.1"]
    stopped(stage, "s", 1)
    assert at_wakeup(stage) == ["start s.2 on n/1 g1"]
    assert served(stage).replicas[0].state is ReplicaState.READY
    assert (served(stage).service.entrypoint, served(stage).rolled_back) == (OLD, "")


def test_another_time_to_start_in_replaces_no_replica(stage, service):
    stage.want(s="0")
    deployed(stage, service, OLD)
    stage.ready("s", 0)
    assert stage.tell(events.ServiceDeployed(service=service("s", entrypoint=OLD, start_timeout_s=5.0))) == []
    assert (served(stage).service.revision, served(stage).service.start_timeout_s) == (1, 5.0)


def test_what_has_no_time_to_start_in_is_not_watched(stage, job, service):
    stage.want(a="0", s="1")
    stage.tell(events.JobSubmitted(job=job("a")), events.ServiceDeployed(service=service("s")))
    assert stage.controller.wakeup_at_s is None
    assert stage.tell(at_s=1e9) == []


@pytest.mark.parametrize("is_seen_running", [True, False])
def test_a_loss_that_is_no_number_ends_the_job_where_its_owner_wants_that(stage, is_seen_running):
    stage.running("a", "0", on_nan="fail")
    stage.running("b", "1")
    for name in "ab":
        told = {"job_id": name, "generation": 1, "step": 90, "total_steps": 100, "world_size": 1, "loss": 0.5}
        if is_seen_running:
            # The newest loss is finite again, but one before was not.
            stage.tell(events.ProgressReported(**told, diverged_at_step=37))
        stage.tell(events.JobFinished(job_id=name, generation=1, step=100, diverged_at_step=37))
    assert stage.state("a") is JobState.FAILED
    assert stage.job("a").reason == "its loss was not a finite number at step 37 (on_nan=fail)"
    assert stage.state("b") is JobState.SUCCEEDED
