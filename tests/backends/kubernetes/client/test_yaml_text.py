"""YAML in and out: plain values only, mistakes with their place, the same text every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.backends.kubernetes.client.yaml_text import read_yaml, write_yaml
from springtide.core.errors import InvalidRequest

TEXTS = st.text(max_size=30).filter(
    lambda text: all(character.isprintable() or character == "\n" for character in text)
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), TEXTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=10
)


@pytest.mark.slow
@given(st.lists(VALUES.filter(lambda value: value is not None), max_size=3))
def test_what_is_written_is_read_again(documents: list[object]) -> None:
    assert read_yaml(write_yaml(documents), "it") == documents


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "no",
        "on",
        "1.20",
        "0o17",
        "017",
        "1e3",
        "1E5",
        ".5",
        "null",
        "~",
        "2026-11-22",
        "0x1f",
        "",
        "18:00",
        "true",
    ],
)
def test_a_text_that_looks_like_something_else_is_quoted_for_every_reader(text: str) -> None:
    written = write_yaml([{"value": text}])
    assert written == f"---\nvalue: '{text}'\n"
    assert read_yaml(written, "it") == [{"value": text}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18:00", "18:00"),
        ("2030-01-31T18:00:00Z", "2030-01-31T18:00:00Z"),
        ("2030-01-31", "2030-01-31"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("0440", 288),
        ("0o440", 288),
        ("0x1F", 31),
        ("-12", -12),
        ("+3", 3),
        ("0", 0),
        ("089", 89.0),
        ("1e3", 1000.0),
        ("1.5", 1.5),
        ("-.5", -0.5),
        ("1_000", "1_000"),
        ("1.2.3", "1.2.3"),
        ("10Gi", "10Gi"),
        ("~", None),
        ("null", None),
        ("nullable", "nullable"),
    ],
)
def test_scalars_are_read_as_they_are_meant(text: str, value: object) -> None:
    (read,) = read_yaml(f"value: {text}", "it")
    assert read == {"value": value}
    assert type(read["value"]) is type(value)


def test_one_table_may_begin_as_another() -> None:
    (read,) = read_yaml("base: &base {a: 1}\nmore: {<<: *base, b: 2}", "it")
    assert read == {"base": {"a": 1}, "more": {"a": 1, "b": 2}}


def test_documents_that_hold_nothing_are_left_out() -> None:
    assert read_yaml("---\n---\na: 1\n---\n# nothing\n", "it") == [{"a": 1}]


def test_what_is_said_twice_is_written_twice() -> None:
    labels = {"app": "springtide"}
    text = write_yaml([{"one": labels, "other": labels}])
    assert "&" not in text
    assert "*" not in text
    assert text == "---\none:\n  app: springtide\nother:\n  app: springtide\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1,\n", r"settings\.yaml is not valid YAML, line 2, column 1"),
        ("a: !!python/object/apply:os.system [id]", r"settings\.yaml is not valid YAML, line 1, column 4: could not"),
        ("a: b: c", r"line 1, column 5"),
        ("a: \x07", "not valid YAML"),
        ("x" * 4_000_001, "longer than 4 million characters"),
        ("[" * 3_000, "not valid YAML"),
    ],
    ids=["torn", "object", "nested", "control character", "long", "deep"],
)
def test_a_mistake_is_told_with_its_place(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        read_yaml(text, "settings.yaml")


def test_a_few_lines_cannot_stand_for_billions_of_values() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)]
    with pytest.raises(InvalidRequest, match=r"more than 200,000 values; write it without aliases"):
        read_yaml("\n".join(lines), "settings.yaml")


def test_what_holds_itself_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="without aliases"):
        read_yaml("&a [*a]", "settings.yaml")
