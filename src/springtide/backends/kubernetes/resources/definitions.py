"""The two kinds of objects that the platform brings to a cluster, as data: TrainingFunction and InferenceFunction."""

from __future__ import annotations

from typing import Any, get_args

from springtide.backends.kubernetes.resources import schema
from springtide.backends.kubernetes.resources.schema import Schema
from springtide.backends.kubernetes.resources.status_schema import (
    inference_columns,
    inference_status,
    training_columns,
    training_status,
)
from springtide.backends.kubernetes.settings import GROUP, VERSION
from springtide.core.workload import MAX_VIRTUAL_SHARDS, LearningRateRule

API_VERSION = f"{GROUP}/{VERSION}"
TRAINING_KIND = "TrainingFunction"
INFERENCE_KIND = "InferenceFunction"
TRAINING_PLURAL = "trainingfunctions"
INFERENCE_PLURAL = "inferencefunctions"
# A job's id is its name with a dash and up to six digits, and must itself be a name.
MAX_TRAINING_NAME = 56
MAX_INFERENCE_NAME = 63
_MILLION = 1_000_000


def custom_resource_definitions() -> tuple[dict[str, Any], ...]:
    """Both definitions, as they are applied to a cluster (apiextensions.k8s.io/v1)."""
    training = _definition(
        TRAINING_KIND,
        TRAINING_PLURAL,
        ["tf", "training"],
        MAX_TRAINING_NAME,
        _training_spec(),
        training_status(),
        training_columns(),
    )
    inference = _definition(
        INFERENCE_KIND,
        INFERENCE_PLURAL,
        ["inf", "inference"],
        MAX_INFERENCE_NAME,
        _inference_spec(),
        inference_status(),
        inference_columns(),
    )
    return training, inference


def spec_schema(kind: str) -> Schema:
    """What the `spec` of an object of that kind may say. Raises KeyError for a kind that is none of the two."""
    return {TRAINING_KIND: _training_spec, INFERENCE_KIND: _inference_spec}[kind]()


def _definition(
    kind: str,
    plural: str,
    short: list[str],
    max_name: int,
    spec: Schema,
    status: Schema,
    columns: list[dict[str, Any]],
) -> dict[str, Any]:
    name: Schema = {
        "type": "string",
        "maxLength": max_name,
        "pattern": schema.worded("a name of a-z 0-9 . - that begins with a letter or digit", "[a-z0-9][a-z0-9.-]*"),
    }
    whole_object: Schema = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": spec,
            "status": status,
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "springtide"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": short,
                "categories": ["springtide"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": whole_object},
                    "additionalPrinterColumns": columns,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                }
            ],
        },
    }


def _training_spec() -> Schema:
    function = schema.matching(
        "The training function. Without it the whole file runs as a script under torchrun's variables.",
        "the name of a function like fit",
        "[A-Za-z_][A-Za-z0-9_]*",
    )
    arguments = {"type": "array", "items": schema.may_be_empty(schema.text("An argument.")), "maxItems": 256}
    code = {"function": function, "args": {**arguments, "description": "The command line of a script."}}
    return schema.record(
        "A training function, and what is wanted of it.",
        {
            "source": schema.source("function", code, ()),
            **_goal(),
            **_length(),
            **_batch(),
            "workers": schema.span("How many workers it may have, whenever; auto: up to all there are.", auto=True),
            "replicas": schema.whole(
                "At most so many workers now, 0: as workers says. What kubectl scale sets.", 0, MAX_VIRTUAL_SHARDS, 0
            ),
            "suspend": schema.flag("While true it holds nothing: it commits a checkpoint and waits."),
            "retries": schema.whole("How often it may begin again from a checkpoint after a failure.", 0, 1000),
            "grace": schema.duration("What it is given to save when it has to leave."),
            "checkpointEvery": schema.duration("How often it saves while it runs."),
            **_afterwards(),
            "params": schema.parameters(),
            **_shares("worker"),
            "container": schema.container(),
            **_knowledge(),
            "functions": _functions(),
        },
        ("source",),
    )


def _goal() -> dict[str, Schema]:
    return {
        "deadline": schema.moment("When it must be done."),
        "budget": schema.money("What it may cost, in US dollars."),
        "soft": schema.flag("The deadline is an aim: it runs, late if it must."),
        "wait": schema.flag("Stay in line while the deadline cannot be promised yet."),
    }


def _length() -> dict[str, Schema]:
    return {
        "epochs": schema.whole("Passes over the dataset.", 1, 100_000, 1),
        "length": schema.choice("What epochs count where the batch changes.", "epochs", "progress"),
        "samples": schema.whole("Samples of one epoch, where that is known.", 1, 10**12),
        "seed": schema.whole("Where all chance comes from.", 0, 2**53, 0),
    }


def _batch() -> dict[str, Schema]:
    return {
        "globalBatch": schema.span("Samples of one step over all workers; a range is chosen in.", highest=_MILLION),
        "initialBatch": schema.whole("What a range of globalBatch starts with; else its lower end.", 1, _MILLION),
        "maxLocalBatch": schema.whole("Samples that one worker holds at once.", 1, _MILLION),
        "minLocalBatch": schema.whole("The fewest samples that are worth a worker's pass.", 1, _MILLION),
        "learningRate": schema.choice("How it follows a batch that changes.", *get_args(LearningRateRule)),
        "virtualShards": schema.whole(
            "Into how many parts a batch is cut: a power of two, at least the most workers.", 1, MAX_VIRTUAL_SHARDS
        ),
    }


def _afterwards() -> dict[str, Schema]:
    return {
        "ttlSecondsAfterFinished": schema.whole(
            "So many seconds after its end it goes, with what the object store holds of it. Left out: it stays.",
            0,
            10 * 365 * 86400,
        ),
        "ttlKeeps": schema.choice(
            "What stays in the object store when it goes: artifacts, which are what it made, or nothing.",
            "artifacts",
            "nothing",
        ),
    }


def _knowledge() -> dict[str, Schema]:
    speed = schema.number("Optimizer steps a second.", 1e9)
    return {
        "speeds": {
            "type": "object",
            "description": "Optimizer steps a second by number of workers, where they are known.",
            "additionalProperties": speed,
            "maxProperties": MAX_VIRTUAL_SHARDS,
        },
        "stepProfile": schema.free("The timeline of a step, as springtide profile writes it."),
        "study": schema.text("The search over jobs that it is a trial of.", max_chars=64),
    }


def _functions() -> Schema:
    phase = schema.record(
        "From an epoch on.",
        {
            "fromEpoch": schema.whole("From 0.", 0, 100_000),
            "globalBatch": schema.whole("Samples of one step.", 1, _MILLION),
        },
        ("fromEpoch", "globalBatch"),
    )
    return schema.record(
        "Run it on the platform's function service instead of pods.",
        {
            "layerProfile": schema.free("The model's layers, as springtide profile --layers writes them."),
            "fastest": schema.flag("Time is all that counts, within the budget where there is one."),
            "search": schema.flag("Try numbers of workers and memory sizes while it trains."),
            "workers": schema.span("The bounds of that search.", highest=10_000),
            "batchSchedule": {"type": "array", "items": phase, "maxItems": 1000},
            "stream": schema.text("The growing dataset that it trains on.", max_chars=64),
        },
    )


def _shares(what: str) -> dict[str, Schema]:
    return {
        "share": schema.share(f"What each {what} holds of its device; left out: the whole."),
        "deviceMemory": schema.size("With share: what it holds of the device's memory."),
    }


def _inference_spec() -> Schema:
    served = schema.matching(
        "The class with load and predict.", "the name of a class like Sentiment", "[A-Za-z_][A-Za-z0-9_]*"
    )
    objective = schema.worded(
        "a latency like p99 < 200ms or 200ms", r"\s*([pP]99\s*<=?\s*)?[0-9]+(\.[0-9]+)?\s*(ms|s|m)\s*"
    )
    return schema.record(
        "An inference class, and what is wanted of it. It answers at /f/NAME of the platform's gateway.",
        {
            "source": schema.source("class", {"class": served}, ("class",)),
            "slo": schema.text("The latency to keep: p99 < 200ms.", max_chars=64) | {"pattern": objective},
            "scale": schema.span(
                "Replicas: guaranteed, and at most; 0..4 may sleep. Left out: 0..1.", lowest=0, highest=256
            ),
            "replicas": schema.whole(
                "Exactly so many whatever the load, 0: as scale says. What kubectl scale sets.",
                0,
                MAX_VIRTUAL_SHARDS,
                0,
            ),
            "suspend": schema.flag("While true it is taken away: nothing answers at its address."),
            "maxBatch": schema.whole("Items that may be predicted together.", 1, 4096, 8),
            "batchWait": schema.duration("How long an item waits for others."),
            "maxQueue": schema.whole("Requests that may wait.", 1, _MILLION, 256),
            "inFlight": schema.whole("Requests at once that call for one replica more.", 1, 100_000, 8),
            "idle": schema.duration("How long without requests until it sleeps."),
            "grace": schema.duration("What a replica is given to answer what it has when it has to leave."),
            "capacity": schema.number("Requests a second that one replica answers within the objective.", 1e9),
            "params": schema.parameters(),
            **_shares("replica"),
            "container": schema.container(),
        },
        ("source",),
    )
