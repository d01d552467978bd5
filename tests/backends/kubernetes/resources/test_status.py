"""Statuses and events as objects have them: everything that a server would refuse is kept out of them."""

from __future__ import annotations

import msgspec
import pytest

from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions
from springtide.backends.kubernetes.resources.events import node_event, object_event, reason_of
from springtide.backends.kubernetes.resources.status import (
    Condition,
    job_conditions,
    job_told,
    merged_conditions,
    selector_of,
    service_conditions,
    service_told,
    without_nothing,
)
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.core.containers import ContainerSettings
from springtide.core.decision import PlannedRun
from springtide.core.shares import Share
from springtide.core.status.platform import JobStatus, ReplicaStatus, ServiceStatus
from springtide.core.status.pods import PodStatus
from springtide.core.workload import JobState

OFFSET_S = 1_900_000_000.0


def job(**changes):
    fields = {
        "job_id": "digits-7f3a",
        "name": "digits",
        "kind": "function",
        "state": "RUNNING",
        "reason": "resized 1 -> 2",
        "submitted_at_s": 10.0,
        "started_at_s": 12.0,
        "ended_at_s": None,
        "deadline_at_s": 610.0,
        "budget_usd": 4.0,
        "min_workers": 1,
        "max_workers": 4,
        "num_workers": 2,
        "global_batch_size": 64,
        "generation": 3,
        "step": 40,
        "total_steps": 100,
        "progress_fraction": 0.4999,
        "epoch": 1,
        "num_epochs": 3,
        "loss": 0.12345678,
        "metrics": {},
        "samples_per_s": 512.34,
        "eta_s": 192.4,
        "slack_s": 100.2,
        "num_resizes": 1,
        "num_restarts": 0,
        "num_preemptions": 0,
        "last_pause_s": None,
        "resize_pause_s": {},
        "checkpoint_step": 30,
        "artifact_path": "",
        "device_seconds": 100.0,
        "alternatives": (),
        "replicas": (
            ReplicaStatus(replica_id="r1", device_id="n2/0", state="READY", rank=1, started_at_s=12.0),
            ReplicaStatus(replica_id="r0", device_id="n1/3", state="READY", rank=0, started_at_s=12.0),
            ReplicaStatus(replica_id="r2", device_id="n3/0", state="STOPPING", rank=None, started_at_s=12.0),
        ),
        "is_promised": True,
        "cost_usd": 0.42,
    }
    return JobStatus(**(fields | changes))


def test_all_devices_of_each_worker_are_told_in_rank_order() -> None:
    held = {"state": "READY", "started_at_s": 12.0}
    replicas = (
        ReplicaStatus(replica_id="r1", device_id="n2/0", more_devices=("n2/1",), rank=1, **held),
        ReplicaStatus(replica_id="r0", device_id="n1/3", more_devices=("n1/0",), rank=0, **held),
    )
    told = job_told(job(replicas=replicas), offset_s=OFFSET_S)
    assert (told["plan"]["workers"], told["plan"]["devices"]) == (2, ["n1/3", "n1/0", "n2/0", "n2/1"])


def service(**changes):
    fields = {
        "service_id": "echo",
        "name": "echo",
        "state": "READY",
        "reason": "",
        "deployed_at_s": 5.0,
        "revision": 2,
        "min_replicas": 1,
        "max_replicas": 4,
        "num_ready": 2,
        "num_starting": 1,
        "slo_s": 0.2,
        "arrivals_per_s": 12.345,
        "in_flight": 3,
        "queued": 0,
        "latency_p50_s": 0.01,
        "latency_p99_s": 0.05,
        "device_seconds": 360.0,
        "url": "http://x/f/echo",
        "replicas": (),
        "share": Share(request=0.3, limit=0.6),
    }
    return ServiceStatus(**(fields | changes))


def misfits(value, schema, where="status"):
    """Where a value is not what the schema says, as far as tests need to know."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    if not isinstance(value, kinds[schema["type"]]) or value == "":
        yield f"{where} {value!r}"
    elif isinstance(value, dict) and "properties" in schema:
        for name, inner in value.items():
            if name in schema["properties"]:
                yield from misfits(inner, schema["properties"][name], f"{where}.{name}")
            else:
                yield f"{where}.{name} is not in the schema"
    elif isinstance(value, list):
        for item in value:
            yield from misfits(item, schema["items"], f"{where}[]")
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} {value!r} is not one of {schema['enum']}"


def schema_of(number):
    version = custom_resource_definitions()[number]["spec"]["versions"][0]
    return version["schema"]["openAPIV3Schema"]["properties"]["status"]


POD = PodStatus(
    workload_id="digits-7f3a",
    replica_id="r2",
    namespace="ml",
    pod="",
    node_id="n1",
    phase="waiting",
    reason="exceeded quota",
)
STATES = ["PENDING", "STARTING", "RUNNING", "PREEMPTING", "PAUSED", "SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("empty", [False, True])
def test_what_is_told_of_a_job_fits_its_schema(state, empty):
    nothing = {
        "deadline_at_s": None,
        "total_steps": None,
        "progress_fraction": None,
        "loss": None,
        "samples_per_s": None,
        "eta_s": None,
        "slack_s": None,
        "checkpoint_step": None,
        "started_at_s": None,
        "reason": "",
        "replicas": (),
        "cost_usd": None,
        "step": 0,
    }
    status = job(state=state, alternatives=("--deadline 2h",), **(nothing if empty else {}))
    planned = (PlannedRun(start_s=20.0, end_s=400.0, num_devices=2),)
    told = job_told(status, offset_s=OFFSET_S, planned=planned, pods=[POD])
    conditions = merged_conditions((), job_conditions(status, [POD]), OFFSET_S, 1)
    whole = {**without_nothing(told), "conditions": conditions, "platform": "p", "observedGeneration": 1}
    assert list(misfits(msgspec.json.decode(msgspec.json.encode(whole)), schema_of(0))) == []


@pytest.mark.parametrize("state", ["READY", "IDLE", "STARTING", "FAILED", "REMOVED"])
@pytest.mark.parametrize("least", [0, 1])
def test_what_is_told_of_a_service_fits_its_schema(state, least):
    status = service(state=state, min_replicas=least, latency_p99_s=None if least else 0.05)
    told = service_told(status, cost_usd=0.25, pods=[POD])
    conditions = merged_conditions((), service_conditions(status, [POD]), OFFSET_S, 1)
    whole = {**without_nothing(told), "conditions": conditions, "platform": "p", "observedGeneration": 1}
    assert list(misfits(msgspec.json.decode(msgspec.json.encode(whole)), schema_of(1))) == []


def test_a_running_job_in_the_words_of_its_columns():
    told = job_told(job(), offset_s=OFFSET_S)
    assert (told["state"], told["workers"], told["progress"]) == ("RUNNING", "2/1..4", "49%")
    assert (told["eta"], told["slack"], told["cost"]) == ("3m12", "1m40", "$0.42")
    assert told["deadline"] == "17:56:50 UTC"
    assert told["plan"]["devices"] == ["n1/3", "n2/0"]
    assert (told["plan"]["workers"], told["plan"]["nodes"]) == (2, ["n1", "n2"])
    assert told["replicas"] == 2


def test_a_deadline_of_another_day_says_the_day():
    assert job_told(job(deadline_at_s=200_000.0), offset_s=OFFSET_S)["deadline"] == "Mar 20 01:20 UTC"


def test_a_refused_job_says_what_would_be_accepted():
    told = {each.type: each for each in job_conditions(job(state="REJECTED", reason="no", alternatives=("a", "b")))}
    accepted = told[ConditionType.ACCEPTED]
    assert (accepted.is_true, accepted.reason) == (False, Reason.REJECTED)
    assert accepted.message == "no; it would be accepted with: a; b"
    assert told[ConditionType.COMPLETE].reason is Reason.REJECTED


def test_a_service_that_sleeps_is_not_one_that_waits():
    def ready(**changes):
        return service_conditions(service(state="IDLE", num_ready=0, **changes))[1].reason

    assert ready(min_replicas=0) is Reason.SLEEPING
    assert ready(min_replicas=1) is Reason.WAITING


def test_a_transition_has_the_time_of_the_change_and_not_of_the_telling():
    first = merged_conditions((), [Condition(ConditionType.READY, True, Reason.REPLICAS_READY, "a")], OFFSET_S, 1)
    second = merged_conditions(first, [Condition(ConditionType.READY, True, Reason.REPLICAS_READY)], OFFSET_S + 9, 2)
    third = merged_conditions(second, [Condition(ConditionType.READY, False, Reason.FAILED, "b")], OFFSET_S + 60, 2)
    assert first[0]["lastTransitionTime"] == second[0]["lastTransitionTime"] == "2030-03-17T17:46:40Z"
    assert "message" not in second[0]
    assert third[0]["lastTransitionTime"] == "2030-03-17T17:47:40Z"


def test_the_selector_is_one_even_for_an_id_that_no_label_can_be():
    assert selector_of("digits-7f3a") == "springtide.dev/workload=digits-7f3a"
    assert len(selector_of("x" * 80).partition("=")[2]) <= 63


OWNER = ContainerSettings(namespace="ml", owner_kind="TrainingFunction", owner_name="digits", owner_uid="u1")


def event(kind="lost", text="r1 was lost", identity="7 lost", state=None):
    return object_event(
        OWNER,
        kind,
        text,
        api_version="springtide.dev/v1alpha1",
        platform="p",
        at_unix_s=OFFSET_S,
        identity=identity,
        state=state,
    )


def test_an_event_is_named_after_what_it_tells_so_that_it_is_told_once():
    assert event()["metadata"]["name"] == event()["metadata"]["name"]
    assert event()["metadata"]["name"] != event(identity="8 lost")["metadata"]["name"]
    assert event()["metadata"]["name"].startswith("digits.")
    assert event(text="x" * 5000)["message"] == "x" * 1024


@pytest.mark.parametrize(
    ("kind", "state", "shown"),
    [
        ("lost", None, "Warning"),
        ("failed", None, "Warning"),
        ("ended", JobState.FAILED, "Warning"),
        ("ended", JobState.REJECTED, "Warning"),
        ("ended", JobState.SUCCEEDED, "Normal"),
        ("grow", None, "Normal"),
    ],
)
def test_what_went_wrong_is_a_warning(kind, state, shown):
    assert event(kind, "x", state=state)["type"] == shown


def test_an_event_of_a_node_is_found_where_kubelets_are():
    found = node_event("n1", "loan", "is lent", platform="p", at_unix_s=OFFSET_S, identity="7")
    assert found["metadata"]["namespace"] == "default"
    assert found["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"}
    assert (found["reason"], reason_of("made-up kind")) == ("NodeLoaned", "MadeUpKind")
