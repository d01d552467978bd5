"""Our strategy of loans: what is kept free ahead of a need, who is taken from, what promises may count on, and why."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from springtide.core.decision import JobView, Overheads, PoolAllocation, ServiceView, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.job_parts import JobBounds, JobProgress
from springtide.core.resources import DeviceId, Topology, make_node
from springtide.core.tide import Tide
from springtide.core.workload import Checkpoint, Entrypoint, Goal, InferenceService, JobState, TrainingJob, WorkloadId
from springtide.scheduling.loans.losses import BROKEN_PROMISE, Losses
from springtide.scheduling.loans.outlook import (
    Coming,
    DemandOutlook,
    capacity_of,
    needed_lately,
    needed_now,
    outlook_of,
)
from springtide.scheduling.loans.pools import pool_state
from springtide.scheduling.loans.reasons import loaned_text
from springtide.scheduling.loans.tide import TideStrategy

# A day of 24 bins of an hour: 8 devices are needed by night, 16 from 08:00 to 20:00.
HOUR_S = 3600.0
DAY = (8,) * 8 + (16,) * 12 + (8,) * 4


def tide_at(hour, *, num_days=4, day=DAY):
    """The tide at that hour of the day after so many days, all alike."""
    whole = int(hour)
    peaks = (day * num_days) + day[:whole]
    level = day[whole]
    return Tide(day_s=24 * HOUR_S, bins_per_day=24, peaks=peaks, peak=level, level=level)


def job(name, *, low=4, high=4, elastic=False, steps_left=1000.0, held=4, kind="function", **more):
    """A job that runs at a step a second on 4 devices, reported at second 0 of the snapshot."""
    given = TrainingJob(
        job_id=WorkloadId(name),
        name=name,
        entrypoint=Entrypoint(source_path="fit.py", kind=kind),
        min_workers=low,
        max_workers=high,
        num_virtual_shards=64,
        elastic=elastic,
        total_steps=100_000,
        profile_steps_per_s={1: 0.25, 2: 0.5, 4: 1.0, 8: 2.0},
        requested_workers=high,
        goal=more.pop("goal", Goal()),
    )
    plain = JobView(
        job=given,
        state=JobState.RUNNING if held else JobState.PENDING,
        submitted_at_s=0.0,
        total_steps=100_000,
        started_at_s=more.pop("started_at_s", 0.0),
        bounds=JobBounds(min_workers=low, max_workers=high),
        progress=JobProgress(step=int(100_000 - steps_left)),
    )
    return with_fields(plain, **more)


class Scene:
    """Four servers of 4 devices, two of them inference's; who holds which."""

    def __init__(self, hour, *, labels="ttii", num_days=4, day=DAY, isolates_devices=False):
        self.now_s = (num_days * 24 + hour) * HOUR_S
        self.tide = tide_at(hour, num_days=num_days, day=day)
        self.pools = {"t": "training", "i": "inference", "s": "shared"}
        self.labels = labels
        self.isolates_devices = isolates_devices
        self.held, self.jobs, self.services = {}, [], []

    def run(self, view, *servers, count=4):
        """A job holds devices of these servers, or waits."""
        self.jobs.append(with_fields(view, progress_at_s=self.now_s))
        if servers:
            self._hold(view.job.job_id, [f"n{server}/{index}" for server in servers for index in range(count)])
        return self

    def serve(self, needed, *devices, low=0, high=16):
        """A service with a minimum, a load that needs so many replicas, and ready ones on these devices."""
        service = InferenceService(
            service_id=WorkloadId("ask"), name="ask", entrypoint=Entrypoint(source_path="ask.py"), target_in_flight=1
        )
        self.services.append(
            ServiceView(service=service, min_replicas=low, max_replicas=high, num_ready=len(devices), in_flight=needed)
        )
        self._hold(service.service_id, list(devices))
        return self

    def _hold(self, who, devices):
        if devices:
            self.held[who] = PoolAllocation(device_ids=tuple(DeviceId(device) for device in devices))

    def state(self):
        """The pools as a strategy sees them."""
        owners = ("training", "training", "inference", "inference")
        made = [
            replace(
                make_node(f"n{number}", 4, pool=self.pools[label], isolates_devices=self.isolates_devices), home=owner
            )
            for number, (label, owner) in enumerate(zip(self.labels, owners, strict=True))
        ]
        return pool_state(
            Snapshot(
                now_s=self.now_s,
                cluster=Topology(nodes=tuple(made)),
                jobs=tuple(self.jobs),
                services=tuple(self.services),
                allocations=self.held,
                overheads=Overheads(change_s=10.0),
                tide=self.tide,
            )
        )

    def choose(self, **parameters):
        """What the strategy wants: server -> label, and the servers that are reclaimed."""
        strategy = TideStrategy(**parameters)
        state = self.state()
        verdict = strategy.choose(state)
        assert strategy.choose(state) == verdict
        return {str(node_id): relabel.pool for node_id, relabel in verdict.pools.items()}, verdict


LOW = (4,) * 8 + (8,) * 12 + (4,) * 4


def test_an_idle_server_is_lent_when_nobody_will_need_it_for_long():
    scene = Scene(22, day=LOW).serve(4, *[f"n2/{i}" for i in range(4)]).run(job("wants", held=0, steps_left=3600))
    labels, verdict = scene.choose()
    assert labels == {"n3": "training"}
    assert verdict.pools["n3"].reason.startswith("forecast needs 4 of 16 whole devices for the next")


def test_a_server_that_is_needed_before_the_next_job_would_be_done_is_not_lent():
    # 07:30: the peak begins in half an hour, the job would take two hours.
    def scene(seconds):
        found = Scene(7, day=LOW).serve(4, *[f"n2/{i}" for i in range(4)]).run(job("wants", held=0, steps_left=seconds))
        found.now_s += HOUR_S / 2
        return found

    assert scene(7200).choose()[0] == {}
    assert scene(7200).choose(ahead=False)[0] == {"n3": "training"}
    # One that would be done by then may have it, and so may one that can be shrunk off it again.
    assert scene(600).choose()[0] == {"n3": "training"}
    elastic = Scene(7, day=LOW).serve(4, *[f"n2/{i}" for i in range(4)])
    elastic.run(job("wants", held=0, low=1, high=8, elastic=True, steps_left=7200))
    elastic.now_s += HOUR_S / 2
    assert elastic.choose()[0] == {"n3": "training"}


def test_ahead_of_a_need_the_server_whose_jobs_end_in_time_is_freed_and_nobody_is_stopped():
    scene = Scene(7, labels="ttit", day=LOW).serve(4, *[f"n2/{i}" for i in range(4)])
    scene.run(job("ends", steps_left=900), 3, count=2).run(job("waits", held=0, steps_left=7200))
    scene.now_s += HOUR_S / 2
    labels, verdict = scene.choose()
    assert labels == {"n3": "inference"}
    assert not verdict.reclaimed
    assert verdict.pools["n3"].reason == "forecast needs 4 more devices in 30m00"
    assert verdict.revisit_at_s == scene.now_s + HOUR_S / 2
    assert scene.choose(ahead=False)[0] == {}


def test_a_missing_minimum_takes_the_server_on_which_least_work_is_lost():
    saved = Checkpoint(generation=1, step=98_990, path="c")
    scene = Scene(3, labels="tttt").serve(0, low=4)
    scene.run(job("script", kind="script"), 0)
    scene.run(job("fresh", kind="script", checkpoint=saved), 1)
    scene.run(job("older", kind="script"), 2).run(job("oldest", kind="script"), 3)
    labels, verdict = scene.choose(ahead=False)
    assert labels == {"n1": "inference"}
    assert verdict.reclaimed == {"n1"}
    assert verdict.pools["n1"].reason == (
        "taken back for 'ask', which has 0 of its guaranteed 4 replicas: stops 'fresh'"
    )
    # FaPES's gain and no choice at all see no difference: they take the first.
    assert scene.choose(ahead=False, victims="gain")[0] == {"n2": "inference"}
    assert scene.choose(ahead=False, victims="any")[0] == {"n2": "inference"}


def test_a_job_that_can_shrink_makes_way_before_any_is_stopped():
    scene = Scene(3, labels="tttt").serve(0, low=4)
    scene.run(job("rigid"), 0).run(job("wide", low=2, high=8, elastic=True), 1, 2).run(job("other"), 3)
    labels, verdict = scene.choose(ahead=False)
    assert list(labels.values()) == ["inference"]
    assert set(labels) <= {"n1", "n2"}
    (relabel,) = verdict.pools.values()
    assert relabel.reason.endswith("shrinks 'wide' from 8 to 4, stops nobody")
    assert set(scene.choose(ahead=False, shrink=False)[0]) <= {"n0", "n3"}


def test_a_promise_is_broken_only_if_there_is_no_other_choice():
    goal = Goal(deadline_s=Scene(3).now_s + 1005.0)
    promised = job("promised", goal=goal, promised_finish_s=Scene(3).now_s + 1000.0)
    scene = Scene(3, labels="ttti").serve(4, *[f"n3/{i}" for i in range(4)], low=8)
    scene.run(promised, 0).run(job("script", kind="script"), 1).run(job("script-2", kind="script"), 2)
    assert "n0" not in scene.choose(ahead=False)[0]
    losses = Losses(scene.state(), away_s=0.0, shrinks=True)
    assert losses.victim(scene.jobs[0]).stop_cost > BROKEN_PROMISE
    assert losses.victim(scene.jobs[1]).stop_cost < BROKEN_PROMISE


def test_what_is_lost_is_the_work_since_the_last_checkpoint_unless_one_can_be_taken():
    scene = Scene(0, labels="tttt")
    scene.run(job("function"), 0).run(job("script", kind="script", checkpoint=None), 1)
    scene.run(job("saved", kind="script", checkpoint=Checkpoint(generation=1, step=98_900, path="c")), 2)
    losses = Losses(scene.state(), away_s=0.0, shrinks=True)
    assert [losses.work_s(view) for view in scene.jobs] == [0.0, 99_000.0, 100.0]
    assert [losses.left_s(view) for view in scene.jobs] == [1000.0] * 3
    assert losses.victim(scene.jobs[2]).stop_cost == 4 * (100.0 + 10.0)


def test_growth_leaves_training_its_own_servers_and_a_minimum_may_take_them():
    grown = Scene(3, labels="ttii").serve(12, *[f"n{s}/{i}" for s in (2, 3) for i in range(4)])
    grown.run(job("a"), 0).run(job("b"), 1)
    assert grown.choose()[0] == {}
    assert needed_now(grown.state()) == 8
    least = Scene(3, labels="ttii").serve(12, *[f"n{s}/{i}" for s in (2, 3) for i in range(4)], low=12)
    least.run(job("a"), 0).run(job("b"), 1)
    assert list(least.choose()[0].values()) == ["inference"]


def test_what_was_needed_a_moment_ago_is_not_lent_at_once():
    scene = Scene(3, day=LOW).serve(4, *[f"n2/{i}" for i in range(4)]).run(job("wants", held=0))
    assert scene.choose(ahead=False)[0] == {"n3": "training"}
    scene.tide = scene.tide.noted(scene.now_s, 8).noted(scene.now_s, 4)
    assert needed_lately(scene.state()) == 8
    assert scene.choose(ahead=False)[0] == {}


def test_before_a_day_is_known_only_what_is_needed_now_counts_and_promises_count_on_nothing_lent():
    scene = Scene(5, num_days=0, day=LOW).serve(4, *[f"n2/{i}" for i in range(4)], high=16)
    scene.run(job("wants", held=0))
    labels, verdict = scene.choose()
    assert labels == {"n3": "training"}
    assert "nothing is forecast yet" in verdict.pools["n3"].reason
    (only,) = TideStrategy().capacity(scene.state(), verdict)
    assert only.num_devices == 8


def test_promises_count_on_loaned_servers_until_the_highest_days_need_them():
    scene = Scene(22, labels="ttit", day=LOW).serve(4, *[f"n2/{i}" for i in range(4)]).run(job("runs"), 3)
    strategy = TideStrategy()
    state = scene.state()
    capacity = strategy.capacity(state, strategy.choose(state))
    assert capacity[0].num_devices == 12
    assert capacity[0].from_s == scene.now_s
    fall = next(each for each in capacity if each.num_devices == 8)
    # The peak is at 08:00, may come an hour early, and servers are freed up to two hours before.
    assert scene.now_s + 5 * HOUR_S <= fall.from_s <= scene.now_s + 9 * HOUR_S
    assert min(each.num_devices for each in capacity) == 8
    assert [each.from_s for each in capacity] == sorted({each.from_s for each in capacity})
    assert capacity_of(state, None, 12, 4, 0.0)[0].num_devices == 8


def test_a_part_of_a_server_is_lent_where_devices_are_isolated():
    def scene(**more):
        return Scene(3, labels="ttii", day=(2,) * 24, **more).serve(2, "n2/0", "n2/1").run(job("wants", held=0))

    assert scene(isolates_devices=True).choose()[0] == {"n2": "shared", "n3": "training"}
    assert scene(isolates_devices=True).choose(fractions=False)[0] == {"n3": "training"}
    assert scene().choose()[0] == {"n3": "training"}


def test_a_tide_that_begins_later_than_asked_asks_for_nothing_before():
    outlook = DemandOutlook(steps=(Coming(in_s=60.0, num_devices=4, expected=3, until_s=3660.0),), is_known=True)
    assert [outlook.within(span_s) for span_s in (0.0, 59.0, 60.0)] == [0, 0, 4]


def test_nothing_is_forecast_where_nobody_serves():
    scene = Scene(3).run(job("a"), 0)
    assert TideStrategy().forecast(scene.state()) is None
    outlook = outlook_of(scene.state(), None, 3600.0)
    assert not outlook.is_known
    assert outlook.within(math.inf) == 0
    assert "nothing is forecast" in loaned_text(scene.state(), outlook)
    # Its one job holds all that it can use.
    assert scene.choose()[0] == {}


@pytest.mark.parametrize("victims", ["loss", "gain", "any"])
def test_the_same_is_chosen_whatever_was_asked_before(victims):
    strategy = TideStrategy(victims=victims)
    for hour in (22, 7, 3, 22):
        scene = Scene(hour, day=LOW).serve(4, *[f"n2/{i}" for i in range(4)]).run(job("wants", held=0))
        assert strategy.choose(scene.state()) == TideStrategy(victims=victims).choose(scene.state())


def test_a_quantile_that_is_none_is_refused():
    with pytest.raises(InvalidRequest, match="quantile"):
        TideStrategy(quantile=1.0)
