"""A state comes back from its data as it was, with everything that its tables derive."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from springtide.control.records import PlatformState
from springtide.control.state_data import (
    PlatformSnapshot,
    StateData,
    data_of,
    decode_snapshot,
    encode_snapshot,
    state_of,
)
from springtide.core import events
from springtide.core.errors import JournalError
from springtide.core.workload import WorkloadId


def derived(state: PlatformState) -> object:
    return [
        (list(table), list(table.live), table.held, table.shares, sorted(table.place, key=table.place.__getitem__))
        for table in (state.jobs, state.services)
    ]


def again(state: PlatformState) -> PlatformState:
    snapshot = PlatformSnapshot(state=data_of(state), kept={"x": b"\x00\xff"})
    back = decode_snapshot(encode_snapshot(snapshot))
    assert back == snapshot
    return state_of(back.state)


@pytest.fixture
def busy(stage, job, service):
    """Jobs that run, wait, are paused and have ended; a service that was removed and came again."""
    stage.running("a", "01")
    for name in ("b", "c", "d"):
        stage.tell(events.JobSubmitted(job=job(name)))
    for name in ("s", "t"):
        stage.tell(events.ServiceDeployed(service=service(name)))
    stage.want(a="01", b="2", s="3")
    stage.ready("s", 0)
    for name in ("s", "c"):
        stage.tell(events.CancelRequested(workload_id=name))
    stage.tell(events.PauseRequested(job_id="d"), events.ReplicaStopped(workload_id="s", replica_id="s.0"))
    stage.tell(events.ServiceDeployed(service=service("s")))
    return stage


def test_it_comes_back_equal_with_its_indexes(busy) -> None:
    state = busy.controller.state
    assert state.services.live
    assert list(state.services.live) != list(state.services), "the order is not told apart"
    back = again(state)
    assert data_of(back) == data_of(state)
    assert derived(back) == derived(state)
    assert back.topology() == state.topology()


def test_no_field_of_the_state_is_left_out() -> None:
    own = set(StateData.__struct_fields__) - {"live_jobs", "live_services"}
    assert own == set(PlatformState.__struct_fields__)


def test_numbers_that_json_does_not_know_come_back(busy) -> None:
    job = busy.controller.state.jobs[WorkloadId("a")]
    busy.controller.state.jobs[WorkloadId("a")] = replace(job, progress=replace(job.progress, loss=math.inf))
    assert again(busy.controller.state).jobs[WorkloadId("a")].progress.loss == math.inf


def test_one_that_left_makes_no_two_have_the_same_place(busy, job) -> None:
    state = busy.controller.state
    busy.tell(events.JobsArchived(job_ids=("c", "a")))
    assert "c" not in state.jobs
    assert "a" in state.jobs, "it has not ended"
    busy.tell(events.JobSubmitted(job=job("e")))
    assert len(set(state.jobs.place.values())) == len(state.jobs.place) == len(state.jobs)
    assert list(again(state).jobs) == list(state.jobs)


def test_a_removed_service_that_left_comes_again_with_numbers_of_its_own(stage, service) -> None:
    stage.tell(events.ServiceDeployed(service=service("s", min_replicas=1)))
    stage.want(s="1")
    stage.tell()
    stage.ready("s", 0)
    stage.tell(events.CancelRequested(workload_id="s"))
    state = stage.controller.state
    stage.tell(events.ServicesArchived(service_ids=("s",)))
    assert "s" in state.services, "its replica still drains"
    stage.tell(events.ReplicaStopped(workload_id="s", replica_id="s.0"))
    old = state.services[WorkloadId("s")]
    assert old.removed_at_s is not None
    stage.tell(events.ServicesArchived(service_ids=("s", "never-was")))
    assert not state.services
    # News of it come late.
    stage.tell(events.ReplicaStopped(workload_id="s", replica_id="s.0"), events.CancelRequested(workload_id="s"))
    deployed = events.ServiceDeployed(service=service("s", revision=2), first_replica=old.next_replica)
    assert stage.tell(deployed) == ["start s.1 on n/1 g2"]
    record = state.services[WorkloadId("s")]
    assert (record.service.revision, record.replicas[0].revision, record.removed_at_s) == (2, 2, None)
    assert list(again(state).services) == ["s"]


def test_what_is_no_snapshot_is_an_error_of_the_journal() -> None:
    for blob in (b"", b"x" * 50, encode_snapshot(PlatformSnapshot(state=data_of(PlatformState())))[:-3]):
        with pytest.raises(JournalError, match="cannot be read"):
            decode_snapshot(blob)
