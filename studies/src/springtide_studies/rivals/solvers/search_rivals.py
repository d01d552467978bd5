"""Searches for a configuration by profiling runs, as published and ours, behind one interface, to be compared.

Each looks at one candidate after another, by a run of a few steps whose time it is told, and says after each which
candidate it would choose. What a run takes and costs is counted by the caller (SMLT, section 3.2 and figure 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt

from springtide.core.errors import InvalidRequest
from springtide.solvers.search.gaussian_process import Fit, Floats, Trend, lognormal_improvement
from springtide.solvers.search.phase_choice import Aim, GoalLimits
from springtide_studies.rivals.solvers.improvement import expected_improvement

# What breaks a limit is worse than anything that does not, and the more so the more it breaks it: in powers of e.
_PENALTY = 3.0
# SMLT searches until the expected improvement is small enough; this part of the best is.
LEAST_GAIN_FRACTION = 0.01
_NUM_FIRST = 3
_NOISE = 0.03
# Lengths in doublings of workers and memory: wide where nothing is known, as the model's error has them where it is.
_PLAIN_LENGTHS, _RATIO_LENGTHS = (1.5, 1.5), (2.0, 1.5)
_RATIO_BIAS, _RATIO_LOCAL = 0.2, 0.15
_CONFIDENCE = 2.0
# Q-learning (Watkins 1989): its learning rate, discount, and how often it tries something at random, at first and last.
_LEARNING_RATE, _DISCOUNT, _FIRST_CHANCE, _LAST_CHANCE = 0.5, 0.9, 0.9, 0.1
_MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))
_STRIDE = 0.5
_MOST_VISITS = 40


class ConfigurationProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates as arrays of one entry each, and what is looked for over `num_steps` steps.

    `prior_step_s` is what a model says of a step beforehand. A step of t seconds costs `base_usd` + t x `usd_per_s`.
    """

    num_workers: Floats
    memory_mb: Floats
    prior_step_s: Floats
    base_usd: Floats
    usd_per_s: Floats
    fits: npt.NDArray[np.bool_]
    num_steps: float
    limits: GoalLimits
    aim: Aim

    def totals(self, index: int, step_s: float) -> tuple[float, float]:
        """Seconds and dollars of the run as this candidate."""
        usd = float(self.base_usd[index]) + step_s * float(self.usd_per_s[index])
        return self.num_steps * step_s, self.num_steps * usd

    def log_value(self, index: int, step_s: float) -> float:
        """The logarithm of the objective, with a penalty for what breaks a limit."""
        seconds, usd = self.totals(index, step_s)
        over = max(seconds / self.limits.left_s, usd / self.limits.left_usd)
        value = self.aim.usd_weight * usd + self.aim.second_weight * seconds
        return math.log(max(value, 1e-300)) + (_PENALTY + math.log(over) if over > 1.0 else 0.0)


class SearchTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What a search looked at, in order, and what it would have chosen after none, one, two... of these runs.

    A choice is None where nothing was known yet. `has_stopped` says that it ended by its own rule.
    """

    tried: tuple[int, ...]
    choices: tuple[int | None, ...]
    has_stopped: bool = False


class _Seen:
    """What was measured, and the best of it."""

    def __init__(self, problem: ConfigurationProblem) -> None:
        self.problem = problem
        self.order: list[int] = []
        self.step_s: dict[int, float] = {}
        self.values: dict[int, float] = {}

    def tell(self, index: int, step_s: float) -> None:
        self.order.append(index)
        self.step_s[index] = step_s
        self.values[index] = self.problem.log_value(index, step_s)

    def best(self) -> int | None:
        return min(self.order, key=lambda index: self.values[index], default=None)


# A method yields the candidate to look at next, and what it would choose now; it ends by its own rule.
_Method = Callable[[_Seen, np.random.Generator], Iterator[int]]


def run_search(
    name: str, problem: ConfigurationProblem, measure: Callable[[int], float], *, max_runs: int, seed: int = 0
) -> SearchTrace:
    """Let the method of that name look at up to `max_runs` candidates. The same seed looks at the same ones.

    `measure` makes a profiling run and returns the seconds of a step. Raises InvalidRequest for an unknown name, and
    where no candidate fits.
    """
    if name not in _METHODS:
        raise InvalidRequest(f"there is no search {name!r}; choose one of {', '.join(METHODS)}")
    if not problem.fits.any():
        raise InvalidRequest("none of the candidates fits: there is nothing to search")
    seen = _Seen(problem)
    asks = _METHODS[name](seen, np.random.default_rng(seed))
    choose = _CHOICES.get(name, _Seen.best)
    choices = [choose(seen)]
    has_stopped = False
    while len(seen.order) < max_runs:
        index = next(asks, None)
        if index is None:
            has_stopped = True
            break
        seen.tell(index, measure(index))
        choices.append(choose(seen))
    return SearchTrace(tried=tuple(seen.order), choices=tuple(choices), has_stopped=has_stopped)


def _random(seen: _Seen, generator: np.random.Generator) -> Iterator[int]:
    """Candidates in a random order."""
    for index in generator.permutation(np.flatnonzero(seen.problem.fits)):
        yield int(index)


def _exhaustive(seen: _Seen, generator: np.random.Generator) -> Iterator[int]:
    """All candidates, one after the other."""
    for index in np.flatnonzero(seen.problem.fits):
        yield int(index)


def _model_alone(seen: _Seen, generator: np.random.Generator) -> Iterator[int]:
    """No candidate is profiled: the model alone chooses."""
    return iter(())


def _bayes(seen: _Seen, generator: np.random.Generator) -> Iterator[int]:
    """SMLT's: random first points, then the largest expected improvement of a Gaussian process, until that is small."""
    problem = seen.problem
    open_ = problem.fits.copy()
    columns = _columns(problem)
    for index in generator.permutation(np.flatnonzero(open_))[:_NUM_FIRST]:
        open_[index] = False
        yield int(index)
    while open_.any():
        values = np.array([seen.values[index] for index in seen.order])
        center, scale = float(values.mean()), max(float(values.std()), 1e-6)
        trend = Trend(bias=0.0, local=1.0, lengths=_PLAIN_LENGTHS)
        points = [column[seen.order] for column in columns]
        fit = Fit(
            trend.at([each[:, None] for each in points], points),
            (values - center) / scale,
            np.full(len(values), _NOISE / scale),
        )
        mean, deviation = fit.posterior(trend.at([each[:, None] for each in columns], points), trend.variance)
        # In logarithms an improvement is a part of the best.
        gain = expected_improvement(center + scale * mean, scale * deviation, float(values.min()))
        gain = np.where(open_, gain, -math.inf)
        index = int(np.argmax(gain))
        if gain[index] < LEAST_GAIN_FRACTION:
            return
        open_[index] = False
        yield index


def _springtide(seen: _Seen, generator: np.random.Generator) -> Iterator[int]:
    """Ours: the process is over the ratio to the model; candidates that cannot keep the limits are skipped."""
    problem = seen.problem
    open_ = problem.fits.copy()
    while open_.any():
        log_step, spread = _ratio_belief(seen)
        if not seen.order:
            index = _safe_choice(problem, log_step, 0.0)
            open_[index] = False
            yield index
            continue
        best = seen.best()
        assert best is not None
        seconds, usd = problem.totals(best, seen.step_s[best])
        aim, limits = problem.aim, problem.limits
        now = aim.usd_weight * usd + aim.second_weight * seconds
        is_within = seconds <= limits.left_s and usd <= limits.left_usd
        alpha = aim.usd_weight * problem.usd_per_s + aim.second_weight
        beta = aim.usd_weight * problem.base_usd
        step_limit = np.full(len(log_step), limits.left_s / problem.num_steps)
        if math.isfinite(limits.left_usd):
            money = (limits.left_usd / problem.num_steps - problem.base_usd) / np.maximum(problem.usd_per_s, 1e-300)
            step_limit = np.minimum(step_limit, money)
        # Where nothing is within its limits yet, anything that is would be better.
        least = now / problem.num_steps if is_within else math.inf
        best_s = (least - beta) / np.maximum(alpha, 1e-300)
        worth = best_s if is_within else np.minimum(step_limit * 2.0, 1e12)
        gain = problem.num_steps * alpha * lognormal_improvement(log_step, spread, worth, step_limit)
        gain = np.where(open_, gain, -math.inf)
        index = int(np.argmax(gain))
        if gain[index] < LEAST_GAIN_FRACTION * now:
            return
        open_[index] = False
        yield index


def _ratio_belief(seen: _Seen) -> tuple[Floats, Floats]:
    """Log step and its spread for every candidate: the model, corrected by what was measured."""
    problem = seen.problem
    prior = np.log(problem.prior_step_s)
    trend = Trend(bias=_RATIO_BIAS, local=_RATIO_LOCAL, lengths=_RATIO_LENGTHS)
    if not seen.order:
        return prior, np.full(len(prior), math.sqrt(trend.variance))
    columns = _columns(problem)
    points = [column[seen.order] for column in columns]
    values = np.array([math.log(seen.step_s[index]) for index in seen.order]) - prior[seen.order]
    among = trend.at([each[:, None] for each in points], points)
    fit = Fit(among, values, np.full(len(values), _NOISE))
    mean, spread = fit.posterior(trend.at([each[:, None] for each in columns], points), trend.variance)
    return prior + mean, spread


def _safe_choice(problem: ConfigurationProblem, log_step: Floats, margin: Floats | float) -> int:
    """The best that keeps the limits with this margin on its step, or what comes closest to them."""
    step_s = np.exp(log_step)
    upper_s = np.exp(log_step + margin)
    usd = problem.num_steps * (problem.base_usd + upper_s * problem.usd_per_s)
    over = np.maximum(problem.num_steps * upper_s / problem.limits.left_s, usd / problem.limits.left_usd)
    each = problem.base_usd + step_s * problem.usd_per_s
    value = problem.aim.usd_weight * each + problem.aim.second_weight * step_s
    within = problem.fits & (over <= 1.0)
    if within.any():
        return int(np.argmin(np.where(within, value, math.inf)))
    return int(np.argmin(np.where(problem.fits, over, math.inf)))


def _believed_choice(seen: _Seen) -> int | None:
    """Ours: the best by what is believed now, whether it was measured or not."""
    log_step, spread = _ratio_belief(seen)
    return _safe_choice(seen.problem, log_step, _CONFIDENCE * spread if seen.order else 0.0)


def _modelled_choice(seen: _Seen) -> int | None:
    return _safe_choice(seen.problem, np.log(seen.problem.prior_step_s), 0.0)


def _columns(problem: ConfigurationProblem) -> list[Floats]:
    return [np.log2(problem.num_workers), np.log2(problem.memory_mb)]


def _reinforcement(seen: _Seen, generator: np.random.Generator) -> Iterator[int]:
    """Tabular Q-learning: a walk over a coarse grid of workers and memory, half a doubling a move.

    The reward of a move is by how much the logarithm of the objective falls. Places that were seen before are not
    measured again, which flatters it; it ends when a long walk brings nothing new.
    """
    problem = seen.problem
    rows, columns = (_levels(each) for each in (problem.num_workers, problem.memory_mb))
    table = np.zeros((len(rows), len(columns), len(_MOVES)))
    place = (int(generator.integers(len(rows))), int(generator.integers(len(columns))))
    before, move = place, 0
    value: float | None = None
    visits = num_moves = 0
    chance = _FIRST_CHANCE
    while visits < _MOST_VISITS:
        index = _nearest(problem, rows[place[0]], columns[place[1]])
        if index not in seen.values:
            visits = 0
            yield index
        visits += 1
        now = seen.values[index]
        if value is not None:
            best = table[place].max()
            table[before][move] += _LEARNING_RATE * (value - now + _DISCOUNT * best - table[before][move])
        value, before = now, place
        move = int(generator.integers(len(_MOVES))) if generator.random() < chance else int(np.argmax(table[place]))
        num_moves += 1
        chance = max(_LAST_CHANCE, _FIRST_CHANCE * 0.97**num_moves)
        place = (
            min(max(place[0] + _MOVES[move][0], 0), len(rows) - 1),
            min(max(place[1] + _MOVES[move][1], 0), len(columns) - 1),
        )


def _levels(values: Floats) -> Floats:
    """From the least to the most, half a doubling apart."""
    low, high = math.log2(float(values.min())), math.log2(float(values.max()))
    return np.asarray(2.0 ** np.linspace(low, high, max(1, math.ceil((high - low) / _STRIDE)) + 1))


def _nearest(problem: ConfigurationProblem, num_workers: float, memory_mb: float) -> int:
    """The fitting candidate that is nearest in doublings."""
    away = np.abs(np.log2(problem.num_workers / num_workers)) + np.abs(np.log2(problem.memory_mb / memory_mb))
    return int(np.argmin(np.where(problem.fits, away, math.inf)))


_METHODS: MappingProxyType[str, _Method] = MappingProxyType(
    {
        "random": _random,
        "exhaustive": _exhaustive,
        "reinforcement-learning": _reinforcement,
        "bayes": _bayes,
        "model-alone": _model_alone,
        "springtide": _springtide,
    }
)
METHODS = tuple(_METHODS)
_CHOICES: MappingProxyType[str, Callable[[_Seen], int | None]] = MappingProxyType(
    {"model-alone": _modelled_choice, "springtide": _believed_choice}
)
