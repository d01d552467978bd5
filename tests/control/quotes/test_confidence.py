"""Probabilities in quotes: said for every deadline, asked for as a level, and learnt from how jobs came out."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from kits.control.quoting import obey, platform, training_job
from springtide.control.quotes.confidence import SpeedRisk
from springtide.control.quotes.quote import quote
from springtide.core.events import ProgressReported
from springtide.core.job_parts import JobOutcome
from springtide.core.workload import SpeedBelief, TrainingJob
from springtide.scheduling.registry import make_policy

OUTCOMES = tuple(JobOutcome(family="f", basis="declared", error=0.02 * (n % 5 - 2)) for n in range(40))
RISK = SpeedRisk(OUTCOMES)


def job(**options: object) -> TrainingJob:
    return replace(training_job(minutes=10, **options), family="f", belief=SpeedBelief(is_declared=True))


def asked(a_job: TrainingJob, devices: int = 1, risk: SpeedRisk = RISK):
    policy = make_policy("springtide")
    return quote(platform(policy, devices=devices).snapshot(0.0), policy, a_job, risk=risk)


def test_a_later_deadline_is_more_probable_and_each_is_said() -> None:
    found = [asked(job(deadline_s=deadline_s, most=1)) for deadline_s in (605, 620, 640, 900)]
    chances = [answer.probability for answer in found]
    assert chances == sorted(chances)
    assert chances[0] < 0.8 < 0.99 < chances[-1]
    assert found[-1].reason.endswith("; the deadline is kept with a probability of over 0.999")


def test_a_job_that_may_grow_is_surer_than_one_that_may_not() -> None:
    alone, growing = (asked(job(deadline_s=610, most=most), devices=2).probability for most in (1, 2))
    assert alone < 0.7 < 0.99 < growing


def test_the_level_is_kept_by_the_plan_or_refused_with_what_would_do() -> None:
    level = RISK.at_level(job(deadline_s=1000, most=1), 0.99)
    assert level.profile_steps_per_s[1] < 0.97 * job().profile_steps_per_s[1]
    accepted = asked(level)
    assert accepted.probability is not None
    assert (accepted.is_promised, accepted.confidence) == (True, 0.99)
    assert accepted.probability >= 0.99
    refused = asked(RISK.at_level(job(deadline_s=620, most=1), 0.99))
    assert (refused.verdict, refused.probability) == ("refused", None)
    offers = {alternative.change.split()[0]: alternative.options for alternative in refused.alternatives}
    assert offers.keys() >= {"--deadline", "--confidence"}
    lower = RISK.at_level(job(deadline_s=620, most=1), offers["--confidence"]["confidence"])
    assert asked(lower).is_promised
    later = replace(level, goal=replace(level.goal, deadline_s=offers["--deadline"]["deadline_s"]))
    assert asked(later).probability >= 0.99


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_what_a_level_holds_is_given_back_once_the_speed_was_measured(slower: float) -> None:
    """Only if it is not needed: a job that is as slow as was allowed for keeps its devices."""
    wide = SpeedRisk(replace(outcome, error=5 * outcome.error) for outcome in OUTCOMES)
    sure = wide.at_level(job(deadline_s=660, most=2), 0.99)
    controller = platform(make_policy("springtide"), sure, devices=2)
    obey(controller, 0.0)
    assert controller.state.jobs["new"].world_size == 2
    other = training_job("other", minutes=9.5, deadline_s=590, now_s=30.0, most=1)
    rate = job().profile_steps_per_s[2] / slower
    assert not quote(controller.snapshot(1.0), make_policy("springtide"), other).is_promised
    report = ProgressReported(
        job_id="new",
        generation=controller.state.jobs["new"].group.generation,
        step=int(30 * rate),
        total_steps=600,
        world_size=2,
        samples_per_s=rate * 64,
    )
    controller.step(30.0, [report])
    assert quote(controller.snapshot(30.0), make_policy("springtide"), other).is_promised == (slower == 1.0)
    assert controller.state.jobs["new"].promise.admitted_at_s == 0.0


def test_ranges_are_those_of_the_outcomes_once_there_are_some() -> None:
    plain, learnt = asked(job(deadline_s=900, most=1), risk=SpeedRisk()), asked(job(deadline_s=900, most=1))
    planned = plain.finish_s.p10 / 0.9
    assert plain.finish_s.p90 == pytest.approx(1.1 * planned)
    assert planned < learnt.finish_s.p90 < 1.08 * planned


def test_nothing_is_said_of_what_nothing_is_known() -> None:
    assert asked(training_job(minutes=10, deadline_s=900, most=1)).probability is None
    assert asked(job(most=1)).probability is None


def test_levels_undo_each_other() -> None:
    once = RISK.at_level(job(deadline_s=900, most=2), 0.99)
    again = RISK.at_level(RISK.at_level(job(deadline_s=900, most=2), 0.6), 0.99)
    assert again.belief is not None
    assert math.isclose(again.profile_steps_per_s[2], once.profile_steps_per_s[2], rel_tol=1e-6)
