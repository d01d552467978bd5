"""What holds shares of a machine's GPUs: the interposition library, what an administrator's MPS does, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from springtide.backends.sharing.gpu.library import find_library
from springtide.core.errors import BackendError

MECHANISM = "cuda-preload"
HELD = (
    "shares of a GPU are held by a library before CUDA's driver: device time by tokens every 5 ms, memory= on every "
    "way to allocate; memory bandwidth and caches are not divided, and what gets around it (static programs, an "
    "environment without the preload) is not held"
)
_ON_GPU = (
    "shares of a GPU are planned and counted, not enforced: processes on it take turns as its driver lets them, and "
    "each sees the whole memory"
)
_UNDER_MPS = (
    "shares of a GPU are planned and counted, not enforced by this platform: an MPS daemon runs here, so that kernels "
    "of different processes run side by side, each process within the thread percentage that was set for MPS"
)
_MPS_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_USUAL = "/tmp/nvidia-mps"
_MPS_PROGRAM = "nvidia-cuda-mps-control"
# The kernel truncates a program's name to this length.
_NAME_CHARACTERS = 15
MEND = (
    "install a C compiler (apt-get install gcc) and CUDA's headers (pip install 'springtide[gpu]'), then start the "
    "platform again"
)


class Enforcement(msgspec.Struct, frozen=True, kw_only=True):
    """How shares of GPUs are enforced here: a name of core/status/shares.py, a sentence, and the library if it is used.

    `reason` says why the library is not used, `mend` how to change that.
    """

    mechanism: str
    enforced: str
    library: Path | None = None
    reason: str = ""
    mend: str = ""


def choose_enforcement(
    environment: Mapping[str, str], only: str = "", *, are_known: bool = True, builds: bool = True
) -> Enforcement:
    """Return the best enforcement here; `only` restricts the mechanism. `are_known`: the UUIDs of all GPUs are known.

    The library is built if necessary, which takes some seconds once; without `builds` only an existing one is used.
    """
    if only not in ("", MECHANISM):
        return _without(environment, f"the setting asks for {only}", "unset SPRINGTIDE_SHARE_MECHANISM")
    if not are_known:
        return _without(environment, "nvidia-smi does not tell the UUIDs of the GPUs", "try nvidia-smi -L")
    try:
        library = find_library(builds=builds)
    except BackendError as error:
        # A compiler's output may be long; its first line names the error.
        return _without(environment, str(error).splitlines()[0].rstrip(":"), MEND)
    return Enforcement(mechanism=MECHANISM, enforced=HELD + _beside_mps(environment), library=library)


def _without(environment: Mapping[str, str], reason: str, mend: str) -> Enforcement:
    has_mps = is_mps_there(environment)
    told = _UNDER_MPS if has_mps else _ON_GPU
    return Enforcement(mechanism="mps" if has_mps else "none", enforced=f"{told} ({reason})", reason=reason, mend=mend)


def _beside_mps(environment: Mapping[str, str]) -> str:
    if not is_mps_there(environment):
        return ""
    return "; an MPS daemon runs here as well, so that kernels of different processes run side by side"


def is_mps_there(environment: Mapping[str, str]) -> bool:
    """Whether MPS's control daemon runs where programs with this environment look for it; sends it no request."""
    directory = Path(environment.get(_MPS_DIRECTORY) or _MPS_USUAL)
    try:
        pid = int((directory / f"{_MPS_PROGRAM}.pid").read_text())
        return _name_of(Path(f"/proc/{pid}/comm")) == _MPS_PROGRAM[:_NAME_CHARACTERS]
    except (OSError, ValueError):
        # Another user's file cannot be read; the pipe exists nevertheless.
        return (directory / "control").exists() and _runs(_MPS_PROGRAM[:_NAME_CHARACTERS])


def _runs(name: str) -> bool:
    return any(_name_of(comm) == name for comm in Path("/proc").glob("[0-9]*/comm"))


def _name_of(comm: Path) -> str:
    try:
        return comm.read_text().strip()
    except OSError:
        return ""
