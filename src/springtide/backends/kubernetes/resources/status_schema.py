"""The status of TrainingFunctions and InferenceFunctions: its schema, and the types and reasons of its conditions."""

from __future__ import annotations

import enum
from typing import Any

from springtide.backends.kubernetes.resources.schema import Schema, record


class ConditionType(enum.StrEnum):
    """What is told of an object, each with a status of its own.

    ACCEPTED: the platform took the object in. APPLIED: what the object says now is in force. PROMISED: its deadline
    is. RUNNING: a job trains. READY: a service answers. COMPLETE: a job has ended for good. EXPIRED: it is kept for no
    longer; told of those alone that are to go by themselves.
    """

    ACCEPTED = "Accepted"
    APPLIED = "Applied"
    PROMISED = "Promised"
    RUNNING = "Running"
    READY = "Ready"
    COMPLETE = "Complete"
    EXPIRED = "Expired"


class Reason(enum.StrEnum):
    """The reason of a condition, in one word; its message is the sentence."""

    NOT_SEEN = "NotSeen"
    SUBMITTED = "Submitted"
    INVALID_SPEC = "InvalidSpec"
    SOURCE_MISSING = "SourceMissing"
    ENDED_THE_CONTROL_PLANE = "EndedTheControlPlane"
    NAME_TAKEN = "NameTaken"
    REJECTED = "Rejected"
    SUSPENDED = "Suspended"
    PLATFORM_UNAVAILABLE = "PlatformUnavailable"
    IN_FORCE = "InForce"
    CHANGE_REFUSED = "ChangeRefused"
    DEADLINE_PROMISED = "DeadlinePromised"
    NO_DEADLINE = "NoDeadline"
    NOT_PROMISED = "NotPromised"
    WAITING = "Waiting"
    STARTING = "Starting"
    PODS_WAITING = "PodsWaiting"
    TRAINING = "Training"
    STALLED = "Stalled"
    PREEMPTING = "Preempting"
    PAUSED = "Paused"
    ENDED = "Ended"
    REPLICAS_READY = "ReplicasReady"
    SLEEPING = "Sleeping"
    FAILED = "Failed"
    REMOVED = "Removed"
    SUCCEEDED = "Succeeded"
    CANCELLED = "Cancelled"
    UNFINISHED = "Unfinished"
    KEPT = "Kept"
    TIME_OVER = "TimeOver"
    STORE_UNAVAILABLE = "StoreUnavailable"


def _told(description: str) -> Schema:
    return {"type": "string", "description": description}


def _count(description: str) -> Schema:
    return {"type": "integer", "format": "int64", "description": description}


def _amount(description: str) -> Schema:
    return {"type": "number", "description": description}


def unseen_status() -> dict[str, Any]:
    """The status that API servers give an object until a platform writes one."""
    message = (
        "no platform has taken it in: none is running, or none runs workloads of this namespace (`namespaces` in its "
        "settings; springtide k8s check)"
    )
    told = {
        "type": ConditionType.ACCEPTED.value,
        "status": "Unknown",
        "reason": Reason.NOT_SEEN.value,
        "message": message,
        # A default is the same for every object, so it cannot know the time.
        "lastTransitionTime": "1970-01-01T00:00:00Z",
    }
    return {"conditions": [told]}


def _condition() -> Schema:
    return record(
        "One thing that is told of the object.",
        {
            "type": {"type": "string", "enum": [kind.value for kind in ConditionType]},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": {"type": "string", "enum": [reason.value for reason in Reason]},
            "message": {"type": "string", "maxLength": 32768},
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "observedGeneration": {"type": "integer", "format": "int64"},
        },
        ("type", "status", "reason", "lastTransitionTime"),
    )


def _planned() -> Schema:
    return record(
        "Devices that it is to have for a while.",
        {
            "from": {"type": "string", "format": "date-time"},
            "until": {"type": "string", "format": "date-time"},
            "devices": _count("How many."),
        },
    )


def _plan(extra: dict[str, Schema]) -> Schema:
    return record(
        "What the policy decided last, and what it has in mind.",
        {
            "workers": _count("How many it holds a device for."),
            "devices": {"type": "array", "items": {"type": "string"}, "description": "Which, in rank order."},
            "nodes": {"type": "array", "items": {"type": "string"}, "description": "On which machines."},
            "share": _told("What each holds of its device; empty: the whole."),
            "reason": _told("Why it is so, in one sentence."),
            "generation": _count("The job's epoch: it rises with every change of its workers."),
            **extra,
        },
    )


def _shared() -> dict[str, Schema]:
    return {
        "observedGeneration": _count("The newest generation of the object that the platform has seen."),
        "workloadId": _told("What the platform calls it: for springtide status, why and logs."),
        "platform": _told("Which platform took it in."),
        "state": _told("Where it is, in one word."),
        "reason": _told("Why it is there, in one sentence."),
        "replicas": _count("How many workers or replicas there are."),
        "selector": _told("The label selector of its pods."),
        "workers": _told("How many there are, of how many there may be."),
        "cost": _told("What it has cost so far."),
        "costUsd": _amount("The same in US dollars."),
        "slack": _told("What is left of the goal beyond what it needs."),
        "conditions": {
            "type": "array",
            "items": _condition(),
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
        "alternatives": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Changes with which the platform would have accepted what it refused.",
        },
        "pods": {
            "type": "array",
            "items": record(
                "A pod that does not run yet.",
                {"name": {"type": "string"}, "phase": {"type": "string"}, "reason": {"type": "string"}},
            ),
            "description": "Pods that do not run, and why.",
        },
        "accepted": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Digests of the parts of the spec as they are in force.",
        },
    }


def training_status() -> Schema:
    """The schema of a TrainingFunction's status."""
    planned: dict[str, Schema] = {
        "globalBatch": _count("Samples of one step."),
        "expectedStart": {"type": "string", "format": "date-time"},
        "expectedFinish": {"type": "string", "format": "date-time"},
        "schedule": {"type": "array", "items": _planned(), "description": "What is planned for the time to come."},
    }
    return record(
        "Where it is. Written by the platform.",
        {
            **_shared(),
            "progress": _told("How much of it is done."),
            "step": _count("Optimizer steps done."),
            "totalSteps": _count("Of so many, where that is known."),
            "epoch": _count("The pass over the data that it is in."),
            "loss": _told("The newest loss."),
            "eta": _told("The time left at the present speed."),
            "etaSeconds": _amount("The same in seconds."),
            "deadline": _told("When it must be done."),
            "slackSeconds": _amount("What is left of the deadline at the predicted end, in seconds."),
            "samplesPerSecond": _amount("Its speed."),
            "resizes": _count("How often its workers changed while it ran."),
            "restarts": _count("How often it had to begin again from a checkpoint."),
            "checkpointStep": _count("The step of the newest checkpoint."),
            "artifact": _told("Where what it saved lies."),
            "submittedAt": {"type": "string", "format": "date-time"},
            "startedAt": {"type": "string", "format": "date-time"},
            "endedAt": {"type": "string", "format": "date-time"},
            "expiresAt": {"type": "string", "format": "date-time"},
            "plan": _plan(planned),
        },
    )


def inference_status() -> Schema:
    """The schema of an InferenceFunction's status."""
    return record(
        "Where it is. Written by the platform.",
        {
            **_shared(),
            "readyReplicas": _count("How many answer."),
            "url": _told("Where to call it."),
            "revision": _count("How often its code or its settings changed."),
            "load": _told("Requests a second."),
            "latency": _told("Its 99th percentile."),
            "objective": _told("What that is to stay below."),
            "plan": _plan({"wanted": _count("How many its load needs, where that is known.")}),
        },
    )


def training_columns() -> list[dict[str, Any]]:
    """The columns of training functions in `kubectl get`."""
    return [
        _column("STATE", ".status.state"),
        _column("WORKERS", ".status.workers"),
        _column("PROGRESS", ".status.progress"),
        _column("ETA", ".status.eta"),
        _column("DEADLINE", ".status.deadline"),
        _column("SLACK", ".status.slack"),
        _column("COST", ".status.cost"),
        _column("REASON", ".status.reason", 1),
        _column("ID", ".status.workloadId", 1),
        {"name": "AGE", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]


def inference_columns() -> list[dict[str, Any]]:
    """The columns of inference functions in `kubectl get`."""
    return [
        _column("STATE", ".status.state"),
        _column("WORKERS", ".status.workers"),
        _column("LOAD", ".status.load"),
        _column("P99", ".status.latency"),
        _column("OBJECTIVE", ".status.objective"),
        _column("SLACK", ".status.slack"),
        _column("COST", ".status.cost"),
        _column("URL", ".status.url", 1),
        _column("REASON", ".status.reason", 1),
        {"name": "AGE", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]


def _column(name: str, path: str, priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": "string", "jsonPath": path}
    return column | ({"priority": priority} if priority else {})
