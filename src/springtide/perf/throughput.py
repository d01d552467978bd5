"""Pollux's model of a step's time (computation, exchange of gradients, and their overlap), and its fit.

The fit is our own damped Gauss-Newton method instead of SciPy's: policies fit during decisions without an extra
dependency, all starts run side by side, and results do not change with a release of SciPy.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# The least time of a computation or an exchange, which keeps logarithms and ratios finite.
LEAST_S = 1e-8
# The bounds of the published adaptdl; the upper bound of seconds is ours, so that logarithms stay finite.
LARGEST_S = 1e4
LARGEST_GAMMA = 10.0
# adaptdl's penalties: a small gamma separates the other parameters better; small terms per worker keep the model
# optimistic.
GAMMA_WEIGHT = 1e-3
BETA_WEIGHT = 1e-2
# adaptdl's prior without measurements on several nodes: an exchange between nodes takes at least this factor longer.
BETWEEN_NODES = 1.1
# Errors below this are negligible; added in the root of the mean square, it makes the root smooth at zero.
SMALL_ERROR = 1e-3
NUM_ITERATIONS = 60
ENOUGH = 1e-6
NUM_REFUSED = 6
# With less damping the system of two parameters that the steps cannot tell apart is singular.
LEAST_DAMPING = 1e-9
GAMMAS = (1.001, 1.6, 3.0, 6.0)

# Parameters in the order of `ThroughputModel`; the first six as logarithms of seconds.
ALPHA_C, BETA_C, ALPHA_N, BETA_N, ALPHA_R, BETA_R, GAMMA = range(7)
_LOWEST = np.array([math.log(LEAST_S)] * 6 + [1.0])
_HIGHEST = np.array([math.log(LARGEST_S)] * 6 + [LARGEST_GAMMA])


class ThroughputModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seven parameters of a job's step (Qiao et al., "Pollux", OSDI'21, section 3.2); all seconds but `gamma`.

    One pass computes for `alpha_c + beta_c * local_batch_size`. The exchange takes nothing on one worker,
    `alpha_r + beta_r * max(0, num_workers - 2)` on one node, and the same with `alpha_n`, `beta_n` over several nodes.
    A step takes `(compute^gamma + exchange^gamma)^(1/gamma)`: their sum at gamma 1, nearly the longer of both at 10.
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def compute_s(self, local_batch_size: ArrayLike) -> Floats:
        """Seconds of one pass without an exchange; any shape."""
        return np.maximum(self.alpha_c + self.beta_c * np.asarray(local_batch_size, dtype=np.float64), LEAST_S)

    def exchange_s(self, num_nodes: ArrayLike, num_workers: ArrayLike) -> Floats:
        """Seconds of the exchange if nothing overlapped with it; shapes broadcast."""
        nodes, workers = np.asarray(num_nodes), np.asarray(num_workers)
        beyond_two = np.maximum(workers - 2, 0)
        within = np.where(workers > 1, self.alpha_r + self.beta_r * beyond_two, 0.0)
        return np.asarray(np.where(nodes > 1, self.alpha_n + self.beta_n * beyond_two, within))

    def step_s(
        self, num_nodes: ArrayLike, num_workers: ArrayLike, local_batch_size: ArrayLike
    ) -> tuple[Floats, Floats]:
        """Return (step_s, sync_s) of steps of one pass; shapes broadcast.

        `sync_s` is the part of the step that a further pass before the exchange would not add.
        """
        compute = self.compute_s(local_batch_size)
        exchange = self.exchange_s(num_nodes, num_workers)
        longer = np.maximum(compute, exchange)
        ratio = np.maximum(np.minimum(compute, exchange) / longer, LEAST_S)
        step = longer * np.exp(np.log1p(np.exp(self.gamma * np.log(ratio))) / self.gamma)
        return step, step - compute


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Measured steps, arrays of shape [N]. `compute_s` is NaN where the exchange was not measured separately."""

    num_nodes: NDArray[np.int64]
    num_workers: NDArray[np.int64]
    local: Floats
    step_s: Floats
    compute_s: Floats


def fit_parameters(steps: Steps) -> ThroughputModel:
    """Return the parameters that minimise the published objective over at least one measured step.

    The objective is the root mean square of the logarithmic error of the pass, plus that of the step, plus two
    penalties (Pollux, section 4.1; adaptdl). Parameters without measurements are pinned, see `_pinned`. Deterministic.
    """
    is_free, fixed = _pinned(steps)
    theta = np.where(is_free, _starts(steps), fixed)
    theta = _minimise(theta, is_free, steps)
    best = theta[int(np.argmin(objective(theta, steps)))]
    values = [float(value) for value in (*np.exp(best[:GAMMA]), best[GAMMA])]
    if not np.any(steps.num_nodes > 1):
        values[ALPHA_N] = max(values[ALPHA_N], values[ALPHA_R] * BETWEEN_NODES)
        values[BETA_N] = max(values[BETA_N], values[BETA_R] * BETWEEN_NODES)
    names = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma")
    return ThroughputModel(**dict(zip(names, values, strict=True)))


def objective(theta: Floats, steps: Steps) -> Floats:
    """The published objective at S parameter vectors: [S, 7] -> [S]."""
    return _value(theta, _errors(theta, steps))


def _value(theta: Floats, found: _Errors) -> Floats:
    penalty = GAMMA_WEIGHT * (theta[:, GAMMA] - 1.0) ** 2 + BETA_WEIGHT * (found.ratios**2).sum(axis=1)
    return np.asarray(found.pass_root + found.step_root + penalty)


def _pinned(steps: Steps) -> tuple[NDArray[np.bool_], Floats]:
    """Which parameters can be fitted to the measurements, and the values of the others (as in adaptdl).

    With a single local batch size, half of a pass is taken as constant. Links without measurements are assumed to cost
    nothing, so that policies try them. A term per worker needs measurements on more than two workers.
    """
    is_free = np.ones(7, dtype=bool)
    fixed = _LOWEST.copy()
    if len(np.unique(steps.local)) == 1:
        is_free[ALPHA_C] = False
        fixed[ALPHA_C] = math.log(max(LEAST_S, float(np.mean(_pass_s(steps))) / 2.0))
    seen = steps.num_nodes > 1
    is_free[[ALPHA_N, BETA_N]] = bool(np.any(seen))
    is_free[[ALPHA_R, BETA_R]] = bool(np.any(~seen & (steps.num_workers > 1)))
    if not np.any(steps.num_workers > 2):
        is_free[[BETA_N, BETA_R]] = False
    if not np.any(steps.num_workers > 1):
        is_free[GAMMA] = False
    return is_free, fixed


def _pass_s(steps: Steps) -> Floats:
    """Seconds of a pass; of the whole step where the pass was not measured separately."""
    return np.where(np.isnan(steps.compute_s), steps.step_s, steps.compute_s)


def _starts(steps: Steps) -> Floats:
    """Starting points [S, 7]: that of adaptdl, and guesses from the measurements with several values of gamma."""
    passes = _pass_s(steps)
    slope = float(np.median(passes / steps.local))
    guess = np.full(7, LEAST_S)
    guess[ALPHA_C], guess[BETA_C] = 0.3 * float(np.median(passes)), 0.7 * slope
    for alpha, beta, link in ((ALPHA_N, BETA_N, steps.num_nodes > 1), (ALPHA_R, BETA_R, steps.num_nodes == 1)):
        seen = link & (steps.num_workers > 1)
        exchange = float(np.median((steps.step_s - 0.8 * passes)[seen])) if np.any(seen) else LEAST_S
        guess[alpha] = max(exchange, 0.01 * float(np.median(passes)))
        guess[beta] = 0.05 * guess[alpha]
    first = np.array([math.log(value) for value in (0.1, 0.01) * 3] + [GAMMAS[0]])
    guess[:GAMMA] = np.log(np.maximum(guess[:GAMMA], LEAST_S))
    starts = [first]
    for gamma in GAMMAS:
        guess[GAMMA] = gamma
        starts.append(guess.copy())
    return np.stack(starts)


class _Errors(msgspec.Struct, frozen=True):
    """Logarithmic errors of pass and step [S, N] (0 where not measured), and values for the derivatives."""

    pass_errors: Floats
    step_errors: Floats
    pass_root: Floats
    step_root: Floats
    ratios: Floats
    log_compute: Floats
    log_exchange: Floats
    log_step: Floats
    share: Floats
    alpha_share: Floats


def _errors(theta: Floats, steps: Steps) -> _Errors:
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r = np.exp(theta[:, :GAMMA]).T[:, :, None]
    gamma = theta[:, GAMMA][:, None]
    compute = alpha_c + beta_c * steps.local
    is_between = steps.num_nodes > 1
    alpha = np.where(is_between, alpha_n, alpha_r)
    exchange = alpha + np.where(is_between, beta_n, beta_r) * np.maximum(steps.num_workers - 2, 0)
    exchange = np.where(steps.num_workers > 1, np.maximum(exchange, LEAST_S), LEAST_S)
    log_compute, log_exchange = np.log(compute), np.log(exchange)
    log_step = np.logaddexp(gamma * log_compute, gamma * log_exchange) / gamma
    is_known = ~np.isnan(steps.compute_s)
    pass_errors = np.where(is_known, log_compute - np.log(np.where(is_known, steps.compute_s, 1.0)), 0.0)
    step_errors = log_step - np.log(steps.step_s)
    return _Errors(
        pass_errors=pass_errors,
        step_errors=step_errors,
        pass_root=_root(pass_errors, int(is_known.sum())),
        step_root=_root(step_errors, len(steps.step_s)),
        ratios=np.concatenate([beta_n / alpha_n, beta_r / alpha_r], axis=1),
        log_compute=log_compute,
        log_exchange=log_exchange,
        log_step=log_step,
        share=np.exp(np.minimum(gamma * (log_compute - log_step), 0.0)),
        alpha_share=alpha / exchange,
    )


def _root(errors: Floats, num_known: int) -> Floats:
    """Root mean square over the last axis, smooth at zero: [S, N] -> [S]."""
    return np.asarray(np.sqrt((errors**2).sum(axis=1) / max(num_known, 1) + SMALL_ERROR**2))


def _system(theta: Floats, steps: Steps, found: _Errors) -> tuple[Floats, Floats]:
    """Normal matrix [S, 7, 7] and gradient [S, 7] of a sum of squares that bounds the objective from above at theta.

    With `root` at theta, the root of a mean square m is at most `m / (2 root) + root / 2`, with equality at theta. Each
    round minimises this bound as weighted least squares, so a step that lowers it also lowers the objective.
    """
    shape = found.step_errors.shape
    share, alpha_share = found.share, found.alpha_share
    by_pass = np.zeros((*shape, 7))
    by_pass[..., ALPHA_C] = np.exp(theta[:, ALPHA_C][:, None] - found.log_compute)
    by_pass[..., BETA_C] = 1.0 - by_pass[..., ALPHA_C]
    by_step = share[..., None] * by_pass
    is_between = steps.num_nodes > 1
    is_within = ~is_between & (steps.num_workers > 1)
    for alpha, beta, applies in ((ALPHA_N, BETA_N, is_between), (ALPHA_R, BETA_R, is_within)):
        by_step[..., alpha] = np.where(applies, (1.0 - share) * alpha_share, 0.0)
        by_step[..., beta] = np.where(applies, (1.0 - share) * (1.0 - alpha_share), 0.0)
    overlap = share * (found.log_compute - found.log_step) + (1.0 - share) * (found.log_exchange - found.log_step)
    by_step[..., GAMMA] = overlap / theta[:, GAMMA][:, None]
    is_known = ~np.isnan(steps.compute_s)
    num_known = max(int(is_known.sum()), 1)
    pass_weight = (0.5 / num_known / found.pass_root)[:, None, None] * is_known[:, None]
    step_weight = (0.5 / shape[1] / found.step_root)[:, None, None]
    weighted_pass, weighted_step = pass_weight * by_pass, step_weight * by_step
    matrix = weighted_pass.transpose(0, 2, 1) @ by_pass + weighted_step.transpose(0, 2, 1) @ by_step
    gradient = (found.pass_errors[:, None] @ weighted_pass + found.step_errors[:, None] @ weighted_step)[:, 0]
    ratios = found.ratios
    for column, (alpha, beta) in enumerate(((ALPHA_N, BETA_N), (ALPHA_R, BETA_R))):
        squared = BETA_WEIGHT * ratios[:, column] ** 2
        for row, sign in ((alpha, -1.0), (beta, 1.0)):
            gradient[:, row] += sign * squared
            matrix[:, row, row] += squared
        matrix[:, alpha, beta] -= squared
        matrix[:, beta, alpha] -= squared
    matrix[:, GAMMA, GAMMA] += GAMMA_WEIGHT
    gradient[:, GAMMA] += GAMMA_WEIGHT * (theta[:, GAMMA] - 1.0)
    return matrix, gradient


def _minimise(theta: Floats, is_free: NDArray[np.bool_], steps: Steps) -> Floats:
    """Levenberg-Marquardt from all starts side by side, within the bounds; [S, 7] -> [S, 7].

    A start is finished when a round improves it by less than `ENOUGH`, or `NUM_REFUSED` consecutive rounds worsen it.
    """
    damping = np.full(len(theta), 1e-2)
    refused = np.zeros(len(theta), dtype=np.int64)
    is_done = np.zeros(len(theta), dtype=bool)
    found = _errors(theta, steps)
    value = _value(theta, found)
    matrix, gradient = _system(theta, steps, found)
    for _ in range(NUM_ITERATIONS):
        # Pinned parameters, and those at a bound that the gradient pushes outwards, stay.
        is_movable = is_free & ~((theta <= _LOWEST) & (gradient > 0)) & ~((theta >= _HIGHEST) & (gradient < 0))
        active = matrix * (is_movable[:, :, None] & is_movable[:, None, :])
        diagonal = damping[:, None] * np.maximum(active[:, range(7), range(7)], 1e-6)
        active[:, range(7), range(7)] += diagonal
        step = np.linalg.solve(active, np.where(is_movable, -gradient, 0.0)[..., None])[..., 0]
        # No parameter changes by more than a factor of about fifty in one round.
        tried = np.clip(theta + np.where(is_movable, np.clip(step, -4.0, 4.0), 0.0), _LOWEST, _HIGHEST)
        found = _errors(tried, steps)
        new_value = _value(tried, found)
        is_better = new_value < value
        refused = np.where(is_better, 0, refused + 1)
        is_done |= (is_better & (value - new_value < ENOUGH)) | (refused >= NUM_REFUSED)
        theta = np.where(is_better[:, None], tried, theta)
        value = np.where(is_better, new_value, value)
        if np.all(is_done):
            break
        new_matrix, new_gradient = _system(tried, steps, found)
        matrix = np.where(is_better[:, None, None], new_matrix, matrix)
        gradient = np.where(is_better[:, None], new_gradient, gradient)
        damping = np.where(is_better, np.maximum(damping / 5.0, LEAST_DAMPING), damping * 4.0)
    return theta
