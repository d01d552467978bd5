"""What `deploy` and `rollback` share: the flags of a release, the question before a gap, and waiting for the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from springtide.cli.session import Session
from springtide.core.errors import InvalidRequest, NoRoomBeside
from springtide.core.quantities import parse_duration_s
from springtide.core.status.platform import ServiceStatus
from springtide.core.status.revisions import RevisionStatus
from springtide.core.workload import DEFAULT_GRACE_S

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
AnswerT = TypeVar("AnswerT")
_POLL_S = 0.1
# A device that is taken from a job is free after the job's grace, so waiting much longer would not help.
_DEVICE_TIMEOUT_S = 2 * DEFAULT_GRACE_S
_FLAGS = ("canary", "watch", "watch_for", "when_full")


def release_options(command: CommandT) -> CommandT:
    """Add the flags of a release to a command."""
    for option in (
        click.option(
            "--when-full",
            type=click.Choice(["borrow", "stop-first", "refuse"]),
            help="No device is free beside the present revision: wait for one that others can give up, stop the "
            "present one first, or refuse. Left out: asks; without a terminal, refuses.",
        ),
        click.option("--watch-for", metavar="TIME", help="How long it is a canary at most: 10m; none: you decide."),
        click.option("--watch", metavar="RULES", help="What its answers are held to meanwhile: p99<200ms,errors<1%."),
        click.option("--canary", metavar="PERCENT", help="The part of the requests that it gets first: 10%."),
    ):
        command = option(command)
    return command


def release_asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The `release` of a request, from the flags. Raises InvalidRequest."""
    release: dict[str, Any] = {}
    if options["canary"] is not None:
        release["canary"] = _fraction(options["canary"])
    if options["watch"] is not None:
        release["watch"] = options["watch"]
    if options["watch_for"] is not None:
        until = options["watch_for"]
        release["watch_for_s"] = 0.0 if until == "none" else parse_duration_s(until, "--watch-for")
    if (release.get("watch") or "watch_for_s" in release) and "canary" not in release:
        raise InvalidRequest("--watch and --watch-for are for a canary; say its part of the requests: --canary 10%")
    if options["when_full"] is not None:
        release["when_full"] = options["when_full"]
    return release


def refuse_release(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for flags that an object of a cluster does not have."""
    given = [name for name in _FLAGS if options[name] is not None]
    if given:
        raise InvalidRequest(
            f"--{given[0].replace('_', '-')} has no meaning with --on k8s: an object's new revision starts beside the "
            "present one, waits for a device where none is free, and gets all requests once it is ready"
        )


def with_room_asked(
    session: Session, release: Mapping[str, Any], send: Callable[[Mapping[str, Any]], AnswerT]
) -> AnswerT:
    """Send a release. Where nothing was said about a full platform, ask before requests have to wait for it."""
    if "when_full" in release:
        return send(release)
    try:
        return send({**release, "when_full": "refuse"})
    except NoRoomBeside as error:
        if not session.may_ask:
            raise
        session.note(str(error))
        if not click.confirm("Stop the present revision first?", default=False, err=True):
            raise
        return send({**release, "when_full": "stop-first"})


def wait_released(session: Session, name: str, revision: int) -> ServiceStatus | None:
    """Wait until it is decided whether that revision gets all requests.

    Returns the service if it is not to be waited for any longer: it was given up, or no device comes free for it. None
    if the revision is the present one.
    """
    end_s, told = time.monotonic() + _DEVICE_TIMEOUT_S, ""
    while True:
        service = session.client.service(name)
        found = of_number(service, revision)
        if service.revision == revision:
            return None
        if found is None or found.state not in ("starting", "canary"):
            return service
        if found.num_replicas:
            end_s = max(end_s, time.monotonic() + _DEVICE_TIMEOUT_S)
        elif time.monotonic() > end_s:
            return service
        if found.reason != told:
            told = found.reason
            session.note(told)
        time.sleep(_POLL_S)


def of_number(service: ServiceStatus, revision: int) -> RevisionStatus | None:
    """The revision of that number, if the service still knows it."""
    return next((each for each in service.revisions if each.revision == revision), None)


def released_problem(service: ServiceStatus, revision: int) -> str:
    """What a person is told where that revision does not answer; empty where it does."""
    if service.revision == revision:
        return ""
    found = of_number(service, revision)
    goes_on = f"revision {service.revision} goes on serving"
    if found is None or found.state == "retired":
        return f"revision {revision} of {service.name} was replaced meanwhile; {goes_on}"
    match found.state:
        case "failed":
            return f"revision {revision} of {service.name} was given up: {found.reason}; {goes_on}"
        case "cancelled":
            return f"revision {revision} of {service.name} was cancelled: {found.reason}; {goes_on}"
        case "starting":
            return (
                f"{service.name}: {found.reason}; it takes over once it is ready. `springtide why {service.name}` says "
                f"what it waits for, `springtide rollback {service.name}` gives it up"
            )
    return ""


def _fraction(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise InvalidRequest(f"--canary {text!r:.40} is no part of the requests; write it like 10% or 0.1")
    return value
