"""Who gets the devices that no promise needs now."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from kits.scheduling.rival_platform import make_view
from springtide.core.decision import PoolAllocation, Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.workload import WorkloadId
from springtide.scheduling.policies.springtide.market import Market
from springtide.scheduling.policies.springtide.memory import costs_of, entry_of
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.solvers.reservations.reservation_table import ReservationTable, verify

CLUSTER = Topology(nodes=(make_node("n0", 8),))
DEVICES = CLUSTER.device_ids()
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
FLAT = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.15}


class World:
    """A reservation table on eight devices, and jobs in it and outside of it."""

    def __init__(self, promised: tuple = (), outside: tuple = (), held: Mapping[str, int] | None = None) -> None:
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

    def share(
        self, *, num_surplus: int = 0, num_kept_idle: int = 0, kept: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """The devices of every job after one choice."""
        market = Market(self.table, self.rows, self.snapshot, num_surplus, dict(kept or {}))
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
