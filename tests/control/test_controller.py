"""The Controller's promises, one small story each."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.core import events
from springtide.core.decision import Plan, PoolAllocation, TimeClaim
from springtide.core.errors import PolicyError
from springtide.core.resources import HostResources, NodeRoom, make_node
from springtide.core.workload import JobState
from springtide.scheduling.decisions.cache import DecisionCache


def test_a_job_starts_warms_forms_a_group_and_ends(stage, job):
    stage.want(a="01")
    assert stage.tell(events.JobSubmitted(job=job("a"))) == ["start a.0 on n/0 g1", "start a.1 on n/1 g1"]
    assert stage.ready("a", 0) == []
    assert stage.ready("a", 1) == ["resize a g1 to a.0,a.1"]
    assert stage.resized("a", direction="start") == []
    assert stage.state("a") is JobState.RUNNING
    assert stage.tell(events.JobFinished(job_id="a", generation=1, step=9)) == [
        "end a SUCCEEDED",
        "stop a.0",
        "stop a.1",
    ]
    assert set(stage.controller.state.holders()) == {"n/0", "n/1"}, "devices stay held until the workers are gone"
    stage.tell(*(events.ReplicaStopped(workload_id="a", replica_id=f"a.{n}") for n in (0, 1)))
    assert stage.controller.state.holders() == {}
    assert stage.controller.is_idle


def test_growth_warms_the_joiners_first_and_switches_once_for_all(stage):
    stage.running("a", "0")
    stage.want(a="012")
    assert stage.tell() == ["start a.1 on n/1 g1", "start a.2 on n/2 g1"]
    assert stage.ready("a", 1) == []
    assert stage.ready("a", 2) == ["resize a g2 to a.0,a.1,a.2"]
    assert stage.tell() == [], "nothing changes while the switch is under way"
    stage.resized("a", step=7)
    assert stage.job("a").changes.num_resizes == 1


def test_growth_and_moves_say_why_they_began_whatever_the_policy_says_of_them_since(stage):
    """While joiners warm, the policy sees them among what the job holds, and may say something else, or nothing."""
    stage.running("j", "0")
    stage.policy.why = {"j": "idle devices: it ends earlier"}
    stage.want(j="01")
    stage.tell()
    stage.policy.why = {}
    assert stage.ready("j", 1) == ["resize j g2 to j.0,j.1"]
    assert stage.job("j").reason == "resized 1 -> 2 (idle devices: it ends earlier)"
    stage.resized("j")
    stage.want(j="0")
    stage.tell()
    stage.resized("j", direction="shrink")
    stage.tell(events.ReplicaStopped(workload_id="j", replica_id="j.1"))
    stage.policy.why = {"j": "moved, so that another job has a block"}
    stage.want(j="2")
    stage.tell()
    stage.policy.why = {"j": "others need devices, too"}
    stage.ready("j", 2)
    assert stage.job("j").reason == "moving 1 -> 1 (moved, so that another job has a block)"
    assert stage.resized("j") == ["resize j g5 to j.2"]
    assert stage.job("j").reason == "resized 1 -> 1 (moved, so that another job has a block)"


def test_a_device_is_granted_only_after_its_holder_gave_it_back(stage, job):
    stage.running("a", "0123")
    stage.want(a="01", b="23")
    assert stage.tell(events.JobSubmitted(job=job("b"))) == ["resize a g2 to a.0,a.1"]
    assert stage.resized("a", direction="shrink") == ["stop a.2", "stop a.3"]
    assert stage.tell(events.ReplicaStopped(workload_id="a", replica_id="a.2")) == []
    assert stage.tell(events.ReplicaStopped(workload_id="a", replica_id="a.3")) == [
        "start b.0 on n/2 g1",
        "start b.1 on n/3 g1",
    ]


def test_survivors_form_a_new_group_at_once_and_the_dead_worker_is_replaced_after_a_pause(stage):
    stage.running("a", "01")
    lost = events.ReplicaLost(workload_id="a", replica_id="a.1", reason="killed")
    assert stage.tell(lost) == ["resize a g2 to a.0 forced"]
    assert stage.resized("a", direction="recover") == []
    assert stage.controller.wakeup_at_s is not None
    assert stage.tell(at_s=stage.controller.wakeup_at_s) == ["start a.2 on n/1 g2"]


def test_a_worker_lost_during_a_switch_forces_a_newer_generation(stage):
    stage.running("a", "01")
    stage.want(a="012")
    stage.tell()
    stage.ready("a", 2)
    assert stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.0")) == ["resize a g3 to a.1,a.2 forced"]


def test_a_joiner_without_state_never_goes_on_alone(stage):
    stage.running("a", "0")
    stage.want(a="01")
    stage.tell()
    stage.ready("a", 1)
    assert stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.0")) == ["stop a.1"]
    assert stage.job("a").restarts.num_restarts == 1
    stage.tell(events.ReplicaStopped(workload_id="a", replica_id="a.1"))
    assert stage.state("a") is JobState.PENDING


def test_a_whole_job_lost_restarts_from_its_checkpoint_after_a_back_off(stage):
    stage.running("a", "0")
    stage.tell(events.CheckpointCommitted(job_id="a", generation=1, step=5, path="c"))
    assert stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.0", reason="exit 9")) == []
    assert "restarting in 1 s" in stage.job("a").reason
    actions = stage.controller.step(stage.controller.wakeup_at_s, ()).actions
    assert [(a.generation, a.restore.step) for a in actions] == [(2, 5)]
    assert stage.job("a").progress.step == 5


def test_who_is_taken_away_has_not_crashed(stage, job):
    stage.want(a="0")
    stage.tell(events.JobSubmitted(job=job("a", max_restarts=0)))
    for number in range(4):
        taken = events.ReplicaLost(
            workload_id="a", replica_id=f"a.{number}", reason="its pod was evicted", is_fault=False
        )
        stage.tell(taken)
        assert "restarts from its checkpoint, no worker is left: its pod was evicted" in stage.job("a").reason
        stage.tell(at_s=stage.controller.wakeup_at_s)
    assert stage.state("a") is JobState.STARTING
    assert stage.job("a").restarts.num_restarts == 0
    stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.4", reason="exit code 1"))
    assert stage.state("a") is JobState.FAILED, "a crash still is one"


ROOM = NodeRoom(total=HostResources(cpu_m=8000, memory_bytes=1 << 40, num_pods=100))
NODE_WITH_ROOM = events.NodeJoined(node=replace(make_node("n", 4), room=ROOM))


def refused(name: str, number: int) -> events.ReplicaLost:
    said = "node n refused the pod: OutOfcpu"
    replica_id = f"{name}.{number}"
    return events.ReplicaLost(workload_id=name, replica_id=replica_id, reason=said, is_fault=False, is_refused=True)


def test_a_job_that_a_node_refuses_has_not_crashed_and_waits_longer_each_time(stage, job):
    stage.tell(NODE_WITH_ROOM)
    stage.want(a="0")
    stage.tell(events.JobSubmitted(job=job("a", max_restarts=0)))
    for number, pause_s in enumerate((1, 2, 4, 8, 16, 32, 60, 60)):
        assert stage.tell(refused("a", number)) == []
        assert stage.job("a").reason == f"node n refused the pod: OutOfcpu; tried there again after {pause_s} s"
        assert stage.controller.wakeup_at_s == pytest.approx(stage.now_s + pause_s)
        assert stage.tell(at_s=stage.controller.wakeup_at_s) == [f"start a.{number + 1} on n/0 g{number + 2}"]
    assert stage.job("a").restarts.num_restarts == 0
    assert stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.8", reason="exit code 1")) == ["end a FAILED"]


def test_a_job_starts_with_the_workers_that_its_nodes_took(stage, job):
    stage.tell(NODE_WITH_ROOM)
    stage.want(a="012", b="3")
    stage.tell(events.JobSubmitted(job=job("a", min_workers=2)), events.JobSubmitted(job=job("b", elastic=False)))
    assert stage.tell(refused("a", 2)) == []
    assert stage.ready("a", 0, 1) == ["resize a g1 to a.0,a.1"]
    stage.resized("a", direction="start")
    assert stage.tell(at_s=stage.controller.wakeup_at_s) == ["start a.3 on n/2 g1"]
    assert stage.tell(refused("a", 3)) == [], "the others train on"
    assert stage.state("a") is JobState.RUNNING
    assert "tried there again after 2 s" in stage.job("a").reason
    assert stage.tell(refused("b", 0)) == []
    assert stage.state("b") is JobState.PENDING


def test_a_service_that_a_node_refuses_waits_and_says_so(stage, service):
    stage.tell(NODE_WITH_ROOM)
    stage.want(s="0")
    stage.tell(events.ServiceDeployed(service=service("s")))
    for number, pause_s in enumerate((1, 2, 4, 8, 16, 32)):
        assert stage.tell(refused("s", number)) == []
        assert stage.controller.wakeup_at_s == pytest.approx(stage.now_s + pause_s)
        record = stage.controller.state.services["s"]
        assert (record.state, record.reason) == (
            "IDLE",
            f"no replica: node n refused the pod: OutOfcpu; tried there again after {pause_s} s",
        )
        assert stage.tell(at_s=stage.controller.wakeup_at_s) == [f"start s.{number + 1} on n/0 g1"]
    stage.ready("s", 6)
    assert stage.controller.state.services["s"].refusals == ()


def test_a_poison_job_fails_after_its_budget_and_says_why(stage, job):
    stage.want(a="0")
    stage.tell(events.JobSubmitted(job=job("a", max_restarts=2)))
    for number in range(3):
        stage.tell(events.ReplicaLost(workload_id="a", replica_id=f"a.{number}", reason="exit code 1"))
        if stage.controller.wakeup_at_s is not None:
            stage.tell(at_s=stage.controller.wakeup_at_s)
    assert stage.state("a") is JobState.FAILED
    assert stage.job("a").reason == "crashed 3 times in 10 minutes: exit code 1"


def test_pause_checkpoints_and_resume_starts_from_there(stage):
    stage.running("a", "01")
    assert stage.tell(events.PauseRequested(job_id="a")) == ["preempt a g2"]
    stage.tell(events.CheckpointCommitted(job_id="a", generation=2, step=11, path="c"))
    stage.tell(*(events.ReplicaStopped(workload_id="a", replica_id=f"a.{n}") for n in (0, 1)))
    assert (stage.state("a"), stage.job("a").reason) == (JobState.PAUSED, "paused by its owner at step 11")
    stage.want(a="012")
    assert stage.tell(events.ResumeRequested(job_id="a")) == [f"start a.{n + 2} on n/{n} g3" for n in range(3)]


def test_a_job_that_finishes_while_it_is_preempted_is_done(stage):
    stage.running("a", "0")
    stage.want()
    assert stage.tell() == ["preempt a g2"]
    assert stage.tell(events.JobFinished(job_id="a", generation=1, step=9)) == ["end a SUCCEEDED"]


def test_messages_of_an_older_generation_change_nothing(stage):
    stage.running("a", "01")
    stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.1"))
    before = stage.job("a")
    late = events.ProgressReported(job_id="a", generation=1, step=99, total_steps=100, world_size=2)
    stage.tell(late, events.JobFinished(job_id="a", generation=1, step=99))
    assert stage.job("a") == before
    assert stage.controller.state.num_stale_events == 2


def test_a_repeated_submit_is_one_job_and_a_terminal_job_never_changes(stage, job):
    stage.running("a", "0")
    assert stage.tell(events.JobSubmitted(job=job("a"))) == []
    stage.tell(events.CancelRequested(workload_id="a"))
    ended = stage.job("a")
    for event in (
        events.CancelRequested(workload_id="a"),
        events.PauseRequested(job_id="a"),
        events.JobFailed(job_id="a", generation=1, error="late"),
        events.JobSubmitted(job=job("a")),
    ):
        stage.tell(event)
    assert (stage.job("a").state, stage.job("a").reason) == (ended.state, "cancelled by its owner")


def test_a_refused_job_ends_with_the_policys_reason(stage, job):
    stage.policy.refuse = {"a": "cannot finish by then"}
    assert stage.tell(events.JobSubmitted(job=job("a"))) == ["end a REJECTED"]
    assert stage.job("a").reason == "cannot finish by then"


def test_a_lost_node_takes_its_replicas_along(stage, job):
    stage.tell(events.NodeJoined(node=make_node("m", 1)))
    stage.running("a", "0")
    stage.policy.wish = {"a": ["n/0", "m/0"]}
    stage.tell()
    stage.ready("a", 1)
    stage.resized("a")
    stage.policy.wish = {"a": ["m/0"]}
    assert stage.tell(events.NodeLost(node_id="n")) == ["resize a g3 to a.1 forced"]
    assert set(stage.controller.state.holders()) == {"m/0"}


def test_an_inelastic_job_keeps_its_size_and_restarts_as_a_whole(stage):
    stage.running("a", "01", elastic=False, min_workers=2, max_workers=2)
    stage.want(a="0")
    assert stage.tell() == []
    assert stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.1")) == ["stop a.0"]
    stage.want(a="01")
    stage.tell(events.ReplicaStopped(workload_id="a", replica_id="a.0"))
    assert stage.tell(at_s=stage.controller.wakeup_at_s) == ["start a.2 on n/0 g2", "start a.3 on n/1 g2"]


def test_a_broken_group_of_living_members_forms_anew(stage):
    stage.running("a", "01")
    assert stage.tell(events.GroupBroken(job_id="a", generation=1)) == ["resize a g2 to a.0,a.1 forced"]


def test_a_service_starts_drains_and_is_replaced_by_a_newer_revision(stage, service):
    stage.want(s="0")
    assert stage.tell(events.ServiceDeployed(service=service("s"))) == ["start s.0 on n/0 g1"]
    changed = service("s", max_batch_size=2)
    assert stage.tell(events.ServiceDeployed(service=changed)) == ["stop s.0"]
    stopped = events.ReplicaStopped(workload_id="s", replica_id="s.0")
    assert stage.tell(stopped) == ["start s.1 on n/0 g2"]
    assert stage.tell(events.CancelRequested(workload_id="s")) == ["stop s.1"]


def test_a_restart_folds_the_journal_and_repeats_what_may_have_been_cut_off(stage, job):
    stage.running("a", "01")
    stage.want(a="0")
    stage.tell()
    from springtide.control.controller import Controller

    fresh = Controller(stage.policy)
    for step in stage.steps:
        fresh.restore(step)
    assert fresh.state == stage.controller.state
    standing = fresh.standing()
    assert [start.replica_id for start in standing.replicas] == ["a.0", "a.1"]
    assert [(type(a).__name__, a.generation) for a in standing.actions] == [("ResizeJob", 2)]


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"a": ["n/0", "n/0"]}, "a device twice"),
        ({"a": ["n/9"]}, "no such device"),
        ({"a": ["n/0", "n/1", "n/2", "n/3", "m/0"]}, "takes 4"),
        ({"ghost": ["n/0"]}, "does not want to run"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(stage, job, wish, told):
    class Wrong:
        def decide(self, snapshot):
            return Plan(allocations={name: PoolAllocation(device_ids=tuple(ids)) for name, ids in wish.items()})

    stage.controller._decisions = DecisionCache(Wrong())
    with pytest.raises(PolicyError, match=told):
        stage.tell(events.JobSubmitted(job=job("a")))


def test_a_leaver_that_is_gone_before_the_switch_is_confirmed_is_no_loss(stage):
    stage.running("a", "01")
    stage.want(a="0")
    assert stage.tell() == ["resize a g2 to a.0"]
    assert stage.tell(events.ReplicaStopped(workload_id="a", replica_id="a.1")) == []
    assert stage.resized("a", direction="shrink") == []
    assert stage.job("a").restarts.losses_at_s == ()


def test_a_leaver_that_is_killed_before_the_switch_forces_the_others_out_of_its_step(stage):
    stage.running("a", "01")
    stage.want(a="0")
    stage.tell()
    assert stage.tell(events.ReplicaLost(workload_id="a", replica_id="a.1")) == ["resize a g3 to a.0 forced"]


def test_an_orderly_shutdown_puts_jobs_to_rest_and_a_start_wakes_them(stage):
    stage.running("a", "01")
    assert stage.tell(events.PlatformStopping()) == ["preempt a g2"]
    stage.tell(*(events.ReplicaStopped(workload_id="a", replica_id=f"a.{n}") for n in (0, 1)))
    assert stage.tell() == []
    assert stage.tell(events.PlatformStarted()) == ["start a.2 on n/0 g3", "start a.3 on n/1 g3"]


def test_a_group_that_breaks_while_its_successor_forms_is_left_by_force(stage):
    stage.running("a", "0")
    stage.want(a="01")
    stage.tell()
    assert stage.ready("a", 1) == ["resize a g2 to a.0,a.1"]
    assert stage.tell(events.GroupBroken(job_id="a", generation=1)) == ["resize a g3 to a.0,a.1 forced"]


def test_a_running_inelastic_job_cannot_be_scaled_a_waiting_one_can(stage, job):
    stage.running("a", "01", elastic=False, min_workers=2, max_workers=2)
    stage.tell(events.ScaleRequested(workload_id="a", minimum=1, maximum=1))
    assert (stage.job("a").bounds.min_workers, stage.job("a").bounds.max_workers) == (2, 2)
    stage.tell(events.JobSubmitted(job=job("b", elastic=False, min_workers=2, max_workers=2)))
    stage.tell(events.ScaleRequested(workload_id="b", minimum=1, maximum=3))
    assert (stage.job("b").bounds.min_workers, stage.job("b").bounds.max_workers) == (3, 3)


def test_a_limit_of_the_platform_is_told_until_it_is_over(stage):
    stage.running("a", "01", min_workers=1, max_workers=4)
    stage.tell(events.ScaleRequested(workload_id="a", minimum=1, maximum=2, reason="no quota", is_limit=True))
    assert (stage.job("a").bounds.max_workers, stage.job("a").bounds.limit_reason) == (2, "no quota")
    stage.tell(events.ScaleRequested(workload_id="a", minimum=1, maximum=4, reason="there is room"))
    assert stage.job("a").bounds.limit_reason == ""


def test_a_running_job_that_is_in_time_again_says_so_and_nothing_of_its_time_replaces_why_it_changes(stage):
    stage.running("j", "01")
    stage.policy.why = {"j": "behind its plan"}
    stage.policy.claims = {"j": TimeClaim(code="given_up")}
    stage.tell()
    assert stage.job("j").reason == "behind its plan"
    stage.policy.why = {"j": "kept as planned now"}
    stage.policy.claims = {"j": TimeClaim(code="kept_in_time", at_s=9.0)}
    stage.tell()
    assert stage.job("j").reason == "kept as planned now"
    stage.policy.why = {"j": "others gain more"}
    stage.want(j="0")
    stage.tell()
    assert stage.job("j").reason == "resized 2 -> 1 (others gain more)"


def test_a_broken_policy_is_told_and_everyone_keeps_what_they_hold(stage, job):
    stage.running("a", "01")
    told = []
    stage.controller._on_policy_error = told.append
    stage.policy.wish = {"a": ["n/9"]}
    assert stage.tell(events.JobSubmitted(job=job("b"))) == []
    assert "no such device" in str(told[0])
    assert set(stage.controller.state.holders()) == {"n/0", "n/1"}


def test_a_policy_that_raises_stops_no_workload_and_loses_its_memory(stage):
    class Confused:
        def decide(self, snapshot):
            raise KeyError("detours")

    stage.running("a", "01")
    told = []
    stage.controller.state.memory = {"format": 1}
    stage.controller._decisions, stage.controller._on_policy_error = DecisionCache(Confused()), told.append
    assert stage.tell() == []
    assert "the policy raised KeyError" in str(told[0])
    assert set(stage.controller.state.holders()) == {"n/0", "n/1"}
    assert stage.controller.state.memory is None


def test_a_service_of_which_a_replica_has_answered_starts_again_however_often_others_crash(stage, service):
    stage.want(s="01")
    stage.tell(events.ServiceDeployed(service=service("s")))
    stage.ready("s", 0, 1)
    for number in (1, 2, 3, 4, 5):
        stage.tell(events.ReplicaLost(workload_id="s", replica_id=f"s.{number}", reason="killed"))
        stage.tell(at_s=stage.controller.wakeup_at_s)
    record = stage.controller.state.services["s"]
    assert (record.state, len(record.crashes_at_s)) == ("READY", 5)
    stage.tell(events.ReplicaLost(workload_id="s", replica_id="s.0", reason="killed"))
    record = stage.controller.state.services["s"]
    assert (record.state, record.reason) == ("STARTING", "the first replica is loading")
    stage.tell(events.ReplicaLost(workload_id="s", replica_id=record.replicas[0].replica_id, reason="killed"))
    record = stage.controller.state.services["s"]
    assert (record.state, record.reason) == ("IDLE", "no replica: the last one crashed: killed")
    assert stage.controller.wakeup_at_s == record.starts_at_s


def test_a_job_that_ends_early_or_diverges_succeeds_and_says_so(stage):
    for name, step, is_diverged, said in (
        ("a", 100, False, "the training function returned"),
        ("b", 17, False, "the training function returned early, at step 17 of 100 (17 %)"),
        ("c", 100, True, "the training function returned; its last loss was not a finite number"),
    ):
        stage.running(name, "0")
        generation = stage.job(name).group.generation
        told = {"job_id": name, "generation": generation, "step": step}
        stage.tell(events.ProgressReported(**told, total_steps=100, world_size=1, loss=0.5, is_diverged=is_diverged))
        stage.tell(events.JobFinished(**told))
        assert (stage.state(name), stage.job(name).reason) == (JobState.SUCCEEDED, said)
        stage.want()
        stage.tell(events.ReplicaStopped(workload_id=name, replica_id=f"{name}.0"))
