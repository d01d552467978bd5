"""Rules over several options: each has one verdict, whichever face the options are given by, in that face's words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from springtide.backends.kubernetes.resources.from_object import check_job_spec, check_service_spec, job_request
from springtide.client.goals import TrainOptions
from springtide.client.serving_goals import ServeOptions
from springtide.core.errors import InvalidRequest
from springtide.core.options import rules
from springtide.core.options.rules import (
    FILLED_RULES,
    JOB_RULES,
    PLACE_RULES,
    SERVICE_RULES,
    SUBMISSION_RULES,
    Rule,
    check_rules,
)
from springtide.core.options.words import JOB_WORDS
from springtide.service.submission.function_checks import check_functions
from springtide.service.submission.option_models import checked_values
from springtide.service.submission.schemas import JobIn, ServiceIn, check_job, check_service, parse_body

NOON = datetime(2030, 1, 31, 12, 0, tzinfo=UTC)
FILES = {"train.py": "def fit(ctx):\n    pass\n"}
LAYER = {
    "name": "l",
    "parameter_bytes": 1,
    "activation_bytes": 1,
    "output_bytes": 1,
    "gradient_bytes": 1,
    "forward_s": [0.1],
    "backward_s": [0.1],
}
PROFILE = {"model": "m", "micro_batch_size": 4, "memory_mb": [1024], "bytes_per_s": [1e8], "layers": [LAYER]}
BOUNDS = {"min_size": 32, "max_size": 64}
ON_FUNCTIONS = {"on": "functions", "layer_profile": PROFILE}

Given = dict[str, Any]


def ask_python(keywords: Given) -> None:
    TrainOptions(**keywords).as_request(4, NOON.replace(tzinfo=None))


def ask_rest(options: Given) -> None:
    source = {"filename": "train.py", "text": FILES["train.py"], "object_name": "fit"}
    request = parse_body(msgspec.json.encode({"name": "fit", "source": source, "options": options}), JobIn)
    check_job(request)
    check_functions(request)
    check_rules(SUBMISSION_RULES, checked_values(request.options), JOB_WORDS["rest"])


def ask_object(spec: Given) -> None:
    spec = {"source": {"function": "fit", "files": FILES}, **spec}
    check_job_spec(spec, 4)
    made = job_request("fit", spec, FILES, created=NOON, now=NOON, devices=4)
    request = parse_body(msgspec.json.encode(made), JobIn)
    check_job(request)
    check_functions(request)


FACES: Mapping[str, Callable[[Given], None]] = {"python": ask_python, "rest": ask_rest, "object": ask_object}


def sentence_of(ask: Callable[[Given], None], given: Given) -> str:
    """What refuses the options; empty where they are taken."""
    try:
        ask(given)
    except InvalidRequest as error:
        return str(error)
    return ""


# What breaks a rule on each face that can say it, and the whole of the sentence, but for what follows "...".
BROKEN: dict[Rule, dict[str, tuple[Given, str]]] = {
    rules.first_batch_within_bounds: {
        "rest": (
            {"batch": BOUNDS, "global_batch_size": 16},
            "options.global_batch_size 16, the batch it starts with, lies outside options.batch (32 to 64); start with "
            "32",
        ),
        "object": (
            {"globalBatch": "32..64", "initialBatch": 16},
            "spec.initialBatch 16, the batch it starts with, lies outside spec.globalBatch (32 to 64); start with 32",
        ),
    },
    rules.changes_need_bounds: {
        "python": (
            {"learning_rate": "sqrt"},
            "learning_rate needs a batch that may change; give it bounds like global_batch=(32, 512) (--batch 32..512)",
        ),
        "rest": (
            {"length_unit": "progress"},
            "options.length_unit needs a batch that may change; give it bounds like options.batch "
            '{"min_size": 32, "max_size": 512}',
        ),
        "object": (
            {"maxLocalBatch": 8},
            "spec.maxLocalBatch needs a batch that may change; give it bounds like globalBatch: 32..512",
        ),
    },
    rules.local_batches_fit: {
        "python": (
            {"global_batch": (32, 512), "max_local_batch": 1},
            "global_batch goes up to 512, which in parts of at most 1 samples are more than 256 parts; use at most 256",
        ),
        "rest": (
            {"batch": {**BOUNDS, "min_local_size": 8, "max_local_size": 4}},
            "options.batch.min_local_size 8 is above options.batch.max_local_size 4; lower it",
        ),
        "object": (
            {"globalBatch": "32..64", "minLocalBatch": 40, "workers": "2..4"},
            "2 workers with at least 40 samples each are more than a batch of at most 64; lower spec.workers or "
            "spec.minLocalBatch",
        ),
    },
    rules.shards_cut_the_batch: {
        "rest": (
            {"num_virtual_shards": 6},
            "options.num_virtual_shards 6 must be a power of two that is at least the most workers (1) ...",
        ),
        "object": (
            {"virtualShards": 2, "workers": 4},
            "spec.virtualShards 2 must be a power of two that is at least the most workers (4) ...",
        ),
    },
    rules.functions_have_one_batch: {
        "python": (
            {"on": "functions", "global_batch": (32, 64)},
            "a job on functions has one global batch, not 32..64; choose one, like global_batch=32 (--batch 32)",
        ),
        "rest": (
            {**ON_FUNCTIONS, "batch": BOUNDS},
            "a job on functions has one global batch, not 32..64; choose one, like options.global_batch_size 32 "
            "without options.batch",
        ),
        "object": (
            {"functions": {"layerProfile": PROFILE}, "globalBatch": "32..64"},
            "a job on functions has one global batch, not 32..64; choose one, like globalBatch: 32",
        ),
    },
    rules.micro_batch_within_batch: {
        "python": (
            {"micro_batch": 64},
            "micro_batch 64 is more than the global batch of 32; use micro_batch=32 (--micro-batch 32)",
        ),
        "rest": (
            {**ON_FUNCTIONS, "global_batch_size": 2},
            "options.layer_profile.micro_batch_size 4 is more than the global batch of 2; use a profile with "
            "--micro-batch 2",
        ),
        "object": (
            {"functions": {"layerProfile": PROFILE}, "globalBatch": 2},
            "spec.functions.layerProfile.micro_batch_size 4 is more than the global batch of 2; use a profile with "
            "--micro-batch 2",
        ),
    },
    rules.one_goal: {
        "python": (
            {"on": "functions", "fastest": True, "deadline": "1h"},
            "fastest and deadline are two goals; keep one (a budget may stay)",
        ),
        "rest": (
            {**ON_FUNCTIONS, "is_fastest": True, "deadline_s": 60.0},
            "options.is_fastest and options.deadline_s are two goals; keep one (a budget may stay)",
        ),
        "object": (
            {"functions": {"layerProfile": PROFILE, "fastest": True}, "deadline": "1h"},
            "spec.functions.fastest and spec.deadline are two goals; keep one (a budget may stay)",
        ),
    },
    rules.schedule_ends_before_the_job: {
        "python": (
            {"on": "functions", "epochs": 2, "batch_schedule": "2:64"},
            "batch_schedule names epoch 2, and epochs are numbered 0 to 1; raise epochs or leave the phase out",
        ),
        "rest": (
            {**ON_FUNCTIONS, "num_epochs": 2, "batch_schedule": [{"from_epoch": 2, "global_batch_size": 64}]},
            "options.batch_schedule names epoch 2, and epochs are numbered 0 to 1; raise options.num_epochs or leave "
            "the phase out",
        ),
        "object": (
            {
                "epochs": 2,
                "functions": {"layerProfile": PROFILE, "batchSchedule": [{"fromEpoch": 2, "globalBatch": 64}]},
            },
            "spec.functions.batchSchedule names epoch 2, and epochs are numbered 0 to 1; raise spec.epochs or leave "
            "the phase out",
        ),
    },
    rules.memory_is_of_a_share: {
        "python": (
            {"memory": "4GB"},
            "memory is what is held of a shared device: ask for a share beside it, like share=0.3 (--share 0.3), or "
            "leave memory out: a workload that holds a whole device has all of its memory",
        ),
        "object": (
            {"deviceMemory": "4GB"},
            "spec.deviceMemory is what is held of a shared device: ask for a share beside it, like share: 0.3, or "
            "leave spec.deviceMemory out: a workload that holds a whole device has all of its memory",
        ),
    },
    rules.each_variable_once: {
        "python": (
            {"env": {"A": "1", "B": "1"}, "secrets": ["C", "B=@b.txt"]},
            "B is in env and in secrets; leave it out of one of them",
        ),
        "rest": (
            {"env": {"A": "1"}, "secrets": {"A": "1"}},
            "A is in options.env and in options.secrets; leave it out of one of them",
        ),
    },
    rules.functions_have_one_environment: {
        "python": (
            {"on": "functions", "env": {"A": "1"}},
            "env is for the platform's machines: a function runs in the platform's image for functions, in which a job "
            "sets nothing; leave it out, or run the job on the cluster",
        ),
        "rest": (
            {**ON_FUNCTIONS, "env": {"A": "1"}},
            "options.env is for the platform's machines: a function runs in the platform's image for functions, in "
            "which a job sets nothing; leave it out, or run the job on the cluster",
        ),
        "object": (
            {"functions": {"layerProfile": PROFILE}, "env": {"A": "1"}},
            "spec.env is for the platform's machines: a function runs in the platform's image for functions, in which "
            "a job sets nothing; leave it out, or run the job on the cluster",
        ),
    },
    rules.functions_share_no_device: {
        "python": (
            {"on": "functions", "share": 0.5},
            "a job on functions shares no device: its functions are as large as their memory; leave share out, or run "
            "it on the cluster",
        ),
        "rest": (
            {**ON_FUNCTIONS, "share": {"request": 0.5}},
            "a job on functions shares no device: its functions are as large as their memory; leave options.share out, "
            "or run it on the cluster",
        ),
        "object": (
            {"functions": {"layerProfile": PROFILE}, "share": "0.5"},
            "a job on functions shares no device: its functions are as large as their memory; leave spec.share out, or "
            "run it on the cluster",
        ),
    },
    rules.workers_hold_several_devices: {
        "python": (
            {"gpu": 2, "share": "auto"},
            "gpu 2 is of several devices, and share auto is what a profile on one device says; name the share, like "
            "share=(0.3, 0.6) (--share 0.3..0.6)",
        ),
        "rest": (
            {"devices_each": 3},
            "options.devices_each is 3: a worker holds 1, 2, 4 or 8 whole devices of one node; a part of one device is "
            "options.share 0.3",
        ),
        "object": (
            {"gpu": 2, "share": "0.5"},
            "in pods a worker or replica holds a share of one device, or whole ones; ...",
        ),
    },
    rules.functions_hold_no_devices: {
        "python": (
            {"on": "functions", "gpu": 2},
            "gpu 2 is for the platform's machines: a function holds no devices; leave it out, or run the job on the "
            "cluster",
        ),
        "rest": (
            {**ON_FUNCTIONS, "devices_each": 4},
            "options.devices_each 4 is for the platform's machines: a function holds no devices; leave it out, or run "
            "the job on the cluster",
        ),
        "object": (
            {"functions": {"layerProfile": PROFILE}, "gpu": 2},
            "spec.gpu 2 is for the platform's machines: a function holds no devices; leave it out, or run the job on "
            "the cluster",
        ),
    },
    # In an object these options are inside `functions`.
    rules.only_functions_know: {
        "python": (
            {"search": False},
            "search is for jobs on functions; add on='functions' (--on functions), or leave it out",
        ),
        "rest": (
            {"batch_schedule": [{"from_epoch": 0, "global_batch_size": 64}]},
            "options.batch_schedule is for jobs on functions; add options.on 'functions', or on machines let the "
            'platform choose the batch within bounds: options.batch {"min_size": 64, "max_size": 256}',
        ),
    },
    # The client takes the profile, and reads what a stream is from it.
    rules.functions_need_a_profile: {
        "rest": (
            {"on": "functions"},
            "options.on 'functions' needs options.layer_profile: `springtide profile FILE --layers` takes it, ...",
        ),
        "object": (
            {"functions": {}},
            "spec.functions needs spec.functions.layerProfile: `springtide profile FILE --layers` takes it, ...",
        ),
    },
    rules.streams_have_no_length: {
        "rest": (
            {**ON_FUNCTIONS, "stream": "clicks", "deadline_s": 60.0},
            "a job on the stream 'clicks' uses each sample once, until the stream is closed; leave out "
            "options.deadline_s (a budget is possible)",
        ),
        "object": (
            {"functions": {"layerProfile": PROFILE, "stream": "clicks"}, "samples": 9},
            "a job on the stream 'clicks' uses each sample once, until the stream is closed; leave out spec.samples",
        ),
    },
    rules.phases_hold_the_micro_batch: {
        "rest": (
            {**ON_FUNCTIONS, "batch_schedule": [{"from_epoch": 0, "global_batch_size": 2}]},
            "options.batch_schedule has a batch of 2 samples, and options.layer_profile.micro_batch_size is 4; use a "
            "profile with --micro-batch 2",
        ),
        "object": (
            {"functions": {"layerProfile": PROFILE, "batchSchedule": [{"fromEpoch": 0, "globalBatch": 2}]}},
            "spec.functions.batchSchedule has a batch of 2 samples, and spec.functions.layerProfile.micro_batch_size "
            "is 4; use a profile with --micro-batch 2",
        ),
    },
    rules.confidence_is_in_a_deadline: {
        "rest": (
            {"confidence": 0.9},
            "options.confidence 0.9 is how sure a deadline has to be; name one with options.deadline_s, or leave "
            "options.confidence out",
        ),
        "object": (
            {"confidence": 0.9, "deadline": "1h", "soft": True},
            "spec.confidence 0.9 is for a promise, and spec.soft makes none; leave one of them out",
        ),
    },
    rules.profile_is_for_functions: {
        "rest": (
            {"layer_profile": PROFILE},
            "options.layer_profile is for jobs on functions; add options.on 'functions', or leave it out",
        ),
    },
}


def test_every_rule_is_broken_here_on_every_face_that_can_say_it() -> None:
    of_services = {rules.replicas_hold_parts_of_several}
    assert set(BROKEN) | of_services == {*JOB_RULES, *PLACE_RULES, *FILLED_RULES, *SUBMISSION_RULES, *SERVICE_RULES}


@pytest.mark.parametrize(
    ("face", "given", "sentence"),
    [
        pytest.param(face, *case, id=f"{rule.__name__}-{face}")
        for rule, cases in BROKEN.items()
        for face, case in cases.items()
    ],
)
def test_a_rule_is_told_in_the_words_of_the_face(face: str, given: Given, sentence: str) -> None:
    told = sentence_of(FACES[face], given)
    beginning, is_cut, _ = sentence.partition("...")
    assert told.startswith(beginning) if is_cut else told == sentence


# One wish after another, as each face writes it: nothing of it breaks a rule by itself on both places.
WISHES: dict[str, dict[str, Given]] = {
    "bounds": {
        "python": {"global_batch": (32, 64)},
        "rest": {"batch": BOUNDS},
        "object": {"globalBatch": "32..64"},
    },
    "first batch": {
        "python": {"global_batch": 64},
        "rest": {"global_batch_size": 64},
        "object": {"globalBatch": 64},
    },
    "local": {
        "python": {"max_local_batch": 8},
        "rest": {"batch": {"max_local_size": 8}},
        "object": {"maxLocalBatch": 8},
    },
    "rate": {
        "python": {"learning_rate": "sqrt"},
        "rest": {"batch": {"learning_rate": "sqrt"}},
        "object": {"learningRate": "sqrt"},
    },
    "usual rate": {
        "python": {"learning_rate": "linear"},
        "rest": {"batch": {"learning_rate": "linear"}},
        "object": {"learningRate": "linear"},
    },
    "length": {"python": {"length": "progress"}, "rest": {"length_unit": "progress"}, "object": {"length": "progress"}},
    "many workers": {
        "python": {"workers": (65, 128)},
        "rest": {"min_workers": 65, "max_workers": 128},
        "object": {"workers": "65..128"},
    },
    "epochs": {"python": {"epochs": 3}, "rest": {"num_epochs": 3}, "object": {"epochs": 3}},
    "schedule": {
        "python": {"batch_schedule": "2:64"},
        "rest": {"batch_schedule": [{"from_epoch": 2, "global_batch_size": 64}]},
        "object": {"functions": {"batchSchedule": [{"fromEpoch": 2, "globalBatch": 64}]}},
    },
    "fastest": {"python": {"fastest": True}, "rest": {"is_fastest": True}, "object": {"functions": {"fastest": True}}},
    "search": {"python": {"search": False}, "rest": {"search": False}, "object": {"functions": {"search": False}}},
    "deadline": {"python": {"deadline": "1h"}, "rest": {"deadline_s": 3600.0}, "object": {"deadline": "1h"}},
    "budget": {"python": {"budget": 4}, "rest": {"budget_usd": 4.0}, "object": {"budget": "$4"}},
    "share": {"python": {"share": 0.5}, "rest": {"share": {"request": 0.5}}, "object": {"share": "0.5"}},
}
BASE: dict[str, dict[str, Given]] = {
    "cluster": {"python": {}, "rest": {}, "object": {}},
    "functions": {
        "python": {"on": "functions"},
        "rest": ON_FUNCTIONS,
        "object": {"functions": {"layerProfile": PROFILE}},
    },
}


def together(*parts: Given) -> Given:
    """All of them in one request; objects inside it are merged."""
    whole: Given = {}
    for name, value in itertools.chain.from_iterable(part.items() for part in parts):
        inner = whole.get(name)
        whole[name] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
    return whole


def can_be_written(place: str, wishes: tuple[str, ...]) -> bool:
    """Whether every face has a way to say this.

    Bounds and a first batch are one keyword in Python; REST says inside the bounds what needs them, and an object says
    inside `functions` what these alone know.
    """
    has_bounds = "bounds" in wishes
    if has_bounds and "first batch" in wishes:
        return False
    if {"local", "rate", "usual rate"} & set(wishes) and not has_bounds:
        return False
    return place == "functions" or not {"schedule", "fastest", "search"} & set(wishes)


@pytest.mark.parametrize("place", BASE)
def test_the_faces_agree_on_every_three_wishes(place: str) -> None:
    verdicts = []
    for wishes in itertools.combinations(WISHES, 3):
        if not can_be_written(place, wishes):
            continue
        told = {
            face: sentence_of(ask, together(BASE[place][face], *(WISHES[wish][face] for wish in wishes)))
            for face, ask in FACES.items()
        }
        assert len({bool(sentence) for sentence in told.values()}) == 1, (wishes, told)
        verdicts.append(bool(told["python"]))
    assert 20 < sum(verdicts) < len(verdicts) - 20


@pytest.mark.parametrize("wishes", [("rate",), ("local",), ("usual rate",), ("usual rate", "epochs")])
def test_python_and_objects_agree_on_what_needs_bounds(wishes: tuple[str, ...]) -> None:
    told = [
        sentence_of(FACES[face], together(*(WISHES[wish][face] for wish in wishes))) for face in ("python", "object")
    ]
    assert bool(told[0]) == bool(told[1]) == ("usual rate" not in wishes)


def test_a_services_memory_is_of_a_share_on_both_faces() -> None:
    with pytest.raises(InvalidRequest, match=r"^memory is what is held .* like share=0\.3 \(--share 0\.3\)"):
        ServeOptions(memory="4GB")
    with pytest.raises(InvalidRequest, match=r"^spec.deviceMemory is what is held .* like share: 0\.3"):
        check_service_spec({"deviceMemory": "4GB"})
    ServeOptions(memory="4GB", gpu=0.3)
    ServeOptions(memory="4GB", share="auto")
    check_service_spec({"deviceMemory": "4GB", "share": "0.3"})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"devices_each": 2},
            "options.devices_each 2 is more than one device, of each of which a replica holds a share",
        ),
        (
            {"devices_each": 3, "share": {"request": 0.5}},
            "options.devices_each is 3: a replica holds its share of 1, 2, ",
        ),
    ],
)
def test_a_replica_on_several_devices_holds_a_share_of_each(options: dict[str, Any], told: str) -> None:
    source = {"filename": "a.py", "text": "class A: ...", "object_name": "A", "kind": "class"}
    with pytest.raises(InvalidRequest) as refused:
        check_service(ServiceIn.model_validate({"source": source, "options": options}))
    assert str(refused.value).startswith(told)
