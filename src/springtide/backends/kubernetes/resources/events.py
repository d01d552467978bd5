"""What was decided, as Events of the cluster: on the object of a workload, or on a node. Pure."""

from __future__ import annotations

import hashlib
import re
from types import MappingProxyType
from typing import Any

from springtide.backends.kubernetes.client.kinds import Object
from springtide.backends.kubernetes.resources.status import stamp
from springtide.backends.kubernetes.settings import GROUP, PLATFORM_LABEL
from springtide.core.containers import ContainerSettings
from springtide.core.workload import JobState

MAX_MESSAGE_CHARS = 1024
# The namespace of Events about objects without a namespace, such as nodes.
NODE_NAMESPACE = "default"
COMPONENT = "springtide"
# Kinds of lines in a workload's story that report a problem; of its end only some states do.
_WARNINGS = frozenset({"lost", "failed", "broken", "stalled", "start-timed-out"})
_BAD_ENDS = frozenset({JobState.FAILED, JobState.REJECTED})
_REASONS = MappingProxyType(
    {
        "submitted": "Submitted",
        "deployed": "Deployed",
        "admitted": "DeadlinePromised",
        "waiting": "Waiting",
        "starting": "StartingReplica",
        "held-up": "ReplicaHeldUp",
        "begun": "ReplicaBegun",
        "ready": "ReplicaReady",
        "stopping": "StoppingReplica",
        "stopped": "ReplicaStopped",
        "lost": "ReplicaLost",
        "start": "Started",
        "resume": "Resumed",
        "grow": "Grown",
        "shrink": "Shrunk",
        "replace": "Replaced",
        "recover": "Recovered",
        "broken": "GroupBroken",
        "preempt": "Preempted",
        "pause": "PauseRequested",
        "scale": "Scaled",
        "batch": "BatchChanged",
        "checkpoint": "CheckpointSaved",
        "finished": "Finished",
        "failed": "CodeFailed",
        "cancelled": "CancelRequested",
        "ended": "Ended",
        "loan": "NodeLoaned",
        "reclaim": "NodeReclaimed",
        "label": "NodeLabelled",
    }
)


def reason_of(kind: str) -> str:
    """The `reason` of an Event for the kind of a line in a workload's story."""
    return _REASONS.get(kind) or "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", kind)) or "Told"


def object_event(
    owner: ContainerSettings,
    kind: str,
    text: str,
    *,
    api_version: str,
    platform: str,
    at_unix_s: float,
    identity: str,
    state: JobState | None = None,
) -> Object:
    """An Event on the object that stands for a workload. `state` is that of a job: it says how a job ended.

    `identity` tells it from every other one of this platform, and is the same whenever it is made again.
    """
    involved = {
        "apiVersion": api_version,
        "kind": owner.owner_kind,
        "namespace": owner.namespace,
        "name": owner.owner_name,
        "uid": owner.owner_uid,
    }
    is_warning = kind in _WARNINGS or (kind == "ended" and state in _BAD_ENDS)
    return _event(involved, owner.namespace, kind, text, platform, at_unix_s, identity, is_warning=is_warning)


def node_event(node: str, kind: str, text: str, *, platform: str, at_unix_s: float, identity: str) -> Object:
    """An Event on a node, found there as kubelets' are: by the node's name in the place of its uid."""
    involved = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
    is_warning = kind in _WARNINGS
    return _event(involved, NODE_NAMESPACE, kind, text, platform, at_unix_s, identity, is_warning=is_warning)


def _event(
    involved: dict[str, Any],
    namespace: str,
    kind: str,
    text: str,
    platform: str,
    at_unix_s: float,
    identity: str,
    *,
    is_warning: bool,
) -> Object:
    moment = stamp(at_unix_s)
    digest = hashlib.sha256(f"{platform}/{involved['uid']}/{identity}".encode()).hexdigest()[:16]
    return {
        "metadata": {
            "name": f"{involved['name'][:200].rstrip('.-')}.{digest}",
            "namespace": namespace,
            "labels": {PLATFORM_LABEL: platform},
        },
        "involvedObject": involved,
        "reason": reason_of(kind),
        "message": text[:MAX_MESSAGE_CHARS],
        "type": "Warning" if is_warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": f"{GROUP}/{COMPONENT}",
        "reportingInstance": platform,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
