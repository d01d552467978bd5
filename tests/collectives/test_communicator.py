"""The communicator among threads on one store: sums, their order, what is left behind, and what goes wrong."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kits.servers import missing_redis, running_redis
from springtide.collectives.communicator import Communicator
from springtide.collectives.schedule import COLLECTIVES
from springtide.core.errors import CollectiveError, InvalidRequest, ObjectMissing, StorageError
from springtide.storage.stores.open import open_store

SEED = 5


class DictStore:
    """A store in memory that wakes waiters, counts requests, and fails on demand."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.failing: set[str] = set()
        self.num_lists = 0
        self.deleted: list[str] = []
        self.order: list[str] = []

    def put(self, key, data):
        if any(word in key for word in self.failing):
            raise StorageError(f"no room for {key}")
        with self.changed:
            assert key not in self.objects, f"{key} was written twice"
            self.objects[key] = bytes(data)
            self.order.append(key)
            self.changed.notify_all()

    def wait(self, key, timeout_s):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.objects, timeout_s):
                raise ObjectMissing(key)
            return self.objects[key]

    def delete(self, keys):
        if "delete" in self.failing:
            raise StorageError("the bucket has vanished")
        with self.changed:
            for key in keys:
                del self.objects[key]
                self.deleted.append(key)

    def keys(self, prefix):
        self.num_lists += 1
        return []


class LateStore(DictStore):
    """Has nothing of ranks 0 and 1 at the first two asks: addends arrive in another order than that of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = Counter()

    def wait(self, key, timeout_s):
        self.num_asked[key, threading.get_ident()] += 1
        if key.endswith((".0", ".1")) and self.num_asked[key, threading.get_ident()] <= 2:
            raise ObjectMissing(key)
        return super().wait(key, timeout_s)


def communicators(store, n, **options):
    return [Communicator(store, rank, n, now_s=time.monotonic, check_s=0.02, **options) for rank in range(n)]


def run_all(ends, inputs, prefix, **options):
    """All ranks' all-reduce at a time; the first error, if any, is raised."""
    values = [array.copy() for array in inputs]
    with ThreadPoolExecutor(len(ends)) as pool:
        futures = [
            pool.submit(end.all_reduce, value, prefix, **options) for end, value in zip(ends, values, strict=True)
        ]
        reports = [future.result() for future in futures]
    return values, reports


def drawn(n, size, dtype=np.float32):
    draws = np.random.default_rng(SEED)
    # Magnitudes differ, so that any other order of addition gives other bits.
    return [(draws.standard_normal(size) * 10.0 ** draws.integers(-6, 6, size)).astype(dtype) for _ in range(n)]


def in_rank_order(inputs):
    total = inputs[0].copy()
    for array in inputs[1:]:
        total += array
    return total


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_sums_are_those_of_rank_order_bit_for_bit(name, n):
    for size, chunks, in_flight, dtype in ((1, 1, 1, np.float32), (3, 2, 4, np.float64), (1001, 3, 4, np.float32)):
        inputs = drawn(n, size, dtype)
        ends = communicators(DictStore(), n, collective=name, num_chunks=chunks, num_in_flight=in_flight)
        values, _ = run_all(ends, inputs, "g/1.0/1")
        for value in values:
            assert value.tobytes() == in_rank_order(inputs).tobytes()


def test_the_order_of_arrival_changes_nothing():
    inputs = drawn(4, 400)
    values, _ = run_all(communicators(LateStore(), 4, num_chunks=2), inputs, "p")
    assert all(value.tobytes() == in_rank_order(inputs).tobytes() for value in values)
    # The check is worth something only if order matters for these numbers.
    assert in_rank_order(inputs[::-1]).tobytes() != in_rank_order(inputs).tobytes()


def test_a_mean_is_the_sum_divided():
    inputs = drawn(4, 57)
    values, _ = run_all(communicators(DictStore(), 4), inputs, "p", mean=True)
    assert all(np.array_equal(value, in_rank_order(inputs) * np.float32(0.25)) for value in values)


def test_nothing_at_all_is_reduced_to_nothing():
    store = DictStore()
    values, reports = run_all(communicators(store, 3), drawn(3, 0), "p")
    assert all(value.size == 0 for value in values)
    assert store.order == []
    assert reports[0].bytes_up == 0


def test_the_report_says_what_moved():
    _, reports = run_all(communicators(DictStore(), 4, num_chunks=2), drawn(4, 800), "p")
    for report in reports:
        assert (report.num_puts, report.num_gets) == (3 * 2 + 2, 2 * 3 * 2)
        assert (report.bytes_up, report.bytes_down) == (3200, 4800)
        assert report.took_s >= 0


@pytest.mark.parametrize("name", COLLECTIVES)
def test_objects_that_all_ranks_have_read_are_deleted_without_a_list(name):
    store = DictStore()
    ends = communicators(store, 3, collective=name, num_chunks=2)
    for step in range(4):
        run_all(ends, drawn(3, 30), f"wire/{step}")
    for end in ends:
        end.flush()
    assert store.num_lists == 0
    assert len(store.deleted) == len(set(store.deleted))
    # Everything of all but the last one is gone, and of the last one what a single rank has read.
    kept = "raw" if name == "all-to-all" else "sum"
    assert all(key.startswith(f"wire/3/{kept}/") for key in store.objects)
    assert {key.split("/")[1] for key in store.deleted} >= {"0", "1", "2"}


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_any_number_of_shards_gives_the_same_sum(num_shards):
    inputs = drawn(3, 101)
    store = DictStore()
    values, reports = run_all(communicators(store, 3, collective="smlt", num_shards=num_shards), inputs, "p")
    assert all(value.tobytes() == in_rank_order(inputs).tobytes() for value in values)
    assert {key.split("/")[2] for key in store.order if "/sum/" in key} == {str(s) for s in range(num_shards)}
    assert sum(report.num_puts for report in reports) == num_shards * 4


def test_everyone_reads_everyone_with_all_to_all():
    store = DictStore()
    _, reports = run_all(communicators(store, 4, collective="all-to-all", num_chunks=2), drawn(4, 800), "p")
    for report in reports:
        assert (report.num_puts, report.num_gets) == (2, 6)
        assert (report.bytes_up, report.bytes_down) == (3200, 9600)


def test_shards_that_cannot_be_are_refused():
    with pytest.raises(InvalidRequest, match="-1 shards are not possible"):
        communicators(DictStore(), 3, collective="smlt", num_shards=-1)


def test_sums_of_ranks_that_were_not_heard_from_stay():
    """In an all-reduce of one element only its owner hears from everyone: the others' old sums stay until later."""
    store = DictStore()
    ends = communicators(store, 3)
    run_all(ends, drawn(3, 30), "a")
    run_all(ends, drawn(3, 1), "b")
    for end in ends:
        end.flush()
    kept = {key for key in store.objects if key.startswith("a/")}
    assert kept
    run_all(ends, drawn(3, 30), "c")
    for end in ends:
        end.flush()
    assert not {key for key in store.objects if key.startswith(("a/", "b/"))}


def test_a_successor_cleans_up_what_its_predecessor_left():
    store = DictStore()
    ends = communicators(store, 3)
    run_all(ends, drawn(3, 30), "a")
    for end in ends:
        end.flush()
    ends[1] = communicators(store, 3)[1]
    ends[1].take_over("a", 30)
    run_all(ends, drawn(3, 30), "b")
    for end in ends:
        end.flush()
    assert all(key.startswith("b/sum/") for key in store.objects)


def test_an_error_of_any_thread_is_raised_at_once():
    store = DictStore()
    store.failing.add("raw/2")
    end = communicators(store, 3)[0]
    with pytest.raises(StorageError, match=r"no room for p/raw/2\.0\.0"):
        end.all_reduce(drawn(3, 30)[0], "p")


def test_an_object_of_another_size_is_refused():
    store = DictStore()
    store.put("p/raw/0.0.1", b"abc")
    with pytest.raises(StorageError, match="holds 3 bytes where 60 were expected"):
        communicators(store, 2)[0].all_reduce(np.ones(30, np.float32), "p")


class Clock:
    """A clock that goes on by five milliseconds at every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.005
        return self.now_s


def test_an_abandoned_one_ends_and_leaves_the_values_alone():
    store = DictStore()
    clock = Clock()
    asked_at_s = []

    def abandon():
        asked_at_s.append(clock.now_s)
        return len(asked_at_s) == 3

    values = np.ones(30, np.float32)
    end = Communicator(store, 0, 2, now_s=clock, check_s=0.02)
    with pytest.raises(CollectiveError, match="abandoned"):
        end.all_reduce(values, "p", abandon=abandon)
    assert len(asked_at_s) == 3
    assert asked_at_s[2] - asked_at_s[1] <= 0.04
    # What arrives late is not written into an array that has gone on to something else.
    store.put("p/raw/0.0.1", np.full(15, 7.0, np.float32).tobytes())
    store.put("p/sum/1.0", np.full(15, 7.0, np.float32).tobytes())
    for thread in threading.enumerate():
        if thread.name.startswith("sync-"):
            thread.join(timeout=10)
    assert np.array_equal(values, np.ones(30, np.float32))


def test_what_abandon_raises_is_raised():
    class Superseded(Exception):
        pass

    def abandon():
        raise Superseded

    with pytest.raises(Superseded):
        Communicator(DictStore(), 0, 2, now_s=Clock(), check_s=0.02).all_reduce(
            np.ones(8, np.float32), "p", abandon=abandon
        )


def test_a_deadline_says_what_was_missing():
    end = Communicator(DictStore(), 0, 3, now_s=Clock(), check_s=0.02, num_in_flight=1)
    with pytest.raises(CollectiveError, match=r"still waiting for raw/0\.0\.2 under p"):
        end.all_reduce(np.ones(9, np.float32), "p", timeout_s=0.1)


def test_a_new_attempt_after_an_abandoned_one_is_right():
    store = DictStore()
    ends = communicators(store, 3, num_chunks=2)
    with pytest.raises(CollectiveError):
        ends[0].all_reduce(drawn(3, 30)[0], "a.0/5", abandon=lambda: True)
    inputs = drawn(3, 30)
    values, _ = run_all(ends, inputs, "a.1/5")
    assert all(value.tobytes() == in_rank_order(inputs).tobytes() for value in values)


def test_a_failed_delete_is_raised_by_the_next_call():
    store = DictStore()
    ends = communicators(store, 2)
    store.failing.add("delete")
    run_all(ends, drawn(2, 8), "a")
    with pytest.raises(StorageError, match="vanished"):
        ends[0].flush()
    ends[0].flush()
    for deletion in ends[1]._deletions:
        deletion.join()
    with pytest.raises(StorageError, match="vanished"):
        ends[1].all_reduce(np.ones(8, np.float32), "b")


def test_a_delete_that_hangs_delays_no_rank():
    store = DictStore()
    gate = threading.Event()
    delete = store.delete
    store.delete = lambda keys: gate.wait() and delete(keys)
    ends = communicators(store, 2)
    for step in range(3):
        inputs = drawn(2, 8)
        values, _ = run_all(ends, inputs, f"p/{step}")
        assert values[0].tobytes() == in_rank_order(inputs).tobytes()
    gate.set()
    for end in ends:
        end.flush()
    assert len(store.deleted) == 3 * 2 * 2


@pytest.mark.parametrize(
    "values",
    [np.ones((2, 2), np.float32), np.ones(8, np.float32)[::2], np.ones(4, np.int32), np.broadcast_to(np.float32(1), 4)],
)
def test_arrays_that_cannot_be_summed_in_place_are_refused(values):
    with pytest.raises(InvalidRequest, match="one-dimensional, contiguous, writable array of floats"):
        communicators(DictStore(), 2)[0].all_reduce(values, "p")


@pytest.mark.parametrize("options", [{"num_in_flight": 0}, {"num_chunks": 0}, {"collective": "ring"}])
def test_settings_that_cannot_be_are_refused(options):
    with pytest.raises(InvalidRequest):
        communicators(DictStore(), 2, **options)


@pytest.mark.slow
def test_a_redis_that_dies_is_said_in_a_sentence_and_the_next_one_serves():
    reason = missing_redis()
    if reason:
        pytest.skip(reason)
    inputs = drawn(2, 400_000)
    with running_redis() as server:
        store = open_store(server.redis_url)
        ends = communicators(store, 2, num_chunks=4)
        values, _ = run_all(ends, inputs, "p/0")
        with ThreadPoolExecutor(1) as pool:
            lonely = pool.submit(ends[0].all_reduce, inputs[0].copy(), "p/1")
            # It has put its parts and waits for those of a rank that does not come.
            store.wait("p/1/raw/1.3.0", 10.0)
            server.kill()
            with pytest.raises(StorageError, match="does not answer"):
                lonely.result()
        store.close()
    with running_redis() as server:
        store = open_store(server.redis_url)
        again, _ = run_all(communicators(store, 2, num_chunks=4), inputs, "p/2")
        store.close()
    assert again[1].tobytes() == values[0].tobytes() == in_rank_order(inputs).tobytes()
