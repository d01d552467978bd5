"""YAML as text: the one place that knows PyYAML. Reading builds plain values only; writing is stable, key by key.

What is no text is read as kubectl's users mean it: `18:00`, `2030-01-31`, `yes` and `on` are texts, `0440` is octal,
and `1e3` a number. What is written is quoted wherever any reader could take it for something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from springtide.core.errors import InvalidRequest

_MAX_CHARACTERS = 4_000_000
# Limits after aliases are expanded: a few lines of them can stand for billions of values.
_MAX_VALUES = 200_000
_INTEGER = re.compile(r"[-+]?(?:0b[01]+|0o?[0-7]+|0x[0-9a-fA-F]+|0|[1-9][0-9]*)")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
# The first characters of scalars of each type.
_RESOLVERS = (
    ("bool", _BOOLEAN, "tTfF"),
    ("null", _NULL, ("~", "n", "N", "")),
    ("int", _INTEGER, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
)


def read_yaml(text: str, place: str) -> list[Any]:
    """The documents of a text of YAML or JSON, empty ones left out. `place` names the text in what people are told.

    Raises InvalidRequest with line and column if it is no YAML, holds tags that would build objects, or is too long.
    """
    import yaml

    if len(text) > _MAX_CHARACTERS:
        raise InvalidRequest(f"{place} is longer than {_MAX_CHARACTERS // 1_000_000} million characters")
    try:
        documents = [document for document in yaml.load_all(text, _reader()) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise InvalidRequest(f"{place} is not valid YAML{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidRequest(f"{place} is not valid YAML: {error}") from None
    if not _is_bounded(documents):
        raise InvalidRequest(f"{place} stands for more than {_MAX_VALUES:,} values; write it without aliases (*name)")
    return documents


def _reader() -> Any:
    """Return the loader class: plain values, and fewer texts that turn into booleans or numbers."""
    import yaml

    class Reader(yaml.SafeLoader):  # type: ignore[misc]
        """Scalars as in YAML 1.2, with the octal numbers that manifests have."""

        # Merge keys (<<) and tags are not resolved.
        yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}

        def read_integer(self, node: Any) -> int:
            sign, digits = re.fullmatch(r"([-+]?)(.*)", self.construct_scalar(node)).groups()  # type: ignore[union-attr]
            is_octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdecimal()
            return int(sign + digits, 8 if is_octal else 0)

    for kind, pattern, first in _RESOLVERS:
        # The pattern must match the whole scalar, else it is a text.
        whole = re.compile(f"(?:{pattern.pattern})$")
        Reader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", whole, list(first))
    Reader.add_constructor("tag:yaml.org,2002:int", Reader.read_integer)
    return Reader


def _is_bounded(documents: list[Any]) -> bool:
    """Whether the values, counted once for each alias, are few enough; never if one contains itself."""
    waiting: list[Any] = list(documents)
    num_values = 0
    while waiting and num_values <= _MAX_VALUES:
        value = waiting.pop()
        num_values += 1
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return not waiting


def write_yaml(documents: Iterable[Any], *, sorts_keys: bool = False) -> str:
    """The documents as one text, separated by `---`. Texts of several lines are written as blocks."""
    import yaml

    class Writer(yaml.SafeDumper):  # type: ignore[misc]
        """Blocks for texts of several lines, no anchors: repeated values are written out each time."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            # Lists stand under their key with an indent of their own, as kubectl's users are used to write them.
            super().increase_indent(flow, False)

    def write_text(writer: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return writer.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Writer.add_representer(str, write_text)
    for kind, pattern, first in _RESOLVERS:
        Writer.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"(?:{pattern.pattern})$"), list(first))
    return str(
        yaml.dump_all(
            list(documents),
            Dumper=Writer,
            sort_keys=sorts_keys,
            width=120,
            allow_unicode=True,
            explicit_start=True,
            default_flow_style=False,
        )
    )
