"""The jobs of FaPES's evaluation as this bench draws them: four model families on V100, their lengths and requests.

Assumptions, since the paper gives no numbers. Computation: forward and backward FLOPs (three times the forward's) at 55
percent of a V100's 15.7 TFLOPS in fp32; of VGG16's, whose 3x3 convolutions Winograd's method shortens, less than half.
Gradients: fp32, in DDP's buckets of 25 MB, ready in the order of the backward pass. Noise scales: McCandlish et al.,
"An Empirical Model of Large-Batch Training" (2018): about 1,000 to 15,000 images on ImageNet, 700 to 100,000 tokens on
text (sequences of 1,024 here). Samples of an epoch are such that FIFO's jobs run as long as in the paper's table 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec
import numpy as np

from springtide.core.workload import (
    AdaptiveBatch,
    Entrypoint,
    GradientBucket,
    StepProfile,
    TrainingJob,
    WorkloadId,
)
from springtide.simulator.fluid.trace import Arrivals

BUCKET_BYTES = 25_000_000
MAX_WORKERS = 64
# The paper's requests: 4 to 64 GPUs; users ask for few more often than for many.
REQUESTED = (4, 8, 16, 32, 64)
REQUESTED_SHARES = (0.35, 0.3, 0.2, 0.1, 0.05)
# The noise scale grows over so many pieces of a training.
NUM_PIECES = 10
_SOURCE = Entrypoint(source_path="trace", object_name="fit")
_RARELY_S = 1e9

# `adaptive`: policies choose workers and batch. `fixed`: the request's batch, workers are chosen. `rigid`: all of it.
RequestRule = Literal["adaptive", "fixed", "rigid"]


class ModelFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `samples_per_s` is computation alone on one GPU; `ready` maps the part of the backward pass that is
    done to the part of the gradient that is ready (both 0..1, linear between). Noise scales and batches in samples.
    """

    name: str
    num_bytes: int
    samples_per_s: float
    profiled_batch_size: int
    ready: tuple[tuple[float, float], ...]
    noise_begin: float
    noise_end: float
    initial_batch_size: int
    max_local_size: int
    samples_per_epoch: int

    def profile(self) -> StepProfile:
        """The timeline of a step on two workers, as profiling would find it."""
        step_s = self.profiled_batch_size / self.samples_per_s
        forward_s, backward_s = step_s / 3.0, step_s * 2.0 / 3.0
        parts, done = zip(*[(part, passed) for passed, part in self.ready], strict=True)
        num_buckets = -(-self.num_bytes // BUCKET_BYTES)
        buckets = []
        for index in range(num_buckets):
            size = min(BUCKET_BYTES, self.num_bytes - index * BUCKET_BYTES)
            passed = float(np.interp((index * BUCKET_BYTES + size) / self.num_bytes, parts, done))
            buckets.append(GradientBucket(ready_s=forward_s + passed * backward_s, num_bytes=size))
        return StepProfile(
            local_batch_size=self.profiled_batch_size,
            forward_s=forward_s,
            backward_s=backward_s,
            buckets=tuple(buckets),
        )

    def noise_scale(self, piece: int) -> float:
        """The gradient noise scale in a piece of the training, in samples."""
        share = piece / (NUM_PIECES - 1)
        return float(self.noise_begin * (self.noise_end / self.noise_begin) ** share)


def _family(name: str, **facts: object) -> tuple[str, ModelFamily]:
    return name, msgspec.convert({"name": name, **facts}, ModelFamily)


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    dict(
        (
            # 25.6 M parameters, two thirds of them in the last stage, which the backward pass meets first.
            _family(
                "resnet50",
                num_bytes=102_400_000,
                samples_per_s=350.0,
                profiled_batch_size=64,
                ready=((0.0, 0.0), (0.22, 0.67), (0.55, 0.95), (1.0, 1.0)),
                noise_begin=1000.0,
                noise_end=15_000.0,
                initial_batch_size=64,
                max_local_size=128,
                samples_per_epoch=30_000,
            ),
            # 138 M parameters (528 MiB), nine tenths in the three layers at the end.
            _family(
                "vgg16",
                num_bytes=553_600_000,
                samples_per_s=200.0,
                profiled_batch_size=64,
                ready=((0.0, 0.0), (0.03, 0.89), (1.0, 1.0)),
                noise_begin=1000.0,
                noise_end=15_000.0,
                initial_batch_size=64,
                max_local_size=128,
                samples_per_epoch=18_500,
            ),
            # 124 M parameters; the embedding, tied to the output, is ready last. Sequences of 1,024 tokens.
            _family(
                "gpt2",
                num_bytes=497_800_000,
                samples_per_s=10.0,
                profiled_batch_size=4,
                ready=((0.0, 0.0), (0.95, 0.69), (1.0, 1.0)),
                noise_begin=0.7,
                noise_end=98.0,
                initial_batch_size=8,
                max_local_size=8,
                samples_per_epoch=520,
            ),
            # 86.6 M parameters in twelve equal blocks.
            _family(
                "vit",
                num_bytes=346_300_000,
                samples_per_s=82.0,
                profiled_batch_size=32,
                ready=((0.0, 0.0), (1.0, 1.0)),
                noise_begin=1000.0,
                noise_end=15_000.0,
                initial_batch_size=64,
                max_local_size=128,
                samples_per_epoch=8_900,
            ),
        )
    )
)


class FapesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One job as it was drawn: `num_samples` at the initial batch size would be its training."""

    job_id: str
    at_s: float
    family: str
    num_samples: float
    num_workers: int
    local_batch_size: int

    @property
    def batch_size(self) -> int:
        """The global batch that its owner would have asked for."""
        return self.num_workers * self.local_batch_size


def draw_requests(moments_s: Sequence[float], seed: int) -> tuple[FapesRequest, ...]:
    """A request for each moment: family, 100 to 200 epochs, 4 to 64 GPUs, and a local batch, all at random."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 17]))
    names = tuple(FAMILIES)
    found = []
    for index, at_s in enumerate(moments_s):
        family = FAMILIES[names[int(rng.integers(len(names)))]]
        found.append(
            FapesRequest(
                job_id=f"job-{index:05d}",
                at_s=float(at_s),
                family=family.name,
                num_samples=float(rng.integers(100, 201)) * family.samples_per_epoch,
                num_workers=int(rng.choice(REQUESTED, p=REQUESTED_SHARES)),
                # Users fill a GPU to an eighth, a quarter, a half or wholly.
                local_batch_size=max(1, family.max_local_size >> int(rng.integers(0, 4))),
            )
        )
    return tuple(found)


def progress_ends(
    family: ModelFamily, request: FapesRequest, batch_size: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Where the pieces of a training end, in steps of `batch_size`, and what such a step is worth in initial ones.

    The training is as long as its samples at the initial batch size make it: progress counts, not samples (Pollux).
    """
    length = request.num_samples / family.initial_batch_size
    worths = tuple(gain(family, piece, batch_size) for piece in range(NUM_PIECES))
    ends: list[float] = []
    done = 0.0
    for worth in worths:
        done += length / NUM_PIECES / worth
        ends.append(done)
    return tuple(ends), worths


def gain(family: ModelFamily, piece: int, batch_size: float) -> float:
    """Progress of a step at a batch size, in steps of the initial one (Pollux, section 3.1)."""
    initial = family.initial_batch_size
    ratio = family.noise_scale(piece) / initial
    return (ratio + 1.0) / (ratio * initial / batch_size + 1.0)


def arrivals_of(
    requests: Sequence[FapesRequest], rule: RequestRule, curves: Mapping[tuple[str, int], Mapping[int, float]]
) -> Arrivals:
    """The requests as jobs. `curves` maps (family, batch) to steps/s on compact groups, for policies without more."""
    return list(_jobs(requests, rule, curves))


def _jobs(
    requests: Sequence[FapesRequest], rule: RequestRule, curves: Mapping[tuple[str, int], Mapping[int, float]]
) -> Iterator[tuple[float, TrainingJob]]:
    for request in requests:
        family = FAMILIES[request.family]
        is_adaptive = rule == "adaptive"
        batch_size = family.initial_batch_size if is_adaptive else request.batch_size
        ends, _ = progress_ends(family, request, batch_size)
        most = MAX_WORKERS if rule != "rigid" else request.num_workers
        most = min(most, batch_size) if not is_adaptive else most
        bounds = AdaptiveBatch(
            min_size=family.initial_batch_size,
            max_size=MAX_WORKERS * family.max_local_size,
            max_local_size=family.max_local_size,
        )
        yield (
            request.at_s,
            TrainingJob(
                job_id=WorkloadId(request.job_id),
                name=request.job_id,
                entrypoint=_SOURCE,
                global_batch_size=batch_size,
                min_workers=request.num_workers if rule == "rigid" else 1,
                max_workers=most,
                num_virtual_shards=MAX_WORKERS,
                elastic=rule != "rigid",
                max_restarts=1_000_000,
                checkpoint_interval_s=_RARELY_S,
                total_steps=max(1, round(ends[-1])),
                profile_steps_per_s={} if is_adaptive else dict(curves[request.family, batch_size]),
                requested_workers=None if is_adaptive else request.num_workers,
                batch=bounds if is_adaptive else None,
                length_unit="progress",
                family=request.family,
                step_profile=family.profile() if is_adaptive else None,
            ),
        )
