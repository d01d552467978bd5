"""What is to change of a job: the body of the request, and what cannot be said."""

from __future__ import annotations

from datetime import datetime

import pytest

from springtide.client.changes import as_change
from springtide.core.errors import InvalidRequest

NOON = datetime(2030, 5, 1, 12, 0)


@pytest.mark.parametrize(
    ("wish", "body"),
    [
        ({"deadline": "90m"}, {"deadline_s": 5400.0}),
        ({"deadline": "13:30"}, {"deadline_s": 5400.0}),
        ({"deadline": 45}, {"deadline_s": 45.0}),
        ({"deadline": "none", "budget": "none"}, {"deadline_s": None, "budget_usd": None}),
        ({"budget": "$5"}, {"budget_usd": 5.0}),
        ({"soft": False, "wait": True, "retries": 0}, {"is_soft": False, "waits": True, "max_restarts": 0}),
    ],
)
def test_what_is_named_is_sent_and_nothing_else(wish, body):
    assert as_change(NOON, **wish) == body


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({}, "nothing is to change"),
        ({"deadline": "soon"}, "'soon' is not a time to keep"),
        ({"budget": "much"}, "much"),
        ({"retries": -1}, "retries must be"),
    ],
)
def test_what_cannot_be_is_refused_in_words(wish, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        as_change(NOON, **wish)
