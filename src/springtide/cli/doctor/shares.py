"""What `springtide doctor` says of shares: which enforcement this machine has, tried on a child that only computes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from springtide.backends.local.devices import discover_gpus
from springtide.backends.sharing.fixed_share import FixedShare
from springtide.backends.sharing.table import MECHANISM_VARIABLE
from springtide.cli.doctor.functions import Check
from springtide.cli.doctor.gpu import check_gpu_shares
from springtide.core.errors import SpringtideError

_RATE = 0.3
_TRIAL_S = 1.0
_SETTLE_S = 0.1
# What a trial of a second may show above the rate: the kernel's ticks, and the moment before it is held.
_TOLERANCE = 0.05
_WITHOUT = (
    "run the platform where control groups may be written: as root, in a container with its own writable cgroups, or "
    "in a systemd user session with the cpu controller delegated"
)


def check_shares(trial_s: float = _TRIAL_S) -> Iterator[Check]:
    """Say what holds sharers of this machine's devices: its GPUs, or its CPU slots where it has none."""
    gpus = discover_gpus()
    yield from check_gpu_shares(gpus) if gpus else _check_cpu_shares(trial_s)


def _check_cpu_shares(trial_s: float) -> Iterator[Check]:
    """Hold a spinning child to 30 % of a core and say what it used."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "while True: pass"], stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        with FixedShare(child.pid, _RATE, only=os.environ.get(MECHANISM_VARIABLE, "")) as held:
            time.sleep(_SETTLE_S)
            begin_s, begin_used_s = time.monotonic(), held.used_s()
            time.sleep(trial_s)
            used = (held.used_s() - begin_used_s) / (time.monotonic() - begin_s)
            yield _judge(held, used, trial_s)
    except SpringtideError as error:
        yield Check("shares", "warn", f"not tried: {error}", _WITHOUT)
    finally:
        child.kill()
        child.wait()


def _judge(held: FixedShare, used: float, trial_s: float) -> Check:
    tried = f"a child held to {_RATE:.0%} of a core used {used:.1%} over {trial_s:g} s"
    if held.mechanism == "none":
        return Check("shares", "warn", f"{held.enforced} ({tried})", _WITHOUT)
    if used > _RATE + _TOLERANCE:
        return Check("shares", "warn", f"{held.mechanism} holds badly here: {tried}", "look at the machine's load")
    if held.mechanism == "signals":
        return Check("shares", "ok", f"signals: {tried}; {held.enforced}", f"for more: {_WITHOUT}")
    return Check("shares", "ok", f"{held.mechanism}: {tried}; {held.enforced}")
