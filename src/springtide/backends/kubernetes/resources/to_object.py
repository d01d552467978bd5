"""Turns a request in the shape of the REST API into the object that represents it in a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from springtide.backends.kubernetes.client.kinds import Object
from springtide.backends.kubernetes.resources.definitions import API_VERSION, INFERENCE_KIND, TRAINING_KIND
from springtide.backends.kubernetes.resources.option_fields import bounds_text, plain, written_options
from springtide.core.errors import InvalidRequest
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.option import inner_fields
from springtide.core.options.rules import NO_PARTS_IN_PODS
from springtide.core.options.services import SERVICE_OPTIONS

Asked = Mapping[str, Any]


def training_function(name: str, namespace: str, source: Asked, options: Asked, container: Asked) -> Object:
    """The object of a job: `source` and `options` are those of POST /v1/jobs, `container` its container settings."""
    spec: dict[str, Any] = {"source": _source(source, "function")}
    if source.get("args"):
        spec["source"]["args"] = list(source["args"])
    # The REST API's default is one worker; the object's is as many as possible.
    spec["workers"] = bounds_text(options.get("min_workers", 1), options.get("max_workers", 1))
    spec |= written_options(JOB_OPTIONS, options) | _batch(options) | _share(options) | _container(container)
    if options.get("on") == "functions":
        spec["functions"] = written_options(JOB_OPTIONS, options, "functions")
    return _object(TRAINING_KIND, name, namespace, spec)


def inference_function(name: str, namespace: str, source: Asked, options: Asked, container: Asked) -> Object:
    """The object of a service: `source` and `options` are those of PUT /v1/services/NAME. Raises InvalidRequest."""
    if options.get("devices_each", 1) > 1:
        raise InvalidRequest(NO_PARTS_IN_PODS)
    spec: dict[str, Any] = {"source": _source(source, "class")}
    spec["scale"] = bounds_text(options.get("min_replicas", 0), options.get("max_replicas", 1))
    spec |= written_options(SERVICE_OPTIONS, options) | _share(options) | _container(container)
    return _object(INFERENCE_KIND, name, namespace, spec)


def _object(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> Object:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def _source(source: Asked, word: str) -> dict[str, Any]:
    named = {word: source["object_name"]} if source.get("object_name") else {}
    files = {source["filename"]: source["text"], **source.get("files", {})}
    folder = {name: value for name, value in (source.get("folder") or {}).items() if value}
    return {**named, "file": source["filename"], "files": files, **({"folder": folder} if folder else {})}


def _batch(options: Asked) -> dict[str, Any]:
    size, batch = options.get("global_batch_size", 32), options.get("batch")
    if batch is None:
        return {"globalBatch": size}
    spec: dict[str, Any] = {"globalBatch": bounds_text(batch["min_size"], batch["max_size"])}
    if size != batch["min_size"]:
        spec["initialBatch"] = size
    if batch["min_size"] == batch["max_size"]:
        return spec
    inner = inner_fields(JOB_OPTIONS, "batch").items()
    spec |= {ours: batch[theirs] for ours, theirs in inner if batch.get(theirs) is not None}
    return spec | ({"length": "progress"} if options.get("length_unit") == "progress" else {})


def _share(options: Asked) -> dict[str, Any]:
    share = options.get("share")
    if share is None:
        return {}
    request, limit = plain(share["request"]), share.get("limit")
    spec = {"share": request if limit is None else f"{request}..{plain(limit)}"}
    return spec | ({"deviceMemory": f"{share['memory_mb']}MB"} if share.get("memory_mb") else {})


def _container(container: Asked) -> dict[str, Any]:
    resources = {name: container[name] for name in ("cpu", "memory") if container.get(name)}
    found = {
        "image": container.get("image"),
        "env": [{"name": name, "value": value} for name, value in container.get("environment", {}).items()],
        "resources": resources,
        "secrets": list(container.get("secrets", ())),
        "serviceAccountName": container.get("service_account"),
    }
    said = {name: value for name, value in found.items() if value}
    return {"container": said} if said else {}
