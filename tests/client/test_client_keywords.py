"""The keywords that the type checker knows are those of the tables."""

from __future__ import annotations

import pytest

from springtide.client.changes import ChangeKeywords
from springtide.client.goals import TrainKeywords
from springtide.client.serving_goals import ServeKeywords
from springtide.core.options.jobs import CHANGEABLE_OPTIONS, JOB_OPTIONS
from springtide.core.options.services import SERVICE_OPTIONS


@pytest.mark.parametrize(
    ("keywords", "table"),
    [(TrainKeywords, JOB_OPTIONS), (ServeKeywords, SERVICE_OPTIONS), (ChangeKeywords, CHANGEABLE_OPTIONS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_keyword_has_its_type_written(keywords, table):
    written, known = set(keywords.__annotations__), {option.name for option in table if option.is_keyword}
    assert not known - written, f"write a line in {keywords.__name__} for each of these"
    assert not written - known, f"no row of the table has these lines of {keywords.__name__}"
