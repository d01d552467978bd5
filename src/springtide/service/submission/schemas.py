"""The bodies that the REST API takes: strict models with bounds, and the sentences that refuse other bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import pydantic
from pydantic import BaseModel, Field
from pydantic_core import ErrorDetails

from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import Where
from springtide.core.options.packages import check_interpreter, check_requirements
from springtide.core.options.rules import JOB_RULES, SERVICE_RULES, check_rules
from springtide.core.options.variables import check_variables
from springtide.core.options.words import JOB_WORDS, SERVICE_WORDS
from springtide.core.quantities import validate_name
from springtide.core.workload import MAX_VIRTUAL_SHARDS, AdaptiveBatch, Library
from springtide.service.submission.option_models import (
    NAME_PATTERN,
    JobChangeIn,
    JobOptionsIn,
    LayerProfileIn,
    ParamName,
    RequestModel,
    ServiceOptionsIn,
    ShortText,
    checked_values,
)
from springtide.service.submission.problems import Malformed
from springtide.storage.folders.tree import MAX_FILES as MAX_FOLDER_FILES

MAX_SOURCE_BYTES = 1024 * 1024
MAX_WORKERS = MAX_VIRTUAL_SHARDS
# An id is the name with a dash and up to six digits, and must itself be a name.
MAX_JOB_NAME_CHARS = 56
MAX_ARGS = 256
MAX_FILES = 256
MAX_PATH_CHARS = 240
_FILENAME_PATTERN = r"^[A-Za-z0-9_](\.?[A-Za-z0-9_-])*\.py$"

ModelT = TypeVar("ModelT", bound=BaseModel)
FileName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127})*$", max_length=MAX_PATH_CHARS
    ),
]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]


class SourceIn(RequestModel):
    """A snapshot of the user's source file, and which object of it is meant."""

    filename: str = Field(
        max_length=128,
        description="the file's name, without folders",
        examples=["digits.py"],
        json_schema_extra={"pattern": _FILENAME_PATTERN, "maxLength": 103},
    )
    text: str = Field(
        description="the whole file, Python, at most 1 MiB",
        examples=["def fit(ctx):\n    ...\n"],
        json_schema_extra={"format": "python", "minLength": 1},
    )
    object_name: str = Field(
        default="",
        max_length=128,
        description="the function or class; a script has none",
        examples=["fit"],
        json_schema_extra={"format": "python-name"},
    )
    args: tuple[Annotated[ShortText, Field(json_schema_extra={"pattern": r"^[^\x00]*$"})], ...] = Field(
        default=(), max_length=MAX_ARGS, description="command line of a script"
    )
    import_root: str = Field(
        default="",
        max_length=4096,
        description="directory of the platform's machine to import neighbours from: an absolute path, or empty",
        json_schema_extra={"format": "directory"},
    )
    files: dict[FileName, str] = Field(
        default={},
        max_length=MAX_FILES,
        description="further files beside it, by name or path (pkg/model.py): text, all together at most 1 MiB",
    )


class FolderIn(RequestModel):
    """The folder that the file is in, of which the workload gets a copy; its contents were sent to /v1/contents."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="of the list of its files, which is a content, too")
    path: str = Field(min_length=1, max_length=512, description="the file's path in it", examples=["pkg/digits.py"])
    directory: str = Field(default="", max_length=512, description="where in it the workload works; empty: at its root")
    origin: str = Field(default="", max_length=4096, description="where it was, for people")


class DigestsIn(RequestModel):
    """The body of POST /v1/missing-contents."""

    sha256: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = Field(max_length=MAX_FOLDER_FILES + 1)


class JobSourceIn(SourceIn):
    """The source of a training job: a function that takes a TrainContext, or a whole script."""

    kind: Literal["function", "script"] = "function"
    folder: FolderIn | None = None
    library: Library = Field(
        default="",
        description="the library that runs the loop of a script, which is then resized in place; springtide: the "
        "script calls springtide.adopt(); empty: a plain script, which has one number of workers",
    )


class ServiceSourceIn(SourceIn):
    """The source of a service: a class with `load` and `predict`."""

    kind: Literal["class"] = "class"
    folder: FolderIn | None = None


class ContainerIn(RequestModel):
    """The containers of a workload's pods, on Kubernetes; what is left out is as the platform sets it."""

    namespace: ObjectName | None = Field(default=None, description="where its object and its pods are")
    image: str = Field(default="", max_length=1024)
    cpu: str = Field(default="", max_length=32, description="cores that each pod is limited to", examples=["500m"])
    memory: str = Field(default="", max_length=32, description="main memory of each pod", examples=["2Gi"])
    service_account: ObjectName | None = None
    environment: dict[ParamName, ShortText] = Field(default={}, max_length=256)
    secrets: tuple[ObjectName, ...] = Field(
        default=(), max_length=64, description="Secrets whose values become environment variables"
    )


class JobIn(RequestModel):
    """The body of POST /v1/jobs."""

    name: str = Field(
        max_length=128,
        description="1 to 56 of a-z 0-9 . _ -",
        examples=["digits"],
        json_schema_extra={"pattern": NAME_PATTERN, "maxLength": MAX_JOB_NAME_CHARS},
    )
    source: JobSourceIn
    options: JobOptionsIn = JobOptionsIn()
    container: ContainerIn | None = None


class QuoteIn(JobIn):
    """The body of POST /v1/quote: that of a submission, which may have a layer profile for any place."""


class ResumeIn(RequestModel):
    """The body of POST /v1/jobs/{id}/resume, where there is one."""

    budget_usd: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        default=None, description="the budget from now on, of all the job has cost and will"
    )


class MoveIn(RequestModel):
    """The body of POST /v1/jobs/{id}/move and of the quote for it."""

    to: Literal["functions"] = "functions"
    layer_profile: LayerProfileIn | None = Field(
        default=None, description="what `springtide profile FILE --layers` takes; else the one that came with the job"
    )


class ReleaseIn(RequestModel):
    """How a new revision of a service that answers gets its requests."""

    canary: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = Field(
        default=0.0, description="the fraction of the requests that it gets first; 0: all as soon as it is ready"
    )
    watch: str = Field(
        default="",
        max_length=256,
        description="rules that its requests are held to while it is a canary: p99<200ms,errors<1%",
    )
    watch_for_s: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] = Field(
        default=600.0, description="after so long as a canary it gets all requests; 0: stays until its owner decides"
    )
    when_full: Literal["borrow", "stop-first", "refuse"] = Field(
        default="borrow",
        description="where no device is free beside the present revision: wait for one that others can give up, stop "
        "replicas of the present one first, or refuse",
    )


class RollbackIn(RequestModel):
    """The body of POST /v1/services/{name}/rollback."""

    revision: int | None = Field(default=None, ge=1, description="a retired one; null: the one before the present")
    release: ReleaseIn = ReleaseIn()


class ApiKeyIn(RequestModel):
    """The body of POST /v1/keys."""

    name: str = Field(pattern=NAME_PATTERN, max_length=63, examples=["shop"])
    services: tuple[Annotated[str, Field(pattern=NAME_PATTERN, max_length=63)], ...] | None = Field(
        default=None, min_length=1, max_length=64, description="names of services that it may call; null: all"
    )
    rate_per_s: float | None = Field(default=None, ge=0.001, le=1e6, description="requests a second; null: any number")
    expires_in_s: float | None = Field(default=None, ge=1.0, le=1e9, description="null: never")


class ServiceIn(RequestModel):
    """The body of PUT /v1/services/{name}."""

    source: ServiceSourceIn
    options: ServiceOptionsIn = ServiceOptionsIn()
    container: ContainerIn | None = None
    release: ReleaseIn = ReleaseIn()


class ScaleIn(RequestModel):
    """The body of POST /v1/workloads/{id}/scale: inclusive bounds."""

    minimum: int = Field(ge=0, le=MAX_WORKERS, description="at most maximum; of a job at least 1")
    maximum: int = Field(ge=1, le=MAX_WORKERS)


class ShutdownIn(RequestModel):
    """The body of POST /v1/shutdown."""

    stop_workers: bool = True


class NothingIn(RequestModel):
    """The body of a request that takes none."""


class ProblemDetail(RequestModel):
    """What is wrong, and what would do."""

    code: str
    message: str


class Problem(RequestModel):
    """How every error is answered."""

    error: ProblemDetail


REQUEST_MODELS: tuple[type[BaseModel], ...] = (
    JobIn,
    QuoteIn,
    DigestsIn,
    JobChangeIn,
    MoveIn,
    ResumeIn,
    ServiceIn,
    RollbackIn,
    ScaleIn,
    ShutdownIn,
    ApiKeyIn,
    Problem,
)


def parse_body(body: bytes, model: type[ModelT]) -> ModelT:
    """Decode and check a body. Raises Malformed (not JSON at all) or InvalidRequest (one sentence for each defect)."""
    try:
        # msgspec refuses what pydantic's reader lets through: NaN and infinities, half surrogates, bad UTF-8.
        body = msgspec.json.encode(with_whole_numbers(msgspec.json.decode(body)))
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


def with_whole_numbers(value: Any) -> Any:
    """The decoded JSON with 190.0 as 190: JSON knows no difference, the models do. Raises RecursionError."""
    match value:
        case float() if value.is_integer() and abs(value) < 2**63:
            return int(value)
        case dict():
            return {key: with_whole_numbers(item) for key, item in value.items()}
        case list():
            return [with_whole_numbers(item) for item in value]
    return value


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
    batch = options.batch
    if batch is not None and job.source.kind == "script":
        raise InvalidRequest("a script's batch is its own; leave out options.batch, or hand over a training function")
    if job.source.library and job.source.kind != "script":
        raise InvalidRequest("source.library is of scripts; leave it out, or send source.kind script")
    if job.source.library not in ("", "springtide") and options.num_virtual_shards is not None:
        raise InvalidRequest(
            f"the sums of a {job.source.library} program are those of its workers, and cannot be exact; leave out "
            "options.num_virtual_shards"
        )
    if batch is not None and batch.min_size > batch.max_size:
        raise InvalidRequest(
            f"options.batch.min_size {batch.min_size} is above options.batch.max_size {batch.max_size}; swap them"
        )
    _check_environment(options)
    check_rules(JOB_RULES, checked_values(options), JOB_WORDS["rest"])


def placed(job: JobIn, on: Where) -> JobIn:
    """The same request for one place: machines are sent no profile of layers."""
    changes = {"on": on} if on == "functions" else {"on": on, "layer_profile": None}
    return job.model_copy(update={"options": job.options.model_copy(update=changes)})


def adaptive_batch(options: JobOptionsIn) -> AdaptiveBatch | None:
    """The bounds of the batch as a job carries them."""
    return None if options.batch is None else AdaptiveBatch(**options.batch.model_dump())


def check_service(service: ServiceIn) -> None:
    """Raise InvalidRequest unless what the fields say together makes sense."""
    options = service.options
    if options.min_replicas > options.max_replicas:
        raise InvalidRequest(
            f"options.min_replicas {options.min_replicas} is above options.max_replicas {options.max_replicas}; "
            "raise max_replicas or lower min_replicas"
        )
    _check_environment(options)
    values = {"gpu": options.devices_each, "share": options.share, "env": options.env, "secrets": options.secrets}
    check_rules(SERVICE_RULES, values, SERVICE_WORDS["rest"])


def _check_environment(options: JobOptionsIn | ServiceOptionsIn) -> None:
    check_variables(options.env, "options.env")
    check_variables(options.secrets, "options.secrets")
    check_requirements(options.requirements, "options.requirements")
    check_interpreter(options.python, "options.python")


def _sentence(detail: ErrorDetails, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in detail["loc"])[:200] or "the body"
    context = detail.get("ctx", {})
    # Values of variables may be private, and sentences are told and logged.
    given = "its value" if {"env", "secrets"} & set(detail["loc"]) else _short(detail["input"])
    match detail["type"]:
        case "extra_forbidden":
            known = ", ".join(_fields_at(model, detail["loc"][:-1]))
            return f"{where} is not a known field; the fields here are {known or 'none'}"
        case "missing":
            return f"{where} is missing; send it"
        case "greater_than" | "greater_than_equal" | "less_than_equal":
            bound = next(iter(context.values()))
            word = {"greater_than": "above", "greater_than_equal": "at least"}.get(detail["type"], "at most")
            return f"{where} must be {word} {bound:,}, got {given}"
        case "literal_error":
            return f"{where} must be {context['expected']}, got {given}"
        case "string_too_long" | "too_long":
            limit = context["max_length"]
            unit = "characters" if detail["type"] == "string_too_long" else "entries"
            return f"{where} is too long; at most {limit} {unit} are possible"
        case _:
            sentence = detail["msg"].removeprefix("Input should be ")
            return f"{where} must be {sentence}, got {given}"


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
