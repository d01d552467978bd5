"""The models of requests' options: a row of a table is a field, and the type checker is told the same."""

from __future__ import annotations

import ast
import inspect
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pydantic
import pytest

from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.kinds import Choice, Count, Duration, Money, Name, Params, Toggle
from springtide.core.options.option import Option, RestField, copied_fields
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.core.workload import Goal, InferenceService, TrainingJob
from springtide.service.submission import option_models
from springtide.service.submission.option_models import JobChangeIn, JobOptionsIn, ServiceOptionsIn, options_model


def made_up(kind, default=None):
    """A model of one option that there is not."""
    row = Option(name="made_up", kind=kind, default=default, rest=RestField(path="made_up", help="What is made up."))
    return options_model("MadeUpIn", "Made up.", (row,))


@pytest.mark.parametrize(
    ("kind", "good", "bad", "refusal"),
    [
        (Count(1, 9, 2), 9, 10, "less than or equal to 9"),
        (Duration(), 0.5, 0.0, "greater than 0"),
        (Duration(60, may_be_zero=True), 0.0, 61.0, "less than or equal to 60"),
        (Money(), 4.0, float("inf"), "finite number"),
        (Toggle(), True, 1, "valid boolean"),
        (Choice(("a", "b")), "b", "c", "'a' or 'b'"),
        (Name("name"), "x", "x" * 65, "at most 64"),
        (Params(), {"lr": "0.1"}, {"lr": 0.1}, "valid string"),
    ],
)
def test_a_row_is_a_field_with_the_bounds_of_its_kind(kind, good, bad, refusal):
    model = made_up(kind)
    assert model(made_up=good).made_up == good
    assert model().made_up is None
    with pytest.raises(pydantic.ValidationError, match=refusal):
        model(made_up=bad)
    assert model.model_json_schema()["properties"]["made_up"]["description"] == "What is made up."


def test_a_row_with_a_default_does_not_take_null():
    model = made_up(Count(1, 9, 2), default=3)
    assert model().made_up == 3
    with pytest.raises(pydantic.ValidationError):
        model(made_up=None)


def declared_fields(name: str) -> dict[str, Any]:
    """The fields that the type checker sees in one of the models."""
    module = ast.parse(inspect.getsource(option_models))
    block = next(node for node in module.body if isinstance(node, ast.If))
    declared = next(node for node in block.body if isinstance(node, ast.ClassDef) and node.name == name)
    written = {
        node.target.id: ast.unparse(node.annotation)
        for node in declared.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    holder = type(name, (), {"__annotations__": written})
    return get_type_hints(holder, vars(option_models))


def plain(annotation: Any) -> Any:
    """A type without the bounds of its values."""
    if get_origin(annotation) is Annotated:
        return plain(get_args(annotation)[0])
    inner = tuple(plain(each) for each in get_args(annotation))
    origin = get_origin(annotation)
    if origin in (tuple, dict):
        return origin[inner]
    return annotation if None.__class__ not in inner else inner[0] | None


@pytest.mark.parametrize("model", [JobOptionsIn, ServiceOptionsIn], ids=lambda model: model.__name__)
def test_the_type_checker_sees_what_the_tables_say(model):
    declared = declared_fields(model.__name__)
    made = {name: plain(field.annotation) for name, field in model.model_fields.items()}
    assert list(declared) == list(made), f"write the fields of {model.__name__} as the table has them"
    assert declared == made


def test_a_change_takes_what_may_be_changed():
    changeable = [option.rest.path for option in JOB_OPTIONS if option.is_changeable and option.rest is not None]
    assert list(JobChangeIn.model_fields) == changeable
    assert "deadline_s" in changeable


@pytest.mark.parametrize(
    ("table", "target", "taker"),
    [
        (JOB_OPTIONS, "workload", TrainingJob),
        (JOB_OPTIONS, "goal", Goal),
        (SERVICE_OPTIONS, "workload", InferenceService),
    ],
)
def test_what_is_copied_has_a_field_there(table, target, taker):
    copied = copied_fields(table, target)
    assert copied
    assert set(copied) <= set(taker.__struct_fields__)
