"""What a process that is profiled for its share of a device is told, and what it answers: lines of JSON over two pipes.

No torch here: the parent, which holds the process to one share after another, reads this, too.
"""

from __future__ import annotations

import os
from typing import Literal, TypeVar

import msgspec

from springtide.core.workload import Entrypoint, TrainingJob

# The entry point of the process: python -m MODULE SPEC.
MODULE = "springtide.runtime.profiling.share_profiler_worker"
# A line is a list of durations at most: so many of them, whatever a function does.
MAX_DURATIONS = 20_000

MessageT = TypeVar("MessageT")


class ShareSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `directory` and `name` are those of the process's files; the two numbers are pipes of the process.

    Of a service `call` is one request as it is sent to it, in JSON ("": one is made up from the types of predict).
    `job` is what a training function trains.
    """

    entrypoint: Entrypoint
    kind: Literal["inference", "training"]
    params: dict[str, str]
    directory: str
    name: str
    orders_fd: int
    answers_fd: int
    call: str = ""
    job: TrainingJob | None = None


class RunOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Run for `warm_s` without a word, then for `measure_s`, at least one iteration each.

    `batch_size` is a service's; a training function has its own.
    """

    batch_size: int = 1
    warm_s: float = 0.0
    measure_s: float = 0.5


class RunAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the iterations took that were measured, and the samples in each of them.

    The first answer comes unasked, when the process has loaded, and has no durations. `is_batchable`: a service takes
    several requests at once. `is_too_large`: there was not enough memory for the batch. `peak_mb` is the most memory
    that the process has held.
    """

    durations_s: list[float] = []
    num_samples: int = 0
    is_batchable: bool = True
    is_too_large: bool = False
    peak_mb: int = 0


def send(descriptor: int, message: msgspec.Struct) -> None:
    data = memoryview(msgspec.json.encode(message) + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


class JsonLines:
    """Messages of one type read from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self, kind: type[MessageT]) -> MessageT | None:
        """The next message; None at the end of the pipe. Blocks."""
        while b"\n" not in self._rest:
            chunk = os.read(self._descriptor, 1 << 16)
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line, type=kind)
