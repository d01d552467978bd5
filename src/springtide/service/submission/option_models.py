"""The `options` of requests: strict models made from the tables of options, and the models nested in them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, create_model

from springtide.core.functions import MAX_LAYERS, MIB
from springtide.core.options.jobs import CHANGEABLE_OPTIONS, JOB_OPTIONS, Where
from springtide.core.options.kinds import (
    TEN_YEARS_S,
    Choice,
    Count,
    CountRange,
    DeviceCount,
    Document,
    Duration,
    Interpreter,
    Moment,
    Money,
    Name,
    Number,
    Objective,
    OptionKind,
    Params,
    Phases,
    Rates,
    Requirements,
    SecretNames,
    ServiceNames,
    Toggle,
    Variables,
)
from springtide.core.options.option import Table, copied_fields, rest_fields
from springtide.core.options.packages import MAX_REQUIREMENT_CHARS
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.core.options.variables import MAX_VARIABLES_BYTES
from springtide.core.workload import DEVICES_EACH, Goal, LearningRateRule, LengthUnit, OnNan, OnStall, Packages

MAX_MEMORY_SIZES = 64
# What `validate_name` takes, as the description of the API says it; the check itself says what would do.
NAME_PATTERN = r"^[a-z0-9](\.?[a-z0-9_-])*\.?$"
_NAME_OR_NONE: Mapping[str, JsonValue] = MappingProxyType(
    {"anyOf": [{"const": ""}, {"pattern": NAME_PATTERN, "maxLength": 63}]}
)

ShortText = Annotated[str, Field(max_length=4096)]
# The names and their number of bytes are checked by check_variables, which says what would do.
VariableText = Annotated[str, Field(max_length=MAX_VARIABLES_BYTES)]
RequirementLine = Annotated[str, Field(min_length=1, max_length=MAX_REQUIREMENT_CHARS)]
ServiceName = Annotated[str, Field(pattern=NAME_PATTERN, max_length=63)]
ParamName = Annotated[str, Field(min_length=1, max_length=128)]
WorkerCount = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,2}$")]
# At least a step in thirty years: what is still less ends as infinite times.
StepsPerSecond = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
# Of the timeline of a step or of a layer.
StepSeconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]


class RequestModel(BaseModel):
    """A model that takes no unknown fields, and each field only in the type that it has in JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class AdaptiveBatchIn(RequestModel):
    """The bounds within which the global batch size may change while a job runs."""

    min_size: int = Field(ge=1, le=1_000_000, description="samples of one optimizer step, over all workers")
    max_size: int = Field(ge=1, le=1_000_000)
    min_local_size: int = Field(default=1, ge=1, le=1_000_000, description="the fewest worth a worker's pass")
    max_local_size: int | None = Field(default=None, ge=1, le=1_000_000, description="what a worker holds at once")
    learning_rate: LearningRateRule = Field(default="linear", description="how it follows the batch")


class GradientBucketIn(RequestModel):
    """A part of the gradient that is exchanged as one, and when in a step it is ready."""

    ready_s: StepSeconds
    num_bytes: int = Field(ge=0, le=10**13)


class StepProfileIn(RequestModel):
    """The timeline of a step as `springtide profile` takes it."""

    local_batch_size: int = Field(ge=1, le=1_000_000)
    forward_s: StepSeconds
    backward_s: StepSeconds
    update_s: StepSeconds = 0.0
    buckets: tuple[GradientBucketIn, ...] = Field(default=(), max_length=1024)


class BatchPhaseIn(RequestModel):
    """The samples of a step, over all workers, from an epoch on (numbered from 0)."""

    from_epoch: int = Field(ge=0, le=100_000)
    global_batch_size: int = Field(ge=1, le=1_000_000)


LayerBytes = Annotated[int, Field(ge=0, le=10**13)]
LayerTimes = Annotated[tuple[StepSeconds | None, ...], Field(min_length=1, max_length=MAX_MEMORY_SIZES)]


class LayerIn(RequestModel):
    """One layer of a model, for one micro-batch: sizes, and times for each memory size (null where it does not fit)."""

    name: str = Field(max_length=256)
    parameter_bytes: LayerBytes
    activation_bytes: LayerBytes
    output_bytes: LayerBytes
    gradient_bytes: LayerBytes
    forward_s: LayerTimes
    backward_s: LayerTimes


class LayerProfileIn(RequestModel):
    """A model's layers as `springtide profile FILE --layers` takes them."""

    model: str = Field(max_length=256)
    micro_batch_size: int = Field(ge=1, le=1_000_000)
    memory_mb: tuple[Annotated[int, Field(ge=1, le=1 << 24)], ...] = Field(min_length=1, max_length=MAX_MEMORY_SIZES)
    bytes_per_s: tuple[Annotated[float, Field(gt=0, le=1e13, allow_inf_nan=False)], ...] = Field(
        min_length=1, max_length=MAX_MEMORY_SIZES
    )
    layers: tuple[LayerIn, ...] = Field(min_length=1, max_length=MAX_LAYERS)
    latency_s: StepSeconds = 0.04
    slowdown: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 1.0
    base_bytes: LayerBytes = 300 * MIB
    fixed_s: StepSeconds = 0.0
    source: ShortText = ""


Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class ShareIn(RequestModel):
    """What each worker or replica holds of one device, in fractions: always `request`, at most `limit`."""

    request: Fraction
    limit: Fraction | None = Field(default=None, description="twice the request, at most 1, where it is left out")
    memory_mb: int = Field(default=0, ge=0, le=10**9, description="of the device's memory; 0: it is not counted")


# What an option of kind Document, or each of its phases, holds.
_DOCUMENTS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        "batch": AdaptiveBatchIn,
        "batch_schedule": BatchPhaseIn,
        "layer_profile": LayerProfileIn,
        "share": ShareIn,
        "step_profile": StepProfileIn,
    }
)


def options_model(name: str, description: str, table: Table) -> type[RequestModel]:
    """The model of the options in `table`. `description` describes it in the API document."""
    fields: dict[str, Any] = {}
    for rest, kind, default in rest_fields(table):
        annotation = _annotation(kind, rest.path)
        described = Field(
            default=default,
            description=rest.help or None,
            examples=list(rest.examples) or None,
            max_length=_most_entries(kind),
            json_schema_extra=_more_of_schema(kind),
        )
        fields[rest.path] = (annotation | None if default is None else annotation, described)
    return create_model(name, __base__=RequestModel, __doc__=description, __module__=__name__, **fields)


def _more_of_schema(kind: OptionKind) -> dict[str, Any] | None:
    """What the schema of a field says beside its type and bounds."""
    if isinstance(kind, DeviceCount):
        return {"enum": list(DEVICES_EACH)}
    return dict(_NAME_OR_NONE) if isinstance(kind, Name) else None


def _annotation(kind: OptionKind, path: str) -> Any:
    """The type of a field, with the bounds of its values."""
    match kind:
        case Moment() | Objective() | Duration(may_be_zero=False):
            return Annotated[float, Field(gt=0, le=TEN_YEARS_S, allow_inf_nan=False)]
        case Duration():
            return Annotated[float, Field(ge=0, le=kind.highest_s, allow_inf_nan=False)]
        case Money() | Number():
            return Annotated[float, Field(gt=0, le=kind.highest, allow_inf_nan=False)]
        case Count():
            return Annotated[int, Field(ge=kind.lowest, le=kind.highest)]
        case CountRange():
            bound = Annotated[int, Field(ge=kind.lowest, le=kind.highest)]
            return tuple[bound, bound]
        case Choice():
            return Literal[kind.values]
        case Phases():
            phase: Any = _DOCUMENTS[path]
            return tuple[phase, ...]
        case Document():
            return _DOCUMENTS[path]
    return _PLAIN[type(kind)]


def _most_entries(kind: OptionKind) -> int | None:
    """How many characters or entries a field may have, where that is bounded."""
    match kind:
        case Interpreter() | Name():
            return kind.max_chars
        case Params() | Rates() | Requirements() | SecretNames() | ServiceNames() | Variables():
            return kind.max_entries
        case Phases():
            return kind.max_phases
    return None


_PLAIN: Mapping[type[OptionKind], Any] = MappingProxyType(
    {
        Toggle: bool,
        Name: str,
        Params: dict[ParamName, ShortText],
        Rates: dict[WorkerCount, StepsPerSecond],
        Variables: dict[ParamName, VariableText],
        SecretNames: dict[ParamName, VariableText],
        Requirements: tuple[RequirementLine, ...],
        ServiceNames: tuple[ServiceName, ...],
        Interpreter: str,
    }
)


def copied(options: RequestModel, table: Table, target: Literal["goal", "workload"]) -> dict[str, Any]:
    """The fields that a workload or its goal takes over under the same name."""
    return {name: getattr(options, name) for name in copied_fields(table, target)}


def packages_of(options: JobOptionsIn | ServiceOptionsIn) -> Packages | None:
    """The environment of its own that a workload asks for; None if it asks for none."""
    if not options.requirements and not options.python:
        return None
    return Packages(requirements=options.requirements, python=options.python)


def checked_values(options: JobOptionsIn) -> dict[str, Any]:
    """The options in the form that the rules over several options take, by the names of the table."""
    size, batch, profile = options.global_batch_size, options.batch, options.layer_profile
    given = {option.name: getattr(options, option.rest.path) for option in JOB_OPTIONS if option.rest is not None}
    given |= {
        "workers": (options.min_workers, options.max_workers),
        "global_batch": (size, size) if batch is None else (batch.min_size, batch.max_size),
        "initial_batch": size,
        "length": "progress" if options.length_unit == "progress" else "epochs",
        "micro_batch": None if profile is None else profile.micro_batch_size,
        "share": options.share,
    }
    if batch is not None:
        given |= {
            "max_local_batch": batch.max_local_size,
            "min_local_batch": batch.min_local_size,
            "learning_rate": batch.learning_rate,
        }
    return given


def goal_of(options: JobOptionsIn, now_s: float) -> Goal:
    """The goal of a job that is submitted now."""
    deadline_s = None if options.deadline_s is None else now_s + options.deadline_s
    return Goal(deadline_s=deadline_s, **copied(options, JOB_OPTIONS, "goal"))


if TYPE_CHECKING:
    # The models below as the type checker sees them. A test compares them with the tables.
    class JobOptionsIn(RequestModel):
        """A training job's length, bounds and goal."""

        def __init__(self, **options: Any) -> None: ...

        deadline_s: float | None
        confidence: float | None
        budget_usd: float | None
        is_fastest: bool
        min_workers: int
        max_workers: int
        num_epochs: int
        global_batch_size: int
        batch: AdaptiveBatchIn | None
        length_unit: LengthUnit
        num_virtual_shards: int | None
        num_samples: int | None
        seed: int
        params: dict[str, str]
        env: dict[str, str]
        secrets: dict[str, str]
        requirements: tuple[str, ...]
        python: str
        on: Where
        batch_schedule: tuple[BatchPhaseIn, ...]
        search: bool | None
        function_workers: tuple[int, int] | None
        layer_profile: LayerProfileIn | None
        stream: str
        share: ShareIn | None
        devices_each: int
        study: str
        is_soft: bool
        waits: bool
        max_restarts: int
        stall_timeout_s: float | None
        on_stall: OnStall
        start_timeout_s: float
        on_nan: OnNan
        grace_s: float
        checkpoint_interval_s: float
        profile_steps_per_s: dict[str, float]
        step_profile: StepProfileIn | None

    class ServiceOptionsIn(RequestModel):
        """A service's objective and bounds."""

        def __init__(self, **options: Any) -> None: ...

        min_replicas: int
        max_replicas: int
        slo_s: float | None
        max_batch_size: int
        target_in_flight: int
        max_queue: int
        max_body_mib: int
        concurrency: int | None
        calls: tuple[str, ...]
        devices_each: int
        share: ShareIn | None
        capacity_per_s: float | None
        batch_wait_s: float
        idle_s: float
        start_timeout_s: float
        grace_s: float
        params: dict[str, str]
        env: dict[str, str]
        secrets: dict[str, str]
        requirements: tuple[str, ...]
        python: str
else:
    JobOptionsIn = options_model("JobOptionsIn", "A training job's length, bounds and goal.", JOB_OPTIONS)
    ServiceOptionsIn = options_model("ServiceOptionsIn", "A service's objective and bounds.", SERVICE_OPTIONS)

JobChangeIn = options_model(
    "JobChangeIn",
    "The body of PATCH /v1/jobs/{id}: what is left out stays as it is, null takes a deadline or budget away.",
    CHANGEABLE_OPTIONS,
)
