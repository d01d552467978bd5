"""A new revision of a service starts beside the one that answers, and replaces it only once it is ready."""

from __future__ import annotations

import pytest

from springtide.control.controller import Controller
from springtide.control.records import ServiceState
from springtide.control.snapshot_views import view_service
from springtide.core import events
from springtide.core.actions import StartReplica
from springtide.core.workload import Entrypoint, ReleaseTerms
from springtide.scheduling.replicas import wanted_replicas

OLD, NEW, NEWER = (Entrypoint(source_path=f"{name}.py") for name in ("old", "new", "newer"))

AT_ONCE = ReleaseTerms()


def served(stage):
    return stage.controller.state.services["s"]


def stopped(stage, number: int) -> list[str]:
    return stage.tell(events.ReplicaStopped(workload_id="s", replica_id=f"s.{number}"))


def lost(stage, number: int) -> list[str]:
    return stage.tell(events.ReplicaLost(workload_id="s", replica_id=f"s.{number}", reason="exit code 1"))


def judge(stage, revision: int, *, is_good: bool) -> list[str]:
    verdict = events.RevisionJudged(service_id="s", revision=revision, is_good=is_good, reason="it was slow")
    return stage.tell(verdict)


@pytest.fixture
def deploy(stage, service):
    def tell(entrypoint: Entrypoint, terms: ReleaseTerms = AT_ONCE, **options) -> list[str]:
        options = {"start_timeout_s": 60.0, "min_replicas": 1, "max_replicas": 1} | options
        asked = service("s", entrypoint=entrypoint, **options)
        return stage.tell(events.ServiceDeployed(service=asked, terms=terms))

    return tell


@pytest.fixture
def old(stage, deploy):
    """A service with one replica that is ready, and a plan with a second device for it."""
    return with_old(stage, deploy)


def with_old(stage, deploy, **options):
    stage.want(s="0")
    deploy(OLD, **options)
    stage.ready("s", 0)
    stage.want(s="01")
    return stage


def test_replicas_of_a_new_revision_say_so_and_not_that_the_load_asks_for_them(stage, deploy):
    """To a policy, a release looks like load that asks for more replicas."""
    stage.want(s="01")
    deploy(OLD, min_replicas=2, max_replicas=2)
    stage.ready("s", 0, 1)
    stage.policy.why = {"s": "its load asks for 3 (0 in flight, 17 queued)"}
    stage.want(s="012")
    deploy(NEW, min_replicas=2, max_replicas=2)
    stage.ready("s", 2)
    stopped(stage, 1)
    started = [action for step in stage.steps for action in step.actions if isinstance(action, StartReplica)]
    told = [action.reason for action in started[2:]]
    assert told == ["revision 2 starts beside revision 1", "revision 2 replaces an older one"]


def test_the_old_revision_answers_until_the_new_one_is_ready(old, deploy):
    assert deploy(NEW) == ["start s.1 on n/1 g2"]
    assert served(old).reason == "1 of 1 replicas ready; revision 1 answers until revision 2 is ready"
    assert (served(old).service.revision, served(old).release.revision) == (1, 2)
    assert old.tell() == [], "nothing more to do until it is ready"
    assert old.ready("s", 1) == ["stop s.0"]
    assert served(old).reason == "1 of 1 replicas ready"
    assert (served(old).service.entrypoint, served(old).service.revision, served(old).release) == (NEW, 2, None)
    assert [(each.service.revision, each.state) for each in served(old).past] == [(1, "retired")]


def test_where_no_device_is_free_for_both_the_new_one_waits_and_it_is_said(stage, deploy):
    stage.want(s="0")
    deploy(OLD)
    stage.ready("s", 0)
    assert deploy(NEW) == []
    assert served(stage).reason == (
        "1 of 1 replicas ready; revision 1 answers until revision 2 is ready, which waits for a device"
    )
    assert stage.tell(at_s=1e6) == [], "to wait for a device is no failure"
    stage.want(s="01")
    assert stage.tell() == ["start s.1 on n/1 g2"]


def test_its_owner_may_let_the_old_one_stop_first_and_it_comes_back_if_the_new_one_fails(stage, deploy):
    stage.want(s="0")
    deploy(OLD)
    stage.ready("s", 0)
    assert deploy(NEW, terms=ReleaseTerms(stop_first=True)) == ["stop s.0"]
    assert "its owner lets it stop first" in stage.steps[-1].actions[0].reason
    assert stopped(stage, 0) == ["start s.1 on n/0 g2"]
    assert stage.tell(at_s=stage.controller.wakeup_at_s) == ["stop s.1"]
    assert stopped(stage, 1) == ["start s.2 on n/0 g1"]
    assert served(stage).service.entrypoint == OLD


def test_a_device_that_another_workload_still_holds_is_waited_for(stage, deploy):
    stage.want(s="0")
    deploy(OLD)
    stage.ready("s", 0)
    stage.running("a", "12")
    stage.want(s="01", a="2")
    assert "stop s.0" not in deploy(NEW, terms=ReleaseTerms(stop_first=True))
    stage.resized("a", direction="shrink")
    assert stage.tell(events.ReplicaStopped(workload_id="a", replica_id="a.0")) == ["start s.1 on n/1 g2"]


def test_several_replicas_are_replaced_one_after_another(stage, deploy):
    stage.want(s="01")
    deploy(OLD, min_replicas=2, max_replicas=2)
    stage.ready("s", 0)
    stage.ready("s", 1)
    stage.want(s="012")
    assert deploy(NEW, min_replicas=2, max_replicas=2) == ["start s.2 on n/2 g2"]
    assert stage.ready("s", 2) == ["stop s.1"]
    assert served(stage).old_revision == 1
    assert stopped(stage, 1) == ["start s.3 on n/1 g2"]
    assert stage.ready("s", 3) == ["stop s.0"]


def test_a_replica_of_the_old_revision_that_is_lost_meanwhile_comes_back_first(stage, deploy):
    stage.want(s="01")
    deploy(OLD, min_replicas=2, max_replicas=2)
    stage.ready("s", 0)
    stage.ready("s", 1)
    deploy(NEW, min_replicas=2, max_replicas=2)
    assert stage.tell(events.ReplicaLost(workload_id="s", replica_id="s.0", is_fault=False)) == ["start s.2 on n/0 g1"]


def test_the_bounds_of_the_new_revision_hold_once_it_answers(stage, deploy):
    old = with_old(stage, deploy, max_replicas=1)
    deploy(NEW, min_replicas=0, max_replicas=4)
    assert (served(old).min_replicas, served(old).max_replicas) == (1, 1)
    old.ready("s", 1)
    assert (served(old).min_replicas, served(old).max_replicas) == (0, 4)


def test_a_new_revision_that_hangs_is_given_up_and_the_old_replica_stays(stage, deploy):
    old = with_old(stage, deploy, max_replicas=2)
    deploy(NEW, max_replicas=2)
    assert old.tell(at_s=old.controller.wakeup_at_s) == ["stop s.1"]
    record = served(old)
    assert (record.service.entrypoint, record.service.revision) == (OLD, 1)
    assert record.state is ServiceState.READY
    old.want(s="0")
    assert stopped(old, 1) == []
    assert served(old).reason == "1 of 1 replicas ready; revision 2 was rolled back: s.1 was not ready within 1m00"
    assert [(each.service.revision, each.state) for each in record.past] == [(2, "failed")]
    old.want(s="01")
    assert deploy(NEWER, max_replicas=2) == ["start s.2 on n/1 g3"], "no number comes twice"


def test_a_new_revision_that_crashes_three_times_is_given_up_and_the_old_replica_stays(stage, deploy):
    old = with_old(stage, deploy, max_replicas=1)
    deploy(NEW)
    for number in range(1, 4):
        assert served(old).release.num_crashes == number - 1
        if number == 3:
            old.want(s="0")
        assert lost(old, number) == []
        if number < 3:
            assert old.tell(at_s=old.controller.wakeup_at_s) == [f"start s.{number + 1} on n/1 g2"]
    assert (served(old).service.entrypoint, served(old).release) == (OLD, None)
    assert "revision 2 was rolled back: crashed 3 times: exit code 1" in served(old).reason
    assert [replica.replica_id for replica in served(old).replicas] == ["s.0"]
    assert served(old).crashes_at_s == (), "they were none of the revision that answers"


def test_a_third_revision_cancels_one_that_loads(old, deploy):
    deploy(NEW)
    assert deploy(NEWER) == ["stop s.1"]
    assert stopped(old, 1) == ["start s.2 on n/1 g3"]
    assert [(each.service.revision, each.state) for each in served(old).past] == [(2, "cancelled")]
    assert old.ready("s", 2) == ["stop s.0"]


def test_the_present_revision_deployed_again_cancels_the_one_that_loads(old, deploy):
    deploy(NEW)
    old.want(s="0")
    assert deploy(OLD) == ["stop s.1"]
    assert stopped(old, 1) == []
    assert (served(old).service.revision, served(old).release) == (1, None)


def test_a_service_that_sleeps_starts_its_new_revision_once(stage, deploy):
    stage.want(s="0")
    deploy(OLD, min_replicas=0)
    stage.ready("s", 0)
    stage.want()
    stage.tell()
    stopped(stage, 0)
    assert wanted_replicas(view_service(served(stage), 1e3)) == 0
    stage.want(s="0")
    assert deploy(NEW, min_replicas=0) == ["start s.1 on n/0 g2"]
    assert wanted_replicas(view_service(served(stage), 1e3)) == 1
    assert served(stage).state is ServiceState.IDLE
    assert served(stage).reason.endswith("revision 1 answers until revision 2 is ready")
    stage.ready("s", 1)
    assert (served(stage).service.revision, served(stage).state) == (2, ServiceState.READY)
    assert wanted_replicas(view_service(served(stage), 1e6)) == 0


def test_a_canary_takes_over_only_after_its_verdict(old, deploy):
    deploy(NEW, terms=ReleaseTerms(canary=0.1))
    assert old.ready("s", 1) == []
    assert served(old).reason == "1 of 1 replicas ready; revision 2 gets 10% of the requests for at most 10m00"
    assert judge(old, 7, is_good=False) == [], "of no revision that there is"
    assert judge(old, 2, is_good=True) == ["stop s.0"]
    assert served(old).service.revision == 2


def test_a_canary_that_is_given_up_stops_although_it_is_ready(old, deploy):
    deploy(NEW, terms=ReleaseTerms(canary=0.1))
    old.ready("s", 1)
    assert judge(old, 2, is_good=False) == ["stop s.1"]
    assert served(old).reason.endswith("revision 2 was rolled back: it was slow")
    old.want(s="0")
    assert stopped(old, 1) == []
    assert [replica.replica_id for replica in served(old).replicas] == ["s.0"]


def test_an_earlier_revision_is_released_as_a_new_one_is_and_keeps_its_number(old, deploy):
    deploy(NEW)
    old.ready("s", 1)
    old.want(s="1")
    stopped(old, 0)
    back = served(old).past[0].service
    old.want(s="01")
    assert old.tell(events.ServiceDeployed(service=back, is_rollback=True)) == ["start s.2 on n/0 g1"]
    assert old.ready("s", 2) == ["stop s.1"]
    assert (served(old).service.entrypoint, served(old).service.revision) == (OLD, 1)
    assert [(each.service.revision, each.state) for each in served(old).past] == [(2, "retired")]


def test_a_service_that_is_removed_meanwhile_stops_both(old, deploy):
    deploy(NEW)
    old.want()
    assert set(old.tell(events.CancelRequested(workload_id="s"))) == {"stop s.0", "stop s.1"}


def test_policies_are_asked_for_one_replica_more_while_both_are_there(old, deploy):
    before = view_service(served(old), 1.0)
    assert (before.max_replicas, wanted_replicas(before)) == (1, 1)
    deploy(NEW)
    view = view_service(served(old), 1.0)
    assert (view.min_replicas, view.max_replicas, wanted_replicas(view), view.needed_replicas) == (1, 2, 2, 2)
    old.ready("s", 1)
    assert wanted_replicas(view_service(served(old), 1.0)) == 1


@pytest.mark.parametrize("ends", ["ready", "crash", "cancel"])
def test_a_restart_at_any_step_of_a_release_comes_to_the_same(stage, deploy, ends):
    with_old(stage, deploy)
    deploy(NEW)
    if ends == "ready":
        stage.ready("s", 1)
    elif ends == "crash":
        lost(stage, 1)
    else:
        deploy(NEWER)
    fresh = Controller(stage.policy)
    for step in stage.steps:
        fresh.restore(step)
    assert fresh.state == stage.controller.state
    assert fresh.standing() == stage.controller.standing()
    for start in fresh.standing().replicas:
        assert start.generation == start.workload.revision
