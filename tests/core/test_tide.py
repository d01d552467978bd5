"""What is remembered of the need for serving devices: the highest of each bin, and no more than a month."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.core.tide import MAX_DAYS, Tide


def test_each_bin_keeps_its_highest_need_and_starts_from_the_level_before() -> None:
    tide = Tide(day_s=40.0, bins_per_day=4)
    for at_s, needed in ((0.0, 1), (3.0, 5), (9.0, 2), (12.0, 1), (20.0, 4)):
        tide = tide.noted(at_s, needed)
    # Bin 1 begins with the 2 that were needed when bin 0 ended.
    assert (tide.first_bin, tide.peaks) == (0, (5, 2))
    assert (tide.open_bin, tide.peak, tide.level) == (2, 4, 4)


def test_a_day_of_another_length_begins_with_what_is_needed_now() -> None:
    tide, wanted = Tide(day_s=40.0, bins_per_day=4).noted(0.0, 1).noted(25.0, 2), Tide(day_s=8.0, bins_per_day=4)
    assert tide.as_long_as(Tide(day_s=40.0, bins_per_day=4), 26.0) is tide
    found = tide.as_long_as(wanted, 26.0)
    assert found == Tide(day_s=8.0, bins_per_day=4, first_bin=13, peak=2, level=2)
    assert Tide().as_long_as(wanted, 26.0) == wanted


def test_without_updates_the_last_level_holds() -> None:
    tide = Tide(day_s=40.0, bins_per_day=4).noted(5.0, 7).noted(6.0, 3).noted(45.0, 3)
    assert tide.peaks == (7, 3, 3, 3)
    assert tide.peak == 3


def test_nothing_new_is_the_same_object() -> None:
    tide = Tide(day_s=40.0, bins_per_day=4).noted(5.0, 7)
    assert tide.noted(6.0, 7) is tide
    assert tide.noted(6.0, 6) is not tide


def test_the_first_note_opens_its_own_bin() -> None:
    tide = Tide(day_s=40.0, bins_per_day=4).noted(95.0, 2)
    assert (tide.first_bin, tide.peaks, tide.open_bin) == (9, (), 9)


def test_no_more_than_a_month_is_remembered() -> None:
    tide = Tide(day_s=4.0, bins_per_day=4).noted(0.0, 1).noted(1_000_000.0, 2)
    assert len(tide.peaks) == 4 * MAX_DAYS
    assert tide.open_bin == 1_000_000


@given(st.floats(10.0, 100_000.0), st.integers(1, 200), st.integers(0, 100_000))
def test_a_bin_is_over_where_the_next_begins(day_s: float, bins_per_day: int, number: int) -> None:
    tide = Tide(day_s=day_s, bins_per_day=bins_per_day)
    assert tide.bin_at(number * tide.bin_s) == number


def test_the_clock_is_the_one_that_people_read() -> None:
    tide = Tide(midnight_s=-3 * 3600.0).noted(0.0, 1)
    assert tide.clock(0.0) == "03:00"
    assert tide.clock(22 * 3600.0) == "01:00"


@given(
    st.lists(
        st.tuples(st.floats(0.0, 30.0, allow_nan=False), st.integers(0, 50)),
        min_size=1,
        max_size=40,
    )
)
def test_the_open_bin_is_the_one_of_the_last_note_and_no_need_is_lost(gaps: list[tuple[float, int]]) -> None:
    tide, now_s, highest = Tide(day_s=40.0, bins_per_day=8), 0.0, 0
    for gap_s, needed in gaps:
        now_s += gap_s
        tide = tide.noted(now_s, needed)
        highest = max(highest, needed)
    assert tide.open_bin == tide.bin_at(now_s)
    assert max((*tide.peaks, tide.peak)) == highest
    assert tide.level == gaps[-1][1]
