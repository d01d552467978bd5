"""What pods wrote while the object store was away comes into it later, once, and nothing of the past does."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest

from kits.service.cluster_double import ClusterDouble
from springtide.backends.kubernetes.client.kinds import key_of
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.control.journal.ended import EndedJob
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.workload import ReplicaId
from springtide.service.logs.upload import MAX_WAIT_S, LogUploader
from springtide.service.reconciler.admission import ResourceAdmission
from springtide.service.submission.source_stores import ObjectSources
from springtide.service.submission.submission import SubmissionService
from springtide.storage.step_lines import gap_line, pack_lines
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore
from springtide.storage.workloads.store import WorkloadStore


def lines_of(generation, first, last):
    return [(step, json.dumps({"generation": generation, "step": step})) for step in range(first, last + 1)]


class House:
    def __init__(self, platform, folder):
        self.platform = platform
        self.store = CheckedStore(FileStore(folder, is_durable=False))
        platform.source_store = ObjectSources(self.store, platform.state_dir)
        self.cluster = ClusterDouble()
        self.submissions = SubmissionService(platform)
        admission = ResourceAdmission(self.submissions, platform, self.cluster, KubernetesSettings(name="ml-platform"))
        obj = self.cluster.put(workers="1..2", epochs=3)
        self.job_id = admission.submit_job(self.cluster.read("TrainingFunction", key_of(obj))).workload_id
        platform.run_job(self.job_id)
        self.kept = WorkloadStore(self.store, self.job_id)
        self.uploader = LogUploader(platform)

    @property
    def generation(self):
        return self.platform.view().jobs[self.job_id].group.generation

    def follow(self, replica="job.0", text="said\n", lines=(), *, has_ended=True):
        """What stands here once the pod's output has been followed."""
        path = self.platform.workload_dir(self.job_id) / "logs" / f"{replica}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if lines:
            path.with_suffix(".steps").write_text("".join(f"{line}\n" for line in pack_lines(lines)))
        if has_ended:
            path.with_suffix(".ended").touch()
        self.uploader.add(self.job_id, ReplicaId(replica))
        return path

    def end(self):
        self.submissions.cancel_job(self.job_id)
        self.platform.stop_replicas(self.job_id)

    def waits(self, replica="job.0"):
        return (self.job_id, replica) in self.uploader._waiting

    def log(self, replica="job.0"):
        try:
            return self.kept.read_log(ReplicaId(replica)).decode()
        except ObjectMissing:
            return None

    def steps(self):
        return [(record["step"], record["generation"]) for record in WorkloadStore(self.store, self.job_id).steps()]


@pytest.fixture
def house(platform, tmp_path):
    return House(platform, tmp_path / "objects")


def test_an_output_that_its_pod_could_not_keep_comes_when_the_store_is_back(house, monkeypatch, caplog):
    path = house.follow()

    def away(*_, **__):
        raise StorageError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(house.store, "put_if_absent", away)
        house.uploader.upload_waiting()
        house.uploader.upload_waiting()
    assert house.log() is None
    assert caplog.text.count("what pods wrote waits for the store: nobody answers") == 1
    house.uploader.upload_waiting()
    assert house.log() == "said\n"
    assert not path.with_suffix(".ended").exists()
    assert house.uploader._waiting == {}


def test_what_the_pod_has_kept_itself_stays(house):
    house.kept.put_log(ReplicaId("job.0"), b"all that was said\n")
    house.follow()
    house.uploader.upload_waiting()
    assert house.log() == "all that was said\n"


def test_an_output_is_waited_for_until_it_is_whole(house):
    path = house.follow(has_ended=False)
    house.uploader.upload_waiting()
    assert house.log() is None
    path.write_text("said\nand more\n")
    path.with_suffix(".ended").touch()
    house.uploader.upload_waiting()
    assert house.log() == "said\nand more\n"
    house.follow("job.1", has_ended=False)
    house.platform.clock_s += MAX_WAIT_S + 1.0
    house.uploader.upload_waiting()
    assert house.uploader._waiting == {}
    assert house.log("job.1") is None


def test_the_step_log_is_made_whole_also_of_a_job_that_has_left_the_state(house, tmp_path):
    generation = house.generation
    house.kept.log_steps(generation, lambda step: lines_of(generation, step + 1, 10))
    house.follow(lines=lines_of(generation, 8, 20))
    house.end()
    with contextlib.closing(SqliteJournal(tmp_path / "journal.db")) as journal:
        journal.ended.put([EndedJob(record=house.platform.view().jobs[house.job_id])])
        house.platform.current = dataclasses.replace(house.platform.view(), jobs={}, ended=journal.ended)
        house.uploader.upload_waiting()
    assert house.steps() == [(step, generation) for step in range(1, 21)]


def test_the_step_log_is_made_whole_once_the_job_has_ended(house):
    generation = house.generation
    house.kept.log_steps(generation, lambda step: lines_of(generation, step + 1, 10))
    path = house.follow(lines=lines_of(generation, 8, 20))
    house.uploader.upload_waiting()
    # Its other workers may be about to write the same.
    assert house.log() == "said\n"
    assert house.steps() == [(step, generation) for step in range(1, 11)]
    house.end()
    house.uploader.upload_waiting()
    assert house.steps() == [(step, generation) for step in range(1, 21)]
    assert not path.with_suffix(".steps").exists()
    assert not house.waits()


def test_steps_that_were_made_again_since_stay_as_they_were_made_last(house):
    generation = house.generation
    house.kept.log_steps(generation, lambda step: lines_of(generation, step + 1, 10))
    house.follow(lines=lines_of(generation, 8, 20))
    house.kept.raise_fence(generation + 1)
    house.end()
    house.uploader.upload_waiting()
    assert house.steps() == [(step, generation) for step in range(1, 11)]
    assert not house.waits()


def test_a_generation_that_never_was_fences_nobody(house):
    house.follow(lines=lines_of(1 << 60, 1, 5))
    house.end()
    house.uploader.upload_waiting()
    assert house.steps() == []
    assert house.kept.head().generation <= house.generation


def test_what_was_lost_before_it_was_said_is_said_in_the_log(house):
    generation = house.generation
    house.follow(lines=[gap_line(generation, 4, 9), *lines_of(generation, 10, 12)])
    house.kept.log_steps(generation, lambda step: lines_of(generation, step + 1, 5))
    house.end()
    house.uploader.upload_waiting()
    assert [step for step, _ in house.steps()] == [1, 2, 3, 4, 5, 10, 11, 12]
    texts = b"".join(house.store.get(key) for key in house.store.keys(house.kept.key("steps/")))
    assert {"generation": generation, "step": 9, "num_lost": 4} in [json.loads(text) for text in texts.splitlines()]


def test_what_an_earlier_control_plane_has_left_here_is_found(house):
    house.follow(lines=lines_of(house.generation, 1, 3))
    house.end()
    after = LogUploader(house.platform)
    after.add_left_behind()
    after.upload_waiting()
    assert house.log() == "said\n"
    assert [step for step, _ in house.steps()] == [1, 2, 3]


def test_a_job_that_was_retired_meanwhile_comes_back_with_nothing(house):
    house.follow(lines=lines_of(house.generation, 1, 3))
    house.end()
    WorkloadStore(house.store, house.job_id).retire(keeps_artifacts=True)
    house.uploader.upload_waiting()
    assert [key.rpartition("/")[2] for key in house.store.keys(house.kept.prefix)] == ["head"]
    assert not house.waits()


def test_the_news_of_an_end_begins_it_and_the_journal_of_the_past_does_not(house):
    house.submissions.cancel_job(house.job_id)
    replicas = {(house.job_id, replica.replica_id) for replica in house.platform.view().jobs[house.job_id].replicas}
    assert replicas
    house.platform.stop_replicas(house.job_id)
    assert set(house.uploader._waiting) == replicas
    house.platform.clock_s += MAX_WAIT_S + 1.0
    after = LogUploader(house.platform)
    assert after._waiting == {}
