"""A request to the platform, in the shape of its REST API, as the object that stands for it in a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from springtide.backends.kubernetes.client.kinds import Object
from springtide.backends.kubernetes.resources.definitions import API_VERSION, INFERENCE_KIND, TRAINING_KIND

Asked = Mapping[str, Any]
_COUNTS = {
    "num_epochs": "epochs",
    "seed": "seed",
    "max_restarts": "retries",
    "num_samples": "samples",
    "num_virtual_shards": "virtualShards",
    "study": "study",
    "step_profile": "stepProfile",
    "profile_steps_per_s": "speeds",
}
_SERVICE_COUNTS = {
    "max_batch_size": "maxBatch",
    "max_queue": "maxQueue",
    "target_in_flight": "inFlight",
    "capacity_per_s": "capacity",
}
_BATCH = {"min_local_size": "minLocalBatch", "max_local_size": "maxLocalBatch", "learning_rate": "learningRate"}
_JOB_TIMES = {"deadline_s": "deadline", "grace_s": "grace", "checkpoint_interval_s": "checkpointEvery"}
_SERVICE_TIMES = {"slo_s": "slo", "batch_wait_s": "batchWait", "idle_s": "idle", "grace_s": "grace"}


def training_function(name: str, namespace: str, source: Asked, options: Asked, container: Asked) -> Object:
    """The object of a job: `source` and `options` are those of POST /v1/jobs, `container` its container settings."""
    spec: dict[str, Any] = {"source": _source(source, "function")}
    if source.get("args"):
        spec["source"]["args"] = list(source["args"])
    # The API's own default is one worker; the object's is as many as there are.
    spec["workers"] = _span(options.get("min_workers", 1), options.get("max_workers", 1))
    spec |= {theirs: options[ours] for ours, theirs in _COUNTS.items() if options.get(ours) not in (None, "", {})}
    spec |= _times(options, _JOB_TIMES)
    if options.get("budget_usd") is not None:
        spec["budget"] = f"${plain(options['budget_usd'])}"
    spec |= {theirs: True for ours, theirs in (("is_soft", "soft"), ("waits", "wait")) if options.get(ours)}
    spec |= _batch(options) | _shared(options, container)
    if options.get("on") == "functions":
        spec["functions"] = _functions(options)
    return _object(TRAINING_KIND, name, namespace, spec)


def inference_function(name: str, namespace: str, source: Asked, options: Asked, container: Asked) -> Object:
    """The object of a service: `source` and `options` are those of PUT /v1/services/NAME."""
    spec: dict[str, Any] = {"source": _source(source, "class")}
    spec["scale"] = _span(options.get("min_replicas", 0), options.get("max_replicas", 1))
    spec |= {theirs: options[ours] for ours, theirs in _SERVICE_COUNTS.items() if options.get(ours) is not None}
    if options.get("batch_wait_s") == 0:
        # No word means nothing at all; this is as good.
        spec["batchWait"] = "0.001ms"
    spec |= _times(options, _SERVICE_TIMES) | _shared(options, container)
    return _object(INFERENCE_KIND, name, namespace, spec)


def plain(amount: float) -> str:
    """A number as people write it: no exponent, no zeros at the end."""
    return f"{amount:.9f}".rstrip("0").rstrip(".")


def _object(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> Object:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def _source(source: Asked, word: str) -> dict[str, Any]:
    named = {word: source["object_name"]} if source.get("object_name") else {}
    files = {source["filename"]: source["text"], **source.get("files", {})}
    return {**named, "file": source["filename"], "files": files}


def _span(low: int, high: int) -> int | str:
    return low if low == high else f"{low}..{high}"


def _times(options: Asked, words: Mapping[str, str]) -> dict[str, str]:
    found = {theirs: options.get(ours) for ours, theirs in words.items()}
    return {word: _time(float(value)) for word, value in found.items() if value}


def _time(seconds: float) -> str:
    return f"{plain(seconds)}s" if seconds >= 1 else f"{plain(seconds * 1000)}ms"


def _batch(options: Asked) -> dict[str, Any]:
    size, batch = options.get("global_batch_size", 32), options.get("batch")
    if batch is None:
        return {"globalBatch": size}
    spec: dict[str, Any] = {"globalBatch": _span(batch["min_size"], batch["max_size"])}
    if size != batch["min_size"]:
        spec["initialBatch"] = size
    if batch["min_size"] == batch["max_size"]:
        return spec
    named = (
        ("min_local_size", "minLocalBatch"),
        ("max_local_size", "maxLocalBatch"),
        ("learning_rate", "learningRate"),
    )
    spec |= {theirs: batch[ours] for ours, theirs in named if batch.get(ours) is not None}
    return spec | ({"length": "progress"} if options.get("length_unit") == "progress" else {})


def _shared(options: Asked, container: Asked) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if options.get("params"):
        spec["params"] = dict(options["params"])
    share = options.get("share")
    if share is not None:
        limit = share.get("limit")
        spec["share"] = plain(share["request"]) if limit is None else f"{plain(share['request'])}..{plain(limit)}"
        if share.get("memory_mb"):
            spec["deviceMemory"] = f"{share['memory_mb']}MB"
    asked = _container(container)
    return spec | ({"container": asked} if asked else {})


def _container(container: Asked) -> dict[str, Any]:
    resources = {name: container[name] for name in ("cpu", "memory") if container.get(name)}
    found = {
        "image": container.get("image"),
        "env": [{"name": name, "value": value} for name, value in container.get("environment", {}).items()],
        "resources": resources,
        "secrets": list(container.get("secrets", ())),
        "serviceAccountName": container.get("service_account"),
    }
    return {name: value for name, value in found.items() if value}


def _functions(options: Asked) -> dict[str, Any]:
    named = (("layer_profile", "layerProfile"), ("is_fastest", "fastest"), ("search", "search"), ("stream", "stream"))
    spec = {theirs: options[ours] for ours, theirs in named if options.get(ours) not in (None, "", False)}
    if options.get("search") is False:
        spec["search"] = False
    if options.get("function_workers"):
        spec["workers"] = _span(*options["function_workers"])
    if options.get("batch_schedule"):
        spec["batchSchedule"] = [
            {"fromEpoch": phase["from_epoch"], "globalBatch": phase["global_batch_size"]}
            for phase in options["batch_schedule"]
        ]
    return spec
