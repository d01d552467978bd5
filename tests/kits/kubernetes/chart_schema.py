"""What Helm checks a chart's values by, made from the settings themselves. Run as a program, it writes the file."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec

from springtide.backends.kubernetes.install.settings_file import SettingsFile

PLACE = Path(__file__).parents[3] / "deploy" / "helm" / "springtide" / "values.schema.json"


def values_schema() -> dict[str, Any]:
    """JSON Schema (draft 7, which Helm reads) of the settings file, with what Helm itself puts beside them."""
    schema = msgspec.json.schema(SettingsFile)
    written: dict[str, Any] = json.loads(json.dumps(schema))
    definitions = written["$defs"]
    plain: dict[str, Any] = _written_out(definitions["SettingsFile"], definitions)
    plain["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **plain}


def _written_out(value: Any, definitions: dict[str, Any]) -> Any:
    """The same without references and defaults: these are the values' own. Descriptions are not indented."""
    if isinstance(value, dict):
        if "$ref" in value:
            return _written_out(definitions[value["$ref"].rpartition("/")[2]], definitions)
        if isinstance(text := value.get("description"), str):
            value = {**value, "description": inspect.cleandoc(text)}
        return {key: _written_out(member, definitions) for key, member in value.items() if key != "default"}
    return [_written_out(member, definitions) for member in value] if isinstance(value, list) else value


if __name__ == "__main__":
    PLACE.write_text(json.dumps(values_schema(), indent=2) + "\n")
