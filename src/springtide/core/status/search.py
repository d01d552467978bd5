"""Status of the search for a job's functions: what was tried, what is expected, what searching has cost.

Terms are those of core.function_search: a configuration is a number of workers and the memory of each.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# It is yet to begin, may still try others, stays where it is, or the job has ended.
SearchPhase = Literal["waiting", "searching", "settled", "over"]


class TriedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration as its steps have shown it, the mean of `num_steps` of them.

    `model_step_s` and `model_step_usd` are what the model alone said of it before anything was measured (None: it
    cannot tell). `is_left` says that the search went on to another one on the same batch.
    """

    num_workers: int
    memory_mb: int
    global_batch_size: int
    gradient_bytes: int
    num_steps: int
    step_s: float
    step_usd: float
    deviation_s: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0
    collective: str = ""
    model_step_s: float | None = None
    model_step_usd: float | None = None
    is_running: bool = False
    is_left: bool = False


class ExpectedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of one configuration at the present batch, after all that was measured.

    A step's time lies between `step_s` / (1 + `error_fraction`) and `step_s` x (1 + `error_fraction`) about two times
    of three. `model_step_s` is what the model alone says. `meets_goal` says whether a job that went on as this from
    now on would be expected to keep its deadline and its budget (None: it has neither, or its length is not known).
    """

    num_workers: int
    memory_mb: int
    step_s: float
    step_usd: float
    error_fraction: float = 0.0
    model_step_s: float | None = None
    meets_goal: bool | None = None


class SearchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job's search at one instant.

    `reason` is the policy's: why it runs as it does, or what it tries next. `tried` has one entry for each
    configuration, batch and gradient, in the order in which they were last measured; `expected` is the map of
    configurations, thinned out (empty in the status of the whole platform). `max_workers` and `sizes_mb` (ascending)
    are the space, `num_workers` and `memory_mb` what it runs as. `num_earlier` measurements came from earlier runs of
    the same function.

    `search_s` and `search_usd` are what the search has cost so far: what steps of the `num_left` configurations that it
    gave up took and cost beyond those of the best one known for their batch.
    `model_error_fraction` is by how much the model alone was off on what was measured (mean), and `error_fraction` by
    how much predictions after correction are expected to be off (the middle one of the map, one standard deviation).
    """

    goal: str
    phase: SearchPhase
    reason: str
    num_workers: int
    memory_mb: int
    max_workers: int
    sizes_mb: tuple[int, ...]
    tried: tuple[TriedConfiguration, ...] = ()
    expected: tuple[ExpectedConfiguration, ...] = ()
    num_left: int = 0
    num_earlier: int = 0
    search_s: float = 0.0
    search_usd: float = 0.0
    model_error_fraction: float | None = None
    error_fraction: float | None = None


class SearchQuote(msgspec.Struct, frozen=True, kw_only=True):
    """What a search would do and cost before anything runs.

    `num_configurations` are searched among, at most `num_trials` of them tried while the job trains. A trial costs at
    most `trial_s` and `trial_usd` beyond what the same steps take and cost in the chosen configuration, starting other
    functions included; what it trains is kept. Predictions are off by up to `error_fraction`, after what
    `num_earlier` measurements of earlier runs have shown.
    """

    num_configurations: int
    num_trials: int
    trial_s: float
    trial_usd: float
    error_fraction: float
    num_earlier: int = 0


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is behind the growing dataset that it trains on.

    `num_waiting` samples have come and were not yet used. `is_idle` says that no function runs because fewer than a
    batch are there (nothing is charged then). After `is_closed` the rest is trained and the job ends.
    """

    name: str
    num_samples: int
    num_used: int
    num_waiting: int
    arrivals_per_s: float = 0.0
    is_closed: bool = False
    is_idle: bool = False
