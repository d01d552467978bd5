from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from kits.control.quoting import Reserving, pass_time, platform, random_case, training_job, verdict_of
from kits.simulation.sweeps import part
from springtide.control.quotes.alternatives import readable_s, typed_duration
from springtide.control.quotes.inquiry import changed_job, grown
from springtide.control.quotes.quote import SpeedRange, quote
from springtide.core.decision import Overheads, Snapshot
from springtide.core.events import NodeJoined
from springtide.core.quantities import parse_duration_s
from springtide.core.resources import Topology, make_node
from springtide.core.workload import Entrypoint, Goal
from springtide.scheduling.registry import POLICY_NAMES, make_policy

NAMES_WITH_ADMISSION = ("springtide", "elasticflow", "edf+admission")


def ask(controller, job, now_s=0.0, **options):
    return quote(controller.snapshot(now_s), Reserving(), job, **options)


def test_a_job_that_fits_is_promised_with_its_range_and_its_cost():
    controller = platform(Reserving(), devices=4)
    answer = ask(controller, training_job(minutes=10, deadline_s=420, most=4), usd_per_device_hour=6.0)
    assert (answer.verdict, answer.is_promised, answer.minimum_share, answer.workers) == ("accepted", True, 2, 2)
    assert answer.finish_s.p10 == pytest.approx(0.9 * 330)
    assert answer.finish_s.p90 == pytest.approx(1.1 * 330)
    assert answer.cost_usd.p90 == pytest.approx(1.1 * 2 * 330 / 3600 * 6.0)
    assert answer.start_s == 0.0
    assert "promised" in answer.reason
    assert answer.alternatives == ()


def test_the_table_has_the_cheapest_the_chosen_and_the_fastest():
    controller = platform(Reserving(), devices=4)
    job = training_job(minutes=10, goal=Goal(deadline_s=420.0, budget_usd=1.0), most=4)
    answer = ask(controller, job, usd_per_device_hour=0.6)
    assert [(row.name, row.workers, row.batch_per_worker) for row in answer.options] == [
        ("cheapest", 1, 64),
        ("chosen", 2, 32),
        ("fastest", 4, 16),
    ]
    assert answer.options[0].verdict == "misses the deadline by 4m00"
    assert answer.options[1].verdict == "fits deadline and budget"
    assert answer.options[2].verdict == "fits deadline and budget (communication takes 23 %)"


def test_the_batch_of_a_script_is_its_own_matter():
    job = training_job(minutes=10, most=1, entrypoint=Entrypoint(source_path="/train.py", kind="script"))
    answer = ask(platform(Reserving(), devices=4), job)
    assert answer.options
    assert {row.batch_per_worker for row in answer.options} == {None}


def test_a_refusal_says_how_many_workers_it_would_take_and_who_holds_them():
    controller = platform(Reserving(), training_job("old", minutes=10, deadline_s=700), devices=2)
    answer = ask(controller, training_job(minutes=10, deadline_s=130, most=2))
    assert answer.verdict == "refused"
    assert answer.minimum_share == 8
    assert answer.reason == (
        "cannot finish within 2m10: needs >= 8 workers from now; this pool has 2 (1 held by 'old')"
    )
    assert any("only 1 devices are not promised" in line for line in answer.evidence)


def test_a_job_that_no_number_of_workers_helps_is_told_so():
    answer = ask(platform(Reserving()), training_job(minutes=10, deadline_s=30))
    assert answer.minimum_share is None
    assert answer.reason == "cannot finish within 30.0 s: even 32 workers need 1m17"


def test_an_owner_s_bound_that_stands_in_the_way_is_named_and_can_be_raised():
    answer = ask(platform(Reserving()), training_job(minutes=10, deadline_s=200, most=2))
    assert answer.reason == "cannot finish within 3m20: needs >= 4 workers from now; it allows 2"
    changes = {alternative.change: alternative.options for alternative in answer.alternatives}
    assert changes["--workers 1..4"] == {"max_workers": 4}


def test_alternatives_are_the_nearest_that_are_accepted():
    controller = platform(Reserving(), training_job("old", minutes=60, deadline_s=1200, most=8), devices=8)
    job = training_job(minutes=10, deadline_s=150, most=8)
    answer = ask(controller, job)
    assert answer.verdict == "refused"
    offers = {alternative.change.partition(" ")[0]: alternative for alternative in answer.alternatives}
    assert offers["--deadline"].change == "--deadline 3m20s"
    assert offers["--epochs"].options == {"num_epochs": 7}
    assert offers["11"].num_devices == 11
    assert offers["--best-effort"].finish_s.p90 == pytest.approx(1.1 * 600)
    for alternative in answer.alternatives:
        assert alternative.finish_s.p10 < alternative.finish_s.p90


def test_workers_of_two_devices_are_told_as_workers_and_cost_both():
    controller = platform(make_policy("springtide"), devices=4)
    job = training_job(minutes=10, deadline_s=420, most=4, devices_each=2)
    answer = quote(controller.snapshot(0.0), make_policy("springtide"), job, usd_per_device_hour=6.0)
    assert (answer.verdict, answer.is_promised, answer.minimum_share, answer.workers) == ("accepted", True, 2, 2)
    assert {run.num_devices for run in answer.schedule} == {4}
    assert answer.finish_s.p90 == pytest.approx(1.1 * answer.schedule[-1].end_s)
    assert answer.cost_usd.p90 == pytest.approx(1.1 * 4 * answer.schedule[-1].end_s / 3600 * 6.0)
    assert [(row.name, row.workers) for row in answer.options] == [("cheapest", 1), ("chosen", 2), ("fastest", 2)]
    assert "on 1, " in answer.evidence[0]
    tight = replace(job, goal=Goal(deadline_s=200.0))
    refused = quote(controller.snapshot(0.0), make_policy("springtide"), tight)
    assert refused.reason == (
        "cannot finish within 3m20: needs >= 4 workers of 2 devices from now; this pool has room for 2"
    )
    grown_to = [offer.num_devices for offer in refused.alternatives if offer.num_devices]
    assert grown_to == [8]


def test_a_budget_refuses_and_is_answered_with_one_that_does():
    controller = platform(Reserving(), devices=4)
    job = training_job(minutes=60, goal=Goal(deadline_s=2500.0, budget_usd=0.10), most=4)
    answer = ask(controller, job, usd_per_device_hour=1.0)
    assert answer.verdict == "refused"
    assert answer.reason == "its planned cost of $1.10 exceeds the budget of $0.10"
    changes = [alternative.change for alternative in answer.alternatives]
    assert "--budget 1.22" in changes
    assert "--best-effort" in changes
    assert not any(change.startswith("--deadline") for change in changes)


def test_without_a_price_no_budget_is_exceeded():
    job = training_job(minutes=60, goal=Goal(budget_usd=0.01))
    answer = ask(platform(Reserving()), job)
    assert answer.verdict == "accepted"
    assert answer.cost_usd.p90 == 0.0


def test_what_is_not_known_is_said():
    job = training_job(deadline_s=60, profile_steps_per_s={}, total_steps=None)
    answer = ask(platform(Reserving()), job)
    assert answer.verdict == "accepted"
    assert not answer.is_promised
    assert answer.finish_s.p90 is None
    assert "--profile" in answer.reason
    assert answer.speed_source == "unknown"


def test_a_first_run_is_told_how_fast_it_has_to_be_to_be_promised():
    job = training_job(deadline_s=100, profile_steps_per_s={})
    answer = quote(platform(make_policy("springtide")).snapshot(0.0), make_policy("springtide"), job)
    assert (answer.verdict, answer.is_promised) == ("accepted", False)
    assert answer.promised_if.step_s == pytest.approx(0.9 * 100.0 / 600, rel=1e-3)
    assert answer.promised_if.num_workers == 8
    words = "its deadline is promised once its speed is measured, if a step takes <= 0.149 s on 8 workers"
    assert f"its speed is not known yet; {words}: run it once" in answer.reason


def test_a_policy_that_promises_nothing_is_played_forward():
    running = training_job("old", minutes=10, most=2)
    controller = platform(make_policy("fifo"), running, devices=2)
    answer = quote(controller.snapshot(0.0), make_policy("fifo"), training_job(minutes=10, deadline_s=400, most=2))
    assert answer.verdict == "accepted"
    assert not answer.is_promised
    assert answer.start_s == pytest.approx(330.0)
    assert answer.finish_s.p10 == pytest.approx(0.9 * 660)
    assert "nothing is promised" in answer.reason
    assert "may miss its deadline" in answer.reason


def test_who_waits_is_told_that_nothing_is_promised_yet():
    controller = platform(Reserving(), training_job("old", minutes=60, deadline_s=1200), devices=4)
    job = training_job(minutes=10, goal=Goal(deadline_s=400.0, waits=True), most=4)
    answer = ask(controller, job)
    assert (answer.verdict, answer.is_promised) == ("accepted", False)
    assert answer.reason.startswith("its deadline in 6m40 cannot be promised now: it would stay in line")
    roomy = platform(Reserving(), devices=4)
    assert ask(roomy, job).is_promised


def test_a_script_with_a_known_speed_is_quoted_at_its_one_size():
    job = training_job(minutes=10, deadline_s=300, elastic=False, min_workers=2, most=2)
    answer = ask(platform(Reserving(), devices=4), job)
    assert answer.verdict == "refused"
    assert {alternative.change for alternative in answer.alternatives} >= {"--deadline 5m40s", "--best-effort"}
    assert [row.workers for row in answer.options] == [2, 2]


def test_a_job_that_asks_for_more_than_there_is_is_told_so():
    job = training_job(minutes=10, deadline_s=600, min_workers=6, most=8)
    answer = ask(platform(Reserving(), devices=4), job)
    assert answer.verdict == "refused"
    assert answer.reason == "cannot finish within 10m00: it asks for at least 6 workers; this pool has 4"
    offers = {alternative.change: alternative.options for alternative in answer.alternatives}
    assert offers == {
        "--workers 1..4": {"min_workers": 1, "max_workers": 4},
        "6 devices instead of 4": {"max_workers": 6},
    }
    waiting = ask(platform(Reserving(), devices=4), training_job(min_workers=6, most=8))
    assert waiting.reason == "it would be taken in and wait: it asks for 6 workers, this pool has 4"


def test_a_deadline_that_has_passed_is_told_as_that():
    answer = ask(platform(Reserving()), training_job(deadline_s=-5.0))
    assert answer.reason.startswith("its deadline has passed")


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_can_be_asked_about_every_kind_of_job(name):
    running = training_job("old", minutes=60, deadline_s=1500, most=8)
    snapshot = platform(make_policy(name), running, devices=8).snapshot(0.0)
    jobs = [
        training_job(minutes=30, deadline_s=600),
        training_job(minutes=30, goal=Goal(deadline_s=600.0, is_soft=True, budget_usd=0.1)),
        training_job(minutes=30, goal=Goal(deadline_s=600.0, waits=True)),
        training_job(total_steps=None, deadline_s=600),
        training_job(profile_steps_per_s={}),
        training_job(elastic=False, min_workers=2, most=2, deadline_s=60),
        training_job(min_workers=16, most=16, deadline_s=600),
    ]
    for shown in (snapshot, Snapshot(now_s=0.0, cluster=Topology())):
        for job in jobs:
            answer = quote(shown, make_policy(name), job, usd_per_device_hour=0.5)
            assert answer.reason
            assert answer.is_promised <= (answer.verdict == "accepted")


def test_nothing_is_changed_by_asking():
    controller = platform(Reserving(), training_job("old", minutes=60, deadline_s=2000))
    before = msgspec.json.encode(controller.snapshot(5.0))
    ask(controller, training_job(deadline_s=100), 5.0)
    assert msgspec.json.encode(controller.snapshot(5.0)) == before


def test_a_speed_that_is_discounted_has_its_slow_end_at_the_plan():
    answer = ask(
        platform(Reserving(), devices=4),
        training_job(minutes=10, deadline_s=420, most=4),
        spread=SpeedRange(fast=0.8, slow=1.0, source="history"),
    )
    assert answer.finish_s.p90 == pytest.approx(330)
    assert answer.speed_source == "history"


@pytest.mark.parametrize("seconds", [1.0, 59.0, 121.0, 509.0, 3601.0, 90_000.0, 1e6])
def test_readable_durations_are_not_shorter_and_can_be_typed(seconds):
    rounded = readable_s(seconds)
    assert seconds <= rounded <= 1.3 * seconds + 5
    assert parse_duration_s(typed_duration(rounded)) == rounded


def test_fewer_epochs_shorten_a_job_in_proportion():
    changed = changed_job(training_job(epochs=10, total_steps=605), {"num_epochs": 3}, 0.0)
    assert (changed.num_epochs, changed.total_steps) == (3, 182)


def test_a_cluster_grows_by_whole_nodes_or_within_its_only_one():
    assert len(grown(Topology(nodes=(make_node("a", 2),)), 5).device_ids()) == 5
    two = Topology(nodes=(make_node("a", 4), make_node("b", 4)))
    assert [len(node.devices) for node in grown(two, 11).nodes] == [4, 4, 4]


def check_case(make, seed):
    """Quote, then submit the same and each counter-offer to a platform of its own. Returns how many offers held."""
    rng = np.random.default_rng(seed)
    devices, nodes, jobs, new = random_case(rng)
    overheads = Overheads(change_s=2.0, fresh_s=2.0, fresh_per_doubling_s=2.0) if seed % 2 else None

    now_s = float(rng.choice([0.0, 30.0, 600.0]))

    def fresh():
        controller = platform(make(), *jobs, devices=devices, nodes=nodes, overheads=overheads)
        if now_s:
            pass_time(controller, 0.0, now_s, np.random.default_rng(seed))
        return controller

    new = replace(new, goal=Goal(deadline_s=now_s + new.goal.deadline_s))
    answer = quote(fresh().snapshot(now_s), make(), new)
    assert answer.verdict == verdict_of(fresh(), new, now_s), f"seed {seed}: {answer.reason}"
    for alternative in answer.alternatives:
        controller = fresh()
        if alternative.num_devices is not None:
            larger = grown(controller.state.topology(), alternative.num_devices)
            controller.step(now_s, [NodeJoined(node=node) for node in larger.nodes])
        changed = changed_job(new, alternative.options, now_s)
        told = f"seed {seed}: {alternative.change} is offered and refused"
        assert verdict_of(controller, changed, now_s) == "accepted", told
    return len(answer.alternatives)


def test_a_counter_offer_that_is_submitted_is_admitted():
    assert sum(check_case(Reserving, seed) for seed in range(60)) > 60


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["reserving", *NAMES_WITH_ADMISSION])
def test_a_thousand_counter_offers_of_a_thousand_are_admitted(name):
    if name != "reserving" and name not in POLICY_NAMES:
        pytest.skip(f"there is no policy {name}")

    def make():
        return Reserving() if name == "reserving" else make_policy(name)

    offers, seed = 0, 0
    while offers < part(1000):
        offers += check_case(make, seed)
        seed += 1
