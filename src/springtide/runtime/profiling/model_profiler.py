"""Profiling a whole model, in any framework, as one layer: the time of a pass at two batch sizes, and its memory."""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.functions import MIB, LayerProfile, ModelProfile
from springtide.core.model import Model
from springtide.runtime.data.samples import Fetch
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.functions.data_parallel.gradients import GradientLayout
from springtide.runtime.profiling.place import (
    BYTES_PER_S,
    Clock,
    Transfer,
    fixed_part_s,
    reset_peak,
    resident_bytes,
    status_bytes,
)

# The ratio of the two batch sizes that are timed.
_FACTOR = 4
# If the profiler chooses the micro-batch, its activations are limited to this size.
_PASS_BYTES = 64 * MIB
# Bytes in memory for each byte of weights: weights, gradients, and twice as much for the optimizer.
_STATE_FACTOR = 4
# Transfers take part of a core, so a larger slowdown is a measurement error: passes of microseconds are mostly noise.
_MOST_SLOWDOWN = 2.0


def profile_model(
    model: Model,
    fetch: Fetch,
    num_samples: int,
    *,
    name: str,
    micro_batch_size: int,
    largest_micro_batch: int = 0,
    num_rounds: int = 5,
    memory_mb: int,
    bytes_per_s: float = BYTES_PER_S,
    latency_s: float = 0.04,
    base_bytes: int = 0,
    clock: Clock = time.perf_counter,
    transfer: Transfer | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ModelProfile:
    """Measure time and memory of a whole model: medians of `num_rounds` rounds after a warm-up.

    The first samples are passed in batches of two sizes, from whose times follows the part that does not grow with the
    samples; that part and the update, once a step, are `fixed_s`. Forward and backward are measured together and
    reported as backward. The micro-batch is enlarged up to `largest_micro_batch` samples while its activations are
    small. Other arguments are as in profile_layers. This trains the model, so discard it afterwards. Raises
    InvalidRequest.
    """
    if num_rounds < 1 or micro_batch_size < 1:
        raise InvalidRequest("a profile takes at least one round of a micro-batch of at least one sample")
    small, large = _sizes(micro_batch_size, num_samples)
    begin = getattr(model, "begin_epoch", None)
    if callable(begin):
        begin(0)
    batches = {size: fetch(list(range(size))) for size in (small, large)}
    layout, sample_bytes = _measure_bytes(model, batches, small, large)
    suited = min(largest_micro_batch, num_samples, _PASS_BYTES // max(1, sample_bytes))
    if suited > micro_batch_size:
        micro_batch_size = suited
        small, large = _sizes(micro_batch_size, num_samples)
        batches = {size: fetch(list(range(size))) for size in (small, large)}
    took = _Rounds()
    for index in range(num_rounds + 1):
        on_progress(f"round {index + 1} of {num_rounds + 1}")
        took.add(model, layout, batches[small], batches[large], clock, transfer, seed, counts=index > 0)
    large_s = statistics.median(took.large_s)
    once_s = fixed_part_s(small, statistics.median(took.small_s), large, large_s)
    sample_s = max(0.0, (large_s - once_s) / large)
    fixed_s = once_s + statistics.median(took.update_s)
    parameter_bytes = (layout.num_elements - 1) * np.dtype(layout.dtype).itemsize
    held = status_bytes("VmHWM") - _STATE_FACTOR * parameter_bytes - large * sample_bytes
    layer = LayerProfile(
        name="model",
        parameter_bytes=parameter_bytes,
        activation_bytes=sample_bytes * micro_batch_size,
        output_bytes=0,
        gradient_bytes=0,
        forward_s=(0.0,),
        backward_s=(fixed_s + micro_batch_size * sample_s,),
    )
    return ModelProfile(
        model=name,
        micro_batch_size=micro_batch_size,
        memory_mb=(memory_mb,),
        bytes_per_s=(bytes_per_s,),
        layers=(layer,),
        latency_s=latency_s,
        slowdown=min(_MOST_SLOWDOWN, max(1.0, statistics.median(took.beside_s) / max(large_s, 1e-9))),
        base_bytes=max(base_bytes, held),
        fixed_s=fixed_s,
        source=f"measured as a whole: medians of {num_rounds} rounds with {small} and {large} samples",
    )


@dataclass(slots=True)
class _Rounds:
    """Seconds of each round: passes of both sizes, the update, and the larger pass beside transfers."""

    small_s: list[float] = field(default_factory=list)
    large_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)

    def add(
        self,
        model: Model,
        layout: GradientLayout,
        small: tuple[Any, Any],
        large: tuple[Any, Any],
        clock: Clock,
        transfer: Transfer | None,
        seed: int,
        *,
        counts: bool,
    ) -> None:
        """Run one round; `counts` is False for the first, which loads and compiles."""
        small_s, large_s = (_time_pass(model, batch, clock, seed) for batch in (small, large))
        at_s = clock()
        model.apply(layout.split(layout.zeros()))
        update_s, beside_s = clock() - at_s, large_s
        if transfer is not None:
            with transfer():
                beside_s = _time_pass(model, large, clock, seed)
        if counts:
            self.small_s.append(small_s)
            self.large_s.append(large_s)
            self.update_s.append(update_s)
            self.beside_s.append(beside_s)


def _sizes(micro_batch_size: int, num_samples: int) -> tuple[int, int]:
    """Two batch sizes; the smaller one is the micro-batch if the dataset has enough samples for a larger one."""
    if num_samples < 1:
        raise InvalidRequest("there is no sample yet to profile the model with; put at least one there first")
    large = min(_FACTOR * micro_batch_size, num_samples)
    return min(micro_batch_size, max(1, large // 2)), large


def _measure_bytes(
    model: Model, batches: dict[int, tuple[Any, Any]], small: int, large: int
) -> tuple[GradientLayout, int]:
    """The layout of the gradients, and the bytes in memory for each sample of a pass."""
    layout: GradientLayout | None = None
    held: dict[int, int] = {}
    for size in (small, large, small, large):
        x, y = batches[size]
        reset_peak()
        before = resident_bytes()
        tracemalloc.start()
        try:
            _, gradients = model.gradients(x, y)
            traced = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # Each size runs twice, because the first time loads and compiles. tracemalloc is exact but sees only Python's
        # allocator; a framework's own memory shows only in the process's peak.
        held[size] = max(traced, status_bytes("VmHWM") - before)
        layout = layout or GradientLayout.of(gradients)
    assert layout is not None
    batch_bytes = sum(np.asarray(part).nbytes for part in batches[large] if part is not None)
    grown = (held[large] - held[small]) / (large - small) if large > small else held[small] / small
    return layout, max(math.ceil(grown), math.ceil(batch_bytes / large))


def _time_pass(model: Model, batch: tuple[Any, Any], clock: Clock, seed: int) -> float:
    seed_everything(seed)
    began_s = clock()
    _, gradients = model.gradients(*batch)
    # Reading the values, because some frameworks compute lazily.
    for gradient in gradients.values():
        np.asarray(gradient)
    return clock() - began_s
