"""Settings and their origin: flag > SPRINGTIDE_* > [tool.springtide] in pyproject.toml > user file > default."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from springtide.control.journal.retention import KEEP_ENDED, KEEP_STEPS, retention_of
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_duration_s, parse_size_bytes
from springtide.core.tide import DAY_S
from springtide.core.workload import MAX_UNFINISHED
from springtide.storage.state_directory import find_state_directory

DEFAULT_PORT = 8787
DEFAULT_POLICY = "springtide"
# Where devices cost money only while they are used: jobs get no devices that bring little.
PAY_PER_USE_POLICY = "springtide:efficiency=0.7"
_MAX_SLOTS = 256
_MAX_TEXT = 1024

Level = Literal["flag", "environment", "pyproject", "user file", "default"]
# In order of precedence.
_LEVELS: tuple[Level, ...] = ("flag", "environment", "pyproject", "user file", "default")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting: its value, the level that it comes from, and a text that names its place."""

    value: str | int | float | None
    level: Level
    origin: str

    def is_at_least_as_near_as(self, other: Setting) -> bool:
        """Whether this setting comes from the same level as the other, or from one with precedence."""
        return _LEVELS.index(self.level) <= _LEVELS.index(other.level)


def _state(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a directory, like '~/springtide'")
    return str(Path(value).expanduser().absolute())


def _url(value: Any) -> str:
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"must be an address, like 'http://127.0.0.1:{DEFAULT_PORT}'")
    return str(value)


def _whole(value: Any, lowest: int, highest: int) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdecimal() or not lowest <= int(text) <= highest:
        raise ValueError(f"must be a whole number from {lowest} to {highest}")
    return int(text)


def _price(value: Any) -> float:
    try:
        usd = float(value)
    except (TypeError, ValueError):
        usd = math.nan
    if isinstance(value, bool) or not 0 <= usd <= 1e6:
        raise ValueError("must be the US dollars that an hour of one device costs, like 0.05; 0 for nothing")
    return usd


def _policy(value: Any) -> str:
    from springtide.scheduling.registry import POLICY_NAMES, check_policy_name

    # A name may have parameters (name:key=value) and a strategy of loans (strategy/name).
    if not isinstance(value, str) or ("/" not in value and value.partition(":")[0] not in POLICY_NAMES):
        raise ValueError(f"must be one of {', '.join(POLICY_NAMES)}")
    check_policy_name(value)
    return value


def _pools(value: Any) -> str:
    from springtide.service.assembly.pool_settings import parse_pools, write_pools

    return write_pools(parse_pools(value))


def _day_s(value: Any) -> float:
    from springtide.service.assembly.pool_settings import tide_of

    return tide_of(parse_duration_s(value if isinstance(value, str | int | float) else str(value), "day")).day_s


def _functions(value: Any) -> str:
    from springtide.service.assembly.function_settings import PROVIDERS

    if value not in (*PROVIDERS, "none"):
        raise ValueError(f"must be one of {', '.join(PROVIDERS)}, or none")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_TEXT or not value.isprintable():
        raise ValueError("must be a text on one line")
    return value.strip()


def _lifetime_s(value: Any) -> float:
    return parse_duration_s(value if isinstance(value, str | int | float) else str(value), "functions_lifetime_s")


def _bandwidth(value: Any) -> float:
    return parse_size_bytes(value if isinstance(value, str | int) else str(value), "functions_bandwidth")


def _faults(value: Any) -> str:
    from springtide.service.assembly.function_settings import parse_faults

    text = value if isinstance(value, str) else str(value)
    parse_faults(text)
    return text


def _journal_retention(value: Any) -> str:
    retention_of(str(value), KEEP_ENDED)
    return str(value)


def _keep_ended(value: Any) -> str:
    retention_of(KEEP_STEPS, str(value))
    return str(value)


_CHECKS: Mapping[str, Callable[[Any], str | int | float]] = MappingProxyType(
    {
        "state": _state,
        "url": _url,
        "port": lambda value: _whole(value, 0, 65535),
        "grpc_port": lambda value: _whole(value, 0, 65535),
        "slots": lambda value: _whole(value, 1, _MAX_SLOTS),
        "policy": _policy,
        "price": _price,
        "pools": _pools,
        "day_s": _day_s,
        "max_unfinished": lambda value: _whole(value, 0, 1_000_000),
        "journal_retention": _journal_retention,
        "keep_ended": _keep_ended,
        "functions": _functions,
        "functions_store": _text,
        "functions_parameter_store": _text,
        "functions_region": _text,
        "functions_role": _text,
        "functions_image": _text,
        "functions_endpoint": _text,
        "functions_concurrency": lambda value: _whole(value, 1, 10_000),
        "functions_places": lambda value: _whole(value, 1, 64),
        "functions_lifetime_s": _lifetime_s,
        "functions_bandwidth": _bandwidth,
        "functions_faults": _faults,
    }
)
NAMES = tuple(_CHECKS)
# Flags whose names differ from their setting's: the setting's name includes the unit, flags take "2m".
_FLAGS: Mapping[str, str] = MappingProxyType({"day_s": "--day", "functions_lifetime_s": "--functions-lifetime"})


def user_file() -> Path:
    """`springtide/config.toml` in the user's configuration folder."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "springtide" / "config.toml"


def resolve(name: str, flag: str | int | float | None = None) -> Setting:
    """The effective setting. Raises InvalidRequest, which names the place of an invalid value."""
    if flag is not None:
        return _checked(name, flag, "flag", _FLAGS.get(name, f"--{name.replace('_', '-')}"))
    variable = f"SPRINGTIDE_{name.upper()}"
    if given := os.environ.get(variable):
        return _checked(name, given, "environment", variable)
    project = Path.cwd() / "pyproject.toml"
    table = _read(project).get("tool", {})
    section = table.get("springtide", {}) if isinstance(table, dict) else {}
    if isinstance(section, dict):
        # Of the files beside it, not of the platform: client/requirements.py reads it.
        section = {key: value for key, value in section.items() if key != "dependencies"}
    if name in _known(section, f"[tool.springtide] in {project}"):
        return _checked(name, section[name], "pyproject", f"[tool.springtide] in {project}")
    own = _read(user_file())
    if name in _known(own, str(user_file())):
        return _checked(name, own[name], "user file", str(user_file()))
    if name == "state":
        found_state = find_state_directory()
        return Setting(value=str(found_state.path), level="default", origin=found_state.note or "default")
    default: dict[str, str | int | float | None] = {
        "port": DEFAULT_PORT,
        "policy": DEFAULT_POLICY,
        "day_s": DAY_S,
        "max_unfinished": MAX_UNFINISHED,
        "journal_retention": KEEP_STEPS,
        "keep_ended": KEEP_ENDED,
    }
    return Setting(value=default.get(name), level="default", origin="default")


def _checked(name: str, value: Any, level: Level, origin: str) -> Setting:
    try:
        return Setting(value=_CHECKS[name](value), level=level, origin=origin)
    except ValueError as error:
        raise InvalidRequest(f"{name} {error}, not {value!r:.80} ({origin})") from None
    except InvalidRequest as error:
        raise InvalidRequest(f"{error} ({origin})") from None


def _read(path: Path) -> dict[str, Any]:
    """The file's content, empty if there is no file. Raises InvalidRequest if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}; mend it, or call this from another folder") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from None


def _known(section: Any, place: str) -> dict[str, Any]:
    if not isinstance(section, dict):
        raise InvalidRequest(f"{place} must be a table of settings; they are {', '.join(NAMES)}")
    unknown = [key for key in section if key not in _CHECKS]
    if unknown:
        raise InvalidRequest(f"there is no setting {unknown[0]!r} ({place}); they are {', '.join(NAMES)}")
    return section
