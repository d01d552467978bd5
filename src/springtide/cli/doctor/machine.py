"""`springtide doctor`: checks everything that training and serving here need, one line each, with the remedy."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from springtide.cli import terminal
from springtide.cli.doctor.functions import Check, check_functions
from springtide.cli.doctor.shares import check_shares
from springtide.cli.doctor.versions import check_library_versions, check_torch_version
from springtide.cli.platform.platform_process import is_alive, is_healthy, read_platform, running_platform
from springtide.cli.session import Session, common_options
from springtide.cli.settings import resolve
from springtide.cli.tables.columns import count
from springtide.cli.tables.statuses import silence
from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.core.status.platform import PlatformStatus
from springtide.core.status.pools import PoolStatus

_PROBE_TIMEOUT_S = 60.0
_LOW_DISK_BYTES = 1_000_000_000
# Run in a child process, because importing torch is slow, and a broken torch may crash the process.
_TORCH_PROBE = """
import json, torch, torch.distributed as d
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "gloo": d.is_available() and d.is_gloo_available(), "gpus": gpus}))
"""


class _Torch(msgspec.Struct):
    version: str
    gloo: bool
    gpus: list[str]


@click.command()
@common_options
@click.pass_obj
def doctor(session: Session) -> None:
    """Check this machine and the platform. Exit code 1 if something must be mended."""
    state_dir = session.state_dir
    checks = [*_check_python(), *_check_torch(), *_check_machine(), *_check_state(state_dir)]
    checks += [Check("state", "warn", session.state_note)] if session.state_note else []
    checks += _check_life(state_dir)
    checks += _check_pools(session)
    checks += check_shares()
    checks += check_functions(state_dir)
    failed = [check for check in checks if check.verdict == "fail"]
    hint = "all of it proven: springtide hello" if not failed else "mend the lines marked fail, then run it again"
    if session.as_json:
        session.print_json({"checks": checks, "passed": not failed})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mend = f"\n{'':<4}  {'':<{width}}  -> {check.mend}" if check.mend else ""
            text = f"{check.verdict:<4}  {check.name.ljust(width)}  {check.text}{mend}"
            # The whole line: what is written is escaped, colours in it too.
            terminal.write(text, fg={"ok": None, "warn": "yellow", "fail": "red"}[check.verdict])
        session.hint(hint)
    if failed:
        raise click.exceptions.Exit(1)


def _check_python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _check_torch() -> Iterator[Check]:
    command = [sys.executable, "-c", _TORCH_PROBE]
    try:
        asked = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield Check(
            "torch", "warn", f"importing it takes more than {_PROBE_TIMEOUT_S:.0f} s", "try again on an idle machine"
        )
        return
    try:
        torch = decode_json(asked.stdout.strip().splitlines()[-1] if asked.stdout.strip() else b"", _Torch)
    except ValueError:
        said = asked.stderr.decode("utf-8", "replace").strip().splitlines()
        yield Check("torch", "fail", said[-1] if said else "it cannot be imported", "pip install 'springtide[runtime]'")
        return
    yield check_torch_version(torch.version)
    yield from check_library_versions()
    if torch.gloo:
        yield Check("gloo", "ok", "workers can exchange gradients")
    else:
        yield Check("gloo", "fail", "this torch was built without it", "install a torch from pytorch.org or PyPI")
    if torch.gpus:
        yield Check("gpu", "ok", ", ".join(torch.gpus))
        return
    from springtide.backends.local.devices import discover_gpus

    gpus = discover_gpus()
    if not gpus:
        yield Check("gpu", "ok", "none: workers run on CPU slots")
        return
    told = f"the driver lists {len(gpus)}, and this torch sees none: torch code on a worker's GPU will fail"
    yield Check("gpu", "warn", told, "install a CUDA build of torch from pytorch.org")


def _check_machine() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    if load > 2 * cores:
        yield Check("cores", "warn", f"{cores}, load {load:.1f}", "other programs keep it busy; expect slow workers")
    else:
        yield Check("cores", "ok", f"{cores}, load {load:.1f}")
    if not hasattr(os, "fork") or not Path("/proc/self").exists():
        yield Check("system", "fail", sys.platform, "workers are forked: use Linux (on Windows, WSL)")


def _check_state(state_dir: Path) -> Iterator[Check]:
    existing = state_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        yield Check("state", "fail", f"{existing} cannot be written", "choose another place: --state DIR")
        return
    free = shutil.disk_usage(existing).free
    if free < _LOW_DISK_BYTES:
        yield Check("disk", "warn", f"{free / 1e9:.1f} GB free", "checkpoints need room; free some space")
    else:
        yield Check("disk", "ok", f"{free / 1e9:.0f} GB free")
    if not state_dir.exists():
        yield Check("state", "ok", f"{state_dir} (made by the first `springtide up`)")
        return
    token = state_dir / "token"
    readable_by_others = token.exists() and stat.S_IMODE(token.stat().st_mode) & 0o077
    if readable_by_others:
        yield Check("state", "fail", f"others can read {token}", f"chmod 600 {token}")
    else:
        yield Check("state", "ok", str(state_dir))


def _check_life(state_dir: Path) -> Iterator[Check]:
    written = read_platform(state_dir)
    if written is None:
        yield Check("platform", "ok", "not running", "start it: springtide up")
        yield from _check_port()
        return
    if is_healthy(written.url):
        yield Check("platform", "ok", f"answers at {written.url} (pid {written.pid})")
    elif is_alive(written.pid):
        yield Check(
            "platform",
            "fail",
            f"pid {written.pid} lives and does not answer at {written.url}",
            f"look into {state_dir / 'platform.log'}; kill {written.pid}, then springtide up goes on from the journal",
        )
    else:
        yield Check("platform", "warn", f"its process {written.pid} is gone", "springtide up goes on from the journal")
    yield from _check_zygote(state_dir, platform_pid=written.pid)


def _check_pools(session: Session) -> Iterator[Check]:
    """Report the pools of the running platform, or else those in the settings."""
    state_dir = session.state_dir
    if running_platform(state_dir) is None:
        yield from _check_asked_pools()
        return
    session.given_state_dir = state_dir
    try:
        status = session.client.status()
    except SpringtideError as error:
        yield Check("pools", "warn", f"the platform did not say: {error}", f"look into {state_dir / 'platform.log'}")
        return
    yield from check_cluster(status)
    if not status.pools:
        num_machines = sum(device.kind != "function" for device in status.devices)
        yield Check("pools", "ok", f"jobs and services share {num_machines} slots")
        return
    told = "; ".join(_pool_text(pool) for pool in status.pools)
    yield Check("pools", "ok", f"{told} (policy {status.policy})")


def _pool_text(pool: PoolStatus) -> str:
    counts = {"borrowed": pool.num_borrowed, "lent": pool.num_lent, "draining": pool.num_draining}
    away = [f"{count} {word}" for word, count in counts.items() if count]
    return f"{pool.pool} {pool.num_devices}" + (f" ({', '.join(away)})" if away else "")


def _check_asked_pools() -> Iterator[Check]:
    asked = resolve("pools")
    if not asked.value:
        yield Check("pools", "ok", "none: jobs and services share the slots")
        return
    from springtide.backends.local.devices import discover_node, split_node
    from springtide.service.assembly.pool_settings import parse_pools

    slots = resolve("slots").value
    try:
        split_node(discover_node(None if slots is None else int(slots)), parse_pools(asked.value))
    except InvalidRequest as error:
        yield Check("pools", "fail", str(error), f"change `pools` or `slots` ({asked.origin})")
        return
    yield Check("pools", "ok", f"{asked.value} at the next `springtide up` ({asked.origin})")


def _check_zygote(state_dir: Path, platform_pid: int) -> Iterator[Check]:
    """Check the zygote, which is found by its socket on its command line; its workers have the same command line."""
    digest = hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:16]
    places = (str(state_dir.resolve() / "run"), f"springtide-{os.getuid()}-{digest}")
    found = [
        pid
        for pid, line in _command_lines()
        if "springtide.runtime zygote" in line and any(place in line for place in places)
    ]
    if found:
        ahead = ", ".join(["torch", *_libraries_of(min(found))])
        yield Check("zygote", "ok", f"pid {min(found)}: workers start without importing {ahead}")
    elif is_alive(platform_pid):
        yield Check(
            "zygote",
            "warn",
            "no process to fork workers from yet",
            f"it starts with the first worker; if not, {state_dir / 'platform.log'} says why",
        )


def _libraries_of(zygote: int) -> list[str]:
    """What the zygote's processes with libraries have imported, by their titles."""
    try:
        children = set(Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split())
    except OSError:
        return []
    titles = [line.split() for pid, line in _command_lines() if str(pid) in children]
    return sorted(
        {word for title in titles if title[:2] == ["springtide", "libraries"] for word in title[2:]} - {"torch"}
    )


def _command_lines() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        yield int(entry.name), line


def _check_port() -> Iterator[Check]:
    port = int(resolve("port").value or 0)
    if not port:
        yield Check("port", "ok", "any free one")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            yield Check("port", "warn", f"{port} is taken by another program", "springtide up --port 0")
        else:
            yield Check("port", "ok", f"{port} is free")


def check_cluster(status: PlatformStatus) -> Iterator[Check]:
    """Check a platform on a cluster: leader, API server, and pods that cannot start."""
    cluster = status.cluster
    if cluster is None:
        return
    told = f"{cluster.server}: {count(cluster.num_nodes, 'node')}, led by {cluster.leader} in term {cluster.term}"
    problem = cluster.problem or silence(cluster)
    mend = "springtide k8s check says which rights, objects or servers are missing"
    if problem:
        yield Check("cluster", "fail", f"{cluster.server}: {problem}", mend)
    elif not cluster.num_nodes:
        yield Check("cluster", "warn", f"{told}: no devices", mend)
    else:
        yield Check("cluster", "ok", told)
    pods = [pod for job in status.jobs for pod in job.pods if pod.reason]
    pods += [pod for service in status.services for pod in service.pods if pod.reason]
    if not pods:
        yield Check("pods", "ok", f"{cluster.num_pods} of replicas, none of them held up")
        return
    first = pods[0]
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    told = f"{first.namespace}/{first.pod}: {first.reason}{more}"
    yield Check("pods", "warn", told, f"springtide why {first.workload_id} | kubectl describe pod -n {first.namespace}")
