"""Objects against workloads with a cluster that answers from the past, forgets to tell, or is cut off in between."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kits.service.cluster_double import House, Moments
from springtide.backends.kubernetes.client.kinds import key_of, uid_of
from springtide.backends.kubernetes.pods.spec import secret_name
from springtide.backends.kubernetes.resources.status import Condition
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.control.records import JobRecord
from springtide.core.errors import BackendError
from springtide.core.events import NodeLost, PauseRequested, ProgressReported, ReplicaReady
from springtide.core.status.pods import ClusterStatus, PodStatus
from springtide.service.reconciler.controller import ResourceReconciler
from springtide.service.reconciler.events import EventPublisher
from springtide.service.reconciler.status import PROGRESS_EVERY_S, StatusWriter
from springtide.service.submission.schemas import ScaleIn


@pytest.fixture
def house(platform):
    return House(platform)


# --- what is cached may be of the past -------------------------------------------------------------------------------


def test_an_object_becomes_a_job_once_however_often_it_is_seen(house):
    obj = house.cluster.put(workers="1..2", epochs=3)
    first, told = house.jobs.submit(obj)
    assert told is None
    second, _ = house.jobs.submit(obj)
    assert isinstance(first, JobRecord)
    assert second.workload_id == first.workload_id
    assert (first.job.num_epochs, first.bounds.max_workers) == (3, 2)
    assert first.job.container.owner_uid == uid_of(obj)
    assert len(house.platform.view().jobs) == 1


def test_hands_that_take_the_same_object_in_at_once_make_one_job_of_it(house):
    obj = house.cluster.put()
    barrier = threading.Barrier(8)

    def take(_):
        barrier.wait()
        return house.admission.submit_job(house.cluster.read("TrainingFunction", key_of(obj))).workload_id

    with ThreadPoolExecutor(8) as hands:
        assert len(set(hands.map(take, range(8)))) == 1
    assert len(house.platform.view().jobs) == 1


def test_hands_that_take_many_objects_of_one_name_in_at_once_give_each_an_id(house):
    objects = [house.cluster.put(name=f"d{number}") for number in range(24)]
    for obj in objects:
        house.cluster.server["TrainingFunction", key_of(obj)]["metadata"]["annotations"] = {"springtide.dev/name": "d"}
    with ThreadPoolExecutor(8) as hands:
        records = list(hands.map(lambda obj: house.jobs.submit(obj)[0], objects))
    assert len({record.workload_id for record in records}) == len(objects)
    assert {record.job.container.owner_uid for record in records} == {uid_of(obj) for obj in objects}


def test_an_object_that_is_gone_by_now_is_not_taken_in(house):
    obj = house.cluster.put()
    del house.cluster.server["TrainingFunction", key_of(obj)]
    assert house.jobs.submit(obj) == (None, None)
    again = house.cluster.put()
    house.cluster.cached["TrainingFunction", key_of(obj)] = obj
    assert house.jobs.submit(obj) == (None, None)
    assert house.jobs.submit(again)[0] is not None


def test_a_wish_of_the_past_is_not_acted_upon(house):
    """A pause over REST is in the object; the cache has not heard of it yet."""
    obj = house.cluster.put(workers="1..2", suspend=False)
    house.jobs.submit(obj)
    house.cluster.change(obj, suspend=True)
    house.submissions.pause_job(house.job(obj).workload_id)
    house.jobs.compare(obj, house.job(obj))
    assert house.job(obj).bounds.is_paused
    house.cluster.change(obj, suspend=False)
    house.compare(obj)
    assert not house.job(obj).bounds.is_paused


def test_bounds_of_the_past_are_not_set_again(house):
    obj = house.cluster.put(workers="1..2")
    house.jobs.submit(obj)
    house.cluster.change(obj, workers=1)
    house.submissions.scale(house.job(obj).workload_id, ScaleIn(minimum=1, maximum=1))
    house.jobs.compare(obj, house.job(obj))
    assert house.job(obj).bounds.max_workers == 1


def test_an_object_that_a_list_forgot_does_not_end_its_job(house):
    obj = house.cluster.put()
    house.jobs.submit(obj)
    house.jobs.end_orphan(house.job(obj))
    assert house.job(obj).lifecycle.outcome is None
    assert house.job(obj).state != "CANCELLED"


@pytest.mark.parametrize("is_made_again", [False, True])
def test_an_object_that_is_gone_ends_its_job_even_if_another_bears_its_name(house, is_made_again):
    obj = house.cluster.put()
    house.jobs.submit(obj)
    del house.cluster.server["TrainingFunction", key_of(obj)]
    if is_made_again:
        house.cluster.put()
    house.jobs.end_orphan(house.job(obj))
    record = house.job(obj)
    assert "CANCELLED" in (record.state, record.lifecycle.outcome)


def test_a_server_that_is_away_changes_nothing_and_is_asked_again(house):
    obj = house.cluster.put(workers="1..2")
    house.jobs.submit(obj)
    house.cluster.change(obj, workers=1)
    seen = house.cluster.see(obj)
    house.cluster.is_away = True
    applied = house.jobs.compare(seen, house.job(obj))
    assert house.job(obj).bounds.max_workers == 2
    assert (applied.is_true, applied.reason) == (False, Reason.PLATFORM_UNAVAILABLE)
    with pytest.raises(BackendError):
        house.jobs.end_orphan(house.job(obj))
    house.cluster.is_away = False
    house.jobs.compare(seen, house.job(obj))
    assert house.job(obj).bounds.max_workers == 1


def test_nothing_is_asked_of_the_server_while_all_is_as_it_should_be(house):
    obj = house.cluster.put(workers="1..2")
    house.jobs.submit(obj)
    reads = house.cluster.reads
    for _ in range(5):
        assert house.compare(obj).is_true
    assert house.cluster.reads == reads


# --- what a job's owner wants ----------------------------------------------------------------------------------------


def test_what_the_job_is_cannot_change_and_putting_it_back_is_enough(house):
    obj = house.cluster.put(epochs=3, params={"lr": 0.1})
    house.jobs.submit(obj)
    house.cluster.change(obj, epochs=4, params={"lr": 0.2})
    applied = house.compare(obj)
    assert (applied.is_true, applied.reason) == (False, Reason.CHANGE_REFUSED)
    assert "spec.epochs, spec.params cannot change any more" in applied.message
    house.cluster.change(obj, epochs=3, params={"lr": 0.1})
    assert house.compare(obj).is_true


def test_more_workers_than_the_job_was_cut_for_are_refused_with_the_mend(house):
    obj = house.cluster.put(workers="1..2")
    house.jobs.submit(obj)
    house.cluster.change(obj, workers="1..200")
    applied = house.compare(obj)
    assert not applied.is_true
    assert "was submitted for at most 4 workers; use maximum <= 4" in applied.message
    assert house.job(obj).bounds.max_workers == 2


def test_a_quota_is_not_fought_against(house):
    obj = house.cluster.put(workers="2..4")
    house.jobs.submit(obj)
    house.caps = {house.job(obj).workload_id: 3}
    house.compare(obj)
    assert (house.job(obj).bounds.min_workers, house.job(obj).bounds.max_workers) == (2, 3)
    house.caps = {house.job(obj).workload_id: 1}
    house.compare(obj)
    # The least that its owner asked for is kept.
    assert house.job(obj).bounds.max_workers == 2 or house.job(obj).bounds.min_workers == 1
    house.caps = {}
    house.compare(obj)
    assert (house.job(obj).bounds.min_workers, house.job(obj).bounds.max_workers) == (2, 4)


def test_a_pause_for_its_budget_is_not_its_owners_to_end_without_a_new_one(house):
    obj = house.cluster.put(budget="$1")
    house.jobs.submit(obj)
    house.platform.play(PauseRequested(job_id=house.job(obj).workload_id, reason="its budget is used up"))
    house.compare(obj)
    assert house.job(obj).bounds.is_paused
    house.cluster.change(obj, budget="$2")
    house.compare(obj)
    record = house.job(obj)
    assert not record.bounds.is_paused
    assert record.job.goal.budget_usd == 2.0


def test_a_suspended_object_is_no_job_until_it_is_let_go_and_its_time_begins_then(house):
    obj = house.cluster.put(suspend=True, deadline="10m")
    record, told = house.jobs.submit(obj)
    assert record is None
    assert told.reason is Reason.SUSPENDED
    assert not house.platform.view().jobs
    house.cluster.change(obj, suspend=False)
    house.jobs.submit(house.cluster.see(obj))
    assert house.job(obj).job.goal.deadline_s == pytest.approx(house.platform.now_s() + 600, abs=1.0)


@pytest.mark.parametrize(
    "name",
    ["ml-platform-master-key", "ml-platform-token", "store", secret_name("digits-7f3a"), secret_name("x" * 80)],
)
@pytest.mark.parametrize("kind", ["TrainingFunction", "InferenceFunction"])
def test_nobody_is_handed_the_platforms_own_secrets(house, name, kind):
    obj = house.cluster.put(kind, "digits", container={"secrets": ["mine", name]})
    if kind == "TrainingFunction":
        record, told = house.jobs.submit(obj)
    else:
        record, (told, *_) = house.services.compare(obj)
    assert record is None
    assert told.reason is Reason.INVALID_SPEC
    assert f"names '{name}', which is the platform's own" in told.message
    mine = house.cluster.put(name="mine", container={"secrets": ["mine"]})
    assert house.jobs.submit(mine)[0].job.container.secrets == ("mine",)


# --- services --------------------------------------------------------------------------------------------------------


def test_a_service_is_deployed_once_for_each_generation(house):
    obj = house.cluster.put("InferenceFunction", "echo", scale="1..2")
    record, told = house.services.compare(obj)
    assert record.service.container.owner_uid == uid_of(obj)
    assert told[0].is_true
    reads = house.cluster.reads
    house.services.compare(obj)
    assert house.cluster.reads == reads
    house.cluster.change(obj, scale="1..3")
    record, _ = house.services.compare(house.cluster.see(obj))
    assert (record.max_replicas, record.service.revision) == (3, 1)
    house.cluster.change(obj, scale="1..2", maxBatch=4)
    record, _ = house.services.compare(house.cluster.see(obj))
    assert (record.max_replicas, record.service.max_batch_size, record.service.revision) == (2, 4, 2)


def test_a_change_is_not_applied_before_the_new_revision_alone_answers(house):
    obj = house.cluster.put("InferenceFunction", "echo", scale="1..1")
    house.services.compare(obj)

    def ready(*numbers):
        house.platform.play(*(ReplicaReady(workload_id="echo", replica_id=f"echo.{number}") for number in numbers))
        _, (applied,) = house.services.compare(house.cluster.see(obj))
        return applied

    assert ready(0) == Condition(ConditionType.APPLIED, True, Reason.IN_FORCE, "all of the spec is in force")
    house.cluster.change(obj, maxBatch=4)
    starting = Condition(
        ConditionType.APPLIED,
        False,
        Reason.STARTING,
        "revision 1 answers until revision 2 is ready, which waits for a device",
    )
    assert ready() == starting
    assert house.platform.view().services["echo"].state == "READY", "the one that answers is the old one"
    house.cluster.change(obj, maxBatch=8)
    assert ready().is_true, "it says again what answers"


def test_a_service_whose_object_is_gone_goes_and_one_that_was_only_not_listed_stays(house):
    obj = house.cluster.put("InferenceFunction", "echo", scale="1..2")
    record, _ = house.services.compare(obj)
    house.services.end_orphan(record)
    assert not house.platform.view().services["echo"].is_removed
    del house.cluster.server["InferenceFunction", key_of(obj)]
    house.services.end_orphan(record)
    assert house.platform.view().services["echo"].is_removed


def test_a_suspended_service_is_taken_away_and_comes_back(house):
    obj = house.cluster.put("InferenceFunction", "echo", scale="1..2")
    house.services.compare(obj)
    house.cluster.change(obj, suspend=True)
    record, told = house.services.compare(house.cluster.see(obj))
    assert record is None
    assert told[0].reason is Reason.SUSPENDED
    assert house.platform.view().services["echo"].is_removed
    house.cluster.change(obj, suspend=False)
    record, _ = house.services.compare(house.cluster.see(obj))
    assert not record.is_removed


def test_a_change_that_cannot_be_leaves_the_service_as_it_is(house):
    obj = house.cluster.put("InferenceFunction", "echo", scale="1..2")
    house.services.compare(obj)
    house.cluster.change(obj, scale="4..2")
    record, told = house.services.compare(house.cluster.see(obj))
    assert (record.min_replicas, record.max_replicas) == (1, 2)
    assert (told[0].type, told[0].is_true) == (ConditionType.APPLIED, False)
    assert "spec.scale" in told[0].message


# --- what is told ----------------------------------------------------------------------------------------------------


@pytest.fixture
def writer(house):
    house.now = Moments()
    house.status = ClusterStatus()
    return StatusWriter(house.platform, house.cluster, "p", "http://x:1", lambda: house.status, house.now)


def progress(house, obj, step):
    job_id, record = house.job(obj).workload_id, house.job(obj)
    house.platform.play(
        ProgressReported(job_id=job_id, generation=record.group.generation, step=step, total_steps=100, world_size=1)
    )


def test_progress_alone_waits_its_turn_and_a_change_of_state_does_not(house, writer):
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    house.platform.run_job(house.job(obj).workload_id)
    assert writer.write_job(obj, house.job(obj), [])
    assert house.cluster.told[-1][1]["state"] == "RUNNING"
    progress(house, obj, 5)
    house.now.at_s += 1.0
    assert not writer.write_job(obj, house.job(obj), [])
    assert not writer.is_due(uid_of(obj))
    house.submissions.pause_job(house.job(obj).workload_id)
    assert writer.write_job(obj, house.job(obj), [])
    assert house.cluster.told[-1][1]["state"] in ("PREEMPTING", "PAUSED")
    assert house.cluster.told[-1][1]["step"] == 5
    house.now.at_s += PROGRESS_EVERY_S
    assert writer.is_due(uid_of(obj))


def test_progress_tells_nothing_of_a_spec_that_was_not_compared_yet(house, writer):
    """A spec that has just changed stands in the cache; it is not in force because the one before it was."""
    reconciler = ResourceReconciler(house.platform, SimpleNamespace(), KubernetesSettings(name="p"))
    reconciler.objects, reconciler._statuses, reconciler._services = house.cluster, writer, house.services
    obj = house.cluster.put("InferenceFunction", "echo", scale="1..1")
    ref = (obj["kind"], key_of(obj))
    reconciler._compare(ref, False)
    house.cluster.change(obj, maxBatch=4)
    house.cluster.see(obj)
    house.now.at_s += 100.0
    reconciler._write_progress(ref, "echo")
    assert [status["observedGeneration"] for _, status in house.cluster.told] == [1]
    reconciler._compare(ref, False)
    assert house.cluster.told[-1][1]["observedGeneration"] == 2
    reconciler.stop()


def test_a_status_that_says_nothing_new_is_not_written(house, writer):
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    refused = Condition(ConditionType.APPLIED, False, Reason.CHANGE_REFUSED, "no")
    writer.write_job(obj, house.job(obj), [refused])
    num = len(house.cluster.told)
    obj["status"] = house.cluster.told[-1][1]
    house.now.at_s += 100.0
    writer.write_job(obj, house.job(obj), [refused])
    assert len(house.cluster.told) == num


def test_a_status_that_somebody_took_away_is_written_again(house, writer):
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    writer.write_job(obj, house.job(obj), [])
    obj["status"] = house.cluster.told[-1][1]
    house.now.at_s += 100.0
    writer.write_job(obj, house.job(obj), [])
    assert len(house.cluster.told) == 1
    del obj["status"]
    writer.write_job(obj, house.job(obj), [])
    assert len(house.cluster.told) == 2


def test_a_condition_keeps_the_moment_of_its_transition(house, writer):
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    writer.write_job(obj, house.job(obj), [])
    before = {each["type"]: each["lastTransitionTime"] for each in house.cluster.told[-1][1]["conditions"]}
    house.platform.clock_s += 60.0
    house.platform.run_job(house.job(obj).workload_id)
    writer.write_job(obj, house.job(obj), [])
    after = {each["type"]: each["lastTransitionTime"] for each in house.cluster.told[-1][1]["conditions"]}
    assert after["Accepted"] == before["Accepted"]
    assert after["Running"] != before["Running"]


def test_pods_that_wait_are_named_with_their_reason(house, writer):
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    job_id = house.job(obj).workload_id
    pod = PodStatus(
        workload_id=job_id,
        replica_id=f"{job_id}.0",
        namespace="ml",
        pod="digits-0",
        node_id="local",
        phase="waiting",
        reason="ImagePullBackOff: there is no image x",
    )
    house.status = ClusterStatus(pods=(pod,))
    assert writer.update_pods() == {job_id}
    assert writer.update_pods() == set()
    writer.write_job(obj, house.job(obj), [])
    status = house.cluster.told[-1][1]
    assert status["pods"] == [{"name": "digits-0", "phase": "waiting", "reason": pod.reason}]
    running = next(each for each in status["conditions"] if each["type"] == "Running")
    assert (running["reason"], running["message"]) == ("PodsWaiting", f"pod digits-0: {pod.reason}")


class Play:
    def __init__(self, house):
        self.posted = []
        self.publisher = EventPublisher("p", house.platform.wall_clock_offset_s, self.posted.append)
        house.platform.subscribe(lambda seq, step, view: self.publisher.add(seq, step))

    def lines(self):
        return [(event["involvedObject"]["name"], event["reason"], event["message"]) for event in self.posted]


def test_every_line_of_a_story_is_an_event_on_its_object(house):
    play = Play(house)
    play.publisher.begin(house.platform.now_s())
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    house.platform.run_job(house.job(obj).workload_id)
    play.publisher.publish(house.platform.view())
    reasons = [reason for name, reason, _ in play.lines() if name == "digits"]
    assert reasons[:2] == ["Submitted", "StartingReplica"]
    assert "Started" in reasons
    assert {event["involvedObject"]["uid"] for event in play.posted if event["involvedObject"]["kind"] != "Node"} == {
        "u1"
    }
    assert len({event["metadata"]["name"] for event in play.posted}) == len(play.posted)


def test_what_was_decided_just_before_a_restart_is_told_under_the_same_name(house):
    first = Play(house)
    first.publisher.begin(house.platform.now_s())
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    first.publisher.publish(house.platform.view())
    house.platform.clock_s += 10.0
    second = Play(house)
    second.publisher.begin(house.platform.now_s())
    second.publisher.publish(house.platform.view())
    assert [event["metadata"] for event in second.posted] == [event["metadata"] for event in first.posted]
    house.platform.clock_s += 1000.0
    third = Play(house)
    third.publisher.begin(house.platform.now_s())
    third.publisher.publish(house.platform.view())
    assert third.posted == []


def test_a_lost_node_is_told_on_the_node_and_on_whoever_was_there(house):
    play = Play(house)
    play.publisher.begin(house.platform.now_s())
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    house.platform.run_job(house.job(obj).workload_id)
    house.platform.play(NodeLost(node_id="local"))
    play.publisher.publish(house.platform.view())
    lost = [(event["involvedObject"]["kind"], event["type"]) for event in play.posted if "lost" in event["message"]]
    assert ("Node", "Normal") in lost or ("Node", "Warning") in lost
    assert ("TrainingFunction", "Warning") in lost
