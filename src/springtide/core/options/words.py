"""What each face of the platform calls an option, and how it writes a value: the words of a sentence on options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.option import Option, Table
from springtide.core.options.services import SERVICE_OPTIONS

# The command line is Python's face with flags beside the keywords.
RuleFace = Literal["python", "rest", "object"]
_PROFILED_MICRO_BATCH = "a profile with --micro-batch {}"
# Where a face says the option of a job by a field that is not in its row.
_OTHER_NAMES: Mapping[tuple[RuleFace, str], str] = MappingProxyType(
    {
        ("rest", "global_batch"): "options.batch",
        ("rest", "initial_batch"): "options.global_batch_size",
        ("rest", "micro_batch"): "options.layer_profile.micro_batch_size",
        ("object", "micro_batch"): "spec.functions.layerProfile.micro_batch_size",
        ("object", "on"): "spec.functions",
    }
)


@dataclass(frozen=True, slots=True)
class FaceWords:
    """The words of one face for the options of a table."""

    face: RuleFace
    table: Table

    def name(self, option_name: str) -> str:
        """The option as the face calls it: "fastest", "options.is_fastest", "spec.functions.fastest"."""
        option, other = self._option(option_name), _OTHER_NAMES.get((self.face, option_name))
        if other is not None:
            return other
        if self.face == "python":
            return option.name
        if self.face == "rest":
            field = option.rest or option.parts[0]
            return f"options.{field.path}"
        assert option.object is not None, f"objects have no {option_name}"
        return f"spec.{option.object.path}"

    def written(self, option_name: str, value: Any) -> str:
        """The option with a value as the face takes it: "workers=(1, 8) (--workers 1..8)", "workers: 1..8"."""
        if self.face == "python":
            flags = self._option(option_name).flags
            flag = flags.get("run") or flags.get("deploy")
            return f"{option_name}={value!r}" + (f" ({flag.flag} {_typed(value)})" if flag is not None else "")
        if option_name == "micro_batch":
            return _PROFILED_MICRO_BATCH.format(value)
        if self.face == "rest":
            return _rest_text(self.name(option_name), option_name, value)
        if option_name == "on":
            return self.name(option_name)
        return f"{self.name(option_name).removeprefix('spec.')}: {_typed(value)}"

    def _option(self, name: str) -> Option:
        return next(option for option in self.table if option.name == name)


JOB_WORDS: Final[Mapping[RuleFace, FaceWords]] = MappingProxyType(
    {
        "python": FaceWords("python", JOB_OPTIONS),
        "rest": FaceWords("rest", JOB_OPTIONS),
        "object": FaceWords("object", JOB_OPTIONS),
    }
)
SERVICE_WORDS: Final[Mapping[RuleFace, FaceWords]] = MappingProxyType(
    {
        "python": FaceWords("python", SERVICE_OPTIONS),
        "rest": FaceWords("rest", SERVICE_OPTIONS),
        "object": FaceWords("object", SERVICE_OPTIONS),
    }
)


def _typed(value: Any) -> str:
    return f"{value[0]}..{value[1]}" if isinstance(value, tuple) else str(value)


def _rest_text(name: str, option_name: str, value: Any) -> str:
    if option_name != "global_batch":
        return f"{name} {value!r}"
    if isinstance(value, tuple):
        return f"{name} {json.dumps({'min_size': value[0], 'max_size': value[1]})}"
    return f"options.global_batch_size {value} without {name}"
