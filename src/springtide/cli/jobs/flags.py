"""Command-line flags made from the tables of options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from springtide.cli.jobs.variables import read_variables
from springtide.cli.session import refuse
from springtide.core.options.kinds import Choice, Count, Number, Params, SecretNames, ServiceNames, Toggle, Variables
from springtide.core.options.option import FlagText, Option, Table
from springtide.core.options.variables import secret_sources

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_ENV_FILE = "env_file"


def option_flags(table: Table, command: str) -> Callable[[CommandT], CommandT]:
    """A decorator that adds the options' flags for this command, with the keywords' names as parameters."""

    def added(function: CommandT) -> CommandT:
        for option in reversed(table):
            if command in option.flags:
                function = _flag(option, option.flags[command])(function)
        return function

    return added


def given_keywords(table: Table, command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords whose flags were given. Raises InvalidRequest."""
    keywords: dict[str, Any] = {}
    for option in table:
        text = option.flags.get(command)
        if text is None:
            continue
        value = given[option.name]
        match option.kind:
            case Variables():
                value = read_variables(value, given[_ENV_FILE], os.environ) or None
            case SecretNames():
                value = secret_sources(value, text.flag) or None
            case Params():
                value = parse_params(value) if value else None
        if value not in (None, ()):
            keywords[option.name] = value
    return keywords


def parse_params(given: tuple[str, ...]) -> dict[str, str]:
    """`("lr=0.1",)` as a mapping. Raises InvalidRequest."""
    params = {}
    for item in given:
        key, separator, value = item.partition("=")
        if not separator or not key:
            refuse(f"--param {item!r} is not a parameter; write it like --param lr=0.1")
        params[key] = value
    return params


def _flag(option: Option, text: FlagText) -> Callable[[CommandT], CommandT]:
    settings: dict[str, Any] = {"help": text.help, "metavar": text.metavar}
    match text.kind or option.kind:
        case Toggle():
            # None without the flag, so that the file's value stays.
            settings = {"help": text.help, "default": None, "is_flag": True}
        case Choice(values):
            settings["type"] = click.Choice([*values, *text.choices])
        case Count(lowest):
            settings["type"] = click.IntRange(min=lowest)
        case Number():
            settings["type"] = float
        case Params() | SecretNames() | ServiceNames():
            settings["multiple"] = True
        case Variables():
            return _variable_flags(option.name, text)
    return click.option(text.flag, option.name, **settings)


def _variable_flags(name: str, text: FlagText) -> Callable[[CommandT], CommandT]:
    one = click.option(text.flag, name, multiple=True, help=text.help, metavar=text.metavar)
    file = click.option(
        "--env-file", _ENV_FILE, multiple=True, metavar="FILE", help="Such variables from a dotenv file. Repeatable."
    )
    return lambda command: one(file(command))
