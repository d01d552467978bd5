"""Searches by profiling runs: deterministic, within their space, and as good as they should be on a plain surface."""

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.solvers.search.phase_choice import CHEAPEST, FASTEST, GoalLimits
from springtide_studies.rivals.solvers.search_rivals import METHODS, ConfigurationProblem, run_search


def problem_of(limits=None, aim=CHEAPEST, num_workers=24, num_sizes=16):
    workers, sizes = np.meshgrid(np.arange(1, num_workers + 1.0), 512.0 * np.arange(1, num_sizes + 1), indexing="ij")
    workers, sizes = workers.ravel(), sizes.ravel()
    step_s = 20.0 / workers / np.minimum(sizes / 1769, 3.0) + 0.5 + 0.03 * workers
    return ConfigurationProblem(
        num_workers=workers,
        memory_mb=sizes,
        prior_step_s=step_s,
        base_usd=1e-5 * workers,
        usd_per_s=workers * sizes / 1024 * 1.7e-5,
        fits=sizes >= 1024,
        num_steps=200.0,
        limits=limits or GoalLimits(left_s=1000.0),
        aim=aim,
    )


def truth_of(problem, seed):
    """What is true where the model is wrong by a smooth factor, and what measuring it gives."""
    generator = np.random.default_rng(seed)
    tilt, bend, bias = generator.normal(0.0, 0.12, 3)
    along = np.log2(problem.num_workers) - 2.0
    up = np.log2(problem.memory_mb) - 11.0
    step_s = problem.prior_step_s * np.exp(bias + tilt * along / 2 + bend * up / 2)
    return step_s, lambda index: float(step_s[index] * np.exp(0.01 * generator.standard_normal()))


def best_of(problem, step_s):
    values = [problem.log_value(index, step_s[index]) for index in range(len(step_s))]
    return float(np.exp(np.min(np.where(problem.fits, values, np.inf))))


@pytest.mark.parametrize("name", METHODS)
def test_a_search_is_deterministic_and_looks_only_at_what_fits(name):
    problem = problem_of()
    traces = []
    for _ in range(2):
        _, measure = truth_of(problem, 1)
        traces.append(run_search(name, problem, measure, max_runs=15, seed=3))
    assert traces[0] == traces[1]
    trace = traces[0]
    assert len(trace.choices) == len(trace.tried) + 1
    assert len(set(trace.tried)) == len(trace.tried) <= 15
    assert all(problem.fits[index] for index in trace.tried)
    assert all(choice is None or problem.fits[choice] for choice in trace.choices)


def test_exhaustive_search_finds_the_best_and_the_model_alone_looks_at_nothing():
    problem = problem_of()
    step_s, _ = truth_of(problem, 2)
    trace = run_search("exhaustive", problem, lambda index: float(step_s[index]), max_runs=10_000)
    assert trace.has_stopped
    chosen = trace.choices[-1]
    assert np.exp(problem.log_value(chosen, step_s[chosen])) == pytest.approx(best_of(problem, step_s))
    alone = run_search("model-alone", problem, lambda index: float(step_s[index]), max_runs=10)
    assert alone.tried == ()
    assert alone.has_stopped


@pytest.mark.parametrize(
    ("limits", "aim"),
    [(GoalLimits(left_s=1000.0), CHEAPEST), (GoalLimits(left_usd=0.6), FASTEST), (GoalLimits(), FASTEST)],
)
def test_ours_comes_nearer_with_fewer_runs_than_the_published_ones(limits, aim):
    problem = problem_of(limits, aim)
    off = {name: [] for name in ("springtide", "bayes", "random", "reinforcement-learning")}
    runs = dict.fromkeys(off, 0)
    for seed in range(8):
        step_s, _ = truth_of(problem, 100 + seed)
        for name in off:
            _, measure = truth_of(problem, 100 + seed)
            trace = run_search(name, problem, measure, max_runs=12, seed=seed)
            chosen = trace.choices[-1]
            off[name].append(np.exp(problem.log_value(chosen, step_s[chosen])) / best_of(problem, step_s))
            runs[name] += len(trace.tried)
    means = {name: np.median(each) for name, each in off.items()}
    assert means["springtide"] <= min(means["bayes"], means["random"], means["reinforcement-learning"]) + 0.005
    assert means["springtide"] < 1.06
    assert runs["springtide"] < min(runs["random"], runs["reinforcement-learning"])


def test_what_cannot_be_searched_is_said():
    problem = problem_of()
    with pytest.raises(InvalidRequest, match="there is no search 'magic'; choose one of random"):
        run_search("magic", problem, lambda index: 1.0, max_runs=1)
    nothing = problem_of(num_sizes=1)
    with pytest.raises(InvalidRequest, match="none of the candidates fits"):
        run_search("random", nothing, lambda index: 1.0, max_runs=1)
