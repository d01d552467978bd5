"""Quotes and forecasts of jobs on parts of devices: from their limit, while others rest, to their request."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kits.control.quoting import SOURCE, obey, pass_time, platform, random_case, training_job, verdict_of
from kits.job_parts import with_fields
from springtide.control.parts import guaranteed_curve, price_fraction, share_of, time_fraction_at_limit
from springtide.control.quotes.forecast import roll_forward, while_changing
from springtide.control.quotes.inquiry import arriving, changed_job, grown, known_curve
from springtide.control.quotes.quote import quote
from springtide.core.events import JobSubmitted, NodeJoined, ServiceDeployed
from springtide.core.shares import make_share
from springtide.core.workload import InferenceService
from springtide.perf.curve import curve_of
from springtide.scheduling.registry import make_policy

SHARE = make_share(0.4, 0.8)


def ask(controller, job, now_s=0.0, policy="dilu/springtide", **options):
    return quote(controller.snapshot(now_s), make_policy(policy), job, policy_name=policy, **options)


def sharing(*jobs, devices=1):
    return platform(make_policy("dilu/springtide"), *jobs, devices=devices)


def test_a_job_on_a_part_counts_on_its_request():
    view = arriving(training_job(share=SHARE), 0.0)
    assert guaranteed_curve(view).rate(1) == pytest.approx(0.4 * curve_of(view).rate(1))
    assert known_curve(view) == guaranteed_curve(view)
    # What was measured was measured on the part.
    measured = with_fields(view, throughput_samples_per_s={1: 40.0})
    assert guaranteed_curve(measured) == curve_of(measured)
    assert (time_fraction_at_limit(view.job), price_fraction(view.job)) == (0.5, 0.4)
    whole = training_job()
    assert guaranteed_curve(arriving(whole, 0.0)) == curve_of(arriving(whole, 0.0))
    assert (share_of(whole), time_fraction_at_limit(whole), price_fraction(whole)) == (None, 1.0, 1.0)


def test_its_range_goes_from_its_limit_to_its_request():
    answer = ask(sharing(), training_job(minutes=10, most=1, share=SHARE), usd_per_device_hour=6.0)
    assert answer.verdict == "accepted"
    assert answer.finish_s.p10 == pytest.approx(0.9 * 600 / 0.8)
    assert answer.finish_s.p90 == pytest.approx(1.1 * 600 / 0.4)
    # It pays for what is kept for it, for as long as it is there.
    assert answer.cost_usd.p10 == pytest.approx(0.9 * 0.4 * (600 / 0.8) / 3600 * 6.0)
    assert answer.cost_usd.p90 == pytest.approx(1.1 * 600 / 3600 * 6.0)
    assert answer.options[0].finish_s == answer.finish_s
    assert "with 0.8 of a device while others there rest .. with 0.4 while they do not" in answer.reason
    assert any("with 0.4 of each device" in line for line in answer.evidence)


def test_a_deadline_is_promised_by_the_request_alone():
    promised = ask(sharing(), training_job(minutes=10, most=1, deadline_s=1700, share=SHARE))
    assert (promised.verdict, promised.is_promised) == ("accepted", True)
    refused = ask(sharing(), training_job(minutes=10, most=1, deadline_s=1000, share=SHARE))
    # At its limit it would make it, but its neighbours may not be idle.
    assert refused.verdict == "refused"
    offers = {offer.change: offer for offer in refused.alternatives}
    assert any(change.startswith("--deadline") for change in offers)
    whole = offers["leave --share out"]
    assert whole.options == {"share": None}
    assert whole.finish_s.p90 == pytest.approx(1.1 * 600, abs=1.0)
    assert whole.cost_usd.p90 == 0.0


def test_what_it_waits_for_is_said_and_counts_before_its_range():
    old = training_job("old", minutes=10, most=1, share=make_share(0.7, 0.7))
    controller = sharing(old)
    obey(controller, 0.0)
    answer = ask(controller, training_job(minutes=10, most=1, share=SHARE))
    waits_s = 600 / 0.7
    assert answer.start_s == pytest.approx(waits_s, abs=1.0)
    assert answer.finish_s.p10 == pytest.approx(waits_s + 0.9 * 600 / 0.8, abs=2.0)
    assert answer.finish_s.p90 == pytest.approx(1.1 * (waits_s + 600 / 0.4), abs=2.0)
    assert any("waits for room" in line for line in answer.evidence)
    assert any("free now: 0.7 held by 'old'" in line for line in answer.evidence)


def test_a_small_part_starts_at_once_beside_others():
    old = training_job("old", minutes=10, most=1, share=make_share(0.6, 0.6))
    controller = sharing(old)
    obey(controller, 0.0)
    answer = ask(controller, training_job(minutes=10, most=1, share=make_share(0.3, 0.3)))
    assert answer.start_s == 0.0
    assert answer.finish_s.p90 == pytest.approx(1.1 * 600 / 0.3, abs=2.0)
    # A part that is never more is no range of parts.
    assert "while others there rest" not in answer.reason
    assert any("beside 'old'" in line for line in answer.evidence)
    assert any("0 of 1 devices free now" in line for line in answer.evidence)


def test_holders_of_parts_are_told_by_what_they_hold():
    service = InferenceService(
        service_id="s", name="answers", entrypoint=SOURCE, min_replicas=2, max_replicas=2, share=make_share(0.25)
    )
    controller = sharing(devices=2)
    controller.step(0.0, [ServiceDeployed(service=service)])
    answer = ask(controller, training_job(minutes=10, most=1))
    assert any("0 of 2 devices free now: 2 x 0.25 held by 'answers'" in line for line in answer.evidence)


def test_a_forecast_uses_guaranteed_speeds():
    first = training_job("first", minutes=10, most=1, share=make_share(0.5, 1.0))
    second = training_job("second", minutes=5, most=1, share=make_share(0.5, 0.5))
    third = training_job("third", minutes=5, most=1, share=make_share(0.5, 0.5))
    forecast = roll_forward(sharing(first, second, third).snapshot(0.0), make_policy("dilu/springtide"))
    assert forecast.finishes_s["first"] == pytest.approx(1200, abs=1.0)
    assert forecast.finishes_s["second"] == pytest.approx(600, abs=1.0)
    # It starts where the second was.
    assert forecast.finishes_s["third"] == pytest.approx(1200, abs=2.0)


def test_a_newcomer_is_put_beside_those_who_have_left_room():
    old = training_job("old", minutes=10, most=1, share=make_share(0.5, 0.5))
    controller = sharing(old)
    obey(controller, 0.0)
    snapshot = controller.snapshot(0.0)
    fits = arriving(training_job("fits", most=1, share=make_share(0.5, 0.5)), 0.0)
    large = arriving(training_job("large", most=1, share=make_share(0.6, 0.6)), 0.0)
    changing = while_changing(replace(snapshot, jobs=(*snapshot.jobs, fits)), make_policy("dilu/springtide"))
    assert changing.allocations["fits"].device_ids == changing.allocations["old"].device_ids
    changing = while_changing(replace(snapshot, jobs=(*snapshot.jobs, large)), make_policy("dilu/springtide"))
    assert "large" not in changing.allocations


def shared_case(seed):
    """A platform's load and a job that often cannot be promised its deadline, about half of them on parts."""
    devices, nodes, jobs, new = random_case(np.random.default_rng(seed))
    rng = np.random.default_rng([seed, 1])

    def with_share(job):
        request = round(float(rng.uniform(0.1, 0.9)), 2)
        limit = min(1.0, round(request * float(rng.uniform(1.0, 2.0)), 2))
        return replace(job, share=make_share(request, limit)) if rng.random() < 0.5 else job

    return devices, nodes, [with_share(job) for job in jobs], replace(with_share(new), share=make_share(0.5))


def check_case(seed):
    """Every counter-offer of one random case must be accepted when it is submitted."""

    def fresh():
        rng = np.random.default_rng(seed)
        policy = make_policy("dilu/edf+admission")
        devices, nodes, jobs, new = shared_case(seed)
        controller = platform(policy, devices=devices, nodes=nodes)
        now_s = 0.0
        for job in jobs:
            controller.step(now_s, [JobSubmitted(job=job)])
            gap_s = float(rng.exponential(300.0))
            pass_time(controller, now_s, now_s + gap_s, rng)
            now_s += gap_s
        goal = replace(new.goal, deadline_s=now_s + new.goal.deadline_s)
        return controller, now_s, replace(new, goal=goal)

    controller, now_s, new = fresh()
    answer = ask(controller, new, now_s, policy="dilu/edf+admission")
    assert verdict_of(controller, new, now_s) == answer.verdict, f"seed {seed}"
    for offer in answer.alternatives:
        controller, now_s, new = fresh()
        if offer.num_devices is not None:
            larger = grown(controller.state.topology(), offer.num_devices)
            controller.step(now_s, [NodeJoined(node=node) for node in larger.nodes])
        changed = changed_job(new, offer.options, now_s)
        assert verdict_of(controller, changed, now_s) == "accepted", f"seed {seed}: {offer.change} is refused"
    return [offer.change.split()[0] for offer in answer.alternatives]


@pytest.mark.slow
def test_a_counter_offer_about_parts_that_is_submitted_is_admitted():
    offered = [change for seed in range(25) for change in check_case(seed)]
    assert len(offered) > 25
    assert {"--deadline", "leave", "--best-effort"} <= set(offered)
