"""An object whose job has left the platform's state: its status stays, it is taken in once, and goes as any other."""

from __future__ import annotations

import logging
import math

import pytest

from kits.service.expiring_objects import Cluster
from kits.service.small_platform import Serving
from springtide.backends.kubernetes.client.kinds import uid_of
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.control.journal.retention import Retention
from springtide.service.reconciler.controller import ResourceReconciler
from springtide.service.submission.source_stores import ObjectSources
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore

KIND = "TrainingFunction"


class Lead(Serving):
    """A control plane that leads, with its journal on a disk and its reconciler on a cluster that is played."""

    def __init__(self, folder, cluster):
        self.store = CheckedStore(FileStore(folder / "objects", is_durable=False))
        self.cluster = cluster
        (folder / "state").mkdir(exist_ok=True)
        super().__init__(folder / "state", Retention(ended_s=0.0), prepare=self.prepare)
        self.reconciler._events.begin(self.platform.now_s())

    def prepare(self, platform):
        platform.source_store = ObjectSources(self.store, platform.state_dir)
        self.reconciler = ResourceReconciler(platform, None, KubernetesSettings(name="ml-platform"))

    def round(self):
        self.reconciler.round(is_due=True)
        # What was handed to other threads is done.
        self.reconciler._expiry._pool.submit(lambda: None).result(10.0)
        self.reconciler._orphans._pool.submit(lambda: None).result(10.0)

    def over(self, obj):
        """The object's job has ended and left the state. Returns its id."""
        self.round()
        (job_id,) = self.platform.view().jobs
        self.reconciler.submissions.cancel_job(job_id)
        self.turn()
        assert not self.platform.view().jobs, "it has not left the state"
        return job_id

    def told(self, obj):
        """The newest status of the object."""
        return [status for uid, status in self.cluster.told if uid == uid_of(obj)][-1]

    def applied(self, obj):
        return next(each for each in self.told(obj)["conditions"] if each["type"] == "Applied")

    def kept(self, job_id):
        prefix = f"workloads/{job_id}/"
        return [key.removeprefix(prefix).partition("/")[0] for key in self.store.keys(prefix)]

    def end(self):
        self.reconciler.stop()
        super().end()


@pytest.fixture
def lead(tmp_path, monkeypatch):
    monkeypatch.setattr("springtide.control.upkeep.STAYS_S", 0.0)
    monkeypatch.setattr("springtide.control.upkeep.SNAPSHOT_STEPS", 1)
    monkeypatch.setattr("springtide.service.reconciler.orphans.RETRY_S", 0.0)
    # So that a round can wait for what it began.
    monkeypatch.setattr("springtide.service.reconciler.expiry.MAX_THREADS", 1)
    # The cluster that is played shows no status.
    monkeypatch.setattr("springtide.service.reconciler.status.CACHE_DELAY_S", math.inf)
    cluster, made = Cluster(), []
    monkeypatch.setattr("springtide.service.reconciler.controller.Objects", lambda *arguments: cluster)

    def lead():
        for before in made:
            before.end()
        made[:] = [Lead(tmp_path, cluster)]
        return made[0]

    yield lead
    made[0].end()


def test_it_is_taken_in_once_and_keeps_its_status_also_under_the_next_control_plane(lead):
    first = lead()
    obj = first.cluster.put(epochs=3)
    job_id = first.over(obj)
    for _ in range(2):
        first.round()
    assert first.told(obj)["state"] == "CANCELLED"
    num_told = len(first.cluster.told)
    second = lead()
    second.turn()
    for _ in range(2):
        second.round()
    assert second.platform.view().ended.count() == 1
    assert not second.platform.view().jobs, "it was taken in again"
    assert len(second.cluster.told) == num_told + 1, "its status is not written, or without need"
    assert (second.told(obj)["state"], second.told(obj)["workloadId"]) == ("CANCELLED", job_id)
    second.cluster.change(obj, epochs=4)
    second.cluster.see(obj)
    second.round()
    assert "it has ended (CANCELLED)" in second.applied(obj)["message"]
    # Another object of its name is another job.
    second.cluster.vanish(obj)
    again = second.cluster.put(epochs=3)
    second.round()
    assert [job.job.container.owner_uid for job in second.platform.view().jobs.values()] == [uid_of(again)]


def test_it_expires_with_what_its_job_has_left_and_then_retention_drops_the_job(lead):
    serving = lead()
    obj = serving.cluster.put(ttlKeeps="nothing")
    job_id = serving.over(obj)
    assert serving.platform.view().ended.owned() == [(job_id, uid_of(obj))]
    serving.turn()
    assert serving.platform.view().ended.get(job_id) is not None, "its object is there"
    assert "source" in serving.kept(job_id)
    serving.cluster.change(obj, ttlSecondsAfterFinished=0)
    serving.cluster.see(obj)
    serving.round()
    assert (KIND, ("ml", "digits")) not in serving.cluster.server
    assert serving.kept(job_id) == ["head"]
    serving.cluster.cached.clear()
    serving.round()
    assert serving.platform.view().ended.owned() == []
    serving.turn()
    assert serving.platform.view().ended.get(job_id) is None


def test_what_a_job_leaves_whose_object_is_deleted_afterwards_goes_in_its_time(lead):
    serving = lead()
    obj = serving.cluster.put(ttlSecondsAfterFinished=1000)
    job_id = serving.over(obj)
    serving.round()
    serving.cluster.vanish(obj)
    serving.round()
    ended = serving.platform.view().ended
    assert ("source" in serving.kept(job_id), ended.owned()) == (True, [(job_id, uid_of(obj))])
    assert serving.platform.source_store.head(job_id).departure is not None
    obj = serving.cluster.put(ttlSecondsAfterFinished=0)
    other_id = serving.over(obj)
    serving.cluster.vanish(obj)
    serving.round()
    serving.round()
    assert serving.kept(other_id) == ["head"]
    assert ended.owned() == [(job_id, "u1")]


def test_an_object_whose_jobs_record_was_changed_waits_and_the_others_go_on(lead, caplog):
    first = lead()
    obj = first.cluster.put()
    job_id = first.over(obj)
    first.platform._journal.query("UPDATE ended SET record = substr(record, 1, 40)")
    second = lead()
    second.turn()
    other = second.cluster.put(name="other")
    with caplog.at_level(logging.WARNING):
        second.round()
    assert [job.job.name for job in second.platform.view().jobs.values()] == ["other"]
    assert f"the record of {job_id}, which has ended, was changed" in caplog.text
    assert second.told(other)["state"] == "PENDING"
