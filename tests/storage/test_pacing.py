"""Pauses grow, part by chance, and end at the deadline; waiting in slices costs what waiting at once does."""

from __future__ import annotations

import itertools

import pytest

from kits.storage.virtual_pace import VirtualTime
from springtide.core.errors import ObjectMissing
from springtide.storage.pacing import Intervals, ask_until, real_pace
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore

INTERVALS = Intervals(first_s=0.025, cap_s=1.0)


def test_pauses_grow_to_the_cap_and_are_drawn_below_their_length():
    lengths = list(itertools.islice(INTERVALS.lengths(lambda: 0.0), 60))
    assert lengths[:3] == pytest.approx([0.025, 0.0275, 0.03025])
    assert lengths[-1] == 1.0
    shortest = list(itertools.islice(INTERVALS.lengths(lambda: 1.0), 60))
    assert shortest == pytest.approx([0.75 * length for length in lengths])


def test_what_comes_is_seen_late_by_at_most_a_tenth_of_the_wait():
    for arrival_s in (0.3, 1.0, 3.0):
        time = VirtualTime()
        answer, asked = ask_until(
            lambda time=time, arrival_s=arrival_s: time.now_s >= arrival_s or None, 60.0, INTERVALS, time.pace()
        )
        assert answer is True
        assert arrival_s <= asked.at_s <= 1.1 * arrival_s + 0.03
        assert asked.at_s <= arrival_s + 1.0


def test_the_last_question_is_at_the_deadline():
    time = VirtualTime()
    asked_at_s = []
    answer, _ = ask_until(lambda: asked_at_s.append(time.now_s), 0.2, INTERVALS, time.pace())
    assert answer is None
    assert asked_at_s[0] == 0.0
    assert asked_at_s[-1] == pytest.approx(0.2)
    assert len(asked_at_s) == 8


def test_no_time_means_one_question_and_no_pause():
    time = VirtualTime()
    ask_until(lambda: None, 0.0, INTERVALS, time.pace())
    assert time.sleeps == []


def test_waiting_in_slices_goes_on_with_the_pauses_where_they_were(tmp_path):
    counts = []
    for slice_s in (20.0, 1.0):
        time = VirtualTime()
        store = CheckedStore(FileStore(tmp_path, pace=time.pace(), intervals=INTERVALS))
        while time.now_s < 20.0 - 1e-6:
            with pytest.raises(ObjectMissing):
                store.wait("never", slice_s)
        counts.append(store.requests().num_gets)
    assert counts[0] < 55
    # One more question at the end of each of 19 slices, instead of 18 in every one of them.
    assert counts[1] <= counts[0] + 20


def test_a_wait_that_begins_later_begins_afresh(tmp_path):
    time = VirtualTime()
    store = CheckedStore(FileStore(tmp_path, pace=time.pace(), intervals=INTERVALS))
    with pytest.raises(ObjectMissing):
        store.wait("key", 10.0)
    time.now_s += 5.0
    time.at(time.now_s + 0.05, lambda: store.put("key", b"x"))
    begun_s = time.now_s
    assert store.wait("key", 10.0) == b"x"
    assert time.now_s - begun_s < 0.1


def test_the_machines_pace_draws_differently():
    pace = real_pace()
    draws = {pace.draw() for _ in range(20)}
    assert len(draws) == 20
    assert all(0.0 <= draw < 1.0 for draw in draws)
