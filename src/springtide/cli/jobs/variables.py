"""`--env`, `--env-file` and `--secret`: variables of workers, from the command line, dotenv files and the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import click
from dotenv.parser import parse_stream

from springtide.core.errors import InvalidRequest
from springtide.core.options.variables import Secrets, check_variable_name, secret_sources

MAX_FILE_BYTES = 1024 * 1024


def read_variables(given: Iterable[str], files: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `--env` and `--env-file` name; a later one replaces an earlier one, a flag those of files.

    NAME without a value has the one that it has in `environment`. Raises InvalidRequest, without any value in it.
    """
    found: dict[str, str] = {}
    for file in files:
        found |= read_env_file(Path(file), environment)
    for item in given:
        name, separator, value = item.partition("=")
        check_variable_name(name, "--env")
        found[name] = value if separator else _inherited(name, environment, "--env")
    return found


def read_env_file(path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a dotenv file. Nothing is replaced in values: $NAME stays as it is. Raises InvalidRequest."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"--env-file {path} is larger than 1 MiB; is it a file of variables?")
        with path.open(encoding="utf-8") as stream:
            bindings = list(parse_stream(stream))
    except UnicodeDecodeError:
        raise InvalidRequest(f"--env-file {path} is not UTF-8 text") from None
    except OSError as error:
        raise InvalidRequest(f"--env-file {path} cannot be read: {error.strerror or error}") from None
    found: dict[str, str] = {}
    for binding in bindings:
        # What the parser calls the line is that of the blank lines before it.
        text = binding.original.string
        line = binding.original.line + text[: len(text) - len(text.lstrip())].count("\n")
        where = f"--env-file {path} line {line}"
        if binding.error:
            raise InvalidRequest(f"{where} is not NAME=VALUE; quote a value of several words or lines")
        if binding.key is None:
            continue
        check_variable_name(binding.key, where)
        found[binding.key] = _inherited(binding.key, environment, where) if binding.value is None else binding.value
    return found


def _inherited(name: str, environment: Mapping[str, str], where: str) -> str:
    if name not in environment:
        raise InvalidRequest(f"{where} {name} takes its value from this shell, which has none: write {name}=VALUE")
    return environment[name]


def ask_secrets(secrets: Secrets, environment: Mapping[str, str], *, may_ask: bool) -> Secrets:
    """The secrets with a value for those that have none here: it is asked for on the terminal, and not shown."""
    sources = secret_sources(secrets, "--secret")
    missing = [name for name, source in sources.items() if source is None and not environment.get(name)]
    if not missing or not may_ask:
        return secrets
    return {**sources, **{name: click.prompt(name, hide_input=True, err=True) for name in missing}}
