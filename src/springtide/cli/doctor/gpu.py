"""What `springtide doctor` says of shares of GPUs: what holds them here, tried on a program that wants the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from springtide.backends.local.devices import Gpu
from springtide.backends.sharing.gpu.enforcement import MECHANISM, choose_enforcement
from springtide.backends.sharing.gpu.library import LIBRARY_NAME, preload
from springtide.backends.sharing.table import MECHANISM_VARIABLE
from springtide.cli.doctor.functions import Check

_TRIAL_TIMEOUT_S = 30.0
# Finds a function of the driver in both ways that programs have, and says in which library each answer lies.
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


def check_gpu_shares(gpus: Sequence[Gpu]) -> Iterator[Check]:
    """Say what would hold sharers of these GPUs, and whether programs that look for the driver find the library."""
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
    """What went wrong, or nothing."""
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
