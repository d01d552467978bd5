"""Jobs that have ended go when their time is over: not before, not half, and not when their owner changed his mind."""

from __future__ import annotations

import pytest

from kits.service.expiring_objects import ARTIFACT, House
from springtide.backends.kubernetes.client.kinds import key_of, uid_of
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.core.errors import StorageError
from springtide.core.status.pods import ClusterStatus
from springtide.service.reconciler.expiry import RETRY_S, Expiry
from springtide.service.reconciler.status import StatusWriter


@pytest.fixture
def house(platform, tmp_path):
    house = House(platform, tmp_path / "objects")
    yield house
    house.expiry.close()


def test_it_goes_when_its_time_is_over_and_not_before(house):
    obj = house.ended(ttlSecondsAfterFinished=60)
    told = house.look(obj)
    assert (told.type, told.is_true, told.reason) == (ConditionType.EXPIRED, False, Reason.KEPT)
    assert "what it made stays" in told.message
    assert house.expiry.due() == []
    house.platform.clock_s += 59.0
    assert house.expiry.due() == []
    assert not house.look(obj).is_true
    house.platform.clock_s += 2.0
    assert house.expiry.due() == [key_of(obj)]
    assert house.look(obj).reason is Reason.TIME_OVER
    house.settle()
    assert not house.is_there(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]
    (event,) = house.cluster.events
    assert event["reason"] == "Expired"
    assert "with 2 of its objects in the store" in event["message"]


def test_nothing_stays_where_nothing_is_to_stay(house):
    obj = house.ended(ttlSecondsAfterFinished=0, ttlKeeps="nothing")
    house.platform.clock_s += 1.0
    house.look(obj)
    house.settle()
    assert not house.is_there(obj)
    assert house.kept(obj) == ["head"]


def test_without_a_time_it_stays_and_while_it_runs_it_has_none(house):
    forever = house.ended()
    house.platform.clock_s += 1e6
    assert house.look(forever) is None
    running = house.cluster.put(name="runs", ttlSecondsAfterFinished=0)
    house.admission.submit_job(house.cluster.read("TrainingFunction", key_of(running)))
    house.platform.clock_s += 1e6
    assert house.look(running) is None
    assert house.expiry.due() == []


def test_a_job_whose_worker_still_leaves_has_not_ended(house):
    obj = house.cluster.put(ttlSecondsAfterFinished=0)
    job = house.admission.submit_job(house.cluster.read("TrainingFunction", key_of(obj)))
    house.submissions.cancel_job(job.workload_id)
    house.platform.clock_s += 100.0
    assert house.admission.job_of(uid_of(obj)).state == "CANCELLED"
    assert house.look(obj) is None
    house.platform.stop_replicas(job.workload_id)
    assert house.look(obj).is_true


def test_who_is_given_more_time_meanwhile_stays(house):
    obj = house.ended(ttlSecondsAfterFinished=10)
    house.look(obj)
    house.platform.clock_s += 11.0
    seen = house.cluster.see(obj)
    house.cluster.change(obj, ttlSecondsAfterFinished=1000)
    assert house.expiry.check(seen, house.admission.job_of(uid_of(obj))).is_true
    house.settle()
    assert house.is_there(obj)
    assert "source/train.py" in house.kept(obj)
    assert not house.look(obj).is_true


def test_another_object_of_its_name_is_left_alone(house):
    obj = house.ended(ttlSecondsAfterFinished=10)
    record = house.admission.job_of(uid_of(obj))
    house.platform.clock_s += 11.0
    seen = house.cluster.see(obj)
    house.cluster.put(ttlSecondsAfterFinished=10)
    house.expiry.check(seen, record)
    house.settle()
    assert house.is_there(obj)
    assert "source/train.py" in house.kept(obj)


def test_a_store_that_is_away_is_told_of_and_asked_again(house, monkeypatch):
    obj = house.ended(ttlSecondsAfterFinished=10)
    house.look(obj)
    house.platform.clock_s += 11.0

    def away(prefix):
        raise StorageError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(house.store, "keys", away)
        house.look(obj)
        house.settle()
    assert house.is_there(obj)
    assert house.expiry.due() == []
    house.platform.clock_s += RETRY_S
    assert house.expiry.due() == [key_of(obj)]
    told = house.look(obj)
    assert (told.is_true, told.reason) == (True, Reason.STORE_UNAVAILABLE)
    assert "the store does not answer" in told.message
    house.settle()
    assert not house.is_there(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]


def test_cut_off_between_store_and_object_it_is_taken_away_by_whoever_comes_next(house):
    obj = house.ended(ttlSecondsAfterFinished=10)
    house.look(obj)
    house.platform.clock_s += 11.0
    record = house.admission.job_of(uid_of(obj))
    house.platform.source_store.retire(record.workload_id, keeps_artifacts=True)
    assert house.is_there(obj)
    after = Expiry(house.platform, house.cluster, "ml-platform")
    after.check(house.cluster.see(obj), record)
    after._pool.shutdown(wait=True)
    assert not house.is_there(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]


def test_its_status_says_until_when(house):
    obj = house.ended(ttlSecondsAfterFinished=60)
    told = house.look(obj)
    writer = StatusWriter(house.platform, house.cluster, "ml-platform", "http://x", lambda: ClusterStatus())
    assert writer.write_job(house.cluster.see(obj), house.admission.job_of(uid_of(obj)), [told])
    _, status = house.cluster.told[-1]
    assert status["expiresAt"] > status["endedAt"]
    expired = next(each for each in status["conditions"] if each["type"] == "Expired")
    assert status["expiresAt"] in expired["message"]


def test_a_platform_may_have_a_time_for_all_who_say_nothing(house):
    house.expiry = Expiry(house.platform, house.cluster, "ml-platform", usual_s=60.0)
    silent, longer = house.ended(), house.ended(name="longer", ttlSecondsAfterFinished=600)
    assert house.look(silent).reason is house.look(longer).reason is Reason.KEPT
    writer = StatusWriter(house.platform, house.cluster, "x", "http://x", lambda: ClusterStatus(), usual_ttl_s=60.0)
    writer.write_job(house.cluster.see(silent), house.admission.job_of(uid_of(silent)), [])
    assert "expiresAt" in house.cluster.told[-1][1]
    house.platform.clock_s += 61.0
    for obj in (silent, longer):
        house.look(obj)
    house.settle()
    assert not house.is_there(silent)
    assert house.is_there(longer)
