"""The test of a canary: how often it is wrong and how soon it is right, over many streams of requests."""

from __future__ import annotations

import random

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.workload import WatchRule
from springtide.serving.canary import PROMOTE_AT, ROLL_BACK_AT, CanaryJudge, FaultTest, parse_watch

NUM_RUNS = 200
LENGTH = 3000


def outcomes(share: float, num_runs: int = NUM_RUNS) -> list[tuple[str, int]]:
    """What is decided about streams with that share of faults, looked at after each request, and after how many."""
    random_of = random.Random(round(share * 1e6))
    found = []
    for _ in range(num_runs):
        test = FaultTest(WatchRule(text="errors<1%", limit=0.01))
        told = ("nothing", LENGTH)
        for number in range(1, LENGTH + 1):
            is_error = random_of.random() < share
            test.add(0.0, is_error=is_error)
            if is_error and test.against >= ROLL_BACK_AT:
                told = ("back", number)
                break
            if not is_error and test.favour >= PROMOTE_AT:
                told = ("promoted", number)
                break
        found.append(told)
    return found


def share_of(told: list[tuple[str, int]], what: str) -> float:
    return sum(kind == what for kind, _ in told) / len(told)


def median(told: list[tuple[str, int]], what: str) -> int:
    numbers = sorted(number for kind, number in told if kind == what)
    return numbers[len(numbers) // 2]


@pytest.mark.parametrize("share", [0.0, 0.003])
def test_a_good_revision_is_promoted_and_not_rolled_back(share):
    told = outcomes(share)
    assert share_of(told, "back") <= 0.01
    assert share_of(told, "promoted") >= 0.93
    assert 300 <= median(told, "promoted") <= 1000


def test_at_the_limit_itself_an_alarm_is_rarer_than_one_in_a_hundred_however_long_one_looks():
    assert share_of(outcomes(0.01), "back") <= 0.015, "200 runs: 1 % and the chance of this sample"


@pytest.mark.parametrize(("share", "within"), [(0.05, 300), (0.1, 70), (1.0, 3)])
def test_a_bad_one_is_rolled_back_soon(share, within):
    told = outcomes(share, 60)
    assert share_of(told, "back") == 1.0
    assert median(told, "back") <= within


def test_342_clean_requests_prove_a_limit_of_one_percent():
    assert outcomes(0.0, 1) == [("promoted", 342)]


def test_slow_answers_and_errors_are_faults_of_a_latency_and_only_errors_of_the_other():
    judge = CanaryJudge(parse_watch("p99<200ms, errors<1%"), 600.0, 0.0)
    judge.add(0.3, is_error=False)
    judge.add(0.1, is_error=True)
    for _ in range(50):
        judge.add(0.1, is_error=False)
    assert [(test.num_bad, test.num_good) for test in judge.tests] == [(2, 50), (1, 51)]
    assert judge.verdict(1.0) is None
    for _ in range(3):
        judge.add(0.3, is_error=False)
    verdict = judge.verdict(2.0)
    assert (verdict.is_good, verdict.reason) == (False, "p99<200ms: 5 of 55 requests broke it")


def test_what_is_not_proven_in_its_time_is_promoted_and_it_is_said():
    judge = CanaryJudge(parse_watch("errors<1%"), 600.0, 100.0)
    judge.add(0.1, is_error=True)
    assert judge.verdict(699.0) is None
    verdict = judge.verdict(700.0)
    assert (verdict.is_good, verdict.is_proven) == (True, False)
    assert verdict.reason == "not proven within its time: errors<1%: 1 of 1 requests broke it"


def test_without_an_end_it_waits_for_its_owner():
    assert CanaryJudge((), 0.0, 0.0).verdict(1e9) is None


@pytest.mark.parametrize(
    "text", ["", "fast", "p99<", "errors<0%", "errors<80%", "p0<1s", "p99<200ms,", "p99>1s", "p1.2.3<1s"]
)
def test_another_rule_is_refused(text):
    if text == "p99<200ms,":
        assert len(parse_watch(text)) == 1
        return
    with pytest.raises(InvalidRequest):
        parse_watch(text)
