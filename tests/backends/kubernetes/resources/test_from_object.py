"""Specs into requests and requests into specs: the same job through both doors, and sentences for what cannot be."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from springtide.backends.kubernetes.resources.from_object import (
    NAME_ANNOTATION,
    check_job_spec,
    check_kept,
    check_service_spec,
    container_settings,
    deadline_s,
    job_request,
    parts_of,
    replica_bounds,
    service_request,
    trimmed,
    worker_bounds,
    workload_name,
)
from springtide.backends.kubernetes.resources.option_fields import plain
from springtide.backends.kubernetes.resources.to_object import inference_function, training_function
from springtide.core.errors import InvalidRequest
from springtide.service.submission.option_models import JobOptionsIn, ServiceOptionsIn
from springtide.service.submission.schemas import JobIn, ServiceIn, parse_body

NOON = datetime(2030, 1, 31, 12, 0, tzinfo=UTC)
FILES = {"train.py": "def fit(ctx):\n    pass\n"}
SOURCE = {"function": "fit", "files": FILES}


def options_of(spec, **more):
    check_job_spec({"source": SOURCE, **spec}, devices=4)
    request = job_request("digits", {"source": SOURCE, **spec}, FILES, created=NOON, now=NOON, devices=4, **more)
    return parse_body(msgspec.json.encode(request), JobIn).options


def test_the_words_of_a_spec_become_numbers():
    options = options_of(
        {
            "deadline": "90m",
            "budget": "$4",
            "workers": "2..8",
            "epochs": 3,
            "globalBatch": "64..512",
            "maxLocalBatch": 64,
            "learningRate": "adascale",
            "length": "progress",
            "samples": 1797,
            "seed": 7,
            "params": {"lr": 0.1, "hidden": 64, "warm": True},
            "retries": 5,
            "grace": "20s",
            "checkpointEvery": "1m",
            "soft": True,
            "wait": True,
            "share": "0.3..0.6",
            "deviceMemory": "4GB",
            "speeds": {"1": 3.2},
            "study": "s1",
            "virtualShards": 16,
        }
    )
    assert options.deadline_s == 5400
    assert options.budget_usd == 4
    assert (options.min_workers, options.max_workers) == (2, 8)
    assert options.batch.model_dump() == {
        "min_size": 64,
        "max_size": 512,
        "min_local_size": 1,
        "max_local_size": 64,
        "learning_rate": "adascale",
    }
    assert (options.global_batch_size, options.length_unit) == (64, "progress")
    assert options.params == {"lr": "0.1", "hidden": "64", "warm": "True"}
    assert (options.grace_s, options.checkpoint_interval_s) == (20, 60)
    assert options.share.model_dump() == {"request": 0.3, "limit": 0.6, "memory_mb": 4000}
    assert (options.is_soft, options.waits, options.study, options.num_virtual_shards) == (True, True, "s1", 16)


@pytest.mark.parametrize(
    ("deadline", "seconds"),
    [
        ("90m", 5400 - 600),
        (600, 1.0),
        ("18:00", 6 * 3600 - 600),
        ("11:00", 23 * 3600 - 600),
        ("2030-01-31T18:00:00Z", 6 * 3600 - 600),
        ("2030-01-31T18:00:00+06:00", 1.0),
    ],
)
def test_a_deadline_counts_from_the_objects_creation_and_never_ends_before_now(deadline, seconds):
    assert deadline_s(deadline, NOON, NOON + timedelta(minutes=10)) == seconds


@pytest.mark.parametrize(
    ("spec", "bounds"),
    [
        ({}, (1, 6)),
        ({"workers": "auto"}, (1, 6)),
        ({"workers": "2..4"}, (2, 4)),
        ({"workers": 3}, (3, 3)),
        ({"workers": "2..4", "replicas": 3}, (2, 3)),
        ({"workers": "2..4", "replicas": 1}, (1, 1)),
        ({"workers": "2..4", "replicas": 9}, (2, 4)),
        ({"workers": "2..4", "replicas": 0}, (2, 4)),
        ({"source": {}}, (1, 1)),
    ],
)
def test_replicas_cut_the_workers_off_above(spec, bounds):
    assert worker_bounds({"source": {"function": "fit"}, **spec}, 6) == bounds


@pytest.mark.parametrize(
    ("spec", "bounds"),
    [({}, (0, 1)), ({"scale": "1..4"}, (1, 4)), ({"replicas": 2}, (2, 2)), ({"scale": "0..3", "replicas": 0}, (0, 3))],
)
def test_replicas_of_a_service_are_exactly_so_many(spec, bounds):
    assert replica_bounds(spec) == bounds


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"workers": "4..1"}, "spec.workers '4..1' must run from"),
        ({"globalBatch": 64, "learningRate": "sqrt"}, "give it bounds like globalBatch: 64..1024"),
        ({"deviceMemory": "4GB"}, "spec.deviceMemory is what is held of a shared device: ask for a share beside it"),
        ({"globalBatch": "16..64", "initialBatch": 8}, "spec.initialBatch 8, the batch it starts with, lies outside"),
        ({"deadline": "1h", "functions": {"fastest": True}}, "spec.functions.fastest and spec.deadline are two goals"),
        ({"functions": {}}, "spec.functions needs spec.functions.layerProfile"),
        ({"params": {"a": [1]}}, "spec.params.a must be a string"),
        ({"source": {"function": "fit", "args": ["x"]}}, "spec.source.args are for scripts"),
        ({"source": {"files": FILES}, "workers": "1..4"}, "a script cannot be resized"),
        ({"source": {"function": "fit", "file": "other.py"}}, "'other.py' is not among the files: train.py"),
        ({"deadline": "2030-99-01T00:00:00Z"}, "is no moment"),
    ],
)
def test_what_the_schema_cannot_say_is_said_with_the_mend(spec, sentence):
    with pytest.raises(InvalidRequest, match=sentence.replace("(", r"\(")):
        options_of(spec)


def test_the_one_python_file_is_the_one_that_is_meant_and_the_others_go_along():
    files = {"train.py": "x", "notes.txt": "y"}
    request = job_request("a", {"source": {"function": "fit"}}, files, created=NOON, now=NOON, devices=1)
    assert request["source"]["filename"] == "train.py"
    assert request["source"]["files"] == {"notes.txt": "y"}
    with pytest.raises(InvalidRequest, match=r"it is in one of a\.py, b\.py"):
        job_request("a", {"source": {"function": "f"}}, {"a.py": "", "b.py": ""}, created=NOON, now=NOON, devices=1)


def test_without_a_function_the_file_is_a_script():
    request = job_request(
        "a", {"source": {"args": ["--lr", "1"]}, "workers": 2}, FILES, created=NOON, now=NOON, devices=1
    )
    assert (request["source"]["kind"], request["source"]["args"]) == ("script", ["--lr", "1"])


# What REST takes, each option at a value of its own.
JOB_OPTIONS = {
    "deadline_s": 5400.5,
    "confidence": 0.95,
    "budget_usd": 0.05,
    "global_batch_size": 96,
    "batch": {"min_size": 64, "max_size": 512, "min_local_size": 2, "max_local_size": 64, "learning_rate": "sqrt"},
    "length_unit": "progress",
    "num_epochs": 3,
    "min_workers": 2,
    "max_workers": 8,
    "seed": 7,
    "max_restarts": 0,
    "stall_timeout_s": 0.0,
    "on_stall": "restart",
    "on_nan": "fail",
    "start_timeout_s": 60.0,
    "grace_s": 20.0,
    "checkpoint_interval_s": 0.5,
    "num_virtual_shards": 16,
    "params": {"lr": "0.1"},
    "env": {"HF_HOME": "/data/hf", "EMPTY": ""},
    "is_soft": True,
    "waits": True,
    "num_samples": 1797,
    "profile_steps_per_s": {"1": 3.2},
    "step_profile": {"local_batch_size": 8, "forward_s": 0.1, "backward_s": 0.2, "update_s": 0.0, "buckets": []},
    "share": {"request": 0.3, "limit": 0.6, "memory_mb": 4000},
    "study": "s1",
    "devices_each": 4,
}
ON_FUNCTIONS = {
    "on": "functions",
    "is_fastest": True,
    "search": False,
    "batch_schedule": [{"from_epoch": 1, "global_batch_size": 64}],
    "function_workers": [2, 16],
    "stream": "clicks",
    "layer_profile": {
        "model": "m",
        "micro_batch_size": 4,
        "memory_mb": [1024],
        "bytes_per_s": [1e8],
        "layers": [
            {
                "name": "l",
                "parameter_bytes": 1,
                "activation_bytes": 1,
                "output_bytes": 1,
                "gradient_bytes": 1,
                "forward_s": [0.1],
                "backward_s": [0.1],
            }
        ],
    },
}


# An object names Secrets of its cluster (spec.container.secrets), and its image has its packages.
NOT_IN_OBJECTS = {"secrets", "requirements", "python"}


def test_every_option_of_a_job_has_a_word():
    assert JOB_OPTIONS.keys() | ON_FUNCTIONS.keys() | NOT_IN_OBJECTS == JobOptionsIn.model_fields.keys()


@pytest.mark.parametrize("more", [{}, ON_FUNCTIONS], ids=["machines", "functions"])
def test_a_job_goes_through_its_object_unchanged(more):
    source = {"filename": "train.py", "text": FILES["train.py"], "object_name": "fit", "kind": "function"}
    source |= {"files": {"model.py": "x = 1\n"}}
    sent = parse_body(
        msgspec.json.encode({"name": "digits", "source": source, "options": {**JOB_OPTIONS, **more}}), JobIn
    )
    obj = training_function("digits", "ml", sent.source.model_dump(), sent.options.model_dump(), {})
    files = obj["spec"]["source"]["files"]
    request = job_request("digits", obj["spec"], files, created=NOON, now=NOON, devices=1)
    assert parse_body(msgspec.json.encode(request), JobIn) == sent


def test_a_job_of_defaults_goes_through_its_object_unchanged():
    source = {"filename": "train.py", "text": FILES["train.py"], "object_name": "fit"}
    sent = parse_body(msgspec.json.encode({"name": "digits", "source": source}), JobIn)
    obj = training_function("digits", "ml", sent.source.model_dump(), sent.options.model_dump(), {})
    request = job_request("digits", obj["spec"], obj["spec"]["source"]["files"], created=NOON, now=NOON, devices=8)
    assert parse_body(msgspec.json.encode(request), JobIn) == sent


SERVICE_OPTIONS = {
    "slo_s": 0.2,
    "min_replicas": 0,
    "max_replicas": 4,
    "max_batch_size": 16,
    "batch_wait_s": 0.0025,
    "max_queue": 10,
    "max_body_mib": 4,
    "concurrency": 8,
    "calls": ("embed",),
    "target_in_flight": 3,
    "idle_s": 45.0,
    "start_timeout_s": 0.0,
    "grace_s": 5.0,
    "params": {"model": "digits"},
    "env": {"HF_HOME": "/data/hf"},
    "share": {"request": 0.25, "limit": 0.5, "memory_mb": 0},
    "capacity_per_s": 120.0,
}


def test_every_option_of_a_service_has_a_word():
    # A pod holds a share of one device.
    assert SERVICE_OPTIONS.keys() | NOT_IN_OBJECTS | {"devices_each"} == ServiceOptionsIn.model_fields.keys()


@pytest.mark.parametrize("options", [SERVICE_OPTIONS, {}], ids=["all", "defaults"])
def test_a_service_goes_through_its_object_unchanged(options):
    source = {"filename": "serve.py", "text": "class A: ...\n", "object_name": "A"}
    sent = parse_body(msgspec.json.encode({"source": source, "options": options}), ServiceIn)
    obj = inference_function("a", "ml", sent.source.model_dump(), sent.options.model_dump(), {})
    request = service_request(obj["spec"], obj["spec"]["source"]["files"])
    assert parse_body(msgspec.json.encode(request), ServiceIn) == sent


def test_memory_of_a_service_is_of_a_share():
    with pytest.raises(InvalidRequest, match=r"like share: 0\.3"):
        check_service_spec({"deviceMemory": "4GB"})


@pytest.mark.parametrize(("amount", "text"), [(4.0, "4"), (0.05, "0.05"), (1e-5, "0.00001"), (1e9, "1000000000")])
def test_numbers_are_written_as_people_write_them(amount, text):
    assert plain(amount) == text


def obj_of(spec, kind="TrainingFunction", **metadata):
    return {"kind": kind, "metadata": {"name": "digits", "namespace": "ml", "uid": "u1", **metadata}, "spec": spec}


def test_a_container_is_asked_for_in_a_pods_words():
    asked = {
        "image": "i",
        "env": [{"name": "A", "value": "1"}],
        "resources": {"cpu": 2, "memory": "24GB"},
        "secrets": ["s"],
        "serviceAccountName": "sa",
    }
    settings = container_settings(obj_of({"source": SOURCE, "container": asked}))
    assert (settings.image, settings.cpu, settings.memory) == ("i", "2", "24000000000")
    assert (settings.environment, settings.secrets, settings.service_account) == ({"A": "1"}, ("s",), "sa")
    assert (settings.owner_kind, settings.owner_name, settings.owner_uid) == ("TrainingFunction", "digits", "u1")
    assert settings.namespace == "ml"


def test_a_job_remembers_what_its_object_said_and_a_service_does_not():
    assert container_settings(obj_of({"source": SOURCE, "epochs": 3})).accepted.keys() == {"source", "epochs"}
    assert container_settings(obj_of({"source": {"class": "A", "files": FILES}}, "InferenceFunction")).accepted == {}


def test_digests_of_parts_are_the_same_for_what_a_cache_holds():
    whole = obj_of({"source": SOURCE, "epochs": 3, "params": {"b": 1, "a": 2}})
    before = parts_of(whole)
    held = trimmed(msgspec.json.decode(msgspec.json.encode(whole)))
    assert "def fit" not in str(held)
    assert parts_of(held) == before == parts_of(whole)
    assert trimmed(held) == held
    other = obj_of({"source": {**SOURCE, "files": {"train.py": "other"}}, "epochs": 3, "params": {"a": 2, "b": 1}})
    assert {name for name in before if parts_of(other)[name] != before[name]} == {"source"}


def test_a_workload_may_be_called_otherwise_than_its_object():
    assert workload_name(obj_of({})) == "digits"
    assert workload_name(obj_of({}, annotations={NAME_ANNOTATION: "fit"})) == "fit"


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("requirements", {"source": {"folder": {"path": "a.py"}}}),
        ("source.folder", {"source": {}, "requirements": ["x"]}),
    ],
)
def test_what_an_older_definition_drops_is_noticed(name, made):
    spec = {"source": {"folder": {"path": "a.py"}}, "requirements": ["x"], "env": {}}
    asked = {"kind": "TrainingFunction", "spec": spec}
    check_kept(asked, {"spec": {"source": spec["source"], "requirements": ["x"]}})
    with pytest.raises(InvalidRequest, match=rf"drops spec\.{name}; .*k8s crds \| kubectl apply"):
        check_kept(asked, {"spec": made})
