"""The time of a training step on a set of devices, from its profiled computation and the times of its exchanges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from springtide.core.errors import InvalidRequest
from springtide.core.workload import StepProfile

Array = npt.NDArray[np.float64]


def bucket_bytes(profile: StepProfile) -> npt.NDArray[np.int64]:
    """The bytes of each gradient bucket in the order in which they are exchanged, shape [buckets]."""
    return np.array([bucket.num_bytes for bucket in profile.buckets], dtype=np.int64)


def computation_scale(
    profile: StepProfile, local_batch_size: npt.ArrayLike, fixed_fraction: npt.ArrayLike = 0.0
) -> Array:
    """Forward and backward time at `local_batch_size` samples a worker, over that of the profile (FaPES, section 4.1).

    FaPES assumes that it is proportional to the batch. Here `fixed_fraction` (0 .. 1) of it does not depend on the
    batch: see `fixed_fraction_of`. Any shape.
    """
    ratio = np.asarray(local_batch_size, dtype=np.float64) / profile.local_batch_size
    fixed = np.asarray(fixed_fraction, dtype=np.float64)
    return np.asarray(fixed + (1.0 - fixed) * ratio, dtype=np.float64)


def iteration_s(
    profile: StepProfile,
    local_batch_size: npt.ArrayLike,
    num_passes: npt.ArrayLike,
    bucket_s: npt.ArrayLike,
    fixed_fraction: npt.ArrayLike = 0.0,
) -> tuple[Array, Array]:
    """Return (step_s, sync_s) of every candidate: the critical path of a step (FaPES, section 4.1, "Iteration Time").

    `bucket_s` [..., buckets] is how long the exchange of each bucket takes on the candidate's devices, in the order of
    `profile.buckets`; zeros for a candidate with one worker. `local_batch_size` and `num_passes` [...] are broadcast
    against it. Buckets are exchanged one after another, each no earlier than it is ready and the one before is done;
    the update follows the last exchange and does not depend on the batch.

    Both are as in core.job_parts.StepTime: `step_s` is one pass with the exchange and the update, `sync_s` the part of
    it that a further pass would not add. Only the last of several passes exchanges, so neither depends on `num_passes`;
    `goodput.step_total_s` combines them. Raises InvalidRequest if the shapes do not fit.
    """
    exchange_s = np.asarray(bucket_s, dtype=np.float64)
    num_buckets = len(profile.buckets)
    if exchange_s.ndim == 0 or exchange_s.shape[-1] != num_buckets:
        raise InvalidRequest(
            f"the profile has {num_buckets} buckets, the exchange times have the shape {exchange_s.shape}; give one "
            "time for each bucket in the last dimension"
        )
    scale = computation_scale(profile, local_batch_size, fixed_fraction)
    scale, passes, _ = np.broadcast_arrays(scale, np.asarray(num_passes), exchange_s[..., :1].sum(axis=-1))
    if np.any(passes < 1):
        raise InvalidRequest("a step has at least one pass; num_passes must be 1 or more")
    pass_s = scale * (profile.forward_s + profile.backward_s)
    exchanged_s = pass_s
    if num_buckets:
        ready_s = np.array([bucket.ready_s for bucket in profile.buckets])
        # The recursion end[i] = max(ready[i], end[i - 1]) + exchange[i], unrolled: the last exchange ends at the
        # maximum over all buckets of the time when the bucket is ready plus all exchanges from it on.
        left_s = np.cumsum(exchange_s[..., ::-1], axis=-1)[..., ::-1]
        exchanged_s = np.maximum(pass_s, (scale[..., None] * ready_s + left_s).max(axis=-1))
    step_s = exchanged_s + profile.update_s
    return step_s, step_s - pass_s


def exchange_intervals(
    profile: StepProfile, bucket_s: Sequence[float], local_batch_size: int | None = None
) -> list[tuple[float, float]]:
    """Start and end of the exchange of each bucket, in seconds from the step's start, for one candidate."""
    scale = float(computation_scale(profile, local_batch_size or profile.local_batch_size))
    intervals: list[tuple[float, float]] = []
    end_s = 0.0
    for bucket, took_s in zip(profile.buckets, bucket_s, strict=True):
        begin_s = max(scale * bucket.ready_s, end_s)
        end_s = begin_s + took_s
        intervals.append((begin_s, end_s))
    return intervals


def fixed_fraction_of(profile: StepProfile, other: StepProfile) -> float:
    """The fraction (0 .. 1) of the computation of `profile` that does not depend on the local batch, from two profiles.

    From a line through both (launching operators costs the same for every batch). Raises InvalidRequest if both have
    the same local batch.
    """
    if profile.local_batch_size == other.local_batch_size:
        raise InvalidRequest("two profiles of the same local batch do not tell what of a step depends on it")
    here_s = profile.forward_s + profile.backward_s
    there_s = other.forward_s + other.backward_s
    if here_s <= 0:
        return 0.0
    per_sample_s = (here_s - there_s) / (profile.local_batch_size - other.local_batch_size)
    return float(np.clip(1.0 - per_sample_s * profile.local_batch_size / here_s, 0.0, 1.0))
