"""The two kinds of objects that the platform brings to a cluster, as data: TrainingFunction and InferenceFunction."""

from __future__ import annotations

from typing import Any

from springtide.backends.kubernetes.resources import schema
from springtide.backends.kubernetes.resources.option_fields import option_properties
from springtide.backends.kubernetes.resources.schema import Schema
from springtide.backends.kubernetes.resources.status_schema import (
    inference_columns,
    inference_status,
    training_columns,
    training_status,
    unseen_status,
)
from springtide.backends.kubernetes.settings import GROUP, VERSION
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.core.workload import MAX_VIRTUAL_SHARDS

API_VERSION = f"{GROUP}/{VERSION}"
TRAINING_KIND = "TrainingFunction"
INFERENCE_KIND = "InferenceFunction"
TRAINING_PLURAL = "trainingfunctions"
INFERENCE_PLURAL = "inferencefunctions"
# A job's id is its name with a dash and up to six digits, and must itself be a name.
MAX_TRAINING_NAME = 56
MAX_INFERENCE_NAME = 63


def custom_resource_definitions() -> tuple[dict[str, Any], ...]:
    """Both custom resource definitions (apiextensions.k8s.io/v1)."""
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
    """The schema of the `spec` of objects of that kind. Raises KeyError for another kind than these two."""
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
            "status": {**status, "default": unseen_status()},
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
            **option_properties(JOB_OPTIONS),
            "replicas": schema.whole(
                "At most so many workers now, 0: as workers says. What kubectl scale sets.", 0, MAX_VIRTUAL_SHARDS, 0
            ),
            "suspend": schema.flag("While true it holds nothing: it commits a checkpoint and waits."),
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
            "container": schema.container(),
            "functions": schema.record(
                "Run it on the platform's function service instead of pods.",
                option_properties(JOB_OPTIONS, "functions"),
            ),
        },
        ("source",),
    )


def _inference_spec() -> Schema:
    served = schema.matching(
        "The class with load and predict.", "the name of a class like Sentiment", "[A-Za-z_][A-Za-z0-9_]*"
    )
    return schema.record(
        "An inference class, and what is wanted of it. It answers at /f/NAME of the platform's gateway.",
        {
            "source": schema.source("class", {"class": served}, ("class",)),
            **option_properties(SERVICE_OPTIONS),
            "replicas": schema.whole(
                "Exactly so many whatever the load, 0: as scale says. What kubectl scale sets.",
                0,
                MAX_VIRTUAL_SHARDS,
                0,
            ),
            "suspend": schema.flag("While true it is taken away: nothing answers at its address."),
            "container": schema.container(),
        },
        ("source",),
    )
