"""The checks of `springtide doctor` for shares: what enforces them on this machine, tried with a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from springtide.backends.local.devices import Gpu, discover_gpus
from springtide.backends.sharing.fixed_share import FixedShare
from springtide.backends.sharing.gpu.enforcement import MECHANISM, choose_enforcement
from springtide.backends.sharing.gpu.library import LIBRARY_NAME, preload
from springtide.backends.sharing.table import MECHANISM_VARIABLE
from springtide.cli.doctor.functions import Check
from springtide.core.errors import SpringtideError

_RATE = 0.3
_TRIAL_S = 1.0
_SETTLE_S = 0.1
# How far a trial of a second may exceed the rate: the kernel's ticks, and the time before the limit is set.
_TOLERANCE = 0.05
_WITHOUT = (
    "run the platform where control groups may be written: as root, in a container with its own writable cgroups, or "
    "in a systemd user session with the cpu controller delegated"
)

_TRIAL_TIMEOUT_S = 30.0
# Looks up a function of the driver in both ways that programs use, and prints the library of each result.
_TRIAL = """
import ctypes, sys
class Place(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in ("base", "name", "at"))]
def place(address):
    found = Place()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found))
    return (found.file or b"nowhere").decode()
cuda = ctypes.CDLL("libcuda.so.1")
print(place(ctypes.cast(cuda.cuLaunchKernel, ctypes.c_void_p).value))
asked, status = ctypes.c_void_p(), ctypes.c_int()
try:
    ask = cuda.cuGetProcAddress_v2
except AttributeError:
    sys.exit()
ask(b"cuLaunchKernel", ctypes.byref(asked), 4000, ctypes.c_uint64(0), ctypes.byref(status))
print(place(asked.value))
"""


def check_shares(trial_s: float = _TRIAL_S) -> Iterator[Check]:
    """Check what enforces shares of this machine's GPUs, or of its CPU slots if it has none."""
    gpus = discover_gpus()
    yield from check_gpu_shares(gpus) if gpus else _check_cpu_shares(trial_s)


def _check_cpu_shares(trial_s: float) -> Iterator[Check]:
    """Limit a busy child process to 30 % of a core and measure what it uses."""
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


def check_gpu_shares(gpus: Sequence[Gpu]) -> Iterator[Check]:
    """Check what would enforce shares of these GPUs, and whether programs find the library in place of the driver."""
    chosen = choose_enforcement(
        os.environ, os.environ.get(MECHANISM_VARIABLE, ""), are_known=all(gpu.uuid for gpu in gpus)
    )
    if chosen.library is None:
        yield Check("shares", "warn", f"{chosen.mechanism}: {chosen.enforced}", chosen.mend)
        return
    trouble = _try(chosen.library)
    if trouble:
        yield Check("shares", "warn", f"{MECHANISM}, but {trouble}", f"look at {chosen.library} and at the driver")
        return
    number = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    tried = f"a program that looks for the driver's launches finds those of {chosen.library}"
    yield Check("shares", "ok", f"{MECHANISM} on {number}, known by UUID: {tried}; {chosen.enforced}")


def _try(library: Path) -> str:
    """Run the trial in a child process with the library preloaded; returns its error, empty if it worked."""
    try:
        tried = subprocess.run(
            [sys.executable, "-S", "-c", _TRIAL],
            env={**os.environ, **preload(os.environ, library)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a program with it preloaded does not run: {error}"
    if tried.returncode:
        said = tried.stderr.strip().splitlines()
        return f"a program with it preloaded failed: {said[-1] if said else f'exit code {tried.returncode}'}"
    passed = [place for place in tried.stdout.split() if Path(place).name != LIBRARY_NAME]
    return f"a program that looks for the driver's launches finds those of {passed[0]}" if passed else ""
