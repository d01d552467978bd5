"""What a schedule has to be, what prices do to it, and that it goes on from where the job is."""

from __future__ import annotations

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.solvers.schedule_planning import (
    Board,
    DevicePlan,
    RoundDemand,
    Servers,
    Shapes,
    plan_job,
    round_lengths,
    unit_prices,
)

SIZES = np.array([2, 4, 6, 8, 12, 16])


def servers(num_switches=2, per_switch=2, capacity=8):
    number = np.arange(num_switches * per_switch)
    switches = np.stack([number // per_switch, np.zeros_like(number)], axis=1)
    return Servers(capacity=np.full(len(number), capacity), switches=switches)


def demand(work, *, power=0.8, near=0.9, far=0.5, sizes=SIZES, **more):
    alone = sizes.astype(float) ** power
    rates = np.stack([alone, alone * near, alone * (near + far) / 2, alone * far, alone * far / 2], axis=1)
    return RoundDemand(work=work, sizes=sizes, rates=rates, unit=2, **more)


def board(low=100.0, high=20_000.0, *, of=None, num_rounds=24):
    return Board(of or servers(), round_lengths(600.0, 600.0, num_rounds), 600.0, low=low, high=high)


def work_done(schedule: DevicePlan, lengths_s, ends_s):
    """The work of a schedule up to its end, without what changes cost."""
    starts_s = np.concatenate(([0.0], np.cumsum(lengths_s)))
    done = 0.0
    for stretch in schedule.stretches:
        done += stretch.rate * (min(starts_s[stretch.last + 1], ends_s) - starts_s[stretch.first])
    return done


def test_rounds_are_single_ones_first_and_cover_the_horizon():
    lengths_s = round_lengths(100.0, 600.0, 144)
    assert lengths_s[0] == 100.0
    assert set(lengths_s[1:13]) == {600.0}
    assert lengths_s.sum() >= 144 * 600.0
    assert len(lengths_s) < 50


def test_an_idle_cluster_starts_a_job_at_once_and_does_exactly_its_work():
    load_board = board()
    found = plan_job(load_board, demand(5000.0))
    assert found is not None
    assert found.stretches[0].first == 0
    assert work_done(found, load_board.lengths_s, found.finish_s) == pytest.approx(5000.0)
    assert found.price > 0.0


def test_planning_leaves_the_board_alone_and_booking_is_undone_exactly():
    load_board = board()
    before = load_board.load.copy()
    found = plan_job(load_board, demand(9000.0))
    assert found is not None
    assert (load_board.load == before).all()
    load_board.book(found)
    assert load_board.load.sum() > 0
    load_board.book(found, sign=-1)
    assert (load_board.load == before).all()


def test_what_is_expensive_is_left_to_others_and_what_is_cheap_is_used():
    thrifty = plan_job(board(low=600.0), demand(4000.0))
    generous = plan_job(board(low=1.0), demand(4000.0))
    assert thrifty is not None
    assert generous is not None
    assert generous.stretches[0].size > thrifty.stretches[0].size
    assert generous.finish_s < thrifty.finish_s


def test_a_full_server_is_never_used_and_a_full_cluster_is_waited_for():
    load_board = board(low=1.0, high=10.0)
    for number in range(2):
        load_board.take(number, ((0, 8), (1, 8), (2, 8), (3, 8)))
    load_board.take(2, ((0, 8),))
    found = plan_job(load_board, demand(3000.0))
    assert found is not None
    assert found.stretches[0].first == 2
    assert all(server != 0 for server, _ in found.stretches[0].placed)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_ever_given_more_than_a_server_has(seed):
    rng = np.random.default_rng(seed)
    load_board = board(low=float(rng.uniform(1.0, 300.0)), high=5000.0)
    for _ in range(12):
        found = plan_job(load_board, demand(float(rng.uniform(100.0, 30_000.0)), power=float(rng.uniform(0.3, 1.0))))
        if found is not None:
            load_board.book(found)
            assert all(stretch.size in SIZES for stretch in found.stretches)
            assert all(a.last < b.first for a, b in zip(found.stretches, found.stretches[1:], strict=False))
    assert (load_board.load <= 8).all()


def test_at_equal_prices_a_job_is_kept_below_one_switch():
    found = plan_job(board(low=1.0, high=2.0), demand(60_000.0, sizes=np.array([16])))
    assert found is not None
    assert {server // 2 for server, _ in found.stretches[0].placed} in ({0}, {1})


def test_a_running_job_goes_on_where_it_is_and_grows_on_the_cheapest():
    load_board = board(low=1.0, high=50.0)
    for number in range(len(load_board.lengths_s)):
        load_board.take(number, ((0, 4),))
    found = plan_job(load_board, demand(40_000.0, held=((3, 8),), setup_s=30.0))
    assert found is not None
    assert (3, 8) in found.stretches[0].placed


def test_a_running_job_does_not_move_for_a_lower_price_alone():
    load_board = board()
    for number in range(len(load_board.lengths_s)):
        load_board.take(number, ((3, 6),))
    found = plan_job(load_board, demand(1000.0, sizes=np.array([2]), held=((3, 2),)))
    assert found is not None
    assert {stretch.placed for stretch in found.stretches} == {((3, 2),)}


def test_growing_and_shrinking_keep_what_is_kept():
    load_board = board(low=1.0, high=600.0)
    # Half of two servers is taken for two rounds: it is cheap to grow after them.
    for number in range(2):
        load_board.take(number, ((0, 8), (1, 8), (2, 6)))
    found = plan_job(load_board, demand(60_000.0, held=((3, 8),)))
    assert found is not None
    assert len(found.stretches) > 1
    for before, after in zip(found.stretches, found.stretches[1:], strict=False):
        small, large = sorted((dict(before.placed), dict(after.placed)), key=lambda placed: sum(placed.values()))
        assert all(large.get(server, 0) >= count for server, count in small.items())


def test_shapes_read_their_table():
    place = servers()
    shapes = Shapes(place, demand(1.0))
    alone = 8.0**0.8
    assert shapes.rate_of(((0, 8),)) == pytest.approx(alone)
    assert shapes.rate_of(((0, 4), (1, 4))) < alone
    assert shapes.rate_of(((0, 4), (2, 4))) < shapes.rate_of(((0, 4), (1, 4)))
    assert shapes.cell(((0, 8),)) == (3, 0)
    assert shapes.cell(((0, 8), (2, 8)))[1] == 3


def test_no_size_or_no_speed_is_no_plan():
    assert plan_job(board(), demand(10.0, sizes=np.array([64]))) is None
    still = demand(10.0)
    still.rates[:] = 0.0
    assert plan_job(board(), still) is None


def test_servers_without_a_whole_unit_hide_no_other():
    uneven = Servers(capacity=np.array([1, 1, 5]), switches=np.zeros((3, 1), dtype=np.int64))
    job = RoundDemand(work=10.0, sizes=np.array([2, 4]), rates=np.ones((2, 3)), unit=2)
    found = plan_job(board(of=uneven), job)
    assert found is not None
    assert [server for server, _ in found.stretches[0].placed] == [2]


def test_prices_must_be_prices():
    with pytest.raises(InvalidRequest, match="0 < low <= high"):
        board(low=5.0, high=1.0)


def test_prices_rise_with_the_number_of_jobs_and_never_fall_with_the_load():
    assert unit_prices(1, 128, 600.0) == (600.0 / 128, 600.0)
    assert unit_prices(64, 128, 600.0) == (300.0, 600.0)
    assert unit_prices(500, 128, 600.0)[0] == unit_prices(500, 128, 600.0)[1]
    assert unit_prices(0, 0, 600.0) == (600.0, 600.0)
