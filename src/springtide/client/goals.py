"""What people pass to `st.train`, checked once when the file is read and turned into the API's options when it is
submitted.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, get_args

import msgspec

from springtide.client.shares import MemoryAsked, ShareAsked, read_share, settled_share, share_option
from springtide.core.errors import InvalidRequest
from springtide.core.function_search import BatchPhase
from springtide.core.quantities import parse_duration_s, parse_money_usd, parse_range, validate_name
from springtide.core.shards import shards_for
from springtide.core.workload import (
    MAX_VIRTUAL_SHARDS,
    AdaptiveBatch,
    Entrypoint,
    LearningRateRule,
    LengthUnit,
    TrainingJob,
    WorkloadId,
)

_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_PHASE = re.compile(r"(\d{1,6})\s*:\s*(\d{1,7})")


class Auto(enum.Enum):
    """The type of `st.auto`."""

    AUTO = "auto"


auto: Final = Auto.AUTO
"""Let the platform choose: between one worker and as many as it has devices."""

Workers = int | str | tuple[int, int] | Auto
GlobalBatch = int | str | tuple[int, int]
Length = Literal["epochs", "progress"]
Where = Literal["cluster", "functions"]
Params = Mapping[str, str | int | float | bool]
# From which epoch on (from 0) the global batch is how large: [(0, 64), (4, 256)] or "0:64,4:256".
BatchSchedule = str | Sequence[tuple[int, int]]
# Of a pipeline on functions, unless the owner says otherwise: what FuncPipe was measured with.
DEFAULT_MICRO_BATCH = 4
# A model that is measured as one takes as many samples at a time as are worth it, up to this.
LARGEST_MICRO_BATCH = 64


class TrainKeywords(TypedDict, total=False):
    """The keywords of `st.train`, of `st.Task` and of `.submit()`."""

    deadline: str | float | None
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
    retries: int
    soft: bool
    wait: bool
    num_samples: int | None
    on: Where
    micro_batch: int | None
    fastest: bool
    search: bool | None
    batch_schedule: BatchSchedule
    study: str
    share: ShareAsked
    memory: MemoryAsked


def deadline_in_s(value: str | float, now: datetime) -> float:
    """Seconds from `now` until a deadline: a duration ("90m") or the next time the clock shows "18:00"."""
    match = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        try:
            return parse_duration_s(value, "deadline")
        except InvalidRequest:
            raise InvalidRequest(
                f"deadline {value!r} is not a time to keep; write it like '90m', '1h30m', '18:00' or 45 (seconds)"
            ) from None
    moment = now.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
    if moment <= now:
        moment += timedelta(days=1)
    return (moment - now).total_seconds()


def workers_range(value: Workers | str, num_devices: int | None = None) -> tuple[int, int] | None:
    """The inclusive bounds; for `auto` 1 to `num_devices`, or None while the number of devices is not known."""
    if value is auto or (isinstance(value, str) and value.strip() == "auto"):
        return None if num_devices is None else (1, max(1, num_devices))
    assert not isinstance(value, Auto)
    return parse_range(value, "workers")


def batch_range(value: GlobalBatch) -> tuple[int, int]:
    """The bounds of the global batch size, equal where it is fixed: 64, (32, 512) or "32..512"."""
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int):
        check_count(value, "global_batch", 32)
        return value, value
    return parse_range(value, "global_batch")


def batch_phases(value: BatchSchedule) -> tuple[BatchPhase, ...]:
    """A batch schedule as phases, epochs ascending. Raises InvalidRequest."""
    mend = "write it like batch_schedule=[(0, 64), (4, 256)], on the command line --batch-schedule 0:64,4:256"
    if isinstance(value, str):
        pairs: list[Any] = []
        for part in value.split(",") if value.strip() else ():
            match = _PHASE.fullmatch(part.strip())
            if match is None:
                raise InvalidRequest(f"{part.strip()!r} is no phase of a batch schedule (EPOCH:BATCH); {mend}")
            pairs.append((int(match[1]), int(match[2])))
    elif isinstance(value, Sequence):
        pairs = list(value)
    else:
        raise InvalidRequest(f"batch_schedule {value!r:.80} is no schedule; {mend}")
    phases: list[BatchPhase] = []
    for pair in pairs:
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(number, int) and not isinstance(number, bool) for number in pair):
            raise InvalidRequest(f"{pair!r:.80} is no phase of a batch schedule (an epoch and a batch); {mend}")
        epoch, size = pair
        if epoch < 0 or size < 1:
            raise InvalidRequest(f"a batch of {size} from epoch {epoch} on cannot be: epochs from 0, batches from 1")
        if phases and epoch <= phases[-1].from_epoch:
            raise InvalidRequest(
                f"the batch schedule names epoch {epoch} after epoch {phases[-1].from_epoch}; epochs ascend, each once"
            )
        phases.append(BatchPhase(from_epoch=epoch, global_batch_size=size))
    return tuple(phases)


def check_count(value: object, what: str, example: int, lowest: int = 1) -> int:
    """Return `value` if it is a whole number of at least `lowest`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InvalidRequest(
            f"{what} must be a whole number of at least {lowest}, got {value!r}; for example {example}"
        )
    return value


def check_params(params: Params) -> dict[str, str]:
    """Parameters as the strings in which they travel."""
    if not isinstance(params, Mapping) or not all(isinstance(key, str) and key for key in params):
        raise InvalidRequest(f"params must map names to values, got {params!r:.80}; for example params={{'lr': 0.1}}")
    for key, value in params.items():
        if not isinstance(value, str | int | float | bool):
            raise InvalidRequest(f"param {key!r} must be a string or a number, not a {type(value).__name__}")
    return {key: str(value) for key, value in params.items()}


def unknown_keyword(names: set[str], allowed: set[str], where: str) -> None:
    """Refuse misspelt keywords, naming the ones that exist."""
    unknown = sorted(names - allowed)
    if unknown:
        raise InvalidRequest(f"{where} does not know {unknown[0]!r}; it knows {', '.join(sorted(allowed))}")


_UNITS: Final[Mapping[Length, LengthUnit]] = MappingProxyType({"epochs": "samples", "progress": "progress"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What a training function asks for, as it was written. A deadline counts from the submission.

    A `global_batch` with bounds may change while the job runs, from its lower bound on: then `max_local_batch` is what
    one worker holds at once, `learning_rate` how the rate follows, and `length` says whether the epochs are passes over
    the data or the progress that so many passes would make with the first batch. `on` is where it runs: on the
    machines of the cluster or on a function service, there in micro-batches of `micro_batch` samples.

    Only on functions: `fastest` makes time all that counts, within the budget where there is one; `search` says whether
    the number of workers and their memory are searched for while it runs (None: where a goal asks for it);
    `batch_schedule` changes the global batch with the epoch. `study` names the search over jobs that it is a trial of.

    Only on machines: `share` is what each worker holds of its device, and `memory` what of the device's memory.
    """

    deadline: str | float | None = None
    budget: str | float | None = None
    global_batch: GlobalBatch = 32
    max_local_batch: int | None = None
    learning_rate: LearningRateRule = "linear"
    length: Length = "epochs"
    epochs: int = 1
    workers: Workers = auto
    seed: int = 0
    name: str = ""
    params: Params = field(default_factory=dict)
    retries: int = 3
    soft: bool = False
    wait: bool = False
    num_samples: int | None = None
    on: Where = "cluster"
    micro_batch: int | None = None
    fastest: bool = False
    search: bool | None = None
    batch_schedule: BatchSchedule = ()
    study: str = ""
    share: ShareAsked = None
    memory: MemoryAsked = None

    def __post_init__(self) -> None:
        """Raise InvalidRequest, with the mend, for what can never be."""
        batch_range(self.global_batch)
        self._check_search()
        self._check_share()
        self._check_batch()
        self._check_place()
        check_count(self.epochs, "epochs", 10)
        check_count(self.retries, "retries", 3, lowest=0)
        check_count(self.seed, "seed", 0, lowest=0)
        if self.num_samples is not None:
            check_count(self.num_samples, "num_samples", 50_000)
        for keyword, value in (("soft", self.soft), ("wait", self.wait)):
            if not isinstance(value, bool):
                raise InvalidRequest(f"{keyword} must be True or False, got {value!r:.80}")
        if self.deadline is not None:
            deadline_in_s(self.deadline, datetime(2000, 1, 1))
        if self.budget is not None:
            parse_money_usd(self.budget)
        bounds = workers_range(self.workers)
        if bounds is not None and bounds[1] > MAX_VIRTUAL_SHARDS:
            raise InvalidRequest(f"workers may be at most {MAX_VIRTUAL_SHARDS}, got {self.workers!r}")
        if self.name:
            validate_name(self.name)
        check_params(self.params)

    def _check_batch(self) -> None:
        """Raise InvalidRequest for what cannot be said of the batch, or not without bounds for it."""
        if self.max_local_batch is not None:
            check_count(self.max_local_batch, "max_local_batch", 64)
        for keyword, value, kind in (
            ("learning_rate", self.learning_rate, LearningRateRule),
            ("length", self.length, Length),
        ):
            if value not in get_args(kind):
                known = ", ".join(repr(name) for name in get_args(kind))
                raise InvalidRequest(f"{keyword} must be one of {known}, got {value!r:.80}")
        low, high = batch_range(self.global_batch)
        if low == high:
            for keyword, is_given in (
                ("max_local_batch", self.max_local_batch is not None),
                ("learning_rate", self.learning_rate != "linear"),
                ("length", self.length != "epochs"),
            ):
                if is_given:
                    raise InvalidRequest(
                        f"{keyword} needs a batch that may change; give it bounds like global_batch=({low}, {16 * low})"
                    )

    def _check_place(self) -> None:
        """Raise InvalidRequest for a place that is none, and for what functions cannot do."""
        if self.on not in get_args(Where):
            known = " or ".join(repr(name) for name in get_args(Where))
            raise InvalidRequest(f"on must be {known}, got {self.on!r:.80}")
        low, high = batch_range(self.global_batch)
        if self.micro_batch is not None:
            check_count(self.micro_batch, "micro_batch", DEFAULT_MICRO_BATCH)
            if self.micro_batch > low:
                raise InvalidRequest(
                    f"micro_batch {self.micro_batch} is more than the global batch of {low}; use at most {low}"
                )
        if self.on == "functions" and low != high:
            raise InvalidRequest(
                f"a job on functions has one global batch, not {self.global_batch!r}; choose one, like {low}"
            )

    def _check_search(self) -> None:
        """Raise InvalidRequest for a goal or a schedule that only functions know, or that cannot be."""
        if not isinstance(self.fastest, bool):
            raise InvalidRequest(f"fastest must be True or False, got {self.fastest!r:.80}")
        if self.search is not None and not isinstance(self.search, bool):
            raise InvalidRequest(f"search must be True, False or None, got {self.search!r:.80}")
        if self.fastest and self.deadline is not None:
            raise InvalidRequest(
                "fastest and a deadline are two goals; keep one (--best-effort drops the deadline, a budget may stay)"
            )
        if self.study:
            validate_name(self.study, "the study's name")
        phases = batch_phases(self.batch_schedule)
        if phases and phases[-1].from_epoch >= self.epochs:
            raise InvalidRequest(
                f"the batch schedule names epoch {phases[-1].from_epoch}, and epochs are numbered 0 to "
                f"{self.epochs - 1}; raise epochs or leave the phase out"
            )

    def _check_share(self) -> None:
        """Raise InvalidRequest for a share that is none."""
        read_share(self.share, self.memory)

    def _check_submission(self) -> None:
        """Raise InvalidRequest for what only functions can do, of a job that is to run on machines."""
        if self.on == "functions":
            if self.share is not None:
                raise InvalidRequest(
                    "a job on functions shares no device: its functions are as large as their memory; leave share out, "
                    "or run it on the cluster"
                )
            return
        for keyword, is_given in (("fastest", self.fastest), ("search", self.search is not None)):
            if is_given:
                raise InvalidRequest(f"{keyword} is for jobs on functions; add on='functions' (--on functions)")
        if batch_phases(self.batch_schedule):
            raise InvalidRequest(
                "a batch schedule is for jobs on functions; add on='functions' (--on functions), or on machines let "
                "the platform choose the batch within bounds: global_batch=(64, 256) (--batch 64..256)"
            )

    def micro_batch_size(self) -> int:
        """How many samples go through the pipeline of functions at a time."""
        sizes = [phase.global_batch_size for phase in batch_phases(self.batch_schedule)]
        return min(self.micro_batch or DEFAULT_MICRO_BATCH, batch_range(self.global_batch)[0], *sizes)

    def largest_micro_batch_size(self) -> int:
        """How many samples a worker with the whole model may take at a time; 0 where its owner said how many."""
        sizes = [phase.global_batch_size for phase in batch_phases(self.batch_schedule)]
        if self.micro_batch is not None:
            return 0
        return min(LARGEST_MICRO_BATCH, batch_range(self.global_batch)[0], *sizes)

    def batch_bounds(self) -> AdaptiveBatch | None:
        """Within what the platform may choose the batch; None where it is fixed."""
        low, high = batch_range(self.global_batch)
        if low == high:
            return None
        return AdaptiveBatch(
            min_size=low, max_size=high, max_local_size=self.max_local_batch, learning_rate=self.learning_rate
        )

    def override(self, changes: Mapping[str, Any], where: str = "submit()") -> TrainOptions:
        """A copy with some keywords changed; `params` are merged. Raises InvalidRequest for unknown keywords."""
        unknown_keyword(set(changes), {option.name for option in fields(self)}, where)
        given = dict(changes)
        if "params" in given:
            given["params"] = {**self.params, **given["params"]}
        return replace(self, **given)

    def as_local_job(self, name: str) -> TrainingJob:
        """The job that a run in this process trains: what the platform would make of it, without goal and source."""
        bounds = workers_range(self.workers)
        return TrainingJob(
            job_id=WorkloadId(name),
            name=name,
            entrypoint=Entrypoint(source_path=""),
            global_batch_size=batch_range(self.global_batch)[0],
            num_epochs=self.epochs,
            num_virtual_shards=shards_for(bounds[1] if bounds is not None else 1, self.batch_bounds()),
            seed=self.seed,
            params=check_params(self.params),
            batch=self.batch_bounds(),
            length_unit=_UNITS[self.length],
            batch_schedule=batch_phases(self.batch_schedule),
        )

    def as_request(self, num_devices: int, now: datetime) -> dict[str, Any]:
        """The `options` of POST /v1/jobs; `num_devices` is what `auto` may grow to."""
        self._check_submission()
        bounds = workers_range(self.workers, num_devices)
        assert bounds is not None
        options: dict[str, Any] = {
            "global_batch_size": batch_range(self.global_batch)[0],
            "num_epochs": self.epochs,
            "min_workers": bounds[0],
            "max_workers": min(bounds[1], MAX_VIRTUAL_SHARDS),
            "seed": self.seed,
            "max_restarts": self.retries,
            "params": check_params(self.params),
        }
        if self.deadline is not None:
            options["deadline_s"] = deadline_in_s(self.deadline, now)
        if self.budget is not None:
            options["budget_usd"] = parse_money_usd(self.budget)
        if self.soft:
            options["is_soft"] = True
        if self.wait:
            options["waits"] = True
        if self.num_samples is not None:
            options["num_samples"] = self.num_samples
        if self.on != "cluster":
            options["on"] = self.on
        bounds = workers_range(self.workers)
        if self.on == "functions" and bounds is not None:
            options["function_workers"] = list(bounds)
        if self.fastest:
            options["is_fastest"] = True
        if self.search is not None:
            options["search"] = self.search
        phases = batch_phases(self.batch_schedule)
        if phases:
            options["batch_schedule"] = msgspec.to_builtins(phases)
        if self.study:
            options["study"] = self.study
        options |= share_option(settled_share(self.share, self.memory))
        batch = self.batch_bounds()
        if batch is not None:
            options["batch"] = msgspec.to_builtins(batch)
            options["length_unit"] = _UNITS[self.length]
        return options
