"""`springtide up --functions`: the flags and settings of the platform's function service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from springtide.cli.settings import NAMES, resolve
from springtide.core.quantities import format_duration
from springtide.service.assembly.function_settings import (
    FunctionSettings,
    check_settings,
    parse_faults,
    shown_address,
)

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
NAMES_OF_FUNCTIONS = tuple(name for name in NAMES if name.startswith("functions"))
_OPTIONS = (
    click.option(
        "--functions",
        metavar="SERVICE",
        help="Jobs may run on functions, too: emulator, aws or alibaba. [default: none]",
    ),
    click.option("--functions-store", metavar="URL", help="Where they meet: file:///path or s3://bucket/prefix."),
    click.option(
        "--functions-parameter-store",
        metavar="URL",
        help="What carries gradients, if not the store: redis (starts one a job), redis://, shm://, ecs://.",
    ),
    click.option("--functions-region", metavar="R", help="Of the provider."),
    click.option("--functions-role", metavar="ARN", help="What functions may do: read and write the store."),
    click.option("--functions-image", metavar="URI", help="What functions are made of: see `springtide package`."),
    click.option("--functions-endpoint", metavar="URL", help="Another address of the provider's API."),
    click.option(
        "--functions-concurrency",
        metavar="N",
        help="How many functions jobs may have at a time; their successors come on top.",
    ),
    click.option("--functions-places", metavar="N", help="How many jobs may run on functions at a time. [default: 4]"),
    click.option(
        "--functions-lifetime", "functions_lifetime_s", metavar="TIME", help="Emulator: when a function is ended: 60s."
    ),
    click.option("--functions-bandwidth", metavar="SIZE", help="Emulator: of a function each way, a second: 70MB."),
    click.option(
        "--functions-faults", metavar="F=P", help="Emulator: what goes wrong how often: kill=0.05,throttled=0.1."
    ),
)


def function_options(command: CommandT) -> CommandT:
    """A decorator that adds the flags of the function service."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def settings_of(given: dict[str, Any]) -> FunctionSettings | None:
    """The function service in flags and settings; None if there is none. Raises InvalidRequest."""
    found = {name: resolve(name, given[name]) for name in NAMES_OF_FUNCTIONS}
    provider = found.pop("functions").value
    if provider in (None, "none"):
        flag = next((name for name in found if given[name] is not None), None)
        if flag is not None:
            from springtide.cli.session import refuse

            refuse(f"--{flag.removesuffix('_s').replace('_', '-')} needs a function service: add --functions emulator")
        return None
    values = {name.removeprefix("functions_"): setting.value for name, setting in found.items()}
    values["bytes_per_s"] = values.pop("bandwidth")
    faults = parse_faults(str(values.pop("faults") or ""))
    named = {name: value for name, value in values.items() if value is not None}
    settings = FunctionSettings(provider=provider, faults=faults, **named)  # type: ignore[arg-type]
    check_settings(settings)
    return settings


def functions_text(settings: FunctionSettings | None) -> str:
    """A line about the connected function service; empty without one."""
    return "" if settings is None else f"\n  functions  {summary_of(settings)}   (springtide run FILE --on functions)"


def summary_of(settings: FunctionSettings) -> str:
    """What the platform is connected to: aws in eu-central-1; store s3://bucket/springtide."""
    parts: list[str] = [settings.provider]
    if settings.region:
        parts[0] += f" in {settings.region}"
    if settings.is_emulated:
        parts.append("functions are processes of this machine")
    if settings.lifetime_s is not None:
        parts.append(f"each ends after {format_duration(settings.lifetime_s)}")
    if settings.store:
        parts.append(f"store {shown_address(settings.store)}")
    if settings.parameter_store:
        parts.append(f"parameter store {shown_address(settings.parameter_store)}")
    if settings.faults:
        parts.append("faults " + ", ".join(f"{name} {fraction:.0%}" for name, fraction in settings.faults.items()))
    return "; ".join(parts)
