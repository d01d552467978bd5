"""The parts of a schema that a cluster checks objects by, as data; a refusal says what would do.

The API server quotes a pattern that a value does not match, and nothing else. So a pattern begins with an alternative
that no text can match and that can be read: `a time like 90m, 1h30m or 18:00$.|^...`.
"""

from __future__ import annotations

import re
from typing import Any, Final

Schema = dict[str, Any]

_DURATION = r"([0-9]+(\.[0-9]+)?\s*(ms|s|m|h|d)\s*)+"
_CLOCK = r"([01]?[0-9]|2[0-3]):[0-5][0-9]"
_MOMENT = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(Z|[+-][0-9]{2}:[0-9]{2})"
_SIZE = r"[0-9]+(\.[0-9]+)?\s*[kKmMgGtT]?i?[bB]?"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
MAX_FILES = 256
_FRACTION = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*%?"
_OBJECTIVE = r"\s*([pP]99\s*<=?\s*)?[0-9]+(\.[0-9]+)?\s*(ms|s|m)\s*"
# The part of a latency objective before the time.
LATENCY_PREFIX: Final = re.compile(r"^\s*p99\s*<=?\s*", re.IGNORECASE)


def worded(mend: str, *patterns: str) -> str:
    """A pattern whose first alternative matches nothing and says what is valid. `mend` has no special characters."""
    return f"{mend}$.|" + "|".join(f"^{pattern}$" for pattern in patterns)


def text(description: str, *, max_chars: int = 4096, least: int = 0) -> Schema:
    """A string."""
    schema: Schema = {"type": "string", "description": description, "maxLength": max_chars}
    return schema | ({"minLength": least} if least else {})


def may_be_empty(schema: Schema) -> Schema:
    """The same, where an empty text is one: servers of Kubernetes 1.20 take it for no value at all."""
    return schema | {"nullable": True}


def matching(description: str, mend: str, *patterns: str) -> Schema:
    """A string that matches a pattern."""
    return text(description, max_chars=256) | {"pattern": worded(mend, *patterns)}


def whole(description: str, minimum: int, maximum: int, default: int | None = None) -> Schema:
    """An integer within bounds."""
    schema: Schema = {"type": "integer", "format": "int64", "description": description}
    schema |= {"minimum": minimum, "maximum": maximum}
    return schema | ({} if default is None else {"default": default})


def number(description: str, maximum: float) -> Schema:
    """A positive number."""
    bounds = {"minimum": 0, "exclusiveMinimum": True, "maximum": maximum}
    return {"type": "number", "description": description, **bounds}


def flag(description: str) -> Schema:
    """A boolean."""
    return {"type": "boolean", "description": description}


def choice(description: str, *values: str, default: str | None = None) -> Schema:
    """A string that is one of a few fixed values."""
    schema: Schema = {"type": "string", "description": description, "enum": list(values)}
    return schema | ({} if default is None else {"default": default})


def _number_or(description: str, pattern: str, minimum: int, maximum: int) -> Schema:
    bounds = {"minimum": minimum, "maximum": maximum}
    return {"x-kubernetes-int-or-string": True, "description": description, "pattern": pattern, **bounds}


def duration(description: str, *, may_be_none: bool = False) -> Schema:
    """A time span: "90m", or whole seconds."""
    patterns, none = ((_DURATION, "none"), ", or none") if may_be_none else ((_DURATION,), "")
    pattern = worded(f"a time like 90m, 1h30m or 45s{none}", *patterns)
    return _number_or(f"{description} As 90m, 1h30m, 250ms, or whole seconds{none}.", pattern, 1, 10 * 365 * 86400)


def moment(description: str) -> Schema:
    """A deadline: "90m" from the object's creation, "18:00" UTC, or a date and time."""
    pattern = worded("a time like 90m, 18:00 or 2030-01-31T18:00:00Z", _DURATION, _CLOCK, _MOMENT)
    told = f"{description} As 90m (from the object's creation on), 18:00 (UTC) or 2030-01-31T18:00:00Z."
    return _number_or(told, pattern, 1, 10 * 365 * 86400)


def money(description: str) -> Schema:
    """US dollars: "$4"."""
    pattern = worded("money like $4 or 0.50 in quotes", r"\s*\$?[0-9]+(\.[0-9]+)?\s*")
    return _number_or(f"{description} As $4 or, in quotes, 0.50.", pattern, 1, 10**9)


def size(description: str) -> Schema:
    """Bytes: "24GB"."""
    return _number_or(f"{description} As 24GB, 512MiB.", worded("a size like 24GB or 512MiB", _SIZE), 1, 2**60)


def span(description: str, *, lowest: int, highest: int, auto: bool = False) -> Schema:
    """A number or a range: 4, "1..8", and where it may be left to the platform "auto"."""
    patterns = [r"\s*[0-9]{1,7}(\s*\.\.\s*[0-9]{1,7})?\s*", *(["auto"] if auto else [])]
    mend = "a number like 4, a range like 1..8" + (", or auto" if auto else "")
    told = f"{description} As 4 or 1..8{', or auto' if auto else ''}."
    return _number_or(told, worded(mend, *patterns), lowest, highest)


def share(description: str) -> Schema:
    """Fractions of a device: "0.3..0.6"."""
    mend = "a share in quotes like 0.3, 30% or 0.3..0.6"
    return matching(f"{description} In quotes: 0.3, 30% or 0.3..0.6.", mend, rf"{_FRACTION}(\s*\.\.\s*{_FRACTION})?")


def names(description: str, max_items: int = 64) -> Schema:
    """A list of names."""
    items = text("A name.", max_chars=253, least=1)
    return {"type": "array", "description": description, "items": items, "maxItems": max_items}


def lines(description: str, max_items: int, max_chars: int) -> Schema:
    """A list of lines."""
    items = text("A line.", max_chars=max_chars, least=1)
    return {"type": "array", "description": description, "items": items, "maxItems": max_items}


def free(description: str) -> Schema:
    """An object whose fields the platform checks itself."""
    return {"type": "object", "description": description, "x-kubernetes-preserve-unknown-fields": True}


def latency(description: str) -> Schema:
    """A latency objective: "p99 < 200ms"."""
    mend = worded("a latency like p99 < 200ms or 200ms", _OBJECTIVE)
    return text(description, max_chars=64) | {"pattern": mend}


def rates(description: str, max_entries: int) -> Schema:
    """Steps a second by number of workers."""
    return {
        "type": "object",
        "description": description,
        "additionalProperties": number("Optimizer steps a second.", 1e9),
        "maxProperties": max_entries,
    }


def phases(max_items: int) -> Schema:
    """The number of samples of a step, by the epoch from which it applies."""
    phase = record(
        "From an epoch on.",
        {
            "fromEpoch": whole("From 0.", 0, 100_000),
            "globalBatch": whole("Samples of one step.", 1, 1_000_000),
        },
        ("fromEpoch", "globalBatch"),
    )
    return {"type": "array", "items": phase, "maxItems": max_items}


def variables(description: str, max_entries: int) -> Schema:
    """Environment variables by name."""
    value = may_be_empty(text("Its value.", max_chars=32 * 1024))
    return {
        "type": "object",
        "description": description,
        "additionalProperties": value,
        "maxProperties": max_entries,
    }


def parameters() -> Schema:
    """What the user's code is handed: scalars by name."""
    return free("For the code: params[NAME] as a string. Values are strings, numbers or booleans.")


def record(description: str, properties: dict[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """An object of named fields."""
    schema: Schema = {"type": "object", "description": description, "properties": properties}
    return schema | ({"required": list(required)} if required else {})


def source(what: str, extra: dict[str, Schema], required: tuple[str, ...]) -> Schema:
    """The user's code: files, here or in a ConfigMap, and what to take from them."""
    # An `__init__.py` is often empty.
    body = may_be_empty(text("The file's text.", max_chars=1024 * 1024))
    properties = {
        **extra,
        "file": matching(
            f"The file that holds the {what}; may be left out where there is only one Python file.",
            "the bare name of a Python file like train.py",
            r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\.py",
        ),
        "files": {
            "type": "object",
            "description": "The files by name or path (pkg/model.py), text as it is; they may import each other.",
            "additionalProperties": body,
            "minProperties": 1,
            "maxProperties": MAX_FILES,
        },
        "configMap": text("A ConfigMap of this namespace whose keys are the files.", max_chars=253, least=1),
        "paths": {
            "type": "object",
            "description": "Where keys of the ConfigMap, which hold no slash, lie: pkg.model.py: pkg/model.py.",
            "additionalProperties": matching("The path.", "a path like pkg/model.py", f"{_PART}(/{_PART})*"),
            "maxProperties": MAX_FILES,
        },
        "folder": _folder(),
    }
    schema = record("The code, as files here or in a ConfigMap. A job keeps what it began with.", properties, required)
    return schema | {"anyOf": [{"required": ["files"]}, {"required": ["configMap"]}]}


def _folder() -> Schema:
    """The folder that the file is in, as a client has sent it."""
    return record(
        "The folder that the file is in, of which the workload works in a copy; springtide run and deploy write this.",
        {
            "sha256": text("The digest of the list of its files.", max_chars=64, least=64),
            "path": text("The file in it.", max_chars=512, least=1),
            "directory": text("Where in it the workload works; left out: at its root.", max_chars=512),
            "origin": text("Where it was, for people."),
            "configMaps": names("ConfigMaps of this namespace that hold the parts of its archive, in order.", 16),
        },
        ("sha256", "path"),
    )


def container() -> Schema:
    """Settings of the pods, in the fields of a pod's container."""
    variable = record(
        "One variable.",
        {"name": text("Its name.", max_chars=253, least=1), "value": may_be_empty(text("Its value."))},
        ("name", "value"),
    )
    processor = _number_or(
        "Processor cores: 2 or 500m.", worded("cores like 2 or 500m", r"[0-9]+m", r"[0-9]+(\.[0-9]+)?"), 1, 4096
    )
    return record(
        "What its pods are made of; what is left out is the platform's own.",
        {
            "image": text("The image; it holds springtide and what the code imports.", max_chars=1024, least=1),
            "env": {
                "type": "array",
                "description": "Environment variables.",
                "items": variable,
                "maxItems": 256,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
            "resources": record(
                "What each pod is limited to, beside its device.", {"cpu": processor, "memory": size("Main memory.")}
            ),
            "secrets": names("Secrets of this namespace whose values become environment variables."),
            "serviceAccountName": text("The ServiceAccount of its pods.", max_chars=253, least=1),
        },
    )
