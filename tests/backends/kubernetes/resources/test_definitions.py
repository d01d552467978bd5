"""The definitions of both kinds as data: what a 1.20 server demands of them, and that a refusal says what would do."""

from __future__ import annotations

import re

import pytest

from springtide.backends.kubernetes.resources.definitions import (
    INFERENCE_KIND,
    TRAINING_KIND,
    custom_resource_definitions,
    spec_schema,
)
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason

COLUMNS = ["STATE", "WORKERS", "PROGRESS", "ETA", "DEADLINE", "SLACK", "COST"]


def parts(schema, where=""):
    """Every schema inside a schema, with its path."""
    yield where, schema
    for name, inner in schema.get("properties", {}).items():
        yield from parts(inner, f"{where}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from parts(schema[word], f"{where}[]")


def versions():
    return [definition["spec"]["versions"][0] for definition in custom_resource_definitions()]


def schemas():
    return [found for version in versions() for found in parts(version["schema"]["openAPIV3Schema"])]


def test_both_kinds_are_there_and_each_call_makes_its_own_data():
    first, second = custom_resource_definitions(), custom_resource_definitions()
    assert [one["spec"]["names"]["kind"] for one in first] == [TRAINING_KIND, INFERENCE_KIND]
    first[0]["spec"]["versions"][0]["schema"].clear()
    assert second == custom_resource_definitions()


@pytest.mark.parametrize(("where", "schema"), schemas())
def test_the_schema_is_structural(where, schema):
    """What a server wants of apiextensions.k8s.io/v1: a type everywhere, and nothing that says two things at once."""
    if "x-kubernetes-int-or-string" in schema:
        assert "type" not in schema, where
    else:
        assert schema.get("type") in {"object", "array", "string", "integer", "number", "boolean"}, where
    assert schema.get("additionalProperties") is not False, where
    assert not ("properties" in schema and "additionalProperties" in schema), where
    if schema.get("type") == "array":
        assert "items" in schema, where
    for bound in ("minimum", "maximum"):
        # Servers hold bounds as floats: what these cannot hold exactly becomes another number.
        assert abs(schema.get(bound, 0)) <= 2**60, where


@pytest.mark.parametrize(("where", "schema"), [(where, schema) for where, schema in schemas() if "pattern" in schema])
def test_a_pattern_begins_with_what_would_do_and_matches_none_of_it(where, schema):
    mend, stop, rest = schema["pattern"].partition("$.|")
    assert stop, where
    assert len(mend) > 10, where
    for text in (mend, f"{mend} ", f"{mend}\n", f"{mend}x", ""):
        assert re.search(schema["pattern"], text) is None, (where, text)
    # Whoever quotes the example from the sentence is let in.
    examples = re.findall(r"(?:like|, | or )\s*([^\s,]+)(?=,| or |$)", mend)
    assert rest.startswith("^"), where
    assert examples or "name" in where, where


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("deadline", ["90m", "1h30m", "18:00", "2030-01-31T18:00:00Z", "2030-01-31T18:00:00+02:00"], ["soon", "25:00"]),
        ("budget", ["$4", "0.50", "4"], ["four", "-1", "4 EUR"]),
        ("workers", ["4", "1..8", "auto"], ["1-8", "many", "..4"]),
        ("deviceMemory", ["24GB", "512MiB", "8Gi"], ["much", "24 apples"]),
        ("share", ["0.3", "30%", "0.3..0.6"], ["half", "0.3-0.6"]),
        ("grace", ["15s", "1m30s"], ["a while"]),
    ],
)
def test_the_words_that_users_know_are_let_in(field, good, bad):
    pattern = spec_schema(TRAINING_KIND)["properties"][field]["pattern"]
    assert [text for text in good if not re.search(pattern, text)] == []
    assert [text for text in bad if re.search(pattern, text)] == []


def test_a_latency_is_written_as_an_objective():
    pattern = spec_schema(INFERENCE_KIND)["properties"]["slo"]["pattern"]
    assert all(re.search(pattern, text) for text in ("p99 < 200ms", "P99<=1s", "200ms"))
    assert not any(re.search(pattern, text) for text in ("fast", "p50 < 200ms"))


def test_columns_scale_and_status_are_what_an_operator_looks_for():
    training, inference = versions()
    names = [column["name"] for column in training["additionalPrinterColumns"]]
    assert names[: len(COLUMNS)] == COLUMNS
    assert [column["name"] for column in inference["additionalPrinterColumns"]][:2] == ["STATE", "WORKERS"]
    for version in (training, inference):
        properties = version["schema"]["openAPIV3Schema"]["properties"]
        for column in version["additionalPrinterColumns"]:
            _, part, name = column["jsonPath"].split(".")
            assert part == "metadata" or name in properties[part]["properties"], column
        scale = version["subresources"]["scale"]
        assert scale["specReplicasPath"] == ".spec.replicas"
        assert "replicas" in properties["spec"]["properties"]
        assert {"replicas", "selector"} <= properties["status"]["properties"].keys()
        assert version["subresources"]["status"] == {}


def test_conditions_and_their_reasons_are_enumerated():
    for version in versions():
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        condition = status["conditions"]["items"]["properties"]
        assert condition["type"]["enum"] == [kind.value for kind in ConditionType]
        assert condition["reason"]["enum"] == [reason.value for reason in Reason]
        assert "plan" in status


def test_a_name_leaves_room_for_the_digits_of_a_jobs_id():
    name = versions()[0]["schema"]["openAPIV3Schema"]["properties"]["metadata"]["properties"]["name"]
    assert name["maxLength"] + len("-123456") <= 63
