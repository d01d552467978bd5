"""What Pod objects say, as the API server has shown them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.pods.reading import MAKING, Making, read_making, read_pod, trim_pod


def pod(phase: str = "Running", state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    container = {"name": "worker", "image": "registry/x:1", "state": state, "ready": "running" in (state or {})}
    containers = [] if state is None else [container]
    return {
        "metadata": {
            "name": "job-0",
            "namespace": "ml",
            "uid": "u1",
            "resourceVersion": "12",
            "managedFields": [{"manager": "somebody"}],
            "labels": {names.TERM_LABEL: "4"},
            "annotations": {
                names.REPLICA_ANNOTATION: "job.0",
                names.WORKLOAD_ANNOTATION: "job",
                names.DEVICE_ANNOTATION: "node/1",
            },
        },
        "spec": {
            "nodeName": "node",
            "containers": [{"name": "worker", "image": "x", "resources": {"limits": {"memory": "2Gi"}}}],
            "volumes": [{"name": "big"}],
        },
        "status": {"phase": phase, "containerStatuses": containers, "podIP": "10.0.0.9", **status},
    }


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def test_a_running_pod() -> None:
    reading = read_pod(pod(state={"running": {}}))
    assert (reading.replica_id, reading.workload_id, reading.device_ids) == ("job.0", "job", ("node/1",))
    assert (reading.uid, reading.term, reading.node, reading.address) == ("u1", 4, "node", "10.0.0.9")
    assert reading.is_running
    assert reading.is_ready
    assert (reading.is_over, reading.is_ending, reading.waiting) == (False, False, "")


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (pod("Failed", ended(137, "OOMKilled")), "the container ran out of its memory limit (2Gi)"),
        (pod("Failed", ended(137)), "the worker was killed (exit code 137)"),
        (
            pod("Failed", ended(1, message="Traceback\n  File\nValueError: no data\n\n")),
            "the worker ended with exit code 1: ValueError: no data",
        ),
        (pod("Succeeded", ended(0, "Completed")), "the worker left without being asked"),
        (
            pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
            "the pod was evicted: The node was low on resource: memory.",
        ),
        (
            pod("Failed", reason="OutOfnvidia.com/gpu", message="Node didn't have enough resource"),
            "node node refused the pod: OutOfnvidia.com/gpu: Node didn't have enough resource",
        ),
        (pod("Failed"), "the pod ended before its container was started"),
    ],
)
def test_how_a_pod_ended(status: dict[str, Any], sentence: str) -> None:
    reading = read_pod(status)
    assert reading.is_over
    assert reading.end == sentence


STARTED = [{"name": "worker", "state": {"terminated": {"exitCode": 137}}, "containerID": "containerd://1"}]
BY_THE_NODE = {"type": "DisruptionTarget", "status": "True", "message": "the node is low on memory"}


@pytest.mark.parametrize(
    ("status", "was_refused", "external_end"),
    [
        (pod("Failed", reason="OutOfcpu", message="cpu"), True, "node node refused the pod: OutOfcpu: cpu"),
        (pod("Failed", reason="UnexpectedAdmissionError"), True, "node node refused the pod: UnexpectedAdmissionError"),
        (pod("Failed", {"waiting": {"reason": "ContainerCreating"}}), True, ""),
        (pod("Pending", {"waiting": {"reason": "ContainerCreating"}}), False, ""),
        (pod("Failed", ended(1)), False, ""),
        (pod("Failed", initContainerStatuses=[{"name": "copy", "state": ended(1)}]), False, ""),
        (
            pod("Failed", reason="NodeAffinity", containerStatuses=STARTED),
            False,
            "node node refused the pod: NodeAffinity",
        ),
        (
            pod("Failed", reason="Evicted", containerStatuses=STARTED, conditions=[BY_THE_NODE]),
            False,
            "its pod was evicted: the node is low on memory",
        ),
        # For a limit of its own, such as that of its disk: then the condition is not there.
        (pod("Failed", reason="Evicted", containerStatuses=STARTED), False, ""),
    ],
)
def test_what_a_node_does_to_a_pod_is_told_from_what_its_code_does(
    status: dict[str, Any], was_refused: bool, external_end: str
) -> None:
    reading = read_pod(status)
    assert (reading.was_refused, reading.external_end) == (was_refused, external_end)


def test_a_container_that_has_ended_is_not_yet_a_pod_that_is_over() -> None:
    # The kubelet says first that the container ended and then, a moment later, that the pod is over.
    reading = read_pod(pod("Running", ended(0, "Completed")))
    assert not reading.is_over
    assert reading.exit_code is None


@pytest.mark.parametrize(
    ("state", "sentence", "is_stuck"),
    [
        (
            {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry/x:1"'}},
            'ImagePullBackOff: Back-off pulling image "registry/x:1"',
            True,
        ),
        (
            {"waiting": {"reason": "ErrImagePull", "message": "no such host"}},
            "ErrImagePull: image registry/x:1: no such host",
            True,
        ),
        ({"waiting": {"reason": "ErrImageNeverPull"}}, "ErrImageNeverPull: image registry/x:1", True),
        (
            {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "wandb" not found'}},
            'CreateContainerConfigError: secret "wandb" not found',
            True,
        ),
        ({"waiting": {"reason": "ContainerCreating"}}, "its container is being made", False),
        (None, "waiting for the kubelet of node node", False),
    ],
)
def test_why_a_pod_does_not_run_yet(state: dict[str, Any] | None, sentence: str, is_stuck: bool) -> None:
    reading = read_pod(pod("Pending", state))
    assert (reading.waiting, reading.is_stuck) == (sentence, is_stuck)


def test_a_pod_that_waits_for_its_node() -> None:
    unbound = pod("Pending")
    unbound["spec"].pop("nodeName")
    assert read_pod(unbound).waiting == "waiting for binding"


def test_who_took_a_pod() -> None:
    plain = pod(state={"running": {}})
    assert read_pod(plain).external_end == ""
    plain["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    reading = read_pod(plain)
    assert reading.is_ending
    assert "kubectl delete" in reading.external_end
    plain["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "node drain"}
    ]
    assert read_pod(plain).external_end == "its pod was evicted: node drain"


def test_trimmed_pods_read_the_same() -> None:
    for whole in (pod(state={"running": {}}), pod("Failed", ended(137, "OOMKilled")), pod("Pending")):
        trimmed = trim_pod(copy.deepcopy(whole))
        assert read_pod(trimmed) == read_pod(whole)
        assert "volumes" not in trimmed["spec"]
        assert "managedFields" not in trimmed["metadata"]


def test_a_pod_of_nobody_reads_as_nobody_s() -> None:
    bare = {"metadata": {"name": "x", "namespace": "y"}, "spec": {}}
    reading = read_pod(bare)
    assert (reading.replica_id, reading.uid, reading.term, reading.is_over) == ("", "", 0, False)


def event(reason: str, at: str, message: str = "", kind: str = "Normal", **more: Any) -> dict[str, Any]:
    moment = {"lastTimestamp": f"2030-01-31T{at}Z"} if at else {}
    return {"metadata": {"name": "job-0.17a0"}, "reason": reason, "message": message, "type": kind, **moment, **more}


@pytest.mark.parametrize(
    ("events", "making"),
    [
        ([], Making(MAKING)),
        (
            [event("Pulling", "16:52:05", 'Pulling image "x:1"')],
            Making('pulls its image since 16:52:05 UTC: Pulling image "x:1"', True),
        ),
        (
            [event("Pulling", "", eventTime="2030-01-31T16:52:05.123456Z")],
            Making("pulls its image since 16:52:05 UTC", True),
        ),
        ([event("Pulling", "", "")], Making("pulls its image", True)),
        ([event("Pulled", "16:53:00"), event("Pulling", "16:52:05")], Making(MAKING)),
        # Within one second the name tells, which has nanoseconds.
        (
            [event("Pulled", "16:52:05", metadata={"name": "job-0.17a2"}), event("Pulling", "16:52:05")],
            Making(MAKING),
        ),
        (
            [event("FailedMount", "16:52:05", 'configmap "c" not found', "Warning")],
            Making(f'{MAKING}: FailedMount: configmap "c" not found'),
        ),
    ],
)
def test_what_a_kubelet_is_at_follows_from_the_newest_event(events: list[dict[str, Any]], making: Making) -> None:
    assert read_making(events) == making


def test_a_container_is_being_made_only_once_the_kubelet_is_at_it() -> None:
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    assert read_pod(pod("Pending", waiting)).is_making
    assert read_pod(pod("Pending", {"waiting": {"reason": "PodInitializing"}})).is_making
    assert not read_pod(pod("Pending")).is_making, "it waits for its kubelet"
    assert not read_pod(pod("Pending", {"waiting": {"reason": "ImagePullBackOff"}})).is_making
    assert not read_pod(pod(state={"running": {}})).is_making
