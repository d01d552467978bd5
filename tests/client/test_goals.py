"""Goals that only functions know, and batch schedules: how they are written, what cannot be, what is sent."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from springtide.client.goals import TrainOptions
from springtide.core.errors import InvalidRequest
from springtide.core.function_search import BatchPhase
from springtide.core.options.kinds import batch_phases

PHASES_TEXT = "0:64,4:256"
NOON = datetime(2026, 1, 1, 12)
PHASES = (BatchPhase(from_epoch=0, global_batch_size=64), BatchPhase(from_epoch=4, global_batch_size=256))


@pytest.mark.parametrize("written", ["0:64,4:256", " 0 : 64 , 4:256", [(0, 64), (4, 256)], ((0, 64), [4, 256])])
def test_a_batch_schedule_is_written_as_text_or_as_pairs(written: Any) -> None:
    assert batch_phases(written) == PHASES


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("0:64,4", "'4' is no phase"),
        ("0=64", "write it like"),
        ("4:64,0:32", "names epoch 0 after epoch 4"),
        ([(0, 64), (0, 128)], "epochs ascend, each once"),
        ([(0, 0)], "batches from 1"),
        ([(-1, 8)], "epochs from 0"),
        ([(0, 64.0)], "is no phase"),
        ([(0, True)], "is no phase"),
        ([0, 64], "is no phase"),
        (64, "is no schedule"),
        ("x" * 5000 + ":1", "is no phase"),
    ],
)
def test_what_is_no_schedule_is_refused_with_how_to_write_it(written: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        batch_phases(written)


def test_workers_hold_one_device_or_several_whole_ones() -> None:
    noon = datetime(2030, 1, 31, 12, 0)
    asked = TrainOptions(gpu=2).as_request(5, noon)
    assert (asked["devices_each"], asked["min_workers"], asked["max_workers"]) == (2, 1, 2)
    assert "devices_each" not in TrainOptions().as_request(5, noon)
    assert TrainOptions(gpu=4).as_local_job("fit").devices_each == 4


@pytest.mark.parametrize("given", [3, 0, 16, 0.5, "2", True])
def test_other_numbers_of_devices_are_refused_with_those_there_are(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"1, 2, 4 or 8 whole devices of one node; a part of one .* share=0\.3"):
        TrainOptions(gpu=given)


def test_an_empty_schedule_is_none() -> None:
    assert batch_phases("") == batch_phases(()) == ()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fastest": 1}, "fastest must be True or False"),
        ({"search": "yes"}, "search must be True, False or None"),
        ({"fastest": True, "deadline": "1h"}, "two goals"),
        ({"epochs": 3, "batch_schedule": [(0, 8), (3, 16)]}, "epochs are numbered 0 to 2"),
        ({"study": "Not a name"}, "study"),
    ],
)
def test_what_can_never_be_is_refused_when_it_is_written(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        TrainOptions(on="functions", **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fastest": True}, "fastest is for jobs on functions"),
        ({"search": False}, "search is for jobs on functions"),
        ({"batch_schedule": "0:64", "epochs": 2}, "--batch 64..256"),
    ],
)
def test_machines_are_not_asked_for_what_only_functions_know(options: dict[str, Any], sentence: str) -> None:
    asked = TrainOptions(**options)
    with pytest.raises(InvalidRequest, match=sentence):
        asked.as_request(4, NOON)


def test_a_local_run_follows_the_schedule_too() -> None:
    job = TrainOptions(epochs=6, batch_schedule="0:64,4:256").as_local_job("wave")
    assert job.batch_schedule == PHASES


def test_what_was_said_is_sent_and_nothing_else() -> None:
    asked = TrainOptions(
        on="functions", epochs=6, fastest=True, search=True, batch_schedule=PHASES_TEXT, study="widths"
    )
    sent = asked.as_request(2, NOON)
    assert sent["is_fastest"] is True
    assert sent["search"] is True
    assert list(sent["batch_schedule"]) == [
        {"from_epoch": 0, "global_batch_size": 64},
        {"from_epoch": 4, "global_batch_size": 256},
    ]
    assert sent["study"] == "widths"
    plain = TrainOptions(on="functions").as_request(2, NOON)
    assert not {"is_fastest", "search", "batch_schedule", "study", "function_workers"} & set(plain)


def test_bounds_on_workers_hold_for_the_search_where_they_were_given() -> None:
    assert TrainOptions(on="functions", workers=(2, 8)).as_request(2, NOON)["function_workers"] == [2, 8]
    assert "function_workers" not in TrainOptions(workers=(2, 8)).as_request(2, NOON), "machines have their own"


def test_the_micro_batch_is_never_more_than_the_smallest_batch_of_the_schedule() -> None:
    assert TrainOptions(global_batch=64, epochs=2, batch_schedule=[(1, 2)]).micro_batch_size() == 2


def test_a_whole_model_may_take_more_samples_at_a_time_unless_its_owner_says_how_many() -> None:
    assert TrainOptions(global_batch=512).largest_micro_batch_size() == 64
    assert TrainOptions(global_batch=512, epochs=2, batch_schedule=[(1, 16)]).largest_micro_batch_size() == 16
    assert TrainOptions(global_batch=512, micro_batch=8).largest_micro_batch_size() == 0
