"""`springtide keys`: API keys for programs that call services."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from springtide.cli.session import Session, common_options, json_option, state_option
from springtide.cli.tables.columns import UNKNOWN, align
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_duration_s

if TYPE_CHECKING:
    from springtide.core.status.api_keys import ApiKeyStatus

_NOTHING = "no keys: services are called with the platform's token, which may do everything"


@click.group()
@json_option
@state_option
def keys() -> None:
    """API keys: who holds one may call services, so often a second, and nothing else of the platform."""


@keys.command()
@click.argument("name")
@click.option("--service", "services", metavar="NAME", multiple=True, help="A service that it may call; repeatable.")
@click.option("--all-services", is_flag=True, help="It may call every service, also those to come.")
@click.option("--rate", "rate_per_s", type=click.FloatRange(0.001, 1e6), help="Requests a second. [default: any]")
@click.option("--expires", metavar="TIME", help="After what time it opens nothing any more: 30d. [default: never]")
@common_options
@click.pass_obj
def create(
    session: Session,
    name: str,
    services: tuple[str, ...],
    all_services: bool,
    rate_per_s: float | None,
    expires: str | None,
) -> None:
    """Make the key NAME and print its secret, which is not kept: it cannot be shown again."""
    if bool(services) == all_services:
        raise InvalidRequest("say which services it may call with --service NAME, or --all-services")
    made = session.client.create_key(
        name,
        None if all_services else services,
        rate_per_s=rate_per_s,
        expires_in_s=None if expires is None else parse_duration_s(expires, "--expires"),
    )
    text = f"{made.secret}\n  {_sentence(made.key)}; it is shown only now"
    session.answer(made, text, f"take it away: springtide keys revoke {name}")


@keys.command()
@common_options
@click.pass_obj
def ls(session: Session) -> None:
    """List the keys, and what became of their requests since the control plane started."""
    found = session.client.keys()
    if not found:
        session.answer(found, _NOTHING, "make one: springtide keys create NAME --service SERVICE")
        return
    rows = [
        (
            key.name,
            _services(key),
            UNKNOWN if key.rate_per_s is None else f"{key.rate_per_s:g}/s",
            _moment(key.expires_unix_s),
            f"{key.num_requests:,}",
            f"{key.num_refused:,}",
            _moment(key.last_used_unix_s),
        )
        for key in found
    ]
    head = ("KEY", "SERVICES", "RATE", "EXPIRES", "REQUESTS", "REFUSED", "LAST USED")
    session.answer(found, align(head, rows))


@keys.command()
@click.argument("name")
@common_options
@click.pass_obj
def revoke(session: Session, name: str) -> None:
    """Take the key NAME away: its next request is refused."""
    gone = session.client.revoke_key(name)
    session.answer(gone, f"{name} opens nothing any more")


def _services(key: ApiKeyStatus) -> str:
    return "all" if key.services is None else ", ".join(key.services)


def _sentence(key: ApiKeyStatus) -> str:
    what = "every service" if key.services is None else _services(key)
    rate = "" if key.rate_per_s is None else f", {key.rate_per_s:g} times a second"
    until = "" if key.expires_unix_s is None else f", until {_moment(key.expires_unix_s)}"
    return f"{key.name} may call {what}{rate}{until}"


def _moment(unix_s: float | None) -> str:
    return UNKNOWN if unix_s is None else datetime.fromtimestamp(unix_s).isoformat(" ", "seconds")
