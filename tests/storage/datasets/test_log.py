"""Who waits for a stream pays one small read a look, sees every append, and is told when it is gone."""

from __future__ import annotations

import pytest

from kits.storage.dataset_arrays import append
from springtide.core.errors import ObjectMissing, StorageError
from springtide.storage.datasets.log import LOOKS_PER_CHECK, DatasetLog, StreamWatch, view_of
from springtide.storage.datasets.store import close_dataset, remove_dataset
from springtide.storage.stores.open import memory_store


@pytest.fixture
def store():
    return memory_store()


def test_a_view_is_two_small_reads(store):
    append(store, 0, 5)
    before = store.requests()
    view = view_of(DatasetLog(store, "clicks").read())
    after = store.requests()
    assert (view.name, view.num_samples, view.is_closed) == ("clicks", 5, False)
    assert (after.num_gets - before.num_gets, after.num_misses - before.num_misses) == (2, 1)


def test_the_rate_is_that_of_the_newest_appends_and_falls_while_none_come(store):
    append(store, 0, 40, at_unix_s=1000.0)
    assert view_of(DatasetLog(store, "clicks").read()).arrivals_per_s == 0.0
    append(store, 40, 60, at_unix_s=1002.0)
    append(store, 60, 100, at_unix_s=1006.0)
    assert view_of(DatasetLog(store, "clicks").read()).arrivals_per_s == 10.0
    assert view_of(DatasetLog(store, "clicks").read(), 1005.0).arrivals_per_s == 10.0
    assert view_of(DatasetLog(store, "clicks").read(), 1060.0).arrivals_per_s == 1.0
    for first in range(100, 200):
        append(store, first, first + 1, at_unix_s=2000.0 + first)
    assert view_of(DatasetLog(store, "clicks").read()).arrivals_per_s == 1.0
    # Clocks of several writers may disagree.
    append(store, 200, 201, at_unix_s=5.0)
    assert view_of(DatasetLog(store, "clicks").read()).arrivals_per_s == 0.0


def test_a_watch_asks_once_a_look_and_misses_nothing(store):
    with pytest.raises(ObjectMissing, match="there is no dataset 'clicks'"):
        StreamWatch(store, "clicks").look()
    append(store, 0, 5)
    watch = StreamWatch(store, "clicks")
    assert watch.look().num_samples == 5
    before = store.requests().num_gets
    assert watch.look().num_samples == 5
    assert store.requests().num_gets - before == 1
    append(store, 5, 6)
    append(store, 6, 9)
    assert watch.look().num_samples == 9
    close_dataset(store, "clicks", at_unix_s=2000.0, part_id="c")
    assert watch.look().is_closed
    before = store.requests().num_gets
    assert watch.look().is_closed
    assert store.requests().num_gets == before


@pytest.mark.parametrize("is_put_anew", [False, True])
def test_a_stream_that_vanishes_is_noticed_and_named(store, is_put_anew):
    append(store, 0, 5)
    append(store, 5, 6)
    watch = StreamWatch(store, "clicks")
    watch.look()
    remove_dataset(store, "clicks")
    if is_put_anew:
        append(store, 0, 1, part_id="anew")
    for _ in range(LOOKS_PER_CHECK - 1):
        assert watch.look().num_samples == 6
    with pytest.raises(StorageError, match="the stream 'clicks' has vanished") as caught:
        watch.look()
    assert "\n" not in str(caught.value)
