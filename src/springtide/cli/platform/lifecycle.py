"""`springtide up`, `down` and `dashboard`: starting and stopping the platform."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import click
import msgspec

from springtide.cli.platform.platform_process import (
    PlatformFile,
    is_alive,
    read_platform,
    read_token,
    running_platform,
    service_command,
    start_platform,
    supervisor_pid,
    wait_gone,
)
from springtide.cli.platform.service_unit import install_unit
from springtide.cli.platform.up_functions import NAMES_OF_FUNCTIONS, function_options, functions_text, settings_of
from springtide.cli.session import Session, common_options, complain
from springtide.cli.settings import DEFAULT_POLICY, PAY_PER_USE_POLICY, resolve
from springtide.cli.tables.columns import count
from springtide.core.decoding import convert
from springtide.core.errors import BackendError, InvalidRequest, SpringtideError
from springtide.core.quantities import format_duration
from springtide.core.status.logins import NewLogin, SignedOut
from springtide.service.assembly.function_settings import write_settings

_DOWN_TIMEOUT_S = 60.0


def login_url(platform: PlatformFile, state_dir: Path) -> str:
    """An address that signs one browser in, once and within ten minutes; the token is not in it."""
    from springtide.client.api import connect

    with connect(platform.url, read_token(state_dir), state_dir=str(state_dir)) as client:
        login = client.request("POST", "/v1/logins", NewLogin)
    return f"{platform.url.rstrip('/')}/login?code={login.code}"


def _address(platform: PlatformFile, state_dir: Path) -> str:
    """The dashboard's address, which signs a browser in if the platform answers already."""
    try:
        return login_url(platform, state_dir)
    except SpringtideError:
        return platform.url


def _described(platform: PlatformFile, state_dir: Path, address: str) -> dict[str, object]:
    return {
        "url": platform.url,
        "grpc": platform.grpc,
        "pid": platform.pid,
        "dashboard_url": address,
        "state_dir": str(state_dir),
        "token_path": str(state_dir / "token"),
        "log_path": str(state_dir / "platform.log"),
    }


def _platform_text(platform: PlatformFile, state_dir: Path, address: str, headline: str) -> str:
    grpc = f"  grpc       {platform.grpc}   (Open Inference Protocol)\n" if platform.grpc else ""
    return (
        f"{headline}\n"
        f"  api        {platform.url}   (docs: {platform.url.rstrip('/')}/docs)\n"
        f"{grpc}"
        f"  dashboard  {address}   (works once; another: springtide dashboard)\n"
        f"  state      {state_dir}   (token: {state_dir / 'token'}, log: {state_dir / 'platform.log'})"
    )


class _StartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options to start the platform with."""

    slots: int | None
    policy: str
    port: int
    grpc_port: int | None
    price: float | None
    pools: str
    day_s: float
    max_unfinished: int
    journal_retention: str
    keep_ended: str


def _start_options(given: dict[str, Any], *, pay_per_use: bool) -> _StartOptions:
    """The flags, completed by the settings. Raises InvalidRequest, also for a contradiction between them."""
    found = {name: resolve(name, flag).value for name, flag in given.items()}
    if pay_per_use:
        if found["policy"] != DEFAULT_POLICY:
            raise InvalidRequest(f"--pay-per-use sets how {DEFAULT_POLICY} decides; the policy is {found['policy']}")
        found["policy"] = PAY_PER_USE_POLICY
    found["policy"] = _check_pools(str(found["policy"]), str(found["pools"] or ""), found["slots"])
    return convert({**found, "port": found["port"] or 0, "pools": found["pools"] or ""}, _StartOptions, strict=False)


def _check_pools(policy: str, pools: str, slots: Any) -> str:
    """The policy for these pools. Raises InvalidRequest if the machine has too few slots for them."""
    if not pools:
        return policy
    # Imported only if pools are configured, so that the command starts fast.
    from springtide.backends.local.devices import discover_node, split_node
    from springtide.scheduling.registry import check_policy_name
    from springtide.service.assembly.pool_settings import parse_pools, policy_with_pools

    owners = parse_pools(pools)
    split_node(discover_node(slots), owners)
    composed = policy_with_pools(policy, owners)
    check_policy_name(composed)
    return composed


@click.command()
@click.option(
    "--slots", type=click.IntRange(1, 256), help="How many CPU workers may run. [default: cores, or the GPUs]"
)
@click.option("--policy", metavar="P", help="What decides: see `springtide policies`. [default: springtide]")
@click.option("--port", type=click.IntRange(0, 65535), help="0 takes a free one. [default: 8787]")
@click.option(
    "--grpc-port", type=click.IntRange(0, 65535), help="Answer gRPC too; 0 takes a free one. [default: no gRPC]"
)
@click.option("--price", type=float, metavar="USD", help="What a device costs an hour. [default: 0.05, a GPU 2.50]")
@click.option("--pay-per-use", is_flag=True, help="Devices cost only while used: give none to jobs it helps little.")
@click.option("--pools", metavar="P=N", help="How many slots each pool owns: inference=2. [default: all share them]")
@click.option("--day", "day_s", metavar="TIME", help="After what time the load comes again: 2m. [default: 24h]")
@click.option(
    "--max-unfinished", type=click.IntRange(0), metavar="N", help="Jobs and services at a time; 0: any. [default: 1000]"
)
@click.option(
    "--journal-retention", metavar="TIME,SIZE", help="How long steps are kept, at most so much. [default: 7d,2GB]"
)
@click.option("--keep-ended", metavar="TIME", help="How long ended jobs are shown. [default: 90d]")
@function_options
@click.option("--foreground", is_flag=True, help="Stay here and end with Ctrl-C.")
@click.option("--install-service", is_flag=True, help="Write a systemd unit with these options; start nothing now.")
@common_options
@click.pass_obj
def up(session: Session, /, foreground: bool, install_service: bool, pay_per_use: bool, **given: Any) -> None:
    """Start the platform: API, dashboard and scheduler in one process on this machine.

    It is started again when it dies; `springtide ps` then says what it died of. What no flag says, the settings say:
    springtide config show.
    """
    state_dir = session.state_dir
    if state_note := session.state_note:
        session.note(state_note)
    running = running_platform(state_dir)
    if running is not None and not install_service:
        address = _address(running, state_dir)
        answer = {**_described(running, state_dir, address), "started": False}
        text = _platform_text(running, state_dir, address, f"already running (pid {running.pid})")
        session.answer(answer, text, "look: springtide ps")
        return
    functions = settings_of({name: given.pop(name) for name in NAMES_OF_FUNCTIONS})
    options = _start_options(given, pay_per_use=pay_per_use)
    asked = (options.slots, options.policy, options.port, options.price)
    kept = write_settings(state_dir, functions)
    more: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("grpc_port", "pools", "day_s", "max_unfinished", "journal_retention", "keep_ended")
    }
    command = service_command(state_dir, *asked, functions=kept, **more)
    if install_service:
        path, start = install_unit(command)
        session.answer({"unit": str(path), "start": start}, f"written: {path}", f"start it with the machine: {start}")
        return
    if foreground:
        os.execv(command[0], command)
    session.note("starting ...")
    platform = start_platform(state_dir, *asked, functions=kept, **more)
    hint = "next: springtide run FILE | springtide hello | stop: springtide down"
    address = _address(platform, state_dir)
    answer = {
        **_described(platform, state_dir, address),
        "started": True,
        "policy": options.policy,
        "pools": options.pools,
        "functions": "" if functions is None else functions.provider,
    }
    text = _platform_text(platform, state_dir, address, f"springtide is up (pid {platform.pid})")
    session.answer(answer, text + _pools_text(options) + functions_text(functions), hint)


def _pools_text(options: _StartOptions) -> str:
    """The slots of each pool and the policy that moves them; empty without pools."""
    if not options.pools:
        return ""
    from springtide.backends.local.devices import discover_node, split_node
    from springtide.service.assembly.pool_settings import parse_pools

    nodes = split_node(discover_node(options.slots), parse_pools(options.pools))
    owned = [
        f"{pool} {', '.join(node.node_id for node in nodes if node.owner == pool) or 'none'}"
        for pool in ("training", "inference")
    ]
    return (
        f"\n  pools      {'; '.join(owned)}"
        f"\n  policy     {options.policy}   (slots are loaned and taken back; "
        f"a day is {format_duration(options.day_s)})"
    )


@click.command()
@click.option("--keep-workers", is_flag=True, help="Let jobs train on; the next `up` finds them again.")
@common_options
@click.pass_obj
def down(session: Session, keep_workers: bool) -> None:
    """Stop the platform. Unfinished jobs continue from where they are after the next `up`."""
    state_dir = session.state_dir
    written, supervisor = read_platform(state_dir), supervisor_pid(state_dir)
    if supervisor is not None and (written is None or not is_alive(written.pid)):
        # It has died, and would be started again in a moment.
        os.kill(supervisor, signal.SIGTERM)
        wait_gone(supervisor, _DOWN_TIMEOUT_S)
        text = "springtide is down: its control plane had died and is not started again; workers that live train on"
        session.answer({"stopped": True, "workers_kept": True}, text, "start again: springtide up")
        return
    if written is None or not is_alive(written.pid):
        session.answer(
            {"stopped": False, "reason": "not running"},
            f"no platform is running in {state_dir}",
            "start one: springtide up",
        )
        return
    # The platform of this state directory, whatever address the settings have.
    session.given_state_dir = state_dir
    session.client.shutdown(stop_workers=not keep_workers)
    if not wait_gone(written.pid, _DOWN_TIMEOUT_S):
        raise BackendError(
            f"the platform (pid {written.pid}) has not ended within {_DOWN_TIMEOUT_S:.0f} s; "
            f"{state_dir / 'platform.log'} says what it waits for"
        )
    if supervisor is not None:
        wait_gone(supervisor, _DOWN_TIMEOUT_S)
    text = "springtide is down" + ("; its workers train on" if keep_workers else "")
    session.answer({"stopped": True, "workers_kept": keep_workers}, text, "start again: springtide up")


@click.command()
@click.option("--sign-out", is_flag=True, help="End the session of every browser.")
@common_options
@click.pass_obj
def dashboard(session: Session, sign_out: bool) -> None:
    """Print an address that signs one browser in, once and within ten minutes: keep it to yourself until then."""
    state_dir = session.state_dir
    platform = running_platform(state_dir)
    if platform is None:
        complain("no platform is running here; start one: springtide up")
        raise click.exceptions.Exit(1)
    if sign_out:
        ended = session.client.request("DELETE", "/v1/logins", SignedOut)
        session.answer(ended, f"{count(ended.num_sessions, 'browser')} signed out", "in again: springtide dashboard")
        return
    address = login_url(platform, state_dir)
    session.answer({"dashboard_url": address}, address, "all browsers out: springtide dashboard --sign-out")
