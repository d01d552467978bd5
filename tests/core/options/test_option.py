"""The tables of options: which faces know which option, and what is made of a row that there is not."""

from __future__ import annotations

from datetime import datetime

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.kinds import Choice, Count, Duration, Params
from springtide.core.options.option import (
    Option,
    RestField,
    check_keywords,
    inner_fields,
    keyword_values,
    overridden,
    rest_fields,
    sent_options,
)
from springtide.core.options.services import SERVICE_OPTIONS

NOON = datetime(2030, 5, 1, 12)
MADE_UP = (
    Option(name="effort", kind=Count(1, 9, 3), default=3, rest=RestField(path="num_efforts")),
    Option(name="mood", kind=Choice(("calm", "bold")), default="calm", rest=RestField(path="mood")),
    Option(name="patience", kind=Duration(), rest=RestField(path="patience_s")),
    Option(name="extras", kind=Params(), default={}, rest=RestField(path="extras")),
    Option(name="inner", kind=Count(1, 9, 3), is_keyword=False, rest=RestField(path="inner")),
)


def without(table, face):
    is_there = {
        "python": lambda option: option.is_keyword,
        "cli": lambda option: option.flags.keys() - {"change"},
        "rest": lambda option: option.rest is not None or option.parts,
        "object": lambda option: option.object is not None,
    }[face]
    return {option.name for option in table if not is_there(option)}


def test_the_faces_that_lack_an_option_of_a_job_are_these():
    """A new option is on every face, or it is written down here which of them lack it and why its row says so."""
    profiled = {"speeds", "step_profile", "layer_profile", "stream", "function_workers"}
    expert = {"initial_batch", "min_local_batch", "grace", "checkpoint_every"}
    assert without(JOB_OPTIONS, "python") == profiled | expert
    assert without(JOB_OPTIONS, "cli") == profiled | expert | {"retries"}
    assert without(JOB_OPTIONS, "rest") == {"initial_batch", "name", "micro_batch"}
    assert without(JOB_OPTIONS, "object") == {"name", "on", "micro_batch", "secrets", "python"}


def test_the_faces_that_lack_an_option_of_a_service_are_these():
    assert without(SERVICE_OPTIONS, "python") == {"max_queue", "grace"}
    assert without(SERVICE_OPTIONS, "cli") == {"max_queue", "grace", "batch_wait"}
    assert without(SERVICE_OPTIONS, "rest") == {"name"}
    assert without(SERVICE_OPTIONS, "object") == {"name", "gpu", "secrets", "python"}


@pytest.mark.parametrize("table", [JOB_OPTIONS, SERVICE_OPTIONS], ids=["jobs", "services"])
def test_every_name_is_there_once(table):
    names = [option.name for option in table]
    fields = [rest.path for rest, _, _ in rest_fields(table)]
    assert len(set(names)) == len(names)
    assert len(set(fields)) == len(fields)


@pytest.mark.parametrize("table", [JOB_OPTIONS, SERVICE_OPTIONS], ids=["jobs", "services"])
def test_defaults_are_values_that_may_be_given(table):
    check_keywords(table, keyword_values(table, {}, "a test"))


def test_a_row_is_a_keyword_with_its_default():
    values = keyword_values(MADE_UP, {"effort": 5}, "st.make")
    assert values == {"effort": 5, "mood": "calm", "patience": None, "extras": {}}
    with pytest.raises(InvalidRequest, match=r"st\.make does not know 'inner'; it knows effort, extras, mood"):
        keyword_values(MADE_UP, {"inner": 5}, "st.make")


def test_a_value_is_checked_by_its_kind():
    with pytest.raises(InvalidRequest, match="mood must be 'calm' or 'bold', got 'wild'"):
        check_keywords(MADE_UP, keyword_values(MADE_UP, {"mood": "wild"}, "st.make"))
    with pytest.raises(InvalidRequest, match="effort must be a whole number of at least 1, got None; for example 3"):
        check_keywords(MADE_UP, keyword_values(MADE_UP, {"effort": None}, "st.make"))


def test_quantities_are_sent_and_words_where_they_are_not_the_default():
    given = {"patience": "90s", "mood": "bold", "extras": {"lr": 0.1}}
    sent = sent_options(MADE_UP, keyword_values(MADE_UP, given, "st.make"), NOON)
    assert sent == {"num_efforts": 3, "mood": "bold", "patience_s": 90.0, "extras": {"lr": "0.1"}}
    assert sent_options(MADE_UP, keyword_values(MADE_UP, {}, "st.make"), NOON) == {"num_efforts": 3, "extras": {}}


def test_parameters_are_merged_and_everything_else_is_replaced():
    before = keyword_values(MADE_UP, {"effort": 5, "extras": {"a": 1, "b": 2}}, "st.make")
    after = overridden(MADE_UP, before, {"effort": 6, "extras": {"b": 3}}, "submit()")
    assert (after["effort"], after["extras"]) == (6, {"a": 1, "b": 3})
    assert before["extras"] == {"a": 1, "b": 2}


def test_what_is_in_an_object_of_its_own_has_the_same_field_both_ways():
    assert inner_fields(JOB_OPTIONS, "batch") == {
        "maxLocalBatch": "max_local_size",
        "minLocalBatch": "min_local_size",
        "learningRate": "learning_rate",
    }
