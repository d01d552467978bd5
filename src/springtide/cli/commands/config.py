"""`springtide config show`: the effective settings, and where each comes from."""

from __future__ import annotations

import click
from msgspec.structs import replace

from springtide.cli.session import Session, common_options, json_option, state_option
from springtide.cli.settings import NAMES, Setting, resolve, user_file
from springtide.cli.tables.columns import align

_UNSET = {
    "url": "that of the platform in `state`",
    "slots": "the GPUs, else the cores",
    "price": "the usual one",
    "pools": "all share the slots",
    "functions": "none: jobs run on this machine",
    "functions_store": "a folder of the state directory",
    "functions_parameter_store": "the store itself",
    "functions_concurrency": "as the service allows",
    "functions_places": "4 jobs at a time",
    "functions_lifetime_s": "as the service allows",
    "functions_bandwidth": "as the service has it",
    "functions_faults": "none",
}


def _shown(name: str, setting: Setting) -> Setting:
    """The setting for printing, without the password of an address."""
    if name in ("functions_store", "functions_parameter_store") and setting.value is not None:
        from springtide.service.assembly.function_settings import shown_address

        return replace(setting, value=shown_address(str(setting.value)))
    return setting


@click.group()
@json_option
@state_option
def config() -> None:
    """Settings: a flag goes before SPRINGTIDE_*, before [tool.springtide] in pyproject.toml, before the user's file."""


@config.command()
@click.option("--origin", is_flag=True, help="Say for each one where it comes from.")
@common_options
@click.pass_obj
def show(session: Session, origin: bool) -> None:
    """Print the settings that hold in this folder."""
    state_dir = session.given_state_dir
    flags = {"state": None if state_dir is None else str(state_dir)}
    found = {name: _shown(name, resolve(name, flags.get(name))) for name in NAMES}
    if session.as_json:
        answer = {name: {"value": setting.value, "origin": setting.origin} for name, setting in found.items()}
        session.print_json(answer if origin else {name: setting.value for name, setting in found.items()})
        return
    rows = []
    for name, setting in found.items():
        value = _UNSET.get(name, "-") if setting.value is None else str(setting.value)
        rows.append((name, value, setting.origin) if origin else (name, value))
    header = ("SETTING", "VALUE", "FROM") if origin else ("SETTING", "VALUE")
    hint = f"change one: a flag, SPRINGTIDE_PORT=..., [tool.springtide] in pyproject.toml, or {user_file()}"
    session.answer(found, align(header, rows), hint)
