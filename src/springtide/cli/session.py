"""What all commands share: the state directory, the connection, answers as text or JSON, and finding a workload."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from springtide.cli import terminal
from springtide.cli.settings import resolve
from springtide.core.errors import InvalidRequest, NotFound
from springtide.core.status.platform import JobStatus, PlatformStatus, ServiceStatus
from springtide.core.workload import JobState
from springtide.storage.state_directory import find_state_directory

if TYPE_CHECKING:
    from springtide.client.api import Client

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def _connect(state_dir: Path | None) -> Client:
    """Connect to the platform of `state_dir` if given; else by the setting `url`, unless `state` precedes it."""
    from springtide.client.api import connect

    if state_dir is not None:
        return connect(state_dir=state_dir)
    state, url = resolve("state"), resolve("url")
    if url.value is None or not url.is_at_least_as_near_as(state):
        return connect(state_dir=str(state.value))
    return connect(str(url.value), os.environ.get("SPRINGTIDE_TOKEN"), str(state.value))


@dataclass
class Session:
    """One run of a command. Tests replace `connect`, which takes the value of `--state` (None: not given)."""

    given_state_dir: Path | None = None
    as_json: bool = False
    connect: Callable[[Path | None], Client] = _connect
    _client: Client | None = None

    @property
    def state_dir(self) -> Path:
        """The platform's state directory: `--state`, else from the settings."""
        return self.given_state_dir.absolute() if self.given_state_dir else Path(str(resolve("state").value))

    @property
    def state_note(self) -> str:
        """Why the state directory is not where XDG_STATE_HOME would have it; empty where it is, or is a setting."""
        is_default = self.given_state_dir is None and resolve("state").level == "default"
        return find_state_directory().note if is_default else ""

    @property
    def client(self) -> Client:
        """The connection to the running platform. Raises SpringtideError if none is running."""
        if self._client is None:
            self._client = self.connect(self.given_state_dir)
            click.get_current_context().call_on_close(self._client.close)
        return self._client

    @property
    def may_ask(self) -> bool:
        """Whether a person at a terminal can be asked."""
        return not self.as_json and sys.stdin.isatty()

    def answer(self, value: Any, text: str, hint: str = "") -> None:
        """Print the value as JSON with --json, else the text and the hint."""
        if self.as_json:
            self.print_json(value)
            return
        terminal.write(text)
        self.hint(hint)

    def print_json(self, value: Any) -> None:
        """One JSON document on standard output."""
        import msgspec

        terminal.write_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())

    def hint(self, text: str) -> None:
        """Print the next useful command, unless --json is given."""
        if text and not self.as_json:
            terminal.write(text, dim=True)

    def note(self, text: str) -> None:
        """Print progress: to standard error with --json, else to standard output."""
        terminal.write(text, err=self.as_json)


def _set_state(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Session).given_state_dir = Path(value).expanduser()


def _set_json(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Session).as_json = True


state_option = click.option(
    "--state",
    metavar="DIR",
    expose_value=False,
    callback=_set_state,
    help="Where the platform keeps its state. [default: as `springtide config show` says]",
)
json_option = click.option(
    "--json", is_flag=True, expose_value=False, callback=_set_json, help="Answer with one JSON document."
)


def common_options(command: CommandT) -> CommandT:
    """Add --state and --json, which every command has."""
    return json_option(state_option(command))


def complain(sentence: str) -> None:
    """Print one red sentence on standard error."""
    terminal.write(sentence, err=True, fg="red")


def refuse(sentence: str) -> NoReturn:
    """End the command with exit code 2 and the sentence, which says what to do."""
    raise InvalidRequest(sentence)


def find(status: PlatformStatus, text: str) -> JobStatus | ServiceStatus:
    """The job or service with this id, name, or unambiguous prefix of an id. Raises InvalidRequest."""
    entries = [(job.job_id, job.name, job) for job in status.jobs]
    services = [(service.service_id, service.name, service) for service in status.services]
    everything: list[tuple[str, str, JobStatus | ServiceStatus]] = [*entries, *services]
    by_id = [entry for entry in everything if entry[0] == text]
    by_name = [entry for entry in everything if entry[1] == text]
    by_prefix = [entry for entry in everything if entry[0].startswith(text)]
    for matches in (by_id, by_name, by_prefix):
        if len(matches) == 1:
            return matches[0][2]
        # A name with several runs means the one that has not ended.
        unfinished = [entry for entry in matches if not _has_ended(entry[2])]
        if len(unfinished) == 1:
            return unfinished[0][2]
        # If all runs have ended, the name means the newest.
        if matches and matches is by_name and not unfinished:
            return matches[-1][2]
        if matches:
            ids = ", ".join(entry[0] for entry in matches[-5:])
            refuse(f"{text!r} could be any of {ids}; give more of the id")
    raise NotFound(f"there is no job or service {text!r}; `springtide ps --all` lists what there is")


def look_up(session: Session, status: PlatformStatus, text: str) -> JobStatus | ServiceStatus:
    """Like `find`, also among the jobs that ended so long ago that they are not in the platform's status."""
    try:
        return find(status, text)
    except NotFound:
        return session.client.job(text)


def _has_ended(status: JobStatus | ServiceStatus) -> bool:
    return isinstance(status, JobStatus) and JobState(status.state).is_terminal


def find_job(status: PlatformStatus, text: str) -> JobStatus:
    """The job with this id, name or prefix. Raises InvalidRequest, also if it is a service."""
    found = find(status, text)
    if isinstance(found, ServiceStatus):
        refuse(f"{found.name} is a service, not a job; `springtide scale {found.name} 0..4` changes its replicas")
    return found


def workload_id(found: JobStatus | ServiceStatus) -> str:
    """The workload's id in the API."""
    return found.job_id if isinstance(found, JobStatus) else found.service_id
