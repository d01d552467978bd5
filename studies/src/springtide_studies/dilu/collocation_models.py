"""The models of the collocation study: latencies on parts of a GPU, made up or fitted to surfaces, and their shares."""

from __future__ import annotations

from pathlib import Path

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.shares import Share
from springtide_studies.dilu.gpu_execution_work import IterationPlan
from springtide_studies.dilu.share_latency import LatencyPoint, ShareLatency, fit_share_latency
from springtide_studies.workloads.share_surfaces import read_share_surface

# An SLO is twice the execution time that a batch may take (Dilu, section 3.2); that time is bounded by twice the one
# of a batch of 4 on the whole device, for measured and made-up models alike.
_BOUND_BATCH, _BOUND_FACTOR = 4, 2.0
_BATCH_SIZES = (1, 2, 4, 8)
_STEP = 0.1
_TRAINING_STEP = 0.02
_REQUEST_THROUGHPUT, _LIMIT_THROUGHPUT = 0.80, 0.98


class GpuModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served and trained. `fit_median_error` is how far it is off its surface (None: made up)."""

    name: str
    latency: ShareLatency
    fit_median_error: float | None = None

    @property
    def execution_bound_s(self) -> float:
        """How long a batch may run."""
        return _BOUND_FACTOR * self.latency.latency_s(_BOUND_BATCH, 1.0)

    @property
    def slo_s(self) -> float:
        """Within which time of its arrival a request must be answered."""
        return 2.0 * self.execution_bound_s


def builtin_models() -> dict[str, GpuModel]:
    """Return four made-up models: a vision one, a small and a large encoder, and a decoder bound by memory."""
    latencies = {
        "vision": ShareLatency(
            host_s=0.014, work_s=0.001, work_per_item_s=0.0005, saturation=0.25, saturation_per_doubling=0.09
        ),
        "small-encoder": ShareLatency(
            host_s=0.009, work_s=0.0005, work_per_item_s=0.0009, saturation=0.12, saturation_per_doubling=0.05
        ),
        "large-encoder": ShareLatency(
            host_s=0.006, work_s=0.0, work_per_item_s=0.0025, saturation=0.18, saturation_per_doubling=0.15
        ),
        "decoder": ShareLatency(
            host_s=0.005, work_s=0.001, work_per_item_s=0.003, saturation=0.15, saturation_per_doubling=0.11
        ),
    }
    return {name: GpuModel(name=name, latency=latency) for name, latency in latencies.items()}


def inference_share(model: GpuModel) -> tuple[int, Share]:
    """Return the batch size and share with the most throughput per share within the bound; the limit is twice it."""
    best = (0.0, 1, 1.0)
    for batch_size in _BATCH_SIZES:
        for number in range(1, round(1.0 / _STEP) + 1):
            share = number * _STEP
            latency_s = model.latency.latency_s(batch_size, share)
            efficacy = batch_size / (latency_s * share)
            if latency_s <= model.execution_bound_s and efficacy > best[0] + 1e-9:
                best = (efficacy, batch_size, share)
    request = round(best[2], 6)
    return best[1], Share(request=request, limit=min(1.0, 2.0 * request))


def training_share(plan: IterationPlan) -> Share:
    """Return the least shares with 80 % and with 98 % of the throughput of the whole device (Dilu, section 3.2)."""
    width = plan.kernels[0].sm_fraction

    def throughput(share: float) -> float:
        return plan.alone_s / (plan.host_s + plan.idle_s + plan.device_s / min(share, width))

    shares = [number * _TRAINING_STEP for number in range(1, round(1.0 / _TRAINING_STEP) + 1)]
    request = next(share for share in shares if throughput(share) >= _REQUEST_THROUGHPUT)
    limit = next(share for share in shares if throughput(share) >= _LIMIT_THROUGHPUT)
    return Share(request=round(request, 6), limit=round(min(1.0, max(request, limit)), 6))


def measured_models(data: Path) -> dict[str, GpuModel]:
    """Return a model for each surface (`*.csv`) in `profiles/` of a folder, or in the folder itself, fitted.

    Raises InvalidRequest.
    """
    folder = data / "profiles" if (data / "profiles").is_dir() else data
    models: dict[str, GpuModel] = {}
    for path in sorted(folder.glob("*.csv")):
        surface = read_share_surface(path)
        fit = fit_share_latency(
            [
                LatencyPoint(batch_size=batch_size, share=percent / 100.0, latency_s=latency_s)
                for (batch_size, percent), latency_s in sorted(surface.latency_s.items())
            ]
        )
        name = path.stem.removeprefix("bs_sm_").replace("_", "-")
        models[name] = GpuModel(name=name, latency=fit.latency, fit_median_error=fit.median_error)
    if len(models) < 2:
        raise InvalidRequest(
            f"a study of pairs needs at least two surfaces, and {folder} holds {len(models)}; give a folder with "
            "profiles/*.csv of batch size, percent of a device, seconds, samples a second"
        )
    return models
