"""The protocol of share profiles: orders to the profiled process and its answers, as lines of JSON over two pipes.

The parent holds the process to one share after another. It uses this module too, so this does not import torch.
"""

from __future__ import annotations

import os
from typing import Literal, TypeVar

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.workload import Entrypoint, TrainingJob

# The entry point of the process: python -m MODULE SPEC.
MODULE = "springtide.runtime.profiling.share_profiler_worker"
# The most durations in one answer, which bounds the length of a line.
MAX_DURATIONS = 20_000

MessageT = TypeVar("MessageT")


class ShareSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `directory` and `name` locate the process's files; `orders_fd` and `answers_fd` are its pipes.

    For a service, `call` is one request in JSON ("": made up from the type hints of predict). For a training function,
    `job` is the job to train.
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
    """Run iterations for `warm_s` without measuring, then measure them for `measure_s`; at least one of each.

    `batch_size` is for services; a training function has its own.
    """

    batch_size: int = 1
    warm_s: float = 0.0
    measure_s: float = 0.5


class RunAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The durations of the measured iterations, and the number of samples in each.

    The first answer, without durations, is sent without an order when the process has loaded. `is_batchable`: the
    service takes several requests at once. `is_too_large`: the batch did not fit into memory. `peak_mb` is the
    process's peak memory.
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
        """Wait for the next message; None at the end of the pipe."""
        while b"\n" not in self._rest:
            chunk = os.read(self._descriptor, 1 << 16)
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return decode_json(line, kind)
