"""The GPUs of this machine, from nvidia-smi."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

import msgspec

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_QUERY_TIMEOUT_S = 10.0
_UUID_PREFIXES = ("GPU-", "MIG-")
_QUERY = ("--query-gpu=uuid,memory.total,mig.mode.current,name", "--format=csv,noheader,nounits")
_NUM_FIELDS = 4
_LISTED = re.compile(r"GPU (?P<number>\d+):(?P<name>[^(]*)(?:\(UUID: (?P<uuid>GPU-[^)\s]+)\))?")
_LISTED_PART = re.compile(r"\s+(?P<name>MIG \d+g\.(?P<gb>\d+)gb\S*)\s.*\(UUID: (?P<uuid>MIG-[0-9a-f-]+)\)")
_MIB = 1 << 20
_MB = 1_000_000


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of this machine: its index in the driver's list, and its UUID as the driver writes it ("": unknown).

    `memory_mb` is in MB of a million bytes (0: unknown).
    """

    number: int
    uuid: str
    memory_mb: int = 0
    name: str = ""

    @property
    def visible_as(self) -> str:
        """Its name in CUDA_VISIBLE_DEVICES: the UUID if known, as CUDA's numbers differ from the list's."""
        return self.uuid or str(self.number)


def discover_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that the driver lists, in its order; none without a driver, or if it does not answer.

    A GPU divided by MIG is listed as its parts, each a GPU of its own. CUDA_VISIBLE_DEVICES of this process restricts
    them, by UUID or by number, as for every CUDA program.
    """
    rows = [[field.strip() for field in line.split(",", _NUM_FIELDS - 1)] for line in _lines_of(*_QUERY)]
    rows = [row for row in rows if len(row) == _NUM_FIELDS and row[0].startswith(_UUID_PREFIXES)]
    is_divided = any(row[2] == "Enabled" for row in rows)
    if rows and not is_divided:
        gpus = tuple(
            Gpu(number=number, uuid=uuid, memory_mb=_in_mb(memory), name=name)
            for number, (uuid, memory, _, name) in enumerate(rows)
        )
    else:
        # An old driver may not support the query.
        gpus = _listed({uuid: _in_mb(memory) for uuid, memory, _, _ in rows})
    return _visible(gpus, os.environ.get(VISIBLE_VARIABLE))


def _in_mb(memory: str) -> int:
    """The driver's MiB as MB; 0 for a device without memory of its own, for which it prints a text."""
    return int(memory) * _MIB // _MB if memory.isdecimal() else 0


def _listed(memory_mb: Mapping[str, int]) -> tuple[Gpu, ...]:
    """Read the list of GPUs: a line `GPU 0: NVIDIA H200 (UUID: GPU-...)` each, with indented lines of its MIG parts.

    `memory_mb` is the memory of GPUs by UUID; that of a part is in its name.
    """
    found: list[Gpu] = []
    for line in _lines_of("-L"):
        whole, part = _LISTED.match(line), _LISTED_PART.match(line)
        if whole is not None:
            uuid = whole["uuid"] or ""
            memory = memory_mb.get(uuid, 0)
            found.append(Gpu(number=int(whole["number"]), uuid=uuid, memory_mb=memory, name=whole["name"].strip()))
        elif part is not None and found:
            if found[-1].uuid.startswith("GPU-"):
                # A divided device cannot be used as a whole.
                found.pop()
            found.append(Gpu(number=len(found), uuid=part["uuid"], memory_mb=int(part["gb"]) * 1000, name=part["name"]))
    return tuple(found)


def _lines_of(*arguments: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        asked = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=False,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def _visible(gpus: tuple[Gpu, ...], asked: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show, in its order: it stops at the first invalid entry."""
    if asked is None:
        return gpus
    shown: list[Gpu] = []
    for entry in (entry.strip() for entry in asked.split(",")):
        if entry.isdecimal():
            named = [gpus[int(entry)]] if int(entry) < len(gpus) else []
        else:
            named = [gpu for gpu in gpus if entry.startswith(_UUID_PREFIXES) and gpu.uuid.startswith(entry)]
        if len(named) != 1 or named[0] in shown:
            break
        shown += named
    return tuple(shown)
