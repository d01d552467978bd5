"""The pipeline of functions as plain numbers: what every possible stage takes, and what a plan of stages comes to.

Stages are (first, end, size): layers `first` up to `end`, which is left out, on functions of the size of that index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
Stage = tuple[int, int, int]
# So many binary digits are left of a double's 53 for each time: sums of them are exact, in whatever order.
_DIGITS = 50
# Values this near are one: less than what a measured time is worth by far.
TOLERANCE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Degree:
    """A degree of data parallelism: replicas, micro-batches of each, and what the exchange among them takes.

    `sync` has the pairs (gamma, delta) of equation 9, of which the largest time counts; one replica exchanges nothing.
    `max_stages` limits the stages of a plan, where not as many functions as wanted may run at a time.
    """

    num_replicas: int
    num_micro_batches: int
    sync: tuple[tuple[float, float], ...] = ()
    max_stages: int | None = None

    def allows(self, num_stages: int) -> bool:
        """Whether a plan may have so many stages."""
        return self.max_stages is None or num_stages <= self.max_stages

    def sync_s(self, transfer_s: Floats, latency_s: float) -> Floats:
        """Seconds of the exchange, for what takes `transfer_s` over a link once."""
        if self.num_replicas == 1 or not self.sync:
            return np.zeros_like(transfer_s)
        return np.asarray(np.max([gamma * transfer_s + delta * latency_s for gamma, delta in self.sync], axis=0))


@dataclass(frozen=True, kw_only=True)
class PipelineProblem:
    """L layers and J sizes: times [L, J] in s with the slowdown in them (infinite: does not fit), bytes [L]."""

    forward_s: Floats
    backward_s: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    output_bytes: Floats
    gradient_bytes: Floats
    memory_mb: Floats
    bytes_per_s: Floats
    latency_s: float
    base_bytes: float
    degrees: tuple[Degree, ...]

    def needed_bytes(self, first: int, end: int, degree: Degree) -> float:
        """What a stage holds: the left side of equation 3b."""
        copies = 2.0 if degree.num_replicas == 1 else 4.0
        activations = float(self.activation_bytes[first:end].sum())
        parameters = float(self.parameter_bytes[first:end].sum())
        return degree.num_micro_batches * activations + copies * parameters + self.base_bytes


@dataclass(frozen=True, kw_only=True)
class PipelineSolution:
    """The best plan under one pair of weights; stages from the first layer on. `num_labels` is what it took to prove.

    `value` is equation 3a, `memory_mb` that of all functions; no plan is below `bound`, and values are equal
    within TOLERANCE.
    """

    stages: tuple[Stage, ...]
    degree: Degree
    value: float
    step_s: float
    memory_mb: float
    bound: float
    num_labels: int = 0

    @property
    def is_proved(self) -> bool:
        """Whether nothing better exists."""
        return self.bound >= self.value * (1.0 - TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class StageTables:
    """What each stage (first, end, size) takes at one degree, [L + 1, L + 1, J]; every time of a transfer is its own.

    A cut's four transfers (equation 8, appendix B) each use the link of one function, so they belong to its stage:
    `forward_s` is its computation, the upload of its output and the download of its input; `backward_s` its computation
    and the download of its gradient; `hand_down_s` the upload of the gradient for the stage below, which counts only
    after its own completion (equation 11). `forward_lag_s` and `backward_lag_s` are the longest of each.
    """

    degree: Degree
    fits: Bools
    forward_s: Floats
    forward_lag_s: Floats
    backward_s: Floats
    backward_lag_s: Floats
    hand_down_s: Floats
    sync_s: Floats
    memory_mb: Floats

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.fits) - 1

    @property
    def num_lags(self) -> int:
        """How many lags follow the first micro-batch: mu - 1."""
        return self.degree.num_micro_batches - 1

    def score(self, stages: tuple[Stage, ...]) -> tuple[float, float]:
        """Seconds of a step (equation 7) and the memory of all functions in MB (equation 5)."""
        forward = forward_lag = backward = backward_lag = end = memory = 0.0
        for stage in reversed(stages):
            forward += self.forward_s[stage]
            forward_lag = max(forward_lag, self.forward_lag_s[stage])
            backward += self.backward_s[stage]
            backward_lag = max(backward_lag, self.backward_lag_s[stage])
            end = max(end, backward + self.num_lags * backward_lag + self.sync_s[stage])
            backward += self.hand_down_s[stage]
            backward_lag = max(backward_lag, self.hand_down_s[stage])
            memory += self.memory_mb[stage[2]]
        return float(forward + self.num_lags * forward_lag + end), float(memory * self.degree.num_replicas)


def stage_tables(problem: PipelineProblem, degree: Degree) -> StageTables:
    """Every stage at this degree. Times are rounded to a common power of two, so that equal plans are equal to the bit.

    Without that, identical layers would leave thousands of orders of the same stages that differ in the last digit.
    """
    num_layers, num_sizes = problem.forward_s.shape
    quantum = _quantum(problem, degree)

    def rounded(seconds: Floats) -> Floats:
        return np.round(seconds / quantum) * quantum

    unfit = ~(np.isfinite(problem.forward_s) & np.isfinite(problem.backward_s))
    begin = np.zeros((1, num_sizes))
    forward = np.concatenate([begin, np.cumsum(rounded(np.where(unfit, 0.0, problem.forward_s)), axis=0)])
    backward = np.concatenate([begin, np.cumsum(rounded(np.where(unfit, 0.0, problem.backward_s)), axis=0)])
    num_unfit = np.concatenate([begin, np.cumsum(unfit, axis=0)])
    parameters = np.concatenate([[0.0], np.cumsum(problem.parameter_bytes)])
    activations = np.concatenate([[0.0], np.cumsum(problem.activation_bytes)])
    # What crosses the cut below layer i, on a link of each size; nothing does at both ends of the model.
    up, down = np.zeros((num_layers + 1, num_sizes)), np.zeros((num_layers + 1, num_sizes))
    up[1:-1] = rounded(problem.output_bytes[:-1, None] / problem.bytes_per_s + problem.latency_s)
    down[1:-1] = rounded(problem.gradient_bytes[1:, None] / problem.bytes_per_s + problem.latency_s)

    shape = (num_layers + 1, num_layers + 1, num_sizes)
    forward_s = forward[None] - forward[:, None]
    backward_s = backward[None] - backward[:, None]
    held = parameters[None] - parameters[:, None]
    needed = degree.num_micro_batches * (activations[None] - activations[:, None])
    needed = needed + (2.0 if degree.num_replicas == 1 else 4.0) * held + problem.base_bytes
    follows = np.arange(num_layers + 1)[:, None] < np.arange(num_layers + 1)[None]
    fits = (needed[:, :, None] <= problem.memory_mb * 2.0**20) & follows[:, :, None]
    fits &= num_unfit[None] - num_unfit[:, None] == 0
    sync_s = degree.sync_s(held[:, :, None] / problem.bytes_per_s, problem.latency_s)
    return StageTables(
        degree=degree,
        fits=fits,
        forward_s=forward_s + up[None] + up[:, None],
        forward_lag_s=np.maximum(np.maximum(forward_s, up[None]), up[:, None]),
        backward_s=backward_s + down[None],
        backward_lag_s=np.maximum(backward_s, down[None]),
        hand_down_s=np.broadcast_to(down[:, None], shape),
        sync_s=rounded(sync_s),
        memory_mb=problem.memory_mb,
    )


def _quantum(problem: PipelineProblem, degree: Degree) -> float:
    """A power of two so small that no step's time has more than 50 digits of it."""
    slowest = problem.bytes_per_s.min()
    known = [
        np.where(np.isfinite(times), times, 0.0).max(axis=1).sum() for times in (problem.forward_s, problem.backward_s)
    ]
    crossing = problem.output_bytes.sum() + problem.gradient_bytes.sum()
    transfers = 2.0 * (crossing / slowest + 2 * len(problem.output_bytes) * problem.latency_s)
    sync = float(degree.sync_s(np.atleast_1d(problem.parameter_bytes.sum() / slowest), problem.latency_s)[0])
    longest = (degree.num_micro_batches + 1) * (sum(known) + transfers) + sync
    return float(2.0 ** (np.ceil(np.log2(max(longest, 1e-9))) - _DIGITS))
