"""What jobs leave in the store whose objects somebody deleted: it goes in its time, and nothing else ever does."""

from __future__ import annotations

import pytest

from kits.service.expiring_objects import ARTIFACT, House
from springtide.backends.kubernetes.client.kinds import key_of, uid_of
from springtide.core.errors import BackendError, StorageError
from springtide.service.reconciler.orphans import RETRY_S, OrphanCollector
from springtide.storage.workloads.store import WorkloadStore

WHOLE = {"source/train.py", ARTIFACT, "head"}


class Widow(House):
    """A house in which objects are deleted by hand."""

    def __init__(self, platform, folder):
        super().__init__(platform, folder)
        self.remains = OrphanCollector(platform, self.cluster)

    def leads_anew(self, usual_s=None):
        """Another control plane leads: it remembers nothing."""
        self.remains.close()
        self.remains = OrphanCollector(self.platform, self.cluster, usual_s)

    def deleted(self, obj):
        self.remains.remember_ttl(self.cluster.see(obj))
        del self.cluster.server["TrainingFunction", key_of(obj)]
        return obj

    def record(self, obj):
        return self.admission.job_of(uid_of(obj))

    def look_at(self, obj):
        self.remains.check(self.record(obj))
        self.remains._pool.submit(lambda: None).result(10.0)


@pytest.fixture
def house(platform, tmp_path):
    house = Widow(platform, tmp_path / "objects")
    yield house
    house.remains.close()
    house.expiry.close()


def test_what_it_left_goes_by_the_time_that_the_object_had(house):
    obj = house.deleted(house.ended(ttlSecondsAfterFinished=600))
    house.look_at(obj)
    assert set(house.kept(obj)) > WHOLE
    house.platform.clock_s += 599.0
    house.look_at(obj)
    assert set(house.kept(obj)) > WHOLE
    house.platform.clock_s += 1.0
    house.look_at(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]
    assert not house.platform.workload_dir(house.record(obj).workload_id).exists()


def test_whoever_leads_then_knows_of_it(house):
    obj = house.deleted(house.ended(ttlSecondsAfterFinished=600, ttlKeeps="nothing"))
    house.look_at(obj)
    house.leads_anew(usual_s=1e9)
    house.platform.clock_s += 599.0
    house.look_at(obj)
    assert set(house.kept(obj)) > WHOLE
    house.platform.clock_s += 1.0
    house.look_at(obj)
    assert house.kept(obj) == ["head"]


def test_one_that_said_nothing_leaves_by_the_platforms_time_and_stays_where_there_is_none(house):
    obj = house.deleted(house.ended())
    house.platform.clock_s += 1e6
    house.look_at(obj)
    house.leads_anew(usual_s=1e6 + 10.0)
    house.look_at(obj)
    assert set(house.kept(obj)) > WHOLE
    house.platform.clock_s += 10.0
    house.look_at(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]


def test_a_job_that_has_not_ended_and_one_whose_worker_still_leaves_keep_what_they_have(house):
    obj = house.cluster.put(ttlSecondsAfterFinished=0)
    job = house.admission.submit_job(house.cluster.read("TrainingFunction", key_of(obj)))
    house.deleted(obj)
    house.look_at(obj)
    house.submissions.cancel_job(job.workload_id)
    house.platform.clock_s += 100.0
    house.look_at(obj)
    assert house.kept(obj) == ["source/train.py"]
    house.platform.stop_replicas(job.workload_id)
    house.look_at(obj)
    assert house.kept(obj) == ["head"]


def test_one_that_the_server_still_has_is_no_orphan(house):
    """What is cached may be of the past, and an object may have been labelled for another platform."""
    obj = house.ended(ttlSecondsAfterFinished=0)
    house.remains.remember_ttl(house.cluster.see(obj))
    house.platform.clock_s += 100.0
    house.look_at(obj)
    assert set(house.kept(obj)) > WHOLE
    del house.cluster.server["TrainingFunction", key_of(obj)]
    house.platform.clock_s += RETRY_S
    house.look_at(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]


def test_another_object_of_its_name_does_not_keep_it(house):
    obj = house.deleted(house.ended(ttlSecondsAfterFinished=0))
    house.cluster.put()
    house.platform.clock_s += 1.0
    house.look_at(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]


def test_what_somebody_else_writes_is_left_alone(house, caplog):
    obj = house.deleted(house.ended(ttlSecondsAfterFinished=0))
    job = house.record(obj)
    WorkloadStore(house.store, job.workload_id).raise_fence(job.group.generation + 1)
    house.platform.clock_s += 1.0
    house.look_at(obj)
    assert set(house.kept(obj)) > WHOLE
    assert "does another platform have the same store_url?" in caplog.text


@pytest.mark.parametrize("who", ["store", "server"])
def test_who_does_not_answer_is_asked_again(house, monkeypatch, who):
    obj = house.deleted(house.ended(ttlSecondsAfterFinished=0))
    house.platform.clock_s += 1.0

    def away(*_):
        raise StorageError("nobody answers") if who == "store" else BackendError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(house.store, "get_version", away) if who == "store" else patch.setattr(
            house.cluster, "read", away
        )
        house.look_at(obj)
    assert set(house.kept(obj)) > WHOLE
    # Not at every step of the journal.
    house.look_at(obj)
    assert set(house.kept(obj)) > WHOLE
    house.platform.clock_s += RETRY_S
    house.look_at(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]


def test_what_went_with_its_object_is_asked_for_once(house, monkeypatch):
    obj = house.ended(ttlSecondsAfterFinished=0)
    house.remains.remember_ttl(house.cluster.see(obj))
    house.platform.clock_s += 1.0
    house.look(obj)
    house.settle()
    house.look_at(obj)
    assert house.remains._ttls == {}
    asked = []
    monkeypatch.setattr(house.store, "get_version", asked.append)
    house.platform.clock_s += 1e6
    house.look_at(obj)
    assert asked == []
    assert house.kept(obj) == [ARTIFACT, "head"]


def test_it_may_be_cut_off_in_between(house, monkeypatch):
    obj = house.deleted(house.ended(ttlSecondsAfterFinished=0))
    house.platform.clock_s += 1.0

    def away(keys):
        raise StorageError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(house.store, "delete", away)
        house.look_at(obj)
    # It is fenced off by now, and most of it is still there.
    assert "source/train.py" in house.kept(obj)
    house.leads_anew()
    house.look_at(obj)
    assert house.kept(obj) == [ARTIFACT, "head"]
