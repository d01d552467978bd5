"""The fields of a spec that are options: a row of a table is a property of the object, and its value goes both ways."""

from __future__ import annotations

import pytest

from springtide.backends.kubernetes.resources.option_fields import option_properties, read_options, written_options
from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.kinds import (
    Choice,
    Count,
    CountRange,
    Duration,
    Money,
    Name,
    Number,
    Objective,
    Params,
    Toggle,
)
from springtide.core.options.option import ObjectField, Option, RestField
from springtide.core.options.services import SERVICE_OPTIONS


def made_up(kind, path="made.up", default=None):
    """A table of one option that there is not."""
    field = ObjectField(path=path, help="What is made up.")
    return (Option(name="made_up", kind=kind, default=default, rest=RestField(path="made_up"), object=field),)


@pytest.mark.parametrize(
    ("kind", "said", "sent", "schema_type"),
    [
        (Count(1, 9, 2), 3, 3, "integer"),
        (Duration(), "90s", 90.0, None),
        (Objective(), "200ms", 0.2, "string"),
        (Money(), "$4", 4.0, None),
        (CountRange(1, 8), "1..8", [1, 8], None),
        (Toggle(), True, True, "boolean"),
        (Choice(("a", "b")), "b", "b", "string"),
        (Name("name"), "x", "x", "string"),
        (Number("a number", 1.0), 2.5, 2.5, "number"),
        (Params(), {"lr": "0.1"}, {"lr": "0.1"}, "object"),
    ],
)
def test_a_row_is_a_property_and_its_value_goes_both_ways(kind, said, sent, schema_type):
    table = made_up(kind)
    properties = option_properties(table, "made")
    assert list(properties) == ["up"]
    assert properties["up"].get("type") == schema_type
    assert option_properties(table) == {}, "it is in an object of its own"
    found = read_options(table, {"made": {"up": said}})
    assert found == {"made_up": sent}
    assert read_options(table, written_into(table, found)) == found
    assert read_options(table, {}) == {}


def written_into(table, options):
    return {"made": written_options(table, options, "made")}


@pytest.mark.parametrize("nothing", [None, "", {}, []])
def test_nothing_is_not_written(nothing):
    assert written_options(made_up(Name("name"), "up"), {"made_up": nothing}) == {}


def test_a_no_is_written_only_where_it_is_not_the_default():
    assert written_options(made_up(Toggle(), "up", default=False), {"made_up": False}) == {}
    assert written_options(made_up(Toggle(may_be_open=True), "up"), {"made_up": False}) == {"up": False}
    assert written_options(made_up(Count(0, 9, 1), "up", default=1), {"made_up": 0}) == {"up": 0}


def test_a_refusal_names_the_field():
    with pytest.raises(InvalidRequest, match=r"spec\.made\.up 'soon' is not a duration"):
        read_options(made_up(Duration()), {"made": {"up": "soon"}})


@pytest.mark.parametrize("table", [JOB_OPTIONS, SERVICE_OPTIONS], ids=["jobs", "services"])
def test_every_row_has_a_property_of_its_own(table):
    paths = [option.object.path for option in table if option.object is not None]
    assert len(set(paths)) == len(paths)
    parents = {path.rpartition(".")[0] for path in paths}
    assert len(paths) == sum(len(option_properties(table, parent)) for parent in parents)
