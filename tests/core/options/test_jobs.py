"""What adding an option takes: one row, and every face has it, from the command line to the job and to its object."""

from __future__ import annotations

import datetime

import click
import pydantic
import pytest
from click.testing import CliRunner

from springtide.backends.kubernetes.resources.option_fields import option_properties, read_options, written_options
from springtide.cli.jobs.flags import given_keywords, option_flags
from springtide.client.changes import ChangeKeywords
from springtide.client.goals import TrainKeywords
from springtide.client.serving_goals import ServeKeywords
from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import CHANGEABLE_OPTIONS, JOB_OPTIONS
from springtide.core.options.kinds import Duration
from springtide.core.options.option import (
    FlagText,
    ObjectField,
    Option,
    RestField,
    copied_fields,
    keyword_values,
    sent_options,
)
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.service.submission.option_models import copied, options_model

NOON = datetime.datetime(2030, 5, 1, 12)
WARM_UP = Option(
    name="warm_up",
    kind=Duration(),
    flags={"run": FlagText("--warm-up TIME", "How long it may take to get going.")},
    rest=RestField("warm_up_s", "seconds until its first step", copied_to="workload"),
    object=ObjectField("warmUp", "How long it may take to get going."),
)
TABLE = (*JOB_OPTIONS, WARM_UP)


def test_a_new_row_is_a_flag_and_a_keyword():
    typed = {}

    @click.command()
    @option_flags(TABLE, "run")
    def run(**given):
        typed.update(given_keywords(TABLE, "run", given))

    shown = CliRunner().invoke(run, ["--help"]).output
    assert "--warm-up TIME" in shown
    assert "How long it may take to get going." in shown
    assert CliRunner().invoke(run, ["--warm-up", "90s"]).exit_code == 0
    assert typed == {"warm_up": "90s"}
    values = keyword_values(TABLE, typed, "st.train")
    assert sent_options(TABLE, values, NOON)["warm_up_s"] == 90.0
    assert "warm_up_s" not in sent_options(TABLE, keyword_values(TABLE, {}, "st.train"), NOON)


def test_a_new_row_is_a_field_of_the_rest_api_that_the_job_takes_over():
    model = options_model("JobOptionsIn", "A training job's options.", TABLE)
    described = model.model_json_schema()["properties"]["warm_up_s"]
    assert described["description"] == "seconds until its first step"
    assert copied(model(warm_up_s=90.0), TABLE, "workload")["warm_up_s"] == 90.0
    assert set(copied_fields(TABLE, "workload")) - set(copied_fields(JOB_OPTIONS, "workload")) == {"warm_up_s"}
    with pytest.raises(pydantic.ValidationError, match="greater than 0"):
        model(warm_up_s=0.0)


def test_a_new_row_is_a_property_of_objects_and_goes_both_ways():
    assert option_properties(TABLE)["warmUp"]["description"].startswith("How long it may take to get going.")
    assert read_options(TABLE, {"warmUp": "90s"}) == {"warm_up_s": 90.0}
    assert written_options(TABLE, {"warm_up_s": 90.0}) == {"warmUp": "90s"}
    with pytest.raises(InvalidRequest, match=r"spec\.warmUp 'soon' is not a duration"):
        read_options(TABLE, {"warmUp": "soon"})


@pytest.mark.parametrize(
    ("keywords", "table"),
    [(TrainKeywords, JOB_OPTIONS), (ServeKeywords, SERVICE_OPTIONS), (ChangeKeywords, CHANGEABLE_OPTIONS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_type_checker_knows_every_keyword(keywords, table):
    written, known = set(keywords.__annotations__), {option.name for option in table if option.is_keyword}
    assert not known - written, f"write a line in {keywords.__name__} for each of these"
    assert not written - known, f"no row of the table has these lines of {keywords.__name__}"
