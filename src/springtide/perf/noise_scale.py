"""Estimates the gradient noise scale from squared norms of the gradients of a step's parts and of their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from springtide.core.job_parts import GradientNoise

# The decay of the moving average per step on the initial batch: it covers about the last thousand steps, as in AdaScale
# (Johnson et al., 2020, appendix B) and the published adaptdl. A step on a larger batch counts as several.
DECAY = 0.999


class NoiseSample(msgspec.Struct, frozen=True, kw_only=True):
    """Unbiased estimates from one step: the gradient's squared norm and the trace of its covariance.

    `trace` is that of a single sample. Either may be negative in a single step; only their averages are used.
    """

    grad_sqr: float
    trace: float


def sample_noise(
    part_sqr_norms: Sequence[float], part_sizes: Sequence[int], mean_sqr_norm: float
) -> NoiseSample | None:
    """Estimate from the K parts of one step (one a worker and pass), of `part_sizes` samples each.

    `part_sqr_norms` are the squared norms of the parts' mean gradients, `mean_sqr_norm` that of the whole step's, the
    mean over all its samples. The expectation of a mean over b samples is |G|^2 + tr(Sigma) / b (McCandlish et al.,
    2018, appendix A.1), so with the parts weighted by their sizes, which need not be equal, over B samples in all:
    tr(Sigma) = B (mean of parts - whole) / (K - 1), and |G|^2 = whole - tr(Sigma) / B. None for fewer than two parts
    with samples, or if a norm is not finite (a step that overflowed says nothing about noise).
    """
    parts = [(norm, size) for norm, size in zip(part_sqr_norms, part_sizes, strict=True) if size > 0]
    if len(parts) < 2 or not all(math.isfinite(norm) for norm in (mean_sqr_norm, *(norm for norm, _ in parts))):
        return None
    total = sum(size for _, size in parts)
    mean_of_parts = sum(norm * size for norm, size in parts) / total
    trace = total * (mean_of_parts - mean_sqr_norm) / (len(parts) - 1)
    return NoiseSample(grad_sqr=mean_sqr_norm - trace / total, trace=trace)


class NoiseMeter(msgspec.Struct, frozen=True, kw_only=True):
    """Moving averages of both estimates; the noise scale is the ratio of the averages.

    Immutable: `update` returns the next value. It is kept in checkpoints.
    """

    num_samples: int = 0
    weight: float = 0.0
    grad_sqr_sum: float = 0.0
    trace_sum: float = 0.0

    def update(self, sample: NoiseSample | None, scale: float = 1.0, decay: float = DECAY) -> NoiseMeter:
        """Return the meter after one more step, at `scale` times the initial batch size; None changes nothing.

        Earlier steps are weighted by `decay ** scale`, but at least by a half, so that no single step dominates.
        """
        if sample is None:
            return self
        kept = max(decay**scale, 0.5)
        return NoiseMeter(
            num_samples=self.num_samples + 1,
            weight=kept * self.weight + (1.0 - kept),
            grad_sqr_sum=kept * self.grad_sqr_sum + (1.0 - kept) * sample.grad_sqr,
            trace_sum=kept * self.trace_sum + (1.0 - kept) * sample.trace,
        )

    def noise(self, initial_batch_size: int) -> GradientNoise | None:
        """The averages, corrected for their start at zero; the variance is that at the initial batch size.

        Negative averages count as zero. None before the first sample, and while both are zero.
        """
        if self.weight <= 0.0:
            return None
        grad_sqr = max(0.0, self.grad_sqr_sum / self.weight)
        grad_var = max(0.0, self.trace_sum / self.weight / initial_batch_size)
        if grad_sqr + grad_var <= 0.0:
            return None
        return GradientNoise(grad_sqr=grad_sqr, grad_var=grad_var)
