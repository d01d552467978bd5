"""Which jobs run shard by shard."""

from __future__ import annotations

import pytest
import torch

from kits.runtime.training_jobs import make_job
from springtide.core.errors import InvalidRequest
from springtide.runtime.elastic.steps.choice import step_method
from springtide.runtime.elastic.steps.overlapped import OverlappedSteps
from springtide.runtime.elastic.steps.sharded import ShardedSteps
from springtide.runtime.models.named_tensors import TrainingState


@pytest.mark.parametrize(
    ("fields", "measures_noise", "expected"),
    [
        # Jobs of earlier releases have no such field.
        ({}, False, ShardedSteps),
        ({"exact": True}, False, ShardedSteps),
        ({"exact": False}, False, OverlappedSteps),
        ({"exact": False}, True, ShardedSteps),
    ],
)
def test_exact_jobs_and_those_that_measure_noise_run_shard_by_shard(fields, measures_noise, expected):
    model = torch.nn.Linear(2, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    assert isinstance(step_method(make_job(**fields), state, measures_noise=measures_noise), expected)


def test_a_job_in_fixed_parts_refuses_another_cut():
    model = torch.nn.Linear(2, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    with pytest.raises(InvalidRequest, match="a larger power of two as exact"):
        step_method(make_job(exact=True), state, measures_noise=False, micro_batch=4)
