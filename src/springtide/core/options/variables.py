"""The environment variables that a workload's owner may set for its workers, and the names that are the platform's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from springtide.core.errors import InvalidRequest

MAX_VARIABLES: Final = 64
# Of all names and values together. A pod is told them in its own environment, which holds 120 kB.
MAX_VARIABLES_BYTES: Final = 32 * 1024
NAME_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
# Secrets as they are asked for: names ("NAME", or "NAME=@file"), or where the value of each is: a text, a file, or None
# for the variable of that name where the workload is submitted.
Secrets = Sequence[str] | Mapping[str, str | Path | None]
_NAME = re.compile(NAME_PATTERN.removeprefix("^").removesuffix("$"), re.ASCII)
_BY_PLATFORM: Final = "the platform sets it"
_AT_START: Final = "it is read when a process starts, and the worker runs by then, so that it would have no effect"
_RESERVED: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        (
            *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
            *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "POD_IP"),
        ),
        _BY_PLATFORM,
    )
    | dict.fromkeys(("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED"), _AT_START)
)
_RESERVED_PREFIXES: Final = ("SPRINGTIDE_", "MASTER_", "TORCHELASTIC_")


def check_variable_name(name: object, where: str) -> str:
    """The name if a variable may have it. Raises InvalidRequest, which calls the option `where`."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{where} has {name!r:.80}, which is no name of a variable: up to 128 letters, digits and _, no digit "
            "first, like HF_HOME"
        )
    # On some systems names differ by case only, and libraries read both.
    why = _RESERVED.get(name) or (_BY_PLATFORM if name.startswith(_RESERVED_PREFIXES) else "")
    if why:
        raise InvalidRequest(f"{where} cannot set {name}: {why}; leave it out, or use another name")
    return name


def check_variables(value: Any, where: str) -> dict[str, str]:
    """Variables as the strings that workers get. Raises InvalidRequest, which calls the option `where`.

    No sentence repeats a value: it may be private.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must map names to values, like {{'HF_HOME': '/data/hf'}}")
    found: dict[str, str] = {}
    for name, text in value.items():
        check_variable_name(name, where)
        if isinstance(text, bool) or not isinstance(text, str | int | float):
            raise InvalidRequest(f"{where}: the value of {name} must be a string or a number, not {_kind(text)}")
        found[name] = str(text)
        if "\0" in found[name]:
            raise InvalidRequest(f"{where}: the value of {name} has a NUL character, which no variable can hold")
        if not _is_encodable(found[name]):
            raise InvalidRequest(f"{where}: the value of {name} is not Unicode text; encode it, as base64 does")
    if len(found) > MAX_VARIABLES:
        raise InvalidRequest(f"{where} has {len(found)} variables; at most {MAX_VARIABLES} are possible")
    size = sum(len(name.encode()) + len(text.encode()) for name, text in found.items())
    if size > MAX_VARIABLES_BYTES:
        raise InvalidRequest(
            f"{where} has {size:,} bytes, and {MAX_VARIABLES_BYTES:,} are possible; put what is large into a file"
        )
    return found


def secret_sources(value: Any, where: str) -> dict[str, str | Path | None]:
    """Where the value of each secret is, by name. Raises InvalidRequest, which calls the option `where`."""
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        raise InvalidRequest(f"{where} must list names of variables, like ['WANDB_API_KEY'] or ['KEY=@key.txt']")
    found: dict[str, str | Path | None] = {}
    for item in value:
        name, separator, file = item.partition("=@") if isinstance(item, str) else (item, "", "")
        if not isinstance(value, Mapping) and isinstance(item, str) and "=" in item and not (separator and file):
            raise InvalidRequest(
                f"{where} takes no value of {item.partition('=')[0]!r:.80}, which other users of the machine and shell "
                "histories would show: name the variable alone, or a file, like KEY=@key.txt"
            )
        if isinstance(value, Mapping):
            name, source = item, value[item]
        else:
            source = Path(file) if separator else None
        if not isinstance(source, str | Path | None):
            raise InvalidRequest(f"{where}: the value of {name!r:.80} must be a string, not {_kind(source)}")
        found[check_variable_name(name, where)] = source
    if len(found) > MAX_VARIABLES:
        raise InvalidRequest(f"{where} has {len(found)} variables; at most {MAX_VARIABLES} are possible")
    return found


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
