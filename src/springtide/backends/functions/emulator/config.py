"""What the emulator is started with: the service that it stands for, how its limits are enforced, what goes wrong."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.functions import FunctionService, MemorySize

DEFAULT_HANDLER = "springtide.runtime.function_handler.handler"
# Modules that the handler imports after it has reported its start.
DEFAULT_PRELOAD = ("torch", "springtide.runtime.functions.worker")
CpuMethod = Literal["auto", "cgroup", "duty-cycle", "none"]


class EmulatorFaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong, by chance. Fractions are of invocations; the n-th draws the same for the same seed.

    `lost_fraction`: accepted, never run, and never answered: the connection breaks when the lifetime is over.
    `answer_lost_fraction`: run, but the connection breaks when the answer is due. `late_fraction`: begun `late_s` late.
    `kill_fraction`: the process is killed at a moment drawn evenly from the first `kill_within_s` of its work.
    `throttled_fraction`: refused with 429. `slow_fraction`: gets `slow_factor` of its CPU for this invocation.
    """

    seed: int = 0
    lost_fraction: float = 0.0
    answer_lost_fraction: float = 0.0
    late_fraction: float = 0.0
    late_s: float = 5.0
    kill_fraction: float = 0.0
    kill_within_s: float = 30.0
    throttled_fraction: float = 0.0
    slow_fraction: float = 0.0
    slow_factor: float = 0.25

    def __post_init__(self) -> None:
        """Fractions are between 0 and 1, times at least 0."""
        fractions = [getattr(self, name) for name in self.__struct_fields__ if name.endswith("_fraction")]
        if not all(0 <= fraction <= 1 for fraction in fractions) or not 0 < self.slow_factor <= 1:
            raise ValueError("fractions of faults are between 0 and 1, and a slow factor above 0 and at most 1")
        if min(self.late_s, self.kill_within_s) < 0 or self.seed < 0:
            raise ValueError("times and seeds of faults are at least 0")


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """The faults injected into one invocation. `kill_after_s` counts from the moment at which the function gets it."""

    is_throttled: bool = False
    is_lost: bool = False
    is_answer_lost: bool = False
    late_s: float = 0.0
    kill_after_s: float | None = None
    cpu_factor: float = 1.0


def fate_of(faults: EmulatorFaults, number: int) -> Fate:
    """The faults of the `number`-th invocation: its own draws, independent of the invocations in between."""
    draws = np.random.default_rng([faults.seed, number]).random(7)
    return Fate(
        is_throttled=bool(draws[0] < faults.throttled_fraction),
        is_lost=bool(draws[1] < faults.lost_fraction),
        is_answer_lost=bool(draws[2] < faults.answer_lost_fraction),
        late_s=faults.late_s if draws[3] < faults.late_fraction else 0.0,
        kill_after_s=float(draws[5]) * faults.kill_within_s if draws[4] < faults.kill_fraction else None,
        cpu_factor=faults.slow_factor if draws[6] < faults.slow_fraction else 1.0,
    )


class EmulatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to stand for, and how.

    `cpu_fraction` of the service's vCPUs is what a function gets on this machine: below 1 where all functions together
    need more cores than there are. `warm_template` forks functions from a process that has imported the handler and
    `preload` already, as a start from a snapshot would be; functions from a zip file start the plain way always.
    `role_environment` is what a function's role would give it (credentials of the store, say). A warm function that is
    not used for `idle_s` is ended; the emulator itself ends after `exit_idle_s` without a request and without a
    function at work (0: never). `python` runs the functions (empty: the emulator's own), and finds modules in
    `python_path`, too.
    """

    service: FunctionService
    handler: str = DEFAULT_HANDLER
    cpu_fraction: float = 1.0
    cpu_method: CpuMethod = "auto"
    warm_template: bool = False
    preload: tuple[str, ...] = DEFAULT_PRELOAD
    idle_s: float = 300.0
    exit_idle_s: float = 0.0
    init_limit_s: float = 120.0
    role_environment: dict[str, str] = {}
    python: str = ""
    python_path: tuple[str, ...] = ()
    region: str = "us-east-1"
    faults: EmulatorFaults = EmulatorFaults()

    def __post_init__(self) -> None:
        """Durations and the share of a CPU are above 0."""
        if self.cpu_fraction <= 0 or min(self.idle_s, self.init_limit_s) <= 0 or self.exit_idle_s < 0:
            raise ValueError("the CPU fraction and the idle and init limits are above 0")

    def offered(self, memory_mb: int) -> MemorySize:
        """What comes with that much memory: between two sizes of the service in a straight line, as they are outside.

        Raises InvalidRequest where the service has no sizes.
        """
        sizes = self.service.sizes
        if not sizes:
            raise InvalidRequest("the function service has no memory sizes")
        places = [size.memory_mb for size in sizes]
        return MemorySize(
            memory_mb=memory_mb,
            vcpus=float(np.interp(memory_mb, places, [size.vcpus for size in sizes])),
            bytes_per_s=float(np.interp(memory_mb, places, [size.bytes_per_s for size in sizes])),
        )
