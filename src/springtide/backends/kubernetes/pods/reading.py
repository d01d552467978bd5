"""Reads a Pod object and its events: states for the executor and reasons for users. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.pods.spec import CONTAINER_NAME
from springtide.core.resources import DeviceId

# Reasons for which a container waits that only a person can fix.
STUCK_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "PreStartHookError",
        "PostStartHookError",
    }
)
MAKING = "its container is being made"
# Init containers, which an operator's overlay may add, have images of their own.
_MAKING_REASONS = ("ContainerCreating", "PodInitializing")
_KILLED = 137
_MAX_MESSAGE = 300


class Reading(NamedTuple):
    """What was read from one pod. `is_over`: none of its containers runs or ever will; `end` is then the reason.

    `waiting` is why it does not run yet, `is_stuck` that only a person can fix that, `is_making` that the kubelet is at
    it: its image, its volumes, its network. `is_ending`: it is being deleted.
    `external_end` is why it ends, if the platform did not order that but its node or another user. `was_refused`: its
    node has ended it before the container was started, so that none of the workload's code has run. `term` is that of
    the control plane that wrote it last (0: unknown).
    """

    replica_id: str
    workload_id: str
    device_ids: tuple[DeviceId, ...]
    node: str
    uid: str
    term: int
    address: str
    is_running: bool
    is_ready: bool
    is_ending: bool
    is_over: bool
    waiting: str = ""
    is_stuck: bool = False
    is_making: bool = False
    exit_code: int | None = None
    end: str = ""
    external_end: str = ""
    was_refused: bool = False


def read_pod(pod: Mapping[str, Any]) -> Reading:
    """Read a Pod object, whole or trimmed."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    node = (pod.get("spec") or {}).get("nodeName", "")
    container = _container(status)
    state = (container or {}).get("state") or {}
    phase = status.get("phase", "")
    is_over = phase in ("Succeeded", "Failed")
    is_running = "running" in state and not is_over
    terminated = state.get("terminated") or {}
    waiting = _Waiting("") if is_over or is_running else _waiting(pod, node, container or {})
    return Reading(
        replica_id=annotations.get(names.REPLICA_ANNOTATION, ""),
        workload_id=annotations.get(names.WORKLOAD_ANNOTATION, ""),
        device_ids=devices_in(annotations),
        node=node,
        uid=metadata.get("uid", ""),
        term=_number(labels.get(names.TERM_LABEL, "")),
        address=status.get("podIP", ""),
        is_running=is_running,
        is_ready=bool((container or {}).get("ready")),
        is_ending="deletionTimestamp" in metadata,
        is_over=is_over,
        waiting=waiting.text,
        is_stuck=waiting.is_stuck,
        is_making=waiting.is_making,
        exit_code=terminated.get("exitCode") if is_over else None,
        end=_end(pod, status, terminated) if is_over else "",
        external_end=_external_end(status, node)
        if "deletionTimestamp" in metadata or _was_ended_by_node(status)
        else "",
        was_refused=phase == "Failed" and _has_never_started(status, container),
    )


def devices_in(annotations: Mapping[str, str]) -> tuple[DeviceId, ...]:
    """The devices that a pod holds by its annotations, the first of its worker first; none if they name none."""
    first, more = (annotations.get(name, "") for name in (names.DEVICE_ANNOTATION, names.MORE_DEVICES_ANNOTATION))
    return tuple([DeviceId(device_id) for device_id in (first, *more.split(",")) if device_id])


class Making(NamedTuple):
    """What a kubelet is at that makes a container: a sentence, and whether it pulls an image."""

    sentence: str
    is_pulling: bool = False


NO_MORE_KNOWN = Making(MAKING)


def read_making(events: Iterable[Mapping[str, Any]]) -> Making:
    """Read the newest of a pod's events. Pod objects do not say whether an image is being pulled."""
    newest = max(events, key=_order_of_event, default=None)
    if newest is None:
        return NO_MORE_KNOWN
    reason, message = newest.get("reason", ""), newest.get("message", "")
    if reason == "Pulling":
        since = _moment_of_event(newest)[11:19]
        what = f"pulls its image since {since} UTC" if since else "pulls its image"
        return Making(f"{what}: {_cut(message)}" if message else what, is_pulling=True)
    return Making(f"{MAKING}: {reason}: {_cut(message)}") if newest.get("type") == "Warning" else NO_MORE_KNOWN


def _moment_of_event(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def _order_of_event(event: Mapping[str, Any]) -> tuple[str, str]:
    # Times are whole seconds; an event's name ends with its first moment in nanoseconds.
    return _moment_of_event(event), str(event["metadata"].get("name", ""))


def trim_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod without fields that are never read, since thousands are kept."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    metadata.pop("managedFields", None)
    container = next((c for c in spec.get("containers", ()) if c.get("name") == CONTAINER_NAME), None)
    kept = [] if container is None else [{"name": CONTAINER_NAME, "resources": container.get("resources") or {}}]
    pod["spec"] = {"nodeName": spec.get("nodeName", ""), "containers": kept}
    return pod


def _container(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    statuses = status.get("containerStatuses") or ()
    return next((c for c in statuses if c.get("name") == CONTAINER_NAME), None)


class _Waiting(NamedTuple):
    """Why a container does not run yet; the rest is as in Reading."""

    text: str
    is_stuck: bool = False
    is_making: bool = False


def _waiting(pod: Mapping[str, Any], node: str, container: Mapping[str, Any]) -> _Waiting:
    if not node:
        return _Waiting("waiting for binding")
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message, image = waiting.get("reason", ""), waiting.get("message", ""), container.get("image", "")
    if "Image" in reason and image and image not in message:
        message = f"image {image}: {message}" if message else f"image {image}"
    if reason in STUCK_REASONS:
        return _Waiting(f"{reason}: {_cut(message)}" if message else reason, is_stuck=True)
    if reason and reason not in _MAKING_REASONS:
        return _Waiting(f"{reason}: {_cut(message)}" if message else reason)
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _Waiting(f"{condition.get('reason', 'Unschedulable')}: {_cut(condition.get('message', ''))}")
    if not reason:
        return _Waiting(f"waiting for the kubelet of node {node}")
    return _Waiting(MAKING, is_making=True)


def _has_never_started(status: Mapping[str, Any], container: Mapping[str, Any] | None) -> bool:
    """Whether a failed pod ended by its node alone: no container of it ran, nor did one before it fail."""
    container = container or {}
    if container.get("containerID") or "terminated" in (container.get("state") or {}) or container.get("lastState"):
        return False
    before = (each.get("state") or {} for each in status.get("initContainerStatuses") or ())
    return not any((state.get("terminated") or {}).get("exitCode") for state in before)


def _disruption(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    conditions = status.get("conditions") or ()
    return next((c for c in conditions if c.get("type") == "DisruptionTarget" and c.get("status") == "True"), None)


def _was_ended_by_node(status: Mapping[str, Any]) -> bool:
    """Whether the kubelet has ended the pod for the node's sake: a shutdown, a restart that finds no room for it.

    An eviction without the condition is for a limit of the pod's own.
    """
    if status.get("phase") != "Failed" or not status.get("reason"):
        return False
    return status["reason"] != "Evicted" or _disruption(status) is not None


def _external_end(status: Mapping[str, Any], node: str) -> str:
    disruption = _disruption(status)
    if disruption is not None:
        return f"its pod was evicted: {_cut(disruption.get('message') or disruption.get('reason', ''))}"
    if _was_ended_by_node(status):
        return _kubelet_reason(status, node)
    return "its pod was deleted from outside (kubectl delete, a node drain, or an eviction)"


def _end(pod: Mapping[str, Any], status: Mapping[str, Any], terminated: Mapping[str, Any]) -> str:
    code, reason = terminated.get("exitCode"), terminated.get("reason", "")
    if reason == "OOMKilled":
        limit = _memory_limit(pod)
        return f"the container ran out of its memory limit ({limit})" if limit else "the container ran out of memory"
    if status.get("reason"):
        return _kubelet_reason(status, (pod.get("spec") or {}).get("nodeName", ""))
    message = _last_line(terminated.get("message", ""))
    if code is None:
        return "the pod ended before its container was started"
    if code == 0:
        return "the worker left without being asked"
    how = f"the worker was killed (exit code {code})" if code == _KILLED else f"the worker ended with exit code {code}"
    return f"{how}: {message}" if message else how


def _kubelet_reason(status: Mapping[str, Any], node: str) -> str:
    """What a kubelet says that has refused or ended the pod itself: OutOfcpu, NodeAffinity, Preempting, Shutdown..."""
    what = "the pod was evicted"
    if status["reason"] != "Evicted":
        what = f"node {node} refused the pod: {status['reason']}"
    return f"{what}: {_cut(status['message'])}" if status.get("message") else what


def _memory_limit(pod: Mapping[str, Any]) -> str:
    for container in (pod.get("spec") or {}).get("containers", ()):
        if container.get("name") == CONTAINER_NAME:
            limit = str(((container.get("resources") or {}).get("limits") or {}).get("memory", ""))
            # A bare number is in bytes, which is hard to read.
            return f"{int(limit) / (1 << 20):.0f}Mi" if limit.isdigit() else limit
    return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _cut(lines[-1]) if lines else ""


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
