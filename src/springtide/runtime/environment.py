"""`python -m springtide.runtime environment`: make the environment that a worker needs, then be that worker.

The process that makes the environment becomes the worker, so that the platform knows one process throughout.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from springtide.core.options.packages import num_packages
from springtide.core.quantities import format_duration
from springtide.core.wire.workers import Failed, FenceOrder, Order, Preempt, Preparing, Stop, WorkerSpec
from springtide.core.workload import Packages
from springtide.runtime.process.control_link import ControlLink
from springtide.runtime.process.environments import EnvironmentCache, EnvironmentFailed, MadeEnvironment
from springtide.runtime.process.exits import exit_now

_TOLD_S = 5.0


def run_in_environment(
    spec: WorkerSpec,
    cache_dir: Path,
    *,
    command: str = "worker",
    limit_s: float | None = None,
    directory: Path | None = None,
) -> int:
    """Run the worker in its environment, which is made first if it is not there. Returns an exit code only if it fails.

    Meanwhile the platform is told what the start waits for. A failure is one of the workload, which a restart would not
    mend, and so is an environment that is not made within `limit_s`. `command` is the entry point of the worker,
    `directory` where paths in its requirements begin.
    """
    packages = spec.workload.packages or Packages()
    cache = EnvironmentCache(cache_dir, directory=directory)
    try:
        made = cache.find(packages)
        if made is None:
            made, spec = _make(cache, packages, spec, limit_s)
    except EnvironmentFailed as error:
        return _fail(spec, str(error))
    _become_worker(made, spec, command)


def _make(
    cache: EnvironmentCache, packages: Packages, spec: WorkerSpec, limit_s: float | None
) -> tuple[MadeEnvironment, WorkerSpec]:
    """Make the environment; returns it, and the spec with which the worker goes on from this process's reports."""
    count = num_packages(packages.requirements)
    reason = f"making an environment: {count} package{'' if count == 1 else 's'}" if count else "making an environment"
    _say(f"springtide: {reason}")
    link = ControlLink(spec, on_order=_obey, on_lease_expired=_end_all)
    link.start()
    try:
        link.send(Preparing(reason=reason))
        variables = {name: value for name, value in spec.workload.env.items() if name.startswith("PIP_")}
        with _time_limit(limit_s):
            made = cache.make(packages, variables, _say)
        seq = link.send(Preparing())
        link.wait_acknowledged(seq, _TOLD_S)
    finally:
        link.close()
    _say("springtide: the environment is made")
    return made, msgspec.structs.replace(spec, first_seq=seq)


@contextlib.contextmanager
def _time_limit(limit_s: float | None) -> Iterator[None]:
    """End what makes the environment when the time is over. Raises EnvironmentFailed then."""
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        EnvironmentCache.end_installers()

    timer = threading.Timer(threading.TIMEOUT_MAX if limit_s is None else limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except EnvironmentFailed:
        if not is_over.is_set():
            raise
        told = format_duration(limit_s or 0.0)
        raise EnvironmentFailed(
            f"its environment was not made within {told}, which is all that its start may take; ask for less, pin "
            "versions, or use an image that has the packages"
        ) from None
    finally:
        timer.cancel()


def _become_worker(made: MadeEnvironment, spec: WorkerSpec, command: str) -> NoReturn:
    # The spec has the worker's token: it goes through memory, not through a file or the command line.
    descriptor = os.memfd_create("spec", 0)
    os.write(descriptor, msgspec.json.encode(spec))
    os.set_inheritable(made.lock, True)
    python = str(made.python)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(python, [python, "-m", "springtide.runtime", command, "--spec", f"/proc/self/fd/{descriptor}"])


def _fail(spec: WorkerSpec, sentence: str) -> int:
    _say(f"springtide: {sentence}")
    link = ControlLink(msgspec.structs.replace(spec, first_seq=spec.first_seq + 2))
    link.start()
    seq = link.send(Failed(generation=spec.generation, error=sentence))
    link.wait_acknowledged(seq, spec.lease_s)
    link.close()
    return 1


def _say(line: str) -> None:
    """Write a line into the worker's log."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _obey(order: Order) -> None:
    """An order to leave ends what makes the environment, too; the worker to come is given any other one again."""
    if isinstance(order, Stop | Preempt | FenceOrder):
        _end_all()


def _end_all() -> None:
    EnvironmentCache.end_installers()
    exit_now(0)
