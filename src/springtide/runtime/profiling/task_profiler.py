"""Profiling a declared task: layer by layer if it has a torch model with layers, else as a whole, in any framework.

This module imports a framework only if the task needs it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.core.functions import ModelProfile
from springtide.core.ports import Store
from springtide.runtime.data.samples import Samples, array_samples, dataset_of
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.functions.place_worker import needs_torch
from springtide.runtime.models.user_models import check_task, explain_missing_framework, model_of
from springtide.runtime.profiling.model_profiler import profile_model
from springtide.runtime.profiling.place import BYTES_PER_S, Clock, Transfer, resident_bytes
from springtide.runtime.profiling.task_profile import TaskProfile

_NO_PARAMS: Mapping[str, str] = MappingProxyType({})


def profile_task(
    task: Any,
    *,
    name: str,
    micro_batch_size: int,
    largest_micro_batch: int = 0,
    num_rounds: int = 5,
    memory_mb: int,
    bytes_per_s: float = BYTES_PER_S,
    latency_s: float = 0.04,
    clock: Clock = time.perf_counter,
    transfer: Transfer | None = None,
    seed: int = 0,
    params: Mapping[str, str] = _NO_PARAMS,
    store: Store | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> TaskProfile:
    """Profile an st.Task on the first samples of its dataset. Changes the process's random seeds and the task's model.

    A model that is profiled as a whole may get micro-batches of up to `largest_micro_batch` samples. `memory_mb` is the
    memory of the machine or function that runs this; `store` holds named datasets (None: the local platform's store).
    Raises InvalidRequest for anything but a task, and for a dataset with fewer samples than a micro-batch.
    """
    if not all(hasattr(task, part) for part in ("model", "dataset", "loss", "optimizer")):
        raise InvalidRequest(
            f"{name} is no st.Task: only a declared model and dataset can be profiled for functions; declare an st.Task"
        )
    place: dict[str, Any] = {
        "name": name,
        "micro_batch_size": micro_batch_size,
        "num_rounds": num_rounds,
        "memory_mb": memory_mb,
        "bytes_per_s": bytes_per_s,
        "latency_s": latency_s,
        "clock": clock,
        "transfer": transfer,
        "on_progress": on_progress,
    }
    seed_everything(seed)
    with explain_missing_framework():
        if needs_torch(task):
            return _profile_torch(task, place, largest_micro_batch, seed, params, store)
        check_task(task)
        samples = array_samples(dataset_of(task, params), store)
        try:
            _check_length(samples, name, micro_batch_size)
            base_bytes = resident_bytes()
            profile = profile_model(
                model_of(task, params),
                samples.fetch,
                samples.num_samples,
                largest_micro_batch=largest_micro_batch,
                base_bytes=base_bytes,
                seed=seed,
                **place,
            )
            return _task_profile(profile, samples)
        finally:
            samples.close()


def _profile_torch(
    task: Any,
    place: dict[str, Any],
    largest_micro_batch: int,
    seed: int,
    params: Mapping[str, str],
    store: Store | None,
) -> TaskProfile:
    from springtide.runtime.functions.pipeline.task_parts import task_parts, tensor_samples
    from springtide.runtime.models.torch_model import torch_models
    from springtide.runtime.profiling.layer_profiler import profile_layers

    size = place["micro_batch_size"]
    # The dataset is loaded first, so that its memory is not counted as the model's.
    samples = tensor_samples(dataset_of(task, params), store)
    try:
        _check_length(samples, place["name"], size)
        base_bytes = resident_bytes()
        parts = task_parts(task, seed, params=params, samples=samples)
        if not parts.layers:
            model = torch_models(task, parts, params)()
            profile = profile_model(
                model,
                samples.fetch,
                samples.num_samples,
                largest_micro_batch=largest_micro_batch,
                base_bytes=base_bytes,
                seed=seed,
                **place,
            )
            return _task_profile(profile, samples)
        x, y = samples.fetch(range(size))
        larger = None
        if samples.num_samples >= 2 * size:
            larger = (*samples.fetch(range(2 * size)), 2 * size)
        profile = profile_layers(parts.layers, x, y, parts.loss, base_bytes=base_bytes, larger=larger, **place)
        return _task_profile(profile, samples)
    finally:
        samples.close()


def _check_length(samples: Samples, name: str, micro_batch_size: int) -> None:
    if samples.num_samples < micro_batch_size:
        raise InvalidRequest(
            f"the dataset of {name} has {samples.num_samples} samples and a micro-batch {micro_batch_size}; take "
            "smaller ones"
        )


def _task_profile(profile: ModelProfile, samples: Samples) -> TaskProfile:
    return TaskProfile(
        profile=profile,
        num_samples=None if samples.stream else samples.num_samples,
        stream=samples.stream,
        dataset=samples.reader.name if samples.reader is not None and not samples.stream else "",
    )


def use_one_thread() -> None:
    """Limit torch, if loaded, to one thread; numpy's and JAX's threads are limited by environment variables."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
