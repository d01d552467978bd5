"""Profiling a whole model in any framework as one layer: the time of a pass by two batch sizes, and its memory."""

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

# The larger of the two batches that are timed, over the smaller one.
_FACTOR = 4
# Where the micro-batch may be chosen, its activations take so much at most: fewer, larger passes waste less.
_PASS_BYTES = 64 * MIB
# What a worker holds for each byte of weights: weights, gradients and twice as much for an optimizer.
_STATE_FACTOR = 4
# Moving bytes takes part of a core beside the computation, not many times the computation: a pass of microseconds
# says more about the clock than about itself.
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
    """Time and weigh a whole model: medians of `num_rounds` rounds after one that is dropped.

    The first samples are taken in batches of two sizes, whose times tell the part that does not grow with the samples;
    that and the update, once a step, are `fixed_s`. Forward and backward are one here, told as backward. Up to
    `largest_micro_batch` samples the micro-batch is made larger while its activations are small. Other arguments as in
    profile_layers. The model is trained by it: it is of no further use. Raises InvalidRequest.
    """
    if num_rounds < 1 or micro_batch_size < 1:
        raise InvalidRequest("a profile takes at least one round of a micro-batch of at least one sample")
    small, large = _sizes(micro_batch_size, num_samples)
    begin = getattr(model, "begin_epoch", None)
    if callable(begin):
        begin(0)
    batches = {size: fetch(list(range(size))) for size in (small, large)}
    layout, sample_bytes = _weigh(model, batches, small, large)
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
        """One round more; the first one does not count: it loads and compiles."""
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
    """Two batch sizes, the smaller one that of a micro-batch where the dataset has enough for a larger one."""
    if num_samples < 1:
        raise InvalidRequest("there is no sample yet to profile the model with; put at least one there first")
    large = min(_FACTOR * micro_batch_size, num_samples)
    return min(micro_batch_size, max(1, large // 2)), large


def _weigh(model: Model, batches: dict[int, tuple[Any, Any]], small: int, large: int) -> tuple[GradientLayout, int]:
    """The layout of the gradients, and the bytes that a pass holds for each of its samples."""
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
        # The second time nothing is loaded or compiled any more. What Python's allocator knows of is exact; what a
        # framework takes by itself shows in the process only.
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
    # Some frameworks compute only when a value is read.
    for gradient in gradients.values():
        np.asarray(gradient)
    return clock() - began_s
