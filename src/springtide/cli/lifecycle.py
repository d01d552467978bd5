"""`springtide up`, `down` and `dashboard`: the platform's own life."""

from __future__ import annotations

import os
from pathlib import Path

import click

from springtide.cli.platform_process import (
    PlatformFile,
    is_alive,
    read_platform,
    read_token,
    running_platform,
    service_command,
    start_platform,
    wait_gone,
)
from springtide.cli.session import Session, common_options, complain
from springtide.cli.settings import resolve
from springtide.core.errors import BackendError

_DOWN_TIMEOUT_S = 60.0


def login_url(platform: PlatformFile, state_dir: Path) -> str:
    """The address that logs a browser in."""
    return f"{platform.url.rstrip('/')}/login?token={read_token(state_dir)}"


def _described(platform: PlatformFile, state_dir: Path) -> dict[str, object]:
    return {
        "url": platform.url,
        "pid": platform.pid,
        "dashboard_url": login_url(platform, state_dir),
        "state_dir": str(state_dir),
        "token_path": str(state_dir / "token"),
        "log_path": str(state_dir / "platform.log"),
    }


def _told(platform: PlatformFile, state_dir: Path, headline: str) -> str:
    return (
        f"{headline}\n"
        f"  api        {platform.url}   (docs: {platform.url.rstrip('/')}/docs)\n"
        f"  dashboard  {login_url(platform, state_dir)}\n"
        f"  state      {state_dir}   (token: {state_dir / 'token'}, log: {state_dir / 'platform.log'})"
    )


@click.command()
@click.option(
    "--slots", type=click.IntRange(1, 256), help="How many CPU workers may run. [default: cores, or the GPUs]"
)
@click.option("--policy", metavar="P", help="Who gets what: see `springtide policies`. [default: elastic]")
@click.option("--port", type=click.IntRange(0, 65535), help="0 takes a free one. [default: 8787]")
@click.option("--price", type=float, metavar="USD", help="What a device costs an hour. [default: 0.05, a GPU 2.50]")
@click.option("--foreground", is_flag=True, help="Stay here and end with Ctrl-C.")
@common_options
@click.pass_obj
def up(
    session: Session, slots: int | None, policy: str | None, port: int | None, price: float | None, foreground: bool
) -> None:
    """Start the platform: API, dashboard and scheduler in one process on this machine.

    What no flag says, the settings say: springtide config show.
    """
    state_dir = session.state_dir
    running = running_platform(state_dir)
    if running is not None:
        answer = {**_described(running, state_dir), "started": False}
        session.answer(answer, _told(running, state_dir, f"already running (pid {running.pid})"), "look: springtide ps")
        return
    chosen_slots = resolve("slots", slots).value
    chosen_price = resolve("price", price).value
    asked = (
        None if chosen_slots is None else int(chosen_slots),
        str(resolve("policy", policy).value),
        int(resolve("port", port).value or 0),
        None if chosen_price is None else float(chosen_price),
    )
    if foreground:
        command = service_command(state_dir, *asked)
        os.execv(command[0], command)
    session.note("starting ...")
    platform = start_platform(state_dir, *asked)
    hint = "next: springtide run FILE | springtide hello | stop: springtide down"
    answer = {**_described(platform, state_dir), "started": True}
    session.answer(answer, _told(platform, state_dir, f"springtide is up (pid {platform.pid})"), hint)


@click.command()
@click.option("--keep-workers", is_flag=True, help="Let jobs train on; the next `up` finds them again.")
@common_options
@click.pass_obj
def down(session: Session, keep_workers: bool) -> None:
    """Stop the platform. Unfinished jobs continue from where they are after the next `up`."""
    state_dir = session.state_dir
    written = read_platform(state_dir)
    if written is None or not is_alive(written.pid):
        session.answer(
            {"stopped": False, "reason": "not running"},
            f"no platform is running in {state_dir}",
            "start one: springtide up",
        )
        return
    # The one that is waited for is the one that is asked, whatever address is set elsewhere.
    session.given_state_dir = state_dir
    session.client.shutdown(stop_workers=not keep_workers)
    if not wait_gone(written.pid, _DOWN_TIMEOUT_S):
        raise BackendError(
            f"the platform (pid {written.pid}) has not ended within {_DOWN_TIMEOUT_S:.0f} s; "
            f"{state_dir / 'platform.log'} says what it waits for"
        )
    text = "springtide is down" + ("; its workers train on" if keep_workers else "")
    session.answer({"stopped": True, "workers_kept": keep_workers}, text, "start again: springtide up")


@click.command()
@common_options
@click.pass_obj
def dashboard(session: Session) -> None:
    """Print the address that logs your browser in. It holds the token: keep it to yourself."""
    state_dir = session.state_dir
    platform = running_platform(state_dir)
    if platform is None:
        complain("no platform is running here; start one: springtide up")
        raise click.exceptions.Exit(1)
    session.answer({"dashboard_url": login_url(platform, state_dir)}, login_url(platform, state_dir))
