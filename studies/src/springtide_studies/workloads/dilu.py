"""Workloads of instances that share devices: the files of Dilu's artifact, and seeded ones of the same distribution."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.shares import Share, make_share
from springtide.workloads.rows import parse_moment_s

Kind = Literal["training", "inference", "llm-inference"]
_KINDS: tuple[Kind, ...] = ("training", "llm-inference", "inference")

MAX_FILE_BYTES = 64 * 2**20
MAX_LINE_CHARS = 2000
MAX_DEVICES = 64
# The devices of the published workloads have 40 GB.
MB_PER_GB = 1024
DEVICE_MEMORY_MB = 40 * MB_PER_GB
# The published recipe: what is deleted at all, as a part of all instances, and after how many minutes.
_DELETED_SERVICES, _SERVICE_MINUTES = 0.6, (1, 3)
_DELETED_TRAINING, _TRAINING_MINUTES = 0.1, (10, 15)
_TRAINING_MEMORY_GB = (25, 30, 35, 40)


class SharingInstance(msgspec.Struct, frozen=True, kw_only=True):
    """It holds `share` of each of `num_devices` devices. `family`: the function that it is an instance of."""

    name: str
    family: str
    kind: Kind
    num_devices: int
    share: Share


class SharingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """At `at_s` (seconds since the first event) an instance starts or goes."""

    at_s: float
    is_start: bool
    instance: SharingInstance


class SharingWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Events in order of time; each starts once, and ends after that. `drawn` is the seed, if there is one."""

    name: str
    events: tuple[SharingEvent, ...]
    drawn: int | None = None

    @property
    def num_instances(self) -> int:
        """How many instances ever start."""
        return sum(event.is_start for event in self.events)


def read_sharing_workload(path: Path) -> SharingWorkload:
    """Read a file of Dilu's artifact (`instances-*.txt`): a line for each event, a Python literal with its moment.

    Memory is in GB of 1,024 MB. Raises InvalidRequest naming the line that cannot be what the format says.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_FILE_BYTES >> 20} MB; split it into shorter workloads")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as text ({error}); name a file of instances") from None
    events: list[SharingEvent] = []
    live: dict[str, SharingInstance] = {}
    gone: set[str] = set()
    first_s = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            moment_s, is_start, instance = _event(line)
            first_s = first_s if events else moment_s
            if events and moment_s - first_s < events[-1].at_s:
                raise ValueError("its time lies before that of the event above it")
            _follow(live, gone, instance, is_start)
        except (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError, InvalidRequest) as error:
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidRequest(
                f"{path.name} line {number}: {said:.120}; it is to hold Time, Action, Instance"
            ) from None
        events.append(SharingEvent(at_s=moment_s - first_s, is_start=is_start, instance=instance))
    if not events:
        raise InvalidRequest(f"{path} holds no event; name a file of instances")
    return SharingWorkload(name=path.stem, events=tuple(events))


def _follow(live: dict[str, SharingInstance], gone: set[str], instance: SharingInstance, is_start: bool) -> None:
    """Update the live instances. Raises ValueError where the event cannot follow those before it."""
    if is_start:
        if instance.name in live or instance.name in gone:
            raise ValueError(f"{instance.name} starts twice")
        live[instance.name] = instance
        return
    if live.pop(instance.name, None) != instance:
        raise ValueError(f"{instance.name} goes, but is not there as it started")
    gone.add(instance.name)


def _event(line: str) -> tuple[float, bool, SharingInstance]:
    if len(line) > MAX_LINE_CHARS:
        raise ValueError(f"it is longer than {MAX_LINE_CHARS} characters")
    told: Any = ast.literal_eval(line.strip())
    if not isinstance(told, dict) or told["Action"] not in ("start", "delete"):
        raise ValueError("it is no event that starts or deletes")
    return parse_moment_s(told["Time"]), told["Action"] == "start", _instance(told["Instance"])


def _instance(told: Any) -> SharingInstance:
    name, kind, count, memory = told["service_name"], told["type"], told["gpu_num"], told["memory"]
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        raise ValueError("its service_name is no name")
    if kind not in _KINDS:
        raise ValueError(f"its type {kind!r:.40} is unknown")
    if type(count) is not int or not 1 <= count <= MAX_DEVICES:
        raise ValueError(f"its gpu_num {count!r:.40} is no number from 1 to {MAX_DEVICES}")
    if not isinstance(memory, list) or len(memory) != count or len(set(memory)) != 1:
        raise ValueError("its memory is not the same number of GB for each worker")
    if type(memory[0]) not in (int, float) or not 0 < memory[0] <= 1e6:
        raise ValueError(f"its memory {memory[0]!r:.40} is no number of GB")
    if any(type(told[field]) not in (int, float) for field in ("sm_requests", "sm_limits")):
        raise ValueError("its sm_requests or sm_limits is no number")
    share = make_share(float(told["sm_requests"]), float(told["sm_limits"]), round(memory[0] * MB_PER_GB))
    return SharingInstance(name=name, family=name, kind=kind, num_devices=count, share=share)


def draw_sharing_workload(
    num_instances: int,
    seed: int,
    *,
    training_fraction: float = 0.2,
    llm_fraction: float = 0.2,
    num_families: int = 0,
) -> SharingWorkload:
    """Instances as the published files hold them, from a seed: one starts each second; some go, after whole minutes.

    Requests are uniform (training 0.4 to 0.8, inference 0.2 to 0.4, language models 0.4 to 0.6), limits at least 0.2
    above and at most 1, 0.6 and 0.8; memory is 25 to 40 GB on each of 2 or 4 devices, 3 to 10 GB, and 20 to 30 GB.
    With `num_families` each kind's instances are of so many functions, drawn evenly; 0: each is one of its own.
    Raises InvalidRequest.
    """
    if num_instances < 1 or seed < 0 or not 0 <= training_fraction + llm_fraction <= 1:
        raise InvalidRequest("a drawn workload has at least one instance, a seed from 0, and parts of at most 1")
    rng = np.random.default_rng(np.random.SeedSequence([seed, num_instances]))
    counts = [int(num_instances * training_fraction), int(num_instances * llm_fraction)]
    kinds: list[Kind] = []
    for kind, count in zip(_KINDS, (*counts, num_instances - sum(counts)), strict=True):
        kinds += [kind] * count
    order = rng.permutation(num_instances).tolist()
    instances = [_draw(rng, f"{kinds[k]}-{at:06d}", kinds[k], num_families) for at, k in enumerate(order)]
    moments = [(float(at), 0, at) for at in range(num_instances)]
    for is_training, fraction, minutes in (
        (False, _DELETED_SERVICES, _SERVICE_MINUTES),
        (True, _DELETED_TRAINING, _TRAINING_MINUTES),
    ):
        those = [at for at, each in enumerate(instances) if (each.kind == "training") == is_training]
        num_deleted = min(int(num_instances * fraction), len(those))
        chosen = sorted(rng.choice(those, num_deleted, replace=False).tolist()) if num_deleted else []
        moments += [(at + 60.0 * int(rng.integers(minutes[0], minutes[1] + 1)), 1, at) for at in chosen]
    events = [SharingEvent(at_s=at_s, is_start=not goes, instance=instances[at]) for at_s, goes, at in sorted(moments)]
    return SharingWorkload(name=f"drawn-{num_instances}-seed{seed}", events=tuple(events), drawn=seed)


def _draw(rng: np.random.Generator, name: str, kind: Kind, num_families: int) -> SharingInstance:
    family = f"{kind}-f{int(rng.integers(num_families))}" if num_families else name
    num_devices = 1
    if kind == "training":
        request, num_devices = rng.uniform(0.4, 0.8), int(rng.choice((2, 4)))
        limit, memory_gb = max(request + 0.2, rng.uniform(0.6, 1.0)), int(rng.choice(_TRAINING_MEMORY_GB))
    elif kind == "inference":
        request = rng.uniform(0.2, 0.4)
        limit, memory_gb = max(request + 0.2, rng.uniform(0.3, 0.6)), int(rng.integers(3, 11))
    else:
        request = rng.uniform(0.4, 0.6)
        limit, memory_gb = rng.uniform(request + 0.2, 0.8), int(rng.integers(20, 31))
    share = make_share(round(request, 2), round(min(1.0, limit), 2), memory_gb * MB_PER_GB)
    return SharingInstance(name=name, family=family, kind=kind, num_devices=num_devices, share=share)


def find_workloads(data: Path) -> Iterator[Path]:
    """The files of instances in a folder, or in its `workload` folder, shortest first. Raises InvalidRequest."""
    folder = data / "workload" if (data / "workload").is_dir() else data
    found = sorted(folder.glob("instances-*.txt"), key=lambda path: (path.stat().st_size, path.name))
    if not found:
        raise InvalidRequest(f"{folder} holds no instances-*.txt; name the folder with Dilu's workloads")
    yield from found
