"""The spec of an object as a request to the platform, in the shape of its REST API. The way back is to_object.py.

What a cluster's schema cannot say of a spec (two fields that do not go together) is said here, with the mend.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from springtide.backends.kubernetes.client.kinds import TRAINING_FUNCTION, Object
from springtide.backends.kubernetes.resources.option_fields import checked_values, read_options
from springtide.backends.kubernetes.settings import GROUP
from springtide.core.containers import ContainerSettings
from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.option import inner_fields
from springtide.core.options.rules import FILLED_RULES, JOB_RULES, PLACE_RULES, SERVICE_RULES, check_rules
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.core.options.words import JOB_WORDS, SERVICE_WORDS
from springtide.core.quantities import parse_duration_s, parse_fractions, parse_range, parse_size_bytes
from springtide.core.shares import make_share
from springtide.core.workload import MAX_VIRTUAL_SHARDS

# The workload's id, if that is not the object's own name; and the digest of the request that created it.
NAME_ANNOTATION = f"{GROUP}/name"
REQUEST_ANNOTATION = f"{GROUP}/request"
# In objects of earlier releases, the folder of a job: `source.folder` of a request, as JSON.
FOLDER_ANNOTATION = f"{GROUP}/folder"
# A cluster stores objects of at most 1.5 MB, including its own overhead.
MAX_OBJECT_SOURCE_BYTES = 900_000
# Of a folder whose archive is in ConfigMaps: the most of these, the bytes of one, and its key.
MAX_FOLDER_PARTS = 16
FOLDER_PART_BYTES = 900_000
PART_KEY = "part"
Spec = Mapping[str, Any]
Request = dict[str, Any]
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127})*", re.ASCII)
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_MB = 1_000_000
_DIGEST = "sha256:"
# A deadline that passed while the platform was down is asked for all the same: the policy names one it would accept.
_LEAST_DEADLINE_S = 1.0


def check_kept(asked: Object, made: Object) -> None:
    """Raise InvalidRequest if a cluster has dropped parts of the spec that it was asked to keep.

    It does so without a word with fields that its definition of the kind does not have.
    """
    dropped = [name for name, value in asked["spec"].items() if value and name not in made["spec"]]
    if "folder" in asked["spec"].get("source", {}) and "folder" not in made["spec"].get("source", {}):
        dropped.append("source.folder")
    if dropped:
        raise InvalidRequest(
            f"this cluster's definition of {asked['kind']} is of an earlier release and drops spec.{dropped[0]}; bring "
            "it up to date: springtide k8s crds | kubectl apply -f -"
        )


def check_job_spec(spec: Spec, devices: int) -> None:
    """Raise InvalidRequest, in the words of a spec, for options of a TrainingFunction that do not go together."""
    workers = worker_bounds({**spec, "replicas": None}, devices)
    values = {**checked_values(JOB_OPTIONS, spec), "workers": workers}
    check_rules((*JOB_RULES, *PLACE_RULES, *FILLED_RULES), values, JOB_WORDS["object"])


def check_service_spec(spec: Spec) -> None:
    """Raise InvalidRequest, in the words of a spec, for options of an InferenceFunction that do not go together."""
    check_rules(SERVICE_RULES, checked_values(SERVICE_OPTIONS, spec), SERVICE_WORDS["object"])


def job_request(
    name: str, spec: Spec, files: Mapping[str, str], *, created: datetime, now: datetime, devices: int
) -> Request:
    """The body of POST /v1/jobs that a TrainingFunction stands for. Raises InvalidRequest.

    `files` are those of its source, wherever they are kept. A deadline counts from `created`; `devices` is what
    "auto" may grow to.
    """
    source = spec["source"]
    function = source.get("function", "")
    asked = _source(source, files, "function")
    asked |= {"kind": "function" if function else "script", "object_name": function}
    if function and source.get("args"):
        raise InvalidRequest("spec.source.args are for scripts, and spec.source.function is named; use spec.params")
    asked["args"] = [argument or "" for argument in source.get("args", ())]
    if not function and (spec.get("workers") == "auto" or len(set(worker_bounds(spec, devices))) > 1):
        raise InvalidRequest(
            "a script cannot be resized, so spec.workers is one number, like 2; a function may have 1..8"
        )
    low, high = worker_bounds({**spec, "replicas": None}, devices)
    options: Request = {"min_workers": low, "max_workers": high}
    options |= read_options(JOB_OPTIONS, spec, lambda deadline: deadline_s(deadline, created, now))
    options |= _batch(spec) | _share(spec) | ({"on": "functions"} if "functions" in spec else {})
    return {"name": name, "source": asked, "options": options}


def service_request(spec: Spec, files: Mapping[str, str]) -> Request:
    """The body of PUT /v1/services/NAME that an InferenceFunction stands for. Raises InvalidRequest."""
    asked = _source(spec["source"], files, "class") | {"kind": "class", "object_name": spec["source"]["class"]}
    low, high = replica_bounds(spec)
    options: Request = {"min_replicas": low, "max_replicas": high}
    options |= read_options(SERVICE_OPTIONS, spec) | _share(spec)
    return {"source": asked, "options": options}


def worker_bounds(spec: Spec, devices: int) -> tuple[int, int]:
    """How many workers a TrainingFunction may have now; `replicas` limits the maximum. Raises InvalidRequest."""
    asked = spec.get("workers", "auto" if spec["source"].get("function") else 1)
    if asked == "auto":
        low, high = 1, max(1, min(devices, spec.get("virtualShards") or MAX_VIRTUAL_SHARDS))
    else:
        low, high = parse_range(asked, "spec.workers")
    most = spec.get("replicas")
    return (low, high) if not most else (min(low, most), min(high, most))


def replica_bounds(spec: Spec) -> tuple[int, int]:
    """How many replicas an InferenceFunction may have now: exactly `replicas` if any. Raises InvalidRequest."""
    low, high = parse_range(spec.get("scale", "0..1"), "spec.scale", lowest=0)
    return (spec["replicas"], spec["replicas"]) if spec.get("replicas") else (low, high)


def ttl_s(obj: Object, usual_s: float | None = None) -> float | None:
    """For how long a TrainingFunction stays after its end, in seconds, `usual_s` if it does not say; None: for good."""
    kept_s = obj["spec"].get("ttlSecondsAfterFinished")
    return usual_s if kept_s is None else float(kept_s)


def keeps_artifacts(obj: Object) -> bool:
    """Whether the job's artifacts stay in the object store when a TrainingFunction expires."""
    return bool(obj["spec"].get("ttlKeeps", "artifacts") == "artifacts")


def container_settings(obj: Object) -> ContainerSettings:
    """The container settings and the owner of the pods of an object's workload. Raises InvalidRequest.

    A job remembers what its object said; a service that has changed is deployed anew.
    """
    metadata, asked = obj["metadata"], obj["spec"].get("container", {})
    resources = asked.get("resources", {})
    memory = resources.get("memory")
    return ContainerSettings(
        namespace=metadata.get("namespace", ""),
        image=asked.get("image", ""),
        cpu=str(resources.get("cpu", "")),
        memory="" if memory is None else str(parse_size_bytes(memory, "spec.container.resources.memory")),
        service_account=asked.get("serviceAccountName", ""),
        environment={variable["name"]: variable["value"] or "" for variable in asked.get("env", ())},
        secrets=tuple(asked.get("secrets", ())),
        owner_kind=obj["kind"],
        owner_name=metadata["name"],
        owner_uid=metadata["uid"],
        accepted=parts_of(obj) if obj["kind"] == TRAINING_FUNCTION.name else {},
    )


def trimmed(obj: Object) -> Object:
    """The object as a cache holds it: of the texts of its source only digests, of its status nothing but that."""
    metadata = obj["metadata"]
    metadata.pop("managedFields", None)
    metadata.get("annotations", {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    files = obj.get("spec", {}).get("source", {}).get("files")
    if files:
        obj["spec"]["source"]["files"] = {name: _digest_of_text(text) for name, text in files.items()}
    return obj


def parts_of(obj: Object) -> dict[str, str]:
    """A digest of each part of the spec, the same for an object and for what a cache holds of it."""
    spec = copy.deepcopy(obj["spec"])
    files = spec.get("source", {}).get("files")
    if files:
        spec["source"]["files"] = {name: _digest_of_text(text) for name, text in files.items()}
    return {name: _digest(msgspec.json.encode(value, order="deterministic")) for name, value in sorted(spec.items())}


def workload_name(obj: Object) -> str:
    """The id of an object's workload."""
    name = obj["metadata"].get("annotations", {}).get(NAME_ANNOTATION) or obj["metadata"]["name"]
    assert isinstance(name, str)
    return name


def _digest_of_text(text: str | None) -> str:
    text = text or ""
    return text if text.startswith(_DIGEST) and len(text) == len(_DIGEST) + 16 else _DIGEST + _digest(text.encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _source(source: Spec, files: Mapping[str, str], what: str) -> Request:
    for name in files:
        if _PATH.fullmatch(name) is None:
            raise InvalidRequest(f"spec.source.files has {name!r:.80}; name a file like train.py, or pkg/model.py")
    main = source.get("file", "")
    # Files in folders are modules to be imported.
    python = sorted(name for name in files if name.endswith(".py") and "/" not in name)
    if not main:
        if len(python) != 1:
            told = f"it is in one of {', '.join(python)}" if python else "there is no Python file (.py) among them"
            raise InvalidRequest(f"spec.source.file is to say which file holds the {what}: {told}")
        main = python[0]
    if main not in files:
        raise InvalidRequest(f"spec.source.file {main!r} is not among the files: {', '.join(sorted(files)) or 'none'}")
    others = {name: text for name, text in files.items() if name != main}
    folder = {name: value for name, value in source.get("folder", {}).items() if name != "configMaps"}
    sent = {**({"files": others} if others else {}), **({"folder": folder} if folder else {})}
    return {"filename": main, "text": files[main], **sent}


def left_s(value: str | int, submitted: datetime, now: datetime) -> float:
    """Seconds from `now` until the deadline that a job is given while it runs; below 0 once it has passed.

    A time of the clock is the next one. Raises InvalidRequest.
    """
    is_clock = _CLOCK.fullmatch(str(value).strip()) is not None
    return _left_s(value, now if is_clock else submitted, now)


def deadline_s(value: str | int, created: datetime, now: datetime) -> float:
    """Seconds from `now` until a deadline. Raises InvalidRequest."""
    return max(_LEAST_DEADLINE_S, _left_s(value, created, now))


def _left_s(value: str | int, created: datetime, now: datetime) -> float:
    text = str(value).strip()
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        moment = created.astimezone(UTC).replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
        moment += timedelta(days=1 if moment <= created else 0)
    elif "T" in text:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidRequest(f"spec.deadline {text!r:.60} is no moment; write 2030-01-31T18:00:00Z") from None
    else:
        moment = created + timedelta(seconds=parse_duration_s(value, "spec.deadline"))
    return (moment - now).total_seconds()


def _batch(spec: Spec) -> Request:
    if "globalBatch" not in spec:
        return {}
    low, high = parse_range(spec["globalBatch"], "spec.globalBatch")
    size = spec.get("initialBatch", low)
    if low == high:
        return {"global_batch_size": low}
    batch: Request = {"min_size": low, "max_size": high}
    batch |= {theirs: spec[ours] for ours, theirs in inner_fields(JOB_OPTIONS, "batch").items() if ours in spec}
    unit = "progress" if spec.get("length") == "progress" else "samples"
    return {"global_batch_size": size, "batch": batch, "length_unit": unit}


def _share(spec: Spec) -> Request:
    if "share" not in spec:
        return {}
    memory = spec.get("deviceMemory")
    memory_mb = 0 if memory is None else -(-parse_size_bytes(memory, "spec.deviceMemory") // _MB)
    share = make_share(*parse_fractions(spec["share"], "spec.share"), memory_mb)
    return {"share": {"request": share.request, "limit": share.limit, "memory_mb": share.memory_mb}}
