"""What the REST API takes: strict models with bounds, and the sentences for what does not fit them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails

from springtide.core.errors import InvalidRequest
from springtide.core.functions import MAX_LAYERS, MIB
from springtide.core.quantities import validate_name
from springtide.core.shards import shards_for
from springtide.core.workload import (
    DEFAULT_GRACE_S,
    MAX_VIRTUAL_SHARDS,
    AdaptiveBatch,
    LearningRateRule,
    LengthUnit,
)
from springtide.service.submission.problems import Malformed

MAX_SOURCE_BYTES = 1024 * 1024
MAX_WORKERS = MAX_VIRTUAL_SHARDS
# An id is the name with a dash and up to six digits, and must itself be a name.
MAX_JOB_NAME_CHARS = 56
MAX_PARAMS = 64
MAX_ARGS = 256
MAX_MEMORY_SIZES = 64
MAX_FILES = 256
MAX_PATH_CHARS = 240
MAX_PHASES = 1000
TEN_YEARS_S = 10 * 365 * 86400.0

ModelT = TypeVar("ModelT", bound=BaseModel)
PositiveSeconds = Annotated[float, Field(gt=0, le=TEN_YEARS_S, allow_inf_nan=False)]
ShortText = Annotated[str, Field(max_length=4096)]
ParamName = Annotated[str, Field(min_length=1, max_length=128)]
FileName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127})*$", max_length=MAX_PATH_CHARS
    ),
]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
WorkerCount = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,2}$")]
StepsPerSecond = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SourceIn(_Model):
    """A snapshot of the user's source file, and which object of it is meant."""

    filename: str = Field(max_length=128, description="the file's name, without folders", examples=["digits.py"])
    text: str = Field(description="the whole file, Python, at most 1 MiB", examples=["def fit(ctx):\n    ...\n"])
    object_name: str = Field(default="", max_length=128, description="the function or class", examples=["fit"])
    args: tuple[ShortText, ...] = Field(default=(), max_length=MAX_ARGS, description="command line of a script")
    import_root: str = Field(default="", max_length=4096, description="absolute directory to import neighbours from")
    files: dict[FileName, str] = Field(
        default={},
        max_length=MAX_FILES,
        description="further files beside it, by name or path (pkg/model.py): text, all together at most 1 MiB",
    )


class JobSourceIn(SourceIn):
    """The source of a training job: a function that takes a TrainContext, or a whole script."""

    kind: Literal["function", "script"] = "function"


class ServiceSourceIn(SourceIn):
    """The source of a service: a class with `load` and `predict`."""

    kind: Literal["class"] = "class"


class AdaptiveBatchIn(_Model):
    """The bounds within which the global batch size may change while a job runs."""

    min_size: int = Field(ge=1, le=1_000_000, description="samples of one optimizer step, over all workers")
    max_size: int = Field(ge=1, le=1_000_000)
    min_local_size: int = Field(default=1, ge=1, le=1_000_000, description="the fewest worth a worker's pass")
    max_local_size: int | None = Field(default=None, ge=1, le=1_000_000, description="what a worker holds at once")
    learning_rate: LearningRateRule = Field(default="linear", description="how it follows the batch")


Moment = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]


class GradientBucketIn(_Model):
    """A part of the gradient that is exchanged as one, and when in a step it is ready."""

    ready_s: Moment
    num_bytes: int = Field(ge=0, le=10**13)


class StepProfileIn(_Model):
    """The timeline of a step as `springtide profile` takes it."""

    local_batch_size: int = Field(ge=1, le=1_000_000)
    forward_s: Moment
    backward_s: Moment
    update_s: Moment = 0.0
    buckets: tuple[GradientBucketIn, ...] = Field(default=(), max_length=1024)


class BatchPhaseIn(_Model):
    """From which epoch on (from 0) a step has how many samples, over all workers."""

    from_epoch: int = Field(ge=0, le=100_000)
    global_batch_size: int = Field(ge=1, le=1_000_000)


LayerSeconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
LayerBytes = Annotated[int, Field(ge=0, le=10**13)]
LayerTimes = Annotated[tuple[LayerSeconds | None, ...], Field(min_length=1, max_length=MAX_MEMORY_SIZES)]


class LayerIn(_Model):
    """One layer of a model, for one micro-batch: sizes, and times for each memory size (null where it does not fit)."""

    name: str = Field(max_length=256)
    parameter_bytes: LayerBytes
    activation_bytes: LayerBytes
    output_bytes: LayerBytes
    gradient_bytes: LayerBytes
    forward_s: LayerTimes
    backward_s: LayerTimes


class LayerProfileIn(_Model):
    """A model's layers as `springtide profile FILE --layers` takes them."""

    model: str = Field(max_length=256)
    micro_batch_size: int = Field(ge=1, le=1_000_000)
    memory_mb: tuple[Annotated[int, Field(ge=1, le=1 << 24)], ...] = Field(min_length=1, max_length=MAX_MEMORY_SIZES)
    bytes_per_s: tuple[Annotated[float, Field(gt=0, le=1e13, allow_inf_nan=False)], ...] = Field(
        min_length=1, max_length=MAX_MEMORY_SIZES
    )
    layers: tuple[LayerIn, ...] = Field(min_length=1, max_length=MAX_LAYERS)
    latency_s: LayerSeconds = 0.04
    slowdown: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 1.0
    base_bytes: LayerBytes = 300 * MIB
    fixed_s: LayerSeconds = 0.0
    source: ShortText = ""


Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class ShareIn(_Model):
    """What each worker or replica holds of one device: sure of `request`, at most `limit`, fractions of the device."""

    request: Fraction
    limit: Fraction | None = Field(default=None, description="twice the request, at most 1, where it is left out")
    memory_mb: int = Field(default=0, ge=0, le=10**9, description="of the device's memory; 0: nobody counts it")


class ContainerIn(_Model):
    """What the pods of a workload are made of, on Kubernetes; what is left out is the platform's own."""

    namespace: ObjectName | None = Field(default=None, description="where its object and its pods are")
    image: str = Field(default="", max_length=1024)
    cpu: str = Field(default="", max_length=32, description="cores that each pod is limited to", examples=["500m"])
    memory: str = Field(default="", max_length=32, description="main memory of each pod", examples=["2Gi"])
    service_account: ObjectName | None = None
    environment: dict[ParamName, ShortText] = Field(default={}, max_length=256)
    secrets: tuple[ObjectName, ...] = Field(
        default=(), max_length=64, description="Secrets whose values become environment variables"
    )


SearchedWorkers = Annotated[int, Field(ge=1, le=10_000)]


class JobOptionsIn(_Model):
    """A training job's length, bounds and goal."""

    deadline_s: PositiveSeconds | None = Field(default=None, description="seconds from now")
    budget_usd: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    global_batch_size: int = Field(default=32, ge=1, le=1_000_000)
    batch: AdaptiveBatchIn | None = Field(
        default=None, description="lets the platform change the batch; global_batch_size is what it starts with"
    )
    length_unit: LengthUnit = Field(
        default="samples",
        description="whether the epochs are passes over the data, or the progress so many make with the first batch",
    )
    num_epochs: int = Field(default=1, ge=1, le=100_000)
    min_workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    max_workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    max_restarts: int = Field(default=3, ge=0, le=1000)
    grace_s: PositiveSeconds = DEFAULT_GRACE_S
    checkpoint_interval_s: PositiveSeconds = 30.0
    num_virtual_shards: int | None = Field(
        default=None,
        ge=1,
        le=MAX_VIRTUAL_SHARDS,
        description="a power of two, at least max_workers; fixes the order in which gradients are reduced",
    )
    params: dict[ParamName, ShortText] = Field(default={}, max_length=MAX_PARAMS)
    is_soft: bool = Field(default=False, description="a deadline to aim at, not a condition: it runs, late if it must")
    waits: bool = Field(default=False, description="stays in line while its deadline cannot be promised yet")
    num_samples: int | None = Field(default=None, ge=1, le=10**12, description="of one epoch, where it is known")
    profile_steps_per_s: dict[WorkerCount, StepsPerSecond] = Field(
        default={},
        max_length=MAX_WORKERS,
        description="optimizer steps a second by number of workers, where they are known",
        examples=[{"1": 3.2, "2": 5.9}],
    )
    step_profile: StepProfileIn | None = Field(default=None, description="the timeline of a step, where it was taken")
    on: Literal["cluster", "functions"] = Field(
        default="cluster", description="the platform's machines, or its function service"
    )
    layer_profile: LayerProfileIn | None = Field(
        default=None, description="what a job on functions is planned from; a quote for the cluster compares with it"
    )
    is_fastest: bool = Field(
        default=False, description="on functions: time is all that counts, within the budget where there is one"
    )
    search: bool | None = Field(
        default=None,
        description="on functions: whether workers and their memory are searched for while it runs; null: where a goal "
        "asks for it and the model fits one function",
    )
    batch_schedule: tuple[BatchPhaseIn, ...] = Field(
        default=(),
        max_length=MAX_PHASES,
        description="on functions: the global batch from each of these epochs on, ascending; before the first it is "
        "global_batch_size",
    )
    function_workers: tuple[SearchedWorkers, SearchedWorkers] | None = Field(
        default=None, description="on functions: the bounds of a search for the number of workers", examples=[[2, 16]]
    )
    stream: str = Field(default="", max_length=64, description="on functions: the growing dataset that it trains on")
    study: str = Field(default="", max_length=64, description="the search over jobs that it is a trial of")
    share: ShareIn | None = Field(default=None, description="what each worker holds of its device; null: the whole")


class ServiceOptionsIn(_Model):
    """A service's objective and bounds."""

    slo_s: PositiveSeconds | None = None
    min_replicas: int = Field(default=0, ge=0, le=MAX_WORKERS)
    max_replicas: int = Field(default=1, ge=1, le=MAX_WORKERS)
    max_batch_size: int = Field(default=8, ge=1, le=4096)
    batch_wait_s: float = Field(default=0.005, ge=0, le=60, allow_inf_nan=False)
    max_queue: int = Field(default=256, ge=1, le=1_000_000)
    target_in_flight: int = Field(default=8, ge=1, le=100_000)
    idle_s: PositiveSeconds = 30.0
    grace_s: PositiveSeconds = DEFAULT_GRACE_S
    params: dict[ParamName, ShortText] = Field(default={}, max_length=MAX_PARAMS)
    share: ShareIn | None = Field(default=None, description="what each replica holds of its device; null: the whole")
    capacity_per_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        default=None,
        description="requests a second that one replica answers within the objective, at the limit of its share; then "
        "the number of replicas follows the co-scaler",
    )


class JobIn(_Model):
    """The body of POST /v1/jobs."""

    name: str = Field(max_length=128, description="1 to 56 of a-z 0-9 . _ -", examples=["digits"])
    source: JobSourceIn
    options: JobOptionsIn = JobOptionsIn()
    container: ContainerIn | None = None


class ResumeIn(_Model):
    """The body of POST /v1/jobs/{id}/resume, where there is one."""

    budget_usd: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        default=None, description="the budget from now on, of all the job has cost and will"
    )


class JobChangeIn(_Model):
    """The body of PATCH /v1/jobs/{id}: what is left out stays as it is, null takes a deadline or budget away."""

    deadline_s: PositiveSeconds | None = Field(default=None, description="seconds from now")
    budget_usd: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        default=None, description="of all the job has cost and will"
    )
    is_soft: bool = False
    waits: bool = False
    max_restarts: int = Field(default=3, ge=0, le=1000)


class ServiceIn(_Model):
    """The body of PUT /v1/services/{name}."""

    source: ServiceSourceIn
    options: ServiceOptionsIn = ServiceOptionsIn()
    container: ContainerIn | None = None


class ScaleIn(_Model):
    """The body of POST /v1/workloads/{id}/scale: inclusive bounds."""

    minimum: int = Field(ge=0, le=MAX_WORKERS)
    maximum: int = Field(ge=1, le=MAX_WORKERS)


class ShutdownIn(_Model):
    """The body of POST /v1/shutdown."""

    stop_workers: bool = True


class NothingIn(_Model):
    """The body of a request that takes none."""


class ProblemDetail(_Model):
    """What is wrong, and what would do."""

    code: str
    message: str


class Problem(_Model):
    """How every error is answered."""

    error: ProblemDetail


REQUEST_MODELS: tuple[type[BaseModel], ...] = (JobIn, JobChangeIn, ResumeIn, ServiceIn, ScaleIn, ShutdownIn, Problem)


def parse_body(body: bytes, model: type[ModelT]) -> ModelT:
    """Decode and check a body. Raises Malformed (not JSON at all) or InvalidRequest (one sentence for each defect)."""
    try:
        # msgspec refuses what pydantic's reader lets through: NaN and infinities, half surrogates, bad UTF-8.
        msgspec.json.decode(body)
    except RecursionError:
        raise Malformed("the body is nested too deeply; send plain objects and lists") from None
    except msgspec.ValidationError as error:
        raise Malformed(f"a number in the body is out of range: {error}") from None
    except ValueError as error:
        raise Malformed(f"the body is not valid JSON (UTF-8, no NaN or Infinity): {error}") from None
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
        more = f"; and {len(details) - 5} more" if len(details) > 5 else ""
        raise InvalidRequest("; ".join(_sentence(detail, model) for detail in details[:5]) + more) from None


def check_job(job: JobIn) -> None:
    """Raise InvalidRequest unless what the fields say together makes sense."""
    validate_name(job.name, "the job's name")
    if len(job.name) > MAX_JOB_NAME_CHARS:
        raise InvalidRequest(f"the job's name has {len(job.name)} characters; use at most {MAX_JOB_NAME_CHARS}")
    options = job.options
    if options.min_workers > options.max_workers:
        raise InvalidRequest(
            f"options.min_workers {options.min_workers} is above options.max_workers {options.max_workers}; "
            "raise max_workers or lower min_workers"
        )
    _check_batch(options, is_script=job.source.kind == "script")
    shards = options.num_virtual_shards
    needed = shards_for(options.max_workers, adaptive_batch(options), least=1)
    if shards is not None and (shards & (shards - 1) or shards < needed):
        raise InvalidRequest(
            f"options.num_virtual_shards {shards} must be a power of two that is at least max_workers "
            f"({options.max_workers}) and, with batch.max_local_size, cuts the largest batch into parts that fit; "
            f"use {shards_for(options.max_workers, adaptive_batch(options))}, or leave it out"
        )


def adaptive_batch(options: JobOptionsIn) -> AdaptiveBatch | None:
    """The bounds of the batch as a job carries them."""
    return None if options.batch is None else AdaptiveBatch(**options.batch.model_dump())


def _check_batch(options: JobOptionsIn, *, is_script: bool) -> None:
    batch, size = options.batch, options.global_batch_size
    if batch is None:
        if options.length_unit == "progress":
            raise InvalidRequest(
                "options.length_unit 'progress' needs options.batch: with one batch size throughout, progress and "
                "samples are the same; leave it out, or send batch bounds"
            )
        return
    if is_script:
        raise InvalidRequest("a script's batch is its own; leave out options.batch, or hand over a training function")
    if batch.min_size > batch.max_size:
        raise InvalidRequest(
            f"options.batch.min_size {batch.min_size} is above options.batch.max_size {batch.max_size}; swap them"
        )
    if not batch.min_size <= size <= batch.max_size:
        raise InvalidRequest(
            f"options.global_batch_size {size}, the batch it starts with, lies outside options.batch "
            f"({batch.min_size} to {batch.max_size}); start with {batch.min_size}"
        )
    if batch.max_local_size is not None:
        if batch.min_local_size > batch.max_local_size:
            raise InvalidRequest(
                f"options.batch.min_local_size {batch.min_local_size} is above max_local_size {batch.max_local_size}; "
                "lower it"
            )
        most = batch.max_local_size * MAX_VIRTUAL_SHARDS
        if batch.max_size > most:
            raise InvalidRequest(
                f"options.batch.max_size {batch.max_size} in parts of at most {batch.max_local_size} samples makes "
                f"more than {MAX_VIRTUAL_SHARDS} parts; use a max_size of at most {most}"
            )
    if batch.min_local_size * options.min_workers > batch.max_size:
        raise InvalidRequest(
            f"{options.min_workers} workers with at least {batch.min_local_size} samples each are more than "
            f"options.batch.max_size {batch.max_size}; lower min_workers or min_local_size"
        )


def check_service(service: ServiceIn) -> None:
    """Raise InvalidRequest unless what the fields say together makes sense."""
    options = service.options
    if options.min_replicas > options.max_replicas:
        raise InvalidRequest(
            f"options.min_replicas {options.min_replicas} is above options.max_replicas {options.max_replicas}; "
            "raise max_replicas or lower min_replicas"
        )


def _sentence(detail: ErrorDetails, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in detail["loc"])[:200] or "the body"
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            known = ", ".join(_fields_at(model, detail["loc"][:-1]))
            return f"{where} is not a known field; the fields here are {known or 'none'}"
        case "missing":
            return f"{where} is missing; send it"
        case "greater_than" | "greater_than_equal" | "less_than_equal":
            bound = next(iter(context.values()))
            word = {"greater_than": "above", "greater_than_equal": "at least"}.get(detail["type"], "at most")
            return f"{where} must be {word} {bound:,}, got {_short(detail['input'])}"
        case "literal_error":
            return f"{where} must be {context['expected']}, got {_short(detail['input'])}"
        case "string_too_long" | "too_long":
            limit = context["max_length"]
            unit = "characters" if detail["type"] == "string_too_long" else "entries"
            return f"{where} is too long; at most {limit} {unit} are possible"
        case _:
            sentence = detail["msg"].removeprefix("Input should be ")
            return f"{where} must be {sentence}, got {_short(detail['input'])}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields_at(model: type[BaseModel], where: tuple[int | str, ...]) -> list[str]:
    """The names of the fields that the object at `where` may have."""
    current: Any = model
    for part in where:
        fields = getattr(current, "model_fields", {})
        if part not in fields:
            return []
        annotation = fields[part].annotation
        current = next((a for a in get_args(annotation) if hasattr(a, "model_fields")), annotation)
    return list(getattr(current, "model_fields", {}))
