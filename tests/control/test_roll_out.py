"""A new revision of a service: the old one answers until it is ready, as far as there are devices for both."""

from __future__ import annotations

import pytest

from springtide.control.records import ServiceState
from springtide.control.snapshot_views import view_service
from springtide.core import events
from springtide.core.workload import Entrypoint
from springtide.scheduling.replicas import wanted_replicas

OLD, NEW, NEWER = (Entrypoint(source_path=f"{name}.py") for name in ("old", "new", "newer"))


def served(stage):
    return stage.controller.state.services["s"]


def stopped(stage, number: int) -> list[str]:
    return stage.tell(events.ReplicaStopped(workload_id="s", replica_id=f"s.{number}"))


def lost(stage, number: int) -> list[str]:
    return stage.tell(events.ReplicaLost(workload_id="s", replica_id=f"s.{number}", reason="exit code 1"))


@pytest.fixture
def deploy(stage, service):
    def tell(entrypoint: Entrypoint, **options) -> list[str]:
        options = {"start_timeout_s": 60.0, "min_replicas": 1, "max_replicas": 1} | options
        return stage.tell(events.ServiceDeployed(service=service("s", entrypoint=entrypoint, **options)))

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


def test_the_old_revision_answers_until_the_new_one_is_ready(old, deploy):
    assert deploy(NEW) == ["start s.1 on n/1 g2"]
    assert served(old).reason == "1 of 1 replicas ready; revision 1 answers until revision 2 is ready"
    assert old.tell() == [], "nothing more to do until it is ready"
    assert old.ready("s", 1) == ["stop s.0"]
    assert served(old).reason == "1 of 1 replicas ready"
    assert served(old).old_revision is None


def test_where_no_device_is_free_for_both_the_old_one_stops_first_and_it_says_so(stage, deploy):
    stage.want(s="0")
    deploy(OLD)
    stage.ready("s", 0)
    assert deploy(NEW) == ["stop s.0"]
    assert stage.steps[-1].actions[0].reason == (
        "a newer revision replaces it, and there is no further device on which that could load meanwhile"
    )
    assert stopped(stage, 0) == ["start s.1 on n/0 g2"]
    assert served(stage).reason == (
        "the first replica is loading revision 2; nothing answers until then, requests wait"
    )


def test_a_device_that_another_workload_still_holds_is_waited_for(stage, deploy):
    stage.want(s="0")
    deploy(OLD)
    stage.ready("s", 0)
    stage.running("a", "12")
    stage.want(s="01", a="2")
    assert "stop s.0" not in deploy(NEW)
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
    assert stopped(stage, 1) == ["start s.3 on n/1 g2"]
    assert stage.ready("s", 3) == ["stop s.0"]


def test_a_new_revision_that_hangs_is_rolled_back_and_the_old_replica_stays(stage, deploy):
    old = with_old(stage, deploy, max_replicas=2)
    deploy(NEW, max_replicas=2)
    assert old.tell(at_s=old.controller.wakeup_at_s) == ["stop s.1"]
    record = served(old)
    assert (record.service.entrypoint, record.service.revision) == (OLD, 3)
    assert record.state is ServiceState.READY
    old.want(s="0")
    assert stopped(old, 1) == []
    assert served(old).reason == "1 of 2 replicas ready; revision 2 was rolled back: s.1 was not ready within 1m00"


def test_a_new_revision_that_crashes_is_rolled_back_and_the_old_replica_stays(stage, deploy):
    old = with_old(stage, deploy, max_replicas=2)
    deploy(NEW, max_replicas=2)
    for number in range(1, 5):
        assert [line for line in lost(old, number) if "s.0" in line] == []
        old.tell(at_s=old.controller.wakeup_at_s)
    assert served(old).service.entrypoint == OLD
    assert "revision 2 was rolled back: exit code 1" in served(old).reason
    assert "s.0" in [replica.replica_id for replica in served(old).replicas]


def test_a_third_revision_replaces_one_that_loads(old, deploy):
    deploy(NEW)
    assert deploy(NEWER) == ["stop s.1"]
    assert stopped(old, 1) == ["start s.2 on n/1 g3"]
    assert old.ready("s", 2) == ["stop s.0"]


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
