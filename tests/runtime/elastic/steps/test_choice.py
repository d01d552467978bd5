"""Which jobs run shard by shard."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kits.runtime.training_jobs import ADAPTIVE, make_job
from springtide.core.errors import InvalidRequest
from springtide.core.workload import AdaptiveBatch
from springtide.runtime.data.shards import GlobalBatch
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
        ({"exact": False, "batch": ADAPTIVE}, True, OverlappedSteps),
        # Exact jobs with bounds, and such jobs of releases in which all of them were exact.
        ({"exact": True, "batch": ADAPTIVE}, True, ShardedSteps),
    ],
)
def test_exact_jobs_run_shard_by_shard(fields, measures_noise, expected):
    model = torch.nn.Linear(2, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    assert isinstance(step_method(make_job(**fields), state, measures_noise=measures_noise), expected)


def test_a_job_in_fixed_parts_refuses_another_cut():
    model = torch.nn.Linear(2, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    with pytest.raises(InvalidRequest, match="a larger power of two as exact"):
        step_method(make_job(exact=True), state, measures_noise=False, micro_batch=4)


@pytest.mark.parametrize(
    ("max_local_size", "micro_batch", "expected"), [(None, 0, 1), (8, 0, 2), (None, 4, 4), (8, 4, 4)]
)
def test_a_pass_has_at_most_the_samples_that_job_and_program_allow(max_local_size, micro_batch, expected):
    model = torch.nn.Linear(2, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    batch = AdaptiveBatch(min_size=4, max_size=64, max_local_size=max_local_size)
    job = make_job(exact=False, batch=batch)
    method = step_method(job, state, measures_noise=False, micro_batch=micro_batch)
    assert len(method.parts(GlobalBatch(0, 0, np.arange(16), 16), None)) == expected
