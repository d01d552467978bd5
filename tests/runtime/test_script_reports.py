"""What a script may report, and what becomes of it where nothing receives it."""

from __future__ import annotations

import pytest

import springtide
from springtide.core.errors import InvalidRequest
from springtide.runtime.script_reports import MAX_METRICS, REPORTS, ScriptReport


@pytest.fixture
def received():
    found: list[ScriptReport] = []
    REPORTS.receive = found.append
    yield found
    REPORTS.receive = None


def test_numbers_reach_the_receiver_as_floats(received):
    springtide.report(3, 10, loss="0.5", accuracy=1)
    springtide.report(step=4)
    assert received == [
        ScriptReport(step=3, total=10, loss=0.5, metrics={"accuracy": 1.0}),
        ScriptReport(step=4),
    ]


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((-1,), {}, "whole number"),
        ((1.5,), {}, "whole number"),
        ((float("nan"),), {}, "whole number"),
        ((11, 10), {}, "step 11 of 10"),
        ((1,), {"loss": [1.0, 2.0]}, "one number as loss"),
        ((1,), {"accuracy": "high"}, "one number as accuracy"),
        ((1,), {f"m{number}": 1.0 for number in range(MAX_METRICS + 1)}, "up to"),
        ((1,), {"m" * 65: 1.0}, "up to"),
    ],
)
def test_what_is_no_report_is_refused_and_not_sent(received, arguments, keywords, message):
    with pytest.raises(InvalidRequest, match=message):
        springtide.report(*arguments, **keywords)
    assert received == []


def test_outside_of_a_job_it_only_checks():
    springtide.report(1, 2, loss=0.5)
    with pytest.raises(InvalidRequest):
        springtide.report(2, 1)
