"""Who gets the devices that no promise needs now."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.rival_platform import counts, look, make_view
from kits.solvers.reservations import verify
from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.resources import Topology, make_node
from springtide.core.workload import JobState, WorkloadId
from springtide.scheduling.policies.springtide.market import Market
from springtide.scheduling.policies.springtide.memory import costs_of, entry_of
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.solvers.reservations.reservation_table import ReservationTable

CLUSTER = Topology(nodes=(make_node("n0", 8),))
DEVICES = CLUSTER.device_ids()
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
FLAT = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.15}


class World:
    """A reservation table on eight devices, and jobs in it and outside of it."""

    def __init__(
        self,
        promised: tuple = (),
        outside: tuple = (),
        held: Mapping[str, int] | None = None,
        decided: Mapping[str, tuple] | None = None,
    ) -> None:
        self.decided = dict(decided or {})
        allocations, first = {}, 0
        for job_id, count in (held or {}).items():
            allocations[WorkloadId(job_id)] = PoolAllocation(device_ids=DEVICES[first : first + count])
            first += count
        self.snapshot = Snapshot(now_s=0.0, cluster=CLUSTER, jobs=(*promised, *outside), allocations=allocations)
        costs = costs_of(self.snapshot.overheads, 8)
        self.table = ReservationTable(len(DEVICES), 0.0, costs)
        self.table.begin(0.0, costs, 100_000)
        for view in promised:
            row = PromiseRow(view)
            assert self.table.admit(entry_of(row, row.steps_left(0.0, 0), since_s=0.0))
        self.rows = [PromiseRow(view) for view in outside]
        self.by_id = {view.job.job_id: PromiseRow(view) for view in (*promised, *outside)}

    def market(self, num_surplus: int = 0, kept: Mapping[str, int] | None = None, efficiency: float = 0.0) -> Market:
        return Market(
            self.table,
            self.rows,
            self.by_id,
            self.snapshot,
            num_surplus,
            dict(kept or {}),
            self.decided,
            efficiency=efficiency,
        )

    def share(
        self,
        *,
        num_surplus: int = 0,
        num_kept_idle: int = 0,
        kept: Mapping[str, int] | None = None,
        efficiency: float = 0.0,
    ) -> dict[str, int]:
        """The devices of every job after one choice."""
        market = self.market(num_surplus, kept, efficiency)
        market.share_reserved(num_kept_idle)
        assert verify(self.table) == []
        counts = market.share_outside((), num_surplus)
        assert sum(counts.values()) <= self.table.profile.at(0.0) + num_surplus
        return {**{key: entry.size_at(0.0) for key, entry in self.table.entries.items()}, **counts}


def test_every_job_runs_before_any_gets_more() -> None:
    views = tuple(make_view(f"j{index}", steps=1000, profile=LINEAR) for index in range(5))
    assert set(World(outside=views).share()) == {f"j{index}" for index in range(5)}
    crowd = World(outside=tuple(make_view(f"j{index}", steps=1000, profile=LINEAR) for index in range(12)))
    assert crowd.share() == {f"j{index}": 1 for index in range(8)}


def test_a_job_that_holds_devices_runs_before_one_that_waits() -> None:
    views = tuple(make_view(f"j{index}", steps=1000, profile=LINEAR) for index in range(9))
    assert "j8" in World(outside=views, held={"j8": 1}).share()


def test_a_promised_job_grows_only_where_it_gains_more_than_others() -> None:
    for profile, others in ((FLAT, LINEAR), (LINEAR, FLAT)):
        promised = make_view("promised", steps=4000, deadline_s=100_000.0, profile=profile)
        counts = World((promised,), tuple(make_view(name, steps=4000, profile=others) for name in "ab")).share()
        assert counts["promised"] <= 2 if profile is FLAT else counts["promised"] >= 4
        assert sum(counts.values()) == 8


def test_devices_that_bring_little_stay_idle_where_each_has_to_bring_something() -> None:
    falling = {1: 1.0, 2: 1.6, 4: 2.4, 8: 3.2}
    promised = make_view("promised", steps=4000, deadline_s=100_000.0, profile=falling)
    other = make_view("other", steps=4000, profile=falling)
    for efficiency, most in ((0.0, 8), (0.3, 8), (0.5, 4), (0.7, 2), (0.9, 1), (1.0, 1)):
        assert World((promised,)).share(efficiency=efficiency) == {"promised": most}
        assert World(outside=(other,)).share(efficiency=efficiency) == {"other": most}
    assert World(outside=(other,), held={"other": 4}).share(efficiency=0.65) == {"other": 4}, (
        "it keeps what is nearly enough"
    )
    assert World(outside=(replace(other, job=replace(other.job, profile_steps_per_s=LINEAR)),)).share(
        efficiency=1.0
    ) == {"other": 8}
    with pytest.raises(InvalidRequest, match=r"between 0 and 1, not 1\.5"):
        Springtide(efficiency=1.5)


def test_more_devices_have_to_save_time_that_is_worth_their_price() -> None:
    # Eight bring 0.83 of what one brings; but four are nearly twice as slow at 0.9 of the price.
    for eight, most_held in ((6.6, 4), (6.75, 8)):
        rates = {1: 1.0, 2: 1.94, 4: 3.67, 8: eight}
        promised = make_view("promised", steps=4000, deadline_s=100_000.0, profile=rates)
        other = make_view("other", steps=4000, profile=rates)
        assert World((promised,)).share(efficiency=0.8) == {"promised": 4}
        assert World(outside=(other,)).share(efficiency=0.8) == {"other": 4}
        assert World(outside=(other,), held={"other": 8}).share(efficiency=0.8) == {"other": most_held}
        assert World(outside=(other,)).share(efficiency=0.7) == {"other": 8}


def test_a_job_that_moves_does_not_keep_its_old_devices_beside_the_new_ones() -> None:
    falling = {1: 1.0, 2: 1.6, 4: 2.4, 8: 3.2}
    job, efficiency = make_view("moved", steps=4000, profile=falling), 0.65
    assert World(outside=(job,), held={"moved": 4}).share(efficiency=efficiency) == {"moved": 4}
    moving = World(outside=(job,), held={"moved": 4}, decided={"moved": DEVICES[2:4]})
    assert moving.share(efficiency=efficiency) == {"moved": 2}
    growing = World(outside=(job,), held={"moved": 2}, decided={"moved": DEVICES[:4]})
    assert growing.market(efficiency=efficiency)._bids[0].has == 2, "what it is still to get is a change"
    # The same by the whole policy, also where its devices are all it could use.
    policy = Springtide(efficiency=efficiency)
    first = look(policy, [job])
    assert counts(first) == {"moved": 2}
    running = replace(job, state=JobState.RUNNING, num_replicas=2)
    plan = look(
        policy, [running, make_view("other", profile=falling)], held={"moved": (6, 7, 0, 1)}, memory=first.memory
    )
    assert counts(plan)["moved"] == 2


def test_a_promised_job_gives_back_what_it_does_not_need_but_keeps_its_deadline() -> None:
    promised = make_view("promised", steps=4000, deadline_s=100_000.0, profile=FLAT)
    world = World((promised,), tuple(make_view(f"j{index}", steps=1000, profile=LINEAR) for index in range(7)))
    entry = world.table.entries["promised"]
    assert world.table.enlarge(entry, 8, min_effort=0)
    counts = world.share()
    assert counts["promised"] == 1
    assert sum(counts.values()) == 8
    tight = World((make_view("promised", steps=4000, deadline_s=1100.0, profile=LINEAR),))
    entry = tight.table.entries["promised"]
    assert tight.table.least_size(entry) == entry.size_at(0.0) == 4


def test_devices_kept_idle_and_those_that_no_promise_may_use_go_to_other_jobs_only() -> None:
    promised = make_view("promised", steps=4000, deadline_s=100_000.0, profile=LINEAR)
    assert World((promised,)).share()["promised"] == 8
    assert World((promised,)).share(num_kept_idle=4)["promised"] == 4
    outside = make_view("free", steps=4000, profile=LINEAR)
    world = World((promised,), (outside,))
    world.table.set_capacity(2)
    counts = world.share(num_surplus=6)
    assert counts["promised"] <= 2
    assert counts["free"] >= 4


def test_a_job_that_is_measured_keeps_its_devices_but_not_from_one_that_could_not_run() -> None:
    measured = make_view("measured", steps=4000, deadline_s=100_000.0, profile=FLAT)
    for number, expected in ((0, 8), (1, 4)):
        others = tuple(make_view(f"j{index}", steps=1000, profile=LINEAR) for index in range(number))
        world = World((measured,), others)
        assert world.table.enlarge(world.table.entries["measured"], 8, min_effort=0)
        assert world.share(kept={"measured": 8})["measured"] == expected


def test_a_soft_deadline_has_the_fewest_devices_that_make_it() -> None:
    soft = make_view("soft", steps=4000, deadline_s=1100.0, profile=LINEAR)
    soft = replace(soft, job=replace(soft.job, goal=replace(soft.job.goal, is_soft=True)))
    others = tuple(make_view(f"j{index}", steps=100_000, profile=LINEAR) for index in range(4))
    assert World(outside=(*others, soft)).share()["soft"] >= 4


@pytest.mark.parametrize(("num_waiting", "kept"), [(2, 4), (5, 2), (6, 1)])
def test_a_deadline_pursued_in_vain_keeps_its_devices_but_not_from_jobs_that_could_not_run(num_waiting, kept) -> None:
    """It takes none from others: as in the reservation table, where a late job keeps its size."""
    late = measured("late", 10.0, {4: 40.0}, num_replicas=4)
    short = make_view("short", steps=10, profile=LINEAR)
    others = tuple(make_view(f"j{index}", steps=10, profile=LINEAR) for index in range(num_waiting))
    shares = World(outside=(late, short, *others), held={"late": 4, "short": 1}).share()
    assert shares["late"] == kept
    best_effort = measured("late", None, {4: 40.0}, num_replicas=4)
    assert World(outside=(best_effort, short, *others), held={"late": 4, "short": 1}).share()["late"] < 4


def test_a_job_that_cannot_be_resized_keeps_what_it_holds() -> None:
    rigid = make_view("rigid", steps=100_000, most=4, elastic=False, profile=LINEAR)
    others = tuple(make_view(f"j{index}", steps=10, profile=LINEAR) for index in range(8))
    assert World(outside=(rigid, *others), held={"rigid": 4}).share()["rigid"] == 4


def test_nothing_changes_for_less_than_a_change_costs() -> None:
    short = make_view("short", steps=3, profile=LINEAR)
    world = World(outside=(short,), held={"short": 1})
    costs = world.table.costs
    world.table.costs = costs._replace(now=lambda n: 100.0, later=[100.0] * len(costs.later))
    assert world.share() == {"short": 1}


def values_of(market: Market) -> dict[str, dict[int, float]]:
    """What each size of each bid is worth, by the market's own weights."""
    weighted = market._weigh()[:, None] * market._all_worth
    return {
        bid.job_id: {0: 0.0} | {int(n): float(v) for n, v in zip(market._all_sizes[i], weighted[i], strict=True) if n}
        for i, bid in enumerate(market._bids)
    }


def value_at(values: Mapping[int, float], count: int) -> float:
    return max(value for n, value in values.items() if n <= count)


def steps_along_hull(points: Mapping[int, float]) -> list[float]:
    """What each unit adds along the upper hull of these points."""
    line = [
        max(
            points[a] + (points[b] - points[a]) * (x - a) / (b - a) if b > a else points[a]
            for a in points
            for b in points
            if a <= x <= b
        )
        for x in range(max(points) + 1)
    ]
    rising = [max(line[: x + 1]) for x in range(len(line))]
    return [after - before for before, after in pairwise(rising)]


JOBS = st.lists(
    st.tuples(st.integers(50, 5000), st.floats(0.3, 1.0), st.sampled_from((0, 1, 2, 4))), min_size=1, max_size=6
)


@settings(max_examples=30)
@given(jobs=JOBS, num_promised=st.integers(0, 2))
def test_the_price_is_what_the_last_device_is_worth_and_changes_are_told_as_they_were_weighed(jobs, num_promised):
    views, held = [], {}
    for index, (steps, power, count) in enumerate(jobs):
        rates = {n: n**power for n in (1, 2, 4, 8)}
        due_s = 1e6 if index < num_promised else None
        views.append(make_view(f"j{index}", steps=steps, profile=rates, deadline_s=due_s, state=JobState.RUNNING))
        if index >= num_promised and 0 < count <= 8 - num_promised - sum(held.values()):
            held[f"j{index}"] = count
    world = World(tuple(views[:num_promised]), tuple(views[num_promised:]), held)
    market = world.market()
    spare = market._spare - market._num_floors
    market.share_reserved(0)
    price_s = market.price_s
    values = values_of(market)
    units = sorted(
        step
        for bid in market._bids
        for step in steps_along_hull(
            {
                n - bid.floor: value - value_at(values[bid.job_id], bid.floor)
                for n, value in values[bid.job_id].items()
                if n >= bid.floor
            }
            | {0: 0.0}
        )
    )
    units.reverse()
    if price_s:
        assert price_s == pytest.approx(units[max(spare, 1) - 1])
    else:
        assert sum(unit > 1e-12 for unit in units) <= spare
    given_counts = market.share_outside((), 0)
    counts = {**{key: entry.size_at(0.0) for key, entry in world.table.entries.items()}, **given_counts}
    placed = {who: PoolAllocation(device_ids=DEVICES[:count]) for who, count in counts.items() if count}
    trades = market.trades(world.snapshot, placed)
    assert {who: trade.num_devices for who, trade in trades.items()} == {
        who: counts.get(who, 0) - n for who, n in held.items() if counts.get(who, 0) != n
    }
    for who, trade in trades.items():
        if trade.here_s is not None:
            gained = value_at(values[who], counts.get(who, 0)) - value_at(values[who], held[who])
            assert trade.here_s == pytest.approx(gained / trade.num_devices)
        if trade.num_devices < 0 and trade.there_s is not None:
            rise = {w: counts[w] - held.get(w, 0) for w in trade.to}
            gain = sum(value_at(values[w], counts[w]) - value_at(values[w], held.get(w, 0)) for w in rise)
            assert min(rise.values()) > 0
            assert trade.there_s == pytest.approx(gain / sum(rise.values()))
    if not num_promised and len(held) == len(views) and market._weights is not None:
        # To leave everything as it was would have been worth no more.
        assert sum(value_at(values[w], counts[w]) - value_at(values[w], held[w]) for w in held) >= -1e-9


def measured(name: str, deadline_s: float | None, speeds: Mapping[int, float], *, num_replicas: int):
    """A job without a profile that has run for 25 s, at these speeds in samples a second."""
    view = make_view(name, steps=20_000, most=4, profile={}, deadline_s=deadline_s)
    known = {"throughput_samples_per_s": speeds, "resized_at_s": 0.0, "progress_at_s": 25.0, "started_at_s": 0.0}
    return with_fields(view, state=JobState.RUNNING, num_replicas=num_replicas, step=25, **known)


def test_devices_have_a_price_where_jobs_would_be_faster_with_more_than_they_can_have() -> None:
    held = {"first": [0, 1], "other": [2, 3]}
    for other in (measured("other", None, {2: 60.0}, num_replicas=2), make_view("other", steps=20_000, most=4)):
        first = measured("first", 40_000.0, {2: 60.0}, num_replicas=2)
        plan = look(Springtide(), [first, other], slots=4, held=held, now_s=25.0)
        # A promise counts on the measured workers alone, and no more than the other two are left for the other job.
        assert (counts(plan), set(plan.admitted)) == ({"first": 2, "other": 2}, {"first"})
        assert plan.price_s > 0.0
    # One that waits for devices that promises have would gain by them, too.
    due = make_view("due", steps=380, most=4, deadline_s=100.0)
    plan = look(Springtide(), [due, make_view("best", steps=100)], slots=4)
    assert counts(plan) == {"due": 4}
    assert plan.price_s > 0.0
    assert look(Springtide(), [make_view("best", steps=100, least=2)], slots=1).price_s > 0.0


def test_who_loses_devices_is_told_who_has_them_and_why_they_are_worth_more_there() -> None:
    slow = make_view("slow", steps=5000, profile=FLAT, state=JobState.RUNNING)
    first = look(Springtide(), [slow])
    assert counts(first) == {"slow": 8}
    held = {"slow": list(range(8))}
    short = make_view("short", steps=100, profile=LINEAR)
    plan = look(Springtide(), [slow, short], held=held, memory=first.memory)
    trade = plan.trades["slow"]
    assert (trade.num_devices, trade.to) == (counts(plan)["slow"] - 8, ("short",))
    assert plan.price_s > 0.0
    assert trade.there_s > trade.here_s > 0.0
    assert plan.reasons["slow"] == (
        f"'short' gains more by {-trade.num_devices} devices: a device-second saves all jobs "
        f"{trade.there_s:.2g} s there, {trade.here_s:.2g} s here"
    )
    # Where nobody wants the devices that are left they are worth nothing.
    narrow = make_view("narrow", steps=100, most=1)
    assert look(Springtide(), [narrow]).price_s == 0.0
    # A claim is no matter of prices.
    due = make_view("due", steps=760, deadline_s=100.0, profile=LINEAR)
    plan = look(Springtide(), [slow, due], held=held, memory=first.memory)
    assert plan.trades["slow"].there_s is None
    assert plan.reasons["slow"] == "'due' needs 8 devices for a promised deadline"


def test_a_claim_explains_only_the_devices_that_it_takes() -> None:
    slow = make_view("slow", steps=5000, profile=FLAT, state=JobState.RUNNING)
    held = {"slow": list(range(8))}
    due = make_view("due", steps=150, most=2, deadline_s=100.0, profile={1: 1.0, 2: 2.0})
    short = make_view("short", steps=100, profile=LINEAR)
    plan = look(Springtide(), [slow, due, short], held=held, memory=look(Springtide(), [slow]).memory)
    given, trade = counts(plan), plan.trades["slow"]
    assert (trade.to, trade.num_to, given["due"]) == (("due",), 2, 2)
    assert trade.num_devices == given["slow"] - 8 < -2
    assert plan.reasons["slow"] == "'due' needs 2 devices for a promised deadline"


def test_a_late_job_without_a_schedule_counts_in_the_price() -> None:
    views = (make_view("a", steps=1000, least=8, most=8, profile=LINEAR, deadline_s=5000.0),)
    world = World(views)
    (entry,) = world.table.entries.values()
    world.table.change_runs(entry, ())
    market = world.market(num_surplus=-1)
    market.share_reserved(0)
    assert market.price_s > 0.0
    assert not entry.runs
