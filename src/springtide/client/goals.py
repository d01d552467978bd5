"""The options of `st.train`: checked when the decorator runs, converted to the API's options at submission."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack, cast

import msgspec

from springtide.client.secret_values import secret_values
from springtide.client.shares import MemoryAsked, ShareAsked, read_share, settled_share, share_option
from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import DEFAULT_MICRO_BATCH, JOB_OPTIONS, LENGTH_UNITS, Length, Where
from springtide.core.options.kinds import batch_phases, check_count
from springtide.core.options.option import check_keywords, copied_fields, keyword_values, overridden, sent_options
from springtide.core.options.rules import JOB_RULES, PLACE_RULES, check_rules
from springtide.core.options.variables import Secrets
from springtide.core.options.words import JOB_WORDS
from springtide.core.quantities import parse_range
from springtide.core.workload import (
    MAX_VIRTUAL_SHARDS,
    AdaptiveBatch,
    Entrypoint,
    LearningRateRule,
    OnNan,
    OnStall,
    TrainingJob,
    WorkloadId,
    shards_for,
)


class Auto(enum.Enum):
    """The type of `st.auto`."""

    AUTO = "auto"


auto: Final = Auto.AUTO
"""Let the platform choose: between one worker and as many as it has devices."""

Workers = int | str | tuple[int, int] | Auto
GlobalBatch = int | str | tuple[int, int]
Params = Mapping[str, str | int | float | bool]
# Environment variables by name.
Variables = Mapping[str, str | int | float]
# (first epoch, global batch size) pairs: [(0, 64), (4, 256)] or "0:64,4:256".
BatchSchedule = str | Sequence[tuple[int, int]]
# The largest micro-batch that a profile tries for a model that is not cut into layers.
LARGEST_MICRO_BATCH = 64


class TrainKeywords(TypedDict, total=False):
    """The options of `st.train` and `st.Task`, and of their `.submit()`, `.quote()` and `.local()`.

    The goal. `deadline`: "10m", "1h30m", "18:00" or seconds, counted from the submission. `confidence`: how probable it
    has to be that the deadline is kept, such as 0.99; else the job is refused. `budget`: "$4" or US dollars;
    a job that is planned to cost more is refused. `soft`: run even if the deadline will be missed. `wait`: stay queued
    while the deadline cannot be promised, instead of being refused. `retries`: how often the job may restart after a
    loss of all workers. `stall_timeout`: how long it may go without a step ("20m"; "none": it is not watched), and
    `on_stall` what happens then: "report", "restart" from its checkpoint, or "fail".
    `start_timeout`: the time from its start to its first step, after which it is started again ("30m").
    `on_nan`: what happens when its loss is NaN or infinite, "report" or "fail".

    The training. `epochs`: passes over the dataset (1). `exact`: the same bits on any number of workers up to this
    power of two (True: 4), at the price of as many passes for each step. `global_batch`: samples of one optimizer
    step (32), or bounds such as (32, 512) within which the platform may change it; with bounds, `max_local_batch`:
    samples that one worker holds at once, `learning_rate`: how the rate follows the batch ("linear", "sqrt",
    "adascale", "none"), `length`: whether epochs count passes ("epochs") or equal training progress ("progress").
    `num_samples`: the dataset's length, if known. `seed`, `name` and `params` (strings for `ctx.params`).
    `env`: variables of its workers' environment, set before the file is imported there; `secrets`: names of
    variables whose values (of this process's environment, or a file: "KEY=@key.txt") are kept apart and told nowhere.
    `requirements`: Python packages for its workers, as lines or the path of a requirements file, and `python`: the
    interpreter, in an environment that is made for them once.

    The place. `on`: "cluster", "functions", or "auto" for whichever makes the goal cheapest. `workers`: `st.auto`, 4,
    (1, 8) or "1..8". `share` and `memory`: the part of its device that each worker holds, such as (0.3, 0.6) and "4GB".
    `gpu`: how many devices of one machine each worker holds, 1, 2, 4 or 8 (`ctx.devices`): whole, or `share` of each.
    Only on functions: `micro_batch`: samples that pass through the stages at a time; `fastest`: minimise the time,
    within the budget if there is one; `search`: search for the number of workers and their memory while the job runs;
    `batch_schedule`: global batch sizes by epoch, such as [(0, 64), (4, 256)]; `study`: the study that the job is a
    trial of.
    """

    deadline: str | float | None
    confidence: float | None
    budget: str | float | None
    global_batch: GlobalBatch
    max_local_batch: int | None
    learning_rate: LearningRateRule
    length: Length
    epochs: int
    workers: Workers
    seed: int
    name: str
    params: Params
    env: Variables
    secrets: Secrets
    requirements: str | Sequence[str]
    python: str
    retries: int
    stall_timeout: str | float | None
    on_stall: OnStall
    start_timeout: str | float | None
    on_nan: OnNan
    soft: bool
    wait: bool
    num_samples: int | None
    on: Where
    micro_batch: int | None
    exact: bool | int | None
    fastest: bool
    search: bool | None
    batch_schedule: BatchSchedule
    study: str
    share: ShareAsked
    memory: MemoryAsked
    gpu: int


def workers_range(value: Workers | str, num_devices: int | None = None) -> tuple[int, int] | None:
    """The inclusive bounds on workers; for `auto` (1, num_devices), or None without `num_devices`."""
    if value is auto or (isinstance(value, str) and value.strip() == "auto"):
        return None if num_devices is None else (1, max(1, num_devices))
    assert not isinstance(value, Auto)
    return parse_range(value, "workers")


def batch_range(value: GlobalBatch) -> tuple[int, int]:
    """The bounds of the global batch size, equal if it is fixed, from 64, (32, 512) or "32..512"."""
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int):
        check_count(value, "global_batch", 32)
        return value, value
    return parse_range(value, "global_batch")


class TrainOptions:
    """The checked options of a training function, as the user wrote them; TrainKeywords describes each.

    `values` holds all keywords of JOB_OPTIONS, with defaults for those that were not given.
    """

    __slots__ = ("values",)

    def __init__(self, **given: Unpack[TrainKeywords]) -> None:
        """Raise InvalidRequest for invalid options; its message says what would be valid."""
        self.values = cast(TrainKeywords, keyword_values(JOB_OPTIONS, given, "st.train"))
        check_keywords(JOB_OPTIONS, self.values)
        read_share(self.values["share"], self.values["memory"])
        bounds = workers_range(self.values["workers"])
        if bounds is not None and bounds[1] > MAX_VIRTUAL_SHARDS:
            raise InvalidRequest(f"workers may be at most {MAX_VIRTUAL_SHARDS}, got {self.values['workers']!r}")
        check_rules(JOB_RULES, self._checked_values(), JOB_WORDS["python"])

    def _checked_values(self) -> dict[str, Any]:
        """The keywords in the form that the rules over several options take."""
        return {
            **self.values,
            "workers": workers_range(self.values["workers"]),
            "global_batch": batch_range(self.values["global_batch"]),
            "batch_schedule": batch_phases(self.values["batch_schedule"]),
            "exact": self._num_shards(),
        }

    def _num_shards(self) -> int | None:
        """The number of virtual shards of an exact job; None if it is not to be exact."""
        return cast(int | None, sent_options(JOB_OPTIONS, self.values, datetime.now()).get("num_virtual_shards"))

    def micro_batch_size(self) -> int:
        """How many samples pass through the pipeline of functions at a time."""
        return min(self.values["micro_batch"] or DEFAULT_MICRO_BATCH, *self._batch_sizes())

    def largest_micro_batch_size(self) -> int:
        """The most samples that a worker with the whole model may take at a time; 0 if `micro_batch` is given."""
        return 0 if self.values["micro_batch"] is not None else min(LARGEST_MICRO_BATCH, *self._batch_sizes())

    def _batch_sizes(self) -> list[int]:
        phases = batch_phases(self.values["batch_schedule"])
        return [batch_range(self.values["global_batch"])[0], *(phase.global_batch_size for phase in phases)]

    def batch_bounds(self) -> AdaptiveBatch | None:
        """The bounds within which the platform may change the batch; None if it is fixed."""
        low, high = batch_range(self.values["global_batch"])
        if low == high:
            return None
        return AdaptiveBatch(
            min_size=low,
            max_size=high,
            max_local_size=self.values["max_local_batch"],
            learning_rate=self.values["learning_rate"],
        )

    def override(self, changes: Mapping[str, Any], where: str = "submit()") -> TrainOptions:
        """A copy with some keywords changed; `params`, `env` and `secrets` are merged. Raises InvalidRequest."""
        return TrainOptions(**cast(TrainKeywords, overridden(JOB_OPTIONS, self.values, changes, where)))

    def as_local_job(self, name: str) -> TrainingJob:
        """The TrainingJob for a run in this process: as the platform would make it, without goal and source."""
        bounds = workers_range(self.values["workers"])
        batch, num_shards = self.batch_bounds(), self._num_shards()
        sent = sent_options(JOB_OPTIONS, self.values, datetime.now())
        copied = {name: sent[name] for name in copied_fields(JOB_OPTIONS, "workload") if name in sent}
        copied["env"] = copied.get("env", {}) | secret_values(self.values["secrets"])
        return TrainingJob(
            job_id=WorkloadId(name),
            name=name,
            entrypoint=Entrypoint(source_path=""),
            global_batch_size=batch_range(self.values["global_batch"])[0],
            num_virtual_shards=num_shards or shards_for(bounds[1] if bounds is not None else 1, batch),
            exact=num_shards is not None,
            batch=batch,
            length_unit=LENGTH_UNITS[self.values["length"]],
            batch_schedule=batch_phases(self.values["batch_schedule"]),
            **copied,
        )

    def as_request(self, num_devices: int, now: datetime) -> dict[str, Any]:
        """The `options` of POST /v1/jobs; `num_devices` is the upper bound of `st.auto`. Raises InvalidRequest."""
        check_rules(PLACE_RULES, self._checked_values(), JOB_WORDS["python"])
        values, bounds = self.values, workers_range(self.values["workers"])
        most = max(1, num_devices // values["gpu"])
        low, high = bounds or (1, min(most, self._num_shards() or MAX_VIRTUAL_SHARDS))
        options = sent_options(JOB_OPTIONS, values, now)
        if values["secrets"]:
            options["secrets"] = secret_values(values["secrets"])
        options |= {
            "global_batch_size": batch_range(values["global_batch"])[0],
            "min_workers": low,
            "max_workers": min(high, MAX_VIRTUAL_SHARDS),
        }
        if values["on"] == "functions" and bounds is not None:
            options["function_workers"] = list(bounds)
        options |= share_option(settled_share(values["share"], values["memory"]))
        batch = self.batch_bounds()
        if batch is not None:
            options["batch"] = msgspec.to_builtins(batch)
            options["length_unit"] = LENGTH_UNITS[values["length"]]
        return options
