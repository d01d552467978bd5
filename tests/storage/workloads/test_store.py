"""A workload's objects: what the head names counts, and a writer of an older generation cannot change that."""

from __future__ import annotations

import json
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from springtide.core.errors import Fenced, ObjectMissing, StorageError
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.store import WorkloadStore, open_workload_store

JOB = WorkloadId("job")


@pytest.fixture(params=["memory", "file", "s3"])
def url(request, tmp_path):
    name = f"workloads-{os.getpid()}-{secrets.token_hex(4)}"
    if request.param == "s3":
        request.getfixturevalue("s3_credentials")
        return request.getfixturevalue("s3_server").s3_url("tests", name)
    return f"memory://{name}" if request.param == "memory" else f"file://{tmp_path}/objects"


def lines(first, last, generation=1):
    def after(step):
        return [
            (number, json.dumps({"generation": generation, "step": number, "loss": number / 10}))
            for number in range(max(first, step + 1), last + 1)
        ]

    return after


def files(directory, text):
    path = directory / "model.safetensors"
    path.write_text(text)
    return {"model.safetensors": path}


def all_keys(store):
    return [key.removeprefix(store.prefix) for key in store.store.keys(store.prefix)]


@pytest.mark.slow
def test_of_all_who_replace_one_version_exactly_one_gets_through(url):
    store = open_store(url)
    assert store.get_version("a/number") is None
    assert store.replace("a/number", b"0", "") is not None
    assert store.replace("a/number", b"5", "") is None
    start = threading.Barrier(6)

    def add(count):
        start.wait()
        handle, mine = open_store(url), 0
        while mine < count:
            data, version = handle.get_version("a/number")
            mine += handle.replace("a/number", str(int(data) + 1).encode(), version) is not None
        handle.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, [5] * 6))
    assert store.get("a/number") == b"30"
    assert store.replace("a/number", b"31", "an older version") is None
    store.delete(["a/number"])
    store.close()


def test_a_store_without_versions_says_what_to_use():
    store = open_store(f"shm://{secrets.token_hex(6)}")
    with pytest.raises(StorageError, match="use s3://"):
        WorkloadStore(store, JOB).head()
    store.close()


def test_files_go_up_and_come_down_whole(url, tmp_path, monkeypatch):
    monkeypatch.setattr("springtide.storage.stores.s3.PART_BYTES", 5 << 20)
    store = open_store(url)
    for name, size in (("empty", 0), ("small", 1000), ("in-parts", (12 << 20) + 7)):
        data = os.urandom(size)
        (tmp_path / name).write_bytes(data)
        store.put_file(f"files/{name}", tmp_path / name)
        store.get_file(f"files/{name}", tmp_path / f"{name}.back")
        assert (tmp_path / f"{name}.back").read_bytes() == data
    with pytest.raises(ObjectMissing):
        store.get_file("files/none", tmp_path / "none")
    store.delete(store.keys("files/"))
    store.close()


def test_a_checkpoint_counts_when_it_is_whole_and_two_are_kept(url, tmp_path):
    store = open_workload_store(url, JOB)
    assert store.checkpoints() == ()
    for step in (10, 20, 30):
        store.publish_checkpoint(1, step, files(tmp_path, f"step {step}"))
    newest, older = store.checkpoints()
    assert (newest.generation, newest.step, newest.path) == (1, 30, "workloads/job/checkpoints/00000001-0000000030")
    assert (older.step, newest.num_bytes) == (20, len("step 30"))
    directory = store.fetch_checkpoint(newest, ["model.safetensors"], tmp_path / "back")
    assert (directory / "model.safetensors").read_text() == "step 30"
    # What was uploaded and never named is no checkpoint, and goes with the next one that is.
    store.store.put(store.key("checkpoints", "00000001-0000000040", "model.safetensors"), b"half")
    assert len(store.checkpoints()) == 2
    store.publish_checkpoint(2, 41, files(tmp_path, "step 41"))
    assert all_keys(store) == [
        "checkpoints/00000001-0000000030/model.safetensors",
        "checkpoints/00000002-0000000041/model.safetensors",
        "head",
    ]
    store.remove()
    assert all_keys(store) == []


class _Sleeper:
    """Stands for a store whose user is stopped just before the swap of the head, and woken by the test."""

    def __init__(self, store):
        self._store = store
        self.at_the_swap = threading.Event()
        self.may_go_on = threading.Event()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def replace(self, key, data, version):
        self.at_the_swap.set()
        assert self.may_go_on.wait(30)
        return self._store.replace(key, data, version)


@pytest.mark.parametrize("what", ["checkpoint", "steps", "artifact"])
def test_a_writer_that_slept_until_it_was_fenced_changes_nothing_that_counts(url, tmp_path, what):
    owner = open_workload_store(url, JOB)
    owner.publish_checkpoint(1, 10, files(tmp_path, "good"))
    owner.log_steps(1, lines(1, 10))
    owner.publish_artifact("model.safetensors", b"good", 1, 10)
    sleeper = _Sleeper(open_store(url))
    late = WorkloadStore(sleeper, JOB)
    write = {
        "checkpoint": lambda: late.publish_checkpoint(1, 20, files(tmp_path, "late")),
        "steps": lambda: late.log_steps(1, lines(1, 20)),
        "artifact": lambda: late.publish_artifact("model.safetensors", b"late", 1, 20),
    }[what]
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        assert sleeper.at_the_swap.wait(30)
        before = owner.head()
        owner.raise_fence(2)
        sleeper.may_go_on.set()
        with pytest.raises(Fenced, match="generation 2 owns"):
            written.result(30)
    after = owner.head()
    assert after.generation == 2
    assert (after.checkpoints, after.logged, after.artifacts) == (before.checkpoints, before.logged, before.artifacts)
    assert [kept.step for kept in owner.checkpoints()] == [10]
    assert [record["step"] for record in owner.steps()] == list(range(1, 11))
    assert owner.read_artifact("model.safetensors") == b"good"
    with pytest.raises(Fenced):
        write()
    owner.remove()


def test_a_lower_fence_changes_nothing(url):
    store = open_workload_store(url, JOB)
    store.raise_fence(5)
    store.raise_fence(3)
    assert open_workload_store(url, JOB).head().generation == 5
    store.remove()


def test_the_step_log_holds_each_step_once_whichever_worker_led(url):
    first, second = open_workload_store(url, JOB), open_workload_store(url, JOB)
    assert first.log_steps(1, lines(1, 7)) == 7
    assert first.log_steps(1, lines(1, 7)) == 7
    # The second leads next and remembers more than the log lacks; the first had logged on meanwhile.
    assert second.log_steps(2, lines(5, 9, generation=2)) == 9
    with pytest.raises(Fenced):
        first.log_steps(1, lines(1, 12))
    assert second.log_steps(2, lines(5, 12, generation=2)) == 12
    steps = second.steps()
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert [record["generation"] for record in steps] == [1] * 7 + [2] * 5
    second.remove()


def test_two_who_log_the_same_steps_at_once_are_one(url):
    start = threading.Barrier(4)

    def log(last):
        start.wait()
        return open_workload_store(url, JOB).log_steps(3, lines(1, last, generation=3))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(log, (10, 11, 12, 12)))
    store = open_workload_store(url, JOB)
    assert [record["step"] for record in store.steps()] == list(range(1, 13))
    store.remove()


def test_who_finds_a_part_written_by_one_that_died_over_it_writes_the_rest(url):
    store = open_workload_store(url, JOB)
    assert store.log_steps(1, lines(1, 1)) == 1
    text = "".join(f"{line}\n" for _, line in lines(2, 15)(1))
    store.store.put(store.key("steps", "00000001-0000000002.jsonl"), text.encode())
    assert store.log_steps(1, lines(1, 40)) == 40
    assert [record["step"] for record in store.steps()] == list(range(1, 41))
    store.remove()


def test_steps_done_again_from_a_checkpoint_count_as_they_were_done_last(url):
    store = open_workload_store(url, JOB)
    store.log_steps(1, lines(1, 20))
    assert store.log_steps(2, lines(11, 14, generation=2), after=10) == 14
    assert store.log_steps(2, lines(11, 25, generation=2), after=10) == 25
    steps = store.steps()
    assert [record["step"] for record in steps] == list(range(1, 26))
    assert [record["generation"] for record in steps] == [1] * 10 + [2] * 15
    store.remove()


class _Deaf:
    """Stands for a network that loses the answers to some writes, although the writes succeed."""

    def __init__(self, store):
        self._store = store
        self.num_lost = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def replace(self, key, data, version):
        replaced = self._store.replace(key, data, version)
        self.num_lost += 1
        if self.num_lost % 2 and replaced is not None:
            raise StorageError("the answer was lost")
        return replaced


def test_a_swap_whose_answer_was_lost_is_found_out(url, tmp_path):
    store = WorkloadStore(_Deaf(open_store(url)), JOB)
    for step in (1, 2, 3):
        store.publish_checkpoint(1, step, files(tmp_path, "x"))
        store.log_steps(1, lines(1, step))
    assert [kept.step for kept in store.checkpoints()] == [3, 2]
    assert [record["step"] for record in store.steps()] == [1, 2, 3]
    store.remove()


def test_a_later_version_of_an_artifact_takes_the_place_of_the_older_one(url):
    store = open_workload_store(url, JOB)
    with pytest.raises(ObjectMissing, match=r"no artifact model\.safetensors"):
        store.read_artifact("model.safetensors")
    store.publish_artifact("model.safetensors", b"one", 1, 5)
    key = store.publish_artifact("model.safetensors", b"two", 2, 9)
    assert store.artifacts() == {"model.safetensors": key}
    assert store.read_artifact("model.safetensors") == b"two"
    assert all_keys(store) == ["artifacts/00000002-0000000009/model.safetensors", "head"]
    store.remove()


def test_source_and_logs(url, tmp_path):
    store = open_workload_store(url, JOB)
    main = store.put_source("0123abcd/train.py", b"import helper\n")
    store.put_source("0123abcd/helper.py", b"x = 1\n")
    store.put_source("other/train.py", b"an older one\n")
    path = store.fetch_source(main, tmp_path)
    assert path == tmp_path / "source/0123abcd/train.py"
    assert path.read_text() == "import helper\n"
    assert (path.parent / "helper.py").read_text() == "x = 1\n"
    assert not (tmp_path / "source/other").exists()
    assert store.fetch_source("workloads/job/source/0123abcd/none.py", tmp_path) is None
    store.put_source("plain.py", b"y = 2\n")
    assert store.fetch_source("/somewhere/else/plain.py", tmp_path).read_text() == "y = 2\n"
    store.put_log(ReplicaId("job.1"), b"hello\n")
    assert store.read_log(ReplicaId("job.1")) == b"hello\n"
    store.remove()
    assert all_keys(store) == []
